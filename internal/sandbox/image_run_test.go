package sandbox_test

import (
	"archive/tar"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/planaria/planaria/internal/sandbox"
)

// hostLayer is a layer with programs of this machine and the libraries that they
// need, under the names by which they are asked for.
func hostLayer(t testing.TB, programs ...string) []file {
	t.Helper()
	seen := map[string]bool{}
	var files []file
	add := func(path, as string) {
		if seen[as] {
			return
		}
		seen[as] = true
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file{name: strings.TrimPrefix(as, "/"), body: string(b)})
	}
	for _, p := range programs {
		path, err := exec.LookPath(p)
		if err != nil {
			t.Skipf("this machine has no %s to make an image of", p)
		}
		add(path, "/bin/"+filepath.Base(p))
		out, err := exec.Command("ldd", path).Output()
		if err != nil {
			t.Skipf("ldd %s: %v", path, err)
		}
		for _, f := range strings.Fields(string(out)) {
			if strings.HasPrefix(f, "/") {
				add(f, f)
			}
		}
	}
	return files
}

// TestImageRun runs a sandbox on an image of a registry of ours: its files,
// variables and user; what it writes is its own; a snapshot of it is restored
// where the image lies, and where it must be fetched again.
func TestImageRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	base := hostLayer(t, "bash", "cat", "id")
	img := image(t, runtime.GOARCH, []string{"GREETING=hello", "PATH=/image/bin:/bin", "http_proxy=http://192.0.2.1"},
		layer(t, archive(t, base...), types.DockerLayer),
		layer(t, archive(t, file{name: "image/bin/hello", body: "#!/bin/bash\necho $GREETING from the image\n"}, file{name: "data/one", body: "one", uid: 1234},
			file{name: "setuid", body: "x", mode: 0o4755}, file{name: "workspace", kind: tar.TypeDir}, file{name: "workspace/readme", body: "of the image"}), types.OCILayerZStd))
	ref := w.push(t, "team/tools:1", img)
	e := open(t, func(c *sandbox.Config) { c.Transport = http.DefaultTransport })
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	root, err := e.r.Image(ctx, "w1", ref)
	if err != nil {
		t.Fatal(err)
	}
	s := e.start("image", func(s *sandbox.Spec) { s.Root = root; s.Env = []string{"OWN=mine"} })
	for command, want := range map[string]string{
		"hello":                         "hello from the image",
		"echo $OWN $http_proxy; pwd":    "mine\n/workspace",
		"cat readme":                    "of the image",
		"id -u":                         "0",
		"cat /etc/resolv.conf; echo $?": "0",
		"[ -u /setuid ] || echo no":     "no",
		"[ -w /data/one ] && echo x >/data/one && cat /data/one": "x",
		"echo kept >/kept; v=5; echo $v":                         "5",
		"[ -e /usr/bin/env ] || echo absent":                     "absent",
	} {
		if got := e.sh(s, command); got != want {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
	if b, err := os.ReadFile(filepath.Join(root.Dir, "data/one")); err != nil || string(b) != "one" {
		t.Errorf("the shared root says %q, %v", b, err)
	}
	m := e.snapshot(s)
	if m.Root.Digest != digestOf(t, img) || m.Root.Image == "" {
		t.Errorf("the snapshot's root is %+v", m.Root)
	}
	if err := s.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	// The image is gone from the folder, and so is the tag: it is fetched again
	// by its digest.
	if err := os.RemoveAll(filepath.Dir(root.Dir)); err != nil {
		t.Fatal(err)
	}
	back, _ := e.restore(m, "again")
	if got := e.sh(back, "echo $v $(</kept) $(</data/one); hello"); got != "5 kept x\nhello from the image" {
		t.Errorf("restored: %q", got)
	}
	// Another root is refused.
	other, err := e.r.Image(ctx, "w1", w.push(t, "team/tools:2", image(t, runtime.GOARCH, nil, layer(t, archive(t, base...), types.DockerLayer))))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := e.r.Restore(ctx, m, sandbox.Spec{Workspace: "w1", ID: "other", Root: other}); !errors.Is(err, sandbox.ErrRoot) {
		t.Errorf("on another root: %v, want ErrRoot", err)
	}
}
