package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/tool"
)

// A contained call is a call of a built-in tool inside the session's sandbox. It
// is no effect: snapshots roll it back. Its output names the tool, its result
// event ends it, and between the two the sandbox knows it by the event's id, so
// that whoever owns the session asks for the same run.

// builtinServer is the name under which the built-in tools are listed beside
// those of MCP servers, whose names are never empty.
const builtinServer = ""

// builtinType is the type of the built-in toolset (reference section 11.1).
const builtinType = string(policy.ToolsetBuiltin)

// builtinTool is a built-in tool as its listing records it, so that a model
// request is a function of the log whatever this version's tools are.
type builtinTool struct {
	Name        string          `json:"name"`
	Description string          `json:"description"`
	InputSchema json.RawMessage `json:"input_schema"`
	Reads       bool            `json:"reads,omitempty"`
	Named       bool            `json:"named,omitempty"`
}

// builtin is the configuration of a built-in tool: the toolset's default and
// its own. named tells whether the agent names it; ok whether it has the toolset.
func (a agent) builtin(name string) (def, own policy.ToolConfig, named, ok bool) {
	for _, t := range a.Tools {
		if t.Type != builtinType {
			continue
		}
		def = t.DefaultConfig.policy()
		for _, c := range t.Configs {
			if c.Name == name {
				own, named = c.policy(), true
			}
		}
		return def, own, named, true
	}
	return def, own, false, false
}

func (c toolConfig) policy() policy.ToolConfig {
	p := policy.ToolConfig{Enabled: c.Enabled}
	if c.PermissionPolicy != nil {
		p.Policy = policy.PermissionPolicy(c.PermissionPolicy.Type)
	}
	return p
}

// builtinOffers are the built-in tools that the agent may use, as recorded.
func (a agent) builtinOffers(listed store.Tools) (out []offer) {
	var tools []builtinTool
	if err := json.Unmarshal(listed.Tools, &tools); err != nil {
		return nil // no listing: the session has no sandbox
	}
	for _, t := range tools {
		def, own, named, ok := a.builtin(t.Name)
		enabled, _ := policy.Resolve(policy.ToolsetBuiltin, def, own)
		if !ok || !enabled || t.Named && !named {
			continue
		}
		out = append(out, offer{builtin: &t, tool: gateway.Tool{Name: t.Name},
			model: gateway.ModelTool{Name: t.Name, Description: t.Description, InputSchema: t.InputSchema}})
	}
	return out
}

// listBuiltin records the built-in tools of this version, when the agent has the
// toolset and the newest record differs. Where none can run the record is empty
// and the user is told in the same append: the record is what says that they were,
// so nothing is said again by a later turn, owner or process until the tools were
// there and are gone again. A crash before that append leaves neither.
func (d *driver) listBuiltin() []store.Draft {
	var last store.Tools
	var known, wanted bool
	var a agent
	d.read(func(st *state) {
		last, known = st.tools[builtinServer]
		_, _, _, wanted = st.agent.builtin("")
		a = st.agent
	})
	var tools []builtinTool
	for _, t := range tool.All() {
		tools = append(tools, builtinTool{t.Name, t.Description, t.InputSchema, t.Reads, t.Named})
	}
	next := store.Tools{V: store.BodyVersion, Server: builtinServer, Tools: encode(tools)}
	missed := a.builtinOffers(next)
	there := d.sandboxed()
	if !there {
		next.Tools = json.RawMessage("[]")
	}
	if !wanted || known && string(last.Tools) == string(next.Tools) || !there && len(missed) == 0 {
		return nil
	}
	drafts := []store.Draft{record(store.KindTools, d.newID("rec_"), "", next)}
	if !there {
		drafts = append(drafts, event(d.newID("sevt_"), evError, "", fields{"error": newSessionError("unknown_error", d.notOffered(missed), "retrying")}))
	}
	return drafts
}

// notOffered tells the user which built-in tools the agent does without, why, and
// the way out.
func (d *driver) notOffered(missed []offer) string {
	names := make([]string, len(missed))
	for i, o := range missed {
		names[i] = o.model.Name
	}
	why := "this server runs none now. 'planaria doctor' there says what it lacks; from the next turn on that a server with sandboxes drives, the agent has them"
	d.read(func(st *state) {
		if !st.env.cloud() {
			why = "this session's environment is self_hosted, for which Planaria has none. Sessions in an environment of type cloud have them"
		}
	})
	return fmt.Sprintf("The agent goes on without its built-in tools (%s). They need a sandbox, and %s.", strings.Join(names, ", "), why)
}

// ruleContained rules a call of a built-in tool. What snapshots roll back can be
// repeated without harm, so auto allows it.
func (a agent) ruleContained(t *builtinTool, raw json.RawMessage) (r gateway.Ruling, asks bool) {
	r = gateway.Ruling{EvaluatedPermission: string(policy.Deny)}
	input, bad := effect.Canonical(raw)
	if bad != nil {
		r.Input = encode(map[string]string{"_raw": string(raw)})
		r.Answer = &gateway.Answer{IsError: true, Content: text("The call was not made: " + bad.Error())}
		return r, false
	}
	r.Input = input
	class := string(store.ClassIdempotent)
	if t.Reads {
		class = string(store.ClassRead)
	}
	def, own, _, _ := a.builtin(t.Name)
	p := policy.Permit(policy.ToolsetBuiltin, def, own, class)
	r.EvaluatedPermission, r.Evaluation = string(p.Verdict), evaluationOf(p)
	if p.Verdict == policy.Deny {
		r.Answer = &gateway.Answer{IsError: true, Content: text("The call was denied and nothing was done: " + p.Reason + ".")}
	}
	return r, p.Verdict == policy.Ask
}

// evaluationOf is the wire's evaluation of a permission (reference section 9.5).
func evaluationOf(p policy.Permission) json.RawMessage {
	if p.Policy == "" {
		return nil
	}
	f := fields{"type": p.Policy}
	if p.Policy == policy.Auto {
		e := fields{"type": p.Verdict}
		if p.Verdict != policy.Allow {
			e["reason_code"] = p.ReasonCode
		}
		f["evaluated_permission"] = e
	}
	return encode(f)
}

// reads tells whether a built-in tool changes nothing inside.
func reads(name string) bool {
	t, ok := tool.Find(name)
	return ok && t.Reads
}

// waitsForPerson tells whether a contained call waits for a person's answer.
func (c *call) waitsForPerson() bool { return c.tool != "" && c.asks && !c.allowed }

// maxLosses is how often a machine may die while one call runs. Then the call
// gets an error: it may be what kills it.
const maxLosses = 2

// lostTooOften answers a call that was under way each time its machine died.
const lostTooOften = "The machine died each time while this call ran, %d times. It was not run again: what it did is undone. Try another way, or with less memory."

// Texts of calls that cannot be run where the session now is.
const (
	nowhereToRun = "This server runs no sandboxes now. Nothing was run."
	outOfReach   = "This server runs no sandboxes now, and the machine is out of reach. Whether this call ran, and how far it came, is unknown: once there is a machine again, look before you go on."
)

// noSandboxes answers contained calls on a node that can run none, for the
// session came from another one or the server's configuration was changed.
func (d *driver) noSandboxes(ctx context.Context, cs []*call) error {
	a := gateway.Answer{IsError: true, Content: text(nowhereToRun)}
	d.read(func(st *state) {
		if liveAct(st.machine.Act) {
			a.Content = text(outOfReach)
		}
	})
	var drafts []store.Draft
	for _, c := range cs {
		drafts = append(drafts, d.unrun(c, a)...)
	}
	_, err := d.append(ctx, store.Append{Entries: drafts})
	return err
}

// errMachineGone: the machine died while a call ran. The loop brings it back.
var errMachineGone = errors.New("the session's machine is gone")

// runContained runs a contained call and commits its result.
//
//  1. the call is asked for inside, by its event's id (not durable here: the
//     sandbox keeps it). A crash from here to 3 leaves it running, or its result
//     kept inside: the next owner asks for it again and it does not run twice.
//  2. its result, which the sandbox keeps until it is acknowledged
//  3. the result event (critical; of a reading tool: relaxed)
//  4. acknowledged: the sandbox forgets it. A crash right before leaves a result
//     inside that nobody asks for; the next snapshot carries it along.
func (d *driver) runContained(ctx context.Context, c *call) (gateway.Progress, error) {
	if c.losses >= maxLosses {
		return d.answered(ctx, c, gateway.Answer{IsError: true, Content: text(fmt.Sprintf(lostTooOften, c.losses))}, true)
	}
	b := d.held()
	if b == nil {
		return gateway.Progress{}, errMachineGone
	}
	if err := context.Cause(ctx); err != nil {
		return gateway.Progress{}, err
	}
	a, err := d.inside(ctx, b, c)
	if err != nil {
		return gateway.Progress{}, err
	}
	if err := d.m.fault("before_result"); err != nil {
		return gateway.Progress{}, err
	}
	p, err := d.answered(ctx, c, a, false)
	if err != nil {
		return p, err
	}
	if err := d.m.fault("after_result"); err != nil {
		return p, err
	}
	d.ack(ctx, b, c.event)
	return p, nil
}

// ack says that results are durable. One that is not acknowledged is kept, which
// costs memory and nothing else.
func (d *driver) ack(ctx context.Context, b *machine, ids ...store.EventID) {
	names := make([]string, len(ids))
	for i, id := range ids {
		names[i] = string(id)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelledCallEnd)
	defer cancel()
	if err := b.s.Ack(ctx, names...); err != nil {
		d.m.log.Debug("cannot acknowledge calls", "session", d.id, "err", err)
	}
}

// answered commits a call's result. unrun: nothing inside came of the call, so
// it is not run again after a loss.
func (d *driver) answered(ctx context.Context, c *call, a gateway.Answer, unrun bool) (gateway.Progress, error) {
	drafts := d.result(c)(a)
	if unrun {
		drafts = d.unrun(c, a)
	}
	p := gateway.Progress{Done: true, Answer: a}
	if reads(c.tool) && !unrun {
		// Lost with a crash, together with every model request that used it.
		d.m.db.AppendRelaxed(d.lease, drafts)
		return p, d.progressed(c, p, nil)
	}
	_, err := d.append(context.WithoutCancel(ctx), store.Append{Entries: drafts})
	return p, err
}

// unrun makes the result of a contained call of which nothing came.
func (d *driver) unrun(c *call, a gateway.Answer, first ...store.Draft) []store.Draft {
	return append(first[:len(first):len(first)], event(d.newID("sevt_"), c.resultType(), d.scope.Thread,
		fields{"tool_use_id": c.event, "content": a.Content, "is_error": a.IsError, unrunField: true}))
}

// unrunField marks results of contained calls that did not run.
const unrunField = "not_run"

// inside runs a call in the machine and waits for its result. Interrupt and
// pause cancel it, and its result says so; a drain, a lost lease and a crash
// leave it running for the next owner.
func (d *driver) inside(ctx context.Context, b *machine, c *call) (gateway.Answer, error) {
	b.begin(c.event)
	defer b.end(c.event)
	defer d.m.hub.end(d.id, c.event)
	if err := d.m.fault("call_begun"); err != nil {
		return gateway.Answer{}, err
	}
	defer d.keepAlive(d.callLimit())()
	// The run outlives ctx: what ends ctx decides what becomes of it.
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	type ended struct {
		a   gateway.Answer
		err error
	}
	done := make(chan ended, 1)
	go func() {
		var e ended
		e.err = d.unpanicked(func() (err error) {
			e.a, err = tool.Run(run, b.s, tool.Call{ID: string(c.event), Thread: string(d.scope.Thread), Name: c.tool, Input: c.input}, d.progress(c))
			return err
		})
		done <- e
	}()
	over := ctx.Done()
	var late, again <-chan time.Time
	for {
		select {
		case e := <-done:
			if errors.Is(e.err, sandbox.ErrGone) || e.err != nil && b.dead() {
				return e.a, errMachineGone
			}
			if errors.Is(e.err, sandbox.ErrFenced) {
				return e.a, fmt.Errorf("%w: %w", store.ErrFenced, e.err)
			}
			if e.err != nil && context.Cause(run) != nil {
				return e.a, context.Cause(run)
			}
			return e.a, e.err
		case <-over:
			over = nil
			cause := context.Cause(ctx)
			if !errors.Is(cause, errInterrupted) && !errors.Is(cause, errPausing) {
				cancel(cause)
				continue
			}
			d.cancelCall(ctx, b, c.event)
			t := time.NewTimer(cancelledCallEnd)
			defer t.Stop()
			// It may not have begun inside when it was first asked to end.
			r := time.NewTicker(cancelAgain)
			defer r.Stop()
			late, again = t.C, r.C
		case <-again:
			d.cancelCall(ctx, b, c.event)
		case <-late:
			late, again = nil, nil
			cancel(context.Cause(ctx))
		}
	}
}

// cancelCall asks a running call to end.
func (d *driver) cancelCall(ctx context.Context, b *machine, id store.EventID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelledCallEnd)
	defer cancel()
	if err := b.s.Cancel(ctx, string(id)); err != nil {
		d.m.log.Warn("cannot cancel a call", "session", d.id, "err", err)
	}
}

// callLimit is how long a call may take at most, with what surrounds it.
func (d *driver) callLimit() (limit time.Duration) {
	d.read(func(st *state) { limit = st.env.callTime() + time.Minute })
	return limit
}

// keepAlive holds off the watchdog while something long is under way, for as
// long as that may take at most.
func (d *driver) keepAlive(limit time.Duration) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		t := time.NewTicker(max(d.m.patience.Silence/4, 5*time.Millisecond))
		defer t.Stop()
		end := time.NewTimer(limit)
		defer end.Stop()
		for {
			d.alive()
			select {
			case <-done:
				return
			case <-end.C:
				return
			case <-t.C:
			}
		}
	}()
	return func() { close(done); <-ended }
}

// progress hands a call's live output to those who watch, now or later.
func (d *driver) progress(c *call) func(string) {
	begun := false
	return func(text string) {
		d.alive()
		if text == "" {
			return
		}
		if !begun {
			begun = true
			d.m.hub.publish(d.id, Delta{Event: c.event, Type: evToolUse, Start: true})
		}
		d.m.hub.publish(d.id, Delta{Event: c.event, Type: evToolUse, Text: text})
	}
}

// interruptedCall is what the model reads for a call that was or may have been
// under way in a machine that nobody can ask any more.
const interruptedCall = "The user interrupted this call. How far it came is unknown: look before you go on."

// abandonContained closes an open contained call for an interrupt. One that
// runs is cancelled and says so itself.
func (d *driver) abandonContained(ctx context.Context, c *call) error {
	never := d.unrun(c, gateway.Answer{IsError: true, Content: text(interruptedResult)})
	// Of this one something may have come: recovery must not take it for unrun.
	unknown := d.result(c)(gateway.Answer{IsError: true, Content: text(interruptedCall)})
	end := func(drafts []store.Draft) error {
		_, err := d.append(ctx, store.Append{Entries: drafts})
		return err
	}
	b := d.held()
	if b == nil {
		var began bool
		d.read(func(st *state) { began = st.machine.Act != "" })
		if began && !c.waitsForPerson() {
			return end(unknown)
		}
		return end(never)
	}
	ask, cancel := context.WithTimeout(ctx, cancelledCallEnd)
	running, kept, err := b.s.Calls(ask)
	cancel()
	switch known := append(running, kept...); {
	case err != nil:
		return end(unknown)
	case slices.Contains(known, string(c.event)):
		soft, cancel := context.WithCancelCause(ctx)
		cancel(errInterrupted)
		a, err := d.inside(soft, b, c)
		if err == nil {
			// Only what is durable may be forgotten inside.
			if err := end(d.result(c)(a)); err != nil {
				return err
			}
			d.ack(ctx, b, c.event)
			return nil
		}
		if dead := (*crash)(nil); errors.As(err, &dead) {
			return err
		}
		return end(unknown)
	}
	return end(never)
}

// confirmContained takes a person's answer to a contained call that asks. An
// allowed one runs when the loop comes to it; the answer is in the log.
func (d *driver) confirmContained(ctx context.Context, r store.Inbox, c *call, ev clientEvent) error {
	if !c.waitsForPerson() {
		return d.logOnly(ctx, r)
	}
	on, err := d.goesOn(ctx, c)
	if err != nil {
		return err
	}
	d.consumed = true
	drafts := append([]store.Draft{processed(r)}, on...)
	if ev.Result == "deny" {
		reason := ev.DenyMessage
		if reason == "" {
			reason = "The user denied this call."
		}
		drafts = d.unrun(c, gateway.Answer{IsError: true, Content: text(reason)}, drafts...)
	}
	if err := d.m.fault("before_approval"); err != nil {
		return err
	}
	if _, err := d.append(ctx, store.Append{Entries: drafts, Consume: []string{r.ID}}); err != nil {
		return err
	}
	return d.m.fault("after_approval")
}

// fitted shortens an answer from outside that is too long for the context,
// where a sandbox can hold the whole of it (reference section 11.4). Elsewhere
// it is cut to what a model is shown.
func (d *driver) fitted(ctx context.Context, c *call, a gateway.Answer) gateway.Answer {
	whole := a
	if a.Whole != nil {
		whole.Content = a.Whole
	}
	a.Whole, whole.Whole = nil, nil
	b := d.held()
	if b == nil || len(whole.Content) <= tool.MaxResult {
		return a
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelledCallEnd)
	defer cancel()
	out, err := tool.Fit(ctx, b.s, string(c.event), whole)
	if err != nil {
		d.m.log.Debug("an answer stays as long as it is", "session", d.id, "err", err)
		return a
	}
	return out
}
