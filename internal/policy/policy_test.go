package policy_test

import (
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/planaria/planaria/internal/policy"
)

func key(role policy.Role, ws string) policy.Principal {
	return policy.Principal{ID: "apikey_1", Workspace: ws, Role: role}
}

// TestDecide writes the whole table out a second time, so that a change of one
// cell is seen by a person. Columns: admin, operator, developer, viewer.
func TestDecide(t *testing.T) {
	const table = `
agents.archive     +-+-
agents.create      +-+-
agents.read        ++++
agents.update      +-+-
api_keys.read      +---
api_keys.write     +---
approvals.answer   ++--
approvals.read     ++++
audit.read         ++--
connectors.read    ++++
connectors.write   ++--
effects.read       ++++
effects.settle     ++--
environments.read  ++++
environments.write +-+-
nodes.read         ++--
sessions.archive   +++-
sessions.create    +++-
sessions.delete    +++-
sessions.pause     +++-
sessions.read      ++++
sessions.resume    +++-
sessions.send      +++-
sessions.update    +++-
usage.read         ++++
vaults.read        ++++
files.write        +++-
files.read         ++++
vaults.write       +++-
workspaces.read    ++--
workspaces.write   +---`
	seen := map[policy.Action]bool{}
	for row := range strings.Lines(strings.TrimSpace(table)) {
		f := strings.Fields(row)
		action := policy.Action(f[0])
		seen[action] = true
		for i, role := range policy.Roles() {
			want := policy.Deny
			if f[1][i] == '+' {
				want = policy.Allow
			}
			got := policy.Decide(key(role, "default"), action, policy.Resource{Workspace: "default"})
			if got.Verdict != want {
				t.Errorf("Decide(%s, %s) = %s (%s), want %s", role, action, got.Verdict, got.Reason, want)
			}
			if got.Reason == "" {
				t.Errorf("Decide(%s, %s) has no reason", role, action)
			}
		}
	}
	for _, a := range policy.Actions() {
		if !seen[a] {
			t.Errorf("action %s is not in the table of this test", a)
		}
	}
	if len(seen) != len(policy.Actions()) {
		t.Errorf("table has %d actions, package has %d", len(seen), len(policy.Actions()))
	}
}

// TestTenants: attack K9, law L11.
func TestTenants(t *testing.T) {
	for _, a := range policy.Actions() {
		for _, r := range []policy.Resource{{Workspace: "wrkspc_b"}, {}} {
			if d := policy.Decide(key(policy.RoleAdmin, "wrkspc_a"), a, r); d.Verdict != policy.Deny {
				t.Errorf("%s on %+v by another tenant's admin = %+v, want deny", a, r, d)
			}
		}
		if d := policy.Decide(key(policy.RoleAdmin, ""), a, policy.Resource{}); d.Verdict != policy.Deny {
			t.Errorf("%s without any workspace = %+v, want deny", a, d)
		}
	}
	for _, a := range []policy.Action{policy.WorkspacesWrite, policy.WorkspacesRead, policy.NodesRead} {
		if d := policy.Decide(key(policy.RoleAdmin, "wrkspc_a"), a, policy.Resource{Workspace: "wrkspc_a"}); d.Verdict != policy.Deny {
			t.Errorf("%s by a tenant's admin = %+v, want deny", a, d)
		}
		if d := policy.Decide(key(policy.RoleAdmin, policy.HomeWorkspace), a, policy.Resource{Workspace: "wrkspc_b"}); d.Verdict != policy.Allow {
			t.Errorf("%s by the home workspace's admin = %+v, want allow", a, d)
		}
	}
}

func TestUnknownGainsNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		role := rapid.OneOf(rapid.SampledFrom(policy.Roles()), rapid.Custom(func(t *rapid.T) policy.Role {
			return policy.Role(rapid.StringMatching(`[ -~]{0,12}`).Draw(t, "name"))
		})).Draw(t, "role")
		action := rapid.OneOf(rapid.SampledFrom(policy.Actions()), rapid.Custom(func(t *rapid.T) policy.Action {
			return policy.Action(rapid.StringMatching(`[a-z_.]{0,20}`).Draw(t, "name"))
		})).Draw(t, "action")
		ws := rapid.SampledFrom([]string{"default", "wrkspc_a", ""})
		p, r := key(role, ws.Draw(t, "own")), policy.Resource{Workspace: ws.Draw(t, "other")}

		got := policy.Decide(p, action, r)
		if got != policy.Decide(p, action, r) {
			t.Fatal("not a function of its arguments")
		}
		known := false
		for _, a := range policy.Actions() {
			known = known || a == action
		}
		switch got.Verdict {
		case policy.Deny:
		case policy.Allow:
			if !known || !role.Valid() || p.Workspace == "" || r.Workspace == "" {
				t.Fatalf("allowed an unknown: %+v %s %+v", p, action, r)
			}
			if role == policy.RoleViewer && !strings.HasSuffix(string(action), ".read") {
				t.Fatalf("a viewer writes: %s", action)
			}
			if d := policy.Decide(key(policy.RoleAdmin, p.Workspace), action, r); d.Verdict != policy.Allow {
				t.Fatalf("%s may %s but an admin may not", role, action)
			}
		default:
			t.Fatalf("verdict %q", got.Verdict)
		}
	})
}

func TestCheck(t *testing.T) {
	p := key(policy.RoleViewer, "default")
	err := policy.Check(p, policy.EffectsSettle, policy.Resource{Workspace: "default", ID: "eff_1"})
	var denied *policy.DeniedError
	if !errors.As(err, &denied) || !errors.Is(err, policy.ErrDenied) {
		t.Fatalf("Check = %v, want *DeniedError", err)
	}
	if denied.Principal != p || denied.Action != policy.EffectsSettle || denied.Resource.ID != "eff_1" {
		t.Errorf("denied = %+v", denied)
	}
	if got, want := err.Error(), "apikey_1 may not effects.settle on eff_1: role viewer does not include effects.settle"; got != want {
		t.Errorf("text = %q, want %q", got, want)
	}
	if err := policy.Check(p, policy.SessionsRead, policy.Resource{Workspace: "default"}); err != nil {
		t.Errorf("Check of a read = %v", err)
	}
}
