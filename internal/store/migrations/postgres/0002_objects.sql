-- Configuration objects: agents, environments, vaults, connectors, keys; and
-- what is kept about requests: idempotency records and the audit chain.
-- Times are UTC microseconds; 0 means "not yet".

CREATE TABLE agents (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  version BIGINT NOT NULL,
  name TEXT COLLATE "C" NOT NULL,
  created_at BIGINT NOT NULL,
  updated_at BIGINT NOT NULL,
  archived_at BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX agents_by_time ON agents (workspace, created_at, id);

-- Bodies never change; the newest version's number stands in agents.
CREATE TABLE agent_versions (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  version BIGINT NOT NULL,
  name TEXT COLLATE "C" NOT NULL,
  body BYTEA NOT NULL,
  updated_at BIGINT NOT NULL,
  PRIMARY KEY (workspace, id, version)
);

CREATE TABLE environments (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  name TEXT COLLATE "C" NOT NULL,
  body BYTEA NOT NULL,
  created_at BIGINT NOT NULL,
  updated_at BIGINT NOT NULL,
  archived_at BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX environments_by_time ON environments (workspace, created_at, id);

CREATE TABLE vaults (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  display_name TEXT COLLATE "C" NOT NULL,
  metadata BYTEA NOT NULL,
  created_at BIGINT NOT NULL,
  updated_at BIGINT NOT NULL,
  archived_at BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX vaults_by_time ON vaults (workspace, created_at, id);

-- sealed holds the secret as the vault package sealed it; NULL once archived.
CREATE TABLE credentials (
  workspace TEXT COLLATE "C" NOT NULL,
  vault TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  display_name TEXT COLLATE "C" NOT NULL,
  metadata BYTEA NOT NULL,
  auth_type TEXT COLLATE "C" NOT NULL,
  match_key TEXT COLLATE "C" NOT NULL,
  auth BYTEA NOT NULL,
  sealed BYTEA,
  created_at BIGINT NOT NULL,
  updated_at BIGINT NOT NULL,
  archived_at BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, vault, id)
);
CREATE UNIQUE INDEX credentials_by_key ON credentials (workspace, vault, match_key) WHERE archived_at = 0;

CREATE TABLE connectors (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  name TEXT COLLATE "C" NOT NULL,
  version BIGINT NOT NULL,
  url TEXT COLLATE "C" NOT NULL,
  body BYTEA NOT NULL,
  created_at BIGINT NOT NULL,
  updated_at BIGINT NOT NULL,
  PRIMARY KEY (workspace, id)
);
CREATE UNIQUE INDEX connectors_by_name ON connectors (workspace, name);
CREATE INDEX connectors_by_url ON connectors (workspace, url);

-- What each version of a connector declared; kept when the connector is deleted.
CREATE TABLE connector_versions (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  version BIGINT NOT NULL,
  body BYTEA NOT NULL,
  updated_at BIGINT NOT NULL,
  PRIMARY KEY (workspace, id, version)
);

-- The digest of the upstream definition that a tool's contract was first used with.
CREATE TABLE connector_pins (
  workspace TEXT COLLATE "C" NOT NULL,
  connector TEXT COLLATE "C" NOT NULL,
  tool TEXT COLLATE "C" NOT NULL,
  digest TEXT COLLATE "C" NOT NULL,
  pinned_at BIGINT NOT NULL,
  PRIMARY KEY (workspace, connector, tool)
);

-- Only the SHA-256 of a key is kept, and its last four characters to tell keys apart.
CREATE TABLE api_keys (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  name TEXT COLLATE "C" NOT NULL,
  role TEXT COLLATE "C" NOT NULL,
  hash BYTEA NOT NULL,
  last4 TEXT COLLATE "C" NOT NULL,
  created_by TEXT COLLATE "C" NOT NULL,
  created_at BIGINT NOT NULL,
  expires_at BIGINT NOT NULL DEFAULT 0,
  revoked_at BIGINT NOT NULL DEFAULT 0,
  last_used_at BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE UNIQUE INDEX api_keys_by_hash ON api_keys (hash);

-- One row per POST that wrote something: with a key of the client for 24 hours,
-- with a key of ours (implicit = 1) for a client's retries within 30 seconds.
-- request is the id of the request that wrote it; answer is the answer, or ids to
-- read it by where content must not lie in clear; unanswered = 1 says that the
-- answer could not be sent.
CREATE TABLE once (
  workspace TEXT COLLATE "C" NOT NULL,
  path TEXT COLLATE "C" NOT NULL,
  key TEXT COLLATE "C" NOT NULL,
  request TEXT COLLATE "C" NOT NULL,
  implicit BIGINT NOT NULL,
  digest BYTEA NOT NULL,
  node TEXT COLLATE "C" NOT NULL,
  answer BYTEA,
  unanswered BIGINT NOT NULL DEFAULT 0,
  created_at BIGINT NOT NULL,
  PRIMARY KEY (workspace, path, key)
);
CREATE INDEX once_by_time ON once (created_at);

-- One hash chain per workspace and node; the head row gives out numbers.
CREATE TABLE audit_heads (
  workspace TEXT COLLATE "C" NOT NULL,
  node TEXT COLLATE "C" NOT NULL,
  seq BIGINT NOT NULL,
  hash BYTEA NOT NULL,
  PRIMARY KEY (workspace, node)
);

CREATE TABLE audit (
  workspace TEXT COLLATE "C" NOT NULL,
  node TEXT COLLATE "C" NOT NULL,
  seq BIGINT NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  at BIGINT NOT NULL,
  principal TEXT COLLATE "C" NOT NULL,
  action TEXT COLLATE "C" NOT NULL,
  resource TEXT COLLATE "C" NOT NULL,
  detail BYTEA NOT NULL,
  prev BYTEA NOT NULL,
  hash BYTEA NOT NULL,
  PRIMARY KEY (workspace, node, seq)
);
CREATE INDEX audit_by_time ON audit (workspace, at, id);
