package session_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// unsaved is a machine of which no snapshot is taken by itself.
var unsaved = testenv.M{"snapshot": "manual", "output_commit": "off"}

// TestLossThenCrash: the machine dies, and the process right after it made a new
// one, before a record tells of that. The next owner does not take the new one,
// in which nothing was done yet, for the one that the log tells of, though both
// have the same generation.
func TestLossThenCrash(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	gate := e.World.HoldAfter("buy", "twice")
	id := e.Begin("twice", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo one > /tmp/a; y=2")), acting("buy", "twice"), calls(shell("cat /tmp/a; echo $y")), ending}})
	waitFor(t, "the call of the world", gate.Arrived())
	e.Arm(testenv.Fault{Point: "session:machine_restored", N: 1})
	e.KillSandbox(id)
	gate.Release()
	waitFor(t, "the crash", e.Fired())
	e.Crash()
	e.Restart()
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 3 || got[2] != "one\n2" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	if ms := machinesOf(t, e, id); len(ms) != 2 || len(ms[1].Repeated) != 1 || len(ms[1].Missing) != 0 {
		t.Errorf("machines %+v", ms)
	}
	e.Check()
}

// TestRunningCallOfSnapshot: a snapshot holds a call half done, which reaches out
// after it. When that snapshot comes back the call does not go on inside, for it
// would reach out a second time.
func TestRunningCallOfSnapshot(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	id := e.Begin("half", llm.PlayScript{Steps: []llm.Step{
		calls(shell("touch /tmp/begun; while [ ! -e /tmp/go ]; do sleep 0.05; done; " + outward + "sleep 1000")),
		calls(shell("ls /tmp/begun; pgrep -f 'sleep 1000' | wc -l")),
		ending}})
	begun(t, e, id, "/tmp/begun")
	if err := e.Sessions().SaveNow(t.Context(), "default", store.SessionID(id), 0); err != nil {
		t.Fatal(err)
	}
	if err := e.Sessions().Inside("default", store.SessionID(id)).PutFile(t.Context(), "/tmp/go", 0, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	await(t, e, id, "the tunnel", func(en store.Entry) bool { return en.Kind == store.KindTunnel })
	e.KillSandbox(id)
	e.Finish(id)
	got := resultsOf(t, e, id)
	if len(got) != 2 || !strings.Contains(got[0], "not run again") || got[1] != "/tmp/begun\n0" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	tunnels := 0
	for _, en := range entriesOf(t, e, id) {
		if en.Kind == store.KindTunnel && !strings.Contains(string(en.Body), `"ended":true`) {
			tunnels++
		}
	}
	if tunnels != 1 {
		t.Errorf("it reached out %d times\n%s", tunnels, e.Describe(id))
	}
	e.Check()
}

// TestHalfDoneCallEnded: the same, but the call came to its end before the machine
// died. What it did after the snapshot is missing, and the model is told so.
func TestHalfDoneCallEnded(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	gate := e.World.HoldAfter("buy", "ended")
	id := e.Begin("ended", llm.PlayScript{Steps: []llm.Step{
		calls(shell("touch /tmp/begun; while [ ! -e /tmp/go ]; do sleep 0.05; done; " + outward + "echo end > /tmp/e")),
		acting("buy", "ended"), calls(shell("true")), calls(shell("ls /tmp/e")), ending}})
	begun(t, e, id, "/tmp/begun")
	if err := e.Sessions().SaveNow(t.Context(), "default", store.SessionID(id), 0); err != nil {
		t.Fatal(err)
	}
	if err := e.Sessions().Inside("default", store.SessionID(id)).PutFile(t.Context(), "/tmp/go", 0, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the call of the world", gate.Arrived())
	e.KillSandbox(id)
	gate.Release()
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 4 || !strings.Contains(got[3], "No such file") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	if ms := machinesOf(t, e, id); len(ms) != 2 || len(ms[1].Missing) != 1 || !strings.Contains(ms[1].Note, "192.0.2.7") {
		t.Errorf("machines %+v", ms)
	}
	e.Check()
}

// begun waits until a file is there inside.
func begun(t *testing.T, e *testenv.Env, id, file string) {
	t.Helper()
	waitUntil(t, file, func() bool {
		s := e.Sessions().Inside("default", store.SessionID(id))
		if s == nil {
			return false
		}
		f, _, err := s.GetFile(t.Context(), file)
		if err == nil {
			_ = f.Close()
		}
		return err == nil
	})
}

// TestEndedWhileSaved: a call ends and is acknowledged while a snapshot is taken
// whose Through lies before its result. It is inside, and is neither run again
// nor told as missing.
func TestEndedWhileSaved(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	gate := e.World.HoldAfter("buy", "while")
	id := e.Begin("while", llm.PlayScript{Steps: []llm.Step{
		calls(shell("cat /proc/sys/kernel/random/uuid > /tmp/u; cat /tmp/u")), acting("buy", "while"), calls(shell("cat /tmp/u")), ending}})
	waitFor(t, "the call of the world", gate.Arrived())
	result := seqOf(t, e, id, func(en store.Entry) bool { return en.Type == "agent.tool_result" })
	if err := e.Sessions().SaveNow(t.Context(), "default", store.SessionID(id), result-1); err != nil {
		t.Fatal(err)
	}
	e.KillSandbox(id)
	gate.Release()
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 3 || got[2] != got[0] {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	if ms := machinesOf(t, e, id); len(ms) != 2 || len(ms[1].Missing)+len(ms[1].Repeated) != 0 {
		t.Errorf("machines %+v", ms)
	}
	e.Check()
}

// TestInterruptedIsNotRepeated: a call that the user ended is not done after all
// when its machine is brought back.
func TestInterruptedIsNotRepeated(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	id := e.Begin("cut", llm.PlayScript{Steps: []llm.Step{
		calls(shell("touch /tmp/begun; sleep 3; echo done > /tmp/n")),
		calls(shell("true")), calls(shell("ls /tmp/n")), ending}})
	begun(t, e, id, "/tmp/begun")
	if _, err := e.API.Send(t.Context(), id, "", testenv.M{"type": "user.interrupt"}); err != nil {
		t.Fatal(err)
	}
	e.Finish(id)
	e.KillSandbox(id)
	e.Say(id, "[cut] Go on.")
	e.Finish(id)
	got := resultsOf(t, e, id)
	if len(got) != 3 || !strings.Contains(got[2], "No such file") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	ms := machinesOf(t, e, id)
	if m := ms[len(ms)-1]; len(m.Missing) != 1 || !strings.Contains(m.Note, "ended while it ran") {
		t.Errorf("machines %+v", ms)
	}
	// That nothing came of a call is recovery's, not the client's.
	var wire json.RawMessage
	if err := e.API.Do(t.Context(), http.MethodGet, "/v1/sessions/"+id+"/events", nil, &wire); err != nil || strings.Contains(string(wire), "not_run") {
		t.Errorf("the events show the mark of a call that did not run: %v", err)
	}
	e.Check()
}

// TestFatalCall: a call that ends the machine each time it is run again does not
// keep the machine from coming back (law L7).
func TestFatalCall(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	id := e.Begin("fatal", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo one > /tmp/a")), calls(shell("[ -e /tmp/first ] || touch /tmp/first; sleep 1; touch /tmp/second")), ending,
		calls(shell("true")), calls(shell("cat /tmp/a; ls /tmp/second")), ending}})
	e.Finish(id)
	e.KillSandbox(id)
	e.Say(id, "[fatal] Go on.")
	begun(t, e, id, "/tmp/first") // it is run again
	e.KillSandbox(id)
	e.Finish(id)
	got := resultsOf(t, e, id)
	if len(got) != 4 || !strings.Contains(got[3], "one") || !strings.Contains(got[3], "No such file") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestCommitAfterLoss: the machine dies between a command and the irreversible
// call that builds upon it. The machine is brought back and saved first, then
// the call is made.
func TestCommitAfterLoss(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "manual"}})
	slow := acting("buy", "after")
	slow.DelayMS = 1500
	id := e.Begin("after", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo kept > /tmp/f")), slow, calls(shell("cat /tmp/f")), ending}})
	await(t, e, id, "the result", func(en store.Entry) bool { return en.Type == "agent.tool_result" })
	e.KillSandbox(id)
	e.Finish(id)
	if n := e.World.Executions("buy", "after"); n != 1 {
		t.Errorf("bought %d times\n%s", n, e.Describe(id))
	}
	if got := resultsOf(t, e, id); len(got) != 3 || got[2] != "kept" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	savedBefore(t, e, id, 1)
	e.Check()
}

// savedBefore asserts that a snapshot that the log names before the nth attempt
// holds all results of the machine's calls before it.
func savedBefore(t *testing.T, e *testenv.Env, id string, nth int) {
	t.Helper()
	var result, attempt store.Seq
	for _, en := range entriesOf(t, e, id) {
		if en.Type == "agent.tool_result" && attempt == 0 {
			result = en.Seq
		}
		if en.Kind == store.KindAttempt && attempt == 0 {
			if nth--; nth == 0 {
				attempt = en.Seq
			}
		}
	}
	if !slices.ContainsFunc(snapshotsOf(t, e, id), func(s snapshotAt) bool {
		return s.Act == store.SnapshotTaken && s.Through >= result && s.seq < attempt
	}) {
		t.Errorf("no snapshot with the result at %d before the attempt at %d\n%s", result, attempt, e.Describe(id))
	}
}

// TestCommitUponMissing: what an irreversible call builds upon was lost with the
// process and the machine, and cannot be done again. The call is not made, and
// the model is told why.
func TestCommitUponMissing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "manual"}})
	e.Arm(testenv.Fault{Point: "session:before_snapshot", N: 1})
	id := e.Begin("missing", llm.PlayScript{Steps: []llm.Step{
		calls(shell("cat /proc/sys/kernel/random/uuid")), acting("buy", "missing"), acting("buy", "again"), ending}})
	waitFor(t, "the crash", e.Fired())
	e.KillSandbox(id)
	e.Crash()
	e.Restart()
	e.Finish(id)
	if n := e.World.Executions("buy", "missing"); n != 0 {
		t.Errorf("bought %d times upon what is lost\n%s", n, e.Describe(id))
	}
	if n := e.World.Executions("buy", "again"); n != 1 {
		t.Errorf("bought %d times when the loss was known\n%s", n, e.Describe(id))
	}
	if got := resultsOf(t, e, id); len(got) != 3 || !strings.Contains(got[1], "not made") || !strings.Contains(got[1], "lost") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestCommitOfWhatWasRead: what a process in the background wrote without using
// the processor noticeably, and the model then read, is saved before an
// irreversible call.
func TestCommitOfWhatWasRead(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "manual"}})
	slow := calls(llm.ToolCall{Name: "read", Input: map[string]any{"file_path": "/tmp/bg"}})
	slow.DelayMS = 1500
	id := e.Begin("bg", llm.PlayScript{Steps: []llm.Step{
		calls(shell("mkfifo /tmp/p; ( read -t 1 x <>/tmp/p; echo hi > /tmp/bg; read -t 100 x <>/tmp/p ) & sleep 0.1")),
		acting("buy", "bg1"), slow, acting("buy", "bg2"), ending}})
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 4 || !strings.Contains(got[2], "hi") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	savedBefore(t, e, id, 2)
	e.Check()
}

// TestSweeperSpares: the copy of a snapshot under test is nobody's session, and a
// session whose log is damaged cannot be driven: both stay for a while, not for
// ever.
func TestSweeperSpares(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 60}})
	id := e.Begin("spare", llm.PlayScript{Steps: []llm.Step{calls(shell("true")), ending}})
	e.Finish(id)
	copied := "test-0123"
	if _, err := e.Machines().Start(t.Context(), sandbox.Spec{Workspace: "default", ID: copied, NoEgress: true, Fence: 1}); err != nil {
		t.Fatal(err)
	}
	if err := e.Sessions().Sweep(t.Context(), "default", copied, 0); err != nil {
		t.Error(err)
	}
	if e.SandboxPID(copied) == 0 {
		t.Error("a copy under test was ended")
	}
	if err := e.Sessions().Sweep(t.Context(), "default", copied, time.Hour); err != nil {
		t.Error(err)
	}
	if e.SandboxPID(copied) != 0 {
		t.Error("a copy that nobody tests stays")
	}
	if err := e.DB().Refuse(t.Context(), "default", store.SessionID(id), "for the test"); err != nil {
		t.Fatal(err)
	}
	e.Crash()
	e.Restart()
	for _, x := range []struct {
		seen time.Duration
		pid  bool
	}{{0, true}, {2 * time.Hour, false}} {
		if err := e.Sessions().Sweep(t.Context(), "default", id, x.seen); err != nil {
			t.Error(err)
		}
		if (e.SandboxPID(id) != 0) != x.pid {
			t.Errorf("after %v its process is %d", x.seen, e.SandboxPID(id))
		}
	}
}

// TestSnapshotPolicies: turn takes one when the turn ends, interval one after the
// other, also while a call runs, manual none but named ones and the one that the
// machine is suspended into.
func TestSnapshotPolicies(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		policy string
		want   []string
	}{{"turn", []string{"taken turn", "taken suspend"}}, {"manual", []string{"taken suspend"}}} {
		e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": x.policy, "linger_seconds": 0}})
		id := e.Begin(x.policy, llm.PlayScript{Steps: []llm.Step{calls(shell("echo a > /tmp/a")), calls(shell("echo b > /tmp/b")), ending}})
		e.Finish(id)
		suspended(t, e, id)
		list := snapshotsOf(t, e, id)
		got := saidOf(list)
		if len(got) < len(x.want) || !slices.Equal(got[:len(x.want)], x.want) {
			t.Errorf("%s: snapshots %v, want %v\n%s", x.policy, got, x.want, e.Describe(id))
		}
		if x.policy == "turn" && len(list) > 1 {
			results := 0
			last := seqOf(t, e, id, func(en store.Entry) bool {
				if en.Type == "agent.tool_result" {
					results++
				}
				return results == 2
			})
			// A shell's time may be counted a moment late: then something has changed.
			another := list[1].Snapshot.Snapshot != list[0].Snapshot.Snapshot
			var then, now sandbox.Activity
			if json.Unmarshal(list[0].Activity, &then) != nil || json.Unmarshal(list[1].Activity, &now) != nil {
				t.Errorf("activities %s, %s", list[0].Activity, list[1].Activity)
			}
			if list[0].Through < last || another && sandbox.Same(then, now) {
				t.Errorf("the turn's snapshot holds what came up to %d, its last result is at %d; suspended into another: %v", list[0].Through, last, another)
			}
		}
		e.Check()
	}
}

// TestSnapshotInterval: under policy interval snapshots are taken while a call
// runs, too. One that comes back goes on with the call.
func TestSnapshotInterval(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "interval", "interval_seconds": 86_400, "output_commit": "off"}})
	id := e.Begin("every", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo a > /tmp/a; touch /tmp/begun; while [ ! -e /tmp/go ]; do sleep 0.05; done; cat /tmp/n /tmp/a")), ending}})
	begun(t, e, id, "/tmp/begun")
	inside := func(file, content string) {
		t.Helper()
		if err := e.Sessions().Inside("default", store.SessionID(id)).PutFile(t.Context(), file, 0, strings.NewReader(content)); err != nil {
			t.Fatal(err)
		}
	}
	inside("/tmp/n", "noted\n")
	if !e.Sessions().SaveEvery("default", store.SessionID(id), 100*time.Millisecond) {
		t.Fatal("nothing is saved from time to time while the first call runs")
	}
	awaitSnapshot(t, e, id, "the snapshot", tookPart(store.SnapshotTaken))
	if list := snapshotsOf(t, e, id); list[0].Why != "interval" || len(list[0].Running) != 1 {
		t.Errorf("snapshots %+v", list)
	}
	e.KillSandbox(id)
	await(t, e, id, "the machine", func(en store.Entry) bool {
		return en.Kind == store.KindMachine && strings.Contains(string(en.Body), `"restored"`)
	})
	waitUntil(t, "the machine in its driver's hands", func() bool { return e.Sessions().Inside("default", store.SessionID(id)) != nil })
	inside("/tmp/go", "")
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 1 || got[0] != "noted\na" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestCompactionCarriesMachine: rebuilding from a compaction knows the machine
// and its snapshots, those that were taken while the summary was made, too.
func TestCompactionCarriesMachine(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	heavy, light := &llm.ScriptUsage{Input: 850, Output: 20}, &llm.ScriptUsage{Input: 90, Output: 20}
	e.Model.Add(t, testenv.Marked("compact", llm.PlayScript{
		Rules: []llm.Step{{When: &llm.When{System: "You compress the history"}, Text: "[compact] made. [script-position: 1]", DelayMS: 1500}},
		Steps: []llm.Step{{Tools: []llm.ToolCall{shell("cat /proc/sys/kernel/random/uuid > /tmp/f; v=kept; cat /tmp/f")}, Usage: heavy},
			{Text: "Done.", Usage: light}, {Tools: []llm.ToolCall{shell("cat /tmp/f; echo $v")}, Usage: light}, {Text: "Done.", Usage: light}}}))
	var agent struct {
		ID string `json:"id"`
	}
	if err := e.API.Do(t.Context(), http.MethodPost, "/v1/agents", testenv.M{"name": "small", "model": "scripted-small",
		"tools": []testenv.M{{"type": "agent_toolset_20260401"}}}, &agent); err != nil {
		t.Fatal(err)
	}
	id, err := e.Create("compact", agent.ID)
	if err != nil {
		t.Fatal(err)
	}
	await(t, e, id, "the result", func(en store.Entry) bool { return en.Type == "agent.tool_result" })
	await(t, e, id, "the summary's request", func(en store.Entry) bool {
		return en.Kind == store.KindIntent && strings.Contains(string(en.Body), "compaction")
	})
	if err := e.Sessions().SaveNow(t.Context(), "default", store.SessionID(id), 0); err != nil {
		t.Fatal(err)
	}
	e.Finish(id)
	compacted := seqOf(t, e, id, func(en store.Entry) bool { return en.Kind == store.KindCompaction })
	list := snapshotsOf(t, e, id)
	if list[0].seq > compacted {
		t.Fatalf("the snapshot at %d came after the compaction at %d\n%s", list[0].seq, compacted, e.Describe(id))
	}
	e.Crash()
	e.KillSandbox(id)
	e.Restart()
	e.Say(id, "[compact] Go on.")
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 2 || got[1] != got[0]+"\nkept" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	ms := machinesOf(t, e, id)
	if m := ms[len(ms)-1]; m.Snapshot != list[0].Snapshot.Snapshot || len(m.Repeated)+len(m.Missing) != 0 {
		t.Errorf("machines %+v", ms)
	}
	e.Check()
}

// TestSuspendIntoDamaged: a machine since whose newest snapshot nothing happened
// is not suspended into that when a test found it damaged (trial G 111).
func TestSuspendIntoDamaged(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 3}})
	id := e.Begin("bad", llm.PlayScript{Steps: []llm.Step{calls(shell("echo a > /tmp/a")), ending}})
	e.Finish(id)
	first := snapshotsOf(t, e, id)[0].Snapshot.Snapshot
	if err := e.Sessions().FailTest(t.Context(), "default", store.SessionID(id), first); err != nil {
		t.Fatal(err)
	}
	suspended(t, e, id)
	for _, m := range machinesOf(t, e, id) {
		if m.Act == store.MachineSuspended && m.Snapshot == first {
			t.Errorf("suspended into the damaged snapshot\n%s", e.Describe(id))
		}
	}
	e.Check()
}

// TestLostWhileSaved: the machine dies when its snapshot is taken and not in the
// log yet. What is brought back is that snapshot: were an older state brought
// back meanwhile, the snapshot would stand in the log as one of what came after.
func TestLostWhileSaved(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	gate := e.World.HoldAfter("buy", "late")
	id := e.Begin("late", llm.PlayScript{Steps: []llm.Step{
		calls(shell(outward + "echo once >> /tmp/log")), acting("buy", "late"), calls(shell("cat /tmp/log")), ending}})
	waitFor(t, "the call of the world", gate.Arrived())
	arrived, release := e.Hold("session:before_snapshot")
	saved := make(chan error, 1)
	go func() { saved <- e.Sessions().SaveNow(t.Context(), "default", store.SessionID(id), 0) }()
	waitFor(t, "the image", arrived)
	e.KillSandbox(id)
	gate.Release()
	await(t, e, id, "the third output", outputs(3))
	late := time.AfterFunc(1500*time.Millisecond, release) // in that time another machine would be there
	defer late.Stop()
	e.Finish(id)
	if err := <-saved; err != nil {
		t.Error(err)
	}
	if got := resultsOf(t, e, id); len(got) != 3 || got[2] != "once" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	if ms := machinesOf(t, e, id); len(ms) != 2 || ms[1].Act != store.MachineRestored || len(ms[1].Missing) != 0 {
		t.Errorf("machines %+v", ms)
	}
	e.Check()
}

// TestSuspendWhatWasRead: what a process in the background wrote without using
// the processor noticeably, and the model then read, is in the state that the
// machine is suspended into.
func TestSuspendWhatWasRead(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "manual", "linger_seconds": 0}})
	slow := calls(llm.ToolCall{Name: "read", Input: map[string]any{"file_path": "/tmp/bg"}})
	slow.DelayMS = 2500
	id := e.Begin("sus", llm.PlayScript{Steps: []llm.Step{
		calls(shell("mkfifo /tmp/p; ( read -t 2 x <>/tmp/p; echo $EPOCHREALTIME > /tmp/bg; read -t 100 x <>/tmp/p ) & sleep 0.1")),
		acting("buy", "sus"), slow, ending, calls(shell("sleep 0.3; cat /tmp/bg")), ending}})
	e.Finish(id)
	suspended(t, e, id)
	e.Say(id, "[sus] Go on.")
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 4 || !strings.Contains(got[2], got[3]) {
		t.Errorf("read before %q, after %q\n%s", got[2], got[3], e.Describe(id))
	}
	e.Check()
}
