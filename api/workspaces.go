package api

// WorkspaceCreate is the body of POST /v1/workspaces.
type WorkspaceCreate struct {
	Name string `json:"name"`
}

// Validate checks the name.
func (w WorkspaceCreate) Validate() error { return required("name", w.Name, MaxAgentName) }

// Workspace is the workspace object: a tenant.
type Workspace struct {
	Type       string `json:"type"`
	ID         string `json:"id"`
	Name       string `json:"name"`
	CreatedAt  Time   `json:"created_at"`
	ArchivedAt *Time  `json:"archived_at"`
}

// MarshalJSON sets the type.
func (w Workspace) MarshalJSON() ([]byte, error) {
	type shadow Workspace
	w.Type = "workspace"
	return Encode(shadow(w))
}
