package sandbox_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// TestTemplate: a snapshot becomes what others begin with, under a name and an
// identity of their own; it is no snapshot of a session any more; dropped, it is
// gone with its image, and what began with it lives on.
func TestTemplate(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("maker", func(s *sandbox.Spec) { s.Env = []string{"MADE=once"} })
	e.sh(s, "mkdir -p /opt/tools && echo tool >/opt/tools/t")
	m := e.snapshot(s)
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	if err := s.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	key := strings.Repeat("ab", 32)
	if _, _, err := e.r.Template(key); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("before it was kept: %v", err)
	}
	if err := e.r.KeepTemplate(sandbox.Template{Key: "../escape", Snapshot: m.ID}); err == nil {
		t.Error("a key that is a path was taken")
	}
	if err := e.r.KeepTemplate(sandbox.Template{Key: key, Workspace: "w1", Recipe: "r", Snapshot: m.ID, At: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if ids, err := e.r.Snapshots(); err != nil || slices.Contains(ids, m.ID) {
		t.Errorf("it is listed among the snapshots: %v, %v", ids, err)
	}
	_, found, err := e.r.Template(key)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	var last *sandbox.Sandbox
	for _, id := range []string{"one", "two"} {
		back, _ := e.restore(found, id)
		if got := e.sh(back, "echo $(</opt/tools/t) $MADE"); got != "tool once" {
			t.Errorf("%s: %q", id, got)
		}
		names[e.sh(back, "hostname; cat /etc/machine-id")] = true
		last = back
	}
	if len(names) != 2 {
		t.Errorf("identities %v, want two", names)
	}
	if _, _, err := e.r.Restore(ctx, found, sandbox.Spec{Workspace: "w2", ID: "x"}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("for another workspace: %v, want ErrNotFound", err)
	}
	if err := e.r.DropTemplate(key); err != nil {
		t.Fatal(err)
	}
	if _, err := e.r.ReadSnapshot(m.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("its image after the drop: %v", err)
	}
	if got := e.sh(last, "cat /opt/tools/t"); got != "tool" {
		t.Errorf("what began with it: %q", got)
	}
}

// TestHostNote: a start that took an earlier process's wrong word for what /usr
// holds ends up with the true one, and a restore never believes it.
func TestHostNote(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "sandboxes")
	if err := os.MkdirAll(filepath.Join(dir, "roots"), 0o700); err != nil {
		t.Fatal(err)
	}
	wrong := strings.Repeat("0", 64)
	b, err := json.Marshal(map[string]string{"stamp": sandbox.HostStamp(), "digest": wrong})
	if err != nil {
		t.Fatal(err)
	}
	note := filepath.Join(dir, "roots", "host.json")
	if err := os.WriteFile(note, b, 0o600); err != nil {
		t.Fatal(err)
	}
	binary(t)
	sandbox.ForgetListing()
	e := open(t, func(c *sandbox.Config) { c.Dir = dir })
	s := e.start("noted")
	ctx, cancel := contextFor(2 * time.Minute)
	defer cancel()
	select {
	case <-e.r.HostListed():
	case <-ctx.Done():
		t.Fatal("the listing does not end")
	}
	digest, err := e.r.RootDigest(ctx, sandbox.Root{})
	if err != nil || digest == wrong {
		t.Fatalf("digest %s, %v", digest, err)
	}
	if b, err := os.ReadFile(note); err != nil || !strings.Contains(string(b), digest) {
		t.Errorf("the note says %s, %v", b, err)
	}
	m := e.snapshot(s)
	if m.Root.Digest != digest {
		t.Errorf("the snapshot names %s, want %s", m.Root.Digest, digest)
	}
	back, _ := e.restore(m, "back")
	e.sh(back, "true")
	stale := *m
	stale.Root.Digest = wrong
	if _, _, err := e.r.Restore(ctx, &stale, sandbox.Spec{Workspace: "w1", ID: "stale"}); !errors.Is(err, sandbox.ErrRoot) {
		t.Errorf("a snapshot of another /usr: %v, want ErrRoot", err)
	}
}
