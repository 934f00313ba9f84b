package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) resumeCommand() *cobra.Command {
	return a.sessionAct("resume SESSION", "Let a session go on: after a pause, an error or a settlement",
		`Let a session go on where it stands, without a new message: after a pause,
when its retries were exhausted, or to look again at once where it would by
itself only later.`, "  planaria resume sesn_01", (*api.Client).ResumeSession)
}

func (a *app) pauseCommand() *cobra.Command {
	return a.sessionAct("pause SESSION", "Stop a session after its current step",
		`Stop a session as soon as nothing is on its way. Calls that left run to their
answer. Input queues until 'planaria resume'.`, "  planaria pause sesn_01", (*api.Client).PauseSession)
}

// sessionAct is a command that does one thing to one session.
func (a *app) sessionAct(use, short, long, example string, act func(*api.Client, context.Context, string) (api.Session, error)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		Args: argsExactly("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			s, err := act(c, cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.showSession(s)
		},
	}
}
