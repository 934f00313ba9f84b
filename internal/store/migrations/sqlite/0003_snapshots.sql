-- Snapshots of sandboxes, derived from the log. body holds all of the row,
-- sealed; the columns beside it are what queries look at. packed names blobs,
-- which say nothing of what is in them: it must be readable when the lineage's
-- key is gone. removed is not derived: image and blobs of a dropped one are gone.
CREATE TABLE snapshots (
  workspace TEXT NOT NULL,
  session TEXT NOT NULL,
  id TEXT NOT NULL,
  lineage TEXT NOT NULL,
  seq INTEGER NOT NULL,
  runtime TEXT NOT NULL,
  packed TEXT NOT NULL,
  dropped_at INTEGER NOT NULL,
  removed INTEGER NOT NULL DEFAULT 0,
  body BLOB,
  PRIMARY KEY (workspace, session, id)
);
CREATE INDEX snapshots_lineage ON snapshots (workspace, lineage) WHERE dropped_at = 0;
CREATE INDEX snapshots_runtime ON snapshots (runtime) WHERE dropped_at = 0;
CREATE INDEX snapshots_dropped ON snapshots (dropped_at) WHERE dropped_at > 0 AND removed = 0;
