package api

import (
	"cmp"
	"encoding/json"
	"slices"
	"strings"
)

// Limits of agents (reference sections 1.9, 3.1 and 11.5).
const (
	MaxAgentName    = 256
	MaxDescription  = 2048
	MaxSystem       = 100_000
	MaxMCPServers   = 20
	MaxSkills       = 500
	MaxModelID      = 256
	maxMCPName      = 255
	defaultEffort   = "high"
	defaultSpeed    = "standard"
	identityDefault = "service_account"
)

// Effort is how hard a model works: low, medium, high, xhigh, max. It is read
// as a string or as {"type": …} and written as the latter.
type Effort string

// MarshalJSON writes the object form.
func (e Effort) MarshalJSON() ([]byte, error) { return Encode(map[string]string{"type": string(e)}) }

// UnmarshalJSON reads either form.
func (e *Effort) UnmarshalJSON(data []byte) error {
	var s struct {
		Type string `json:"type"`
	}
	if firstByte(data) == '{' {
		err := unmarshal(data, &s)
		*e = Effort(s.Type)
		return err
	}
	err := unmarshal(data, &s.Type)
	*e = Effort(s.Type)
	return err
}

// ModelConfig names a model and how it is run. It is read as a bare id too.
type ModelConfig struct {
	ID           string `json:"id"`
	Effort       Effort `json:"effort,omitzero"`
	Speed        string `json:"speed,omitzero"`
	InferenceGeo string `json:"inference_geo,omitzero"`
}

// UnmarshalJSON reads a string or an object.
func (m *ModelConfig) UnmarshalJSON(data []byte) error {
	type shadow ModelConfig
	switch firstByte(data) {
	case '"':
		*m = ModelConfig{}
		return unmarshal(data, &m.ID)
	case '{', 'n':
		var s shadow
		err := unmarshal(data, &s)
		*m = ModelConfig(s)
		return err
	}
	return badField("", "must be a model id or an object with id")
}

func (m ModelConfig) validate(path string) error {
	if m.ID == "" {
		return Invalid(path, "is required; name a model, such as \"claude-opus-5-5\"").withCode(CodeAgentModelRequired)
	}
	if err := required(sub(path, "id"), m.ID, MaxModelID); err != nil {
		return err
	}
	if m.Effort != "" {
		if err := oneOf(sub(path, "effort"), string(m.Effort), "low", "medium", "high", "xhigh", "max"); err != nil {
			return err
		}
	}
	if m.Speed != "" {
		return oneOf(sub(path, "speed"), m.Speed, "standard", "fast")
	}
	return nil
}

// resolve fills in the defaults of effort and speed.
func (m ModelConfig) resolve() ModelConfig {
	m.Effort = cmp.Or(m.Effort, defaultEffort)
	m.Speed = cmp.Or(m.Speed, defaultSpeed)
	return m
}

// MCPServer declares a server by URL. Its credentials come from vaults.
type MCPServer struct {
	Type string `json:"type"`
	Name string `json:"name"`
	URL  string `json:"url"` // http, https, or planaria:<connector name>
}

// Skill names a skill of an agent; Version is concrete in objects.
type Skill struct {
	Type    string `json:"type"` // anthropic, custom
	SkillID string `json:"skill_id"`
	Version string `json:"version,omitzero"`
}

// MarshalJSON writes the version also when it is empty: it is required in objects.
func (s Skill) MarshalJSON() ([]byte, error) {
	return Encode(struct {
		Type    string `json:"type"`
		SkillID string `json:"skill_id"`
		Version string `json:"version"`
	}(s))
}

// ExecutionIdentity is the principal for which an agent runs.
type ExecutionIdentity struct {
	Type    string `json:"type"` // service_account, aws_role
	RoleARN string `json:"role_arn,omitzero"`
}

func (e ExecutionIdentity) validate(path string) error {
	if err := oneOf(sub(path, "type"), e.Type, identityDefault, "aws_role"); err != nil {
		return err
	}
	if e.Type == "aws_role" {
		return required(sub(path, "role_arn"), e.RoleARN, maxURL)
	}
	return nil
}

// AgentCreate is the body of POST /v1/agents (reference section 3.1).
type AgentCreate struct {
	Name              string             `json:"name"`
	Model             ModelConfig        `json:"model"`
	Description       *string            `json:"description,omitzero"`
	System            *string            `json:"system,omitzero"`
	Tools             []ToolParams       `json:"tools,omitzero"`
	MCPServers        []MCPServer        `json:"mcp_servers,omitzero"`
	Skills            []Skill            `json:"skills,omitzero"`
	Multiagent        json.RawMessage    `json:"multiagent,omitzero"`
	ExecutionIdentity *ExecutionIdentity `json:"execution_identity,omitzero"`
	Metadata          map[string]string  `json:"metadata,omitzero"`
}

// Validate applies the rules of reference sections 3.1, 11.1 and 12.1.
func (a AgentCreate) Validate() error {
	_, err := ResolveAgent(a)
	return err
}

// AgentSpec is what an agent and a session's snapshot of it have in common.
type AgentSpec struct {
	Name              string            `json:"name"`
	Description       *string           `json:"description"`
	System            *string           `json:"system"`
	Model             ModelConfig       `json:"model"`
	Tools             List[Tool]        `json:"tools"`
	MCPServers        List[MCPServer]   `json:"mcp_servers"`
	Skills            List[Skill]       `json:"skills"`
	Multiagent        json.RawMessage   `json:"multiagent"`
	ExecutionIdentity ExecutionIdentity `json:"execution_identity"`
}

// Agent is the agent object (reference section 3.2): one version of it.
type Agent struct {
	Type    string `json:"type"`
	ID      string `json:"id"`
	Version int64  `json:"version"`
	AgentSpec
	Metadata   Metadata `json:"metadata"`
	CreatedAt  Time     `json:"created_at"`
	UpdatedAt  Time     `json:"updated_at"`
	ArchivedAt *Time    `json:"archived_at"`
}

// MarshalJSON sets the type.
func (a Agent) MarshalJSON() ([]byte, error) {
	type shadow Agent
	a.Type = "agent"
	return Encode(shadow(a))
}

// SessionAgent is the snapshot of an agent in a session (reference section 6.2).
type SessionAgent struct {
	Type    string `json:"type"`
	ID      string `json:"id"`
	Version int64  `json:"version"`
	AgentSpec
}

// MarshalJSON sets the type.
func (a SessionAgent) MarshalJSON() ([]byte, error) {
	type shadow SessionAgent
	a.Type = "agent"
	return Encode(shadow(a))
}

// AgentUpdate is the body of POST /v1/agents/{id} (reference section 3.3).
type AgentUpdate struct {
	Version           Optional[int64]             `json:"version,omitzero"`
	Name              Optional[string]            `json:"name,omitzero"`
	Model             Optional[ModelConfig]       `json:"model,omitzero"`
	Description       Optional[string]            `json:"description,omitzero"`
	System            Optional[string]            `json:"system,omitzero"`
	Tools             Optional[[]ToolParams]      `json:"tools,omitzero"`
	MCPServers        Optional[[]MCPServer]       `json:"mcp_servers,omitzero"`
	Skills            Optional[[]Skill]           `json:"skills,omitzero"`
	Multiagent        Optional[json.RawMessage]   `json:"multiagent,omitzero"`
	ExecutionIdentity Optional[ExecutionIdentity] `json:"execution_identity,omitzero"`
	Metadata          Optional[MetadataPatch]     `json:"metadata,omitzero"`
}

// Validate checks what can be checked without the stored agent.
func (u AgentUpdate) Validate() error {
	if v, ok := u.Version.Get(); ok && v < 1 {
		return Invalid("version", "must be at least 1")
	}
	if u.Name.IsNull() {
		return Invalid("name", "cannot be cleared; leave it out to keep it")
	}
	if m, ok := u.Model.Get(); u.Model.IsSet() && (!ok || m.ID == "") {
		return Invalid("model", "cannot be cleared; leave it out to keep it").withCode(CodeAgentModelRequired)
	}
	return nil
}

// ResolveAgent makes the agent object of a valid request: version 1, defaults
// filled in. Id and times are the caller's.
func ResolveAgent(c AgentCreate) (Agent, error) {
	if err := required("name", c.Name, MaxAgentName); err != nil {
		return Agent{}, err
	}
	if err := c.Model.validate("model"); err != nil {
		return Agent{}, err
	}
	tools, err := resolveTools("tools", c.Tools)
	if err != nil {
		return Agent{}, err
	}
	a := Agent{Type: "agent", Version: 1, Metadata: MetadataPatch(nil).apply(c.Metadata, false)}
	a.AgentSpec = AgentSpec{
		Name: c.Name, Description: nilIfEmpty(c.Description), System: nilIfEmpty(c.System),
		Model: c.Model.resolve(), Tools: tools, MCPServers: resolveServers(c.MCPServers),
		Skills: resolveSkills(c.Skills), Multiagent: nullIfAbsent(c.Multiagent),
		ExecutionIdentity: ExecutionIdentity{Type: identityDefault},
	}
	if c.ExecutionIdentity != nil {
		a.ExecutionIdentity = *c.ExecutionIdentity
	}
	return a, a.validate()
}

// validate checks the whole of a resolved agent, so that creation, update and
// overrides share one set of rules.
func (a Agent) validate() error {
	return cmp.Or(a.AgentSpec.validate(), validateMetadata("metadata", a.Metadata))
}

func (s AgentSpec) validate() error {
	return cmp.Or(
		required("name", s.Name, MaxAgentName),
		atMostPtr("description", s.Description, MaxDescription),
		atMostPtr("system", s.System, MaxSystem),
		s.Model.validate("model"),
		validateServers("mcp_servers", s.MCPServers),
		validateReferences(s.Tools, s.MCPServers),
		validateSkills("skills", s.Skills),
		validateMultiagent("multiagent", s.Multiagent),
		s.ExecutionIdentity.validate("execution_identity"),
	)
}

// ApplyUpdate applies an update to the newest version of an agent. changed says
// whether that makes a new version; then Version is one higher and UpdatedAt is
// the caller's to set. A wrong Version is a 409 also when nothing would change.
func ApplyUpdate(a Agent, u AgentUpdate) (updated Agent, changed bool, err error) {
	if err := u.Validate(); err != nil {
		return a, false, err
	}
	if v, ok := u.Version.Get(); ok && v != a.Version {
		return a, false, NewError(ErrConflict, "version: the agent is at version %d, not %d; read it again and repeat the update", a.Version, v)
	}
	if a.ArchivedAt != nil {
		return a, false, Invalid("", "agent %s is archived and cannot be updated; create another one", a.ID)
	}
	n := a
	if v, ok := u.Name.Get(); ok {
		n.Name = v
	}
	if m, ok := u.Model.Get(); ok {
		n.Model = replaceModel(a.Model, m)
	}
	if u.Description.IsSet() {
		n.Description = optionalText(u.Description)
	}
	if u.System.IsSet() {
		n.System = optionalText(u.System)
	}
	if err := n.replaceLists(u.Tools, u.MCPServers, u.Skills); err != nil {
		return a, false, err
	}
	if u.Multiagent.IsSet() {
		raw, _ := u.Multiagent.Get()
		n.Multiagent = mergeMultiagent(a.Multiagent, raw)
	}
	if u.ExecutionIdentity.IsSet() {
		n.ExecutionIdentity = ExecutionIdentity{Type: identityDefault}
		if e, ok := u.ExecutionIdentity.Get(); ok {
			n.ExecutionIdentity = e
		}
	}
	if p, ok := u.Metadata.Get(); ok {
		n.Metadata = p.apply(a.Metadata, false)
	}
	if err := n.validate(); err != nil {
		return a, false, err
	}
	if sameJSON(a, n) {
		return a, false, nil
	}
	n.Version++
	return n, true, nil
}

// replaceModel replaces a model as a whole, except that an omitted effort keeps
// the stored one while the id is the same.
func replaceModel(old, m ModelConfig) ModelConfig {
	if m.Effort == "" && m.ID == old.ID {
		m.Effort = old.Effort
	}
	return m.resolve()
}

func (s *AgentSpec) replaceLists(tools Optional[[]ToolParams], servers Optional[[]MCPServer], skills Optional[[]Skill]) error {
	if tools.IsSet() {
		params, _ := tools.Get()
		resolved, err := resolveTools("tools", params)
		if err != nil {
			return err
		}
		s.Tools = resolved
	}
	if servers.IsSet() {
		v, _ := servers.Get()
		s.MCPServers = resolveServers(v)
	}
	if skills.IsSet() {
		v, _ := skills.Get()
		s.Skills = resolveSkills(v)
	}
	return nil
}

// AgentOverrides replaces values of an agent for one session (reference
// section 6.1): omitted keeps, null or empty clears, a value replaces.
type AgentOverrides struct {
	Model      Optional[ModelConfig]  `json:"model,omitzero"`
	System     Optional[string]       `json:"system,omitzero"`
	Tools      Optional[[]ToolParams] `json:"tools,omitzero"`
	MCPServers Optional[[]MCPServer]  `json:"mcp_servers,omitzero"`
	Skills     Optional[[]Skill]      `json:"skills,omitzero"`
}

// Snapshot makes the agent of a session. o may be nil. Paths in errors begin
// with "agent", where the overrides stand in the request.
func Snapshot(a Agent, o *AgentOverrides) (SessionAgent, error) {
	s := SessionAgent{Type: "agent", ID: a.ID, Version: a.Version, AgentSpec: a.AgentSpec}
	if o == nil {
		return s, nil
	}
	if o.Model.IsSet() {
		m, ok := o.Model.Get()
		if !ok || m.ID == "" {
			return s, Invalid("agent.model", "cannot be cleared (%s); leave it out to use the agent's", CodeAgentModelRequired).withCode(CodeAgentModelRequired)
		}
		s.Model = replaceModel(a.Model, m)
	}
	if o.System.IsSet() {
		s.System = optionalText(o.System)
	}
	if err := s.replaceLists(o.Tools, o.MCPServers, o.Skills); err != nil {
		return s, under("agent", err)
	}
	return s, under("agent", s.AgentSpec.validate())
}

// under puts a path before the path of an error.
func under(path string, err error) error {
	e, ok := err.(*Error)
	if !ok || e == nil {
		return err
	}
	out := *e
	switch field := e.Field(); {
	case field == "":
		out.Message = path + ": " + e.Message
	default:
		out.Message = path + "." + e.Message
		out.Details = &ErrorDetails{ErrorCode: e.Code(), Field: sub(path, field)}
	}
	return &out
}

func resolveServers(in []MCPServer) List[MCPServer] {
	out := make(List[MCPServer], 0, len(in))
	for _, s := range in {
		s.Type = cmp.Or(s.Type, "url")
		out = append(out, s)
	}
	return out
}

func validateServers(path string, servers []MCPServer) error {
	if len(servers) > MaxMCPServers {
		return Invalid(path, "holds %d servers; at most %d are allowed", len(servers), MaxMCPServers)
	}
	var names []string
	for i, s := range servers {
		p := index(path, i)
		err := cmp.Or(oneOf(p+".type", s.Type, "url"), required(p+".name", s.Name, maxMCPName))
		if err != nil {
			return err
		}
		if slices.Contains(names, s.Name) {
			return Invalid(p+".name", "%q is used twice; names must be unique", s.Name)
		}
		names = append(names, s.Name)
		if name, ok := strings.CutPrefix(s.URL, connectorScheme); ok {
			if !connectorName().MatchString(name) {
				return Invalid(p+".url", "%q is not a connector's name; use planaria:<name> with [a-z0-9-]{1,63}", short(name))
			}
			continue
		}
		if err := validateURL(p+".url", s.URL); err != nil {
			return err
		}
	}
	return nil
}

// validateReferences wants one mcp_toolset for each server and a server for each mcp_toolset.
func validateReferences(tools []Tool, servers []MCPServer) error {
	used := make(map[string]bool)
	for i, t := range tools {
		if t.Type != ToolsetMCP {
			continue
		}
		p := index("tools", i) + ".mcp_server_name"
		if !slices.ContainsFunc(servers, func(s MCPServer) bool { return s.Name == t.MCPServerName }) {
			return Invalid(p, "names %q, which is not in mcp_servers; declare the server there", short(t.MCPServerName))
		}
		if used[t.MCPServerName] {
			return Invalid(p, "names %q, which another mcp_toolset already uses; keep one per server", t.MCPServerName)
		}
		used[t.MCPServerName] = true
	}
	for i, s := range servers {
		if !used[s.Name] {
			return Invalid(index("mcp_servers", i)+".name", "%q is not used; add {\"type\":\"mcp_toolset\",\"mcp_server_name\":%q} to tools", s.Name, s.Name)
		}
	}
	return nil
}

func resolveSkills(in []Skill) List[Skill] {
	out := make(List[Skill], 0, len(in))
	for _, s := range in {
		s.Version = cmp.Or(s.Version, "latest")
		out = append(out, s)
	}
	return out
}

func validateSkills(path string, skills []Skill) error {
	if len(skills) > MaxSkills {
		return Invalid(path, "holds %d skills; at most %d are allowed", len(skills), MaxSkills)
	}
	for i, s := range skills {
		p := index(path, i)
		if err := cmp.Or(oneOf(p+".type", s.Type, "anthropic", "custom"), required(p+".skill_id", s.SkillID, maxMCPName)); err != nil {
			return err
		}
	}
	return nil
}

// The types of multiagent configurations. They are kept as they were given.
const (
	multiagentCoordinator = "coordinator"
	multiagentNew         = "multiagent_20261001"
)

func validateMultiagent(path string, raw json.RawMessage) error {
	if isNull(raw) {
		return nil
	}
	var m struct {
		Type   string            `json:"type"`
		Agents []json.RawMessage `json:"agents"`
	}
	if err := unmarshal(raw, &m); err != nil {
		return Invalid(path, "%v", err)
	}
	if err := oneOf(sub(path, "type"), m.Type, multiagentCoordinator, multiagentNew); err != nil {
		return err
	}
	if m.Type == multiagentCoordinator && (len(m.Agents) < 1 || len(m.Agents) > 20) {
		return Invalid(sub(path, "agents"), "must hold 1 to 20 agents, got %d", len(m.Agents))
	}
	return nil
}

// mergeMultiagent merges level by level where both have the newer type, and
// replaces otherwise.
func mergeMultiagent(old, new json.RawMessage) json.RawMessage {
	if isNull(new) {
		return nullIfAbsent(nil)
	}
	var a, b map[string]any
	if unmarshal(old, &a) != nil || unmarshal(new, &b) != nil || a["type"] != multiagentNew || b["type"] != multiagentNew {
		return new
	}
	out, err := Encode(mergeObjects(a, b))
	if err != nil {
		return new
	}
	return out
}

func mergeObjects(a, b map[string]any) map[string]any {
	out := make(map[string]any, len(a)+len(b))
	for k, v := range a {
		out[k] = v
	}
	for k, v := range b {
		was, isObj := out[k].(map[string]any)
		now, nowObj := v.(map[string]any)
		if isObj && nowObj && (now["type"] == nil || was["type"] == now["type"]) {
			out[k] = mergeObjects(was, now)
			continue
		}
		out[k] = v
	}
	return out
}

func nilIfEmpty(s *string) *string {
	if s == nil || *s == "" {
		return nil
	}
	return s
}

func optionalText(o Optional[string]) *string {
	v, ok := o.Get()
	if !ok || v == "" {
		return nil
	}
	return &v
}

func nullIfAbsent(raw json.RawMessage) json.RawMessage {
	if isNull(raw) {
		return json.RawMessage("null")
	}
	return raw
}
