// Package server is the REST API and its event streams over session and store.
//
// It holds no rule of the domain: it authenticates, asks policy, decodes with
// package api, calls one operation, encodes the answer. What is promised on the
// wire stands in the Managed Agents API reference; what goes beyond it in
// design section 9.
//
// Invariants:
//
//   - Every answer is JSON with status 200, or an error envelope; both carry a
//     request id. What is not in the table of errors.go is a 500 that says
//     nothing but "internal error"; the rest goes to the log.
//   - Every look-up is by the caller's workspace, so that an id of another
//     workspace looks exactly like an unknown one.
//   - A write, its audit row and its idempotency record commit together.
//   - A stream reads the log and never promises from memory: a reader that is
//     cut off, slow or late gets the rest by its cursor.
//
// It keeps no state but which requests are under way; that may be lost.
package server

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// Limits and times of the server.
const (
	// MaxBody is the largest request body (reference section 1.9).
	MaxBody = 32 << 20
	// PingEvery is how often a silent stream says that it lives; proxies cut
	// silent connections after 15 to 60 s (reference section 10.3).
	PingEvery = 10 * time.Second
	// WriteTimeout is how long one write to a stream may take. A reader that
	// does not take what it asked for in that time is cut off and comes back
	// with its cursor.
	WriteTimeout = 20 * time.Second
	// AnswerTimeout bounds a request that is not a stream.
	AnswerTimeout = 2 * time.Minute
)

// Sealer seals the secret of a credential. *vault.Master implements it.
type Sealer interface {
	Seal(ws, id string, s vault.Secret) ([]byte, error)
}

// Config wires a server. DB, Sessions and Master are required.
type Config struct {
	DB       *store.DB
	Sessions *session.Manager
	// Master seals credentials before they reach the store.
	Master Sealer
	// Node is this process; its audit chain and its idempotency records bear the name.
	Node store.NodeID
	// Version is shown by /healthz.
	Version string
	// Logger is slog.Default when nil.
	Logger *slog.Logger
	// WhoIs says who asks; the same function serves the console. Nil: API keys
	// of the store.
	WhoIs func(*http.Request) (Caller, error)
	// Metrics answers GET /metrics; nil: unknown path.
	Metrics http.Handler
	// Reset, if set, is called when a stream had to tell its reader that the
	// cursor is unknown.
	Reset func()
	// Ready says whether the process takes work; nil: whether the store answers.
	Ready func(context.Context) error
	// MaxBody, MaxFile (api.MaxFile), PingEvery and WriteTimeout replace the constants when not zero.
	MaxBody      int64
	MaxFile      int64
	PingEvery    time.Duration
	WriteTimeout time.Duration
}

// Caller is who asks, and for which workspace.
type Caller struct {
	policy.Principal
	KeyID store.APIKeyID
}

// ws is the caller's workspace.
func (c Caller) ws() store.WorkspaceID { return store.WorkspaceID(c.Workspace) }

type server struct {
	cfg      Config
	db       *store.DB
	sessions *session.Manager
	log      *slog.Logger
	mux      *http.ServeMux
	flight   flight
}

// New makes the handler of the whole API. It starts nothing.
func New(cfg Config) http.Handler {
	s := &server{cfg: cfg, db: cfg.DB, sessions: cfg.Sessions, log: cfg.Logger, mux: http.NewServeMux()}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.cfg.WhoIs == nil {
		s.cfg.WhoIs = s.whoIs
	}
	if s.cfg.MaxBody == 0 {
		s.cfg.MaxBody = MaxBody
	}
	if s.cfg.MaxFile == 0 {
		s.cfg.MaxFile = api.MaxFile
	}
	if s.cfg.PingEvery == 0 {
		s.cfg.PingEvery = PingEvery
	}
	if s.cfg.WriteTimeout == 0 {
		s.cfg.WriteTimeout = WriteTimeout
	}
	for _, r := range s.routes() {
		s.mux.Handle(r.pattern, s.serve(r))
	}
	s.mux.HandleFunc("GET /healthz", s.healthz)
	s.mux.HandleFunc("GET /readyz", s.readyz)
	if cfg.Metrics != nil {
		s.mux.Handle("GET /metrics", cfg.Metrics)
	}
	s.mux.HandleFunc("/", s.unknownPath)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(requestID, store.NewID("req_", s.db.Now()))
		s.mux.ServeHTTP(w, r)
	})
}

// requestID is the header that every answer carries.
const requestID = "request-id"

// route is one line of the API.
type route struct {
	pattern string
	action  policy.Action
	handle  handler
	// again gives the answer of a request that was done before, from the path
	// and from what keeps kept: the present state of what was written. Nil where
	// the answer itself is kept, which is never the case for content of sessions:
	// that lies sealed in the log and nowhere else.
	again handler
	// logged says that the session's own log proves the act, so that no audit
	// row is written.
	logged bool
	// stream handlers write the answer themselves.
	stream bool
	// receive takes the body in place of the wrapper, which would hold it whole,
	// and leaves in the call what stands for it.
	receive func(w http.ResponseWriter, c *call) error
}

// handler does one operation. The answer is encoded by the wrapper.
type handler func(ctx context.Context, c *call) (any, error)

func (s *server) routes() []route {
	return []route{
		{pattern: "POST /v1/agents", action: policy.AgentsCreate, handle: s.createAgent},
		{pattern: "GET /v1/agents", action: policy.AgentsRead, handle: s.listAgents},
		{pattern: "GET /v1/agents/{agent}", action: policy.AgentsRead, handle: s.getAgent},
		{pattern: "POST /v1/agents/{agent}", action: policy.AgentsUpdate, handle: s.updateAgent},
		{pattern: "POST /v1/agents/{agent}/archive", action: policy.AgentsArchive, handle: s.archiveAgent},
		{pattern: "GET /v1/agents/{agent}/versions", action: policy.AgentsRead, handle: s.listAgentVersions},

		{pattern: "POST /v1/environments", action: policy.EnvironmentsWrite, handle: s.createEnvironment},
		{pattern: "GET /v1/environments", action: policy.EnvironmentsRead, handle: s.listEnvironments},
		{pattern: "GET /v1/environments/{environment}", action: policy.EnvironmentsRead, handle: s.getEnvironment},
		{pattern: "POST /v1/environments/{environment}", action: policy.EnvironmentsWrite, handle: s.updateEnvironment},
		{pattern: "DELETE /v1/environments/{environment}", action: policy.EnvironmentsWrite, handle: s.deleteEnvironment},
		{pattern: "POST /v1/environments/{environment}/archive", action: policy.EnvironmentsWrite, handle: s.archiveEnvironment},

		{pattern: "POST /v1/sessions", action: policy.SessionsCreate, handle: s.createSession, again: s.createdSession, logged: true},
		{pattern: "GET /v1/sessions", action: policy.SessionsRead, handle: s.listSessions},
		{pattern: "GET /v1/sessions/{session}", action: policy.SessionsRead, handle: s.getSession},
		{pattern: "POST /v1/sessions/{session}", action: policy.SessionsUpdate, handle: s.updateSession, again: s.getSession},
		{pattern: "DELETE /v1/sessions/{session}", action: policy.SessionsDelete, handle: s.deleteSession},
		{pattern: "POST /v1/sessions/{session}/archive", action: policy.SessionsArchive, handle: s.archiveSession, again: s.getSession},
		{pattern: "POST /v1/sessions/{session}/pause", action: policy.SessionsPause, handle: s.pauseSession, again: s.getSession},
		{pattern: "POST /v1/sessions/{session}/resume", action: policy.SessionsResume, handle: s.resumeSession, again: s.getSession},

		{pattern: "GET /v1/sessions/{session}/events", action: policy.SessionsRead, handle: s.listEvents},
		{pattern: "POST /v1/sessions/{session}/events", action: policy.SessionsSend, handle: s.sendEvents, again: s.sentEvents, logged: true},
		{pattern: "GET /v1/sessions/{session}/events/stream", action: policy.SessionsRead, handle: s.streamEvents, stream: true},
		{pattern: "GET /v1/sessions/{session}/threads", action: policy.SessionsRead, handle: s.listThreads},
		{pattern: "GET /v1/sessions/{session}/threads/{thread}", action: policy.SessionsRead, handle: s.getThread},
		{pattern: "POST /v1/sessions/{session}/threads/{thread}/archive", action: policy.SessionsArchive, handle: s.archiveThread},
		{pattern: "GET /v1/sessions/{session}/threads/{thread}/events", action: policy.SessionsRead, handle: s.listThreadEvents},
		{pattern: "GET /v1/sessions/{session}/threads/{thread}/stream", action: policy.SessionsRead, handle: s.streamThread, stream: true},
		{pattern: "GET /v1/sessions/{session}/resources", action: policy.SessionsRead, handle: s.listResources},
		{pattern: "POST /v1/sessions/{session}/resources", action: policy.SessionsUpdate, handle: s.addResource, again: s.addedResource},
		{pattern: "GET /v1/sessions/{session}/resources/{resource}", action: policy.SessionsRead, handle: s.getResource},
		{pattern: "POST /v1/sessions/{session}/resources/{resource}", action: policy.SessionsUpdate, handle: s.updateResource, again: s.getResource},
		{pattern: "DELETE /v1/sessions/{session}/resources/{resource}", action: policy.SessionsUpdate, handle: s.deleteResource},
		{pattern: "GET /v1/sessions/{session}/sandbox", action: policy.SessionsRead, handle: s.getSandbox},
		{pattern: "GET /v1/sessions/{session}/checkpoints", action: policy.SessionsRead, handle: s.listCheckpoints},
		{pattern: "POST /v1/sessions/{session}/checkpoints", action: policy.SessionsUpdate, handle: s.createCheckpoint, again: s.createdCheckpoint},

		{pattern: "GET /v1/sessions/{session}/effects", action: policy.EffectsRead, handle: s.listSessionEffects},
		{pattern: "GET /v1/effects", action: policy.EffectsRead, handle: s.listEffects},
		{pattern: "GET /v1/effects/{effect}", action: policy.EffectsRead, handle: s.getEffect},
		{pattern: "POST /v1/effects/{effect}/settle", action: policy.EffectsSettle, handle: s.settleEffect, again: s.getEffect},
		{pattern: "GET /v1/approvals", action: policy.ApprovalsRead, handle: s.listApprovals},
		{pattern: "POST /v1/approvals/{effect}", action: policy.ApprovalsAnswer, handle: s.answerApproval, again: s.getEffect},

		{pattern: "POST /v1/vaults", action: policy.VaultsWrite, handle: s.createVault},
		{pattern: "GET /v1/vaults", action: policy.VaultsRead, handle: s.listVaults},
		{pattern: "GET /v1/vaults/{vault}", action: policy.VaultsRead, handle: s.getVault},
		{pattern: "POST /v1/vaults/{vault}", action: policy.VaultsWrite, handle: s.updateVault},
		{pattern: "DELETE /v1/vaults/{vault}", action: policy.VaultsWrite, handle: s.deleteVault},
		{pattern: "POST /v1/vaults/{vault}/archive", action: policy.VaultsWrite, handle: s.archiveVault},
		{pattern: "POST /v1/vaults/{vault}/credentials", action: policy.VaultsWrite, handle: s.createCredential},
		{pattern: "GET /v1/vaults/{vault}/credentials", action: policy.VaultsRead, handle: s.listCredentials},
		{pattern: "GET /v1/vaults/{vault}/credentials/{credential}", action: policy.VaultsRead, handle: s.getCredential},
		{pattern: "POST /v1/vaults/{vault}/credentials/{credential}", action: policy.VaultsWrite, handle: s.updateCredential},
		{pattern: "DELETE /v1/vaults/{vault}/credentials/{credential}", action: policy.VaultsWrite, handle: s.deleteCredential},
		{pattern: "POST /v1/vaults/{vault}/credentials/{credential}/archive", action: policy.VaultsWrite, handle: s.archiveCredential},
		{pattern: "POST /v1/vaults/{vault}/credentials/{credential}/mcp_oauth_validate", action: policy.VaultsWrite, handle: s.validateCredential},

		{pattern: "POST /v1/files", action: policy.FilesWrite, handle: s.createFile, again: s.createdFile, receive: s.receiveFile},
		{pattern: "GET /v1/files", action: policy.FilesRead, handle: s.listFiles},
		{pattern: "GET /v1/files/{file}", action: policy.FilesRead, handle: s.getFile},
		{pattern: "GET /v1/files/{file}/content", action: policy.FilesRead, handle: s.fileContent, stream: true},
		{pattern: "DELETE /v1/files/{file}", action: policy.FilesWrite, handle: s.deleteFile},

		{pattern: "POST /v1/connectors", action: policy.ConnectorsWrite, handle: s.createConnector},
		{pattern: "GET /v1/connectors", action: policy.ConnectorsRead, handle: s.listConnectors},
		{pattern: "GET /v1/connectors/{connector}", action: policy.ConnectorsRead, handle: s.getConnector},
		{pattern: "POST /v1/connectors/{connector}", action: policy.ConnectorsWrite, handle: s.updateConnector},
		{pattern: "DELETE /v1/connectors/{connector}", action: policy.ConnectorsWrite, handle: s.deleteConnector},

		{pattern: "POST /v1/api_keys", action: policy.APIKeysWrite, handle: s.createAPIKey, again: s.createdAPIKey},
		{pattern: "GET /v1/api_keys", action: policy.APIKeysRead, handle: s.listAPIKeys},
		{pattern: "GET /v1/api_keys/{api_key}", action: policy.APIKeysRead, handle: s.getAPIKey},
		{pattern: "DELETE /v1/api_keys/{api_key}", action: policy.APIKeysWrite, handle: s.revokeAPIKey},
		{pattern: "POST /v1/workspaces", action: policy.WorkspacesWrite, handle: s.createWorkspace},
		{pattern: "GET /v1/workspaces", action: policy.WorkspacesRead, handle: s.listWorkspaces},
		{pattern: "GET /v1/workspaces/{workspace}", action: policy.WorkspacesRead, handle: s.getWorkspace},
		{pattern: "GET /v1/usage", action: policy.UsageRead, handle: s.usage},
		{pattern: "GET /v1/audit", action: policy.AuditRead, handle: s.audit},
		{pattern: "GET /v1/nodes", action: policy.NodesRead, handle: s.listNodes},
	}
}
