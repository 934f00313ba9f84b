package api

import (
	"context"
	"iter"
	"net/url"
	"strconv"
)

// CreateAgent creates an agent.
func (c *Client) CreateAgent(ctx context.Context, a AgentCreate) (Agent, error) {
	return post[Agent](ctx, c, "/v1/agents", a)
}

// GetAgent returns a version of an agent; 0 is the newest.
func (c *Client) GetAgent(ctx context.Context, id string, version int64) (Agent, error) {
	q := url.Values{}
	if version > 0 {
		q.Set("version", strconv.FormatInt(version, 10))
	}
	return get[Agent](ctx, c, "/v1/agents/"+pathID(id), q)
}

// UpdateAgent updates an agent; a change makes a new version.
func (c *Client) UpdateAgent(ctx context.Context, id string, u AgentUpdate) (Agent, error) {
	return post[Agent](ctx, c, "/v1/agents/"+pathID(id), u)
}

// ArchiveAgent archives an agent for good.
func (c *Client) ArchiveAgent(ctx context.Context, id string) (Agent, error) {
	return post[Agent](ctx, c, "/v1/agents/"+pathID(id)+"/archive", nil)
}

// ListAgents returns one page of agents.
func (c *Client) ListAgents(ctx context.Context, p ListParams) (Page[Agent], error) {
	return get[Page[Agent]](ctx, c, "/v1/agents", p.Query())
}

// AllAgents walks all agents.
func (c *Client) AllAgents(ctx context.Context, p ListParams) iter.Seq2[Agent, error] {
	return all[Agent](ctx, c, "/v1/agents", p.Query())
}

// AgentVersions walks the versions of an agent.
func (c *Client) AgentVersions(ctx context.Context, id string) iter.Seq2[Agent, error] {
	return all[Agent](ctx, c, "/v1/agents/"+pathID(id)+"/versions", url.Values{})
}

// CreateEnvironment creates an environment.
func (c *Client) CreateEnvironment(ctx context.Context, e EnvironmentCreate) (Environment, error) {
	return post[Environment](ctx, c, "/v1/environments", e)
}

// GetEnvironment returns an environment.
func (c *Client) GetEnvironment(ctx context.Context, id string) (Environment, error) {
	return get[Environment](ctx, c, "/v1/environments/"+pathID(id), nil)
}

// UpdateEnvironment updates an environment.
func (c *Client) UpdateEnvironment(ctx context.Context, id string, u EnvironmentUpdate) (Environment, error) {
	return post[Environment](ctx, c, "/v1/environments/"+pathID(id), u)
}

// ArchiveEnvironment archives an environment for good.
func (c *Client) ArchiveEnvironment(ctx context.Context, id string) (Environment, error) {
	return post[Environment](ctx, c, "/v1/environments/"+pathID(id)+"/archive", nil)
}

// DeleteEnvironment deletes an environment.
func (c *Client) DeleteEnvironment(ctx context.Context, id string) (Deleted, error) {
	return remove(ctx, c, "/v1/environments/"+pathID(id))
}

// AllEnvironments walks all environments.
func (c *Client) AllEnvironments(ctx context.Context, p ListParams) iter.Seq2[Environment, error] {
	return all[Environment](ctx, c, "/v1/environments", p.Query())
}

// CreateSession creates a session.
func (c *Client) CreateSession(ctx context.Context, s SessionCreate) (Session, error) {
	return post[Session](ctx, c, "/v1/sessions", s)
}

// GetSession returns a session.
func (c *Client) GetSession(ctx context.Context, id string) (Session, error) {
	return get[Session](ctx, c, sessionPath(id, ""), nil)
}

// UpdateSession updates a session.
func (c *Client) UpdateSession(ctx context.Context, id string, u SessionUpdate) (Session, error) {
	return post[Session](ctx, c, sessionPath(id, ""), u)
}

// ListSessions returns one page of sessions.
func (c *Client) ListSessions(ctx context.Context, p SessionListParams) (SessionPage, error) {
	return get[SessionPage](ctx, c, "/v1/sessions", p.Query())
}

// AllSessions walks all sessions.
func (c *Client) AllSessions(ctx context.Context, p SessionListParams) iter.Seq2[Session, error] {
	return all[Session](ctx, c, "/v1/sessions", p.Query())
}

// ArchiveSession terminates a session that is not running; its log stays.
func (c *Client) ArchiveSession(ctx context.Context, id string) (Session, error) {
	return post[Session](ctx, c, sessionPath(id, "/archive"), nil)
}

// DeleteSession deletes a session that is not running.
func (c *Client) DeleteSession(ctx context.Context, id string) (Deleted, error) {
	return remove(ctx, c, sessionPath(id, ""))
}

// ResumeSession lets a session go on: after a pause, an error or a settlement.
func (c *Client) ResumeSession(ctx context.Context, id string) (Session, error) {
	return post[Session](ctx, c, sessionPath(id, "/resume"), nil)
}

// PauseSession stops a session after its current step; input queues until it is resumed.
func (c *Client) PauseSession(ctx context.Context, id string) (Session, error) {
	return post[Session](ctx, c, sessionPath(id, "/pause"), nil)
}

// SendEvents sends events and returns them with their ids.
func (c *Client) SendEvents(ctx context.Context, id string, events ...EventBody) ([]Event, error) {
	sent, err := post[SentEvents](ctx, c, sessionPath(id, "/events"), SendEvents{Events: events})
	return sent.Data, err
}

// Confirm answers a tool call that asks. toolUse is the id of its event;
// denyMessage may be empty.
func (c *Client) Confirm(ctx context.Context, id, toolUse string, allow bool, denyMessage string) (Event, error) {
	body := &UserToolConfirmation{ToolUseID: toolUse, Result: ResultAllow}
	if !allow {
		body.Result = ResultDeny
		if denyMessage != "" {
			body.DenyMessage = &denyMessage
		}
	}
	sent, err := c.SendEvents(ctx, id, body)
	if err != nil || len(sent) == 0 {
		return Event{}, err
	}
	return sent[0], nil
}

// ListEvents returns one page of a session's events.
func (c *Client) ListEvents(ctx context.Context, id string, p EventListParams) (Page[Event], error) {
	return get[Page[Event]](ctx, c, sessionPath(id, "/events"), p.Query())
}

// AllEvents walks a session's events.
func (c *Client) AllEvents(ctx context.Context, id string, p EventListParams) iter.Seq2[Event, error] {
	return all[Event](ctx, c, sessionPath(id, "/events"), p.Query())
}

// AllThreads walks a session's threads.
func (c *Client) AllThreads(ctx context.Context, id string) iter.Seq2[Thread, error] {
	return all[Thread](ctx, c, sessionPath(id, "/threads"), url.Values{})
}

// GetThread returns a thread of a session.
func (c *Client) GetThread(ctx context.Context, id, thread string) (Thread, error) {
	return get[Thread](ctx, c, sessionPath(id, "/threads/"+pathID(thread)), nil)
}

// ThreadEvents walks a thread's events.
func (c *Client) ThreadEvents(ctx context.Context, id, thread string) iter.Seq2[Event, error] {
	return all[Event](ctx, c, sessionPath(id, "/threads/"+pathID(thread)+"/events"), url.Values{})
}

// ListEffects returns one page of a session's effects.
func (c *Client) ListEffects(ctx context.Context, id string, p EffectListParams) (Page[Effect], error) {
	return get[Page[Effect]](ctx, c, sessionPath(id, "/effects"), p.Query())
}

// AllEffects walks a session's effects.
func (c *Client) AllEffects(ctx context.Context, id string, p EffectListParams) iter.Seq2[Effect, error] {
	return all[Effect](ctx, c, sessionPath(id, "/effects"), p.Query())
}

// GetEffect returns an effect.
func (c *Client) GetEffect(ctx context.Context, id string) (Effect, error) {
	return get[Effect](ctx, c, "/v1/effects/"+pathID(id), nil)
}

// SettleEffect settles an effect in doubt.
func (c *Client) SettleEffect(ctx context.Context, id string, s SettleRequest) (Effect, error) {
	return post[Effect](ctx, c, "/v1/effects/"+pathID(id)+"/settle", s)
}

// CreateConnector creates a connector.
func (c *Client) CreateConnector(ctx context.Context, in ConnectorCreate) (Connector, error) {
	return post[Connector](ctx, c, "/v1/connectors", in)
}

// GetConnector returns a connector by id.
func (c *Client) GetConnector(ctx context.Context, id string) (Connector, error) {
	return get[Connector](ctx, c, "/v1/connectors/"+pathID(id), nil)
}

// UpdateConnector updates a connector; a change makes a new version.
func (c *Client) UpdateConnector(ctx context.Context, id string, u ConnectorUpdate) (Connector, error) {
	return post[Connector](ctx, c, "/v1/connectors/"+pathID(id), u)
}

// DeleteConnector deletes a connector.
func (c *Client) DeleteConnector(ctx context.Context, id string) (Deleted, error) {
	return remove(ctx, c, "/v1/connectors/"+pathID(id))
}

// AllConnectors walks all connectors.
func (c *Client) AllConnectors(ctx context.Context) iter.Seq2[Connector, error] {
	return all[Connector](ctx, c, "/v1/connectors", url.Values{})
}

// CreateVault creates a vault.
func (c *Client) CreateVault(ctx context.Context, v VaultCreate) (Vault, error) {
	return post[Vault](ctx, c, "/v1/vaults", v)
}

// GetVault returns a vault.
func (c *Client) GetVault(ctx context.Context, id string) (Vault, error) {
	return get[Vault](ctx, c, "/v1/vaults/"+pathID(id), nil)
}

// UpdateVault updates a vault.
func (c *Client) UpdateVault(ctx context.Context, id string, u VaultUpdate) (Vault, error) {
	return post[Vault](ctx, c, "/v1/vaults/"+pathID(id), u)
}

// ArchiveVault archives a vault and purges its secrets.
func (c *Client) ArchiveVault(ctx context.Context, id string) (Vault, error) {
	return post[Vault](ctx, c, "/v1/vaults/"+pathID(id)+"/archive", nil)
}

// DeleteVault deletes a vault.
func (c *Client) DeleteVault(ctx context.Context, id string) (Deleted, error) {
	return remove(ctx, c, "/v1/vaults/"+pathID(id))
}

// AllVaults walks all vaults.
func (c *Client) AllVaults(ctx context.Context, p ListParams) iter.Seq2[Vault, error] {
	return all[Vault](ctx, c, "/v1/vaults", p.Query())
}

// CreateCredential puts a credential into a vault.
func (c *Client) CreateCredential(ctx context.Context, vault string, in CredentialCreate) (Credential, error) {
	return post[Credential](ctx, c, credentialPath(vault, "", ""), in)
}

// GetCredential returns a credential without its secret.
func (c *Client) GetCredential(ctx context.Context, vault, id string) (Credential, error) {
	return get[Credential](ctx, c, credentialPath(vault, id, ""), nil)
}

// UpdateCredential updates a credential.
func (c *Client) UpdateCredential(ctx context.Context, vault, id string, u CredentialUpdate) (Credential, error) {
	return post[Credential](ctx, c, credentialPath(vault, id, ""), u)
}

// ArchiveCredential archives a credential and purges its secret.
func (c *Client) ArchiveCredential(ctx context.Context, vault, id string) (Credential, error) {
	return post[Credential](ctx, c, credentialPath(vault, id, "/archive"), nil)
}

// DeleteCredential deletes a credential.
func (c *Client) DeleteCredential(ctx context.Context, vault, id string) (Deleted, error) {
	return remove(ctx, c, credentialPath(vault, id, ""))
}

// AllCredentials walks the credentials of a vault.
func (c *Client) AllCredentials(ctx context.Context, vault string, p ListParams) iter.Seq2[Credential, error] {
	return all[Credential](ctx, c, credentialPath(vault, "", ""), p.Query())
}

// CreateAPIKey creates an API key; only this answer holds the key itself.
func (c *Client) CreateAPIKey(ctx context.Context, k APIKeyCreate) (APIKey, error) {
	return post[APIKey](ctx, c, "/v1/api_keys", k)
}

// GetAPIKey returns an API key without the key itself.
func (c *Client) GetAPIKey(ctx context.Context, id string) (APIKey, error) {
	return get[APIKey](ctx, c, "/v1/api_keys/"+pathID(id), nil)
}

// RevokeAPIKey revokes an API key for good.
func (c *Client) RevokeAPIKey(ctx context.Context, id string) (Deleted, error) {
	return remove(ctx, c, "/v1/api_keys/"+pathID(id))
}

// AllAPIKeys walks all API keys of the workspace.
func (c *Client) AllAPIKeys(ctx context.Context) iter.Seq2[APIKey, error] {
	return all[APIKey](ctx, c, "/v1/api_keys", url.Values{})
}

// CreateWorkspace creates a workspace.
func (c *Client) CreateWorkspace(ctx context.Context, w WorkspaceCreate) (Workspace, error) {
	return post[Workspace](ctx, c, "/v1/workspaces", w)
}

// GetWorkspace returns a workspace.
func (c *Client) GetWorkspace(ctx context.Context, id string) (Workspace, error) {
	return get[Workspace](ctx, c, "/v1/workspaces/"+pathID(id), nil)
}

// AllWorkspaces walks all workspaces that the key may see.
func (c *Client) AllWorkspaces(ctx context.Context) iter.Seq2[Workspace, error] {
	return all[Workspace](ctx, c, "/v1/workspaces", url.Values{})
}

// AllNodes walks the nodes.
func (c *Client) AllNodes(ctx context.Context) iter.Seq2[Node, error] {
	return all[Node](ctx, c, "/v1/nodes", url.Values{})
}

// AllUsage walks the rows of usage.
func (c *Client) AllUsage(ctx context.Context, p UsageParams) iter.Seq2[UsageRow, error] {
	return all[UsageRow](ctx, c, "/v1/usage", p.Query())
}

func sessionPath(id, rest string) string { return "/v1/sessions/" + pathID(id) + rest }

func credentialPath(vault, id, rest string) string {
	p := "/v1/vaults/" + pathID(vault) + "/credentials"
	if id != "" {
		p += "/" + pathID(id)
	}
	return p + rest
}
