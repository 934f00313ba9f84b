package session_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
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
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
	"github.com/planaria/planaria/internal/vault"
)

const ws = store.WorkspaceID("default")

// env is a manager on a real SQLite store with a scripted model and one MCP
// server, that can be stopped as by a kill and started again.
type env struct {
	t      testing.TB
	folder string
	master *vault.Master
	blobs  *blob.Folder
	world  *testenv.MCPWorld
	model  *httptest.Server
	logs   *logs
	pat    session.Patience
	window int // of the model, tokens

	mu    sync.Mutex
	fault func(point string) error
	step  func(point string) error // of the store

	db      *store.DB
	gw      *gateway.Gateway
	manager *session.Manager
	drain   func()
	stop    func()
}

type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

var errKilled = errors.New("killed")

// newEnv starts everything. contracts maps the world's tools to their contracts, as JSON.
func newEnv(t testing.TB, world *testenv.MCPWorld, contracts map[string]string, steps ...llm.Step) *env {
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
	script := &llm.Script{Scripts: []llm.PlayScript{{Name: "script", Steps: steps}}}
	if err := script.Validate(); err != nil {
		t.Fatal(err)
	}
	e := &env{t: t, folder: filepath.Join(dir, "data"), master: m, blobs: blobs, world: world, logs: &logs{},
		model: httptest.NewServer(llm.NewScriptServer(script)), window: 1_000_000,
		pat: session.Patience{Base: 5 * time.Millisecond, Max: 50 * time.Millisecond}}
	t.Cleanup(e.model.Close)
	e.open(contracts)
	t.Cleanup(func() {
		if e.stop != nil {
			e.kill()
		}
		if t.Failed() {
			s := e.logs.String()
			t.Logf("end of the log:\n%s", s[max(0, len(s)-4<<10):])
		}
	})
	return e
}

func (e *env) hook(f *func(string) error) func(string) error {
	return func(p string) error {
		e.mu.Lock()
		h := *f
		e.mu.Unlock()
		if h == nil {
			return nil
		}
		return h(p)
	}
}

// at makes the process die at the nth time that it comes to a point.
func (e *env) at(point string, nth int) (dead <-chan struct{}) {
	c := make(chan struct{})
	n := 0
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fault = func(p string) error {
		e.mu.Lock()
		defer e.mu.Unlock()
		if p == point {
			n++
		}
		if n < nth {
			return nil
		}
		if p == point && n == nth {
			close(c)
		}
		return errKilled
	}
	return c
}

func (e *env) open(contracts map[string]string) {
	e.t.Helper()
	log := slog.New(slog.NewTextHandler(e.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	db, err := store.Open(e.t.Context(), store.Config{URL: "sqlite:" + filepath.Join(e.folder, "planaria.db"),
		Master: e.master, Blobs: e.blobs, Logger: log, Fault: e.hook(&e.step)})
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
	if contracts != nil {
		tools := map[string]json.RawMessage{}
		for name, c := range contracts {
			tools[name] = json.RawMessage(c)
		}
		body, err := json.Marshal(map[string]any{"name": "world", "kind": "mcp", "url": e.world.URL, "tools": tools})
		if err != nil {
			e.t.Fatal(err)
		}
		if _, err := effect.ParseConnector(body); err != nil {
			e.t.Fatalf("connector: %v", err)
		}
		now := db.Now()
		if _, err := db.CreateConnector(e.t.Context(), store.Connector{Workspace: ws, ID: store.ConnectorID(store.NewID("conn_", now)),
			Name: "world", Version: 1, URL: e.world.URL, Body: body, CreatedAt: now, UpdatedAt: now}); err != nil {
			e.t.Fatal(err)
		}
	}
	node, err := db.Join(e.t.Context(), store.NodeInfo{})
	if err != nil {
		e.t.Fatal(err)
	}
	effects := effect.New(db, effect.Config{SendWithin: time.Minute}) // a slow machine is not what is tested
	config := llm.Config{BaseURL: e.model.URL, Key: func() string { return "key" }}
	models, err := llm.NewModels(http.DefaultClient, []llm.Rule{{Pattern: "*", Provider: "anthropic", Config: config,
		ContextWindow: e.window, MaxOutput: 1000, Prices: &llm.Prices{Input: 3, Output: 15}}})
	if err != nil {
		e.t.Fatal(err)
	}
	k := keeper.New(keeper.Config{DB: db, Effects: effects, Vault: e.master, Models: models, Logger: log,
		AllowPrivateNetworks: true, Fault: e.hook(&e.fault), Dial: keeper.Guard((&net.Dialer{}).DialContext, nil)})
	e.gw = gateway.New(gateway.Config{DB: db, Keeper: k, Effects: effects, Logger: log})
	e.manager = session.New(session.Config{DB: db, Node: node, Gateway: e.gw, Logger: log, Fault: e.hook(&e.fault), Patience: e.pat})
	run, drain := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() { defer close(over); _ = e.manager.Run(run) }()
	e.drain = func() { drain(); <-over }
	e.stop = func() { drain(); <-over; k.Close(); cancel(); wg.Wait() }
}

// kill ends the process: from now on it writes nothing.
func (e *env) kill() {
	e.t.Helper()
	e.mu.Lock()
	e.step = func(string) error { return errKilled }
	e.fault = func(string) error { return errKilled }
	e.mu.Unlock()
	e.stop()
	e.stop = nil
	_ = e.db.Close() // it died
}

// restart kills what is left and begins the next life.
func (e *env) restart() {
	e.t.Helper()
	if e.stop != nil {
		e.kill()
	}
	e.mu.Lock()
	e.step, e.fault = nil, nil
	e.mu.Unlock()
	e.open(nil)
}

type m = map[string]any

func raw(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

func message(text string) m {
	return m{"type": "user.message", "content": []m{{"type": "text", "text": text}}}
}

func allow(event store.EventID) m {
	return m{"type": "user.tool_confirmation", "tool_use_id": event, "result": "allow"}
}

func deny(event store.EventID) m {
	return m{"type": "user.tool_confirmation", "tool_use_id": event, "result": "deny", "deny_message": "no"}
}

func answer(event store.EventID) m {
	return m{"type": "user.custom_tool_result", "custom_tool_use_id": event, "content": []m{{"type": "text", "text": "done"}}}
}

// begin makes a session of an agent with the world's tools, those in ask under
// always_ask, and the custom tool "client".
func (e *env) begin(ask ...string) store.SessionID {
	e.t.Helper()
	var configs []m
	for _, name := range ask {
		configs = append(configs, m{"name": name, "permission_policy": m{"type": "always_ask"}})
	}
	var servers []m
	tools := []m{{"type": "custom", "name": "client", "description": "done by the client", "input_schema": m{"type": "object"}}}
	if e.world != nil {
		servers = append(servers, m{"name": "world", "url": e.world.URL})
		tools = append(tools, m{"type": "mcp_toolset", "mcp_server_name": "world",
			"default_config": m{"permission_policy": m{"type": "always_allow"}}, "configs": configs})
	}
	s, err := e.manager.Create(e.t.Context(), ws, "test", session.CreateParams{
		Agent:         raw(m{"id": "agent_1", "version": 1, "name": "tester", "model": m{"id": "scripted"}, "mcp_servers": servers, "tools": tools}),
		InitialEvents: []json.RawMessage{raw(message("begin"))}})
	if err != nil {
		e.t.Fatal(err)
	}
	return s.ID
}

func (e *env) send(id store.SessionID, events ...m) {
	e.t.Helper()
	if err := e.trySend(id, events...); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) trySend(id store.SessionID, events ...m) error {
	var list []json.RawMessage
	for _, ev := range events {
		list = append(list, raw(ev))
	}
	_, err := e.manager.Send(e.t.Context(), ws, id, list)
	return err
}

const testDeadline = 20 * time.Second

// until follows a session's log from its beginning until ok says so.
func (e *env) until(id store.SessionID, what string, ok func([]store.Entry) bool) []store.Entry {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), testDeadline)
	defer cancel()
	f, err := e.db.Follow(ctx, ws, id, 0)
	if err != nil {
		e.t.Fatal(err)
	}
	defer f.Close()
	var all []store.Entry
	for {
		items, err := f.Next(ctx)
		if err != nil {
			e.t.Fatalf("wait until %s: %v\n%s", what, err, e.tell(id))
		}
		for _, it := range items {
			if it.Entry != nil {
				all = append(all, *it.Entry)
			}
		}
		if ok(all) {
			return all
		}
	}
}

// rests waits until the nth idle event and returns its reason.
func (e *env) rests(id store.SessionID, nth int) (reason string, events []store.EventID) {
	e.t.Helper()
	all := e.until(id, fmt.Sprintf("it rests %d times", nth), func(all []store.Entry) bool { return count(all, "session.status_idle") >= nth })
	var b struct {
		Stop struct {
			Type     string          `json:"type"`
			EventIDs []store.EventID `json:"event_ids"`
		} `json:"stop_reason"`
	}
	n := 0
	for _, en := range all {
		if en.Type != "session.status_idle" {
			continue
		}
		if n++; n == nth {
			if err := json.Unmarshal(en.Body, &b); err != nil {
				e.t.Fatal(err)
			}
		}
	}
	return b.Stop.Type, b.Stop.EventIDs
}

func count(all []store.Entry, typ string) (n int) {
	for _, en := range all {
		if en.Type == typ {
			n++
		}
	}
	return n
}

func (e *env) session(id store.SessionID) store.Session {
	e.t.Helper()
	s, err := e.db.Session(e.t.Context(), ws, id)
	if err != nil {
		e.t.Fatal(err)
	}
	return s
}

// asleep waits until nobody owns the session and reports its row.
func (e *env) asleep(id store.SessionID) store.Session {
	e.t.Helper()
	deadline := time.Now().Add(testDeadline)
	for {
		s := e.session(id)
		if s.Owner == "" {
			return s
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("session stays owned\n%s", e.tell(id))
		}
		<-time.After(time.Millisecond)
	}
}

func (e *env) tell(id store.SessionID) string {
	s, err := e.db.Session(context.Background(), ws, id)
	if err != nil {
		return err.Error()
	}
	entries, err := e.db.Entries(context.Background(), ws, id, store.Range{})
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s owner=%q fence=%d head=%d wake=%v paused=%v err=%v\n", id, s.Status, s.Owner, s.Fence, s.Head, s.WakeAt, s.Paused, err)
	for _, en := range entries[max(0, len(entries)-60):] {
		fmt.Fprintf(&b, "  %3d f%d %-11s %-34s %.150s\n", en.Seq, en.Fence, en.Kind, en.Type, en.Body)
	}
	return b.String()
}

func use(tool, id string) llm.ToolCall {
	return llm.ToolCall{Name: "mcp__world__" + tool, Input: map[string]any{"id": id}}
}

var (
	client = llm.ToolCall{Name: "client", Input: map[string]any{"id": "1"}}
	done   = llm.Step{Text: "Done."}
)

func calls(cs ...llm.ToolCall) llm.Step { return llm.Step{Tools: cs} }
