-- Snapshots of sandboxes, derived from the log. body holds all of the row,
-- sealed; the columns beside it are what queries look at. packed names blobs,
-- which say nothing of what is in them: it must be readable when the lineage's
-- key is gone. removed is not derived: image and blobs of a dropped one are gone.
CREATE TABLE snapshots (
  workspace TEXT COLLATE "C" NOT NULL,
  session TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  lineage TEXT COLLATE "C" NOT NULL,
  seq BIGINT NOT NULL,
  runtime TEXT COLLATE "C" NOT NULL,
  packed TEXT COLLATE "C" NOT NULL,
  dropped_at BIGINT NOT NULL,
  removed BIGINT NOT NULL DEFAULT 0,
  body BYTEA,
  PRIMARY KEY (workspace, session, id)
);
CREATE INDEX snapshots_lineage ON snapshots (workspace, lineage) WHERE dropped_at = 0;
CREATE INDEX snapshots_runtime ON snapshots (runtime) WHERE dropped_at = 0;
CREATE INDEX snapshots_dropped ON snapshots (dropped_at) WHERE dropped_at > 0 AND removed = 0;
