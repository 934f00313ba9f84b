package policy

import (
	"slices"
)

// Role is what an API key may be.
type Role string

// The roles of API keys (design section 9).
const (
	// RoleAdmin does everything in its workspace, keys included.
	RoleAdmin Role = "admin"
	// RoleOperator runs what others built: connectors, approvals, effects in
	// doubt, sessions, audit.
	RoleOperator Role = "operator"
	// RoleDeveloper builds: agents, environments, vaults, sessions.
	RoleDeveloper Role = "developer"
	// RoleViewer reads.
	RoleViewer Role = "viewer"
)

// Roles lists the roles, strongest first.
func Roles() []Role { return []Role{RoleAdmin, RoleOperator, RoleDeveloper, RoleViewer} }

// Valid reports whether r is one of the roles.
func (r Role) Valid() bool { return roleSet("aodv").has(r) }

// HomeWorkspace is the workspace that the first start makes. Its keys alone
// act on the whole installation: they are the installation's operators.
const HomeWorkspace = "default"

// Action is one thing that the REST API does, "noun.verb".
type Action string

// The actions of the REST API.
const (
	AgentsCreate      Action = "agents.create"
	AgentsUpdate      Action = "agents.update"
	AgentsArchive     Action = "agents.archive"
	AgentsRead        Action = "agents.read"
	EnvironmentsWrite Action = "environments.write"
	EnvironmentsRead  Action = "environments.read"
	SessionsCreate    Action = "sessions.create"
	SessionsUpdate    Action = "sessions.update"
	SessionsArchive   Action = "sessions.archive"
	SessionsDelete    Action = "sessions.delete"
	SessionsSend      Action = "sessions.send" // client events: messages, interrupts, tool results, confirmations
	SessionsPause     Action = "sessions.pause"
	SessionsResume    Action = "sessions.resume"
	SessionsRead      Action = "sessions.read" // objects, events, streams, threads
	EffectsRead       Action = "effects.read"
	EffectsSettle     Action = "effects.settle"
	ApprovalsRead     Action = "approvals.read"
	ApprovalsAnswer   Action = "approvals.answer"
	VaultsWrite       Action = "vaults.write" // vaults and their credentials; secrets are never read back
	VaultsRead        Action = "vaults.read"
	FilesWrite        Action = "files.write"
	FilesRead         Action = "files.read" // contents too
	ConnectorsWrite   Action = "connectors.write"
	ConnectorsRead    Action = "connectors.read"
	APIKeysWrite      Action = "api_keys.write"
	APIKeysRead       Action = "api_keys.read"
	UsageRead         Action = "usage.read"
	AuditRead         Action = "audit.read"
	WorkspacesWrite   Action = "workspaces.write"
	WorkspacesRead    Action = "workspaces.read"
	NodesRead         Action = "nodes.read"
)

// roleSet names roles by their first letters.
type roleSet string

func (s roleSet) has(r Role) bool {
	for _, c := range s {
		if letters[c] == r {
			return true
		}
	}
	return false
}

var letters = map[rune]Role{'a': RoleAdmin, 'o': RoleOperator, 'd': RoleDeveloper, 'v': RoleViewer}

// rule says who may do one action.
type rule struct {
	roles        roleSet
	installation bool // acts on the whole installation, not on one workspace
}

// rules has one row per action.
//
// A developer answers the questions of an agent's own permission policies,
// which are client events (sessions.send); approvals that an operator's
// contract demands are approvals.answer. Connectors may point at private
// addresses and declare what is safe to repeat, so they are the operator's.
var rules = map[Action]rule{
	AgentsCreate:      {roles: "ad"},
	AgentsUpdate:      {roles: "ad"},
	AgentsArchive:     {roles: "ad"},
	AgentsRead:        {roles: "aodv"},
	EnvironmentsWrite: {roles: "ad"},
	EnvironmentsRead:  {roles: "aodv"},
	SessionsCreate:    {roles: "aod"},
	SessionsUpdate:    {roles: "aod"},
	SessionsArchive:   {roles: "aod"},
	SessionsDelete:    {roles: "aod"},
	SessionsSend:      {roles: "aod"},
	SessionsPause:     {roles: "aod"},
	SessionsResume:    {roles: "aod"},
	SessionsRead:      {roles: "aodv"},
	EffectsRead:       {roles: "aodv"},
	EffectsSettle:     {roles: "ao"},
	ApprovalsRead:     {roles: "aodv"},
	ApprovalsAnswer:   {roles: "ao"},
	VaultsWrite:       {roles: "aod"},
	VaultsRead:        {roles: "aodv"},
	FilesWrite:        {roles: "aod"},
	FilesRead:         {roles: "aodv"},
	ConnectorsWrite:   {roles: "ao"},
	ConnectorsRead:    {roles: "aodv"},
	APIKeysWrite:      {roles: "a"},
	APIKeysRead:       {roles: "a"},
	UsageRead:         {roles: "aodv"},
	AuditRead:         {roles: "ao"},
	WorkspacesWrite:   {roles: "a", installation: true},
	WorkspacesRead:    {roles: "ao", installation: true},
	NodesRead:         {roles: "ao", installation: true},
}

// Actions lists every action, sorted.
func Actions() []Action {
	all := make([]Action, 0, len(rules))
	for a := range rules {
		all = append(all, a)
	}
	slices.Sort(all)
	return all
}
