package store_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/store"
)

// Fault pairs: every durable step fails once and is not there, and once and is
// there. Then the store is opened again, the work goes on, and everything that
// was acknowledged is found, once (attack E11, E19; trial K1).
func TestFaultPairs(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		type step struct {
			name string
			// run does the step for a fresh session and reports whether what it
			// wrote is there.
			run   func(t *testing.T, id store.SessionID, arm func()) error
			there func(t *testing.T, id store.SessionID) bool
		}
		var eff store.EffectID
		var m store.Delivery
		var head store.Seq
		steps := []step{
			{"append", func(t *testing.T, id store.SessionID, arm func()) error {
				l := e.claim()
				eff = newEffect()
				arm()
				_, err := e.db.Append(t.Context(), l, entries(running(), intent(eff, store.ClassIrreversible)))
				return err
			}, func(t *testing.T, id store.SessionID) bool {
				_, err := e.db.Effect(t.Context(), ws, eff)
				return err == nil
			}},
			{"claim", func(t *testing.T, id store.SessionID, arm func()) error {
				arm()
				ls, err := e.node.Claim(t.Context(), 1)
				if err == nil && (len(ls) != 1 || ls[0].Session() != id) {
					t.Errorf("claimed %v", ls)
				}
				return err
			}, func(t *testing.T, id store.SessionID) bool { return e.session(id).Fence == 1 }},
			{"deliver", func(t *testing.T, id store.SessionID, arm func()) error {
				m = message("second")
				arm()
				_, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{m}, nil)
				return err
			}, func(t *testing.T, id store.SessionID) bool {
				box, err := e.db.Inbox(t.Context(), ws, id)
				if err != nil {
					t.Fatal(err)
				}
				return len(box) == 2 && box[1].ID == m.ID
			}},
			{"unowned", func(t *testing.T, id store.SessionID, arm func()) error {
				head = e.session(id).Head
				arm()
				_, err := e.db.AppendUnowned(t.Context(), ws, id, entries(event("session.updated")), nil)
				return err
			}, func(t *testing.T, id store.SessionID) bool { return e.session(id).Head == head+2 }},
			{"blob", func(t *testing.T, id store.SessionID, arm func()) error {
				head = e.session(id).Head
				arm()
				_, err := e.db.AppendUnowned(t.Context(), ws, id, entries(event("big", "x", strings.Repeat("y", store.MaxInlineBody))), nil)
				return err
			}, func(t *testing.T, id store.SessionID) bool { return e.session(id).Head == head+2 }},
			{"tx", func(t *testing.T, id store.SessionID, arm func()) error {
				arm()
				return e.db.EnsureWorkspace(t.Context(), store.WorkspaceID("w"+string(id)), "W")
			}, func(t *testing.T, id store.SessionID) bool {
				_, err := e.db.WorkspaceSecret(t.Context(), store.WorkspaceID("w"+string(id)))
				return err == nil
			}},
		}
		for _, s := range steps {
			for _, side := range []string{"before", "after", "before and after each try", "after, and nobody can tell"} {
				t.Run(s.name+" "+side, func(t *testing.T) {
					outer := e.t
					e.t = t
					defer func() { e.t = outer }()
					id := e.create(message("go")).ID
					err := s.run(t, id, func() {
						switch side {
						case "before", "after":
							e.fault.arm(s.name+"."+side, 1)
						case "before and after each try":
							e.fault.arm(s.name+".before", 1)
							e.fault.arm(s.name+".after", 1)
						default:
							e.fault.arm(s.name+".after", 1)
							e.fault.arm(s.name+".compare", 1)
						}
					})
					e.fault.arm(s.name+".before", 0)
					e.fault.arm(s.name+".after", 0)
					e.fault.arm(s.name+".compare", 0)
					e.crash()
					there := s.there(t, id)
					switch {
					case err == nil && !there:
						t.Fatal("acknowledged and not there")
					case err == nil && side == "before":
						t.Fatal("failed before the step, and no error")
					case side == "after" && s.name != "blob" && !there:
						t.Fatal("failed after the step, and it is not there")
					case side == "after" && err != nil && s.name != "blob" && s.name != "tx":
						t.Fatalf("is there and could be found out: %v", err)
					case err != nil && there && !errors.Is(err, store.ErrUnknown):
						t.Fatalf("is there, and the error says otherwise: %v", err)
					}
					// Go on: the session can be claimed, written, and is sound.
					e.finish(id)
				})
			}
		}
	})
}

// finish claims what has work and brings it to rest.
func (e *env) finish(id store.SessionID) {
	e.t.Helper()
	ls, err := e.node.Claim(e.t.Context(), 100)
	if err != nil {
		e.t.Fatalf("claim: %v", err)
	}
	for _, l := range ls {
		a := store.Append{Entries: []store.Draft{idle()}, Rest: true}
		box, err := e.db.Inbox(e.t.Context(), ws, l.Session())
		if err != nil {
			e.t.Fatalf("inbox: %v", err)
		}
		for _, row := range box {
			a.Consume = append(a.Consume, row.ID)
			a.Entries = append(a.Entries, event("user.message"))
		}
		open, err := e.db.OpenEffects(e.t.Context(), ws, l.Session())
		if err != nil {
			e.t.Fatalf("open effects: %v", err)
		}
		for _, x := range open {
			if x.State == store.StateAttempted {
				a.Entries = append(a.Entries, doubt(x.ID, x.Attempts))
			}
			a.Entries = append(a.Entries, settlement(x.ID, "did_not_happen"))
		}
		e.must(l, a)
	}
	if s := e.session(id); s.Status != store.StatusIdle || s.Owner != "" {
		e.t.Fatalf("session does not rest: %+v", s)
	}
	e.sound(id)
}

// A commit whose fate cannot be found out ends the lease: the owner drops its
// memory and rebuilds.
func TestUnknownCommit(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		e.fault.arm("append.after", 1)
		e.fault.arm("append.compare", 1)
		if _, err := e.db.Append(t.Context(), l, entries(event("x"))); !errors.Is(err, store.ErrUnknown) {
			t.Errorf("append = %v, want unknown", err)
		}
		<-l.Lost()
		if _, err := e.db.Append(t.Context(), l, entries(event("y"))); !errors.Is(err, store.ErrFenced) {
			t.Errorf("append after it = %v, want fenced", err)
		}
		e.crash()
		e.finish(id)
	})
}

// A retry after COMMIT failed and nothing was there writes each entry once.
func TestRetriedCommit(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		var got []store.Seq
		l.OnCommit(func(es []store.Entry) {
			for _, x := range es {
				got = append(got, x.Seq)
			}
		})
		e.fault.arm("append.commit", 2)
		out := e.must(l, entries(event("x"), event("y")))
		if len(out) != 2 || len(got) != 2 || got[0] != 4 || got[1] != 5 {
			t.Errorf("entries %v, told %v", out, got)
		}
		if n := e.fault.count("append.commit"); n < 3 {
			t.Errorf("the commit was tried %d times, want at least 3", n)
		}
		e.sound(id)
	})
}

// A claim whose fate cannot be found out leaves no session with a living owner
// and without a driver: the next claim frees what the lost one took (law L7).
func TestUnknownClaim(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id := e.create(message("go")).ID
		e.fault.arm("claim.after", 1)
		e.fault.arm("claim.compare", 1)
		if _, err := e.node.Claim(t.Context(), 1); !errors.Is(err, store.ErrUnknown) {
			t.Fatalf("claim = %v, want unknown", err)
		}
		ls, err := e.node.Claim(t.Context(), 1)
		if err != nil || len(ls) != 1 || ls[0].Session() != id || ls[0].Fence() != 2 {
			t.Fatalf("claim after it = %v, %v, want the session under a new fence; its owner is %q", ls, err, e.session(id).Owner)
		}
		e.must(ls[0], store.Append{Entries: []store.Draft{idle()}, Park: true})
		e.finish(id)
	})
}
