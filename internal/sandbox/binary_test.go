package sandbox_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/sandbox"
)

// TestOpenIsCheap: every server opens a Runtime; without sandboxes that reads
// and copies no binary. What the first start had to do, the next process finds.
func TestOpenIsCheap(t *testing.T) {
	dir := t.TempDir()
	big := filepath.Join(dir, "big")
	if err := os.WriteFile(big, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(big, 200<<20); err != nil {
		t.Fatal(err)
	}
	cfg := sandbox.Config{Dir: filepath.Join(dir, "s"), Binary: big}
	r, err := sandbox.Open(t.Context(), cfg)
	if errors.Is(err, sandbox.ErrUnsupported) {
		t.Skipf("no sandboxes here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if kept, _ := os.ReadDir(filepath.Join(cfg.Dir, "runtimes")); len(kept) != 0 {
		t.Errorf("opening kept %v", kept)
	}
	var digests [2]string
	var kept [2]os.FileInfo
	for i := range 2 {
		r, err := sandbox.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if digests[i], err = r.Binary(t.Context()); err != nil {
			t.Fatal(err)
		}
		list, _ := filepath.Glob(filepath.Join(cfg.Dir, "runtimes", digests[i], "*"))
		if len(list) != 1 {
			t.Fatalf("kept: %v", list)
		}
		if kept[i], err = os.Stat(list[0]); err != nil {
			t.Fatal(err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// One that is copied again is another file.
	if digests[0] != digests[1] || !os.SameFile(kept[0], kept[1]) {
		t.Errorf("kept again: %v", digests)
	}
	// A file that is written over is another binary; the kept one is as it was.
	if err := os.WriteFile(big, []byte("other"), 0o755); err != nil {
		t.Fatal(err)
	}
	if r, err = sandbox.Open(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if d, err := r.Binary(t.Context()); err != nil || d == digests[0] {
		t.Errorf("after an upgrade in place: %s, %v", d, err)
	}
	list, _ := filepath.Glob(filepath.Join(cfg.Dir, "runtimes", digests[0], "*"))
	if len(list) != 1 {
		t.Fatalf("kept: %v", list)
	}
	if info, err := os.Stat(list[0]); err != nil || info.Size() != 200<<20 {
		t.Errorf("the kept binary has changed: %v", err)
	}
}

// TestCarriedProgram: a binary that is not what sandboxes run has that within
// itself; it is found again like the binary itself, and both are told apart.
func TestCarriedProgram(t *testing.T) {
	t.Parallel()
	program, err := os.ReadFile(binary(t))
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.Executable() // of this test, which holds no gVisor
	if err != nil {
		t.Fatal(err)
	}
	carries := func(c *sandbox.Config) { c.Binary, c.Program = own, string(program) }
	e := open(t, carries)
	s := e.start("carried")
	if got := e.sh(s, "echo $((6*7))"); got != "42" {
		t.Errorf("its shell says %q", got)
	}
	sum := sha256.Sum256(program)
	for again := range 2 {
		if d, err := e.r.Binary(t.Context()); err != nil || d != hex.EncodeToString(sum[:]) {
			t.Errorf("%d: runs %s, %v, want the program", again, d, err)
		}
		if again == 0 {
			if err := e.r.Close(); err != nil {
				t.Fatal(err)
			}
			e.reopen(sandbox.Config{Dir: e.dir, Binary: own, Program: string(program), Blobs: e.blobs})
		}
	}
	if err := e.r.Close(); err != nil {
		t.Fatal(err)
	}
	e.reopen(sandbox.Config{Dir: e.dir, Binary: own, Blobs: e.blobs})
	if d, err := e.r.Binary(t.Context()); err != nil || d == hex.EncodeToString(sum[:]) {
		t.Errorf("the binary itself = %s, %v", d, err)
	}
	s, err = e.r.Find(t.Context(), "w1", "carried", 2)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Kill(t.Context()); err != nil {
		t.Error(err)
	}
	for _, f := range sandbox.Check(sandbox.Config{Binary: own, Program: string(program)}) {
		if f.What == "static binary" && !f.OK {
			t.Errorf("the program is %s", f.Says)
		}
	}
}

// puts is a blob store whose uploads of binaries wait, and fail at first.
type puts struct {
	*blob.Folder
	allow chan struct{}
	fail  atomic.Int32
	count atomic.Int32
}

func (p *puts) PutReader(ctx context.Context, ws string, r io.Reader) (string, int64, error) {
	if ws != "planaria-runtimes" {
		return p.Folder.PutReader(ctx, ws, r)
	}
	select {
	case <-p.allow:
	case <-ctx.Done():
		return "", 0, ctx.Err()
	}
	p.count.Add(1)
	if p.fail.Add(-1) >= 0 {
		return "", 0, errors.New("no space left")
	}
	return p.Folder.PutReader(ctx, ws, r)
}

// TestBinaryIsStored: a start does not wait for the upload of the binary, a
// snapshot does, and none exists without it.
func TestBinaryIsStored(t *testing.T) {
	t.Parallel()
	p := &puts{allow: make(chan struct{})}
	e := open(t, func(c *sandbox.Config) {
		p.Folder = c.Blobs.(*blob.Folder)
		c.Blobs = p
	})
	s := e.start("stored")
	e.sh(s, "true")
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if _, err := s.Snapshot(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a snapshot whose binary is not stored: %v", err)
	}
	p.fail.Store(2)
	close(p.allow)
	if _, err := s.Snapshot(t.Context()); err == nil {
		t.Error("a snapshot although the binary cannot be stored")
	}
	if ids, err := e.r.Snapshots(); err != nil || len(ids) != 0 {
		t.Errorf("snapshots %v, %v", ids, err)
	}
	m := e.snapshot(s)
	if b, err := p.Open(t.Context(), "planaria-runtimes", m.Runtime); err != nil {
		t.Error(err)
	} else {
		_ = b.Close()
	}
	// The next process does not store it again.
	if err := e.r.Close(); err != nil {
		t.Fatal(err)
	}
	before := p.count.Load()
	e.reopen(sandbox.Config{Dir: e.dir, Binary: binary(t), Blobs: p})
	s, err := e.r.Find(t.Context(), "w1", "stored", 2)
	if err != nil {
		t.Fatal(err)
	}
	e.snapshot(s)
	if n := p.count.Load() - before; n != 0 {
		t.Errorf("stored %d times again", n)
	}
}
