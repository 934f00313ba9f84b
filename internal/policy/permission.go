package policy

// Toolset is the type of an entry in an agent's tools (reference section 11.1).
type Toolset string

// The toolsets that have permission policies. Custom tools have none: the
// client performs them.
const (
	ToolsetBuiltin Toolset = "agent_toolset_20260401"
	ToolsetMCP     Toolset = "mcp_toolset"
)

// PermissionPolicy is the type of a permission policy (reference section 11.3).
type PermissionPolicy string

// The permission policies.
const (
	AlwaysAllow PermissionPolicy = "always_allow"
	AlwaysAsk   PermissionPolicy = "always_ask"
	Auto        PermissionPolicy = "auto"
)

// Valid reports whether p is one of the policies.
func (p PermissionPolicy) Valid() bool { return p == AlwaysAllow || p == AlwaysAsk || p == Auto }

// Reason codes of an evaluation under auto (reference section 9.5).
const (
	ReasonHighRisk      = "high_risk"
	ReasonIndeterminate = "indeterminate"
)

// ToolConfig is what an agent says about its tools: default_config of a
// toolset, or one entry of configs. A zero field says nothing.
type ToolConfig struct {
	Enabled *bool
	Policy  PermissionPolicy
}

// Permission is the evaluated permission of one tool call.
type Permission struct {
	// Verdict is the wire's evaluated_permission.
	Verdict Verdict
	// Policy is the type of the wire's evaluation. Empty when the call was
	// refused before any policy; then the event has no evaluation.
	Policy PermissionPolicy
	// ReasonCode belongs to an evaluation under auto that did not allow.
	ReasonCode string
	// Reason is a phrase for people and logs.
	Reason string
}

// Resolve merges what is said about one tool: the per-tool config wins, then
// the toolset's default_config, then the default of the toolset's type.
// perTool is the zero value when the agent does not name the tool. An unknown
// toolset resolves to a disabled tool.
func Resolve(set Toolset, def, perTool ToolConfig) (enabled bool, p PermissionPolicy) {
	switch set {
	case ToolsetBuiltin:
		enabled, p = true, AlwaysAllow
	case ToolsetMCP:
		enabled, p = true, AlwaysAsk
	default:
		return false, ""
	}
	for _, c := range []ToolConfig{def, perTool} {
		if c.Enabled != nil {
			enabled = *c.Enabled
		}
		if c.Policy != "" {
			p = c.Policy
		}
	}
	return enabled, p
}

// Permit evaluates one call of a tool. class is the effective effect class of
// the call (read, idempotent, mixed, irreversible; design section 4), empty
// when it is not known; only auto looks at it.
func Permit(set Toolset, def, perTool ToolConfig, class string) Permission {
	enabled, p := Resolve(set, def, perTool)
	if !enabled {
		return Permission{Verdict: Deny, Reason: "tool is not enabled"}
	}
	switch p {
	case AlwaysAllow:
		return Permission{Verdict: Allow, Policy: p, Reason: "policy always_allow"}
	case AlwaysAsk:
		return Permission{Verdict: Ask, Policy: p, Reason: "policy always_ask"}
	case Auto:
		return auto(class)
	}
	return Permission{Verdict: Deny, Reason: "unknown permission policy"}
}

// auto judges by effect class: what can be repeated without harm runs, what
// cannot be taken back waits for a person, and so does what nobody classified.
func auto(class string) Permission {
	switch class {
	case "read", "idempotent":
		return Permission{Verdict: Allow, Policy: Auto, Reason: "policy auto: class " + class}
	case "mixed", "irreversible":
		return Permission{Verdict: Ask, Policy: Auto, ReasonCode: ReasonHighRisk, Reason: "policy auto: class " + class}
	}
	return Permission{Verdict: Ask, Policy: Auto, ReasonCode: ReasonIndeterminate, Reason: "policy auto: unknown class"}
}
