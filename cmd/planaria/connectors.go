package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/planaria/planaria/api"
)

func (a *app) connectorsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "connectors",
		Short:   "List, show, apply and delete connectors and their contracts",
		Example: "  planaria connectors apply -f cloud.yaml\n  planaria connectors get cloud",
		RunE:    needSubcommand,
	}
	cmd.AddCommand(a.connectorsList(), a.connectorsGet(), a.connectorsApply(), a.connectorsDelete())
	return cmd
}

func (a *app) connectorsList() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List connectors, newest first",
		Example: "  planaria connectors list",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			all, err := collect(c.AllConnectors(cmd.Context()), 0)
			if err != nil {
				return err
			}
			return list(a, all, "connectors", []string{"ID", "NAME", "VERSION", "URL", "CONTRACTS", "UPDATED"}, func(x api.Connector) []string {
				return []string{x.ID, x.Name, fmt.Sprint(x.Version), x.URL, classCount(x.Tools), shortTime(x.UpdatedAt.Time)}
			})
		},
	}
}

// classCount counts contracts by class, harmless first.
func classCount(tools api.ContractTools) string {
	var parts []string
	for _, class := range []api.EffectClass{api.ClassRead, api.ClassIdempotent, api.ClassMixed, api.ClassIrreversible} {
		n := 0
		for _, t := range tools {
			if t.Class == class {
				n++
			}
		}
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, class))
		}
	}
	return strings.Join(parts, ", ")
}

func (a *app) connectorsGet() *cobra.Command {
	return &cobra.Command{
		Use:     "get CONNECTOR",
		Short:   "Show one connector, by id or name, as JSON or as the YAML that apply takes",
		Example: "  planaria connectors get cloud > cloud.yaml",
		Args:    argsExactly("CONNECTOR"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			x, err := findConnector(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			return a.showConnector(x)
		},
	}
}

func (a *app) showConnector(x api.Connector) error {
	if a.json {
		return a.printJSON(x)
	}
	data, err := api.Encode(x.ConnectorSpec)
	if err != nil {
		return err
	}
	var v yaml.Node
	if err := yaml.Unmarshal(data, &v); err != nil {
		return fmt.Errorf("write connector: %w", err)
	}
	blockStyle(&v)
	out, err := yaml.Marshal(&v)
	if err != nil {
		return fmt.Errorf("write connector: %w", err)
	}
	_, err = fmt.Fprintf(a.stdout, "# %s, version %d\n%s", x.ID, x.Version, out)
	return err
}

// blockStyle makes YAML that was read from JSON look like YAML.
func blockStyle(n *yaml.Node) {
	n.Style &^= yaml.FlowStyle | yaml.DoubleQuotedStyle
	for _, c := range n.Content {
		blockStyle(c)
	}
}

// findConnector finds a connector by id or by name.
func findConnector(ctx context.Context, c *api.Client, key string) (api.Connector, error) {
	if strings.HasPrefix(key, "conn_") {
		return c.GetConnector(ctx, key)
	}
	for x, err := range c.AllConnectors(ctx) {
		if err != nil {
			return x, err
		}
		if x.Name == key {
			return x, nil
		}
	}
	return api.Connector{}, api.Missing("connector", key)
}

func (a *app) connectorsApply() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Create a connector, or update the one of that name, from a JSON or YAML file",
		Long: `Create a connector, or update the one of that name, so that it is what the file
says. The file is the connector object without id: name, kind, url, and the
contract of each tool. Unknown fields are errors that name the field.`,
		Example: "  planaria connectors apply -f cloud.yaml\n  planaria connectors get cloud | sed s/idempotent/irreversible/ | planaria connectors apply -f -",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				return misused(errors.New("-f is missing"), "name the file, - for standard input")
			}
			var in api.ConnectorCreate
			if err := a.decodeFile(file, &in); err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			x, what, err := applyConnector(cmd.Context(), c, in)
			if err != nil {
				return err
			}
			a.say("connector %s %s (version %d)", x.Name, what, x.Version)
			if a.json {
				return a.printJSON(x)
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "the connector as a JSON or YAML file, - for standard input (required)")
	return cmd
}

// applyConnector makes the connector of in's name be what in says.
func applyConnector(ctx context.Context, c *api.Client, in api.ConnectorCreate) (x api.Connector, what string, err error) {
	if in.Name == "" {
		return x, "", api.Invalid("name", "is missing")
	}
	old, err := findConnector(ctx, c, in.Name)
	var e *api.Error
	if errors.As(err, &e) && e.Type == api.ErrNotFound {
		x, err = c.CreateConnector(ctx, in)
		return x, "created", err
	}
	if err != nil {
		return x, "", err
	}
	if in.Kind != old.Kind {
		return x, "", api.Invalid("kind", "cannot change from %q; delete the connector first", old.Kind)
	}
	x, err = c.UpdateConnector(ctx, old.ID, api.ConnectorUpdate{Version: api.Some(old.Version), URL: api.Some(in.URL),
		TrustAnnotations: api.Some(in.TrustAnnotations), Tools: api.Some(in.Tools)})
	if err == nil && x.Version == old.Version {
		return x, "unchanged", nil
	}
	return x, "updated", err
}

func (a *app) connectorsDelete() *cobra.Command {
	return &cobra.Command{
		Use:     "delete CONNECTOR",
		Short:   "Delete a connector, by id or name",
		Example: "  planaria connectors delete cloud",
		Args:    argsExactly("CONNECTOR"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			x, err := findConnector(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			d, err := c.DeleteConnector(cmd.Context(), x.ID)
			if err != nil {
				return err
			}
			return a.show(d, [][2]string{{"deleted", x.Name}, {"id", d.ID}})
		},
	}
}

// decodeFile reads a JSON or YAML file strictly into a request.
func (a *app) decodeFile(name string, into any) error {
	data, err := a.fileOf(name)
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if err := decodeYAML(data, into); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

// decodeYAML reads YAML, of which JSON is a part, by way of JSON, so that the
// API's own strict reader judges names and types.
func decodeYAML(data []byte, into any) error {
	var v any
	dec := yaml.NewDecoder(bytes.NewReader(data))
	if err := dec.Decode(&v); err != nil {
		return err
	}
	if err := dec.Decode(new(any)); !errors.Is(err, io.EOF) {
		return errors.New("it holds more than one document")
	}
	if _, ok := v.(map[string]any); !ok {
		return errors.New("it is not an object")
	}
	doc, err := api.Encode(v)
	if err != nil {
		return err
	}
	return api.DecodeStrict(doc, into)
}
