package server

import (
	"context"
	"fmt"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
)

func wireEnvironment(e store.Environment) (api.Environment, error) {
	var w api.Environment
	if err := api.Decode(e.Body, &w); err != nil {
		return w, fmt.Errorf("read environment %s: %w", e.ID, internal(err))
	}
	w.ArchivedAt = api.AtOrNull(e.ArchivedAt)
	return w, nil
}

func (s *server) createEnvironment(ctx context.Context, c *call) (any, error) {
	var req api.EnvironmentCreate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	e, err := api.ResolveEnvironment(req)
	if err != nil {
		return nil, err
	}
	if err := noNUL("name", e.Name); err != nil {
		return nil, err
	}
	now := s.db.Now()
	e.ID, e.CreatedAt, e.UpdatedAt = store.NewID("env_", now), api.At(now), api.At(now)
	body, err := api.Encode(e)
	if err != nil {
		return nil, err
	}
	c.keeps(as(wireEnvironment))
	row, err := s.db.CreateEnvironment(ctx, store.Environment{Workspace: c.caller.ws(), ID: store.EnvironmentID(e.ID),
		Name: e.Name, Body: body, CreatedAt: now, UpdatedAt: now})
	if err != nil {
		return nil, err
	}
	return wireEnvironment(row)
}

func (s *server) listEnvironments(ctx context.Context, c *call) (any, error) {
	p, limit, err := c.query.page("environments")
	if err != nil {
		return nil, err
	}
	rows, err := s.db.Environments(ctx, c.caller.ws(), p)
	if err != nil {
		return nil, err
	}
	return pageOf("environments", rows, limit, wireEnvironment,
		func(e store.Environment) (time.Time, string) { return e.CreatedAt, string(e.ID) })
}

// missingEnvironment is the 404 with the error code that belongs to it.
func missingEnvironment(err error, id string) error {
	if e, ok := missing(err, "environment", id).(*api.Error); ok {
		return api.Coded(e.Type, api.CodeEnvironmentNotFound, "%s", e.Message)
	}
	return err
}

func (s *server) getEnvironment(ctx context.Context, c *call) (any, error) {
	id := c.id("environment")
	e, err := s.db.Environment(ctx, c.caller.ws(), store.EnvironmentID(id))
	if err != nil {
		return nil, missingEnvironment(err, id)
	}
	return wireEnvironment(e)
}

func (s *server) updateEnvironment(ctx context.Context, c *call) (any, error) {
	var req api.EnvironmentUpdate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	return s.changeEnvironment(ctx, c, func(e store.Environment) (store.Environment, error) {
		old, err := wireEnvironment(e)
		if err != nil {
			return e, err
		}
		upd, changed, err := api.ApplyEnvironmentUpdate(old, req)
		if err != nil || !changed {
			return e, err
		}
		if err := noNUL("name", upd.Name); err != nil {
			return e, err
		}
		now := s.db.Now()
		upd.UpdatedAt = api.At(now)
		e.Name, e.UpdatedAt = upd.Name, now
		e.Body, err = api.Encode(upd)
		return e, err
	})
}

func (s *server) archiveEnvironment(ctx context.Context, c *call) (any, error) {
	return s.changeEnvironment(ctx, c, func(e store.Environment) (store.Environment, error) {
		if e.ArchivedAt.IsZero() {
			e.ArchivedAt = s.db.Now()
		}
		return e, nil
	})
}

func (s *server) changeEnvironment(ctx context.Context, c *call, change func(store.Environment) (store.Environment, error)) (any, error) {
	id := c.id("environment")
	c.keeps(as(wireEnvironment))
	row, err := s.db.UpdateEnvironment(ctx, c.caller.ws(), store.EnvironmentID(id), change)
	if err != nil {
		return nil, missingEnvironment(err, id)
	}
	return wireEnvironment(row)
}

func (s *server) deleteEnvironment(ctx context.Context, c *call) (any, error) {
	id := c.id("environment")
	if err := s.db.DeleteEnvironment(ctx, c.caller.ws(), store.EnvironmentID(id)); err != nil {
		return nil, missingEnvironment(err, id)
	}
	return api.Deleted{ID: id, Type: api.DeletedEnvironment}, nil
}
