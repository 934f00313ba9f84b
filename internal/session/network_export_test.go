package session

import (
	"encoding/json"

	"github.com/planaria/planaria/internal/gateway"
)

// NetworkOf is what a sandbox may reach in an environment beside these servers.
func NetworkOf(environment string, servers ...string) (gateway.Network, error) {
	e, err := parseEnvironment(json.RawMessage(environment))
	return network(e, servers), err
}
