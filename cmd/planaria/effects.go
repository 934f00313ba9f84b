package main

import (
	"fmt"
	"iter"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) effectsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "effects",
		Short:   "List and show effects: what agents did to the world outside",
		Example: "  planaria effects list --state in_doubt\n  planaria effects show eff_01",
		RunE:    needSubcommand,
	}
	cmd.AddCommand(a.effectsList(), a.effectsShow())
	return cmd
}

func (a *app) effectsList() *cobra.Command {
	var session string
	var states, classes, tools []string
	var models, desc bool
	var limit int
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List effects of the workspace or of one session, oldest first",
		Example: "  planaria effects list --session sesn_01\n  planaria effects list --state in_doubt --state awaiting_approval",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			p := api.EffectListParams{Tools: tools, Order: "asc", Limit: 100}
			if desc {
				p.Order = "desc"
			}
			for _, s := range states {
				p.States = append(p.States, api.EffectState(s))
			}
			for _, s := range classes {
				p.Classes = append(p.Classes, api.EffectClass(s))
			}
			items := c.AllWorkspaceEffects(cmd.Context(), p)
			if session != "" {
				items = c.AllEffects(cmd.Context(), session, p)
			}
			if !models {
				items = withoutModels(items)
			}
			effects, err := collect(items, limit)
			if err != nil {
				return err
			}
			return list(a, effects, "effects", []string{"ID", "SEQ", "TOOL", "CLASS", "STATE", "ATTEMPTS", "FENCE", "CREATED", "SESSION"}, func(e api.Effect) []string {
				return []string{e.ID, fmt.Sprint(e.Seq), target(e), string(e.Class), stateWord(e), fmt.Sprint(len(e.Attempts)), lastFence(e), shortTime(e.CreatedAt.Time), e.SessionID}
			})
		},
	}
	cmd.Flags().StringVar(&session, "session", "", "only of this session")
	cmd.Flags().StringArrayVar(&states, "state", nil, "only in this state, such as in_doubt (repeatable)")
	cmd.Flags().StringArrayVar(&classes, "class", nil, "only of this class: read, idempotent, mixed, irreversible (repeatable)")
	cmd.Flags().StringArrayVar(&tools, "tool", nil, "only of this tool (repeatable)")
	cmd.Flags().BoolVar(&models, "models", false, "also model requests")
	cmd.Flags().BoolVar(&desc, "desc", false, "newest first")
	cmd.Flags().IntVar(&limit, "limit", 0, "at most so many; 0 is all")
	return cmd
}

// withoutModels leaves out model requests.
func withoutModels(items iter.Seq2[api.Effect, error]) iter.Seq2[api.Effect, error] {
	return func(yield func(api.Effect, error) bool) {
		for e, err := range items {
			if err == nil && isModel(e) {
				continue
			}
			if !yield(e, err) {
				return
			}
		}
	}
}

// stateWord is an effect's state with its outcome.
func stateWord(e api.Effect) string {
	if e.Outcome != nil && *e.Outcome == "refused" {
		return string(e.State) + " (refused)"
	}
	return string(e.State)
}

// lastFence is the fence of the newest attempt.
func lastFence(e api.Effect) string {
	if len(e.Attempts) == 0 {
		return ""
	}
	return fmt.Sprint(e.Attempts[len(e.Attempts)-1].Fence)
}

func (a *app) effectsShow() *cobra.Command {
	return &cobra.Command{
		Use:     "show EFFECT",
		Short:   "Show one effect with its arguments, attempts, evidence and response",
		Example: "  planaria effects show eff_01",
		Args:    argsExactly("EFFECT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			e, err := c.GetEffect(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if err := a.show(e, effectFields(e)); err != nil {
				return err
			}
			if e.State == api.EffectInDoubt {
				a.say("the way out:\n%s", wayOut(e))
			}
			return nil
		},
	}
}
