package api

import (
	"cmp"
	"log/slog"
)

// Limits of vaults (reference sections 1.9 and 15).
const (
	MaxVaultName           = 255
	MaxCredentialsPerVault = 20
	maxSecretBytes         = 64 << 10
)

// AuthStaticBearer is the type of a credential that is sent as a bearer token.
const AuthStaticBearer = "static_bearer"

const redacted = "REDACTED"

// Secret is a credential on its way from a client to the server's vault. It
// prints and logs as REDACTED; only its JSON, which is the wire, holds it.
type Secret string

// String hides it.
func (Secret) String() string { return redacted }

// GoString hides it.
func (Secret) GoString() string { return redacted }

// LogValue hides it.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// Reveal returns it.
func (s Secret) Reveal() string { return string(s) }

// VaultCreate is the body of POST /v1/vaults.
type VaultCreate struct {
	DisplayName string            `json:"display_name"`
	Metadata    map[string]string `json:"metadata,omitzero"`
}

// Validate applies the rules of reference section 15.
func (v VaultCreate) Validate() error {
	return cmp.Or(required("display_name", v.DisplayName, MaxVaultName), validateMetadata("metadata", v.Metadata))
}

// VaultUpdate is the body of POST /v1/vaults/{id}.
type VaultUpdate struct {
	DisplayName Optional[string]        `json:"display_name,omitzero"`
	Metadata    Optional[MetadataPatch] `json:"metadata,omitzero"`
}

// Validate checks what can be checked without the stored vault.
func (u VaultUpdate) Validate() error {
	if u.DisplayName.IsNull() {
		return Invalid("display_name", "cannot be cleared; leave it out to keep it")
	}
	return nil
}

// Vault is the vault object: a set of credentials.
type Vault struct {
	Type        string   `json:"type"`
	ID          string   `json:"id"`
	DisplayName string   `json:"display_name"`
	Metadata    Metadata `json:"metadata"`
	CreatedAt   Time     `json:"created_at"`
	UpdatedAt   Time     `json:"updated_at"`
	ArchivedAt  *Time    `json:"archived_at"`
}

// MarshalJSON sets the type.
func (v Vault) MarshalJSON() ([]byte, error) {
	type shadow Vault
	v.Type = "vault"
	return Encode(shadow(v))
}

// ApplyVaultUpdate applies an update; UpdatedAt is the caller's to set when it changed.
func ApplyVaultUpdate(v Vault, u VaultUpdate) (updated Vault, changed bool, err error) {
	if err := u.Validate(); err != nil {
		return v, false, err
	}
	if v.ArchivedAt != nil {
		return v, false, Invalid("", "vault %s is archived and cannot be updated; create another one", v.ID)
	}
	n := v
	n.DisplayName, n.Metadata = renamed(v.DisplayName, v.Metadata, u.DisplayName, u.Metadata)
	if err := (VaultCreate{DisplayName: n.DisplayName, Metadata: n.Metadata}).Validate(); err != nil {
		return v, false, err
	}
	return n, !sameJSON(v, n), nil
}

func renamed(name string, m Metadata, newName Optional[string], patch Optional[MetadataPatch]) (string, Metadata) {
	if s, ok := newName.Get(); ok {
		name = s
	}
	if p, ok := patch.Get(); ok {
		m = p.apply(m, false)
	}
	return name, m
}

// CredentialAuthParams is auth in a request. Token is write-only.
type CredentialAuthParams struct {
	Type         string `json:"type"`
	MCPServerURL string `json:"mcp_server_url,omitzero"`
	Token        Secret `json:"token,omitzero"`
}

// CredentialAuth is auth in an object: no secret.
type CredentialAuth struct {
	Type         string `json:"type"`
	MCPServerURL string `json:"mcp_server_url"`
}

// CredentialCreate is the body of POST /v1/vaults/{id}/credentials.
type CredentialCreate struct {
	DisplayName *string              `json:"display_name,omitzero"`
	Auth        CredentialAuthParams `json:"auth"`
	Metadata    map[string]string    `json:"metadata,omitzero"`
}

// Validate applies the rules of reference section 15.
func (c CredentialCreate) Validate() error {
	if err := cmp.Or(atMostPtr("display_name", c.DisplayName, MaxVaultName),
		validateAuthType("auth.type", c.Auth.Type),
		validateURL("auth.mcp_server_url", c.Auth.MCPServerURL),
		validateMetadata("metadata", c.Metadata)); err != nil {
		return err
	}
	return validateSecret("auth.token", c.Auth.Token)
}

func validateAuthType(path, t string) error {
	if t == "mcp_oauth" || t == "environment_variable" {
		return Invalid(path, "%q is not supported yet by this version; use %s", t, AuthStaticBearer)
	}
	return oneOf(path, t, AuthStaticBearer)
}

// validateSecret never puts the secret into the error.
func validateSecret(path string, s Secret) error {
	if s == "" {
		return Invalid(path, "is required")
	}
	if len(s) > maxSecretBytes {
		return Invalid(path, "has %d bytes; at most %d are allowed", len(s), maxSecretBytes)
	}
	for i := range len(s) {
		if s[i] < 0x21 || s[i] > 0x7e {
			return Invalid(path, "holds a character that cannot stand in an Authorization header; check for spaces and line ends")
		}
	}
	return nil
}

// CredentialUpdate is the body of POST /v1/vaults/{id}/credentials/{id}.
type CredentialUpdate struct {
	DisplayName Optional[string]               `json:"display_name,omitzero"`
	Auth        Optional[CredentialAuthParams] `json:"auth,omitzero"`
	Metadata    Optional[MetadataPatch]        `json:"metadata,omitzero"`
}

// Credential is the credential object; secrets are never in it.
type Credential struct {
	Type        string         `json:"type"`
	ID          string         `json:"id"`
	VaultID     string         `json:"vault_id"`
	DisplayName *string        `json:"display_name"`
	Auth        CredentialAuth `json:"auth"`
	Metadata    Metadata       `json:"metadata"`
	CreatedAt   Time           `json:"created_at"`
	UpdatedAt   Time           `json:"updated_at"`
	ArchivedAt  *Time          `json:"archived_at"`
}

// MarshalJSON sets the type.
func (c Credential) MarshalJSON() ([]byte, error) {
	type shadow Credential
	c.Type = "vault_credential"
	return Encode(shadow(c))
}

// ApplyCredentialUpdate applies an update. token is the new secret, empty to
// keep the stored one; UpdatedAt is the caller's to set when it changed.
func ApplyCredentialUpdate(c Credential, u CredentialUpdate) (updated Credential, token Secret, changed bool, err error) {
	if c.ArchivedAt != nil {
		return c, "", false, Invalid("", "credential %s is archived and cannot be updated; create another one", c.ID)
	}
	if a, ok := u.Auth.Get(); ok {
		switch {
		case a.Type != c.Auth.Type:
			return c, "", false, Invalid("auth.type", "must be %q; the type of a credential cannot change", c.Auth.Type)
		case a.MCPServerURL != "" && a.MCPServerURL != c.Auth.MCPServerURL:
			return c, "", false, Invalid("auth.mcp_server_url", "cannot change; create another credential")
		}
		if a.Token != "" {
			if err := validateSecret("auth.token", a.Token); err != nil {
				return c, "", false, err
			}
		}
		token = a.Token
	}
	n := c
	if u.DisplayName.IsSet() {
		n.DisplayName = optionalText(u.DisplayName)
	}
	if p, ok := u.Metadata.Get(); ok {
		n.Metadata = p.apply(c.Metadata, false)
	}
	if err := cmp.Or(atMostPtr("display_name", n.DisplayName, MaxVaultName), validateMetadata("metadata", n.Metadata)); err != nil {
		return c, "", false, err
	}
	return n, token, token != "" || !sameJSON(c, n), nil
}
