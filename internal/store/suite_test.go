package store_test

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

const ws = store.WorkspaceID("default")

// each runs a test on both engines; a difference is a bug or a line in the contract.
func each(t *testing.T, f func(t *testing.T, e *env)) {
	t.Helper()
	t.Run("sqlite", func(t *testing.T) { f(t, newEnv(t, "sqlite:"+filepath.Join(t.TempDir(), "data", "planaria.db"))) })
	t.Run("postgres", func(t *testing.T) { f(t, newEnv(t, testenv.Postgres(t))) })
}

// env is a store under test that can be closed and opened again.
type env struct {
	t     testing.TB
	cfg   store.Config
	blobs *memBlobs
	db    *store.DB
	node  *store.Node
	stop  func()
	fault *faults
}

func newEnv(t testing.TB, url string) *env {
	t.Helper()
	return newEnvWith(t, url, nil)
}

func newEnvWith(t testing.TB, url string, set func(*store.Config)) *env {
	t.Helper()
	e := &env{t: t, blobs: &memBlobs{}, fault: &faults{}}
	e.cfg = store.Config{URL: url, Master: newMaster(t), Blobs: e.blobs, Fault: e.fault.hook,
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
		// The node of most tests is not run, so that it can crash without
		// leaving; its lease must outlast the test.
		LeaseTTL: time.Hour}
	if set != nil {
		set(&e.cfg)
	}
	e.open()
	t.Cleanup(func() {
		if e.stop != nil {
			e.close()
		}
	})
	return e
}

// open opens the store, makes the workspace, and joins.
func (e *env) open() {
	e.t.Helper()
	db, err := store.Open(e.t.Context(), e.cfg)
	if err != nil {
		e.t.Fatalf("open: %v", err)
	}
	e.db = db
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := db.Run(ctx); err != nil {
			e.t.Errorf("run: %v", err)
		}
	})
	e.stop = func() { cancel(); wg.Wait() }
	if err := db.EnsureWorkspace(e.t.Context(), ws, "Default"); err != nil {
		e.t.Fatalf("workspace: %v", err)
	}
	if e.node, err = db.Join(e.t.Context(), store.NodeInfo{}); err != nil {
		e.t.Fatalf("join: %v", err)
	}
}

// close ends the store without telling anybody, as a crash would.
func (e *env) close() {
	e.t.Helper()
	e.stop()
	if err := e.db.Close(); err != nil {
		e.t.Errorf("close: %v", err)
	}
	e.stop = nil
}

// crash closes and opens again: a new process, a new node.
func (e *env) crash() {
	e.t.Helper()
	e.close()
	e.open()
}

// master wraps keys as vault does.
type master struct{ aead cipher.AEAD }

func newMaster(t testing.TB) master {
	t.Helper()
	b, err := aes.NewCipher(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	a, err := cipher.NewGCM(b)
	if err != nil {
		t.Fatal(err)
	}
	return master{a}
}

func (m master) Wrap(plain []byte) ([]byte, error) {
	nonce := make([]byte, m.aead.NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	return m.aead.Seal(nonce, nonce, plain, nil), nil
}

func (m master) Unwrap(wrapped []byte) ([]byte, error) {
	n := m.aead.NonceSize()
	if len(wrapped) < n {
		return nil, errors.New("short")
	}
	return m.aead.Open(nil, wrapped[:n], wrapped[n:], nil)
}

// memBlobs keeps blobs in memory; it survives a crash of the store.
type memBlobs struct {
	mu sync.Mutex
	m  map[string][]byte
	at map[string]time.Time
}

func (b *memBlobs) Put(_ context.Context, w string, data []byte) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.m == nil {
		b.m, b.at = map[string][]byte{}, map[string]time.Time{}
	}
	sum := sha256.Sum256(data)
	name := hex.EncodeToString(sum[:])
	b.at[w+"/"+name] = time.Now()
	b.m[w+"/"+name] = append([]byte(nil), data...)
	return name, nil
}

func (b *memBlobs) Get(_ context.Context, w, name string) ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, ok := b.m[w+"/"+name]
	if !ok {
		return nil, errors.New("no such blob")
	}
	return append([]byte(nil), d...), nil
}

func (b *memBlobs) Delete(_ context.Context, w, name string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.m, w+"/"+name)
	return nil
}

func (b *memBlobs) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.m)
}

// faults fails named steps, once per arming.
type faults struct {
	mu    sync.Mutex
	armed map[string]int // how many times the step fails
	seen  map[string]int
}

var errInjected = errors.New("injected fault")

func (f *faults) hook(step string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.seen == nil {
		f.seen = map[string]int{}
	}
	f.seen[step]++
	if f.armed[step] == 0 {
		return nil
	}
	f.armed[step]--
	return fmt.Errorf("%w at %s", errInjected, step)
}

func (f *faults) arm(step string, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.armed == nil {
		f.armed = map[string]int{}
	}
	f.armed[step] = n
}

func (f *faults) count(step string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen[step]
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", b)
	return len(b), nil
}

// The makers of drafts.

func event(typ string, fields ...any) store.Draft {
	body := map[string]any{"v": 1, "type": typ}
	for i := 0; i+1 < len(fields); i += 2 {
		body[fields[i].(string)] = fields[i+1]
	}
	return store.Draft{Kind: store.KindEvent, Type: typ, ID: store.NewID("sevt_", time.Now()), Thread: "sthr_1", Body: marshal(body)}
}

func record(kind store.Kind, id string, body any) store.Draft {
	if id == "" {
		id = store.NewID("rec_", time.Now())
	}
	return store.Draft{Kind: kind, ID: id, Thread: "sthr_1", Body: marshal(body)}
}

func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

func running() store.Draft { return event("session.status_running") }
func idle() store.Draft {
	return event("session.status_idle", "stop_reason", map[string]any{"type": "end_turn"})
}

func newEffect() store.EffectID { return store.EffectID(store.NewID("eff_", time.Now())) }

func intent(id store.EffectID, class store.Class) store.Draft {
	return record(store.KindIntent, string(id), store.Intent{V: 1, Key: "key-" + string(id), EffectHeader: store.EffectHeader{
		Effect: id, Event: store.EventID("sevt_" + string(id)), Tool: "delete_database", Server: "aws", Class: class,
		Arguments: json.RawMessage(`{"id":"db-1"}`), Digest: "d1", Near: "n1"}})
}

func attempt(id store.EffectID, n int) store.Draft {
	return record(store.KindAttempt, string(id), store.Attempt{V: 1, Effect: id, N: n, SendBy: time.Now().Add(2 * time.Second)})
}

func completion(id store.EffectID, n int) store.Draft {
	return record(store.KindCompletion, string(id), store.Completion{V: 1, Effect: id, N: n, Outcome: store.OutcomeOK, Response: json.RawMessage(`[{"type":"text","text":"done"}]`)})
}

func doubt(id store.EffectID, n int) store.Draft {
	return record(store.KindDoubt, string(id), store.Doubt{V: 1, Effect: id, N: n, Reason: "owner_lost"})
}

func settlement(id store.EffectID, outcome string) store.Draft {
	return record(store.KindSettlement, string(id), store.Settlement{V: 1, Effect: id, Outcome: outcome, By: "person"})
}

func output(id store.EffectID) store.Draft {
	return record(store.KindOutput, string(id), store.Output{V: 1, Effect: id, Purpose: "turn", Model: "m", Content: json.RawMessage(`[]`),
		StopReason: "end_turn", Usage: store.TokenUsage{Input: 10, Output: 5}, CostNanoUSD: 100})
}

// message is a client event that starts a turn.
func message(text string) store.Delivery {
	return store.Delivery{ID: store.NewID("sevt_", time.Now()), Kind: store.InboxEvent, Type: "user.message", Starts: true,
		Body: marshal(map[string]any{"v": 1, "type": "user.message", "text": text})}
}

// create makes a session, with an inbox if there are deliveries.
func (e *env) create(ds ...store.Delivery) store.Session {
	e.t.Helper()
	s, err := e.db.CreateSession(e.t.Context(), ws, store.NewSession{
		ID: store.SessionID(store.NewID("sesn_", time.Now())), Inbox: ds,
		Created: store.Created{V: 1, Thread: "sthr_1", Creator: "test", Config: store.SessionConfig{
			Agent: json.RawMessage(`{"id":"agent_1","version":3}`), EnvironmentID: "env_1"}}})
	if err != nil {
		e.t.Fatalf("create session: %v", err)
	}
	return s
}

// claim claims the one session that has work.
func (e *env) claim() *store.Lease {
	e.t.Helper()
	ls, err := e.node.Claim(e.t.Context(), 10)
	if err != nil {
		e.t.Fatalf("claim: %v", err)
	}
	if len(ls) != 1 {
		e.t.Fatalf("claimed %d sessions, want 1", len(ls))
	}
	return ls[0]
}

// must appends and fails the test on error.
func (e *env) must(l *store.Lease, a store.Append) []store.Entry {
	e.t.Helper()
	out, err := e.db.Append(e.t.Context(), l, a)
	if err != nil {
		e.t.Fatalf("append: %v", err)
	}
	return out
}

// sound verifies and rebuilds a session.
func (e *env) sound(id store.SessionID) {
	e.t.Helper()
	rep, err := e.db.Verify(e.t.Context(), ws, id)
	if err != nil || rep.Problem != "" {
		e.t.Fatalf("verify %s: %v %s", id, err, rep.Problem)
	}
	diff, err := e.db.Rebuild(e.t.Context(), ws, id)
	if err != nil || diff != "" {
		e.t.Fatalf("rebuild %s: %v\n%s", id, err, diff)
	}
}

func (e *env) session(id store.SessionID) store.Session {
	e.t.Helper()
	s, err := e.db.Session(e.t.Context(), ws, id)
	if err != nil {
		e.t.Fatalf("session: %v", err)
	}
	return s
}

func entries(ds ...store.Draft) store.Append { return store.Append{Entries: ds} }
