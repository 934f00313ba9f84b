// Package gateway is the front of the only way out: it parses the model's
// hostile bytes, rules calls, drafts their intents, and says what an open
// effect needs next. It holds no secret; what may leave goes to the keeper as
// a typed, already ruled request.
//
// Invariants:
//
//   - Rule writes nothing: its drafts are committed by the session together
//     with the model's output, so that no call is asked for that is not on
//     record.
//   - Continue is the same after a crash as before one. What it does follows
//     from the effect's records alone.
//   - An effect is worked on by one caller at a time.
//   - An error or an unknown is a denial while ruling, and a doubt after a send.
package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
)

// Model types are llm's, passed through keeper.
type (
	ModelRequest = keeper.ModelRequest
	ModelReply   = keeper.ModelReply
	ModelError   = keeper.ModelError
	ModelDelta   = keeper.ModelDelta
	Message      = keeper.Message
	Block        = keeper.Block
	ModelTool    = keeper.ModelTool
	ModelSpec    = keeper.ModelSpec
)

// Errors of the gateway.
var (
	// ErrStaleApproval: what was approved is not what would be done now.
	ErrStaleApproval = errors.New("approval is stale")
	// ErrSettled: the effect is not in doubt any more, or never was.
	ErrSettled = errors.New("effect is not in doubt")
)

// Config sets up a Gateway.
type Config struct {
	DB      *store.DB
	Keeper  *keeper.Keeper
	Effects *effect.Log
	Logger  *slog.Logger // slog.Default when nil
	// Contradicted, if set, is told of evidence that disagrees with a settlement.
	Contradicted func(store.Effect)
	// Settled, if set, is told of every effect that ended here: by settlement,
	// denial or the client's answer. What the keeper ends, it observes itself.
	Settled func(e store.Effect, state store.EffectState)
	// PackageHosts are the operator's own mirrors: what a sandbox reaches besides
	// the public registries where its environment allows package managers. Bare
	// names, "*." wildcards, or "host:port".
	PackageHosts []string
}

// Gateway rules calls, commits intents and passes ruled requests to the
// keeper. Safe for concurrent use.
type Gateway struct {
	cfg     Config
	db      *store.DB
	keeper  *keeper.Keeper
	effects *effect.Log
	log     *slog.Logger

	mu    sync.Mutex
	busy  map[store.EffectID]chan struct{} // closed when the effect's worker is done
	tries map[store.EffectID]int           // probes and resends without an end, for backing off
	ways  map[egressKey]int                // connections out of each sandbox

	packages *hostRules // never changed
	refusals refusals   // of ways out, for the log
}

// New makes a Gateway; no I/O.
func New(cfg Config) *Gateway {
	g := &Gateway{cfg: cfg, db: cfg.DB, keeper: cfg.Keeper, effects: cfg.Effects, log: cfg.Logger,
		busy: map[store.EffectID]chan struct{}{}, tries: map[store.EffectID]int{}, ways: map[egressKey]int{}}
	if g.log == nil {
		g.log = slog.Default()
	}
	var err error
	if g.packages, err = publicPackages(cfg.PackageHosts); err != nil {
		g.log.Error("left out package hosts of the configuration", "err", err)
	}
	return g
}

// Server is an entry of the agent's mcp_servers.
type Server struct{ Name, URL string }

// Scope says for whom the gateway acts.
type Scope struct {
	Lease   *store.Lease
	Lineage store.SessionID
	Thread  store.ThreadID
	Servers []Server
	Vaults  []store.VaultID
}

func (s Scope) workspace() store.WorkspaceID { return s.Lease.Workspace() }

// Answer is what a tool use gets.
type Answer struct {
	Effect  store.EffectID
	Outcome store.Outcome
	IsError bool
	// Content is a JSON array of wire content blocks (text, image, …), never empty.
	Content json.RawMessage
	// Whole is Content before it was cut to what a model is shown; nil when it was
	// not cut, or is not at hand any more.
	Whole json.RawMessage
}

// Plain takes out of a text what a terminal obeys and what nobody sees, as it is
// done with answers from outside (attack M10).
func Plain(text string) string { return keeper.Plain(text) }

// Progress says where an effect stands after Continue or Settle.
type Progress struct {
	Done   bool // its end is committed together with result's drafts
	Answer Answer
	// RetryAt is when to call Continue again: only time is needed.
	RetryAt time.Time
	// Person: nothing but a person (or late evidence) can settle it.
	Person bool
	// Tell: the contract says to leave it to the agent; the caller does.
	Tell bool
}

// ServerError says that an MCP server cannot be used now.
type ServerError struct {
	Server string
	Auth   bool // credentials were refused
	Err    error
}

func (e *ServerError) Error() string { return "mcp server " + e.Server + ": " + e.Err.Error() }
func (e *ServerError) Unwrap() error { return e.Err }

// take makes the caller the one worker on an effect until the returned
// function is called.
func (g *Gateway) take(ctx context.Context, id store.EffectID) (func(), error) {
	for {
		g.mu.Lock()
		other := g.busy[id]
		if other == nil {
			done := make(chan struct{})
			g.busy[id] = done
			g.mu.Unlock()
			return func() {
				g.mu.Lock()
				delete(g.busy, id)
				g.mu.Unlock()
				close(done)
			}, nil
		}
		g.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// connectorScheme names a connector in an agent's mcp_servers.
const connectorScheme = "planaria:"

// peer is an MCP server with its contracts.
type peer struct {
	target    keeper.Target
	row       store.Connector // zero without connector
	connector effect.Connector
}

// place is what digests of calls to the peer are bound to.
func (p *peer) place() string {
	if p.row.ID != "" {
		return string(p.row.ID)
	}
	return p.target.URL
}

// peer finds a server of the agent's: the connector that it names or whose URL
// it has, else an implicit one without contracts.
func (g *Gateway) peer(ctx context.Context, s Scope, name string) (*peer, error) {
	for _, srv := range s.Servers {
		if srv.Name != name {
			continue
		}
		if c, ok := strings.CutPrefix(srv.URL, connectorScheme); ok {
			row, err := g.db.ConnectorByName(ctx, s.workspace(), c)
			if errors.Is(err, store.ErrNotFound) {
				return nil, &ServerError{Server: name, Err: fmt.Errorf("there is no connector %q in this workspace", c)}
			}
			if err != nil {
				return nil, err
			}
			return connected(s, name, row)
		}
		u, err := effect.NormalizeURL(srv.URL)
		if err != nil {
			return nil, &ServerError{Server: name, Err: fmt.Errorf("url %w", err)}
		}
		row, err := g.db.ConnectorByURL(ctx, s.workspace(), u)
		if err == nil {
			return connected(s, name, row)
		}
		if !errors.Is(err, store.ErrNotFound) {
			return nil, err
		}
		return &peer{target: keeper.Target{Workspace: s.workspace(), Server: name, URL: u, Vaults: s.Vaults}}, nil
	}
	return nil, &ServerError{Server: name, Err: errors.New("the agent has no such server")}
}

func connected(s Scope, name string, row store.Connector) (*peer, error) {
	c, err := effect.LoadConnector(row.Body)
	if err != nil {
		return nil, &ServerError{Server: name, Err: fmt.Errorf("connector %s: %w", row.Name, err)}
	}
	return &peer{row: row, connector: c, target: keeper.Target{
		Workspace: s.workspace(), Server: name, Connector: row.ID, URL: c.URL, Operator: true, Vaults: s.Vaults,
	}}, nil
}

// peerOf finds the server of an effect: by its connector, which may have
// another name in the agent since, else by name.
func (g *Gateway) peerOf(ctx context.Context, s Scope, h store.EffectHeader) (*peer, error) {
	if h.Connector == "" {
		p, err := g.peer(ctx, s, h.Server)
		if err == nil && p.row.ID != "" {
			// A connector has taken the URL since. Its contracts rule new calls;
			// this one goes where it was ruled to go.
			p.row, p.connector = store.Connector{}, effect.Connector{}
		}
		return p, err
	}
	row, err := g.db.Connector(ctx, s.workspace(), h.Connector)
	if errors.Is(err, store.ErrNotFound) {
		return nil, &ServerError{Server: h.Server, Err: errors.New("its connector was removed")}
	}
	if err != nil {
		return nil, err
	}
	return connected(s, h.Server, row)
}

// Model asks the model once. The caller logs intent and output.
func (g *Gateway) Model(ctx context.Context, s Scope, req ModelRequest, onDelta func(ModelDelta)) (*ModelReply, error) {
	return g.keeper.Model(ctx, req, onDelta)
}

// Spec returns limits and prices of a model; an error says how to configure it.
func (g *Gateway) Spec(model string) (ModelSpec, error) { return g.keeper.Spec(model) }

// Cost is the list cost of a request in 10⁻⁹ dollars.
func (g *Gateway) Cost(model string, u store.TokenUsage) int64 { return g.keeper.Cost(model, u) }
