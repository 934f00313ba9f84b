package session_test

import (
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// TestSnapshotDiskFull: a snapshot that cannot be taken fails no session. The
// irreversible call that depends on it is not sent, the model is told, and the
// machine lives on (trials G 95, G 111).
func TestSnapshotDiskFull(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	dir := filepath.Join(e.Dir(), "sandboxes", "snapshots")
	if err := syscall.Mount("none", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("this machine lets us mount no small file system: %v", err)
	}
	full := true
	free := func() {
		if full {
			full = false
			if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(free)
	id := e.Begin("full", llm.PlayScript{Steps: []llm.Step{calls(shell("echo kept > /workspace/f")), acting("buy", "full"), ending,
		calls(shell("cat /workspace/f")), acting("buy", "full2"), ending}})
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	got := resultsOf(t, e, id)
	if len(got) != 2 || !strings.HasPrefix(got[1], "error: ") || !strings.Contains(got[1], "not made") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	if n := e.World.Executions("buy", "full"); n != 0 {
		t.Errorf("bought %d times without a snapshot", n)
	}
	if live := e.Machines().Live(); len(live) != 1 {
		t.Errorf("live machines: %v", live)
	}
	free()
	e.Say(id, "[full] Again.")
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 4 || got[2] != "kept" || strings.HasPrefix(got[3], "error: ") {
		t.Errorf("results with space again %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestBringBackWithFullDisk: the machine's newest snapshot is packed, and this
// node has no room for its image. The call is answered with that; the state is
// not given up for a fresh machine, and comes back when there is room (trial
// G 111).
func TestBringBackWithFullDisk(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	id := e.Begin("room", llm.PlayScript{Steps: []llm.Step{
		calls(shell("cat /proc/sys/kernel/random/uuid > /tmp/u; cat /tmp/u")), ending,
		calls(shell("cat /tmp/u")), ending, calls(shell("cat /tmp/u")), ending}})
	e.Finish(id)
	suspended(t, e, id)
	awaitPacked(t, e, id)
	rows, err := e.DB().Snapshots(t.Context(), "default", store.SessionID(id))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range rows {
		if err := e.Machines().DropImage(x.ID); err != nil {
			t.Fatal(err)
		}
	}
	dir := filepath.Join(e.Dir(), "sandboxes", "snapshots")
	if err := syscall.Mount("none", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("this machine lets us mount no small file system: %v", err)
	}
	free := sync.OnceFunc(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(free)
	e.Say(id, "[room] Go on.")
	e.Finish(id)
	free()
	e.Say(id, "[room] Again.")
	e.Finish(id)
	got := resultsOf(t, e, id)
	if len(got) != 3 || !strings.HasPrefix(got[1], "error") || !strings.Contains(got[1], "no space left") || got[2] != got[0] {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}
