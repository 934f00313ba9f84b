package session_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
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

// A call is not run again when it reached out, nor when a process did that
// belongs to no call, also after the call's end: it may have been told to.
func TestOutside(t *testing.T) {
	for name, c := range map[string]struct {
		calls         []store.EventID
		opened, after store.Seq
		again         bool
	}{
		"its own":                         {[]store.EventID{"b", "c"}, 25, 10, false},
		"its own, before the state":       {[]store.EventID{"c"}, 5, 10, false},
		"another's":                       {[]store.EventID{"b"}, 25, 10, true},
		"packages":                        {[]store.EventID{"packages"}, 25, 10, true},
		"nobody's":                        {nil, 25, 10, false},
		"nobody's, inside the state":      {nil, 5, 10, true},
		"nobody's, after the call's end":  {nil, 35, 10, false},
		"another's, after the call's end": {[]store.EventID{"d"}, 35, 10, true},
	} {
		why := session.Outside(store.Tunnel{Host: "a.test", Calls: c.calls}, c.opened, "c", 30, c.after)
		if (why == "") != c.again {
			t.Errorf("%s: %q", name, why)
		}
	}
}
