package session

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// An environment's packages are installed once: the first session of it on a
// node builds a machine, under its own name and fence but with another way out,
// which leads to the package registries alone; a snapshot of it is the template;
// every session, the builder included, begins with a restore of that under its
// own name and with an identity of its own. Sessions that come meanwhile wait.
//
// A template is known by all that it depends on (templateKey): another list of
// packages, another root file system, other limits or another runtime make
// another one.

const (
	// installTime bounds one manager's command, as far as the environment's
	// call_seconds allow it so long.
	installTime = 15 * time.Minute
	// buildTime bounds a whole build.
	buildTime = 30 * time.Minute
	// templateGrace is how long a template that no environment's newest
	// configuration asks for is kept after its last use.
	templateGrace = 24 * time.Hour
	// lastLines of a command that failed are told.
	lastLines = 20
	// templateTries: a template that cannot be restored is built again, once.
	templateTries = 2
	// buildThread has the shell of a build; it is gone before the snapshot.
	buildThread = "packages"
	// packageDir is where packages go that the root's own manager does not keep.
	packageDir = "/opt/planaria"
	// templateFormat changes when the commands do.
	templateFormat = 1
)

// BuildError says why an environment's packages could not be installed. The
// model and the user read it.
type BuildError struct {
	Manager string // apt, cargo, gem, go, npm or pip
	Says    string // its last lines, or what is missing
}

func (e *BuildError) Error() string {
	return "install the environment's packages: " + e.Manager + ": " + e.Says
}

// manager installs packages of one kind. Its command gets them quoted.
type manager struct {
	name    string
	list    func(api.Packages) []string
	program string // that must be there
	command func(packages string) string
	// vars are set for shells where the manager has packages: a folder before
	// what the variable holds.
	vars map[string]string
}

// managers in the order in which they run (reference section 4.1). All but apt
// install into folders of their own, so that they do the same on every root.
var managers = []manager{
	{name: "apt", list: func(p api.Packages) []string { return p.Apt }, program: "apt-get",
		command: func(p string) string {
			const get = "apt-get -q -o APT::Sandbox::User=root -o Acquire::Retries=2 -o Dpkg::Use-Pty=0 "
			return get + "update && " + get + "install -y --no-install-recommends " + p + " && apt-get clean && rm -rf /var/lib/apt/lists/*"
		}},
	{name: "cargo", list: func(p api.Packages) []string { return p.Cargo }, program: "cargo", vars: map[string]string{"PATH": "cargo/bin"},
		command: func(p string) string {
			return "CARGO_HOME=/tmp/cargo CARGO_TARGET_DIR=/tmp/cargo-target cargo install --root " + packageDir + "/cargo " + p
		}},
	{name: "gem", list: func(p api.Packages) []string { return p.Gem }, program: "gem", vars: map[string]string{"PATH": "gem/bin", "GEM_PATH": "gem"},
		command: func(p string) string {
			return "gem install --no-document --install-dir " + packageDir + "/gem --bindir " + packageDir + "/gem/bin " + p
		}},
	{name: "go", list: func(p api.Packages) []string { return latest(p.Go) }, program: "go", vars: map[string]string{"PATH": "go/bin"},
		command: func(p string) string {
			// Packages of different modules cannot be named in one command.
			return "for p in " + p + "; do GOBIN=" + packageDir + "/go/bin GOPATH=/tmp/go GOCACHE=/tmp/go-build GOFLAGS=-modcacherw go install \"$p\" || exit; done"
		}},
	{name: "npm", list: func(p api.Packages) []string { return p.NPM }, program: "npm", vars: map[string]string{"PATH": "npm/bin", "NODE_PATH": "npm/lib/node_modules"},
		command: func(p string) string {
			return "npm install --global --prefix " + packageDir + "/npm --cache /tmp/npm --no-audit --no-fund --no-update-notifier --color=false --loglevel=error " + p
		}},
	{name: "pip", list: func(p api.Packages) []string { return p.Pip }, program: "python3", vars: map[string]string{"PATH": "pip/bin", "PYTHONPATH": "pip"},
		command: func(p string) string {
			return "PIP_ROOT_USER_ACTION=ignore python3 -m pip install --no-cache-dir --disable-pip-version-check --no-input --progress-bar off --target " + packageDir + "/pip " + p
		}},
}

// latest gives Go packages the version that go install needs.
func latest(list []string) []string {
	out := slices.Clone(list)
	for i, p := range out {
		if !strings.Contains(p, "@") {
			out[i] = p + "@latest"
		}
	}
	return out
}

// shellPath is PATH where the root sets none.
const shellPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// packageEnv is what shells need to find the packages.
func packageEnv(p api.Packages, root []string) []string {
	vars := map[string]string{}
	for _, m := range slices.Backward(managers) {
		if len(m.list(p)) == 0 {
			continue
		}
		for name, dir := range m.vars {
			rest, ok := vars[name]
			if !ok {
				rest = lookup(root, name)
			}
			if rest == "" && name == "PATH" {
				rest = shellPath
			}
			vars[name] = path.Join(packageDir, dir) + ":" + rest
		}
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(vars)) {
		value := vars[name]
		if name != "GEM_PATH" { // where an end of ":" stands for the usual folders
			value = strings.TrimSuffix(value, ":")
		}
		out = append(out, name+"="+value)
	}
	return out
}

func lookup(env []string, name string) (value string) {
	for _, e := range env {
		if n, v, _ := strings.Cut(e, "="); n == name {
			value = v
		}
	}
	return value
}

// quote makes words of a shell command of names that strangers chose.
func quote(words []string) string {
	out := make([]string, len(words))
	for i, w := range words {
		out[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
	}
	return strings.Join(out, " ")
}

// fresh starts the session's first machine, which nothing has run in yet: from
// the template of its environment where that has packages, else from the root
// file system alone. The caller sets name, fence, limits and env of spec; its
// root is filled in here, from the environment's image.
//
// An error that unwraps to *BuildError or sandbox.ErrImage is for the model and
// the user to read: the tool call that needed the machine is answered with its
// text, and the next one tries again. Other errors are the node's.
func (d *driver) fresh(ctx context.Context, spec sandbox.Spec) (*sandbox.Sandbox, error) {
	var e environment
	d.read(func(st *state) { e = st.env })
	if image := e.machine.Image; image != "" && image != "host" {
		root, err := d.m.cfg.Sandboxes.Image(ctx, string(d.ws), image)
		if err != nil {
			return nil, err
		}
		spec.Root = root
	}
	if e.Packages == nil || !hasPackages(*e.Packages) {
		return d.m.cfg.Sandboxes.Start(ctx, spec)
	}
	if len(e.Packages.Apt) > 0 && spec.Root.Dir == "" {
		return nil, &BuildError{"apt", "the environment runs on the node's own programs, which apt must not change; give it an image (config.planaria.image), or leave the apt packages out"}
	}
	spec.Env = append(spec.Env, d.m.builds.env...)
	spec.Env = append(spec.Env, packageEnv(*e.Packages, spec.Root.Env)...)
	return d.template(ctx, spec, e)
}

func hasPackages(p api.Packages) bool {
	return slices.ContainsFunc(managers, func(m manager) bool { return len(m.list(p)) > 0 })
}

// recipe names what an environment asks for of a template.
func recipe(e environment) string {
	m := e.machine
	p := api.Packages{Type: "packages"}
	if e.Packages != nil {
		p = *e.Packages
		p.Type = "packages"
	}
	return digest(struct {
		Packages api.Packages
		Image    string
		Limits   []any
	}{p, m.Image, []any{m.CPUs, m.MemoryMB, m.DiskMB, m.Processes, m.CallSeconds}})
}

// templateKey names all that a template depends on, so that one that is found
// under it can be restored for this session.
func (d *driver) templateKey(ctx context.Context, spec sandbox.Spec, recipe string) (string, error) {
	r := d.m.cfg.Sandboxes
	root, err := r.RootDigest(ctx, spec.Root)
	if err != nil {
		return "", err
	}
	runtime, err := r.Binary(ctx)
	if err != nil {
		return "", err
	}
	return digest(struct {
		Format                           int
		Workspace, Recipe, Root, Runtime string
		Limits                           sandbox.Limits
		Env                              []string
	}{templateFormat, spec.Workspace, recipe, root, runtime, spec.Limits, spec.Env}), nil
}

func digest(v any) string {
	b, _ := json.Marshal(v) // plain structs: cannot fail
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// template starts a machine from the environment's template, which it builds
// where there is none.
func (d *driver) template(ctx context.Context, spec sandbox.Spec, e environment) (*sandbox.Sandbox, error) {
	made := recipe(e)
	key, err := d.templateKey(ctx, spec, made)
	if err != nil {
		return nil, err
	}
	for try := 1; ; {
		s, err := d.restoreTemplate(ctx, key, spec)
		if err == nil || !unrestorable(err) {
			return s, err
		}
		if !errors.Is(err, sandbox.ErrNotFound) {
			d.m.log.Warn("a template cannot be restored and is built again", "session", d.id, "err", err)
		}
		if try > templateTries {
			return nil, err
		}
		led, err := d.m.builds.once(ctx, key, func() error {
			if err := d.m.cfg.Sandboxes.DropTemplate(key); err != nil {
				return err
			}
			return d.build(ctx, key, made, spec, *e.Packages)
		})
		if err != nil {
			return nil, err
		}
		if led {
			try++
			d.m.dropTemplates(ctx)
		}
	}
}

func (d *driver) restoreTemplate(ctx context.Context, key string, spec sandbox.Spec) (*sandbox.Sandbox, error) {
	d.m.builds.restoring.RLock() // dropTemplates waits
	defer d.m.builds.restoring.RUnlock()
	_, m, err := d.m.cfg.Sandboxes.Template(key)
	if err != nil {
		return nil, err
	}
	s, _, err := d.m.cfg.Sandboxes.Restore(ctx, m, spec)
	return s, err
}

// builds are the templates that are being built, and the machines in which.
type builds struct {
	env       []string     // tests: of every build and what comes of it
	restoring sync.RWMutex // held for writing while templates are removed

	mu    sync.Mutex
	under map[string]*build // by template key
	doors map[*sandbox.Sandbox]*buildDoor
}

// build is one that goes on.
type build struct {
	over chan struct{}
	err  error
}

// once runs f unless somebody builds this template; then it waits for that and
// has its error, except that a builder who was only cut short leaves the build
// to the next. led tells whether f ran here.
func (b *builds) once(ctx context.Context, key string, f func() error) (led bool, err error) {
	b.mu.Lock()
	other := b.under[key]
	if other == nil {
		if b.under == nil {
			b.under = map[string]*build{}
		}
		mine := &build{over: make(chan struct{}), err: errors.New("the build ended without a word")}
		b.under[key] = mine
		b.mu.Unlock()
		defer func() { // also when f panics
			b.mu.Lock()
			delete(b.under, key)
			b.mu.Unlock()
			close(mine.over)
		}()
		mine.err = f()
		return true, mine.err
	}
	b.mu.Unlock()
	select {
	case <-other.over:
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
	if errors.As(other.err, new(*BuildError)) {
		return false, other.err
	}
	return false, nil // it is there, or the next one tries
}

// build installs the packages in a new machine and makes its snapshot the
// template.
//
//  1. the machine, under the session's name: a crash leaves one that no record
//     tells of, and the session's next owner ends it
//  2. its snapshot. A crash from here to 3 leaves an image that nobody names,
//     which is swept.
//  3. the template's note: from here on sessions begin with it
func (d *driver) build(ctx context.Context, key, recipe string, spec sandbox.Spec, p api.Packages) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, buildTime, &BuildError{"all", fmt.Sprintf("the build took longer than %v", buildTime)})
	defer cancel()
	began := d.m.now()
	s, err := d.m.cfg.Sandboxes.Start(ctx, spec)
	if err != nil {
		return err
	}
	door := d.m.builds.open(d, s)
	defer func() {
		d.m.builds.shut(door)
		if errors.As(err, new(*crash)) {
			return // it is left as a crash would leave it
		}
		if kerr := s.Kill(context.WithoutCancel(ctx)); kerr != nil && err == nil {
			err = kerr
		}
	}()
	for _, m := range managers {
		if list := m.list(p); len(list) > 0 {
			if err := d.install(ctx, s, m, list); err != nil {
				if cause := context.Cause(ctx); cause != nil {
					return cause
				}
				return err
			}
		}
	}
	if err := d.tidy(ctx, s); err != nil {
		return err
	}
	if err := d.m.fault("packages_installed"); err != nil {
		return err
	}
	image, err := s.Snapshot(ctx)
	if err != nil {
		return err
	}
	if err := d.m.fault("template_saved"); err != nil {
		return err
	}
	if err := d.m.cfg.Sandboxes.KeepTemplate(sandbox.Template{Key: key, Workspace: spec.Workspace, Recipe: recipe, Snapshot: image.ID, At: d.m.now()}); err != nil {
		return err
	}
	d.m.log.Info("installed an environment's packages", "session", d.id, "template", key, "bytes", image.Size(), "elapsed", d.m.now().Sub(began))
	return nil
}

// install runs one manager's command.
func (d *driver) install(ctx context.Context, s *sandbox.Sandbox, m manager, list []string) error {
	r, err := buildCall(ctx, s, m.name+"_there", "command -v "+m.program, time.Minute)
	if err != nil {
		return err
	}
	if r.IsError {
		return &BuildError{m.name, "the root file system has no " + m.program + "; give the environment an image with it (config.planaria.image)"}
	}
	r, err = buildCall(ctx, s, m.name, "(umask 022; cd /tmp && "+m.command(quote(list))+") 2>&1", installTime)
	if err != nil {
		return err
	}
	if r.IsError {
		return &BuildError{m.name, newestLines(r.Text, lastLines)}
	}
	return nil
}

// tidy leaves neither the build's shell nor its files in the template.
func (d *driver) tidy(ctx context.Context, s *sandbox.Sandbox) error {
	r, err := buildCall(ctx, s, "tidy", "find /tmp /var/tmp -mindepth 1 -delete; rm -rf \"$HOME/.cache\" \"$HOME/.npm\"", time.Minute)
	if err == nil && r.IsError {
		d.m.log.Warn("a build's files stay in its template", "session", d.id, "err", newestLines(r.Text, 1))
	}
	if err != nil {
		return err
	}
	in := encode(map[string]bool{"restart": true})
	id := "packages_end"
	if _, err := s.Do(ctx, sandbox.Call{ID: id, Thread: buildThread, Tool: "bash", Input: in}); err != nil {
		return err
	}
	return s.Ack(ctx, id)
}

// buildCall runs a command in a build's machine to its end.
func buildCall(ctx context.Context, s *sandbox.Sandbox, name, command string, limit time.Duration) (*sandbox.Result, error) {
	id := "packages_" + name
	in := encode(map[string]any{"command": command, "timeout_ms": limit.Milliseconds()})
	r, err := s.Do(ctx, sandbox.Call{ID: id, Thread: buildThread, Tool: "bash", Input: in})
	if err != nil {
		return nil, err
	}
	return r, s.Ack(ctx, id)
}

// terminalCodes are what programs write for a terminal: colours, cursor.
var terminalCodes = regexp.MustCompile(`\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\a\x1b]*(\a|\x1b\\)|[@-_])`)

// newestLines are the last lines of an output that are not empty.
func newestLines(text string, n int) string {
	text = strings.ReplaceAll(terminalCodes.ReplaceAllString(text, ""), "\r", "\n")
	lines := slices.DeleteFunc(strings.Split(text, "\n"), func(l string) bool { return strings.TrimSpace(l) == "" })
	return clip(strings.Join(lines[max(0, len(lines)-n):], "\n"), 4000)
}

// buildDoor is the way out of a machine in which packages are installed.
type buildDoor struct {
	d    *driver
	s    *sandbox.Sandbox
	ctx  context.Context // ends when the build does
	shut context.CancelFunc
	wait sync.WaitGroup
}

func (b *builds) open(d *driver, s *sandbox.Sandbox) *buildDoor {
	ctx, cancel := context.WithCancel(context.Background())
	door := &buildDoor{d: d, s: s, ctx: ctx, shut: cancel}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.doors == nil {
		b.doors = map[*sandbox.Sandbox]*buildDoor{}
	}
	b.doors[s] = door
	return door
}

// shut closes a build's way out and waits for what it serves.
func (b *builds) shut(door *buildDoor) {
	b.mu.Lock()
	delete(b.doors, door.s)
	b.mu.Unlock()
	door.shut()
	door.wait.Wait()
}

// serve serves a connection of a build's machine; false: it is no build's.
func (b *builds) serve(ctx context.Context, g *gateway.Gateway, s *sandbox.Sandbox, conn io.ReadWriteCloser) bool {
	b.mu.Lock()
	door := b.doors[s]
	if door != nil {
		door.wait.Add(1)
	}
	b.mu.Unlock()
	if door == nil {
		return false
	}
	defer door.wait.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(door.ctx, cancel)()
	if err := door.d.unpanicked(func() error {
		g.Egress(ctx, door.d.buildScope(), conn)
		return nil
	}); err != nil {
		_ = conn.Close()
	}
	return true
}

// buildCalls stands for the calls of a build in the records of tunnels: what it
// fetched is no reason not to run the session's own calls again.
const buildCalls = store.EventID("packages")

// buildScope is where a build may connect to: the package registries, whatever
// else the environment allows. Each tunnel is in the log before it is dialled.
func (d *driver) buildScope() gateway.EgressScope {
	return gateway.EgressScope{Workspace: d.ws, Session: d.id, Network: gateway.Network{PackageManagers: true},
		Opened: func(ctx context.Context, t store.Tunnel) error {
			t.V, t.Calls = store.BodyVersion, []store.EventID{buildCalls}
			_, err := d.append(ctx, store.Append{Entries: []store.Draft{record(store.KindTunnel, t.Tunnel, d.scope.Thread, t)}})
			return err
		},
		Ended: func(t store.Tunnel) {
			t.V, t.Ended, t.Calls = store.BodyVersion, true, []store.EventID{buildCalls}
			d.m.db.AppendRelaxed(d.lease, []store.Draft{record(store.KindTunnel, t.Tunnel, d.scope.Thread, t)})
		}}
}

// dropTemplates removes templates that no environment's newest configuration
// asks for, and older ones of those that it does (another root, another
// runtime), a day after their last use. What fails is tried after the next build.
func (m *Manager) dropTemplates(ctx context.Context) {
	if err := m.tryDropTemplates(ctx); err != nil && ctx.Err() == nil {
		m.log.Warn("cannot remove old templates", "err", err)
	}
}

func (m *Manager) tryDropTemplates(ctx context.Context) error {
	m.builds.restoring.Lock()
	defer m.builds.restoring.Unlock()
	list, err := m.cfg.Sandboxes.Templates()
	if err != nil {
		return err
	}
	slices.SortFunc(list, func(a, b sandbox.Template) int { return b.At.Compare(a.At) }) // the newest first
	wanted := map[string]map[string]bool{}
	for _, t := range list {
		if wanted[t.Workspace] == nil {
			if wanted[t.Workspace], err = m.recipes(ctx, store.WorkspaceID(t.Workspace)); err != nil {
				return err
			}
		}
		if wanted[t.Workspace][t.Recipe] {
			delete(wanted[t.Workspace], t.Recipe) // its newest is this one
			continue
		}
		if time.Since(t.Used) < templateGrace {
			continue
		}
		if err := m.cfg.Sandboxes.DropTemplate(t.Key); err != nil {
			return err
		}
		m.log.Info("removed a template that no environment asks for", "template", t.Key)
	}
	return nil
}

// recipes are what a workspace's environments ask for now.
func (m *Manager) recipes(ctx context.Context, ws store.WorkspaceID) (map[string]bool, error) {
	list, err := m.db.Environments(ctx, ws, store.Page{})
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, row := range list {
		var e api.Environment
		if err := json.Unmarshal(row.Body, &e); err != nil {
			return nil, fmt.Errorf("read environment %s: %w", row.ID, err)
		}
		env := environment{EnvironmentConfig: e.Config}
		if e.Config.Planaria != nil {
			env.machine = *e.Config.Planaria
		}
		out[recipe(env)] = true
	}
	return out, nil
}
