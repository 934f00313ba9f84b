package store

import (
	"context"
	"database/sql"
	"sync"
)

// maxStmts bounds the prepared statements of one SQLite connection; lists of
// different lengths make more.
const maxStmts = 400

// statements is one connection of SQLite with its statements: compiling one costs
// as much as running it. Whoever holds it uses it alone.
type statements struct {
	conn  *sql.Conn
	stmts map[string]*sql.Stmt
}

// prepare returns the statement of a query.
func (s *statements) prepare(query string) (*sql.Stmt, error) {
	if st, ok := s.stmts[query]; ok {
		return st, nil
	}
	st, err := s.conn.PrepareContext(context.Background(), query)
	if err != nil {
		return nil, err
	}
	s.stmts[query] = st
	return st, nil
}

// trim forgets the statements when there are too many. No rows are open.
func (s *statements) trim() {
	if len(s.stmts) <= maxStmts {
		return
	}
	for q, st := range s.stmts {
		st.Close()
		delete(s.stmts, q)
	}
}

func (s *statements) close() error {
	for _, st := range s.stmts {
		st.Close()
	}
	return s.conn.Close()
}

// readers are SQLite's connections for reading, at most sqliteReaders. The one
// that was used last is used next, so that few calm readers keep few caches.
type readers struct {
	db    *sql.DB
	slots chan struct{}

	mu     sync.Mutex // guards the fields below
	idle   []*statements
	closed bool
}

func newReaders(db *sql.DB) *readers {
	return &readers{db: db, slots: make(chan struct{}, sqliteReaders)}
}

// take waits for a reader; the caller gives it back with put.
func (r *readers) take(ctx context.Context) (*statements, error) {
	select {
	case r.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if err := ctx.Err(); err != nil {
		<-r.slots
		return nil, err
	}
	r.mu.Lock()
	if n := len(r.idle); n > 0 {
		s := r.idle[n-1]
		r.idle = r.idle[:n-1]
		r.mu.Unlock()
		return s, nil
	}
	r.mu.Unlock()
	conn, err := r.db.Conn(ctx)
	if err != nil {
		<-r.slots
		return nil, err
	}
	return &statements{conn: conn, stmts: map[string]*sql.Stmt{}}, nil
}

// put gives a reader back; a broken one is closed.
func (r *readers) put(s *statements, broken bool) {
	defer func() { <-r.slots }()
	s.trim()
	r.mu.Lock()
	if broken = broken || r.closed; !broken {
		r.idle = append(r.idle, s)
	}
	r.mu.Unlock()
	if broken {
		s.close() //nolint:errcheck // reading only
	}
}

func (r *readers) close() {
	r.mu.Lock()
	idle := r.idle
	r.idle, r.closed = nil, true
	r.mu.Unlock()
	for _, s := range idle {
		s.close() //nolint:errcheck // reading only
	}
}

// snapshot runs f between BEGIN and ROLLBACK on a reader.
func (r *readers) snapshot(ctx context.Context, db *DB, f func(*tx) error) error {
	s, err := r.take(ctx)
	if err != nil {
		return err
	}
	t := &tx{ctx: ctx, db: db, st: s}
	if _, err := t.exec("BEGIN"); err != nil {
		r.put(s, true)
		return err
	}
	broken := true
	defer func() {
		if _, err := t.exec("ROLLBACK"); err == nil {
			broken = false
		}
		r.put(s, broken)
	}()
	return f(t)
}

// oneRow is the answer of queryRow; Scan must be called, once.
type oneRow struct {
	row  *sql.Row
	err  error
	free func() // gives the reader back; nil when there is nothing to give
}

// Scan is that of sql.Row.
func (r oneRow) Scan(dest ...any) error {
	if r.free != nil {
		defer r.free()
	}
	if r.err != nil {
		return r.err
	}
	return r.row.Scan(dest...)
}
