package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
)

// Times of settling.
const (
	// firstRetry and lastRetry bound the waits between two probes or resends.
	firstRetry = 500 * time.Millisecond
	lastRetry  = 30 * time.Second
	// patience is how long after the contract's settle time a target that
	// cannot be asked, or does not know, is asked again before a person is.
	patience = 10 * time.Minute
	// probeTime bounds one probe.
	probeTime = 30 * time.Second
)

// inDoubt settles an effect in doubt: evidence, probe, resend, person, in this
// order. asked means that a person wants the probe now.
func (g *Gateway) inDoubt(ctx context.Context, s Scope, k *effect.Known, result Result, asked bool) (Progress, error) {
	if p, done, err := g.byEvidence(ctx, s, k, result); done || err != nil {
		return p, err
	}
	d, at, err := g.doubt(ctx, s, k)
	if err != nil {
		return Progress{}, err
	}
	if k.Contract.Reconcile != nil {
		p, done, err := g.byProbe(ctx, s, k, d, nil, result)
		if done || err != nil {
			return p, err
		}
		if r, again := g.askAgain(k, d, at); again && !asked {
			return r, nil
		}
	}
	if k.Contract.MayResend(k.IntentAt, g.effects.Now()) {
		return g.resend(ctx, s, k, result)
	}
	return g.person(k), nil
}

// person says that all automatic ways have ended.
func (g *Gateway) person(k *effect.Known) Progress {
	g.forget(k.ID)
	if k.Contract.InDoubt == "tell" && !k.Told {
		return Progress{Tell: true}
	}
	return Progress{Person: true}
}

// later asks for time before the next resend, or for a person when the
// target's window will be over.
func (g *Gateway) later(k *effect.Known) Progress {
	at := g.effects.Now().Add(g.backoff(k.ID))
	if !k.Contract.MayResend(k.IntentAt, at) {
		return g.person(k)
	}
	return Progress{RetryAt: at}
}

// backoff is the wait before the next try, twice as long each time.
func (g *Gateway) backoff(id store.EffectID) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := g.tries[id]
	g.tries[id] = min(n+1, 16)
	return min(firstRetry<<n, lastRetry)
}

func (g *Gateway) forget(id store.EffectID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.tries, id)
}

// doubt reads the effect's doubt and looks again for its owner's death if that
// was not proved yet.
func (g *Gateway) doubt(ctx context.Context, s Scope, k *effect.Known) (store.Doubt, time.Time, error) {
	d, at, err := g.effects.DoubtOf(ctx, k)
	if err != nil {
		return store.Doubt{}, at, err
	}
	if d == nil {
		return store.Doubt{}, at, fmt.Errorf("doubt of %s: %w", k.ID, store.ErrDamaged)
	}
	if d.DeadSince.IsZero() && d.Reason == "owner_lost" {
		fence := k.AttemptFence
		if !effect.Attempted(k.Class) {
			fence = k.IntentFence
		}
		if d.DeadSince, err = g.effects.DeadSince(ctx, k.Workspace, k.Session, fence, s.Lease.Node()); err != nil {
			return *d, at, err
		}
	}
	return *d, at, nil
}

// believeAt is from when a probe's "did not happen" counts: the contract's
// settle time after the attempting process was proved dead, or, if it was not,
// after send_by and the deadline, since the request may still be on its way
// through the target (attack E13).
func believeAt(k *effect.Known, d store.Doubt, at time.Time) time.Time {
	base := d.DeadSince
	if base.IsZero() {
		base = at // no attempt: from the doubt
		if !k.SendBy.IsZero() {
			base = k.SendBy
		}
		base = base.Add(k.Contract.Deadline())
	}
	return base.Add(k.Contract.Settle())
}

// byEvidence settles by what came in late. A late answer is proof of either
// outcome; where late ones disagree, what happened has happened.
func (g *Gateway) byEvidence(ctx context.Context, s Scope, k *effect.Known, result Result) (Progress, bool, error) {
	learnt, err := g.effects.EvidenceOf(ctx, k.Effect)
	if err != nil {
		return Progress{}, false, err
	}
	var proof *effect.Learnt
	for i := range learnt {
		ev := &learnt[i]
		if proves(k.Effect, ev.Evidence) && (ev.Says == happened || proof == nil || proof.Says != happened) {
			proof = ev
		}
	}
	if proof == nil {
		return Progress{}, false, nil
	}
	by := "late"
	if proof.Kind == "probe" || proof.Kind == "person" {
		by = proof.Kind
	}
	set := store.Settlement{Outcome: proof.Says, By: by, Reason: proof.Detail, Response: proof.Response, IsError: proof.IsError}
	a := didNotHappen(k.ID, how(by, proof.Detail))
	if proof.Says == happened {
		a = didHappen(k.ID, how(by, proof.Detail), proof.Response, proof.IsError)
	}
	p, err := g.settle(ctx, s, k, effect.Settling{Settlement: set}, a, result)
	return p, true, err
}

// proves reports whether evidence settles an effect in doubt. That one send did
// not happen proves it only of a class that is sent once: an idempotent effect
// may have been sent again by another owner meanwhile.
func proves(e store.Effect, ev store.Evidence) bool {
	return ev.Says == happened || ev.Says == notHappened && ev.Kind == "late" && effect.Attempted(e.Class)
}

// byProbe asks the target what happened. It is a read, its answer a record of
// evidence; done means that the effect is settled.
func (g *Gateway) byProbe(ctx context.Context, s Scope, k *effect.Known, d store.Doubt, consume []string, result Result) (p Progress, done bool, err error) {
	ev, err := g.probe(ctx, s, k)
	if err != nil {
		return Progress{}, false, err
	}
	_, at, err := g.effects.DoubtOf(ctx, k)
	if err != nil {
		return Progress{}, false, err
	}
	set := effect.Settling{Evidence: &ev, Consume: consume}
	switch {
	case ev.Says == happened:
		why := "the target shows it (" + k.Contract.Reconcile.Tool + ")"
		set.Settlement = store.Settlement{Outcome: happened, By: "probe", Reason: why}
		p, err = g.settle(ctx, s, k, set, didHappen(k.ID, why, nil, false), result)
		return p, true, err
	case ev.Says == notHappened && !g.effects.Now().Before(believeAt(k, d, at)):
		why := "the target shows nothing of it (" + k.Contract.Reconcile.Tool + ")"
		set.Settlement = store.Settlement{Outcome: notHappened, By: "probe", Reason: why}
		p, err = g.settle(ctx, s, k, set, didNotHappen(k.ID, why), result)
		return p, true, err
	}
	return Progress{}, false, g.note(ctx, s, k, ev, consume)
}

// note records what a probe said where it is news.
func (g *Gateway) note(ctx context.Context, s Scope, k *effect.Known, ev store.Evidence, consume []string) error {
	if len(consume) == 0 {
		learnt, err := g.effects.EvidenceOf(ctx, k.Effect)
		if err != nil {
			return err
		}
		if n := len(learnt); n > 0 && learnt[n-1].Kind == ev.Kind && learnt[n-1].Says == ev.Says && learnt[n-1].Detail == ev.Detail {
			return nil
		}
	}
	return g.effects.Record(ctx, s.Lease, k.Effect, ev, consume)
}

// askAgain says when to probe next, or false when the target had its time.
func (g *Gateway) askAgain(k *effect.Known, d store.Doubt, at time.Time) (Progress, bool) {
	now, believe := g.effects.Now(), believeAt(k, d, at)
	if !now.Before(believe.Add(patience)) {
		return Progress{}, false
	}
	if k.Contract.MayResend(k.IntentAt, now) {
		return Progress{}, false // a resend is safe and settles it at once
	}
	next := now.Add(g.backoff(k.ID))
	if now.Before(believe) && next.After(believe) {
		next = believe
	}
	return Progress{RetryAt: next}, true
}

// probe asks once. A target that cannot be asked says "unknown"; the error is
// ctx's or the store's.
func (g *Gateway) probe(ctx context.Context, s Scope, k *effect.Known) (store.Evidence, error) {
	r := k.Contract.Reconcile
	unknown := func(why string) store.Evidence {
		return store.Evidence{Kind: "probe", Says: "unknown", Detail: why}
	}
	args, err := effect.Fill(r.Arguments, effect.Facts{Arguments: k.Header.Arguments, Key: k.Key, Effect: k.ID, IntendedAt: k.IntentAt})
	if err != nil {
		return unknown(err.Error()), nil
	}
	p, err := g.peerOf(ctx, s, k.Header)
	var se *ServerError
	if errors.As(err, &se) {
		return unknown(se.Error()), nil
	}
	if err != nil {
		return store.Evidence{}, err
	}
	pctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	res, err := g.keeper.Ask(pctx, s.Lease, p.target, keeper.Request{Tool: r.Tool, Arguments: args, Timeout: probeTime})
	if ctx.Err() != nil {
		return store.Evidence{}, context.Cause(ctx)
	}
	if err != nil {
		return unknown(err.Error()), nil
	}
	yes, no := effect.Hold(r.Happened, res), effect.Hold(r.NotHappened, res)
	ev := store.Evidence{Kind: "probe", Response: res}
	switch {
	case yes && no:
		ev.Says, ev.Detail = "unknown", "the answer of "+r.Tool+" fits both"
	case yes:
		ev.Says, ev.Detail = happened, "the answer of "+r.Tool+" says so"
	case no:
		ev.Says, ev.Detail = notHappened, "the answer of "+r.Tool+" says so"
	default:
		ev.Says, ev.Detail = "unknown", "the answer of "+r.Tool+" says neither"
	}
	return ev, nil
}

// resend sends an idempotent effect in doubt again under its key.
func (g *Gateway) resend(ctx context.Context, s Scope, k *effect.Known, result Result) (Progress, error) {
	p, err := g.peerOf(ctx, s, k.Header)
	var se *ServerError
	if errors.As(err, &se) {
		return g.later(k), nil
	}
	if err != nil {
		return Progress{}, err
	}
	return g.perform(ctx, s, k, p, result)
}

// SettleRequest is a person's word on an effect in doubt.
type SettleRequest struct {
	Outcome  string          `json:"outcome"` // happened, did_not_happen, probe, tell
	Response json.RawMessage `json:"response,omitempty"`
	Evidence string          `json:"evidence,omitempty"`
	Person   string          `json:"person"` // principal
}

// Settle applies a person's settlement, consuming the inbox rows that brought
// it (may be none). tell leaves the effect in doubt (store.Told) and ends the
// tool use with "outcome unknown, eff_…, do not repeat". result is nil when
// the tool use was closed before. ErrSettled when the effect is not in doubt.
func (g *Gateway) Settle(ctx context.Context, s Scope, id store.EffectID, r SettleRequest, consume []string, result func(Answer) []store.Draft) (Progress, error) {
	release, err := g.take(ctx, id)
	if err != nil {
		return Progress{}, err
	}
	defer release()
	k, err := g.effects.Load(ctx, s.workspace(), id)
	if err != nil {
		return Progress{}, err
	}
	// A person's word also reaches an effect whose sender is gone and that
	// nobody has called in doubt yet.
	if k.Session == s.Lease.Session() && k.State == store.StateAttempted {
		if err := g.lost(ctx, s, k); err != nil {
			return Progress{}, err
		}
	}
	if k.Session != s.Lease.Session() || k.State != store.StateInDoubt {
		return Progress{}, fmt.Errorf("settle %s, which is %s: %w", id, k.State, ErrSettled)
	}
	p, err := g.bySomeone(ctx, s, k, r, consume, result)
	if errors.Is(err, store.ErrConflict) {
		if now, lerr := g.db.Effect(ctx, s.workspace(), id); lerr == nil && now.State != store.StateInDoubt {
			return p, fmt.Errorf("settle %s, which is %s: %w", id, now.State, ErrSettled)
		}
	}
	return p, err
}

func (g *Gateway) bySomeone(ctx context.Context, s Scope, k *effect.Known, r SettleRequest, consume []string, result Result) (Progress, error) {
	set := effect.Settling{Consume: consume, Settlement: store.Settlement{
		Outcome: r.Outcome, By: "person", Person: r.Person, Reason: r.Evidence, Response: r.Response}}
	why := "a person has settled it"
	if r.Evidence != "" {
		why += " (" + r.Evidence + ")"
	}
	switch r.Outcome {
	case happened:
		return g.settle(ctx, s, k, set, didHappen(k.ID, why, r.Response, false), result)
	case notHappened:
		set.Response = nil
		return g.settle(ctx, s, k, set, didNotHappen(k.ID, why), result)
	case "tell":
		set.Outcome, set.Response = store.Told, nil
		a := Answer{Effect: k.ID, Content: keeper.Text(told(k.ID))}
		set.Extra = drafts(result, a)
		if err := g.effects.Settle(ctx, s.Lease, k.Effect, set); err != nil {
			return Progress{}, err
		}
		return Progress{Done: true, Answer: a}, nil
	case "probe":
		return g.probeNow(ctx, s, k, consume, result)
	}
	return Progress{}, fmt.Errorf("settle %s: outcome %q is none of happened, did_not_happen, probe, tell", k.ID, r.Outcome)
}

// probeNow asks the target because a person wants it.
func (g *Gateway) probeNow(ctx context.Context, s Scope, k *effect.Known, consume []string, result Result) (Progress, error) {
	if k.Contract.Reconcile == nil {
		ev := store.Evidence{Kind: "probe", Says: "unknown", Detail: "the tool's contract has no reconcile call"}
		if err := g.effects.Record(ctx, s.Lease, k.Effect, ev, consume); err != nil {
			return Progress{}, err
		}
		return g.person(k), nil
	}
	d, at, err := g.doubt(ctx, s, k)
	if err != nil {
		return Progress{}, err
	}
	p, done, err := g.byProbe(ctx, s, k, d, consume, result)
	if done || err != nil {
		return p, err
	}
	if r, again := g.askAgain(k, d, at); again {
		return r, nil
	}
	return g.person(k), nil
}

// Void ends an effect that was never sent (awaiting approval, or intended and
// proved unsent) because it is no longer wanted: denied or interrupted.
// reason is what the model is told. An idempotent effect that may have left is
// not voided: it is in doubt, and its tool use ends with "outcome unknown".
func (g *Gateway) Void(ctx context.Context, s Scope, id store.EffectID, reason string, consume []string, result func(Answer) []store.Draft) (Progress, error) {
	release, err := g.take(ctx, id)
	if err != nil {
		return Progress{}, err
	}
	defer release()
	k, err := g.effects.Load(ctx, s.workspace(), id)
	if err != nil {
		return Progress{}, err
	}
	a := Answer{Effect: id, Outcome: store.OutcomeRefused, IsError: true, Content: keeper.Text(keeper.Plain(reason))}
	switch {
	case k.Session != s.Lease.Session():
		return Progress{}, fmt.Errorf("void %s: %w", id, store.ErrNotFound)
	case k.State == store.StateProposed || k.State == store.StateAwaitingApproval:
		if err := g.effects.Deny(ctx, s.Lease, k, reason, drafts(result, a), consume); err != nil {
			return Progress{}, err
		}
		if g.cfg.Settled != nil {
			g.cfg.Settled(k.Effect, store.StateDenied)
		}
		return Progress{Done: true, Answer: a}, nil
	case k.State != store.StateIntended:
		return Progress{}, fmt.Errorf("void %s, which is %s: %w", id, k.State, store.ErrConflict)
	case g.keeper.MayHaveLeft(k, s.Lease):
		if err := g.lost(ctx, s, k); err != nil {
			return Progress{}, err
		}
		return g.bySomeone(ctx, s, k, SettleRequest{Outcome: "tell", Evidence: reason}, consume, result)
	}
	return g.settle(ctx, s, k, effect.Settling{
		Settlement: store.Settlement{Outcome: notHappened, By: "recovery", Reason: reason},
		Consume:    consume, From: []store.EffectState{store.StateIntended},
	}, a, result)
}

// ClientAnswer completes a client effect with what the client sent.
func (g *Gateway) ClientAnswer(ctx context.Context, s Scope, id store.EffectID, content json.RawMessage, isError bool, consume []string, result func(Answer) []store.Draft) (Progress, error) {
	release, err := g.take(ctx, id)
	if err != nil {
		return Progress{}, err
	}
	defer release()
	k, err := g.effects.Load(ctx, s.workspace(), id)
	if err != nil {
		return Progress{}, err
	}
	if !k.Client || k.Session != s.Lease.Session() {
		return Progress{}, fmt.Errorf("answer %s, which the client does not perform: %w", id, store.ErrConflict)
	}
	if !blocks(content) {
		content = keeper.Text("(no output)")
	}
	kept, err := json.Marshal(keeper.Response{Content: content})
	if err != nil {
		return Progress{}, fmt.Errorf("answer %s: %w", id, err)
	}
	a := Answer{Effect: id, Outcome: store.OutcomeOK, IsError: isError, Content: content}
	err = g.effects.CompleteClient(ctx, s.Lease, k.Effect, store.Completion{
		Outcome: store.OutcomeOK, IsError: isError, Response: kept,
		ElapsedMS: g.effects.Now().Sub(k.IntentAt).Milliseconds(),
	}, drafts(result, a), consume)
	if err != nil {
		return Progress{}, err
	}
	if g.cfg.Settled != nil {
		g.cfg.Settled(k.Effect, store.StateCompleted)
	}
	return Progress{Done: true, Answer: a}, nil
}

// Evidence records late evidence from the inbox, consuming its row. It changes
// no state; Continue judges it. An effect that was left to the agent has nobody
// who continues it, so proof settles it here. Evidence against a settlement
// changes nothing, but alarms.
func (g *Gateway) Evidence(ctx context.Context, s Scope, e store.Evidence, consume []string) error {
	release, err := g.take(ctx, e.Effect)
	if err != nil {
		return err
	}
	defer release()
	row, err := g.db.Effect(ctx, s.workspace(), e.Effect)
	if err != nil {
		return err
	}
	if effect.Contradicts(row, e.Says) {
		e.Contradicts = true
		g.log.Error("evidence contradicts how an effect was settled", slog.String("session", string(row.Session)),
			slog.String("effect", string(row.ID)), slog.String("says", e.Says), slog.String("state", string(row.State)))
		if g.cfg.Contradicted != nil {
			g.cfg.Contradicted(row)
		}
	}
	if row.State != store.StateInDoubt || !row.Told || row.Session != s.Lease.Session() || !proves(row, e) {
		return g.effects.Record(ctx, s.Lease, row, e, consume)
	}
	set := store.Settlement{Outcome: e.Says, By: "late", Reason: e.Detail, Response: e.Response, IsError: e.IsError}
	_, err = g.settle(ctx, s, &effect.Known{Effect: row}, effect.Settling{Settlement: set, Evidence: &e, Consume: consume}, Answer{}, nil)
	return err
}
