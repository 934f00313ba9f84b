package gateway

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"

	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
)

// Tool is one tool of a server, as recorded in a tools entry.
type Tool struct {
	Server      string            `json:"server"`
	Connector   store.ConnectorID `json:"connector,omitempty"`
	Name        string            `json:"name"`
	Description string            `json:"description"`
	InputSchema json.RawMessage   `json:"input_schema"`
	Annotations json.RawMessage   `json:"annotations,omitempty"`
	Digest      string            `json:"digest"`
	// Quarantined says why the tool must not be offered (pin mismatch), empty when fine.
	Quarantined string `json:"quarantined,omitempty"`
}

// Listing is what a server offers.
type Listing struct {
	Server    string
	Connector store.ConnectorID
	Digest    string
	Tools     []Tool
}

const quarantine = "its definition changed since its contract was first used; an operator has to look at it and save the connector again"

// List asks a server for its tools (class read). A connector's tools are
// pinned to the definition that was seen first; one that differs is
// quarantined (attack M3). *ServerError when the server cannot be used.
func (g *Gateway) List(ctx context.Context, s Scope, server string) (Listing, error) {
	p, err := g.peer(ctx, s, server)
	if err != nil {
		return Listing{}, err
	}
	tools, err := g.keeper.Tools(ctx, p.target)
	if err != nil {
		return Listing{}, serverError(server, err)
	}
	l := Listing{Server: server, Connector: p.row.ID}
	sum := sha256.New()
	for _, t := range tools {
		out := Tool{Server: server, Connector: p.row.ID, Name: t.Name, Description: t.Description,
			InputSchema: t.InputSchema, Annotations: t.Annotations, Digest: t.Digest}
		if p.row.ID != "" {
			pin, err := g.pin(ctx, p.row, t)
			if err != nil {
				return Listing{}, err
			}
			if pin != t.Digest {
				out.Quarantined = quarantine
			}
		}
		sum.Write([]byte(t.Digest))
		l.Tools = append(l.Tools, out)
	}
	l.Digest = hex.EncodeToString(sum.Sum(nil))
	return l, nil
}

// pin returns the definition that a connector's tool is bound to.
func (g *Gateway) pin(ctx context.Context, row store.Connector, t keeper.Tool) (string, error) {
	if d, ok := row.Pins[t.Name]; ok {
		return d, nil
	}
	return g.db.PinTool(ctx, row.Workspace, row.ID, t.Name, t.Digest)
}

func serverError(server string, err error) error {
	var ce *keeper.ConnectError
	if errors.As(err, &ce) {
		return &ServerError{Server: server, Auth: ce.Auth, Err: ce.Err}
	}
	return err
}
