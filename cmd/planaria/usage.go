package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) usageCommand() *cobra.Command {
	var group string
	var since time.Duration
	cmd := &cobra.Command{
		Use:   "usage",
		Short: "Show what was used and what it cost, waste apart",
		Long: `Show what was used and what it cost at list price. Waste is what a failure made
us pay again; it stands apart and is in no other number.`,
		Example: "  planaria usage --by day --since 720h\n  planaria usage --by session --json",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			p := api.UsageParams{GroupBy: group}
			if since > 0 {
				p.From = api.At(time.Now().Add(-since))
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			rows, err := collect(c.AllUsage(cmd.Context(), p), 0)
			if err != nil {
				return err
			}
			return list(a, rows, "usage", []string{"GROUP", "REQUESTS", "INPUT", "OUTPUT", "CACHE READ", "CACHE WRITE", "EFFECTS", "COST", "WASTED TOKENS"}, func(r api.UsageRow) []string {
				return []string{r.Group, fmt.Sprint(r.ModelRequests), fmt.Sprint(r.InputTokens), fmt.Sprint(r.OutputTokens), fmt.Sprint(r.CacheReadInputTokens),
					fmt.Sprint(r.CacheCreation.Ephemeral5m + r.CacheCreation.Ephemeral1h), fmt.Sprint(r.Effects), money(r.ListCost), fmt.Sprint(r.WastedTokens)}
			})
		},
	}
	cmd.Flags().StringVar(&group, "by", "model", "model, session, agent or day")
	cmd.Flags().DurationVar(&since, "since", 0, "only the last so many hours, such as 24h (default: all)")
	return cmd
}
