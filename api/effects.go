package api

import (
	"encoding/json"
	"net/url"
)

// EffectClass is what a tool's contract declares (design section 4).
type EffectClass string

// The classes.
const (
	ClassRead         EffectClass = "read"
	ClassIdempotent   EffectClass = "idempotent"
	ClassMixed        EffectClass = "mixed"
	ClassIrreversible EffectClass = "irreversible"
)

// EffectState is where an effect is in its life.
type EffectState string

// The states.
const (
	EffectProposed         EffectState = "proposed"
	EffectAwaitingApproval EffectState = "awaiting_approval"
	EffectDenied           EffectState = "denied"
	EffectIntended         EffectState = "intended"
	EffectAttempted        EffectState = "attempted"
	EffectInDoubt          EffectState = "in_doubt"
	EffectCompleted        EffectState = "completed"
	EffectVoid             EffectState = "void"
)

// EffectAttempt is one try of an irreversible effect.
type EffectAttempt struct {
	Seq   int64 `json:"seq"`
	Fence int64 `json:"fence"`
	At    Time  `json:"at"`
}

// EffectCompletion is how an effect ended.
type EffectCompletion struct {
	Seq      int64           `json:"seq"`
	At       Time            `json:"at"`
	Response json.RawMessage `json:"response"`
	IsError  bool            `json:"is_error"`
	ETag     *string         `json:"etag"`
}

// EffectEvidence is what was learnt about an effect outside the normal path.
type EffectEvidence struct {
	Seq  int64  `json:"seq"`
	Kind string `json:"kind"` // probe, late, person
	Says string `json:"says"` // happened, did_not_happen, unknown
	At   Time   `json:"at"`
}

// EffectApproval is a person's answer, bound to the effect's exact arguments.
type EffectApproval struct {
	EventID string `json:"event_id"` // the user.tool_confirmation
	Result  string `json:"result"`   // allow, deny
	Digest  string `json:"digest"`   // what it is bound to
	At      Time   `json:"at"`
}

// Effect is the effect object (design section 7).
type Effect struct {
	Type            string               `json:"type"`
	ID              string               `json:"id"`
	SessionID       string               `json:"session_id"`
	SessionThreadID string               `json:"session_thread_id"`
	Seq             int64                `json:"seq"`
	Tool            string               `json:"tool"`
	Connector       *string              `json:"connector"`
	Class           EffectClass          `json:"class"`
	State           EffectState          `json:"state"`
	Outcome         *string              `json:"outcome"` // ok, refused
	Shadow          bool                 `json:"shadow"`
	Arguments       json.RawMessage      `json:"arguments"`
	Digest          string               `json:"digest"`
	IdempotencyKey  *string              `json:"idempotency_key"`
	EventID         string               `json:"event_id"`
	Attempts        List[EffectAttempt]  `json:"attempts"`
	Completion      *EffectCompletion    `json:"completion"`
	Evidence        List[EffectEvidence] `json:"evidence"`
	Approval        *EffectApproval      `json:"approval"`
	ReplayedFrom    *string              `json:"replayed_from"`
	CompensatedBy   *string              `json:"compensated_by"`
	CreatedAt       Time                 `json:"created_at"`
	UpdatedAt       Time                 `json:"updated_at"`
}

// MarshalJSON sets the type; arguments are an object, never null.
func (e Effect) MarshalJSON() ([]byte, error) {
	type shadow Effect
	e.Type = "effect"
	if isNull(e.Arguments) {
		e.Arguments = json.RawMessage("{}")
	}
	return Encode(shadow(e))
}

// The outcomes that a settlement can have.
const (
	SettleHappened     = "happened"
	SettleDidNotHappen = "did_not_happen"
	SettleProbe        = "probe"
	SettleTell         = "tell"
)

// maxEvidence bounds the text with which a person settles.
const maxEvidence = 10_000

// SettleRequest is the body of POST /v1/effects/{id}/settle.
type SettleRequest struct {
	// Outcome: happened and did_not_happen are a person's word, probe asks the
	// target again, tell leaves it to the agent.
	Outcome string `json:"outcome"`
	// Response is the tool's answer of an effect that happened, if it is known.
	Response json.RawMessage `json:"response,omitzero"`
	// Evidence says how the person knows.
	Evidence *string `json:"evidence,omitzero"`
}

// Validate checks the outcome and what may stand beside it.
func (s SettleRequest) Validate() error {
	if err := oneOf("outcome", s.Outcome, SettleHappened, SettleDidNotHappen, SettleProbe, SettleTell); err != nil {
		return err
	}
	if !isNull(s.Response) && s.Outcome != SettleHappened {
		return Invalid("response", "belongs to outcome %q only; leave it out", SettleHappened)
	}
	if !isNull(s.Response) {
		if b := firstByte(s.Response); b != '{' && b != '[' && b != '"' {
			return Invalid("response", "must be the tool's answer: an object, a list of content blocks, or text")
		}
	}
	return atMostPtr("evidence", s.Evidence, maxEvidence)
}

// EffectListParams selects effects.
type EffectListParams struct {
	States  []EffectState
	Classes []EffectClass
	Tools   []string
	Order   string // asc (default), desc
	Limit   int
	Page    string
}

// Query is the query string.
func (p EffectListParams) Query() url.Values {
	q := url.Values{}
	for _, s := range p.States {
		q.Add("state[]", string(s))
	}
	for _, c := range p.Classes {
		q.Add("class[]", string(c))
	}
	for _, t := range p.Tools {
		q.Add("tool[]", t)
	}
	setString(q, "order", p.Order)
	setPage(q, p.Limit, p.Page)
	return q
}
