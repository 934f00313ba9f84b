package sandbox_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"github.com/planaria/planaria/internal/sandbox"
)

// openRoots makes a runtime for tests that start no sandbox: it needs no binary
// that runs one.
func openRoots(t testing.TB, change ...func(*sandbox.Config)) *sandbox.Runtime {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("sandboxes need Linux")
	}
	cfg := sandbox.Config{Dir: filepath.Join(t.TempDir(), "sandboxes"), Binary: "/bin/true", Transport: http.DefaultTransport}
	for _, c := range change {
		c(&cfg)
	}
	r, err := sandbox.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil && !errors.Is(err, fs.ErrClosed) {
			t.Error(err)
		}
	})
	return r
}

// file is a tar entry.
type file struct {
	name string
	kind byte
	body string
	link string
	mode int64
	uid  int
	size int64 // claimed, where it is not the body's
}

func archive(t testing.TB, files ...file) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Typeflag: f.kind, Linkname: f.link, Mode: f.mode, Uid: f.uid, Gid: f.uid, Size: int64(len(f.body)), ModTime: time.Unix(1_700_000_000, 0)}
		if f.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if f.mode == 0 {
			h.Mode = 0o755
		}
		if f.size != 0 {
			h.Size = f.size
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil && !strings.Contains(err.Error(), "missed writing") {
		t.Fatal(err)
	}
	return b.Bytes()
}

// layer of an image: an archive as it is, or compressed by its kind.
func layer(t testing.TB, b []byte, kind types.MediaType) v1.Layer {
	t.Helper()
	var z bytes.Buffer
	switch kind {
	case types.OCILayer, types.DockerLayer:
		w := gzip.NewWriter(&z)
		_, _ = w.Write(b)
		_ = w.Close()
		b = z.Bytes()
	case types.OCILayerZStd:
		w, err := zstd.NewWriter(&z)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = w.Write(b)
		_ = w.Close()
		b = z.Bytes()
	}
	return static.NewLayer(b, kind)
}

// shellFile makes an image pass as one with a shell.
var shellFile = file{name: "bin/bash", body: "#!\n"}

func image(t testing.TB, arch string, env []string, layers ...v1.Layer) v1.Image {
	t.Helper()
	img := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	for _, l := range layers {
		kind, err := l.MediaType()
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.Append(img, mutate.Addendum{Layer: l, MediaType: kind}); err != nil {
			t.Fatal(err)
		}
	}
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", arch
	c.Config.Env, c.Config.User, c.Config.WorkingDir = env, "1000", "/elsewhere"
	if img, err = mutate.ConfigFile(img, c); err != nil {
		t.Fatal(err)
	}
	return img
}

// world is a registry on loopback.
type world struct {
	host  string
	asked atomic.Int64
	mu    sync.Mutex
	wrap  func(next http.Handler) http.Handler
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{}
	reg := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") {
			w.asked.Add(1)
		}
		w.mu.Lock()
		wrap := w.wrap
		w.mu.Unlock()
		h := reg
		if wrap != nil {
			h = wrap(reg)
		}
		h.ServeHTTP(rw, req)
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Start()
	t.Cleanup(server.Close)
	w.host = strings.TrimPrefix(server.URL, "http://")
	return w
}

func (w *world) push(t testing.TB, ref string, what remote.Taggable) string {
	t.Helper()
	full := w.host + "/" + ref
	tag, err := name.ParseReference(full)
	if err != nil {
		t.Fatal(err)
	}
	switch v := what.(type) {
	case v1.Image:
		err = remote.Write(tag, v)
	case v1.ImageIndex:
		err = remote.WriteIndex(tag, v)
	}
	if err != nil {
		t.Fatal(err)
	}
	return full
}

func (w *world) through(wrap func(http.Handler) http.Handler) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wrap = wrap
}

func digestOf(t testing.TB, img v1.Image) string {
	t.Helper()
	h, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if !sandbox.KeepsOwners() {
		return h.String() + "-mapped"
	}
	return h.String()
}

// tree lists a folder as text: kind, mode, bytes or target.
func tree(t testing.TB, dir string, only ...string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		top, _, _ := strings.Cut(rel, "/")
		wanted := false
		for _, o := range only {
			wanted = wanted || o == top
		}
		if !wanted {
			return nil
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		switch info.Mode().Type() {
		case fs.ModeDir:
			out[rel] = "dir " + info.Mode().Perm().String()
		case fs.ModeSymlink:
			to, _ := os.Readlink(p)
			out[rel] = "-> " + to
		default:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			out[rel] = info.Mode().String() + " " + string(b)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestImageLayers unpacks layers over one another as containers see them.
func TestImageLayers(t *testing.T) {
	w := newWorld(t)
	img := image(t, runtime.GOARCH, []string{"A=1", "PATH=/x/bin", "nothing"},
		layer(t, archive(t,
			file{name: "./bin", kind: tar.TypeSymlink, link: "usr/bin"}, file{name: "usr/bin/bash", body: "bash", mode: 0o6755},
			file{name: "a/", kind: tar.TypeDir, mode: 0o750}, file{name: "a/keep", body: "1", mode: 0o644}, file{name: "a/gone", body: "2"},
			file{name: "o/deep/one", body: "1"}, file{name: "o/two", body: "2"},
			file{name: "var/run", kind: tar.TypeSymlink, link: "/run"}, file{name: "up", kind: tar.TypeSymlink, link: "../../../a"},
			file{name: "dev/null", kind: tar.TypeChar}, file{name: "a/pipe", kind: tar.TypeFifo},
			file{name: "becomes", body: "a file"}, file{name: "etc/resolv.conf", kind: tar.TypeSymlink, link: "/usr/bin/bash"},
			file{name: "workspace", kind: tar.TypeSymlink, link: "/usr"}, file{name: "etc/passwd", body: "root:x:0:0::/root:/bin/bash\n", mode: 0o644},
		), types.DockerLayer),
		layer(t, archive(t,
			file{name: "bin/tool", body: "through a link"}, file{name: "var/run/pid", body: "absolute link"}, file{name: "up/new", body: "link up"},
			file{name: "a/.wh.gone"}, file{name: "o/mine", body: "3"}, file{name: "o/deep/mine", body: "4"}, file{name: "o/.wh..wh..opq"},
			file{name: "becomes/", kind: tar.TypeDir}, file{name: "becomes/full", kind: tar.TypeLink, link: "a/keep"},
			file{name: ".wh..wh.plnk"},
		), types.OCILayerZStd),
		layer(t, archive(t, file{name: "a/keep", body: "changed", mode: 0o600}), types.OCIUncompressedLayer))
	ref := w.push(t, "team/layers:1", img)
	r := openRoots(t)
	root, err := r.Image(t.Context(), "w1", ref)
	if err != nil {
		t.Fatal(err)
	}
	if want := digestOf(t, img); root.Digest != want {
		t.Errorf("digest %s, want %s", root.Digest, want)
	}
	if diff := cmp.Diff([]string{"A=1", "PATH=/x/bin"}, root.Env); diff != "" {
		t.Errorf("env (-want +got):\n%s", diff)
	}
	want := map[string]string{
		"bin": "-> usr/bin", "usr": "dir rwxr-xr-x", "usr/bin": "dir rwxr-xr-x", "usr/bin/bash": "-rwxr-xr-x bash", "usr/bin/tool": "-rwxr-xr-x through a link",
		"a": "dir rwxr-x---", "a/keep": "-rw------- changed", "a/new": "-rwxr-xr-x link up",
		"o": "dir rwxr-xr-x", "o/mine": "-rwxr-xr-x 3", "o/deep": "dir rwxr-xr-x", "o/deep/mine": "-rwxr-xr-x 4",
		"run": "dir rwxr-xr-x", "run/pid": "-rwxr-xr-x absolute link", "up": "-> ../../../a",
		"becomes": "dir rwxr-xr-x", "becomes/full": "-rw-r--r-- 1", "workspace": "dir rwxr-xr-x",
	}
	for k, v := range want {
		want[k] = strings.ReplaceAll(v, "dir ", "dir -")
	}
	if diff := cmp.Diff(want, tree(t, root.Dir, "bin", "usr", "a", "o", "run", "up", "becomes", "workspace")); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	etc := tree(t, root.Dir, "etc", ".planaria", "mnt", "dev")
	for k, v := range map[string]string{"etc/resolv.conf": "-rw-r--r-- ", "etc/passwd": "-rw-r--r-- root:x:0:0::/root:/bin/bash\n", ".planaria/ctl": "dir -rwxr-xr-x",
		"mnt/session/outputs": "dir -rwxr-xr-x", "dev": "dir -rwxr-xr-x", "dev/null": ""} {
		if etc[k] != v {
			t.Errorf("%s is %q, want %q", k, etc[k], v)
		}
	}
	if info, err := os.Stat(filepath.Join(root.Dir, "usr/bin/bash")); err != nil || info.ModTime().Unix() != 1_700_000_000 {
		t.Errorf("time of bash: %v %v", info, err)
	}
}

// TestImageHostile unpacks what means harm (attacks F1, F2, F3). Nothing of it
// may touch what lies outside, none may be believed, and none may stay behind.
func TestImageHostile(t *testing.T) {
	outside := t.TempDir()
	canary := filepath.Join(outside, "canary")
	if err := os.WriteFile(canary, []byte("alive"), 0o644); err != nil {
		t.Fatal(err)
	}
	zeros := bytes.Repeat([]byte{0}, 4<<20)
	for _, tt := range []struct {
		name   string
		layers [][]file
		raw    []byte // of one more layer
		limits sandbox.ImageLimits
		want   string // of the error; empty: it is unpacked, and harmless
	}{
		{name: "dots", layers: [][]file{{{name: "../../../../../../.." + canary, body: "x"}}}, want: "a name in it"},
		{name: "dots inside", layers: [][]file{{{name: "a/../../b", body: "x"}}}, want: "a name in it"},
		{name: "absolute", layers: [][]file{{{name: canary, body: "x"}}}, want: "a name in it"},
		{name: "long name", layers: [][]file{{{name: strings.Repeat("d/", 2200) + "f", body: "x"}}}, want: "a name in it"},
		{name: "long part", layers: [][]file{{{name: strings.Repeat("n", 300), body: "x"}}}, want: "a name in it"},
		{name: "file through a link out", layers: [][]file{{{name: "l", kind: tar.TypeSymlink, link: outside}, {name: "l/canary", body: "x"}}}},
		{name: "file through a link up", layers: [][]file{{{name: "l", kind: tar.TypeSymlink, link: "../../../../../../../.." + outside}, {name: "l/canary", body: "x"}}}},
		{name: "file over a link out", layers: [][]file{{{name: "l", kind: tar.TypeSymlink, link: canary}}, {{name: "l", body: "x"}}}},
		{name: "folder over a link out", layers: [][]file{{{name: "l", kind: tar.TypeSymlink, link: outside}}, {{name: "l/", kind: tar.TypeDir, mode: 0o777}, {name: "l/canary", body: "x"}}}},
		{name: "links in a circle", layers: [][]file{{{name: "a", kind: tar.TypeSymlink, link: "b"}, {name: "b", kind: tar.TypeSymlink, link: "a"}, {name: "a/x", body: "x"}}}, want: "in a circle"},
		{name: "hard link out", layers: [][]file{{{name: "l", kind: tar.TypeLink, link: canary}}}, want: "hard link"},
		{name: "hard link up", layers: [][]file{{{name: "l", kind: tar.TypeLink, link: "../../../../.." + canary}}}, want: "hard link"},
		{name: "hard link through a link", layers: [][]file{{{name: "d", kind: tar.TypeSymlink, link: outside}, {name: "l", kind: tar.TypeLink, link: "d/canary"}}}, want: "hard link"},
		{name: "hard link to a link out, then written", layers: [][]file{{{name: "s", kind: tar.TypeSymlink, link: canary}, {name: "l", kind: tar.TypeLink, link: "s"}}, {{name: "l", body: "x"}}}},
		{name: "hard link to nothing", layers: [][]file{{{name: "l", kind: tar.TypeLink, link: "none"}}}, want: "hard link"},
		{name: "hard link to a folder", layers: [][]file{{{name: "d/", kind: tar.TypeDir}, {name: "l", kind: tar.TypeLink, link: "d"}}}, want: "hard link"},
		{name: "whiteout of the parent", layers: [][]file{{{name: "a/.wh..."}}}, want: "a name in it"},
		{name: "whiteout of the root", layers: [][]file{{{name: ".wh.."}}}, want: "a name in it"},
		{name: "whiteout of nothing", layers: [][]file{{{name: ".wh."}}}, want: "a name in it"},
		{name: "whiteout through a link out", layers: [][]file{{{name: "l", kind: tar.TypeSymlink, link: outside}}, {{name: "l/.wh.canary"}}}},
		{name: "opaque through a link out", layers: [][]file{{{name: "l", kind: tar.TypeSymlink, link: outside}}, {{name: "l/.wh..wh..opq"}}}},
		{name: "below a file", layers: [][]file{{{name: "f", body: "x"}, {name: "f/x", body: "x"}}}, want: "no folder"},
		{name: "below a device", layers: [][]file{{{name: "dev/sda", kind: tar.TypeBlock}, {name: "dev/sda/x", body: "x"}}}},
		{name: "our own folders as links", layers: [][]file{{{name: ".planaria", kind: tar.TypeSymlink, link: outside}, {name: "mnt", kind: tar.TypeSymlink, link: outside},
			{name: "etc", kind: tar.TypeSymlink, link: outside}, {name: "proc", kind: tar.TypeSymlink, link: outside}, {name: "tmp", kind: tar.TypeSymlink, link: outside}}}},
		{name: "etc files as links", layers: [][]file{{{name: "etc/hosts", kind: tar.TypeSymlink, link: canary}, {name: "etc/hostname", kind: tar.TypeSymlink, link: canary}, {name: "etc/profile", kind: tar.TypeSymlink, link: canary}}}},
		{name: "many files", layers: [][]file{{{name: "1"}, {name: "2"}, {name: "3"}}}, limits: sandbox.ImageLimits{Entries: 4}, want: "more files"},
		{name: "many folders in one name", layers: [][]file{{{name: "1/2/3/4/5/6/7/8/9"}}}, limits: sandbox.ImageLimits{Entries: 8}, want: "more files"},
		{name: "long names", layers: [][]file{{{name: strings.Repeat("n", 200)}, {name: strings.Repeat("m", 200)}}}, limits: sandbox.ImageLimits{Names: 300}, want: "more files"},
		{name: "many bytes", layers: [][]file{{{name: "1", body: string(zeros)}}}, limits: sandbox.ImageLimits{Unpacked: 1 << 20}, want: "more bytes"},
		{name: "a bomb", raw: zeros, limits: sandbox.ImageLimits{Unpacked: 1 << 20}, want: ""},
		{name: "many layers", layers: [][]file{{{name: "1"}}, {{name: "2"}}}, limits: sandbox.ImageLimits{Layers: 2}, want: "at most 2"},
		{name: "large layers", layers: [][]file{{{name: "1"}}}, limits: sandbox.ImageLimits{Packed: 10}, want: "layers of more than"},
		{name: "large configuration", limits: sandbox.ImageLimits{Config: 10}, want: "configuration has"},
		{name: "many variables", limits: sandbox.ImageLimits{Envs: 3}, want: "bytes of variables"},
		{name: "no archive", raw: []byte(strings.Repeat("this is no tar ", 100)), want: "no archive"},
		{name: "half an archive", raw: archive(t, file{name: "f", body: "x", size: 1 << 20}), want: "no archive"},
		{name: "a huge sparse file", raw: sparse(1 << 40), want: "more bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			layers := []v1.Layer{layer(t, archive(t, shellFile), types.DockerLayer)}
			for _, l := range tt.layers {
				layers = append(layers, layer(t, archive(t, l...), types.DockerLayer))
			}
			if tt.raw != nil {
				layers = append(layers, layer(t, tt.raw, types.DockerLayer))
			}
			ref := w.push(t, "bad:1", image(t, runtime.GOARCH, []string{"A=12345"}, layers...))
			r := openRoots(t)
			r.SetImageLimits(tt.limits)
			root, err := r.Image(t.Context(), "w1", ref)
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("it is refused: %v", err)
			case tt.want != "" && (err == nil || !errors.Is(err, sandbox.ErrImage) || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("%v, want an ErrImage with %q", err, tt.want)
			}
			if b, err := os.ReadFile(canary); err != nil || string(b) != "alive" {
				t.Errorf("the canary says %q, %v", b, err)
			}
			entries, err := os.ReadDir(outside)
			if err != nil || len(entries) != 1 {
				t.Errorf("outside: %v, %v", entries, err)
			}
			if info, err := os.Stat(outside); err != nil || info.Mode().Perm() == 0o777 {
				t.Errorf("outside: %v, %v", info, err)
			}
			left, err := os.ReadDir(r.RootsDir())
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range left {
				if strings.HasPrefix(e.Name(), ".tmp-") || tt.want != "" && strings.HasPrefix(e.Name(), "oci-") {
					t.Errorf("%s is left", e.Name())
				}
			}
			if root.Dir == "" {
				return
			}
			for _, d := range []string{"etc", "proc", "tmp", "mnt/session/outputs", ".planaria/ctl"} {
				if info, err := os.Lstat(filepath.Join(root.Dir, d)); err != nil || !info.IsDir() {
					t.Errorf("%s is no folder: %v, %v", d, info, err)
				}
			}
		})
	}
}

// sparse is an archive of one file that claims to be large and holds nothing.
func sparse(size int64) []byte {
	h := make([]byte, 512)
	copy(h, "hole")
	copy(h[100:], "0000644\x00")
	copy(h[108:], "0000000\x00")
	copy(h[116:], "0000000\x00")
	copy(h[124:], "00000000000\x00")
	copy(h[136:], "00000000000\x00")
	h[156] = 'S'
	copy(h[257:], "ustar  \x00")
	h[483] = 0x80 // real size in base 256
	for i := range 8 {
		h[483+11-i] = byte(size >> (8 * i))
	}
	copy(h[148:], "        ")
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return append(h, make([]byte, 1024)...)
}

// TestImageNames: every way in which a name leads to no image says what is wrong
// and what to do.
func TestImageNames(t *testing.T) {
	w := newWorld(t)
	one := layer(t, archive(t, shellFile), types.DockerLayer)
	good := image(t, runtime.GOARCH, nil, one)
	other := image(t, "sparc64", nil, one)
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: other, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "sparc64"}}},
		mutate.IndexAddendum{Add: good, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}}})
	foreign := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: other, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "sparc64"}}})
	w.push(t, "index:1", index)
	w.push(t, "foreign:1", foreign)
	w.push(t, "single:1", other)
	w.push(t, "noshell:1", image(t, runtime.GOARCH, nil, layer(t, archive(t, file{name: "bin/sh", body: "x"}), types.DockerLayer)))
	w.push(t, "layer:1", image(t, runtime.GOARCH, nil, static.NewLayer([]byte("{}"), "application/vnd.wasm.content.layer.v1+wasm")))
	w.push(t, "good:1", good)
	hash, err := good.Digest()
	if err != nil {
		t.Fatal(err)
	}
	layouts := t.TempDir()
	path, err := layout.Write(filepath.Join(layouts, "mine"), index)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.AppendImage(good, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "v2"})); err != nil {
		t.Fatal(err)
	}
	elsewhere := t.TempDir()
	if _, err := layout.Write(elsewhere, index); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, filepath.Join(layouts, "linked")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(layouts, "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	r := openRoots(t, func(c *sandbox.Config) { c.Layouts = layouts })
	closed := openRoots(t, func(c *sandbox.Config) { c.Transport = nil })
	for _, tt := range []struct {
		r    *sandbox.Runtime
		name string
		want string // empty: the good image
	}{
		{r, w.host + "/good:1", ""},
		{r, w.host + "/good@" + hash.String(), ""},
		{r, w.host + "/index:1", ""},
		{r, "layout:" + filepath.Join(layouts, "mine") + ":v2", ""},
		{r, "layout:mine", ""},
		{r, "layout:mine@" + hash.String(), ""},
		{r, "layout:mine:v3", `no image with the tag "v3"`},
		{r, "layout:mine@sha256:" + strings.Repeat("0", 64), "no image with this digest"},
		{r, "layout:empty", "no OCI layout"},
		{r, "layout:" + elsewhere, "no such image in this node's folder"},
		{r, "layout:linked", "no such image in this node's folder"},
		{r, "layout:../" + filepath.Base(elsewhere), "no such image in this node's folder"},
		{r, "layout:/etc/shadow", "no such image in this node's folder"},
		{r, w.host + "/none:1", "no such image or tag; check its name"},
		{r, w.host + "/foreign:1", "no variant for linux/" + runtime.GOARCH + " (it has linux/sparc64)"},
		{r, w.host + "/single:1", "no variant for linux/" + runtime.GOARCH + " (it has linux/sparc64)"},
		{r, w.host + "/noshell:1", "add bash to the image"},
		{r, w.host + "/layer:1", "is no file archive"},
		{r, "no name at all", "is no name of an image"},
		{r, "127.0.0.1:1/x:1", "cannot be reached"},
		{r, "10.1.2.3:5000/x:1", "TLS only"},
		{closed, w.host + "/good:1", "fetches no images from registries"},
		{closed, "layout:mine", "offers no folder of images"},
	} {
		root, err := tt.r.Image(t.Context(), "w1", tt.name)
		switch {
		case tt.want == "" && (err != nil || root.Digest != digestOf(t, good)):
			t.Errorf("%s: %v, %v", tt.name, root, err)
		case tt.want != "" && (err == nil || !errors.Is(err, sandbox.ErrImage) || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%s: %v, want an ErrImage with %q", tt.name, err, tt.want)
		}
	}
}

// TestImageRegistry: what a registry may do on the way.
func TestImageRegistry(t *testing.T) {
	w := newWorld(t)
	big := strings.Repeat("0123456789abcdef", 1<<14)
	img := image(t, runtime.GOARCH, nil, layer(t, archive(t, shellFile, file{name: "big", body: big}), types.OCIUncompressedLayer))
	ref := w.push(t, "team/img:1", img)
	fresh := func(t *testing.T, change ...func(*sandbox.Config)) *sandbox.Runtime { return openRoots(t, change...) }

	t.Run("concurrent askers share one fetch", func(t *testing.T) {
		r := fresh(t)
		w.asked.Store(0)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				if _, err := r.Image(t.Context(), "w1", ref); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := w.asked.Load(); n > 3 { // config twice at most, the layer once
			t.Errorf("%d blobs were fetched", n)
		}
	})
	t.Run("bytes that were changed on the way", func(t *testing.T) {
		w.through(func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				rec := httptest.NewRecorder()
				next.ServeHTTP(rec, req)
				b := rec.Body.Bytes()
				if strings.Contains(req.URL.Path, "/blobs/") && len(b) > 100_000 {
					b = bytes.Replace(b, []byte("0123456789"), []byte("9123456780"), 1)
				}
				for k, v := range rec.Header() {
					rw.Header()[k] = v
				}
				rw.WriteHeader(rec.Code)
				_, _ = rw.Write(b)
			})
		})
		defer w.through(nil)
		if _, err := fresh(t).Image(t.Context(), "w1", ref); !errors.Is(err, sandbox.ErrImage) {
			t.Errorf("%v, want ErrImage", err)
		}
	})
	t.Run("a body that ends too early once", func(t *testing.T) {
		var cut atomic.Bool
		w.through(func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				rec := httptest.NewRecorder()
				next.ServeHTTP(rec, req)
				b := rec.Body.Bytes()
				for k, v := range rec.Header() {
					rw.Header()[k] = v
				}
				rw.Header().Set("Content-Length", fmt.Sprint(len(b)))
				rw.WriteHeader(rec.Code)
				if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") && len(b) > 100_000 && cut.CompareAndSwap(false, true) {
					_, _ = rw.Write(b[:1000])
					panic(http.ErrAbortHandler)
				}
				_, _ = rw.Write(b)
			})
		})
		defer w.through(nil)
		if _, err := fresh(t).Image(t.Context(), "w1", ref); err != nil || !cut.Load() {
			t.Errorf("%v (cut %v)", err, cut.Load())
		}
	})
	t.Run("credentials", func(t *testing.T) {
		const secret = "hunter2-5512"
		w.through(func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				if _, p, _ := req.BasicAuth(); p != secret {
					rw.Header().Set("WWW-Authenticate", `Basic realm="r"`)
					rw.WriteHeader(http.StatusUnauthorized)
					return
				}
				next.ServeHTTP(rw, req)
			})
		})
		defer w.through(nil)
		_, err := fresh(t).Image(t.Context(), "w1", ref)
		if !errors.Is(err, sandbox.ErrImage) || !strings.Contains(err.Error(), "private or does not exist") {
			t.Errorf("without: %v", err)
		}
		keys := keychain{w.host: {Username: "u", Password: secret}}
		if _, err := fresh(t, func(c *sandbox.Config) { c.Keychain = keys }).Image(t.Context(), "w1", ref); err != nil {
			t.Errorf("with: %v", err)
		}
		keys[w.host] = authn.AuthConfig{Username: "u", Password: "wrong-5512"}
		if _, err := fresh(t, func(c *sandbox.Config) { c.Keychain = keys }).Image(t.Context(), "w1", ref); err == nil || strings.Contains(err.Error(), "5512") {
			t.Errorf("with a wrong one: %v", err)
		}
	})
	t.Run("a redirect to plain HTTP", func(t *testing.T) {
		w.through(func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				if strings.Contains(req.URL.Path, "/blobs/") {
					http.Redirect(rw, req, "http://192.0.2.1/layer", http.StatusTemporaryRedirect)
					return
				}
				next.ServeHTTP(rw, req)
			})
		})
		defer w.through(nil)
		if _, err := fresh(t).Image(t.Context(), "w1", ref); !errors.Is(err, sandbox.ErrImage) || !strings.Contains(err.Error(), "TLS only") {
			t.Errorf("%v, want a refusal of plain HTTP", err)
		}
	})
	t.Run("a tag that moves, and a registry that is away", func(t *testing.T) {
		r := fresh(t)
		moving := w.push(t, "moving:latest", img)
		first, err := r.Image(t.Context(), "w1", moving)
		if err != nil {
			t.Fatal(err)
		}
		second := image(t, runtime.GOARCH, []string{"B=2"}, layer(t, archive(t, shellFile), types.DockerLayer))
		w.push(t, "moving:latest", second)
		if again, err := r.Image(t.Context(), "w1", moving); err != nil || again.Digest != first.Digest {
			t.Errorf("within a minute: %v, %v", again, err)
		}
		r.ForgetTags()
		if later, err := r.Image(t.Context(), "w1", moving); err != nil || later.Digest != digestOf(t, second) {
			t.Errorf("later: %v, %v", later, err)
		}
		if old, err := r.Image(t.Context(), "w1", first.Image); err != nil || old.Dir != first.Dir {
			t.Errorf("by its digest: %v, %v", old, err)
		}
		r.ForgetTags()
		w.through(func(http.Handler) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) })
		})
		defer w.through(nil)
		if off, err := r.Image(t.Context(), "w1", moving); err != nil || off.Digest != digestOf(t, second) {
			t.Errorf("with the registry away: %v, %v", off, err)
		}
		if _, err := fresh(t).Image(t.Context(), "w1", moving); !errors.Is(err, sandbox.ErrImage) || !strings.Contains(err.Error(), "cannot be reached") {
			t.Errorf("never seen, with the registry away: %v", err)
		}
	})
	t.Run("it never ends", func(t *testing.T) {
		stop := make(chan struct{})
		w.through(func(http.Handler) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				select {
				case <-req.Context().Done():
				case <-stop:
				}
			})
		})
		defer func() { close(stop); w.through(nil) }()
		r := fresh(t)
		r.SetImageLimits(sandbox.ImageLimits{Time: 200 * time.Millisecond})
		if _, err := r.Image(t.Context(), "w1", ref); !errors.Is(err, sandbox.ErrImage) || !strings.Contains(err.Error(), "was not there within") {
			t.Errorf("%v, want the time's end", err)
		}
	})
}

// keychain has credentials by registry.
type keychain map[string]authn.AuthConfig

func (k keychain) Resolve(r authn.Resource) (authn.Authenticator, error) {
	if c, ok := k[r.RegistryStr()]; ok {
		return authn.FromConfig(c), nil
	}
	return authn.Anonymous, nil
}

// TestImageCrash dies between unpacking and its rename, and in an eviction: the
// next life has the whole image or none.
func TestImageCrash(t *testing.T) {
	w := newWorld(t)
	img := image(t, runtime.GOARCH, nil, layer(t, archive(t, shellFile), types.DockerLayer))
	ref := w.push(t, "img:1", img)
	dir := filepath.Join(t.TempDir(), "sandboxes")
	died := errors.New("died")
	r := openRoots(t, func(c *sandbox.Config) { c.Dir = dir })
	r.SetFault(func(at string) error {
		if at == "unpacked" {
			// What a crash leaves: a temporary folder.
			if err := os.MkdirAll(filepath.Join(r.RootsDir(), ".tmp-left", "root"), 0o700); err != nil {
				t.Error(err)
			}
			return died
		}
		return nil
	})
	if _, err := r.Image(t.Context(), "w1", ref); !errors.Is(err, died) {
		t.Fatalf("%v, want the fault", err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r = openRoots(t, func(c *sandbox.Config) { c.Dir = dir })
	entries, err := os.ReadDir(r.RootsDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "oci-") || strings.HasPrefix(e.Name(), ".tmp-") {
			t.Errorf("%s is there after the crash", e.Name())
		}
	}
	root, err := r.Image(t.Context(), "w1", ref)
	if err != nil {
		t.Fatal(err)
	}
	// An eviction that died after the note was gone: the image is made anew.
	if err := os.Remove(filepath.Join(filepath.Dir(root.Dir), "image.json")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root.Dir, "stale"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if root, err = r.Image(t.Context(), "w1", ref); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root.Dir, "stale")); err == nil {
		t.Error("a half-removed image was taken for a whole one")
	}
}

// TestImageRoom removes images that nobody uses, the oldest first.
func TestImageRoom(t *testing.T) {
	w := newWorld(t)
	body := strings.Repeat("x", 1<<20)
	r := openRoots(t, func(c *sandbox.Config) { c.RootBytes = 5 << 19 })
	var roots []sandbox.Root
	for i := range 2 {
		root, err := r.Image(t.Context(), "w1", w.push(t, fmt.Sprintf("img:%d", i), image(t, runtime.GOARCH, nil, layer(t, archive(t, shellFile, file{name: fmt.Sprint(i), body: body}), types.DockerLayer))))
		if err != nil {
			t.Fatal(err)
		}
		roots = append(roots, root)
	}
	if err := r.MakeRoom(1 << 20); !errors.Is(err, sandbox.ErrImage) {
		t.Errorf("%v, want no room while all were just asked for", err)
	}
	old := time.Now().Add(-2 * time.Hour)
	for _, root := range roots {
		if err := os.Chtimes(filepath.Join(filepath.Dir(root.Dir), "image.json"), old, old); err != nil {
			t.Fatal(err)
		}
		old = old.Add(time.Minute)
	}
	if err := r.MakeRoom(1 << 20); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(roots[0].Dir); err == nil {
		t.Error("the oldest is still there")
	}
	if _, err := os.Stat(roots[1].Dir); err != nil {
		t.Errorf("the newer one went too: %v", err)
	}
}
