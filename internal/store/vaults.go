package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// MaxCredentials is how many live credentials a vault holds (reference section 1.9).
const MaxCredentials = 20

// Errors of vaults.
var (
	// ErrDuplicate: another live object of the same place has this name or key.
	ErrDuplicate = errors.New("already exists")
	// ErrFull: the vault holds MaxCredentials credentials.
	ErrFull = errors.New("vault is full")
	// ErrArchived: the object is archived and takes no change.
	ErrArchived = errors.New("archived")
)

// Vault is a set of credentials.
type Vault struct {
	Workspace   WorkspaceID
	ID          VaultID
	DisplayName string
	Metadata    map[string]string
	CreatedAt   time.Time
	UpdatedAt   time.Time
	ArchivedAt  time.Time
}

// Credential is one credential of a vault. Sealed is opened by keeper only.
type Credential struct {
	Workspace   WorkspaceID
	Vault       VaultID
	ID          CredentialID
	DisplayName string
	Metadata    map[string]string
	AuthType    string          // static_bearer, …
	MatchKey    string          // normalised mcp_server_url (or secret_name); unique among the vault's live ones
	Auth        json.RawMessage // wire auth without secrets
	Sealed      []byte          // vault.Seal under (workspace, credential id); nil once archived
	CreatedAt   time.Time
	UpdatedAt   time.Time
	ArchivedAt  time.Time
}

const vaultColumns = `workspace, id, display_name, metadata, created_at, updated_at, archived_at`

func scanVault(r interface{ Scan(...any) error }) (Vault, error) {
	var v Vault
	var meta []byte
	var created, updated, archived int64
	if err := r.Scan(&v.Workspace, &v.ID, &v.DisplayName, &meta, &created, &updated, &archived); err != nil {
		return v, err
	}
	v.CreatedAt, v.UpdatedAt, v.ArchivedAt = fromMicros(created), fromMicros(updated), fromMicros(archived)
	return v, json.Unmarshal(meta, &v.Metadata)
}

// metadata is how a map of strings is stored.
func metadata(m map[string]string) []byte {
	if m == nil {
		return []byte("{}")
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic("store: encode a map of strings: " + err.Error())
	}
	return b
}

// CreateVault writes a vault.
func (db *DB) CreateVault(ctx context.Context, v Vault) (Vault, error) {
	err := db.tx(ctx, func(t *tx) error {
		if _, err := t.exec(`INSERT INTO vaults (workspace, id, display_name, metadata, created_at, updated_at) VALUES (?, ?, ?, ?, ?, ?)`,
			v.Workspace, v.ID, v.DisplayName, metadata(v.Metadata), micros(v.CreatedAt), micros(v.UpdatedAt)); err != nil {
			return err
		}
		return db.written(ctx, t, v)
	})
	if err != nil {
		return Vault{}, fmt.Errorf("create vault %s: %w", v.ID, err)
	}
	return v, nil
}

// Vault returns a vault.
func (db *DB) Vault(ctx context.Context, ws WorkspaceID, id VaultID) (Vault, error) {
	var v Vault
	err := db.read(ctx, func(t *tx) error {
		var err error
		v, err = t.vault(ws, id)
		return err
	})
	if err != nil {
		return Vault{}, fmt.Errorf("vault %s: %w", id, err)
	}
	return v, nil
}

func (t *tx) vault(ws WorkspaceID, id VaultID) (Vault, error) {
	v, err := scanVault(t.queryRow(`SELECT `+vaultColumns+` FROM vaults WHERE workspace = ? AND id = ?`, ws, id))
	return v, notFound(err)
}

// Vaults lists vaults, newest first.
func (db *DB) Vaults(ctx context.Context, ws WorkspaceID, p Page) ([]Vault, error) {
	w := where{}
	w.add("workspace = ?", ws)
	tail := w.page(p, "")
	var out []Vault
	err := db.read(ctx, func(t *tx) error {
		out = nil
		return t.each(`SELECT `+vaultColumns+` FROM vaults`+tail, w.args, func(r *sql.Rows) error {
			v, err := scanVault(r)
			out = append(out, v)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list vaults: %w", err)
	}
	return out, nil
}

// UpdateVault replaces a vault by what change makes of it. change is pure and
// may run twice; its error refuses. Setting ArchivedAt archives the vault's
// credentials with it and purges their secrets.
func (db *DB) UpdateVault(ctx context.Context, ws WorkspaceID, id VaultID, change func(Vault) (Vault, error)) (Vault, error) {
	var out Vault
	err := db.tx(ctx, func(t *tx) error {
		old, err := t.vault(ws, id)
		if err != nil {
			return err
		}
		v, err := change(old)
		if err != nil {
			return err
		}
		if _, err := t.exec(`UPDATE vaults SET display_name = ?, metadata = ?, updated_at = ?, archived_at = ? WHERE workspace = ? AND id = ?`,
			v.DisplayName, metadata(v.Metadata), micros(v.UpdatedAt), micros(v.ArchivedAt), ws, id); err != nil {
			return err
		}
		if !v.ArchivedAt.IsZero() && old.ArchivedAt.IsZero() {
			if _, err := t.exec(`UPDATE credentials SET sealed = NULL, archived_at = ?, updated_at = ?
				WHERE workspace = ? AND vault = ? AND archived_at = 0`,
				micros(v.ArchivedAt), micros(v.ArchivedAt), ws, id); err != nil {
				return err
			}
		}
		out = v
		return db.written(ctx, t, v)
	})
	if err != nil {
		return Vault{}, fmt.Errorf("update vault %s: %w", id, err)
	}
	return out, nil
}

// DeleteVault removes a vault and its credentials.
func (db *DB) DeleteVault(ctx context.Context, ws WorkspaceID, id VaultID) error {
	err := db.tx(ctx, func(t *tx) error {
		n, err := t.exec(`DELETE FROM vaults WHERE workspace = ? AND id = ?`, ws, id)
		if err != nil {
			return err
		}
		if n == 0 {
			return ErrNotFound
		}
		if _, err := t.exec(`DELETE FROM credentials WHERE workspace = ? AND vault = ?`, ws, id); err != nil {
			return err
		}
		return db.written(ctx, t, nil)
	})
	if err != nil {
		return fmt.Errorf("delete vault %s: %w", id, err)
	}
	return nil
}

const credentialColumns = `workspace, vault, id, display_name, metadata, auth_type, match_key, auth, sealed, created_at, updated_at, archived_at`

func scanCredential(r interface{ Scan(...any) error }) (Credential, error) {
	var c Credential
	var meta, auth []byte
	var created, updated, archived int64
	if err := r.Scan(&c.Workspace, &c.Vault, &c.ID, &c.DisplayName, &meta, &c.AuthType, &c.MatchKey,
		&auth, &c.Sealed, &created, &updated, &archived); err != nil {
		return c, err
	}
	c.Auth = auth
	c.CreatedAt, c.UpdatedAt, c.ArchivedAt = fromMicros(created), fromMicros(updated), fromMicros(archived)
	return c, json.Unmarshal(meta, &c.Metadata)
}

// CreateCredential writes a credential. ErrNotFound: no such vault;
// ErrArchived: the vault is archived; ErrFull; ErrDuplicate: the vault has a
// live credential with this MatchKey.
func (db *DB) CreateCredential(ctx context.Context, c Credential) (Credential, error) {
	err := db.tx(ctx, func(t *tx) error {
		v, err := t.vault(c.Workspace, c.Vault)
		if err != nil {
			return err
		}
		if !v.ArchivedAt.IsZero() {
			return ErrArchived
		}
		var all, same int
		if err := t.queryRow(`SELECT count(*), coalesce(sum(CASE WHEN match_key = ? THEN 1 ELSE 0 END), 0) FROM credentials
			WHERE workspace = ? AND vault = ? AND archived_at = 0`, c.MatchKey, c.Workspace, c.Vault).Scan(&all, &same); err != nil {
			return err
		}
		switch {
		case same > 0:
			return ErrDuplicate
		case all >= MaxCredentials:
			return ErrFull
		}
		if _, err := t.exec(`INSERT INTO credentials
			(workspace, vault, id, display_name, metadata, auth_type, match_key, auth, sealed, created_at, updated_at)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			c.Workspace, c.Vault, c.ID, c.DisplayName, metadata(c.Metadata), c.AuthType, c.MatchKey,
			[]byte(c.Auth), orNull(c.Sealed), micros(c.CreatedAt), micros(c.UpdatedAt)); err != nil {
			return err
		}
		return db.written(ctx, t, c)
	})
	if err != nil {
		return Credential{}, fmt.Errorf("create credential %s: %w", c.ID, err)
	}
	return c, nil
}

// Credential returns a credential of a vault.
func (db *DB) Credential(ctx context.Context, ws WorkspaceID, vault VaultID, id CredentialID) (Credential, error) {
	var c Credential
	err := db.read(ctx, func(t *tx) error {
		var err error
		c, err = t.credential(ws, vault, id)
		return err
	})
	if err != nil {
		return Credential{}, fmt.Errorf("credential %s: %w", id, err)
	}
	return c, nil
}

func (t *tx) credential(ws WorkspaceID, vault VaultID, id CredentialID) (Credential, error) {
	c, err := scanCredential(t.queryRow(`SELECT `+credentialColumns+` FROM credentials
		WHERE workspace = ? AND vault = ? AND id = ?`, ws, vault, id))
	return c, notFound(err)
}

// Credentials lists the credentials of a vault, newest first. ErrNotFound when
// there is no such vault.
func (db *DB) Credentials(ctx context.Context, ws WorkspaceID, vault VaultID, p Page) ([]Credential, error) {
	w := where{}
	w.add("workspace = ? AND vault = ?", ws, vault)
	tail := w.page(p, "")
	var out []Credential
	err := db.read(ctx, func(t *tx) error {
		out = nil
		if _, err := t.vault(ws, vault); err != nil {
			return err
		}
		return t.each(`SELECT `+credentialColumns+` FROM credentials`+tail, w.args, func(r *sql.Rows) error {
			c, err := scanCredential(r)
			out = append(out, c)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list credentials of %s: %w", vault, err)
	}
	return out, nil
}

// UpdateCredential replaces a credential by what change makes of it. change is
// pure and may run twice; its error refuses. An archived one loses its secret.
func (db *DB) UpdateCredential(ctx context.Context, ws WorkspaceID, vault VaultID, id CredentialID, change func(Credential) (Credential, error)) (Credential, error) {
	var out Credential
	err := db.tx(ctx, func(t *tx) error {
		old, err := t.credential(ws, vault, id)
		if err != nil {
			return err
		}
		c, err := change(old)
		if err != nil {
			return err
		}
		if !c.ArchivedAt.IsZero() {
			c.Sealed = nil
		}
		if _, err := t.exec(`UPDATE credentials SET display_name = ?, metadata = ?, auth = ?, sealed = ?, updated_at = ?, archived_at = ?
			WHERE workspace = ? AND vault = ? AND id = ?`,
			c.DisplayName, metadata(c.Metadata), []byte(c.Auth), orNull(c.Sealed), micros(c.UpdatedAt), micros(c.ArchivedAt), ws, vault, id); err != nil {
			return err
		}
		out = c
		return db.written(ctx, t, c)
	})
	if err != nil {
		return Credential{}, fmt.Errorf("update credential %s: %w", id, err)
	}
	return out, nil
}

// DeleteCredential removes a credential.
func (db *DB) DeleteCredential(ctx context.Context, ws WorkspaceID, vault VaultID, id CredentialID) error {
	err := db.tx(ctx, func(t *tx) error {
		n, err := t.exec(`DELETE FROM credentials WHERE workspace = ? AND vault = ? AND id = ?`, ws, vault, id)
		if err != nil {
			return err
		}
		if n == 0 {
			return ErrNotFound
		}
		return db.written(ctx, t, nil)
	})
	if err != nil {
		return fmt.Errorf("delete credential %s: %w", id, err)
	}
	return nil
}

// CredentialFor returns the first live credential, in the order of the vaults,
// whose MatchKey equals key; ErrNotFound.
func (db *DB) CredentialFor(ctx context.Context, ws WorkspaceID, vaults []VaultID, key string) (Credential, error) {
	var c Credential
	err := db.read(ctx, func(t *tx) error {
		for _, v := range vaults {
			var err error
			c, err = scanCredential(t.queryRow(`SELECT `+credentialColumns+` FROM credentials
				WHERE workspace = ? AND vault = ? AND match_key = ? AND archived_at = 0`, ws, v, key))
			if !errors.Is(err, sql.ErrNoRows) {
				return err
			}
		}
		return ErrNotFound
	})
	if err != nil {
		return Credential{}, fmt.Errorf("credential for %s: %w", key, err)
	}
	return c, nil
}
