package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"
)

// Agent is one version of an agent; Body is the wire object.
type Agent struct {
	Workspace  WorkspaceID
	ID         AgentID
	Version    int
	Name       string
	Body       json.RawMessage // of this version; the times in it may be older than the row's
	CreatedAt  time.Time
	UpdatedAt  time.Time // of this version
	ArchivedAt time.Time
}

const agentColumns = `a.workspace, a.id, v.version, v.name, v.body, a.created_at, v.updated_at, a.archived_at`

func scanAgent(r interface{ Scan(...any) error }) (Agent, error) {
	var a Agent
	var body []byte
	var created, updated, archived int64
	err := r.Scan(&a.Workspace, &a.ID, &a.Version, &a.Name, &body, &created, &updated, &archived)
	a.Body = body
	a.CreatedAt, a.UpdatedAt, a.ArchivedAt = fromMicros(created), fromMicros(updated), fromMicros(archived)
	return a, err
}

// CreateAgent writes version 1 of an agent.
func (db *DB) CreateAgent(ctx context.Context, a Agent) (Agent, error) {
	err := db.tx(ctx, func(t *tx) error {
		if _, err := t.exec(`INSERT INTO agents (workspace, id, version, name, created_at, updated_at) VALUES (?, ?, ?, ?, ?, ?)`,
			a.Workspace, a.ID, a.Version, a.Name, micros(a.CreatedAt), micros(a.UpdatedAt)); err != nil {
			return err
		}
		if err := addAgentVersion(t, a); err != nil {
			return err
		}
		return db.written(ctx, t, a)
	})
	if err != nil {
		return Agent{}, fmt.Errorf("create agent %s: %w", a.ID, err)
	}
	return a, nil
}

func addAgentVersion(t *tx, a Agent) error {
	_, err := t.exec(`INSERT INTO agent_versions (workspace, id, version, name, body, updated_at) VALUES (?, ?, ?, ?, ?, ?)`,
		a.Workspace, a.ID, a.Version, a.Name, []byte(a.Body), micros(a.UpdatedAt))
	return err
}

// Agent returns a version of an agent; version 0 is the newest.
func (db *DB) Agent(ctx context.Context, ws WorkspaceID, id AgentID, version int) (Agent, error) {
	var a Agent
	err := db.read(ctx, func(t *tx) error {
		var err error
		a, err = t.agent(ws, id, version)
		return err
	})
	if err != nil {
		return Agent{}, fmt.Errorf("agent %s: %w", id, err)
	}
	return a, nil
}

func (t *tx) agent(ws WorkspaceID, id AgentID, version int) (Agent, error) {
	const from = `SELECT ` + agentColumns + ` FROM agents a JOIN agent_versions v
		ON v.workspace = a.workspace AND v.id = a.id AND v.version = `
	var row oneRow
	if version == 0 {
		row = t.queryRow(from+`a.version WHERE a.workspace = ? AND a.id = ?`, ws, id)
	} else {
		row = t.queryRow(from+`? WHERE a.workspace = ? AND a.id = ?`, version, ws, id)
	}
	a, err := scanAgent(row)
	return a, notFound(err)
}

// Agents lists agents at their newest versions, newest first.
func (db *DB) Agents(ctx context.Context, ws WorkspaceID, p Page) ([]Agent, error) {
	w := where{}
	w.add("a.workspace = ?", ws)
	tail := w.page(p, "a.")
	var out []Agent
	err := db.read(ctx, func(t *tx) error {
		out = nil
		return t.each(`SELECT `+agentColumns+` FROM agents a JOIN agent_versions v
			ON v.workspace = a.workspace AND v.id = a.id AND v.version = a.version`+tail, w.args, func(r *sql.Rows) error {
			a, err := scanAgent(r)
			out = append(out, a)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list agents: %w", err)
	}
	return out, nil
}

// AgentVersions lists the versions of an agent below before (0 = from the
// newest), newest first. ErrNotFound when there is no such agent.
func (db *DB) AgentVersions(ctx context.Context, ws WorkspaceID, id AgentID, before, limit int) ([]Agent, error) {
	w := where{}
	w.add("a.workspace = ? AND a.id = ?", ws, id)
	if before > 0 {
		w.add("v.version < ?", before)
	}
	var out []Agent
	err := db.read(ctx, func(t *tx) error {
		out = nil
		if _, err := t.agent(ws, id, 0); err != nil {
			return err
		}
		return t.each(`SELECT `+agentColumns+` FROM agents a JOIN agent_versions v
			ON v.workspace = a.workspace AND v.id = a.id`+w.sql()+` ORDER BY v.version DESC`+w.limit(limit), w.args, func(r *sql.Rows) error {
			a, err := scanAgent(r)
			out = append(out, a)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list versions of agent %s: %w", id, err)
	}
	return out, nil
}

// UpdateAgent replaces the newest version of an agent by what change makes of
// it. change is pure and may run twice; its error refuses. A higher Version is
// written as a new one and leaves the old bodies alone; an equal one changes
// only ArchivedAt.
func (db *DB) UpdateAgent(ctx context.Context, ws WorkspaceID, id AgentID, change func(Agent) (Agent, error)) (Agent, error) {
	var out Agent
	err := db.tx(ctx, func(t *tx) error {
		old, err := t.agent(ws, id, 0)
		if err != nil {
			return err
		}
		a, err := change(old)
		if err != nil {
			return err
		}
		if a.Version > old.Version {
			if err := addAgentVersion(t, a); err != nil {
				return err
			}
		}
		if _, err := t.exec(`UPDATE agents SET version = ?, name = ?, updated_at = ?, archived_at = ? WHERE workspace = ? AND id = ?`,
			a.Version, a.Name, micros(a.UpdatedAt), micros(a.ArchivedAt), ws, id); err != nil {
			return err
		}
		out = a
		return db.written(ctx, t, a)
	})
	if err != nil {
		return Agent{}, fmt.Errorf("update agent %s: %w", id, err)
	}
	return out, nil
}
