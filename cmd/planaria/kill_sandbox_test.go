package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

var sandboxKills = flag.Int("sandbox.kills", 26, "how often TestKillSandboxes kills a sandbox or the server")

// newBoxSite is a site whose agent has a machine of its own; the test is skipped
// where none can run.
func newBoxSite(t *testing.T) *site {
	t.Helper()
	for _, f := range sandbox.Probe(t.Context(), sandbox.Config{Binary: machineProgram}) {
		if f.Fatal && !f.OK {
			t.Skipf("this machine runs no sandbox: %s: %s (%s)", f.What, f.Says, f.Mend)
		}
	}
	s := newSite(t, "")
	yaml, err := os.ReadFile(s.config)
	if err != nil {
		t.Fatal(err)
	}
	yaml = append(yaml, "allow_private_networks: true\nsandboxes: {enabled: on}\n"...)
	if err := os.WriteFile(s.config, yaml, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.endMachines() })
	return s
}

// machineObjects makes an agent with the built-in tools, and an environment whose
// machines are suspended soon after their session rests.
func (s *site) machineObjects(linger int) {
	s.t.Helper()
	s.objects()
	make1 := func(path string, in testenv.M) string {
		var out struct {
			ID string `json:"id"`
		}
		if err := s.api.Do(s.t.Context(), http.MethodPost, path, in, &out); err != nil {
			s.t.Fatal(err)
		}
		return out.ID
	}
	s.environment = make1("/v1/environments", testenv.M{"name": "machines", "config": testenv.M{"type": "cloud",
		"networking": testenv.M{"type": "limited", "allowed_hosts": []string{"localhost"}}, "planaria": testenv.M{"linger_seconds": linger}}})
	s.agent = make1("/v1/agents", testenv.M{"name": "machinist", "model": "scripted-1", "system": "You are under test.",
		"tools": []testenv.M{{"type": "agent_toolset_20260401", "default_config": testenv.M{"permission_policy": testenv.M{"type": "always_allow"}}}}})
}

// endMachines kills what has outlived the servers.
func (s *site) endMachines() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, err := sandbox.Open(ctx, sandbox.Config{Dir: filepath.Join(s.dir, sandboxFolder), Binary: binary})
	if err != nil {
		s.t.Errorf("open the sandboxes: %v", err)
		return
	}
	for _, l := range r.Live() {
		if err := r.End(ctx, l[0], l[1]); err != nil {
			s.t.Error(err)
		}
	}
	if err := r.Close(); err != nil {
		s.t.Error(err)
	}
}

// machines lists the processes of the sandboxes that live, by session.
func (s *site) machines() map[string]int {
	files, err := filepath.Glob(filepath.Join(s.dir, sandboxFolder, "live", "*", "state.json"))
	if err != nil {
		s.t.Fatal(err)
	}
	out := map[string]int{}
	for _, f := range files {
		var state struct {
			ID    string `json:"id"`
			Phase string `json:"phase"`
			PID   int    `json:"pid"`
		}
		data, err := os.ReadFile(f)
		if err == nil && json.Unmarshal(data, &state) == nil && state.Phase == "running" && state.PID > 1 {
			out[state.ID] = state.PID
		}
	}
	return out
}

// told is what a session's log says of its machine.
type told struct {
	results  map[string]string // of calls, by the line that each writes; only those that ended well
	missing  map[string]bool   // lines of calls that a note tells to be gone
	failed   map[string]string // results that say that something went wrong
	notes    []string
	restored int
	attached int
}

// tell reads it. Each call's command says in a comment which line it writes.
func (s *site) tell(db *store.DB, id store.SessionID) told {
	t := s.t
	t.Helper()
	entries, err := db.Entries(t.Context(), "default", id, store.Range{})
	if err != nil {
		t.Fatal(err)
	}
	out := told{results: map[string]string{}, missing: map[string]bool{}, failed: map[string]string{}}
	line := map[string]string{} // by the call's event
	for _, e := range entries {
		switch {
		case e.Kind == store.KindMachine:
			var m store.Machine
			if err := json.Unmarshal(e.Body, &m); err != nil {
				t.Fatal(err)
			}
			switch m.Act {
			case store.MachineRestored:
				out.restored++
			case store.MachineAttached:
				out.attached++
			}
			for _, c := range m.Missing {
				out.missing[line[string(c)]] = true
			}
			if m.Act == store.MachineStarted && m.Note != "" {
				// A new one: the note says that all of before is gone but what was
				// run again.
				for id, name := range line {
					if _, done := out.results[name]; done && !slices.Contains(m.Repeated, store.EventID(id)) {
						out.missing[name] = true
					}
				}
			}
			if m.Note != "" {
				out.notes = append(out.notes, m.Note)
			}
		case e.Type == "agent.tool_use":
			var b struct {
				Input struct {
					Command string `json:"command"`
				} `json:"input"`
			}
			if err := json.Unmarshal(e.Body, &b); err != nil {
				t.Fatal(err)
			}
			_, line[string(e.ID)], _ = strings.Cut(b.Input.Command, "# ")
		case e.Type == "agent.tool_result":
			var b struct {
				Use     string `json:"tool_use_id"`
				IsError bool   `json:"is_error"`
				Content []struct {
					Text string `json:"text"`
				} `json:"content"`
			}
			if err := json.Unmarshal(e.Body, &b); err != nil {
				t.Fatal(err)
			}
			text := ""
			for _, c := range b.Content {
				text += c.Text
			}
			if b.IsError {
				out.failed[line[b.Use]] = text
			} else {
				out.results[line[b.Use]] = strings.TrimSpace(text)
			}
		}
	}
	return out
}

// boxSteps is how many lines each session of TestKillSandboxes writes.
const boxSteps = 6

// boxScript writes line after line, each with a number that a process in the
// background keeps in memory, and shows in the end what is there.
func boxScript(tag string) llm.PlayScript {
	bash := func(command, line string) llm.Step {
		return llm.Step{Text: "On it.", DelayMS: 60, ChunkDelayMS: 1, Tools: []llm.ToolCall{{Name: "bash", Input: map[string]any{"command": command + " # " + line}}}}
	}
	steps := []llm.Step{bash(`coproc C { n=0; while read -r x; do n=$((n+1)); echo $n; done; }; echo started`, "start")}
	for i := 1; i <= boxSteps; i++ {
		steps = append(steps, bash(fmt.Sprintf(`echo >&$((C[1])); read -r -t 20 n <&$((C[0])); echo "line%d $n" >> log.txt; sleep 0.1; echo %s $n`, i, tag), fmt.Sprintf("line%d", i)))
	}
	// A call under which the machine dies twice is answered with an error, so the
	// file is asked for more than once; what is shown last counts.
	for range 3 {
		steps = append(steps, bash(`cat log.txt`, "show"))
	}
	steps = append(steps, llm.Step{Text: "All done."})
	return llm.PlayScript{Steps: steps}
}

// TestKillSandboxes kills sandboxes and the server at random moments (trials R2,
// K1 to K4, table G): what the machine holds in the end is what the transcript
// says, or a note has told the model. No call is done twice, none is lost
// silently, and a process in the background never begins again.
func TestKillSandboxes(t *testing.T) {
	s := newBoxSite(t)
	rnd := chance(t, 2)
	p := s.start(s.addr)
	s.up(p)
	s.machineObjects(1)
	h := &herd{site: s, up: make(chan struct{}), script: boxScript}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var lanes sync.WaitGroup
	for i := range 3 {
		lanes.Go(func() { h.lane(ctx, i) })
	}
	began := time.Now()
	sandboxes, servers := 0, 0
	for sandboxes+servers < *sandboxKills {
		s.up(p)
		h.rise()
		wait(nil, p.gone, time.Duration(100+rnd.IntN(900))*time.Millisecond)
		select {
		case <-p.gone:
			t.Fatalf("the server ended by itself: %v\n%s", p.err, s.logs.Tail(4<<10))
		default:
		}
		if rnd.IntN(4) > 0 {
			if s.killOne(rnd) {
				sandboxes++
			}
			continue
		}
		servers++
		h.fall()
		p.kill()
		p = s.start(s.addr)
	}
	elapsed := time.Since(began)
	s.up(p)
	h.finish(p, &lanes)
	s.judgeMachines(h, sandboxes, servers, elapsed)
}

// killOne kills one of the sandboxes that live.
func (s *site) killOne(rnd *rand.Rand) bool {
	alive := s.machines()
	if len(alive) == 0 {
		return false
	}
	n := rnd.IntN(len(alive))
	for _, pid := range alive {
		if n--; n < 0 {
			return syscall.Kill(pid, syscall.SIGKILL) == nil
		}
	}
	return false
}

func (s *site) judgeMachines(h *herd, sandboxes, servers int, elapsed time.Duration) {
	t := s.t
	list := s.check()
	if len(list) != len(h.sessions) {
		t.Errorf("%d sessions are in the store, %d were made", len(list), len(h.sessions))
	}
	db, _ := s.offline()
	var restored, attached, noted, failed int
	for _, x := range list {
		if x.Status != store.StatusIdle {
			t.Errorf("%s ended as %s", x.ID, x.Status)
		}
		w := s.tell(db, x.ID)
		restored, attached, noted, failed = restored+w.restored, attached+w.attached, noted+len(w.notes), failed+len(w.failed)
		s.judgeLines(x.ID, w)
	}
	if restored == 0 || attached+servers == 0 {
		t.Errorf("%d machines were restored and %d found again: nothing was tried", restored, attached)
	}
	t.Logf("%d sandboxes and %d servers killed in %.1f s, %d sessions, %d machines restored, %d found again, %d notes, %d results that tell of a loss",
		sandboxes, servers, elapsed.Seconds(), len(list), restored, attached, noted, failed)
}

// judgeLines compares what the file holds in the end with the transcript.
func (s *site) judgeLines(id store.SessionID, w told) {
	t := s.t
	t.Helper()
	shown, ok := w.results["show"]
	if !ok {
		t.Errorf("%s: its file was never shown: %v, notes %q", id, w.failed, w.notes)
		return
	}
	// The model was told where the call that begins the process was lost (the
	// machine died under it twice) or is not in the machine; it then goes on without.
	begun := w.failed["start"] == "" && !w.missing["start"]
	if !begun {
		t.Logf("%s: goes on without its process: %v, notes %q", id, w.failed, w.notes)
	}
	seen, last := map[string]int{}, 0
	for line := range strings.Lines(shown) {
		name, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		seen[name]++
		if !begun {
			if number != "" {
				t.Errorf("%s: a process that the transcript does not have said %q", id, number)
			}
			continue
		}
		n, err := strconv.Atoi(number)
		if err != nil || n <= last {
			t.Errorf("%s: the process in the background said %q after %d; results that tell of a loss: %v, notes %q", id, number, last, w.failed, w.notes)
		}
		last = n
	}
	for i := 1; i <= boxSteps; i++ {
		name := fmt.Sprintf("line%d", i)
		_, done := w.results[name]
		switch n := seen[name]; {
		case n > 1:
			t.Errorf("%s: %s was written %d times", id, name, n)
		case n == 0 && done && !w.missing[name]:
			t.Errorf("%s: %s is in the transcript, not in the machine, and no note says so: %q", id, name, w.notes)
		case n == 0 && !done && w.failed[name] == "":
			t.Errorf("%s: %s has no result", id, name)
		}
	}
}

// outsideCounter is a server of the outside that counts who calls.
type outsideCounter struct {
	*httptest.Server
	mu    sync.Mutex
	calls map[string]int // guarded by mu
	come  chan string    // each call's name, as it arrives
}

// newOutsideCounter listens where a sandbox with limited networking may reach this
// machine: by name, on the port of HTTP or HTTPS.
func newOutsideCounter(t *testing.T) *outsideCounter {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:80")
	if err != nil {
		l, err = net.Listen("tcp", "127.0.0.1:443")
	}
	if err != nil {
		t.Skipf("neither port 80 nor 443 of 127.0.0.1 is free for us: %v", err)
	}
	c := &outsideCounter{calls: map[string]int{}, come: make(chan string, 16)}
	c.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/")
		c.mu.Lock()
		c.calls[name]++
		c.mu.Unlock()
		c.come <- name
		_, _ = io.WriteString(w, "counted\n")
	}))
	_ = c.Server.Listener.Close()
	c.Server.Listener = l
	c.Start()
	t.Cleanup(c.Close)
	return c
}

func (c *outsideCounter) called(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls[name]
}

// arrive waits until a call has come.
func (c *outsideCounter) arrive(t *testing.T, s *site, name string) {
	t.Helper()
	select {
	case got := <-c.come:
		if got != name {
			t.Fatalf("%s called, not %s", got, name)
		}
	case <-time.After(time.Minute):
		t.Fatalf("%s never came\n%s", name, s.logs.Tail(4<<10))
	}
}

// TestKillWhileCommandRuns: the server drains, then another dies, while a command
// runs that has called outside; the next one finds the machine at work, the
// result arrives, and the command ran once, counted inside and outside (trials
// K3, W3, R2). Then the machine
// itself dies in such a command: it is not run again, for it has called outside,
// and the model is told.
func TestKillWhileCommandRuns(t *testing.T) {
	s := newBoxSite(t)
	outside := newOutsideCounter(t)
	host := fmt.Sprintf("localhost:%d", addrPort(outside.Listener).Port())
	command := func(name string) llm.Step {
		c := fmt.Sprintf(`echo begin %[1]s >> runs.log; exec 9<>/dev/tcp/127.0.0.1/3128; printf 'GET http://%[2]s/%[1]s HTTP/1.1\r\nHost: %[2]s\r\nConnection: close\r\n\r\n' >&9; `+
			`tail -n 1 <&9; exec 9>&-; sleep 2; echo end %[1]s >> runs.log; echo finished # %[1]s`, name, host)
		return llm.Step{Text: "On it.", Tools: []llm.ToolCall{{Name: "bash", Input: map[string]any{"command": c}}}}
	}
	show := llm.Step{Text: "And now?", Tools: []llm.ToolCall{{Name: "bash", Input: map[string]any{"command": "cat runs.log # show"}}}}
	s.model.Add(t, testenv.Marked("command", llm.PlayScript{Steps: []llm.Step{
		command("zero"), command("one"), {Text: "One is done."}, command("two"), show, {Text: "All done."}}}))
	p := s.start(s.addr)
	s.up(p)
	s.machineObjects(60)
	id, err := s.create(t.Context(), "command")
	if err != nil {
		t.Fatal(err)
	}
	// SIGTERM does not wait for the command: the machine goes on without a server.
	outside.arrive(t, s, "zero")
	asked := time.Now()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-p.gone
	if p.err != nil {
		t.Errorf("the drained server ended with %v", p.err)
	}
	drained := time.Since(asked)
	p = s.start(s.addr)
	s.up(p)
	outside.arrive(t, s, "one")
	p.kill()
	p = s.start(s.addr)
	s.up(p)
	finish := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if stop, err := s.person.Finish(ctx, id); err != nil || stop.Type != "end_turn" {
			t.Fatalf("the session ended with %v, %v\n%s", stop, err, s.logs.Tail(4<<10))
		}
	}
	finish() // its machine has a snapshot now
	if err := s.api.Do(t.Context(), http.MethodPost, "/v1/sessions/"+id+"/events", testenv.M{"events": []testenv.M{testenv.Message("On.")}}, nil); err != nil {
		t.Fatal(err)
	}
	outside.arrive(t, s, "two")
	pid, ok := s.machines()[id]
	if !ok {
		t.Fatalf("the session has no machine\n%s", s.logs.Tail(4<<10))
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	finish()
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	<-p.gone
	s.check()
	db, _ := s.offline()
	w := s.tell(db, store.SessionID(id))
	// The answer from outside went through the server that died.
	for _, name := range []string{"zero", "one"} {
		if got := strings.TrimPrefix(w.results[name], "counted\n"); got != "finished" {
			t.Errorf("command %s, which outlived the server, says %q %v, want its whole result", name, got, w.failed)
		}
	}
	if w.attached != 2 || w.restored != 1 {
		t.Errorf("the machine was found again %d times and restored %d times, want 2 and 1", w.attached, w.restored)
	}
	for _, name := range []string{"zero", "one", "two"} {
		if n := outside.called(name); n != 1 {
			t.Errorf("command %s called outside %d times, want once", name, n)
		}
	}
	said, isError := w.failed["two"]
	if !isError {
		t.Errorf("the command that died with the machine says %q, want an error that tells of it", w.results["two"])
	}
	t.Logf("drained in %s; the model was told %q, notes %q", drained, said, w.notes)
	shown := w.results["show"]
	for _, name := range []string{"begin zero", "end zero", "begin one", "end one"} {
		if n := strings.Count(shown, name+"\n") + strings.Count(shown+"$", name+"$"); n != 1 {
			t.Errorf("%s stands in its file %d times: %q", name, n, shown)
		}
	}
	if strings.Contains(shown, "end two") {
		t.Errorf("the command that died is said to have ended: %q", shown)
	}
}
