package sandbox_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/sandbox"
)

// TestCollectBinaries: a runtime stays while this program, a sandbox, an image
// or a snapshot somewhere needs it, and goes with the last of them.
func TestCollectBinaries(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("collect")
	m := e.snapshot(s)
	old, wanted, young := strings.Repeat("a", 64), strings.Repeat("b", 64), strings.Repeat("c", 64)
	long := time.Now().Add(-48 * time.Hour)
	for _, d := range []string{old, wanted, young} {
		dir := filepath.Join(e.dir, "runtimes", d)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if d == young {
			continue
		}
		if err := os.Chtimes(dir, long, long); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(filepath.Join(e.dir, "runtimes", m.Runtime), long, long); err != nil {
		t.Fatal(err)
	}
	extra, err := e.blobs.Put(t.Context(), "planaria-runtimes", []byte("an older program"))
	if err != nil {
		t.Fatal(err)
	}
	stored := func() (out []string) {
		t.Helper()
		list, err := e.blobs.List(t.Context(), "planaria-runtimes")
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range list {
			out = append(out, b.Name)
		}
		return out
	}
	before := time.Now().Add(-time.Hour)
	if err := e.r.CollectBinaries(t.Context(), []string{wanted}, before, false); err != nil {
		t.Fatal(err)
	}
	there := func(d string) bool {
		_, err := os.Stat(filepath.Join(e.dir, "runtimes", d))
		return err == nil
	}
	if there(old) || !there(wanted) || !there(young) || !there(m.Runtime) {
		t.Errorf("old %v, wanted %v, young %v, own %v", there(old), there(wanted), there(young), there(m.Runtime))
	}
	if got := stored(); len(got) != 2 || !slices.Contains(got, extra) {
		t.Errorf("stored not long ago: %v", got)
	}
	// Long after, the store keeps what is needed; with other nodes, everything.
	late := time.Now().Add(time.Hour)
	if err := e.r.CollectBinaries(t.Context(), nil, late, true); err != nil {
		t.Fatal(err)
	}
	if got := stored(); len(got) != 2 {
		t.Errorf("stored, with other nodes: %v", got)
	}
	if err := e.r.CollectBinaries(t.Context(), nil, late, false); err != nil {
		t.Fatal(err)
	}
	if got := stored(); len(got) != 1 || got[0] != m.Runtime {
		t.Errorf("stored at the end: %v", got)
	}
	if there(wanted) || there(young) || !there(m.Runtime) {
		t.Errorf("at the end: wanted %v, young %v, own %v", there(wanted), there(young), there(m.Runtime))
	}
	c, _ := e.restore(m, "copy")
	if got := e.sh(c, "echo lives"); got != "lives" {
		t.Errorf("restored: %q", got)
	}
}

// TestCollectFormerBinary: after an upgrade from a binary that was gVisor itself to
// one that carries it, under the same name, and back, the other one's runtime goes.
func TestCollectFormerBinary(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	installed := filepath.Join(dir, "planaria")
	if err := os.WriteFile(installed, []byte("itself"), 0o755); err != nil {
		t.Fatal(err)
	}
	blobs, err := blob.Open(filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"", "carried", ""} {
		r, err := sandbox.Open(t.Context(), sandbox.Config{Dir: filepath.Join(dir, "sandboxes"), Binary: installed, Program: program, Blobs: blobs})
		if errors.Is(err, sandbox.ErrUnsupported) {
			t.Skipf("no sandboxes here: %v", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		// Before and after the first sandbox.
		if err := r.CollectBinaries(t.Context(), nil, time.Now().Add(time.Hour), false); err != nil {
			t.Fatal(err)
		}
		digest, err := r.Binary(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := r.CollectBinaries(t.Context(), nil, time.Now().Add(time.Hour), false); err != nil {
			t.Fatal(err)
		}
		kept, _ := filepath.Glob(filepath.Join(dir, "sandboxes", "runtimes", strings.Repeat("?", 64)))
		if len(kept) != 1 || filepath.Base(kept[0]) != digest {
			t.Errorf("program %q: kept %v, want %s only", program, kept, digest)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
