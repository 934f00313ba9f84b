package testenv_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// TestLawsAreSeenBroken breaks the laws one by one behind the system's back:
// the checker sees each of them.
func TestLawsAreSeenBroken(t *testing.T) {
	const ws = "default"
	ctx := context.Background()
	exec := func(t *testing.T, e *testenv.Env, query string, args ...any) {
		t.Helper()
		db, err := sql.Open("sqlite", "file:"+filepath.Join(e.Dir(), "planaria.db")+"?_pragma=busy_timeout(10000)")
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if _, err := db.ExecContext(ctx, query, args...); err != nil {
			t.Fatal(err)
		}
	}
	entry := func(t *testing.T, e *testenv.Env, id string, d store.Draft, body testenv.M) {
		t.Helper()
		body["v"] = 1
		b, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		if d.ID == "" {
			d.ID = "sevt_00000000000000000000000001"
		}
		d.Body = b
		if _, err := e.DB().AppendUnowned(ctx, ws, store.SessionID(id), store.Append{Entries: []store.Draft{d}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	effectOf := func(t *testing.T, e *testenv.Env, id, tool string) store.Effect {
		t.Helper()
		list, err := e.DB().Effects(ctx, ws, store.EffectFilter{Session: store.SessionID(id), Tools: []string{tool}})
		if err != nil || len(list) != 1 {
			t.Fatalf("effects of %s: %d, %v", tool, len(list), err)
		}
		return list[0]
	}
	for _, tt := range []struct {
		name  string
		want  string
		spoil func(t *testing.T, e *testenv.Env, id string)
	}{
		{"an act that nobody intended", "L1:", func(t *testing.T, e *testenv.Env, id string) { e.World.Forge("buy", "nobody") }},
		{"an act done twice", "L3:", func(t *testing.T, e *testenv.Env, id string) { e.World.Forge("buy", "law") }},
		{"evidence against what was settled", "L4:", func(t *testing.T, e *testenv.Env, id string) {
			x := effectOf(t, e, id, "put")
			entry(t, e, id, store.Draft{Kind: store.KindEvidence, ID: string(x.ID)}, testenv.M{"effect": x.ID, "kind": "late", "says": "did_not_happen", "contradicts": true})
		}},
		{"a result of no call", "H1", func(t *testing.T, e *testenv.Env, id string) {
			entry(t, e, id, store.Draft{Kind: store.KindEvent, Type: "agent.mcp_tool_result"}, testenv.M{"type": "agent.mcp_tool_result", "mcp_tool_use_id": "sevt_x"})
		}},
		{"an event behind idle", "stands behind session.status_idle", func(t *testing.T, e *testenv.Env, id string) {
			entry(t, e, id, store.Draft{Kind: store.KindEvent, Type: "agent.message"}, testenv.M{"type": "agent.message", "content": []testenv.M{}})
		}},
		{"a secret in a message", "L6:", func(t *testing.T, e *testenv.Env, id string) {
			entry(t, e, id, store.Draft{Kind: store.KindEvent, Type: "user.message"}, testenv.M{"type": "user.message", "content": testenv.CanaryToken})
		}},
		{"a secret in the log output", "L6:", func(t *testing.T, e *testenv.Env, id string) {
			_, _ = e.Logs.Write([]byte("token=" + testenv.CanaryToken))
		}},
		{"a session that nobody wakes", "L7:", func(t *testing.T, e *testenv.Env, id string) {
			exec(t, e, "UPDATE sessions SET status = 'running', next_at = 0 WHERE id = ?", id)
		}},
		{"a row that is not what the log says", "L2", func(t *testing.T, e *testenv.Env, id string) {
			exec(t, e, "UPDATE effects SET state = 'in_doubt' WHERE session = ? AND tool = 'buy'", id)
		}},
		{"a changed hash", "cannot be read", func(t *testing.T, e *testenv.Env, id string) {
			exec(t, e, "UPDATE log SET at = at + 1 WHERE session = ? AND seq = 5", id)
		}},
		{"a log that lost its end", "cannot be read", func(t *testing.T, e *testenv.Env, id string) {
			exec(t, e, "DELETE FROM log WHERE session = ? AND seq = (SELECT max(seq) FROM log WHERE session = ?)", id, id)
		}},
		{"an invalid model request", "H1:", func(t *testing.T, e *testenv.Env, id string) {
			resp, err := http.Post(e.Model.URL+"/v1/messages", "application/json", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := testenv.New(t, testenv.Options{})
			id := e.Begin("law", llm.PlayScript{Steps: []llm.Step{calls(use("put", "law")), calls(use("buy", "law")), done}})
			e.Finish(id)
			e.Check()
			tt.spoil(t, e, id)
			e.ForgetLaws()
			broken := strings.Join(e.Broken(), "\n")
			if !strings.Contains(broken, tt.want) {
				t.Errorf("want %q in what is broken, got %q", tt.want, broken)
			}
		})
	}
}
