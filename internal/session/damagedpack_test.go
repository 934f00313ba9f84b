package session_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// damageImage changes one bit of a snapshot's image.
func damageImage(t *testing.T, e *testenv.Env, snapshot string) {
	t.Helper()
	path := filepath.Join(e.Dir(), "sandboxes", "snapshots", snapshot, "pages.img")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[100_000] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func newestSnapshot(t *testing.T, e *testenv.Env, id string) store.SnapshotRow {
	t.Helper()
	rows, err := e.DB().Snapshots(t.Context(), "default", store.SessionID(id))
	if err != nil || len(rows) == 0 {
		t.Fatalf("snapshots %v: %v", rows, err)
	}
	return rows[0]
}

// TestSnapshotOnlyItsImage: a pack that cannot be read back, and cannot be made
// anew, may be worth nothing: the image stays where it is for as long.
func TestSnapshotOnlyItsImage(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	arrived, release := e.Hold("session:snapshot_packed")
	id := e.Begin("only", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo one > /workspace/f")), ending, calls(shell("cat /workspace/f")), ending}})
	e.Finish(id)
	waitFor(t, "the pack", arrived) // its blobs are there, the entry is not
	dir := filepath.Join(e.Dir(), "blobs", "default")
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // where nothing can be stored
		t.Fatal(err)
	}
	release()
	waitUntil(t, "the proof that fails", func() bool { return bytes.Contains(e.Logs.All(), []byte("could not be proved here")) })
	x := newestSnapshot(t, e, id)
	if err := e.Sessions().KeepLater(t.Context(), "default", store.SessionID(id), 2*time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Machines().ReadSnapshot(x.ID); err != nil {
		t.Errorf("the only image is gone: %v", err)
	}
	e.Say(id, "[only] Go on.")
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 2 || got[1] != "one" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	// The environment's own look at the end needs what lies there.
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	e.Check()
}

// TestSnapshotImageDamaged: an image that is damaged before its snapshot is
// packed, or together with its pack, is told of in the log: no other node waits
// for it, and what is older is not let go for it.
func TestSnapshotImageDamaged(t *testing.T) {
	t.Parallel()
	for name, packed := range map[string]bool{"before the pack": false, "with the pack": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
			var arrived <-chan struct{}
			var release func()
			if packed {
				arrived, release = e.Hold("session:snapshot_packed")
			} else {
				release = e.Sessions().HoldPacks()
				t.Cleanup(release)
			}
			id := e.Begin("hurt", llm.PlayScript{Steps: []llm.Step{calls(shell("echo one > /workspace/f")), ending}})
			e.Finish(id)
			suspended(t, e, id)
			if packed {
				waitFor(t, "the pack", arrived)
				blobs, err := filepath.Glob(filepath.Join(e.Dir(), "blobs", "default", "*"))
				if err != nil || len(blobs) == 0 {
					t.Fatalf("no blobs: %v", err)
				}
				largest := slices.MaxFunc(blobs, func(a, b string) int { return int(sizeOf(t, a) - sizeOf(t, b)) })
				if err := os.Remove(largest); err != nil {
					t.Fatal(err)
				}
			}
			x := newestSnapshot(t, e, id)
			damageImage(t, e, x.ID)
			release()
			awaitSnapshot(t, e, id, "the failed test", func(b store.Snapshot) bool {
				return b.Act == store.SnapshotTested && b.Snapshot == x.ID && strings.Contains(b.Failed, "damaged")
			})
			if now := newestSnapshot(t, e, id); now.Failed == "" {
				t.Errorf("snapshot %s", fmt.Sprint(now))
			}
		})
	}
}

// TestSnapshotImageLost: an image that is gone from the disk of the node that took
// it, and is not in the blob store, is nowhere. The log tells, or another node
// would wait for it as long as this one lives.
func TestSnapshotImageLost(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	release := e.Sessions().HoldPacks()
	t.Cleanup(release)
	id := e.Begin("gone", llm.PlayScript{Steps: []llm.Step{calls(shell("echo one > /workspace/f")), ending}})
	e.Finish(id)
	suspended(t, e, id)
	x := newestSnapshot(t, e, id)
	if err := e.Machines().DropImage(x.ID); err != nil {
		t.Fatal(err)
	}
	release()
	awaitSnapshot(t, e, id, "the word of its loss", func(b store.Snapshot) bool {
		return b.Act == store.SnapshotTested && b.Snapshot == x.ID && b.Failed != ""
	})
}
