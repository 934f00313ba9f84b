package sandbox_test

import (
	"context"
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
	best := time.Hour
	for range 5 {
		began := time.Now()
		r, err := sandbox.Open(t.Context(), cfg)
		if errors.Is(err, sandbox.ErrUnsupported) {
			t.Skipf("no sandboxes here: %v", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(began))
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if t.Logf("opened in %v", best); best > 5*time.Millisecond {
		t.Errorf("opening takes %v, want at most 5 ms", best)
	}
	if kept, _ := os.ReadDir(filepath.Join(cfg.Dir, "runtimes")); len(kept) != 0 {
		t.Errorf("opening kept %v", kept)
	}
	var took [2]time.Duration
	var digests [2]string
	for i := range 2 {
		r, err := sandbox.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if digests[i], err = r.Binary(t.Context()); err != nil {
			t.Fatal(err)
		}
		took[i] = time.Since(began)
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("kept in %v, found again in %v", took[0], took[1])
	if digests[0] != digests[1] || took[1] > 20*time.Millisecond {
		t.Errorf("digests %v, found again in %v", digests, took[1])
	}
	// A file that is written over is another binary; the kept one is as it was.
	if err := os.WriteFile(big, []byte("other"), 0o755); err != nil {
		t.Fatal(err)
	}
	r, err := sandbox.Open(t.Context(), cfg)
	if err != nil {
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
