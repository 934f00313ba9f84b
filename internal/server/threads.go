package server

import (
	"context"
	"slices"
	"strconv"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
)

// Every session has its primary thread and, in this version, no other.

func (s *server) wireThread(x store.Session) (api.Thread, error) {
	now := s.db.Now()
	w, err := wireSession(x, now, 0)
	if err != nil {
		return api.Thread{}, err
	}
	t := api.Thread{ID: string(x.Thread), SessionID: string(x.ID), Status: w.Status, CreatedAt: w.CreatedAt, UpdatedAt: w.UpdatedAt}
	if idled := len(x.StopReason) > 0; idled || x.Status != store.StatusIdle {
		t.Stats = &api.ThreadStats{ActiveSeconds: w.Stats.ActiveSeconds, DurationSeconds: w.Stats.DurationSeconds}
		if idled {
			t.Usage = &w.Usage
		}
	}
	if !x.ArchivedAt.IsZero() {
		t.ArchivedAt = w.ArchivedAt
	}
	return t, t.SetAgent(w.Agent)
}

func (s *server) listThreads(ctx context.Context, c *call) (any, error) {
	limit, err := c.query.limit(1000, 1000)
	if err != nil {
		return nil, err
	}
	if _, err := c.query.cursor("threads", strconv.Itoa(limit)); err != nil {
		return nil, err
	}
	statuses := c.query.list("statuses")
	for _, st := range statuses {
		switch store.Status(st) {
		case store.StatusIdle, store.StatusRunning, store.StatusRescheduling, store.StatusTerminated:
		default:
			return nil, api.Invalid("statuses", "%q is not a status; use idle, running, rescheduling or terminated", st)
		}
	}
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	t, err := s.wireThread(x)
	if err != nil {
		return nil, err
	}
	out := api.Page[api.Thread]{Data: api.List[api.Thread]{}}
	if len(statuses) == 0 || slices.Contains(statuses, string(t.Status)) {
		out.Data = append(out.Data, t)
	}
	return out, nil
}

// thread reads the session and checks that the thread is its own.
func (s *server) thread(ctx context.Context, c *call) (store.Session, error) {
	x, err := s.session(ctx, c)
	if err != nil {
		return x, err
	}
	if id := c.id("thread"); id != string(x.Thread) {
		return x, api.Missing("session thread", id)
	}
	return x, nil
}

func (s *server) getThread(ctx context.Context, c *call) (any, error) {
	x, err := s.thread(ctx, c)
	if err != nil {
		return nil, err
	}
	return s.wireThread(x)
}

func (s *server) archiveThread(ctx context.Context, c *call) (any, error) {
	if _, err := s.thread(ctx, c); err != nil {
		return nil, err
	}
	return nil, api.Invalid("", "the primary thread ends with its session; archive the session")
}

func (s *server) listThreadEvents(ctx context.Context, c *call) (any, error) {
	q, err := c.query.eventQuery("events of " + c.id("thread"))
	if err != nil {
		return nil, err
	}
	x, err := s.thread(ctx, c)
	if err != nil {
		return nil, err
	}
	return s.events(ctx, x, q)
}
