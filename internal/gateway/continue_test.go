package gateway_test

import (
	"testing"

	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

func TestPlainCalls(t *testing.T) {
	w := testenv.NewMCPWorld(t,
		testenv.MCPTool{Name: "look", Class: "read"},
		testenv.MCPTool{Name: "put", Class: "idempotent", KeyArgument: "token"},
		testenv.MCPTool{Name: "fire", Class: "irreversible"})
	e := newEnv(t, w, contracts{
		"look": `{"class":"read"}`,
		"put":  `{"class":"idempotent","idempotency":{"argument":"token"}}`,
		"fire": `{"class":"irreversible"}`,
	})
	for tool, want := range map[string]string{
		"look": "intent completion result",
		"put":  "intent completion result",
		"fire": "intent attempt completion result",
	} {
		id := e.intend(tool, `{"x":1}`)
		p := e.goOn(id)
		if !p.Done || p.Answer.IsError || text(p.Answer) != `{"done":true}` {
			t.Errorf("%s: got %+v %s", tool, p, text(p.Answer))
		}
		e.want(id, store.StateCompleted, store.OutcomeOK)
		if got := e.kinds(id); got != want {
			t.Errorf("%s: log has %q, want %q", tool, got, want)
		}
		if n := w.Executions(tool); n != 1 {
			t.Errorf("%s executed %d times, want 1", tool, n)
		}
	}
}
