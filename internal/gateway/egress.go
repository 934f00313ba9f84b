package gateway

import (
	"context"
	"io"

	"github.com/planaria/planaria/internal/store"
)

// Network is where the processes of a sandbox may connect to (reference section 4.1).
type Network struct {
	Unrestricted    bool
	Hosts           []string // bare names or "*." wildcards
	PackageManagers bool
}

// Repository is a git repository that a sandbox may fetch through us: its token
// never enters the sandbox. Inside it is http://repositories.planaria/{Resource}.
type Repository struct {
	Resource string // "sesrsc_…", names the stored token too
	URL      string
}

// EgressScope says for which sandbox a connection is served.
type EgressScope struct {
	Workspace    store.WorkspaceID
	Session      store.SessionID
	Network      Network
	Repositories []Repository
	// Opened records a tunnel before it is dialled; an error refuses it. Ended
	// records its end.
	Opened func(ctx context.Context, t store.Tunnel) error
	Ended  func(t store.Tunnel)
}

// Egress serves one connection of a process in a sandbox to the proxy: CONNECT
// and plain HTTP requests, until it ends or ctx does.
func (g *Gateway) Egress(ctx context.Context, s EgressScope, conn io.ReadWriteCloser) {
	_ = conn.Close()
}
