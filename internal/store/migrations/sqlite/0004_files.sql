-- Files that clients uploaded and that sessions made. What a file is called and
-- holds is sealed: meta in the row, the bytes in the blob store, both under the
-- data key key_id, which copies of one content share. session: whose it is, ''
-- = the workspace's. origin: keyed digest of what an output was made of, so that
-- it becomes one file. A row whose content is gone (gone_at) stays a while to say so.
CREATE TABLE files (
  workspace TEXT NOT NULL,
  id TEXT NOT NULL,
  session TEXT NOT NULL DEFAULT '',
  key_id TEXT NOT NULL,
  blob TEXT NOT NULL,
  size INTEGER NOT NULL,
  meta BLOB NOT NULL,
  origin TEXT NOT NULL DEFAULT '',
  downloadable INTEGER NOT NULL DEFAULT 0,
  created_at INTEGER NOT NULL,
  expires_at INTEGER NOT NULL DEFAULT 0,
  gone_at INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (workspace, id)
);
CREATE INDEX files_by_time ON files (workspace, created_at, id);
CREATE INDEX files_by_session ON files (workspace, session) WHERE session <> '';
CREATE INDEX files_by_key ON files (workspace, key_id);
CREATE UNIQUE INDEX files_by_origin ON files (workspace, origin) WHERE origin <> '';
CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at > 0 AND gone_at = 0;
CREATE INDEX files_gone ON files (gone_at) WHERE gone_at > 0;

-- Tokens of repositories that sessions mount, sealed by vault under the
-- workspace and the resource's id.
CREATE TABLE resource_secrets (
  workspace TEXT NOT NULL,
  session TEXT NOT NULL,
  id TEXT NOT NULL,
  sealed BLOB NOT NULL,
  updated_at INTEGER NOT NULL,
  PRIMARY KEY (workspace, session, id)
);
