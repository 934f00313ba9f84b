// Package llm speaks to model providers behind one request, reply and stream
// type, and holds the scripted model server for demos, tests and dry runs.
//
// A provider makes exactly one HTTP request per call: no retry of a library,
// no redirect, no proxy from the environment, explicit options only (the SDK
// would else read ANTHROPIC_BASE_URL and might call ourselves). Retrying is
// the session's business, because a retry is paid for and must be metered.
package llm

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

// Role says who speaks in a message.
type Role string

// The roles.
const (
	RoleUser      Role = "user"
	RoleAssistant Role = "assistant"
	RoleSystem    Role = "system" // mid-conversation; only where the model takes it
)

// Block is one content block, in the form of the Messages API.
type Block struct {
	Type  string          `json:"type"` // text, image, document, search_result, tool_use, tool_result, thinking, redacted_thinking
	Text  string          `json:"text,omitempty"`
	ID    string          `json:"id,omitempty"`   // tool_use
	Name  string          `json:"name,omitempty"` // tool_use
	Input json.RawMessage `json:"input,omitempty"`
	// InputText is what the model wrote as the input of a tool_use when that is
	// no JSON object (cut by max_tokens, or broken). Input then holds
	// {"INVALID_JSON": InputText}: the call must not run, an error result answers it.
	InputText string          `json:"input_text,omitempty"`
	ToolUseID string          `json:"tool_use_id,omitempty"` // tool_result
	Content   []Block         `json:"content,omitempty"`     // tool_result
	IsError   bool            `json:"is_error,omitempty"`
	Source    json.RawMessage `json:"source,omitempty"`  // image, document: wire form
	Title     string          `json:"title,omitempty"`   // document
	Context   string          `json:"context,omitempty"` // document: what it is, not part of it
	// Raw is the block exactly as the provider sent it. When it is set it is
	// what goes back (thinking blocks with signatures must not change by a byte).
	Raw json.RawMessage `json:"raw,omitempty"`
}

// Message is one turn of the conversation.
type Message struct {
	Role    Role    `json:"role"`
	Content []Block `json:"content"`
}

// Tool is a tool offered to the model.
type Tool struct {
	Name        string          `json:"name"`
	Description string          `json:"description"`
	InputSchema json.RawMessage `json:"input_schema"`
}

// Request is one model request, a pure function of a session's log.
type Request struct {
	Model        string
	Effort       string // "", low … max
	Speed        string // "", standard, fast
	InferenceGeo string
	System       string
	Messages     []Message
	Tools        []Tool
	MaxTokens    int // 0 = the provider's default for the model
}

// Usage counts the tokens of one request.
type Usage struct {
	Input, Output, CacheRead, CacheCreation5m, CacheCreation1h int64
}

// Reply is one complete answer.
type Reply struct {
	Model       string
	Content     []Block
	StopReason  string          // Messages API names: end_turn, tool_use, max_tokens, refusal, …
	StopDetails json.RawMessage // with refusal
	Usage       Usage
	RequestID   string
}

// Delta is a transient fragment of an answer under way.
type Delta struct {
	Index int
	Type  string // "text" or "thinking" (thinking carries no text)
	Text  string
	Start bool // the block began
}

// Provider asks one model API. Stream returns the complete reply, or an
// *Error; never a partial reply. onDelta may be nil and must not block.
type Provider interface {
	Stream(ctx context.Context, req Request, onDelta func(Delta)) (*Reply, error)
}

// ErrorKind classifies a failed model request (reference section 22.5).
type ErrorKind string

// The kinds.
const (
	ErrOverloaded    ErrorKind = "overloaded"
	ErrRateLimited   ErrorKind = "rate_limited"
	ErrBilling       ErrorKind = "billing"
	ErrRequest       ErrorKind = "request_failed" // 4xx that a retry does not mend
	ErrServer        ErrorKind = "server"         // 5xx, broken or truncated stream, network
	ErrContextWindow ErrorKind = "context_window"
	ErrCancelled     ErrorKind = "cancelled" // the caller's context ended
)

// Error is a failed model request.
type Error struct {
	Kind       ErrorKind
	Status     int // HTTP status, 0 when there was none
	Message    string
	RetryAfter time.Duration // 0 when the provider gave no hint
	Retryable  bool
	RequestID  string
	// Usage is what the provider reported before the request failed; metered as waste.
	Usage Usage
	Err   error
}

func (e *Error) Error() string {
	if e.Status != 0 {
		return fmt.Sprintf("model request: %s (status %d): %s", e.Kind, e.Status, e.Message)
	}
	return fmt.Sprintf("model request: %s: %s", e.Kind, e.Message)
}

func (e *Error) Unwrap() error { return e.Err }
