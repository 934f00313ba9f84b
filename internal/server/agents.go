package server

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
)

// wireAgent is the agent object of a row. The body is that of its version;
// archiving makes no version, so archived_at comes from the row.
func wireAgent(a store.Agent) (api.Agent, error) {
	var w api.Agent
	if err := api.Decode(a.Body, &w); err != nil {
		return w, fmt.Errorf("read agent %s: %w", a.ID, internal(err))
	}
	w.ArchivedAt = api.AtOrNull(a.ArchivedAt)
	return w, nil
}

// internal hides that an error about stored bytes is an *api.Error, which would
// blame the caller.
func internal(err error) error { return errors.New(err.Error()) }

// as adapts a function on rows to what a write of that row returns.
func as[R, W any](wire func(R) (W, error)) func(any) (any, error) {
	return func(result any) (any, error) {
		r, ok := result.(R)
		if !ok {
			return nil, nil
		}
		return wire(r)
	}
}

func (s *server) createAgent(ctx context.Context, c *call) (any, error) {
	var req api.AgentCreate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	a, err := api.ResolveAgent(req)
	if err != nil {
		return nil, err
	}
	if err := noNUL("name", a.Name); err != nil {
		return nil, err
	}
	now := s.db.Now()
	a.ID, a.CreatedAt, a.UpdatedAt = store.NewID("agent_", now), api.At(now), api.At(now)
	body, err := api.Encode(a)
	if err != nil {
		return nil, err
	}
	c.keeps(as(wireAgent))
	row, err := s.db.CreateAgent(ctx, store.Agent{Workspace: c.caller.ws(), ID: store.AgentID(a.ID), Version: 1,
		Name: a.Name, Body: body, CreatedAt: now, UpdatedAt: now})
	if err != nil {
		return nil, err
	}
	return wireAgent(row)
}

// missing says which object was not found; other errors pass.
func missing(err error, kind, id string) error {
	if errors.Is(err, store.ErrNotFound) {
		return api.Missing(kind, id)
	}
	return err
}

func (s *server) listAgents(ctx context.Context, c *call) (any, error) {
	p, limit, err := c.query.page("agents")
	if err != nil {
		return nil, err
	}
	rows, err := s.db.Agents(ctx, c.caller.ws(), p)
	if err != nil {
		return nil, err
	}
	return pageOf("agents", rows, limit, wireAgent, func(a store.Agent) (time.Time, string) { return a.CreatedAt, string(a.ID) })
}

func (s *server) getAgent(ctx context.Context, c *call) (any, error) {
	id, version := c.id("agent"), 0
	if v := c.query.get("version"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 {
			return nil, api.Invalid("version", "must be a number from 1")
		}
		version = n
	}
	a, err := s.db.Agent(ctx, c.caller.ws(), store.AgentID(id), version)
	if err != nil {
		if version > 0 {
			return nil, missing(err, "agent version", id+"@"+strconv.Itoa(version))
		}
		return nil, missing(err, "agent", id)
	}
	return wireAgent(a)
}

func (s *server) updateAgent(ctx context.Context, c *call) (any, error) {
	var req api.AgentUpdate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	id := c.id("agent")
	c.keeps(as(wireAgent))
	row, err := s.db.UpdateAgent(ctx, c.caller.ws(), store.AgentID(id), func(a store.Agent) (store.Agent, error) {
		old, err := wireAgent(a)
		if err != nil {
			return a, err
		}
		upd, changed, err := api.ApplyUpdate(old, req)
		if err != nil || !changed {
			return a, err
		}
		if err := noNUL("name", upd.Name); err != nil {
			return a, err
		}
		now := s.db.Now()
		upd.UpdatedAt = api.At(now)
		a.Version, a.Name, a.UpdatedAt = int(upd.Version), upd.Name, now
		a.Body, err = api.Encode(upd)
		return a, err
	})
	if err != nil {
		return nil, missing(err, "agent", id)
	}
	return wireAgent(row)
}

// archiveAgent is final; archiving twice keeps the first time.
func (s *server) archiveAgent(ctx context.Context, c *call) (any, error) {
	id := c.id("agent")
	c.keeps(as(wireAgent))
	row, err := s.db.UpdateAgent(ctx, c.caller.ws(), store.AgentID(id), func(a store.Agent) (store.Agent, error) {
		if a.ArchivedAt.IsZero() {
			a.ArchivedAt = s.db.Now()
		}
		return a, nil
	})
	if err != nil {
		return nil, missing(err, "agent", id)
	}
	return wireAgent(row)
}

func (s *server) listAgentVersions(ctx context.Context, c *call) (any, error) {
	limit, err := c.query.limit(20, 100)
	if err != nil {
		return nil, err
	}
	at, err := c.query.cursor("agent versions", "desc")
	if err != nil {
		return nil, err
	}
	id, before := c.id("agent"), 0
	if at != nil {
		before = int(at.N)
	}
	rows, err := s.db.AgentVersions(ctx, c.caller.ws(), store.AgentID(id), before, limit+1)
	if err != nil {
		return nil, missing(err, "agent", id)
	}
	var following *string
	if len(rows) > limit {
		rows = rows[:limit]
		following = next(cursor{List: "agent versions", Order: "desc", N: int64(rows[limit-1].Version)})
	}
	out, err := pageOf("agent versions", rows, limit, wireAgent, nil)
	out.NextPage = following
	return out, err
}
