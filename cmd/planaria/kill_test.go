package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
	"github.com/planaria/planaria/internal/vault"
)

var (
	kills    = flag.Int("kills", 300, "how often TestKill kills the server")
	killSeed = flag.Uint64("kill.seed", 0, "seed of TestKill; 0 takes the time")
)

// Secrets of the processes under test; they may show up nowhere.
const (
	killAPIKey   = "plk-canary-51c8e7a2b94d0f36"
	killModelKey = "sk-canary-e20d7b4951fa8c63"
	killToken    = "tok-canary-9b3fd06c72e1a845"
)

// site is what outlives every process of a test: data folder, world, model.
type site struct {
	t      testing.TB
	dir    string
	store  string // URL; empty: SQLite in the data folder
	addr   string
	config string
	world  *testenv.Outside
	model  *testenv.Model
	api    *testenv.API
	person *testenv.Person
	logs   *testenv.Logs

	environment, vault, agent, small string
}

func newSite(t testing.TB, storeURL string) *site {
	t.Helper()
	s := &site{t: t, dir: filepath.Join(t.TempDir(), "data"), store: storeURL, logs: &testenv.Logs{},
		world: testenv.NewOutside(t, killToken), model: testenv.NewModel(t, killModelKey)}
	s.addr = freePort(t)
	s.config = filepath.Join(t.TempDir(), "planaria.yaml")
	yaml := fmt.Sprintf("models:\n  - pattern: \"*\"\n    provider: anthropic\n    base_url: %s\n    key_env: KILL_MODEL_KEY\n    context_window: 1000000\n    max_output: 1000\n", s.model.URL)
	if storeURL != "" {
		yaml += "store_env: KILL_STORE\n"
	}
	if err := os.WriteFile(s.config, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	// No connection is kept: a request to a dead process must not be repeated by the client.
	s.api = &testenv.API{Base: "http://" + s.addr, Key: killAPIKey, HTTP: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	s.person = &testenv.Person{API: s.api, World: s.world}
	return s
}

func freePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// victim is one process.
type victim struct {
	cmd   *exec.Cmd
	ready chan struct{} // closed when it takes requests
	gone  chan struct{} // closed when it has ended
	err   error         // of Wait
}

// start starts planaria serve.
func (s *site) start(addr string) *victim {
	s.t.Helper()
	p := &victim{ready: make(chan struct{}), gone: make(chan struct{})}
	p.cmd = exec.Command(binary, "serve", "--config", s.config, "--data", s.dir, "--listen", addr, "--log-level", "debug")
	p.cmd.Env = append(withoutOurs(os.Environ()), "PLANARIA_API_KEY="+killAPIKey, "KILL_MODEL_KEY="+killModelKey, "KILL_STORE="+s.store)
	p.cmd.Stderr = s.logs
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() {
		defer close(p.gone)
		r := bufio.NewReader(out)
		for said := false; ; {
			line, err := r.ReadString('\n')
			_, _ = io.WriteString(s.logs, line)
			if !said && strings.Contains(line, "ready on") {
				said = true
				close(p.ready)
			}
			if err != nil {
				break
			}
		}
		p.err = p.cmd.Wait()
	}()
	s.t.Cleanup(p.kill)
	return p
}

// kill ends the process at once and waits until it is gone.
func (p *victim) kill() {
	_ = p.cmd.Process.Kill() // it may have ended by itself
	<-p.gone
}

// up waits until the process takes requests.
func (s *site) up(p *victim) {
	s.t.Helper()
	select {
	case <-p.ready:
	case <-p.gone:
		s.t.Fatalf("the server ended: %v\n%s", p.err, s.logs.Tail(4<<10))
	case <-time.After(time.Minute):
		s.t.Fatalf("the server is not ready\n%s", s.logs.Tail(4<<10))
	}
}

// objects makes connector, agents and the rest in a server that is up.
func (s *site) objects() {
	s.t.Helper()
	s.environment, s.vault, s.agent, s.small = testenv.Objects(func(path string, in testenv.M) string {
		var out struct {
			ID string `json:"id"`
		}
		if err := s.api.Do(s.t.Context(), http.MethodPost, path, in, &out); err != nil {
			s.t.Fatal(err)
		}
		return out.ID
	}, s.world)
}

// create makes the session of a tag, once however often it is called.
func (s *site) create(ctx context.Context, tag string) (string, error) {
	var out testenv.SessionView
	err := s.api.Do(ctx, http.MethodPost, "/v1/sessions", testenv.M{"agent": s.agent, "environment_id": s.environment,
		"vault_ids": []string{s.vault}, "initial_events": []testenv.M{testenv.Message("[" + tag + "] Begin.")}}, &out, "Idempotency-Key", "create-"+tag)
	return out.ID, err
}

// check asserts the laws on the store that the processes left, offline.
func (s *site) check() []store.Session {
	t := s.t
	t.Helper()
	ctx := context.Background()
	db, url := s.offline()
	laws := &testenv.Laws{DB: db, URL: url, World: s.world, Model: s.model, Secrets: []string{killAPIKey, killModelKey, killToken},
		Said: map[string][]byte{"output of a process": s.logs.All(), "an answer": s.api.Seen()}}
	broken, err := laws.Check(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range broken {
		t.Errorf("law broken: %s", b)
	}
	list, err := db.Sessions(ctx, "default", store.SessionFilter{IncludeArchived: true})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// offline opens the store that the processes left, to read it until the test ends.
func (s *site) offline() (db *store.DB, url string) {
	t := s.t
	t.Helper()
	master, err := vault.OpenMaster(s.dir, "")
	if err != nil {
		t.Fatal(err)
	}
	blobs, err := blob.Open(filepath.Join(s.dir, blobFolder))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = blobs.Close() })
	if url = s.store; url == "" {
		url = "sqlite:" + filepath.Join(s.dir, storeFile)
	}
	if db, err = store.Open(t.Context(), store.Config{URL: url, Master: master, Blobs: blobs, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db, url
}

// TestKillSQLite kills the real server with SIGKILL at random moments while
// several sessions act on the world through it (trials K1 to K4, P1, A2;
// attacks E1, E11, E12). Afterwards nothing irreversible happened twice,
// nothing that is on record is missing outside or the reverse, and every
// session came to its end.
func TestKillSQLite(t *testing.T) { killTest(t, "", *kills) }

// TestKillPostgres is the same with the shared store, where a new process must
// first see that the former one is dead.
func TestKillPostgres(t *testing.T) { killTest(t, testenv.Postgres(t), min(*kills, 20)) }

func killTest(t *testing.T, storeURL string, kills int) {
	rnd := chance(t, 1)
	s := newSite(t, storeURL)
	s.world.SetDelay(3 * time.Millisecond)
	p := s.start(s.addr)
	s.up(p)
	s.objects()

	h := &herd{site: s, up: make(chan struct{})}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	var lanes sync.WaitGroup
	for i := range 6 {
		lanes.Go(func() { h.lane(ctx, i) })
	}
	began := time.Now()
	early := 0
	for n := range kills {
		if n%7 == 6 {
			// While it starts.
			if wait(p.ready, p.gone, time.Duration(rnd.IntN(60))*time.Millisecond) {
				early++
			}
		} else {
			s.up(p)
			h.rise()
			wait(nil, p.gone, time.Duration(rnd.IntN(400))*time.Millisecond)
		}
		select {
		case <-p.gone:
			t.Fatalf("the server ended by itself after kill %d: %v\n%s", n, p.err, s.logs.Tail(4<<10))
		default:
		}
		h.fall()
		p.kill()
		p = s.start(s.addr)
	}
	elapsed := time.Since(began)
	s.up(p)
	h.finish(p, &lanes)
	list := s.check()
	if len(list) != len(h.sessions) {
		t.Errorf("%d sessions are in the store, %d were made", len(list), len(h.sessions))
	}
	twice := 0
	for _, act := range []string{"buy", "swap", "pay", "fire"} {
		for _, id := range h.tags {
			if n := s.world.Executions(act, id); n > 1 {
				twice++
				t.Errorf("%s %s happened %d times", act, id, n)
			}
		}
	}
	var fences store.Fence
	for _, x := range list {
		fences += x.Fence
		if x.Status != store.StatusIdle {
			t.Errorf("%s ended as %s", x.ID, x.Status)
		}
	}
	t.Logf("%d kills in %.1f s (%d while starting), %d sessions, %d claims, %d acts outside, %d of them repeated, model: %+v",
		kills, elapsed.Seconds(), early, len(list), fences, len(s.world.Ledger()), twice, s.model.Stats())
}

// chance is what a test decides by; its seed is said, and said again when the
// test fails.
func chance(t *testing.T, stream uint64) *rand.Rand {
	seed := *killSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d (repeat with -kill.seed)", seed)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, stream))
}

// finish lets every session come to its end, then the last process leave.
func (h *herd) finish(p *victim, lanes *sync.WaitGroup) {
	t := h.site.t
	h.rise()
	h.last.Store(true)
	lanes.Wait()
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	<-p.gone
	if p.err != nil {
		t.Errorf("the last process ended with %v", p.err)
	}
}

// wait waits for a time, or until one of the channels is closed; it reports
// whether the time was over first.
func wait(a, b <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-a:
	case <-b:
	case <-timer.C:
		return true
	}
	return false
}

// herd drives sessions through all lives of the server.
type herd struct {
	*site
	last   atomic.Bool                     // begin no new session
	script func(tag string) llm.PlayScript // of each session; nil: killScript

	mu       sync.Mutex
	up       chan struct{} // closed while the server takes requests
	sessions map[string]string
	tags     []string
}

func (h *herd) rise() {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.up:
	default:
		close(h.up)
	}
}

func (h *herd) fall() {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.up:
		h.up = make(chan struct{})
	default:
	}
}

func (h *herd) alive() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.up
}

// lane brings one session after the other to its end.
func (h *herd) lane(ctx context.Context, lane int) {
	for n := 0; !h.last.Load(); n++ {
		tag := fmt.Sprintf("lane%d-%d", lane, n)
		script := killScript
		if h.script != nil {
			script = h.script
		}
		h.model.Add(h.t, testenv.Marked(tag, script(tag)))
		if err := h.session(ctx, tag); err != nil {
			h.t.Errorf("session %s: %v", tag, err)
			return
		}
	}
}

// session is made and driven by requests of which any may meet a dead server.
func (h *herd) session(ctx context.Context, tag string) error {
	id := ""
	for {
		select {
		case <-h.alive():
		case <-ctx.Done():
			return ctx.Err()
		}
		var err error
		if id == "" {
			if id, err = h.create(ctx, tag); err == nil {
				h.mu.Lock()
				if h.sessions == nil {
					h.sessions = map[string]string{}
				}
				h.sessions[id] = tag
				h.tags = append(h.tags, tag)
				h.mu.Unlock()
			}
		}
		var stop testenv.Stop
		if err == nil {
			stop, err = h.person.Finish(ctx, id)
		}
		var api *testenv.APIError
		switch {
		case err == nil && stop.Type == "end_turn":
			return nil
		case err == nil:
			return fmt.Errorf("%s rests with %s", id, stop.Type)
		case errors.As(err, &api) && api.Status < 500:
			return err
		case ctx.Err() != nil:
			return fmt.Errorf("%s: %w", id, err)
		}
		// Nobody answered, or a dying server said 500: on in the next life.
		if wait(nil, ctx.Done(), 5*time.Millisecond) {
			continue
		}
	}
}

// killScript acts in every class, also beside each other, asks a person and the client.
func killScript(tag string) llm.PlayScript {
	use := func(tool string) llm.ToolCall {
		return llm.ToolCall{Name: "mcp__w__" + tool, Input: map[string]any{"id": tag}}
	}
	step := func(c ...llm.ToolCall) llm.Step { return llm.Step{Text: "On it.", Tools: c, ChunkDelayMS: 1} }
	return llm.PlayScript{Steps: []llm.Step{
		step(use("look")), step(use("put")), step(use("buy")), step(use("look"), use("swap"), use("set"), use("look")),
		step(use("pay")), step(llm.ToolCall{Name: "client_act"}), step(use("fire")), {Text: "All done.", ChunkDelayMS: 1},
	}}
}
