package keeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/store"
)

// Result is how a call stands after it was performed.
type Result struct {
	Verdict effect.Verdict
	Answer  Answer
	Reason  string // why it was refused or is in doubt
	// Open: nothing was committed, the effect stands where it stood: it was sent
	// again, or could not be, and an earlier send may have happened.
	Open bool
}

// End makes the entries that are committed together with the completion.
type End func(Result) []store.Draft

// Perform attempts and sends the intended effect e once and commits its end,
// or its doubt. The write order, with what a crash right after each step
// leaves:
//
//  1. connection made, listing checked: reads; the intent stands.
//  2. attempt committed (irreversible): in doubt for the next owner.
//  3. ticket spent, request written: in doubt.
//  4. completion and result committed in one append: done.
//
// When ctx ends before step 2 nothing is committed and ctx's error is
// returned; from there on a non-read runs to its answer or deadline. A class
// read runs no step 2, ends with ctx, and its completion is relaxed. Other
// errors: of the store, or of a fault.
func (k *Keeper) Perform(ctx context.Context, lease *store.Lease, e *effect.Known, t Target, end End) (Result, error) {
	began := time.Now()
	if err := ctx.Err(); err != nil {
		return Result{}, context.Cause(ctx)
	}
	req := request(e)
	c, l, err := k.prepare(ctx, t, req)
	if err != nil {
		if ctx.Err() != nil {
			return Result{}, context.Cause(ctx)
		}
		return k.unsent(ctx, lease, e, err, end, began)
	}
	res, err := k.sendOnce(ctx, lease, e, c, l, req, end)
	if err == nil {
		k.observe(e, res.Verdict, time.Since(began))
	}
	return res, err
}

func (k *Keeper) observe(e *effect.Known, v effect.Verdict, elapsed time.Duration) {
	if k.cfg.Observe != nil {
		k.cfg.Observe(e.Effect, v, elapsed)
	}
}

func request(e *effect.Known) Request {
	req := Request{Tool: e.Tool, ToolHash: e.Header.ToolHash, Arguments: e.Header.Arguments, Timeout: e.Contract.Deadline()}
	if i := e.Contract.Idempotency; i != nil && i.Header != "" {
		req.Header, req.Key = i.Header, e.Key
	}
	return req
}

// ErrChanged: the server's definition of the tool is not the one that was ruled.
var ErrChanged = errors.New("the tool's definition has changed")

// prepare does what may be done before the attempt: connect, compare the
// definition with the ruled one (attack M3), hold a line that lives.
func (k *Keeper) prepare(ctx context.Context, t Target, req Request) (*conn, *line, error) {
	c, err := k.open(ctx, t, false)
	if err != nil {
		return nil, nil, err
	}
	if req.ToolHash != "" {
		tool, ok := c.tool(req.Tool)
		if !ok {
			return nil, nil, fmt.Errorf("%w: %s does not offer %s any more", ErrChanged, t.Server, req.Tool)
		}
		if tool.Digest != req.ToolHash {
			return nil, nil, ErrChanged
		}
	}
	l, err := c.line(ctx)
	if err != nil {
		return nil, nil, &ConnectError{Server: t.Server, Err: c.clean(err)}
	}
	return c, l, nil
}

// unsent ends an effect that found no connection: refused, nothing happened.
// An effect that may have been sent before is not ended by that.
func (k *Keeper) unsent(ctx context.Context, lease *store.Lease, e *effect.Known, cause error, end End, began time.Time) (Result, error) {
	res := refused(cause.Error())
	if k.MayHaveLeft(e, lease) {
		res.Open = true
		return res, nil
	}
	c := store.Completion{Outcome: store.OutcomeRefused, IsError: true, Reason: res.Reason,
		Response: response(res.Answer, nil), ElapsedMS: time.Since(began).Milliseconds()}
	var err error
	if e.Class == store.ClassRead {
		err = k.cfg.Effects.CompleteRead(lease, e.Effect, c, end(res))
	} else {
		err = k.cfg.Effects.RefuseUnsent(ctx, lease, e.Effect, e.Contract.Deadline(), c, end(res))
	}
	if err != nil {
		return Result{}, err
	}
	k.observe(e, res.Verdict, time.Since(began))
	return res, nil
}

// MayHaveLeft reports whether e may have reached its target although no attempt
// is on record, so that a refusal of one more send proves nothing: an
// idempotent effect of an older fence, one in doubt, or one that this process
// has sent.
func (k *Keeper) MayHaveLeft(e *effect.Known, lease *store.Lease) bool {
	if e.Class != store.ClassIdempotent {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return e.State == store.StateInDoubt || e.IntentFence != lease.Fence() || k.left[e.ID]
}

// leaving remembers that an idempotent effect is about to be sent, so that
// under this fence too a later refusal does not pass for proof.
func (k *Keeper) leaving(e *effect.Known) {
	if e.Class == store.ClassIdempotent {
		k.mu.Lock()
		k.left[e.ID] = true
		k.mu.Unlock()
	}
}

func (k *Keeper) ended(e *effect.Known) {
	k.mu.Lock()
	delete(k.left, e.ID)
	k.mu.Unlock()
}

func refused(reason string) Result {
	return Result{Verdict: effect.Refused, Reason: reason,
		Answer: Answer{IsError: true, Content: Text("The call was refused and nothing was done: " + Plain(reason))}}
}

func response(a Answer, raw json.RawMessage) json.RawMessage {
	b, err := json.Marshal(Response{Content: a.Content, Raw: raw})
	if err != nil {
		panic("keeper: encode response: " + err.Error()) // both were decoded before
	}
	return b
}

func (k *Keeper) sendOnce(ctx context.Context, lease *store.Lease, e *effect.Known, c *conn, l *line, req Request, end End) (Result, error) {
	giveBack := func(err error) (Result, error) {
		c.keep(l)
		return Result{}, err
	}
	if err := k.fault("before_attempt"); err != nil {
		return giveBack(err)
	}
	if err := ctx.Err(); err != nil {
		return giveBack(context.Cause(ctx))
	}
	var ticket *effect.Ticket
	if effect.Attempted(e.Class) {
		var err error
		if ticket, err = k.cfg.Effects.Attempt(ctx, lease, e.Effect, req.Timeout); err != nil {
			return giveBack(err)
		}
		e.State, e.Attempts, e.AttemptFence = store.StateAttempted, ticket.N, lease.Fence()
	} else {
		ticket = k.cfg.Effects.Ticket(lease)
	}
	if err := k.fault("after_attempt"); err != nil {
		return giveBack(err)
	}
	again := k.MayHaveLeft(e, lease)
	sendCtx := ctx
	if e.Class != store.ClassRead {
		sendCtx = context.WithoutCancel(ctx)
	}
	var stopped error
	cl := newCall(sendCtx, req, l, func() error {
		if stopped = k.fault("before_send"); stopped != nil {
			return stopped
		}
		if err := ticket.Use(); err != nil {
			return err
		}
		k.leaving(e)
		return nil
	})
	reply := c.send(cl)
	if stopped != nil {
		return Result{}, stopped
	}
	if err := k.fault("after_send"); err != nil {
		return Result{}, err
	}
	if e.Class == store.ClassRead {
		if ctx.Err() != nil && len(reply.Result) == 0 {
			return Result{}, context.Cause(ctx)
		}
		return k.endRead(lease, e, cl, reply, end)
	}
	return k.endSent(ctx, lease, e, cl, sentAs{ticket.N, again}, reply, end)
}

// sentAs says which attempt a send was, and whether it was not the first.
type sentAs struct {
	n     int
	again bool
}

// endRead commits a read's end, whatever came: it may be asked again by a new call.
func (k *Keeper) endRead(lease *store.Lease, e *effect.Known, cl *call, reply effect.Reply, end End) (Result, error) {
	v, reason := e.Contract.Judge(reply)
	res := k.result(v, reason, reply)
	outcome := store.OutcomeOK
	if v == effect.Refused {
		outcome = store.OutcomeRefused
	}
	if v == effect.InDoubt {
		res.Verdict = effect.OK
		res.Answer = Answer{IsError: true, Content: Text("The call gave no usable answer (" + Plain(reason) + "). It only reads: it may be called again.")}
	}
	c := completion(res, reply, cl, 0, outcome)
	if err := k.fault("before_completion"); err != nil {
		return Result{}, err
	}
	if err := k.cfg.Effects.CompleteRead(lease, e.Effect, c, end(res)); err != nil {
		return Result{}, err
	}
	return res, k.fault("after_completion")
}

// endSent commits a non-read's completion or its doubt.
func (k *Keeper) endSent(ctx context.Context, lease *store.Lease, e *effect.Known, cl *call, as sentAs, reply effect.Reply, end End) (Result, error) {
	v, reason := e.Contract.Judge(reply)
	res := k.result(v, reason, reply)
	if v == effect.Refused && as.again {
		res.Open = true // refused this time; an earlier send may have happened
		return res, nil
	}
	if err := k.fault("before_completion"); err != nil {
		return Result{}, err
	}
	var err error
	switch v {
	case effect.InDoubt:
		if e.State == store.StateInDoubt {
			res.Open = true // it was sent again and is in doubt still
			return res, nil
		}
		err = k.cfg.Effects.Doubt(ctx, lease, e.Effect, store.Doubt{N: as.n, Reason: reason},
			store.StateAttempted, store.StateIntended)
	case effect.Refused:
		err = k.cfg.Effects.Complete(ctx, lease, e.Effect, completion(res, reply, cl, as.n, store.OutcomeRefused), end(res))
	default:
		err = k.cfg.Effects.Complete(ctx, lease, e.Effect, completion(res, reply, cl, as.n, store.OutcomeOK), end(res))
	}
	if err != nil {
		return Result{}, err
	}
	k.ended(e)
	return res, k.fault("after_completion")
}

func completion(res Result, reply effect.Reply, cl *call, n int, o store.Outcome) store.Completion {
	return store.Completion{
		N: n, Outcome: o, IsError: res.Answer.IsError, Reason: res.Reason,
		Response: response(res.Answer, reply.Result), SentAt: cl.start.UTC().Truncate(time.Microsecond),
		ElapsedMS: cl.elapsed.Milliseconds(),
	}
}

func (k *Keeper) result(v effect.Verdict, reason string, reply effect.Reply) Result {
	switch v {
	case effect.OK:
		return Result{Verdict: v, Answer: readResult(reply.Result)}
	case effect.Refused:
		if reply.Message != "" {
			reason += ": " + reply.Message
		}
		res := refused(reason)
		if len(reply.Result) > 0 { // an error before execution, by the contract: show what the target said
			res.Answer = readResult(reply.Result)
			res.Answer.IsError = true
		}
		return res
	}
	return Result{Verdict: v, Reason: reason}
}

// Ask makes a call of class read that is no effect of its own: a probe. The
// effect that it asks about is its durable reason. It returns the tool's full
// result, or an error that says why there is none.
func (k *Keeper) Ask(ctx context.Context, lease *store.Lease, t Target, req Request) (json.RawMessage, error) {
	c, l, err := k.prepare(ctx, t, req)
	if err != nil {
		return nil, err
	}
	cl := newCall(ctx, req, l, k.cfg.Effects.Ticket(lease).Use)
	reply := c.send(cl)
	if len(reply.Result) > 0 {
		return reply.Result, nil
	}
	_, reason := effect.Contract{}.Judge(reply)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return nil, fmt.Errorf("ask %s: %s", req.Tool, reason)
}
