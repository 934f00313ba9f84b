package server_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/server"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

func TestErrorTable(t *testing.T) {
	wrap := func(err error) error { return fmt.Errorf("outer: %w", fmt.Errorf("inner: %w", err)) }
	for _, c := range []struct {
		err    error
		status int
		typ    api.ErrorType
		says   string
	}{
		{store.ErrNotFound, 404, api.ErrNotFound, "not found"},
		{store.ErrConflict, 409, api.ErrConflict, "changed meanwhile"},
		{store.ErrDuplicate, 409, api.ErrConflict, "exists already"},
		{store.ErrOwned, 409, api.ErrConflict, "worked on"},
		{store.ErrTerminated, 400, api.ErrInvalidRequest, "terminated"},
		{store.ErrAnswered, 400, api.ErrInvalidRequest, "answered before"},
		{store.ErrArchived, 400, api.ErrInvalidRequest, "archived"},
		{store.ErrFull, 400, api.ErrInvalidRequest, "20"},
		{store.ErrDamaged, 500, api.ErrAPI, "damaged"},
		{store.ErrUnknown, 500, api.ErrAPI, "unknown"},
		{&policy.DeniedError{Reason: "role viewer does not include x"}, 403, api.ErrPermission, "role viewer"},
		{&session.Problem{Text: "say it so", Code: "budget_not_raised", Err: session.ErrInput}, 400, api.ErrInvalidRequest, "say it so"},
		{&session.Problem{Text: "not now", Err: session.ErrState}, 400, api.ErrInvalidRequest, "not now"},
		{&session.Problem{Text: "gone", Err: store.ErrNotFound}, 404, api.ErrNotFound, "gone"},
		{api.Invalid("name", "is bad"), 400, api.ErrInvalidRequest, "name: is bad"},
		{errors.New("sql: secret detail"), 500, api.ErrAPI, "internal error"},
		{store.ErrFenced, 500, api.ErrAPI, "internal error"},
	} {
		got, _ := server.WireError(wrap(c.err))
		if got.Status != c.status || got.Type != c.typ || !strings.Contains(got.Message, c.says) || strings.Contains(got.Message, "outer") {
			t.Errorf("%v = %d %s %q, want %d %s …%s…", c.err, got.Status, got.Type, got.Message, c.status, c.typ, c.says)
		}
	}
	if got, _ := server.WireError(wrap(&session.Problem{Text: "x", Code: "budget_not_raised", Err: session.ErrInput})); got.Code() != "budget_not_raised" {
		t.Errorf("error code = %q", got.Code())
	}
}

// Every answer is an envelope with a request id, whatever is asked.
func TestEnvelopes(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	for _, c := range []struct {
		name, method, path, body string
		headers                  []string
		status                   int
		typ                      string
		says                     string
	}{
		{"no key", "GET", "/v1/agents", "", []string{"Authorization", ""}, 401, "authentication_error", "API key"},
		{"wrong key", "GET", "/v1/agents", "", bearer("nonsense"), 401, "authentication_error", "not valid"},
		{"basic auth", "GET", "/v1/agents", "", []string{"Authorization", "Basic YTpi"}, 401, "authentication_error", "API key"},
		{"endless key", "GET", "/v1/agents", "", bearer(strings.Repeat("x", 4000)), 401, "authentication_error", "not valid"},
		{"unknown path", "GET", "/v1/nothing", "", nil, 404, "not_found_error", "/v1/nothing"},
		{"later noun", "GET", "/v1/memory_stores", "", nil, 404, "not_found_error", ""},
		{"later noun", "POST", "/v1/dreams", "{}", nil, 404, "not_found_error", ""},
		{"later noun", "GET", "/v1/environments/" + o.environment + "/work", "", nil, 404, "not_found_error", ""},
		{"method", "PUT", "/v1/agents", "{}", nil, 405, "invalid_request_error", "GET or POST"},
		{"method", "DELETE", "/v1/agents/" + o.agent, "", nil, 405, "invalid_request_error", "GET or POST"},
		{"no body", "POST", "/v1/agents", "", nil, 400, "invalid_request_error", "empty"},
		{"no json", "POST", "/v1/agents", "{", nil, 400, "invalid_request_error", ""},
		{"twice", "POST", "/v1/agents", `{"name":"a","name":"b","model":"m"}`, nil, 400, "invalid_request_error", "twice"},
		{"field", "POST", "/v1/agents", `{"name":"","model":"m"}`, nil, 400, "invalid_request_error", "name: "},
		{"nul", "POST", "/v1/agents", `{"name":"a\u0000","model":"m"}`, nil, 400, "invalid_request_error", "NUL"},
		{"strict", "POST", "/v1/connectors", `{"name":"a","kind":"mcp","url":"https://x.example","nonsense":1}`, nil, 400, "invalid_request_error", "nonsense"},
		{"later field", "POST", "/v1/connectors", `{"name":"a","kind":"mcp","url":"https://x.example","tools":{"t":{"approval":"two"}}}`, nil, 400, "invalid_request_error", "tools.t.approval"},
		{"dup name", "POST", "/v1/connectors", `{"name":"aws","kind":"mcp","url":"https://x.example"}`, nil, 409, "conflict_error", "aws"},
		{"limit", "GET", "/v1/agents?limit=0", "", nil, 400, "invalid_request_error", "limit"},
		{"limit", "GET", "/v1/agents?limit=101", "", nil, 400, "invalid_request_error", "limit"},
		{"cursor", "GET", "/v1/agents?page=nonsense", "", nil, 400, "invalid_request_error", "page"},
		{"flag", "GET", "/v1/agents?include_archived=maybe", "", nil, 400, "invalid_request_error", "include_archived"},
		{"time", "GET", "/v1/agents?created_at%5Bgte%5D=yesterday", "", nil, 400, "invalid_request_error", "created_at[gte]"},
		{"version", "GET", "/v1/agents/" + o.agent + "?version=x", "", nil, 400, "invalid_request_error", "version"},
		{"agent_version alone", "GET", "/v1/sessions?agent_version=1", "", nil, 400, "invalid_request_error", "agent_id"},
		{"order", "GET", "/v1/sessions?order=sideways", "", nil, 400, "invalid_request_error", "order"},
		{"types", "GET", "/v1/sessions/" + o.session + "/events?types[]=user.nonsense", "", nil, 400, "invalid_request_error", "user.nonsense"},
		{"deltas", "GET", "/v1/sessions/" + o.session + "/events/stream?event_deltas[]=user.message", "", nil, 400, "invalid_request_error", "event_deltas"},
		{"many deltas", "GET", "/v1/sessions/" + o.session + "/events/stream?" + strings.Repeat("event_deltas[]=agent.message&", 101), "", nil, 400, "invalid_request_error", "101"},
		{"event", "POST", "/v1/sessions/" + o.session + "/events", `{"events":[{"type":"user.message","content":[{"type":"text","text":"x"}]},{"type":"user.nonsense"}]}`, nil, 400, "invalid_request_error", "events[1]"},
		{"no events", "POST", "/v1/sessions/" + o.session + "/events", `{"events":[]}`, nil, 400, "invalid_request_error", "events"},
		{"odd id", "GET", "/v1/sessions/%00", "", nil, 404, "not_found_error", ""},
		{"odd id", "GET", "/v1/agents/" + strings.Repeat("x", 3000), "", nil, 404, "not_found_error", ""},
		{"primary thread", "POST", "/v1/sessions/" + o.session + "/threads/" + o.thread + "/archive", "", nil, 400, "invalid_request_error", "primary"},
		{"last admin", "DELETE", "/v1/api_keys/" + e.adminID(), "", nil, 400, "invalid_request_error", "last admin"},
		{"settle nothing", "POST", "/v1/effects/eff_0/settle", `{"outcome":"happened"}`, nil, 404, "not_found_error", "eff_0"},
		{"settle", "POST", "/v1/effects/eff_0/settle", `{"outcome":"maybe"}`, nil, 400, "invalid_request_error", "outcome"},
		{"idempotency key", "POST", "/v1/agents", agentBody, []string{"Idempotency-Key", "with space"}, 400, "invalid_request_error", "Idempotency-Key"},
		{"oauth", "POST", "/v1/vaults/" + o.vault + "/credentials", `{"auth":{"type":"mcp_oauth","mcp_server_url":"https://x.example","access_token":"s"}}`, nil, 400, "invalid_request_error", "not supported yet"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := e.do(c.method, c.path, c.body, c.headers...)
			var env struct {
				Type      string
				RequestID string `json:"request_id"`
				Error     struct{ Type, Message string }
			}
			if err := json.Unmarshal(got.body, &env); err != nil {
				t.Fatalf("%d %q: %v", got.status, got.body, err)
			}
			if got.status != c.status || env.Type != "error" || env.Error.Type != c.typ || !strings.Contains(env.Error.Message, c.says) {
				t.Errorf("%s %s = %d %s, want %d %s …%s…", c.method, c.path, got.status, got.body, c.status, c.typ, c.says)
			}
			if id := got.header.Get("request-id"); id == "" || id != env.RequestID {
				t.Errorf("request-id header %q, envelope %q", id, env.RequestID)
			}
			if ct := got.header.Get("content-type"); ct != "application/json" {
				t.Errorf("content type %q", ct)
			}
			if retry := got.header.Get("x-should-retry"); (retry == "false") != (c.status == 409) {
				t.Errorf("x-should-retry %q on %d", retry, c.status)
			}
		})
	}
}

// adminID is the id of the first key.
func (e *env) adminID() string {
	e.t.Helper()
	var list struct{ Data []struct{ ID string } }
	e.do("GET", "/v1/api_keys", "").get(e.t, &list)
	return list.Data[len(list.Data)-1].ID
}

func TestTooLarge(t *testing.T) {
	e := newEnv(t)
	e.stop()
	e.start(func(c *server.Config) { c.MaxBody = 1000 })
	body := `{"name":"` + strings.Repeat("x", 2000) + `"}`
	if got := e.do("POST", "/v1/agents", body); got.status != http.StatusRequestEntityTooLarge || !strings.Contains(string(got.body), "request_too_large") {
		t.Errorf("announced length: %d %s", got.status, got.body)
	}
	// Without a length the limit shows while reading.
	req, err := http.NewRequest("POST", e.url+"/v1/agents", io.MultiReader(strings.NewReader(body)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("x-api-key", adminKey)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("chunked: %d", resp.StatusCode)
	}
}

// A panic of one request is a 500 and leaves the others alone.
func TestPanic(t *testing.T) {
	e := newEnv(t)
	e.stop()
	e.start(func(c *server.Config) {
		c.WhoIs = func(r *http.Request) (server.Caller, error) {
			if r.Header.Get("x-boom") != "" {
				panic("boom with a detail")
			}
			return server.Caller{Principal: policy.Principal{ID: "apikey_1", Workspace: "default", Role: policy.RoleAdmin}}, nil
		}
	})
	got := e.do("GET", "/v1/agents", "", "x-boom", "1")
	if got.status != 500 || strings.Contains(string(got.body), "boom") || got.header.Get("request-id") == "" {
		t.Errorf("panic = %d %s", got.status, got.body)
	}
	if got := e.do("GET", "/v1/agents", ""); got.status != 200 {
		t.Errorf("after a panic: %d", got.status)
	}
	if !strings.Contains(e.logs.String(), "boom with a detail") {
		t.Error("the log does not say why")
	}
}

// Old clients: x-api-key, the old version, any beta, ?beta=true, any Accept.
func TestOldClients(t *testing.T) {
	e := newEnv(t)
	for _, h := range [][]string{
		{"Authorization", "", "x-api-key", adminKey, "anthropic-version", "2023-06-01"},
		{"anthropic-version", "2026-10-21", "anthropic-beta", "managed-agents-2026-04-01,nonsense-2030"},
		{"x-api-key", "nonsense"}, // Authorization is preferred
		{"Accept", "text/event-stream"},
		{"Accept", "application/binary"},
	} {
		got := e.do("GET", "/v1/agents?beta=true", "", h...)
		if got.status != 200 || got.header.Get("content-type") != "application/json" {
			t.Errorf("%v = %d %s", h, got.status, got.body)
		}
		if want := `{"data":[],"next_page":null}`; string(got.body) != want {
			t.Errorf("empty list = %s, want %s", got.body, want)
		}
	}
	if got := e.do("GET", "/v1/sessions", ""); string(got.body) != `{"data":[],"next_page":null,"prev_page":null}` {
		t.Errorf("empty list of sessions = %s", got.body)
	}
}

func TestOperations(t *testing.T) {
	e := newEnv(t)
	for _, path := range []string{"/healthz", "/readyz"} {
		if got := e.do("GET", path, "", "Authorization", ""); got.status != 200 || !json.Valid(got.body) {
			t.Errorf("%s = %d %s", path, got.status, got.body)
		}
	}
	if got := e.do("GET", "/metrics", ""); got.status != 404 {
		t.Errorf("/metrics without a handler = %d", got.status)
	}
	var nodes struct{ Data []api.Node }
	e.do("GET", "/v1/nodes", "").get(t, &nodes)
	if len(nodes.Data) != 1 || !nodes.Data[0].Alive || nodes.Data[0].Version != "test" {
		t.Errorf("nodes = %+v", nodes.Data)
	}
}
