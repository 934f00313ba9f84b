package testenv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/server"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// The engines of the store.
const (
	SQLite     = "sqlite"
	PostgreSQL = "postgres"
)

// Secrets of every test; wherever one shows up, a law is broken.
const (
	canaryToken = "tok-canary-4f1d77c2a9e84b06"
	canaryModel = "sk-canary-a07b52e6d3c94f18"
)

// patience of every test: short waits, so that a recovery is quick.
var patience = session.Patience{Base: 5 * time.Millisecond, Max: 50 * time.Millisecond}

// Deadline bounds every wait for the system.
const Deadline = 30 * time.Second

// Options choose what New builds. The zero value is SQLite without faults.
type Options struct {
	Engine string
	// Faults are injected, the first in the first life of the process, the
	// next in the life after it, and so on.
	Faults []Fault
	// LeaseTTL, LeaseRenew and LeaseMargin shorten leases; PostgreSQL only.
	LeaseTTL, LeaseRenew, LeaseMargin time.Duration
	Patience                          session.Patience
	// Window is the context window of the model "scripted-small", tokens.
	Window int
	// Sandboxes runs the agents' machines, in real gVisor; a test that asks for
	// them is skipped where the machine forbids it. Sandboxes outlive a crash as
	// they would outlive a killed process, and end with the test.
	Sandboxes bool
	// Machine is config.planaria of the environment; nil: the defaults.
	Machine any
	// MaxRunning is the session manager's; 0: its default.
	MaxRunning int
}

// Env is the whole system in one process: store, vault, blobs, effects,
// keeper, gateway, session manager and server, with a scripted model and the
// world outside, which live on when it crashes.
type Env struct {
	t      testing.TB
	opts   Options
	dir    string
	url    string // of the store
	faults *faults

	World  *Outside
	Model  *Model
	API    *API
	Person *Person
	Logs   *Logs

	// Ids of what the tests work with.
	Agent, SmallAgent, Environment, Vault string

	listen string // host:port, kept over restarts
	life   *life
	// without: lives from the next one on run no sandboxes, though there are some.
	without bool
	laws    *Laws
}

// life is one process.
type life struct {
	DB       *store.DB
	Node     *store.Node
	Sessions *session.Manager
	keeper   *keeper.Keeper
	conns    *conns
	http     *http.Server
	cancel   context.CancelFunc // of everything
	drain    context.CancelFunc // of the manager
	drained  chan struct{}      // closed when the manager has ended
	nodeOver chan struct{}
	leave    context.CancelFunc
	dbOver   chan struct{}
	closeDB  context.CancelFunc
	served   chan struct{}
	blobs    *blob.Folder
	machines *sandbox.Runtime
}

// New builds the system and starts it.
func New(t testing.TB, o Options) *Env {
	t.Helper()
	e := &Env{t: t, opts: o, dir: tempDir(t), Logs: &Logs{}}
	e.faults = newFaults()
	e.World = NewOutside(t, canaryToken)
	e.Model = NewModel(t, canaryModel)
	e.API = &API{HTTP: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	e.Person = &Person{API: e.API, World: e.World}
	switch o.Engine {
	case "", SQLite:
		e.url = "sqlite:" + filepath.Join(e.dir, "planaria.db")
	case PostgreSQL:
		e.url = Postgres(t)
	default:
		t.Fatalf("engine %q is neither sqlite nor postgres", o.Engine)
	}
	if _, err := vault.CreateMaster(e.dir, ""); err != nil {
		t.Fatal(err)
	}
	if o.Sandboxes {
		Binary(t) // built, or the test skipped, before anything runs
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("end of the log:\n%s", e.Logs.Tail(8<<10))
		}
		e.faults.kill()
		e.end(true)
		e.endSandboxes()
	})
	if err := e.start(); err != nil {
		t.Fatalf("start: %v", err)
	}
	e.API.Key = "plk-canary-8c35e0d1b6f249a7"
	if _, err := e.life.DB.CreateWorkspace(t.Context(), store.Workspace{ID: "default", Name: "default", CreatedAt: e.life.DB.Now()}); err != nil {
		t.Fatal(err)
	}
	_, err := e.life.DB.EnsureBootstrapKey(t.Context(), store.APIKey{ID: store.APIKeyID(store.NewID("apikey_", time.Now())),
		Workspace: "default", Name: "test", Role: "admin", CreatedAt: e.life.DB.Now()}, e.API.Key)
	if err != nil {
		t.Fatal(err)
	}
	e.objects()
	e.Arm(o.Faults...) // only now, so that points are counted from a session's first step on
	return e
}

// Arm replaces the faults that are still to come and counts points anew.
// It returns how many of the former did not happen.
func (e *Env) Arm(plan ...Fault) (left int) { return e.faults.arm(plan) }

// Under makes t the test that failures are reported to.
func (e *Env) Under(t testing.TB) { e.t = t }

// Through runs f, which must go on where it was left, until it succeeds. When a
// fault ends the process f is cut off, the process begins its next life, the
// laws are checked and f runs again; where it survives, f's failed request is
// made again.
func (e *Env) Through(f func(ctx context.Context) error) {
	e.t.Helper()
	for try := 0; try < 10; try++ {
		fired := e.Fired()
		ctx, cancel := context.WithTimeout(context.Background(), Deadline)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			select {
			case <-fired:
				if e.faults.isDead() {
					cancel()
				}
			case <-ctx.Done():
			}
		}()
		err := f(ctx)
		late := ctx.Err() != nil
		cancel()
		<-ended
		switch {
		case e.faults.isDead():
			e.Crash()
			e.Restart()
			e.Check()
			continue
		case err == nil:
			return
		}
		select {
		case <-fired:
			if !late {
				e.t.Logf("again after %v", err)
				continue
			}
		default:
		}
		e.t.Fatalf("%v\n%s", err, e.Logs.Tail(4<<10))
	}
	e.t.Fatal("it does not come to its end")
}

// tempDir is a folder in memory where the machine has one: it is the process
// that crashes here, not the machine, and a sync that costs nothing lets more
// crashes into the same time.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "planaria-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// objects makes what sessions are made of, through the API.
func (e *Env) objects() {
	e.t.Helper()
	id := func(path string, in M) string {
		e.t.Helper()
		var out struct {
			ID string `json:"id"`
		}
		if err := e.API.Do(e.t.Context(), http.MethodPost, path, in, &out); err != nil {
			e.t.Fatal(err)
		}
		return out.ID
	}
	e.Environment, e.Vault, e.Agent, e.SmallAgent = Objects(id, e.World)
	if e.opts.Sandboxes {
		config := M{"type": "cloud"}
		if e.opts.Machine != nil {
			config["planaria"] = e.opts.Machine
		}
		e.Environment = id("/v1/environments", M{"name": "sandboxes", "config": config})
		e.Agent = id("/v1/agents", sandboxAgent())
	}
}

// Objects makes connector, environment, vault and agents through create, which
// posts to a path and returns the id of what was made.
func Objects(create func(path string, in M) string, w *Outside) (environment, vaultID, agent, small string) {
	tools := M{}
	var ask []M
	for _, t := range Tools() {
		if t.Contract != nil {
			tools[t.Name] = t.Contract
		}
		if t.Ask {
			ask = append(ask, M{"name": t.Name, "permission_policy": M{"type": "always_ask"}})
		}
	}
	create("/v1/connectors", M{"name": "outside", "kind": "mcp", "url": w.URL, "tools": tools})
	environment = create("/v1/environments", M{"name": "test"})
	vaultID = create("/v1/vaults", M{"display_name": "test"})
	create("/v1/vaults/"+vaultID+"/credentials", M{"auth": M{"type": "static_bearer", "mcp_server_url": w.URL, "token": w.Token}})
	of := func(name, model string) M {
		return M{"name": name, "model": model, "system": "You are under test.",
			"mcp_servers": []M{{"type": "url", "name": "w", "url": "planaria:outside"}},
			"tools": []M{
				{"type": "mcp_toolset", "mcp_server_name": "w", "default_config": M{"permission_policy": M{"type": "always_allow"}}, "configs": ask},
				{"type": "custom", "name": "client_act", "description": "Done by the client.",
					"input_schema": M{"type": "object", "properties": M{"id": M{"type": "string"}}}},
			}}
	}
	return environment, vaultID, create("/v1/agents", of("tester", "scripted-1")), create("/v1/agents", of("forgetful", "scripted-small"))
}

// ModelRules routes all scripted models to m.
func ModelRules(m *Model, window int) []llm.Rule {
	if window == 0 {
		window = 1000
	}
	config := llm.Config{BaseURL: m.URL, Key: func() string { return m.Key }}
	return []llm.Rule{
		{Pattern: "scripted-small", Provider: "anthropic", Config: config, ContextWindow: window, MaxOutput: 100},
		{Pattern: "*", Provider: "anthropic", Config: config, ContextWindow: 1_000_000, MaxOutput: 1000,
			Prices: &llm.Prices{Input: 3, Output: 15}},
	}
}

// start begins a life on the data that is there.
func (e *Env) start() (err error) {
	l := &life{conns: &conns{all: map[net.Conn]struct{}{}}, drained: make(chan struct{}), nodeOver: make(chan struct{}),
		dbOver: make(chan struct{}), served: make(chan struct{})}
	e.life = l
	e.faults.reborn(l.conns.sever)
	log := slog.New(slog.NewTextHandler(e.Logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	master, err := vault.OpenMaster(e.dir, "")
	if err != nil {
		return err
	}
	if l.blobs, err = blob.Open(filepath.Join(e.dir, "blobs")); err != nil {
		return err
	}
	all, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	l.DB, err = store.Open(all, store.Config{URL: e.url, Master: master, Blobs: l.blobs, Logger: log, Fault: e.faults.at("store"),
		LeaseTTL: e.opts.LeaseTTL, LeaseRenew: e.opts.LeaseRenew, LeaseMargin: e.opts.LeaseMargin})
	if err != nil {
		l.DB = nil
		return err
	}
	var dbCtx, nodeCtx, runCtx context.Context
	dbCtx, l.closeDB = context.WithCancel(all)
	nodeCtx, l.leave = context.WithCancel(all)
	runCtx, l.drain = context.WithCancel(all)
	go func() { defer close(l.dbOver); _ = l.DB.Run(dbCtx) }()
	l.Node, err = l.DB.Join(all, store.NodeInfo{Address: e.listen, Roles: []string{"api", "worker", "keeper"}, Version: "test"})
	if err != nil {
		close(l.nodeOver)
		close(l.drained)
		return err
	}
	go func() { defer close(l.nodeOver); _ = l.Node.Run(nodeCtx) }()

	effects := effect.New(l.DB, effect.Config{})
	models, err := llm.NewModels(&http.Client{Transport: &http.Transport{DialContext: l.conns.dial((&net.Dialer{}).DialContext)}}, ModelRules(e.Model, e.opts.Window))
	if err != nil {
		e.t.Fatal(err)
	}
	l.keeper = keeper.New(keeper.Config{DB: l.DB, Effects: effects, Vault: master, Models: models, Logger: log, Fault: e.faults.at("keeper"),
		Dial: keeper.Guard(l.conns.dial((&net.Dialer{}).DialContext), nil)})
	gate := gateway.New(gateway.Config{DB: l.DB, Keeper: l.keeper, Effects: effects, Logger: log})
	p := e.opts.Patience
	if p == (session.Patience{}) {
		p = patience
	}
	if e.opts.Sandboxes && !e.without {
		if err := e.openSandboxes(all, l, log); err != nil {
			close(l.drained)
			return err
		}
	}
	l.Sessions = session.New(session.Config{DB: l.DB, Node: l.Node, Gateway: gate, Logger: log, Fault: e.faults.at("session"), Patience: p,
		Sandboxes: l.machines, MaxRunning: e.opts.MaxRunning})
	go func() { defer close(l.drained); _ = l.Sessions.Run(runCtx) }()

	if e.listen == "" {
		e.listen = "127.0.0.1:0"
	}
	lis, err := net.Listen("tcp", e.listen)
	if err != nil {
		close(l.served)
		return err
	}
	if e.listen = lis.Addr().String(); e.API.Base == "" { // clients of former lives go on with it
		e.API.Base = "http://" + e.listen
	}
	l.http = &http.Server{ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		Handler:     server.New(server.Config{DB: l.DB, Sessions: l.Sessions, Master: master, Node: l.Node.ID(), Version: "test", Logger: log}),
		BaseContext: func(net.Listener) context.Context { return all }}
	go func() { defer close(l.served); _ = l.http.Serve(lis) }()
	return nil
}

// end ends the life: hard, as a kill would, or with a drain.
func (e *Env) end(hard bool) {
	l := e.life
	if l == nil || l.cancel == nil {
		return
	}
	wait := func(what string, c <-chan struct{}) {
		select {
		case <-c:
		case <-time.After(2 * Deadline):
			e.t.Errorf("%s did not end in time", what)
		}
	}
	if hard {
		l.conns.sever()
	}
	if l.http != nil {
		l.http.Close()
		wait("the listener", l.served)
	}
	if l.DB == nil {
		l.cancel()
		l.blobs.Close()
		l.cancel = nil
		return
	}
	l.drain()
	if hard {
		l.conns.sever()
	}
	if l.Sessions != nil {
		wait("the session manager", l.drained)
	}
	if l.keeper != nil {
		l.conns.sever()
		l.keeper.Close()
	}
	if l.machines != nil {
		if err := l.machines.Close(); err != nil { // what runs in them lives on
			e.t.Errorf("close sandboxes: %v", err)
		}
	}
	l.leave()
	if l.Node != nil {
		wait("the node", l.nodeOver)
	}
	l.closeDB()
	wait("the store", l.dbOver)
	if err := l.DB.Close(); err != nil && !hard {
		e.t.Errorf("close store: %v", err)
	}
	l.cancel()
	l.blobs.Close()
	l.cancel = nil
}

// Crash ends the process as SIGKILL would: from this moment on it writes
// nothing, answers nothing and its connections are cut. What has left it has left.
func (e *Env) Crash() {
	e.t.Helper()
	e.faults.kill()
	e.end(true)
}

// Stop ends the process as SIGTERM would.
func (e *Env) Stop() {
	e.t.Helper()
	e.end(false)
}

// Restart begins the next life on the same data. A fault of this life that
// happens while it starts makes it start again.
func (e *Env) Restart() {
	e.t.Helper()
	for try := 0; ; try++ {
		err := e.start()
		if err == nil {
			return
		}
		if !errors.Is(err, ErrFault) || try > 3 {
			e.t.Fatalf("restart: %v", err)
		}
		e.Crash()
	}
}

// CopyData copies the data folder as it is on disk at this moment, as a power
// cut or a backup would find it, and returns the copy. SQLite only; nothing may
// be writing.
func (e *Env) CopyData() string {
	e.t.Helper()
	dir := tempDir(e.t)
	err := filepath.WalkDir(e.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == e.dir {
			return err
		}
		to := filepath.Join(dir, strings.TrimPrefix(path, e.dir))
		if d.IsDir() {
			return os.Mkdir(to, 0o700)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(to, b, 0o600)
	})
	if err != nil {
		e.t.Fatal(err)
	}
	return dir
}

// OpenCopy opens the store of a copied data folder as a server would, with the
// keys of the original.
func (e *Env) OpenCopy(dir string) (*store.DB, error) {
	master, err := vault.OpenMaster(dir, "")
	if err != nil {
		return nil, err
	}
	blobs, err := blob.Open(filepath.Join(dir, "blobs"))
	if err != nil {
		return nil, err
	}
	e.t.Cleanup(func() { blobs.Close() })
	return store.Open(context.Background(), store.Config{URL: "sqlite:" + filepath.Join(dir, "planaria.db"), Master: master, Blobs: blobs,
		Logger: slog.New(slog.NewTextHandler(e.Logs, nil))})
}

// DB is the store of this life.
func (e *Env) DB() *store.DB { return e.life.DB }

// Sessions is the session manager of this life.
func (e *Env) Sessions() *session.Manager { return e.life.Sessions }

// Dir is the data folder; URL is the store's.
func (e *Env) Dir() string { return e.dir }

// StoreURL is the URL of the store.
func (e *Env) StoreURL() string { return e.url }

// Fired is closed when this life's fault has happened.
func (e *Env) Fired() <-chan struct{} { return e.faults.firedCh() }

// Hold makes whoever comes to a named point next (see Fault) wait there until
// release is called, which the end of the test does too.
func (e *Env) Hold(point string) (arrived <-chan struct{}, release func()) {
	arrived, release = e.faults.hold(point)
	e.t.Cleanup(release)
	return arrived, release
}

// Points returns how often each named point was come to.
func (e *Env) Points() map[string]int { return e.faults.points() }

// Check asserts the laws on everything that is there.
func (e *Env) Check() {
	e.t.Helper()
	for _, b := range e.Broken() {
		e.t.Errorf("law broken: %s", b)
	}
}

// ForgetLaws makes the next Check read everything anew, also what was sound.
func (e *Env) ForgetLaws() { e.laws.Forget() }

// Broken returns the laws that are broken.
func (e *Env) Broken() []string {
	e.t.Helper()
	if e.laws == nil {
		e.laws = &Laws{URL: e.url, World: e.World, Model: e.Model, Secrets: []string{canaryToken, canaryModel, e.API.Key}}
	}
	l := e.laws
	l.DB, l.Said = e.life.DB, map[string][]byte{"the log": e.Logs.All(), "an answer": e.API.Seen()}
	ctx, cancel := context.WithTimeout(context.Background(), Deadline)
	defer cancel()
	broken, err := l.Check(ctx)
	if err != nil {
		e.t.Fatalf("check: %v", err)
	}
	return broken
}

// Begin makes a session that plays a script and returns its id. tag names
// both; the script's marker is set.
func (e *Env) Begin(tag string, p llm.PlayScript) string {
	e.t.Helper()
	e.Model.Add(e.t, Marked(tag, p))
	id, err := e.Create(tag, "")
	if err != nil {
		e.t.Fatal(err)
	}
	return id
}

// Marked binds a script to the sessions that begin with tag.
func Marked(tag string, p llm.PlayScript) llm.PlayScript {
	p.Name, p.Marker = tag, "["+tag+"]"
	return p
}

// Create makes a session that begins with a message that carries tag. agent
// empty: the usual one.
func (e *Env) Create(tag, agent string) (string, error) {
	if agent == "" {
		agent = e.Agent
	}
	ctx, cancel := context.WithTimeout(context.Background(), Deadline)
	defer cancel()
	var out SessionView
	err := e.API.Do(ctx, http.MethodPost, "/v1/sessions", M{"agent": agent, "environment_id": e.Environment, "vault_ids": []string{e.Vault},
		"initial_events": []M{Message("[" + tag + "] Begin.")}}, &out, "Idempotency-Key", "create-"+tag)
	return out.ID, err
}

// Finish brings a session to the end of its turn and returns why it rests.
func (e *Env) Finish(id string) Stop {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Deadline)
	defer cancel()
	stop, err := e.Person.Finish(ctx, id)
	if err != nil {
		e.t.Fatalf("finish %s: %v\n%s", id, err, e.Describe(id))
	}
	return stop
}

// Until waits until a session's log holds an event of a type.
func (e *Env) Until(ctx context.Context, id, typ string) error {
	f, err := e.life.DB.Follow(ctx, "default", store.SessionID(id), 0)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		items, err := f.Next(ctx)
		if err != nil {
			return fmt.Errorf("wait for %s of %s: %w", typ, id, err)
		}
		for _, it := range items {
			if it.Entry != nil && it.Entry.Type == typ {
				return nil
			}
		}
	}
}

// Describe tells a session's log for failure texts.
func (e *Env) Describe(id string) string {
	s, err := e.life.DB.Session(context.Background(), "default", store.SessionID(id))
	if err != nil {
		return err.Error()
	}
	entries, err := e.life.DB.Entries(context.Background(), "default", store.SessionID(id), store.Range{})
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s owner=%q fence=%d head=%d wake=%v paused=%v damaged=%q err=%v\n", id, s.Status, s.Owner, s.Fence, s.Head, s.WakeAt, s.Paused, s.Damaged, err)
	for _, en := range entries[max(0, len(entries)-70):] {
		fmt.Fprintf(&b, "  %3d f%d %-11s %-34s %s %.160s\n", en.Seq, en.Fence, en.Kind, en.Type, en.ID, en.Body)
	}
	return b.String()
}

// Logs keeps what a process logged.
type Logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *Logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// All returns what was logged.
func (l *Logs) All() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Clone(l.b.Bytes())
}

// Tail returns the last n bytes.
func (l *Logs) Tail(n int) string {
	b := l.All()
	return string(b[max(0, len(b)-n):])
}

// conns are the connections that a process has made, to be cut when it dies.
type conns struct {
	mu   sync.Mutex
	dead bool
	all  map[net.Conn]struct{}
}

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

var errDead = errors.New("the process is dead")

func (c *conns) dial(next dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := next(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.dead {
			conn.Close()
			return nil, errDead
		}
		k := &kept{Conn: conn, of: c}
		c.all[k] = struct{}{}
		return k, nil
	}
}

// sever cuts all connections and lets none be made any more.
func (c *conns) sever() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead = true
	for conn := range c.all {
		conn.(*kept).Conn.Close()
	}
	clear(c.all)
}

type kept struct {
	net.Conn
	of *conns
}

func (k *kept) Close() error {
	k.of.mu.Lock()
	delete(k.of.all, k)
	k.of.mu.Unlock()
	return k.Conn.Close()
}
