package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

// logLine is one position of a session's log, as far as the API shows it.
type logLine struct {
	Seq    int64      `json:"seq"`
	At     api.Time   `json:"at"`
	Kind   string     `json:"kind"` // event, intent, attempt, completion, evidence
	Event  *api.Event `json:"event,omitzero"`
	Effect string     `json:"effect,omitzero"`
	Tool   string     `json:"tool,omitzero"`
	Class  string     `json:"class,omitzero"`
	Fence  int64      `json:"fence,omitzero"`
	Says   string     `json:"says,omitzero"`
}

func (a *app) logCommand() *cobra.Command {
	var follow, events bool
	cmd := &cobra.Command{
		Use:   "log SESSION",
		Short: "Show a session's log: its events and, at their places, what became of its effects",
		Long: `Show a session's log in order: its events and, at their places, the intent,
attempts, completion and evidence of each effect. With --follow it goes on until
the session ends or you leave with Ctrl-C.`,
		Example: "  planaria log sesn_01\n  planaria log sesn_01 --follow --json",
		Args:    argsExactly("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			l := &logReader{a: a, c: c, session: args[0], events: events, seen: map[string]bool{}}
			if follow {
				return l.follow(cmd.Context())
			}
			return l.once(cmd.Context())
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	cmd.Flags().BoolVar(&events, "events", false, "only events")
	return cmd
}

// logReader merges the two views that the API gives of one log.
type logReader struct {
	a       *app
	c       *api.Client
	session string
	events  bool
	seen    map[string]bool // effect records that were printed
}

// once prints what is there. The stream tells the seq of each event; it is left
// at the event that was the newest when we began.
func (l *logReader) once(ctx context.Context) error {
	newest, err := collect(l.c.AllEvents(ctx, l.session, api.EventListParams{Order: "desc", Limit: 10}), 10)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(newest, func(e api.Event) bool { return e.ProcessedAt != nil })
	var lines []logLine
	if i >= 0 {
		for e, err := range l.c.Stream(ctx, l.session, api.StreamOptions{}) {
			if err != nil {
				return err
			}
			if e.ID == "" || e.ProcessedAt == nil {
				continue
			}
			lines = append(lines, logLine{Seq: e.Seq, At: *e.ProcessedAt, Kind: "event", Event: &e})
			if e.ID == newest[i].ID {
				break
			}
		}
	}
	records, err := l.records(ctx)
	if err != nil {
		return err
	}
	return l.print(append(lines, records...))
}

// follow prints the log as it grows. Records of effects are asked for when an
// event shows that some may be there.
func (l *logReader) follow(ctx context.Context) error {
	for e, err := range l.c.Stream(ctx, l.session, api.StreamOptions{}) {
		if err != nil {
			return err
		}
		if e.ID == "" || e.ProcessedAt == nil {
			continue
		}
		lines := []logLine{{Seq: e.Seq, At: *e.ProcessedAt, Kind: "event", Event: &e}}
		switch e.Body.(type) {
		case *api.AgentMCPToolUse, *api.AgentMCPToolResult, *api.AgentCustomToolUse, *api.SessionStatusIdle, *api.SessionStatusRescheduled:
			records, err := l.records(ctx)
			if err != nil {
				return err
			}
			lines = append(lines, records...)
		}
		if err := l.print(lines); err != nil {
			return err
		}
	}
	return nil
}

// records are the places of effects in the log that were not printed yet.
func (l *logReader) records(ctx context.Context) ([]logLine, error) {
	if l.events {
		return nil, nil
	}
	var lines []logLine
	add := func(e api.Effect, seq int64, at api.Time, kind, says string, fence int64) {
		key := fmt.Sprint(e.ID, kind, seq)
		if seq > 0 && !l.seen[key] {
			l.seen[key] = true
			lines = append(lines, logLine{Seq: seq, At: at, Kind: kind, Effect: e.ID, Tool: e.Tool, Class: string(e.Class), Fence: fence, Says: says})
		}
	}
	for e, err := range l.c.AllEffects(ctx, l.session, api.EffectListParams{Limit: 100}) {
		if err != nil {
			return nil, err
		}
		first := "intent"
		switch e.State {
		case api.EffectDenied, api.EffectAwaitingApproval, api.EffectProposed:
			first = "proposal"
		}
		add(e, e.Seq, e.CreatedAt, first, "", 0)
		for _, at := range e.Attempts {
			add(e, at.Seq, at.At, "attempt", "", at.Fence)
		}
		for _, ev := range e.Evidence {
			add(e, ev.Seq, ev.At, "evidence", ev.Kind+" says: "+ev.Says, 0)
		}
		if c := e.Completion; c != nil {
			add(e, c.Seq, c.At, "completion", stateWord(e), 0)
		}
	}
	return lines, nil
}

func (l *logReader) print(lines []logLine) error {
	slices.SortStableFunc(lines, func(x, y logLine) int { return int(x.Seq - y.Seq) })
	for _, n := range lines {
		if l.a.json {
			if err := l.a.printJSON(n); err != nil {
				return err
			}
			continue
		}
		kind, text := n.Kind, fmt.Sprintf("%s  %s, %s", n.Effect, n.Tool, n.Class)
		if n.Event != nil {
			kind, text = string(n.Event.Type()), n.Event.ID+"  "+describe(*n.Event)
		}
		if n.Fence > 0 {
			text += fmt.Sprintf(", fence %d", n.Fence)
		}
		if n.Says != "" {
			text += ", " + n.Says
		}
		if _, err := fmt.Fprintf(l.a.stdout, "%6d  %s  %-30s  %s\n", n.Seq, n.At.UTC().Format("15:04:05.000"), kind, oneLine(text)); err != nil {
			return err
		}
	}
	return nil
}
