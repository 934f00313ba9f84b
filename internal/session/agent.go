package session

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
)

// agent is what a driver needs of the wire agent snapshot (reference section 6.2).
type agent struct {
	ID      string `json:"id"`
	Version int    `json:"version"`
	Name    string `json:"name"`
	Model   struct {
		ID     string `json:"id"`
		Effort struct {
			Type string `json:"type"`
		} `json:"effort"`
		Speed        string `json:"speed"`
		InferenceGeo string `json:"inference_geo"`
	} `json:"model"`
	System     *string     `json:"system"`
	Tools      []toolEntry `json:"tools"`
	MCPServers []struct {
		Name string `json:"name"`
		URL  string `json:"url"`
	} `json:"mcp_servers"`
}

// toolEntry is one resolved entry of the agent's tools (reference section 11.2).
type toolEntry struct {
	Type          string          `json:"type"`
	Name          string          `json:"name"`
	Description   string          `json:"description"`
	InputSchema   json.RawMessage `json:"input_schema"`
	MCPServerName string          `json:"mcp_server_name"`
	DefaultConfig toolConfig      `json:"default_config"`
	Configs       []toolConfig    `json:"configs"`
}

type toolConfig struct {
	Name             string `json:"name"`
	Enabled          *bool  `json:"enabled"`
	PermissionPolicy *struct {
		Type string `json:"type"`
	} `json:"permission_policy"`
}

func parseAgent(raw json.RawMessage) (agent, error) {
	var a agent
	if err := json.Unmarshal(raw, &a); err != nil {
		return agent{}, fmt.Errorf("read agent snapshot: %w", err)
	}
	return a, nil
}

// permission resolves enabled and policy of one MCP tool: its own config, the
// toolset's default, the type's default always_ask (reference section 11.3).
func (a agent) permission(server, tool string) (enabled bool, policy string) {
	for _, t := range a.Tools {
		if t.Type != "mcp_toolset" || t.MCPServerName != server {
			continue
		}
		enabled, policy = true, "always_ask"
		apply := func(c toolConfig) {
			if c.Enabled != nil {
				enabled = *c.Enabled
			}
			if c.PermissionPolicy != nil && c.PermissionPolicy.Type != "" {
				policy = c.PermissionPolicy.Type
			}
		}
		apply(t.DefaultConfig)
		for _, c := range t.Configs {
			if c.Name == tool {
				apply(c)
			}
		}
		return enabled, policy
	}
	return false, "always_ask"
}

func (a agent) servers() []gateway.Server {
	out := make([]gateway.Server, 0, len(a.MCPServers))
	for _, s := range a.MCPServers {
		out = append(out, gateway.Server{Name: s.Name, URL: s.URL})
	}
	return out
}

// offer is one tool as the model sees it, with the way back to what it means.
type offer struct {
	model  gateway.ModelTool
	tool   gateway.Tool
	custom bool
	// builtin tools are run in the session's sandbox.
	builtin *builtinTool
}

// maxToolName is the longest tool name that model APIs take.
const maxToolName = 128

// modelToolName is the name under which the model sees an MCP tool. Custom
// tools keep their own names, which may not begin with "mcp__" (reference
// section 11.1), so the two cannot meet.
func modelToolName(server, tool string) string {
	clean := func(s string) string {
		return strings.Map(func(r rune) rune {
			switch {
			case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
				return r
			}
			return '_'
		}, s)
	}
	name := "mcp__" + clean(server) + "__" + clean(tool)
	// Where the two could be cut apart in another way, another pair has this name too.
	ambiguous := strings.Contains(server, "__") || strings.HasSuffix(server, "_") || strings.HasPrefix(tool, "_")
	if len(name) <= maxToolName && clean(server) == server && clean(tool) == tool && !ambiguous {
		return name
	}
	sum := sha256.Sum256([]byte(server + "\x00" + tool))
	suffix := "_" + hex.EncodeToString(sum[:6])
	if len(name) > maxToolName-len(suffix) {
		name = name[:maxToolName-len(suffix)]
	}
	return name + suffix
}

// offers lists the tools of a request in a fixed order: by the agent's tools,
// MCP tools in the order of their server's recorded listing. A name is offered
// once: a second one, which a server may choose on purpose, would make the model
// API refuse every request.
func (a agent) offers(listed map[string]store.Tools) []offer {
	var out []offer
	taken := map[string]bool{}
	add := func(o offer) {
		if !taken[o.model.Name] {
			taken[o.model.Name] = true
			out = append(out, o)
		}
	}
	for _, t := range a.Tools {
		switch t.Type {
		case "custom":
			add(offer{custom: true,
				model: gateway.ModelTool{Name: t.Name, Description: t.Description, InputSchema: t.InputSchema},
				tool:  gateway.Tool{Name: t.Name, InputSchema: t.InputSchema}})
		case builtinType:
			for _, o := range a.builtinOffers(listed[builtinServer]) {
				add(o)
			}
		case "mcp_toolset":
			var tools []gateway.Tool
			if err := json.Unmarshal(listed[t.MCPServerName].Tools, &tools); err != nil {
				continue // no listing: the server could not be used when the turn began
			}
			for _, tool := range tools {
				enabled, _ := a.permission(t.MCPServerName, tool.Name)
				if !enabled || tool.Quarantined != "" {
					continue
				}
				add(offer{tool: tool, model: gateway.ModelTool{
					Name: modelToolName(tool.Server, tool.Name), Description: tool.Description, InputSchema: tool.InputSchema}})
			}
		}
	}
	return out
}
