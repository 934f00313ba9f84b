package api

import (
	"bytes"
	"encoding/json"
	"net/url"
	"time"

	"github.com/go-json-experiment/json/jsontext"
)

// EventType is the "type" of an event.
type EventType string

// The types of client events (reference section 9.3).
const (
	TypeUserMessage          EventType = "user.message"
	TypeUserInterrupt        EventType = "user.interrupt"
	TypeUserToolConfirmation EventType = "user.tool_confirmation"
	TypeUserCustomToolResult EventType = "user.custom_tool_result"
	TypeUserToolResult       EventType = "user.tool_result"
	TypeUserDefineOutcome    EventType = "user.define_outcome"
	TypeSystemMessage        EventType = "system.message"
)

// The types of server events (reference sections 9.5 and 9.6).
const (
	TypeAgentMessage             EventType = "agent.message"
	TypeAgentThinking            EventType = "agent.thinking"
	TypeAgentToolUse             EventType = "agent.tool_use"
	TypeAgentToolResult          EventType = "agent.tool_result"
	TypeAgentMCPToolUse          EventType = "agent.mcp_tool_use"
	TypeAgentMCPToolResult       EventType = "agent.mcp_tool_result"
	TypeAgentCustomToolUse       EventType = "agent.custom_tool_use"
	TypeAgentContextCompacted    EventType = "agent.thread_context_compacted"
	TypeSessionStatusRunning     EventType = "session.status_running"
	TypeSessionStatusIdle        EventType = "session.status_idle"
	TypeSessionStatusRescheduled EventType = "session.status_rescheduled"
	TypeSessionStatusTerminated  EventType = "session.status_terminated"
	TypeSessionDeleted           EventType = "session.deleted"
	TypeSessionUpdated           EventType = "session.updated"
	TypeSessionUsage             EventType = "session.usage"
	TypeSessionError             EventType = "session.error"
	TypeThreadStatusRunning      EventType = "session.thread_status_running"
	TypeThreadStatusIdle         EventType = "session.thread_status_idle"
	TypeThreadStatusRescheduled  EventType = "session.thread_status_rescheduled"
	TypeThreadStatusTerminated   EventType = "session.thread_status_terminated"
	TypeModelRequestStart        EventType = "span.model_request_start"
	TypeModelRequestEnd          EventType = "span.model_request_end"
)

// The types of frames that only streams carry, and of our own events.
const (
	TypeEventStart     EventType = "event_start"
	TypeEventDelta     EventType = "event_delta"
	TypeSessionPaused  EventType = "session.paused"  // extension, before the idle of a pause
	TypeSessionResumed EventType = "session.resumed" // extension
	TypeStreamReset    EventType = "stream.reset"    // extension, stream only: the cursor is unknown
)

// EventBody is an event without id and processed_at: its own fields.
type EventBody interface {
	EventType() EventType
}

// BodyVersion is the version in event bodies of the log.
const BodyVersion = 1

// Event is one event as the API shows it. ID is empty in frames that are never
// stored; ProcessedAt is nil while a client event is queued.
type Event struct {
	ID          string
	ProcessedAt *Time
	Body        EventBody
	// Seq is the position in the session's log, as a stream told it; 0 when unknown.
	Seq int64
}

// Type is the type of the event.
func (e Event) Type() EventType {
	if e.Body == nil {
		return ""
	}
	return e.Body.EventType()
}

// MarshalJSON writes id, type, processed_at and the fields of the body.
func (e Event) MarshalJSON() ([]byte, error) {
	body, err := MarshalBody(e.Body)
	if err != nil {
		return nil, err
	}
	var at *time.Time
	if e.ProcessedAt != nil {
		at = &e.ProcessedAt.Time
	}
	return WireEvent(e.ID, at, body)
}

// UnmarshalJSON reads an event; an unknown type gives an UnknownEvent.
func (e *Event) UnmarshalJSON(data []byte) error {
	var head struct {
		ID          string `json:"id"`
		ProcessedAt *Time  `json:"processed_at"`
	}
	if err := unmarshal(data, &head); err != nil {
		return err
	}
	body, err := UnmarshalBody(data)
	if err != nil {
		return err
	}
	*e = Event{ID: head.ID, ProcessedAt: head.ProcessedAt, Body: body}
	return nil
}

// MarshalBody writes an event body for the log: its fields, type and version.
func MarshalBody(b EventBody) ([]byte, error) {
	if b == nil {
		return nil, badField("", "event has no body")
	}
	if u, ok := b.(*UnknownEvent); ok {
		return u.Raw, nil
	}
	if t, ok := b.(interface{ withInput() EventBody }); ok {
		b = t.withInput()
	}
	fields, err := Encode(b)
	if err != nil {
		return nil, err
	}
	out, err := Encode(struct {
		V    int       `json:"v"`
		Type EventType `json:"type"`
	}{BodyVersion, b.EventType()})
	if err != nil || string(fields) == "{}" {
		return out, err
	}
	out[len(out)-1] = ','
	return append(out, fields[1:]...), nil
}

// UnmarshalBody reads a body from the log or the wire, by its type. Bodies are
// pointers: *AgentMessage, *UserMessage, ….
func UnmarshalBody(data []byte) (EventBody, error) {
	var head struct {
		Type EventType `json:"type"`
	}
	if err := unmarshal(data, &head); err != nil {
		return nil, err
	}
	make, ok := bodies[head.Type]
	if !ok {
		return &UnknownEvent{Type: head.Type, Raw: append(json.RawMessage(nil), data...)}, nil
	}
	b := make()
	return b, unmarshal(data, b)
}

// WireEvent writes the wire form of a body from the log: id, type and
// processed_at (null when at is nil) before the other fields, without version.
// An empty id leaves id and processed_at out, for frames that are never stored.
func WireEvent(id string, at *time.Time, body []byte) ([]byte, error) {
	fields, err := members(body)
	if err != nil {
		return nil, err
	}
	out := []byte{'{'}
	add := func(name string, value any) error {
		v, err := Encode(value)
		if err != nil {
			return err
		}
		out = appendMember(out, name, v)
		return nil
	}
	if id != "" {
		if err := add("id", id); err != nil {
			return nil, err
		}
	}
	for _, f := range fields {
		if f.name == "type" {
			out = appendMember(out, f.name, f.value)
		}
	}
	if id != "" {
		var t *Time
		if at != nil {
			v := At(*at)
			t = &v
		}
		if err := add("processed_at", t); err != nil {
			return nil, err
		}
	}
	for _, f := range fields {
		switch f.name {
		case "v", "type", "not_run": // the last is of recovery: nothing came of the call
		case "id", "processed_at":
			if id == "" {
				out = appendMember(out, f.name, f.value)
			}
		default:
			out = appendMember(out, f.name, f.value)
		}
	}
	return append(out, '}'), nil
}

type member struct {
	name  string
	value jsontext.Value
}

// members reads the members of an object in their order.
func members(data []byte) ([]member, error) {
	dec := jsontext.NewDecoder(bytes.NewReader(data), lenient)
	tok, err := dec.ReadToken()
	if err != nil {
		return nil, locate(err)
	}
	if tok.Kind() != '{' {
		return nil, badField("", "event is not an object")
	}
	var out []member
	for dec.PeekKind() == '"' {
		name, err := dec.ReadToken()
		if err != nil {
			return nil, locate(err)
		}
		key := name.String() // a copy: the token is valid until the next read
		v, err := dec.ReadValue()
		if err != nil {
			return nil, locate(err)
		}
		out = append(out, member{key, v.Clone()})
	}
	if _, err := dec.ReadToken(); err != nil {
		return nil, locate(err)
	}
	return out, nil
}

func appendMember(out []byte, name string, value []byte) []byte {
	if len(out) > 1 {
		out = append(out, ',')
	}
	out, _ = jsontext.AppendQuote(out, name)
	out = append(out, ':')
	return append(out, value...)
}

// UnknownEvent is an event of a type that this version does not know.
type UnknownEvent struct {
	Type EventType
	Raw  json.RawMessage // the whole event
}

// EventType is the event's type.
func (u *UnknownEvent) EventType() EventType { return u.Type }

// bodies makes an empty body for each type that this version knows.
var bodies = map[EventType]func() EventBody{
	TypeUserMessage:              func() EventBody { return new(UserMessage) },
	TypeUserInterrupt:            func() EventBody { return new(UserInterrupt) },
	TypeUserToolConfirmation:     func() EventBody { return new(UserToolConfirmation) },
	TypeUserCustomToolResult:     func() EventBody { return new(UserCustomToolResult) },
	TypeUserToolResult:           func() EventBody { return new(UserToolResult) },
	TypeUserDefineOutcome:        func() EventBody { return new(UserDefineOutcome) },
	TypeSystemMessage:            func() EventBody { return new(SystemMessage) },
	TypeAgentMessage:             func() EventBody { return new(AgentMessage) },
	TypeAgentThinking:            func() EventBody { return new(AgentThinking) },
	TypeAgentToolUse:             func() EventBody { return new(AgentToolUse) },
	TypeAgentToolResult:          func() EventBody { return new(AgentToolResult) },
	TypeAgentMCPToolUse:          func() EventBody { return new(AgentMCPToolUse) },
	TypeAgentMCPToolResult:       func() EventBody { return new(AgentMCPToolResult) },
	TypeAgentCustomToolUse:       func() EventBody { return new(AgentCustomToolUse) },
	TypeAgentContextCompacted:    func() EventBody { return new(AgentContextCompacted) },
	TypeSessionStatusRunning:     func() EventBody { return new(SessionStatusRunning) },
	TypeSessionStatusIdle:        func() EventBody { return new(SessionStatusIdle) },
	TypeSessionStatusRescheduled: func() EventBody { return new(SessionStatusRescheduled) },
	TypeSessionStatusTerminated:  func() EventBody { return new(SessionStatusTerminated) },
	TypeSessionDeleted:           func() EventBody { return new(SessionDeleted) },
	TypeSessionUpdated:           func() EventBody { return new(SessionUpdated) },
	TypeSessionUsage:             func() EventBody { return new(SessionUsage) },
	TypeSessionError:             func() EventBody { return new(SessionError) },
	TypeThreadStatusRunning:      func() EventBody { return new(ThreadStatusRunning) },
	TypeThreadStatusIdle:         func() EventBody { return new(ThreadStatusIdle) },
	TypeThreadStatusRescheduled:  func() EventBody { return new(ThreadStatusRescheduled) },
	TypeThreadStatusTerminated:   func() EventBody { return new(ThreadStatusTerminated) },
	TypeModelRequestStart:        func() EventBody { return new(ModelRequestStart) },
	TypeModelRequestEnd:          func() EventBody { return new(ModelRequestEnd) },
	TypeEventStart:               func() EventBody { return new(EventStart) },
	TypeEventDelta:               func() EventBody { return new(EventDelta) },
	TypeSessionPaused:            func() EventBody { return new(SessionPaused) },
	TypeSessionResumed:           func() EventBody { return new(SessionResumed) },
	TypeStreamReset:              func() EventBody { return new(StreamReset) },
}

// KnownEventType reports whether the type is one that lists can filter by.
func KnownEventType(t EventType) bool {
	switch t {
	case TypeEventStart, TypeEventDelta, TypeStreamReset, TypeSessionDeleted:
		return false
	}
	_, ok := bodies[t]
	return ok || laterEventTypes[t]
}

// laterEventTypes are stored types of the Managed Agents API that this version
// does not emit; a filter may name them.
var laterEventTypes = map[EventType]bool{
	"agent.thread_message_sent": true, "agent.thread_message_received": true, "session.thread_created": true,
	"span.outcome_evaluation_start": true, "span.outcome_evaluation_ongoing": true, "span.outcome_evaluation_end": true,
	"workflow_run.created": true, "workflow_run.status_running": true, "workflow_run.status_idle": true,
	"workflow_run.phase_started": true, "workflow_run.phase_ended": true, "workflow_run.error": true,
	"workflow_run.status_ended": true,
}

// EventListParams selects events (reference section 1.7).
type EventListParams struct {
	Types     []EventType
	CreatedAt TimeRange // compared with processed_at
	Order     string    // asc (default), desc
	Limit     int
	Page      string
}

// Query is the query string.
func (p EventListParams) Query() url.Values {
	q := url.Values{}
	for _, t := range p.Types {
		q.Add("types[]", string(t))
	}
	p.CreatedAt.set(q, "created_at")
	setString(q, "order", p.Order)
	setPage(q, p.Limit, p.Page)
	return q
}
