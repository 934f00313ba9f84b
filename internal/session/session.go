// Package session keeps the life of one session: claim, rebuild, turn,
// interrupt, rest, resume. Recovery is the normal path: a driver claims, reads
// the log from the newest compaction and does what the log says comes next; a
// fresh start is the recovery of an empty log.
//
// It holds no truth in memory: everything it decides from is an entry of the
// log (folded by State) or a row of the inbox. It never dials and holds no
// secret: models and tools are reached through gateway.
package session

import (
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// Errors of operations, beside the store's. Texts are for people: they name
// the field and the way out.
var (
	// ErrState: the session's state does not allow it (wire: 400).
	ErrState = errors.New("not possible in this state")
	// ErrInput: the input is not valid (wire: 400).
	ErrInput = errors.New("invalid input")
)

// Problem is an error with a text for the caller; it unwraps to ErrState,
// ErrInput or a store error.
type Problem struct {
	Text string
	Code string // error.details.error_code of the wire, may be empty
	Err  error
}

func (p *Problem) Error() string { return p.Text }
func (p *Problem) Unwrap() error { return p.Err }

// Config wires a Manager.
type Config struct {
	DB      *store.DB
	Node    *store.Node      // nil: this process drives no sessions (role api)
	Gateway *gateway.Gateway // nil with Node
	Logger  *slog.Logger     // slog.Default when nil
	Now     func() time.Time // time.Now when nil
	// Sandboxes runs the agents' machines. Nil: this node has none, and the
	// built-in tools are not offered. Its Egress must be Manager.Egress.
	Sandboxes *sandbox.Runtime
	// MaxRunning bounds the sessions driven at once; 1,000 when 0.
	MaxRunning int
	// Observe is called at points that metrics are made of; may be nil.
	Observe Observer
	// Fault is called at named points of the driver (crash matrix); nil in production.
	Fault func(point string) error
	// Patience replaces the budgets of patience when not zero (tests).
	Patience Patience
}

// CreateParams is a validated request to create a session.
type CreateParams struct {
	Agent         json.RawMessage // session agent snapshot (reference section 6.2)
	EnvironmentID store.EnvironmentID
	Environment   json.RawMessage // wire config of the environment
	Title         *string
	Metadata      map[string]string
	VaultIDs      []store.VaultID
	Resources     json.RawMessage
	Attach        store.Attachments // what Resources name
	Budget        json.RawMessage
	InitialEvents []json.RawMessage // validated wire events, at most 50
}

// UpdateParams is a validated update; nil fields are kept.
type UpdateParams struct {
	Title *string
	// NoTitle clears the title.
	NoTitle  bool
	Metadata map[string]*string // merged; nil value deletes the key
	// Tools and MCPServers replace the agent's lists (resolved wire form). What
	// is left out is left out in the inbox too: null there would clear it.
	Tools      json.RawMessage `json:",omitempty"`
	MCPServers json.RawMessage `json:",omitempty"`
	// Budget: "null" removes it.
	Budget json.RawMessage `json:",omitempty"`
	// Resources changes one resource.
	Resources *ResourceChange `json:",omitempty"`
}

// ResourceChange puts a resource into a session's list, in place of the one with
// its id or behind all others; without Put it removes that one.
type ResourceChange struct {
	ID  string
	Put json.RawMessage `json:",omitempty"` // wire resource (reference section 7)
	// Replace refuses to add one: who removed it meanwhile wanted it gone.
	Replace bool `json:",omitempty"`
}

// Sent is one event as the send call answers it.
type Sent struct {
	ID          string
	Body        json.RawMessage // the wire event without id and processed_at
	ProcessedAt time.Time       // zero: queued
}

// SettleRequest is a person's word on an effect in doubt.
type SettleRequest = gateway.SettleRequest

// Delta is a transient fragment of an answer under way, for previews
// (reference section 10.4). It is never stored.
type Delta struct {
	Event store.EventID // the id that the final event will carry
	Type  string        // agent.message or agent.thinking; agent.tool_use: output of a command
	Start bool          // event_start
	Index int           // content block of the event
	Text  string
}

// Observer receives what metrics and traces are made of. Methods are quick.
type Observer interface {
	// Resumed is called when a claim took over a session whose former owner had
	// not released it; result is ok or failed.
	Resumed(s store.Session, result string, elapsed time.Duration)
	// Lost is called then too, with the time from the former owner's last entry
	// to the claim: an upper bound of the work that was lost.
	Lost(s store.Session, silent time.Duration)
	// Step is called after each model request.
	Step(s store.Session, model string, elapsed time.Duration, err error)
	// Wasted counts tokens that a failure made us pay again.
	Wasted(tokens int64)
	// Stuck is called when the watchdog cancelled a driver.
	Stuck(s store.Session)
	// Saved is called for every snapshot that was tried: how long the sandbox
	// stood still and how long it took until the snapshot was logged. An error
	// means that a checkpoint is missing.
	Saved(s store.Session, why string, pause, elapsed time.Duration, err error)
	// Kept is called for what is done to a snapshot later: packed, tested,
	// unpacked; bytes are those that were stored or read.
	Kept(act string, bytes int64, elapsed time.Duration, err error)
}
