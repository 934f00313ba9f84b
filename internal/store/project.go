package store

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// rows are a session's rows while entries are applied to them. fold is the
// only function that derives projections: the committer uses it for what it
// writes, Rebuild for what it compares.
type rows struct {
	session Session // Status is what the log says, not the effective one
	// effect finds an effect as it was before; false when there is none. With
	// fresh only open ones are looked for: the id is expected to be new, and
	// that it is not an ended one's is left to the table's key.
	effect func(id EffectID, fresh bool) (Effect, bool, error)
	// snapshots reads the snapshots that are not dropped; nil: there are none.
	snapshots func() ([]SnapshotRow, error)

	effects map[EffectID]*Effect // changed by fold
	fresh   map[EffectID]bool    // of these: new
	headed  map[EffectID]bool    // of these: an intent wrote over what the proposal said
	usage   []usageRow
	saved   *savedRows // snapshots, once one was touched
	config  bool       // the configuration changed
	status  bool       // a status event was among the entries
}

func newRows(s Session, effect func(EffectID, bool) (Effect, bool, error)) *rows {
	return &rows{session: s, effect: effect, effects: map[EffectID]*Effect{}, fresh: map[EffectID]bool{}, headed: map[EffectID]bool{}}
}

// clone lets an append be tried and dropped.
func (r *rows) clone() *rows {
	c := newRows(r.session, r.effect)
	c.snapshots, c.saved = r.snapshots, r.saved.clone()
	for id, e := range r.effects {
		v := *e
		c.effects[id] = &v
		c.fresh[id], c.headed[id] = r.fresh[id], r.headed[id]
	}
	c.usage = slices.Clip(r.usage)
	c.config, c.status = r.config, r.status
	return c
}

// usageRow is one metered thing.
type usageRow struct {
	id    string
	kind  string
	name  string
	at    time.Time
	usage TokenUsage
	cost  int64
	waste bool
}

// parsed is a body read once, before the committer's turn.
type parsed struct {
	body    any // nil for kinds that project nothing
	version int
	effect  EffectID // the effect that the record is about
}

// parse reads what fold needs of a body. Bodies are ours: an unreadable one is
// an error of the caller or damage.
func parse(d *Draft) (p parsed, err error) {
	read := func(v any) error { p.body = v; return json.Unmarshal(d.Body, v) }
	switch d.Kind {
	case KindEvent:
		if d.Type == "session.status_idle" {
			err = read(&idleBody{})
		}
	case KindCreated:
		err = read(&Created{})
	case KindConfig:
		err = read(&ConfigChange{})
	case KindWait:
		err = read(&Wait{})
	case KindOutput:
		b := &Output{}
		err = read(b)
		p.effect = b.Effect
	case KindProposal:
		b := &Proposal{}
		err = read(b)
		p.effect = b.Effect
	case KindIntent:
		b := &Intent{}
		err = read(b)
		p.effect = b.Effect
	case KindAttempt:
		b := &Attempt{}
		err = read(b)
		p.effect = b.Effect
	case KindDoubt:
		b := &Doubt{}
		err = read(b)
		p.effect = b.Effect
	case KindCompletion:
		b := &Completion{}
		err = read(b)
		p.effect = b.Effect
	case KindEvidence:
		b := &Evidence{}
		err = read(b)
		p.effect = b.Effect
	case KindSettlement:
		b := &Settlement{}
		err = read(b)
		p.effect = b.Effect
	case KindSnapshot:
		err = read(&Snapshot{})
	case KindClaim, KindTools, KindCompaction, KindArchive, KindMachine, KindTunnel:
	default:
		return p, fmt.Errorf("entry of unknown kind %q", d.Kind)
	}
	if err == nil {
		p.version, err = bodyVersion(d.Body)
	}
	if err != nil {
		return p, fmt.Errorf("body of %s %s: %w", d.Kind, d.ID, err)
	}
	return p, nil
}

type idleBody struct {
	StopReason json.RawMessage `json:"stop_reason"`
}

// bodyVersion reads the field "v", which our encoders put first (records) or
// last (events, whose fields are sorted).
func bodyVersion(body []byte) (int, error) {
	if rest, ok := bytes.CutPrefix(body, []byte(`{"v":`)); ok {
		if n, size := digits(rest); size > 0 && size < len(rest) && (rest[size] == ',' || rest[size] == '}') {
			return n, nil
		}
	}
	// Between the last brace, which closes the body, and this there is but a
	// number: it is a field of the body and nothing deeper.
	if i := bytes.LastIndex(body[max(0, len(body)-16):], []byte(`,"v":`)); i >= 0 {
		rest := body[max(0, len(body)-16)+i+len(`,"v":`):]
		if n, size := digits(rest); size > 0 && string(rest[size:]) == "}" {
			return n, nil
		}
	}
	var v struct {
		V int `json:"v"`
	}
	err := json.Unmarshal(body, &v)
	return v.V, err
}

// digits reads a number of at most six digits and says how many it has.
func digits(b []byte) (n, size int) {
	for size < len(b) && size < 6 && b[size] >= '0' && b[size] <= '9' {
		n = n*10 + int(b[size]-'0')
		size++
	}
	return n, size
}

// fold applies one entry. It is pure: the new rows follow from the old rows and
// the entry alone. An illegal transition is ErrConflict; the caller drops r.
func fold(r *rows, e *Entry, p parsed) error {
	s := &r.session
	s.Head, s.HeadHash, s.UpdatedAt = e.Seq, e.Hash, e.At
	s.Format = max(s.Format, p.version)
	switch b := p.body.(type) {
	case *Created:
		s.Thread, s.Config, s.CreatedAt = b.Thread, b.Config, e.At
		s.Status, r.config = StatusIdle, true
	case *ConfigChange:
		s.Config, r.config = b.Config, true
	case *Wait:
		s.WakeAt = b.Until.UTC().Truncate(time.Microsecond)
	case *Output:
		s.WakeAt = time.Time{}
		return r.output(e, b)
	case *Proposal:
		return r.propose(e, b)
	case *Intent:
		return r.intend(e, b)
	case *Attempt:
		return r.attempt(e, b)
	case *Doubt:
		return r.doubt(e, b)
	case *Completion:
		return r.complete(e, b)
	case *Evidence:
		return r.change(e, b.Effect, func(x *Effect) error {
			x.EvidenceSeqs = append(slices.Clip(x.EvidenceSeqs), e.Seq)
			return nil
		})
	case *Settlement:
		return r.settle(e, b)
	case *Snapshot:
		return r.snapshot(e, b)
	}
	switch e.Kind {
	case KindEvent:
		r.event(e, p)
	case KindCompaction:
		s.Compacted = e.Seq
	case KindArchive:
		if s.ArchivedAt.IsZero() {
			s.ArchivedAt = e.At
		}
	}
	return nil
}

func (r *rows) event(e *Entry, p parsed) {
	s := &r.session
	switch e.Type {
	case "session.status_running":
		if s.Status != StatusRunning {
			s.RunningSince = e.At
		}
		s.Status, s.WakeAt, r.status = StatusRunning, time.Time{}, true
	case "session.status_idle":
		r.stop(StatusIdle, e.At)
		if b, ok := p.body.(*idleBody); ok {
			s.StopReason = b.StopReason
		}
		s.WakeAt = time.Time{}
	case "session.status_rescheduled", "session.status_rescheduling":
		r.stop(StatusRescheduling, e.At)
	case "session.status_terminated":
		r.stop(StatusTerminated, e.At)
		s.WakeAt = time.Time{}
		if s.TerminatedAt.IsZero() {
			s.TerminatedAt = e.At
		}
	case "session.paused":
		s.Paused = true
	case "session.resumed":
		s.Paused = false
	}
}

// stop ends a stretch of running.
func (r *rows) stop(to Status, at time.Time) {
	s := &r.session
	if s.Status == StatusRunning && !s.RunningSince.IsZero() {
		s.Usage.ActiveMicros += at.Sub(s.RunningSince).Microseconds()
	}
	s.RunningSince, s.Status, r.status = time.Time{}, to, true
}

// find returns an effect of this session as it is now, nil when there is none.
func (r *rows) find(id EffectID) (*Effect, error) { return r.look(id, false) }

func (r *rows) look(id EffectID, fresh bool) (*Effect, error) {
	if x, ok := r.effects[id]; ok {
		return x, nil
	}
	x, ok, err := r.effect(id, fresh)
	if err != nil || !ok {
		return nil, err
	}
	r.effects[id] = &x
	return &x, nil
}

// change applies f to an effect that must exist.
func (r *rows) change(e *Entry, id EffectID, f func(*Effect) error) error {
	x, err := r.find(id)
	if err != nil {
		return err
	}
	if x == nil {
		return fmt.Errorf("%w: %s names effect %q, which is not in this session", ErrConflict, e.Kind, id)
	}
	if err := f(x); err != nil {
		return err
	}
	x.UpdatedAt = e.At
	return nil
}

// refuse is the error of an illegal transition.
func refuse(e *Entry, x *Effect) error {
	return fmt.Errorf("%w: %s of effect %s (%s), which is %s", ErrConflict, e.Kind, x.ID, x.Class, x.State)
}

// begin makes the row of a new effect.
func (r *rows) begin(e *Entry, h *EffectHeader) *Effect {
	x := &Effect{Workspace: r.session.Workspace, Session: r.session.ID, Lineage: r.session.Lineage,
		ID: h.Effect, Thread: e.Thread, Tool: h.Tool, Server: h.Server, Connector: h.Connector,
		Class: h.Class, Event: h.Event, Digest: h.Digest, Near: h.Near,
		FirstSeq: e.Seq, CreatedAt: e.At, UpdatedAt: e.At}
	r.effects[x.ID], r.fresh[x.ID] = x, true
	return x
}

// header fills what an intent may know better than its proposal.
func (x *Effect) header(h *EffectHeader) {
	x.Tool, x.Server, x.Connector, x.Class = h.Tool, h.Server, h.Connector, h.Class
	x.Event, x.Digest, x.Near = h.Event, h.Digest, h.Near
}

func (r *rows) propose(e *Entry, b *Proposal) error {
	x, err := r.look(b.Effect, true)
	if err != nil {
		return err
	}
	if x == nil {
		x = r.begin(e, &b.EffectHeader)
	} else if x.State != StateProposed && x.State != StateAwaitingApproval {
		return refuse(e, x)
	}
	switch b.State {
	case StateDenied:
		x.EndSeq = e.Seq
	case StateProposed, StateAwaitingApproval:
	default:
		return fmt.Errorf("%w: proposal of effect %s with state %q", ErrConflict, b.Effect, b.State)
	}
	x.State, x.UpdatedAt = b.State, e.At
	return nil
}

func (r *rows) intend(e *Entry, b *Intent) error {
	x, err := r.look(b.Effect, true)
	if err != nil {
		return err
	}
	if x == nil {
		x = r.begin(e, &b.EffectHeader)
	} else if x.State != StateProposed && x.State != StateAwaitingApproval {
		return refuse(e, x)
	}
	switch b.Class {
	case ClassRead, ClassIdempotent, ClassMixed, ClassIrreversible:
	default:
		return fmt.Errorf("%w: intent of effect %s with class %q", ErrConflict, b.Effect, b.Class)
	}
	x.header(&b.EffectHeader)
	r.headed[x.ID] = true
	x.State, x.IntentSeq, x.Key, x.Client, x.UpdatedAt = StateIntended, e.Seq, b.Key, b.Client, e.At
	return nil
}

// needsAttempt: nothing may be completed that was not attempted (law L1).
func (x *Effect) needsAttempt() bool {
	return !x.Client && (x.Class == ClassIrreversible || x.Class == ClassMixed)
}

func (r *rows) attempt(e *Entry, b *Attempt) error {
	return r.change(e, b.Effect, func(x *Effect) error {
		if x.State != StateIntended || x.Client || (b.N != 0 && b.N != x.Attempts+1) {
			return refuse(e, x)
		}
		x.State = StateAttempted
		x.Attempts++
		x.AttemptSeqs = append(slices.Clip(x.AttemptSeqs), e.Seq)
		x.AttemptFence, x.SendBy = e.Fence, b.SendBy.UTC().Truncate(time.Microsecond)
		return nil
	})
}

func (r *rows) doubt(e *Entry, b *Doubt) error {
	return r.change(e, b.Effect, func(x *Effect) error {
		// An idempotent intent counts as attempted; a client's act may have been
		// done by the client, who alone knows.
		if x.State != StateAttempted && !(x.State == StateIntended && (x.Class == ClassIdempotent || x.Client)) {
			return refuse(e, x)
		}
		x.State = StateInDoubt
		return nil
	})
}

func (r *rows) complete(e *Entry, b *Completion) error {
	return r.change(e, b.Effect, func(x *Effect) error {
		sent := x.State == StateAttempted && (b.N == 0 || b.N == x.Attempts)
		unsent := x.State == StateIntended && (!x.needsAttempt() || b.ReplayedFrom != "")
		if !sent && !unsent {
			return refuse(e, x)
		}
		switch b.Outcome {
		case OutcomeOK, OutcomeRefused:
		default:
			return fmt.Errorf("%w: completion of effect %s with outcome %q", ErrConflict, x.ID, b.Outcome)
		}
		x.State, x.Outcome, x.IsError, x.EndSeq = StateCompleted, b.Outcome, b.IsError, e.Seq
		return nil
	})
}

func (r *rows) settle(e *Entry, b *Settlement) error {
	return r.change(e, b.Effect, func(x *Effect) error {
		inDoubt := x.State == StateInDoubt
		switch {
		case b.Outcome == Told && inDoubt:
			x.Told = true
		case b.Outcome == "happened" && inDoubt:
			x.State, x.Outcome, x.IsError, x.EndSeq = StateCompleted, OutcomeOK, b.IsError, e.Seq
		case b.Outcome == "did_not_happen" && (inDoubt || x.State == StateIntended):
			x.State, x.EndSeq = StateVoid, e.Seq
		default:
			return refuse(e, x)
		}
		x.EvidenceSeqs = append(slices.Clip(x.EvidenceSeqs), e.Seq)
		return nil
	})
}

// output completes the model call's effect. A model call needs no intent: the
// durable state before it asks for it.
func (r *rows) output(e *Entry, b *Output) error {
	x, err := r.look(b.Effect, true)
	if err != nil {
		return err
	}
	if x == nil {
		x = r.begin(e, &EffectHeader{Effect: b.Effect, Tool: "model:" + b.Model, Class: ClassRead})
	} else if x.State != StateIntended {
		return refuse(e, x)
	}
	x.State, x.Outcome, x.EndSeq, x.UpdatedAt = StateCompleted, OutcomeOK, e.Seq, e.At
	u := &r.session.Usage
	if b.Failed != "" {
		x.Outcome, x.IsError = OutcomeRefused, true
		u.WastedTokens += b.Usage.total()
	} else {
		u.Input += b.Usage.Input
		u.Output += b.Usage.Output
		u.CacheRead += b.Usage.CacheRead
		u.CacheCreation5m += b.Usage.CacheCreation5m
		u.CacheCreation1h += b.Usage.CacheCreation1h
		u.CostNanoUSD += b.CostNanoUSD
	}
	r.usage = append(r.usage, usageRow{id: string(b.Effect), kind: "model", name: b.Model, at: e.At,
		usage: b.Usage, cost: b.CostNanoUSD, waste: b.Failed != ""})
	return nil
}

func (u TokenUsage) total() int64 {
	return u.Input + u.Output + u.CacheRead + u.CacheCreation5m + u.CacheCreation1h
}

// ended reports whether nothing more can change the effect's state.
func (x *Effect) ended() bool {
	return x.State == StateCompleted || x.State == StateDenied || x.State == StateVoid
}
