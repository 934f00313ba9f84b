package policy_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"pgregory.net/rapid"

	"github.com/planaria/planaria/internal/policy"
)

func TestPermit(t *testing.T) {
	on, off := true, false
	type config = policy.ToolConfig
	tests := []struct {
		name    string
		set     policy.Toolset
		def     config
		perTool config
		class   string
		want    policy.Permission
	}{
		{"built-in default", policy.ToolsetBuiltin, config{}, config{}, "irreversible",
			policy.Permission{Verdict: policy.Allow, Policy: policy.AlwaysAllow}},
		{"MCP default", policy.ToolsetMCP, config{}, config{}, "read",
			policy.Permission{Verdict: policy.Ask, Policy: policy.AlwaysAsk}},
		{"default_config beats type", policy.ToolsetMCP, config{Policy: policy.AlwaysAllow}, config{}, "irreversible",
			policy.Permission{Verdict: policy.Allow, Policy: policy.AlwaysAllow}},
		{"tool beats default_config", policy.ToolsetMCP, config{Policy: policy.AlwaysAllow}, config{Policy: policy.AlwaysAsk}, "read",
			policy.Permission{Verdict: policy.Ask, Policy: policy.AlwaysAsk}},
		{"tool that says only enabled keeps default_config", policy.ToolsetMCP, config{Policy: policy.AlwaysAllow}, config{Enabled: &on}, "",
			policy.Permission{Verdict: policy.Allow, Policy: policy.AlwaysAllow}},
		{"disabled by default_config", policy.ToolsetBuiltin, config{Enabled: &off}, config{}, "read",
			policy.Permission{Verdict: policy.Deny}},
		{"enabled again", policy.ToolsetBuiltin, config{Enabled: &off}, config{Enabled: &on}, "read",
			policy.Permission{Verdict: policy.Allow, Policy: policy.AlwaysAllow}},
		{"disabled by tool", policy.ToolsetMCP, config{Policy: policy.AlwaysAllow}, config{Enabled: &off, Policy: policy.AlwaysAllow}, "read",
			policy.Permission{Verdict: policy.Deny}},
		{"auto read", policy.ToolsetMCP, config{Policy: policy.Auto}, config{}, "read",
			policy.Permission{Verdict: policy.Allow, Policy: policy.Auto}},
		{"auto idempotent", policy.ToolsetMCP, config{Policy: policy.Auto}, config{}, "idempotent",
			policy.Permission{Verdict: policy.Allow, Policy: policy.Auto}},
		{"auto mixed", policy.ToolsetMCP, config{Policy: policy.Auto}, config{}, "mixed",
			policy.Permission{Verdict: policy.Ask, Policy: policy.Auto, ReasonCode: "high_risk"}},
		{"auto irreversible", policy.ToolsetMCP, config{}, config{Policy: policy.Auto}, "irreversible",
			policy.Permission{Verdict: policy.Ask, Policy: policy.Auto, ReasonCode: "high_risk"}},
		{"auto without class", policy.ToolsetMCP, config{}, config{Policy: policy.Auto}, "",
			policy.Permission{Verdict: policy.Ask, Policy: policy.Auto, ReasonCode: "indeterminate"}},
		{"unknown policy", policy.ToolsetMCP, config{}, config{Policy: "never_mind"}, "read",
			policy.Permission{Verdict: policy.Deny}},
		{"custom tools have no policy", "custom", config{Policy: policy.AlwaysAllow}, config{}, "read",
			policy.Permission{Verdict: policy.Deny}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := policy.Permit(tt.set, tt.def, tt.perTool, tt.class)
			if d := cmp.Diff(tt.want, got, cmpopts.IgnoreFields(policy.Permission{}, "Reason")); d != "" {
				t.Errorf("Permit (-want +got):\n%s", d)
			}
			if got.Reason == "" {
				t.Error("no reason")
			}
		})
	}
}

func TestPermitUnknownGainsNothing(t *testing.T) {
	word := rapid.StringMatching(`[a-z_]{0,12}`)
	rapid.Check(t, func(t *rapid.T) {
		set := policy.Toolset(rapid.OneOf(rapid.SampledFrom([]string{"agent_toolset_20260401", "mcp_toolset"}), word).Draw(t, "toolset"))
		pol := rapid.OneOf(rapid.SampledFrom([]string{"", "always_allow", "always_ask", "auto"}), word)
		def := policy.ToolConfig{Policy: policy.PermissionPolicy(pol.Draw(t, "default"))}
		tool := policy.ToolConfig{Policy: policy.PermissionPolicy(pol.Draw(t, "tool"))}
		class := rapid.OneOf(rapid.SampledFrom([]string{"read", "idempotent", "mixed", "irreversible"}), word).Draw(t, "class")

		got := policy.Permit(set, def, tool, class)
		if got.Verdict == policy.Allow {
			if set != policy.ToolsetBuiltin && set != policy.ToolsetMCP {
				t.Fatalf("unknown toolset %q allowed", set)
			}
			if got.Policy == policy.Auto && class != "read" && class != "idempotent" {
				t.Fatalf("auto allowed class %q", class)
			}
			if got.Policy != policy.AlwaysAllow && got.Policy != policy.Auto {
				t.Fatalf("policy %q allowed", got.Policy)
			}
		}
		if got.Policy != "" && !got.Policy.Valid() {
			t.Fatalf("evaluation of an unknown type %q", got.Policy)
		}
	})
}
