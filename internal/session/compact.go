package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
)

// Compaction limits.
const (
	// compactAt is the part of the context window at which history is summed up.
	compactAt = 0.8
	// bytesPerToken is a low estimate, so that what is cut to fit does fit.
	bytesPerToken = 3
	// fallbackWindow is assumed for models whose window is not configured, tokens.
	fallbackWindow = 100_000
	// maxSummary bounds a summary, tokens.
	maxSummary = 8_000
)

// summarySystem is the system prompt of a compaction request.
const summarySystem = "You compress the history of an AI agent that works on a long task. Write the summary from which the agent will go on; it will see nothing else of the history. Keep: the task and every instruction of the user; decisions and why; every identifier, name, path and number that later work needs; what was done in the outside world and must not be done again; what is open or whose outcome is unknown. Do not invent anything."

// compact replaces the history by a summary, at a point where every call has
// its result. It runs outside the context that is too long: the history is
// rendered as text and cut to fit (trials, section J). After
// Patience.Compactions attempts the newest part that fits is kept as it is, so
// that a session is never wedged by its own length.
//
// A crash before the append leaves the history as it was; after it the log is
// read from the compaction entry on. The original stays in the log.
func (d *driver) compact(ctx context.Context, spec gateway.ModelSpec) error {
	var st state
	d.read(func(s *state) { st = *s })
	if st.shrunk > d.m.patience.Compactions {
		return d.exhausted(ctx, newSessionError("compaction_limit_reached_error",
			"The history does not fit the model's context window even after it was compacted. Fork the session at an earlier point or use a model with a larger window.", "exhausted"))
	}
	window := spec.ContextWindow
	if window == 0 {
		window = fallbackWindow
	}
	for try := range d.m.patience.Compactions {
		if st.shrunk == d.m.patience.Compactions {
			break // summaries did not help: what is kept beside them is too long
		}
		room := window / 2 * bytesPerToken >> (try + st.shrunk)
		req := gateway.ModelRequest{Model: st.agent.Model.ID, System: summarySystem, MaxTokens: min(maxSummary, max(spec.MaxOutput, 1)),
			Messages: []gateway.Message{{Role: "user", Content: []gateway.Block{{Type: "text", Text: "History:\n\n" + render(st.messages, room) + "\n\nWrite the summary now."}}}}}
		if spec.MaxOutput == 0 {
			req.MaxTokens = maxSummary
		}
		reply, a, err := d.ask(ctx, req, purposeCompaction)
		var me *gateway.ModelError
		var cut *cutShort
		switch {
		case errors.As(err, &cut):
			return d.cutOff(a, cut)
		case errors.As(err, &me) && string(me.Kind) == "context_window":
			d.m.db.AppendRelaxed(d.lease, d.failedDrafts(a, string(me.Kind), errorUsage(me)))
			continue
		case errors.As(err, &me):
			return d.modelFailed(ctx, a, me, spec)
		}
		if err != nil {
			return err
		}
		if summary := spokenText(reply.Content); summary != "" {
			return d.compacted(ctx, a, reply, store.Compaction{Summary: summary, Method: "summary"}, st, nil)
		}
		d.m.db.AppendRelaxed(d.lease, d.failedDrafts(a, "empty_summary", replyUsage(reply)))
	}
	room := window / 4 * bytesPerToken
	short, err := d.withoutLong(ctx, st.messages, room)
	if err != nil {
		return err
	}
	kept := newest(short, room)
	return d.compacted(ctx, asked{}, nil, store.Compaction{Method: "cut",
		Summary: "Earlier history was cut because it did not fit. What follows is its newest part."}, st, kept)
}

// compacted commits a compaction: output of the summary, the entry from which
// rebuilding starts, and the event.
func (d *driver) compacted(ctx context.Context, a asked, r *gateway.ModelReply, c store.Compaction, st state, kept []gateway.Message) error {
	if err := d.m.fault("before_compaction"); err != nil {
		return err
	}
	open, err := d.m.db.OpenEffects(ctx, d.ws, d.id)
	if err != nil {
		return err
	}
	intro := "Summary of the work so far:\n\n" + c.Summary
	for _, e := range open {
		if e.State == store.StateInDoubt {
			c.Open = append(c.Open, e.ID)
			intro += fmt.Sprintf("\n\nThe outcome of %s (%s) is unknown; do not repeat it.", e.Tool, e.ID)
		}
	}
	first := gateway.Message{Role: "user", Content: []gateway.Block{{Type: "text", Text: intro}}}
	if kept == nil {
		kept = lastInput(st.messages)
	}
	cs := compactState{Messages: merge(first, kept), Tools: st.tools, Told: st.told, Usage: st.usage, Status: st.status,
		Running: st.running, Want: st.want, Rounds: st.rounds, Shrunk: st.shrunk + 1, Machine: st.machine}
	var drafts []store.Draft
	if r != nil {
		u := replyUsage(r)
		out := store.Output{V: store.BodyVersion, Effect: a.effect, Purpose: purposeCompaction, Model: a.model, StopReason: r.StopReason,
			Content: encode(r.Content), Usage: u, CostNanoUSD: d.m.cfg.Gateway.Cost(a.model, u), RequestID: r.RequestID,
			ElapsedMS: d.m.now().Sub(a.started).Milliseconds()}
		cs.Usage.Input += u.Input
		cs.Usage.Output += u.Output
		cs.Usage.CacheRead += u.CacheRead
		cs.Usage.CacheCreation5m += u.CacheCreation5m
		cs.Usage.CacheCreation1h += u.CacheCreation1h
		cs.Usage.CostNanoUSD += out.CostNanoUSD
		drafts = append(drafts, record(store.KindOutput, string(a.effect), d.scope.Thread, out),
			event(d.newID("sevt_"), evSpanEnd, d.scope.Thread, fields{
				"model_request_start_id": a.span, "is_error": false, "model_usage": modelUsage(u, "")}))
	}
	// Snapshots are taken, packed and dropped while the summary is made. Nobody
	// logs one between this look and the append.
	d.saves.take.Lock()
	defer d.saves.take.Unlock()
	d.read(func(now *state) { cs.Machine = now.machine })
	c.V, c.Through, c.State = store.BodyVersion, st.seq, encode(cs)
	drafts = append(drafts, record(store.KindCompaction, d.newID("rec_"), d.scope.Thread, c),
		event(d.newID("sevt_"), evCompacted, d.scope.Thread, nil))
	if _, err := d.append(ctx, store.Append{Entries: drafts}); err != nil {
		return err
	}
	return d.m.fault("after_compaction")
}

// merge puts a first user message before others, as one message where they meet.
func merge(first gateway.Message, rest []gateway.Message) []gateway.Message {
	if len(rest) > 0 && rest[0].Role == first.Role {
		m := gateway.Message{Role: first.Role, Content: append(first.Content[:len(first.Content):len(first.Content)], rest[0].Content...)}
		return append([]gateway.Message{m}, rest[1:]...)
	}
	return append([]gateway.Message{first}, rest...)
}

// lastInput is the user's newest words that the model has not answered; tool
// results are part of the summary, because their calls are.
func lastInput(ms []gateway.Message) []gateway.Message {
	n := len(ms)
	if n == 0 || ms[n-1].Role != "user" {
		return nil
	}
	var words []gateway.Block
	for _, b := range ms[n-1].Content {
		if b.Type != "tool_result" {
			words = append(words, b)
		}
	}
	if len(words) == 0 {
		return nil
	}
	return []gateway.Message{{Role: "user", Content: words}}
}

// newest is the longest tail of closed pairs that fits into n bytes: it begins
// with an assistant message, never between a call and its result.
func newest(ms []gateway.Message, n int) []gateway.Message {
	start, size := len(ms), 0
	for i := len(ms) - 1; i >= 0; i-- {
		size += len(encode(ms[i]))
		if size > n {
			break
		}
		if ms[i].Role == "assistant" {
			start = i
		}
	}
	if start == len(ms) {
		return fitting(lastInput(ms), n)
	}
	return ms[start:]
}

// fitting keeps the newest n bytes of the user's words, which may be longer than
// the window by themselves.
func fitting(ms []gateway.Message, n int) []gateway.Message {
	if len(ms) == 0 {
		return nil
	}
	var words []gateway.Block
	for _, b := range slices.Backward(ms[0].Content) {
		size := len(encode(b))
		if size > n {
			if b.Type == "text" && n > 0 {
				b.Text = "(the beginning was cut) " + strings.ToValidUTF8(b.Text[max(0, len(b.Text)-n):], "")
				words = append(words, gateway.Block{Type: "text", Text: b.Text})
			}
			break
		}
		n -= size
		words = append(words, b)
	}
	slices.Reverse(words)
	return []gateway.Message{{Role: "user", Content: words}}
}

// render writes history as text, newest part kept, at most n bytes.
func render(ms []gateway.Message, n int) string {
	var parts []string
	size := 0
	for i := len(ms) - 1; i >= 0 && size < n; i-- {
		var b strings.Builder
		for _, bl := range ms[i].Content {
			switch bl.Type {
			case "text":
				fmt.Fprintf(&b, "%s: %s\n", ms[i].Role, bl.Text)
			case "tool_use":
				fmt.Fprintf(&b, "%s calls %s %s\n", ms[i].Role, bl.Name, clip(string(bl.Input), 2000))
			case "tool_result":
				what := "result"
				if bl.IsError {
					what = "error result"
				}
				fmt.Fprintf(&b, "%s: %s\n", what, clip(spokenText(bl.Content), 4000))
			case "thinking", "redacted_thinking":
			default:
				fmt.Fprintf(&b, "%s: (%s)\n", ms[i].Role, bl.Type)
			}
		}
		s := b.String()
		if len(s) > n-size {
			s = "…" + s[len(s)-len(clip(s, n-size)):]
			s = strings.ToValidUTF8(s, "")
		}
		size += len(s)
		parts = append(parts, s)
	}
	for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
		parts[i], parts[j] = parts[j], parts[i]
	}
	return strings.Join(parts, "")
}

func spokenText(bs []gateway.Block) string {
	var out []string
	for _, b := range bs {
		if b.Type == "text" && b.Text != "" {
			out = append(out, b.Text)
		}
	}
	return strings.Join(out, "\n")
}
