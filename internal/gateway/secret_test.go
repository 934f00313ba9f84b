package gateway_test

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
	"github.com/planaria/planaria/internal/vault"
)

const canary = "canary-7f3b9c01d5e8/+secret=="

// credential keeps a token for a URL in a new vault of a workspace.
func (e *env) credential(w store.WorkspaceID, url, token string) store.VaultID {
	e.t.Helper()
	now := e.now()
	v := store.Vault{Workspace: w, ID: store.VaultID(store.NewID("vlt_", now)), DisplayName: "v", CreatedAt: now, UpdatedAt: now}
	if _, err := e.db.CreateVault(e.t.Context(), v); err != nil {
		e.t.Fatal(err)
	}
	id := store.CredentialID(store.NewID("vcrd_", now))
	sealed, err := e.master.Seal(string(w), string(id), vault.NewSecret(token))
	if err != nil {
		e.t.Fatal(err)
	}
	key, err := effect.NormalizeURL(url)
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.db.CreateCredential(e.t.Context(), store.Credential{Workspace: w, Vault: v.ID, ID: id, AuthType: "static_bearer",
		MatchKey: key, Auth: []byte(`{"type":"static_bearer"}`), Sealed: sealed, CreatedAt: now, UpdatedAt: now}); err != nil {
		e.t.Fatal(err)
	}
	return v.ID
}

func noSecret(t *testing.T, where, text string) {
	t.Helper()
	for name, form := range map[string]string{
		"plain": canary, "base64": base64.StdEncoding.EncodeToString([]byte(canary)), "hex": hex.EncodeToString([]byte(canary)),
		"json": strings.ReplaceAll(canary, "/", `\/`),
	} {
		if strings.Contains(text, form) {
			t.Errorf("%s shows the credential (%s)", where, name)
		}
	}
}

// Attack K2, law L6: a server that echoes its headers does not bring the
// credential to the agent, the log, an error or a trace.
func TestCredential(t *testing.T) {
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible"})
	w.RequireBearer(canary)
	e := newEnv(t, w, nil)
	// Without a credential: the server's refusal, told apart (trial of connecting).
	var se *gateway.ServerError
	if _, err := e.gw.List(t.Context(), e.scope(), "world"); !errors.As(err, &se) || !se.Auth {
		t.Errorf("list without credential: got %v, want a refusal of credentials", err)
	}
	e.vaults = []store.VaultID{e.credential(ws, w.URL+"/", canary)}
	w.Script("act", testenv.MCPFault{Kind: "echo"}, testenv.MCPFault{Before: true, Kind: "status", Status: 422, Body: canary})
	id := e.intend("act", `{"x":1}`)
	p := e.goOn(id)
	if !p.Done || !strings.Contains(text(p.Answer), vault.Redacted) {
		t.Errorf("got %+v %s, want the echo with the credential scrubbed", p, text(p.Answer))
	}
	noSecret(t, "answer", text(p.Answer))
	if p := e.goOn(e.intend("act", `{"x":2}`)); !p.Done || p.Answer.Outcome != store.OutcomeRefused {
		t.Errorf("got %+v, want refused", p)
	}
	noSecret(t, "log", e.log())
	if got := w.Calls("act")[0].Header["Authorization"]; len(got) != 1 {
		t.Errorf("the server saw %d Authorization headers, want 1", len(got)) // attack K7
	}
	if !strings.Contains(e.logs.String(), "scrubbed a credential") {
		t.Error("no alarm about the echo")
	}
}

// Attack N5, trap P6: a redirect is not followed; the credential stays.
func TestRedirectKeepsCredential(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	evil := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, fmt.Sprint(r.Method, r.URL, r.Header))
	}))
	defer evil.Close()
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "read"})
	w.RequireBearer(canary)
	e := newEnv(t, w, contracts{"act": `{"class":"read"}`})
	e.vaults = []store.VaultID{e.credential(ws, w.URL, canary)}
	w.Script("act", testenv.MCPFault{Kind: "redirect", Body: evil.URL})
	if p := e.goOn(e.intend("act", `{}`)); !p.Answer.IsError {
		t.Errorf("got %+v, want an error", p)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(seen) > 0 {
		t.Errorf("the redirect was followed: %v", seen)
	}
}

// Attack K9: a credential is found in the session's own vaults only, and a
// connection that carries it serves nobody else.
func TestCredentialOfOthers(t *testing.T) {
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "read"})
	w.RequireBearer(canary)
	e := newEnv(t, w, nil)
	mine := e.credential(ws, w.URL, canary)
	e.vaults = []store.VaultID{mine}
	e.list() // a connection with the credential is kept now
	var se *gateway.ServerError
	s := e.scope()
	s.Vaults = nil
	before := w.Connections()
	if _, err := e.gw.List(t.Context(), s, "world"); !errors.As(err, &se) || !se.Auth {
		t.Errorf("a session without vaults: got %v, want a refusal", err)
	}
	if w.Connections() == before {
		t.Error("a session without vaults used a connection that carries a credential")
	}
	before = w.Connections()
	if err := e.db.EnsureWorkspace(t.Context(), "wrkspc_other", "Other"); err != nil {
		t.Fatal(err)
	}
	_, err := e.keeper.Tools(t.Context(), keeper.Target{Workspace: "wrkspc_other", Server: "world", URL: w.URL, Operator: true, Vaults: []store.VaultID{mine}})
	var ce *keeper.ConnectError
	if !errors.As(err, &ce) || !ce.Auth {
		t.Errorf("another workspace: got %v, want a refusal", err)
	}
	if w.Connections() == before {
		t.Error("another workspace used a connection of this one")
	}
	e.list() // and the owner's is as it was
	// Without credentials too: an MCP session belongs to one workspace.
	w.RequireBearer("")
	for _, id := range []store.WorkspaceID{ws, "wrkspc_other"} {
		before = w.Connections()
		if _, err := e.keeper.Tools(t.Context(), keeper.Target{Workspace: id, Server: "world", URL: w.URL, Operator: true}); err != nil {
			t.Fatal(err)
		}
		if w.Connections() == before {
			t.Errorf("workspace %s used a connection of another", id)
		}
	}
}

// Attacks N1, N4: an agent's own URL does not reach this machine; an
// operator's may.
func TestPrivateAddress(t *testing.T) {
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible"})
	e := newBareEnv(t, w)
	e.close()
	e.private = false
	e.open()
	e.claim()
	port := w.URL[strings.LastIndex(w.URL, ":"):]
	for _, url := range []string{w.URL, "http://localhost" + port, "http://0x7f000001" + port, "http://127.1" + port, "http://[::ffff:127.0.0.1]" + port,
		"http://169.254.169.254/mcp", "https://[::1]/"} {
		e.server.URL = url
		var se *gateway.ServerError
		if _, err := e.gw.List(t.Context(), e.scope(), "world"); !errors.As(err, &se) || se.Auth {
			t.Errorf("%s: got %v, want a refusal", url, err)
		}
	}
	if n := w.Connections(); n != 0 {
		t.Errorf("%d connections were made, want none", n)
	}
	e.connector(nil)
	if p := e.goOn(e.intend("act", `{}`)); !p.Done || p.Answer.IsError {
		t.Errorf("through a connector: got %+v", p)
	}
}

// The session of the MCP server is gone after its restart: found out by a read
// before the attempt when it was idle; else refused, and healed (trial row 123).
func TestServerRestarts(t *testing.T) {
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible"})
	e := newEnv(t, w, nil)
	id := e.intend("act", `{"x":1}`)
	w.ForgetSessions()
	p := e.goOn(id)
	if !p.Done || p.Answer.Outcome != store.OutcomeRefused {
		t.Errorf("right after the restart: got %+v, want refused", p)
	}
	for i := range 3 {
		if p := e.goOn(e.intend("act", fmt.Sprintf(`{"x":%d}`, i+2))); !p.Done || p.Answer.IsError {
			t.Errorf("call %d after it: got %+v %s", i, p, text(p.Answer))
		}
	}
	if n := w.Executions("act"); n != 3 {
		t.Errorf("executed %d times, want 3", n)
	}
}

// Parallel calls on one server do not wait for each other, and one that is cut
// does not harm the others (trial P1).
func TestParallel(t *testing.T) {
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible"}, testenv.MCPTool{Name: "cut", Class: "irreversible"})
	e := newEnv(t, w, nil)
	const n = 8
	arrived, release := make(chan struct{}, n), make(chan struct{})
	var pairs []string
	for i := range n {
		w.Script("act", testenv.MCPFault{Kind: "hang", Arrived: arrived, Release: release})
		pairs = append(pairs, "act", fmt.Sprintf(`{"x":%d}`, i))
	}
	w.Script("cut", testenv.MCPFault{Kind: "cut"})
	rs := e.rule(e.calls("always_allow", append(pairs, "cut", `{}`)...)...)
	var wg sync.WaitGroup
	done := make([]gateway.Progress, n)
	for i := range n {
		wg.Go(func() { done[i], _ = e.go1(rs[i].Effect) })
	}
	for range n {
		select {
		case <-arrived:
		case <-time.After(20 * time.Second):
			t.Fatal("the calls wait for each other")
		}
	}
	if p := e.goOn(rs[n].Effect); !p.Person {
		t.Errorf("cut: got %+v", p)
	}
	close(release)
	wg.Wait()
	for i, p := range done {
		if !p.Done || p.Answer.IsError {
			t.Errorf("call %d: got %+v", i, p)
		}
	}
}

// Attack M10 and large answers: stripped and cut for display, whole in the log.
func TestAnswers(t *testing.T) {
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible", Do: func(args map[string]any) (any, error) {
		switch args["x"] {
		case "escapes":
			return map[string]any{"content": []any{map[string]any{"type": "text", "text": "a\x1b[31mred\x1b]0;title\x07\u202eb\U000E0041\U000E0042c\u200bd"}}}, nil
		case "large":
			return map[string]any{"content": []any{map[string]any{"type": "text", "text": strings.Repeat("é", keeper.MaxDisplay+5)}}}, nil
		case "nothing":
			return map[string]any{"content": []any{}}, nil
		case "blank":
			return map[string]any{"content": []any{map[string]any{"type": "text", "text": "\u200b"}}}, nil
		}
		return nil, errors.New("tool says no")
	}})
	e := newEnv(t, w, nil)
	for x, want := range map[string]string{"escapes": "aredbcd", "nothing": "(no output)", "blank": "(no output)", "fails": "tool says no"} {
		p := e.goOn(e.intend("act", `{"x":"`+x+`"}`))
		if !p.Done || text(p.Answer) != want || p.Answer.IsError != (x == "fails") || p.Answer.Outcome != store.OutcomeOK {
			t.Errorf("%s: got %+v %q, want %q", x, p, text(p.Answer), want)
		}
	}
	if !strings.Contains(e.log(), `\u001b[31m`) {
		t.Error("the raw answer is not in the log")
	}
	id := e.intend("act", `{"x":"large"}`)
	p := e.goOn(id)
	if got := text(p.Answer); !strings.Contains(got, "cut after") || strings.Count(got, "é") != keeper.MaxDisplay {
		t.Errorf("large: %d characters shown", strings.Count(got, "é"))
	}
	if n := strings.Count(e.log(), strings.Repeat("é", keeper.MaxDisplay+5)); n != 1 {
		t.Errorf("the whole answer is in the log %d times, want 1", n)
	}
}

// Attack K2: a call that is out while its credential is rotated shows neither
// the new nor the old one when it comes back.
func TestRotatedCredentialIsScrubbed(t *testing.T) {
	const next = "canary-rotated-5d0f1c"
	arrived, release := make(chan struct{}, 1), make(chan struct{})
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible",
		Do: func(map[string]any) (any, error) { return map[string]any{"seen": canary}, nil }})
	w.RequireBearer(canary)
	e := newEnv(t, w, contracts{"act": `{"class":"irreversible"}`})
	v := e.credential(ws, w.URL, canary)
	e.vaults = []store.VaultID{v}
	w.Script("act", testenv.MCPFault{Kind: "hang", Arrived: arrived, Release: release})
	id := e.intend("act", `{}`)
	done := make(chan gateway.Progress, 1)
	go func() {
		p, err := e.go1(id)
		if err != nil {
			t.Errorf("continue: %v", err)
		}
		done <- p
	}()
	<-arrived
	key, err := effect.NormalizeURL(w.URL)
	if err != nil {
		t.Fatal(err)
	}
	row, err := e.db.CredentialFor(t.Context(), ws, e.vaults, key)
	if err != nil {
		t.Fatal(err)
	}
	e.later(time.Second)
	if _, err := e.db.UpdateCredential(t.Context(), ws, v, row.ID, func(c store.Credential) (store.Credential, error) {
		sealed, err := e.master.Seal(string(ws), string(c.ID), vault.NewSecret(next))
		c.Sealed, c.UpdatedAt = sealed, e.now()
		return c, err
	}); err != nil {
		t.Fatal(err)
	}
	w.RequireBearer(next)
	e.list() // the new token is in use now
	close(release)
	p := <-done
	if !p.Done || !strings.Contains(text(p.Answer), vault.Redacted) {
		t.Errorf("got %+v %s, want the old credential scrubbed", p, text(p.Answer))
	}
	noSecret(t, "answer", text(p.Answer))
	noSecret(t, "log", e.log())
}
