package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) settleCommand() *cobra.Command {
	var response, evidence string
	cmd := &cobra.Command{
		Use:   "settle EFFECT OUTCOME",
		Short: "Give an effect in doubt its outcome",
		Long: `Give an effect in doubt its outcome. OUTCOME is one of

  happened         it did happen; --response is the tool's answer, if you know it
  did_not_happen   it did not; the agent is told so and may try again
  probe            ask the target again, by the contract's probe
  tell             leave it to the agent: outcome unknown, do not repeat

A second settlement is refused.`,
		Example: `  planaria settle eff_01 probe
  planaria settle eff_01 happened --evidence 'seen in the cloud console' --response '{"status":"deleted"}'`,
		Args: argsExactly("EFFECT", "OUTCOME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			in := api.SettleRequest{Outcome: args[1]}
			if evidence != "" {
				in.Evidence = &evidence
			}
			if response != "" {
				if !json.Valid([]byte(response)) {
					return misused(fmt.Errorf("--response is not JSON"), "quote a plain text: --response '\"done\"'")
				}
				in.Response = json.RawMessage(response)
			}
			if err := in.Validate(); err != nil {
				return misused(err, "see 'planaria settle --help'")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			e, err := c.SettleEffect(cmd.Context(), args[0], in)
			if err != nil {
				return err
			}
			return a.show(e, effectFields(e))
		},
	}
	cmd.Flags().StringVar(&response, "response", "", "the tool's answer as JSON, with happened")
	cmd.Flags().StringVar(&evidence, "evidence", "", "how you know")
	return cmd
}
