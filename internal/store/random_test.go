package store_test

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/planaria/planaria/internal/store"
)

// model is what a session must be after any sequence of operations.
type model struct {
	id      store.SessionID
	log     []string // ids of entries, but claims
	inbox   []string // in order of arrival
	status  store.Status
	starts  bool // input that starts a turn waits
	paused  bool
	lease   *store.Lease
	dropped bool // its lease ended with an unknown commit; the next claim frees it
	effects map[store.EffectID]store.EffectState
	classes map[store.EffectID]store.Class
	order   []store.EffectID
}

func (m *model) effective() store.Status {
	if m.starts && m.status == store.StatusIdle && !m.paused {
		return store.StatusRunning
	}
	return m.status
}

// work reports whether the session is to be claimed. All inbox rows of the
// model are plain, so that a paused session sleeps.
func (m *model) work() bool {
	if m.paused && m.status == store.StatusIdle {
		return false
	}
	return m.effective() != store.StatusIdle || len(m.inbox) > 0
}

// machine runs random operations on a store and on models of its sessions.
type machine struct {
	*env
	sessions []*model
}

// random operations against the reference model, on both engines. The seed is
// in rapid's failure text.
func TestRandom(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		// -rapid.checks=N asks for more; a crash costs more on PostgreSQL.
		if checks := flag.Lookup("rapid.checks"); checks.Value.String() == checks.DefValue {
			n := "30"
			if strings.HasPrefix(e.cfg.URL, "postgres") {
				n = "6"
			}
			checks.Value.Set(n)
			defer checks.Value.Set(checks.DefValue)
		}
		flag.Set("rapid.nofailfile", "true") // the seed is enough
		rapid.Check(t, func(rt *rapid.T) {
			m := &machine{env: e}
			for range rapid.IntRange(1, 3).Draw(rt, "sessions") {
				s := e.create()
				m.sessions = append(m.sessions, &model{id: s.ID, status: store.StatusIdle,
					effects: map[store.EffectID]store.EffectState{}, classes: map[store.EffectID]store.Class{}})
				list, err := e.db.Entries(t.Context(), ws, s.ID, store.Range{})
				if err != nil {
					rt.Fatal(err)
				}
				m.sessions[len(m.sessions)-1].log = []string{list[0].ID}
			}
			rt.Repeat(map[string]func(*rapid.T){
				"deliver": m.deliver,
				"claim":   m.claimAll,
				"events":  m.events,
				"effect":  m.effect,
				"rest":    m.rest,
				"pause":   m.pause,
				"unowned": m.unowned,
				"relaxed": m.relaxed,
				"crash":   m.crashNow,
			})
			m.compare(rt)
			m.retire(rt)
		})
	})
}

func (m *machine) pick(rt *rapid.T) *model {
	return m.sessions[rapid.IntRange(0, len(m.sessions)-1).Draw(rt, "session")]
}

func (m *machine) owned(rt *rapid.T) *model {
	s := m.pick(rt)
	if s.lease == nil {
		rt.Skip("nobody owns it")
	}
	return s
}

// disturb arms faults around a step: none, fails and is not there, fails and is
// there, fails and is there and nobody can tell.
func (m *machine) disturb(rt *rapid.T, step string) (kind int) {
	kind = rapid.SampledFrom([]int{0, 0, 0, 0, 1, 2, 3}).Draw(rt, "fault")
	m.fault.arm(step+".before", b2i(kind == 1))
	m.fault.arm(step+".after", b2i(kind >= 2))
	m.fault.arm(step+".compare", b2i(kind == 3))
	return kind
}

func (m *machine) calm(step string) {
	for _, s := range []string{".before", ".after", ".compare"} {
		m.fault.arm(step+s, 0)
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// append appends under faults and reports whether the entries are there.
func (m *machine) append(rt *rapid.T, s *model, a store.Append) bool {
	kind := m.disturb(rt, "append")
	_, err := m.db.Append(m.t.Context(), s.lease, a)
	m.calm("append")
	there := kind != 1
	switch {
	case kind == 1 && !errors.Is(err, errInjected), kind == 0 && err != nil, kind == 2 && err != nil:
		rt.Fatalf("append with fault %d = %v", kind, err)
	case kind == 3:
		if !errors.Is(err, store.ErrUnknown) {
			rt.Fatalf("append with unknown outcome = %v", err)
		}
		<-s.lease.Lost()
		s.lease, s.dropped = nil, true
	}
	if there {
		for _, d := range a.Entries {
			s.log = append(s.log, d.ID)
		}
		for _, id := range a.Consume {
			s.inbox = slices.DeleteFunc(s.inbox, func(x string) bool { return x == id })
		}
	}
	return there
}

func (m *machine) deliver(rt *rapid.T) {
	s := m.pick(rt)
	d := message(fmt.Sprint(len(s.log)))
	kind := m.disturb(rt, "deliver")
	_, err := m.db.Deliver(m.t.Context(), ws, s.id, []store.Delivery{d}, nil)
	m.calm("deliver")
	switch {
	case kind == 1 && errors.Is(err, errInjected):
		return
	case kind == 3 && !errors.Is(err, store.ErrUnknown), kind != 3 && err != nil:
		rt.Fatalf("deliver with fault %d = %v", kind, err)
	}
	s.inbox = append(s.inbox, d.ID)
	if s.status == store.StatusIdle && !s.paused {
		s.starts = true
	}
}

func (m *machine) claimAll(rt *rapid.T) {
	var want, got []store.SessionID
	for _, s := range m.sessions {
		if s.lease == nil && s.work() {
			want = append(want, s.id)
		}
		s.dropped = false
	}
	ls, err := m.node.Claim(m.t.Context(), 100)
	if err != nil {
		rt.Fatal(err)
	}
	for _, l := range ls {
		i := slices.IndexFunc(m.sessions, func(s *model) bool { return s.id == l.Session() })
		if i < 0 { // left by a sequence that rapid broke off
			m.must(l, store.Append{Entries: []store.Draft{event("session.status_terminated")}, Rest: true})
			continue
		}
		m.sessions[i].lease = l
		got = append(got, l.Session())
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		rt.Fatalf("claimed: %s", diff)
	}
}

func (m *machine) events(rt *rapid.T) {
	s := m.owned(rt)
	a := store.Append{}
	for range rapid.IntRange(0, 3).Draw(rt, "events") {
		a.Entries = append(a.Entries, event("agent.message"))
	}
	status := rapid.SampledFrom([]store.Status{"", store.StatusRunning, store.StatusIdle}).Draw(rt, "status")
	switch status {
	case store.StatusRunning:
		a.Entries = append(a.Entries, running())
	case store.StatusIdle:
		a.Entries = append(a.Entries, idle())
	}
	if n := len(s.inbox); n > 0 && rapid.Bool().Draw(rt, "consume") {
		a.Consume = append(a.Consume, s.inbox[rapid.IntRange(0, n-1).Draw(rt, "row")])
	}
	if len(a.Entries) == 0 {
		rt.Skip("nothing to append")
	}
	if m.append(rt, s, a) && status != "" {
		s.status, s.starts = status, false
	}
}

// effect tries any record on any effect: allowed ones go through, all others
// are conflicts.
func (m *machine) effect(rt *rapid.T) {
	s := m.owned(rt)
	if len(s.order) == 0 || rapid.IntRange(0, 2).Draw(rt, "new") == 0 {
		id := newEffect()
		class := rapid.SampledFrom([]store.Class{store.ClassRead, store.ClassIdempotent, store.ClassMixed, store.ClassIrreversible}).Draw(rt, "class")
		if m.append(rt, s, entries(intent(id, class))) {
			s.effects[id], s.classes[id], s.order = store.StateIntended, class, append(s.order, id)
		}
		return
	}
	id := s.order[rapid.IntRange(0, len(s.order)-1).Draw(rt, "effect")]
	step := rapid.SampledFrom([]string{"intent", "attempt", "completion", "doubt", "happened", "did_not_happen"}).Draw(rt, "record")
	next, ok := after(s.effects[id], s.classes[id], step)
	d := map[string]func() store.Draft{
		"intent":         func() store.Draft { return intent(id, s.classes[id]) },
		"attempt":        func() store.Draft { return attempt(id, 0) },
		"completion":     func() store.Draft { return completion(id, 0) },
		"doubt":          func() store.Draft { return doubt(id, 0) },
		"happened":       func() store.Draft { return settlement(id, "happened") },
		"did_not_happen": func() store.Draft { return settlement(id, "did_not_happen") },
	}[step]()
	if !ok {
		_, err := m.db.Append(m.t.Context(), s.lease, entries(event("beside"), d))
		if !errors.Is(err, store.ErrConflict) {
			rt.Fatalf("%s of an effect that is %s = %v, want a conflict", step, s.effects[id], err)
		}
		return
	}
	if m.append(rt, s, entries(d)) {
		s.effects[id] = next
	}
}

// after is the state machine of design section 4, written a second time.
func after(state store.EffectState, class store.Class, step string) (store.EffectState, bool) {
	strong := class == store.ClassIrreversible || class == store.ClassMixed
	switch step + " " + string(state) {
	case "attempt intended":
		return store.StateAttempted, true
	case "completion attempted":
		return store.StateCompleted, true
	case "completion intended":
		return store.StateCompleted, !strong
	case "doubt attempted":
		return store.StateInDoubt, true
	case "doubt intended":
		return store.StateInDoubt, class == store.ClassIdempotent
	case "happened in_doubt":
		return store.StateCompleted, true
	case "did_not_happen in_doubt", "did_not_happen intended":
		return store.StateVoid, true
	}
	return "", false
}

func (m *machine) rest(rt *rapid.T) {
	s := m.owned(rt)
	a := store.Append{Entries: []store.Draft{idle()}, Rest: rapid.Bool().Draw(rt, "rest")}
	a.Park = !a.Rest
	if a.Rest && len(s.inbox) > 0 && !s.paused {
		if _, err := m.db.Append(m.t.Context(), s.lease, a); !errors.Is(err, store.ErrConflict) {
			rt.Fatalf("rest over %d rows = %v, want a conflict", len(s.inbox), err)
		}
		return
	}
	l := s.lease
	if m.append(rt, s, a) {
		<-l.Lost()
		s.status, s.starts, s.lease, s.dropped = store.StatusIdle, false, nil, false
	}
}

func (m *machine) pause(rt *rapid.T) {
	s := m.owned(rt)
	typ := "session.paused"
	if s.paused {
		typ = "session.resumed"
	}
	if m.append(rt, s, entries(event(typ))) {
		s.paused = !s.paused
	}
}

func (m *machine) unowned(rt *rapid.T) {
	s := m.pick(rt)
	d := event("session.updated")
	kind := m.disturb(rt, "unowned")
	_, err := m.db.AppendUnowned(m.t.Context(), ws, s.id, entries(d), nil)
	m.calm("unowned")
	switch {
	case kind == 1 && errors.Is(err, errInjected):
		return
	case s.lease != nil || s.dropped:
		if !errors.Is(err, store.ErrOwned) {
			rt.Fatalf("append to an owned session = %v", err)
		}
		return
	case kind == 3 && !errors.Is(err, store.ErrUnknown), kind != 3 && err != nil:
		rt.Fatalf("append to an unowned session with fault %d = %v", kind, err)
	}
	s.log = append(s.log, d.ID)
}

func (m *machine) relaxed(rt *rapid.T) {
	s := m.owned(rt)
	r, c := event("span.relaxed"), event("agent.message")
	m.db.AppendRelaxed(s.lease, []store.Draft{r})
	// No fault here: a relaxed entry that is lost by one shows at a later append.
	if _, err := m.db.Append(m.t.Context(), s.lease, entries(c)); err != nil {
		rt.Fatal(err)
	}
	s.log = append(s.log, r.ID, c.ID)
}

func (m *machine) crashNow(rt *rapid.T) {
	m.crash()
	for _, s := range m.sessions {
		s.lease, s.dropped = nil, false
	}
	m.compare(rt)
}

// compare reads everything and compares it with the models.
func (m *machine) compare(rt *rapid.T) {
	for _, s := range m.sessions {
		list, err := m.db.Entries(m.t.Context(), ws, s.id, store.Range{})
		if err != nil {
			rt.Fatal(err)
		}
		var log []string
		for _, x := range list {
			if x.Kind != store.KindClaim {
				log = append(log, x.ID)
			}
		}
		if diff := cmp.Diff(s.log, log); diff != "" {
			rt.Fatalf("log: %s", diff)
		}
		box, err := m.db.Inbox(m.t.Context(), ws, s.id)
		if err != nil {
			rt.Fatal(err)
		}
		var rows []string
		for _, b := range box {
			rows = append(rows, b.ID)
		}
		if !slices.Equal(s.inbox, rows) {
			rt.Fatalf("inbox: %s", cmp.Diff(s.inbox, rows))
		}
		got := m.session(s.id)
		if got.Status != s.effective() || got.Paused != s.paused || int(got.Head) != len(list) || (got.Owner != "") != (s.lease != nil || s.dropped) {
			rt.Fatalf("session is %s (paused %v, owner %q), want %s (%v, owned %v)", got.Status, got.Paused, got.Owner, s.effective(), s.paused, s.lease != nil)
		}
		open := 0
		for id, state := range s.effects {
			x, err := m.db.Effect(m.t.Context(), ws, id)
			if err != nil || x.State != state {
				rt.Fatalf("effect is %s, want %s: %v", x.State, state, err)
			}
			if state != store.StateCompleted && state != store.StateVoid {
				open++
			}
		}
		if xs, err := m.db.OpenEffects(m.t.Context(), ws, s.id); err != nil || len(xs) != open {
			rt.Fatalf("%d open effects, want %d: %v", len(xs), open, err)
		}
		m.sound(s.id)
	}
}

// retire keeps the sessions of one sequence out of the next one's claims.
func (m *machine) retire(rt *rapid.T) {
	m.claimAll(rt)
	for _, s := range m.sessions {
		if s.lease != nil {
			if _, err := m.db.Append(m.t.Context(), s.lease, store.Append{Entries: []store.Draft{event("session.status_terminated")}, Rest: true}); err != nil {
				rt.Fatal(err)
			}
			continue
		}
		if _, err := m.db.AppendUnowned(m.t.Context(), ws, s.id, entries(event("session.status_terminated")), nil); err != nil {
			rt.Fatal(err)
		}
	}
}
