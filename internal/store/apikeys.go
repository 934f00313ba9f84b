package store

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"errors"
	"fmt"
	"time"
)

// keyPrefix begins every API key that we make, so that scanners find leaked ones.
const keyPrefix = "pk_planaria_"

// BootstrapName is the name of the first key.
const BootstrapName = "first admin key"

// APIKey is a key of a workspace. The key itself is never stored.
type APIKey struct {
	Workspace WorkspaceID
	ID        APIKeyID
	Name      string
	Role      string // as in policy: admin, operator, developer, viewer
	Last4     string
	CreatedBy string // principal
	CreatedAt time.Time
	ExpiresAt time.Time // zero: never
	RevokedAt time.Time // zero: not revoked
	// LastUsedAt is when the key was last looked up, to within UsedWithin.
	LastUsedAt time.Time
}

// UsedWithin is how exact LastUsedAt is: a key in steady use costs one write
// in that time.
const UsedWithin = time.Hour

// Live reports whether the key opens anything at this time.
func (k APIKey) Live(now time.Time) bool {
	return k.RevokedAt.IsZero() && (k.ExpiresAt.IsZero() || now.Before(k.ExpiresAt))
}

// NewKey makes a key of 32 random bytes.
func NewKey() string {
	b := make([]byte, 32)
	if _, err := rand.Read(b); err != nil {
		panic("store: no entropy: " + err.Error()) // crypto/rand never fails on a working system
	}
	return keyPrefix + base64.RawURLEncoding.EncodeToString(b)
}

// last4 is what is shown of a key; nothing of a short one.
func last4(key string) string {
	if len(key) < 16 {
		return ""
	}
	return key[len(key)-4:]
}

const apiKeyColumns = `workspace, id, name, role, last4, created_by, created_at, expires_at, revoked_at, last_used_at`

func scanAPIKey(r interface{ Scan(...any) error }) (APIKey, error) {
	var k APIKey
	var created, expires, revoked, used int64
	err := r.Scan(&k.Workspace, &k.ID, &k.Name, &k.Role, &k.Last4, &k.CreatedBy, &created, &expires, &revoked, &used)
	k.CreatedAt, k.ExpiresAt, k.RevokedAt, k.LastUsedAt = fromMicros(created), fromMicros(expires), fromMicros(revoked), fromMicros(used)
	return k, notFound(err)
}

// CreateAPIKey writes k for the given key, of which only the SHA-256 is kept.
// ErrDuplicate when the key exists; ErrNotFound when the workspace does not.
func (db *DB) CreateAPIKey(ctx context.Context, k APIKey, key string) (APIKey, error) {
	k.Last4 = last4(key)
	err := db.tx(ctx, func(t *tx) error {
		if err := t.workspaceLive(k.Workspace); err != nil {
			return err
		}
		if err := t.addAPIKey(k, key); err != nil {
			return err
		}
		return db.written(ctx, t, k)
	})
	if err != nil {
		return APIKey{}, fmt.Errorf("create api key %s: %w", k.Name, err)
	}
	return k, nil
}

func (t *tx) addAPIKey(k APIKey, key string) error {
	hash := sha256.Sum256([]byte(key))
	n, err := t.exec(`INSERT INTO api_keys
		(workspace, id, name, role, hash, last4, created_by, created_at, expires_at)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (hash) DO NOTHING`,
		k.Workspace, k.ID, k.Name, k.Role, hash[:], k.Last4, k.CreatedBy, micros(k.CreatedAt), micros(k.ExpiresAt))
	if err == nil && n == 0 {
		err = ErrDuplicate
	}
	return err
}

// APIKeyOf returns the live key that this is; ErrNotFound for an unknown,
// revoked or expired one, and for one of an archived workspace. The comparison
// is of digests, by an index: its timing tells nothing of keys.
func (db *DB) APIKeyOf(ctx context.Context, key string) (APIKey, error) {
	hash := sha256.Sum256([]byte(key))
	var k APIKey
	err := db.read(ctx, func(t *tx) error {
		var err error
		if k, err = scanAPIKey(t.queryRow(`SELECT `+apiKeyColumns+` FROM api_keys WHERE hash = ?`, hash[:])); err != nil {
			return err
		}
		if !k.Live(db.Now()) {
			return ErrNotFound
		}
		return t.workspaceLive(k.Workspace)
	})
	if err == nil && db.Now().Sub(k.LastUsedAt) > UsedWithin {
		err = db.tx(ctx, func(t *tx) error {
			_, err := t.exec(`UPDATE api_keys SET last_used_at = ? WHERE workspace = ? AND id = ?`, micros(db.Now()), k.Workspace, k.ID)
			return err
		})
	}
	if err != nil {
		return APIKey{}, fmt.Errorf("look up api key: %w", err)
	}
	return k, nil
}

// APIKey returns a key by id, a revoked one too.
func (db *DB) APIKey(ctx context.Context, ws WorkspaceID, id APIKeyID) (APIKey, error) {
	var k APIKey
	err := db.read(ctx, func(t *tx) error {
		var err error
		k, err = t.apiKey(ws, id)
		return err
	})
	if err != nil {
		return APIKey{}, fmt.Errorf("api key %s: %w", id, err)
	}
	return k, nil
}

func (t *tx) apiKey(ws WorkspaceID, id APIKeyID) (APIKey, error) {
	return scanAPIKey(t.queryRow(`SELECT `+apiKeyColumns+` FROM api_keys WHERE workspace = ? AND id = ?`, ws, id))
}

// APIKeys lists keys, newest first; revoked ones with IncludeArchived.
func (db *DB) APIKeys(ctx context.Context, ws WorkspaceID, p Page) ([]APIKey, error) {
	w := where{}
	w.add("workspace = ?", ws)
	if !p.IncludeArchived {
		w.add("revoked_at = 0")
	}
	p.IncludeArchived = true
	tail := w.page(p, "")
	var out []APIKey
	err := db.read(ctx, func(t *tx) error {
		out = nil
		return t.each(`SELECT `+apiKeyColumns+` FROM api_keys`+tail, w.args, func(r *sql.Rows) error {
			k, err := scanAPIKey(r)
			out = append(out, k)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list api keys: %w", err)
	}
	return out, nil
}

// ErrLastAdmin: the workspace would be left without an admin key.
var ErrLastAdmin = errors.New("last admin key of the workspace")

// RevokeAPIKey ends a key at once; the row stays. Revoking twice keeps the
// first time. ErrLastAdmin when no live admin key of the workspace would remain.
func (db *DB) RevokeAPIKey(ctx context.Context, ws WorkspaceID, id APIKeyID, admin string) (APIKey, error) {
	var out APIKey
	err := db.tx(ctx, func(t *tx) error {
		k, err := t.apiKey(ws, id)
		if err != nil {
			return err
		}
		now := db.Now()
		if k.RevokedAt.IsZero() {
			k.RevokedAt = now
		}
		if k.Role == admin {
			var others int
			if err := t.queryRow(`SELECT count(*) FROM api_keys WHERE workspace = ? AND role = ? AND id <> ?
				AND revoked_at = 0 AND (expires_at = 0 OR expires_at > ?)`, ws, admin, id, micros(now)).Scan(&others); err != nil {
				return err
			}
			if others == 0 {
				return ErrLastAdmin
			}
		}
		if _, err := t.exec(`UPDATE api_keys SET revoked_at = ? WHERE workspace = ? AND id = ?`, micros(k.RevokedAt), ws, id); err != nil {
			return err
		}
		out = k
		return db.written(ctx, t, k)
	})
	if err != nil {
		return APIKey{}, fmt.Errorf("revoke api key %s: %w", id, err)
	}
	return out, nil
}

// EnsureBootstrapKey writes k with the given key if the store has no API key
// at all, and reports whether it did. Two processes that start at once make one.
func (db *DB) EnsureBootstrapKey(ctx context.Context, k APIKey, key string) (made bool, err error) {
	k.Last4 = last4(key)
	err = db.tx(ctx, func(t *tx) error {
		made = false
		var n int
		if err := t.queryRow(`SELECT count(*) FROM api_keys`).Scan(&n); err != nil || n > 0 {
			return err
		}
		if err := t.addAPIKey(k, key); err != nil {
			return err
		}
		made = true
		return db.written(ctx, t, k)
	})
	if err != nil {
		return false, fmt.Errorf("make first api key: %w", err)
	}
	return made, nil
}
