package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
)

func wireConnector(r store.Connector) (api.Connector, error) {
	var w api.Connector
	if err := api.Decode(r.Body, &w); err != nil {
		return w, fmt.Errorf("read connector %s: %w", r.ID, internal(err))
	}
	w.Digests = r.Pins
	return w, nil
}

func (s *server) createConnector(ctx context.Context, c *call) (any, error) {
	var req api.ConnectorCreate
	if err := api.DecodeStrict(c.body, &req); err != nil {
		return nil, err
	}
	w, err := api.ResolveConnector(req)
	if err != nil {
		return nil, err
	}
	url, err := api.NormalizeURL(w.URL)
	if err != nil {
		return nil, api.Invalid("url", "is not a URL")
	}
	now := s.db.Now()
	w.ID, w.CreatedAt, w.UpdatedAt = store.NewID("conn_", now), api.At(now), api.At(now)
	body, err := api.Encode(w)
	if err != nil {
		return nil, err
	}
	c.keeps(as(wireConnector))
	row, err := s.db.CreateConnector(ctx, store.Connector{Workspace: c.caller.ws(), ID: store.ConnectorID(w.ID), Name: w.Name,
		Version: 1, URL: url, Body: body, CreatedAt: now, UpdatedAt: now})
	if errors.Is(err, store.ErrDuplicate) {
		return nil, api.NewError(api.ErrConflict, "a connector named %q exists already; update that one or choose another name", w.Name)
	}
	if err != nil {
		return nil, err
	}
	return wireConnector(row)
}

func (s *server) listConnectors(ctx context.Context, c *call) (any, error) {
	p, limit, err := c.query.page("connectors")
	if err != nil {
		return nil, err
	}
	rows, err := s.db.Connectors(ctx, c.caller.ws(), p)
	if err != nil {
		return nil, err
	}
	return pageOf("connectors", rows, limit, wireConnector,
		func(r store.Connector) (time.Time, string) { return r.CreatedAt, string(r.ID) })
}

func (s *server) getConnector(ctx context.Context, c *call) (any, error) {
	id := c.id("connector")
	r, err := s.db.Connector(ctx, c.caller.ws(), store.ConnectorID(id))
	if err != nil {
		return nil, missing(err, "connector", id)
	}
	return wireConnector(r)
}

// updateConnector binds the tools anew when they are given, changed or not:
// the operator has looked at them, so a quarantine ends.
func (s *server) updateConnector(ctx context.Context, c *call) (any, error) {
	var req api.ConnectorUpdate
	if err := api.DecodeStrict(c.body, &req); err != nil {
		return nil, err
	}
	id := c.id("connector")
	c.keeps(as(wireConnector))
	row, err := s.db.UpdateConnector(ctx, c.caller.ws(), store.ConnectorID(id), func(r store.Connector) (store.Connector, error) {
		old, err := wireConnector(r)
		if err != nil {
			return r, err
		}
		upd, changed, err := api.ApplyConnectorUpdate(old, req)
		if err != nil {
			return r, err
		}
		if req.Tools.IsSet() || upd.URL != old.URL {
			r.Pins = map[string]string{}
		}
		if !changed {
			return r, nil
		}
		if r.URL, err = api.NormalizeURL(upd.URL); err != nil {
			return r, api.Invalid("url", "is not a URL")
		}
		now := s.db.Now()
		upd.UpdatedAt, upd.Digests = api.At(now), nil
		r.Version, r.UpdatedAt = int(upd.Version), now
		r.Body, err = api.Encode(upd)
		return r, err
	})
	if err != nil {
		return nil, missing(err, "connector", id)
	}
	return wireConnector(row)
}

func (s *server) deleteConnector(ctx context.Context, c *call) (any, error) {
	id := c.id("connector")
	if err := s.db.DeleteConnector(ctx, c.caller.ws(), store.ConnectorID(id)); err != nil {
		return nil, missing(err, "connector", id)
	}
	return api.Deleted{ID: id, Type: api.DeletedConnector}, nil
}
