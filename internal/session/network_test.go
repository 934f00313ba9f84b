package session_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/session"
)

// What an environment's networking comes to (reference section 4.1): an MCP
// server is reached where its URL says, and never counts as named by the
// environment.
func TestNetwork(t *testing.T) {
	servers := []string{"https://mcp.test/mcp", "https://mcp2.test:8443/mcp", "planaria:crm", "https://10.0.0.1/mcp"}
	for in, want := range map[string]gateway.Network{
		"":                 {Unrestricted: true},
		`{"type":"cloud"}`: {Unrestricted: true},
		`{"type":"cloud","networking":{"type":"unrestricted"}}`:       {Unrestricted: true},
		`{"type":"cloud","networking":{"type":"limited"}}`:            {},
		`{"type":"cloud","networking":{"type":"not known here yet"}}`: {},
		`{"type":"cloud","networking":{"type":"limited","allowed_hosts":["a.test"],"allow_package_managers":true,"allow_mcp_servers":true}}`: {
			Hosts: []string{"a.test"}, PackageManagers: true, Servers: []string{"mcp.test", "mcp2.test:8443", "10.0.0.1"}},
	} {
		got, err := session.NetworkOf(in, servers...)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: %v %s", in, err, diff)
		}
	}
}
