-- The log, the rows derived from it, and what stands beside it. Times are UTC
-- microseconds, 0 = none; text '' = none. Every key begins with the workspace.

CREATE TABLE workspaces (
  id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  name TEXT COLLATE "C" NOT NULL,
  secret_wrapped BYTEA NOT NULL,
  created_at BIGINT NOT NULL,
  archived_at BIGINT NOT NULL DEFAULT 0
);

-- One data key per lineage, wrapped by the master key.
CREATE TABLE data_keys (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  lineage TEXT COLLATE "C" NOT NULL,
  wrapped BYTEA NOT NULL,
  created_at BIGINT NOT NULL,
  destroyed_at BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);

CREATE TABLE sessions (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  parent TEXT COLLATE "C" NOT NULL DEFAULT '',
  fork_seq BIGINT NOT NULL DEFAULT 0,
  lineage TEXT COLLATE "C" NOT NULL,
  key_id TEXT COLLATE "C" NOT NULL,
  thread TEXT COLLATE "C" NOT NULL DEFAULT '',
  status TEXT COLLATE "C" NOT NULL,
  starting BIGINT NOT NULL DEFAULT 0,
  stop_reason TEXT COLLATE "C" NOT NULL DEFAULT '',
  paused BIGINT NOT NULL DEFAULT 0,
  agent_id TEXT COLLATE "C" NOT NULL DEFAULT '',
  agent_version BIGINT NOT NULL DEFAULT 0,
  owner TEXT COLLATE "C" NOT NULL DEFAULT '',
  former TEXT COLLATE "C" NOT NULL DEFAULT '',
  fence BIGINT NOT NULL DEFAULT 0,
  head BIGINT NOT NULL DEFAULT 0,
  head_hash BYTEA NOT NULL,
  compacted BIGINT NOT NULL DEFAULT 0,
  format BIGINT NOT NULL DEFAULT 0,
  wake_at BIGINT NOT NULL DEFAULT 0,
  next_at BIGINT NOT NULL DEFAULT 0,
  inbox_n BIGINT NOT NULL DEFAULT 0,
  inbox_urgent BIGINT NOT NULL DEFAULT 0,
  inbox_last BIGINT NOT NULL DEFAULT 0,
  inbox_seen BIGINT NOT NULL DEFAULT 0,
  open_from TEXT COLLATE "C" NOT NULL DEFAULT '',
  input_tokens BIGINT NOT NULL DEFAULT 0,
  output_tokens BIGINT NOT NULL DEFAULT 0,
  cache_read_tokens BIGINT NOT NULL DEFAULT 0,
  cache_5m_tokens BIGINT NOT NULL DEFAULT 0,
  cache_1h_tokens BIGINT NOT NULL DEFAULT 0,
  cost_nusd BIGINT NOT NULL DEFAULT 0,
  active_us BIGINT NOT NULL DEFAULT 0,
  wasted_tokens BIGINT NOT NULL DEFAULT 0,
  created_at BIGINT NOT NULL,
  updated_at BIGINT NOT NULL,
  running_since BIGINT NOT NULL DEFAULT 0,
  terminated_at BIGINT NOT NULL DEFAULT 0,
  archived_at BIGINT NOT NULL DEFAULT 0,
  deleted_at BIGINT NOT NULL DEFAULT 0,
  damaged TEXT COLLATE "C" NOT NULL DEFAULT '',
  PRIMARY KEY (workspace, id)
) WITH (fillfactor = 60);
CREATE INDEX sessions_listed ON sessions (workspace, created_at, id);
CREATE INDEX sessions_work ON sessions (next_at) WHERE owner = '' AND next_at > 0;
CREATE INDEX sessions_owned ON sessions (owner) WHERE owner <> '';
CREATE INDEX sessions_lineage ON sessions (workspace, lineage) WHERE parent <> '';

-- The configuration is beside the session's row, because that row is written
-- with every append and must stay small. Sealed.
CREATE TABLE session_configs (
  workspace TEXT COLLATE "C" NOT NULL,
  session TEXT COLLATE "C" NOT NULL,
  config BYTEA NOT NULL,
  PRIMARY KEY (workspace, session)
);

-- The one log.
-- digest is set only when body and salt are erased.
CREATE TABLE log (
  workspace TEXT COLLATE "C" NOT NULL,
  session TEXT COLLATE "C" NOT NULL,
  seq BIGINT NOT NULL,
  kind TEXT COLLATE "C" NOT NULL,
  type TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  thread TEXT COLLATE "C" NOT NULL,
  at BIGINT NOT NULL,
  fence BIGINT NOT NULL,
  key_id TEXT COLLATE "C" NOT NULL,
  salt BYTEA,
  body BYTEA,
  blob TEXT COLLATE "C" NOT NULL DEFAULT '',
  digest BYTEA,
  hash BYTEA NOT NULL
);
CREATE UNIQUE INDEX log_seq ON log (workspace, session, seq);

CREATE TABLE effects (
  workspace TEXT COLLATE "C" NOT NULL,
  session TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  lineage TEXT COLLATE "C" NOT NULL,
  thread TEXT COLLATE "C" NOT NULL,
  tool TEXT COLLATE "C" NOT NULL,
  server TEXT COLLATE "C" NOT NULL,
  connector TEXT COLLATE "C" NOT NULL,
  class TEXT COLLATE "C" NOT NULL,
  state TEXT COLLATE "C" NOT NULL,
  outcome TEXT COLLATE "C" NOT NULL,
  flags BIGINT NOT NULL,
  event TEXT COLLATE "C" NOT NULL,
  digest TEXT COLLATE "C" NOT NULL,
  near TEXT COLLATE "C" NOT NULL,
  idem_key TEXT COLLATE "C" NOT NULL,
  first_seq BIGINT NOT NULL,
  intent_seq BIGINT NOT NULL,
  attempt_seqs TEXT COLLATE "C" NOT NULL,
  attempt_fence BIGINT NOT NULL,
  send_by BIGINT NOT NULL,
  end_seq BIGINT NOT NULL,
  evidence_seqs TEXT COLLATE "C" NOT NULL,
  created_at BIGINT NOT NULL,
  updated_at BIGINT NOT NULL,
  PRIMARY KEY (workspace, id)
) WITH (fillfactor = 80);
CREATE INDEX effects_session ON effects (workspace, session, id);
CREATE INDEX effects_digest ON effects (workspace, lineage, digest) WHERE class <> 'read';

CREATE TABLE inbox (
  workspace TEXT COLLATE "C" NOT NULL,
  session TEXT COLLATE "C" NOT NULL,
  n BIGINT NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  kind TEXT COLLATE "C" NOT NULL,
  type TEXT COLLATE "C" NOT NULL,
  thread TEXT COLLATE "C" NOT NULL,
  target TEXT COLLATE "C" NOT NULL,
  starts BIGINT NOT NULL,
  urgent BIGINT NOT NULL,
  body BYTEA,
  blob TEXT COLLATE "C" NOT NULL DEFAULT '',
  created_at BIGINT NOT NULL,
  PRIMARY KEY (workspace, session, n)
);

-- Answers stay for the life of the session: one per target.
CREATE TABLE answers (
  workspace TEXT COLLATE "C" NOT NULL,
  session TEXT COLLATE "C" NOT NULL,
  target TEXT COLLATE "C" NOT NULL,
  digest BYTEA NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  at BIGINT NOT NULL,
  PRIMARY KEY (workspace, session, target)
);

-- dead_at: its sessions were freed. proved_at: its process is known to be gone.
CREATE TABLE nodes (
  id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  address TEXT COLLATE "C" NOT NULL,
  roles TEXT COLLATE "C" NOT NULL,
  version TEXT COLLATE "C" NOT NULL,
  lock_key BIGINT NOT NULL,
  joined_at BIGINT NOT NULL,
  until BIGINT NOT NULL,
  left_at BIGINT NOT NULL DEFAULT 0,
  dead_at BIGINT NOT NULL DEFAULT 0,
  proved_at BIGINT NOT NULL DEFAULT 0
);

CREATE INDEX nodes_unproved ON nodes (id) WHERE proved_at = 0;

-- One row per metered thing; the id is derived from what was metered, so that
-- nothing counts twice. waste: paid because of a failure, not part of the sums.
CREATE TABLE usage (
  workspace TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  session TEXT COLLATE "C" NOT NULL,
  kind TEXT COLLATE "C" NOT NULL,
  name TEXT COLLATE "C" NOT NULL,
  at BIGINT NOT NULL,
  input_tokens BIGINT NOT NULL DEFAULT 0,
  output_tokens BIGINT NOT NULL DEFAULT 0,
  cache_read_tokens BIGINT NOT NULL DEFAULT 0,
  cache_5m_tokens BIGINT NOT NULL DEFAULT 0,
  cache_1h_tokens BIGINT NOT NULL DEFAULT 0,
  quantity BIGINT NOT NULL DEFAULT 0,
  cost_nusd BIGINT NOT NULL DEFAULT 0,
  waste BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX usage_at ON usage (workspace, at);
