package api

import "encoding/json"

// ThreadStats are a thread's times in seconds.
type ThreadStats struct {
	ActiveSeconds   float64 `json:"active_seconds"`
	DurationSeconds float64 `json:"duration_seconds"`
	StartupSeconds  float64 `json:"startup_seconds"`
}

// ThreadAgent is the agent of a thread: a snapshot without multiagent.
type ThreadAgent struct{ SessionAgent }

// MarshalJSON leaves multiagent out.
func (a ThreadAgent) MarshalJSON() ([]byte, error) {
	return Encode(struct {
		Type              string            `json:"type"`
		ID                string            `json:"id"`
		Version           int64             `json:"version"`
		Name              string            `json:"name"`
		Description       *string           `json:"description"`
		System            *string           `json:"system"`
		Model             ModelConfig       `json:"model"`
		Tools             List[Tool]        `json:"tools"`
		MCPServers        List[MCPServer]   `json:"mcp_servers"`
		Skills            List[Skill]       `json:"skills"`
		ExecutionIdentity ExecutionIdentity `json:"execution_identity"`
	}{"agent", a.ID, a.Version, a.Name, a.Description, a.System, a.Model, a.Tools, a.MCPServers, a.Skills, a.ExecutionIdentity})
}

// UnmarshalJSON reads it back.
func (a *ThreadAgent) UnmarshalJSON(data []byte) error { return unmarshal(data, &a.SessionAgent) }

// Thread is the session thread object (reference section 8). Stats is null
// until the first transition, Usage until the first idle.
type Thread struct {
	Type           string          `json:"type"`
	ID             string          `json:"id"`
	SessionID      string          `json:"session_id"`
	ParentThreadID *string         `json:"parent_thread_id"`
	Agent          json.RawMessage `json:"agent"` // ThreadAgent, or an advisor or inline agent
	Status         SessionStatus   `json:"status"`
	Stats          *ThreadStats    `json:"stats"`
	Usage          *Usage          `json:"usage"`
	WorkflowRunID  *string         `json:"workflow_run_id"`
	CreatedAt      Time            `json:"created_at"`
	UpdatedAt      Time            `json:"updated_at"`
	ArchivedAt     *Time           `json:"archived_at"`
}

// MarshalJSON sets the type.
func (t Thread) MarshalJSON() ([]byte, error) {
	type shadow Thread
	t.Type = "session_thread"
	return Encode(shadow(t))
}

// SetAgent fills in the agent of a thread from a session's snapshot.
func (t *Thread) SetAgent(a SessionAgent) error {
	raw, err := Encode(ThreadAgent{a})
	t.Agent = raw
	return err
}
