package api

import (
	"cmp"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// The types of entries in an agent's tools (reference section 11.1).
const (
	ToolsetAgent = "agent_toolset_20260401"
	ToolsetMCP   = "mcp_toolset"
	ToolCustom   = "custom"
)

// The types of permission policies (reference section 11.3).
const (
	AlwaysAllow = "always_allow"
	AlwaysAsk   = "always_ask"
	AutoPolicy  = "auto"
)

// builtinTools are the names of the tools in the agent toolset.
var builtinTools = []string{"bash", "read", "write", "edit", "glob", "grep", "web_fetch", "web_search"}

// browserTool is an extension of the toolset: it is offered only to agents whose
// configs name it. An agent that does not may have a custom tool of that name.
const browserTool = "browser"

// Limits of tools (reference sections 1.9 and 11.1).
const (
	MaxToolEntries   = 128
	MaxToolsInTotal  = 256
	maxToolName      = 128
	maxDomains       = 64
	maxSchemaDepth   = 64
	mcpNamePrefix    = "mcp__"
	maxPropertyChars = 64
)

// PermissionPolicy says whether a tool call asks a person first.
type PermissionPolicy struct {
	Type string `json:"type"`
}

// ToolParams is one entry of tools in a request; Type says which fields count.
type ToolParams struct {
	Type string `json:"type"`
	// Toolsets.
	MCPServerName string             `json:"mcp_server_name,omitzero"` // mcp_toolset
	DefaultConfig *ToolDefaultParams `json:"default_config,omitzero"`
	Configs       []ToolConfigParams `json:"configs,omitzero"`
	// Custom tools.
	Name        string          `json:"name,omitzero"`
	Description string          `json:"description,omitzero"`
	InputSchema json.RawMessage `json:"input_schema,omitzero"`
}

// ToolDefaultParams is a toolset's default_config in a request.
type ToolDefaultParams struct {
	Enabled          *bool             `json:"enabled,omitzero"`
	PermissionPolicy *PermissionPolicy `json:"permission_policy,omitzero"`
}

// ToolConfigParams configures one tool of a toolset in a request.
type ToolConfigParams struct {
	Name             string            `json:"name"`
	Type             string            `json:"type,omitzero"` // built-in tools: equal to name
	Enabled          *bool             `json:"enabled,omitzero"`
	PermissionPolicy *PermissionPolicy `json:"permission_policy,omitzero"`
	WebConfig
}

// WebConfig is what only web_search and web_fetch take.
type WebConfig struct {
	AllowedDomains   []string      `json:"allowed_domains,omitzero"`
	BlockedDomains   []string      `json:"blocked_domains,omitzero"`
	UserLocation     *UserLocation `json:"user_location,omitzero"`      // web_search
	MaxContentTokens *int64        `json:"max_content_tokens,omitzero"` // web_fetch
	URLSources       *URLSources   `json:"url_sources,omitzero"`        // web_fetch
}

// UserLocation tells web_search where the user is.
type UserLocation struct {
	Type     string  `json:"type"` // approximate
	City     *string `json:"city,omitzero"`
	Country  *string `json:"country,omitzero"`
	Region   *string `json:"region,omitzero"`
	Timezone *string `json:"timezone,omitzero"`
}

// URLSources says which sources contribute URLs that web_fetch may fetch.
type URLSources struct {
	UserInput         URLSource `json:"user_input"`
	ClientToolResults URLSource `json:"client_tool_results"`
	ServerToolResults URLSource `json:"server_tool_results"`
}

// URLSource is one of them: all, none, only or except some tools. It is read
// as a string too.
type URLSource struct {
	Type  string          `json:"type"`
	Tools []ToolReference `json:"tools,omitzero"`
}

// ToolReference names a tool.
type ToolReference struct {
	Type string `json:"type"` // tool_reference
	Name string `json:"name"`
}

// UnmarshalJSON reads either form.
func (u *URLSource) UnmarshalJSON(data []byte) error {
	if firstByte(data) == '"' {
		*u = URLSource{}
		return unmarshal(data, &u.Type)
	}
	type shadow URLSource
	var s shadow
	err := unmarshal(data, &s)
	*u = URLSource(s)
	return err
}

// Tool is one entry of tools in an object: everything filled in.
type Tool struct {
	Type          string
	MCPServerName string
	DefaultConfig ToolDefault
	Configs       []ToolConfig
	Name          string
	Description   string
	InputSchema   json.RawMessage
}

// ToolDefault is a toolset's default_config.
type ToolDefault struct {
	Enabled          bool             `json:"enabled"`
	PermissionPolicy PermissionPolicy `json:"permission_policy"`
}

// ToolConfig is one tool's configuration. Type is empty for tools of MCP servers.
type ToolConfig struct {
	Type             string           `json:"type,omitzero"`
	Name             string           `json:"name"`
	Enabled          bool             `json:"enabled"`
	PermissionPolicy PermissionPolicy `json:"permission_policy"`
	WebConfig
}

// MarshalJSON writes url_sources of web_fetch as null when there are none.
func (c ToolConfig) MarshalJSON() ([]byte, error) {
	type shadow ToolConfig
	if c.Type == "web_fetch" && c.URLSources == nil {
		return Encode(struct {
			shadow
			Sources *URLSources `json:"url_sources"`
		}{shadow: shadow(c)})
	}
	return Encode(shadow(c))
}

// MarshalJSON writes the form of the type.
func (t Tool) MarshalJSON() ([]byte, error) {
	switch t.Type {
	case ToolCustom:
		return Encode(struct {
			Type        string          `json:"type"`
			Name        string          `json:"name"`
			Description string          `json:"description"`
			InputSchema json.RawMessage `json:"input_schema"`
		}{t.Type, t.Name, t.Description, t.InputSchema})
	case ToolsetMCP:
		return Encode(struct {
			Type          string           `json:"type"`
			MCPServerName string           `json:"mcp_server_name"`
			DefaultConfig ToolDefault      `json:"default_config"`
			Configs       List[ToolConfig] `json:"configs"`
		}{t.Type, t.MCPServerName, t.DefaultConfig, t.Configs})
	}
	return Encode(struct {
		Type          string           `json:"type"`
		DefaultConfig ToolDefault      `json:"default_config"`
		Configs       List[ToolConfig] `json:"configs"`
	}{t.Type, t.DefaultConfig, t.Configs})
}

// UnmarshalJSON reads a resolved entry back.
func (t *Tool) UnmarshalJSON(data []byte) error {
	var s struct {
		Type          string          `json:"type"`
		MCPServerName string          `json:"mcp_server_name"`
		DefaultConfig ToolDefault     `json:"default_config"`
		Configs       []ToolConfig    `json:"configs"`
		Name          string          `json:"name"`
		Description   string          `json:"description"`
		InputSchema   json.RawMessage `json:"input_schema"`
	}
	err := unmarshal(data, &s)
	*t = Tool(s)
	return err
}

// Policy returns whether a tool of this toolset is enabled and its permission
// policy: the tool's own configuration, else the default.
func (t Tool) Policy(name string) (enabled bool, policy string) {
	for _, c := range t.Configs {
		if c.Name == name {
			return c.Enabled, c.PermissionPolicy.Type
		}
	}
	return t.DefaultConfig.Enabled, t.DefaultConfig.PermissionPolicy.Type
}

func resolveTools(path string, in []ToolParams) (List[Tool], error) {
	if len(in) > MaxToolEntries {
		return nil, Invalid(path, "holds %d entries; at most %d are allowed", len(in), MaxToolEntries)
	}
	out := make(List[Tool], 0, len(in))
	total := 0
	var custom []string
	for i, p := range in {
		at := index(path, i)
		t, err := p.resolve(at)
		if err != nil {
			return nil, err
		}
		if t.Type == ToolsetAgent && slices.ContainsFunc(out, func(o Tool) bool { return o.Type == ToolsetAgent }) {
			return nil, Invalid(at+".type", "%q is there already; put all configs into one entry", t.Type)
		}
		if t.Type == ToolCustom {
			if slices.Contains(custom, t.Name) {
				return nil, Invalid(at+".name", "%q is used twice; names must be unique", t.Name)
			}
			custom = append(custom, t.Name)
		}
		if total += max(1, len(t.Configs)); total > MaxToolsInTotal {
			return nil, Invalid(path, "configures more than %d tools", MaxToolsInTotal)
		}
		out = append(out, t)
	}
	for i, t := range out {
		named := func(o Tool) bool {
			return o.Type == ToolsetAgent && slices.ContainsFunc(o.Configs, func(c ToolConfig) bool { return c.Name == browserTool })
		}
		if t.Type == ToolCustom && t.Name == browserTool && slices.ContainsFunc(out, named) {
			return nil, Invalid(index(path, i)+".name", "%q is configured as a built-in tool too; choose another", browserTool)
		}
	}
	return out, nil
}

func (p ToolParams) resolve(path string) (Tool, error) {
	t := Tool{Type: p.Type}
	var err error
	switch p.Type {
	case ToolsetAgent:
		t.DefaultConfig, err = p.DefaultConfig.resolve(path+".default_config", AlwaysAllow)
	case ToolsetMCP:
		t.MCPServerName = p.MCPServerName
		if err := required(path+".mcp_server_name", p.MCPServerName, maxMCPName); err != nil {
			return t, err
		}
		t.DefaultConfig, err = p.DefaultConfig.resolve(path+".default_config", AlwaysAsk)
	case ToolCustom:
		t.Name, t.Description, t.InputSchema = p.Name, p.Description, p.InputSchema
		return t, validateCustom(path, p)
	default:
		return t, oneOf(path+".type", p.Type, ToolsetAgent, ToolsetMCP, ToolCustom)
	}
	if err != nil {
		return t, err
	}
	t.Configs = make([]ToolConfig, 0, len(p.Configs))
	for i, c := range p.Configs {
		at := index(path+".configs", i)
		if slices.ContainsFunc(t.Configs, func(o ToolConfig) bool { return o.Name == c.Name }) {
			return t, Invalid(at+".name", "%q is configured twice", short(c.Name))
		}
		cfg, err := c.resolve(at, p.Type, t.DefaultConfig)
		if err != nil {
			return t, err
		}
		t.Configs = append(t.Configs, cfg)
	}
	return t, nil
}

func (d *ToolDefaultParams) resolve(path, policy string) (ToolDefault, error) {
	out := ToolDefault{Enabled: true, PermissionPolicy: PermissionPolicy{Type: policy}}
	if d == nil {
		return out, nil
	}
	if d.Enabled != nil {
		out.Enabled = *d.Enabled
	}
	if d.PermissionPolicy != nil {
		out.PermissionPolicy = *d.PermissionPolicy
	}
	return out, out.PermissionPolicy.validate(path + ".permission_policy")
}

func (p PermissionPolicy) validate(path string) error {
	return oneOf(path+".type", p.Type, AlwaysAllow, AlwaysAsk, AutoPolicy)
}

func (c ToolConfigParams) resolve(path, toolset string, d ToolDefault) (ToolConfig, error) {
	out := ToolConfig{Name: c.Name, Enabled: d.Enabled, PermissionPolicy: d.PermissionPolicy, WebConfig: c.WebConfig}
	if c.Enabled != nil {
		out.Enabled = *c.Enabled
	}
	if c.PermissionPolicy != nil {
		out.PermissionPolicy = *c.PermissionPolicy
	}
	if err := out.PermissionPolicy.validate(path + ".permission_policy"); err != nil {
		return out, err
	}
	if toolset == ToolsetMCP {
		out.WebConfig = WebConfig{}
		return out, required(path+".name", c.Name, maxToolName)
	}
	if err := oneOf(path+".name", c.Name, append(builtinTools[:len(builtinTools):len(builtinTools)], browserTool)...); err != nil {
		return out, err
	}
	if c.Type != "" && c.Type != c.Name {
		return out, Invalid(path+".type", "is %q; it must equal name, or be left out", short(c.Type))
	}
	out.Type = c.Name
	out.URLSources = c.URLSources.resolve()
	return out, out.WebConfig.validate(path, c.Name)
}

// resolve fills in the sources that were left out.
func (u *URLSources) resolve() *URLSources {
	if u == nil {
		return nil
	}
	out := *u
	for _, s := range []*URLSource{&out.UserInput, &out.ClientToolResults, &out.ServerToolResults} {
		s.Type = cmp.Or(s.Type, "all")
	}
	return &out
}

func (w WebConfig) validate(path, tool string) error {
	if tool != "web_search" && tool != "web_fetch" {
		if w.AllowedDomains != nil || w.BlockedDomains != nil || w.UserLocation != nil || w.MaxContentTokens != nil || w.URLSources != nil {
			return Invalid(path, "%s takes no web settings; they belong to web_search and web_fetch", tool)
		}
		return nil
	}
	if w.AllowedDomains != nil && w.BlockedDomains != nil {
		return Invalid(path+".blocked_domains", "cannot stand beside allowed_domains; keep one of them")
	}
	paths := tool == "web_search"
	if err := cmp.Or(validateDomains(path+".allowed_domains", w.AllowedDomains, paths),
		validateDomains(path+".blocked_domains", w.BlockedDomains, paths)); err != nil {
		return err
	}
	if tool == "web_search" {
		if w.MaxContentTokens != nil || w.URLSources != nil {
			return Invalid(path, "web_search takes no max_content_tokens or url_sources; they belong to web_fetch")
		}
		if w.UserLocation != nil {
			return oneOf(path+".user_location.type", w.UserLocation.Type, "approximate")
		}
		return nil
	}
	if w.UserLocation != nil {
		return Invalid(path+".user_location", "belongs to web_search")
	}
	if w.MaxContentTokens != nil && *w.MaxContentTokens < 1 {
		return Invalid(path+".max_content_tokens", "must be at least 1")
	}
	return w.URLSources.validate(path + ".url_sources")
}

func validateDomains(path string, domains []string, pathSuffix bool) error {
	if domains == nil {
		return nil
	}
	if len(domains) < 1 || len(domains) > maxDomains {
		return Invalid(path, "must hold 1 to %d host names, got %d", maxDomains, len(domains))
	}
	for i, d := range domains {
		host := d
		if pathSuffix {
			host, _, _ = strings.Cut(d, "/")
		}
		if err := validateHost(index(path, i), host); err != nil {
			return err
		}
	}
	return nil
}

func (u *URLSources) validate(path string) error {
	if u == nil {
		return nil
	}
	if u.UserInput.Type == "none" && u.ClientToolResults.Type == "none" && u.ServerToolResults.Type == "none" {
		return Invalid(path, "allows no source at all; disable web_fetch instead")
	}
	return cmp.Or(oneOf(path+".user_input.type", u.UserInput.Type, "all", "none"),
		u.ClientToolResults.validate(path+".client_tool_results"),
		u.ServerToolResults.validate(path+".server_tool_results"))
}

func (u URLSource) validate(path string) error {
	if err := oneOf(path+".type", u.Type, "all", "none", "only", "except"); err != nil {
		return err
	}
	if u.Type == "all" || u.Type == "none" {
		return nil
	}
	if len(u.Tools) < 1 || len(u.Tools) > maxToolName {
		return Invalid(path+".tools", "must name 1 to %d tools, got %d", maxToolName, len(u.Tools))
	}
	var names []string
	for i, t := range u.Tools {
		p := index(path+".tools", i)
		if err := cmp.Or(oneOf(p+".type", t.Type, "tool_reference"), required(p+".name", t.Name, maxToolName)); err != nil {
			return err
		}
		if slices.Contains(names, t.Name) {
			return Invalid(p+".name", "%q is named twice", t.Name)
		}
		names = append(names, t.Name)
	}
	return nil
}

var customName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9_-]{1,128}$`) })

// validateCustom applies the rules of custom tools (reference section 11.1).
func validateCustom(path string, p ToolParams) error {
	switch {
	case !customName().MatchString(p.Name):
		return Invalid(path+".name", "%q must have 1 to 128 letters, digits, _ or -", short(p.Name))
	case slices.Contains(builtinTools, p.Name):
		return Invalid(path+".name", "%q is the name of a built-in tool; choose another", p.Name)
	case strings.HasPrefix(p.Name, mcpNamePrefix):
		return Invalid(path+".name", "must not begin with %s, which is kept for tools of MCP servers", mcpNamePrefix)
	case blank(p.Description):
		return Invalid(path+".description", "is required; tell the model what the tool does")
	case isNull(p.InputSchema):
		return Invalid(path+".input_schema", "is required; give a JSON schema with \"type\":\"object\"")
	}
	return validateSchema(path+".input_schema", p.InputSchema)
}

func validateSchema(path string, raw json.RawMessage) error {
	var root map[string]any
	if err := unmarshal(raw, &root); err != nil {
		return Invalid(path, "must be a JSON schema object: %v", err)
	}
	if root["type"] != "object" {
		return Invalid(path+".type", "must be \"object\" at the root")
	}
	for _, k := range []string{"oneOf", "anyOf", "allOf"} {
		if _, ok := root[k]; ok {
			return Invalid(path+"."+k, "is not allowed at the root; move it into a property")
		}
	}
	return validateSchemaNode(path, root, maxSchemaDepth)
}

// validateSchemaNode refuses $ref and names of properties that models do not take.
func validateSchemaNode(path string, node any, depth int) error {
	if depth == 0 {
		return Invalid(path, "is nested more than %d deep", maxSchemaDepth)
	}
	switch v := node.(type) {
	case []any:
		for i, e := range v {
			if err := validateSchemaNode(index(path, i), e, depth-1); err != nil {
				return err
			}
		}
	case map[string]any:
		if ref, ok := v["$ref"].(string); ok {
			return Invalid(path+".$ref", "%q: references are not allowed; write the schema out", short(ref))
		}
		for _, k := range sortedKeys(v) {
			if k == "const" || k == "enum" || k == "default" || k == "examples" {
				continue // values, not schemas
			}
			props, ok := v[k].(map[string]any)
			if k != "properties" || !ok {
				if err := validateSchemaNode(path+"."+k, v[k], depth-1); err != nil {
					return err
				}
				continue
			}
			for _, name := range sortedKeys(props) {
				if n := runes(name); n < 1 || n > maxPropertyChars {
					return Invalid(path+".properties", "%q must have 1 to %d characters", short(name), maxPropertyChars)
				}
				if err := validateSchemaNode(path+".properties."+name, props[name], depth-1); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
