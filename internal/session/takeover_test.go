package session_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// TestReadLostWithItsAcknowledgement: the process is killed when a reading tool's
// result is on its way to the log and the sandbox has been told to forget it. The
// next owner reads again: the model gets what stands there, not that something
// was forgotten.
func TestReadLostWithItsAcknowledgement(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	slow := calls(llm.ToolCall{Name: "read", Input: map[string]any{"file_path": "/tmp/f"}})
	slow.DelayMS = 1500
	id := e.Begin("read", llm.PlayScript{Steps: []llm.Step{calls(shell("echo kept > /tmp/f")), slow, ending}})
	await(t, e, id, "the first result", func(en store.Entry) bool { return en.Type == "agent.tool_result" })
	await(t, e, id, "the second request", func(en store.Entry) bool {
		return en.Kind == store.KindIntent && strings.Contains(string(en.Body), `"messages":3`)
	})
	// The first commit is the output's, the next one the result's.
	e.Arm(testenv.Fault{Point: "store:append.before", N: 2})
	waitFor(t, "the crash", e.Fired())
	e.Crash()
	e.Restart()
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 2 || !strings.Contains(got[1], "kept") || strings.HasPrefix(got[1], "error") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestTakeoverWithFullDisk: the new owner cannot write down its fence beside the
// sandbox, as on a full disk. That says nothing of the machine, which is not
// given up for it: it is taken over when there is room again (trial G 111).
func TestTakeoverWithFullDisk(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	id := e.Begin("full", llm.PlayScript{Steps: []llm.Step{
		calls(shell("cat /proc/sys/kernel/random/uuid > /tmp/u; cat /tmp/u")), ending, calls(shell("cat /tmp/u")), ending}})
	e.Finish(id)
	pid := e.SandboxPID(id)
	e.Crash()
	folders, err := filepath.Glob(filepath.Join(e.Dir(), "sandboxes", "live", "*"))
	if err != nil || len(folders) != 1 {
		t.Fatalf("folders of sandboxes %v: %v", folders, err)
	}
	obstacle := filepath.Join(folders[0], "state.json.tmp") // a folder where the new state is to be written
	if err := os.Mkdir(obstacle, 0o700); err != nil {
		t.Fatal(err)
	}
	e.Restart()
	e.Say(id, "[full] Go on.")
	// More often than a driver may fail at one place.
	waitUntil(t, "the failed takeovers", func() bool { return bytes.Count(e.Logs.All(), []byte("state.json.tmp")) > 4 })
	if now := e.SandboxPID(id); now != pid {
		t.Errorf("process %d of a healthy machine was replaced by %d", pid, now)
	}
	if err := os.Remove(obstacle); err != nil {
		t.Fatal(err)
	}
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	if got := resultsOf(t, e, id); len(got) != 2 || got[1] != got[0] {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestLeftProcessIsNotBegunAgain: a call leaves a process that reaches out while
// another call runs. After a loss the first call is not run again, or the process
// would reach out a second time, although no tunnel names the call.
func TestLeftProcessIsNotBegunAgain(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: unsaved})
	gate := e.World.HoldAfter("buy", "left")
	slow := ending
	slow.DelayMS = 3500
	id := e.Begin("left", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo one > /tmp/a")),
		calls(shell("( sleep 1.5; " + outward + ") >/dev/null 2>&1 & true")),
		calls(shell("sleep 3")), acting("buy", "left"), calls(shell("cat /tmp/a")), calls(shell("cat /tmp/a")), slow}})
	waitFor(t, "the call of the world", gate.Arrived())
	e.KillSandbox(id)
	gate.Release()
	e.Finish(id)
	tunnels := 0
	for _, en := range entriesOf(t, e, id) {
		var b store.Tunnel
		if en.Kind == store.KindTunnel && json.Unmarshal(en.Body, &b) == nil && !b.Ended {
			if tunnels++; len(b.Calls) != 1 {
				t.Errorf("the tunnel names %v", b.Calls)
			}
		}
	}
	if tunnels != 1 {
		t.Errorf("it reached out %d times\n%s", tunnels, e.Describe(id))
	}
	ms := machinesOf(t, e, id)
	if m := ms[len(ms)-1]; len(ms) != 2 || len(m.Repeated) != 1 || len(m.Missing) != 2 || !strings.Contains(m.Note, "process") {
		t.Errorf("machines %+v", ms)
	}
	if got := resultsOf(t, e, id); got[len(got)-1] != "one" {
		t.Errorf("results %q", got)
	}
	e.Check()
}
