package server

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

// created is what the record of a creation keeps: the id to read the object by.
type created struct {
	ID string `json:"id"`
}

// wireSession is the session object at a time. inDoubt counts its effects in doubt.
func wireSession(s store.Session, now time.Time, inDoubt int64) (api.Session, error) {
	c := s.Config
	w := api.Session{ID: string(s.ID), Status: api.SessionStatus(s.Status), EnvironmentID: string(c.EnvironmentID), Title: c.Title,
		Metadata: c.Metadata, VaultIDs: api.List[string]{}, CreatedAt: api.At(s.CreatedAt), UpdatedAt: api.At(s.UpdatedAt),
		ArchivedAt: api.AtOrNull(s.ArchivedAt), Stats: sessionStats(s, now), Usage: sessionUsage(s, now),
		Planaria: &api.SessionExtension{Paused: s.Paused, HeadSeq: int64(s.Head), InDoubt: inDoubt, Damaged: s.Damaged,
			WakeAt: api.AtOrNull(s.WakeAt), Parent: string(s.Parent), ForkSeq: int64(s.ForkSeq)}}
	for _, v := range c.VaultIDs {
		w.VaultIDs = append(w.VaultIDs, string(v))
	}
	if c.DeploymentID != "" {
		w.DeploymentID = &c.DeploymentID
	}
	for _, part := range []struct {
		raw  json.RawMessage
		into any
	}{{c.Agent, &w.Agent}, {c.Resources, &w.Resources}, {c.Budget, &w.Budget}, {s.StopReason, &w.Planaria.StopReason}} {
		if len(part.raw) == 0 {
			continue
		}
		if err := api.Decode(part.raw, part.into); err != nil {
			return w, fmt.Errorf("read session %s: %w", s.ID, internal(err))
		}
	}
	return w, nil
}

// active is the time that a session ran, up to now.
func active(s store.Session, now time.Time) float64 {
	us := s.Usage.ActiveMicros
	if !s.RunningSince.IsZero() && now.After(s.RunningSince) {
		us += now.Sub(s.RunningSince).Microseconds()
	}
	return float64(us) / 1e6
}

func duration(s store.Session, now time.Time) float64 {
	if !s.TerminatedAt.IsZero() {
		now = s.TerminatedAt
	}
	return float64(max(0, now.Sub(s.CreatedAt).Microseconds())) / 1e6
}

func sessionStats(s store.Session, now time.Time) api.SessionStats {
	return api.SessionStats{ActiveSeconds: active(s, now), DurationSeconds: duration(s, now)}
}

func sessionUsage(s store.Session, now time.Time) api.Usage {
	cost := api.USD(s.Usage.CostNanoUSD)
	return api.Usage{InputTokens: s.Usage.Input, OutputTokens: s.Usage.Output, CacheReadInputTokens: s.Usage.CacheRead,
		CacheCreation: api.CacheCreation{Ephemeral5m: s.Usage.CacheCreation5m, Ephemeral1h: s.Usage.CacheCreation1h},
		ActiveSeconds: active(s, now), ListCost: &cost}
}

// show is wireSession with what has to be asked for.
func (s *server) show(ctx context.Context, x store.Session) (any, error) {
	counts, err := s.db.InDoubt(ctx, x.Workspace, []store.SessionID{x.ID})
	if err != nil {
		return nil, err
	}
	return wireSession(x, s.db.Now(), counts[x.ID])
}

// session reads a session of the caller's workspace.
func (s *server) session(ctx context.Context, c *call) (store.Session, error) {
	return s.sessionByID(ctx, c, c.id("session"))
}

func (s *server) sessionByID(ctx context.Context, c *call, id string) (store.Session, error) {
	x, err := s.db.Session(ctx, c.caller.ws(), store.SessionID(id))
	return x, missing(err, "session", id)
}

func (s *server) createSession(ctx context.Context, c *call) (any, error) {
	var req api.SessionCreate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	p, err := s.createParams(ctx, c, req)
	if err != nil {
		return nil, err
	}
	c.keeps(func(result any) (any, error) {
		x, ok := result.(store.Session)
		if !ok {
			return nil, nil
		}
		return created{string(x.ID)}, nil
	})
	x, err := s.sessions.Create(ctx, c.caller.ws(), c.caller.ID, p)
	if err != nil {
		return nil, err
	}
	return wireSession(x, s.db.Now(), 0)
}

// createdSession answers a creation that was done before.
func (s *server) createdSession(ctx context.Context, c *call) (any, error) {
	id, err := c.keptID()
	if err != nil {
		return nil, err
	}
	x, err := s.sessionByID(ctx, c, id)
	if err != nil {
		return nil, err
	}
	return s.show(ctx, x)
}

// keptID is the id that the record of a creation kept.
func (c *call) keptID() (string, error) {
	var was created
	if err := json.Unmarshal(c.kept, &was); err != nil {
		return "", fmt.Errorf("read idempotency record: %w", err)
	}
	return was.ID, nil
}

// createParams looks up what the request names, in the caller's workspace.
func (s *server) createParams(ctx context.Context, c *call, req api.SessionCreate) (session.CreateParams, error) {
	p := session.CreateParams{Title: req.Title, Metadata: req.Metadata, EnvironmentID: store.EnvironmentID(req.EnvironmentID)}
	var err error
	if p.Agent, err = s.snapshot(ctx, c, req.Agent); err != nil {
		return p, err
	}
	if p.Environment, err = s.environmentConfig(ctx, c, req.EnvironmentID); err != nil {
		return p, err
	}
	for i, id := range req.VaultIDs {
		v, err := s.db.Vault(ctx, c.caller.ws(), store.VaultID(plainID(id)))
		if err != nil {
			return p, missing(err, "vault", id)
		}
		if !v.ArchivedAt.IsZero() {
			return p, api.Invalid(fmt.Sprintf("vault_ids[%d]", i), "vault %s is archived; leave it out", id)
		}
		p.VaultIDs = append(p.VaultIDs, v.ID)
	}
	if err := s.attach(ctx, c, req.Resources, &p); err != nil {
		return p, err
	}
	if req.Budget != nil {
		if p.Budget, err = api.Encode(req.Budget); err != nil {
			return p, err
		}
	}
	if err := s.showable(ctx, c, "initial_events", req.InitialEvents); err != nil {
		return p, err
	}
	p.InitialEvents, err = bodies(req.InitialEvents)
	return p, err
}

// bodies encodes validated client events as the log keeps them.
func bodies(events api.ClientEvents) ([]json.RawMessage, error) {
	out := make([]json.RawMessage, 0, len(events))
	for _, e := range events {
		b, err := api.MarshalBody(e)
		if err != nil {
			return nil, fmt.Errorf("encode event: %w", err)
		}
		out = append(out, b)
	}
	return out, nil
}

func (s *server) snapshot(ctx context.Context, c *call, ref api.AgentRef) (json.RawMessage, error) {
	version := 0
	if ref.Version != nil {
		version = int(*ref.Version)
	}
	row, err := s.db.Agent(ctx, c.caller.ws(), store.AgentID(plainID(ref.ID)), version)
	if err != nil {
		if version > 0 {
			return nil, missing(err, "agent version", ref.ID+"@"+strconv.Itoa(version))
		}
		return nil, missing(err, "agent", ref.ID)
	}
	if !row.ArchivedAt.IsZero() {
		return nil, api.Invalid("agent", "agent %s is archived and starts no new sessions; use another one", ref.ID)
	}
	a, err := wireAgent(row)
	if err != nil {
		return nil, err
	}
	snap, err := api.Snapshot(a, ref.Overrides)
	if err != nil {
		return nil, err
	}
	return api.Encode(snap)
}

func (s *server) environmentConfig(ctx context.Context, c *call, id string) (json.RawMessage, error) {
	row, err := s.db.Environment(ctx, c.caller.ws(), store.EnvironmentID(plainID(id)))
	if err != nil {
		return nil, missingEnvironment(err, id)
	}
	if !row.ArchivedAt.IsZero() {
		return nil, api.Coded(api.ErrInvalidRequest, api.CodeEnvironmentArchived,
			"environment_id: environment %s is archived and takes no new sessions; use another one", id)
	}
	e, err := wireEnvironment(row)
	if err != nil {
		return nil, err
	}
	return api.Encode(e.Config)
}

func (s *server) getSession(ctx context.Context, c *call) (any, error) {
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	return s.show(ctx, x)
}

func (s *server) updateSession(ctx context.Context, c *call) (any, error) {
	var req api.SessionUpdate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	p, err := updateParams(x, req)
	if err != nil {
		return nil, err
	}
	upd, err := s.sessions.Update(ctx, c.caller.ws(), x.ID, p)
	if err != nil {
		return nil, missing(err, "session", string(x.ID))
	}
	return s.show(ctx, upd)
}

// updateParams checks an update against the session as it is now; session
// checks it again under its lock.
func updateParams(x store.Session, req api.SessionUpdate) (session.UpdateParams, error) {
	var p session.UpdateParams
	cur, err := wireSession(x, x.UpdatedAt, 0)
	if err != nil {
		return p, err
	}
	spent, err := strconv.ParseInt(api.USD(x.Usage.CostNanoUSD).Amount, 10, 64)
	if err != nil {
		return p, fmt.Errorf("read cost of session %s: %w", x.ID, err)
	}
	upd, _, err := api.ApplySessionUpdate(api.SessionConfig{Title: cur.Title, Metadata: cur.Metadata, Agent: cur.Agent, Budget: cur.Budget}, req, spent)
	if err != nil {
		return p, err
	}
	if req.Title.IsSet() {
		p.Title, p.NoTitle = upd.Title, upd.Title == nil
	}
	p.Metadata, _ = req.Metadata.Get()
	if a, ok := req.Agent.Get(); ok {
		if a.Tools.IsSet() {
			if p.Tools, err = api.Encode(upd.Agent.Tools); err != nil {
				return p, err
			}
		}
		if a.MCPServers.IsSet() {
			if p.MCPServers, err = api.Encode(upd.Agent.MCPServers); err != nil {
				return p, err
			}
		}
	}
	if req.Budget.IsSet() {
		p.Budget, err = api.Encode(upd.Budget)
	}
	return p, err
}

func (s *server) archiveSession(ctx context.Context, c *call) (any, error) {
	return s.sessionOp(ctx, c, func(id store.SessionID) (store.Session, error) {
		return s.sessions.Archive(ctx, c.caller.ws(), id, c.caller.ID)
	})
}

func (s *server) pauseSession(ctx context.Context, c *call) (any, error) {
	return s.sessionOp(ctx, c, func(id store.SessionID) (store.Session, error) {
		return s.sessions.Pause(ctx, c.caller.ws(), id, c.caller.ID)
	})
}

func (s *server) resumeSession(ctx context.Context, c *call) (any, error) {
	return s.sessionOp(ctx, c, func(id store.SessionID) (store.Session, error) {
		return s.sessions.Resume(ctx, c.caller.ws(), id, c.caller.ID)
	})
}

func (s *server) sessionOp(ctx context.Context, c *call, op func(store.SessionID) (store.Session, error)) (any, error) {
	id := c.id("session")
	x, err := op(store.SessionID(id))
	if err != nil {
		return nil, missing(err, "session", id)
	}
	return s.show(ctx, x)
}

func (s *server) deleteSession(ctx context.Context, c *call) (any, error) {
	id := c.id("session")
	if err := s.sessions.Delete(ctx, c.caller.ws(), store.SessionID(id), c.caller.ID); err != nil {
		return nil, missing(err, "session", id)
	}
	return api.Deleted{ID: id, Type: api.DeletedSession}, nil
}

// sessionFilter reads the filters of reference section 1.7. none says that
// nothing can match.
func (q query) sessionFilter() (f store.SessionFilter, sp span, none bool, err error) {
	if sp, err = q.span("created_at"); err != nil {
		return f, sp, false, err
	}
	f.CreatedGT, f.CreatedGTE, f.CreatedLT, f.CreatedLTE = sp.gt, sp.gte, sp.lt, sp.lte
	if f.IncludeArchived, err = q.flag("include_archived"); err != nil {
		return f, sp, false, err
	}
	if id := q.get("agent_id"); id != "" {
		f.AgentID = store.AgentID(plainID(id))
	}
	if v := q.get("agent_version"); v != "" {
		if f.AgentVersion, err = strconv.Atoi(v); err != nil || f.AgentVersion < 1 {
			return f, sp, false, api.Invalid("agent_version", "must be a number from 1")
		}
		if f.AgentID == "" {
			return f, sp, false, api.Invalid("agent_version", "needs agent_id")
		}
	}
	for _, st := range q.list("statuses") {
		switch store.Status(st) {
		case store.StatusIdle, store.StatusRunning, store.StatusRescheduling, store.StatusTerminated:
			f.Statuses = append(f.Statuses, store.Status(st))
		default:
			return f, sp, false, api.Invalid("statuses", "%q is not a status; use idle, running, rescheduling or terminated", st)
		}
	}
	// Deployments and memory stores are not here yet, so no session has one.
	none = q.get("deployment_id") != "" || q.get("memory_store_id") != ""
	return f, sp, none, nil
}

// maxSessionPage is the largest page of sessions.
const maxSessionPage = 100

// listSessions walks both ways: a cursor says in which direction it leads.
func (s *server) listSessions(ctx context.Context, c *call) (any, error) {
	limit, err := c.query.limit(20, maxSessionPage)
	if err != nil {
		return nil, err
	}
	order, err := c.query.order("desc")
	if err != nil {
		return nil, err
	}
	f, sp, none, err := c.query.sessionFilter()
	if err != nil {
		return nil, err
	}
	at, err := c.query.cursor("sessions", order)
	if err != nil {
		return nil, err
	}
	out := api.SessionPage{Data: api.List[api.Session]{}}
	if none {
		return out, nil
	}
	f.Asc, f.Limit = order == "asc", limit+1
	back := at != nil && at.Back
	if at != nil {
		if !sp.covers(at.at()) {
			return nil, api.Invalid("page", "lies outside of the created_at filter; start again without page")
		}
		f.AfterAt, f.AfterID, f.Asc = at.at(), store.SessionID(at.ID), f.Asc != back
	}
	rows, err := s.db.Sessions(ctx, c.caller.ws(), f)
	if err != nil {
		return nil, err
	}
	more := len(rows) > limit
	rows = rows[:min(len(rows), limit)]
	if back {
		slices.Reverse(rows)
	}
	if len(rows) > 0 {
		first, last := rows[0], rows[len(rows)-1]
		if more || back {
			out.NextPage = next(sessionCursor(order, last, false))
		}
		if at != nil && (!back || more) {
			out.PrevPage = next(sessionCursor(order, first, true))
		}
	}
	out.Data, err = s.showAll(ctx, c, rows)
	return out, err
}

func sessionCursor(order string, x store.Session, back bool) cursor {
	return cursor{List: "sessions", Order: order, At: x.CreatedAt.UnixMicro(), ID: string(x.ID), Back: back}
}

func (s *server) showAll(ctx context.Context, c *call, rows []store.Session) (api.List[api.Session], error) {
	ids := make([]store.SessionID, len(rows))
	for i, x := range rows {
		ids[i] = x.ID
	}
	counts, err := s.db.InDoubt(ctx, c.caller.ws(), ids)
	if err != nil {
		return nil, err
	}
	out, now := api.List[api.Session]{}, s.db.Now()
	for _, x := range rows {
		w, err := wireSession(x, now, counts[x.ID])
		if err != nil {
			return nil, err
		}
		out = append(out, w)
	}
	return out, nil
}
