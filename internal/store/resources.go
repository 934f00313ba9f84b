package store

import (
	"context"
	"fmt"
	"time"
)

// ResourceSecret is the token of a repository that a session mounts. Sealed is
// what vault.Master.Seal made for the workspace and the resource's id; keeper
// alone opens it, with vault.Master.Open for the same two names.
type ResourceSecret struct {
	ID     string // "sesrsc_…"
	Sealed []byte
}

// Attachments go into the transaction that creates a session.
type Attachments struct {
	Files   []FileCopy
	Secrets []ResourceSecret
}

func (t *tx) attach(ws WorkspaceID, id SessionID, a Attachments, now time.Time) error {
	for _, c := range a.Files {
		if _, err := t.copyFile(ws, id, c); err != nil {
			return fmt.Errorf("copy file %s: %w", c.From, err)
		}
	}
	for _, s := range a.Secrets {
		if err := t.putSecret(ws, id, s, now); err != nil {
			return err
		}
	}
	return nil
}

func (t *tx) putSecret(ws WorkspaceID, id SessionID, s ResourceSecret, now time.Time) error {
	_, err := t.exec(`INSERT INTO resource_secrets (workspace, session, id, sealed, updated_at) VALUES (?, ?, ?, ?, ?)
		ON CONFLICT (workspace, session, id) DO UPDATE SET sealed = excluded.sealed, updated_at = excluded.updated_at`,
		ws, id, s.ID, s.Sealed, micros(now))
	return err
}

// PutResourceSecret sets or replaces the token of a resource. It joins no audit
// row: the change of the resource, which follows, does.
func (db *DB) PutResourceSecret(ctx context.Context, ws WorkspaceID, id SessionID, s ResourceSecret) error {
	err := db.tx(ctx, func(t *tx) error {
		if _, err := t.sessionRow(ws, id, true); err != nil {
			return err
		}
		return t.putSecret(ws, id, s, db.Now())
	})
	if err != nil {
		return fmt.Errorf("put secret of resource %s: %w", s.ID, err)
	}
	return nil
}

// ResourceSecret returns the sealed token of a session's resource. ErrNotFound:
// it has none.
func (db *DB) ResourceSecret(ctx context.Context, ws WorkspaceID, session SessionID, resource string) ([]byte, error) {
	var sealed []byte
	err := db.peek(ctx).queryRow(`SELECT sealed FROM resource_secrets WHERE workspace = ? AND session = ? AND id = ?`,
		ws, session, resource).Scan(&sealed)
	if err != nil {
		return nil, fmt.Errorf("secret of resource %s: %w", resource, notFound(db.mapErr(err)))
	}
	return sealed, nil
}

// DeleteResourceSecret removes the token of a resource that is removed. One
// that is not there is no error.
func (db *DB) DeleteResourceSecret(ctx context.Context, ws WorkspaceID, session SessionID, resource string) error {
	err := db.tx(ctx, func(t *tx) error {
		_, err := t.exec(`DELETE FROM resource_secrets WHERE workspace = ? AND session = ? AND id = ?`, ws, session, resource)
		return err
	})
	if err != nil {
		return fmt.Errorf("delete secret of resource %s: %w", resource, err)
	}
	return nil
}
