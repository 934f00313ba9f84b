// Package keeper is the back of the gateway: the only reader of vault. It
// takes ruled calls, commits attempt and completion (package effect), dials,
// sends once, scrubs what comes back.
//
// Invariants:
//
//   - A tools/call leaves only on a line that we hold, in one write, after its
//     ticket was spent right before. No library can send it again: below the
//     MCP client there is no http.Transport but conn.RoundTrip, which knows a
//     call by its body and lets it through once.
//   - The outcome is judged from status line, JSON-RPC message and byte count
//     on the wire. The MCP client's errors are never read for it.
//   - A credential is set on requests to the server that it was matched to, and
//     nowhere else; connections are shared within one workspace, URL and
//     credential only. What comes back is scrubbed before anything looks at it.
//   - Redirects, proxies, compression, resumption, server requests: none.
//
// It rules nothing: whether a call may be made, and what it means, is the
// gateway's business.
package keeper

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"net/url"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// Models finds providers. *llm.Models implements it.
type Models interface {
	For(model string) (llm.Provider, llm.Spec, error)
}

// Config sets up a Keeper.
type Config struct {
	DB      *store.DB     // required
	Effects *effect.Log   // required
	Vault   *vault.Master // opens credentials; required where vaults are used
	Models  Models        // nil: there are no models
	// Dial is the program's one dial function (Guard). A plain guarded dialer when nil.
	Dial   DialFunc
	Logger *slog.Logger // slog.Default when nil
	// AllowPrivateNetworks lets an agent's own URLs reach private addresses, and
	// sandboxes those that Tunnel is asked for as private.
	AllowPrivateNetworks bool
	// Roots verify servers; the system's when nil.
	Roots *x509.CertPool
	// Fault is called at named points of a call; an error there is as if the
	// process had died. For the crash matrix; nil in production.
	Fault func(point string) error
	// Observe, if set, is told of every effect that ended here.
	Observe func(e store.Effect, v effect.Verdict, elapsed time.Duration)
}

// Keeper sends. Safe for concurrent use.
type Keeper struct {
	cfg    Config
	log    *slog.Logger
	client *mcp.Client
	tls    *tls.Config
	work   sync.WaitGroup // closing of dropped connections

	mu    sync.Mutex
	conns map[connKey]*conn
	swept time.Time
	left  map[store.EffectID]bool // idempotent effects that this process has sent and not ended

	places map[movedKey]*url.URL // repositories that have moved on their host
}

// New makes a Keeper; no I/O.
func New(cfg Config) *Keeper {
	if cfg.Dial == nil {
		cfg.Dial = Guard((&net.Dialer{Timeout: dialTime}).DialContext, nil)
	}
	k := &Keeper{cfg: cfg, log: cfg.Logger, conns: map[connKey]*conn{}, left: map[store.EffectID]bool{}, places: map[movedKey]*url.URL{}, tls: &tls.Config{RootCAs: cfg.Roots}}
	if k.log == nil {
		k.log = slog.Default()
	}
	k.client = mcp.NewClient(&mcp.Implementation{Name: "planaria", Version: "1"}, &mcp.ClientOptions{
		// The SDK's own messages may hold arguments.
		Logger:         slog.New(slog.DiscardHandler),
		Capabilities:   &mcp.ClientCapabilities{}, // no roots, no sampling, no elicitation (attack K13)
		MultiRoundTrip: &mcp.MultiRoundTripOptions{Disabled: true},
	})
	return k
}

// Close ends all MCP connections. No call may be under way or come after it.
func (k *Keeper) Close() {
	k.mu.Lock()
	conns := k.conns
	k.conns = map[connKey]*conn{}
	k.mu.Unlock()
	for _, c := range conns {
		k.background(c.close)
	}
	k.work.Wait()
}

// background runs the ending of a connection; Close waits for it.
func (k *Keeper) background(f func()) { k.work.Go(f) }

func (k *Keeper) fault(point string) error {
	if k.cfg.Fault == nil {
		return nil
	}
	return k.cfg.Fault(point)
}

// Tools asks a server for its tools. Errors are *ConnectError or ctx's.
func (k *Keeper) Tools(ctx context.Context, t Target) ([]Tool, error) {
	c, err := k.open(ctx, t, true)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Tool(nil), c.order...), nil
}
