package session_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
	"github.com/planaria/planaria/internal/vault"
)

// TestPackageCommands: managers run in alphabetical order, names are never read
// by the shell, and shells find what was installed.
func TestPackageCommands(t *testing.T) {
	if m := session.PackageManagers(); !slices.IsSorted(m) || len(m) != 6 {
		t.Errorf("managers %v, want six in alphabetical order", m)
	}
	hostile := "x;touch${IFS}/tmp/owned'$(id)`id`"
	p := api.Packages{Apt: []string{hostile}, Cargo: []string{hostile}, Gem: []string{hostile}, Go: []string{hostile + "@v1", "plain"}, NPM: []string{hostile}, Pip: []string{hostile}}
	for _, name := range session.PackageManagers() {
		command := session.PackageCommand(name, p)
		// A shell that only prints the words that it would run with.
		script := "for n in apt-get cargo gem go npm python3 rm; do eval \"$n() { printf '%s\\n' \\\"\\$@\\\"; }\"; done\n" + command
		out, err := exec.Command("bash", "-c", script).CombinedOutput()
		if err != nil || !slices.ContainsFunc(strings.Split(string(out), "\n"), func(l string) bool { return strings.HasPrefix(l, hostile) }) {
			t.Errorf("%s: %s\nsays %q, %v", name, command, out, err)
		}
		if name == "go" && !strings.Contains(string(out), "plain@latest") {
			t.Errorf("go: no version for a package without one: %q", out)
		}
	}
	for _, tt := range []struct {
		name string
		p    api.Packages
		root []string
		want []string
	}{
		{"pip on the host", api.Packages{Pip: []string{"a"}}, nil,
			[]string{"PATH=/opt/planaria/pip/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH=/opt/planaria/pip"}},
		{"on an image", api.Packages{NPM: []string{"a"}, Gem: []string{"b"}}, []string{"PATH=/image/bin", "NODE_PATH=/n"},
			[]string{"GEM_PATH=/opt/planaria/gem:", "NODE_PATH=/opt/planaria/npm/lib/node_modules:/n", "PATH=/opt/planaria/gem/bin:/opt/planaria/npm/bin:/image/bin"}},
		{"apt alone", api.Packages{Apt: []string{"a"}}, nil, nil},
	} {
		if diff := cmp.Diff(tt.want, session.PackageEnv(tt.p, tt.root)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// registries are an npm registry and a pip index on loopback.
type registries struct {
	server  *httptest.Server
	fetched atomic.Int64 // packages
	broken  atomic.Bool
	mu      sync.Mutex
	dialled []string
}

func newRegistries(t testing.TB) *registries {
	t.Helper()
	r := &registries{}
	tgz := npmPackage(t)
	wheel := pipPackage(t)
	sum := sha512.Sum512(tgz)
	mux := http.NewServeMux()
	mux.HandleFunc("GET registry.npmjs.org/planaria-hello", func(w http.ResponseWriter, _ *http.Request) {
		if r.broken.Load() {
			http.Error(w, `{"error":"the registry is broken today"}`, http.StatusNotFound)
			return
		}
		_ = json.NewEncoder(w).Encode(m{"name": "planaria-hello", "dist-tags": m{"latest": "1.0.0"}, "versions": m{"1.0.0": m{
			"name": "planaria-hello", "version": "1.0.0", "bin": m{"planaria-hello": "hello.js"},
			"dist": m{"tarball": "http://registry.npmjs.org/planaria-hello/-/planaria-hello-1.0.0.tgz", "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:])}}}})
	})
	mux.HandleFunc("GET registry.npmjs.org/planaria-hello/-/", func(w http.ResponseWriter, _ *http.Request) {
		r.fetched.Add(1)
		_, _ = w.Write(tgz)
	})
	mux.HandleFunc("GET pypi.org/simple/planaria-hello/", func(w http.ResponseWriter, req *http.Request) {
		if strings.HasSuffix(req.URL.Path, ".whl") {
			r.fetched.Add(1)
			_, _ = w.Write(wheel)
			return
		}
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, `<!DOCTYPE html><html><body><a href="planaria_hello-1.0-py3-none-any.whl">planaria_hello-1.0-py3-none-any.whl</a></body></html>`)
	})
	r.server = httptest.NewServer(mux)
	t.Cleanup(r.server.Close)
	return r
}

// dial reaches the registries under their names and nothing else.
func (r *registries) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	r.mu.Lock()
	r.dialled = append(r.dialled, addr)
	r.mu.Unlock()
	return (&net.Dialer{}).DialContext(ctx, network, r.server.Listener.Addr().String())
}

func npmPackage(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for name, text := range map[string]string{
		"package/package.json": `{"name":"planaria-hello","version":"1.0.0","bin":{"planaria-hello":"hello.js"},"main":"hello.js"}`,
		"package/hello.js":     "#!/usr/bin/env node\nconsole.log('hello from npm')\n",
	} {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(w, text)
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func pipPackage(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	const info = "planaria_hello-1.0.dist-info/"
	record := ""
	for _, f := range [][2]string{
		{"planaria_hello/__init__.py", "def main():\n    print('hello from pip')\n"},
		{info + "METADATA", "Metadata-Version: 2.1\nName: planaria-hello\nVersion: 1.0\n"},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{info + "entry_points.txt", "[console_scripts]\nplanaria-py = planaria_hello:main\n"},
		{info + "RECORD", ""},
	} {
		text := f[1]
		record += f[0] + ",,\n"
		if strings.HasSuffix(f[0], "RECORD") {
			text = record
		}
		e, err := w.Create(f[0])
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(e, text)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// packaged is a system whose sandboxes reach registries of ours, through the
// real gateway.
type packaged struct {
	t       testing.TB
	db      *store.DB
	manager *session.Manager
	r       *sandbox.Runtime
	world   *registries
	logs    *logs
	dir     string // of the sandboxes

	mu    sync.Mutex
	fault func(point string) error
}

func newPackaged(t testing.TB, script ...llm.PlayScript) *packaged {
	t.Helper()
	binary := testenv.Binary(t)
	dir := t.TempDir()
	p := &packaged{t: t, world: newRegistries(t), logs: &logs{}, dir: filepath.Join(dir, "sandboxes")}
	log := slog.New(slog.NewTextHandler(p.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	master, err := vault.CreateMaster(dir, filepath.Join(dir, "identity"))
	if err != nil {
		t.Fatal(err)
	}
	blobs, err := blob.Open(filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	if p.db, err = store.Open(t.Context(), store.Config{URL: "sqlite:" + filepath.Join(dir, "data", "planaria.db"), Master: master, Blobs: blobs, Logger: log}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wait sync.WaitGroup
	wait.Go(func() { _ = p.db.Run(ctx) })
	if err := p.db.EnsureWorkspace(t.Context(), ws, "Default"); err != nil {
		t.Fatal(err)
	}
	node, err := p.db.Join(t.Context(), store.NodeInfo{})
	if err != nil {
		t.Fatal(err)
	}
	s := &llm.Script{Scripts: script}
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	model := httptest.NewServer(llm.NewScriptServer(s))
	models, err := llm.NewModels(http.DefaultClient, []llm.Rule{{Pattern: "*", Provider: "anthropic",
		Config: llm.Config{BaseURL: model.URL, Key: func() string { return "key" }}, ContextWindow: 1_000_000, MaxOutput: 1000}})
	if err != nil {
		t.Fatal(err)
	}
	effects := effect.New(p.db, effect.Config{})
	k := keeper.New(keeper.Config{DB: p.db, Effects: effects, Vault: master, Models: models, Logger: log, Dial: p.world.dial})
	if p.r, err = sandbox.Open(t.Context(), sandbox.Config{Dir: p.dir, Blobs: blobs, Binary: binary, Log: log, StartTimeout: time.Minute,
		Egress: func(ctx context.Context, s *sandbox.Sandbox, conn io.ReadWriteCloser) { p.manager.Egress(ctx, s, conn) }}); err != nil {
		t.Fatal(err)
	}
	p.manager = session.New(session.Config{DB: p.db, Node: node, Gateway: gateway.New(gateway.Config{DB: p.db, Keeper: k, Effects: effects, Logger: log}),
		Logger: log, Sandboxes: p.r, Patience: session.Patience{Base: 5 * time.Millisecond, Max: 50 * time.Millisecond},
		Fault: func(point string) error {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.fault == nil {
				return nil
			}
			return p.fault(point)
		}})
	p.manager.BuildEnv("npm_config_registry=http://registry.npmjs.org/", "PIP_INDEX_URL=http://pypi.org/simple", "PIP_TRUSTED_HOST=pypi.org")
	run, drain := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() { defer close(over); _ = p.manager.Run(run) }()
	t.Cleanup(func() {
		drain()
		<-over
		for _, l := range p.r.Live() {
			if err := p.r.End(context.Background(), l[0], l[1]); err != nil {
				t.Error(err)
			}
		}
		if err := p.r.Close(); err != nil {
			t.Error(err)
		}
		k.Close()
		model.Close()
		cancel()
		wait.Wait()
		_ = p.db.Close()
		_ = blobs.Close()
		if t.Failed() {
			s := p.logs.String()
			t.Logf("end of the log:\n%s", s[max(0, len(s)-6<<10):])
		}
	})
	return p
}

// environment stores an environment and returns its wire config.
func (p *packaged) environment(config m) (store.EnvironmentID, json.RawMessage) {
	p.t.Helper()
	var c api.EnvironmentCreate
	if err := json.Unmarshal(raw(m{"name": "packages", "config": config}), &c); err != nil {
		p.t.Fatal(err)
	}
	e, err := api.ResolveEnvironment(c)
	if err != nil {
		p.t.Fatal(err)
	}
	now := p.db.Now()
	id := store.EnvironmentID(store.NewID("env_", now))
	e.ID = string(id)
	if _, err := p.db.CreateEnvironment(p.t.Context(), store.Environment{Workspace: ws, ID: id, Name: e.Name, Body: raw(e), CreatedAt: now, UpdatedAt: now}); err != nil {
		p.t.Fatal(err)
	}
	return id, raw(e.Config)
}

// begin makes a session with a tag that finds its script.
func (p *packaged) begin(tag string, env store.EnvironmentID, config json.RawMessage) store.SessionID {
	p.t.Helper()
	s, err := p.manager.Create(p.t.Context(), ws, "test", session.CreateParams{
		Agent: raw(m{"id": "agent_1", "version": 1, "name": "tester", "model": m{"id": "scripted"},
			"tools": []m{{"type": "agent_toolset_20260401", "default_config": m{"permission_policy": m{"type": "always_allow"}}}}}),
		EnvironmentID: env, Environment: config, InitialEvents: []json.RawMessage{raw(message(tag))}})
	if err != nil {
		p.t.Fatal(err)
	}
	return s.ID
}

// results waits until a session has rested n times and returns its tools' results.
func (p *packaged) results(id store.SessionID, n int) (out []string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), 2*time.Minute)
	defer cancel()
	f, err := p.db.Follow(ctx, ws, id, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	for n > 0 {
		items, err := f.Next(ctx)
		if err != nil {
			p.t.Fatalf("session %s does not rest: %v", id, err)
		}
		for _, it := range items {
			if it.Entry == nil {
				continue
			}
			switch it.Entry.Type {
			case "session.status_idle":
				n--
			case "agent.tool_result":
				var b struct {
					Content []struct{ Text string }
					IsError bool `json:"is_error"`
				}
				if err := json.Unmarshal(it.Entry.Body, &b); err != nil {
					p.t.Fatal(err)
				}
				text := ""
				for _, c := range b.Content {
					text += c.Text
				}
				if b.IsError {
					text = "error: " + text
				}
				out = append(out, strings.TrimSpace(text))
			}
		}
	}
	return out
}

// TestPackages: packages are installed once for an environment, through the
// gateway and from the registries alone; sessions that come together share the
// build, and each begins with a machine of its own. A build that fails says why
// and is tried again.
func TestPackages(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"/usr/bin/npm", "/usr/bin/python3"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("this machine has no %s", program)
		}
	}
	use := shell("planaria-hello; planaria-py; node -e 'require(\"planaria-hello\")'; cat /etc/machine-id; ls /tmp")
	script := func(name string) llm.PlayScript {
		return llm.PlayScript{Name: name, Marker: name, Steps: []llm.Step{calls(use), done, calls(use), done}}
	}
	p := newPackaged(t, script("failing"), script("first"), script("second"))
	env, config := p.environment(m{"type": "cloud", "packages": m{"npm": []string{"planaria-hello@1.0.0"}, "pip": []string{"planaria-hello==1.0"}}})

	p.world.broken.Store(true)
	failing := p.begin("failing", env, config)
	if got := p.results(failing, 1); len(got) != 1 || !strings.HasPrefix(got[0], "error: ") || !strings.Contains(got[0], "install the environment's packages: npm: ") || !strings.Contains(got[0], "404") || strings.ContainsRune(got[0], 0x1b) {
		t.Errorf("the failing build's call says %q", got)
	}
	if n := p.errors(failing); n != 1 {
		t.Errorf("%d session.error events, want one", n)
	}
	p.world.broken.Store(false)
	p.world.fetched.Store(0)
	ids := []store.SessionID{p.begin("first", env, config), p.begin("second", env, config)}
	if _, err := p.manager.Send(t.Context(), ws, failing, []json.RawMessage{raw(message("again"))}); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for i, id := range append(ids, failing) {
		got := p.results(id, 1+i/2)
		if i == 2 {
			got = got[1:]
		}
		want := "hello from npm\nhello from pip\nhello from npm\n"
		if len(got) != 1 || !strings.HasPrefix(got[0], want) {
			t.Fatalf("session %d: %q, want %q and an id", i, got, want)
		}
		machine := strings.TrimPrefix(got[0], want)
		if machine == "" || strings.Contains(machine, "\n") || seen[machine] {
			t.Errorf("session %d has the machine id %q, which is not its own, or files of the build", i, machine)
		}
		seen[machine] = true
	}
	if n := p.world.fetched.Load(); n != 2 {
		t.Errorf("%d packages were fetched, want each once", n)
	}
	p.world.mu.Lock()
	for _, a := range p.world.dialled {
		if a != "registry.npmjs.org:80" && a != "pypi.org:80" {
			t.Errorf("a build reached out to %s", a)
		}
	}
	p.world.mu.Unlock()
	list, err := p.r.Templates()
	if err != nil || len(list) != 1 {
		t.Fatalf("templates %v, %v, want one", list, err)
	}
	if ids, err := p.r.Snapshots(); err != nil || slices.Contains(ids, list[0].Snapshot) {
		t.Errorf("the template is listed as a snapshot: %v, %v", ids, err)
	}
	p.oldTemplates(env, list[0])
}

// errors counts a session's error events.
func (p *packaged) errors(id store.SessionID) int {
	p.t.Helper()
	all, err := p.db.Entries(p.t.Context(), ws, id, store.Range{})
	if err != nil {
		p.t.Fatal(err)
	}
	return count(all, "session.error")
}

// TestPackagesCrash: the builder dies when its snapshot is there and the note of
// the template is not. Nobody takes the snapshot for a template; the next
// session builds, and its machine is whole.
func TestPackagesCrash(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("/usr/bin/python3"); err != nil {
		t.Skip("this machine has no /usr/bin/python3")
	}
	p := newPackaged(t, llm.PlayScript{Name: "dies", Marker: "dies", Steps: []llm.Step{calls(shell("planaria-py")), done}},
		llm.PlayScript{Name: "lives", Marker: "lives", Steps: []llm.Step{calls(shell("planaria-py")), done}})
	env, config := p.environment(m{"type": "cloud", "packages": m{"pip": []string{"planaria-hello"}}})
	died := make(chan struct{})
	p.mu.Lock()
	p.fault = func(point string) error {
		if point != "template_saved" {
			return nil
		}
		p.fault = nil
		close(died)
		return errKilled
	}
	p.mu.Unlock()
	p.begin("dies", env, config)
	select {
	case <-died:
	case <-time.After(2 * time.Minute):
		t.Fatal("the build does not come to its snapshot")
	}
	if list, err := p.r.Templates(); err != nil || len(list) != 0 {
		t.Errorf("templates %v, %v, want none", list, err)
	}
	if ids, err := p.r.Snapshots(); err != nil || len(ids) != 1 {
		t.Errorf("snapshots %v, %v, want the one that nobody names, to be swept", ids, err)
	}
	if got := p.results(p.begin("lives", env, config), 1); len(got) != 1 || got[0] != "hello from pip" {
		t.Errorf("the next session: %q", got)
	}
	if n := p.world.fetched.Load(); n != 2 {
		t.Errorf("%d packages were fetched, want one for each build", n)
	}
}

// oldTemplates: one that the environment asks for stays however old it is; when
// it does not any more, it goes.
func (p *packaged) oldTemplates(env store.EnvironmentID, have sandbox.Template) {
	p.t.Helper()
	p.age(have.Key)
	if err := p.manager.DropTemplates(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}
	if _, _, err := p.r.Template(have.Key); err != nil {
		p.t.Errorf("the template that is asked for: %v", err)
	}
	if err := p.db.DeleteEnvironment(p.t.Context(), ws, env); err != nil {
		p.t.Fatal(err)
	}
	if err := p.manager.DropTemplates(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}
	if _, _, err := p.r.Template(have.Key); err != nil {
		p.t.Errorf("a template that was just used: %v", err)
	}
	p.age(have.Key)
	if err := p.manager.DropTemplates(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}
	if _, _, err := p.r.Template(have.Key); !errors.Is(err, sandbox.ErrNotFound) {
		p.t.Errorf("an old template that nobody asks for: %v", err)
	}
	if _, err := p.r.ReadSnapshot(have.Snapshot); !errors.Is(err, sandbox.ErrNotFound) {
		p.t.Errorf("its image: %v", err)
	}
}

// age makes a template look as if it had not been used for long.
func (p *packaged) age(key string) {
	p.t.Helper()
	old := time.Now().Add(-48 * time.Hour)
	if err := os.Chtimes(filepath.Join(p.dir, "templates", key+".json"), old, old); err != nil {
		p.t.Fatal(err)
	}
}
