package store_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/store"
)

func seqs(list []store.Entry) (out []store.Seq) {
	for _, e := range list {
		out = append(out, e.Seq)
	}
	return out
}

// Ranges, filters and order of reading.
func TestEntries(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started() // created, claim, running
		for i := range 6 {
			d := event([]string{"a", "b"}[i%2], "i", i)
			if i == 5 {
				d.Thread = "sthr_2"
			}
			e.must(l, entries(d)) // seq 4 … 9
		}
		all, err := e.db.Entries(t.Context(), ws, id, store.Range{})
		if err != nil || len(all) != 9 {
			t.Fatalf("%d entries, %v", len(all), err)
		}
		for _, c := range []struct {
			name string
			r    store.Range
			want []store.Seq
		}{
			{"all", store.Range{}, []store.Seq{1, 2, 3, 4, 5, 6, 7, 8, 9}},
			{"after", store.Range{After: 7}, []store.Seq{8, 9}},
			{"after head", store.Range{After: 9}, nil},
			{"until", store.Range{Until: 2}, []store.Seq{1, 2}},
			{"until beyond", store.Range{After: 8, Until: 99}, []store.Seq{9}},
			{"limit", store.Range{After: 2, Limit: 3}, []store.Seq{3, 4, 5}},
			{"descending", store.Range{Desc: true, Limit: 2}, []store.Seq{9, 8}},
			{"descending between", store.Range{After: 3, Until: 6, Desc: true}, []store.Seq{6, 5, 4}},
			{"types", store.Range{Types: []string{"a"}}, []store.Seq{4, 6, 8}},
			{"kinds", store.Range{Kinds: []store.Kind{store.KindCreated, store.KindClaim}}, []store.Seq{1, 2}},
			{"thread", store.Range{Thread: "sthr_2"}, []store.Seq{9}},
			{"later than", store.Range{AtGT: all[6].At}, []store.Seq{8, 9}},
			{"not earlier than", store.Range{AtGTE: all[7].At}, []store.Seq{8, 9}},
			{"earlier than", store.Range{AtLT: all[1].At}, []store.Seq{1}},
			{"not later than", store.Range{AtLTE: all[1].At}, []store.Seq{1, 2}},
			{"filter, limit, descending", store.Range{Types: []string{"b"}, Desc: true, Limit: 2}, []store.Seq{9, 7}},
		} {
			list, err := e.db.Entries(t.Context(), ws, id, c.r)
			if diff := cmp.Diff(c.want, seqs(list)); err != nil || diff != "" {
				t.Errorf("%s: %v %s", c.name, err, diff)
			}
		}
		for i := 1; i < len(all); i++ {
			if !all[i].At.After(all[i-1].At) || all[i].At.Location() != time.UTC {
				t.Errorf("seq %d at %v is not after %v", all[i].Seq, all[i].At, all[i-1].At)
			}
		}
		for _, x := range all {
			if x.Kind != store.KindEvent {
				continue
			}
			if seq, err := e.db.SeqOf(t.Context(), ws, id, store.EventID(x.ID)); err != nil || seq != x.Seq {
				t.Errorf("seq of %s = %d, %v, want %d", x.ID, seq, err, x.Seq)
			}
		}
		for _, id2 := range []string{"sevt_none", store.NewID("sevt_", time.Now()), store.NewID("sevt_", time.Now().Add(-time.Hour))} {
			if _, err := e.db.SeqOf(t.Context(), ws, id, store.EventID(id2)); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("seq of %s = %v, want not found", id2, err)
			}
		}
		// An id that is older than its entry (queued for long), and one that has no time.
		old := event("old")
		old.ID = store.NewID("sevt_", time.Now().Add(-time.Hour))
		odd := event("odd")
		odd.ID = "sevt_odd"
		e.must(l, entries(old, odd))
		for i, x := range []store.Draft{old, odd} {
			if seq, err := e.db.SeqOf(t.Context(), ws, id, store.EventID(x.ID)); err != nil || seq != store.Seq(10+i) {
				t.Errorf("seq of %s = %d, %v", x.ID, seq, err)
			}
		}
		if x, err := e.db.EntryAt(t.Context(), ws, id, 4); err != nil || x.Type != "a" {
			t.Errorf("entry 4 = %+v, %v", x, err)
		}
		for _, seq := range []store.Seq{0, 99} {
			if _, err := e.db.EntryAt(t.Context(), ws, id, seq); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("entry %d = %v, want not found", seq, err)
			}
		}
	})
}

// The clock may stand still or jump back; times in a session grow all the same.
func TestClock(t *testing.T) {
	now := time.Now()
	e := newEnvWith(t, "sqlite:"+t.TempDir()+"/planaria.db", func(c *store.Config) { c.Now = func() time.Time { return now } })
	id, l := e.started()
	now = now.Add(-time.Hour)
	e.must(l, entries(event("a"), event("b")))
	list, err := e.db.Entries(t.Context(), ws, id, store.Range{})
	if err != nil || !slices.IsSortedFunc(list, func(a, b store.Entry) int { return a.At.Compare(b.At) }) {
		t.Errorf("times are not in order: %v", err)
	}
	e.sound(id)
}

// Lists of sessions: order, pages, filters.
func TestSessions(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		var ids []store.SessionID
		start := time.Now().UTC().Truncate(time.Microsecond)
		for i := range 5 {
			s, err := e.db.CreateSession(t.Context(), ws, store.NewSession{ID: store.SessionID(fmt.Sprint("sesn_", i)), Now: start.Add(time.Duration(i/2) * time.Second),
				Created: store.Created{V: 1, Thread: "sthr_1", Config: store.SessionConfig{Agent: fmt.Appendf(nil, `{"id":"agent_%d","version":%d}`, i%2, i)}}})
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, s.ID)
		}
		list := func(f store.SessionFilter) (out []store.SessionID) {
			t.Helper()
			got, err := e.db.Sessions(t.Context(), ws, f)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range got {
				out = append(out, s.ID)
			}
			return out
		}
		if _, err := e.db.Deliver(t.Context(), ws, ids[3], []store.Delivery{message("x")}, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.AppendUnowned(t.Context(), ws, ids[4], entries(event("session.status_terminated"), record(store.KindArchive, "", store.Archive{V: 1, By: "p"})), nil); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			name string
			f    store.SessionFilter
			want []store.SessionID
		}{
			{"newest first, without archived", store.SessionFilter{}, []store.SessionID{"sesn_3", "sesn_2", "sesn_1", "sesn_0"}},
			{"with archived", store.SessionFilter{IncludeArchived: true, Limit: 2}, []store.SessionID{"sesn_4", "sesn_3"}},
			{"oldest first", store.SessionFilter{Asc: true, Limit: 3}, []store.SessionID{"sesn_0", "sesn_1", "sesn_2"}},
			{"next page", store.SessionFilter{Asc: true, AfterAt: start, AfterID: "sesn_0", Limit: 2}, []store.SessionID{"sesn_1", "sesn_2"}},
			{"page back", store.SessionFilter{AfterAt: start.Add(time.Second), AfterID: "sesn_3"}, []store.SessionID{"sesn_2", "sesn_1", "sesn_0"}},
			{"agent", store.SessionFilter{AgentID: "agent_1"}, []store.SessionID{"sesn_3", "sesn_1"}},
			{"version", store.SessionFilter{AgentID: "agent_1", AgentVersion: 1}, []store.SessionID{"sesn_1"}},
			{"running", store.SessionFilter{Statuses: []store.Status{store.StatusRunning}}, []store.SessionID{"sesn_3"}},
			{"idle or terminated", store.SessionFilter{Statuses: []store.Status{store.StatusIdle, store.StatusTerminated}, IncludeArchived: true}, []store.SessionID{"sesn_4", "sesn_2", "sesn_1", "sesn_0"}},
			{"created", store.SessionFilter{CreatedGTE: start.Add(time.Second), CreatedLT: start.Add(2 * time.Second)}, []store.SessionID{"sesn_3", "sesn_2"}},
			{"created later", store.SessionFilter{CreatedGT: start, CreatedLTE: start.Add(time.Second)}, []store.SessionID{"sesn_3", "sesn_2"}},
		} {
			if diff := cmp.Diff(c.want, list(c.f)); diff != "" {
				t.Errorf("%s: %s", c.name, diff)
			}
		}
		if s := e.session(ids[4]); s.ArchivedAt.IsZero() || s.Status != store.StatusTerminated || s.Fence != 1 || s.Owner != "" {
			t.Errorf("archived session = %+v", s)
		}
		e.sound(ids[4])
	})
}

// AppendUnowned writes only when nobody owns the session.
func TestUnowned(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.create()
		title := "new title"
		change := record(store.KindConfig, "", store.ConfigChange{V: 1, Config: store.SessionConfig{Title: &title, EnvironmentID: "env_2"}})
		out, err := e.db.AppendUnowned(t.Context(), ws, s.ID, entries(change), func(got store.Session) error {
			if got.Config.EnvironmentID != "env_1" {
				t.Errorf("check saw %+v", got)
			}
			return nil
		})
		if err != nil || len(out) != 1 || out[0].Seq != 3 {
			t.Fatalf("append = %+v, %v", out, err)
		}
		got := e.session(s.ID)
		if got.Config.EnvironmentID != "env_2" || *got.Config.Title != title || got.Status != store.StatusIdle || got.Fence != 1 {
			t.Errorf("session = %+v", got)
		}
		no := errors.New("no")
		if _, err := e.db.AppendUnowned(t.Context(), ws, s.ID, entries(change), func(store.Session) error { return no }); !errors.Is(err, no) {
			t.Errorf("refused by check = %v", err)
		}
		if _, err := e.db.Deliver(t.Context(), ws, s.ID, []store.Delivery{message("x")}, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.AppendUnowned(t.Context(), ws, s.ID, entries(change), nil); err != nil {
			t.Errorf("append to an unowned running session = %v", err)
		}
		if got := e.session(s.ID); got.Status != store.StatusRunning {
			t.Errorf("status = %s: the message still waits", got.Status)
		}
		e.claim()
		if _, err := e.db.AppendUnowned(t.Context(), ws, s.ID, entries(change), nil); !errors.Is(err, store.ErrOwned) {
			t.Errorf("append to an owned session = %v, want owned", err)
		}
		e.sound(s.ID)
	})
}

// What follows from the log alone: waiting, usage, active time, waste.
func TestProjection(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		wake := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
		failed := record(store.KindOutput, "eff_f", store.Output{V: 1, Effect: "eff_f", Model: "m", Failed: "overloaded", Usage: store.TokenUsage{Input: 7}, CostNanoUSD: 9})
		e.must(l, entries(output("eff_a"), failed, record(store.KindCompaction, "", store.Compaction{V: 1, Through: 3})))
		e.must(l, store.Append{Entries: []store.Draft{event("session.status_rescheduled"), record(store.KindWait, "", store.Wait{V: 1, Until: wake, Reason: "model_retry"})}, Park: true})
		s := e.session(id)
		if s.Status != store.StatusRescheduling || !s.WakeAt.Equal(wake) || s.Compacted != 6 || s.Usage.ActiveMicros <= 0 || !s.RunningSince.IsZero() {
			t.Errorf("waiting session = %+v", s)
		}
		if s.Usage.Input != 10 || s.Usage.CostNanoUSD != 100 || s.Usage.WastedTokens != 7 {
			t.Errorf("usage = %+v", s.Usage)
		}
		if x, err := e.db.Effect(t.Context(), ws, "eff_f"); err != nil || x.State != store.StateCompleted || x.Outcome != store.OutcomeRefused || x.Class != store.ClassRead {
			t.Errorf("failed model call = %+v, %v", x, err)
		}
		if ls, err := e.node.Claim(t.Context(), 1); err != nil || len(ls) != 0 {
			t.Fatalf("claimed %d before the time, %v", len(ls), err)
		}
		if at, err := e.node.NextWake(t.Context()); err != nil || !at.Equal(wake) {
			t.Errorf("next wake = %v, %v, want %v", at, err, wake)
		}
		// Input wakes it early.
		if _, err := e.db.Deliver(t.Context(), ws, id, []store.Delivery{message("x")}, nil); err != nil {
			t.Fatal(err)
		}
		l = e.claim()
		e.must(l, entries(running()))
		if s := e.session(id); !s.WakeAt.IsZero() || s.Status != store.StatusRunning {
			t.Errorf("running again = %+v", s)
		}
		e.sound(id)
	})
}

// Deleting hides at once, erases bodies, keeps digests and tombstones.
func TestDelete(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		eff := newEffect()
		big := event("big", "x", string(make([]byte, store.MaxInlineBody)))
		e.must(l, entries(intent(eff, store.ClassIrreversible), big))
		if err := e.db.DeleteSession(t.Context(), ws, id, "p"); !errors.Is(err, store.ErrConflict) {
			t.Errorf("delete of a running session = %v, want a conflict", err)
		}
		e.must(l, entries(attempt(eff, 1)))
		f, err := e.db.Follow(t.Context(), ws, id, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		e.must(l, store.Append{Entries: []store.Draft{doubt(eff, 1), idle()}, Rest: true})
		if err := e.db.DeleteSession(t.Context(), ws, id, "p"); err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = f.Next(t.Context())
		}
		if !errors.Is(err, store.ErrNotFound) {
			t.Errorf("follower of a deleted session = %v", err)
		}
		if _, err := e.db.Session(t.Context(), ws, id); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("deleted session = %v", err)
		}
		if err := e.db.DeleteSession(t.Context(), ws, id, "p"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("second delete = %v", err)
		}
		if x, err := e.db.Effect(t.Context(), ws, eff); err != nil || x.State != store.StateInDoubt || x.Digest == "" {
			t.Errorf("tombstone = %+v, %v", x, err)
		}
		if n := e.blobs.count(); n != 0 {
			t.Errorf("%d blobs are left", n)
		}
		e.crash()
		rep, err := e.db.Verify(t.Context(), ws, id)
		if err != nil || rep.Problem != "" || rep.Erased != rep.Entries || rep.Entries == 0 {
			t.Errorf("verify = %+v, %v; the chain of an erased log still holds", rep, err)
		}
	})
}
