package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

func wireVault(v store.Vault) (api.Vault, error) {
	return api.Vault{ID: string(v.ID), DisplayName: v.DisplayName, Metadata: v.Metadata,
		CreatedAt: api.At(v.CreatedAt), UpdatedAt: api.At(v.UpdatedAt), ArchivedAt: api.AtOrNull(v.ArchivedAt)}, nil
}

func (s *server) createVault(ctx context.Context, c *call) (any, error) {
	var req api.VaultCreate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	if err := noNUL("display_name", req.DisplayName); err != nil {
		return nil, err
	}
	now := s.db.Now()
	c.keeps(as(wireVault))
	v, err := s.db.CreateVault(ctx, store.Vault{Workspace: c.caller.ws(), ID: store.VaultID(store.NewID("vlt_", now)),
		DisplayName: req.DisplayName, Metadata: req.Metadata, CreatedAt: now, UpdatedAt: now})
	if err != nil {
		return nil, err
	}
	return wireVault(v)
}

func (s *server) listVaults(ctx context.Context, c *call) (any, error) {
	p, limit, err := c.query.page("vaults")
	if err != nil {
		return nil, err
	}
	rows, err := s.db.Vaults(ctx, c.caller.ws(), p)
	if err != nil {
		return nil, err
	}
	return pageOf("vaults", rows, limit, wireVault, func(v store.Vault) (time.Time, string) { return v.CreatedAt, string(v.ID) })
}

func (s *server) getVault(ctx context.Context, c *call) (any, error) {
	id := c.id("vault")
	v, err := s.db.Vault(ctx, c.caller.ws(), store.VaultID(id))
	if err != nil {
		return nil, missing(err, "vault", id)
	}
	return wireVault(v)
}

func (s *server) updateVault(ctx context.Context, c *call) (any, error) {
	var req api.VaultUpdate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	return s.changeVault(ctx, c, func(v store.Vault) (store.Vault, error) {
		old, err := wireVault(v)
		if err != nil {
			return v, err
		}
		upd, changed, err := api.ApplyVaultUpdate(old, req)
		if err != nil || !changed {
			return v, err
		}
		v.DisplayName, v.Metadata, v.UpdatedAt = upd.DisplayName, upd.Metadata, s.db.Now()
		return v, noNUL("display_name", v.DisplayName)
	})
}

// archiveVault takes the vault's credentials with it and purges their secrets.
func (s *server) archiveVault(ctx context.Context, c *call) (any, error) {
	return s.changeVault(ctx, c, func(v store.Vault) (store.Vault, error) {
		if v.ArchivedAt.IsZero() {
			v.ArchivedAt = s.db.Now()
		}
		return v, nil
	})
}

func (s *server) changeVault(ctx context.Context, c *call, change func(store.Vault) (store.Vault, error)) (any, error) {
	id := c.id("vault")
	c.keeps(as(wireVault))
	v, err := s.db.UpdateVault(ctx, c.caller.ws(), store.VaultID(id), change)
	if err != nil {
		return nil, missing(err, "vault", id)
	}
	return wireVault(v)
}

func (s *server) deleteVault(ctx context.Context, c *call) (any, error) {
	id := c.id("vault")
	if err := s.db.DeleteVault(ctx, c.caller.ws(), store.VaultID(id)); err != nil {
		return nil, missing(err, "vault", id)
	}
	return api.Deleted{ID: id, Type: api.DeletedVault}, nil
}

func wireCredential(cr store.Credential) (api.Credential, error) {
	w := api.Credential{ID: string(cr.ID), VaultID: string(cr.Vault), Metadata: cr.Metadata,
		CreatedAt: api.At(cr.CreatedAt), UpdatedAt: api.At(cr.UpdatedAt), ArchivedAt: api.AtOrNull(cr.ArchivedAt)}
	if cr.DisplayName != "" {
		w.DisplayName = &cr.DisplayName
	}
	if err := api.Decode(cr.Auth, &w.Auth); err != nil {
		return w, fmt.Errorf("read credential %s: %w", cr.ID, internal(err))
	}
	return w, nil
}

// createCredential seals the secret before the row reaches the store.
func (s *server) createCredential(ctx context.Context, c *call) (any, error) {
	var req api.CredentialCreate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	key, err := api.NormalizeURL(req.Auth.MCPServerURL)
	if err != nil {
		return nil, api.Invalid("auth.mcp_server_url", "is not a URL")
	}
	auth, err := api.Encode(api.CredentialAuth{Type: req.Auth.Type, MCPServerURL: req.Auth.MCPServerURL})
	if err != nil {
		return nil, err
	}
	now := s.db.Now()
	row := store.Credential{Workspace: c.caller.ws(), Vault: store.VaultID(c.id("vault")),
		ID: store.CredentialID(store.NewID("vcrd_", now)), Metadata: req.Metadata, AuthType: req.Auth.Type,
		MatchKey: key, Auth: auth, CreatedAt: now, UpdatedAt: now}
	if req.DisplayName != nil {
		row.DisplayName = *req.DisplayName
	}
	if err := noNUL("display_name", row.DisplayName); err != nil {
		return nil, err
	}
	if row.Sealed, err = s.seal(row, req.Auth.Token); err != nil {
		return nil, err
	}
	c.keeps(as(wireCredential))
	row, err = s.db.CreateCredential(ctx, row)
	switch {
	case errors.Is(err, store.ErrDuplicate):
		return nil, api.NewError(api.ErrConflict, "the vault has a credential for %s already; update or archive that one", req.Auth.MCPServerURL)
	case err != nil:
		return nil, missing(err, "vault", c.id("vault"))
	}
	return wireCredential(row)
}

func (s *server) seal(row store.Credential, token api.Secret) ([]byte, error) {
	sealed, err := s.cfg.Master.Seal(string(row.Workspace), string(row.ID), vault.NewSecret(token.Reveal()))
	if err != nil {
		return nil, fmt.Errorf("seal credential %s: %w", row.ID, err)
	}
	return sealed, nil
}

func (s *server) listCredentials(ctx context.Context, c *call) (any, error) {
	id := c.id("vault")
	list := "credentials of " + id
	p, limit, err := c.query.page(list)
	if err != nil {
		return nil, err
	}
	rows, err := s.db.Credentials(ctx, c.caller.ws(), store.VaultID(id), p)
	if err != nil {
		return nil, missing(err, "vault", id)
	}
	return pageOf(list, rows, limit, wireCredential,
		func(cr store.Credential) (time.Time, string) { return cr.CreatedAt, string(cr.ID) })
}

func (s *server) getCredential(ctx context.Context, c *call) (any, error) {
	id := c.id("credential")
	cr, err := s.db.Credential(ctx, c.caller.ws(), store.VaultID(c.id("vault")), store.CredentialID(id))
	if err != nil {
		return nil, missing(err, "credential", id)
	}
	return wireCredential(cr)
}

func (s *server) updateCredential(ctx context.Context, c *call) (any, error) {
	var req api.CredentialUpdate
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	return s.changeCredential(ctx, c, func(cr store.Credential) (store.Credential, error) {
		old, err := wireCredential(cr)
		if err != nil {
			return cr, err
		}
		upd, token, changed, err := api.ApplyCredentialUpdate(old, req)
		if err != nil || !changed {
			return cr, err
		}
		cr.DisplayName, cr.Metadata, cr.UpdatedAt = "", upd.Metadata, s.db.Now()
		if upd.DisplayName != nil {
			cr.DisplayName = *upd.DisplayName
		}
		if token != "" {
			if cr.Sealed, err = s.seal(cr, token); err != nil {
				return cr, err
			}
		}
		return cr, noNUL("display_name", cr.DisplayName)
	})
}

func (s *server) archiveCredential(ctx context.Context, c *call) (any, error) {
	return s.changeCredential(ctx, c, func(cr store.Credential) (store.Credential, error) {
		if cr.ArchivedAt.IsZero() {
			cr.ArchivedAt = s.db.Now()
		}
		return cr, nil
	})
}

func (s *server) changeCredential(ctx context.Context, c *call, change func(store.Credential) (store.Credential, error)) (any, error) {
	id := c.id("credential")
	c.keeps(as(wireCredential))
	cr, err := s.db.UpdateCredential(ctx, c.caller.ws(), store.VaultID(c.id("vault")), store.CredentialID(id), change)
	if err != nil {
		return nil, missing(err, "credential", id)
	}
	return wireCredential(cr)
}

func (s *server) deleteCredential(ctx context.Context, c *call) (any, error) {
	id := c.id("credential")
	if err := s.db.DeleteCredential(ctx, c.caller.ws(), store.VaultID(c.id("vault")), store.CredentialID(id)); err != nil {
		return nil, missing(err, "credential", id)
	}
	return api.Deleted{ID: id, Type: api.DeletedCredential}, nil
}

// validateCredential tries OAuth tokens, which this version does not keep.
func (s *server) validateCredential(ctx context.Context, c *call) (any, error) {
	if _, err := s.getCredential(ctx, c); err != nil {
		return nil, err
	}
	return nil, api.Invalid("", "only credentials of type mcp_oauth are validated, which this version does not support yet")
}
