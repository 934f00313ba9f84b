package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
)

// asked is one model request under way.
type asked struct {
	purpose string
	model   string
	span    store.EventID
	effect  store.EffectID
	message store.EventID // the ids that the final events will carry
	think   store.EventID
	started time.Time
}

// step asks the model and commits its whole answer in one transaction.
//
//  1. running events, if the session was at rest (critical)
//  2. tools listed, if the turn just began (what changed: relaxed)
//  3. span start and the model call's intent (relaxed: a model call is a read,
//     and the durable input asks for it). A crash from here to 5 loses the
//     answer, which was seen by nobody but previews; the next owner closes the
//     span and asks again.
//  4. the model
//  5. output, messages, tool uses, span end, intents: one critical append
//
// A step that ends the turn commits its rest in the same append.
func (d *driver) step(ctx context.Context) error {
	if err := d.ensureRunning(ctx); err != nil {
		return err
	}
	if err := d.list(ctx); err != nil {
		return err
	}
	var req gateway.ModelRequest
	var tokens int64
	var shrunk int
	d.read(func(st *state) { req, tokens, shrunk = st.request(), st.context, st.shrunk })
	spec, err := d.m.cfg.Gateway.Spec(req.Model)
	if err != nil {
		return d.exhausted(ctx, newSessionError("model_request_failed_error", err.Error(), "exhausted"))
	}
	req.MaxTokens = spec.MaxOutput
	if spec.ContextWindow > 0 && shrunk == 0 && tokens > int64(float64(spec.ContextWindow)*compactAt) {
		return d.compact(ctx, spec)
	}
	if req.Messages, err = d.withFiles(ctx, req.Messages); err != nil {
		return err
	}
	d.thinking(ctx)
	reply, a, err := d.ask(ctx, req, purposeTurn)
	var me *gateway.ModelError
	var cut *cutShort
	switch {
	case errors.As(err, &cut):
		return d.cutOff(a, cut)
	case err == nil && reply.StopReason == "model_context_window_exceeded":
		d.m.db.AppendRelaxed(d.lease, d.failedDrafts(a, "context_window", replyUsage(reply)))
		return d.compact(ctx, spec)
	case err == nil:
		return d.output(ctx, a, reply)
	case errors.As(err, &me):
		return d.modelFailed(ctx, a, me, spec)
	}
	return err
}

// ask makes one model request. Crash, drain and interrupt leave no half answer.
func (d *driver) ask(ctx context.Context, req gateway.ModelRequest, purpose string) (*gateway.ModelReply, asked, error) {
	a := asked{purpose: purpose, model: req.Model, started: d.m.now(), span: store.EventID(d.newID("sevt_")),
		effect: store.EffectID(d.newID("eff_")), think: store.EventID(d.newID("sevt_")), message: store.EventID(d.newID("sevt_"))}
	var through store.Seq
	d.read(func(st *state) { through = st.seq })
	d.m.db.AppendRelaxed(d.lease, []store.Draft{
		event(string(a.span), evSpanStart, d.scope.Thread, nil),
		record(store.KindIntent, string(a.effect), d.scope.Thread, store.Intent{V: store.BodyVersion, EffectHeader: store.EffectHeader{
			Effect: a.effect, Tool: "model:" + req.Model, Class: store.ClassRead,
			Arguments: encode(modelArguments{Purpose: purpose, Model: req.Model, Through: int64(through), Messages: len(req.Messages)})}}),
	})
	if err := d.m.fault("before_model"); err != nil {
		return nil, a, err
	}
	var reply *gateway.ModelReply
	var err error
	defer d.m.hub.end(d.id, a.message, a.think)
	d.during(ctx, func(soft context.Context) {
		reply, err = d.m.cfg.Gateway.Model(soft, d.scope, req, d.previews(a))
		if err != nil && context.Cause(soft) != nil {
			err = &cutShort{cause: context.Cause(soft), err: err}
		}
	})
	if d.m.cfg.Observe != nil {
		d.m.cfg.Observe.Step(d.lease.Claimed(), req.Model, d.m.now().Sub(a.started), err)
	}
	if ferr := d.m.fault("after_model"); ferr != nil {
		return nil, a, ferr
	}
	return reply, a, err
}

// cutShort is a model request that we ended ourselves.
type cutShort struct{ cause, err error }

func (c *cutShort) Error() string   { return "model request cut short: " + c.cause.Error() }
func (c *cutShort) Unwrap() []error { return []error{c.cause, c.err} }

// previews turns provider fragments into deltas of the events to come. Text
// blocks are counted as they will stand in the final event. What arrives shows
// that the request lives, however long its answer takes.
func (d *driver) previews(a asked) func(gateway.ModelDelta) {
	position := map[int]int{} // block of the reply -> block of agent.message
	thinking := false
	return func(m gateway.ModelDelta) {
		d.alive()
		if a.purpose != purposeTurn {
			return
		}
		i, known := position[m.Index]
		if m.Type == "text" && !known {
			i = len(position)
			position[m.Index] = i
		}
		switch {
		case m.Type == "thinking" && !thinking:
			thinking = true
			d.m.hub.publish(d.id, Delta{Event: a.think, Type: evThinking, Start: true})
		case m.Type == "text":
			if !known && i == 0 {
				d.m.hub.publish(d.id, Delta{Event: a.message, Type: evMessage, Start: true})
			}
			if m.Text != "" {
				d.m.hub.publish(d.id, Delta{Event: a.message, Type: evMessage, Index: i, Text: m.Text})
			}
		}
	}
}

// alive puts off the watchdog.
func (d *driver) alive() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.commit = d.m.now()
}

// mend closes what a dead owner left open: the span of a model request whose
// answer nobody has (trial K4). What it cost is not known and is not made up.
func (d *driver) mend() {
	var a asked
	d.read(func(st *state) {
		a = asked{span: st.openSpan, effect: st.openModel, purpose: st.openFor, model: st.agent.Model.ID}
	})
	if a.span == "" {
		return
	}
	d.m.db.AppendRelaxed(d.lease, d.failedDrafts(a, "owner_lost", store.TokenUsage{}))
}

// failedDrafts end a model request without an answer.
func (d *driver) failedDrafts(a asked, why string, u store.TokenUsage) []store.Draft {
	var drafts []store.Draft
	if a.effect != "" {
		o := store.Output{V: store.BodyVersion, Effect: a.effect, Purpose: a.purpose, Model: a.model, Failed: why, Usage: u,
			CostNanoUSD: d.m.cfg.Gateway.Cost(a.model, u), Content: json.RawMessage("[]")}
		if !a.started.IsZero() {
			o.ElapsedMS = d.m.now().Sub(a.started).Milliseconds()
		}
		drafts = append(drafts, record(store.KindOutput, string(a.effect), d.scope.Thread, o))
	}
	if n := u.Input + u.Output + u.CacheRead + u.CacheCreation5m + u.CacheCreation1h; n > 0 && d.m.cfg.Observe != nil {
		d.m.cfg.Observe.Wasted(n)
	}
	return append(drafts, event(d.newID("sevt_"), evSpanEnd, d.scope.Thread, fields{
		"model_request_start_id": a.span, "is_error": true, "model_usage": modelUsage(u, "")}))
}

// cutOff logs a request that we ended ourselves; the loop sees why.
func (d *driver) cutOff(a asked, c *cutShort) error {
	var u store.TokenUsage
	if me := (*gateway.ModelError)(nil); errors.As(c.err, &me) {
		u = errorUsage(me)
	}
	d.m.db.AppendRelaxed(d.lease, d.failedDrafts(a, "interrupted", u))
	if errors.Is(c.cause, store.ErrFenced) {
		return c.cause
	}
	return nil
}

// modelFailed decides what a failed request means for the turn.
func (d *driver) modelFailed(ctx context.Context, a asked, e *gateway.ModelError, spec gateway.ModelSpec) error {
	u := errorUsage(e)
	if string(e.Kind) == "context_window" {
		d.m.db.AppendRelaxed(d.lease, d.failedDrafts(a, string(e.Kind), u))
		return d.compact(ctx, spec)
	}
	if e.Status == http.StatusBadRequest || e.Status == http.StatusRequestEntityTooLarge {
		var foreign bool
		d.read(func(st *state) { foreign = st.plain(false) })
		switch {
		case foreign && a.purpose == purposeTurn:
			_, err := d.append(ctx, store.Append{Entries: d.failedDrafts(a, contentRefused, u)})
			return err // asked again without it
		case e.Status == http.StatusRequestEntityTooLarge && a.purpose == purposeTurn:
			d.m.db.AppendRelaxed(d.lease, d.failedDrafts(a, string(e.Kind), u))
			return d.compact(ctx, spec)
		}
	}
	drafts := d.failedDrafts(a, string(e.Kind), u)
	var tries int
	d.read(func(st *state) { tries = st.tries["model"] + 1 })
	if !e.Retryable || tries >= d.m.patience.Tries {
		return d.exhausted(ctx, newSessionError(errorType(e), e.Error(), "exhausted"), drafts...)
	}
	until := d.m.now().Add(d.m.patience.backoff(tries, e.RetryAfter))
	return d.reschedule(ctx, newSessionError(errorType(e), e.Error(), "retrying"),
		store.Wait{Until: until, Reason: "model", Tries: tries}, drafts...)
}

func tokens(input, output, read, creation5m, creation1h int64) store.TokenUsage {
	return store.TokenUsage{Input: input, Output: output, CacheRead: read, CacheCreation5m: creation5m, CacheCreation1h: creation1h}
}

func replyUsage(r *gateway.ModelReply) store.TokenUsage {
	u := r.Usage
	return tokens(u.Input, u.Output, u.CacheRead, u.CacheCreation5m, u.CacheCreation1h)
}

func errorUsage(e *gateway.ModelError) store.TokenUsage {
	u := e.Usage
	return tokens(u.Input, u.Output, u.CacheRead, u.CacheCreation5m, u.CacheCreation1h)
}

// output commits one answer of the model.
func (d *driver) output(ctx context.Context, a asked, r *gateway.ModelReply) error {
	content := r.Content
	if r.StopReason == "max_tokens" {
		// A call that was cut off must not run, nor stand without a result.
		for n := len(content); n > 0 && content[n-1].Type == "tool_use"; n = len(content) {
			content = content[:n-1]
		}
	}
	var agent agent
	var listed map[string]store.Tools
	d.read(func(st *state) { agent, listed = st.agent, st.tools })
	uses, calls := d.toolUses(agent, listed, content)
	rulings, err := d.rule(ctx, agent, uses, calls)
	if err != nil {
		return fmt.Errorf("rule calls: %w", err)
	}
	usage := replyUsage(r)
	out := store.Output{V: store.BodyVersion, Effect: a.effect, Purpose: a.purpose, Model: r.Model, StopReason: r.StopReason,
		StopDetails: r.StopDetails, Usage: usage, CostNanoUSD: d.m.cfg.Gateway.Cost(a.model, usage),
		RequestID: r.RequestID, ElapsedMS: d.m.now().Sub(a.started).Milliseconds()}
	if out.Model == "" {
		out.Model = a.model
	}
	var events, behind, results []store.Draft
	for i, u := range uses {
		ru := rulings[i]
		if b := &content[u.block]; !json.Valid(b.Input) {
			b.Input, b.Raw = ru.Input, nil // it must go back as JSON
		}
		oc := store.OutputCall{ModelID: content[u.block].ID, Event: u.event, Effect: ru.Effect, Waits: ru.Waits}
		if u.builtin != nil && ru.Answer == nil {
			oc.Tool, oc.Asks = u.builtin.Name, u.asks
		}
		out.Calls = append(out.Calls, oc)
		typ := u.typ
		if ru.Answer != nil && typ == evCustomToolUse {
			typ = evToolUse // nothing for the client to do
		}
		events = append(events, d.toolUseEvent(u, typ, ru))
		behind = append(behind, ru.Drafts...)
		if ru.Answer != nil {
			c := &call{event: u.event, typ: typ}
			results = append(results, d.result(c)(*ru.Answer)...)
		}
	}
	out.Content = encode(nonNil(content))
	drafts := []store.Draft{record(store.KindOutput, string(a.effect), d.scope.Thread, out)}
	drafts = append(drafts, d.spoken(a, content)...)
	drafts = append(drafts, events...)
	drafts = append(drafts, event(d.newID("sevt_"), evSpanEnd, d.scope.Thread, fields{
		"model_request_start_id": a.span, "is_error": false, "model_usage": modelUsage(usage, agent.Model.Speed)}))
	drafts = append(drafts, behind...)
	drafts = append(drafts, results...)
	return d.commitOutput(ctx, drafts, out)
}

func nonNil(b []gateway.Block) []gateway.Block {
	if b == nil {
		return []gateway.Block{}
	}
	return b
}

// commitOutput commits an answer, with the rest of the turn where it ends one.
func (d *driver) commitOutput(ctx context.Context, drafts []store.Draft, out store.Output) error {
	if err := d.m.fault("before_output"); err != nil {
		return err
	}
	var reason stopReason
	switch {
	case len(out.Calls) > 0:
	case out.StopReason == "refusal":
		reason.Type = stopRefusal
	case out.StopReason != "max_tokens" && out.StopReason != "pause_turn":
		reason.Type = stopEndTurn
	}
	var details json.RawMessage
	if reason.Type == stopRefusal {
		details = refusal(out)
	}
	// With a machine, or one that died, more is to be done before the rest.
	if reason.Type != "" && d.held() == nil && !(reason.Type == stopEndTurn && d.died()) {
		idle := d.idle(reason, details, store.SessionUsage{TokenUsage: out.Usage, CostNanoUSD: out.CostNanoUSD})
		// Seen is not set: a message that waited behind this turn is in the inbox
		// too, and the session must not fall asleep before it is answered.
		_, err := d.append(ctx, store.Append{Entries: append(drafts[:len(drafts):len(drafts)], idle...), Rest: true})
		if err == nil {
			d.released = true
			return d.m.fault("after_output")
		}
		if !errors.Is(err, store.ErrConflict) {
			return err
		}
		// Input arrived meanwhile: the answer is committed alone, the turn goes on.
	}
	if _, err := d.append(ctx, store.Append{Entries: drafts}); err != nil {
		return err
	}
	return d.m.fault("after_output")
}

// spoken makes agent.thinking and agent.message of an answer.
func (d *driver) spoken(a asked, content []gateway.Block) []store.Draft {
	var drafts []store.Draft
	var said []fields
	thought := false
	for _, b := range content {
		switch b.Type {
		case "thinking", "redacted_thinking":
			thought = true
		case "text":
			if b.Text != "" {
				said = append(said, fields{"type": "text", "text": b.Text})
			}
		}
	}
	if thought {
		drafts = append(drafts, event(string(a.think), evThinking, d.scope.Thread, nil))
	}
	if len(said) > 0 {
		drafts = append(drafts, event(string(a.message), evMessage, d.scope.Thread, fields{"content": said}))
	}
	return drafts
}

// use is one tool use of an answer.
type use struct {
	block int // in the answer's content
	event store.EventID
	typ   string
	tool  gateway.Tool
	// builtin tools are run in the session's sandbox; asks: once a person allows it.
	builtin *builtinTool
	asks    bool
}

// rule rules the calls of an output: those of built-in tools here, for they are
// contained and no effect comes of them, the others by the gateway.
func (d *driver) rule(ctx context.Context, a agent, uses []use, calls []gateway.Call) ([]gateway.Ruling, error) {
	out := make([]gateway.Ruling, len(calls))
	var at []int
	var outward []gateway.Call
	for i, c := range calls {
		if uses[i].builtin == nil {
			at, outward = append(at, i), append(outward, c)
			continue
		}
		out[i], uses[i].asks = a.ruleContained(uses[i].builtin, c.Arguments)
	}
	rulings, err := d.m.cfg.Gateway.Rule(ctx, d.scope, outward)
	for i, r := range rulings {
		out[at[i]] = r
	}
	return out, err
}

// toolUses finds what each tool use of the answer means.
func (d *driver) toolUses(a agent, listed map[string]store.Tools, content []gateway.Block) ([]use, []gateway.Call) {
	offers := map[string]offer{}
	for _, o := range a.offers(listed) {
		offers[o.model.Name] = o
	}
	var uses []use
	var calls []gateway.Call
	for i, b := range content {
		if b.Type != "tool_use" {
			continue
		}
		u := use{block: i, event: store.EventID(d.newID("sevt_")), typ: evToolUse, tool: gateway.Tool{Name: b.Name}}
		c := gateway.Call{Event: u.event, Tool: u.tool, Arguments: b.Input}
		if b.InputText != "" {
			c.Arguments = json.RawMessage(b.InputText) // not an object: it is answered with an error, not run
		}
		if o, ok := offers[b.Name]; ok && o.builtin != nil {
			u.tool, u.builtin = o.tool, o.builtin
		} else if ok {
			u.tool, u.typ = o.tool, evMCPToolUse
			c.Tool, c.Known, c.Enabled, c.Client = o.tool, true, true, o.custom
			if o.custom {
				u.typ = evCustomToolUse
			} else {
				_, c.Policy = a.permission(o.tool.Server, o.tool.Name)
			}
		}
		uses, calls = append(uses, u), append(calls, c)
	}
	return uses, calls
}

func (d *driver) toolUseEvent(u use, typ string, r gateway.Ruling) store.Draft {
	f := fields{"name": u.tool.Name, "input": r.Input}
	if typ != evCustomToolUse {
		f["evaluated_permission"] = r.EvaluatedPermission
		if len(r.Evaluation) > 0 {
			f["evaluation"] = r.Evaluation
		}
	}
	if typ == evMCPToolUse {
		f["mcp_server_name"] = u.tool.Server
	}
	return event(string(u.event), typ, d.scope.Thread, f)
}

// list asks the agent's MCP servers for their tools when a turn begins. What
// differs from the newest record is recorded, so that every model request is a
// function of the log. A server that cannot be used is left out and said.
func (d *driver) list(ctx context.Context) error {
	if d.listed {
		return nil
	}
	builtin := d.listBuiltin()
	if len(d.scope.Servers) == 0 && len(builtin) == 0 {
		return nil
	}
	listings := make([]gateway.Listing, len(d.scope.Servers))
	errs := make([]error, len(d.scope.Servers))
	var cut error
	d.during(ctx, func(soft context.Context) {
		var wg sync.WaitGroup
		for i, s := range d.scope.Servers {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(soft, d.m.patience.List)
				defer cancel()
				errs[i] = d.unpanicked(func() (err error) {
					listings[i], err = d.m.cfg.Gateway.List(ctx, d.scope, s.Name)
					return err
				})
			})
		}
		wg.Wait()
		cut = context.Cause(soft)
	})
	if errors.Is(cut, errInterrupted) || errors.Is(cut, errPausing) || errors.Is(cut, errDraining) || errors.Is(cut, store.ErrFenced) {
		return store.ErrConflict // look at the inbox first
	}
	drafts := builtin
	for i, s := range d.scope.Servers {
		drafts = append(drafts, d.listedDrafts(s.Name, listings[i], errs[i])...)
	}
	if len(drafts) > 0 {
		if _, err := d.append(ctx, store.Append{Entries: drafts}); err != nil {
			return err
		}
	}
	d.listed = true
	return nil
}

func (d *driver) listedDrafts(server string, l gateway.Listing, err error) []store.Draft {
	var last store.Tools
	var known bool
	d.read(func(st *state) { last, known = st.tools[server] })
	next := store.Tools{V: store.BodyVersion, Server: server, Connector: l.Connector, Digest: l.Digest}
	var drafts []store.Draft
	if err != nil {
		next.Error = err.Error()
		typ := "mcp_connection_failed_error"
		var se *gateway.ServerError
		if errors.As(err, &se) && se.Auth {
			typ = "mcp_authentication_failed_error"
		}
		e := newSessionError(typ, err.Error(), "retrying")
		e.MCPServerName = server
		drafts = append(drafts, event(d.newID("sevt_"), evError, "", fields{"error": e}))
	} else {
		if l.Tools == nil {
			l.Tools = []gateway.Tool{}
		}
		next.Tools = encode(l.Tools)
	}
	if known && last.Error == "" && next.Error == "" && last.Digest == next.Digest && string(last.Tools) == string(next.Tools) {
		return drafts
	}
	return append(drafts, record(store.KindTools, d.newID("rec_"), "", next))
}
