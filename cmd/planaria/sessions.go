package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) sessionsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "sessions",
		Short:   "List, create, read, write to and end sessions",
		Example: "  planaria sessions list --status running\n  planaria sessions events sesn_01",
		RunE:    needSubcommand,
	}
	cmd.AddCommand(a.sessionsList(), a.sessionsGet(), a.sessionsCreate(), a.sessionsSend(), a.sessionsEvents(),
		a.sessionsArchive(), a.sessionsDelete())
	return cmd
}

func (a *app) sessionsList() *cobra.Command {
	var statuses []string
	var agent string
	var archived bool
	var limit int
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List sessions, newest first",
		Example: "  planaria sessions list --status running --status rescheduling\n  planaria sessions list --json | head -1",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			p := api.SessionListParams{AgentID: agent, IncludeArchived: archived, Limit: pageOf(limit)}
			for _, s := range statuses {
				p.Statuses = append(p.Statuses, api.SessionStatus(s))
			}
			sessions, err := collect(c.AllSessions(cmd.Context(), p), limit)
			if err != nil {
				return err
			}
			return list(a, sessions, "sessions", []string{"ID", "STATUS", "WAITS FOR", "AGENT", "TITLE", "CREATED"}, func(s api.Session) []string {
				return []string{s.ID, string(s.Status), waitsFor(s), s.Agent.Name, cut(deref(s.Title), 50), shortTime(s.CreatedAt.Time)}
			})
		},
	}
	cmd.Flags().StringArrayVar(&statuses, "status", nil, "only of this status: idle, running, rescheduling, terminated (repeatable)")
	cmd.Flags().StringVar(&agent, "agent", "", "only of this agent")
	cmd.Flags().BoolVar(&archived, "archived", false, "also archived ones")
	cmd.Flags().IntVar(&limit, "limit", 50, "at most so many; 0 is all")
	return cmd
}

// pageOf is the page size with which a limited list is read.
func pageOf(limit int) int {
	if limit <= 0 || limit > 100 {
		return 100
	}
	return limit
}

// waitsFor says in words why a session rests.
func waitsFor(s api.Session) string {
	p := s.Planaria
	switch {
	case p == nil:
		return ""
	case p.Damaged != "":
		return "nothing: its log is damaged"
	case p.Paused:
		return "resume (paused)"
	case p.InDoubt > 0:
		return fmt.Sprintf("%d effect(s) in doubt", p.InDoubt)
	case s.Status == api.StatusRescheduling && p.WakeAt != nil:
		return "itself, at " + when(p.WakeAt)
	case s.Status == api.StatusIdle && p.StopReason != nil:
		switch p.StopReason.Type {
		case api.StopRequiresAction:
			return fmt.Sprintf("%d answer(s)", len(p.StopReason.EventIDs))
		case api.StopRetriesExhausted:
			return "resume (retries exhausted)"
		case api.StopBudgetReached:
			return "a larger budget"
		}
	}
	return ""
}

func (a *app) sessionsGet() *cobra.Command {
	return &cobra.Command{
		Use:     "get SESSION",
		Short:   "Show one session",
		Example: "  planaria sessions get sesn_01",
		Args:    argsExactly("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			s, err := c.GetSession(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.showSession(s)
		},
	}
}

func (a *app) showSession(s api.Session) error {
	fields := [][2]string{
		{"session", s.ID}, {"title", deref(s.Title)}, {"status", string(s.Status)}, {"waits for", waitsFor(s)},
		{"agent", fmt.Sprintf("%s (%s, version %d)", s.Agent.Name, s.Agent.ID, s.Agent.Version)},
		{"model", s.Agent.Model.ID}, {"environment", s.EnvironmentID},
		{"tokens", fmt.Sprintf("%d in, %d out, %d from cache", s.Usage.InputTokens, s.Usage.OutputTokens, s.Usage.CacheReadInputTokens)},
		{"cost", money(s.Usage.ListCost)},
		{"created", shortTime(s.CreatedAt.Time)}, {"updated", shortTime(s.UpdatedAt.Time)}, {"archived", when(s.ArchivedAt)},
	}
	if p := s.Planaria; p != nil {
		fields = append(fields, [2]string{"head", fmt.Sprintf("seq %d", p.HeadSeq)}, [2]string{"damaged", p.Damaged})
	}
	return a.show(s, fields)
}

func (a *app) sessionsCreate() *cobra.Command {
	var agent, environment, title, message string
	var vaults []string
	cmd := &cobra.Command{
		Use:     "create",
		Short:   "Create a session; with --message it starts at once",
		Example: "  planaria sessions create --agent agent_01 --environment env_01 --message 'Tidy the backlog'",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if agent == "" {
				return misused(errors.New("--agent is missing"), "'planaria agents list' shows the agents")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if environment == "" {
				if environment, err = defaultEnvironment(cmd.Context(), c); err != nil {
					return err
				}
			}
			in := api.SessionCreate{Agent: api.AgentRef{ID: agent}, EnvironmentID: environment, VaultIDs: vaults}
			if title != "" {
				in.Title = &title
			}
			if message != "" {
				in.InitialEvents = api.ClientEvents{&api.UserMessage{Content: api.Texts(message)}}
			}
			s, err := c.CreateSession(cmd.Context(), in)
			if err != nil {
				return err
			}
			return a.showSession(s)
		},
	}
	cmd.Flags().StringVar(&agent, "agent", "", "id of the agent (required)")
	cmd.Flags().StringVar(&environment, "environment", "", "id of the environment (default: the one named "+cliEnvironment+", made if missing)")
	cmd.Flags().StringVar(&title, "title", "", "title of the session")
	cmd.Flags().StringVar(&message, "message", "", "first message")
	cmd.Flags().StringArrayVar(&vaults, "vault", nil, "id of a vault whose credentials the session uses (repeatable)")
	return cmd
}

// cliEnvironment is the environment of sessions for which nobody named one.
const cliEnvironment = "default"

// defaultEnvironment finds or makes that environment.
func defaultEnvironment(ctx context.Context, c *api.Client) (string, error) {
	for e, err := range c.AllEnvironments(ctx, api.ListParams{Limit: 100}) {
		if err != nil {
			return "", err
		}
		if e.Name == cliEnvironment {
			return e.ID, nil
		}
	}
	e, err := c.CreateEnvironment(ctx, api.EnvironmentCreate{Name: cliEnvironment})
	return e.ID, err
}

func (a *app) sessionsSend() *cobra.Command {
	var interrupt bool
	cmd := &cobra.Command{
		Use:   "send SESSION [MESSAGE]",
		Short: "Send a message, or an interrupt",
		Long: `Send a message to a session, or an interrupt. The message - is read from
standard input. The command returns when it was accepted durably; 'planaria log
SESSION --follow' shows what becomes of it.`,
		Example: "  planaria sessions send sesn_01 'And now the second one'\n  planaria sessions send sesn_01 --interrupt",
		Args: func(cmd *cobra.Command, args []string) error {
			if interrupt {
				return argsExactly("SESSION")(cmd, args)
			}
			return argsExactly("SESSION", "MESSAGE")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			var body api.EventBody = &api.UserInterrupt{}
			if !interrupt {
				text, err := a.textOf(args[1])
				if err != nil {
					return err
				}
				body = &api.UserMessage{Content: api.Texts(text)}
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			sent, err := c.SendEvents(cmd.Context(), args[0], body)
			if err != nil {
				return err
			}
			for _, e := range sent {
				if err := a.printEvent(e); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&interrupt, "interrupt", false, "send an interrupt instead of a message")
	return cmd
}

// maxStdin bounds what is read from standard input and files: the wire limit
// of a request body.
const maxStdin = 32 << 20

// textOf is an argument, or standard input where it is -.
func (a *app) textOf(arg string) (string, error) {
	if arg != "-" {
		return arg, nil
	}
	data, err := io.ReadAll(io.LimitReader(a.stdin, maxStdin))
	if err != nil {
		return "", fmt.Errorf("read standard input: %w", err)
	}
	return strings.TrimRight(string(data), "\n"), nil
}

// fileOf reads a file, or standard input where the name is -.
func (a *app) fileOf(name string) ([]byte, error) {
	if name == "-" {
		text, err := a.textOf("-")
		return []byte(text), err
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	if len(data) > maxStdin {
		return nil, fmt.Errorf("read %s: it is larger than %d bytes", name, maxStdin)
	}
	return data, nil
}

func (a *app) sessionsEvents() *cobra.Command {
	var types []string
	var limit int
	var desc bool
	cmd := &cobra.Command{
		Use:     "events SESSION",
		Short:   "List a session's events, oldest first",
		Example: "  planaria sessions events sesn_01 --type agent.message\n  planaria sessions events sesn_01 --json",
		Args:    argsExactly("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			p := api.EventListParams{Order: "asc"}
			if desc {
				p.Order = "desc"
			}
			for _, t := range types {
				p.Types = append(p.Types, api.EventType(t))
			}
			n := 0
			for e, err := range c.AllEvents(cmd.Context(), args[0], p) {
				if err != nil {
					return err
				}
				if err := a.printEvent(e); err != nil {
					return err
				}
				if n++; n == limit {
					break
				}
			}
			return nil
		},
	}
	cmd.Flags().StringArrayVar(&types, "type", nil, "only events of this type (repeatable)")
	cmd.Flags().IntVar(&limit, "limit", 0, "at most so many; 0 is all")
	cmd.Flags().BoolVar(&desc, "desc", false, "newest first")
	return cmd
}

func (a *app) sessionsArchive() *cobra.Command {
	return &cobra.Command{
		Use:     "archive SESSION",
		Short:   "End a session for good; its log stays",
		Example: "  planaria sessions archive sesn_01",
		Args:    argsExactly("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			s, err := c.ArchiveSession(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.showSession(s)
		},
	}
}

func (a *app) sessionsDelete() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:     "delete SESSION",
		Short:   "Delete a session and erase its log",
		Example: "  planaria sessions delete sesn_01 --yes",
		Args:    argsExactly("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !yes {
				return misused(fmt.Errorf("deleting %s erases its log for good", args[0]), "say --yes to do it; 'planaria sessions archive' keeps the log")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			d, err := c.DeleteSession(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.show(d, [][2]string{{"deleted", d.ID}})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do it")
	return cmd
}
