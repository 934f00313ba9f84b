package api

import (
	"cmp"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// Limits of client events (reference section 9.3).
const (
	MaxSendEvents      = 1000 // not stated by the reference; bounds one transaction
	MaxDenyMessage     = 10_000
	MaxRubric          = 262_144
	MaxIterations      = 20
	DefaultIterations  = 3
	maxOutcomeDescribe = 100_000
)

// UserMessage is what a user says.
type UserMessage struct {
	Content List[Block] `json:"content"`
}

// EventType is user.message.
func (*UserMessage) EventType() EventType { return TypeUserMessage }

// UserInterrupt stops the session, or one of its threads.
type UserInterrupt struct {
	SessionThreadID string `json:"session_thread_id,omitzero"`
}

// EventType is user.interrupt.
func (*UserInterrupt) EventType() EventType { return TypeUserInterrupt }

// The results of a confirmation.
const (
	ResultAllow = "allow"
	ResultDeny  = "deny"
)

// UserToolConfirmation answers a tool call that asks. ToolUseID is an event id.
type UserToolConfirmation struct {
	ToolUseID       string  `json:"tool_use_id"`
	Result          string  `json:"result"`
	DenyMessage     *string `json:"deny_message,omitzero"`
	SessionThreadID string  `json:"session_thread_id,omitzero"` // set by the server
}

// EventType is user.tool_confirmation.
func (*UserToolConfirmation) EventType() EventType { return TypeUserToolConfirmation }

// UserCustomToolResult is the client's answer to a call of a custom tool.
type UserCustomToolResult struct {
	CustomToolUseID string      `json:"custom_tool_use_id"`
	Content         List[Block] `json:"content,omitzero"`
	IsError         *bool       `json:"is_error,omitzero"`
	SessionThreadID string      `json:"session_thread_id,omitzero"` // set by the server
}

// EventType is user.custom_tool_result.
func (*UserCustomToolResult) EventType() EventType { return TypeUserCustomToolResult }

// UserToolResult is a worker's answer to a built-in tool's call, in
// self-hosted environments only.
type UserToolResult struct {
	ToolUseID       string      `json:"tool_use_id"`
	Content         List[Block] `json:"content,omitzero"`
	IsError         *bool       `json:"is_error,omitzero"`
	SessionThreadID string      `json:"session_thread_id,omitzero"` // set by the server
}

// EventType is user.tool_result.
func (*UserToolResult) EventType() EventType { return TypeUserToolResult }

// Rubric says how an outcome is graded.
type Rubric struct {
	Type    string `json:"type"` // text, file
	Content string `json:"content,omitzero"`
	FileID  string `json:"file_id,omitzero"`
}

// UserDefineOutcome asks for an outcome that is graded.
type UserDefineOutcome struct {
	Description   string `json:"description"`
	Rubric        Rubric `json:"rubric"`
	MaxIterations *int64 `json:"max_iterations,omitzero"`
	OutcomeID     string `json:"outcome_id,omitzero"` // set by the server
}

// EventType is user.define_outcome.
func (*UserDefineOutcome) EventType() EventType { return TypeUserDefineOutcome }

// SystemMessage instructs the model in the middle of a conversation.
type SystemMessage struct {
	Content List[Block] `json:"content"`
}

// EventType is system.message.
func (*SystemMessage) EventType() EventType { return TypeSystemMessage }

// ClientEvents are events that a client sends.
type ClientEvents []EventBody

// clientTypes are the types that a client may send.
var clientTypes = []string{string(TypeUserMessage), string(TypeUserInterrupt), string(TypeUserToolConfirmation),
	string(TypeUserCustomToolResult), string(TypeUserToolResult), string(TypeUserDefineOutcome), string(TypeSystemMessage)}

// UnmarshalJSON refuses types that a client may not send, naming the index.
func (c *ClientEvents) UnmarshalJSON(data []byte) error {
	var raw []jsontext.Value
	if err := unmarshal(data, &raw); err != nil {
		return err
	}
	*c = make(ClientEvents, 0, len(raw))
	for i, r := range raw {
		b, err := UnmarshalBody(r)
		if err == nil {
			t := string(b.EventType())
			if e := oneOf("type", t, clientTypes...); e != nil {
				err = badField("type", "%s", strings.TrimPrefix(e.(*Error).Message, "type: "))
			}
		}
		if err != nil {
			return &fieldError{path: append([]string{index("", i)}, pathOf(err)...), text: textOf(err)}
		}
		*c = append(*c, b)
	}
	return nil
}

func pathOf(err error) []string {
	if fe, ok := err.(*fieldError); ok {
		return fe.path
	}
	return nil
}

func textOf(err error) string {
	if fe, ok := err.(*fieldError); ok {
		return fe.text
	}
	return err.Error()
}

// MarshalJSON writes the events as they are sent: without id and version.
func (c ClientEvents) MarshalJSON() ([]byte, error) {
	out := make(List[jsontext.Value], 0, len(c))
	for _, b := range c {
		body, err := MarshalBody(b)
		if err != nil {
			return nil, err
		}
		wire, err := WireEvent("", nil, body)
		if err != nil {
			return nil, err
		}
		out = append(out, wire)
	}
	return Encode(out)
}

// SendEvents is the body of POST /v1/sessions/{id}/events.
type SendEvents struct {
	Events ClientEvents `json:"events"`
}

// Validate applies the rules of reference sections 9.3 and 9.4 that need no
// look at the session.
func (s SendEvents) Validate() error {
	if len(s.Events) == 0 || len(s.Events) > MaxSendEvents {
		return Invalid("events", "must hold 1 to %d events, got %d", MaxSendEvents, len(s.Events))
	}
	return s.Events.validate("events")
}

// SentEvents is the answer: the same events with their ids, in order.
type SentEvents struct {
	Data List[Event] `json:"data"`
}

func (c ClientEvents) validate(path string) error {
	for i, b := range c {
		p := index(path, i)
		if err := validateBody(p, b); err != nil {
			return err
		}
		if b.EventType() != TypeSystemMessage {
			continue
		}
		if i != len(c)-1 {
			return Invalid(p+".type", "system.message must be the last event of a request, at most one")
		}
		if i > 0 && !mayPrecedeSystem(c[i-1].EventType()) {
			return Invalid(p+".type", "system.message must stand alone or directly after user.message, user.tool_result or user.custom_tool_result")
		}
	}
	return nil
}

func mayPrecedeSystem(t EventType) bool {
	return t == TypeUserMessage || t == TypeUserToolResult || t == TypeUserCustomToolResult
}

// validateInitial checks the initial events of a session (reference section 6.1).
func (c ClientEvents) validateInitial(path string) error {
	if len(c) > MaxInitialEvents {
		return Invalid(path, "holds %d events; at most %d are allowed", len(c), MaxInitialEvents)
	}
	outcomes := 0
	for i, b := range c {
		p := index(path, i) + ".type"
		switch b.EventType() {
		case TypeUserMessage:
		case TypeUserDefineOutcome:
			if outcomes++; outcomes > 1 {
				return Invalid(p, "at most one user.define_outcome is allowed")
			}
		default:
			return Invalid(p, "%q cannot be an initial event; use user.message or user.define_outcome", b.EventType())
		}
	}
	return c.validate(path)
}

func validateBody(path string, body EventBody) error {
	switch b := body.(type) {
	case *UserMessage:
		return validateBlocks(path+".content", b.Content, inMessage)
	case *UserInterrupt:
		return atMost(path+".session_thread_id", b.SessionThreadID, maxID)
	case *UserToolConfirmation:
		return b.validate(path)
	case *UserCustomToolResult:
		return cmp.Or(required(path+".custom_tool_use_id", b.CustomToolUseID, maxID), validateBlocks(path+".content", b.Content, inResult))
	case *UserToolResult:
		return cmp.Or(required(path+".tool_use_id", b.ToolUseID, maxID), validateBlocks(path+".content", b.Content, inResult))
	case *UserDefineOutcome:
		return b.validate(path)
	case *SystemMessage:
		return validateBlocks(path+".content", b.Content, inSystem)
	case nil:
		return Invalid(path, "is required")
	}
	return oneOf(path+".type", string(body.EventType()), clientTypes...)
}

func (c *UserToolConfirmation) validate(path string) error {
	err := cmp.Or(required(path+".tool_use_id", c.ToolUseID, maxID), oneOf(path+".result", c.Result, ResultAllow, ResultDeny),
		atMostPtr(path+".deny_message", c.DenyMessage, MaxDenyMessage))
	if err != nil {
		return err
	}
	if c.DenyMessage != nil && c.Result != ResultDeny {
		return Invalid(path+".deny_message", "belongs to result \"deny\" only; leave it out")
	}
	return nil
}

func (o *UserDefineOutcome) validate(path string) error {
	if n := o.MaxIterations; n != nil && (*n < 1 || *n > MaxIterations) {
		return Invalid(path+".max_iterations", "must be 1 to %d", MaxIterations)
	}
	if err := required(path+".description", o.Description, maxOutcomeDescribe); err != nil {
		return err
	}
	switch o.Rubric.Type {
	case "text":
		return required(path+".rubric.content", o.Rubric.Content, MaxRubric)
	case "file":
		return required(path+".rubric.file_id", o.Rubric.FileID, maxID)
	}
	return oneOf(path+".rubric.type", o.Rubric.Type, "text", "file")
}
