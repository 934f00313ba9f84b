package store

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// sqliteAppID marks the file as ours (PRAGMA application_id): "plan".
const sqliteAppID = 0x706c616e

// lockMark is written into the lock file once the database was initialised, so
// that a database that is gone or empty is noticed and not made anew.
const lockMark = "planaria data folder, initialised\n"

// sqliteReaders bounds the pool of readers; each holds its page cache.
const sqliteReaders = 8

// beside lists what others of ours keep in the data folder before the
// database exists. Anything else there makes the folder foreign.
var beside = []string{"lock", "blobs", "keys", "tmp", "lost+found", "planaria.yaml"}

// openSQLite takes the folder lock, then opens the file. The lock's holder is
// the only process that writes, so an owner that is not of this process is dead.
func (db *DB) openSQLite(ctx context.Context, file string) error {
	dir := filepath.Dir(file)
	if db.cfg.ReadOnly {
		if _, err := os.Stat(file); err != nil {
			return err
		}
		return db.dialSQLite(ctx, file)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	fresh, err := db.lockFolder(dir, file)
	if err != nil {
		return err
	}
	if fresh { // for the owner's eyes only, as the files that SQLite puts beside it
		f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		f.Close()
	}
	if err := db.dialSQLite(ctx, file); err != nil {
		return err
	}
	if !fresh {
		if err := db.checkSQLite(ctx); err != nil {
			return err
		}
	}
	if err := db.migrate(ctx); err != nil {
		return err
	}
	if err := db.checkSchema(ctx); err != nil {
		return err
	}
	if fresh {
		if _, err := db.writer.conn.ExecContext(ctx, `PRAGMA wal_checkpoint(TRUNCATE)`); err != nil {
			return err
		}
		if err := markInitialised(db.lock, dir); err != nil {
			return fmt.Errorf("mark the folder: %w", err)
		}
	}
	if db.wit, err = openWitness(dir); err != nil {
		return err
	}
	return db.compareWitness(ctx)
}

// lockFolder takes the exclusive lock and says whether the database is to be
// made. A crash before markInitialised leaves a half-made database and an empty
// lock file: the next start makes it again, nothing was acknowledged.
func (db *DB) lockFolder(dir, file string) (fresh bool, err error) {
	names, err := os.ReadDir(dir)
	if err != nil {
		return false, err
	}
	base := filepath.Base(file)
	_, statErr := os.Stat(file)
	missing := errors.Is(statErr, fs.ErrNotExist)
	if missing {
		for _, n := range names {
			if !slices.Contains(beside, n.Name()) && !strings.HasPrefix(n.Name(), base) &&
				!strings.HasPrefix(n.Name(), "master") && !strings.HasPrefix(n.Name(), "witness") {
				return false, fmt.Errorf("%w: %s holds %q", ErrForeign, dir, n.Name())
			}
		}
	}
	// Before anything is written: the file may be another program's.
	if mark, err := os.ReadFile(filepath.Join(dir, "lock")); !missing && string(mark) != lockMark && (err == nil || errors.Is(err, fs.ErrNotExist)) {
		if err := refuseForeign(file); err != nil {
			return false, err
		}
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return false, err
	}
	db.lock = f
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return false, fmt.Errorf("%w: %s", ErrLocked, dir)
		}
		return false, fmt.Errorf("lock %s: %w", dir, err)
	}
	mark, err := os.ReadFile(f.Name())
	if err != nil {
		return false, err
	}
	fresh = string(mark) != lockMark
	if st, err := os.Stat(file); !fresh && (err != nil || st.Size() == 0) {
		return false, fmt.Errorf("%w: the database %s is missing or empty, but this folder was initialised; restore it from a backup", ErrDamaged, file)
	}
	return fresh, nil
}

// refuseForeign looks at the header of a database in a folder that was not
// initialised. Ours is empty or half-made by a start that died: it has our id,
// or neither an id nor a schema.
func refuseForeign(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	head := make([]byte, 100)
	n, err := io.ReadFull(f, head)
	if n == 0 && errors.Is(err, io.EOF) {
		return nil
	}
	if err != nil || string(head[:16]) != "SQLite format 3\x00" {
		return fmt.Errorf("%w: %s is not a database", ErrForeign, file)
	}
	schema, id := binary.BigEndian.Uint32(head[40:]), binary.BigEndian.Uint32(head[68:])
	if id != sqliteAppID && (id != 0 || schema != 0) {
		return fmt.Errorf("%w: the database %s belongs to another program", ErrForeign, file)
	}
	return nil
}

func markInitialised(lock *os.File, dir string) error {
	if _, err := lock.WriteAt([]byte(lockMark), 0); err != nil {
		return err
	}
	if err := lock.Sync(); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

func (db *DB) dialSQLite(ctx context.Context, file string) error {
	// On Linux SQLite's own build commits with fdatasync; this port needs telling.
	sqlite.Fdatasync(true) //nolint:errcheck // where it is not available fsync stays
	dsn := func(mode string, pragmas ...string) string {
		q := url.Values{"mode": {mode}, "_txlock": {"deferred"}}
		for _, p := range pragmas {
			q.Add("_pragma", p)
		}
		return (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: file}).EscapedPath(), RawQuery: q.Encode()}).String()
	}
	var err error
	if !db.cfg.ReadOnly {
		db.w, err = sql.Open("sqlite", dsn("rwc", "busy_timeout(10000)", "journal_mode(WAL)",
			"synchronous(FULL)", "temp_store(MEMORY)", "cache_size(-16000)", "wal_autocheckpoint(4000)"))
		if err != nil {
			return err
		}
		db.w.SetMaxOpenConns(1)
		if db.writer, err = newSQLiteWriter(ctx, db.w); err != nil {
			return err
		}
	}
	db.r, err = sql.Open("sqlite", dsn("ro", "busy_timeout(10000)", "cache_size(-4000)", "query_only(1)"))
	if err != nil {
		return err
	}
	db.r.SetMaxOpenConns(sqliteReaders + 1) // one for what the start looks at
	db.readers = newReaders(db.r)
	if db.cfg.ReadOnly {
		if err := db.checkSQLite(ctx); err != nil {
			return err
		}
		if err := db.checkFormat(ctx); err != nil {
			return err
		}
		return db.checkSchema(ctx)
	}
	return nil
}

// checkSQLite refuses a database that is not ours.
func (db *DB) checkSQLite(ctx context.Context) error {
	var id int64
	q := db.w
	if q == nil {
		q = db.r
	}
	var err error
	if db.writer != nil {
		err = db.writer.conn.QueryRowContext(ctx, `PRAGMA application_id`).Scan(&id)
	} else {
		err = q.QueryRowContext(ctx, `PRAGMA application_id`).Scan(&id)
	}
	if err != nil {
		return err
	}
	if id == 0 && db.lock != nil {
		return fmt.Errorf("%w: the database has lost its contents; restore it from a backup", ErrDamaged)
	}
	if id != sqliteAppID {
		return fmt.Errorf("%w: the database belongs to another program", ErrForeign)
	}
	return nil
}

// sqliteWriter is the one connection that writes, with its prepared statements.
type sqliteWriter struct {
	statements
	turn chan struct{} // holds one token; who has it may use the fields
	// others counts the transactions that are not the committer's, begun ones
	// too. The folder's lock makes this the only process that writes.
	others int64
}

func newSQLiteWriter(ctx context.Context, w *sql.DB) (*sqliteWriter, error) {
	conn, err := w.Conn(ctx)
	if err != nil {
		return nil, err
	}
	return &sqliteWriter{statements: statements{conn: conn, stmts: map[string]*sql.Stmt{}}, turn: make(chan struct{}, 1)}, nil
}

// transact waits for the turn and runs f between BEGIN IMMEDIATE and COMMIT.
func (w *sqliteWriter) transact(ctx context.Context, db *DB, f func(*tx) error) (err error) {
	select {
	case w.turn <- struct{}{}:
		defer func() { <-w.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	ctx = context.WithoutCancel(ctx)
	w.trim()
	if ctx.Value(commitStep{}) == nil {
		w.others++
	}
	t := &tx{ctx: ctx, db: db, st: &w.statements}
	if _, err := t.exec("BEGIN IMMEDIATE"); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	done := false
	defer func() {
		if !done { // an error or a panic of f
			if _, rerr := t.exec("ROLLBACK"); rerr != nil && err == nil {
				err = rerr
			}
		}
	}()
	if err := f(t); err != nil {
		return err
	}
	if err := db.commitFault(ctx); err != nil {
		return err
	}
	if _, err := t.exec("COMMIT"); err != nil {
		// SQLite either rolled back or left the transaction open; the rollback
		// above ends the latter. What readers see decides.
		return fmt.Errorf("%w: %w", errLostCommit, err)
	}
	done = true
	return nil
}

// sqliteErr maps what the engine says about damage.
func sqliteErr(err error) error {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		// SQLite keeps a type with each value, so one that does not fit its column
		// was not written by us. database/sql has no type for this error.
		for in := err; in != nil; in = errors.Unwrap(in) {
			if strings.HasPrefix(in.Error(), "sql: Scan error on column") {
				return fmt.Errorf("%w: %w", ErrDamaged, err)
			}
		}
		return err
	}
	switch e.Code() & 0xff {
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	case sqlite3.SQLITE_FULL:
		return fmt.Errorf("the disk of the data folder is full: %w", err)
	case sqlite3.SQLITE_IOERR:
		return fmt.Errorf("reading or writing the data folder: %w", err)
	}
	return err
}
