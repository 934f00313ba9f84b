package store_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/store"
)

func answer(id, target, body string) store.Delivery {
	return store.Delivery{ID: id, Kind: store.InboxEvent, Type: "user.tool_confirmation", Target: target, Body: []byte(body), Starts: true}
}

// An answer is unique per target for the life of the session (recipe A1).
func TestAnswers(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		deliver := func(ds ...store.Delivery) ([]store.Accepted, error) {
			return e.db.Deliver(t.Context(), ws, id, ds, nil)
		}
		first, err := deliver(answer("sevt_a", "sevt_tool", `{"v":1,"result":"allow"}`))
		if err != nil || first[0].Duplicate || first[0].ID != "sevt_a" {
			t.Fatalf("first answer = %+v, %v", first, err)
		}
		check := func(when string) {
			t.Helper()
			again, err := deliver(answer("sevt_b", "sevt_tool", `{"v":1,"result":"allow"}`))
			if err != nil || !again[0].Duplicate || again[0].ID != "sevt_a" {
				t.Errorf("%s: equal answer = %+v, %v", when, again, err)
			}
			if _, err := deliver(answer("sevt_c", "sevt_tool", `{"v":1,"result":"deny"}`)); !errors.Is(err, store.ErrAnswered) {
				t.Errorf("%s: other answer = %v, want answered", when, err)
			}
			// All or none: the message beside a refused answer is not accepted.
			if _, err := deliver(message("x"), answer("sevt_d", "sevt_tool", `{}`)); !errors.Is(err, store.ErrAnswered) {
				t.Errorf("%s: message with other answer = %v", when, err)
			}
		}
		check("in the inbox")
		if box, err := e.db.Inbox(t.Context(), ws, id); err != nil || len(box) != 1 {
			t.Fatalf("inbox = %v, %v, want the one answer", box, err)
		}
		e.must(l, store.Append{Entries: []store.Draft{event("user.tool_confirmation")}, Consume: []string{"sevt_a"}})
		check("consumed")
		e.must(l, store.Append{Entries: []store.Draft{idle()}, Rest: true})
		e.crash()
		check("after a crash")
		e.sound(id)
	})
}

// Racing equal and different answers: exactly one is accepted (recipe W2).
func TestAnswersRace(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, _ := e.started()
		const n = 16
		var wg sync.WaitGroup
		var mu sync.Mutex
		accepted := map[string]int{}
		for i := range n {
			wg.Go(func() {
				body := fmt.Sprintf(`{"v":1,"answer":%d}`, i%2)
				a, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{answer(fmt.Sprint("sevt_", i), "t", body)}, nil)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case errors.Is(err, store.ErrAnswered):
					accepted["refused"]++
				case err != nil:
					t.Errorf("deliver: %v", err)
				case a[0].Duplicate:
					accepted["duplicate"]++
				default:
					accepted["first"]++
				}
			})
		}
		wg.Wait()
		if diff := cmp.Diff(map[string]int{"first": 1, "duplicate": n/2 - 1, "refused": n / 2}, accepted); diff != "" {
			t.Error(diff)
		}
	})
}

// Status, order and claims of what waits.
func TestInbox(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.create()
		if s.Status != store.StatusIdle {
			t.Errorf("status of a new session = %s", s.Status)
		}
		deliver := func(ds ...store.Delivery) {
			t.Helper()
			if _, err := e.db.Deliver(t.Context(), ws, s.ID, ds, nil); err != nil {
				t.Fatal(err)
			}
		}
		control := func(typ string, urgent bool) store.Delivery {
			return store.Delivery{ID: "inb_" + typ, Kind: store.InboxControl, Type: typ, Urgent: urgent, Body: []byte(`{"v":1}`)}
		}
		if ls, err := e.node.Claim(t.Context(), 1); err != nil || len(ls) != 0 {
			t.Fatalf("claimed %d of an empty session, %v", len(ls), err)
		}
		deliver(control("update", false))
		if got := e.session(s.ID).Status; got != store.StatusIdle {
			t.Errorf("status after a control = %s, want idle", got)
		}
		m1, m2 := message("one"), message("two")
		deliver(m1, m2)
		if got := e.session(s.ID).Status; got != store.StatusRunning {
			t.Errorf("status after a message = %s, want running", got)
		}
		deliver(control("interrupt", true))
		var order []string
		box, err := e.db.Inbox(t.Context(), ws, s.ID)
		for _, b := range box {
			order = append(order, b.ID)
		}
		if diff := cmp.Diff([]string{"inb_interrupt", "inb_update", m1.ID, m2.ID}, order); err != nil || diff != "" {
			t.Errorf("inbox %v: %s", err, diff)
		}
		l := e.claim()
		e.must(l, store.Append{Entries: []store.Draft{running(), event("session.paused"), idle()}, Consume: []string{"inb_interrupt"}, Rest: true})

		// A paused session queues; only urgent rows wake it.
		deliver(message("three"))
		got := e.session(s.ID)
		if got.Status != store.StatusIdle || !got.Paused {
			t.Errorf("paused session = %s, paused %v", got.Status, got.Paused)
		}
		if ls, err := e.node.Claim(t.Context(), 1); err != nil || len(ls) != 0 {
			t.Fatalf("claimed %d while paused, %v", len(ls), err)
		}
		deliver(control("resume", true))
		l = e.claim()
		var consume []string
		if box, err = e.db.Inbox(t.Context(), ws, s.ID); err != nil || len(box) != 5 {
			t.Fatalf("inbox = %d rows, %v", len(box), err)
		}
		for _, b := range box {
			consume = append(consume, b.ID)
		}
		e.must(l, store.Append{Entries: []store.Draft{event("session.resumed"), running(), event("session.status_terminated")}, Consume: consume, Rest: true})
		if _, err := e.db.Deliver(t.Context(), ws, s.ID, []store.Delivery{message("late")}, nil); !errors.Is(err, store.ErrTerminated) {
			t.Errorf("message to a terminated session = %v", err)
		}
		e.sound(s.ID)
	})
}

// The check runs under the session's lock and may refuse; a foreign workspace
// sees nothing (recipe X1, law L11).
func TestDeliverCheck(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		eff := newEffect()
		e.must(l, entries(intent(eff, store.ClassIrreversible)))
		no := errors.New("no")
		_, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{message("x")}, func(v store.View) error {
			x, err := v.EffectByEvent(store.EventID("sevt_" + string(eff)))
			if err != nil || x.ID != eff || x.State != store.StateIntended {
				t.Errorf("effect by event = %+v, %v", x, err)
			}
			if _, err := v.EffectByEvent("sevt_none"); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("unknown event = %v", err)
			}
			if s := v.Session(); s.ID != id || s.Config.EnvironmentID != "env_1" {
				t.Errorf("session = %+v", s)
			}
			if ok, err := v.Answered("t"); ok || err != nil {
				t.Errorf("answered = %v, %v", ok, err)
			}
			return no
		})
		if !errors.Is(err, no) {
			t.Errorf("deliver = %v, want the check's error", err)
		}
		if err := e.db.EnsureWorkspace(t.Context(), "other", "Other"); err != nil {
			t.Fatal(err)
		}
		for name, err := range map[string]error{
			"deliver": second(e.db.Deliver(t.Context(), "other", id, []store.Delivery{message("x")}, nil)),
			"session": second(e.db.Session(t.Context(), "other", id)),
			"entries": second(e.db.Entries(t.Context(), "other", id, store.Range{})),
			"inbox":   second(e.db.Inbox(t.Context(), "other", id)),
			"effect":  second(e.db.Effect(t.Context(), "other", eff)),
			"follow":  second(e.db.Follow(t.Context(), "other", id, 0)),
			"unowned": second(e.db.AppendUnowned(t.Context(), "other", id, entries(event("x")), nil)),
			"delete":  e.db.DeleteSession(t.Context(), "other", id, "p"),
			"refuse":  e.db.Refuse(t.Context(), "other", id, "why"),
		} {
			if !errors.Is(err, store.ErrNotFound) {
				t.Errorf("%s from another workspace = %v, want not found", name, err)
			}
		}
		if list, err := e.db.Sessions(t.Context(), "other", store.SessionFilter{}); err != nil || len(list) != 0 {
			t.Errorf("sessions of the other workspace = %v, %v", list, err)
		}
	})
}

func second[T any](_ T, err error) error { return err }

// Deliveries beside appends: no row is lost, none is consumed twice, and a rest
// never goes over a row (law L7).
func TestDeliverBesideAppends(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id := e.create().ID
		const n = 60
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := range n {
				if _, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{message(fmt.Sprint(i))}, nil); err != nil {
					t.Errorf("deliver: %v", err)
				}
			}
		})
		consumed := map[string]bool{}
		for len(consumed) < n {
			<-e.node.Work()
			ls, err := e.node.Claim(t.Context(), 1)
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range ls {
				e.serve(l, consumed)
			}
		}
		wg.Wait()
		s := e.session(id)
		if s.Status != store.StatusIdle || s.Owner != "" {
			t.Errorf("session = %+v", s)
		}
		e.sound(id)
	})
}

// serve consumes rows until a rest succeeds.
func (e *env) serve(l *store.Lease, consumed map[string]bool) {
	e.t.Helper()
	for {
		box, err := e.db.Inbox(e.t.Context(), ws, l.Session())
		if err != nil {
			e.t.Fatal(err)
		}
		a := store.Append{Entries: []store.Draft{running()}}
		for _, b := range box {
			if consumed[b.ID] {
				e.t.Fatalf("row %s is back", b.ID)
			}
			consumed[b.ID] = true
			a.Consume = append(a.Consume, b.ID)
		}
		a.Entries = append(a.Entries, idle())
		a.Rest = true
		_, err = e.db.Append(e.t.Context(), l, a)
		if err == nil {
			return
		}
		if !errors.Is(err, store.ErrConflict) {
			e.t.Fatalf("rest: %v", err)
		}
		for _, id := range a.Consume {
			delete(consumed, id)
		}
	}
}

// One row is the same row however often it is sent while it waits.
func TestDeliverAgain(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id := e.create().ID
		m := message("x")
		for i := range 3 {
			a, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{m}, nil)
			if err != nil || a[0].Duplicate != (i > 0) {
				t.Errorf("delivery %d = %+v, %v", i, a, err)
			}
		}
		box, err := e.db.Inbox(t.Context(), ws, id)
		if err != nil || len(box) != 1 {
			t.Errorf("inbox = %v, %v", box, err)
		}
		ids := []string{}
		for _, b := range box {
			ids = append(ids, b.ID)
		}
		if !slices.Equal(ids, []string{m.ID}) {
			t.Errorf("ids = %v", ids)
		}
	})
}
