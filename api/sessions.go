package api

import (
	"cmp"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
)

// Limits of sessions (reference sections 1.9 and 6.1).
const (
	MaxInitialEvents = 50
	MaxResources     = 500
	MaxMemoryStores  = 8
	MaxVaults        = 50
	MaxTitle         = 1024
	maxInstructions  = 4096
	maxID            = 128
)

// SessionStatus is a session's or a thread's status.
type SessionStatus string

// The statuses.
const (
	StatusIdle         SessionStatus = "idle"
	StatusRunning      SessionStatus = "running"
	StatusRescheduling SessionStatus = "rescheduling"
	StatusTerminated   SessionStatus = "terminated"
)

// AgentRef names the agent of a session in one of three forms: an id (newest
// version), an id with a version, an id with overrides.
type AgentRef struct {
	ID        string
	Version   *int64          // nil = newest
	Overrides *AgentOverrides // nil = none
}

type agentRefObject struct {
	Type    string `json:"type"`
	ID      string `json:"id"`
	Version *int64 `json:"version,omitzero"`
	AgentOverrides
}

// MarshalJSON writes the shortest form.
func (r AgentRef) MarshalJSON() ([]byte, error) {
	switch {
	case r.Overrides != nil:
		return Encode(agentRefObject{Type: "agent_with_overrides", ID: r.ID, Version: r.Version, AgentOverrides: *r.Overrides})
	case r.Version != nil:
		return Encode(agentRefObject{Type: "agent", ID: r.ID, Version: r.Version})
	}
	return Encode(r.ID)
}

// UnmarshalJSON reads any form.
func (r *AgentRef) UnmarshalJSON(data []byte) error {
	*r = AgentRef{}
	if firstByte(data) != '{' {
		return unmarshal(data, &r.ID)
	}
	var o agentRefObject
	if err := unmarshal(data, &o); err != nil {
		return err
	}
	r.ID, r.Version = o.ID, o.Version
	switch o.Type {
	case "agent":
	case "agent_with_overrides":
		r.Overrides = &o.AgentOverrides
	default:
		return badField("type", "is %q; use \"agent\" or \"agent_with_overrides\"", short(o.Type))
	}
	return nil
}

func (r AgentRef) validate(path string) error {
	if err := required(path, r.ID, maxID); err != nil {
		return err
	}
	if r.Version != nil && *r.Version < 1 {
		return Invalid(path+".version", "must be at least 1")
	}
	if o := r.Overrides; o != nil && o.Model.IsSet() {
		if m, ok := o.Model.Get(); !ok || m.ID == "" {
			return Invalid(path+".model", "cannot be cleared (%s); leave it out to use the agent's", CodeAgentModelRequired).withCode(CodeAgentModelRequired)
		}
	}
	return nil
}

// SessionCreate is the body of POST /v1/sessions (reference section 6.1).
type SessionCreate struct {
	Agent         AgentRef          `json:"agent"`
	EnvironmentID string            `json:"environment_id"`
	Title         *string           `json:"title,omitzero"`
	Metadata      map[string]string `json:"metadata,omitzero"`
	Resources     []ResourceParams  `json:"resources,omitzero"`
	VaultIDs      []string          `json:"vault_ids,omitzero"`
	Budget        *Budget           `json:"budget,omitzero"`
	InitialEvents ClientEvents      `json:"initial_events,omitzero"`
}

// Validate applies the rules of reference section 6.1. Whether the agent's
// overrides are sound shows when Snapshot is made.
func (s SessionCreate) Validate() error {
	err := cmp.Or(s.Agent.validate("agent"), required("environment_id", s.EnvironmentID, maxID),
		atMostPtr("title", s.Title, MaxTitle), validateMetadata("metadata", s.Metadata), s.Budget.validate("budget"),
		validateResources("resources", s.Resources))
	if err != nil {
		return err
	}
	if len(s.VaultIDs) > MaxVaults {
		return Invalid("vault_ids", "holds %d vaults; at most %d are allowed", len(s.VaultIDs), MaxVaults)
	}
	for i, id := range s.VaultIDs {
		if err := required(index("vault_ids", i), id, maxID); err != nil {
			return err
		}
	}
	return s.InitialEvents.validateInitial("initial_events")
}

// SessionAgentUpdate is agent in an update of a session.
type SessionAgentUpdate struct {
	Tools      Optional[[]ToolParams] `json:"tools,omitzero"`
	MCPServers Optional[[]MCPServer]  `json:"mcp_servers,omitzero"`
}

// SessionUpdate is the body of POST /v1/sessions/{id} (reference section 6.3).
type SessionUpdate struct {
	Title    Optional[string]             `json:"title,omitzero"`
	Metadata Optional[MetadataPatch]      `json:"metadata,omitzero"`
	Agent    Optional[SessionAgentUpdate] `json:"agent,omitzero"`
	Budget   Optional[Budget]             `json:"budget,omitzero"`
	VaultIDs Optional[[]string]           `json:"vault_ids,omitzero"`
}

// Validate checks what can be checked without the stored session.
func (u SessionUpdate) Validate() error {
	if u.VaultIDs.IsSet() {
		return Invalid("vault_ids", "cannot change on a session; create another session")
	}
	if u.Agent.IsNull() {
		return Invalid("agent", "cannot be cleared; leave it out to keep it")
	}
	if t, ok := u.Title.Get(); ok {
		if err := atMost("title", t, MaxTitle); err != nil {
			return err
		}
	}
	if b, ok := u.Budget.Get(); ok {
		return b.validate("budget")
	}
	return nil
}

// SessionConfig is the part of a session that an update can change.
type SessionConfig struct {
	Title    *string
	Metadata Metadata
	Agent    SessionAgent
	Budget   *Budget
}

// ApplySessionUpdate applies an update. spent is the session's list cost so
// far, in cents. event holds what changed; it is nil when nothing did.
func ApplySessionUpdate(c SessionConfig, u SessionUpdate, spent int64) (updated SessionConfig, event *SessionUpdated, err error) {
	if err := u.Validate(); err != nil {
		return c, nil, err
	}
	n, ev := c, SessionUpdated{}
	if u.Title.IsSet() {
		n.Title = nil
		if v, ok := u.Title.Get(); ok {
			n.Title = &v
		}
		if !sameJSON(c.Title, n.Title) {
			ev.Title = u.Title
		}
	}
	if p, ok := u.Metadata.Get(); ok {
		n.Metadata = p.apply(c.Metadata, false)
		if err := validateMetadata("metadata", n.Metadata); err != nil {
			return c, nil, err
		}
		if !sameJSON(c.Metadata, n.Metadata) {
			ev.Metadata = Some(n.Metadata)
		}
	}
	if a, ok := u.Agent.Get(); ok {
		if err := n.Agent.replaceLists(a.Tools, a.MCPServers, Optional[[]Skill]{}); err != nil {
			return c, nil, under("agent", err)
		}
		if err := n.Agent.AgentSpec.validate(); err != nil {
			return c, nil, under("agent", err)
		}
		if !sameJSON(c.Agent, n.Agent) {
			ev.Agent = Some(n.Agent)
		}
	}
	if u.Budget.IsSet() {
		if n.Budget, err = changeBudget(c.Budget, u.Budget, spent); err != nil {
			return c, nil, err
		}
		if !sameJSON(c.Budget, n.Budget) {
			ev.Budget = u.Budget
		}
	}
	if !ev.Title.IsSet() && !ev.Metadata.IsSet() && !ev.Agent.IsSet() && !ev.Budget.IsSet() {
		return c, nil, nil
	}
	return n, &ev, nil
}

// changeBudget raises or removes a budget. A session without one gets none,
// also when a former one was removed (reference section 6.3).
func changeBudget(old *Budget, o Optional[Budget], spent int64) (*Budget, error) {
	b, ok := o.Get()
	if !ok {
		return nil, nil
	}
	if old == nil {
		return nil, Invalid("budget", "cannot be added to a session that was created without one (%s); create another session", CodeBudgetCreateOnly).
			withCode(CodeBudgetCreateOnly)
	}
	limit, err := strconv.ParseInt(b.MaxListCost.Amount, 10, 64)
	if err != nil || limit <= spent {
		return nil, Invalid("budget.max_list_cost.amount", "must exceed the cost so far, %d (%s)", spent, CodeBudgetNotRaised).withCode(CodeBudgetNotRaised)
	}
	return &b, nil
}

// SessionStats are a session's times in seconds.
type SessionStats struct {
	ActiveSeconds   float64 `json:"active_seconds"`
	DurationSeconds float64 `json:"duration_seconds"`
}

// Session is the session object (reference section 6.2).
type Session struct {
	Type               string                `json:"type"`
	ID                 string                `json:"id"`
	Status             SessionStatus         `json:"status"`
	Agent              SessionAgent          `json:"agent"`
	EnvironmentID      string                `json:"environment_id"`
	Title              *string               `json:"title"`
	Metadata           Metadata              `json:"metadata"`
	Resources          List[json.RawMessage] `json:"resources"`
	VaultIDs           List[string]          `json:"vault_ids"`
	Budget             *Budget               `json:"budget"`
	OutcomeEvaluations List[json.RawMessage] `json:"outcome_evaluations"`
	Stats              SessionStats          `json:"stats"`
	Usage              Usage                 `json:"usage"`
	DeploymentID       *string               `json:"deployment_id"`
	CreatedAt          Time                  `json:"created_at"`
	UpdatedAt          Time                  `json:"updated_at"`
	ArchivedAt         *Time                 `json:"archived_at"`
	// Planaria is what only this server knows; official clients ignore it.
	Planaria *SessionExtension `json:"planaria,omitzero"`
}

// SessionExtension is what a session shows beyond the Managed Agents API.
type SessionExtension struct {
	Paused     bool        `json:"paused"`
	StopReason *StopReason `json:"stop_reason"` // of the last idle, null before the first
	HeadSeq    int64       `json:"head_seq"`
	InDoubt    int64       `json:"in_doubt"`          // effects in doubt
	Damaged    string      `json:"damaged,omitzero"`  // why the log is refused
	WakeAt     *Time       `json:"wake_at,omitzero"`  // when it goes on by itself
	Parent     string      `json:"parent,omitzero"`   // of a fork
	ForkSeq    int64       `json:"fork_seq,omitzero"` // of a fork
}

// MarshalJSON sets the type.
func (s Session) MarshalJSON() ([]byte, error) {
	type shadow Session
	s.Type = "session"
	return Encode(shadow(s))
}

// TimeRange bounds a time; zero ends are open.
type TimeRange struct{ GT, GTE, LT, LTE Time }

func (r TimeRange) set(q url.Values, key string) {
	setTime(q, key+"[gt]", r.GT)
	setTime(q, key+"[gte]", r.GTE)
	setTime(q, key+"[lt]", r.LT)
	setTime(q, key+"[lte]", r.LTE)
}

// SessionListParams selects sessions (reference section 1.7).
type SessionListParams struct {
	AgentID         string
	AgentVersion    int64
	Statuses        []SessionStatus
	IncludeArchived bool
	CreatedAt       TimeRange
	Order           string // asc, desc
	Limit           int
	Page            string
}

// Query is the query string.
func (p SessionListParams) Query() url.Values {
	q := url.Values{}
	setString(q, "agent_id", p.AgentID)
	if p.AgentVersion > 0 {
		q.Set("agent_version", strconv.FormatInt(p.AgentVersion, 10))
	}
	for _, s := range p.Statuses {
		q.Add("statuses[]", string(s))
	}
	if p.IncludeArchived {
		q.Set("include_archived", "true")
	}
	p.CreatedAt.set(q, "created_at")
	setString(q, "order", p.Order)
	setPage(q, p.Limit, p.Page)
	return q
}

// ListParams selects configuration objects.
type ListParams struct {
	IncludeArchived bool
	CreatedAt       TimeRange
	Limit           int
	Page            string
}

// Query is the query string.
func (p ListParams) Query() url.Values {
	q := url.Values{}
	if p.IncludeArchived {
		q.Set("include_archived", "true")
	}
	p.CreatedAt.set(q, "created_at")
	setPage(q, p.Limit, p.Page)
	return q
}

// pathID escapes an id for a path; "." and ".." would change it.
func pathID(id string) string {
	return strings.ReplaceAll(url.PathEscape(id), ".", "%2E")
}
