package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"
)

// Environment is an environment; Body is the wire object.
type Environment struct {
	Workspace  WorkspaceID
	ID         EnvironmentID
	Name       string
	Body       json.RawMessage
	CreatedAt  time.Time
	UpdatedAt  time.Time
	ArchivedAt time.Time
}

const environmentColumns = `workspace, id, name, body, created_at, updated_at, archived_at`

func scanEnvironment(r interface{ Scan(...any) error }) (Environment, error) {
	var e Environment
	var body []byte
	var created, updated, archived int64
	err := r.Scan(&e.Workspace, &e.ID, &e.Name, &body, &created, &updated, &archived)
	e.Body = body
	e.CreatedAt, e.UpdatedAt, e.ArchivedAt = fromMicros(created), fromMicros(updated), fromMicros(archived)
	return e, err
}

// CreateEnvironment writes an environment. Names need not be unique.
func (db *DB) CreateEnvironment(ctx context.Context, e Environment) (Environment, error) {
	err := db.tx(ctx, func(t *tx) error {
		if _, err := t.exec(`INSERT INTO environments (workspace, id, name, body, created_at, updated_at) VALUES (?, ?, ?, ?, ?, ?)`,
			e.Workspace, e.ID, e.Name, []byte(e.Body), micros(e.CreatedAt), micros(e.UpdatedAt)); err != nil {
			return err
		}
		return db.written(ctx, t, e)
	})
	if err != nil {
		return Environment{}, fmt.Errorf("create environment %s: %w", e.ID, err)
	}
	return e, nil
}

// Environment returns an environment.
func (db *DB) Environment(ctx context.Context, ws WorkspaceID, id EnvironmentID) (Environment, error) {
	var e Environment
	err := db.read(ctx, func(t *tx) error {
		var err error
		e, err = t.environment(ws, id)
		return err
	})
	if err != nil {
		return Environment{}, fmt.Errorf("environment %s: %w", id, err)
	}
	return e, nil
}

func (t *tx) environment(ws WorkspaceID, id EnvironmentID) (Environment, error) {
	e, err := scanEnvironment(t.queryRow(`SELECT `+environmentColumns+` FROM environments WHERE workspace = ? AND id = ?`, ws, id))
	return e, notFound(err)
}

// Environments lists environments, newest first.
func (db *DB) Environments(ctx context.Context, ws WorkspaceID, p Page) ([]Environment, error) {
	w := where{}
	w.add("workspace = ?", ws)
	tail := w.page(p, "")
	var out []Environment
	err := db.read(ctx, func(t *tx) error {
		out = nil
		return t.each(`SELECT `+environmentColumns+` FROM environments`+tail, w.args, func(r *sql.Rows) error {
			e, err := scanEnvironment(r)
			out = append(out, e)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list environments: %w", err)
	}
	return out, nil
}

// UpdateEnvironment replaces an environment by what change makes of it. change
// is pure and may run twice; its error refuses.
func (db *DB) UpdateEnvironment(ctx context.Context, ws WorkspaceID, id EnvironmentID, change func(Environment) (Environment, error)) (Environment, error) {
	var out Environment
	err := db.tx(ctx, func(t *tx) error {
		old, err := t.environment(ws, id)
		if err != nil {
			return err
		}
		e, err := change(old)
		if err != nil {
			return err
		}
		if _, err := t.exec(`UPDATE environments SET name = ?, body = ?, updated_at = ?, archived_at = ? WHERE workspace = ? AND id = ?`,
			e.Name, []byte(e.Body), micros(e.UpdatedAt), micros(e.ArchivedAt), ws, id); err != nil {
			return err
		}
		out = e
		return db.written(ctx, t, e)
	})
	if err != nil {
		return Environment{}, fmt.Errorf("update environment %s: %w", id, err)
	}
	return out, nil
}

// DeleteEnvironment removes an environment. Sessions keep the copy they were
// created with.
func (db *DB) DeleteEnvironment(ctx context.Context, ws WorkspaceID, id EnvironmentID) error {
	err := db.tx(ctx, func(t *tx) error {
		n, err := t.exec(`DELETE FROM environments WHERE workspace = ? AND id = ?`, ws, id)
		if err != nil {
			return err
		}
		if n == 0 {
			return ErrNotFound
		}
		return db.written(ctx, t, nil)
	})
	if err != nil {
		return fmt.Errorf("delete environment %s: %w", id, err)
	}
	return nil
}
