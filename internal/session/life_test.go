package session_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

const (
	read  = `{"class":"read"}`
	plain = `{"class":"irreversible"}`
	// probed is asked for with the tool status.
	probed = `{"class":"irreversible","reconcile":{"tool":"status","happened":[{"pointer":"/status","equals":"done"}]}}`
)

func ends(nth int) func([]store.Entry) bool {
	return func(all []store.Entry) bool {
		return count(all, "agent.message") >= nth && last(all) == "session.status_idle"
	}
}

func last(all []store.Entry) (typ string) {
	for _, e := range all {
		if e.Kind == store.KindEvent {
			typ = e.Type
		}
	}
	return typ
}

// eventOf finds the tool-use event of a tool.
func eventOf(t testing.TB, e *env, id store.SessionID, tool string) store.EventID {
	t.Helper()
	effects, err := e.db.Effects(t.Context(), ws, store.EffectFilter{Session: id, Tools: []string{tool}})
	if err != nil || len(effects) == 0 {
		t.Fatalf("no effect of %s: %v\n%s", tool, err, e.tell(id))
	}
	return effects[0].Event
}

// quiet asserts that nobody claims a session that rests.
func quiet(e *env, id store.SessionID) {
	e.t.Helper()
	s := e.asleep(id)
	<-time.After(300 * time.Millisecond)
	if now := e.session(id); now.Fence != s.Fence || now.Head != s.Head || now.Owner != "" {
		e.t.Fatalf("claimed %d times while nothing was said\n%s", now.Fence-s.Fence, e.tell(id))
	}
}

// A message that comes while a tool runs waits for the turn and starts the next.
func TestMessageWhileToolRuns(t *testing.T) {
	arrived, release := make(chan struct{}, 1), make(chan struct{})
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "look", Class: "read"})
	world.Script("look", testenv.MCPFault{Before: true, Kind: "hang", Arrived: arrived, Release: release})
	e := newEnv(t, world, map[string]string{"look": read}, calls(use("look", "1")), done, done)
	id := e.begin()
	<-arrived
	e.send(id, message("and this"))
	close(release)
	e.until(id, "both messages are answered", ends(2))
	quiet(e, id)
}

// What is urgent is taken while a session is paused: two pauses at once, a settlement.
func TestPausedTakesWhatIsUrgent(t *testing.T) {
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "pay", Class: "irreversible"})
	world.Script("pay", testenv.MCPFault{Kind: "cut"})
	e := newEnv(t, world, map[string]string{"pay": plain}, calls(use("pay", "1")), done)
	id := e.begin()
	if reason, _ := e.rests(id, 1); reason != "requires_action" {
		t.Fatalf("rests with %s", reason)
	}
	e.asleep(id)
	pause := store.Delivery{Kind: store.InboxControl, Type: "pause", Urgent: true, Body: []byte(`{"v":1}`)}
	ds := []store.Delivery{pause, pause}
	ds[0].ID, ds[1].ID = "inb_1", "inb_2"
	if _, err := e.db.Deliver(t.Context(), ws, id, ds, nil); err != nil {
		t.Fatal(err)
	}
	e.rests(id, 2)
	if s := e.asleep(id); !s.Paused {
		t.Fatalf("not paused\n%s", e.tell(id))
	}
	quiet(e, id)
	effects, err := e.db.Effects(t.Context(), ws, store.EffectFilter{Session: id, Tools: []string{"pay"}})
	if err != nil || len(effects) != 1 {
		t.Fatal(effects, err)
	}
	x, err := e.manager.Settle(t.Context(), ws, effects[0].ID, session.SettleRequest{Outcome: "happened", Person: "test"})
	if err != nil || x.State != store.StateCompleted {
		t.Fatalf("settled %s: %v\n%s", x.State, err, e.tell(id))
	}
	quiet(e, id)
	if _, err := e.manager.Resume(t.Context(), ws, id, "test"); err != nil {
		t.Fatal(err)
	}
	e.until(id, "it goes on", ends(1))
}

// A crash right behind the append that took the last answer leaves a session
// that goes on by itself (law L7, trial A2).
func TestCrashBehindLastAnswer(t *testing.T) {
	tests := []struct {
		name, tool, contract string
		fault                testenv.MCPFault
		answer               func(e *env, id store.SessionID, event store.EventID)
	}{
		{"allow", "pay", plain, testenv.MCPFault{}, func(e *env, id store.SessionID, ev store.EventID) { e.send(id, allow(ev)) }},
		{"deny", "pay", plain, testenv.MCPFault{}, func(e *env, id store.SessionID, ev store.EventID) { e.send(id, deny(ev)) }},
		{"result", "client", "", testenv.MCPFault{}, func(e *env, id store.SessionID, ev store.EventID) { e.send(id, answer(ev)) }},
		{"settle", "buy", plain, testenv.MCPFault{Kind: "cut"}, func(e *env, id store.SessionID, _ store.EventID) {
			effects, err := e.db.Effects(e.t.Context(), ws, store.EffectFilter{Session: id, Tools: []string{"buy"}})
			if err != nil {
				e.t.Fatal(err)
			}
			if _, err := e.manager.Settle(e.t.Context(), ws, effects[0].ID, session.SettleRequest{Outcome: "happened"}); err != nil {
				e.t.Log(err) // the process died under it
			}
		}},
		{"evidence", "buy", plain, testenv.MCPFault{Kind: "cut"}, func(e *env, id store.SessionID, _ store.EventID) {
			effects, err := e.db.Effects(e.t.Context(), ws, store.EffectFilter{Session: id, Tools: []string{"buy"}})
			if err != nil {
				e.t.Fatal(err)
			}
			d := store.Delivery{ID: "inb_1", Kind: store.InboxEvidence, Body: raw(store.Evidence{V: 1, Effect: effects[0].ID, Kind: "late", Says: "happened"})}
			if _, err := e.db.Deliver(e.t.Context(), ws, id, []store.Delivery{d}, nil); err != nil {
				e.t.Fatal(err)
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "pay", Class: "irreversible"}, testenv.MCPTool{Name: "buy", Class: "irreversible"})
			if tt.fault.Kind != "" {
				world.Script(tt.tool, tt.fault)
			}
			step := calls(use(tt.tool, "1"))
			if tt.tool == "client" {
				step = calls(client)
			}
			e := newEnv(t, world, map[string]string{"pay": plain, "buy": plain}, step, done)
			e.pat.Echo = time.Millisecond
			id := e.begin("pay")
			if reason, _ := e.rests(id, 1); reason != "requires_action" {
				t.Fatalf("rests with %s", reason)
			}
			e.asleep(id)
			event := eventOf(t, e, id, tt.tool)
			dead := e.at("after_row", 1)
			tt.answer(e, id, event)
			<-dead
			e.restart()
			e.until(id, "it goes on", ends(1))
		})
	}
}

// The session is running as soon as its last answer is accepted (reference
// section 9.9), and not before.
func TestLastAnswerStarts(t *testing.T) {
	second := client
	second.Input = map[string]any{"id": "2"}
	e := newEnv(t, nil, nil, calls(client, second), done)
	e.pat.Echo = time.Millisecond
	id := e.begin()
	_, events := e.rests(id, 1)
	if len(events) != 2 {
		t.Fatalf("waits for %v", events)
	}
	e.send(id, answer(events[0]))
	if _, left := e.rests(id, 2); !slices.Equal(left, events[1:]) {
		t.Fatalf("waits for %v, want %v", left, events[1:])
	}
	e.asleep(id)
	e.drain() // nobody takes it
	e.send(id, answer(events[1]))
	if s := e.session(id); s.Status != store.StatusRunning {
		t.Errorf("%s after the last answer", s.Status)
	}
	e.restart()
	all := e.until(id, "it goes on", ends(1))
	if n := count(all, "session.status_running"); n != 2 {
		t.Errorf("%d times running\n%s", n, e.tell(id))
	}
	quiet(e, id)
}

// One call waits for a person, another for time; when the time has settled its
// call the session sleeps until the person answers.
func TestDoubtBesideQuestion(t *testing.T) {
	var mu sync.Mutex
	status := "pending"
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "buy", Class: "irreversible"}, testenv.MCPTool{Name: "pay", Class: "irreversible"},
		testenv.MCPTool{Name: "status", Class: "read", Do: func(map[string]any) (any, error) {
			mu.Lock()
			defer mu.Unlock()
			return map[string]any{"status": status}, nil
		}})
	world.Script("buy", testenv.MCPFault{Kind: "cut"})
	e := newEnv(t, world, map[string]string{"buy": probed, "pay": plain, "status": read}, calls(use("buy", "1"), use("pay", "1")), done)
	id := e.begin("pay")
	reason, events := e.rests(id, 1)
	pay := eventOf(t, e, id, "pay")
	if reason != "requires_action" || !slices.Equal(events, []store.EventID{pay}) {
		t.Fatalf("rests with %s for %v, want %v", reason, events, pay)
	}
	mu.Lock()
	status = "done"
	mu.Unlock()
	e.until(id, "the probe settles it", func(all []store.Entry) bool { return count(all, "agent.mcp_tool_result") == 1 })
	quiet(e, id)
	e.send(id, allow(pay))
	e.until(id, "it goes on", ends(1))
	quiet(e, id)
}

// A fault of the store while a session is at rest is waited out, once.
func TestFaultAtRest(t *testing.T) {
	for _, fails := range []int{1, 6} { // the append of the driver; also those that release
		e := newEnv(t, nil, nil, done)
		id := e.begin()
		e.rests(id, 1)
		e.asleep(id)
		n := 0
		e.mu.Lock()
		e.step = func(p string) error {
			if p != "append.before" {
				return nil
			}
			if n++; n <= fails {
				return errors.New("disk full")
			}
			return nil
		}
		e.mu.Unlock()
		e.send(id, m{"type": "user.interrupt"})
		e.until(id, "the interrupt is taken", func(all []store.Entry) bool { return count(all, "user.interrupt") == 1 })
		quiet(e, id)
	}
}

// A driver that fails before the turn has begun waits before it is tried again.
func TestFaultBeforeTurn(t *testing.T) {
	e := newEnv(t, nil, nil, done)
	e.kill()
	e.pat.Base, e.pat.Max = time.Hour, time.Hour
	e.restart()
	n := 0
	e.mu.Lock()
	e.step = func(p string) error {
		if p == "append.before" {
			if n++; n%2 != 0 {
				return errors.New("disk full")
			}
		}
		return nil
	}
	e.mu.Unlock()
	id := e.begin()
	e.until(id, "it waits", func(all []store.Entry) bool {
		return slices.ContainsFunc(all, func(en store.Entry) bool { return en.Kind == store.KindWait })
	})
	quiet(e, id)
}

// A drain cuts a read; beside a question it is not forgotten.
func TestDrainBesideQuestion(t *testing.T) {
	arrived, release := make(chan struct{}, 1), make(chan struct{})
	defer close(release)
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "look", Class: "read"})
	world.Script("look", testenv.MCPFault{Before: true, Kind: "hang", Arrived: arrived, Release: release})
	e := newEnv(t, world, map[string]string{"look": read}, calls(use("look", "1"), client), done)
	id := e.begin()
	<-arrived
	e.drain()
	e.restart()
	e.until(id, "the read has run", func(all []store.Entry) bool { return count(all, "agent.mcp_tool_result") == 1 })
	if reason, events := e.rests(id, 1); reason != "requires_action" || len(events) != 1 {
		t.Errorf("rests with %s for %v", reason, events)
	}
}

// An answer that comes while another call runs is not asked for again.
func TestAnswerWhileAnotherRuns(t *testing.T) {
	arrived, release := make(chan struct{}, 1), make(chan struct{})
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "buy", Class: "irreversible", Do: func(map[string]any) (any, error) {
		arrived <- struct{}{}
		<-release
		return "bought", nil
	}})
	world.Script("buy", testenv.MCPFault{Kind: "cut"})
	e := newEnv(t, world, map[string]string{"buy": plain}, calls(use("buy", "1"), client), done)
	id := e.begin()
	<-arrived
	e.send(id, answer(eventOf(t, e, id, "client")))
	e.until(id, "the answer is taken", func(all []store.Entry) bool { return count(all, "user.custom_tool_result") == 1 })
	close(release)
	reason, events := e.rests(id, 1)
	if want := []store.EventID{eventOf(t, e, id, "buy")}; reason != "requires_action" || !slices.Equal(events, want) {
		t.Errorf("rests with %s for %v, want %v\n%s", reason, events, want, e.tell(id))
	}
}

// A call that was approved and is in doubt now can be left to the agent by the
// same kind of answer as approved it.
func TestDenyWhatIsInDoubt(t *testing.T) {
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "pay", Class: "irreversible"})
	world.Script("pay", testenv.MCPFault{Kind: "cut"})
	e := newEnv(t, world, map[string]string{"pay": plain}, calls(use("pay", "1")), done)
	id := e.begin("pay")
	e.rests(id, 1)
	pay := eventOf(t, e, id, "pay")
	e.send(id, allow(pay))
	if reason, events := e.rests(id, 2); reason != "requires_action" || !slices.Equal(events, []store.EventID{pay}) {
		t.Fatalf("rests with %s for %v", reason, events)
	}
	e.send(id, deny(pay))
	e.send(id, deny(pay)) // a repetition
	e.until(id, "it goes on", ends(1))
	other := deny(pay)
	other["deny_message"] = "another"
	if err := e.trySend(id, other); !errors.Is(err, session.ErrState) {
		t.Errorf("another denial: %v", err)
	}
	quiet(e, id)
}

// A panic beside others ends the driver, not the process.
func TestPanicInParallelCall(t *testing.T) {
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "look", Class: "read"})
	e := newEnv(t, world, map[string]string{"look": read}, calls(use("look", "1"), use("look", "2")), done)
	n := 0
	e.mu.Lock()
	e.fault = func(p string) error {
		if p == "before_attempt" {
			e.mu.Lock()
			n++
			first := n == 1
			e.mu.Unlock()
			if first {
				panic("a bug")
			}
		}
		return nil
	}
	e.mu.Unlock()
	id := e.begin()
	e.until(id, "it goes on", ends(1))
}

// Resume goes on where answers that were cut off ended the turn.
func TestResumeAfterCuts(t *testing.T) {
	cut := llm.Step{Text: "And then", Stop: "max_tokens"}
	e := newEnv(t, nil, nil, cut, cut, done)
	e.kill()
	e.pat.Cuts = 1
	e.restart()
	id := e.begin()
	if reason, _ := e.rests(id, 1); reason != "retries_exhausted" {
		t.Fatalf("rests with %s", reason)
	}
	e.asleep(id)
	e.send(id, m{"type": "user.interrupt"}) // says nothing new
	e.until(id, "the interrupt is taken", func(all []store.Entry) bool { return count(all, "user.interrupt") == 1 })
	quiet(e, id)
	if _, err := e.manager.Resume(t.Context(), ws, id, "test"); err != nil {
		t.Fatal(err)
	}
	all := e.until(id, "it goes on", ends(3))
	if n := count(all, "session.status_idle"); n != 2 {
		t.Errorf("rests %d times\n%s", n, e.tell(id))
	}
}

// Two updates at once both hold.
func TestUpdatesAtOnce(t *testing.T) {
	e := newEnv(t, nil, nil, done)
	id := e.begin()
	e.rests(id, 1)
	e.asleep(id)
	title, value := "t", "v"
	once := sync.OnceFunc(func() {
		if _, err := e.manager.Update(t.Context(), ws, id, session.UpdateParams{Title: &title}); err != nil {
			t.Error(err)
		}
	})
	first := true
	e.mu.Lock()
	e.step = func(p string) error {
		e.mu.Lock()
		now := first && p == "unowned.before"
		first = first && !now
		e.mu.Unlock()
		if now {
			once()
		}
		return nil
	}
	e.mu.Unlock()
	if _, err := e.manager.Update(t.Context(), ws, id, session.UpdateParams{Metadata: map[string]*string{"k": &value}}); err != nil {
		t.Fatal(err)
	}
	c := e.session(id).Config
	if c.Title == nil || *c.Title != "t" || c.Metadata["k"] != "v" {
		t.Errorf("title %v, metadata %v", c.Title, c.Metadata)
	}
}

// Content that the model API refuses is left out and the session goes on: one
// broken image of a tool must not brick it (trial H1).
func TestRefusedContent(t *testing.T) {
	for _, status := range []int{400, 413} {
		e := newEnv(t, nil, nil, calls(client), llm.Step{Text: "Done."}, llm.Step{Text: "Again."})
		refused := 0
		scripted := e.model.Config.Handler
		e.model.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			if bytes.Contains(body, []byte(`"type":"image"`)) {
				refused++
				http.Error(w, `{"type":"error","error":{"type":"invalid_request_error","message":"Could not process image"}}`, status)
				return
			}
			r.Body = io.NopCloser(bytes.NewReader(body))
			scripted.ServeHTTP(w, r)
		})
		id := e.begin()
		_, events := e.rests(id, 1)
		picture := answer(events[0])
		picture["content"] = []m{{"type": "image", "source": m{"type": "base64", "media_type": "image/png", "data": "bm90IGEgcGljdHVyZQ=="}}}
		e.send(id, picture)
		e.until(id, "it goes on", ends(1))
		e.restart()
		e.send(id, message("again"))
		e.until(id, "it goes on after a restart", ends(2))
		if refused != 1 {
			t.Errorf("status %d: refused %d times, want once", status, refused)
		}
	}
}

// A message shows the model files by their ids (reference section 9.4): what goes
// to the model API is their content, and a word where there is none any more.
func TestFilesInMessages(t *testing.T) {
	e := newEnv(t, nil, nil, done, calls(client), done, done, done)
	var asked []byte // the newest request
	scripted := e.model.Config.Handler
	e.model.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		asked = body
		r.Body = io.NopCloser(bytes.NewReader(body))
		scripted.ServeHTTP(w, r)
	})
	file := func(in store.WorkspaceID, mime, content string) store.FileID {
		c, err := e.db.PutContent(t.Context(), in, strings.NewReader(content))
		if err != nil {
			t.Fatal(err)
		}
		now := e.db.Now()
		f, err := e.db.CreateFile(t.Context(), store.File{Workspace: in, ID: store.FileID(store.NewID("file_", now)), Filename: "f", MIME: mime, CreatedAt: now}, c)
		if err != nil {
			t.Fatal(err)
		}
		return f.ID
	}
	shown := func(kind string, id store.FileID) m {
		return m{"type": kind, "source": m{"type": "file", "file_id": id}}
	}
	if err := e.db.EnsureWorkspace(t.Context(), "other", "Other"); err != nil {
		t.Fatal(err)
	}
	picture, words := file(ws, "image/png", "a picture"), file(ws, "text/plain; charset=utf-8", "some \"words\"")
	pdf, foreign, odd := file(ws, "application/pdf", "a book"), file("other", "text/plain", "a secret"), file(ws, "application/zip", "zip")
	titled := shown("document", words)
	titled["title"], titled["context"] = "Words", "of the test"
	image := shown("image", picture)
	image["title"] = "accepted, and no word of an image"
	id := e.begin()
	e.rests(id, 1)
	e.send(id, m{"type": "user.message", "content": []m{image, titled, shown("document", foreign), shown("document", odd)}})
	_, events := e.rests(id, 2)
	result := answer(events[0])
	result["content"] = []m{shown("document", pdf)}
	e.send(id, result)
	e.rests(id, 3)
	for _, want := range []string{
		`{"data":"YSBwaWN0dXJl","media_type":"image/png","type":"base64"}`, `{"data":"some \"words\"","media_type":"text/plain","type":"text"},"title":"Words","context":"of the test"`,
		`{"data":"YSBib29r","media_type":"application/pdf","type":"base64"}`,
		"(the document " + string(foreign) + " is not there any more)", "is of type \\\"application/zip\\\"",
	} {
		if !bytes.Contains(asked, []byte(want)) {
			t.Errorf("the model was not shown %s:\n%s", want, asked)
		}
	}
	if bytes.Contains(asked, []byte("a secret")) || bytes.Contains(asked, []byte(`"file_id"`)) {
		t.Errorf("the request: %s", asked)
	}
	if err := e.db.DeleteFile(t.Context(), ws, picture); err != nil {
		t.Fatal(err)
	}
	e.send(id, message("again"))
	e.rests(id, 4)
	if !bytes.Contains(asked, []byte("(the image "+string(picture)+" is not there any more)")) {
		t.Errorf("after its deletion: %s", asked)
	}
	// More than fit: the newest are there.
	e.asleep(id)
	session.ShowOnly(t, 20<<10)
	var large []store.FileID
	for i := range 3 {
		large = append(large, file(ws, "image/png", strings.Repeat("abc"[i:i+1], 9<<10)))
	}
	e.send(id, m{"type": "user.message", "content": []m{shown("image", large[0]), shown("image", large[1]), shown("image", large[2])}})
	e.rests(id, 5)
	for i, gone := range []bool{true, false, false} {
		if bytes.Contains(asked, []byte("(the image "+string(large[i])+" is left out")) != gone {
			t.Errorf("image %d of three is left out: %v", i, !gone)
		}
	}
}

// A message that is longer than the window by itself is cut in the end, and the
// session goes on (trial C1).
func TestMessageLongerThanWindow(t *testing.T) {
	e := newEnv(t, nil, nil, llm.Step{Text: "Done. Done. Done."}, done, done, done, done, done, done, done, done, done, done)
	scripted := e.model.Config.Handler
	summaries := 0
	e.model.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		if bytes.Contains(body, []byte("You compress the history")) {
			summaries++
		} else if len(body) > 10_000 {
			http.Error(w, `{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long"}}`, http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		scripted.ServeHTTP(w, r)
	})
	e.kill()
	e.window = 8_000
	e.restart()
	id := e.begin()
	e.rests(id, 1)
	e.send(id, message(strings.Repeat("word ", 10_000)+"the end"))
	if reason, _ := e.rests(id, 2); reason != "end_turn" {
		t.Errorf("rests with %s after %d summaries\n%s", reason, summaries, e.tell(id))
	}
	e.send(id, message("and this"))
	if reason, _ := e.rests(id, 3); reason != "end_turn" {
		t.Errorf("rests with %s\n%s", reason, e.tell(id))
	}
	// A file that a message names is as long as it is, not as its name.
	c, err := e.db.PutContent(t.Context(), ws, strings.NewReader(strings.Repeat("word ", 10_000)))
	if err != nil {
		t.Fatal(err)
	}
	f, err := e.db.CreateFile(t.Context(), store.File{Workspace: ws, ID: "file_long", Filename: "f", MIME: "text/plain", CreatedAt: e.db.Now()}, c)
	if err != nil {
		t.Fatal(err)
	}
	e.send(id, m{"type": "user.message", "content": []m{{"type": "text", "text": "read this"}, {"type": "document", "source": m{"type": "file", "file_id": f.ID}}}})
	if reason, _ := e.rests(id, 4); reason != "end_turn" {
		t.Errorf("after a long file it rests with %s\n%s", reason, e.tell(id))
	}
}

// An answer that takes longer than the watchdog's patience but keeps coming is
// not stuck: cut off, it would be paid for again and again.
func TestLongAnswerIsNotStuck(t *testing.T) {
	step := llm.Step{Text: strings.Repeat("word by word ", 60), ChunkDelayMS: 60}
	e := newEnv(t, nil, nil, step)
	e.pat.Silence = 250 * time.Millisecond
	e.restart()
	id := e.begin()
	started := time.Now()
	all := e.until(id, "the answer", ends(1))
	if took := time.Since(started); took < 2*e.pat.Silence {
		t.Fatalf("the answer took %v: too quick to prove anything", took)
	}
	if n := count(all, "span.model_request_start"); n != 1 {
		t.Errorf("%d model requests, want 1\n%s", n, e.tell(id))
	}
}

// An interrupt of a paused session closes its open calls; the idle event is
// the last one again, else a client's runner would wait for ever (REF 9.11).
func TestInterruptOfPaused(t *testing.T) {
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible"})
	e := newEnv(t, world, map[string]string{"act": plain}, calls(use("act", "1")), done)
	id := e.begin("act")
	e.until(id, "the question", func(all []store.Entry) bool { return last(all) == "session.status_idle" })
	if _, err := e.manager.Pause(t.Context(), ws, id, "someone"); err != nil {
		t.Fatal(err)
	}
	e.until(id, "the pause", func(all []store.Entry) bool {
		return count(all, "session.paused") == 1 && last(all) == "session.status_idle"
	})
	e.send(id, m{"type": "user.interrupt"})
	e.until(id, "the interrupt", func(all []store.Entry) bool {
		return count(all, "user.interrupt") == 1 && count(all, "agent.mcp_tool_result") == 1 && last(all) == "session.status_idle"
	})
	if n := world.Executions("act"); n != 0 {
		t.Errorf("act was executed %d times, want 0", n)
	}
}
