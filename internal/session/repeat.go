package session

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/tool"
)

// pastCall is a contained call that ended after the state that was brought back.
type pastCall struct {
	event   store.EventID
	tool    string
	input   json.RawMessage
	content json.RawMessage
	isError bool
	ended   bool
	unrun   bool
	cut     bool      // the user may have ended it
	at      store.Seq // of its result
}

// past is what happened since a seq.
type past struct {
	calls   []*pastCall // ended ones, in the order of their results
	tunnels []tunnelAt
	output  store.Seq // of the newest output that was read
}

type tunnelAt struct {
	seq store.Seq
	store.Tunnel
}

// since reads what ended after a seq, from the output before it on: a call may
// have been under way then.
func (d *driver) since(ctx context.Context, after store.Seq) (past, error) {
	var p past
	from := after
	before, err := d.m.db.Entries(ctx, d.ws, d.id, store.Range{Until: after, Kinds: []store.Kind{store.KindOutput}, Desc: true, Limit: 1})
	if err != nil {
		return p, err
	}
	if len(before) > 0 {
		from = before[0].Seq - 1
	}
	entries, err := d.m.db.Entries(ctx, d.ws, d.id, store.Range{After: from,
		Kinds: []store.Kind{store.KindOutput, store.KindEvent, store.KindTunnel}})
	if err != nil {
		return p, err
	}
	byID := map[store.EventID]*pastCall{}
	for _, e := range entries {
		if err := p.entry(e, after, byID); err != nil {
			return p, err
		}
	}
	return p, nil
}

func (p *past) entry(e store.Entry, after store.Seq, byID map[store.EventID]*pastCall) error {
	switch {
	case e.Kind == store.KindOutput:
		var o store.Output
		if err := json.Unmarshal(e.Body, &o); err != nil {
			return err
		}
		p.output = e.Seq
		for _, c := range o.Calls {
			if c.Tool != "" {
				byID[c.Event] = &pastCall{event: c.Event, tool: c.Tool}
			}
		}
	case e.Kind == store.KindTunnel:
		t := tunnelAt{seq: e.Seq}
		if err := json.Unmarshal(e.Body, &t.Tunnel); err != nil {
			return err
		}
		if !t.Ended {
			p.tunnels = append(p.tunnels, t)
		}
	case e.Type == inInterrupt, e.Type == evPaused:
		// They end what runs, and stand behind its result. What the user stopped
		// is not to be done after all.
		for _, c := range p.calls {
			c.cut = c.cut || c.isError && c.at > p.output
		}
	case e.Type == evToolUse:
		var b eventBody
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return err
		}
		if c := byID[store.EventID(e.ID)]; c != nil {
			c.input = b.Input
		}
	case e.Type == evToolResult:
		var b struct {
			eventBody
			Unrun bool `json:"not_run"`
		}
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return err
		}
		if c := byID[b.ToolUseID]; c != nil {
			c.ended, c.unrun, c.content, c.isError, c.at = true, b.Unrun, b.Content, b.IsError, e.Seq
			if e.Seq > after && !b.Unrun {
				p.calls = append(p.calls, c)
			}
		}
	}
	return nil
}

// shutOff closes the way out of a machine that is brought back: new connections
// are refused at once, and those that its processes opened while its resources
// were mounted end.
func (d *driver) shutOff(b *machine) *machine {
	b.close()
	n := b.reopened()
	n.setPartial(true)
	n.setShut(true)
	d.hold(n)
	return n
}

// outside tells why a call may not be run again: it reached out, or a process
// that no call can be named for did after the state that was brought back. That
// process may have done later what the call left to it, and would again.
func (p *past) outside(c *pastCall, after store.Seq) string {
	for _, t := range p.tunnels {
		if slices.Contains(t.Calls, c.event) {
			return "it had a connection to " + t.Host
		}
		if len(t.Calls) == 0 && t.seq > after {
			return "a process had a connection to " + t.Host
		}
	}
	return ""
}

// reachedOut names the host to which a call had a connection after a seq.
func (p *past) reachedOut(id store.EventID, after store.Seq) (host string) {
	for _, t := range p.tunnels {
		if t.seq > after && slices.Contains(t.Calls, id) {
			host = t.Host
		}
	}
	return host
}

// reachedLater names the host to which something had a connection after a call's
// end, in the name of another call.
func (p *past) reachedLater(c *pastCall) (host string) {
	for _, t := range p.tunnels {
		if t.seq > c.at && !slices.Contains(t.Calls, buildCalls) {
			host = t.Host
		}
	}
	return host
}

// maxRepeat bounds how long calls are run again in all.
const maxRepeat = 10 * time.Minute

// repeat runs again, in order, the calls that ended after the state that was
// brought back, while each result equals the recorded one and none of them
// touched the world (design section 5, recovery, step 3). Reading calls are
// skipped: there is nothing of them to bring back. Those of not are left out.
func (d *driver) repeat(ctx context.Context, r *recovery, p past, not map[store.EventID]string) error {
	if len(p.calls) > 0 {
		r.b = d.shutOff(r.b) // what is run again must not reach out
	}
	end := d.m.now().Add(maxRepeat)
	for _, c := range p.calls {
		if reads(c.tool) {
			continue
		}
		if there, err := d.isInside(ctx, r, c); err != nil {
			return err
		} else if there {
			continue
		}
		switch {
		case r.gap != "":
		case c.cut:
			r.gap = "the user had it ended while it ran"
		case p.outside(c, r.after) != "":
			r.gap = p.outside(c, r.after)
		case not[c.event] != "":
			r.gap = not[c.event]
		default:
			same, err := d.againAlone(ctx, r.b, c, p.reachedLater(c), end.Sub(d.m.now()))
			switch {
			case errors.Is(err, errTooLong):
				r.gap = "running calls again took too long"
			case err != nil && r.b.dead() && ctx.Err() == nil:
				return &badRepeat{c.event, "run again, it ended the machine"}
			case err != nil:
				return err
			case same:
				r.rec.Repeated = append(r.rec.Repeated, c.event)
				continue
			default:
				r.gap = "run again, it had another result"
			}
		}
		r.rec.Missing = append(r.rec.Missing, c.event)
	}
	return d.endStray(ctx, r, p)
}

// isInside reports whether a call that ended behind Through has ended in the
// image all the same: it did so while the snapshot was taken. The snapshot lists
// those that may have; what was acknowledged meanwhile only the machine knows.
func (d *driver) isInside(ctx context.Context, r *recovery, c *pastCall) (bool, error) {
	switch {
	case slices.Contains(r.kept, c.event):
		d.ack(ctx, r.b, c.event)
		return true, nil
	case r.saved == nil || !slices.Contains(r.saved.Running, c.event):
		return false, nil
	case slices.Contains(r.running, c.event), slices.Contains(r.stopped, c.event):
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, cancelledCallEnd)
	defer cancel()
	_, err := r.b.s.Reattach(ctx, string(c.event), nil)
	if errors.Is(err, sandbox.ErrUnknownCall) {
		return false, nil
	}
	return err == nil, err
}

// errTooLong: a call that is run again does not end in time.
var errTooLong = errors.New("running calls again takes too long")

// again runs one call again, for at most the time that is left, and compares.
func (d *driver) again(ctx context.Context, b *machine, c *pastCall, left time.Duration) (same bool, err error) {
	run, cancel := context.WithTimeoutCause(ctx, left, errTooLong)
	defer cancel()
	a, err := tool.Run(run, b.s, tool.Call{ID: string(c.event), Thread: string(d.scope.Thread), Name: c.tool, Input: c.input}, nil)
	if err != nil && errors.Is(context.Cause(run), errTooLong) {
		d.cancelCall(ctx, b, c.event)
		return false, errTooLong
	}
	if err != nil {
		return false, fmt.Errorf("run call %s again: %w", c.event, err)
	}
	d.ack(ctx, b, c.event)
	return a.IsError == c.isError && sameJSON(a.Content, c.content), nil
}

// againAlone is again for a call after whose end something reached a host, if it
// is not empty. A tunnel names the calls that ran when it was opened; it may have
// been a process all the same that this call had left. Where the call leaves one
// when it is run again, that would reach out a second time: badRepeat.
func (d *driver) againAlone(ctx context.Context, b *machine, c *pastCall, host string, left time.Duration) (same bool, err error) {
	if host == "" {
		return d.again(ctx, b, c, left)
	}
	before, err := processesIn(ctx, b)
	if err != nil {
		return false, err
	}
	if before == 0 {
		before = 1 // the shell, which stays
	}
	if same, err = d.again(ctx, b, c, left); err != nil || !same {
		return same, err
	}
	after, err := processesIn(ctx, b)
	if err == nil && after > before {
		err = &badRepeat{c.event, "it leaves a process, which may have had a connection to " + host}
	}
	return same, err
}

// processesIn counts the processes inside, without the agent.
func processesIn(ctx context.Context, b *machine) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, cancelledCallEnd)
	defer cancel()
	a, err := b.s.Activity(ctx)
	return len(strings.Fields(a.Processes)), err
}

func sameJSON(a, b json.RawMessage) bool {
	var x, y bytes.Buffer
	if json.Compact(&x, a) != nil || json.Compact(&y, b) != nil {
		return false
	}
	if bytes.Equal(x.Bytes(), y.Bytes()) {
		return true
	}
	// One may have been written with other escapes.
	var u, v any
	if json.Unmarshal(a, &u) != nil || json.Unmarshal(b, &v) != nil {
		return false
	}
	return string(encode(u)) == string(encode(v))
}

// Texts of calls that were under way when their machine was lost.
const (
	lostOutside = "The machine died while this call was under way or about to begin, and was brought back as it was before. The call had a connection to %s, so it was not run again: what it did inside is undone, what it did outside is not known. Look before you repeat it."
	lostBefore  = "The machine died before this call ended, and what was brought back does not contain all that the call builds upon. It was not run again."
)

// stillOpen answers those open calls that cannot be run again. The others run in
// the machine that was brought back: what they did in the former one is undone.
func (d *driver) stillOpen(r *recovery, p past) (drafts []store.Draft) {
	d.read(func(st *state) {
		for _, c := range st.open() {
			if c.tool == "" || c.waitsForPerson() || r.knows(c.event) {
				continue
			}
			why := ""
			if host := p.reachedOut(c.event, 0); host != "" {
				why = fmt.Sprintf(lostOutside, host)
			}
			if why == "" && len(r.rec.Missing) > 0 {
				why = lostBefore
			}
			if why != "" {
				cp := *c
				drafts = append(drafts, d.unrun(&cp, gateway.Answer{IsError: true, Content: text(why)})...)
			}
		}
	})
	return drafts
}

// noteOf says what the model has to know of a machine that was brought back;
// empty when there is nothing: it was suspended and is as it was.
func noteOf(r *recovery, p past) string {
	var b strings.Builder
	switch {
	case r.saved == nil:
		b.WriteString("Your machine was lost and nothing of it could be brought back. It is a new one: files, processes and shell state of before are gone.")
	case r.rec.Reason != "":
		fmt.Fprintf(&b, "Your machine was lost and was brought back as it was at %s: what its processes did after that is undone.", r.saved.At.UTC().Format(time.RFC3339))
	case len(r.rec.Missing)+len(r.rec.Tried) > 0:
		fmt.Fprintf(&b, "Your machine was suspended and was brought back as it was at %s.", r.saved.At.UTC().Format(time.RFC3339))
	}
	if n := len(r.rec.Tried); n > 0 {
		fmt.Fprintf(&b, " %d newer snapshots of it could not be used.", n)
	}
	if n := len(r.rec.Repeated); n > 0 {
		fmt.Fprintf(&b, " %d tool calls after that were run again with the same results.", n)
	}
	if len(r.rec.Missing) > 0 {
		fmt.Fprintf(&b, " It does not contain what these calls did, although their results stand above (%s):", r.gap)
		for _, c := range p.calls {
			if slices.Contains(r.rec.Missing, c.event) {
				fmt.Fprintf(&b, "\n- %s %s", c.tool, clip(string(c.input), 200))
			}
		}
		b.WriteString("\nCheck before you build on them.")
	}
	if len(r.rec.Dead) > 0 {
		fmt.Fprintf(&b, " These outside connections of its processes have ended: %s.", strings.Join(r.rec.Dead, ", "))
	}
	return strings.TrimSpace(b.String())
}
