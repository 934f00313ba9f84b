package server

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/store"
)

// What an operator looks at: keys, workspaces, usage, audit, nodes.

func wireAPIKey(k store.APIKey) (api.APIKey, error) {
	return api.APIKey{ID: string(k.ID), WorkspaceID: string(k.Workspace), Name: k.Name, Role: api.Role(k.Role), Hint: k.Last4,
		CreatedAt: api.At(k.CreatedAt), ExpiresAt: api.AtOrNull(k.ExpiresAt), RevokedAt: api.AtOrNull(k.RevokedAt), LastUsedAt: api.AtOrNull(k.LastUsedAt)}, nil
}

// createAPIKey shows the key in this answer and never again: not even the
// record of this request keeps it.
func (s *server) createAPIKey(ctx context.Context, c *call) (any, error) {
	var req api.APIKeyCreate
	if err := api.DecodeStrict(c.body, &req); err != nil {
		return nil, err
	}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	if err := noNUL("name", req.Name); err != nil {
		return nil, err
	}
	ws := c.caller.ws()
	if req.WorkspaceID != "" && req.WorkspaceID != string(ws) {
		// A key for another workspace is an act on the installation.
		if err := policy.Check(c.caller.Principal, policy.WorkspacesWrite, policy.Resource{Workspace: c.caller.Workspace}); err != nil {
			return nil, api.Missing("workspace", req.WorkspaceID)
		}
		ws = store.WorkspaceID(plainID(req.WorkspaceID))
	}
	now := s.db.Now()
	k := store.APIKey{Workspace: ws, ID: store.APIKeyID(store.NewID("apikey_", now)), Name: req.Name, Role: string(req.Role),
		CreatedBy: c.caller.ID, CreatedAt: now}
	if req.ExpiresAt != nil {
		if k.ExpiresAt = req.ExpiresAt.Time; !k.ExpiresAt.After(now) {
			return nil, api.Invalid("expires_at", "must lie in the future")
		}
	}
	c.keeps(func(result any) (any, error) {
		k, ok := result.(store.APIKey)
		if !ok {
			return nil, nil
		}
		return createdKey{string(k.Workspace), string(k.ID)}, nil
	})
	key := store.NewKey()
	k, err := s.db.CreateAPIKey(ctx, k, key)
	if err != nil {
		return nil, missing(err, "workspace", string(ws))
	}
	w, err := wireAPIKey(k)
	w.Key = api.Secret(key)
	return w, err
}

// createdKey is what the record of a key's creation keeps.
type createdKey struct {
	Workspace string `json:"workspace"`
	ID        string `json:"id"`
}

// createdAPIKey answers a creation that was done before, without the key.
func (s *server) createdAPIKey(ctx context.Context, c *call) (any, error) {
	var was createdKey
	if err := json.Unmarshal(c.kept, &was); err != nil {
		return nil, fmt.Errorf("read idempotency record: %w", err)
	}
	k, err := s.db.APIKey(ctx, store.WorkspaceID(was.Workspace), store.APIKeyID(was.ID))
	if err != nil {
		return nil, missing(err, "api key", was.ID)
	}
	return wireAPIKey(k)
}

func (s *server) listAPIKeys(ctx context.Context, c *call) (any, error) {
	p, limit, err := c.query.page("api keys")
	if err != nil {
		return nil, err
	}
	rows, err := s.db.APIKeys(ctx, c.caller.ws(), p)
	if err != nil {
		return nil, err
	}
	return pageOf("api keys", rows, limit, wireAPIKey, func(k store.APIKey) (time.Time, string) { return k.CreatedAt, string(k.ID) })
}

func (s *server) getAPIKey(ctx context.Context, c *call) (any, error) {
	id := c.id("api_key")
	k, err := s.db.APIKey(ctx, c.caller.ws(), store.APIKeyID(id))
	if err != nil {
		return nil, missing(err, "api key", id)
	}
	return wireAPIKey(k)
}

func (s *server) revokeAPIKey(ctx context.Context, c *call) (any, error) {
	id := c.id("api_key")
	if _, err := s.db.RevokeAPIKey(ctx, c.caller.ws(), store.APIKeyID(id), string(policy.RoleAdmin)); err != nil {
		return nil, missing(err, "api key", id)
	}
	return api.Deleted{ID: id, Type: api.DeletedAPIKey}, nil
}

func wireWorkspace(w store.Workspace) (api.Workspace, error) {
	return api.Workspace{ID: string(w.ID), Name: w.Name, CreatedAt: api.At(w.CreatedAt), ArchivedAt: api.AtOrNull(w.ArchivedAt)}, nil
}

func (s *server) createWorkspace(ctx context.Context, c *call) (any, error) {
	var req api.WorkspaceCreate
	if err := api.DecodeStrict(c.body, &req); err != nil {
		return nil, err
	}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	if err := noNUL("name", req.Name); err != nil {
		return nil, err
	}
	now := s.db.Now()
	c.keeps(as(wireWorkspace))
	w, err := s.db.CreateWorkspace(ctx, store.Workspace{ID: store.WorkspaceID(store.NewID("wrkspc_", now)), Name: req.Name, CreatedAt: now})
	if err != nil {
		return nil, err
	}
	return wireWorkspace(w)
}

func (s *server) listWorkspaces(ctx context.Context, c *call) (any, error) {
	p, limit, err := c.query.page("workspaces")
	if err != nil {
		return nil, err
	}
	rows, err := s.db.Workspaces(ctx, p)
	if err != nil {
		return nil, err
	}
	return pageOf("workspaces", rows, limit, wireWorkspace, func(w store.Workspace) (time.Time, string) { return w.CreatedAt, string(w.ID) })
}

func (s *server) getWorkspace(ctx context.Context, c *call) (any, error) {
	id := c.id("workspace")
	w, err := s.db.Workspace(ctx, store.WorkspaceID(id))
	if err != nil {
		return nil, missing(err, "workspace", id)
	}
	return wireWorkspace(w)
}

// usage sums what was metered, by model, session, agent or day.
func (s *server) usage(ctx context.Context, c *call) (any, error) {
	limit, err := c.query.limit(100, 1000)
	if err != nil {
		return nil, err
	}
	f := store.UsageFilter{GroupBy: c.query.get("group_by"), Limit: limit + 1}
	switch f.GroupBy {
	case "":
		f.GroupBy = "model"
	case "model", "session", "agent", "day":
	default:
		return nil, api.Invalid("group_by", "must be model, session, agent or day")
	}
	if f.From, err = c.query.time("from"); err != nil {
		return nil, err
	}
	if f.To, err = c.query.time("to"); err != nil {
		return nil, err
	}
	list := "usage by " + f.GroupBy
	at, err := c.query.cursor(list, "asc")
	if err != nil {
		return nil, err
	}
	if at != nil {
		f.After = at.ID
	}
	rows, err := s.db.Usage(ctx, c.caller.ws(), f)
	if err != nil {
		return nil, err
	}
	out := api.Page[api.UsageRow]{Data: api.List[api.UsageRow]{}}
	if len(rows) > limit {
		rows = rows[:limit]
		out.NextPage = next(cursor{List: list, Order: "asc", ID: rows[limit-1].Group})
	}
	for _, r := range rows {
		out.Data = append(out.Data, wireUsage(r))
	}
	return out, nil
}

func wireUsage(r store.UsageSum) api.UsageRow {
	cost, wasted := api.USD(r.CostNanoUSD), api.USD(r.WastedCostNanoUSD)
	return api.UsageRow{Group: r.Group, ModelRequests: r.ModelRequests, Effects: r.Effects, WastedTokens: r.WastedTokens, WastedCost: &wasted,
		Usage: api.Usage{InputTokens: r.Input, OutputTokens: r.Output, CacheReadInputTokens: r.CacheRead, ListCost: &cost,
			CacheCreation: api.CacheCreation{Ephemeral5m: r.CacheCreation5m, Ephemeral1h: r.CacheCreation1h}}}
}

// auditRow is one link of an audit chain on the wire.
type auditRow struct {
	Type      string          `json:"type"` // audit_row
	ID        string          `json:"id"`
	Node      string          `json:"node"`
	Seq       int64           `json:"seq"`
	At        api.Time        `json:"at"`
	Principal string          `json:"principal"`
	Action    string          `json:"action"`
	Resource  string          `json:"resource"`
	Detail    json.RawMessage `json:"detail"`
	Prev      string          `json:"prev"` // hex of the former row's hash
	Hash      string          `json:"hash"`
}

func wireAudit(r store.AuditRow) (auditRow, error) {
	return auditRow{Type: "audit_row", ID: r.ID, Node: string(r.Node), Seq: r.Seq, At: api.At(r.At), Principal: r.Principal,
		Action: r.Action, Resource: r.Resource, Detail: r.Detail, Prev: hex.EncodeToString(r.Prev[:]), Hash: hex.EncodeToString(r.Hash[:])}, nil
}

func (s *server) audit(ctx context.Context, c *call) (any, error) {
	p, limit, err := c.query.page("audit")
	if err != nil {
		return nil, err
	}
	f := store.AuditFilter{Principal: c.query.text("principal"), Action: c.query.text("action"), Resource: c.query.text("resource"),
		CreatedGTE: p.CreatedGTE, CreatedLTE: p.CreatedLTE, AfterAt: p.AfterAt, AfterID: p.AfterID, Limit: p.Limit}
	rows, err := s.db.Audit(ctx, c.caller.ws(), f)
	if err != nil {
		return nil, err
	}
	return pageOf("audit", rows, limit, wireAudit, func(r store.AuditRow) (time.Time, string) { return r.At, r.ID })
}

// text is a filter by an id or name; empty when absent.
func (q query) text(name string) string {
	if v := q.get(name); v != "" {
		return plainID(v)
	}
	return ""
}

// maxNodes is how many nodes are listed, newest first; old ones are history.
const maxNodes = 100

// noLease: a lease that ends so far away is none (SQLite has no leases).
const noLease = 24 * time.Hour

func (s *server) listNodes(ctx context.Context, c *call) (any, error) {
	rows, err := s.db.Nodes(ctx, maxNodes)
	if err != nil {
		return nil, err
	}
	now := s.db.Now()
	out := api.Page[api.Node]{Data: api.List[api.Node]{}}
	for _, n := range rows {
		w := api.Node{ID: string(n.ID), Address: n.Address, Roles: n.Roles, Version: n.Version, StartedAt: api.At(n.JoinedAt),
			Sessions: n.Sessions}
		if n.Until.Sub(now) < noLease {
			w.Until = api.AtOrNull(n.Until)
		}
		w.Alive = n.LeftAt.IsZero() && n.DeadAt.IsZero() && (n.Until.IsZero() || n.Until.After(now))
		out.Data = append(out.Data, w)
	}
	return out, nil
}

// Bootstrap makes the workspace "default" and, in a store without API keys, its
// first admin key: the given one, or a new one when key is empty. A new key is
// returned to be shown once; made says whether a key was written.
func Bootstrap(ctx context.Context, db *store.DB, node store.NodeID, key string) (show string, made bool, err error) {
	if err := db.EnsureWorkspace(ctx, store.WorkspaceID(policy.HomeWorkspace), policy.HomeWorkspace); err != nil {
		return "", false, fmt.Errorf("make workspace: %w", err)
	}
	if len(key) > maxKey {
		return "", false, errors.New("the API key has more than 512 characters")
	}
	if key == "" {
		key = store.NewKey()
		show = key
	}
	now := db.Now()
	k := store.APIKey{Workspace: store.WorkspaceID(policy.HomeWorkspace), ID: store.APIKeyID(store.NewID("apikey_", now)),
		Name: store.BootstrapName, Role: string(policy.RoleAdmin), CreatedBy: "bootstrap", CreatedAt: now}
	ctx = store.WithAct(ctx, store.Act{Workspace: k.Workspace, Node: node, Principal: "bootstrap",
		Action: string(policy.APIKeysWrite), Resource: string(k.ID)})
	made, err = db.EnsureBootstrapKey(ctx, k, key)
	if err != nil || !made {
		return "", false, err
	}
	return show, true, nil
}
