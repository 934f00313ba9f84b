package api

import "encoding/json"

// AgentMessage is what the model said in one answer.
type AgentMessage struct {
	Content List[Block] `json:"content"`
}

// EventType is agent.message.
func (*AgentMessage) EventType() EventType { return TypeAgentMessage }

// AgentThinking says that the model thought; it carries no text.
type AgentThinking struct{}

// EventType is agent.thinking.
func (*AgentThinking) EventType() EventType { return TypeAgentThinking }

// The values of evaluated_permission.
const (
	PermissionAllow = "allow"
	PermissionAsk   = "ask"
	PermissionDeny  = "deny"
)

// Evaluation says which policy ruled a tool call.
type Evaluation struct {
	Type string `json:"type"` // always_allow, always_ask, auto
	// EvaluatedPermission is the judgement of type auto.
	EvaluatedPermission *AutoPermission `json:"evaluated_permission,omitzero"`
}

// AutoPermission is the judgement of the policy auto.
type AutoPermission struct {
	Type       string `json:"type"` // allow, ask, deny
	ReasonCode string `json:"reason_code,omitzero"`
}

// AgentToolUse is a call of a built-in tool, before it runs.
type AgentToolUse struct {
	Name                string          `json:"name"`
	Input               json.RawMessage `json:"input"` // an object
	EvaluatedPermission string          `json:"evaluated_permission"`
	Evaluation          *Evaluation     `json:"evaluation,omitzero"`
	SessionThreadID     string          `json:"session_thread_id,omitzero"`
}

// EventType is agent.tool_use.
func (*AgentToolUse) EventType() EventType { return TypeAgentToolUse }

func (u AgentToolUse) withInput() EventBody { u.Input = objectOrEmpty(u.Input); return &u }

// AgentToolResult ends a call of a built-in tool.
type AgentToolResult struct {
	ToolUseID string      `json:"tool_use_id"`
	Content   List[Block] `json:"content"`
	IsError   bool        `json:"is_error"`
}

// EventType is agent.tool_result.
func (*AgentToolResult) EventType() EventType { return TypeAgentToolResult }

// AgentMCPToolUse is a call of a tool of an MCP server, before it runs.
type AgentMCPToolUse struct {
	MCPServerName       string          `json:"mcp_server_name"`
	Name                string          `json:"name"`
	Input               json.RawMessage `json:"input"` // an object
	EvaluatedPermission string          `json:"evaluated_permission"`
	Evaluation          *Evaluation     `json:"evaluation,omitzero"`
	SessionThreadID     string          `json:"session_thread_id,omitzero"`
}

// EventType is agent.mcp_tool_use.
func (*AgentMCPToolUse) EventType() EventType { return TypeAgentMCPToolUse }

func (u AgentMCPToolUse) withInput() EventBody { u.Input = objectOrEmpty(u.Input); return &u }

// AgentMCPToolResult ends a call of a tool of an MCP server.
type AgentMCPToolResult struct {
	MCPToolUseID string      `json:"mcp_tool_use_id"`
	Content      List[Block] `json:"content"`
	IsError      bool        `json:"is_error"`
}

// EventType is agent.mcp_tool_result.
func (*AgentMCPToolResult) EventType() EventType { return TypeAgentMCPToolResult }

// AgentCustomToolUse is a call that the client performs.
type AgentCustomToolUse struct {
	Name            string          `json:"name"`
	Input           json.RawMessage `json:"input"` // an object
	SessionThreadID string          `json:"session_thread_id,omitzero"`
}

// EventType is agent.custom_tool_use.
func (*AgentCustomToolUse) EventType() EventType { return TypeAgentCustomToolUse }

func (u AgentCustomToolUse) withInput() EventBody { u.Input = objectOrEmpty(u.Input); return &u }

// AgentContextCompacted says that the history was summarised.
type AgentContextCompacted struct{}

// EventType is agent.thread_context_compacted.
func (*AgentContextCompacted) EventType() EventType { return TypeAgentContextCompacted }

// SessionStatusRunning says that a turn starts or goes on.
type SessionStatusRunning struct{}

// EventType is session.status_running.
func (*SessionStatusRunning) EventType() EventType { return TypeSessionStatusRunning }

// The types of stop reasons (reference section 9.7).
const (
	StopEndTurn          = "end_turn"
	StopRequiresAction   = "requires_action"
	StopRetriesExhausted = "retries_exhausted"
	StopBudgetReached    = "budget_reached"
	StopRefusal          = "refusal"
)

// StopReason says why a session waits. EventIDs belongs to requires_action.
type StopReason struct {
	Type     string
	EventIDs []string
}

// MarshalJSON writes event_ids only, and always, for requires_action.
func (s StopReason) MarshalJSON() ([]byte, error) {
	if s.Type == StopRequiresAction {
		return Encode(struct {
			Type     string       `json:"type"`
			EventIDs List[string] `json:"event_ids"`
		}{s.Type, s.EventIDs})
	}
	return Encode(map[string]string{"type": s.Type})
}

// UnmarshalJSON reads either form.
func (s *StopReason) UnmarshalJSON(data []byte) error {
	var v struct {
		Type     string   `json:"type"`
		EventIDs []string `json:"event_ids"`
	}
	err := unmarshal(data, &v)
	*s = StopReason{v.Type, v.EventIDs}
	return err
}

// StopDetails explains a refusal; null for every other reason.
type StopDetails struct {
	Type        string  `json:"type"` // refusal
	Category    *string `json:"category"`
	Explanation string  `json:"explanation"`
}

// SessionStatusIdle is the last event of a turn.
type SessionStatusIdle struct {
	StopReason  StopReason   `json:"stop_reason"`
	StopDetails *StopDetails `json:"stop_details"`
}

// EventType is session.status_idle.
func (*SessionStatusIdle) EventType() EventType { return TypeSessionStatusIdle }

// SessionStatusRescheduled says that the session will retry by itself.
type SessionStatusRescheduled struct{}

// EventType is session.status_rescheduled.
func (*SessionStatusRescheduled) EventType() EventType { return TypeSessionStatusRescheduled }

// SessionStatusTerminated is final.
type SessionStatusTerminated struct{}

// EventType is session.status_terminated.
func (*SessionStatusTerminated) EventType() EventType { return TypeSessionStatusTerminated }

// SessionDeleted is the last event of any open stream; it is not stored.
type SessionDeleted struct{}

// EventType is session.deleted.
func (*SessionDeleted) EventType() EventType { return TypeSessionDeleted }

// SessionUpdated holds what an update changed; a null budget was removed.
type SessionUpdated struct {
	Title    Optional[string]       `json:"title,omitzero"`
	Metadata Optional[Metadata]     `json:"metadata,omitzero"`
	Agent    Optional[SessionAgent] `json:"agent,omitzero"`
	Budget   Optional[Budget]       `json:"budget,omitzero"`
}

// EventType is session.updated.
func (*SessionUpdated) EventType() EventType { return TypeSessionUpdated }

// SessionUsage stands directly before each idle of the session.
type SessionUsage struct {
	Usage  Usage   `json:"usage"`
	Budget *Budget `json:"budget"`
}

// EventType is session.usage.
func (*SessionUsage) EventType() EventType { return TypeSessionUsage }

// The types of retry_status (reference section 9.8).
const (
	RetryRetrying  = "retrying"
	RetryExhausted = "exhausted"
	RetryTerminal  = "terminal"
)

// The types of a session's error (reference section 9.8).
const (
	SessionErrUnknown           = "unknown_error"
	SessionErrOverloaded        = "model_overloaded_error"
	SessionErrRateLimited       = "model_rate_limited_error"
	SessionErrRequestFailed     = "model_request_failed_error"
	SessionErrBilling           = "billing_error"
	SessionErrMCPConnection     = "mcp_connection_failed_error"
	SessionErrMCPAuthentication = "mcp_authentication_failed_error"
	SessionErrToolUseLimit      = "tool_use_limit_reached_error"
	SessionErrCompactionLimit   = "compaction_limit_reached_error"
	SessionErrCredentialHost    = "credential_host_unreachable_error"
)

// RetryStatus says what becomes of the turn after an error.
type RetryStatus struct {
	Type string `json:"type"`
}

// SessionErrorDetail is what went wrong.
type SessionErrorDetail struct {
	Type          string      `json:"type"`
	Message       string      `json:"message"`
	RetryStatus   RetryStatus `json:"retry_status"`
	MCPServerName string      `json:"mcp_server_name,omitzero"`
	CredentialID  string      `json:"credential_id,omitzero"`
	VaultID       string      `json:"vault_id,omitzero"`
	RepositoryURL string      `json:"repository_url,omitzero"`
}

// SessionError reports an error of the session.
type SessionError struct {
	Error SessionErrorDetail `json:"error"`
}

// EventType is session.error.
func (*SessionError) EventType() EventType { return TypeSessionError }

// ThreadStatusRunning says that a thread starts or goes on.
type ThreadStatusRunning struct {
	SessionThreadID string `json:"session_thread_id"`
	AgentName       string `json:"agent_name"`
}

// EventType is session.thread_status_running.
func (*ThreadStatusRunning) EventType() EventType { return TypeThreadStatusRunning }

// ThreadStatusIdle says that a thread waits.
type ThreadStatusIdle struct {
	SessionThreadID string       `json:"session_thread_id"`
	AgentName       string       `json:"agent_name"`
	StopReason      StopReason   `json:"stop_reason"`
	StopDetails     *StopDetails `json:"stop_details"`
}

// EventType is session.thread_status_idle.
func (*ThreadStatusIdle) EventType() EventType { return TypeThreadStatusIdle }

// ThreadStatusRescheduled says that a thread will retry by itself.
type ThreadStatusRescheduled struct {
	SessionThreadID string `json:"session_thread_id"`
	AgentName       string `json:"agent_name"`
}

// EventType is session.thread_status_rescheduled.
func (*ThreadStatusRescheduled) EventType() EventType { return TypeThreadStatusRescheduled }

// ThreadStatusTerminated is final.
type ThreadStatusTerminated struct {
	SessionThreadID string `json:"session_thread_id"`
	AgentName       string `json:"agent_name"`
}

// EventType is session.thread_status_terminated.
func (*ThreadStatusTerminated) EventType() EventType { return TypeThreadStatusTerminated }

// ModelRequestStart stands before each model request.
type ModelRequestStart struct{}

// EventType is span.model_request_start.
func (*ModelRequestStart) EventType() EventType { return TypeModelRequestStart }

// ModelRequestEnd stands after each model request, also a failed one.
type ModelRequestEnd struct {
	ModelRequestStartID string     `json:"model_request_start_id"`
	IsError             bool       `json:"is_error"`
	ModelUsage          ModelUsage `json:"model_usage"`
}

// EventType is span.model_request_end.
func (*ModelRequestEnd) EventType() EventType { return TypeModelRequestEnd }

// EventStart announces an event that is under way; streams only.
type EventStart struct {
	Event EventPreview `json:"event"`
}

// EventPreview names the event that is under way.
type EventPreview struct {
	Type EventType `json:"type"` // agent.message, agent.thinking
	ID   string    `json:"id"`
}

// EventType is event_start.
func (*EventStart) EventType() EventType { return TypeEventStart }

// EventDelta is a fragment of an event under way; streams only.
type EventDelta struct {
	EventID string `json:"event_id"`
	Delta   Delta  `json:"delta"`
}

// Delta is the fragment: text to append to block Index.
type Delta struct {
	Type    string    `json:"type"` // content_delta
	Index   int64     `json:"index"`
	Content TextBlock `json:"content"`
}

// EventType is event_delta.
func (*EventDelta) EventType() EventType { return TypeEventDelta }

// TextDelta makes the frame of a text fragment.
func TextDelta(eventID string, block int64, text string) *EventDelta {
	return &EventDelta{EventID: eventID, Delta: Delta{Type: "content_delta", Index: block, Content: TextBlock{BlockText, text}}}
}

// SessionPaused says that the session waits for resume; extension.
type SessionPaused struct {
	Reason string `json:"reason,omitzero"`
}

// EventType is session.paused.
func (*SessionPaused) EventType() EventType { return TypeSessionPaused }

// SessionResumed says that a pause is over; extension.
type SessionResumed struct {
	Reason string `json:"reason,omitzero"`
}

// EventType is session.resumed.
func (*SessionResumed) EventType() EventType { return TypeSessionResumed }

// StreamReset says that the cursor of the request is unknown: what follows
// begins now, and the client must list to catch up; extension, streams only.
type StreamReset struct {
	Reason      string `json:"reason"`
	LastEventID string `json:"last_event_id"`
	// OldestCursor is the Last-Event-ID from which the log is complete.
	OldestCursor string `json:"oldest_cursor"`
}

// EventType is stream.reset.
func (*StreamReset) EventType() EventType { return TypeStreamReset }

// objectOrEmpty keeps an input an object on the wire, whatever a model wrote:
// nothing becomes {}, what is no object becomes {"unreadable": its text}.
func objectOrEmpty(raw json.RawMessage) json.RawMessage {
	if isNull(raw) {
		return json.RawMessage("{}")
	}
	if firstByte(raw) == '{' && json.Valid(raw) {
		return raw
	}
	out, err := Encode(map[string]string{"unreadable": string(raw)})
	if err != nil {
		return json.RawMessage("{}")
	}
	return out
}
