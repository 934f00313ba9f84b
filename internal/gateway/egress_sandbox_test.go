package gateway_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/testenv"
)

// guest is a real sandbox whose way out is ours.
type guest struct {
	t     testing.TB
	s     *sandbox.Sandbox
	calls int
}

// start runs a sandbox on gVisor; the test is skipped where none can run.
func (i *inside) start() *guest {
	i.t.Helper()
	binary := os.Getenv("PLANARIA_TEST_SANDBOX")
	if binary == "" {
		binary = filepath.Join(i.t.TempDir(), "planaria")
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", binary, "../../cmd/planaria-sandbox")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			i.t.Fatalf("build the binary: %v: %s", err, out)
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(i.t.Context()), 5*time.Minute)
	i.t.Cleanup(cancel)
	for _, f := range sandbox.Probe(ctx, sandbox.Config{Binary: binary}) {
		if f.Fatal && !f.OK {
			i.t.Skipf("this machine runs no sandbox: %s: %s (%s)", f.What, f.Says, f.Mend)
		}
	}
	r, err := sandbox.Open(ctx, sandbox.Config{Dir: i.t.TempDir(), Binary: binary, StartTimeout: time.Minute,
		Egress: func(ctx context.Context, _ *sandbox.Sandbox, conn io.ReadWriteCloser) { i.g.Egress(ctx, i.scope, conn) }})
	if err != nil {
		i.t.Fatal(err)
	}
	i.t.Cleanup(func() {
		if err := r.Close(); err != nil {
			i.t.Errorf("close: %v", err)
		}
	})
	s, err := r.Start(ctx, sandbox.Spec{Workspace: "w1", ID: "egress", Fence: 1})
	if err != nil {
		i.t.Fatal(err)
	}
	i.t.Cleanup(func() {
		if err := s.Kill(ctx); err != nil {
			i.t.Error(err)
		}
	})
	return &guest{t: i.t, s: s}
}

// sh runs a command and returns what it says and whether it ended well.
func (g *guest) sh(command string) (string, bool) {
	g.t.Helper()
	g.calls++
	in, err := json.Marshal(map[string]string{"command": command})
	if err != nil {
		g.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(g.t.Context(), 2*time.Minute)
	defer cancel()
	r, err := g.s.Do(ctx, sandbox.Call{ID: fmt.Sprint("call_", g.calls), Thread: "main", Tool: "bash", Input: in})
	if err != nil {
		g.t.Fatalf("%s: %v", command, err)
	}
	return strings.TrimSpace(r.Text), !r.IsError
}

func (g *guest) has(program string) bool {
	_, ok := g.sh("command -v " + program)
	return ok
}

// must runs a command that ends well and says want.
func (g *guest) must(command, want string) {
	g.t.Helper()
	begin := time.Now()
	out, ok := g.sh(command)
	if !ok || !strings.Contains(out, want) {
		g.t.Errorf("%s: ok %v\n%s\nwant %q", command, ok, out, want)
	}
	g.t.Logf("%6d ms %s", time.Since(begin).Milliseconds(), command)
}

// npmRegistry serves one package.
func npmRegistry(t testing.TB) http.Handler {
	var tgz bytes.Buffer
	zw := gzip.NewWriter(&tgz)
	tw := tar.NewWriter(zw)
	for name, text := range map[string]string{"package/package.json": `{"name":"tiny-pkg","version":"1.0.0","main":"index.js"}`,
		"package/index.js": `module.exports = "tiny from npm"`} {
		if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(tw, text)
	}
	if tw.Close() != nil || zw.Close() != nil {
		t.Fatal("make package")
	}
	sum := sha512.Sum512(tgz.Bytes())
	mux := http.NewServeMux()
	mux.HandleFunc("GET /tiny-pkg", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"name":"tiny-pkg","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"tiny-pkg","version":"1.0.0",
			"dist":{"tarball":"https://registry.npmjs.org/tiny-pkg/-/tiny-pkg-1.0.0.tgz","integrity":"sha512-%s"}}}}`, base64.StdEncoding.EncodeToString(sum[:]))
	})
	mux.HandleFunc("GET /tiny-pkg/-/tiny-pkg-1.0.0.tgz", func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write(tgz.Bytes()) })
	return mux
}

func zipped(t testing.TB, files [][2]string) []byte {
	var b bytes.Buffer
	zw := zip.NewWriter(&b)
	for _, f := range files {
		w, err := zw.Create(f[0])
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(w, f[1])
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// pythonIndex serves one wheel: its page, and the host of files.
func pythonIndex(t testing.TB) (index, files http.HandlerFunc) {
	wheel := zipped(t, [][2]string{
		{"tinypkg.py", "text = 'tiny from pip'\n"},
		{"tinypkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinypkg\nVersion: 1.0\n"},
		{"tinypkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"tinypkg-1.0.dist-info/RECORD", "tinypkg.py,,\ntinypkg-1.0.dist-info/METADATA,,\ntinypkg-1.0.dist-info/WHEEL,,\ntinypkg-1.0.dist-info/RECORD,,\n"},
	})
	const name = "tinypkg-1.0-py3-none-any.whl"
	return func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/simple/tinypkg/" {
				http.NotFound(w, r)
				return
			}
			w.Header().Set("Content-Type", "text/html")
			_, _ = fmt.Fprintf(w, `<!DOCTYPE html><html><body><a href="https://files.pythonhosted.org/%s#sha256=%x">%s</a></body></html>`, name, sha256.Sum256(wheel), name)
		}, func(w http.ResponseWriter, r *http.Request) {
			_, _ = w.Write(wheel)
		}
}

// goProxy serves one module.
func goProxy(t testing.TB) http.Handler {
	mod := zipped(t, [][2]string{{"tiny.test/mod@v1.0.0/go.mod", "module tiny.test/mod\n"}, {"tiny.test/mod@v1.0.0/m.go", "package mod\n"}})
	mux := http.NewServeMux()
	for name, b := range map[string][]byte{"info": []byte(`{"Version":"v1.0.0"}`), "mod": []byte("module tiny.test/mod\n"), "zip": mod} {
		mux.HandleFunc("GET /tiny.test/mod/@v/v1.0.0."+name, func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write(b) })
	}
	return mux
}

// Programs that people use run unchanged in a real sandbox and reach through the
// proxy what its environment allows, and nothing else. A download goes on over
// snapshots (trial R5: connections of the original survive).
func TestEgressSandbox(t *testing.T) {
	e := newBareEnv(t, testenv.NewMCPWorld(t))
	o := newOutside(t)
	a := newAuthority(t)
	gitServer(t, o, a)
	index, files := pythonIndex(t)
	o.serveTLS(a, "pypi.org:443", index)
	o.serveTLS(a, "files.pythonhosted.org:443", files)
	o.serveTLS(a, "registry.npmjs.org:443", npmRegistry(t))
	o.serveTLS(a, "proxy.golang.org:443", goProxy(t))
	o.serve("plain.test:80", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		_, _ = fmt.Fprintf(w, "plain %s %d", r.Method, len(b))
	})
	o.serve("deb.debian.org:80", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/flat/./Packages" && r.URL.Path != "/flat/Packages" {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, "Package: tiny\nVersion: 1.0\nArchitecture: all\nMaintainer: T <t@example.test>\nFilename: ./tiny.deb\nSize: 1\nDescription: tiny from apt\n\n")
	})
	block, half, release := bytes.Repeat([]byte("0123456789abcdef"), 1<<12), make(chan struct{}), make(chan struct{})
	const blocks = 256 // 16 MiB
	o.serveTLS(a, "files.world.test:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(blocks*len(block)))
		for n := range blocks {
			if n == blocks/2 {
				w.(http.Flusher).Flush()
				close(half)
				<-release
			}
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	}))
	i := o.inside(gateway.Network{Hosts: []string{"git.test", "plain.test", "*.world.test"}, PackageManagers: true},
		func(k *keeper.Config) { k.DB, k.Vault, k.Roots = e.db, e.master, a.roots() })
	i.scope.Session = e.session
	i.scope.Repositories = []gateway.Repository{{Resource: "sesrsc_1", URL: "https://git.test/owner/repo.git"}}
	e.storeToken("sesrsc_1", gitToken)
	g := i.start()
	begin := time.Now()
	ctx := t.Context()
	if err := g.s.PutFile(ctx, "/workspace/ca.pem", 0o644, bytes.NewReader(a.pem)); err != nil {
		t.Fatal(err)
	}
	g.must("mkdir -p /etc/ssl/certs && cat ca.pem >> /etc/ssl/certs/ca-certificates.crt && export NODE_EXTRA_CA_CERTS=/workspace/ca.pem && echo ready", "ready")
	if g.has("curl") {
		g.must("curl -sS http://plain.test/", "plain GET 0")
		g.must("head -c 3000000 /dev/zero | curl -sS --data-binary @- http://plain.test/", "plain POST 3000000")
		g.must("head -c 100000 /dev/zero | curl -sS -T - http://plain.test/", "plain PUT 100000")
		g.must("curl -sS http://denied.test/", `add "denied.test" to the environment's networking.allowed_hosts`)
		g.must("curl -sS https://denied.test/ 2>&1 || true", "403")
		g.must("curl -sS http://169.254.169.254/ http://127.0.0.1:3128/", "not by address")
		g.must("curl -sS --connect-to git.test:443:files.world.test:443 https://git.test/ 2>&1 || true", "unrecognized name")
	} else {
		t.Log("curl is missing in the sandbox: not tried")
	}
	if g.has("git") {
		g.must("git clone -q http://repositories.planaria/sesrsc_1 mounted && cat mounted/README", "fetched by the keeper")
		g.must("git clone -q https://git.test/open/repo.git cloned && cat cloned/README", "fetched by the keeper")
		g.must("cd mounted && git push -q origin HEAD:refs/heads/x 2>&1; cd ..", "comes with contracted hosts")
		if out, _ := g.sh("grep -rl 'ghp_This[T]oken' /workspace /root /tmp /proc/[0-9]*/environ 2>/dev/null"); !strings.HasPrefix(out, "exit code") {
			t.Errorf("the token is inside: %s", out)
		}
	} else {
		t.Log("git is missing in the sandbox: not tried")
	}
	if g.has("npm") {
		g.must("mkdir n && cd n && npm install --no-audit --no-fund --loglevel=error tiny-pkg && node -p 'require(\"tiny-pkg\")'; cd ..", "tiny from npm")
	} else {
		t.Log("npm is missing in the sandbox: not tried")
	}
	if _, ok := g.sh("python3 -m pip --version"); ok {
		g.must("python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-compile --target p tinypkg && PYTHONPATH=p python3 -c 'import tinypkg; print(tinypkg.text)'", "tiny from pip")
	} else {
		t.Log("pip is missing in the sandbox: not tried")
	}
	if _, ok := g.sh("/usr/local/go/bin/go version"); ok {
		g.must("GOFLAGS=-modcacherw GONOSUMDB='*' GOTELEMETRY=off /usr/local/go/bin/go mod download -json tiny.test/mod@v1.0.0", `"Version": "v1.0.0"`)
	} else {
		t.Log("go is missing in the sandbox: not tried")
	}
	if g.has("apt-get") {
		g.must("mkdir -p apt/lists/partial apt/cache/archives/partial && echo 'deb [trusted=yes] http://deb.debian.org/flat ./' > apt/list && touch apt/status && "+
			"apt-get -q -o Dir::Etc::SourceList=/workspace/apt/list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=/workspace/apt/lists -o Dir::State::status=/workspace/apt/status -o Dir::Cache=/workspace/apt/cache -o APT::Sandbox::User=root update && "+
			"grep -rh Description apt/lists", "tiny from apt")
	} else {
		t.Log("apt-get is missing in the sandbox: not tried")
	}
	if g.has("curl") {
		g.must("curl -sS https://files.world.test/big -o big & echo started", "started")
		<-half
		for range 2 {
			if _, err := g.s.Snapshot(ctx); err != nil {
				t.Fatal(err)
			}
		}
		close(release)
		sum := sha256.New()
		for range blocks {
			sum.Write(block)
		}
		g.must("wait; sha256sum < big", fmt.Sprintf("%x", sum.Sum(nil)))
	}
	t.Logf("%d tunnels in %v", o.tunnels(), time.Since(begin))
}
