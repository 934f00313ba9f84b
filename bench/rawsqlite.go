package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"strings"

	"modernc.org/sqlite"
)

// sqlite copies the store's database with all its tables and indexes and
// writes to the copy with the store's settings.
func (r *raw) sqlite(ctx context.Context, storeURL, file string) error {
	src, err := sql.Open("sqlite", "file:"+(&url.URL{Path: strings.TrimPrefix(storeURL, "sqlite:")}).EscapedPath()+"?mode=ro")
	if err != nil {
		return err
	}
	defer src.Close()
	if err := r.learn(ctx, src, func(int) string { return "?" }); err != nil {
		return err
	}
	if _, err := src.ExecContext(ctx, `VACUUM INTO ?`, file); err != nil {
		return fmt.Errorf("copy the database: %w", err)
	}
	sqlite.Fdatasync(true) //nolint:errcheck // as the store
	q := url.Values{"_txlock": {"immediate"}}
	for _, p := range []string{"busy_timeout(10000)", "journal_mode(WAL)", "synchronous(FULL)", "temp_store(MEMORY)", "cache_size(-16000)", "wal_autocheckpoint(4000)"} {
		q.Add("_pragma", p)
	}
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: file}).EscapedPath()+"?"+q.Encode())
	if err != nil {
		return err
	}
	r.closers = append(r.closers, func() { db.Close() })
	db.SetMaxOpenConns(1)
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	r.closers = append(r.closers, func() { conn.Close() })
	return r.sqliteStatements(ctx, conn)
}

func (r *raw) sqliteStatements(ctx context.Context, conn *sql.Conn) error {
	var failed error
	prepare := func(query string) *sql.Stmt {
		st, err := conn.PrepareContext(ctx, query)
		if err != nil && failed == nil {
			failed = err
		}
		return st
	}
	marks := func(n int) string { return strings.TrimSuffix(strings.Repeat("?, ", n), ", ") }
	begin, commit, rollback := prepare(`BEGIN IMMEDIATE`), prepare(`COMMIT`), prepare(`ROLLBACK`)
	log := prepare(`INSERT INTO log (` + rawLogColumns + `) VALUES (` + marks(14) + `)`)
	insert := prepare(`INSERT INTO effects (` + rawEffColumns + `) VALUES (` + marks(25) + `)`)
	update := prepare(`UPDATE effects SET state = ?, outcome = ?, attempt_seqs = ?, attempt_fence = ?, send_by = ?, end_seq = ?, updated_at = ? WHERE workspace = ? AND id = ?`)
	session := prepare(`UPDATE sessions SET head = ?, head_hash = ?, updated_at = ?, open_from = ? WHERE workspace = ? AND id = ?`)
	if failed != nil {
		return failed
	}
	r.write = func(ctx context.Context, batch []*rawAppend) (err error) {
		if _, err := begin.ExecContext(ctx); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				_, _ = rollback.ExecContext(ctx)
			}
		}()
		for _, a := range batch {
			for _, row := range a.log {
				if _, err := log.ExecContext(ctx, row...); err != nil {
					return err
				}
			}
			e := a.effect
			if a.fresh {
				_, err = insert.ExecContext(ctx, e...)
			} else {
				_, err = update.ExecContext(ctx, e[9], e[10], e[18], e[19], e[20], e[21], e[24], e[0], e[effID])
			}
			if err != nil {
				return err
			}
			if _, err := session.ExecContext(ctx, a.head, a.log[0][13], e[24], e[effID], e[0], a.session); err != nil {
				return err
			}
		}
		_, err = commit.ExecContext(ctx)
		return err
	}
	return nil
}
