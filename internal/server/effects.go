package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

// showEffect makes the effect object (design section 7) of a row and of the
// entries that it names.
func (s *server) showEffect(ctx context.Context, e store.Effect) (api.Effect, error) {
	w := api.Effect{ID: string(e.ID), SessionID: string(e.Session), SessionThreadID: string(e.Thread), Seq: int64(e.FirstSeq),
		Tool: e.Tool, Connector: orNull(string(e.Connector)), Class: api.EffectClass(e.Class), State: api.EffectState(e.State),
		Outcome: orNull(string(e.Outcome)), Shadow: e.Shadow, Digest: e.Digest, IdempotencyKey: orNull(e.Key),
		EventID: string(e.Event), CreatedAt: api.At(e.CreatedAt), UpdatedAt: api.At(e.UpdatedAt)}
	r := &effectReader{ctx: ctx, s: s, e: e}
	r.first(&w)
	for _, seq := range e.AttemptSeqs {
		if at, ok := r.entry(seq); ok {
			w.Attempts = append(w.Attempts, api.EffectAttempt{Seq: int64(seq), Fence: int64(at.Fence), At: api.At(at.At)})
		}
	}
	r.end(&w)
	for _, seq := range e.EvidenceSeqs {
		r.evidence(&w, seq)
	}
	return w, r.err
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// effectReader reads the entries of one effect; the first error stays.
type effectReader struct {
	ctx context.Context
	s   *server
	e   store.Effect
	err error
}

// entry reads one entry; false when there is none any more, or an error came
// before. The log of a deleted session is gone and that of a damaged one is
// refused: what the effect's row says is shown without it.
func (r *effectReader) entry(seq store.Seq) (store.Entry, bool) {
	if r.err != nil || seq == 0 {
		return store.Entry{}, false
	}
	en, err := r.s.db.EntryAt(r.ctx, r.e.Workspace, r.e.Session, seq)
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, store.ErrDamaged) {
		return store.Entry{}, false
	}
	if err != nil {
		r.err = fmt.Errorf("read effect %s: %w", r.e.ID, err)
		return store.Entry{}, false
	}
	return en, true
}

// body reads one entry's body into v.
func (r *effectReader) body(seq store.Seq, v any) (store.Entry, bool) {
	en, ok := r.entry(seq)
	if !ok || en.Erased {
		return en, false
	}
	if err := json.Unmarshal(en.Body, v); err != nil {
		r.err = fmt.Errorf("read effect %s at %d: %w", r.e.ID, seq, err)
		return en, false
	}
	return en, true
}

// first reads what was asked for, and the approval it was given.
func (r *effectReader) first(w *api.Effect) {
	var p store.Proposal
	if _, ok := r.body(r.e.FirstSeq, &p); ok {
		w.Arguments = p.Arguments
	}
	var in store.Intent
	if r.e.IntentSeq == 0 {
		return
	}
	if _, ok := r.body(r.e.IntentSeq, &in); !ok {
		return
	}
	w.Arguments = in.Arguments
	if in.Approved == "" {
		return
	}
	w.Approval = &api.EffectApproval{EventID: in.Approved, Result: api.ResultAllow, Digest: p.Approval}
	seq, err := r.s.db.SeqOf(r.ctx, r.e.Workspace, r.e.Session, store.EventID(in.Approved))
	if errors.Is(err, store.ErrNotFound) {
		return // deleted since the intent was read
	}
	if err != nil {
		r.err = fmt.Errorf("read approval of effect %s: %w", r.e.ID, err)
		return
	}
	if en, ok := r.entry(seq); ok {
		w.Approval.At = api.At(en.At)
	}
}

// end reads how it ended. A model call ends with its output, another effect
// with a completion or the settlement that took its place.
func (r *effectReader) end(w *api.Effect) {
	if r.e.EndSeq == 0 {
		return
	}
	en, ok := r.entry(r.e.EndSeq)
	if !ok {
		return
	}
	c := api.EffectCompletion{Seq: int64(en.Seq), At: api.At(en.At), IsError: r.e.IsError, Response: json.RawMessage("null")}
	if !en.Erased {
		switch en.Kind {
		case store.KindCompletion:
			var b store.Completion
			r.body(en.Seq, &b)
			c.Response, c.IsError, c.ETag = orJSONNull(b.Response), b.IsError, orNull(b.ETag)
			w.ReplayedFrom = orNull(string(b.ReplayedFrom))
		case store.KindOutput:
			var b store.Output
			r.body(en.Seq, &b)
			c.Response = orJSONNull(b.Content)
		case store.KindSettlement:
			var b store.Settlement
			r.body(en.Seq, &b)
			c.Response, c.IsError = orJSONNull(b.Response), b.IsError
		}
	}
	if r.e.State == store.StateCompleted {
		w.Completion = &c
	}
}

func orJSONNull(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("null")
	}
	return raw
}

// evidence reads evidence and settlements: what was learnt, and who said it.
func (r *effectReader) evidence(w *api.Effect, seq store.Seq) {
	en, ok := r.entry(seq)
	if !ok {
		return
	}
	ev := api.EffectEvidence{Seq: int64(seq), At: api.At(en.At)}
	switch en.Kind {
	case store.KindEvidence:
		var b store.Evidence
		if _, ok := r.body(seq, &b); ok {
			ev.Kind, ev.Says = b.Kind, b.Says
		}
	case store.KindSettlement:
		var b store.Settlement
		if _, ok := r.body(seq, &b); ok {
			ev.Kind, ev.Says = b.By, b.Outcome
		}
	default:
		return
	}
	w.Evidence = append(w.Evidence, ev)
}

// effectFilter reads state, class and tool, each repeated or not.
func (q query) effectFilter() (f store.EffectFilter, err error) {
	for _, v := range q.list("state") {
		switch st := store.EffectState(v); st {
		case store.StateProposed, store.StateAwaitingApproval, store.StateDenied, store.StateIntended,
			store.StateAttempted, store.StateInDoubt, store.StateCompleted, store.StateVoid:
			f.States = append(f.States, st)
		default:
			return f, api.Invalid("state", "%q is not a state of effects", v)
		}
	}
	for _, v := range q.list("class") {
		switch cl := store.Class(v); cl {
		case store.ClassRead, store.ClassIdempotent, store.ClassMixed, store.ClassIrreversible:
			f.Classes = append(f.Classes, cl)
		default:
			return f, api.Invalid("class", "%q is not a class; use read, idempotent, mixed or irreversible", v)
		}
	}
	for _, v := range q.list("tool") {
		f.Tools = append(f.Tools, plainID(v))
	}
	return f, nil
}

// maxEffectPage is the largest page of effects; each object reads several entries.
const maxEffectPage = 200

func (s *server) pageOfEffects(ctx context.Context, c *call, f store.EffectFilter) (any, error) {
	limit, err := c.query.limit(100, maxEffectPage)
	if err != nil {
		return nil, err
	}
	order, err := c.query.order("asc")
	if err != nil {
		return nil, err
	}
	list := "effects of " + string(f.Session)
	at, err := c.query.cursor(list, order)
	if err != nil {
		return nil, err
	}
	if at != nil {
		f.After = store.EffectID(at.ID)
	}
	f.Desc, f.Limit = order == "desc", limit+1
	rows, err := s.db.Effects(ctx, c.caller.ws(), f)
	if err != nil {
		return nil, err
	}
	out := api.Page[api.Effect]{Data: api.List[api.Effect]{}}
	if len(rows) > limit {
		rows = rows[:limit]
		out.NextPage = next(cursor{List: list, Order: order, ID: string(rows[limit-1].ID)})
	}
	for _, e := range rows {
		w, err := s.showEffect(ctx, e)
		if err != nil {
			return nil, err
		}
		out.Data = append(out.Data, w)
	}
	return out, nil
}

func (s *server) listSessionEffects(ctx context.Context, c *call) (any, error) {
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	f, err := c.query.effectFilter()
	if err != nil {
		return nil, err
	}
	f.Session = x.ID
	return s.pageOfEffects(ctx, c, f)
}

func (s *server) listEffects(ctx context.Context, c *call) (any, error) {
	f, err := c.query.effectFilter()
	if err != nil {
		return nil, err
	}
	return s.pageOfEffects(ctx, c, f)
}

func (s *server) getEffect(ctx context.Context, c *call) (any, error) {
	id := c.id("effect")
	e, err := s.db.Effect(ctx, c.caller.ws(), store.EffectID(id))
	if err != nil {
		return nil, missing(err, "effect", id)
	}
	return s.showEffect(ctx, e)
}

func (s *server) settleEffect(ctx context.Context, c *call) (any, error) {
	var req api.SettleRequest
	if err := api.DecodeStrict(c.body, &req); err != nil {
		return nil, err
	}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	id := c.id("effect")
	r := session.SettleRequest{Outcome: req.Outcome, Response: req.Response, Person: c.caller.ID}
	if req.Evidence != nil {
		r.Evidence = *req.Evidence
	}
	e, err := s.sessions.Settle(ctx, c.caller.ws(), store.EffectID(id), r)
	if err != nil {
		return nil, missing(err, "effect", id)
	}
	return s.showEffect(ctx, e)
}

// listApprovals lists what waits for a person, oldest first.
func (s *server) listApprovals(ctx context.Context, c *call) (any, error) {
	return s.pageOfEffects(ctx, c, store.EffectFilter{States: []store.EffectState{store.StateAwaitingApproval}, Living: true})
}

// approvalAnswer is the body of POST /v1/approvals/{effect}.
type approvalAnswer struct {
	Result      string  `json:"result"`
	DenyMessage *string `json:"deny_message,omitzero"`
}

// answerApproval is a user.tool_confirmation by another way, and answers with
// the effect.
func (s *server) answerApproval(ctx context.Context, c *call) (any, error) {
	var req approvalAnswer
	if err := api.DecodeStrict(c.body, &req); err != nil {
		return nil, err
	}
	id := c.id("effect")
	e, err := s.db.Effect(ctx, c.caller.ws(), store.EffectID(id))
	if err != nil {
		return nil, missing(err, "effect", id)
	}
	events := api.ClientEvents{&api.UserToolConfirmation{ToolUseID: string(e.Event), Result: req.Result, DenyMessage: req.DenyMessage}}
	if e.Event == "" {
		return nil, api.Invalid("", "effect %s asks nobody: it is %s", id, e.State)
	}
	if err := (api.SendEvents{Events: events}).Validate(); err != nil {
		return nil, err
	}
	evs, err := bodies(events)
	if err != nil {
		return nil, err
	}
	if _, err := s.sessions.Send(ctx, e.Workspace, e.Session, evs); err != nil {
		return nil, missing(err, "session", string(e.Session))
	}
	return s.getEffect(ctx, c)
}
