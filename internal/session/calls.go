package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
)

// maxParallel is how many reads and idempotent calls of one output run at once.
const maxParallel = 16

// result makes the entries that close a call: what came first (a confirmation)
// and the tool result event.
func (d *driver) result(c *call, first ...store.Draft) func(gateway.Answer) []store.Draft {
	id := d.newID("sevt_")
	return func(a gateway.Answer) []store.Draft {
		key := "tool_use_id"
		if c.typ == evMCPToolUse {
			key = "mcp_tool_use_id"
		}
		content := a.Content
		if len(content) == 0 {
			content = text(noOutput)
		}
		return append(first[:len(first):len(first)], event(id, c.resultType(), d.scope.Thread,
			fields{key: c.event, "content": content, "is_error": a.IsError}))
	}
}

// progressed takes the result of a call that is done into the state at once: a
// read's end is still on its way to the log, and the next model request may
// already use it (a crash then loses both).
func (d *driver) progressed(c *call, p gateway.Progress, err error) error {
	if err != nil {
		return err
	}
	if p.Done {
		d.read(func(st *state) { st.close(c.event, p.Answer.Content, p.Answer.IsError) })
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.foldErr
}

// standing is where the open calls of an output stand.
type standing struct {
	blocked []store.EventID // wait for the client or a person
	retryAt time.Time       // zero: none waits for time
	effect  store.EffectID  // one that waits for time
	tool    string
	changed bool // something was closed
	cut     bool // something was cut short: the loop sees why
}

// calls brings the open calls of the newest output forward: what may run runs,
// what waits is waited for. The same code serves a fresh output and one whose
// owner died (recovery, design section 5).
func (d *driver) calls(ctx context.Context) error {
	var open []*call
	var status store.Status
	var stop stopReason
	d.read(func(st *state) {
		for _, c := range st.open() {
			cp := *c
			open = append(open, &cp)
		}
		status, stop = st.status, st.stop
	})
	byID := map[store.EffectID]store.Effect{}
	effects, err := d.m.db.OpenEffects(ctx, d.ws, d.id)
	if err != nil {
		return fmt.Errorf("read open effects: %w", err)
	}
	for _, e := range effects {
		byID[e.ID] = e
	}

	var s standing
	var run, inside []*call
	approvals := 0
	for _, c := range open {
		e, live := byID[c.effect]
		switch {
		case c.waitsForPerson():
			s.blocked = append(s.blocked, c.event)
			approvals++
		case c.tool != "":
			// An act inside never overtakes one that waits for a person.
			if approvals == 0 {
				run, inside = append(run, c), append(inside, c)
			}
		case c.effect == "" || !live:
			run = append(run, c)
		case e.State == store.StateAwaitingApproval, e.Client && e.State == store.StateIntended:
			s.blocked = append(s.blocked, c.event)
			approvals++
		default:
			run = append(run, c)
		}
	}
	if status == store.StatusIdle && approvals > 0 {
		// Some of the answers that the session waits for are in, not all: it goes
		// on waiting and says for which (reference section 9.7). Only effects in
		// doubt are looked at.
		run = only(run, func(c *call) bool { return byID[c.effect].State == store.StateInDoubt })
		inside = nil
	} else if len(run) > 0 && status == store.StatusIdle && (len(inside) > 0 || anyUnsent(run, byID)) {
		if err := d.ensureRunning(ctx); err != nil {
			return err
		}
	}
	if err := d.m.fault("before_calls"); err != nil {
		return err
	}
	if len(inside) > 0 {
		if d.m.cfg.Sandboxes == nil {
			return d.noSandboxes(ctx, inside)
		}
		if ok, err := d.ready(ctx, inside); err != nil || !ok {
			return err
		}
		d.working(ctx)
		run = d.stillWanted(run)
	}
	if err := d.runCalls(ctx, run, byID, &s); err != nil {
		return err
	}
	if err := d.m.fault("after_calls"); err != nil {
		return err
	}
	d.read(func(st *state) {
		for _, c := range open { // the client may have answered meanwhile
			if now := st.call(c.event); now == nil || now.closed {
				s.changed = true
			}
		}
	})
	switch {
	case s.changed, s.cut:
		return nil // the loop looks again
	case len(s.blocked) > 0:
		return d.await(ctx, s, stop)
	case !s.retryAt.IsZero():
		return d.reschedule(ctx, d.doubtError(s), store.Wait{Until: s.retryAt, Reason: "reconcile"})
	}
	return nil
}

// stillWanted drops the calls that were closed while the machine was made.
func (d *driver) stillWanted(run []*call) []*call {
	return only(run, func(c *call) (open bool) {
		d.read(func(st *state) {
			now := st.call(c.event)
			if open = now != nil && !now.closed; open {
				*c = *now
			}
		})
		return open
	})
}

func (d *driver) doubtError(s standing) sessionError {
	return newSessionError("unknown_error", fmt.Sprintf(
		"The outcome of %s (%s) is in doubt. It is not repeated; the target is asked again at %s.",
		s.tool, s.effect, s.retryAt.UTC().Format(time.RFC3339)), "retrying")
}

func only(cs []*call, keep func(*call) bool) []*call {
	var out []*call
	for _, c := range cs {
		if keep(c) {
			out = append(out, c)
		}
	}
	return out
}

func anyUnsent(cs []*call, byID map[store.EffectID]store.Effect) bool {
	for _, c := range cs {
		if byID[c.effect].State == store.StateIntended {
			return true
		}
	}
	return false
}

// await rests with requires_action. A session that already says so, about the
// same calls, is left without a new event.
func (d *driver) await(ctx context.Context, s standing, last stopReason) error {
	var status store.Status
	d.read(func(st *state) { status = st.status })
	if status == store.StatusIdle && last.Type == stopAction && equal(last.EventIDs, s.blocked) && !d.consumed {
		return d.settleDown(ctx, s.retryAt)
	}
	return d.restConsuming(ctx, nil, stopReason{Type: stopAction, EventIDs: s.blocked}, nil, nil, s.retryAt)
}

func equal(a, b []store.EventID) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// runCalls runs calls: reads and idempotent ones beside each other, the others
// one after another in the model's order, so that a later act never overtakes
// an earlier one.
func (d *driver) runCalls(ctx context.Context, run []*call, byID map[store.EffectID]store.Effect, s *standing) error {
	if len(run) == 0 {
		return nil
	}
	contained := slices.ContainsFunc(run, func(c *call) bool { return c.tool != "" })
	var mu sync.Mutex
	var errs []error
	one := func(ctx context.Context, c *call) bool {
		var p gateway.Progress
		err := d.unpanicked(func() (err error) {
			p, err = d.advance(ctx, c, byID[c.effect])
			return err
		})
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil:
			errs = append(errs, err)
			return false
		case p.Done:
			s.changed = true
		case p.Person:
			s.blocked = append(s.blocked, c.event)
		case !p.RetryAt.IsZero():
			if s.retryAt.IsZero() || p.RetryAt.Before(s.retryAt) {
				s.retryAt, s.effect, s.tool = p.RetryAt, c.effect, c.name
			}
		}
		return true
	}
	d.during(ctx, func(soft context.Context) {
		var wg sync.WaitGroup
		sem := make(chan struct{}, maxParallel)
		var chain []*call
		for _, c := range run {
			switch class := byID[c.effect].Class; {
			case class == store.ClassRead, class == store.ClassIdempotent && !contained:
				sem <- struct{}{}
				wg.Go(func() {
					defer func() { <-sem }()
					one(soft, c)
				})
			default:
				chain = append(chain, c)
			}
		}
		for len(chain) > 0 {
			n := readers(chain)
			if !together(chain[:n], func(c *call) bool { return one(soft, c) }) {
				break
			}
			chain = chain[n:]
		}
		wg.Wait()
	})
	err := d.worst(errs)
	s.cut = err == nil && len(errs) > 0
	return err
}

// readers counts the calls at the head of a chain that may run beside each
// other: reading tools inside the machine, else one call.
func readers(chain []*call) int {
	n := 0
	for n < len(chain) && n < maxParallel && reads(chain[n].tool) {
		n++
	}
	return max(n, 1)
}

// together runs calls beside each other and reports whether all went well.
func together(cs []*call, one func(*call) bool) bool {
	if len(cs) == 1 {
		return one(cs[0])
	}
	well := make([]bool, len(cs))
	var wg sync.WaitGroup
	for i, c := range cs {
		wg.Go(func() { well[i] = one(c) })
	}
	wg.Wait()
	return !slices.Contains(well, false)
}

// worst picks the error that decides: what ended the lease or the process
// before what merely cut the work short, which the loop handles.
func (d *driver) worst(errs []error) error {
	var rest error
	for _, err := range errs {
		var dead *crash
		if errors.As(err, &dead) || errors.Is(err, store.ErrFenced) || errors.Is(err, store.ErrDamaged) {
			return err
		}
		if errors.Is(err, context.Canceled) || errors.Is(err, errInterrupted) || errors.Is(err, errPausing) || errors.Is(err, errDraining) || errors.Is(err, errMachineGone) {
			continue
		}
		if rest == nil || errors.Is(rest, store.ErrConflict) {
			rest = err
		}
	}
	return rest
}

// advance brings one call forward.
func (d *driver) advance(ctx context.Context, c *call, e store.Effect) (gateway.Progress, error) {
	if c.tool != "" {
		return d.runContained(ctx, c)
	}
	if c.effect == "" {
		return d.advanceWaiting(ctx, c)
	}
	if e.State == store.StateIntended && (e.Class == store.ClassIrreversible || e.Class == store.ClassMixed) {
		// Output commit: what this call can depend on is durable before it may be
		// attempted, so that no recovery goes back behind it.
		if err := d.durable(ctx); errors.Is(err, errUnsaved) {
			p, err := d.m.cfg.Gateway.Void(ctx, d.scope, c.effect, "The call was not made: "+err.Error()+".", nil, d.result(c))
			return p, d.progressed(c, p, err)
		} else if err != nil {
			return gateway.Progress{}, err
		}
	}
	// An answer that is too long is kept in the machine, and the same short form
	// of it is logged and taken into the state.
	var short *gateway.Answer
	log := d.result(c)
	p, err := d.m.cfg.Gateway.Continue(ctx, d.scope, c.effect, func(a gateway.Answer) []store.Draft {
		a = d.fitted(ctx, c, a)
		short = &a
		return log(a)
	})
	if err == nil && p.Done && short != nil {
		p.Answer = *short
	}
	if err == nil && p.Tell {
		p, err = d.m.cfg.Gateway.Settle(ctx, d.scope, c.effect, SettleRequest{Outcome: "tell", Person: "contract"}, nil, d.result(c))
	}
	return p, d.progressed(c, p, err)
}

// advanceWaiting gives a call the outcome of the effect that it repeats
// (design section 4, step 3a): nothing is sent for it.
func (d *driver) advanceWaiting(ctx context.Context, c *call) (gateway.Progress, error) {
	a, until, err := d.m.cfg.Gateway.Waited(ctx, d.scope, c.waits)
	if err != nil {
		return gateway.Progress{}, err
	}
	if !until.IsZero() {
		return gateway.Progress{RetryAt: until}, nil
	}
	if _, err := d.append(ctx, store.Append{Entries: d.result(c)(a)}); err != nil {
		return gateway.Progress{}, err
	}
	return gateway.Progress{Done: true, Answer: a}, nil
}
