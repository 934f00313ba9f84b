package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) approveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "approve",
		Short:   "List calls that wait for a person, allow or deny them",
		Example: "  planaria approve list\n  planaria approve allow eff_01\n  planaria approve deny eff_01 --message 'not on a Friday'",
		RunE:    needSubcommand,
	}
	cmd.AddCommand(a.approveList(), a.approveAnswer(true), a.approveAnswer(false))
	return cmd
}

func (a *app) approveList() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List what waits for a person, oldest first",
		Example: "  planaria approve list",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			effects, err := collect(c.AllApprovals(cmd.Context()), 0)
			if err != nil {
				return err
			}
			return list(a, effects, "approvals wait", []string{"ID", "TOOL", "CLASS", "ARGUMENTS", "SINCE", "SESSION"}, func(e api.Effect) []string {
				return []string{e.ID, target(e), string(e.Class), cut(string(e.Arguments), 100), shortTime(e.CreatedAt.Time), e.SessionID}
			})
		},
	}
}

// approveAnswer is approve allow and approve deny. An effect's arguments never
// change, so the answer to the id is an answer to exactly what was shown.
func (a *app) approveAnswer(allow bool) *cobra.Command {
	use, short, example := "allow EFFECT", "Let a call run, once, with exactly the arguments shown", "  planaria approve allow eff_01"
	if !allow {
		use, short, example = "deny EFFECT", "Refuse a call; the agent is told", "  planaria approve deny eff_01 --message 'not on a Friday'"
	}
	var message string
	cmd := &cobra.Command{
		Use: use, Short: short, Example: example,
		Args: argsExactly("EFFECT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			e, err := c.GetEffect(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if e.State != api.EffectAwaitingApproval {
				return fmt.Errorf("effect %s does not await approval: %s", e.ID, effectWords(e))
			}
			after, err := c.AnswerApproval(cmd.Context(), e.ID, allow, message)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(after)
			}
			word := "allowed"
			if !allow {
				word = "denied"
			}
			_, err = fmt.Fprintf(a.stdout, "%s %s %s\n", word, target(e), oneLine(string(e.Arguments)))
			return err
		},
	}
	if !allow {
		cmd.Flags().StringVar(&message, "message", "", "what the agent is told")
	}
	return cmd
}
