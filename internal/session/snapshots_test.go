package session_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// snapshotAt is an entry about a snapshot.
type snapshotAt struct {
	store.Snapshot
	seq store.Seq
}

func snapshotsOf(t testing.TB, e *testenv.Env, id string) (out []snapshotAt) {
	t.Helper()
	for _, en := range entriesOf(t, e, id) {
		if en.Kind != store.KindSnapshot {
			continue
		}
		b := snapshotAt{seq: en.Seq}
		if err := json.Unmarshal(en.Body, &b.Snapshot); err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}

// saidOf says what the entries about snapshots are, in order.
func saidOf(list []snapshotAt) (out []string) {
	for _, s := range list {
		what := s.Act
		if s.Act == store.SnapshotTaken {
			what += " " + s.Why
		}
		out = append(out, what)
	}
	return out
}

func seqOf(t testing.TB, e *testenv.Env, id string, f func(store.Entry) bool) store.Seq {
	t.Helper()
	for _, en := range entriesOf(t, e, id) {
		if f(en) {
			return en.Seq
		}
	}
	t.Fatalf("no such entry\n%s", e.Describe(id))
	return 0
}

// awaitSnapshot waits until an entry about a snapshot comes that f takes.
func awaitSnapshot(t testing.TB, e *testenv.Env, id, what string, f func(store.Snapshot) bool) {
	t.Helper()
	await(t, e, id, what, func(en store.Entry) bool {
		var b store.Snapshot
		return en.Kind == store.KindSnapshot && json.Unmarshal(en.Body, &b) == nil && f(b)
	})
}

func tookPart(act string) func(store.Snapshot) bool {
	return func(b store.Snapshot) bool { return b.Act == act }
}

// suspended waits until the session's machine is suspended.
func suspended(t testing.TB, e *testenv.Env, id string) {
	t.Helper()
	await(t, e, id, "the end of its machine", func(en store.Entry) bool {
		var b store.Machine
		return en.Kind == store.KindMachine && json.Unmarshal(en.Body, &b) == nil && b.Act == store.MachineSuspended
	})
}

var reading = llm.ToolCall{Name: "read", Input: map[string]any{"file_path": "/workspace/f"}}

// TestSnapshotOfSteps: under policy step a snapshot is taken while the model
// thinks, when the step changed something; a step that only read takes none. The
// machine is suspended into one that holds all that was read.
func TestSnapshotOfSteps(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	slow := calls(reading)
	slow.DelayMS = 2000 // longer than any snapshot takes: the next result comes behind its entry
	id := e.Begin("steps", llm.PlayScript{Steps: []llm.Step{calls(shell("echo one > /workspace/f")), slow, calls(reading), ending}})
	e.Finish(id)
	suspended(t, e, id)
	list := snapshotsOf(t, e, id)
	if len(list) < 2 || list[0].Why != "step" || list[1].Why != "suspend" || list[1].Snapshot.Snapshot == list[0].Snapshot.Snapshot {
		t.Fatalf("snapshots: %v, want one that was taken for the first step and one that the machine is suspended into\n%s", saidOf(list), e.Describe(id))
	}
	first := seqOf(t, e, id, func(en store.Entry) bool { return en.Type == "agent.tool_result" })
	outputs := 0
	second := seqOf(t, e, id, func(en store.Entry) bool {
		if en.Kind == store.KindOutput {
			outputs++
		}
		return outputs == 2
	})
	if s := list[0]; s.Through < first || s.Through >= second || s.seq > second {
		t.Errorf("the snapshot at %d holds what came up to %d; the call's result is at %d, the next output at %d", s.seq, s.Through, first, second)
	}
	if list[1].Through <= list[0].Through {
		t.Errorf("the suspended one holds what came up to %d, before it %d", list[1].Through, list[0].Through)
	}
	e.Check()
}

// TestOutputCommit: before an irreversible call is attempted, all that the
// machine did before is in a snapshot that the log names, wherever the process
// dies.
func TestOutputCommit(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "manual"}})
	for i, point := range []string{"", "session:before_snapshot", "session:after_snapshot", "keeper:after_attempt", "session:before_calls"} {
		tag := fmt.Sprintf("commit%d", i)
		if point != "" {
			e.Arm(testenv.Fault{Point: point, N: 1})
		}
		id := e.Begin(tag, llm.PlayScript{Steps: []llm.Step{calls(shell("echo " + tag + " > /workspace/f")), acting("buy", tag), ending}})
		if point != "" {
			waitFor(t, "the fault at "+point, e.Fired())
			e.Crash()
			e.Restart()
		}
		e.Finish(id)
		// Killed between the attempt and the send, the probe proves that nothing
		// happened.
		if n := e.World.Executions("buy", tag); n != 1 && !(n == 0 && point == "keeper:after_attempt") {
			t.Errorf("%s: bought %d times\n%s", point, n, e.Describe(id))
		}
		result := seqOf(t, e, id, func(en store.Entry) bool { return en.Type == "agent.tool_result" })
		attempt := seqOf(t, e, id, func(en store.Entry) bool { return en.Kind == store.KindAttempt })
		if !slices.ContainsFunc(snapshotsOf(t, e, id), func(s snapshotAt) bool {
			return s.Act == store.SnapshotTaken && s.Through >= result && s.seq < attempt
		}) {
			t.Errorf("%s: no snapshot with the result at %d before the attempt at %d\n%s", point, result, attempt, e.Describe(id))
		}
	}
	e.Check()
}

// TestOutputCommitStored: policy stored waits until the snapshot is packed.
func TestOutputCommitStored(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "manual", "output_commit": "stored"}})
	id := e.Begin("stored", llm.PlayScript{Steps: []llm.Step{calls(shell("echo x > /workspace/f")), acting("buy", "stored"), ending}})
	e.Finish(id)
	attempt := seqOf(t, e, id, func(en store.Entry) bool { return en.Kind == store.KindAttempt })
	list := snapshotsOf(t, e, id)
	if len(list) < 2 || list[0].Why != "commit" || list[1].Act != store.SnapshotPacked || list[1].seq > attempt {
		t.Errorf("snapshots %v, attempt at %d\n%s", saidOf(list), attempt, e.Describe(id))
	}
	e.Check()
}

// TestSnapshotPacked: a session at rest is packed and restore-tested; its
// machine comes back from the blob store where the image is lost or damaged
// (trials R1, R2), and a further snapshot stores only what changed.
func TestSnapshotPacked(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	id := e.Begin("packed", llm.PlayScript{Steps: []llm.Step{
		calls(shell("head -c 20000000 /dev/urandom > /dev/shm/big; cd /tmp; v=kept; echo one > /workspace/f")), ending,
		calls(shell("echo $v $PWD; cat /workspace/f; stat -c %s /dev/shm/big; echo two > /workspace/f")), ending,
		calls(shell("echo $v; cat /workspace/f")), ending}})
	e.Finish(id)
	suspended(t, e, id)
	awaitSnapshot(t, e, id, "the pack", tookPart(store.SnapshotPacked))
	awaitSnapshot(t, e, id, "the test", tookPart(store.SnapshotTested))
	list := snapshotsOf(t, e, id)
	last := list[len(list)-1]
	if last.Failed != "" {
		t.Fatalf("the snapshot failed its test: %s", last.Failed)
	}
	image := last.Snapshot.Snapshot
	if err := e.Machines().DropImage(image); err != nil {
		t.Fatal(err)
	}
	e.Say(id, "[packed] Go on.")
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 2 || got[1] != "kept /tmp\none\n20000000" {
		t.Fatalf("results %q\n%s", got, e.Describe(id))
	}
	if m := machinesOf(t, e, id); m[len(m)-1].Note != "" || m[2].Act != store.MachineRestored || m[2].Snapshot != image {
		t.Errorf("machines %+v", m)
	}
	// The next snapshot shares what it can.
	packs := func() (out []snapshotAt) {
		return slices.DeleteFunc(snapshotsOf(t, e, id), func(s snapshotAt) bool { return s.Act != store.SnapshotPacked })
	}
	first := packs()[0]
	awaitSnapshot(t, e, id, "the next pack", func(b store.Snapshot) bool {
		return b.Act == store.SnapshotPacked && b.Snapshot != first.Snapshot.Snapshot
	})
	second := packs()[1]
	t.Logf("the first stored %d KiB, the next %d KiB", first.Bytes>>10, second.Bytes>>10)
	if second.Parent != first.Snapshot.Snapshot || second.Bytes > first.Bytes/4 {
		t.Errorf("the second pack: %d bytes upon %q, the first %d bytes", second.Bytes, second.Parent, first.Bytes)
	}
	e.Check()
}

// TestSnapshotDamaged: where the image of the newest snapshot is damaged it is
// rebuilt from its pack; where that is gone too, the next older one comes back,
// and what was done since is done again (trial R2).
func TestSnapshotDamaged(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	var steps []llm.Step
	for i := range 4 {
		steps = append(steps, calls(shell(fmt.Sprintf("echo %d >> /workspace/f; cat /workspace/f", i))), ending)
	}
	id := e.Begin("damaged", llm.PlayScript{Steps: steps})
	e.Finish(id)
	damage := func() store.SnapshotRow {
		t.Helper()
		awaitPacked(t, e, id)
		rows, err := e.DB().Snapshots(t.Context(), "default", store.SessionID(id))
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(e.Dir(), "sandboxes", "snapshots", rows[0].ID, "pages.img")
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, 100_000); err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte{b[0] ^ 1}, 100_000); err != nil {
			t.Fatal(err)
		}
		return rows[0]
	}
	idle := func() {
		t.Helper()
		waitUntil(t, "that nobody owns the session", func() bool {
			s, err := e.DB().Session(context.Background(), "default", store.SessionID(id))
			return err == nil && s.Owner == "" && s.Status == store.StatusIdle
		})
	}
	restored := func() store.Machine {
		t.Helper()
		ms := slices.DeleteFunc(machinesOf(t, e, id), func(m store.Machine) bool { return m.Act != store.MachineRestored })
		if len(ms) == 0 {
			t.Fatalf("no machine was restored\n%s", e.Describe(id))
		}
		return ms[len(ms)-1]
	}
	idle()
	first := damage()
	e.Say(id, "[damaged] Go on.")
	e.Finish(id)
	if m := restored(); m.Snapshot != first.ID || len(m.Tried) != 0 || len(m.Missing) != 0 {
		t.Errorf("from the pack: %+v, want %s", m, first.ID)
	}
	idle()
	awaitPacked(t, e, id)
	second := damage()
	if second.ID == first.ID {
		t.Fatalf("no further snapshot was taken\n%s", e.Describe(id))
	}
	var p sandbox.Packed
	if err := json.Unmarshal(second.Packed, &p); err != nil {
		t.Fatal(err)
	}
	if err := e.Machines().RemoveBlobs(t.Context(), "default", []string{p.Recipe}); err != nil {
		t.Fatal(err)
	}
	e.Say(id, "[damaged] Go on.")
	e.Finish(id)
	if m := restored(); m.Snapshot == second.ID || len(m.Tried) != 1 || m.Tried[0].Snapshot != second.ID || len(m.Missing) != 0 {
		t.Errorf("from the older one: %+v", m)
	}
	if got := resultsOf(t, e, id); len(got) != 3 || got[2] != "0\n1\n2" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestSnapshotExpires: what is superseded or expired is dropped, its image and
// the packs that it alone needed go, and what is kept can be read.
func TestSnapshotExpires(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0, "keep_snapshots": 1}})
	var steps []llm.Step
	for i := range 4 {
		steps = append(steps, calls(shell(fmt.Sprintf("echo %d > /workspace/f", i))), ending)
	}
	id := e.Begin("expires", llm.PlayScript{Steps: steps})
	e.Finish(id)
	for i := range 3 {
		suspended(t, e, id)
		awaitPacked(t, e, id)
		if i == 0 {
			if _, err := e.Sessions().Checkpoint(t.Context(), "default", store.SessionID(id), "the first"); err != nil {
				t.Fatal(err)
			}
		}
		e.Say(id, fmt.Sprintf("[expires] Again %d.", i))
		e.Finish(id)
	}
	awaitPacked(t, e, id)
	waitUntil(t, "that all but three are gone", func() bool {
		rows, err := e.DB().Snapshots(context.Background(), "default", store.SessionID(id))
		return err == nil && len(rows) <= 3
	})
	rows, err := e.DB().Snapshots(t.Context(), "default", store.SessionID(id))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(rows); rows[n-1].Name != "the first" || rows[0].PackedAt.IsZero() {
		t.Errorf("kept: %+v", rows)
	}
	if err := e.Sessions().SweepImages(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	gone, err := e.DB().DroppedSnapshots(t.Context(), 10)
	if err != nil || len(gone) != 0 {
		t.Errorf("not removed: %v, %v", gone, err)
	}
	// Every kept one comes back from its pack.
	sealer, err := e.DB().Sealer(t.Context(), "default", store.SessionID(id))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range rows {
		if err := e.Machines().DropImage(x.ID); err != nil {
			t.Fatal(err)
		}
		var p sandbox.Packed
		if err := json.Unmarshal(x.Packed, &p); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Machines().Unpack(t.Context(), "default", &p, sealer); err != nil {
			t.Errorf("a kept snapshot: %v", err)
		}
	}
	// Deleting the session leaves nothing.
	if err := e.Sessions().Delete(t.Context(), "default", store.SessionID(id), "test"); err != nil {
		t.Fatal(err)
	}
	if err := e.Sessions().SweepImages(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	if images, err := e.Machines().Snapshots(); err != nil || len(images) != 0 {
		t.Errorf("images of a deleted session: %v, %v", images, err)
	}
	if files, err := filepath.Glob(filepath.Join(e.Dir(), "blobs", "default", "*")); err != nil || len(files) != 0 {
		t.Errorf("%d blobs of a deleted session, %v", len(files), err)
	}
}

// TestSnapshotPackDamaged: before a snapshot counts as tested its pack is read
// back, for that is what stays of it. One that is damaged while the image is there
// is packed anew, and nothing of the bad one is left.
func TestSnapshotPackDamaged(t *testing.T) {
	t.Parallel()
	for name, harm := range map[string]func(path string) error{
		"flipped": func(path string) error {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			b[len(b)/2] ^= 1
			return os.WriteFile(path, b, 0o600)
		},
		"gone": os.Remove,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
			arrived, release := e.Hold("session:snapshot_packed")
			id := e.Begin("harmed", llm.PlayScript{Steps: []llm.Step{
				calls(shell("v=kept; echo one > /workspace/f")), ending, calls(shell("echo $v; cat /workspace/f")), ending}})
			e.Finish(id)
			waitFor(t, "the pack", arrived) // its blobs are there, the entry is not
			blobs, err := filepath.Glob(filepath.Join(e.Dir(), "blobs", "default", "*"))
			if err != nil || len(blobs) == 0 {
				t.Fatalf("no blobs: %v", err)
			}
			largest := slices.MaxFunc(blobs, func(a, b string) int { return int(sizeOf(t, a) - sizeOf(t, b)) })
			if err := harm(largest); err != nil {
				t.Fatal(err)
			}
			release()
			awaitSnapshot(t, e, id, "the test", tookPart(store.SnapshotTested))
			var packs []snapshotAt
			for _, s := range snapshotsOf(t, e, id) {
				if s.Act == store.SnapshotPacked {
					packs = append(packs, s)
				}
			}
			if len(packs) != 2 || packs[0].Snapshot.Snapshot != packs[1].Snapshot.Snapshot {
				t.Fatalf("packs %+v", packs)
			}
			var p sandbox.Packed
			if err := json.Unmarshal(packs[1].Packed, &p); err != nil {
				t.Fatal(err)
			}
			now, err := filepath.Glob(filepath.Join(e.Dir(), "blobs", "default", "*"))
			if err != nil || len(now) != len(p.Blobs)+1 {
				t.Errorf("%d blobs, want the %d of the new pack and its recipe: %v", len(now), len(p.Blobs), err)
			}
			if err := e.Machines().DropImage(p.Snapshot); err != nil {
				t.Fatal(err)
			}
			e.Say(id, "[harmed] Go on.")
			e.Finish(id)
			if got := resultsOf(t, e, id); len(got) != 2 || got[1] != "kept\none" {
				t.Errorf("results %q\n%s", got, e.Describe(id))
			}
			e.Check()
		})
	}
}

func sizeOf(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// TestSnapshotKeeperCrash: killed behind each step of the keeper, the next life
// goes on: nothing that is kept is lost, nothing that is dropped stays.
func TestSnapshotKeeperCrash(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0, "keep_snapshots": 1}})
	var steps []llm.Step
	for i := range 4 {
		steps = append(steps, calls(shell(fmt.Sprintf("echo %d >> /workspace/f; cat /workspace/f", i))), ending)
	}
	id := e.Begin("keeper", llm.PlayScript{Steps: steps})
	e.Finish(id)
	// The first is tested and kept for that, so that each later one replaces the
	// one before it.
	waitUntil(t, "the test of the first snapshot", func() bool {
		rows, err := e.DB().Snapshots(context.Background(), "default", store.SessionID(id))
		return err == nil && len(rows) > 0 && !rows[0].TestedAt.IsZero()
	})
	for i, point := range []string{"session:snapshot_packed", "session:snapshot_dropped", "session:snapshot_removed"} {
		e.Arm(testenv.Fault{Point: point, N: 1})
		e.Say(id, fmt.Sprintf("[keeper] Again %d.", i))
		if point != "session:snapshot_removed" { // a sweep comes to that one
			waitFor(t, "the fault at "+point, e.Fired())
		} else {
			e.Finish(id)
			awaitPacked(t, e, id)
			if err := e.Sessions().SweepImages(t.Context(), 1); err == nil {
				t.Errorf("nothing was removed\n%s", e.Describe(id))
			}
		}
		e.Crash()
		e.Restart()
		e.Finish(id)
		if err := e.Sessions().KeepNow(t.Context(), "default", store.SessionID(id)); err != nil {
			t.Errorf("after %s: %v", point, err)
		}
		awaitPacked(t, e, id)
	}
	if err := e.Sessions().SweepImages(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	if gone, err := e.DB().DroppedSnapshots(t.Context(), 10); err != nil || len(gone) != 0 {
		t.Errorf("not removed: %v, %v", gone, err)
	}
	rows, err := e.DB().Snapshots(t.Context(), "default", store.SessionID(id))
	if err != nil {
		t.Fatal(err)
	}
	sealer, err := e.DB().Sealer(t.Context(), "default", store.SessionID(id))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range rows {
		var p sandbox.Packed
		if x.PackedAt.IsZero() || json.Unmarshal(x.Packed, &p) != nil {
			continue
		}
		if err := e.Machines().DropImage(x.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Machines().Unpack(t.Context(), "default", &p, sealer); err != nil {
			t.Errorf("a kept snapshot: %v", err)
		}
	}
	if got := resultsOf(t, e, id); got[len(got)-1] != "0\n1\n2\n3" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}

// awaitPacked waits until the newest snapshot is packed.
func awaitPacked(t testing.TB, e *testenv.Env, id string) {
	t.Helper()
	waitUntil(t, "the pack of the newest snapshot", func() bool {
		rows, err := e.DB().Snapshots(context.Background(), "default", store.SessionID(id))
		return err == nil && len(rows) > 0 && !rows[0].PackedAt.IsZero()
	})
}

// TestSnapshotUnnamed: a process that dies between an image and its entry leaves
// an image that nobody names. It is swept, and never one whose taker lives.
func TestSnapshotUnnamed(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	e.Arm(testenv.Fault{Point: "session:before_snapshot", N: 1})
	id := e.Begin("unnamed", llm.PlayScript{Steps: []llm.Step{calls(shell("echo x > /workspace/f")), {Text: "Done.", DelayMS: 1000}}})
	waitFor(t, "the fault", e.Fired())
	e.Crash()
	e.Restart()
	e.Finish(id)
	images, err := e.Machines().Snapshots()
	if err != nil {
		t.Fatal(err)
	}
	rows, err := e.DB().Snapshots(t.Context(), "default", store.SessionID(id))
	if err != nil {
		t.Fatal(err)
	}
	if len(images) != len(rows)+1 {
		t.Fatalf("%d images, %d named ones\n%s", len(images), len(rows), e.Describe(id))
	}
	release := e.Sessions().Taking()
	if err := e.Sessions().SweepImages(t.Context(), 3); err != nil {
		t.Fatal(err)
	}
	if now, err := e.Machines().Snapshots(); err != nil || len(now) != len(images) {
		t.Errorf("swept while a snapshot was under way: %d of %d left, %v", len(now), len(images), err)
	}
	release()
	if err := e.Sessions().SweepImages(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	if now, err := e.Machines().Snapshots(); err != nil || len(now) != len(rows) {
		t.Errorf("after the sweep %d images, want %d, %v", len(now), len(rows), err)
	}
	e.Check()
}

// TestCheckpoint: a running machine is saved under a name, a suspended one's
// snapshot gets it; names are unique, and a session without a machine says so.
func TestCheckpoint(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"snapshot": "manual", "linger_seconds": 600}})
	id := e.Begin("named", llm.PlayScript{Steps: []llm.Step{calls(shell("echo x > /workspace/f")), ending}})
	e.Finish(id)
	ask := func(id, name string) (store.SnapshotRow, error) {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.Deadline)
		defer cancel()
		return e.Sessions().Checkpoint(ctx, "default", store.SessionID(id), name)
	}
	x, err := ask(id, "before the move")
	if err != nil {
		t.Fatalf("%v\n%s", err, e.Describe(id))
	}
	if x.Name != "before the move" || x.Why != "manual" {
		t.Errorf("made %+v", x)
	}
	if _, err := ask(id, "before the move"); !errors.Is(err, session.ErrState) {
		t.Errorf("the same name again: %v", err)
	}
	y, err := ask(id, "again")
	if err != nil || y.ID == "" {
		t.Fatalf("a second one: %+v, %v", y, err)
	}
	plain := e.Begin("plain", llm.PlayScript{Steps: []llm.Step{ending}})
	e.Finish(plain)
	if _, err := ask(plain, "nothing"); !errors.Is(err, session.ErrState) || !strings.Contains(err.Error(), "no machine") {
		t.Errorf("without a machine: %v", err)
	}
	e.Check()
}

func TestCheckpointName(t *testing.T) {
	for name, ok := range map[string]bool{"a": true, "before the move": true, "vor dem Umzug №1": true, "12a": true, strings.Repeat("ä", 64): true,
		"": false, " a": false, "a ": false, "12": false, "sevt_x": false, "snap-x": false, "a\nb": false, "a\x00": false, "\xff": false, strings.Repeat("ä", 65): false} {
		if err := session.CheckpointName(name); (err == nil) != ok || err != nil && !errors.Is(err, session.ErrInput) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// TestExpired: what is kept of a session's snapshots.
func TestExpired(t *testing.T) {
	at := time.Unix(1e9, 0)
	row := func(seq int, marks string) store.SnapshotRow {
		x := store.SnapshotRow{ID: fmt.Sprint(seq), Seq: store.Seq(seq)}
		for _, m := range marks {
			switch m {
			case 'p':
				x.PackedAt = at
			case 't':
				x.TestedAt = at
			case 'n':
				x.Name = "name" + x.ID
			case 'f':
				x.Failed = "damaged"
			}
		}
		return x
	}
	for _, c := range []struct {
		name  string
		rows  []string // marks, the newest first; seqs count down
		keep  int
		forks []store.Seq
		want  []string
	}{
		{"nothing", nil, 5, nil, nil},
		{"one", []string{""}, 1, nil, nil},
		{"raw ones are superseded but for two", []string{"", "", "", ""}, 5, nil, []string{"2", "1"}},
		{"packed ones are kept", []string{"", "", "p", "", "p"}, 5, nil, []string{"2"}},
		{"the newest few", []string{"p", "p", "p", "p"}, 2, nil, []string{"2", "1"}},
		{"named ones", []string{"p", "p", "pn", "n"}, 1, nil, []string{"3"}},
		{"the newest restore-tested one", []string{"p", "p", "pt", "pt"}, 1, nil, []string{"3", "1"}},
		{"damaged ones do not count", []string{"pf", "pf", "p", "p"}, 1, nil, []string{"4", "3", "1"}},
		{"nothing but damaged ones", []string{"pf", "pf"}, 1, nil, []string{"1"}},
		{"one that was tested well and then not", []string{"p", "ptf"}, 1, nil, []string{"1"}},
		{"what a fork begins with", []string{"p", "p", "p", "p"}, 1, []store.Seq{3, 1}, []string{"2"}},
		{"a fork before all", []string{"p", "p"}, 1, []store.Seq{0}, []string{"1"}},
		{"the older raw one of two", []string{"", ""}, 1, nil, []string{"1"}},
	} {
		var rows []store.SnapshotRow
		for i, m := range c.rows {
			rows = append(rows, row(len(c.rows)-i, m))
		}
		var got []string
		for _, x := range session.Expired(rows, c.keep, c.forks) {
			got = append(got, x.ID)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
	}
}

// TestStoredAfterSuspend: under policy stored an irreversible call waits until
// the state that the machine was suspended into is packed, also when nothing has
// brought the machine back yet.
func TestStoredAfterSuspend(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0, "output_commit": "stored"}})
	id := e.Begin("store", llm.PlayScript{Steps: []llm.Step{calls(shell("echo x > /workspace/f")), ending, acting("buy", "store"), ending}})
	release := e.Sessions().HoldPacks()
	defer release()
	e.Finish(id)
	suspended(t, e, id)
	e.Say(id, "[store] Buy.")
	await(t, e, id, "the third output", outputs(3))
	release()
	e.Finish(id)
	if n := e.World.Executions("buy", "store"); n != 1 {
		t.Errorf("bought %d times\n%s", n, e.Describe(id))
	}
	e.Check()
}

// TestImageElsewhere: a snapshot that is not packed and whose image is not on
// this node is not looked at again and again.
func TestImageElsewhere(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	id := e.Begin("else", llm.PlayScript{Steps: []llm.Step{calls(shell("echo x > /workspace/f")), ending}})
	release := e.Sessions().HoldPacks()
	e.Finish(id)
	suspended(t, e, id)
	list := snapshotsOf(t, e, id)
	if err := e.Machines().DropImage(list[len(list)-1].Snapshot.Snapshot); err != nil {
		t.Fatal(err)
	}
	release()
	keeper := session.New(session.Config{DB: e.DB(), Sandboxes: e.Machines(), Logger: slog.New(slog.DiscardHandler)})
	if err := keeper.KeepNow(t.Context(), "default", store.SessionID(id)); err != nil {
		t.Fatal(err)
	}
	if left, ok := keeper.NextLook("default", store.SessionID(id)); ok && left < 10*time.Second {
		t.Errorf("it is looked at again in %v", left)
	}
}
