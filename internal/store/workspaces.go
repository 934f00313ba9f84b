package store

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"
)

// Workspace is a tenant.
type Workspace struct {
	ID         WorkspaceID
	Name       string
	CreatedAt  time.Time
	ArchivedAt time.Time // its keys open nothing any more
}

const workspaceColumns = `id, name, created_at, archived_at`

func scanWorkspace(r interface{ Scan(...any) error }) (Workspace, error) {
	var w Workspace
	var created, archived int64
	err := r.Scan(&w.ID, &w.Name, &created, &archived)
	w.CreatedAt, w.ArchivedAt = fromMicros(created), fromMicros(archived)
	return w, notFound(err)
}

// CreateWorkspace writes a workspace with a fresh secret.
func (db *DB) CreateWorkspace(ctx context.Context, w Workspace) (Workspace, error) {
	wrapped, err := db.keys.master.Wrap(random(32))
	if err != nil {
		return Workspace{}, fmt.Errorf("wrap secret of workspace %s: %w", w.ID, err)
	}
	err = db.tx(ctx, func(t *tx) error {
		if _, err := t.exec(`INSERT INTO workspaces (id, name, secret_wrapped, created_at) VALUES (?, ?, ?, ?)`,
			w.ID, w.Name, wrapped, micros(w.CreatedAt)); err != nil {
			return err
		}
		return db.written(ctx, t, w)
	})
	if err != nil {
		return Workspace{}, fmt.Errorf("create workspace %s: %w", w.ID, err)
	}
	return w, nil
}

// Workspace returns a workspace.
func (db *DB) Workspace(ctx context.Context, id WorkspaceID) (Workspace, error) {
	var w Workspace
	err := db.read(ctx, func(t *tx) error {
		var err error
		w, err = scanWorkspace(t.queryRow(`SELECT `+workspaceColumns+` FROM workspaces WHERE id = ?`, id))
		return err
	})
	if err != nil {
		return Workspace{}, fmt.Errorf("workspace %s: %w", id, err)
	}
	return w, nil
}

// workspaceLive is ErrNotFound for an unknown or archived workspace.
func (t *tx) workspaceLive(id WorkspaceID) error {
	w, err := scanWorkspace(t.queryRow(`SELECT `+workspaceColumns+` FROM workspaces WHERE id = ?`, id))
	if err == nil && !w.ArchivedAt.IsZero() {
		err = ErrNotFound
	}
	return err
}

// Workspaces lists the workspaces of the installation, newest first.
func (db *DB) Workspaces(ctx context.Context, p Page) ([]Workspace, error) {
	w := where{}
	w.add("id <> ''")
	tail := w.page(p, "")
	var out []Workspace
	err := db.read(ctx, func(t *tx) error {
		out = nil
		return t.each(`SELECT `+workspaceColumns+` FROM workspaces`+tail, w.args, func(r *sql.Rows) error {
			ws, err := scanWorkspace(r)
			out = append(out, ws)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list workspaces: %w", err)
	}
	return out, nil
}

// NodeRow is a process as the store knows it.
type NodeRow struct {
	NodeInfo
	ID       NodeID
	JoinedAt time.Time
	Until    time.Time // end of its lease
	LeftAt   time.Time // it left by itself
	DeadAt   time.Time // its sessions were freed
	Sessions int64     // sessions that it owns
}

// Nodes lists the newest nodes, alive ones and former ones.
func (db *DB) Nodes(ctx context.Context, limit int) ([]NodeRow, error) {
	var out []NodeRow
	err := db.read(ctx, func(t *tx) error {
		out = nil
		return t.each(`SELECT n.id, n.address, n.roles, n.version, n.joined_at, n.until, n.left_at, n.dead_at,
			(SELECT count(*) FROM sessions s WHERE s.owner = n.id AND s.owner <> '')
			FROM nodes n ORDER BY n.joined_at DESC, n.id DESC LIMIT ?`, []any{limit}, func(r *sql.Rows) error {
			var n NodeRow
			var roles string
			var joined, until, left, dead int64
			if err := r.Scan(&n.ID, &n.Address, &roles, &n.Version, &joined, &until, &left, &dead, &n.Sessions); err != nil {
				return err
			}
			n.Roles = strings.FieldsFunc(roles, func(c rune) bool { return c == ',' || c == ' ' })
			n.JoinedAt, n.Until, n.LeftAt, n.DeadAt = fromMicros(joined), fromMicros(until), fromMicros(left), fromMicros(dead)
			out = append(out, n)
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	return out, nil
}

// Ping reports whether the store answers.
func (db *DB) Ping(ctx context.Context) error {
	var n int
	return db.read(ctx, func(t *tx) error { return t.queryRow(`SELECT 1`).Scan(&n) })
}
