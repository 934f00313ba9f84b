package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// DB is the store: one log per session and the rows derived from it. Safe for
// concurrent use.
type DB struct {
	cfg Config
	log *slog.Logger
	now func() time.Time
	pg  bool // PostgreSQL, else SQLite

	w       *sql.DB       // writes; on SQLite a single connection
	r       *sql.DB       // reads
	beat    *sql.DB       // PostgreSQL: renews the node's lease and finds dead nodes
	writer  *sqliteWriter // SQLite: the one writer; nil on PostgreSQL
	readers *readers      // SQLite: connections of r with their statements
	lock    *os.File      // SQLite: holds the folder lock; nil when read only
	wit     *witness      // SQLite: what was acknowledged, beside the database

	keys *keyring
	com  *committer
	hub  *hub

	instance string // names this process in notices

	mu     sync.Mutex // guards the fields below
	leases map[sessionKey]*Lease
	nodes  map[NodeID]*Node // joined by this process

	notices notices // PostgreSQL: what other nodes are to be told
}

// sessionKey names a session in memory.
type sessionKey struct {
	ws WorkspaceID
	id SessionID
}

// Open opens (and in an empty place initialises) the store, checks its format,
// migrates forward. It starts nothing: Run does.
func Open(ctx context.Context, cfg Config) (*DB, error) {
	if cfg.Master == nil || cfg.Blobs == nil {
		return nil, errors.New("open store: Config.Master and Config.Blobs are required")
	}
	db := &DB{cfg: cfg, log: cfg.Logger, now: cfg.Now,
		leases: map[sessionKey]*Lease{}, nodes: map[NodeID]*Node{}}
	if db.log == nil {
		db.log = slog.Default()
	}
	if db.now == nil {
		db.now = time.Now
	}
	db.instance = NewID("proc_", db.now())
	db.notices = notices{signal: make(chan struct{}, 1), keys: map[sessionKey]struct{}{}}
	db.keys = newKeyring(cfg.Master)
	db.hub = newHub()
	db.com = newCommitter(db)
	var err error
	switch {
	case strings.HasPrefix(cfg.URL, "sqlite:"):
		err = db.openSQLite(ctx, strings.TrimPrefix(cfg.URL, "sqlite:"))
	case strings.HasPrefix(cfg.URL, "postgres://"), strings.HasPrefix(cfg.URL, "postgresql://"):
		db.pg = true
		err = db.openPostgres(ctx)
	default:
		err = errors.New(`the URL is neither "sqlite:FILE" nor "postgres://…"`)
	}
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("open store: %w", db.mapErr(err))
	}
	return db, nil
}

// Run drives the group committer, and on PostgreSQL the wake-ups, until ctx ends.
// No append returns before Run was started. It owns every goroutine. When ctx
// ends it commits what was submitted before and returns.
func (db *DB) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return db.com.run(ctx) })
	if !db.cfg.ReadOnly {
		g.Go(func() error { return db.sweeper(ctx) })
	}
	if db.pg && !db.cfg.ReadOnly {
		g.Go(func() error { return db.listen(ctx) })
		g.Go(func() error { return db.poll(ctx) })
		g.Go(func() error { return db.notifier(ctx) })
	}
	return g.Wait()
}

// Close closes connections after Run has returned.
func (db *DB) Close() error {
	var errs []error
	db.mu.Lock()
	nodes := db.nodes
	db.nodes = map[NodeID]*Node{}
	db.mu.Unlock()
	for _, n := range nodes {
		if n.lock != nil { // frees the advisory lock: the node is dead
			n.lock.conn.Close(context.Background()) //nolint:errcheck // it is gone either way
		}
	}
	// Readers first: SQLite's last connection, the writer, then empties the WAL.
	if db.readers != nil {
		db.readers.close()
	}
	if db.r != nil {
		errs = append(errs, db.r.Close())
	}
	if db.beat != nil {
		errs = append(errs, db.beat.Close())
	}
	if db.writer != nil {
		errs = append(errs, db.writer.close())
	}
	if db.w != nil {
		errs = append(errs, db.w.Close())
	}
	if db.wit != nil {
		errs = append(errs, db.wit.close())
	}
	if db.lock != nil {
		// Frees the folder's lock for others at once: a process that is being started
		// has a copy of the descriptor until it becomes another program.
		errs = append(errs, syscall.Flock(int(db.lock.Fd()), syscall.LOCK_UN), db.lock.Close())
	}
	return errors.Join(errs...)
}

// Now is the store's clock, UTC, in microseconds.
func (db *DB) Now() time.Time { return db.now().UTC().Truncate(time.Microsecond) }

func (db *DB) ttl() time.Duration    { return orElse(db.cfg.LeaseTTL, LeaseTTL) }
func (db *DB) renew() time.Duration  { return orElse(db.cfg.LeaseRenew, LeaseRenew) }
func (db *DB) margin() time.Duration { return orElse(db.cfg.LeaseMargin, LeaseMargin) }

func orElse(d, def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return d
}

// fault calls the test hook for a durable step; nil in production.
func (db *DB) fault(step string) error {
	if db.cfg.Fault == nil {
		return nil
	}
	return db.cfg.Fault(step)
}

// micros is how times are stored: UTC microseconds, 0 for the zero time.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// fromMicros is the inverse of micros.
func fromMicros(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}

// b2i stores a flag.
func b2i(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
