//go:build linux

package sandbox_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/sandbox"
)

// TestClosedMakesNothing: once Close has returned the folder may be another
// process's; nothing that was asked for before or after makes anything in it.
func TestClosedMakesNothing(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("lives")
	m := e.snapshot(s)
	begun := make(chan error, 2)
	for _, id := range []string{"one", "two"} {
		go func() {
			_, err := e.r.Start(context.Background(), sandbox.Spec{Workspace: "w1", ID: id, Fence: 1})
			begun <- err
		}()
	}
	for list := []os.DirEntry(nil); len(list) < 2; {
		list, _ = os.ReadDir(filepath.Join(e.dir, "live"))
	}
	if err := e.r.Close(); err != nil {
		t.Fatal(err)
	}
	live := 1
	for range 2 {
		select {
		case err := <-begun:
			if err == nil {
				live++
			}
		case <-time.After(10 * time.Millisecond):
			t.Error("a start goes on after Close")
		}
	}
	if err := e.r.Close(); err != nil {
		t.Errorf("closed again: %v", err)
	}
	if _, err := e.r.Start(t.Context(), sandbox.Spec{Workspace: "w1", ID: "late", Fence: 1}); err == nil {
		t.Error("a start after Close")
	}
	if err := e.r.Warm(t.Context(), sandbox.Spec{}, 1); err == nil {
		t.Error("a pool is filled after Close")
	}
	if _, _, err := e.r.Restore(t.Context(), m, sandbox.Spec{Workspace: "w1", ID: "late", Fence: 1}); err == nil {
		t.Error("a restore after Close")
	}
	if list, _ := os.ReadDir(filepath.Join(e.dir, "live")); len(list) != live {
		t.Errorf("%d folders, want %d", len(list), live)
	}
	e.reopen(sandbox.Config{Dir: e.dir, Binary: binary(t), Blobs: e.blobs, StartTimeout: time.Minute})
	if got := len(e.r.Live()); got != live {
		t.Errorf("%d live, want %d", got, live)
	}
}

// TestOldPool: a sandbox that was created before the machine's programs changed
// is not taken: its snapshots would name a root that is not there any more.
func TestOldPool(t *testing.T) {
	t.Parallel()
	e := open(t)
	if err := e.r.Warm(t.Context(), sandbox.Spec{}, 1); err != nil {
		t.Fatal(err)
	}
	e.r.AgePool()
	s := e.start("fresh")
	m := e.snapshot(s)
	if want, err := e.r.RootDigest(t.Context(), sandbox.Root{}); err != nil || m.Root.Digest != want {
		t.Errorf("root %q, %v, want %q", m.Root.Digest, err, want)
	}
	if list, _ := os.ReadDir(filepath.Join(e.dir, "live")); len(list) != 1 {
		t.Errorf("%d folders", len(list))
	}
	// An end goes through although who asks for it has left.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Kill(ctx); err != nil {
		t.Error(err)
	}
	if list, _ := os.ReadDir(filepath.Join(e.dir, "live")); len(list) != 0 {
		t.Errorf("%d folders after the end", len(list))
	}
}

// madeUp puts an image into the folder that no sandbox has made.
func madeUp(t *testing.T, r *sandbox.Runtime, runtime string) *sandbox.Manifest {
	t.Helper()
	m := &sandbox.Manifest{Version: 1, ID: "snap-" + strings.Repeat("5", 32), Workspace: "w1", Sandbox: "s", Runtime: runtime}
	dir := r.SnapshotDir(m.ID)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	page := make([]byte, 4096)
	var body []byte
	for i := range 3000 {
		page[0], page[1] = byte(i), byte(i>>8)
		body = append(body, page...)
	}
	body = append(body, "a short end"...)
	sum := sha256.Sum256(body)
	m.Files = []sandbox.ImageFile{{Name: "pages.img", Size: int64(len(body)), SHA256: hex.EncodeToString(sum[:])}}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"pages.img": body, "manifest.json": b} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// TestUnpackTogether: forks of one session bring back one snapshot at the same
// moment. Each gets it, none of them takes it for damaged.
func TestUnpackTogether(t *testing.T) {
	dir := t.TempDir()
	blobs, err := blob.Open(filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	defer blobs.Close()
	r, err := sandbox.Open(t.Context(), sandbox.Config{Dir: filepath.Join(dir, "sandboxes"), Blobs: blobs})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	key := newSealer(t)
	m := madeUp(t, r, strings.Repeat("a", 64))
	p, err := r.Pack(t.Context(), m, nil, key)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := r.DropImage(m.ID); err != nil {
			t.Fatal(err)
		}
		var wait sync.WaitGroup
		for range 6 {
			wait.Go(func() {
				got, err := r.Unpack(t.Context(), "w1", p, key)
				if err == nil {
					err = r.VerifyImage(got)
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
	}
	if list, _ := os.ReadDir(filepath.Join(dir, "sandboxes", "snapshots")); len(list) != 1 {
		t.Errorf("%d folders of images", len(list))
	}
	// A blob that is missing, cut short, or another one of the same pack.
	if err := r.DropImage(m.ID); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		do   func(path string) error
	}{
		{"cut short", func(path string) error { return os.Truncate(path, 100) }},
		{"missing", os.Remove},
	} {
		path := filepath.Join(dir, "blobs", "w1", p.Blobs[0])
		whole, err := os.ReadFile(path)
		if err == nil {
			err = tt.do(path)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Unpack(t.Context(), "w1", p, key); err == nil {
			t.Errorf("a pack that is %s was unpacked", tt.name)
		}
		if list, _ := os.ReadDir(filepath.Join(dir, "sandboxes", "snapshots")); len(list) != 0 {
			t.Errorf("%s: %d folders of images", tt.name, len(list))
		}
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCollectKeepsTemplates: the runtime of a template is needed although no
// session's snapshot names it.
func TestCollectKeepsTemplates(t *testing.T) {
	dir := t.TempDir()
	r, err := sandbox.Open(t.Context(), sandbox.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	runtime := strings.Repeat("a", 64)
	m := madeUp(t, r, runtime)
	if err := r.KeepTemplate(sandbox.Template{Key: strings.Repeat("7", 64), Workspace: "w1", Snapshot: m.ID}); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "runtimes", runtime), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := r.CollectBinaries(t.Context(), nil, time.Now().Add(time.Hour), true); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "runtimes", runtime)); err != nil {
		t.Error("the runtime of a template was removed")
	}
}
