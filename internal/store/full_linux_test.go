package store_test

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/planaria/planaria/internal/store"
)

// A full disk refuses appends with a readable error; nothing acknowledged is
// lost, and with space the session goes on (attack E19).
func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=3m"); err != nil {
		t.Skipf("no right to mount a small file system: %v", err)
	}
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
	e := newEnv(t, "sqlite:"+filepath.Join(dir, "data", "planaria.db"))
	id, l := e.started()
	var acknowledged store.Seq
	var full error
	for i := 0; i < 1000 && full == nil; i++ {
		out, err := e.db.Append(t.Context(), l, entries(event("x", "text", strings.Repeat("y", 30_000))))
		if err == nil {
			acknowledged = out[0].Seq
		}
		full = err
	}
	if full == nil || !strings.Contains(full.Error(), "full") {
		t.Fatalf("append on a full disk = %v", full)
	}
	if got := e.session(id).Head; got != acknowledged {
		t.Errorf("head = %d, acknowledged %d", got, acknowledged)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT, "size=64m"); err != nil {
		t.Fatal(err)
	}
	e.must(l, entries(event("again")))
	e.must(l, store.Append{Entries: []store.Draft{idle()}, Rest: true})
	e.sound(id)
	e.crash()
	e.sound(id)
}
