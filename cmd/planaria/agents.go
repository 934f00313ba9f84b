package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) agentsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "agents",
		Short:   "List, show, create and archive agents",
		Example: "  planaria agents list\n  planaria agents create --name tidy --model claude-opus-5-5 --mcp tracker=planaria:tracker",
		RunE:    needSubcommand,
	}
	cmd.AddCommand(a.agentsList(), a.agentsGet(), a.agentsCreate(), a.agentsArchive())
	return cmd
}

func (a *app) agentsList() *cobra.Command {
	var archived bool
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List agents, newest first",
		Example: "  planaria agents list",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			agents, err := collect(c.AllAgents(cmd.Context(), api.ListParams{IncludeArchived: archived, Limit: 100}), 0)
			if err != nil {
				return err
			}
			return list(a, agents, "agents", []string{"ID", "VERSION", "NAME", "MODEL", "SERVERS", "CREATED"}, func(g api.Agent) []string {
				return []string{g.ID, fmt.Sprint(g.Version), g.Name, g.Model.ID, serverNames(g.MCPServers), shortTime(g.CreatedAt.Time)}
			})
		},
	}
	cmd.Flags().BoolVar(&archived, "archived", false, "also archived ones")
	return cmd
}

func serverNames(servers []api.MCPServer) string {
	names := make([]string, len(servers))
	for i, s := range servers {
		names[i] = s.Name
	}
	return strings.Join(names, ", ")
}

func (a *app) agentsGet() *cobra.Command {
	var v int64
	cmd := &cobra.Command{
		Use:     "get AGENT",
		Short:   "Show one agent",
		Example: "  planaria agents get agent_01 --version 2",
		Args:    argsExactly("AGENT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			g, err := c.GetAgent(cmd.Context(), args[0], v)
			if err != nil {
				return err
			}
			return a.showAgent(g)
		},
	}
	cmd.Flags().Int64Var(&v, "version", 0, "this version (default: the newest)")
	return cmd
}

func (a *app) showAgent(g api.Agent) error {
	var servers []string
	for _, s := range g.MCPServers {
		servers = append(servers, s.Name+" = "+s.URL)
	}
	return a.show(g, [][2]string{
		{"agent", g.ID}, {"name", g.Name}, {"version", fmt.Sprint(g.Version)}, {"description", deref(g.Description)},
		{"model", g.Model.ID}, {"servers", strings.Join(servers, "\n")}, {"system", deref(g.System)},
		{"created", shortTime(g.CreatedAt.Time)}, {"updated", shortTime(g.UpdatedAt.Time)}, {"archived", when(g.ArchivedAt)},
	})
}

func (a *app) agentsCreate() *cobra.Command {
	var in agentFlags
	var file, name string
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create an agent from flags, or from a JSON or YAML file",
		Example: `  planaria agents create --name tidy --model claude-opus-5-5 --system 'You keep the backlog tidy.' --mcp tracker=planaria:tracker
  planaria agents create -f agent.yaml`,
		Args: argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var create api.AgentCreate
			var err error
			switch {
			case file != "" && (name != "" || in.set()):
				return misused(errors.New("-f stands alone"), "put everything into the file, or leave -f out")
			case file != "":
				err = a.decodeFile(file, &create)
			case name == "" || in.model == "":
				return misused(errors.New("an agent needs --name and --model"), "or -f FILE")
			default:
				create, err = in.create(name)
			}
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			g, err := c.CreateAgent(cmd.Context(), create)
			if err != nil {
				return err
			}
			return a.showAgent(g)
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "the agent as a JSON or YAML file, - for standard input")
	cmd.Flags().StringVar(&name, "name", "", "name of the agent")
	in.add(cmd)
	return cmd
}

func (a *app) agentsArchive() *cobra.Command {
	return &cobra.Command{
		Use:     "archive AGENT",
		Short:   "Archive an agent for good; its sessions go on",
		Example: "  planaria agents archive agent_01",
		Args:    argsExactly("AGENT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			g, err := c.ArchiveAgent(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.showAgent(g)
		},
	}
}

// agentFlags are the flags that describe an agent; run has them too.
type agentFlags struct {
	model, system string
	servers       []string
	ask           bool
}

func (f *agentFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.model, "model", "", "name of the model")
	cmd.Flags().StringVar(&f.system, "system", "", "system prompt")
	cmd.Flags().StringArrayVar(&f.servers, "mcp", nil, "an MCP server as NAME=URL, or NAME=planaria:CONNECTOR (repeatable)")
	cmd.Flags().BoolVar(&f.ask, "ask", true, "ask before each call of a tool; --ask=false lets the tools run")
}

func (f *agentFlags) set() bool { return f.model != "" || f.system != "" || len(f.servers) > 0 }

// create is the agent that the flags describe.
func (f *agentFlags) create(name string) (api.AgentCreate, error) {
	in := api.AgentCreate{Name: name, Model: api.ModelConfig{ID: f.model}}
	if f.system != "" {
		in.System = &f.system
	}
	policy := "always_allow"
	if f.ask {
		policy = "always_ask"
	}
	for _, s := range f.servers {
		name, u, ok := strings.Cut(s, "=")
		if !ok || name == "" || u == "" {
			return in, misused(fmt.Errorf("--mcp %q is not NAME=URL", s), "such as --mcp tracker=https://mcp.example.com/mcp or --mcp tracker=planaria:tracker")
		}
		in.MCPServers = append(in.MCPServers, api.MCPServer{Type: "url", Name: name, URL: u})
		in.Tools = append(in.Tools, api.ToolParams{Type: "mcp_toolset", MCPServerName: name,
			DefaultConfig: &api.ToolDefaultParams{PermissionPolicy: &api.PermissionPolicy{Type: policy}}})
	}
	return in, nil
}
