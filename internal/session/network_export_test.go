package session

import (
	"encoding/json"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
)

// NetworkOf is what a sandbox may reach in an environment beside these servers.
func NetworkOf(environment string, servers ...string) (gateway.Network, error) {
	e, err := parseEnvironment(json.RawMessage(environment))
	return network(e, servers), err
}

// Outside is why a call that ended at a seq may not be run again in the state of
// after, given one tunnel.
func Outside(t store.Tunnel, opened store.Seq, call store.EventID, ended, after store.Seq) string {
	p := past{tunnels: []tunnelAt{{opened, t}}}
	return p.outside(&pastCall{event: call, at: ended}, after)
}
