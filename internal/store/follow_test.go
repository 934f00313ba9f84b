package store_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/planaria/planaria/internal/store"
)

// A follower sees the log without gap or repetition, and a client event queued
// once and never after its entry (law L10).
func TestFollow(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		const n = 300
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := range n {
				m := message(fmt.Sprint(i))
				if _, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{m}, nil); err != nil {
					t.Errorf("deliver: %v", err)
					return
				}
				d := event("user.message")
				d.ID = m.ID
				if _, err := e.db.Append(t.Context(), l, store.Append{Entries: []store.Draft{d, event("agent.message")}, Consume: []string{m.ID}}); err != nil {
					t.Errorf("append: %v", err)
					return
				}
			}
		})
		const want = store.Seq(3 + 2*n)
		for k := range 4 {
			wg.Go(func() {
				after := store.Seq(k)
				f, err := e.db.Follow(t.Context(), ws, id, after)
				if err != nil {
					t.Errorf("follow: %v", err)
					return
				}
				defer f.Close()
				logged, queued := map[string]bool{}, map[string]bool{}
				for after < want {
					items, err := f.Next(t.Context())
					if err != nil {
						t.Errorf("next: %v", err)
						return
					}
					for _, it := range items {
						switch {
						case it.Queued != nil && (queued[it.Queued.ID] || logged[it.Queued.ID]):
							t.Errorf("%s is queued again or after its entry", it.Queued.ID)
						case it.Queued != nil:
							queued[it.Queued.ID] = true
						case it.Entry.Seq != after+1:
							t.Errorf("seq %d after %d", it.Entry.Seq, after)
							return
						default:
							after++
							logged[it.Entry.ID] = true
						}
					}
				}
				if len(queued) == 0 {
					t.Error("no queued event was seen")
				}
			})
		}
		wg.Wait()
		// One that starts late reads pages from the store.
		f, err := e.db.Follow(t.Context(), ws, id, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for seq := store.Seq(0); seq < want; {
			items, err := f.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, it := range items {
				if seq++; it.Entry.Seq != seq || len(it.Entry.Body) == 0 {
					t.Fatalf("seq %d, want %d", it.Entry.Seq, seq)
				}
			}
		}
	})
}

// A Next whose caller left says why the caller left, also when there is
// something to read, and takes nothing away from the next one.
func TestFollowerLeft(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, _ := e.started()
		f, err := e.db.Follow(t.Context(), ws, id, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		why := errors.New("client gone")
		gone, cancel := context.WithCancelCause(t.Context())
		cancel(why)
		// Both the signal and the end of ctx are there; which one is seen is chance.
		for range 64 {
			if items, err := f.Next(gone); !errors.Is(err, why) || len(items) > 0 {
				t.Fatalf("next after the client left = %d items, %v", len(items), err)
			}
		}
		for seq := store.Seq(0); seq < 3; {
			items, err := f.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, it := range items {
				if seq++; it.Entry.Seq != seq {
					t.Fatalf("seq %d, want %d", it.Entry.Seq, seq)
				}
			}
		}
	})
}

// A slow follower is not waited for and still misses nothing.
func TestSlowFollower(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		f, err := e.db.Follow(t.Context(), ws, id, 3)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var ps []*store.Pending
		const n = 3000
		for range n {
			ps = append(ps, e.db.Submit(l, entries(event("x"))))
		}
		for _, p := range ps {
			if _, err := p.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for seq := store.Seq(3); seq < 3+n; {
			items, err := f.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, it := range items {
				if seq++; it.Entry.Seq != seq {
					t.Fatalf("seq %d, want %d", it.Entry.Seq, seq)
				}
			}
		}
	})
}
