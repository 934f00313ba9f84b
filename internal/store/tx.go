package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"
)

// How to use transactions (for every noun that is not written by Append):
//
//	err := db.tx(ctx, func(tx *tx) error {
//		n, err := tx.exec(`UPDATE agents SET name = ? WHERE workspace = ? AND id = ?`, name, ws, id)
//		…
//	})
//
// db.tx is a write transaction. The function may run more than once (PostgreSQL
// repeats it after a serialization failure, which is isolated SERIALIZABLE), so
// it sets its results anew each time and touches no network, file or channel.
// Its error rolls back and is returned as it is. db.read is the same for reads:
// one consistent snapshot. Placeholders are ? on both engines. Times are stored
// as micros(t) and read with fromMicros. tx.queryRow(…).Scan gives
// sql.ErrNoRows; notFound(err) makes ErrNotFound of it.

// tx is one transaction, or a way to read without one (DB.peek).
type tx struct {
	ctx context.Context
	db  *DB
	q   querier     // PostgreSQL
	st  *statements // SQLite: the connection, held by this transaction
	r   *readers    // SQLite, without a transaction: a connection is taken per query
}

// querier is what *sql.Tx and *sql.DB have in common.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Statements of SQLite run to their end: a context that can end costs a
// goroutine for each. Who leaves is noticed between rows.
var unending = context.Background()

// exec runs a statement and returns how many rows it changed. Not for peek.
func (t *tx) exec(query string, args ...any) (int64, error) {
	var res sql.Result
	var err error
	if t.st != nil {
		st, perr := t.st.prepare(query)
		if perr != nil {
			return 0, t.db.mapErr(perr)
		}
		res, err = st.ExecContext(unending, args...)
	} else {
		res, err = t.q.ExecContext(t.ctx, t.db.sql(query), args...)
	}
	if err != nil {
		return 0, t.db.mapErr(err)
	}
	return res.RowsAffected()
}

// script runs statements without arguments.
func (t *tx) script(text string) error {
	var err error
	if t.st != nil {
		_, err = t.st.conn.ExecContext(unending, text)
	} else {
		_, err = t.q.ExecContext(t.ctx, text)
	}
	return t.db.mapErr(err)
}

// query runs a query for several rows; the caller closes them and checks Err.
// Not for peek: see each.
func (t *tx) query(query string, args ...any) (*sql.Rows, error) {
	if t.st != nil {
		st, err := t.st.prepare(query)
		if err != nil {
			return nil, t.db.mapErr(err)
		}
		rows, err := st.QueryContext(unending, args...)
		return rows, t.db.mapErr(err)
	}
	rows, err := t.q.QueryContext(t.ctx, t.db.sql(query), args...)
	return rows, t.db.mapErr(err)
}

// queryRow runs a query for one row. The caller must Scan.
func (t *tx) queryRow(query string, args ...any) oneRow {
	switch {
	case t.r != nil:
		s, err := t.r.take(t.ctx)
		if err != nil {
			return oneRow{err: err}
		}
		row := (&tx{ctx: t.ctx, db: t.db, st: s}).queryRow(query, args...)
		row.free = func() { t.r.put(s, false) }
		return row
	case t.st != nil:
		st, err := t.st.prepare(query)
		if err != nil {
			return oneRow{err: err}
		}
		return oneRow{row: st.QueryRowContext(unending, args...)}
	}
	return oneRow{row: t.q.QueryRowContext(t.ctx, t.db.sql(query), args...)}
}

// each runs a query and calls f per row. f runs no query of the same text.
func (t *tx) each(query string, args []any, f func(*sql.Rows) error) error {
	if t.r != nil {
		s, err := t.r.take(t.ctx)
		if err != nil {
			return err
		}
		defer t.r.put(s, false)
		return (&tx{ctx: t.ctx, db: t.db, st: s}).each(query, args, f)
	}
	rows, err := t.query(query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := t.ctx.Err(); err != nil {
			return err
		}
		if err := f(rows); err != nil {
			return t.db.mapErr(err)
		}
	}
	return t.db.mapErr(rows.Err())
}

// maxTries bounds repetitions of a batch after serialization failures.
const maxTries = 20

// retryTime bounds repetitions of a write transaction after serialization
// failures: many that write one row (the head of an audit chain) wait for each
// other, however slow the machine is.
const retryTime = 15 * time.Second

// tx runs f in a write transaction; see the comment at the top of this file.
func (db *DB) tx(ctx context.Context, f func(*tx) error) error {
	return db.write(ctx, writeOpt{iso: sql.LevelSerializable, step: "tx"}, f)
}

// writeOpt says how a write transaction runs.
type writeOpt struct {
	iso  sql.IsolationLevel // PostgreSQL only
	pool *sql.DB            // PostgreSQL only; the writers' when nil
	step string             // names the fault hook
	// landed finds out after an error of COMMIT whether the transaction is
	// there. Nil: the caller gets ErrUnknown.
	landed func(*tx) (bool, error)
	// waits: landed locks a row that the transaction locked, so that on
	// PostgreSQL it waits for a COMMIT that the server is still at.
	waits bool
}

// write runs f in a write transaction, repeats it after serialization failures,
// and after an error of COMMIT finds out what became of it.
func (db *DB) write(ctx context.Context, o writeOpt, f func(*tx) error) error {
	if db.cfg.ReadOnly {
		return errReadOnly
	}
	began := time.Now()
	for try := 1; ; try++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := db.writeOnce(ctx, o, f)
		lost := errors.Is(err, errLostCommit)
		if err == nil || !(time.Since(began) < retryTime && db.isRetry(err)) && !(try < connTries && !lost && db.isConn(err)) {
			return err
		}
		if db.isRetry(err) {
			stepAside(ctx, try)
		}
	}
}

// stepAside waits a moment of chance before a transaction that met others is
// repeated, the longer the more often it met them: many that write one row (the
// head of the audit chain) would else meet each time.
func stepAside(ctx context.Context, try int) {
	t := time.NewTimer(rand.N(min(time.Millisecond<<min(try, 10), 50*time.Millisecond)))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

var errReadOnly = errors.New("store is open for reading only")

// errLostCommit marks an error of COMMIT itself.
var errLostCommit = errors.New("commit gave an error")

func (db *DB) writeOnce(ctx context.Context, o writeOpt, f func(*tx) error) error {
	if err := db.fault(o.step + ".before"); err != nil {
		return err // nothing is there
	}
	pool := o.pool
	if pool == nil {
		pool = db.w
	}
	err := db.transactIn(ctx, pool, o.iso, f)
	if err == nil {
		// Durable now. A crash or a lost reply right here: there, unanswered.
		if ferr := db.fault(o.step + ".after"); ferr != nil {
			err = fmt.Errorf("%w: %w", errLostCommit, ferr)
		}
	}
	if !errors.Is(err, errLostCommit) {
		return err
	}
	if o.landed == nil {
		return fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	there := false
	look := db.read
	if db.pg && o.waits {
		look = func(ctx context.Context, f func(*tx) error) error { return db.transact(ctx, sql.LevelReadCommitted, f) }
	}
	rerr := look(context.WithoutCancel(ctx), func(t *tx) (err error) {
		if err := db.fault(o.step + ".compare"); err != nil {
			return err
		}
		there, err = o.landed(t)
		return err
	})
	switch {
	case rerr != nil:
		return fmt.Errorf("%w: %w: %w", ErrUnknown, err, rerr)
	case there:
		return nil
	case db.uncertain(err), db.isConn(err) && !o.waits:
		return fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return err // not there, and the caller may try again
}

// transact runs f between BEGIN and COMMIT once. What begins is not cut by a
// caller that leaves: its fate would be unknown for no gain.
func (db *DB) transact(ctx context.Context, iso sql.IsolationLevel, f func(*tx) error) error {
	return db.transactIn(ctx, db.w, iso, f)
}

func (db *DB) transactIn(ctx context.Context, pool *sql.DB, iso sql.IsolationLevel, f func(*tx) error) error {
	if !db.pg {
		return db.writer.transact(ctx, db, f)
	}
	ctx = context.WithoutCancel(ctx)
	stx, err := pool.BeginTx(ctx, &sql.TxOptions{Isolation: iso})
	if err != nil {
		return fmt.Errorf("begin: %w", db.mapErr(err))
	}
	defer stx.Rollback() //nolint:errcheck // after Commit it is a no-op
	if err := f(&tx{ctx: ctx, db: db, q: stx}); err != nil {
		return err
	}
	if err := db.commitFault(ctx); err != nil {
		return err
	}
	if err := stx.Commit(); err != nil {
		if db.isRetry(err) {
			return err // the server said that it rolled back
		}
		return fmt.Errorf("%w: %w", errLostCommit, db.mapErr(err))
	}
	return nil
}

// commitFault lets a test make COMMIT of the committer's transaction fail with
// nothing there.
func (db *DB) commitFault(ctx context.Context) error {
	if step, ok := ctx.Value(commitStep{}).(string); ok {
		if err := db.fault(step); err != nil {
			return fmt.Errorf("%w: %w", errLostCommit, err)
		}
	}
	return nil
}

// commitStep is the context key of the fault hook's name for COMMIT.
type commitStep struct{}

// read runs f against one consistent snapshot.
func (db *DB) read(ctx context.Context, f func(*tx) error) error {
	if !db.pg {
		return db.mapErr(db.readers.snapshot(ctx, db, f))
	}
	opt := &sql.TxOptions{ReadOnly: true, Isolation: sql.LevelRepeatableRead}
	stx, err := db.r.BeginTx(ctx, opt)
	if err != nil {
		return fmt.Errorf("begin reading: %w", db.mapErr(err))
	}
	defer stx.Rollback() //nolint:errcheck // reading only
	return db.mapErr(f(&tx{ctx: ctx, db: db, q: stx}))
}

// peek reads without a transaction: each statement sees its own snapshot.
func (db *DB) peek(ctx context.Context) *tx {
	if !db.pg {
		return &tx{ctx: ctx, db: db, r: db.readers}
	}
	return &tx{ctx: ctx, db: db, q: db.r}
}

// notFound maps sql.ErrNoRows to ErrNotFound.
func notFound(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return ErrNotFound
	}
	return err
}

// missing is the error of a row that must be there. That it is gone is damage;
// that it cannot be read now (the caller left, a connection broke) is not, and
// must not refuse a session for good.
func missing(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("%w: the row is missing", ErrDamaged) // and not ErrNotFound: nobody deleted it
	}
	return err
}

// unreachable tells an error of the way to a blob, which may pass, from what
// the blobs say of a blob.
func unreachable(err error) bool {
	var errno syscall.Errno
	var ne net.Error
	return errors.As(err, &errno) || errors.As(err, &ne)
}

// rewritten caches queries with PostgreSQL's placeholders. The queries are
// constants of this package but for lists, whose lengths are bounded by pages.
var rewritten sync.Map

// sql rewrites ? to $1, $2, … for PostgreSQL. No query holds a literal ?.
func (db *DB) sql(query string) string {
	if !db.pg {
		return query
	}
	if q, ok := rewritten.Load(query); ok {
		return q.(string)
	}
	var b strings.Builder
	n := 0
	for _, c := range query {
		if c == '?' {
			n++
			fmt.Fprintf(&b, "$%d", n)
			continue
		}
		b.WriteRune(c)
	}
	rewritten.Store(query, b.String())
	return b.String()
}

// marks returns "?, ?, …" for n values.
func marks(n int) string {
	if n == 0 {
		return "NULL"
	}
	return strings.Repeat("?, ", n-1) + "?"
}

// wake signals a channel of size one; signals merge.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// forever is how far a time without end lies away.
const forever = 365 * 24 * time.Hour
