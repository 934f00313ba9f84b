package effect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// Times of the protocol.
const (
	// SendWithin is how long after the start of its attempt's commit a call may
	// begin to leave (design section 4, step 6).
	SendWithin = 2 * time.Second
	// commitTime bounds an append whose caller may have left.
	commitTime = 30 * time.Second
	claimsRead = 256 // claims looked through for the owner of a fence
)

// Config sets up a Log. The zero value works.
type Config struct {
	// Now is the store's clock when nil.
	Now func() time.Time
	// Boot is a clock that counts suspension, from any zero; CLOCK_BOOTTIME when nil.
	Boot func() time.Duration
	// SendWithin replaces the constant when not zero.
	SendWithin time.Duration
}

// Log speaks the effect protocol on the store. It keeps nothing but the
// workspaces' secrets. Safe for concurrent use.
type Log struct {
	db         *store.DB
	now        func() time.Time
	boot       func() time.Duration
	sendWithin time.Duration

	mu      sync.Mutex
	secrets map[store.WorkspaceID][]byte
}

// New makes a Log; no I/O.
func New(db *store.DB, cfg Config) *Log {
	l := &Log{db: db, now: cfg.Now, boot: cfg.Boot, sendWithin: cfg.SendWithin, secrets: map[store.WorkspaceID][]byte{}}
	if l.now == nil {
		l.now = db.Now
	}
	if l.boot == nil {
		l.boot = bootClock
	}
	if l.sendWithin == 0 {
		l.sendWithin = SendWithin
	}
	return l
}

// Now is the protocol's clock.
func (l *Log) Now() time.Time { return l.now() }

// NewID returns a fresh effect id.
func (l *Log) NewID() store.EffectID { return store.EffectID(store.NewID("eff_", l.now())) }

// Key returns the idempotency key of an effect.
func (l *Log) Key(ctx context.Context, ws store.WorkspaceID, id store.EffectID) (string, error) {
	l.mu.Lock()
	secret := l.secrets[ws]
	l.mu.Unlock()
	if secret == nil {
		var err error
		if secret, err = l.db.WorkspaceSecret(ctx, ws); err != nil {
			return "", fmt.Errorf("key of %s: %w", id, err)
		}
		l.mu.Lock()
		l.secrets[ws] = secret
		l.mu.Unlock()
	}
	return KeyFor(secret, id), nil
}

// draft makes the entry of one record of an effect.
func draft(kind store.Kind, id store.EffectID, thread store.ThreadID, body any) (store.Draft, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return store.Draft{}, fmt.Errorf("write %s of %s: %w", kind, id, err)
	}
	return store.Draft{Kind: kind, ID: string(id), Thread: thread, Body: b}, nil
}

// Proposal drafts the record of a call that is denied or waits for approval.
// A second one with state denied ends a waiting one.
func Proposal(thread store.ThreadID, p store.Proposal) (store.Draft, error) {
	p.V = store.BodyVersion
	return draft(store.KindProposal, p.Effect, thread, p)
}

// Intent drafts the record that must be durable before anything is sent.
func Intent(thread store.ThreadID, i store.Intent) (store.Draft, error) {
	i.V = store.BodyVersion
	return draft(store.KindIntent, i.Effect, thread, i)
}

// Known is an effect with the records that say how to go on with it.
type Known struct {
	store.Effect
	Header   store.EffectHeader
	Contract Contract
	Approved store.EventID // confirmation that was burnt
	Approval string        // what an approval binds to, of a proposal
	// IntentAt and IntentFence are of the intent; zero before it.
	IntentAt    time.Time
	IntentFence store.Fence
	ProposedAt  time.Time
}

// Load reads an effect and its proposal or intent.
func (l *Log) Load(ctx context.Context, ws store.WorkspaceID, id store.EffectID) (*Known, error) {
	row, err := l.db.Effect(ctx, ws, id)
	if err != nil {
		return nil, fmt.Errorf("load effect %s: %w", id, err)
	}
	k := &Known{Effect: row}
	if row.IntentSeq != 0 {
		e, err := l.db.EntryAt(ctx, ws, row.Session, row.IntentSeq)
		if err != nil {
			return nil, fmt.Errorf("load intent of %s: %w", id, err)
		}
		var in store.Intent
		if err := body(e, &in); err != nil {
			return nil, err
		}
		k.Header, k.Approved, k.IntentAt, k.IntentFence = in.EffectHeader, store.EventID(in.Approved), e.At, e.Fence
	} else {
		e, err := l.db.EntryAt(ctx, ws, row.Session, row.FirstSeq)
		if err != nil {
			return nil, fmt.Errorf("load proposal of %s: %w", id, err)
		}
		var p store.Proposal
		if err := body(e, &p); err != nil {
			return nil, err
		}
		k.Header, k.Approval, k.ProposedAt = p.EffectHeader, p.Approval, e.At
	}
	if k.Contract, err = ParseContract(k.Header.Contract); err != nil {
		return nil, fmt.Errorf("load effect %s: %w", id, err)
	}
	// The class that was ruled holds: hints may have made it worse than the contract's.
	k.Contract.Class = k.Header.Class
	return k, nil
}

func body(e store.Entry, v any) error {
	if e.Erased {
		return fmt.Errorf("read %s at %d: %w", e.Kind, e.Seq, store.ErrNotFound)
	}
	if err := json.Unmarshal(e.Body, v); err != nil {
		return fmt.Errorf("read %s at %d: %w", e.Kind, e.Seq, store.ErrDamaged)
	}
	return nil
}

// EndOf reads how a completed or void effect ended: its completion, else the
// settlement that ended it.
func (l *Log) EndOf(ctx context.Context, e store.Effect) (*store.Completion, *store.Settlement, error) {
	if e.EndSeq == 0 {
		return nil, nil, fmt.Errorf("end of %s: %w", e.ID, store.ErrNotFound)
	}
	entry, err := l.db.EntryAt(ctx, e.Workspace, e.Session, e.EndSeq)
	if err != nil {
		return nil, nil, fmt.Errorf("end of %s: %w", e.ID, err)
	}
	if entry.Kind == store.KindCompletion {
		c := new(store.Completion)
		return c, nil, body(entry, c)
	}
	s := new(store.Settlement)
	return nil, s, body(entry, s)
}

// DoubtOf reads the newest doubt record of an effect; nil when there is none.
func (l *Log) DoubtOf(ctx context.Context, k *Known) (*store.Doubt, time.Time, error) {
	entries, err := l.db.Entries(ctx, k.Workspace, k.Session, store.Range{After: k.IntentSeq, Kinds: []store.Kind{store.KindDoubt}})
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("doubt of %s: %w", k.ID, err)
	}
	for i := len(entries) - 1; i >= 0; i-- {
		if entries[i].ID == string(k.ID) {
			d := new(store.Doubt)
			return d, entries[i].At, body(entries[i], d)
		}
	}
	return nil, time.Time{}, nil
}

// Learnt is one piece of evidence with its time.
type Learnt struct {
	store.Evidence
	At time.Time
}

// EvidenceOf reads an effect's evidence, oldest first.
func (l *Log) EvidenceOf(ctx context.Context, e store.Effect) ([]Learnt, error) {
	var out []Learnt
	for _, seq := range e.EvidenceSeqs {
		entry, err := l.db.EntryAt(ctx, e.Workspace, e.Session, seq)
		if err != nil {
			return nil, fmt.Errorf("evidence of %s: %w", e.ID, err)
		}
		if entry.Kind != store.KindEvidence {
			continue
		}
		x := Learnt{At: entry.At}
		if err := body(entry, &x.Evidence); err != nil {
			return nil, err
		}
		out = append(out, x)
	}
	return out, nil
}

// DeadSince is when the owner of a fence was proved dead; zero when it is not
// proved, or is this lease's own node.
func (l *Log) DeadSince(ctx context.Context, ws store.WorkspaceID, id store.SessionID, fence store.Fence, own store.NodeID) (time.Time, error) {
	claims, err := l.db.Entries(ctx, ws, id, store.Range{Kinds: []store.Kind{store.KindClaim}, Desc: true, Limit: claimsRead})
	if err != nil {
		return time.Time{}, fmt.Errorf("owner of fence %d: %w", fence, err)
	}
	for _, e := range claims {
		if e.Fence != fence {
			continue
		}
		var c store.Claim
		if err := body(e, &c); err != nil {
			return time.Time{}, err
		}
		if c.Node == own {
			return time.Time{}, nil // alive: it is us, under an older fence
		}
		dead, err := l.db.Dead(ctx, c.Node)
		if errors.Is(err, store.ErrNotFound) {
			return time.Time{}, nil // forgotten: not proved
		}
		return dead, err
	}
	return time.Time{}, nil
}

// detached is a context for what must be recorded although the asker has left.
func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), commitTime)
}

// Complete commits a non-read's completion together with extra (the tool
// result event). An idempotent effect in doubt is settled by its resend
// instead. It runs to its end whatever ctx does. When it matches nothing
// because a newer owner exists or the effect's state has moved on, what came
// back goes to the session's inbox as late evidence, and the error is returned
// (attack E10). A lost commit does the same: evidence that says what is already
// recorded changes nothing.
func (l *Log) Complete(ctx context.Context, lease *store.Lease, e store.Effect, c store.Completion, extra []store.Draft) error {
	ctx, cancel := detached(ctx)
	defer cancel()
	d, is, err := l.completion(lease, e, c)
	if err != nil {
		return err
	}
	_, err = l.db.Append(ctx, lease, store.Append{Entries: append([]store.Draft{d}, extra...), Effects: []store.EffectIs{is}})
	if err == nil {
		return nil
	}
	// A crash right here leaves the effect attempted: the next owner finds it in
	// doubt. Whatever kept the completion out (a newer owner, an unknown commit, a
	// disk that was full for a moment), what the target said is known here and
	// nowhere else: it goes where it needs no fence.
	return errors.Join(fmt.Errorf("complete %s: %w", e.ID, err), l.Late(ctx, e, LateEvidence(c)))
}

// completion makes the entry that ends a non-read, and what must hold for it.
func (l *Log) completion(lease *store.Lease, e store.Effect, c store.Completion) (store.Draft, store.EffectIs, error) {
	is := store.EffectIs{ID: e.ID, States: []store.EffectState{store.StateIntended}}
	if e.State == store.StateInDoubt {
		is.States = []store.EffectState{store.StateInDoubt}
		d, err := draft(store.KindSettlement, e.ID, e.Thread, store.Settlement{
			V: store.BodyVersion, Effect: e.ID, Outcome: "happened", By: "resend",
			Reason: "answered when it was sent again under the same key", Response: c.Response, IsError: c.IsError,
		})
		return d, is, err
	}
	if Attempted(e.Class) {
		is.States, is.Attempt, is.Fence = []store.EffectState{store.StateAttempted}, c.N, lease.Fence()
	}
	c.V, c.Effect = store.BodyVersion, e.ID
	d, err := draft(store.KindCompletion, e.ID, e.Thread, c)
	return d, is, err
}

// CompleteClient commits the client's answer to an effect that it performed.
func (l *Log) CompleteClient(ctx context.Context, lease *store.Lease, e store.Effect, c store.Completion, extra []store.Draft, consume []string) error {
	c.V, c.Effect = store.BodyVersion, e.ID
	d, err := draft(store.KindCompletion, e.ID, e.Thread, c)
	if err != nil {
		return err
	}
	_, err = l.db.Append(ctx, lease, store.Append{
		Entries: append([]store.Draft{d}, extra...),
		Effects: []store.EffectIs{{ID: e.ID, States: []store.EffectState{store.StateIntended}}},
		Consume: consume,
	})
	if err != nil {
		return fmt.Errorf("complete %s: %w", e.ID, err)
	}
	return nil
}

// CompleteRead queues a read's completion for the next critical commit. A
// crash before that leaves an intent, and the read runs again.
func (l *Log) CompleteRead(lease *store.Lease, e store.Effect, c store.Completion, extra []store.Draft) error {
	c.V, c.Effect = store.BodyVersion, e.ID
	d, err := draft(store.KindCompletion, e.ID, e.Thread, c)
	if err != nil {
		return err
	}
	l.db.AppendRelaxed(lease, append([]store.Draft{d}, extra...))
	return nil
}

// RefuseUnsent commits attempt and completion of a call that found no
// connection, in one append: the attempt that never left is on record, and
// costs no commit of its own.
func (l *Log) RefuseUnsent(ctx context.Context, lease *store.Lease, e store.Effect, deadline time.Duration, c store.Completion, extra []store.Draft) error {
	if !Attempted(e.Class) {
		return l.Complete(ctx, lease, e, c, extra)
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	a, err := l.attempt(e, deadline, l.now())
	if err != nil {
		return err
	}
	c.V, c.Effect, c.N = store.BodyVersion, e.ID, e.Attempts+1
	d, err := draft(store.KindCompletion, e.ID, e.Thread, c)
	if err != nil {
		return err
	}
	_, err = l.db.Append(ctx, lease, store.Append{
		Entries: append([]store.Draft{a, d}, extra...),
		Effects: []store.EffectIs{{ID: e.ID, States: []store.EffectState{store.StateIntended}}},
	})
	if err != nil {
		return fmt.Errorf("refuse %s: %w", e.ID, err)
	}
	return nil
}

// Doubt records that nobody can know yet whether the effect happened. from
// lists the states it may be in.
func (l *Log) Doubt(ctx context.Context, lease *store.Lease, e store.Effect, d store.Doubt, from ...store.EffectState) error {
	ctx, cancel := detached(ctx)
	defer cancel()
	d.V, d.Effect = store.BodyVersion, e.ID
	entry, err := draft(store.KindDoubt, e.ID, e.Thread, d)
	if err != nil {
		return err
	}
	_, err = l.db.Append(ctx, lease, store.Append{
		Entries: []store.Draft{entry},
		Effects: []store.EffectIs{{ID: e.ID, States: from}},
	})
	if err != nil {
		return fmt.Errorf("doubt %s: %w", e.ID, err)
	}
	return nil
}

// Settling is a settlement with what is committed beside it.
type Settling struct {
	store.Settlement
	Evidence *store.Evidence     // what proved it, recorded right before
	Extra    []store.Draft       // the tool result event
	Consume  []string            // inbox rows that brought it
	From     []store.EffectState // where the effect may stand; default in_doubt
}

// Settle gives an effect in doubt its outcome, or voids an intent that is
// proved unsent. ErrConflict: it stands elsewhere, someone was faster.
func (l *Log) Settle(ctx context.Context, lease *store.Lease, e store.Effect, s Settling) error {
	var entries []store.Draft
	if s.Evidence != nil {
		d, err := evidence(e, *s.Evidence)
		if err != nil {
			return err
		}
		entries = append(entries, d)
	}
	s.V, s.Effect = store.BodyVersion, e.ID
	d, err := draft(store.KindSettlement, e.ID, e.Thread, s.Settlement)
	if err != nil {
		return err
	}
	if s.From == nil {
		s.From = []store.EffectState{store.StateInDoubt}
	}
	_, err = l.db.Append(ctx, lease, store.Append{
		Entries: append(append(entries, d), s.Extra...),
		Effects: []store.EffectIs{{ID: e.ID, States: s.From}},
		Consume: s.Consume,
	})
	if err != nil {
		return fmt.Errorf("settle %s: %w", e.ID, err)
	}
	return nil
}

func evidence(e store.Effect, ev store.Evidence) (store.Draft, error) {
	ev.V, ev.Effect = store.BodyVersion, e.ID
	return draft(store.KindEvidence, e.ID, e.Thread, ev)
}

// Deny ends a proposal that waits for approval.
func (l *Log) Deny(ctx context.Context, lease *store.Lease, k *Known, reason string, extra []store.Draft, consume []string) error {
	d, err := Proposal(k.Thread, store.Proposal{EffectHeader: k.Header, State: store.StateDenied, Reason: reason, Approval: k.Approval})
	if err != nil {
		return err
	}
	_, err = l.db.Append(ctx, lease, store.Append{
		Entries: append([]store.Draft{d}, extra...),
		Effects: []store.EffectIs{{ID: k.ID, States: []store.EffectState{store.StateAwaitingApproval, store.StateProposed}}},
		Consume: consume,
	})
	if err != nil {
		return fmt.Errorf("deny %s: %w", k.ID, err)
	}
	return nil
}

// Record commits evidence under the owner's fence, consuming the inbox rows
// that brought it.
func (l *Log) Record(ctx context.Context, lease *store.Lease, e store.Effect, ev store.Evidence, consume []string) error {
	d, err := evidence(e, ev)
	if err != nil {
		return err
	}
	_, err = l.db.Append(ctx, lease, store.Append{Entries: []store.Draft{d}, Consume: consume})
	if err != nil {
		return fmt.Errorf("record evidence of %s: %w", e.ID, err)
	}
	return nil
}

// Late hands evidence to the session's inbox. It needs no fence and changes no
// state by itself: the owner judges it.
func (l *Log) Late(ctx context.Context, e store.Effect, ev store.Evidence) error {
	ctx, cancel := detached(ctx)
	defer cancel()
	ev.V, ev.Effect = store.BodyVersion, e.ID
	b, err := json.Marshal(ev)
	if err != nil {
		return fmt.Errorf("late evidence of %s: %w", e.ID, err)
	}
	_, err = l.db.Deliver(ctx, e.Workspace, e.Session, []store.Delivery{{
		ID: store.NewID("inb_", l.now()), Kind: store.InboxEvidence, Thread: e.Thread, Body: b,
	}}, nil)
	if errors.Is(err, store.ErrTerminated) {
		// Nobody will read an inbox there, and the effect may outlive its session
		// in doubt: the operator sees the evidence in the log.
		_, err = l.db.AppendUnowned(ctx, e.Workspace, e.Session, store.Append{Entries: []store.Draft{
			{Kind: store.KindEvidence, ID: string(e.ID), Thread: e.Thread, Body: b}}}, nil)
	}
	if err != nil {
		return fmt.Errorf("late evidence of %s: %w", e.ID, err)
	}
	return nil
}

// LateEvidence says what a completion proves once it comes too late to be one.
func LateEvidence(c store.Completion) store.Evidence {
	ev := store.Evidence{Kind: "late", Says: "happened", Response: c.Response, IsError: c.IsError}
	if c.Outcome == store.OutcomeRefused {
		ev.Says, ev.Detail = "did_not_happen", c.Reason
	}
	return ev
}

// Contradicts reports whether evidence disagrees with how the effect ended.
func Contradicts(e store.Effect, says string) bool {
	happened := e.State == store.StateCompleted && e.Outcome != store.OutcomeRefused
	not := e.State == store.StateVoid || (e.State == store.StateCompleted && e.Outcome == store.OutcomeRefused)
	return (says == "happened" && not) || (says == "did_not_happen" && happened)
}
