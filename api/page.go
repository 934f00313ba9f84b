package api

// Page is one page of a list. NextPage is null on the last one; an empty page
// may still have a next.
type Page[T any] struct {
	Data     List[T] `json:"data"`
	NextPage *string `json:"next_page"`
}

// SessionPage is one page of sessions, which can be walked both ways.
type SessionPage struct {
	Data     List[Session] `json:"data"`
	NextPage *string       `json:"next_page"`
	PrevPage *string       `json:"prev_page"`
}

// Deleted is the answer to a deletion; Type is the object's name and "_deleted".
type Deleted struct {
	ID   string `json:"id"`
	Type string `json:"type"`
}

// The types of deletions.
const (
	DeletedEnvironment = "environment_deleted"
	DeletedSession     = "session_deleted"
	DeletedVault       = "vault_deleted"
	DeletedCredential  = "vault_credential_deleted"
	DeletedConnector   = "connector_deleted"
	DeletedAPIKey      = "api_key_deleted"
	DeletedFile        = "file_deleted"
	DeletedResource    = "session_resource_deleted"
)
