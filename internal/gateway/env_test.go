package gateway_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
	"github.com/planaria/planaria/internal/vault"
)

const ws = store.WorkspaceID("default")

// env is store, keeper and gateway on a real SQLite store, which can be killed
// and started again, with one session that it owns.
type env struct {
	t      testing.TB
	folder string
	master *vault.Master
	blobs  *blob.Folder
	world  *testenv.MCPWorld
	logs   *syncBuffer

	mu    sync.Mutex
	ahead time.Duration // how far our clock is ahead
	fault func(point string) error
	step  func(point string) error // of the store

	db      *store.DB
	node    *store.Node
	effects *effect.Log
	keeper  *keeper.Keeper
	gw      *gateway.Gateway
	lease   *store.Lease
	stop    func()

	session store.SessionID
	thread  store.ThreadID
	server  gateway.Server
	vaults  []store.VaultID
	private bool // AllowPrivateNetworks
	results int  // tool results committed
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// contracts maps tools to their contracts, as JSON.
type contracts map[string]string

// newEnv starts everything with a connector for the world's tools.
func newEnv(t testing.TB, world *testenv.MCPWorld, cs contracts) *env {
	t.Helper()
	e := newBareEnv(t, world)
	e.connector(cs)
	return e
}

// newBareEnv has no connector: the agent names the world by its URL.
func newBareEnv(t testing.TB, world *testenv.MCPWorld) *env {
	t.Helper()
	dir := t.TempDir()
	m, err := vault.CreateMaster(dir, filepath.Join(dir, "identity"))
	if err != nil {
		t.Fatal(err)
	}
	blobs, err := blob.Open(filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	e := &env{t: t, folder: filepath.Join(dir, "data"), master: m, blobs: blobs, world: world, logs: &syncBuffer{}, private: true}
	e.server = gateway.Server{Name: "world", URL: world.URL}
	e.open()
	t.Cleanup(func() {
		if e.stop != nil {
			e.close()
		}
	})
	thread := store.ThreadID(store.NewID("sthr_", e.now()))
	e.thread = thread
	e.session = store.SessionID(store.NewID("sesn_", e.now()))
	_, err = e.db.CreateSession(t.Context(), ws, store.NewSession{ID: e.session, Now: e.now(),
		Created: store.Created{V: 1, Thread: thread, Creator: "test", Config: store.SessionConfig{Agent: json.RawMessage(`{}`)}},
		Inbox: []store.Delivery{{ID: store.NewID("sevt_", e.now()), Kind: store.InboxEvent, Type: "user.message", Thread: thread,
			Body: []byte(`{"v":1,"type":"user.message","content":[{"type":"text","text":"go"}]}`), Starts: true}}})
	if err != nil {
		t.Fatalf("create session: %v", err)
	}
	e.claim()
	return e
}

func (e *env) now() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return time.Now().Add(e.ahead)
}

// later moves our clock forward.
func (e *env) later(d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ahead += d
}

func (e *env) connector(cs contracts) {
	e.t.Helper()
	tools := map[string]json.RawMessage{}
	for name, c := range cs {
		tools[name] = json.RawMessage(c)
	}
	body, err := json.Marshal(map[string]any{"name": "world", "kind": "mcp", "url": e.world.URL, "tools": tools})
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := effect.ParseConnector(body); err != nil {
		e.t.Fatalf("connector: %v", err)
	}
	now := e.now()
	if _, err := e.db.CreateConnector(e.t.Context(), store.Connector{Workspace: ws, ID: store.ConnectorID(store.NewID("conn_", now)),
		Name: "world", Version: 1, URL: e.world.URL, Body: body, CreatedAt: now, UpdatedAt: now}); err != nil {
		e.t.Fatal(err)
	}
	e.server.URL = "planaria:world"
}

func (e *env) open() {
	e.t.Helper()
	logger := slog.New(slog.NewTextHandler(e.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	db, err := store.Open(e.t.Context(), store.Config{URL: "sqlite:" + filepath.Join(e.folder, "planaria.db"), Master: e.master,
		Blobs: e.blobs, Logger: logger, Now: e.now, Fault: func(step string) error {
			e.mu.Lock()
			f := e.step
			e.mu.Unlock()
			if f == nil {
				return nil
			}
			return f(step)
		}})
	if err != nil {
		e.t.Fatalf("open store: %v", err)
	}
	e.db = db
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = db.Run(ctx) })
	if err := db.EnsureWorkspace(e.t.Context(), ws, "Default"); err != nil {
		e.t.Fatal(err)
	}
	if e.node, err = db.Join(e.t.Context(), store.NodeInfo{}); err != nil {
		e.t.Fatal(err)
	}
	start := time.Now()
	e.effects = effect.New(db, effect.Config{SendWithin: time.Minute, // a slow machine is not what is tested
		Boot: func() time.Duration { return e.now().Sub(start) }})
	e.keeper = keeper.New(keeper.Config{DB: db, Effects: e.effects, Vault: e.master, Logger: logger,
		AllowPrivateNetworks: e.private, Fault: func(p string) error {
			e.mu.Lock()
			f := e.fault
			e.mu.Unlock()
			if f == nil {
				return nil
			}
			return f(p)
		}})
	e.gw = gateway.New(gateway.Config{DB: db, Keeper: e.keeper, Effects: e.effects, Logger: logger})
	k := e.keeper
	e.stop = func() { k.Close(); cancel(); wg.Wait() }
}

// close ends everything without telling anybody, as a kill would.
func (e *env) close() {
	e.t.Helper()
	e.stop()
	e.stop = nil
	if err := e.db.Close(); err != nil {
		e.t.Errorf("close store: %v", err)
	}
}

// crash is a kill and a new start: another node, another fence.
func (e *env) crash() {
	e.t.Helper()
	e.close()
	e.mu.Lock()
	e.fault, e.step = nil, nil
	e.mu.Unlock()
	e.open()
	e.claim()
}

func (e *env) claim() {
	e.t.Helper()
	leases, err := e.node.Claim(e.t.Context(), 10)
	if err != nil || len(leases) != 1 {
		e.t.Fatalf("claim: got %d leases, error %v, want 1", len(leases), err)
	}
	e.lease = leases[0]
}

// steal makes another node the owner while the former one goes on.
func (e *env) steal() error {
	n, err := e.db.Join(e.t.Context(), store.NodeInfo{})
	if err != nil {
		return err
	}
	e.node = n
	e.claim()
	return nil
}

func (e *env) scope() gateway.Scope {
	return gateway.Scope{Lease: e.lease, Lineage: e.session, Thread: e.lease.Claimed().Thread,
		Servers: []gateway.Server{e.server}, Vaults: e.vaults}
}

// list lists the world's tools.
func (e *env) list() []gateway.Tool {
	e.t.Helper()
	l, err := e.gw.List(e.t.Context(), e.scope(), "world")
	if err != nil {
		e.t.Fatalf("list: %v", err)
	}
	return l.Tools
}

// calls makes the calls of one output.
func (e *env) calls(policy string, pairs ...string) []gateway.Call {
	e.t.Helper()
	tools := e.list()
	var out []gateway.Call
	for i := 0; i < len(pairs); i += 2 {
		c := gateway.Call{Event: store.EventID(store.NewID("sevt_", e.now())), Arguments: json.RawMessage(pairs[i+1]), Policy: policy, Enabled: true}
		for _, tool := range tools {
			if tool.Name == pairs[i] {
				c.Tool, c.Known = tool, true
			}
		}
		out = append(out, c)
	}
	return out
}

// rule rules calls and commits their drafts as an output would.
func (e *env) rule(calls ...gateway.Call) []gateway.Ruling {
	e.t.Helper()
	rs, err := e.gw.Rule(e.t.Context(), e.scope(), calls)
	if err != nil {
		e.t.Fatalf("rule: %v", err)
	}
	var drafts []store.Draft
	for _, r := range rs {
		drafts = append(drafts, r.Drafts...)
	}
	if len(drafts) > 0 {
		if _, err := e.db.Append(e.t.Context(), e.lease, store.Append{Entries: drafts}); err != nil {
			e.t.Fatalf("append drafts: %v", err)
		}
	}
	return rs
}

// intend rules one allowed call and returns its effect.
func (e *env) intend(tool, args string) store.EffectID {
	e.t.Helper()
	r := e.rule(e.calls("always_allow", tool, args)...)[0]
	if r.State != store.StateIntended {
		e.t.Fatalf("rule %s %s: got %+v, want an intent", tool, args, r)
	}
	return r.Effect
}

// result is the tool result event of a call.
func (e *env) result(a gateway.Answer) []store.Draft {
	e.mu.Lock()
	e.results++
	e.mu.Unlock()
	body, err := json.Marshal(map[string]any{"v": 1, "type": "agent.mcp_tool_result", "effect": a.Effect, "is_error": a.IsError, "content": a.Content})
	if err != nil {
		e.t.Fatal(err)
	}
	return []store.Draft{{Kind: store.KindEvent, Type: "agent.mcp_tool_result", ID: store.NewID("sevt_", e.now()),
		Thread: e.thread, Body: body}}
}

func (e *env) go1(id store.EffectID) (gateway.Progress, error) {
	return e.gw.Continue(e.t.Context(), e.scope(), id, e.result)
}

// goOn continues an effect and fails on an error.
func (e *env) goOn(id store.EffectID) gateway.Progress {
	e.t.Helper()
	p, err := e.go1(id)
	if err != nil {
		e.t.Fatalf("continue %s: %v", id, err)
	}
	return p
}

// finish continues an effect until nothing but a person is needed, moving the
// clock where only time is.
func (e *env) finish(id store.EffectID) gateway.Progress {
	e.t.Helper()
	for range 60 {
		p := e.goOn(id)
		if p.RetryAt.IsZero() {
			return p
		}
		e.later(max(0, p.RetryAt.Sub(e.now())) + time.Millisecond)
	}
	e.t.Fatalf("effect %s does not come to an end", id)
	return gateway.Progress{}
}

func (e *env) effect(id store.EffectID) store.Effect {
	e.t.Helper()
	// A read's end is committed relaxed: a critical append makes it visible.
	if _, err := e.db.Append(e.t.Context(), e.lease, store.Append{Entries: []store.Draft{{Kind: store.KindTools,
		ID: store.NewID("rec_", e.now()), Body: []byte(`{"v":1,"server":"x","digest":"x","tools":[]}`)}}}); err != nil {
		e.t.Fatalf("flush: %v", err)
	}
	x, err := e.db.Effect(e.t.Context(), ws, id)
	if err != nil {
		e.t.Fatalf("effect: %v", err)
	}
	return x
}

// want checks where an effect stands.
func (e *env) want(id store.EffectID, state store.EffectState, outcome store.Outcome) {
	e.t.Helper()
	x := e.effect(id)
	if x.State != state || x.Outcome != outcome {
		e.t.Errorf("effect %s: got %s %q, want %s %q", x.Tool, x.State, x.Outcome, state, outcome)
	}
}

// kinds lists the records of an effect and the results, in order.
func (e *env) kinds(id store.EffectID) string {
	e.t.Helper()
	entries, err := e.db.Entries(e.t.Context(), ws, e.session, store.Range{})
	if err != nil {
		e.t.Fatal(err)
	}
	var out []string
	for _, x := range entries {
		switch {
		case x.ID == string(id):
			out = append(out, string(x.Kind))
		case x.Kind == store.KindEvent && strings.Contains(string(x.Body), string(id)):
			out = append(out, "result")
		}
	}
	return strings.Join(out, " ")
}

// log is everything that the session's log and our logger hold.
func (e *env) log() string {
	e.t.Helper()
	entries, err := e.db.Entries(e.t.Context(), ws, e.session, store.Range{})
	if err != nil {
		e.t.Fatal(err)
	}
	var b strings.Builder
	for _, x := range entries {
		b.Write(x.Body)
	}
	return b.String() + e.logs.String()
}

func text(a gateway.Answer) string {
	var bs []struct{ Type, Text string }
	if err := json.Unmarshal(a.Content, &bs); err != nil || len(bs) == 0 {
		return "not content: " + string(a.Content)
	}
	var out []string
	for _, b := range bs {
		out = append(out, b.Text)
	}
	return strings.Join(out, "\n")
}

var errKill = errors.New("killed here")

// killAt makes the process die at a point, the nth time.
func (e *env) killAt(point string, nth int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	e.fault = func(p string) error {
		if p == point {
			if n++; n == nth {
				return fmt.Errorf("%s: %w", p, errKill)
			}
		}
		return nil
	}
}
