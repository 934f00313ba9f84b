package server_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
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
	"github.com/planaria/planaria/internal/server"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

const adminKey = "admin-key-of-the-tests"

// env is a real server on loopback over a real SQLite store and a real session
// manager; only the model is scripted, over HTTP.
type env struct {
	t      *testing.T
	dir    string
	url    string
	store  string // URL of the store
	db     *store.DB
	node   store.NodeID
	model  *httptest.Server
	master *vault.Master
	logs   *lines
	ended  chan struct{} // signalled when a stream has ended at the server
	stop   func()
}

// script is what the model says in these tests: the answer follows from the
// last words of the user.
const script = `
scripts:
  - name: tests
    rules:
      - when: {user: "think slowly"}
        thinking: "Hm."
        text: "one two three four five six seven eight nine ten"
        chunk: 5
        chunk_delay_ms: 2
      - when: {user: "drag on"}
        text: "The answer goes on and on, so that a second reader comes in its middle and wants to know how it began."
        chunk: 2
        chunk_delay_ms: 25
      - when: {user: "use the tool"}
        tools:
          - {name: lookup, input: {key: a}}
      - when: {user: "delete it"}
        tools:
          - {name: mcp__out__delete, input: {id: db-1}}
      - when: {result: "deleted"}
        text: "It is gone."
      - when: {result: "found"}
        text: "It is there."
    steps:
      - text: "Hello."
    repeat: true
`

func newEnv(t *testing.T) *env {
	t.Helper()
	return newEnvOn(t, "")
}

// newEnvOn runs on a store; SQLite in the folder when url is empty.
func newEnvOn(t *testing.T, url string) *env {
	t.Helper()
	e := &env{t: t, dir: t.TempDir(), store: url, logs: &lines{t: t}, ended: make(chan struct{}, 1000)}
	sc, err := llm.ParseScript([]byte(script))
	if err != nil {
		t.Fatalf("script: %v", err)
	}
	e.model = httptest.NewServer(llm.NewScriptServer(sc))
	t.Cleanup(e.model.Close)
	if e.store == "" {
		e.store = "sqlite:" + filepath.Join(e.dir, "data", "planaria.db")
	}
	if e.master, err = vault.CreateMaster(e.dir, ""); err != nil {
		t.Fatalf("master key: %v", err)
	}
	e.start()
	t.Cleanup(func() { e.stop() })
	return e
}

// start starts all that a process runs, on the store of the folder.
func (e *env) start(change ...func(*server.Config)) {
	t := e.t
	t.Helper()
	log := slog.New(slog.NewTextHandler(e.logs, &slog.HandlerOptions{Level: slog.LevelWarn}))
	blobs, err := blob.Open(filepath.Join(e.dir, "blobs"))
	if err != nil {
		t.Fatalf("blobs: %v", err)
	}
	db, err := store.Open(t.Context(), store.Config{URL: e.store, Master: e.master, Blobs: blobs, Logger: log})
	if err != nil {
		t.Fatalf("open store: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var storeRun, managerRun sync.WaitGroup
	storeCtx, stopStore := context.WithCancel(context.Background())
	storeRun.Go(func() { _ = db.Run(storeCtx) })
	node, err := db.Join(t.Context(), store.NodeInfo{Address: "127.0.0.1", Roles: []string{"api", "worker"}, Version: "test"})
	if err != nil {
		t.Fatalf("join: %v", err)
	}
	if _, _, err := server.Bootstrap(t.Context(), db, node.ID(), adminKey); err != nil {
		t.Fatalf("bootstrap: %v", err)
	}
	models, err := llm.NewModels(http.DefaultClient, []llm.Rule{{Pattern: "*", Provider: "anthropic", ContextWindow: 200_000,
		MaxOutput: 8000, Config: llm.Config{BaseURL: e.model.URL + "/"}}})
	if err != nil {
		t.Fatalf("models: %v", err)
	}
	effects := effect.New(db, effect.Config{})
	k := keeper.New(keeper.Config{DB: db, Effects: effects, Vault: e.master, Models: models, Dial: (&net.Dialer{}).DialContext, Logger: log, AllowPrivateNetworks: true})
	g := gateway.New(gateway.Config{DB: db, Keeper: k, Effects: effects, Logger: log})
	m := session.New(session.Config{DB: db, Node: node, Gateway: g, Logger: log})
	managerRun.Go(func() { _ = m.Run(ctx) })
	managerRun.Go(func() { _ = node.Run(ctx) })
	cfg := server.Config{DB: db, Sessions: m, Master: e.master, Node: node.ID(), Version: "test", Logger: log}
	for _, f := range change {
		f(&cfg)
	}
	handler := server.New(cfg)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("x-lose-answer") != "" {
			handler.ServeHTTP(brokenWriter{w}, r)
			panic(http.ErrAbortHandler)
		}
		handler.ServeHTTP(w, r)
		if strings.HasSuffix(r.URL.Path, "/stream") {
			e.ended <- struct{}{}
		}
	}))
	e.db, e.node, e.url = db, node.ID(), srv.URL
	e.stop = func() {
		srv.CloseClientConnections()
		cancel()
		managerRun.Wait()
		srv.Close()
		stopStore()
		storeRun.Wait()
		if err := db.Close(); err != nil {
			t.Errorf("close store: %v", err)
		}
		if err := blobs.Close(); err != nil {
			t.Errorf("close blobs: %v", err)
		}
	}
}

// brokenWriter is a connection that breaks at the first byte of the answer.
type brokenWriter struct{ http.ResponseWriter }

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
func (brokenWriter) WriteHeader(int)           {}

// restart stops everything and starts it again on the same folder.
func (e *env) restart() {
	e.t.Helper()
	e.stop()
	e.start()
}

// lines collects log lines.
type lines struct {
	t  testing.TB
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// answer is an answer of the server.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func (a answer) get(t testing.TB, into any) {
	t.Helper()
	if a.status != http.StatusOK {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	if err := json.Unmarshal(a.body, into); err != nil {
		t.Fatalf("read answer %s: %v", a.body, err)
	}
}

// object reads an answer as an object.
func (a answer) object(t testing.TB) map[string]any {
	t.Helper()
	var m map[string]any
	a.get(t, &m)
	return m
}

func (a answer) id(t testing.TB) string {
	t.Helper()
	id, _ := a.object(t)["id"].(string)
	return id
}

// do makes one request. headers are name and value in turn; without an
// Authorization among them the admin key is sent.
func (e *env) do(method, path, body string, headers ...string) answer {
	e.t.Helper()
	a, err := e.try(method, path, body, headers...)
	if err != nil {
		e.t.Fatalf("%s %s: %v", method, path, err)
	}
	return a
}

func (e *env) try(method, path, body string, headers ...string) (answer, error) {
	req, err := http.NewRequestWithContext(e.t.Context(), method, e.url+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Authorization", "Bearer "+adminKey)
	for i := 0; i+1 < len(headers); i += 2 {
		if headers[i+1] == "" {
			req.Header.Del(headers[i])
			continue
		}
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, b}, err
}

func bearer(key string) []string { return []string{"Authorization", "Bearer " + key} }

// objects are one of each kind in a workspace.
type objects struct {
	key                                                              string
	agent, environment, session, thread, vault, credential, conn, id string
	effect, file                                                     string
}

const agentBody = `{"name":"helper","model":"claude-opus-5-5","tools":[{"type":"custom","name":"lookup","description":"look up","input_schema":{"type":"object","properties":{"key":{"type":"string"}}}}]}`

// fill makes one of each in the workspace of a key.
func (e *env) fill(key string) objects {
	e.t.Helper()
	o := objects{key: key}
	h := bearer(key)
	o.agent = e.do("POST", "/v1/agents", agentBody, h...).id(e.t)
	o.environment = e.do("POST", "/v1/environments", `{"name":"env"}`, h...).id(e.t)
	o.vault = e.do("POST", "/v1/vaults", `{"display_name":"vault"}`, h...).id(e.t)
	o.credential = e.do("POST", "/v1/vaults/"+o.vault+"/credentials",
		`{"auth":{"type":"static_bearer","mcp_server_url":"https://mcp.example.com/mcp","token":"secret-token-1234567890"}}`, h...).id(e.t)
	o.conn = e.do("POST", "/v1/connectors", `{"name":"aws","kind":"mcp","url":"https://mcp.example.com/mcp"}`, h...).id(e.t)
	o.file = e.send([]string{"file", "in.txt", "in"}, h...).id(e.t)
	o.session = e.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":%q,"environment_id":%q}`, o.agent, o.environment), h...).id(e.t)
	var threads struct{ Data []struct{ ID string } }
	e.do("GET", "/v1/sessions/"+o.session+"/threads", "", h...).get(e.t, &threads)
	o.thread = threads.Data[0].ID
	return o
}

// workspace makes another tenant and returns an admin key of it.
func (e *env) workspace(name string) string {
	e.t.Helper()
	ws := e.do("POST", "/v1/workspaces", fmt.Sprintf(`{"name":%q}`, name)).id(e.t)
	k := e.do("POST", "/v1/api_keys", fmt.Sprintf(`{"name":"admin","role":"admin","workspace_id":%q}`, ws)).object(e.t)
	return k["key"].(string)
}

// key makes a key of a role in the home workspace.
func (e *env) key(role string) string {
	e.t.Helper()
	return e.do("POST", "/v1/api_keys", fmt.Sprintf(`{"name":%q,"role":%q}`, role, role)).object(e.t)["key"].(string)
}

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// wait polls a condition through the API until it holds; every turn of it is a
// request, so it needs no pause of its own.
func (e *env) wait(what string, cond func() bool) {
	e.t.Helper()
	for deadline := time.Now().Add(patience); !cond(); {
		if time.Now().After(deadline) {
			e.t.Fatalf("waited in vain for %s; log:\n%s%s", what, e.logs, e.story())
		}
	}
}

// story is what happened in all sessions, for failures.
func (e *env) story() string {
	var list struct{ Data []struct{ ID string } }
	if err := json.Unmarshal(e.do("GET", "/v1/sessions", "").body, &list); err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, s := range list.Data {
		fmt.Fprintf(&b, "%s\n%s\n", e.do("GET", "/v1/sessions/"+s.ID, "").body, e.do("GET", "/v1/sessions/"+s.ID+"/events", "").body)
	}
	return b.String()
}

func (e *env) idle(id string, headers ...string) {
	e.t.Helper()
	e.wait("session "+id+" to be idle", func() bool {
		s := e.do("GET", "/v1/sessions/"+id, "", headers...).object(e.t)
		p := s["planaria"].(map[string]any)
		return s["status"] == "idle" && p["stop_reason"] != nil
	})
}

// idleFor waits until a session is idle with a stop reason.
func (e *env) idleFor(id, reason string, headers ...string) {
	e.t.Helper()
	e.wait("session "+id+" to be idle: "+reason, func() bool {
		var s struct {
			Status   string
			Planaria struct {
				StopReason *struct{ Type string } `json:"stop_reason"`
			}
		}
		e.do("GET", "/v1/sessions/"+id, "", headers...).get(e.t, &s)
		return s.Status == "idle" && s.Planaria.StopReason != nil && s.Planaria.StopReason.Type == reason
	})
}

func TestWalk(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	got := e.do("POST", "/v1/sessions/"+o.session+"/events", `{"events":[{"type":"user.message","content":[{"type":"text","text":"hi"}]}]}`).object(t)
	if n := len(got["data"].([]any)); n != 1 {
		t.Fatalf("sent %d events", n)
	}
	e.idle(o.session)
	var list struct {
		Data []struct {
			ID, Type    string
			ProcessedAt *string `json:"processed_at"`
		}
		NextPage *string `json:"next_page"`
	}
	e.do("GET", "/v1/sessions/"+o.session+"/events", "").get(t, &list)
	var types []string
	for _, ev := range list.Data {
		types = append(types, ev.Type)
	}
	if last := types[len(types)-1]; last != "session.status_idle" {
		t.Errorf("events %v: the last is not session.status_idle", types)
	}
	if list.NextPage != nil {
		t.Errorf("next_page = %q", *list.NextPage)
	}
}
