package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
)

// clientEvent is what the driver reads of an event that a client sent.
type clientEvent struct {
	Type            string          `json:"type"`
	Content         json.RawMessage `json:"content"`
	IsError         bool            `json:"is_error"`
	ToolUseID       store.EventID   `json:"tool_use_id"`
	CustomToolUseID store.EventID   `json:"custom_tool_use_id"`
	Result          string          `json:"result"`
	DenyMessage     string          `json:"deny_message"`
}

// target is the call that an answer answers; empty for other events.
func (c clientEvent) target() store.EventID {
	if c.CustomToolUseID != "" {
		return c.CustomToolUseID
	}
	return c.ToolUseID
}

// processed is the draft that puts a client event into the log under the id
// that its sender was given.
func processed(r store.Inbox) store.Draft {
	return store.Draft{Kind: store.KindEvent, Type: r.Type, ID: r.ID, Thread: r.Thread, Body: r.Body}
}

func (d *driver) inbox(ctx context.Context) ([]store.Inbox, error) {
	rows, seen, err := d.m.db.InboxSeen(ctx, d.ws, d.id)
	if err != nil {
		return nil, fmt.Errorf("read inbox of session %s: %w", d.id, err)
	}
	d.mu.Lock()
	d.seen = max(d.seen, seen)
	d.mu.Unlock()
	return rows, nil
}

// glance looks at the inbox while work is under way. It returns the cause to
// cut that work short, if there is one; answers of the client are taken at
// once, everything else waits for the loop.
func (d *driver) glance(ctx context.Context) error {
	rows, err := d.m.db.Inbox(ctx, d.ws, d.id)
	if err != nil {
		return nil // the loop will see it
	}
	var cause error
	for _, r := range rows {
		switch {
		case r.Kind == store.InboxEvent && r.Type == inInterrupt:
			return errInterrupted
		case r.Kind == store.InboxControl && r.Type == controlPause:
			cause = errPausing
		case r.Kind == store.InboxEvent && (r.Type == inCustomResult || r.Type == inToolResult):
			if err := d.clientAnswer(ctx, r); err != nil {
				d.m.log.Debug("answer waits for the loop", "session", d.id, "err", err)
			}
		}
	}
	return cause
}

// maxConflicts is how often in a row the inbox is looked at again because one
// of its rows met a conflict, before that counts as a fault of the driver.
const maxConflicts = 5

// takeInbox acts on what can be acted on now; the rest stays queued on purpose.
// ErrConflict: a row has to be looked at again before anything else is decided.
func (d *driver) takeInbox(ctx context.Context) error {
	rows, err := d.inbox(ctx)
	if err != nil {
		return err
	}
	var conflict error
	for _, r := range rows {
		var paused bool
		d.read(func(st *state) { paused = st.paused })
		if paused && !r.Urgent {
			continue // input queues until resume
		}
		var err error
		switch r.Kind {
		case store.InboxControl:
			err = d.control(ctx, r)
		case store.InboxSettle:
			err = d.settle(ctx, r)
		case store.InboxEvidence:
			err = d.evidence(ctx, r)
		case store.InboxEvent:
			err = d.takeEvent(ctx, r)
		}
		if errors.Is(err, store.ErrConflict) {
			conflict = err // settled by another way meanwhile, or another row stood before it
			continue
		}
		if err != nil {
			return fmt.Errorf("take %s %s: %w", r.Kind, r.ID, err)
		}
		if err := d.m.fault("after_row"); err != nil {
			return err
		}
		if d.released {
			return nil
		}
	}
	if conflict == nil {
		d.conflicts = 0
		return d.takeMessages(ctx, rows)
	}
	if d.conflicts++; d.conflicts > maxConflicts {
		return fmt.Errorf("the inbox cannot be taken: %v", conflict) // not a conflict any more: the driver waits
	}
	return conflict
}

// evidence records what came in late. A session that rests is running first:
// a crash behind this append leaves it with work, and the evidence is judged.
func (d *driver) evidence(ctx context.Context, r store.Inbox) error {
	var e store.Evidence
	if err := json.Unmarshal(r.Body, &e); err != nil {
		return err
	}
	var waited bool
	d.read(func(st *state) {
		for _, c := range st.open() {
			waited = waited || c.effect == e.Effect && !st.paused
		}
	})
	if waited {
		if err := d.ensureRunning(ctx); err != nil {
			return err
		}
	}
	return d.m.cfg.Gateway.Evidence(ctx, d.scope, e, []string{r.ID})
}

func (d *driver) takeEvent(ctx context.Context, r store.Inbox) error {
	switch r.Type {
	case inInterrupt:
		return d.interrupt(ctx, r)
	case inConfirmation:
		return d.confirm(ctx, r)
	case inCustomResult, inToolResult:
		return d.clientAnswer(ctx, r)
	}
	return nil // messages are taken together
}

// takeMessages starts a turn with the queued messages, or goes on with them
// when the turn just came to its end. While calls are open or the model has
// input to answer they wait (reference section 9.3).
func (d *driver) takeMessages(ctx context.Context, rows []store.Inbox) error {
	var ready bool
	d.read(func(st *state) {
		ready = len(st.open()) == 0 && !st.paused && (!st.want || st.status == store.StatusIdle) &&
			st.status != store.StatusTerminated
	})
	a := store.Append{}
	for _, r := range rows {
		if r.Kind == store.InboxEvent && (r.Type == inMessage || r.Type == inSystem) {
			a.Entries = append(a.Entries, processed(r))
			a.Consume = append(a.Consume, r.ID)
		}
	}
	d.waiting = len(a.Entries)
	if !ready || d.waiting == 0 {
		return nil
	}
	if err := d.m.fault("before_take"); err != nil {
		return err
	}
	a.Entries = append(d.running(), a.Entries...)
	if _, err := d.append(ctx, a); err != nil {
		return err
	}
	d.consumed, d.waiting = true, 0
	return d.m.fault("after_take")
}

// control acts on pause, resume and update.
func (d *driver) control(ctx context.Context, r store.Inbox) error {
	var st state
	d.read(func(s *state) { st = *s })
	consume := []string{r.ID}
	switch r.Type {
	case controlPause:
		if st.paused {
			_, err := d.append(ctx, store.Append{Consume: consume})
			return err
		}
		// No rest in this append: what else is urgent is taken before the lease ends.
		drafts := append(d.running(), event(d.newID("sevt_"), evPaused, "", nil))
		drafts = append(drafts, d.idle(stopReason{Type: stopEndTurn}, nil, store.SessionUsage{})...)
		_, err := d.append(ctx, store.Append{Entries: drafts, Consume: consume})
		return err
	case controlResume:
		d.consumed = true
		drafts := d.running()
		drafts = append(drafts, event(d.newID("sevt_"), evResumed, "", nil))
		_, err := d.append(ctx, store.Append{Entries: drafts, Consume: consume})
		return err
	case controlCheckpoint:
		return d.checkpoint(ctx, r)
	case controlLeave:
		d.leaving = true
		_, err := d.append(ctx, store.Append{Consume: consume})
		return err
	case controlUpdate:
		var p UpdateParams
		if err := json.Unmarshal(r.Body, &p); err != nil {
			return err
		}
		drafts, err := updateDrafts(st.config, p, d.m.now())
		if err != nil {
			// Checked when it was accepted; what changed since makes it void.
			d.m.log.Warn("update does not apply any more", "session", d.id, "err", err)
			drafts = nil
		}
		_, err = d.append(ctx, store.Append{Entries: drafts, Consume: consume})
		return err
	}
	_, err := d.append(ctx, store.Append{Consume: consume})
	return err
}

// openCall finds the open call of a tool-use event.
func (d *driver) openCall(id store.EventID) (found *call) {
	d.read(func(st *state) {
		if c := st.call(id); c != nil && !c.closed {
			cp := *c
			found = &cp
		}
	})
	return found
}

// confirm burns an approval in the intent's transaction, or ends the call
// with the denial. On an effect in doubt a denial leaves it to the agent.
func (d *driver) confirm(ctx context.Context, r store.Inbox) error {
	var ev clientEvent
	if err := json.Unmarshal(r.Body, &ev); err != nil {
		return err
	}
	c := d.openCall(ev.ToolUseID)
	if c == nil {
		return d.logOnly(ctx, r)
	}
	if c.tool != "" {
		return d.confirmContained(ctx, r, c, ev)
	}
	e, err := d.m.db.Effect(ctx, d.ws, c.effect)
	if err != nil {
		return err
	}
	on, err := d.goesOn(ctx, c)
	if err != nil {
		return err
	}
	d.consumed = true
	note := processed(r)
	first := append([]store.Draft{note}, on...)
	switch {
	case e.State == store.StateInDoubt && ev.Result == "deny":
		p, err := d.m.cfg.Gateway.Settle(ctx, d.scope, c.effect, SettleRequest{Outcome: "tell", Person: "user"},
			[]string{r.ID}, d.result(c, first...))
		return d.progressed(c, p, err)
	case e.State != store.StateAwaitingApproval:
		return d.logOnly(ctx, r)
	case ev.Result == "deny":
		reason := ev.DenyMessage
		if reason == "" {
			reason = "The user denied this call."
		}
		p, err := d.m.cfg.Gateway.Void(ctx, d.scope, c.effect, reason, []string{r.ID}, d.result(c, first...))
		return d.progressed(c, p, err)
	}
	drafts, pre, err := d.m.cfg.Gateway.Intend(ctx, d.scope, c.effect, store.EventID(r.ID))
	if errors.Is(err, gateway.ErrStaleApproval) {
		p, err := d.m.cfg.Gateway.Void(ctx, d.scope, c.effect,
			"The approval no longer fits what would be done now: "+err.Error()+". Make the call again to be asked again.",
			[]string{r.ID}, d.result(c, first...))
		return d.progressed(c, p, err)
	}
	if err != nil {
		return err
	}
	if err := d.m.fault("before_approval"); err != nil {
		return err
	}
	_, err = d.append(ctx, store.Append{Entries: append(first, drafts...), Effects: pre, Consume: []string{r.ID}})
	if err != nil {
		return err
	}
	return d.m.fault("after_approval")
}

// goesOn makes the running events of a resting session whose last answer is
// the one to c. They are committed with that answer: a crash right behind it
// leaves a session with work, which is claimed again (law L7), not one that
// rests and waits for nobody. None while other answers are missing.
func (d *driver) goesOn(ctx context.Context, c *call) ([]store.Draft, error) {
	effects, err := d.m.db.OpenEffects(ctx, d.ws, d.id)
	if err != nil {
		return nil, fmt.Errorf("read open effects: %w", err)
	}
	waits := map[store.EventID]bool{} // for somebody else than time
	var last bool
	d.read(func(st *state) {
		for _, e := range effects {
			waits[e.Event] = e.State == store.StateAwaitingApproval || e.Client && e.State == store.StateIntended ||
				e.State == store.StateInDoubt && slices.Contains(st.stop.EventIDs, e.Event)
		}
		last = st.status == store.StatusIdle && !st.paused
		for _, o := range st.open() {
			last = last && (o.event == c.event || !waits[o.event] && !o.waitsForPerson())
		}
	})
	if !last {
		return nil, nil
	}
	return d.running(), nil
}

// logOnly takes an answer into the log that nothing waits for any more: it was
// accepted, then the call was closed by an interrupt.
func (d *driver) logOnly(ctx context.Context, r store.Inbox) error {
	_, err := d.append(ctx, store.Append{Entries: []store.Draft{processed(r)}, Consume: []string{r.ID}})
	return err
}

func (d *driver) clientAnswer(ctx context.Context, r store.Inbox) error {
	var ev clientEvent
	if err := json.Unmarshal(r.Body, &ev); err != nil {
		return err
	}
	c := d.openCall(ev.target())
	if c == nil {
		return d.logOnly(ctx, r)
	}
	content := ev.Content
	if len(blocksOf(content)) == 0 {
		content = text(noOutput)
	}
	on, err := d.goesOn(ctx, c)
	if err != nil {
		return err
	}
	d.consumed = true
	p, err := d.m.cfg.Gateway.ClientAnswer(ctx, d.scope, c.effect, content, ev.IsError, []string{r.ID},
		func(gateway.Answer) []store.Draft { return append([]store.Draft{processed(r)}, on...) })
	return d.progressed(c, p, err)
}

func (d *driver) settle(ctx context.Context, r store.Inbox) error {
	var req struct {
		Effect store.EffectID `json:"effect"`
		SettleRequest
	}
	if err := json.Unmarshal(r.Body, &req); err != nil {
		return err
	}
	d.consumed = true
	var c *call
	d.read(func(st *state) {
		for _, o := range st.open() {
			if o.effect == req.Effect {
				cp := *o
				c = &cp
			}
		}
	})
	var result func(gateway.Answer) []store.Draft
	if c != nil {
		on, err := d.goesOn(ctx, c)
		if err != nil {
			return err
		}
		result = d.result(c, on...)
	}
	// A probe asks the target, which takes its time: an interrupt or a drain
	// does not wait for it, and the row stays for the next look.
	var p gateway.Progress
	var err error
	d.during(ctx, func(soft context.Context) {
		p, err = d.m.cfg.Gateway.Settle(soft, d.scope, req.Effect, req.SettleRequest, []string{r.ID}, result)
		if err != nil && context.Cause(soft) != nil {
			err = store.ErrConflict
		}
	})
	if errors.Is(err, gateway.ErrSettled) {
		_, err := d.append(ctx, store.Append{Consume: []string{r.ID}})
		return err
	}
	if c != nil {
		return d.progressed(c, p, err)
	}
	return err
}

// interrupt closes what is open with honest results and ends the turn. Calls
// that were attempted have run to their answer by now; those in doubt are left
// to the agent as unknown.
func (d *driver) interrupt(ctx context.Context, r store.Inbox) error {
	var open []*call
	var status store.Status
	d.read(func(st *state) {
		for _, c := range st.open() {
			cp := *c
			open = append(open, &cp)
		}
		status = st.status
	})
	for _, c := range open {
		if err := d.abandon(ctx, c); err != nil {
			return err
		}
	}
	drafts := []store.Draft{processed(r)}
	if status != store.StatusIdle || len(open) > 0 {
		drafts = append(drafts, d.idle(stopReason{Type: stopEndTurn}, nil, store.SessionUsage{})...)
	}
	if err := d.m.fault("before_interrupt"); err != nil {
		return err
	}
	if _, err := d.append(ctx, store.Append{Entries: drafts, Consume: []string{r.ID}}); err != nil {
		return err
	}
	return d.m.fault("after_interrupt")
}

// interruptedResult is what the model reads for a call that was never sent.
const interruptedResult = "The user interrupted before this call was made. It did not happen; make it again if it is still wanted."

// interruptedRead is what it reads for a read, which may have been under way.
const interruptedRead = "The user interrupted before an answer came. The call only reads: make it again if it is still wanted."

// abandon closes one open call.
func (d *driver) abandon(ctx context.Context, c *call) error {
	if c.tool != "" {
		return d.abandonContained(ctx, c)
	}
	if c.effect == "" {
		ds := d.result(c)(gateway.Answer{IsError: true, Content: text(interruptedResult)})
		_, err := d.append(ctx, store.Append{Entries: ds})
		return err
	}
	e, err := d.m.db.Effect(ctx, d.ws, c.effect)
	if err != nil {
		return err
	}
	var p gateway.Progress
	if e.Client && e.State == store.StateIntended {
		return d.abandonClient(ctx, c)
	}
	switch e.State {
	case store.StateAwaitingApproval, store.StateIntended:
		reason := interruptedResult
		if e.Class == store.ClassRead && e.State == store.StateIntended {
			reason = interruptedRead
		}
		p, err = d.m.cfg.Gateway.Void(ctx, d.scope, c.effect, reason, nil, d.result(c))
	default:
		p, err = d.m.cfg.Gateway.Settle(ctx, d.scope, c.effect, SettleRequest{Outcome: "tell", Person: "user"}, nil, d.result(c))
	}
	return d.progressed(c, p, err)
}

// abandonClient closes a call that the client performs. Whether it did is not
// known here: the effect is in doubt, and told so.
func (d *driver) abandonClient(ctx context.Context, c *call) error {
	a := gateway.Answer{Effect: c.effect, IsError: true, Content: text(fmt.Sprintf(
		"The user interrupted before the client answered. Whether the client did it is unknown (%s); do not repeat it without asking.", c.effect))}
	drafts := append([]store.Draft{
		record(store.KindDoubt, string(c.effect), d.scope.Thread, store.Doubt{V: store.BodyVersion, Effect: c.effect, Reason: "interrupted"}),
		record(store.KindSettlement, string(c.effect), d.scope.Thread, store.Settlement{V: store.BodyVersion, Effect: c.effect, Outcome: store.Told, By: "person"}),
	}, d.result(c)(a)...)
	_, err := d.append(ctx, store.Append{Entries: drafts,
		Effects: []store.EffectIs{{ID: c.effect, States: []store.EffectState{store.StateIntended}}}})
	return err
}
