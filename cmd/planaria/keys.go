package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) keysCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "keys",
		Short:   "Create, list and revoke API keys",
		Example: "  planaria keys create --name ci --role developer\n  planaria keys revoke apikey_01",
		RunE:    needSubcommand,
	}
	cmd.AddCommand(a.keysList(), a.keysCreate(), a.keysRevoke())
	return cmd
}

func (a *app) keysList() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the API keys of the workspace; the keys themselves are never shown",
		Example: "  planaria keys list",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			keys, err := collect(c.AllAPIKeys(cmd.Context()), 0)
			if err != nil {
				return err
			}
			return list(a, keys, "keys", []string{"ID", "NAME", "ROLE", "ENDS IN", "CREATED", "EXPIRES", "LAST USED", "REVOKED"}, func(k api.APIKey) []string {
				return []string{k.ID, k.Name, string(k.Role), k.Hint, shortTime(k.CreatedAt.Time), when(k.ExpiresAt), when(k.LastUsedAt), when(k.RevokedAt)}
			})
		},
	}
}

func (a *app) keysCreate() *cobra.Command {
	var in api.APIKeyCreate
	var role string
	var expires time.Duration
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create an API key; it is printed once",
		Long: `Create an API key. The key itself is printed once, to standard output; the
server keeps only its digest. Roles: admin (everything, keys included), operator
(connectors, approvals, effects in doubt), developer (agents, sessions), viewer.`,
		Example: "  planaria keys create --name ci --role developer --expires 720h > key.txt",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if in.Name == "" {
				return misused(errors.New("--name is missing"), "say what the key is for")
			}
			in.Role = api.Role(role)
			if err := in.Validate(); err != nil {
				return misused(err, "see 'planaria keys create --help'")
			}
			if expires > 0 {
				t := api.At(time.Now().Add(expires))
				in.ExpiresAt = &t
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			k, err := c.CreateAPIKey(cmd.Context(), in)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(k)
			}
			a.say("created %s (%s, role %s); this is the only time that it is shown", k.ID, oneLine(k.Name), k.Role)
			_, err = fmt.Fprintln(a.stdout, k.Key.Reveal())
			return err
		},
	}
	cmd.Flags().StringVar(&in.Name, "name", "", "what the key is for (required)")
	cmd.Flags().StringVar(&role, "role", string(api.RoleDeveloper), "admin, operator, developer or viewer")
	cmd.Flags().DurationVar(&expires, "expires", 0, "time after which it ends, such as 720h (default: never)")
	cmd.Flags().StringVar(&in.WorkspaceID, "workspace", "", "workspace of the key (default: your own)")
	return cmd
}

func (a *app) keysRevoke() *cobra.Command {
	return &cobra.Command{
		Use:     "revoke KEY",
		Short:   "Revoke an API key, by its id, at once and for good",
		Example: "  planaria keys revoke apikey_01",
		Args:    argsExactly("KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			d, err := c.RevokeAPIKey(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.show(d, [][2]string{{"revoked", d.ID}})
		},
	}
}
