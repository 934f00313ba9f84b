package store

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// Migrations have the same names on both engines, go forward only, and each is
// one transaction with the row that records it. A crash between two leaves the
// first; the next start goes on. The running code works before and after each
// one (expand, move, contract).

//go:embed migrations/sqlite/*.sql migrations/postgres/*.sql
var migrationFiles embed.FS

// migrationLock is the advisory lock that nodes take one after the other to
// migrate PostgreSQL: "plan" and 1.
const migrationLock = 0x706c616e_00000001

func migrationNames(engine string) ([]string, error) {
	names, err := fs.Glob(migrationFiles, "migrations/"+engine+"/*.sql")
	if err != nil {
		return nil, err
	}
	for i, n := range names {
		names[i] = strings.TrimSuffix(path.Base(n), ".sql")
	}
	slices.Sort(names)
	return names, nil
}

func (db *DB) engine() string {
	if db.pg {
		return "postgres"
	}
	return "sqlite"
}

const createMigrations = `CREATE TABLE IF NOT EXISTS migrations (name TEXT NOT NULL PRIMARY KEY, at BIGINT NOT NULL)`

// migrate brings the schema forward; ErrNewer if it is newer than this program.
func (db *DB) migrate(ctx context.Context) error {
	names, err := migrationNames(db.engine())
	if err != nil {
		return err
	}
	if !db.pg {
		// Inside a transaction this pragma is part of it; outside it commits by
		// itself, and doing it twice does no harm.
		if _, err := db.writer.conn.ExecContext(ctx, fmt.Sprintf("PRAGMA application_id = %d", sqliteAppID)); err != nil {
			return err
		}
	}
	if err := db.transact(ctx, 0, func(t *tx) error {
		if err := t.lockMigrations(); err != nil {
			return err
		}
		_, err := t.exec(createMigrations)
		return err
	}); err != nil {
		return fmt.Errorf("make table of migrations: %w", err)
	}
	if err := db.checkFormat(ctx); err != nil {
		return err
	}
	for _, name := range names {
		if err := db.transact(ctx, 0, func(t *tx) error { return t.migrateOne(name) }); err != nil {
			return fmt.Errorf("migration %s: %w", name, err)
		}
	}
	return nil
}

func (t *tx) lockMigrations() error {
	if !t.db.pg {
		return nil
	}
	_, err := t.exec(`SELECT pg_advisory_xact_lock(?)`, int64(migrationLock))
	return err
}

func (t *tx) migrateOne(name string) error {
	if err := t.lockMigrations(); err != nil {
		return err
	}
	var n int64
	if err := t.queryRow(`SELECT count(*) FROM migrations WHERE name = ?`, name).Scan(&n); err != nil || n > 0 {
		return err
	}
	text, err := migrationFiles.ReadFile("migrations/" + t.db.engine() + "/" + name + ".sql")
	if err != nil {
		return err
	}
	// Not prepared: a file holds several statements.
	if err := t.script(string(text)); err != nil {
		return t.db.mapErr(err)
	}
	_, err = t.exec(`INSERT INTO migrations (name, at) VALUES (?, ?)`, name, micros(t.db.Now()))
	return err
}

// checkFormat refuses a store with migrations that this program does not know:
// ErrNewer behind its own ones, ErrDamaged in the place of one.
func (db *DB) checkFormat(ctx context.Context) error {
	names, err := migrationNames(db.engine())
	if err != nil {
		return err
	}
	n := 0
	return db.peek(ctx).each(`SELECT name FROM migrations ORDER BY name`, nil, func(rows *sql.Rows) error {
		var name string
		if err := rows.Scan(&name); err != nil {
			return err
		}
		switch {
		case n >= len(names):
			return fmt.Errorf("%w: it has %s, this program knows up to %s; use the newer program", ErrNewer, name, names[len(names)-1])
		case name != names[n]: // no program ever recorded another one at this place
			return fmt.Errorf("%w: the database records migration %q where %s belongs; restore it from a backup", ErrDamaged, name, names[n])
		}
		n++
		return nil
	})
}

// checkSchema compares the columns of SQLite's tables with those that the
// recorded migrations make. The engine takes a byte that flipped in the text of
// its schema for another schema: queries would fail one by one, later.
func (db *DB) checkSchema(ctx context.Context) error {
	sample, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		return err
	}
	defer sample.Close()
	sample.SetMaxOpenConns(1)
	texts := []string{createMigrations}
	if err := db.peek(ctx).each(`SELECT name FROM migrations ORDER BY name`, nil, func(rows *sql.Rows) error {
		var name string
		if err := rows.Scan(&name); err != nil {
			return err
		}
		text, err := migrationFiles.ReadFile("migrations/sqlite/" + name + ".sql")
		texts = append(texts, string(text))
		return err
	}); err != nil {
		return err
	}
	for _, text := range texts {
		if _, err := sample.ExecContext(ctx, text); err != nil {
			return fmt.Errorf("make a sample of the schema: %w", err)
		}
	}
	want, err := columnsOf(ctx, sample)
	if err != nil {
		return err
	}
	got, err := columnsOf(ctx, db.r)
	if err != nil {
		return err
	}
	for table, columns := range want {
		if got[table] != columns {
			return fmt.Errorf("%w: the database has not the columns of table %s; restore it from a backup", ErrDamaged, table)
		}
	}
	return nil
}

// columnsOf describes the columns of each table.
func columnsOf(ctx context.Context, q querier) (map[string]string, error) {
	rows, err := q.QueryContext(ctx, `SELECT m.name, p.name || ' ' || p.type || ' ' || p."notnull" || ' ' || coalesce(p.dflt_value, '') || ' ' || p.pk
 FROM sqlite_schema m JOIN pragma_table_info(m.name) p WHERE m.type = 'table' ORDER BY m.name, p.cid`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := map[string]string{}
	for rows.Next() {
		var table, column string
		if err := rows.Scan(&table, &column); err != nil {
			return nil, err
		}
		out[table] += column + "\n"
	}
	return out, rows.Err()
}
