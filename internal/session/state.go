package session

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
)

// call is one tool use of the newest output.
type call struct {
	event   store.EventID
	modelID string
	effect  store.EffectID // empty: answered without one
	waits   store.EffectID // gets the outcome of this other effect
	tool    string         // built-in tool of a contained call
	asks    bool           // it runs only when a person has allowed it
	allowed bool           // a person has
	losses  int            // how often its machine was lost while it was the next to end
	behind  bool           // asked for by a model that did not know what its machine has lost
	input   json.RawMessage
	typ     string // event type of the tool use
	name    string // tool as the event names it
	closed  bool
	content json.RawMessage
	isError bool
}

// resultType is the event that closes the call when we have its result.
func (c *call) resultType() string {
	if c.typ == evMCPToolUse {
		return evMCPToolResult
	}
	return evToolResult
}

// state is what the log of a session says. fold is its only writer, the same
// while the session runs and when it is rebuilt; only close may run ahead of
// the log, for a read's result that is on its way to it.
type state struct {
	seq    store.Seq
	config store.SessionConfig
	agent  agent
	env    environment
	thread store.ThreadID

	status  store.Status
	stop    stopReason
	paused  bool
	usage   store.SessionUsage
	running time.Time // since when, zero unless running

	messages []gateway.Message // the context up to the newest closed pair
	calls    []*call           // of the newest output, in its order
	want     bool              // the context ends with input that the model has not answered
	tools    map[string]store.Tools

	openSpan  store.EventID  // a model request without its end
	openModel store.EffectID // its effect
	openFor   string         // its purpose
	// told effects are in doubt and their tool use is closed; a later
	// settlement is noted in the context.
	told    map[store.EffectID]string
	notes   []string // wait for the open pair to close
	tries   map[string]int
	cuts    int             // outputs in a row that ended at max_tokens
	refused json.RawMessage // stop_details of the newest output, if it refused and the turn is not over
	rounds  int             // model outputs since the turn's input
	context int64           // tokens of the newest request and its answer
	shrunk  int             // compactions in a row without an output between them
	wake    time.Time       // when the session wants to be woken, as its row says
	rested  time.Time       // when it came to rest the last time
	machine machineState
}

func newState(s store.Session) (*state, error) {
	st := &state{config: s.Config, thread: s.Thread, status: store.StatusIdle,
		tools: map[string]store.Tools{}, told: map[store.EffectID]string{}, tries: map[string]int{}}
	if s.Compacted > 0 {
		// Rebuilding starts at a compaction: what lies before it and is not in
		// its own state is in the row, which is derived from the same log.
		st.seq, st.paused, st.usage = s.Compacted-1, s.Paused, store.SessionUsage{}
	}
	return st, st.setConfig(s.Config)
}

func (st *state) setConfig(c store.SessionConfig) error {
	a, err := parseAgent(c.Agent)
	if err != nil {
		return err
	}
	env, err := parseEnvironment(c.Environment)
	if err != nil {
		return err
	}
	st.config, st.agent, st.env = c, a, env
	return nil
}

// fold applies one entry. An entry that cannot be read is an error: the
// session is refused rather than continued on a part of its log.
func (st *state) fold(e store.Entry) error {
	if e.Seq != st.seq+1 {
		return fmt.Errorf("fold seq %d after %d: %w", e.Seq, st.seq, store.ErrDamaged)
	}
	st.seq = e.Seq
	if e.Erased {
		return nil
	}
	var err error
	switch e.Kind {
	case store.KindEvent:
		err = st.foldEvent(e)
	case store.KindCreated:
		var b store.Created
		if err = json.Unmarshal(e.Body, &b); err == nil {
			st.thread = b.Thread
			err = st.setConfig(b.Config)
		}
	case store.KindConfig:
		var b store.ConfigChange
		if err = json.Unmarshal(e.Body, &b); err == nil {
			err = st.setConfig(b.Config)
		}
	case store.KindTools:
		var b store.Tools
		if err = json.Unmarshal(e.Body, &b); err == nil {
			st.tools[b.Server] = b
		}
	case store.KindWait:
		var b store.Wait
		if err = json.Unmarshal(e.Body, &b); err == nil {
			st.tries[b.Reason], st.wake = b.Tries, b.Until
		}
	case store.KindIntent:
		err = st.foldIntent(e)
	case store.KindOutput:
		err = st.foldOutput(e)
	case store.KindCompletion:
		clear(st.tries) // progress
	case store.KindSettlement:
		err = st.foldSettlement(e)
	case store.KindCompaction:
		err = st.foldCompaction(e)
	case store.KindMachine:
		err = st.foldMachine(e)
	case store.KindSnapshot:
		err = st.foldSnapshot(e)
	}
	if err != nil {
		return fmt.Errorf("fold %s at seq %d: %w", e.Kind, e.Seq, err)
	}
	return nil
}

// eventBody is what fold reads of any event.
type eventBody struct {
	Content         json.RawMessage `json:"content"`
	IsError         bool            `json:"is_error"`
	ToolUseID       store.EventID   `json:"tool_use_id"`
	MCPToolUseID    store.EventID   `json:"mcp_tool_use_id"`
	CustomToolUseID store.EventID   `json:"custom_tool_use_id"`
	StopReason      stopReason      `json:"stop_reason"`
	Name            string          `json:"name"`
	Input           json.RawMessage `json:"input"`
	Result          string          `json:"result"`
}

func (st *state) foldEvent(e store.Entry) error {
	var b eventBody
	if err := json.Unmarshal(e.Body, &b); err != nil {
		return err
	}
	switch e.Type {
	case evRunning:
		st.status, st.running, st.rounds, st.wake = store.StatusRunning, e.At, 0, time.Time{}
	case evRescheduled:
		st.stopClock(e.At)
		st.status = store.StatusRescheduling
	case evTerminated:
		st.stopClock(e.At)
		st.status = store.StatusTerminated
	case evIdle:
		st.stopClock(e.At)
		st.status, st.stop, st.wake, st.rested, st.refused = store.StatusIdle, b.StopReason, time.Time{}, e.At, nil
		if !st.paused && st.stop.Type != stopAction && st.stop.Type != stopBudget {
			st.want = false
		}
	case evPaused:
		st.paused = true
	case evResumed:
		st.paused, st.cuts = false, 0
		clear(st.tries)
		// Going on needs no new message: unanswered input is asked about again.
		st.want = st.endsWithInput() && len(st.open()) == 0
	case evSpanStart:
		st.openSpan = store.EventID(e.ID)
	case evSpanEnd:
		st.openSpan = ""
	case evToolUse, evMCPToolUse, evCustomToolUse:
		if c := st.call(store.EventID(e.ID)); c != nil {
			c.typ, c.name = e.Type, b.Name
			if c.tool != "" {
				c.input = b.Input
			}
		}
	case inConfirmation:
		if c := st.call(b.ToolUseID); c != nil && b.Result == "allow" {
			c.allowed = true
		}
	case inMessage:
		st.add("user", blocksOf(b.Content))
		st.want, st.cuts, st.shrunk, st.refused = true, 0, 0, nil
		clear(st.tries)
	case inSystem:
		st.add("system", blocksOf(b.Content))
	case evToolResult, inToolResult:
		st.close(b.ToolUseID, b.Content, b.IsError)
	case evMCPToolResult:
		st.close(b.MCPToolUseID, b.Content, b.IsError)
	case inCustomResult:
		st.close(b.CustomToolUseID, b.Content, b.IsError)
	}
	return nil
}

func (st *state) stopClock(at time.Time) {
	if !st.running.IsZero() {
		st.usage.ActiveMicros += at.Sub(st.running).Microseconds()
	}
	st.running = time.Time{}
}

func (st *state) foldIntent(e store.Entry) error {
	var b store.Intent
	if err := json.Unmarshal(e.Body, &b); err != nil {
		return err
	}
	if b.Event == "" && isModel(b.Tool) {
		var a modelArguments
		if err := json.Unmarshal(b.Arguments, &a); err != nil {
			return err
		}
		st.openModel, st.openFor = b.Effect, a.Purpose
	}
	return nil
}

func (st *state) foldOutput(e store.Entry) error {
	var b store.Output
	if err := json.Unmarshal(e.Body, &b); err != nil {
		return err
	}
	st.openModel, st.wake = "", time.Time{}
	if b.Failed != "" {
		// Paid for nothing: metered apart (law L12).
		st.usage.WastedTokens += b.Usage.Input + b.Usage.Output + b.Usage.CacheRead + b.Usage.CacheCreation5m + b.Usage.CacheCreation1h
		if b.Failed == contentRefused {
			st.plain(true)
		}
		return nil
	}
	st.usage.Input += b.Usage.Input
	st.usage.Output += b.Usage.Output
	st.usage.CacheRead += b.Usage.CacheRead
	st.usage.CacheCreation5m += b.Usage.CacheCreation5m
	st.usage.CacheCreation1h += b.Usage.CacheCreation1h
	st.usage.CostNanoUSD += b.CostNanoUSD
	if b.Purpose != purposeTurn {
		return nil
	}
	var blocks []gateway.Block
	if err := json.Unmarshal(b.Content, &blocks); err != nil {
		return err
	}
	clear(st.tries)
	st.shrunk = 0
	st.rounds++
	st.context = b.Usage.Input + b.Usage.CacheRead + b.Usage.CacheCreation5m + b.Usage.CacheCreation1h + b.Usage.Output
	if len(blocks) > 0 {
		st.add("assistant", blocks)
	}
	st.calls = nil
	for _, oc := range b.Calls {
		st.calls = append(st.calls, &call{event: oc.Event, modelID: oc.ModelID, effect: oc.Effect, waits: oc.Waits,
			tool: oc.Tool, asks: oc.Asks})
	}
	st.want, st.refused = false, nil
	switch b.StopReason {
	case "refusal":
		st.cuts, st.refused = 0, refusal(b)
	case "max_tokens":
		st.cuts++
		if len(st.calls) == 0 {
			st.add("user", []gateway.Block{{Type: "text", Text: cutNote}})
			st.want = true
		}
	case "pause_turn":
		// The same content goes back unchanged (reference section 22.3).
		st.want = true
	default:
		st.cuts = 0
	}
	return nil
}

// refusal is what the rest after an output tells of why the model refused.
func refusal(o store.Output) json.RawMessage {
	if len(o.StopDetails) > 0 {
		return o.StopDetails
	}
	return encode(fields{"type": "refusal", "category": nil, "explanation": nil})
}

func (st *state) foldSettlement(e store.Entry) error {
	var b store.Settlement
	if err := json.Unmarshal(e.Body, &b); err != nil {
		return err
	}
	if b.Outcome == store.Told {
		for _, c := range st.calls {
			if c.effect == b.Effect {
				st.told[b.Effect] = c.name
			}
		}
		return nil
	}
	name, was := st.told[b.Effect]
	if !was {
		clear(st.tries)
		return nil
	}
	delete(st.told, b.Effect)
	switch b.Outcome {
	case "happened":
		st.note(fmt.Sprintf("The outcome of %s (%s), which was unknown, is now settled: it happened.", name, b.Effect))
	case "did_not_happen":
		st.note(fmt.Sprintf("The outcome of %s (%s), which was unknown, is now settled: it did not happen.", name, b.Effect))
	}
	return nil
}

// note adds a line for the model, after the open pair if there is one.
func (st *state) note(s string) {
	if len(st.open()) > 0 {
		st.notes = append(st.notes, s)
		return
	}
	st.add("user", []gateway.Block{{Type: "text", Text: s}})
}

// compactState is the state that a compaction carries (store.Compaction.State).
type compactState struct {
	Messages []gateway.Message         `json:"messages"`
	Tools    map[string]store.Tools    `json:"tools"`
	Told     map[store.EffectID]string `json:"told"`
	Usage    store.SessionUsage        `json:"usage"`
	Status   store.Status              `json:"status"`
	Running  time.Time                 `json:"running,omitzero"`
	Want     bool                      `json:"want"`
	Rounds   int                       `json:"rounds"`
	Shrunk   int                       `json:"shrunk"`
	Span     store.EventID             `json:"span,omitempty"`
	Machine  machineState              `json:"machine,omitzero"`
}

func (st *state) foldCompaction(e store.Entry) error {
	var b store.Compaction
	if err := json.Unmarshal(e.Body, &b); err != nil {
		return err
	}
	var c compactState
	if err := json.Unmarshal(b.State, &c); err != nil {
		return err
	}
	st.messages, st.calls, st.notes = c.Messages, nil, nil
	st.tools, st.told, st.usage = c.Tools, c.Told, c.Usage
	if st.tools == nil {
		st.tools = map[string]store.Tools{}
	}
	if st.told == nil {
		st.told = map[store.EffectID]string{}
	}
	st.status, st.running, st.want, st.rounds, st.shrunk = c.Status, c.Running, c.Want, c.Rounds, c.Shrunk
	st.openSpan, st.openModel = c.Span, ""
	st.context, st.wake = 0, time.Time{}
	st.machine = c.Machine
	return nil
}

func (st *state) call(id store.EventID) *call {
	for _, c := range st.calls {
		if c.event == id {
			return c
		}
	}
	return nil
}

// open lists the calls without a result, in order.
func (st *state) open() []*call {
	var out []*call
	for _, c := range st.calls {
		if !c.closed {
			out = append(out, c)
		}
	}
	return out
}

// close gives a call its result, once. When it was the last open one the whole
// pair enters the context, results in the order of the calls.
func (st *state) close(id store.EventID, content json.RawMessage, isError bool) {
	c := st.call(id)
	if c == nil || c.closed {
		return
	}
	c.closed, c.content, c.isError = true, content, isError
	if len(st.open()) > 0 {
		return
	}
	results := make([]gateway.Block, 0, len(st.calls))
	for _, c := range st.calls {
		results = append(results, gateway.Block{Type: "tool_result", ToolUseID: c.modelID,
			Content: nonEmpty(blocksOf(c.content)), IsError: c.isError})
	}
	st.add("user", results)
	for _, n := range st.notes {
		st.add("user", []gateway.Block{{Type: "text", Text: n}})
	}
	st.notes = nil
	st.want = true
}

// add appends blocks to the context; two messages of one role become one.
func (st *state) add(role string, blocks []gateway.Block) {
	if len(blocks) == 0 {
		return
	}
	if n := len(st.messages); n > 0 && string(st.messages[n-1].Role) == role {
		last := &st.messages[n-1]
		last.Content = append(last.Content[:len(last.Content):len(last.Content)], blocks...)
		return
	}
	m := gateway.Message{Role: "user", Content: blocks}
	switch role {
	case "assistant":
		m.Role = "assistant"
	case "system":
		m.Role = "system"
	}
	st.messages = append(st.messages, m)
}

func (st *state) endsWithInput() bool {
	n := len(st.messages)
	return n > 0 && st.messages[n-1].Role != "assistant"
}
