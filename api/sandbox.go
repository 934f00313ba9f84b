package api

import (
	"context"
	"iter"
	"net/url"
)

// States of a session's sandbox.
const (
	SandboxNone      = "none"      // it never had one
	SandboxRunning   = "running"   // also while it lingers at rest
	SandboxSuspended = "suspended" // a snapshot holds all of it
	SandboxLost      = "lost"      // it died; the next call brings back what can be
)

// Sandbox is what a session's machine is now. An extension.
type Sandbox struct {
	Type       string                `json:"type"`
	SessionID  string                `json:"session_id"`
	State      string                `json:"state"`
	Node       *string               `json:"node"` // where it runs or ran
	Generation int64                 `json:"generation"`
	Image      *string               `json:"image"`  // digest of the root file system, as of the newest snapshot
	Since      *Time                 `json:"since"`  // when it came into this state
	Reason     *string               `json:"reason"` // of the newest change, where there is one
	Note       *string               `json:"note"`   // what the model was told of it
	Snapshots  List[SandboxSnapshot] `json:"snapshots"`
}

// MarshalJSON sets the type.
func (s Sandbox) MarshalJSON() ([]byte, error) {
	type shadow Sandbox
	s.Type = "sandbox"
	return Encode(shadow(s))
}

// SandboxSnapshot is a saved state of a sandbox, and as such a checkpoint of its
// session: Seq is the position in the log.
type SandboxSnapshot struct {
	Type        string       `json:"type"` // snapshot, checkpoint
	ID          string       `json:"id"`
	Seq         int64        `json:"seq"`
	Through     int64        `json:"through"` // results up to this seq are in it
	Name        *string      `json:"name"`
	Why         string       `json:"why"` // step, turn, interval, manual, commit, suspend
	Node        string       `json:"node"`
	Generation  int64        `json:"generation"`
	SizeBytes   int64        `json:"size_bytes"`   // of the image
	StoredBytes int64        `json:"stored_bytes"` // that packing added
	PauseMS     int64        `json:"pause_ms"`     // for so long the sandbox stood still
	Running     List[string] `json:"running"`      // calls that were under way in it
	CreatedAt   Time         `json:"created_at"`
	PackedAt    *Time        `json:"packed_at"` // null: only on the node's disk
	TestedAt    *Time        `json:"tested_at"` // newest time that a copy was restored
	Failed      *string      `json:"failed"`    // why the newest restore did not succeed
}

// CheckpointCreate is the body of POST /v1/sessions/{id}/checkpoints.
type CheckpointCreate struct {
	Name string `json:"name"`
}

// GetSandbox returns what a session's machine is now.
func (c *Client) GetSandbox(ctx context.Context, session string) (Sandbox, error) {
	return get[Sandbox](ctx, c, sessionPath(session, "/sandbox"), nil)
}

// CreateCheckpoint gives the session's machine, as it is now, a name.
func (c *Client) CreateCheckpoint(ctx context.Context, session, name string) (SandboxSnapshot, error) {
	return post[SandboxSnapshot](ctx, c, sessionPath(session, "/checkpoints"), CheckpointCreate{Name: name})
}

// AllCheckpoints walks the checkpoints of a session, newest first.
func (c *Client) AllCheckpoints(ctx context.Context, session string) iter.Seq2[SandboxSnapshot, error] {
	return all[SandboxSnapshot](ctx, c, sessionPath(session, "/checkpoints"), url.Values{})
}
