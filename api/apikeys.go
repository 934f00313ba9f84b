package api

import "cmp"

// Role is what an API key may do.
type Role string

// The roles, from most to least.
const (
	RoleAdmin     Role = "admin"
	RoleOperator  Role = "operator"
	RoleDeveloper Role = "developer"
	RoleViewer    Role = "viewer"
)

// APIKeyCreate is the body of POST /v1/api_keys.
type APIKeyCreate struct {
	Name      string `json:"name"`
	Role      Role   `json:"role"`
	ExpiresAt *Time  `json:"expires_at,omitzero"`
	// WorkspaceID is the key's workspace; empty means that of the caller.
	WorkspaceID string `json:"workspace_id,omitzero"`
}

// Validate checks name and role.
func (k APIKeyCreate) Validate() error {
	return cmp.Or(required("name", k.Name, MaxAgentName),
		oneOf("role", string(k.Role), string(RoleAdmin), string(RoleOperator), string(RoleDeveloper), string(RoleViewer)),
		atMost("workspace_id", k.WorkspaceID, maxID))
}

// APIKey is the API key object.
type APIKey struct {
	Type        string `json:"type"`
	ID          string `json:"id"`
	WorkspaceID string `json:"workspace_id"`
	Name        string `json:"name"`
	Role        Role   `json:"role"`
	Hint        string `json:"hint"` // the last characters of the key
	CreatedAt   Time   `json:"created_at"`
	ExpiresAt   *Time  `json:"expires_at"`
	LastUsedAt  *Time  `json:"last_used_at"`
	RevokedAt   *Time  `json:"revoked_at"`
	// Key is the key itself: only in the answer that created it.
	Key Secret `json:"key,omitzero"`
}

// MarshalJSON sets the type.
func (k APIKey) MarshalJSON() ([]byte, error) {
	type shadow APIKey
	k.Type = "api_key"
	return Encode(shadow(k))
}
