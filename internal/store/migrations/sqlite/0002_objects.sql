-- Configuration objects: agents, environments, vaults, connectors, keys; and
-- what is kept about requests: idempotency records and the audit chain.
-- Times are UTC microseconds; 0 means "not yet".

CREATE TABLE agents (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  version INTEGER NOT NULL,
  name TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  archived_at INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX agents_by_time ON agents (workspace, created_at, id);

-- Bodies never change; the newest version's number stands in agents.
CREATE TABLE agent_versions (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  version INTEGER NOT NULL,
  name TEXT NOT NULL,
  body BLOB NOT NULL,
  updated_at INTEGER NOT NULL,
  PRIMARY KEY (workspace, id, version)
);

CREATE TABLE environments (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  name TEXT NOT NULL,
  body BLOB NOT NULL,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  archived_at INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX environments_by_time ON environments (workspace, created_at, id);

CREATE TABLE vaults (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  display_name TEXT NOT NULL,
  metadata BLOB NOT NULL,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  archived_at INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX vaults_by_time ON vaults (workspace, created_at, id);

-- sealed holds the secret as the vault package sealed it; NULL once archived.
CREATE TABLE credentials (
  workspace TEXT NOT NULL,
  vault TEXT NOT NULL,
  id TEXT NOT NULL,
  display_name TEXT NOT NULL,
  metadata BLOB NOT NULL,
  auth_type TEXT NOT NULL,
  match_key TEXT NOT NULL,
  auth BLOB NOT NULL,
  sealed BLOB,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  archived_at INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, vault, id)
);
CREATE UNIQUE INDEX credentials_by_key ON credentials (workspace, vault, match_key) WHERE archived_at = 0;

CREATE TABLE connectors (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  name TEXT NOT NULL,
  version INTEGER NOT NULL,
  url TEXT NOT NULL,
  body BLOB NOT NULL,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  PRIMARY KEY (workspace, id)
);
CREATE UNIQUE INDEX connectors_by_name ON connectors (workspace, name);
CREATE INDEX connectors_by_url ON connectors (workspace, url);

-- What each version of a connector declared; kept when the connector is deleted.
CREATE TABLE connector_versions (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  version INTEGER NOT NULL,
  body BLOB NOT NULL,
  updated_at INTEGER NOT NULL,
  PRIMARY KEY (workspace, id, version)
);

-- The digest of the upstream definition that a tool's contract was first used with.
CREATE TABLE connector_pins (
  workspace TEXT NOT NULL,
  connector TEXT NOT NULL,
  tool TEXT NOT NULL,
  digest TEXT NOT NULL,
  pinned_at INTEGER NOT NULL,
  PRIMARY KEY (workspace, connector, tool)
);

-- Only the SHA-256 of a key is kept, and its last four characters to tell keys apart.
CREATE TABLE api_keys (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  name TEXT NOT NULL,
  role TEXT NOT NULL,
  hash BLOB NOT NULL,
  last4 TEXT NOT NULL,
  created_by TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER NOT NULL DEFAULT 0,
  revoked_at INTEGER NOT NULL DEFAULT 0,
  last_used_at INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE UNIQUE INDEX api_keys_by_hash ON api_keys (hash);

-- One row per POST that wrote something: with a key of the client for 24 hours,
-- with a key of ours (implicit = 1) for a client's retries within 30 seconds.
-- request is the id of the request that wrote it; answer is the answer, or ids to
-- read it by where content must not lie in clear; unanswered = 1 says that the
-- answer could not be sent.
CREATE TABLE once (
  workspace TEXT NOT NULL,
  path TEXT NOT NULL,
  key TEXT NOT NULL,
  request TEXT NOT NULL,
  implicit INTEGER NOT NULL,
  digest BLOB NOT NULL,
  node TEXT NOT NULL,
  answer BLOB,
  unanswered INTEGER NOT NULL DEFAULT 0,
  created_at INTEGER NOT NULL,
  PRIMARY KEY (workspace, path, key)
);
CREATE INDEX once_by_time ON once (created_at);

-- One hash chain per workspace and node; the head row gives out numbers.
CREATE TABLE audit_heads (
  workspace TEXT NOT NULL,
  node TEXT NOT NULL,
  seq INTEGER NOT NULL,
  hash BLOB NOT NULL,
  PRIMARY KEY (workspace, node)
);

CREATE TABLE audit (
  workspace TEXT NOT NULL,
  node TEXT NOT NULL,
  seq INTEGER NOT NULL,
  id TEXT NOT NULL,
  at INTEGER NOT NULL,
  principal TEXT NOT NULL,
  action TEXT NOT NULL,
  resource TEXT NOT NULL,
  detail BLOB NOT NULL,
  prev BLOB NOT NULL,
  hash BLOB NOT NULL,
  PRIMARY KEY (workspace, node, seq)
);
CREATE INDEX audit_by_time ON audit (workspace, at, id);
