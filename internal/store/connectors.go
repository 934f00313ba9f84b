package store

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Connector is an outside system with its contracts; Body is the wire object
// as the operator gave it, with defaults filled in.
type Connector struct {
	Workspace WorkspaceID
	ID        ConnectorID
	Name      string // unique in the workspace
	Version   int    // from 1, one more with each change
	URL       string // normalised
	Body      json.RawMessage
	// Pins maps tool names to the digest of the upstream definition that the
	// contract was first used with; a different one quarantines the tool.
	Pins      map[string]string
	CreatedAt time.Time
	UpdatedAt time.Time
}

const connectorColumns = `workspace, id, name, version, url, body, created_at, updated_at`

func scanConnector(r interface{ Scan(...any) error }) (Connector, error) {
	var c Connector
	var body []byte
	var created, updated int64
	err := r.Scan(&c.Workspace, &c.ID, &c.Name, &c.Version, &c.URL, &body, &created, &updated)
	c.Body, c.CreatedAt, c.UpdatedAt = body, fromMicros(created), fromMicros(updated)
	return c, err
}

// CreateConnector writes version 1 of a connector; ErrDuplicate when the
// workspace has one of this name.
func (db *DB) CreateConnector(ctx context.Context, c Connector) (Connector, error) {
	err := db.tx(ctx, func(t *tx) error {
		if err := t.connectorNameFree(c); err != nil {
			return err
		}
		if _, err := t.exec(`INSERT INTO connectors (`+connectorColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
			c.Workspace, c.ID, c.Name, c.Version, c.URL, []byte(c.Body), micros(c.CreatedAt), micros(c.UpdatedAt)); err != nil {
			return err
		}
		if err := t.addConnectorVersion(c); err != nil {
			return err
		}
		return db.written(ctx, t, c)
	})
	if err != nil {
		return Connector{}, fmt.Errorf("create connector %s: %w", c.Name, err)
	}
	return c, nil
}

func (t *tx) connectorNameFree(c Connector) error {
	var n int
	err := t.queryRow(`SELECT count(*) FROM connectors WHERE workspace = ? AND name = ? AND id <> ?`,
		c.Workspace, c.Name, c.ID).Scan(&n)
	if err == nil && n > 0 {
		err = ErrDuplicate
	}
	return err
}

func (t *tx) addConnectorVersion(c Connector) error {
	_, err := t.exec(`INSERT INTO connector_versions (workspace, id, version, body, updated_at) VALUES (?, ?, ?, ?, ?)`,
		c.Workspace, c.ID, c.Version, []byte(c.Body), micros(c.UpdatedAt))
	return err
}

// Connector returns a connector by id.
func (db *DB) Connector(ctx context.Context, ws WorkspaceID, id ConnectorID) (Connector, error) {
	return db.connectorBy(ctx, string(id), `workspace = ? AND id = ?`, ws, id)
}

// ConnectorByName returns a connector of the workspace.
func (db *DB) ConnectorByName(ctx context.Context, ws WorkspaceID, name string) (Connector, error) {
	return db.connectorBy(ctx, name, `workspace = ? AND name = ?`, ws, name)
}

// ConnectorByURL returns the connector whose normalised URL this is, the
// oldest if there are several; ErrNotFound.
func (db *DB) ConnectorByURL(ctx context.Context, ws WorkspaceID, url string) (Connector, error) {
	return db.connectorBy(ctx, url, `workspace = ? AND url = ? ORDER BY created_at, id LIMIT 1`, ws, url)
}

func (db *DB) connectorBy(ctx context.Context, what, cond string, args ...any) (Connector, error) {
	var c Connector
	err := db.read(ctx, func(t *tx) error {
		var err error
		c, err = t.connector(cond, args...)
		return err
	})
	if err != nil {
		return Connector{}, fmt.Errorf("connector %s: %w", what, err)
	}
	return c, nil
}

func (t *tx) connector(cond string, args ...any) (Connector, error) {
	c, err := scanConnector(t.queryRow(`SELECT `+connectorColumns+` FROM connectors WHERE `+cond, args...))
	if err != nil {
		return Connector{}, notFound(err)
	}
	return c, t.readPins(&c)
}

func (t *tx) readPins(c *Connector) error {
	c.Pins = map[string]string{}
	return t.each(`SELECT tool, digest FROM connector_pins WHERE workspace = ? AND connector = ?`,
		[]any{c.Workspace, c.ID}, func(r *sql.Rows) error {
			var tool, digest string
			err := r.Scan(&tool, &digest)
			c.Pins[tool] = digest
			return err
		})
}

// Connectors lists connectors, newest first.
func (db *DB) Connectors(ctx context.Context, ws WorkspaceID, p Page) ([]Connector, error) {
	w := where{}
	w.add("workspace = ?", ws)
	p.IncludeArchived = true // connectors are deleted, never archived
	tail := w.page(p, "")
	var out []Connector
	err := db.read(ctx, func(t *tx) error {
		out = nil
		err := t.each(`SELECT `+connectorColumns+` FROM connectors`+tail, w.args, func(r *sql.Rows) error {
			c, err := scanConnector(r)
			out = append(out, c)
			return err
		})
		for i := range out {
			if err == nil {
				err = t.readPins(&out[i])
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list connectors: %w", err)
	}
	return out, nil
}

// UpdateConnector replaces a connector by what change makes of it. change is
// pure and may run twice; its error refuses. A changed body becomes a new
// version. A tool that change leaves out of Pins is bound anew at its next use.
// ErrDuplicate when another connector has the name.
func (db *DB) UpdateConnector(ctx context.Context, ws WorkspaceID, id ConnectorID, change func(Connector) (Connector, error)) (Connector, error) {
	var out Connector
	err := db.tx(ctx, func(t *tx) error {
		old, err := t.connector(`workspace = ? AND id = ?`, ws, id)
		if err != nil {
			return err
		}
		c, err := change(old)
		if err != nil {
			return err
		}
		if err := t.connectorNameFree(c); err != nil {
			return err
		}
		for tool := range old.Pins {
			if _, keep := c.Pins[tool]; keep {
				continue
			}
			if _, err := t.exec(`DELETE FROM connector_pins WHERE workspace = ? AND connector = ? AND tool = ?`, ws, id, tool); err != nil {
				return err
			}
		}
		if !bytes.Equal(old.Body, c.Body) {
			if err := t.addConnectorVersion(c); err != nil {
				return err
			}
		}
		if _, err := t.exec(`UPDATE connectors SET name = ?, version = ?, url = ?, body = ?, updated_at = ? WHERE workspace = ? AND id = ?`,
			c.Name, c.Version, c.URL, []byte(c.Body), micros(c.UpdatedAt), ws, id); err != nil {
			return err
		}
		out = c
		return db.written(ctx, t, c)
	})
	if err != nil {
		return Connector{}, fmt.Errorf("update connector %s: %w", id, err)
	}
	return out, nil
}

// DeleteConnector removes a connector and its pins. Intents keep the contract
// that they were ruled by, so effects in doubt can still be settled.
func (db *DB) DeleteConnector(ctx context.Context, ws WorkspaceID, id ConnectorID) error {
	err := db.tx(ctx, func(t *tx) error {
		n, err := t.exec(`DELETE FROM connectors WHERE workspace = ? AND id = ?`, ws, id)
		if err != nil {
			return err
		}
		if n == 0 {
			return ErrNotFound
		}
		if _, err := t.exec(`DELETE FROM connector_pins WHERE workspace = ? AND connector = ?`, ws, id); err != nil {
			return err
		}
		return db.written(ctx, t, nil)
	})
	if err != nil {
		return fmt.Errorf("delete connector %s: %w", id, err)
	}
	return nil
}

// PinTool binds a tool to the digest of its definition if it has none yet, and
// returns the digest that holds. ErrNotFound when there is no such connector.
func (db *DB) PinTool(ctx context.Context, ws WorkspaceID, id ConnectorID, tool, digest string) (string, error) {
	// Nearly always it is bound already: read first, outside the one writer.
	held, err := db.pin(ctx, ws, id, tool)
	if err == nil {
		return held, nil
	}
	if !errors.Is(err, ErrNotFound) {
		return "", fmt.Errorf("read pin of %s: %w", tool, err)
	}
	err = db.tx(ctx, func(t *tx) error {
		var n int
		if err := t.queryRow(`SELECT count(*) FROM connectors WHERE workspace = ? AND id = ?`, ws, id).Scan(&n); err != nil {
			return err
		}
		if n == 0 {
			return ErrNotFound
		}
		if _, err := t.exec(`INSERT INTO connector_pins (workspace, connector, tool, digest, pinned_at) VALUES (?, ?, ?, ?, ?)
			ON CONFLICT (workspace, connector, tool) DO NOTHING`, ws, id, tool, digest, micros(db.Now())); err != nil {
			return err
		}
		return t.queryRow(`SELECT digest FROM connector_pins WHERE workspace = ? AND connector = ? AND tool = ?`, ws, id, tool).Scan(&held)
	})
	if err != nil {
		return "", fmt.Errorf("pin %s of connector %s: %w", tool, id, err)
	}
	return held, nil
}

func (db *DB) pin(ctx context.Context, ws WorkspaceID, id ConnectorID, tool string) (string, error) {
	var held string
	err := db.read(ctx, func(t *tx) error {
		return notFound(t.queryRow(`SELECT digest FROM connector_pins WHERE workspace = ? AND connector = ? AND tool = ?`, ws, id, tool).Scan(&held))
	})
	return held, err
}
