package store

import (
	"context"
	"database/sql"
	"strings"
)

// HotQuery is a query of every step, and the index that it is meant to use.
type HotQuery struct {
	Name, Text, Index string
	Args              []any
}

// HotQueries are the queries whose cost must not grow with the workspace.
func HotQueries() []HotQuery {
	const ws, id = "default", "x"
	pkey := "pkey"
	return []HotQuery{
		{"effects by digest", `SELECT ` + effectColumns + ` FROM effects WHERE ` + byDigest, "effects_digest", []any{ws, id, id}},
		{"open effects", `SELECT ` + effectColumns + ` FROM effects WHERE ` + openFrom, "effects_session", []any{ws, id, id}},
		{"effect", `SELECT ` + effectColumns + ` FROM effects WHERE workspace = ? AND id = ?`, pkey, []any{ws, id}},
		{"log", `SELECT ` + readColumns + ` FROM log WHERE workspace = ? AND session = ? AND seq > ? AND seq <= ? ORDER BY seq`, "log_seq", []any{ws, id, 1, 9}},
		{"inbox", `SELECT id FROM inbox WHERE workspace = ? AND session = ? ORDER BY n`, pkey, []any{ws, id}},
		{"session", `SELECT ` + sessionColumns + ` FROM sessions WHERE workspace = ? AND id = ?`, pkey, []any{ws, id}},
		{"work", `SELECT id FROM sessions WHERE owner = '' AND next_at > 0 AND next_at <= ? ORDER BY next_at`, "sessions_work", []any{9}},
	}
}

// Plan is how the engine would run a query, a primary key named pkey.
func (db *DB) Plan(ctx context.Context, query string, args ...any) (plan string, err error) {
	err = db.tx(ctx, func(t *tx) error {
		explain := `EXPLAIN QUERY PLAN `
		if db.pg {
			explain = `EXPLAIN `
			if _, err := t.exec(`SET LOCAL enable_seqscan = off`); err != nil { // the tables are small
				return err
			}
		}
		plan = ""
		return t.each(explain+query, args, func(rows *sql.Rows) error {
			var line string
			var n [3]int64
			if db.pg {
				err = rows.Scan(&line)
			} else {
				err = rows.Scan(&n[0], &n[1], &n[2], &line)
			}
			plan += line + "\n"
			return err
		})
	})
	return strings.ReplaceAll(plan, "sqlite_autoindex", "pkey"), err
}

// Exec runs a statement past all checks: tests damage rows with it.
func (db *DB) Exec(ctx context.Context, query string, args ...any) (n int64, err error) {
	err = db.write(ctx, writeOpt{step: "test"}, func(t *tx) error {
		n, err = t.exec(query, args...)
		return err
	})
	return n, err
}

// CopyConfig gives a session the configuration of another of its lineage.
func (db *DB) CopyConfig(ctx context.Context, ws WorkspaceID, from, to SessionID) error {
	return db.tx(ctx, func(t *tx) error {
		row, err := t.fullRow(ws, from, false)
		if err != nil {
			return err
		}
		key, err := t.dataKey(ws, row.keyID)
		if err != nil {
			return err
		}
		row.ID = to
		sealed, err := newChange(*row, key, nil).sealedConfig()
		if err != nil {
			return err
		}
		_, err = t.exec(upsertConfig, ws, to, sealed)
		return err
	})
}

// RawStep writes the rows of one append of BenchmarkEffect with nothing around
// them: no precondition, hash, seal or fold. What is measured against it is the
// protocol's own cost.
type RawStep struct {
	Session SessionID
	Effect  EffectID
	Seq     Seq
	Step    int // 0 intent, 1 attempt, 2 completion with its event
	Body    []byte
}

// RawCommit commits steps in one transaction.
func (db *DB) RawCommit(ctx context.Context, steps []RawStep) error {
	salt, hash := make([]byte, saltSize), make([]byte, 32)
	now := micros(db.Now())
	write := func(t *tx, s *RawStep) error {
		entries := 1 + s.Step/2
		for k := range entries {
			if _, err := t.exec(insertLog, "default", string(s.Session), int64(s.Seq)+int64(k), "completion", "", string(s.Effect), "sthr_1", now, int64(1), "dkey_01m8m8ww2jq2jqvnz338dg3326", salt, s.Body, "", hash); err != nil {
				return err
			}
		}
		x := Effect{Workspace: "default", Session: s.Session, Lineage: s.Session, ID: s.Effect, Thread: "sthr_1", Tool: "delete_database", Server: "aws",
			Class: ClassIrreversible, State: StateIntended, Event: EventID("sevt_" + s.Effect), Digest: "d1", Near: "n1", Key: "key-" + string(s.Effect), CreatedAt: db.Now()}
		args := x.args()
		var err error
		if s.Step == 0 {
			_, err = t.exec(insertEffect, args...)
		} else {
			_, err = t.exec(moveEffect, append(x.movedArgs(), args[0], args[2])...)
		}
		if err != nil {
			return err
		}
		r := &sessionRow{}
		r.Owner, r.Fence, r.Status, r.nextAt = "node", 1, StatusRunning, 1
		r.Head = s.Seq + Seq(entries) - 1
		_, err = t.exec(updateSession[setEvery], append(r.setArgs()[:setEvery:setEvery], "default", string(s.Session), int64(1), int64(s.Seq)-1)...)
		return err
	}
	return db.transact(ctx, 0, func(t *tx) error {
		for i := range steps {
			if err := write(t, &steps[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

// VersionOf is how the version of a body is read.
func VersionOf(body []byte) (int, error) { return bodyVersion(body) }
