package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/store"
)

// Call is a tool use of the model, to be ruled.
type Call struct {
	Event     store.EventID
	Tool      Tool            // from the recorded listing
	Arguments json.RawMessage // as the model wrote them, maybe not even JSON
	Policy    string          // always_allow, always_ask, auto: resolved by the session from the agent
	Enabled   bool            // false: tool not enabled, denied before any policy
	Known     bool            // false: the model named a tool that nobody offers
	// Client: performed by the client (custom tools, built-in tools of
	// self-hosted environments): class irreversible, intended, never sent by us.
	Client bool
}

// Ruling is what the gateway says of a call.
type Ruling struct {
	Effect store.EffectID    // empty when no effect came of it
	State  store.EffectState // intended, awaiting_approval, denied, or "" (Answer or Waits is set)
	// Waits names the effect whose outcome this call gets (step 3a).
	Waits store.EffectID
	// Drafts are committed with the model output: proposal or intent.
	Drafts []store.Draft
	// Answer is the tool result where nothing is to be done: bad arguments,
	// denied, unknown tool, repeat returned.
	Answer *Answer
	// EvaluatedPermission and Evaluation go on the tool-use event (reference section 9.5).
	EvaluatedPermission string          // allow, ask, deny
	Evaluation          json.RawMessage // nil when refused before any policy
	Class               store.Class
	// Input is the canonical input for the tool-use event (always a JSON
	// object; {"_raw":"…"} when the model's text was not JSON).
	Input json.RawMessage
}

// clientTarget stands for the target of what the client performs.
const clientTarget = "client"

// Rule canonicalises, rules and matches the calls of one model output, in
// order. Nothing is written; Drafts are for the caller's output transaction.
// A call of which a part cannot be found out is denied; an error is the store's.
func (g *Gateway) Rule(ctx context.Context, s Scope, calls []Call) ([]Ruling, error) {
	r := ruler{g: g, s: s, peers: map[string]*peer{}, now: g.effects.Now()}
	out := make([]Ruling, len(calls))
	for i, c := range calls {
		var err error
		if out[i], err = r.rule(ctx, c); err != nil {
			return nil, fmt.Errorf("rule call %s: %w", c.Event, err)
		}
	}
	return out, nil
}

// ruler rules the calls of one output.
type ruler struct {
	g     *Gateway
	s     Scope
	peers map[string]*peer
	now   time.Time
}

// subject is a call on its way through the rules.
type subject struct {
	call     Call
	peer     *peer // nil for a client call
	contract effect.Contract
	header   store.EffectHeader
	key      string
}

func (r *ruler) rule(ctx context.Context, c Call) (Ruling, error) {
	// 1. Canonicalise. Everything later uses this value.
	args, bad := effect.Canonical(c.Arguments)
	out := Ruling{Input: args, EvaluatedPermission: string(policy.Deny)}
	if bad != nil {
		out.Input = rawInput(c.Arguments)
	}
	switch {
	case !c.Known:
		return out.answer(false, "There is no tool of this name."), nil
	case bad != nil:
		return out.answer(false, "The call was not made: "+bad.Error()), nil
	}
	sub, err := r.subject(ctx, c, args)
	var se *ServerError
	switch {
	case errors.As(err, &se):
		return out.answer(false, "The call was not made: "+se.Error()), nil
	case err != nil:
		return out, err
	}
	out.Class = sub.contract.Class
	if !c.Enabled {
		return r.deny(out, sub, "the tool is not enabled")
	}
	if c.Tool.Quarantined != "" {
		return r.deny(out, sub, "the tool is quarantined: "+c.Tool.Quarantined)
	}
	if err := effect.CheckSchema(ctx, c.Tool.InputSchema, sub.header.Arguments); err != nil {
		return out.answer(false, "The call was not made: "+err.Error()), nil
	}
	// 2. Rule.
	perm := policy.Permission{Verdict: policy.Allow}
	if !c.Client {
		perm = policy.Permit(policy.ToolsetMCP, policy.ToolConfig{},
			policy.ToolConfig{Policy: policy.PermissionPolicy(c.Policy)}, string(sub.contract.Class))
		if perm.Verdict == policy.Deny {
			out.Evaluation = evaluation(perm)
			return r.deny(out, sub, perm.Reason)
		}
	}
	// 3. Match.
	if sub.contract.Class != store.ClassRead {
		done, err := r.match(ctx, sub, &out, &perm)
		if err != nil || done {
			return out, err
		}
	}
	return r.admit(out, sub, perm)
}

// rawInput shows what was not a JSON object.
func rawInput(raw json.RawMessage) json.RawMessage {
	b, err := json.Marshal(map[string]string{"_raw": strings.ToValidUTF8(string(raw), "\uFFFD")})
	if err != nil {
		return json.RawMessage("{}")
	}
	return b
}

func (out Ruling) answer(ok bool, text string) Ruling {
	out.Answer = &Answer{Effect: out.Effect, IsError: !ok, Outcome: store.OutcomeRefused, Content: keeper.Text(text)}
	return out
}

// subject finds contract, class, key and digests of a call.
func (r *ruler) subject(ctx context.Context, c Call, args json.RawMessage) (*subject, error) {
	sub := &subject{call: c, contract: effect.Implicit()}
	target := clientTarget
	if !c.Client {
		p, err := r.peer(ctx, c.Tool.Server)
		if err != nil {
			return nil, err
		}
		sub.peer, target = p, p.place()
		sub.contract = p.connector.For(c.Tool.Name, c.Tool.Annotations)
	}
	id := r.g.effects.NewID()
	if sub.contract.Keyed() {
		key, err := r.g.effects.Key(ctx, r.s.workspace(), id)
		if err != nil {
			return nil, err
		}
		sub.key = key
	}
	digest, near, err := sub.contract.Digests(effect.Place{
		Workspace: r.s.workspace(), Lineage: r.s.Lineage, Target: target, Tool: c.Tool.Name,
	}, args)
	if err != nil {
		return nil, err
	}
	if args, err = sub.contract.FillKey(args, sub.key); err != nil {
		return nil, err
	}
	contract, err := json.Marshal(sub.contract)
	if err != nil {
		return nil, err
	}
	sub.header = store.EffectHeader{Effect: id, Event: c.Event, Tool: c.Tool.Name, Server: c.Tool.Server,
		Class: sub.contract.Class, Arguments: args, Digest: digest, Near: near, ToolHash: c.Tool.Digest, Contract: contract}
	if sub.peer != nil {
		sub.header.Connector = sub.peer.row.ID
	}
	return sub, nil
}

func (r *ruler) peer(ctx context.Context, server string) (*peer, error) {
	if p, ok := r.peers[server]; ok {
		return p, nil
	}
	p, err := r.g.peer(ctx, r.s, server)
	if err == nil {
		r.peers[server] = p
	}
	return p, err
}

func (r *ruler) deny(out Ruling, sub *subject, reason string) (Ruling, error) {
	d, err := effect.Proposal(r.s.Thread, store.Proposal{EffectHeader: sub.header, State: store.StateDenied, Reason: reason})
	if err != nil {
		return out, err
	}
	out.Effect, out.State, out.Drafts = sub.header.Effect, store.StateDenied, []store.Draft{d}
	return out.answer(false, "The call was denied and nothing was done: "+reason+"."), nil
}

// reasonRepeat is our reason code for a call that repeats a completed one.
const reasonRepeat = "repeat"

// match looks for the same intent in the lineage (design section 4, step 3).
// It reports true when the call is answered or waits.
func (r *ruler) match(ctx context.Context, sub *subject, out *Ruling, perm *policy.Permission) (bool, error) {
	same, err := r.g.db.EffectsByDigest(ctx, r.s.workspace(), r.s.Lineage, sub.header.Digest)
	if err != nil {
		return false, err
	}
	// 3a. One that is in doubt, or open from an earlier step: nothing is sent.
	// Near counts as equal: the digest is of the identity arguments.
	for _, e := range slices.Backward(same) {
		switch e.State {
		case store.StateInDoubt:
			if e.Told {
				out.EvaluatedPermission, out.Evaluation = string(policy.Deny), evaluation(*perm)
				*out = out.answer(true, told(e.ID))
				out.Answer.Effect = e.ID
				return true, nil
			}
		case store.StateProposed, store.StateAwaitingApproval, store.StateIntended, store.StateAttempted:
		default:
			continue
		}
		out.Waits = e.ID
		out.EvaluatedPermission, out.Evaluation = string(policy.Allow), evaluation(*perm)
		return true, nil
	}
	// 3c. One that was completed within the contract's repeat window.
	window := time.Duration(sub.contract.RepeatWindow) * time.Second
	for _, e := range slices.Backward(same) {
		if e.State != store.StateCompleted || e.Outcome != store.OutcomeOK || !e.UpdatedAt.Add(window).After(r.now) {
			continue
		}
		if sub.contract.Repeat == "return" && e.Near == sub.header.Near {
			a, err := r.g.ended(ctx, e)
			if err != nil {
				return false, err
			}
			a.Content = prepend("Not sent again: an equal call was completed at "+e.UpdatedAt.UTC().Format(time.RFC3339)+" ("+string(e.ID)+"). Its result:", a.Content)
			out.Answer, out.EvaluatedPermission, out.Evaluation = &a, string(policy.Allow), evaluation(*perm)
			return true, nil
		}
		*perm = policy.Permission{Verdict: policy.Ask, Policy: policy.Auto, ReasonCode: reasonRepeat,
			Reason: fmt.Sprintf("an equal call was completed at %s (%s)", e.UpdatedAt.UTC().Format(time.RFC3339), e.ID)}
		break
	}
	return false, nil
}

// prepend puts a text before content blocks.
func prepend(text string, content json.RawMessage) json.RawMessage {
	first := keeper.Text(text)
	if rest := strings.TrimPrefix(string(content), "["); len(rest) < len(content) && rest != "]" {
		return json.RawMessage(string(first[:len(first)-1]) + "," + rest)
	}
	return first
}

// admit drafts the intent of an allowed call, or the proposal of one to be asked for.
func (r *ruler) admit(out Ruling, sub *subject, perm policy.Permission) (Ruling, error) {
	out.Effect = sub.header.Effect
	out.EvaluatedPermission, out.Evaluation = string(perm.Verdict), evaluation(perm)
	var d store.Draft
	var err error
	switch perm.Verdict {
	case policy.Allow:
		out.State = store.StateIntended
		d, err = effect.Intent(r.s.Thread, store.Intent{EffectHeader: sub.header, Key: sub.key, Client: sub.call.Client})
	case policy.Ask:
		out.State = store.StateAwaitingApproval
		d, err = effect.Proposal(r.s.Thread, store.Proposal{EffectHeader: sub.header, State: store.StateAwaitingApproval,
			Reason: perm.Reason, Approval: effect.ApprovalDigest(r.s.Lease.Session(), sub.peer.place(), sub.header)})
	default:
		return r.deny(out, sub, "unknown decision")
	}
	out.Drafts = []store.Draft{d}
	return out, err
}

// evaluation is the wire's evaluation of a permission (reference section 9.5).
func evaluation(p policy.Permission) json.RawMessage {
	if p.Policy == "" {
		return nil
	}
	v := map[string]any{"type": p.Policy}
	if p.Policy == policy.Auto {
		e := map[string]any{"type": p.Verdict}
		if p.Verdict != policy.Allow {
			e["reason_code"] = p.ReasonCode
		}
		v["evaluated_permission"] = e
	}
	b, err := json.Marshal(v)
	if err != nil {
		return nil
	}
	return b
}

// approvalAge is how long an answer to a question is valid (design section 4, step 4).
const approvalAge = 24 * time.Hour

// Intend makes the intent of an approved proposal: entries and preconditions
// for the append that consumes the confirmation, so that it is burnt in the
// intent's transaction (attack A5). The approval binds to the digest that was
// asked for; anything that changed since is ErrStaleApproval.
func (g *Gateway) Intend(ctx context.Context, s Scope, id store.EffectID, confirmation store.EventID) ([]store.Draft, []store.EffectIs, error) {
	k, err := g.effects.Load(ctx, s.workspace(), id)
	if err != nil {
		return nil, nil, err
	}
	stale := func(why string) ([]store.Draft, []store.EffectIs, error) {
		return nil, nil, fmt.Errorf("%w: %s", ErrStaleApproval, why)
	}
	if k.State != store.StateAwaitingApproval || k.Session != s.Lease.Session() {
		return stale("the call does not wait for approval")
	}
	old, err := g.olderThan(ctx, s, confirmation, approvalAge)
	if err != nil {
		return nil, nil, err
	}
	if old {
		return stale("the answer is older than 24 hours")
	}
	p, err := g.peerOf(ctx, s, k.Header)
	var se *ServerError
	if errors.As(err, &se) {
		return stale(se.Error())
	}
	if err != nil {
		return nil, nil, err
	}
	if why := changed(p, k); why != "" {
		return stale(why)
	}
	if effect.ApprovalDigest(k.Session, p.place(), k.Header) != k.Approval {
		return stale("the call is not the one that was asked for")
	}
	key := ""
	if k.Contract.Keyed() {
		if key, err = g.effects.Key(ctx, s.workspace(), id); err != nil {
			return nil, nil, err
		}
	}
	d, err := effect.Intent(k.Thread, store.Intent{EffectHeader: k.Header, Key: key, Approved: string(confirmation)})
	if err != nil {
		return nil, nil, err
	}
	return []store.Draft{d}, []store.EffectIs{{ID: id, States: []store.EffectState{store.StateAwaitingApproval}}}, nil
}

// olderThan reports whether the inbox row arrived longer ago than age.
func (g *Gateway) olderThan(ctx context.Context, s Scope, row store.EventID, age time.Duration) (bool, error) {
	rows, err := g.db.Inbox(ctx, s.workspace(), s.Lease.Session())
	if err != nil {
		return false, err
	}
	for _, r := range rows {
		if r.ID == string(row) {
			return g.effects.Now().Sub(r.CreatedAt) > age, nil
		}
	}
	return false, nil // consumed with the append that this intent is for, or never there: the append finds out
}

// changed says what is not as it was when the effect was ruled; empty when
// nothing is.
func changed(p *peer, k *effect.Known) string {
	if pin, ok := p.row.Pins[k.Tool]; ok && k.Header.ToolHash != "" && pin != k.Header.ToolHash {
		return "the tool's definition has changed"
	}
	declared, ok := p.connector.Tools[k.Tool]
	if !ok && p.connector.TrustAnnotations {
		return "" // ruled by the definition's own hints, which the digest covers
	}
	now := p.connector.For(k.Tool, nil)
	now.Class = k.Class // hints may have made it worse
	was := k.Contract
	a, errA := json.Marshal(now)
	b, errB := json.Marshal(was)
	if errA != nil || errB != nil || string(a) != string(b) {
		return "the tool's contract has changed"
	}
	if ok && worse(declared.Class, k.Class) {
		return "the tool's class has changed"
	}
	return ""
}

// rank orders classes from harmless to worst.
var rank = map[store.Class]int{store.ClassRead: 0, store.ClassIdempotent: 1, store.ClassMixed: 2, store.ClassIrreversible: 3}

func worse(a, b store.Class) bool { return rank[a] > rank[b] }
