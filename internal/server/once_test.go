package server_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
)

func idem(key string, more ...string) []string {
	return append([]string{"Idempotency-Key", key}, more...)
}

// With a key a POST happens once, also when its repetitions come at once or
// after a restart, and each gets the same answer.
func TestIdempotencyKey(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	first := e.do("POST", "/v1/agents", agentBody, idem("k1")...)
	if first.header.Get("idempotent-replayed") != "" {
		t.Error("the first answer says that it is a repetition")
	}
	for i, again := range []func() answer{
		func() answer { return e.do("POST", "/v1/agents", agentBody, idem("k1")...) },
		func() answer { e.restart(); return e.do("POST", "/v1/agents", agentBody, idem("k1")...) },
	} {
		got := again()
		if string(got.body) != string(first.body) || got.header.Get("idempotent-replayed") != "true" {
			t.Errorf("repetition %d = %d %s, want %s", i, got.status, got.body, first.body)
		}
	}
	if got := e.do("POST", "/v1/agents", `{"name":"other","model":"m"}`, idem("k1")...); got.status != 400 || !strings.Contains(string(got.body), `k1`) {
		t.Errorf("same key, other body = %d %s", got.status, got.body)
	}
	if got := e.do("POST", "/v1/agents", agentBody, idem("k2")...); string(got.body) == string(first.body) {
		t.Error("another key made no other agent")
	}
	if got := e.do("POST", "/v1/vaults", `{"display_name":"v"}`, idem("k1")...); got.status != 200 {
		t.Errorf("same key on another path = %d %s", got.status, got.body)
	}
	theirs := e.workspace("two")
	if got := e.do("POST", "/v1/agents", agentBody, append(bearer(theirs), idem("k1")...)...); string(got.body) == string(first.body) || got.status != 200 {
		t.Errorf("same key in another workspace = %d %s", got.status, got.body)
	}
	// A request that was refused was not done: the key is free.
	if got := e.do("POST", "/v1/agents", `{"name":""}`, idem("k3")...); got.status != 400 {
		t.Fatal(got.status)
	}
	if got := e.do("POST", "/v1/agents", agentBody, idem("k3")...); got.status != 200 {
		t.Errorf("after a refusal = %d %s", got.status, got.body)
	}
	body := fmt.Sprintf(`{"agent":%q,"environment_id":%q,"initial_events":[{"type":"user.message","content":[{"type":"text","text":"hi"}]}]}`, o.agent, o.environment)
	var mu sync.Mutex
	var wg sync.WaitGroup
	ids := map[string]int{}
	for range 6 {
		wg.Go(func() {
			got, err := e.try("POST", "/v1/sessions", body, idem("k4")...)
			if err != nil || got.status != 200 {
				t.Errorf("session = %d %s %v", got.status, got.body, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ids[got.id(t)]++
		})
	}
	wg.Wait()
	if len(ids) != 1 {
		t.Errorf("six requests with one key made %d sessions", len(ids))
	}
}

// A message sent twice with one key is one message, and the repetition shows
// the event as it stands.
func TestIdempotentSend(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	path, body := "/v1/sessions/"+o.session+"/events", `{"events":[{"type":"user.message","content":[{"type":"text","text":"canary-of-a-message"}]}]}`
	var first, again struct {
		Data []struct {
			ID          string
			ProcessedAt *string `json:"processed_at"`
		}
	}
	e.do("POST", path, body, idem("k1")...).get(t, &first)
	e.idle(o.session)
	e.do("POST", path, body, idem("k1")...).get(t, &again)
	if len(again.Data) != 1 || again.Data[0].ID != first.Data[0].ID || again.Data[0].ProcessedAt == nil {
		t.Errorf("repetition = %+v, first %+v", again, first)
	}
	if n := e.messages(o.session); n != 1 {
		t.Errorf("%d messages in the log", n)
	}
	if n := e.occurrences("canary-of-a-message"); n != 0 {
		t.Errorf("the message stands %d times in clear in the data folder", n)
	}
	for i, op := range []string{"pause", "pause", "resume", "archive", "archive"} {
		if i == 3 {
			e.idle(o.session) // resumed, it runs for a moment, and then it cannot be archived
		}
		if got := e.do("POST", "/v1/sessions/"+o.session+"/"+op, "", idem("op-"+op)...); got.status != 200 || got.id(t) != o.session {
			t.Errorf("%s = %d %s", op, got.status, got.body)
		}
	}
	key := e.do("POST", "/v1/api_keys", `{"name":"k","role":"viewer"}`, idem("k5")...).object(t)
	twin := e.do("POST", "/v1/api_keys", `{"name":"k","role":"viewer"}`, idem("k5")...).object(t)
	if twin["id"] != key["id"] || key["key"] == nil || twin["key"] != nil {
		t.Errorf("repeated creation of a key = %v; the key is shown once", twin)
	}
	if n := e.occurrences(key["key"].(string)); n != 0 {
		t.Errorf("the key stands %d times in clear in the data folder", n)
	}
}

// messages counts user messages in the log and the queue.
func (e *env) messages(session string) int {
	e.t.Helper()
	n := 0
	_, byID := e.events(session)
	for _, ev := range byID {
		if ev["type"] == "user.message" {
			n++
		}
	}
	return n
}

// A retry of an official client, known by its count, gets the answer that was
// lost; an equal message that was meant is another message.
func TestStainlessRetry(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	path, body := "/v1/sessions/"+o.session+"/events", `{"events":[{"type":"user.message","content":[{"type":"text","text":"continue"}]}]}`
	retry := []string{"X-Stainless-Retry-Count", "1"}

	// The answer was given: an equal body, even called a retry, is a new message.
	e.do("POST", path, body)
	e.do("POST", path, body)
	e.do("POST", path, body, retry...)
	if n := e.messages(o.session); n != 3 {
		t.Errorf("%d messages, want 3: every answer was given", n)
	}

	// The process that owed the answer is gone.
	last := e.do("POST", path, body)
	e.restart()
	got := e.do("POST", path, body, retry...)
	if got.status != 200 || got.header.Get("idempotent-replayed") != "true" || firstID(t, got) != firstID(t, last) {
		t.Errorf("retry after a restart = %d %s, want the event of %s", got.status, got.body, last.body)
	}
	if n := e.messages(o.session); n != 4 {
		t.Errorf("%d messages, want 4: the retry after a restart is none", n)
	}
	// Without the count it is meant.
	e.do("POST", path, body)
	if n := e.messages(o.session); n != 5 {
		t.Errorf("%d messages, want 5", n)
	}

	// The answer could not be written.
	create := fmt.Sprintf(`{"agent":%q,"environment_id":%q,"title":"lost"}`, o.agent, o.environment)
	if got, err := e.try("POST", "/v1/sessions", create, "x-lose-answer", "1"); err == nil {
		t.Fatalf("the answer was not lost: %s", got.body)
	}
	a, b := e.do("POST", "/v1/sessions", create, retry...), e.do("POST", "/v1/sessions", create, retry...)
	if a.status != 200 || a.id(t) != b.id(t) {
		t.Errorf("retries = %s and %s", a.body, b.body)
	}
	var list struct{ Data []struct{ Title string } }
	e.do("GET", "/v1/sessions", "").get(t, &list)
	n := 0
	for _, s := range list.Data {
		if s.Title == "lost" {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d sessions of one creation", n)
	}
}

func firstID(t *testing.T, a answer) string {
	t.Helper()
	return a.object(t)["data"].([]any)[0].(map[string]any)["id"].(string)
}
