package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
)

// Result makes the entries committed in one append with an effect's end.
type Result = func(Answer) []store.Draft

// Continue does what an open effect needs next, the same after a crash as
// before one: an intent is attempted and sent (checked again first when it is
// of an older fence), an idempotent one is sent again inside its window, an
// attempt of an older fence becomes in doubt, an effect in doubt is settled
// by evidence, probe or resend. result makes the entries (tool result event)
// committed in one append with the end. When ctx ends before anything was
// sent, nothing is committed and ctx's error is returned; once a non-read was
// sent it runs to its answer or deadline whatever ctx does. A read's end is
// committed relaxed. For an effect that has ended already the answer is
// returned and result is not called.
func (g *Gateway) Continue(ctx context.Context, s Scope, id store.EffectID, result func(Answer) []store.Draft) (Progress, error) {
	p, err := g.goOn(ctx, s, id, result)
	if err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return Progress{}, context.Cause(ctx)
	}
	return p, err
}

func (g *Gateway) goOn(ctx context.Context, s Scope, id store.EffectID, result Result) (Progress, error) {
	release, err := g.take(ctx, id)
	if err != nil {
		return Progress{}, err
	}
	defer release()
	k, err := g.effects.Load(ctx, s.workspace(), id)
	if err != nil {
		return Progress{}, err
	}
	if k.Session != s.Lease.Session() {
		return Progress{}, fmt.Errorf("continue %s: %w", id, store.ErrNotFound)
	}
	switch k.State {
	case store.StateCompleted, store.StateVoid, store.StateDenied:
		a, err := g.ended(ctx, k.Effect)
		return Progress{Done: err == nil, Answer: a}, err
	case store.StateProposed, store.StateAwaitingApproval:
		return Progress{Person: true}, nil
	case store.StateIntended:
		if k.Client {
			return Progress{Person: true}, nil
		}
		return g.intended(ctx, s, k, result)
	case store.StateAttempted:
		// Nobody sends it in this process: we are its one worker. So its sender
		// is gone, or has lost its answer.
		if err := g.lost(ctx, s, k); err != nil {
			return Progress{}, err
		}
		return g.inDoubt(ctx, s, k, result, false)
	case store.StateInDoubt:
		return g.inDoubt(ctx, s, k, result, false)
	}
	return Progress{}, fmt.Errorf("continue %s: state %q: %w", id, k.State, store.ErrDamaged)
}

// lost makes an effect in doubt whose sender left no end.
func (g *Gateway) lost(ctx context.Context, s Scope, k *effect.Known) error {
	fence := k.AttemptFence
	if !effect.Attempted(k.Class) {
		fence = k.IntentFence
	}
	d := store.Doubt{N: k.Attempts, Reason: "answer_lost", Detail: "the answer was not recorded"}
	if fence != s.Lease.Fence() {
		dead, err := g.effects.DeadSince(ctx, k.Workspace, k.Session, fence, s.Lease.Node())
		if err != nil {
			return err
		}
		d.Reason, d.Detail, d.DeadSince = "owner_lost", "the process that sent it is gone", dead
	}
	if err := g.effects.Doubt(ctx, s.Lease, k.Effect, d, k.State); err != nil {
		return err
	}
	k.State = store.StateInDoubt
	return nil
}

// intended goes on with an intent that has no attempt.
func (g *Gateway) intended(ctx context.Context, s Scope, k *effect.Known, result Result) (Progress, error) {
	p, err := g.peerOf(ctx, s, k.Header)
	var se *ServerError
	if errors.As(err, &se) {
		return g.voidUnsent(ctx, s, k, "the call was not sent: "+se.Error(), result)
	}
	if err != nil {
		return Progress{}, err
	}
	if k.IntentFence != s.Lease.Fence() {
		// The owner of the intent is gone. An irreversible one is proved unsent, and
		// checked again before it goes; an idempotent one counts as attempted.
		if k.Class == store.ClassIdempotent {
			if k.Contract.Reconcile != nil || !k.Contract.MayResend(k.IntentAt, g.effects.Now()) {
				if err := g.lost(ctx, s, k); err != nil {
					return Progress{}, err
				}
				return g.inDoubt(ctx, s, k, result, false)
			}
		} else if why := g.recheck(p, k); why != "" {
			return g.voidUnsent(ctx, s, k, "the call was not sent before the server stopped, and "+why+" since. Make it again if it is still wanted", result)
		}
	}
	return g.perform(ctx, s, k, p, result)
}

// recheck says why an intent of an older fence may not go any more.
func (g *Gateway) recheck(p *peer, k *effect.Known) string {
	if k.Class == store.ClassRead {
		return ""
	}
	if k.Approved != "" && g.effects.Now().Sub(k.IntentAt) > approvalAge {
		return "its approval has expired"
	}
	return changed(p, k)
}

// voidUnsent ends an intent that is proved unsent. For an idempotent one that
// may have left nothing is proved: it is in doubt.
func (g *Gateway) voidUnsent(ctx context.Context, s Scope, k *effect.Known, reason string, result Result) (Progress, error) {
	if g.keeper.MayHaveLeft(k, s.Lease) {
		if err := g.lost(ctx, s, k); err != nil {
			return Progress{}, err
		}
		return g.inDoubt(ctx, s, k, result, false)
	}
	a := refusal(k.ID, reason)
	return g.settle(ctx, s, k, effect.Settling{
		Settlement: store.Settlement{Outcome: notHappened, By: "recovery", Reason: reason},
		From:       []store.EffectState{store.StateIntended},
	}, a, result)
}

// perform sends an effect once and says where it stands then.
func (g *Gateway) perform(ctx context.Context, s Scope, k *effect.Known, p *peer, result Result) (Progress, error) {
	was := k.State
	res, err := g.keeper.Perform(ctx, s.Lease, k, p.target, func(r keeper.Result) []store.Draft {
		return drafts(result, answerOf(k.ID, r))
	})
	if err != nil {
		return Progress{}, err
	}
	switch {
	case res.Open && was == store.StateIntended:
		// Sent again without an end: record that it is in doubt, then wait for
		// another way.
		d := store.Doubt{Reason: "refused_again", Detail: res.Reason}
		if err := g.effects.Doubt(ctx, s.Lease, k.Effect, d, store.StateIntended); err != nil {
			return Progress{}, err
		}
		k.State = store.StateInDoubt
		return g.later(k), nil
	case res.Open:
		return g.later(k), nil
	case res.Verdict == effect.InDoubt:
		k.State = store.StateInDoubt
		return g.inDoubt(ctx, s, k, result, false)
	}
	g.forget(k.ID)
	return Progress{Done: true, Answer: answerOf(k.ID, res)}, nil
}

func answerOf(id store.EffectID, r keeper.Result) Answer {
	a := Answer{Effect: id, Outcome: store.OutcomeOK, IsError: r.Answer.IsError, Content: r.Answer.Content, Whole: r.Answer.Whole}
	if r.Verdict == effect.Refused {
		a.Outcome = store.OutcomeRefused
	}
	return a
}

func drafts(result Result, a Answer) []store.Draft {
	if result == nil {
		return nil
	}
	return result(a)
}

// Words of settlements in the log.
const (
	happened    = "happened"
	notHappened = "did_not_happen"
)

// settle commits a settlement and says that the effect is done.
func (g *Gateway) settle(ctx context.Context, s Scope, k *effect.Known, set effect.Settling, a Answer, result Result) (Progress, error) {
	set.Extra = drafts(result, a)
	if err := g.effects.Settle(ctx, s.Lease, k.Effect, set); err != nil {
		return Progress{}, err
	}
	g.forget(k.ID)
	if g.cfg.Settled != nil {
		state := store.StateVoid
		if set.Outcome == happened {
			state = store.StateCompleted
		}
		g.cfg.Settled(k.Effect, state)
	}
	return Progress{Done: true, Answer: a}, nil
}

func refusal(id store.EffectID, reason string) Answer {
	return Answer{Effect: id, Outcome: store.OutcomeRefused, IsError: true, Content: keeper.Text("Nothing was done: " + keeper.Plain(reason) + ".")}
}

// told is what the model learns of an effect whose outcome nobody knows. It
// says neither that it failed nor that it worked (law L4).
func told(id store.EffectID) string {
	return fmt.Sprintf("Outcome unknown (%s): the call was sent, and whether it happened cannot be found out now. Do not repeat it. Check the target by other means, or go on without it.", id)
}

// didNotHappen is what the model learns of a call that proved not to have happened.
func didNotHappen(id store.EffectID, how string) Answer {
	return Answer{Effect: id, Outcome: store.OutcomeRefused, IsError: true, Content: keeper.Text(fmt.Sprintf(
		"It did not happen (%s): %s. If it is still wanted, make the call again; that is a new call.", id, keeper.Plain(how)))}
}

// didHappen is what the model learns of a call that proved to have happened.
func didHappen(id store.EffectID, how string, response json.RawMessage, isError bool) Answer {
	a := Answer{Effect: id, Outcome: store.OutcomeOK, IsError: isError}
	if content := contentOf(response); content != nil {
		a.Content = content
		return a
	}
	a.Content = keeper.Text(fmt.Sprintf("It happened (%s): %s. The tool's own answer is not known. Do not repeat it.", id, keeper.Plain(how)))
	return a
}

// contentOf reads content blocks out of a kept response or a person's: an
// object with content, or a list of blocks, or any other JSON as text.
func contentOf(response json.RawMessage) json.RawMessage {
	if len(response) == 0 || string(response) == "null" {
		return nil
	}
	var kept keeper.Response
	if json.Unmarshal(response, &kept) == nil && blocks(kept.Content) {
		return kept.Content
	}
	if blocks(response) {
		return response
	}
	var text string
	if json.Unmarshal(response, &text) != nil {
		text = string(response)
	}
	if text = keeper.Plain(text); text == "" {
		return nil
	}
	return keeper.Text(text)
}

// blocks reports whether raw is a list of at least one content block.
func blocks(raw json.RawMessage) bool {
	var bs []struct {
		Type string `json:"type"`
	}
	return json.Unmarshal(raw, &bs) == nil && len(bs) > 0 && bs[0].Type != ""
}

// ended is the answer of an effect that has ended.
func (g *Gateway) ended(ctx context.Context, e store.Effect) (Answer, error) {
	if e.State == store.StateDenied {
		return refusal(e.ID, "the call was denied"), nil
	}
	c, set, err := g.effects.EndOf(ctx, e)
	if err != nil {
		return Answer{}, err
	}
	if c != nil {
		a := Answer{Effect: e.ID, Outcome: c.Outcome, IsError: c.IsError, Content: contentOf(c.Response)}
		if a.Content == nil {
			a.Content = keeper.Text("(no output)")
		}
		return a, nil
	}
	if set.Outcome == happened {
		return didHappen(e.ID, how(set.By, set.Reason), set.Response, set.IsError), nil
	}
	return didNotHappen(e.ID, how(set.By, set.Reason)), nil
}

// how says in words how a settlement was reached.
func how(by, reason string) string {
	if reason != "" {
		return reason
	}
	switch by {
	case "person":
		return "a person has settled it"
	case "probe":
		return "the target was asked"
	case "resend":
		return "it was sent again under the same key"
	case "late":
		return "its answer came late"
	}
	return "it was never sent"
}

// Waited gives a call the outcome of the effect that it repeats (design
// section 4, step 3a); until is when to ask again while that effect runs.
func (g *Gateway) Waited(ctx context.Context, s Scope, id store.EffectID) (a Answer, until time.Time, err error) {
	e, err := g.db.Effect(ctx, s.workspace(), id)
	if err != nil {
		return Answer{}, time.Time{}, err
	}
	switch e.State {
	case store.StateCompleted, store.StateVoid, store.StateDenied:
		a, err = g.ended(ctx, e)
		return a, time.Time{}, err
	case store.StateInDoubt:
		if e.Told {
			return Answer{Effect: id, Content: keeper.Text(told(id))}, time.Time{}, nil
		}
	}
	return Answer{}, g.effects.Now().Add(waitedEvery), nil
}

// waitedEvery is how often a call looks for the outcome that it waits for.
const waitedEvery = time.Second
