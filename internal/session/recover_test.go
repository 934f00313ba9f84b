package session_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// waitUntil polls something that no event tells of.
func waitUntil(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(testenv.Deadline)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("%s did not come", what)
		}
	}
}

// actsOf are the acts of machine records.
func actsOf(ms []store.Machine) (out []string) {
	for _, m := range ms {
		out = append(out, m.Act)
	}
	return out
}

// TestSandboxOutlivesCrash: the process is killed while a command runs. The
// sandbox lives on, the next owner finds it, the result arrives and the command
// ran once.
func TestSandboxOutlivesCrash(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	id := e.Begin("crash", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo run >> /tmp/n; while [ ! -e /tmp/go ]; do sleep 0.1; [ $((i++)) -gt 20 ] && break; done; wc -l < /tmp/n")),
		ending}})
	waitUntil(t, "the sandbox", func() bool { return e.SandboxPID(id) != 0 })
	await(t, e, id, "the machine's record", func(en store.Entry) bool { return en.Kind == store.KindMachine })
	pid := e.SandboxPID(id)
	e.Crash()
	e.Restart()
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v", stop)
	}
	if got := resultsOf(t, e, id); len(got) != 1 || got[0] != "1" {
		t.Errorf("results %q, want one run\n%s", got, e.Describe(id))
	}
	if got := actsOf(machinesOf(t, e, id)); strings.Join(got, " ") != "started attached" {
		t.Errorf("the machine was %v", got)
	}
	if now := e.SandboxPID(id); now != pid {
		t.Errorf("process %d was replaced by %d", pid, now)
	}
	e.Check()
}

// TestR2SandboxLost: SIGKILL of the sandbox between two steps and during a call.
// The newest snapshot is restored: variables, files and a background process go
// on, a call that was cut runs again as if it never had, and the model is told
// (trial R2).
func TestR2SandboxLost(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	gate := e.World.HoldAfter("buy", "r2")
	id := e.Begin("r2", llm.PlayScript{Steps: []llm.Step{
		calls(shell("x=kept; cd /tmp; (i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.05; done) & echo $! > pid; sleep 0.3")),
		acting("buy", "r2"),
		calls(shell("a=$(cat count); sleep 0.5; b=$(cat count); echo $x $PWD; [ $b -gt $a ] && echo counts; kill -0 $(cat pid) && echo lives")),
		calls(shell("echo run >> n; sleep 1.5; wc -l < n")),
		ending}})
	waitFor(t, "the call of the world", gate.Arrived())
	e.KillSandbox(id)
	gate.Release()
	await(t, e, id, "the third output", outputs(4))
	pid := e.SandboxPID(id)
	waitUntil(t, "the last command", func() bool { return pid != 0 && running(e, id) })
	e.KillSandbox(id)
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v", stop)
	}
	got := resultsOf(t, e, id)
	if len(got) != 4 || got[2] != "kept /tmp\ncounts\nlives" || got[3] != "1" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	ms := machinesOf(t, e, id)
	if a := strings.Join(actsOf(ms), " "); a != "started restored restored" {
		t.Errorf("the machine was %s\n%s", a, e.Describe(id))
	}
	for _, m := range ms[1:] {
		if m.Reason == "" || !strings.Contains(m.Note, "brought back as it was") {
			t.Errorf("a loss is told as %+v", m)
		}
	}
	if n := e.World.Executions("buy", "r2"); n != 1 {
		t.Errorf("it was bought %d times", n)
	}
	e.Check()
}

// outputs takes the nth output of a model.
func outputs(n int) func(store.Entry) bool {
	seen := 0
	return func(en store.Entry) bool {
		if en.Kind == store.KindOutput {
			seen++
		}
		return seen == n
	}
}

// running reports whether a call runs in a session's sandbox: its last tool use
// has no result. What it did inside is not known.
func running(e *testenv.Env, id string) bool {
	entries, err := e.DB().Entries(context.Background(), "default", store.SessionID(id), store.Range{Types: []string{"agent.tool_use", "agent.tool_result"}})
	return err == nil && len(entries) > 0 && entries[len(entries)-1].Type == "agent.tool_use"
}

// TestRunAgain: without a snapshot the machine comes back fresh. Calls are run
// again in order while each result is the recorded one; at the first other one
// it stops, and the model is told what is not there (design section 5).
func TestRunAgain(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "manual", "output_commit": "off"}})
	gate := e.World.HoldAfter("buy", "again")
	id := e.Begin("again", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo one > /tmp/a; y=2")),
		calls(llm.ToolCall{Name: "read", Input: map[string]any{"file_path": "/tmp/a"}}),
		calls(shell("cat /proc/sys/kernel/random/uuid > /tmp/b; cat /tmp/b")),
		calls(shell("echo three > /tmp/c")),
		acting("buy", "again"),
		calls(shell("echo $y; cat /tmp/a; ls /tmp/c")),
		ending}})
	waitFor(t, "the call of the world", gate.Arrived())
	e.KillSandbox(id)
	gate.Release()
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	ms := machinesOf(t, e, id)
	if a := strings.Join(actsOf(ms), " "); a != "started started" {
		t.Fatalf("the machine was %s\n%s", a, e.Describe(id))
	}
	m := ms[1]
	if len(m.Repeated) != 1 || len(m.Missing) != 2 || !strings.Contains(m.Note, "three") {
		t.Errorf("it came back as %+v", m)
	}
	got := resultsOf(t, e, id)
	if last := got[len(got)-1]; !strings.Contains(last, "was not run again") {
		t.Errorf("the call that builds upon what is missing came to %q", last)
	}
	told := false
	for _, b := range e.Model.Bodies() {
		told = told || strings.Contains(string(b), "nothing of it could be brought back")
	}
	if !told {
		t.Error("the model was not told")
	}
	e.Check()
}

// TestLinger: at rest the machine stays for a while, then it is suspended and
// nobody owns the session. The next message finds it as it was (trial G 99).
func TestLinger(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 1}})
	id := e.Begin("linger", llm.PlayScript{Steps: []llm.Step{
		calls(shell("z=still; sleep 1000 & echo $!")), ending,
		calls(shell("echo $z; jobs")), ending,
		calls(shell("echo $z again")), ending}})
	e.Finish(id)
	s, err := e.DB().Session(t.Context(), "default", store.SessionID(id))
	if err != nil || s.Owner == "" || s.WakeAt.IsZero() || s.Status != store.StatusIdle {
		t.Errorf("a session that lingers is %s, owner %q, wakes %v: %v", s.Status, s.Owner, s.WakeAt, err)
	}
	e.Say(id, "at once")
	e.Finish(id)
	if got := strings.Join(actsOf(machinesOf(t, e, id)), " "); got != "started" {
		t.Errorf("a message while it lingers: the machine was %s", got)
	}
	asleep := func() bool {
		s, err := e.DB().Session(t.Context(), "default", store.SessionID(id))
		return err == nil && s.Owner == "" && e.SandboxPID(id) == 0
	}
	waitUntil(t, "the machine suspended", asleep)
	e.Say(id, "later")
	e.Finish(id)
	got := resultsOf(t, e, id)
	if len(got) != 3 || !strings.Contains(got[1], "still") || !strings.Contains(got[1], "Running") || got[2] != "still again" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	ms := machinesOf(t, e, id)
	if a := strings.Join(actsOf(ms), " "); a != "started suspended restored" {
		t.Errorf("the machine was %s\n%s", a, e.Describe(id))
	} else if ms[2].Note != "" {
		t.Errorf("a machine that is as it was is told as %q", ms[2].Note)
	}
	e.Check()
}

// TestInterruptCommand: an interrupt ends a running command, whose result says
// so; pause does the same, and the session goes on after it.
func TestInterruptCommand(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	id := e.Begin("stop", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo begun; sleep 1000")), ending, ending}})
	await(t, e, id, "the machine's record", func(en store.Entry) bool { return en.Kind == store.KindMachine })
	waitUntil(t, "the command", func() bool { return running(e, id) })
	began := time.Now()
	if _, err := e.API.Send(t.Context(), id, "", testenv.M{"type": "user.interrupt"}); err != nil {
		t.Fatal(err)
	}
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v", stop)
	}
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("the interrupt took %v", d)
	}
	got := resultsOf(t, e, id)
	t.Logf("it came to %q after %v", got, time.Since(began))
	if len(got) != 1 || !strings.HasPrefix(got[0], "error: ") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestArchiveLingering: a session that rests with its machine is archived and
// deleted like one without: its machine is ended.
func TestArchiveLingering(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	for i, act := range []string{"archive", "delete"} {
		id := e.Begin(fmt.Sprintf("end%d", i), llm.PlayScript{Steps: []llm.Step{calls(shell("true")), ending}})
		e.Finish(id)
		var err error
		if act == "archive" {
			_, err = e.Sessions().Archive(t.Context(), "default", store.SessionID(id), "test")
		} else {
			err = e.Sessions().Delete(t.Context(), "default", store.SessionID(id), "test")
		}
		if err != nil {
			t.Errorf("%s: %v\n%s", act, err, e.Describe(id))
		}
		waitUntil(t, "the end of the machine", func() bool { return e.SandboxPID(id) == 0 })
	}
	e.Check()
}

// outward is a command that asks for a connection to an address that nobody has.
const outward = "exec 3<>/dev/tcp/127.0.0.1/3128 && printf 'CONNECT 192.0.2.7:443 HTTP/1.1\\r\\nHost: 192.0.2.7:443\\r\\n\\r\\n' >&3 && head -1 <&3 >/dev/null; exec 3>&-; "

// TestOutsideIsNotRepeated: calls that reached out are not run again after a
// loss, neither ended ones nor the one that was under way: what they did outside
// stands. The tunnel is in the log before it is dialled (law L1).
func TestOutsideIsNotRepeated(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "manual", "output_commit": "off"}})
	gate := e.World.HoldAfter("buy", "out")
	id := e.Begin("out", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo one > /tmp/a")),
		calls(shell(outward + "echo two > /tmp/b")),
		acting("buy", "out"),
		calls(shell("cat /tmp/a; ls /tmp/b")),
		calls(shell("cat /tmp/a; ls /tmp/b")),
		calls(shell(outward + "sleep 1000")),
		ending}})
	waitFor(t, "the call of the world", gate.Arrived())
	e.KillSandbox(id)
	gate.Release()
	tunnels := 0
	await(t, e, id, "the second tunnel", func(en store.Entry) bool {
		if en.Kind == store.KindTunnel && !strings.Contains(string(en.Body), `"ended":true`) {
			tunnels++
		}
		return tunnels == 2
	})
	e.KillSandbox(id)
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	ms := machinesOf(t, e, id)
	if len(ms) != 3 || len(ms[1].Repeated) != 1 || len(ms[1].Missing) != 1 || !strings.Contains(ms[1].Note, "192.0.2.7") {
		t.Errorf("the machine: %+v\n%s", ms, e.Describe(id))
	}
	got := resultsOf(t, e, id)
	if len(got) != 6 || !strings.Contains(got[5], "not run again") || !strings.Contains(got[4], "one") {
		t.Errorf("results %q", got)
	}
	if tunnels != 2 {
		t.Errorf("%d tunnels", tunnels)
	}
	e.Check()
}

// TestDrainLeavesCommand: a drain does not wait for a long command. The sandbox
// lives on and the next process gets its result.
func TestDrainLeavesCommand(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	id := e.Begin("drain", llm.PlayScript{Steps: []llm.Step{
		calls(shell("while [ ! -e /tmp/go ]; do sleep 0.1; [ $((i++)) -gt 40 ] && break; done; echo out")), ending}})
	await(t, e, id, "the machine's record", func(en store.Entry) bool { return en.Kind == store.KindMachine })
	waitUntil(t, "the command", func() bool { return running(e, id) })
	began := time.Now()
	e.Stop()
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("the drain took %v", d)
	}
	e.Restart()
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 1 || got[0] != "out" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestPausedMachine: a pause ends the running command and suspends the machine
// at once; resume finds it as it was.
func TestPausedMachine(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	id := e.Begin("pause", llm.PlayScript{Steps: []llm.Step{
		calls(shell("v=7; true")), calls(shell("echo begun; sleep 1000")), calls(shell("echo $v")), ending}})
	waitFor(t, "the command", says(t, e, id, "begun")) // a call that has not begun is made after the pause
	if _, err := e.Sessions().Pause(t.Context(), "default", store.SessionID(id), "test"); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the machine suspended", func() bool {
		s, err := e.DB().Session(t.Context(), "default", store.SessionID(id))
		return err == nil && s.Paused && s.Owner == "" && e.SandboxPID(id) == 0
	})
	if _, err := e.Sessions().Resume(t.Context(), "default", store.SessionID(id), "test"); err != nil {
		t.Fatal(err)
	}
	await(t, e, id, "the end", func(en store.Entry) bool {
		return en.Type == "session.status_idle" && en.Seq > 0 && strings.Contains(string(en.Body), "end_turn") && len(resultsOf(t, e, id)) == 3
	})
	if got := resultsOf(t, e, id); len(got) != 3 || !strings.HasPrefix(got[1], "error: ") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// says is closed when a running command of a session has said something.
func says(t testing.TB, e *testenv.Env, id, what string) <-chan struct{} {
	t.Helper()
	deltas, cancel := e.Sessions().Deltas(store.SessionID(id))
	said, over := make(chan struct{}), make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		for {
			select {
			case d := <-deltas:
				if d.Type == "agent.tool_use" && strings.Contains(d.Text, what) {
					close(said)
					return
				}
			case <-over:
				return
			}
		}
	})
	t.Cleanup(func() { close(over); watching.Wait(); cancel() })
	return said
}

// TestSweptSandbox: a sandbox that no driver will hold again does not stay: its
// owner died after it said that it is suspended, or the machine of a session at
// rest was left running and nobody comes by itself.
func TestSweptSandbox(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	id := e.Begin("sweep", llm.PlayScript{Steps: []llm.Step{calls(shell("w=9; true")), ending, calls(shell("echo $w")), ending}})
	e.Arm(testenv.Fault{Point: "session:suspended", N: 1})
	waitFor(t, "the crash", e.Fired())
	if e.SandboxPID(id) == 0 {
		t.Fatal("the sandbox did not outlive the crash")
	}
	e.Crash()
	e.Restart()
	waitUntil(t, "the end of the sandbox", func() bool { return e.SandboxPID(id) == 0 })
	e.Say(id, "go on")
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 2 || got[1] != "9" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestLostAtRest: the sandbox dies while the session lingers. The log says so,
// nobody owns the session, and the next message finds the newest snapshot.
func TestLostAtRest(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	id := e.Begin("rest", llm.PlayScript{Steps: []llm.Step{calls(shell("w=9; true")), ending, calls(shell("echo $w")), ending}})
	e.Finish(id)
	e.KillSandbox(id)
	await(t, e, id, "the loss", func(en store.Entry) bool {
		return en.Kind == store.KindMachine && strings.Contains(string(en.Body), `"lost"`)
	})
	waitUntil(t, "the rest", func() bool {
		s, err := e.DB().Session(t.Context(), "default", store.SessionID(id))
		return err == nil && s.Owner == "" && s.WakeAt.IsZero()
	})
	e.Say(id, "go on")
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 2 || got[1] != "9" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	if got := strings.Join(actsOf(machinesOf(t, e, id)), " "); got != "started lost restored" {
		t.Errorf("the machine was %s", got)
	}
	e.Check()
}
