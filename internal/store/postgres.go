package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib" // registers "pgx"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// pgConns bounds the connections of one node, beside the two dedicated ones.
const pgConns = 16

func (db *DB) openPostgres(ctx context.Context) error {
	var err error
	if db.w, err = sql.Open("pgx", db.cfg.URL); err != nil {
		return err
	}
	db.r = db.w
	db.w.SetMaxOpenConns(pgConns)
	db.w.SetMaxIdleConns(pgConns)
	var commit, version string
	if err := db.w.QueryRowContext(ctx, `SELECT current_setting('synchronous_commit'), current_setting('server_version_num')`).Scan(&commit, &version); err != nil {
		return err
	}
	if commit == "off" {
		return errors.New("PostgreSQL runs with synchronous_commit=off, which loses acknowledged entries; switch it on")
	}
	if version < "150000" {
		return fmt.Errorf("PostgreSQL %s is too old, 15 is needed", version)
	}
	if db.cfg.ReadOnly {
		return db.checkFormat(ctx)
	}
	return db.migrate(ctx)
}

// mapErr maps what the engines say about damage and space to clear errors.
func (db *DB) mapErr(err error) error {
	if err == nil {
		return nil
	}
	if !db.pg {
		return sqliteErr(err)
	}
	var e *pgconn.PgError
	if errors.As(err, &e) {
		switch e.Code {
		case "XX001", "XX002": // data_corrupted, index_corrupted
			return fmt.Errorf("%w: %w", ErrDamaged, err)
		case "53100": // disk_full
			return fmt.Errorf("the disk of PostgreSQL is full: %w", err)
		}
	}
	return err
}

// isRetry reports whether the server rolled a transaction back only because of
// others that ran beside it.
func (db *DB) isRetry(err error) bool {
	var e *pgconn.PgError
	return db.pg && errors.As(err, &e) && (e.Code == "40001" || e.Code == "40P01")
}

// isUnique reports a row whose key is already there.
func (db *DB) isUnique(err error) bool {
	var p *pgconn.PgError
	if errors.As(err, &p) {
		return p.Code == "23505"
	}
	var s *sqlite.Error
	return errors.As(err, &s) && (s.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY || s.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE)
}

type nodeLock struct{}

func (n *Node) joinPostgres(ctx context.Context, info NodeInfo) error { return nil }
func (n *Node) runPostgres(ctx context.Context) error                 { <-ctx.Done(); return nil }
func (n *Node) mayClaim(ctx context.Context) error                    { return nil }
func (t *tx) holdNode(n *Node) error                                  { return nil }
func (t *tx) writeUnnest(cs []*change) error                          { return nil }
func (db *DB) tellOthers(rs []*sessionRow, work bool)                 {}

func (db *DB) listen(ctx context.Context) error   { <-ctx.Done(); return nil }
func (db *DB) poll(ctx context.Context) error     { <-ctx.Done(); return nil }
func (db *DB) notifier(ctx context.Context) error { <-ctx.Done(); return nil }
