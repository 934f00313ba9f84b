package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/store"
)

// started makes a session that is claimed and running.
func (e *env) started() (store.SessionID, *store.Lease) {
	e.t.Helper()
	m := message("go")
	s := e.create(m)
	l := e.claim()
	e.must(l, store.Append{Entries: []store.Draft{running()}, Consume: []string{m.ID}})
	return s.ID, l
}

// Illegal transitions are conflicts and write nothing (laws L1, L3, L4).
func TestIllegalTransitions(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		irr, idem, mixed, read, client := newEffect(), newEffect(), newEffect(), newEffect(), newEffect()
		byClient := record(store.KindIntent, string(client), store.Intent{V: 1, Client: true,
			EffectHeader: store.EffectHeader{Effect: client, Tool: "ask", Class: store.ClassIrreversible}})
		proposal := func(id store.EffectID, s store.EffectState) store.Draft {
			return record(store.KindProposal, string(id), store.Proposal{V: 1, State: s,
				EffectHeader: store.EffectHeader{Effect: id, Tool: "t", Class: store.ClassIrreversible}})
		}
		asked := newEffect()
		steps := []struct {
			name  string
			entry store.Draft
			ok    bool
		}{
			{"attempt of nothing", attempt(irr, 1), false},
			{"completion of nothing", completion(irr, 0), false},
			{"intent, irreversible", intent(irr, store.ClassIrreversible), true},
			{"second intent", intent(irr, store.ClassIrreversible), false},
			{"completion without attempt, irreversible", completion(irr, 0), false},
			{"doubt without attempt, irreversible", doubt(irr, 1), false},
			{"happened without attempt", settlement(irr, "happened"), false},
			{"attempt with wrong number", attempt(irr, 2), false},
			{"attempt", attempt(irr, 1), true},
			{"second attempt", attempt(irr, 2), false},
			{"settlement while attempted", settlement(irr, "happened"), false},
			{"completion of another attempt", completion(irr, 2), false},
			{"doubt", doubt(irr, 1), true},
			{"completion in doubt", completion(irr, 1), false},
			{"attempt in doubt", attempt(irr, 2), false},
			{"told", settlement(irr, store.Told), true},
			{"happened", settlement(irr, "happened"), true},
			{"second settlement", settlement(irr, "did_not_happen"), false},
			{"told after settlement", settlement(irr, store.Told), false},
			{"completion after settlement", completion(irr, 1), false},

			{"intent, mixed", intent(mixed, store.ClassMixed), true},
			{"completion without attempt, mixed", completion(mixed, 0), false},
			{"void, unsent", settlement(mixed, "did_not_happen"), true},
			{"attempt of void", attempt(mixed, 1), false},

			{"intent, idempotent", intent(idem, store.ClassIdempotent), true},
			{"completion, idempotent", completion(idem, 0), true},
			{"second completion", completion(idem, 0), false},
			{"intent after completion", intent(idem, store.ClassIdempotent), false},

			{"intent, read", intent(read, store.ClassRead), true},
			{"doubt of a read", doubt(read, 0), false},
			{"completion, read", completion(read, 0), true},

			{"intent, client", byClient, true},
			{"attempt, client", attempt(client, 1), false},
			{"completion, client", completion(client, 0), true},

			{"proposal", proposal(asked, store.StateAwaitingApproval), true},
			{"completion of a proposal", completion(asked, 0), false},
			{"denied", proposal(asked, store.StateDenied), true},
			{"intent after denial", intent(asked, store.ClassIrreversible), false},
			{"class unknown", intent(newEffect(), "harmless"), false},
			{"output", output(store.EffectID("eff_model")), true},
			{"output twice", output(store.EffectID("eff_model")), false},
		}
		head := e.session(id).Head
		for _, s := range steps {
			_, err := e.db.Append(t.Context(), l, entries(s.entry))
			if s.ok && err != nil {
				t.Fatalf("%s: %v", s.name, err)
			}
			if !s.ok && !errors.Is(err, store.ErrConflict) {
				t.Fatalf("%s: %v, want a conflict", s.name, err)
			}
			if s.ok {
				head++
			}
			if got := e.session(id).Head; got != head {
				t.Fatalf("%s: head %d, want %d", s.name, got, head)
			}
		}
		e.sound(id)
		x, err := e.db.Effect(t.Context(), ws, irr)
		if err != nil || x.State != store.StateCompleted || !x.Told || x.Attempts != 1 || len(x.EvidenceSeqs) != 2 {
			t.Errorf("settled effect = %+v, %v", x, err)
		}
		if open, err := e.db.OpenEffects(t.Context(), ws, id); err != nil || len(open) != 0 {
			t.Errorf("open effects = %v, %v", open, err)
		}
		// The same after the rows were read anew: no memory of the committer is needed.
		if _, err := e.db.Append(t.Context(), l, store.Append{Entries: []store.Draft{idle()}, Park: true}); err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.AppendUnowned(t.Context(), ws, id, entries(completion(idem, 0)), nil); !errors.Is(err, store.ErrConflict) {
			t.Errorf("second completion later = %v, want a conflict", err)
		}
	})
}

// An append is all or nothing, and a failing one disturbs no other of its batch.
func TestBatchIsolation(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		const n = 20
		var leases []*store.Lease
		for range n {
			e.create(message("go"))
		}
		leases, err := e.node.Claim(t.Context(), 100)
		if err != nil || len(leases) != n {
			t.Fatalf("claimed %d, %v", len(leases), err)
		}
		var wg sync.WaitGroup
		for i, l := range leases {
			wg.Go(func() {
				for k := range 10 {
					bad := (i+k)%3 == 0
					a := entries(running(), event("agent.message", "text", strings.Repeat("x", 100*k)))
					if bad {
						a.Entries = append(a.Entries, completion("eff_none", 0))
					}
					_, err := e.db.Append(t.Context(), l, a)
					if bad != errors.Is(err, store.ErrConflict) || !bad && err != nil {
						t.Errorf("session %d append %d: %v", i, k, err)
					}
				}
			})
		}
		wg.Wait()
		for i, l := range leases {
			good := 0
			for k := range 10 {
				if (i+k)%3 != 0 {
					good++
				}
			}
			if got := e.session(l.Session()).Head; got != store.Seq(2+2*good) {
				t.Errorf("session %d: head %d, want %d", i, got, 2+2*good)
			}
			e.sound(l.Session())
		}
	})
}

// Preconditions on effects and inbox rows.
func TestPreconditions(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		eff := newEffect()
		e.must(l, entries(intent(eff, store.ClassIrreversible)))
		e.must(l, entries(attempt(eff, 1)))
		for _, c := range []struct {
			name string
			is   store.EffectIs
			ok   bool
		}{
			{"state", store.EffectIs{ID: eff, States: []store.EffectState{store.StateAttempted}}, true},
			{"other state", store.EffectIs{ID: eff, States: []store.EffectState{store.StateIntended}}, false},
			{"attempt", store.EffectIs{ID: eff, Attempt: 1}, true},
			{"other attempt", store.EffectIs{ID: eff, Attempt: 2}, false},
			{"fence", store.EffectIs{ID: eff, Fence: l.Fence()}, true},
			{"other fence", store.EffectIs{ID: eff, Fence: l.Fence() + 1}, false},
			{"unknown", store.EffectIs{ID: "eff_none"}, false},
		} {
			_, err := e.db.Append(t.Context(), l, store.Append{Entries: []store.Draft{event("x")}, Effects: []store.EffectIs{c.is}})
			if c.ok != (err == nil) || !c.ok && !errors.Is(err, store.ErrConflict) {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		m := message("more")
		if _, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{m}, nil); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			name    string
			consume []string
			ok      bool
		}{
			{"missing row", []string{"sevt_none"}, false},
			{"row twice", []string{m.ID, m.ID}, false},
			{"row", []string{m.ID}, true},
			{"consumed row", []string{m.ID}, false},
		} {
			_, err := e.db.Append(t.Context(), l, store.Append{Entries: []store.Draft{event("x")}, Consume: c.consume})
			if c.ok != (err == nil) || !c.ok && !errors.Is(err, store.ErrConflict) {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		e.sound(id)
	})
}

// Rest is refused while the inbox holds something; a session at rest with a
// row that was left on purpose sleeps until the next one arrives.
func TestRest(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		rest := store.Append{Entries: []store.Draft{idle()}, Rest: true}
		if _, err := e.db.Append(t.Context(), l, store.Append{Entries: []store.Draft{event("x")}, Rest: true}); !errors.Is(err, store.ErrConflict) {
			t.Errorf("rest while running = %v, want a conflict", err)
		}
		m := message("second")
		if _, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{m}, nil); err != nil {
			t.Fatal(err)
		}
		<-l.Inbox()
		if _, err := e.db.Append(t.Context(), l, rest); !errors.Is(err, store.ErrConflict) {
			t.Fatalf("rest over a full inbox = %v, want a conflict", err)
		}
		box, err := e.db.Inbox(t.Context(), ws, id)
		if err != nil || len(box) != 1 || box[0].ID != m.ID {
			t.Fatalf("inbox = %v, %v", box, err)
		}
		rest.Seen = box[0].N
		e.must(l, rest)
		<-l.Lost()
		if _, err := e.db.Append(t.Context(), l, entries(event("x"))); !errors.Is(err, store.ErrFenced) {
			t.Errorf("append after rest = %v, want fenced", err)
		}
		if ls, err := e.node.Claim(t.Context(), 1); err != nil || len(ls) != 0 {
			t.Fatalf("claimed %d, %v, want none: the row was left on purpose", len(ls), err)
		}
		if _, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{message("third")}, nil); err != nil {
			t.Fatal(err)
		}
		l = e.claim()
		if l.Fence() != 2 {
			t.Errorf("fence = %d, want 2", l.Fence())
		}
		if box, err = e.db.Inbox(t.Context(), ws, id); err != nil || len(box) != 2 {
			t.Fatalf("inbox = %v, %v", box, err)
		}
		e.must(l, store.Append{Entries: []store.Draft{idle()}, Consume: []string{box[0].ID, box[1].ID}, Rest: true})
		e.sound(id)
	})
}

// Relaxed entries stand before the critical ones that were appended later, are
// invisible before, and come by themselves after RelaxedDelay.
func TestRelaxed(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		var mu sync.Mutex
		var got []string
		committed := make(chan struct{}, 100)
		l.OnCommit(func(es []store.Entry) {
			mu.Lock()
			defer mu.Unlock()
			for _, x := range es {
				got = append(got, x.Type)
			}
			committed <- struct{}{}
		})
		e.db.AppendRelaxed(l, []store.Draft{event("span.a"), event("span.b")})
		p := e.db.Submit(l, entries(event("c")))
		e.db.AppendRelaxed(l, []store.Draft{event("span.d")})
		q := e.db.Submit(l, entries(event("e")))
		for _, p := range []*store.Pending{p, q} {
			if _, err := p.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for len(committed) > 0 {
			<-committed
		}
		start := time.Now()
		e.db.AppendRelaxed(l, []store.Draft{event("span.f")})
		<-committed
		if d := time.Since(start); d > 20*store.RelaxedDelay {
			t.Errorf("a lonely relaxed entry took %v", d)
		}
		if diff := cmp.Diff([]string{"span.a", "span.b", "c", "span.d", "e", "span.f"}, got); diff != "" {
			t.Error(diff)
		}
		// A relaxed append that fails shows at the next critical one, once, and not
		// as a conflict of that one: its owner has to rebuild, not to try again.
		e.db.AppendRelaxed(l, []store.Draft{completion("eff_none", 0)})
		if _, err := e.db.Append(t.Context(), l, entries(event("g"))); err == nil || errors.Is(err, store.ErrConflict) {
			t.Errorf("append after a failed relaxed one = %v, want an error that is no conflict", err)
		}
		e.must(l, entries(event("h")))
		e.sound(id)
		list, err := e.db.Entries(t.Context(), ws, id, store.Range{Types: []string{"g", "h"}})
		if err != nil || len(list) != 1 || list[0].Type != "h" {
			t.Errorf("entries g and h = %v, %v", list, err)
		}
	})
}

// Appends of one lease commit in the order of submission, and share commits.
func TestSubmitOrder(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		const n = 200
		var ps []*store.Pending
		for i := range n {
			ps = append(ps, e.db.Submit(l, entries(event(fmt.Sprint("e", i)))))
		}
		for i, p := range ps {
			out, err := p.Wait(t.Context())
			if err != nil || out[0].Seq != store.Seq(4+i) || out[0].Type != fmt.Sprint("e", i) {
				t.Fatalf("append %d = %+v, %v", i, out, err)
			}
		}
		if c := e.fault.count("append.before"); c > n/2 {
			t.Errorf("%d appends took %d commits", n, c)
		}
		e.sound(id)
	})
}

// A caller that leaves early does not undo its append.
func TestLeaveEarly(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		ctx, cancel := context.WithCancel(t.Context())
		p := e.db.Submit(l, entries(event("x")))
		cancel()
		if _, err := p.Wait(ctx); err != nil && !errors.Is(err, store.ErrUnknown) {
			t.Errorf("wait = %v", err)
		}
		e.must(l, entries(event("y")))
		list, err := e.db.Entries(t.Context(), ws, id, store.Range{Types: []string{"x", "y"}})
		if err != nil || len(list) != 2 {
			t.Errorf("entries = %v, %v", list, err)
		}
	})
}

// Bodies over MaxInlineBody are blobs, sealed; all others are sealed rows.
func TestBodies(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		secret := "the secret of the session"
		big := event("big", "text", secret+strings.Repeat("0", store.MaxInlineBody))
		small := event("small", "text", secret)
		e.must(l, entries(big, small))
		bigRow := store.Delivery{ID: "sevt_big", Kind: store.InboxEvent, Type: "user.message", Body: big.Body}
		if _, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{bigRow}, nil); err != nil {
			t.Fatal(err)
		}
		if n := e.blobs.count(); n != 2 {
			t.Errorf("%d blobs, want 2", n)
		}
		for _, d := range e.blobs.m {
			if bytes.Contains(d, []byte(secret)) {
				t.Error("a blob holds a body in clear")
			}
		}
		e.crash()
		list, err := e.db.Entries(t.Context(), ws, id, store.Range{After: 3, Limit: 2})
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []store.Draft{big, small} {
			if diff := cmp.Diff(want, list[i].Draft); diff != "" {
				t.Errorf("entry %d: %s", i, diff)
			}
		}
		box, err := e.db.Inbox(t.Context(), ws, id)
		if err != nil || len(box) != 1 || !bytes.Equal(box[0].Body, big.Body) {
			t.Errorf("inbox has %d rows, %v", len(box), err)
		}
		e.sound(id)
		// A blob that is gone is damage of this session.
		e.blobs.m = nil
		if _, err := e.db.Entries(t.Context(), ws, id, store.Range{}); !errors.Is(err, store.ErrDamaged) {
			t.Errorf("entries without their blob = %v, want damaged", err)
		}
		if _, err := e.db.CreateSession(t.Context(), "foreign", store.NewSession{ID: "sesn_x"}); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("session in an unknown workspace = %v, want not found", err)
		}
	})
}
