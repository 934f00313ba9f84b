-- The log, the rows derived from it, and what stands beside it. Times are UTC
-- microseconds, 0 = none; text '' = none. Every key begins with the workspace.

CREATE TABLE workspaces (
  id TEXT NOT NULL PRIMARY KEY,
  name TEXT NOT NULL,
  secret_wrapped BLOB NOT NULL,
  created_at INTEGER NOT NULL,
  archived_at INTEGER NOT NULL DEFAULT 0
);

-- One data key per lineage, wrapped by the master key.
CREATE TABLE data_keys (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  lineage TEXT NOT NULL,
  wrapped BLOB NOT NULL,
  created_at INTEGER NOT NULL,
  destroyed_at INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);

CREATE TABLE sessions (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  parent TEXT NOT NULL DEFAULT '',
  fork_seq INTEGER NOT NULL DEFAULT 0,
  lineage TEXT NOT NULL,
  key_id TEXT NOT NULL,
  thread TEXT NOT NULL DEFAULT '',
  status TEXT NOT NULL,
  starting INTEGER NOT NULL DEFAULT 0,
  stop_reason TEXT NOT NULL DEFAULT '',
  paused INTEGER NOT NULL DEFAULT 0,
  agent_id TEXT NOT NULL DEFAULT '',
  agent_version INTEGER NOT NULL DEFAULT 0,
  owner TEXT NOT NULL DEFAULT '',
  former TEXT NOT NULL DEFAULT '',
  fence INTEGER NOT NULL DEFAULT 0,
  head INTEGER NOT NULL DEFAULT 0,
  head_hash BLOB NOT NULL,
  compacted INTEGER NOT NULL DEFAULT 0,
  format INTEGER NOT NULL DEFAULT 0,
  wake_at INTEGER NOT NULL DEFAULT 0,
  next_at INTEGER NOT NULL DEFAULT 0,
  inbox_n INTEGER NOT NULL DEFAULT 0,
  inbox_urgent INTEGER NOT NULL DEFAULT 0,
  inbox_last INTEGER NOT NULL DEFAULT 0,
  inbox_seen INTEGER NOT NULL DEFAULT 0,
  open_from TEXT NOT NULL DEFAULT '',
  input_tokens INTEGER NOT NULL DEFAULT 0,
  output_tokens INTEGER NOT NULL DEFAULT 0,
  cache_read_tokens INTEGER NOT NULL DEFAULT 0,
  cache_5m_tokens INTEGER NOT NULL DEFAULT 0,
  cache_1h_tokens INTEGER NOT NULL DEFAULT 0,
  cost_nusd INTEGER NOT NULL DEFAULT 0,
  active_us INTEGER NOT NULL DEFAULT 0,
  wasted_tokens INTEGER NOT NULL DEFAULT 0,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  running_since INTEGER NOT NULL DEFAULT 0,
  terminated_at INTEGER NOT NULL DEFAULT 0,
  archived_at INTEGER NOT NULL DEFAULT 0,
  deleted_at INTEGER NOT NULL DEFAULT 0,
  damaged TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (workspace, id)
);
CREATE INDEX sessions_listed ON sessions (workspace, created_at, id);
CREATE INDEX sessions_work ON sessions (next_at) WHERE owner = '' AND next_at > 0;
CREATE INDEX sessions_owned ON sessions (owner) WHERE owner <> '';
CREATE INDEX sessions_lineage ON sessions (workspace, lineage) WHERE parent <> '';

-- The configuration is beside the session's row, because that row is written
-- with every append and must stay small. Sealed.
CREATE TABLE session_configs (
  workspace TEXT NOT NULL,
  session TEXT NOT NULL,
  config BLOB NOT NULL,
  PRIMARY KEY (workspace, session)
);

-- The one log. A rowid table: a clustered key was measured three times slower.
-- digest is set only when body and salt are erased.
CREATE TABLE log (
  workspace TEXT NOT NULL,
  session TEXT NOT NULL,
  seq INTEGER NOT NULL,
  kind TEXT NOT NULL,
  type TEXT NOT NULL,
  id TEXT NOT NULL,
  thread TEXT NOT NULL,
  at INTEGER NOT NULL,
  fence INTEGER NOT NULL,
  key_id TEXT NOT NULL,
  salt BLOB,
  body BLOB,
  blob TEXT NOT NULL DEFAULT '',
  digest BLOB,
  hash BLOB NOT NULL
);
CREATE UNIQUE INDEX log_seq ON log (workspace, session, seq);

CREATE TABLE effects (
  workspace TEXT NOT NULL,
  session TEXT NOT NULL,
  id TEXT NOT NULL,
  lineage TEXT NOT NULL,
  thread TEXT NOT NULL,
  tool TEXT NOT NULL,
  server TEXT NOT NULL,
  connector TEXT NOT NULL,
  class TEXT NOT NULL,
  state TEXT NOT NULL,
  outcome TEXT NOT NULL,
  flags INTEGER NOT NULL,
  event TEXT NOT NULL,
  digest TEXT NOT NULL,
  near TEXT NOT NULL,
  idem_key TEXT NOT NULL,
  first_seq INTEGER NOT NULL,
  intent_seq INTEGER NOT NULL,
  attempt_seqs TEXT NOT NULL,
  attempt_fence INTEGER NOT NULL,
  send_by INTEGER NOT NULL,
  end_seq INTEGER NOT NULL,
  evidence_seqs TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX effects_session ON effects (workspace, session, id);
CREATE INDEX effects_digest ON effects (workspace, lineage, digest) WHERE class <> 'read';

CREATE TABLE inbox (
  workspace TEXT NOT NULL,
  session TEXT NOT NULL,
  n INTEGER NOT NULL,
  id TEXT NOT NULL,
  kind TEXT NOT NULL,
  type TEXT NOT NULL,
  thread TEXT NOT NULL,
  target TEXT NOT NULL,
  starts INTEGER NOT NULL,
  urgent INTEGER NOT NULL,
  body BLOB,
  blob TEXT NOT NULL DEFAULT '',
  created_at INTEGER NOT NULL,
  PRIMARY KEY (workspace, session, n)
);

-- Answers stay for the life of the session: one per target.
CREATE TABLE answers (
  workspace TEXT NOT NULL,
  session TEXT NOT NULL,
  target TEXT NOT NULL,
  digest BLOB NOT NULL,
  id TEXT NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (workspace, session, target)
);

-- dead_at: its sessions were freed. proved_at: its process is known to be gone.
CREATE TABLE nodes (
  id TEXT NOT NULL PRIMARY KEY,
  address TEXT NOT NULL,
  roles TEXT NOT NULL,
  version TEXT NOT NULL,
  lock_key INTEGER NOT NULL,
  joined_at INTEGER NOT NULL,
  until INTEGER NOT NULL,
  left_at INTEGER NOT NULL DEFAULT 0,
  dead_at INTEGER NOT NULL DEFAULT 0,
  proved_at INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX nodes_unproved ON nodes (id) WHERE proved_at = 0;

-- One row per metered thing; the id is derived from what was metered, so that
-- nothing counts twice. waste: paid because of a failure, not part of the sums.
CREATE TABLE usage (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  session TEXT NOT NULL,
  kind TEXT NOT NULL,
  name TEXT NOT NULL,
  at INTEGER NOT NULL,
  input_tokens INTEGER NOT NULL DEFAULT 0,
  output_tokens INTEGER NOT NULL DEFAULT 0,
  cache_read_tokens INTEGER NOT NULL DEFAULT 0,
  cache_5m_tokens INTEGER NOT NULL DEFAULT 0,
  cache_1h_tokens INTEGER NOT NULL DEFAULT 0,
  quantity INTEGER NOT NULL DEFAULT 0,
  cost_nusd INTEGER NOT NULL DEFAULT 0,
  waste INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX usage_at ON usage (workspace, at);
