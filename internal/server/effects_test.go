package server_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/store"
)

// outside is an MCP server that counts executions.
type outside struct {
	url   string
	calls atomic.Int64
	cut   atomic.Bool // the connection breaks after the act
}

type deleteArgs struct {
	ID string `json:"id"`
}

func newOutside(t *testing.T) *outside {
	t.Helper()
	o := &outside{}
	s := mcp.NewServer(&mcp.Implementation{Name: "outside", Version: "1"}, nil)
	mcp.AddTool(s, &mcp.Tool{Name: "delete", Description: "delete a thing"}, func(_ context.Context, _ *mcp.CallToolRequest, in deleteArgs) (*mcp.CallToolResult, any, error) {
		o.calls.Add(1)
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: "deleted " + in.ID}}}, nil, nil
	})
	h := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return s }, &mcp.StreamableHTTPOptions{Stateless: true, JSONResponse: true})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the caller left
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		if o.cut.Load() && bytes.Contains(body, []byte(`"tools/call"`)) {
			h.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler) // done, and the answer is lost
		}
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	o.url = srv.URL
	return o
}

// asking starts a session whose model calls the outside tool with a policy.
func (e *env) asking(o *outside, policy string) string {
	e.t.Helper()
	e.connect(o)
	return e.ask(policy)
}

// connect declares the outside's tools.
func (e *env) connect(o *outside) {
	e.t.Helper()
	e.do("POST", "/v1/connectors", fmt.Sprintf(`{"name":"out","kind":"mcp","url":%q,"tools":{"delete":{"class":"irreversible","identity":["id"]}}}`, o.url)).id(e.t)
}

// ask starts a session whose agent calls it.
func (e *env) ask(policy string) string {
	e.t.Helper()
	agent := e.do("POST", "/v1/agents", fmt.Sprintf(`{"name":"a","model":"m","mcp_servers":[{"type":"url","name":"out","url":"planaria:out"}],
		"tools":[{"type":"mcp_toolset","mcp_server_name":"out","default_config":{"permission_policy":{"type":%q}}}]}`, policy)).id(e.t)
	env := e.do("POST", "/v1/environments", `{"name":"e"}`).id(e.t)
	return e.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":%q,"environment_id":%q,"initial_events":[{"type":"user.message","content":[{"type":"text","text":"delete it"}]}]}`, agent, env)).id(e.t)
}

func (e *env) effects(path string) []api.Effect {
	e.t.Helper()
	var list api.Page[api.Effect]
	a := e.do("GET", path, "")
	if a.status != 200 {
		e.t.Fatalf("%s = %d %s", path, a.status, a.body)
	}
	if err := api.Decode(a.body, &list); err != nil {
		e.t.Fatal(err)
	}
	return list.Data
}

// What waits for a person is listed, answered once, done once, and its whole
// story is the effect object.
func TestApprovals(t *testing.T) {
	e := newEnv(t)
	o := newOutside(t)
	session := e.asking(o, "always_ask")
	e.idleFor(session, "requires_action")
	waiting := e.effects("/v1/approvals")
	if len(waiting) != 1 || waiting[0].State != api.EffectAwaitingApproval || waiting[0].Tool != "delete" || string(waiting[0].Arguments) != `{"id":"db-1"}` {
		t.Fatalf("approvals = %+v", waiting)
	}
	id := waiting[0].ID
	if o.calls.Load() != 0 {
		t.Error("the tool was called before it was allowed")
	}
	if got := e.do("POST", "/v1/approvals/"+id, `{"result":"perhaps"}`); got.status != 400 {
		t.Errorf("no answer at all = %d %s", got.status, got.body)
	}
	if got := e.do("POST", "/v1/approvals/"+id, `{"result":"allow"}`); got.status != 200 || got.id(t) != id {
		t.Fatalf("allow = %d %s", got.status, got.body)
	}
	e.do("POST", "/v1/approvals/"+id, `{"result":"allow"}`) // the same answer again changes nothing
	if got := e.do("POST", "/v1/approvals/"+id, `{"result":"deny"}`); got.status != 400 {
		t.Errorf("another answer = %d %s", got.status, got.body)
	}
	e.idleFor(session, "end_turn")
	if n := o.calls.Load(); n != 1 {
		t.Errorf("%d executions, want 1", n)
	}
	got := e.effects("/v1/sessions/" + session + "/effects?tool=delete&state[]=completed&class=irreversible")
	if len(got) != 1 {
		t.Fatalf("effects = %+v", got)
	}
	x := got[0]
	if x.ID != id || x.Outcome == nil || *x.Outcome != "ok" || len(x.Attempts) != 1 || x.Completion == nil || x.Completion.IsError ||
		x.Connector == nil || !strings.HasPrefix(*x.Connector, "conn_") || x.Approval == nil || x.Approval.Result != "allow" || x.EventID == "" || x.Seq == 0 {
		t.Errorf("effect = %+v", x)
	}
	if !strings.Contains(string(x.Completion.Response), "deleted db-1") {
		t.Errorf("response = %s", x.Completion.Response)
	}
	if x.Attempts[0].Seq <= x.Seq || x.Completion.Seq <= x.Attempts[0].Seq {
		t.Errorf("order: first %d, attempt %d, completion %d", x.Seq, x.Attempts[0].Seq, x.Completion.Seq)
	}
	var answers struct {
		Data []struct{ Principal, Action, Resource string }
	}
	e.do("GET", "/v1/audit?action=approvals.answer", "").get(t, &answers)
	if len(answers.Data) == 0 || answers.Data[0].Resource != id || answers.Data[0].Principal == "" {
		t.Errorf("audit of the answer = %+v", answers.Data)
	}
	if len(e.effects("/v1/approvals")) != 0 {
		t.Error("it still waits")
	}
	var usage struct{ Data []api.UsageRow }
	e.do("GET", "/v1/usage?group_by=session", "").get(t, &usage)
	if len(usage.Data) != 1 || usage.Data[0].Group != session || usage.Data[0].ModelRequests != 2 || usage.Data[0].Effects != 1 {
		t.Errorf("usage = %+v", usage.Data)
	}
}

// An act whose answer was lost is in doubt; a person settles it, once.
func TestSettle(t *testing.T) {
	e := newEnv(t)
	o := newOutside(t)
	o.cut.Store(true)
	session := e.asking(o, "always_allow")
	e.idleFor(session, "requires_action")
	doubt := e.effects("/v1/effects?state=in_doubt")
	if len(doubt) != 1 || doubt[0].Completion != nil || len(doubt[0].Attempts) != 1 {
		t.Fatalf("in doubt = %+v", doubt)
	}
	if s := e.do("GET", "/v1/sessions/"+session, "").object(t)["planaria"].(map[string]any); s["in_doubt"] != 1.0 {
		t.Errorf("session says %v in doubt", s["in_doubt"])
	}
	id := doubt[0].ID
	got := e.do("POST", "/v1/effects/"+id+"/settle", `{"outcome":"happened","evidence":"I looked","response":{"content":[{"type":"text","text":"deleted"}]}}`, idem("settle-1")...)
	if got.status != 200 {
		t.Fatalf("settle = %d %s", got.status, got.body)
	}
	if again := e.do("POST", "/v1/effects/"+id+"/settle", `{"outcome":"happened","evidence":"I looked","response":{"content":[{"type":"text","text":"deleted"}]}}`, idem("settle-1")...); again.status != 200 || again.header.Get("idempotent-replayed") != "true" {
		t.Errorf("the same settlement by key = %d %s", again.status, again.body)
	}
	if again := e.do("POST", "/v1/effects/"+id+"/settle", `{"outcome":"did_not_happen"}`); again.status != 400 {
		t.Errorf("a second settlement = %d %s", again.status, again.body)
	}
	e.idleFor(session, "end_turn")
	x := e.effects("/v1/sessions/" + session + "/effects?tool=delete")[0]
	if x.State != api.EffectCompleted || len(x.Evidence) == 0 || x.Evidence[len(x.Evidence)-1].Kind != "person" || x.Evidence[len(x.Evidence)-1].Says != "happened" {
		t.Errorf("settled effect = %+v", x)
	}
	if n := o.calls.Load(); n != 1 {
		t.Errorf("%d executions, want 1", n)
	}
}

// Effects outlive their session as tombstones, and one deleted or damaged
// session does not hide the effects of the others.
func TestEffectsWithoutSession(t *testing.T) {
	e := newEnv(t)
	o := newOutside(t)
	e.connect(o)
	var ids []string
	for range 3 {
		id := e.ask("always_ask")
		e.idleFor(id, "requires_action")
		ids = append(ids, id)
	}
	if got := e.do("DELETE", "/v1/sessions/"+ids[0], ""); got.status != 200 {
		t.Fatalf("delete = %d %s", got.status, got.body)
	}
	if err := e.db.Refuse(t.Context(), policy.HomeWorkspace, store.SessionID(ids[1]), "for a test"); err != nil {
		t.Fatal(err)
	}
	byID := map[string]api.Effect{}
	for _, x := range e.effects("/v1/effects?tool=delete") {
		byID[x.SessionID] = x
	}
	if len(byID) != 3 || string(byID[ids[0]].Arguments) != "{}" || byID[ids[0]].Digest == "" || string(byID[ids[2]].Arguments) == "{}" {
		t.Errorf("effects = %+v, want all three, that of the deleted session without content", byID)
	}
	if got := e.do("GET", "/v1/effects/"+byID[ids[0]].ID, ""); got.status != 200 {
		t.Errorf("effect of a deleted session = %d %s", got.status, got.body)
	}
	for _, x := range e.effects("/v1/approvals") {
		if x.SessionID == ids[0] {
			t.Errorf("a call of a deleted session waits for a person: %+v", x)
		}
	}
}
