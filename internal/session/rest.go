package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// running makes the events that turn the session to running; none when it is.
// Order as in reference section 9.9.
func (d *driver) running() []store.Draft {
	var status store.Status
	d.read(func(st *state) { status = st.status })
	if status == store.StatusRunning {
		return nil
	}
	return []store.Draft{
		event(d.newID("sevt_"), evRunning, "", nil),
		event(d.newID("sevt_"), evThreadRunning, d.scope.Thread, d.threadFields(nil)),
	}
}

func (d *driver) threadFields(f fields) fields {
	out := fields{"session_thread_id": d.scope.Thread, "agent_name": d.agentName()}
	for k, v := range f {
		out[k] = v
	}
	return out
}

func (d *driver) agentName() (name string) {
	d.read(func(st *state) { name = st.agent.Name })
	return name
}

func (d *driver) ensureRunning(ctx context.Context) error {
	drafts := d.running()
	if len(drafts) == 0 {
		return nil
	}
	_, err := d.append(ctx, store.Append{Entries: drafts})
	return err
}

// idle makes the events of a rest: thread idle, usage, session idle, in this
// order and with nothing behind them (reference sections 9.9 and 9.11). more
// is what the same append uses beyond the state.
func (d *driver) idle(reason stopReason, details json.RawMessage, more store.SessionUsage) []store.Draft {
	if details == nil {
		details = json.RawMessage("null")
	}
	if reason.Type == stopAction && reason.EventIDs == nil {
		reason.EventIDs = []store.EventID{}
	}
	var usage store.SessionUsage
	var budget json.RawMessage
	now := d.m.now()
	d.read(func(st *state) { usage, budget = st.usageAt(now), st.config.Budget })
	usage.Input += more.Input
	usage.Output += more.Output
	usage.CacheRead += more.CacheRead
	usage.CacheCreation5m += more.CacheCreation5m
	usage.CacheCreation1h += more.CacheCreation1h
	usage.CostNanoUSD += more.CostNanoUSD
	if len(budget) == 0 {
		budget = json.RawMessage("null")
	}
	stop := fields{"stop_reason": reason, "stop_details": details}
	return []store.Draft{
		event(d.newID("sevt_"), evThreadIdle, d.scope.Thread, d.threadFields(stop)),
		event(d.newID("sevt_"), evUsage, "", fields{"usage": wireUsage(usage), "budget": budget}),
		event(d.newID("sevt_"), evIdle, "", stop),
	}
}

func (st *state) usageAt(now time.Time) store.SessionUsage {
	u := st.usage
	if !st.running.IsZero() {
		u.ActiveMicros += max(0, now.Sub(st.running).Microseconds())
	}
	return u
}

// rest ends the turn and the lease in one transaction. before stands ahead of
// the idle events. ErrConflict means that input arrived: the turn goes on.
//
// A crash before this commit leaves the session running without an owner; the
// next claim comes to the same rest. After it there is nothing to repair.
func (d *driver) rest(ctx context.Context, reason stopReason, details json.RawMessage, before ...store.Draft) error {
	return d.restConsuming(ctx, nil, reason, details, before, time.Time{})
}

// died reports whether the machine is gone that the log says is running.
func (d *driver) died() (yes bool) {
	if d.m.cfg.Sandboxes == nil || d.held() != nil {
		return false
	}
	d.read(func(st *state) { yes = liveAct(st.machine.Act) })
	return yes
}

// finish ends a turn to which nothing more is to be said. A machine that died in
// it is brought back first, for what it left in the outputs folder: once or
// twice, and where that fails the turn ends all the same.
func (d *driver) finish(ctx context.Context) error {
	if d.died() && d.revived < maxLosses {
		d.revived++
		err, cut := d.makeNow(ctx)
		if errors.As(err, new(*crash)) || errors.Is(err, store.ErrFenced) || errors.Is(err, store.ErrUnknown) {
			return err
		}
		switch {
		case errors.Is(cut, store.ErrFenced):
			return cut
		case cut != nil:
			return store.ErrConflict // the loop sees why
		case err != nil:
			d.m.log.Warn("the outputs of a machine that died stay in it", "session", d.id, "err", err)
		}
	}
	return d.rest(ctx, stopReason{Type: stopEndTurn}, nil)
}

// endTurn does what the machine needs before a turn's rest is said: its outputs
// are kept as files, and the snapshots of the turn are taken.
func (d *driver) endTurn(ctx context.Context) error {
	b := d.held()
	if b == nil {
		return nil
	}
	defer d.keepAlive(saveTime)()
	if err := d.collect(ctx, b.s); err != nil {
		if d.over(err) {
			return err
		}
		d.m.log.Warn("cannot collect the outputs", "session", d.id, "err", err)
	}
	return d.turnEnds(ctx)
}

// restConsuming is rest that consumes inbox rows. again is when the session
// wants to be woken; zero: it does not.
func (d *driver) restConsuming(ctx context.Context, consume []string, reason stopReason, details json.RawMessage, before []store.Draft, again time.Time) error {
	if err := d.m.fault("before_rest"); err != nil {
		return err
	}
	if err := d.endTurn(ctx); err != nil {
		return err
	}
	drafts := append(before, d.idle(reason, details, store.SessionUsage{})...)
	a := store.Append{Entries: drafts, Consume: consume}
	if reason.Type == stopAction || reason.Type == stopBudget {
		a.Seen = d.seen // messages wait behind the question, or for the budget
	}
	if err := d.restWith(ctx, a, again); err != nil {
		return err
	}
	return d.m.fault("after_rest")
}

// exhausted ends a turn that used up its patience. Queued messages are taken
// into the log, so that the next one starts over (reference section 9.7). When
// something else arrived nothing ends but the request that before tells of.
func (d *driver) exhausted(ctx context.Context, e sessionError, before ...store.Draft) error {
	drafts := append(before[:len(before):len(before)], d.running()...)
	var consume []string
	rows, err := d.m.db.Inbox(ctx, d.ws, d.id) // not as seen: what is no message is looked at first
	if err != nil {
		return fmt.Errorf("read inbox of session %s: %w", d.id, err)
	}
	for _, r := range rows {
		if r.Kind == store.InboxEvent && (r.Type == inMessage || r.Type == inSystem) {
			drafts = append(drafts, processed(r))
			consume = append(consume, r.ID)
		}
	}
	drafts = append(drafts, event(d.newID("sevt_"), evError, "", fields{"error": e}))
	err = d.restConsuming(ctx, consume, stopReason{Type: stopExhausted}, nil, drafts, time.Time{})
	if errors.Is(err, store.ErrConflict) && len(before) > 0 {
		d.m.db.AppendRelaxed(d.lease, before)
	}
	return err
}

// reschedule sleeps until a time: the session wakes by itself. The status
// events are written once, the wait each time.
func (d *driver) reschedule(ctx context.Context, e sessionError, wait store.Wait, before ...store.Draft) error {
	drafts := before
	var status store.Status
	d.read(func(st *state) { status = st.status })
	if status != store.StatusRescheduling {
		drafts = append(drafts, d.running()...)
		drafts = append(drafts,
			event(d.newID("sevt_"), evError, "", fields{"error": e}),
			event(d.newID("sevt_"), evThreadRescheduled, d.scope.Thread, d.threadFields(nil)),
			event(d.newID("sevt_"), evRescheduled, "", nil))
	}
	wait.V = store.BodyVersion
	drafts = append(drafts, record(store.KindWait, d.newID("rec_"), "", wait))
	if d.held() != nil && !d.leaving {
		// The machine is waited with: what runs in it keeps its way out.
		if _, err := d.append(ctx, store.Append{Entries: drafts}); err != nil {
			return err
		}
		if err := d.lingerUntil(ctx, wait.Until); err != nil || !d.leaving {
			return err
		}
		drafts = nil // its place is needed: the wait is on record, the next owner finds the machine
	}
	if _, err := d.append(ctx, store.Append{Entries: drafts, Park: true, Seen: d.seen}); err != nil {
		return err
	}
	d.released = true
	return nil
}

// overBudget compares the list cost so far with the session's budget, whole
// cents as on the wire (reference section 6.1).
func (st *state) overBudget() bool {
	limit, ok := budgetLimit(st.config.Budget)
	return ok && st.usage.CostNanoUSD >= limit
}

// budgetLimit is the limit in 10⁻⁹ dollars.
func budgetLimit(raw json.RawMessage) (int64, bool) {
	var b struct {
		MaxListCost struct {
			Amount string `json:"amount"`
		} `json:"max_list_cost"`
	}
	if len(raw) == 0 || json.Unmarshal(raw, &b) != nil {
		return 0, false
	}
	cents, err := strconv.ParseInt(b.MaxListCost.Amount, 10, 64)
	if err != nil {
		return 0, false
	}
	return cents * 10_000_000, true
}
