package session

import (
	"bytes"
	"encoding/json"

	"github.com/planaria/planaria/internal/store"
)

// Event types that the driver writes (reference sections 9.5 and 9.6).
const (
	evRunning           = "session.status_running"
	evIdle              = "session.status_idle"
	evRescheduled       = "session.status_rescheduled"
	evTerminated        = "session.status_terminated"
	evThreadRunning     = "session.thread_status_running"
	evThreadIdle        = "session.thread_status_idle"
	evThreadRescheduled = "session.thread_status_rescheduled"
	evThreadTerminated  = "session.thread_status_terminated"
	evUsage             = "session.usage"
	evError             = "session.error"
	evUpdated           = "session.updated"
	evPaused            = "session.paused"  // extension
	evResumed           = "session.resumed" // extension
	evSpanStart         = "span.model_request_start"
	evSpanEnd           = "span.model_request_end"
	evMessage           = "agent.message"
	evThinking          = "agent.thinking"
	evToolUse           = "agent.tool_use"
	evToolResult        = "agent.tool_result"
	evMCPToolUse        = "agent.mcp_tool_use"
	evMCPToolResult     = "agent.mcp_tool_result"
	evCustomToolUse     = "agent.custom_tool_use"
	evCompacted         = "agent.thread_context_compacted"

	inMessage      = "user.message"
	inSystem       = "system.message"
	inInterrupt    = "user.interrupt"
	inConfirmation = "user.tool_confirmation"
	inCustomResult = "user.custom_tool_result"
	inToolResult   = "user.tool_result"
	inOutcome      = "user.define_outcome"
)

// Controls of the inbox.
const (
	controlPause  = "pause"
	controlResume = "resume"
	controlUpdate = "update"
)

// fields are the members of an event beside v and type.
type fields map[string]any

// event makes an event's draft with a given id.
func event(id, typ string, thread store.ThreadID, f fields) store.Draft {
	body := fields{"v": store.BodyVersion, "type": typ}
	for k, v := range f {
		body[k] = v
	}
	return store.Draft{Kind: store.KindEvent, Type: typ, ID: id, Thread: thread, Body: encode(body)}
}

// record makes a record's draft.
func record(kind store.Kind, id string, thread store.ThreadID, body any) store.Draft {
	return store.Draft{Kind: kind, ID: id, Thread: thread, Body: encode(body)}
}

// encode marshals what we built ourselves; it cannot fail but by a bug. Text
// stays as it is: a model's blocks go back to it byte for byte.
func encode(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic("session: encode: " + err.Error())
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// stopReason is why a session rests (reference section 9.7).
type stopReason struct {
	Type     string          `json:"type"`
	EventIDs []store.EventID `json:"event_ids,omitempty"`
}

// The stop reasons.
const (
	stopEndTurn   = "end_turn"
	stopAction    = "requires_action"
	stopExhausted = "retries_exhausted"
	stopBudget    = "budget_reached"
	stopRefusal   = "refusal"
)

// sessionError is the error of a session.error event (reference section 9.8).
type sessionError struct {
	Type        string `json:"type"`
	Message     string `json:"message"`
	RetryStatus struct {
		Type string `json:"type"`
	} `json:"retry_status"`
	MCPServerName string `json:"mcp_server_name,omitempty"`
	RepositoryURL string `json:"repository_url,omitempty"`
}

func newSessionError(typ, message, retry string) sessionError {
	e := sessionError{Type: typ, Message: message}
	e.RetryStatus.Type = retry
	return e
}

// text makes a one-block content array.
func text(s string) json.RawMessage {
	return encode([]fields{{"type": "text", "text": s}})
}

// centsOf rounds 10⁻⁹ dollars to whole cents as a wire amount (reference section 14).
func centsOf(nano int64) string {
	b, _ := json.Marshal((nano + 5_000_000) / 10_000_000)
	return string(b)
}

// wireUsage is the session usage object (reference section 14).
func wireUsage(u store.SessionUsage) fields {
	return fields{
		"input_tokens": u.Input, "output_tokens": u.Output, "cache_read_input_tokens": u.CacheRead,
		"cache_creation": fields{
			"ephemeral_5m_input_tokens": u.CacheCreation5m, "ephemeral_1h_input_tokens": u.CacheCreation1h,
		},
		"active_seconds": float64(u.ActiveMicros) / 1e6,
		"list_cost":      fields{"amount": centsOf(u.CostNanoUSD), "currency": "USD"},
	}
}

// modelUsage is the usage of one request (reference section 9.6).
func modelUsage(u store.TokenUsage, speed string) fields {
	f := fields{
		"input_tokens": u.Input, "output_tokens": u.Output,
		"cache_creation_input_tokens": u.CacheCreation5m + u.CacheCreation1h,
		"cache_read_input_tokens":     u.CacheRead,
	}
	if speed != "" {
		f["speed"] = speed
	}
	return f
}
