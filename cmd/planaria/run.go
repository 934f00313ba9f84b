package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) runCommand() *cobra.Command {
	r := &runner{a: a, shown: map[string]bool{}}
	var in agentFlags
	var agent, environment, session, title string
	var vaults []string
	cmd := &cobra.Command{
		Use:   "run TASK",
		Short: "Give an agent a task and watch the turn live; answer approvals here",
		Long: `Give an agent a task and watch the turn live. What the agent says goes to
standard output, everything else to standard error: its calls, and what commands
in its machine print while they run. TASK may be - for standard
input. Without --agent an agent is made from --model, --system and --mcp; with
--session an existing session gets the task as its next message.

Calls that need a person are asked for here: y allows, n denies, d shows all
arguments. Without a terminal they are left open. Ctrl-C interrupts the agent; a
second one leaves, and the session goes on without you.

Exit codes: 0 the turn ended, 1 it ended otherwise (retries exhausted, refusal,
budget reached, terminated), 2 misused, 3 it waits for a person, 130 you left.`,
		Example: `  planaria run 'What is new in the backlog?' --model claude-opus-5-5 --mcp tracker=planaria:tracker
  planaria run 'Now close the oldest one' --session sesn_01
  echo 'Summarise this' | planaria run - --agent agent_01 --json`,
		Args: argsExactly("TASK"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkRunFlags(agent, session, in); err != nil {
				return err
			}
			task, err := a.textOf(args[0])
			if err != nil {
				return err
			}
			if r.c, err = a.client(); err != nil {
				return err
			}
			ctx := cmd.Context()
			if session == "" {
				if agent == "" {
					if agent, err = makeAgent(ctx, r.c, in); err != nil {
						return err
					}
				}
				return r.start(ctx, task, agent, environment, title, vaults)
			}
			return r.goOn(ctx, task, session)
		},
	}
	f := cmd.Flags()
	f.StringVar(&agent, "agent", "", "id of the agent")
	f.StringVar(&session, "session", "", "id of an existing session")
	f.StringVar(&environment, "environment", "", "id of the environment (default: the one named "+cliEnvironment+", made if missing)")
	f.StringVar(&title, "title", "", "title of the session (default: the beginning of the task)")
	f.StringArrayVar(&vaults, "vault", nil, "id of a vault whose credentials the session uses (repeatable)")
	f.BoolVar(&r.yes, "yes", false, "allow every call that asks, without asking")
	in.add(cmd)
	return cmd
}

func checkRunFlags(agent, session string, in agentFlags) error {
	given := 0
	for _, set := range []bool{agent != "", session != "", in.set()} {
		if set {
			given++
		}
	}
	switch {
	case given == 0:
		return misused(errors.New("who shall do it?"), "name --agent, --session, or at least --model")
	case given > 1:
		return misused(errors.New("--agent, --session and --model with --system and --mcp exclude each other"), "name one of them")
	case in.set() && in.model == "":
		return misused(errors.New("--model is missing"), "such as --model claude-opus-5-5")
	}
	_, err := in.create("")
	return err
}

// makeAgent makes the agent that the flags describe.
func makeAgent(ctx context.Context, c *api.Client, in agentFlags) (string, error) {
	create, err := in.create("planaria run")
	if err != nil {
		return "", err
	}
	g, err := c.CreateAgent(ctx, create)
	return g.ID, err
}

// runner follows one turn of one session.
type runner struct {
	a       *app
	c       *api.Client
	session string
	yes     bool

	lines <-chan string // what the person types
	out   *liveText
	said  string               // what the agent said last, for approvals
	calls map[string]api.Event // tool-use events by id
	after string               // the event that began our turn; idles before it are not ours
	began bool                 // it was processed
	shown map[string]bool      // effects in doubt that were shown
}

// start creates a session whose first message is the task.
func (r *runner) start(ctx context.Context, task, agent, environment, title string, vaults []string) error {
	var err error
	if environment == "" {
		if environment, err = defaultEnvironment(ctx, r.c); err != nil {
			return err
		}
	}
	if title == "" {
		title = cut(oneLine(task), 80)
	}
	s, err := r.c.CreateSession(ctx, api.SessionCreate{Agent: api.AgentRef{ID: agent}, EnvironmentID: environment, Title: &title,
		VaultIDs: vaults, InitialEvents: api.ClientEvents{&api.UserMessage{Content: api.Texts(task)}}})
	if err != nil {
		return err
	}
	r.began = true
	r.a.say("session %s", s.ID)
	return r.watch(ctx, s.ID, api.StreamOptions{})
}

// goOn sends the task to an existing session. The cursor is taken before, so
// that nothing of the turn is missed.
func (r *runner) goOn(ctx context.Context, task, session string) error {
	s, err := r.c.GetSession(ctx, session)
	if err != nil {
		return err
	}
	var o api.StreamOptions
	r.session = session
	if p := s.Planaria; p != nil {
		o.After = p.HeadSeq
		if s.Status == api.StatusIdle && p.StopReason != nil && p.StopReason.Type == api.StopRequiresAction {
			open, err := r.ask(ctx, p.StopReason.EventIDs)
			if err != nil {
				return err
			}
			if open > 0 {
				r.a.say("session %s waits for a person (%d open); answer that first, the task was not sent", session, open)
				return &exitError{exitWaits}
			}
		}
	}
	sent, err := r.c.SendEvents(ctx, session, &api.UserMessage{Content: api.Texts(task)})
	if err != nil {
		return err
	}
	if s.Planaria != nil && s.Planaria.Paused {
		r.a.say("session %s is paused; the task is queued until 'planaria resume %s'", session, session)
		return &exitError{exitWaits}
	}
	if len(sent) > 0 {
		r.after = sent[0].ID
	}
	return r.watch(ctx, session, o)
}

// watch follows the session until its turn is over.
func (r *runner) watch(ctx context.Context, session string, o api.StreamOptions) error {
	r.session = session
	r.out = newLiveText(r.a)
	r.calls = map[string]api.Event{}
	o.Deltas = []api.EventType{api.TypeAgentMessage, api.TypeAgentToolUse}
	ctx, stop := r.interrupts(ctx)
	defer stop()
	defer r.out.end()
	for e, err := range r.c.Stream(ctx, session, o) {
		if err != nil {
			if errors.Is(context.Cause(ctx), errLeft) {
				r.out.end()
				r.a.say("left; the session goes on: planaria log %s --follow", session)
				return &exitError{exitInterrupted}
			}
			return err
		}
		if r.a.json && e.ID != "" {
			if err := r.a.printJSON(e); err != nil {
				return err
			}
		}
		done, err := r.take(ctx, e)
		if err != nil || done {
			return err
		}
	}
	return nil
}

// errLeft: the person left with a second Ctrl-C.
var errLeft = errors.New("left")

// interrupts turns the first Ctrl-C into an interrupt of the agent and the
// second into the end of watching.
func (r *runner) interrupts(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt)
	var wait sync.WaitGroup
	done := make(chan struct{})
	wait.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-done:
				return
			case <-signals:
			}
			if n > 0 {
				cancel(errLeft)
				return
			}
			r.a.say("\ninterrupting; once more to leave")
			if _, err := r.c.SendEvents(background(ctx), r.session, &api.UserInterrupt{}); err != nil {
				r.a.say("the interrupt was not accepted: %s", oneLine(err.Error()))
			}
		}
	})
	return ctx, func() {
		signal.Stop(signals)
		close(done)
		cancel(nil)
		wait.Wait()
	}
}

// take shows one event. done says that the turn is over.
func (r *runner) take(ctx context.Context, e api.Event) (done bool, err error) {
	if e.ID != "" && e.ID == r.after && e.ProcessedAt != nil {
		r.began = true
	}
	switch b := e.Body.(type) {
	case *api.EventStart:
		r.out.start(b.Event.ID)
	case *api.EventDelta:
		if _, command := r.calls[b.EventID].Body.(*api.AgentToolUse); command {
			r.out.output(b.EventID, b.Delta.Content.Text)
		} else {
			r.out.delta(b.EventID, b.Delta.Content.Text)
		}
	case *api.AgentThinking:
		r.out.note("thinking")
	case *api.AgentMessage:
		r.said = blockText(b.Content)
		r.out.message(e.ID, r.said)
	case *api.ModelRequestStart:
		r.out.wait("waiting for the model")
	case *api.AgentMCPToolUse:
		r.calls[e.ID] = e
		r.out.note("-> %s.%s %s", b.MCPServerName, b.Name, cut(oneLine(string(b.Input)), 120))
		r.out.wait("waiting for " + b.MCPServerName)
	case *api.AgentToolUse:
		r.calls[e.ID] = e
		r.out.note("-> %s %s", b.Name, cut(oneLine(string(b.Input)), 120))
		r.out.wait("waiting for " + oneLine(b.Name))
	case *api.AgentToolResult:
		r.builtinResult(b)
	case *api.AgentCustomToolUse:
		r.calls[e.ID] = e
		r.out.note("-> %s %s (performed by the client)", b.Name, cut(oneLine(string(b.Input)), 120))
	case *api.AgentMCPToolResult:
		r.result(ctx, b)
	case *api.SessionError:
		r.out.note("error: %s (%s)", b.Error.Message, b.Error.RetryStatus.Type)
	case *api.SessionStatusRescheduled:
		r.out.note("waiting; it goes on by itself")
		return false, r.showDoubts(ctx, nil)
	case *api.SessionStatusIdle:
		if !r.began && b.StopReason.Type == api.StopEndTurn {
			return false, nil // of the turn before ours
		}
		return r.idle(ctx, b.StopReason, b.StopDetails)
	case *api.SessionStatusTerminated:
		return true, r.over("terminated", exitFailed)
	case *api.SessionDeleted:
		return true, r.over("deleted", exitFailed)
	}
	return false, nil
}

// result shows how a call ended, with its class and state.
func (r *runner) result(ctx context.Context, b *api.AgentMCPToolResult) {
	name := "call"
	if use, ok := r.calls[b.MCPToolUseID].Body.(*api.AgentMCPToolUse); ok {
		name = use.MCPServerName + "." + use.Name
	}
	words := "ok"
	if b.IsError {
		words = "error"
	}
	if e, err := r.effectOf(ctx, b.MCPToolUseID); err == nil && e.ID != "" {
		words = string(e.Class) + ", " + effectWords(e)
	}
	r.out.note("<- %s: %s: %s", name, words, cut(oneLine(blockText(b.Content)), 120))
}

// builtinResult shows how a call of a built-in tool ended: its machine is undone
// with a snapshot, so it is no effect.
func (r *runner) builtinResult(b *api.AgentToolResult) {
	name, words := "call", "ok"
	if use, ok := r.calls[b.ToolUseID].Body.(*api.AgentToolUse); ok {
		name = use.Name
	}
	if b.IsError {
		words = "error"
	}
	r.out.note("<- %s: %s: %s", name, words, cut(oneLine(blockText(b.Content)), 120))
}

// effectOf finds the effect of a tool call; without an id when there is none.
func (r *runner) effectOf(ctx context.Context, event string) (api.Effect, error) {
	n := 0
	for e, err := range r.c.AllEffects(ctx, r.session, api.EffectListParams{Order: "desc", Limit: 10}) {
		if err != nil {
			return api.Effect{}, err
		}
		if e.EventID == event {
			return e, nil
		}
		if n++; n == 500 {
			break // a call of this turn is among the newest
		}
	}
	return api.Effect{}, nil
}

// idle handles the end of a turn: it is over, or a person is asked.
func (r *runner) idle(ctx context.Context, stop api.StopReason, details *api.StopDetails) (bool, error) {
	r.out.end()
	switch stop.Type {
	case api.StopEndTurn:
		return true, r.over("", exitDone)
	case api.StopRequiresAction:
		open, err := r.ask(ctx, stop.EventIDs)
		if err != nil || open == 0 {
			return false, err
		}
		return true, r.over(fmt.Sprintf("waits for a person (%d open)", open), exitWaits)
	case api.StopRefusal:
		if details != nil {
			return true, r.over("the model refused: "+oneLine(details.Explanation), exitFailed)
		}
	}
	return true, r.over(strings.ReplaceAll(stop.Type, "_", " "), exitFailed)
}

// over ends watching with words on stderr and an exit code.
func (r *runner) over(words string, code int) error {
	r.out.end()
	if words != "" {
		r.a.say("session %s: %s", r.session, words)
	}
	if code == exitDone {
		return nil
	}
	return &exitError{code}
}

// ask puts what waits for a person before the person. It returns how many stay open.
func (r *runner) ask(ctx context.Context, events []string) (open int, err error) {
	for _, id := range events {
		use, builtin, err := r.builtinUse(ctx, id)
		if err != nil {
			return open, err
		}
		if builtin {
			answered, err := r.confirm(ctx, id, use)
			if err != nil {
				return open, err
			}
			if !answered {
				open++
			}
			continue
		}
		e, err := r.effectOf(ctx, id)
		if err != nil {
			return open, err
		}
		switch {
		case e.ID == "" || e.State == api.EffectIntended:
			r.a.say("%s waits for its result from the client (user.custom_tool_result)", id)
			open++
		case e.State == api.EffectAwaitingApproval:
			answered, err := r.approve(ctx, e)
			if err != nil {
				return open, err
			}
			if !answered {
				open++
			}
		case e.State == api.EffectInDoubt:
			if err := r.showDoubts(ctx, &e); err != nil {
				return open, err
			}
			open++
		}
	}
	return open, nil
}

// builtinUse finds a call of a built-in tool by its event; false when the event is
// another one.
func (r *runner) builtinUse(ctx context.Context, id string) (api.AgentToolUse, bool, error) {
	e, ok := r.calls[id]
	if !ok {
		n := 0
		for x, err := range r.c.AllEvents(ctx, r.session, api.EventListParams{Types: []api.EventType{api.TypeAgentToolUse}, Order: "desc", Limit: 100}) {
			if err != nil {
				return api.AgentToolUse{}, false, err
			}
			if n++; x.ID == id || n == 500 { // a call of this turn is among the newest
				e = x
				break
			}
		}
	}
	use, ok := e.Body.(*api.AgentToolUse)
	if !ok || e.ID != id {
		return api.AgentToolUse{}, false, nil
	}
	return *use, true, nil
}

// confirm asks about a call of a built-in tool.
func (r *runner) confirm(ctx context.Context, id string, use api.AgentToolUse) (answered bool, err error) {
	q := question{what: use.Name, class: "in its own machine", arguments: string(use.Input), fields: [][2]string{
		{"event", id}, {"tool", use.Name}, {"arguments", indent(use.Input)}},
		// There is no effect that planaria approve could name.
		elsewhere: fmt.Sprintf("planaria run --session %s, with a terminal or --yes", r.session)}
	return r.decide(ctx, q, func(allow bool) error {
		result := "deny"
		if allow {
			result = "allow"
		}
		_, err := r.c.SendEvents(ctx, r.session, &api.UserToolConfirmation{ToolUseID: id, Result: result})
		return err
	})
}

// approve asks about one call. What is decided on is drawn from the canonical
// arguments that the server will send; what the agent says stands apart.
func (r *runner) approve(ctx context.Context, e api.Effect) (answered bool, err error) {
	q := question{what: target(e), class: string(e.Class), arguments: string(e.Arguments), fields: effectFields(e),
		elsewhere: fmt.Sprintf("planaria approve allow %s, or planaria approve deny %s", e.ID, e.ID)}
	return r.decide(ctx, q, func(allow bool) error {
		_, err := r.c.AnswerApproval(ctx, e.ID, allow, "")
		return err
	})
}

// question is a call that a person decides on.
type question struct {
	what, class, arguments string
	fields                 [][2]string // all of it
	elsewhere              string      // how to answer without a terminal
}

// decide puts a question to the person, and the answer to the server.
func (r *runner) decide(ctx context.Context, q question, answer func(allow bool) error) (answered bool, err error) {
	if r.yes {
		err := answer(true)
		r.a.say("allowed %s %s", oneLine(q.what), oneLine(q.arguments))
		return err == nil, err
	}
	r.a.say("\nthe agent asks to call %s (%s):", oneLine(q.what), q.class)
	r.a.say("  %s", cut(oneLine(q.arguments), 300))
	if r.said != "" {
		r.a.say("the agent says: %q", cut(oneLine(r.said), 200))
	}
	if !isTerminal(r.a.stdin) {
		r.a.say("no terminal to ask on: %s", q.elsewhere)
		return false, nil
	}
	for {
		fmt.Fprint(r.a.stderr, "allow it? [y]es, [n]o, [d]etails: ")
		line, ok := r.line(ctx)
		if !ok {
			r.a.say("")
			return false, nil
		}
		switch strings.ToLower(strings.TrimSpace(line)) {
		case "y", "yes":
			err := answer(true)
			return err == nil, err
		case "n", "no":
			err := answer(false)
			return err == nil, err
		case "d", "details":
			for _, f := range q.fields {
				if f[1] != "" {
					r.a.say("  %-10s %s", f[0], clean(f[1]))
				}
			}
		}
	}
}

// line reads one line that the person types; false when there is no more, or
// when the person leaves.
func (r *runner) line(ctx context.Context) (string, bool) {
	if r.lines == nil {
		lines := make(chan string)
		r.lines = lines
		go func() { // blocks in a read that nothing can end; it goes with the process
			defer close(lines)
			for in := bufio.NewScanner(r.a.stdin); in.Scan(); {
				lines <- in.Text()
			}
		}()
	}
	select {
	case s, ok := <-r.lines:
		return s, ok
	case <-ctx.Done():
		return "", false
	}
}

// showDoubts shows effects in doubt with the way out: this one, or all of the session.
func (r *runner) showDoubts(ctx context.Context, one *api.Effect) error {
	var effects []api.Effect
	if one != nil {
		effects = []api.Effect{*one}
	} else {
		var err error
		effects, err = collect(r.c.AllEffects(ctx, r.session, api.EffectListParams{States: []api.EffectState{api.EffectInDoubt}}), 20)
		if err != nil {
			return err
		}
	}
	for _, e := range effects {
		if r.shown[e.ID] && one == nil {
			continue
		}
		r.shown[e.ID] = true
		r.a.say("%s %s %s\n  in doubt: it may or may not have happened. The way out:\n%s", e.ID, target(e), cut(oneLine(string(e.Arguments)), 200), wayOut(e))
	}
	return nil
}
