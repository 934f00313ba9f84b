package store_test

import (
	"testing"

	"github.com/planaria/planaria/internal/store"
)

// One turn from the first message to rest: claim, output, effect, completion, rest.
func TestTurn(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		m := message("hello")
		s := e.create(m)
		if s.Status != store.StatusRunning {
			t.Errorf("status after creation with a message = %s, want running", s.Status)
		}
		l := e.claim()
		if l.Fence() != 1 || l.Claimed().Head != 2 {
			t.Errorf("fence %d head %d, want 1 and 2", l.Fence(), l.Claimed().Head)
		}
		eff, model := newEffect(), newEffect()
		e.must(l, store.Append{Entries: []store.Draft{running(), event("user.message")}, Consume: []string{m.ID}})
		e.must(l, entries(output(model), intent(eff, store.ClassIrreversible)))
		e.must(l, entries(attempt(eff, 1)))
		e.must(l, entries(completion(eff, 1), event("agent.mcp_tool_result")))
		out := e.must(l, store.Append{Entries: []store.Draft{idle()}, Rest: true})
		if got := out[0].Seq; got != 10 {
			t.Errorf("seq of the last entry = %d, want 10", got)
		}
		<-l.Lost()
		e.sound(s.ID)
		got := e.session(s.ID)
		if got.Status != store.StatusIdle || got.Owner != "" || got.Usage.Input != 10 || string(got.StopReason) != `{"type":"end_turn"}` {
			t.Errorf("session at rest = %+v", got)
		}
		list, err := e.db.Entries(t.Context(), ws, s.ID, store.Range{})
		if err != nil || len(list) != 10 {
			t.Fatalf("entries: %d, %v", len(list), err)
		}
		x, err := e.db.Effect(t.Context(), ws, eff)
		if err != nil || x.State != store.StateCompleted || x.Attempts != 1 {
			t.Errorf("effect = %+v, %v", x, err)
		}
		e.crash()
		e.sound(s.ID)
		if ls, err := e.node.Claim(t.Context(), 10); err != nil || len(ls) != 0 {
			t.Errorf("claimed %d sessions at rest, %v", len(ls), err)
		}
	})
}
