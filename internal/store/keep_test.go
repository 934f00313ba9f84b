package store_test

import (
	"errors"
	"testing"

	"github.com/planaria/planaria/internal/store"
)

// A rest that keeps the owner is refused where the rest would be, and leaves the
// lease as it is: the owner goes on to write, and to rest.
func TestRestKeep(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id := e.create().ID
		if _, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{message("x")}, nil); err != nil {
			t.Fatal(err)
		}
		l := e.claim()
		keep := store.Append{Entries: []store.Draft{running(), idle()}, Rest: true, Keep: true}
		if _, err := e.db.Append(t.Context(), l, keep); !errors.Is(err, store.ErrConflict) {
			t.Errorf("with a full inbox: %v, want ErrConflict", err)
		}
		box, err := e.db.Inbox(t.Context(), ws, id)
		if err != nil {
			t.Fatal(err)
		}
		keep.Consume = []string{box[0].ID}
		e.must(l, keep)
		if s := e.session(id); s.Owner == "" || s.Status != store.StatusIdle {
			t.Errorf("it is %s, owner %q", s.Status, s.Owner)
		}
		e.must(l, store.Append{Rest: true})
		if s := e.session(id); s.Owner != "" {
			t.Errorf("owner %q after the rest", s.Owner)
		}
		e.sound(id)
	})
}
