// Package tool keeps the agent's built-in tools: what the model is told of them,
// and what a call of one comes to. They work inside the session's sandbox, so
// what they do is contained: no effect comes of it.
//
// A call's input is checked here before it reaches the sandbox, so that the
// model reads which field is wrong; the agent inside checks again what depends
// on its files. Names and inputs are those of reference section 11.4; browser is
// an extension that is offered only to agents that name it.
package tool

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"

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

	// check refuses an input that the tool cannot work with.
	check func(input json.RawMessage) error
	// foreign: its text comes from programs and pages, not from files that are to
	// be changed by their very bytes: what a terminal obeys and what nobody sees is
	// taken out (attack M10).
	foreign bool
	// empty stands for a result without text: a content block needs some.
	empty string
}

// tools in the order in which the model sees them.
var tools = []Tool{bash, read, write, edit, glob, grep, browser}

// All lists the tools in the order in which the model sees them.
func All() []Tool { return append([]Tool(nil), tools...) }

// Find returns a tool by its name.
func Find(name string) (Tool, bool) {
	for _, t := range tools {
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
	t, ok := Find(c.Name)
	if !ok {
		return refuse("there is no tool %q", c.Name), nil
	}
	if err := t.check(c.Input); err != nil {
		return refuse("%s: %v", c.Name, err), nil
	}
	r, err := s.Do(ctx, sandbox.Call{ID: c.ID, Thread: c.Thread, Tool: c.Name, Input: c.Input, Progress: progress})
	if err != nil {
		return gateway.Answer{}, fmt.Errorf("run %s: %w", c.Name, err)
	}
	if t.Reads && r.Reason == forgotten {
		if r, err = readAnew(ctx, s, c); err != nil {
			return gateway.Answer{}, fmt.Errorf("run %s anew: %w", c.Name, err)
		}
	}
	// An agent of this version bounds its results itself; one that an older
	// snapshot brought back may not.
	return Fit(ctx, s, c.ID, answer(t, r))
}

// forgotten is the reason of a result that the sandbox keeps no more.
const forgotten = "gone"

// readAnew reads once more under an id of its own. A reading tool's result is
// acknowledged while it is on its way to the log: it does not arrive there when
// the process is killed, and then nobody has seen it.
func readAnew(ctx context.Context, s *sandbox.Sandbox, c Call) (*sandbox.Result, error) {
	id := c.ID + "." + rand.Text()
	r, err := s.Do(ctx, sandbox.Call{ID: id, Thread: c.Thread, Tool: c.Name, Input: c.Input})
	if err != nil {
		return nil, err
	}
	return r, s.Ack(ctx, id)
}

// block is a content block of the wire (reference section 9.4).
type block struct {
	Type   string  `json:"type"`
	Text   string  `json:"text,omitzero"`
	Source *source `json:"source,omitzero"`
}

type source struct {
	Type      string `json:"type"` // base64
	MediaType string `json:"media_type"`
	Data      []byte `json:"data"`
}

// answer makes content blocks of a result.
func answer(t Tool, r *sandbox.Result) gateway.Answer {
	var blocks []block
	text := r.Text
	if t.foreign {
		text = gateway.Plain(text)
	}
	if text != "" {
		blocks = append(blocks, block{Type: "text", Text: text})
	}
	for _, i := range r.Images {
		blocks = append(blocks, block{Type: "image", Source: &source{"base64", i.MediaType, i.Data}})
	}
	if len(blocks) == 0 {
		blocks = []block{{Type: "text", Text: t.empty}}
	}
	return gateway.Answer{IsError: r.IsError, Content: encode(blocks)}
}

// refuse answers a call that never reached the sandbox.
func refuse(format string, args ...any) gateway.Answer {
	return gateway.Answer{IsError: true, Content: encode([]block{{Type: "text", Text: fmt.Sprintf(format, args...)}})}
}

func encode(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings and bytes always encode
	}
	return b
}
