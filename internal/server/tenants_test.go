package server_test

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/server"
)

// used runs a turn that leaves a client tool call open, so that there are
// events and an effect.
func (e *env) used(o *objects) {
	e.t.Helper()
	h := bearer(o.key)
	e.do("POST", "/v1/sessions/"+o.session+"/events", `{"events":[{"type":"user.message","content":[{"type":"text","text":"use the tool"}]}]}`, h...)
	e.idle(o.session, h...)
	var list struct {
		Data []struct{ ID, Tool, EventID string }
	}
	e.do("GET", "/v1/sessions/"+o.session+"/effects", "", h...).get(e.t, &list)
	for _, x := range list.Data {
		if x.Tool == "lookup" {
			o.effect = x.ID
		}
	}
	if o.effect == "" {
		e.t.Fatalf("no effect of the client tool: %+v", list)
	}
}

// bodyFor is a valid body for a POST.
func bodyFor(pattern string) string {
	switch {
	case strings.HasSuffix(pattern, "/events"):
		return `{"events":[{"type":"user.message","content":[{"type":"text","text":"hi"}]}]}`
	case strings.HasSuffix(pattern, "/settle"):
		return `{"outcome":"happened"}`
	case strings.HasSuffix(pattern, "/credentials"):
		return `{"auth":{"type":"static_bearer","mcp_server_url":"https://x.example/mcp","token":"abcdef"}}`
	case strings.HasPrefix(pattern, "POST /v1/approvals/"):
		return `{"result":"allow"}`
	case strings.HasSuffix(pattern, "/resources"):
		return `{"type":"file","file_id":"file_1"}`
	case strings.HasSuffix(pattern, "/{connector}"):
		return `{"trust_annotations":true}`
	}
	return `{}`
}

var pathParam = regexp.MustCompile(`\{[a-z_]+\}`)

// path fills a pattern with ids.
func (o objects) path(pattern string) string {
	ids := map[string]string{"{agent}": o.agent, "{environment}": o.environment, "{session}": o.session, "{thread}": o.thread,
		"{resource}": "sesrsc_1", "{effect}": o.effect, "{vault}": o.vault, "{credential}": o.credential, "{connector}": o.conn,
		"{api_key}": o.id, "{file}": o.file, "{workspace}": "default"}
	return pathParam.ReplaceAllStringFunc(pattern, func(p string) string { return ids[p] })
}

// all are the ids of one workspace.
func (o objects) all() []string {
	return []string{o.agent, o.environment, o.session, o.thread, o.effect, o.vault, o.credential, o.conn, o.id, o.file}
}

var randomIDs = regexp.MustCompile(`[a-z]+_[0-9a-z]{26}`)

// Trial X1, law L11: every route, asked with the ids of another workspace,
// answers exactly as for ids that nobody has, and no list shows a foreign row.
func TestX1Tenants(t *testing.T) {
	e := newEnv(t)
	mine := e.fill(adminKey)
	e.used(&mine)
	mine.id = e.do("POST", "/v1/api_keys", `{"name":"k","role":"viewer"}`).id(t)
	theirs := bearer(e.workspace("tenant two"))
	unknown := objects{agent: "agent_0", environment: "env_0", session: "sesn_0", thread: "sthr_0", effect: "eff_0", vault: "vlt_0",
		credential: "vcrd_0", conn: "conn_0", id: "apikey_0", file: "file_0"}
	plain := func(a answer, ids ...string) string {
		s := string(a.body)
		for _, id := range ids {
			s = strings.ReplaceAll(s, id, "ID")
		}
		return randomIDs.ReplaceAllString(s, "RANDOM")
	}
	for _, r := range server.Routes() {
		method, pattern, _ := strings.Cut(r.Pattern, " ")
		t.Run(r.Pattern, func(t *testing.T) {
			body := ""
			if method == "POST" {
				body = bodyFor(r.Pattern)
			}
			if !strings.Contains(pattern, "{") {
				if method != "GET" {
					return // creations have no foreign id in the path; see below
				}
				got := e.do(method, pattern, body, theirs...)
				for _, id := range mine.all() {
					if strings.Contains(string(got.body), id) {
						t.Errorf("the list shows %s of another workspace", id)
					}
				}
				return
			}
			foreign := e.do(method, mine.path(pattern), body, theirs...)
			nobody := e.do(method, unknown.path(pattern), body, theirs...)
			want := http.StatusNotFound
			if r.Action == policy.WorkspacesRead {
				want = http.StatusForbidden
			}
			if foreign.status != want {
				t.Errorf("status %d, want %d: %s", foreign.status, want, foreign.body)
			}
			if a, b := plain(foreign, mine.all()...), plain(nobody, unknown.all()...); foreign.status != nobody.status || a != b {
				t.Errorf("a foreign id can be told from an unknown one:\n%s\n%s", a, b)
			}
		})
	}
	for what, body := range map[string]string{
		"agent":       fmt.Sprintf(`{"agent":%q,"environment_id":"env_0"}`, mine.agent),
		"version":     fmt.Sprintf(`{"agent":{"type":"agent","id":%q,"version":1},"environment_id":"env_0"}`, mine.agent),
		"environment": fmt.Sprintf(`{"agent":%q,"environment_id":%q}`, e.do("POST", "/v1/agents", agentBody, theirs...).id(t), mine.environment),
	} {
		if got := e.do("POST", "/v1/sessions", body, theirs...); got.status != http.StatusNotFound {
			t.Errorf("session with a foreign %s = %d %s", what, got.status, got.body)
		}
	}
	own := e.fill(strings.TrimPrefix(theirs[1], "Bearer "))
	if got := e.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":%q,"environment_id":%q,"vault_ids":[%q]}`, own.agent, own.environment, mine.vault), theirs...); got.status != http.StatusNotFound {
		t.Errorf("session with a foreign vault = %d %s", got.status, got.body)
	}
	foreign := fmt.Sprintf(`{"type":"file","file_id":%q}`, mine.file)
	if got := e.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":%q,"environment_id":%q,"resources":[%s]}`, own.agent, own.environment, foreign), theirs...); got.status != http.StatusNotFound {
		t.Errorf("session with a foreign file = %d %s", got.status, got.body)
	}
	if got := e.do("POST", "/v1/sessions/"+own.session+"/resources", foreign, theirs...); got.status != http.StatusNotFound {
		t.Errorf("foreign file as a resource = %d %s", got.status, got.body)
	}
	if got := e.do("GET", "/v1/sessions/"+own.session+"/threads/"+mine.thread, "", theirs...); got.status != http.StatusNotFound {
		t.Errorf("foreign thread in an own session = %d", got.status)
	}
	if got := e.do("GET", "/v1/agents", "", append(theirs, "anthropic-workspace-id", "default")...); got.status != http.StatusForbidden {
		t.Errorf("another workspace by header = %d", got.status)
	}
	if got := e.do("POST", "/v1/api_keys", `{"name":"x","role":"admin","workspace_id":"default"}`, theirs...); got.status != http.StatusNotFound {
		t.Errorf("a key for another workspace = %d %s", got.status, got.body)
	}
}

// Roles: each route for each role, as policy says; a refusal is a 403 that
// leaves an audit row, and changes nothing.
func TestRoles(t *testing.T) {
	e := newEnv(t)
	refused := 0
	for _, role := range policy.Roles() {
		key := bearer(e.key(string(role)))
		for _, r := range server.Routes() {
			method, pattern, _ := strings.Cut(r.Pattern, " ")
			path := objects{agent: "a", environment: "e", session: "s", thread: "t", effect: "f", vault: "v", credential: "c", conn: "n", id: "k", file: "l"}.path(pattern)
			got := e.do(method, path, `{"name":""}`, key...)
			want := policy.Decide(policy.Principal{ID: "x", Workspace: "default", Role: role}, r.Action, policy.Resource{Workspace: "default"})
			if allowed := got.status != http.StatusForbidden; allowed != (want.Verdict == policy.Allow) {
				t.Errorf("%s %s = %d, policy says %s", role, r.Pattern, got.status, want.Verdict)
			}
			if got.status == http.StatusForbidden {
				refused++
			}
		}
	}
	if refused == 0 {
		t.Fatal("nothing was refused")
	}
	n := 0
	page := ""
	for {
		var list struct {
			Data []struct {
				Detail struct{ Refused string }
			}
			NextPage *string `json:"next_page"`
		}
		e.do("GET", "/v1/audit?limit=100"+page, "").get(t, &list)
		for _, row := range list.Data {
			if row.Detail.Refused != "" {
				n++
			}
		}
		if list.NextPage == nil {
			break
		}
		page = "&page=" + *list.NextPage
	}
	if n != refused {
		t.Errorf("%d refusals, %d audit rows of them", refused, n)
	}
	if _, err := e.db.VerifyAudit(t.Context(), "default"); err != nil {
		t.Errorf("verify audit: %v", err)
	}
}
