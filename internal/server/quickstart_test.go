package server_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// quickstart is the text whose snippets are executed.
const quickstart = "../../docs/quickstart.md"

// snippet is one fenced block. Its info string says what to do with it:
// "LANG file=NAME" writes it, "sh run" runs it, "sh background" runs it until
// the end of the test, "text output" is what the run before it printed, in
// order, "…" standing for anything.
type snippet struct {
	line int
	what string // file, run, background, output
	name string // of a file
	text string
}

var (
	fence = regexp.MustCompile("(?m)^```(.*)$")
	infos = regexp.MustCompile(`^(?:\w+) (?:(file)=([\w.]+)|(run|background|output))$`)
)

// snippets finds every fenced block of a document. A block that no run can
// reach is an error.
func snippets(t *testing.T, doc string) []snippet {
	t.Helper()
	marks := fence.FindAllStringSubmatchIndex(doc, -1)
	if len(marks)%2 != 0 {
		t.Fatal("a fence is not closed")
	}
	var out []snippet
	for i := 0; i < len(marks); i += 2 {
		info := doc[marks[i][2]:marks[i][3]]
		line := 1 + strings.Count(doc[:marks[i][0]], "\n")
		m := infos.FindStringSubmatch(info)
		if m == nil {
			t.Fatalf("line %d: block %q says neither file=NAME, run, background nor output", line, info)
		}
		out = append(out, snippet{line: line, what: m[1] + m[3], name: m[2], text: doc[marks[i][1]+1 : marks[i+1][0]]})
	}
	return out
}

// startTimeout bounds how long a background block may take to say that it is ready.
const startTimeout = time.Minute

// TestQuickstart executes docs/quickstart.md from top to bottom in an empty
// folder, against the real binary.
func TestQuickstart(t *testing.T) {
	for _, program := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s in PATH: the quickstart is not executed", program)
		}
	}
	modules := nodeModules(t)
	text, err := os.ReadFile(quickstart)
	if err != nil {
		t.Fatal(err)
	}
	doc := string(text)
	for _, port := range []string{"4747", "4748"} {
		doc = strings.ReplaceAll(doc, port, freePort(t))
	}
	r := newReader(t, modules)
	ran := map[string]int{}
	for _, s := range snippets(t, doc) {
		r.do(t, s)
		ran[s.what]++
	}
	for _, what := range []string{"file", "run", "background", "output"} {
		if ran[what] < 2 {
			t.Errorf("only %d blocks of kind %s: the extraction is broken", ran[what], what)
		}
	}
}

// buildPlanaria builds the binary into a folder of the test's own, unless make
// test has built it already.
func buildPlanaria(t *testing.T) string {
	t.Helper()
	if b := os.Getenv("PLANARIA_TEST_BINARY"); b != "" {
		return b
	}
	program := filepath.Join(t.TempDir(), "planaria")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/planaria/planaria/cmd/planaria")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build planaria: %v\n%s", err, out)
	}
	return program
}

// freePort finds a port that nobody listens on now.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// reader does what somebody does who follows the text.
type reader struct {
	dir  string // the folder in which it is followed
	path string
	out  string // what the last run printed
}

// newReader prepares a folder in which the SDKs are installed as the text says
// and planaria is on the PATH.
func newReader(t *testing.T, modules string) *reader {
	t.Helper()
	r := &reader{dir: t.TempDir(), path: filepath.Dir(buildPlanaria(t)) + string(os.PathListSeparator) + os.Getenv("PATH")}
	scope := filepath.Join(r.dir, "node_modules", "@anthropic-ai")
	if err := os.MkdirAll(scope, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(modules, "sdk-new"), filepath.Join(scope, "sdk")); err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	mod = bytes.Replace(mod, []byte("module github.com/planaria/planaria"), []byte("module quickstart"), 1)
	if err := os.WriteFile(filepath.Join(r.dir, "go.mod"), mod, 0o644); err != nil {
		t.Fatal(err)
	}
	copyFile(t, "../../go.sum", filepath.Join(r.dir, "go.sum"))
	return r
}

func (r *reader) do(t *testing.T, s snippet) {
	t.Helper()
	switch s.what {
	case "file":
		if err := os.WriteFile(filepath.Join(r.dir, s.name), []byte(s.text), 0o644); err != nil {
			t.Fatal(err)
		}
	case "run":
		r.run(t, s)
	case "background":
		r.background(t, s)
	case "output":
		r.expect(t, s)
	}
}

// state keeps variables and functions from one block to the next, as one
// terminal would.
const (
	before = "set -aeuo pipefail\n[ -e .terminal ] && . ./.terminal\n"
	after  = "\n{ declare -f; export -p | grep -v 'declare -x [A-Z_]*=\"\"$' || true; } > .terminal\n"
)

// runTimeout bounds one block; Go's own first build of a program is the longest.
const runTimeout = 10 * time.Minute

func (r *reader) run(t *testing.T, s snippet) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", before+s.text+after)
	cmd.Dir = r.dir
	cmd.Env = append(os.Environ(), "PATH="+r.path, "GOFLAGS=-mod=mod", "GOWORK=off")
	cmd.WaitDelay = 10 * time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	r.out = stdout.String()
	t.Logf("line %d:\n%s\n%s%s", s.line, s.text, r.out, stderr.String())
	if err != nil {
		t.Fatalf("line %d: %v", s.line, err)
	}
}

// background starts a block that is one command and waits until it says that
// it is ready. It is ended with the test.
func (r *reader) background(t *testing.T, s snippet) {
	t.Helper()
	words := strings.TrimSpace(s.text)
	if strings.Contains(words, "\n") {
		t.Fatalf("line %d: a background block is one command", s.line)
	}
	// A variable before the command belongs to it; exec does not take it.
	if name, rest, ok := strings.Cut(words, " "); ok && strings.Contains(name, "=") {
		words = "export " + name + "\nexec " + rest
	} else {
		words = "exec " + words
	}
	cmd := exec.Command("bash", "-c", words)
	cmd.Dir, cmd.Env = r.dir, append(os.Environ(), "PATH="+r.path)
	out := &watched{word: "ready", seen: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		<-ended
		if t.Failed() {
			t.Logf("line %d said:\n%s", s.line, out)
		}
	})
	timer := time.NewTimer(startTimeout)
	defer timer.Stop()
	select {
	case <-out.seen:
	case err := <-ended:
		ended <- err
		t.Fatalf("line %d ended: %v\n%s", s.line, err, out)
	case <-timer.C:
		t.Fatalf("line %d does not say ready:\n%s", s.line, out)
	}
}

// expect compares the last output with a block: its lines come in this order,
// with others between them.
func (r *reader) expect(t *testing.T, s snippet) {
	t.Helper()
	rest := strings.Split(r.out, "\n")
	for want := range strings.Lines(s.text) {
		form := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(want)), "…", ".*"))
		for {
			if len(rest) == 0 {
				t.Fatalf("line %d: the output has no further line %q:\n%s", s.line, strings.TrimSpace(want), r.out)
			}
			line := strings.TrimSpace(rest[0])
			rest = rest[1:]
			if form.MatchString(line) {
				break
			}
		}
	}
}

// watched keeps what a process prints and tells when a word was in it.
type watched struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	word string
	seen chan struct{}
	told bool
}

var _ io.Writer = (*watched)(nil)

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf.Write(p)
	if !w.told && strings.Contains(w.buf.String(), w.word) {
		w.told = true
		close(w.seen)
	}
	return len(p), nil
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}

// TestSnippets shows that the extraction and the comparison can fail.
func TestSnippets(t *testing.T) {
	got := snippets(t, "a\n```js file=x.mjs\nx\n```\n```sh run\ny\nz\n```\n```text output\n…\n```\n")
	want := []snippet{{2, "file", "x.mjs", "x\n"}, {5, "run", "", "y\nz\n"}, {9, "output", "", "…\n"}}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("snippets = %v, want %v", got, want)
	}
	for _, bad := range []string{"sh", "js file=", "sh skip", "text output x"} {
		if infos.MatchString(bad) {
			t.Errorf("info string %q is taken", bad)
		}
	}
}
