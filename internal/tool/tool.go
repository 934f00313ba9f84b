// Package tool keeps the agent's built-in tools: what the model is told of them,
// and what a call of one comes to. They work inside the session's sandbox, so
// what they do is contained: no effect comes of it.
package tool

import (
	"context"
	"encoding/json"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
)

// Tool is one built-in tool.
type Tool struct {
	Name        string
	Description string
	InputSchema json.RawMessage // reference section 11.4
	// Reads: it changes nothing inside, so it needs no snapshot and is not run
	// again after a restore.
	Reads bool
	// Named: it is offered only when the agent's configs name it.
	Named bool
}

// All lists the tools in the order in which the model sees them.
func All() []Tool { return nil }

// Find returns a tool by its name.
func Find(name string) (Tool, bool) {
	for _, t := range All() {
		if t.Name == name {
			return t, true
		}
	}
	return Tool{}, false
}

// Call is one call of a built-in tool.
type Call struct {
	ID     string // the tool event's: runs at most once per sandbox and id
	Thread string // whose shell
	Name   string
	Input  json.RawMessage
}

// Run runs a call in the sandbox and waits for its result: a bad input, a limit
// or a failed command are answers with IsError. Go errors are the sandbox's
// (sandbox.ErrGone, sandbox.ErrFenced) and ctx's. The caller makes the answer
// durable, then calls sandbox.Ack.
func Run(ctx context.Context, s *sandbox.Sandbox, c Call, progress func(text string)) (gateway.Answer, error) {
	return gateway.Answer{}, nil
}

// MaxResult is how many characters of text an answer may have; what is longer
// goes into a file of the sandbox (reference section 11.4).
const MaxResult = 100_000

// Fit writes an answer that is too long for the context into a file of the
// sandbox and leaves a preview with its path. Others are returned as they are.
func Fit(ctx context.Context, s *sandbox.Sandbox, id string, a gateway.Answer) (gateway.Answer, error) {
	return a, nil
}
