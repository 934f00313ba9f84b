package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/testenv"
)

// What a program prints is shown as it would stand there, and can do nothing else.
func TestPlainLine(t *testing.T) {
	for in, want := range map[string]string{
		"plain":                                  "plain",
		"\x1b[1;31mred\x1b[0m and \x1b[2Knot":    "red and not",
		"10%\r50%\r100%":                         "100%",
		"windows\r":                              "windows",
		"\x1b]0;title\x07after":                  "after",
		"\x1b]8;;http://x\x1b\\link\x1b]8;;\x07": "link",
		"\x1b]52;c;ZXZpbA==":                     "", // the clipboard, cut off
		"\x1bPq#0\x1b\\sixel":                    "sixel",
		"\x1b(Bcharset \x1b7\x1b8":               "charset",
		"a\x08\x00\x9b31mb":                      "a31mb",
		"rtl\u202etxt.exe":                       "rtltxt.exe",
		"bad \xff\xfe utf":                       "bad  utf",
		"\ttab ":                                 "\ttab",
	} {
		if got := plainLine(in); got != want {
			t.Errorf("plainLine(%q) = %q, want %q", in, got, want)
		}
	}
}

// However much a command prints, so much is shown, and memory holds a line.
func TestLiveOutputIsBounded(t *testing.T) {
	var stderr bytes.Buffer
	l := newLiveText(&app{stdout: io.Discard, stderr: &stderr})
	l.output("a", "be")
	l.output("a", "gin\nlong "+strings.Repeat("x", 1<<20))
	l.output("a", strings.Repeat("y", 1<<20)+"\n")
	if l.line.Cap() > 4*maxLiveBytes {
		t.Errorf("a line takes %d bytes", l.line.Cap())
	}
	for i := range 1000 {
		l.output("a", fmt.Sprintf("line %d\n", i))
	}
	l.output("b", "not ended")
	l.end()
	lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
	if len(lines) != maxLiveLines+2 || lines[0] != "  | begin"[2:] || !strings.Contains(lines[maxLiveLines], "more") || lines[maxLiveLines+1] != "  | not ended" {
		t.Errorf("%d lines, from %q to %q", len(lines), lines[0], lines[len(lines)-1])
	}
	for _, line := range lines {
		if len([]rune(line)) > maxLiveLine+4 {
			t.Errorf("a line of %d characters is shown", len(line))
		}
	}
}

// A message whose stream was cut and opened again in its middle is shown once.
func TestMessageComesAgain(t *testing.T) {
	var stdout, stderr bytes.Buffer
	l := newLiveText(&app{stdout: &stdout, stderr: &stderr})
	l.start("m")
	l.delta("m", "one ")
	l.delta("m", "twö ")
	l.start("m")
	l.delta("m", "one t")
	l.delta("m", "wö three")
	l.message("m", "one twö three four")
	l.start("n")
	l.delta("n", "next")
	l.message("n", "next")
	if got := stdout.String(); got != "one twö three four\nnext\n" {
		t.Errorf("shown: %q", got)
	}
}

// output reads what a command prints to stderr, until a line holds a text.
func readUntil(t *testing.T, r *bufio.Reader, text string) (all string) {
	t.Helper()
	for {
		line, err := r.ReadString('\n')
		if all += line; strings.Contains(line, text) {
			return all
		}
		if err != nil {
			t.Fatalf("%q did not come: %v\n%s", text, err, all)
		}
	}
}

// lateStream opens a stream in the middle of a command: it shows a start, all
// that was printed since the command began, and what is printed now.
func lateStream(ctx context.Context, t *testing.T, c *api.Client, id, use string) {
	t.Helper()
	var got []api.Event
	for e, err := range c.Stream(ctx, id, api.StreamOptions{Live: true, Deltas: []api.EventType{api.TypeAgentToolUse}}) {
		if err != nil {
			t.Fatal(err)
		}
		if got = append(got, e); len(got) == 3 {
			break
		}
	}
	start, ok := got[0].Body.(*api.EventStart)
	if !ok || start.Event.ID != use || start.Event.Type != api.TypeAgentToolUse {
		t.Errorf("a late stream begins with %+v, want the start of %s", got[0], use)
	}
	for i, e := range got[1:] {
		d, ok := e.Body.(*api.EventDelta)
		if !ok || d.EventID != use || i == 0 && !strings.HasPrefix(d.Delta.Content.Text, "first\n") || !strings.Contains(d.Delta.Content.Text, "tick") {
			t.Errorf("then comes %+v, want what %s printed", e, use)
		}
	}
}

// What a command prints in a machine is on streams that ask for it, and before
// the person, while it runs. A call that asks is asked for here too.
func TestRunShowsCommands(t *testing.T) {
	s := newBoxSite(t)
	s.up(s.start(s.addr))
	s.machineObjects(0)
	bash := func(command string) llm.Step {
		return llm.Step{Tools: []llm.ToolCall{{Name: "bash", Input: map[string]any{"command": command}}}}
	}
	s.model.Add(t, testenv.Marked("live", llm.PlayScript{Steps: []llm.Step{
		bash(`echo first; while :; do printf '\033[31mtick\033[0m\n'; sleep 0.1; done`), {Text: "Stopped."}}}))
	s.model.Add(t, testenv.Marked("asks", llm.PlayScript{Steps: []llm.Step{bash("echo was allowed"), {Text: "Done."}}}))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	run := func(args ...string) (*exec.Cmd, *bufio.Reader) {
		t.Helper()
		cmd := exec.CommandContext(ctx, binary, append([]string{"run", "--environment", s.environment}, args...)...)
		cmd.Env = append(withoutOurs(os.Environ()), "PLANARIA_SERVER="+s.api.Base, "PLANARIA_API_KEY="+s.api.Key)
		out, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd, bufio.NewReader(out)
	}

	cmd, out := run("--agent", s.agent, "[live] Begin.")
	said := readUntil(t, out, "  | tick\n")
	if strings.Contains(said, "<- bash") || strings.Contains(said, "\x1b") {
		t.Errorf("said %q before the command ended", said)
	}
	_, rest, _ := strings.Cut(said, "session ")
	id := strings.Fields(rest)[0]
	c := &api.Client{BaseURL: s.api.Base, Key: s.api.Key}
	use := ""
	for e, err := range c.Stream(ctx, id, api.StreamOptions{Deltas: []api.EventType{api.TypeAgentToolUse}}) {
		if err != nil {
			t.Fatal(err)
		}
		switch b := e.Body.(type) {
		case *api.AgentToolUse:
			use = e.ID
		case *api.AgentToolResult:
			t.Error("the command ended before its output came")
		case *api.EventDelta:
			if b.EventID != use || !strings.Contains(b.Delta.Content.Text, "tick") {
				t.Errorf("delta %+v, want a tick of %s", b, use)
			}
		default:
			continue
		}
		if e.Type() == api.TypeEventDelta {
			break
		}
	}
	lateStream(ctx, t, c, id, use)
	if _, err := c.SendEvents(ctx, id, &api.UserInterrupt{}); err != nil {
		t.Fatal(err)
	}
	said = readUntil(t, out, "<- bash: error:")
	if _, err := io.Copy(io.Discard, out); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("run ended with %v\n%s", err, said)
	}

	var asking struct {
		ID string `json:"id"`
	}
	if err := s.api.Do(ctx, http.MethodPost, "/v1/agents", testenv.M{"name": "asking", "model": "scripted-1",
		"tools": []testenv.M{{"type": "agent_toolset_20260401", "default_config": testenv.M{"permission_policy": testenv.M{"type": "always_ask"}}}}}, &asking); err != nil {
		t.Fatal(err)
	}
	cmd, out = run("--agent", asking.ID, "[asks] Begin.") // no terminal
	said = readUntil(t, out, "waits for a person")
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != exitWaits || !strings.Contains(said, "the agent asks to call bash") || !strings.Contains(said, "--yes") {
		t.Errorf("run ended with %v, want code %d\n%s", err, exitWaits, said)
	}
	cmd, out = run("--agent", asking.ID, "--yes", "[asks] Begin.")
	readUntil(t, out, "allowed bash")
	readUntil(t, out, "<- bash: ok: was allowed")
	if err := cmd.Wait(); err != nil {
		t.Errorf("run --yes ended with %v", err)
	}
}
