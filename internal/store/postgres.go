package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib" // registers "pgx"
)

// The connections of one node, beside the two dedicated ones. Each pool is for
// one purpose: readers that hang (at a blob that does not come) must not keep
// appends from being written, and neither may cost the node its lease.
const (
	pgWriters = 8
	pgReaders = 8
	pgBeat    = 1
)

func (db *DB) openPostgres(ctx context.Context) error {
	for pool, conns := range map[**sql.DB]int{&db.w: pgWriters, &db.r: pgReaders, &db.beat: pgBeat} {
		p, err := sql.Open("pgx", db.cfg.URL)
		if err != nil {
			return err
		}
		p.SetMaxOpenConns(conns)
		p.SetMaxIdleConns(conns)
		*pool = p
	}
	var commit string
	var version int64
	if err := db.w.QueryRowContext(ctx, `SELECT current_setting('synchronous_commit'), current_setting('server_version_num')::bigint`).Scan(&commit, &version); err != nil {
		return err
	}
	if commit == "off" {
		return errors.New("PostgreSQL runs with synchronous_commit=off, which loses acknowledged entries; switch it on")
	}
	if version < 150000 {
		return fmt.Errorf("PostgreSQL has version %d, 15 or later is needed", version/10000)
	}
	if db.cfg.ReadOnly {
		return db.checkFormat(ctx)
	}
	return db.migrate(ctx)
}

// pgErr maps what PostgreSQL says about damage and space.
func pgErr(err error) error {
	var e *pgconn.PgError
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code {
	case "XX001", "XX002": // data_corrupted, index_corrupted
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	case "53100": // disk_full
		return fmt.Errorf("the disk of PostgreSQL is full: %w", err)
	}
	return err
}

// isRetry reports whether the server rolled a transaction back only because of
// others that ran beside it.
func (db *DB) isRetry(err error) bool {
	var e *pgconn.PgError
	return db.pg && errors.As(err, &e) && (e.Code == "40001" || e.Code == "40P01")
}

// connTries bounds how often work that had not reached COMMIT is done again on
// another connection.
const connTries = 4

// isConn reports that the connection broke. Before COMMIT was sent that means
// that nothing is there.
func (db *DB) isConn(err error) bool {
	if !db.pg || err == nil {
		return false
	}
	var e *pgconn.PgError
	if errors.As(err, &e) {
		return e.Code == "57P01" || e.Code == "57P02" || e.Code == "57P03" || strings.HasPrefix(e.Code, "08")
	}
	var netErr net.Error
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.As(err, &netErr) || pgconn.SafeToRetry(err) || strings.Contains(err.Error(), "conn closed")
}

// notifyChannel carries wake-ups between nodes. A lost one costs PollEvery.
const notifyChannel = "planaria"

// maxNotify bounds a notification; PostgreSQL takes 8,000 bytes. What does not
// fit wakes everything.
const maxNotify = 7000

// notices gathers what other nodes are to be told until the notifier sends it.
type notices struct {
	signal chan struct{}
	keys   map[sessionKey]struct{} // guarded by DB.mu, as the next
	work   bool
}

// tellOthers queues a wake-up for the other nodes.
func (db *DB) tellOthers(rs []*sessionRow, work bool) {
	db.mu.Lock()
	for _, r := range rs {
		db.notices.keys[sessionKey{r.Workspace, r.ID}] = struct{}{}
	}
	db.notices.work = db.notices.work || work
	db.mu.Unlock()
	wake(db.notices.signal)
}

// notifier sends one notification for all that gathered while the last one was
// sent, in a transaction of its own.
func (db *DB) notifier(ctx context.Context) error {
	for {
		select {
		case <-db.notices.signal:
		case <-ctx.Done():
			return nil
		}
		db.mu.Lock()
		keys, work := db.notices.keys, db.notices.work
		db.notices.keys, db.notices.work = map[sessionKey]struct{}{}, false
		db.mu.Unlock()
		if _, err := db.w.ExecContext(ctx, `SELECT pg_notify($1, $2)`, notifyChannel, db.notice(keys, work)); err != nil && ctx.Err() == nil {
			db.log.Warn("left other nodes to their poll", "err", err)
		}
	}
}

// notice is sender, work flag and sessions, one per line.
func (db *DB) notice(keys map[sessionKey]struct{}, work bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n%d", db.instance, b2i(work))
	for k := range keys {
		if b.Len() > maxNotify {
			return fmt.Sprintf("%s\n%d\n*", db.instance, b2i(work))
		}
		fmt.Fprintf(&b, "\n%s/%s", k.ws, k.id)
	}
	return b.String()
}

// heard acts on another node's notice.
func (db *DB) heard(payload string) {
	lines := strings.Split(payload, "\n")
	if len(lines) < 2 || lines[0] == db.instance {
		return
	}
	if lines[1] == "1" {
		db.wakeNodes()
	}
	for _, line := range lines[2:] {
		if line == "*" {
			db.hub.pokeAll()
			db.wakeOwners()
			continue
		}
		if ws, id, ok := strings.Cut(line, "/"); ok {
			key := sessionKey{WorkspaceID(ws), SessionID(id)}
			db.hub.poke(key)
			db.wakeOwner(key)
		}
	}
}

func (db *DB) wakeOwners() {
	db.mu.Lock()
	defer db.mu.Unlock()
	for _, l := range db.leases {
		wake(l.inbox)
	}
}

// listen receives notices on a connection of its own and makes it anew when it
// breaks; meanwhile the poll serves.
func (db *DB) listen(ctx context.Context) error {
	for ctx.Err() == nil {
		err := db.listenOnce(ctx)
		if ctx.Err() != nil {
			return nil
		}
		db.log.Warn("lost the connection for wake-ups", "err", err)
		db.hub.pokeAll()
		db.wakeOwners()
		db.wakeNodes()
		select {
		case <-time.After(PollEvery):
		case <-ctx.Done():
		}
	}
	return nil
}

func (db *DB) listenOnce(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, db.cfg.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // nothing is lost
	if _, err := conn.Exec(ctx, "LISTEN "+notifyChannel); err != nil {
		return err
	}
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		db.heard(n.Payload)
	}
}

// poll finds what a lost notice would have told.
func (db *DB) poll(ctx context.Context) error {
	tick := time.NewTicker(PollEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if err := db.pollOnce(ctx); err != nil && ctx.Err() == nil {
			db.log.Warn("poll of the store", "err", err)
		}
	}
}

func (db *DB) pollOnce(ctx context.Context) error {
	db.mu.Lock()
	var nodes []string
	for id := range db.nodes {
		nodes = append(nodes, string(id))
	}
	db.mu.Unlock()
	t := db.peek(ctx)
	if len(nodes) > 0 {
		var n int64
		if err := t.queryRow(`SELECT count(*) FROM (SELECT 1 FROM sessions WHERE owner = '' AND next_at > 0 AND next_at <= ? LIMIT 1) x`, micros(db.Now())).Scan(&n); err != nil {
			return err
		}
		if n > 0 {
			db.wakeNodes()
		}
		err := t.each(`SELECT workspace, id, inbox_last FROM sessions WHERE owner = ANY (?::text[]) AND owner <> '' AND inbox_n > 0`, []any{nodes}, func(rows *sql.Rows) error {
			var k sessionKey
			var last int64
			if err := rows.Scan(&k.ws, &k.id, &last); err != nil {
				return err
			}
			db.mu.Lock()
			defer db.mu.Unlock()
			if l := db.leases[k]; l != nil && l.polled < last {
				l.polled = last
				wake(l.inbox)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return db.pollFollowed(t)
}

func (db *DB) pollFollowed(t *tx) error {
	keys := db.hub.keys()
	if len(keys) == 0 {
		return nil
	}
	tab := newTable("sessions", "workspace, id", "tt")
	for _, k := range keys {
		tab.add([]any{string(k.ws), string(k.id)})
	}
	return t.each(`SELECT s.workspace, s.id, s.head, s.inbox_last, s.deleted_at FROM sessions s JOIN `+tab.unnest()+` ON s.workspace = u.workspace AND s.id = u.id`, tab.cols, func(rows *sql.Rows) error {
		var k sessionKey
		var head Seq
		var last, deleted int64
		if err := rows.Scan(&k.ws, &k.id, &head, &last, &deleted); err != nil {
			return err
		}
		db.hub.behind(k, head, last, deleted != 0)
		return nil
	})
}

// nodeLock is a session advisory lock on a connection of its own: the server
// frees it at once when the process dies, however it dies.
type nodeLock struct {
	conn *pgx.Conn
	key  int64
}

// dbNow is the database's clock in microseconds.
const dbNow = `(extract(epoch FROM clock_timestamp()) * 1000000)::bigint`

// joinPostgres takes the advisory lock first: a row without its lock is dead.
func (n *Node) joinPostgres(ctx context.Context, info NodeInfo) error {
	conn, err := pgx.Connect(ctx, n.db.cfg.URL)
	if err != nil {
		return err
	}
	key := int64(0)
	for _, b := range random(7) { // positive, so that its halves are easily compared
		key = key<<8 | int64(b)
	}
	var got bool
	if err := conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, key).Scan(&got); err != nil || !got {
		conn.Close(ctx)
		return fmt.Errorf("advisory lock %d: %w", key, errors.Join(err, ctx.Err()))
	}
	n.lock = &nodeLock{conn, key}
	started := time.Now()
	var now int64
	err = n.db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "join"}, func(t *tx) error {
		return t.queryRow(`INSERT INTO nodes (id, address, roles, version, lock_key, joined_at, until) VALUES (?, ?, ?, ?, ?, `+dbNow+`, `+dbNow+` + ?) RETURNING joined_at`,
			n.id, info.Address, strings.Join(info.Roles, ","), info.Version, key, n.db.ttl().Microseconds()).Scan(&now)
	})
	if err != nil {
		conn.Close(ctx)
		return err
	}
	n.renewed(started, now)
	return n.detect(ctx)
}

// renewed records a renewal: trusted from before the request on.
func (n *Node) renewed(started time.Time, dbNow int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.until = started.Add(n.db.ttl() - n.db.margin())
	// The database's clock was read between started and now.
	taken := time.Since(started)
	n.skew = max((n.db.Now().Add(-taken/2).Sub(fromMicros(dbNow)).Abs() - taken/2), 0)
}

// mayClaim: a node that is lost, does not trust its lease or whose clock is off
// claims nothing.
func (n *Node) mayClaim(ctx context.Context) (bool, error) {
	n.mu.Lock()
	lost, until, skew := n.lost, n.until, n.skew
	n.mu.Unlock()
	switch {
	case lost:
		return false, fmt.Errorf("node %s: %w", n.id, ErrFenced)
	case !n.db.pg:
		return true, nil
	case !time.Now().Before(until):
		return false, nil
	case skew > MaxSkew:
		n.db.log.Warn("claims nothing: the clock differs from the database's", "elapsed", skew)
		return false, nil
	}
	return true, nil
}

// holdNode keeps the node from being found dead until the transaction ends.
func (t *tx) holdNode(n *Node) error {
	q := `SELECT dead_at FROM nodes WHERE id = ?`
	if t.db.pg {
		q += ` FOR SHARE`
	}
	var dead int64
	if err := t.queryRow(q, n.id).Scan(&dead); err != nil {
		return notFound(err)
	}
	if dead != 0 {
		return fmt.Errorf("node %s: %w", n.id, ErrFenced)
	}
	return nil
}

// errLockGone ends a node whose advisory lock's connection broke.
var errLockGone = errors.New("the connection of the node's lock is gone")

// runPostgres renews the lease, watches the lock's connection and finds dead nodes.
func (n *Node) runPostgres(ctx context.Context) error {
	watch, cancel := context.WithCancel(ctx)
	gone := make(chan error, 1)
	go func() { // ends with watch; waited for below
		_, err := n.lock.conn.WaitForNotification(watch)
		gone <- err
	}()
	defer func() {
		cancel()
		<-gone
		n.lock.conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // frees the lock
	}()
	renew, detect := time.NewTicker(n.db.renew()), time.NewTicker(PollEvery)
	defer renew.Stop()
	defer detect.Stop()
	expire := time.NewTimer(n.left())
	defer expire.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-gone:
			gone <- err
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("node %s: %w: %w: %w", n.id, ErrFenced, errLockGone, err)
		case <-expire.C:
			if n.left() <= 0 {
				return fmt.Errorf("node %s: %w: its lease could not be renewed", n.id, ErrFenced)
			}
		case <-renew.C:
			if err := n.renewOnce(ctx); errors.Is(err, ErrFenced) {
				return err
			} else if err != nil && ctx.Err() == nil {
				n.db.log.Warn("renew lease", "err", err)
			}
		case <-detect.C:
			if err := n.detect(ctx); err != nil && ctx.Err() == nil {
				n.db.log.Warn("look for dead nodes", "err", err)
			}
		}
		expire.Reset(max(n.left(), 0))
	}
}

// left is how long the node still trusts its lease. Both clocks count: the
// monotonic one does not jump, the wall clock counts suspension.
func (n *Node) left() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	return min(n.until.Sub(now), n.until.Round(0).Sub(now.Round(0)))
}

// beats reads and writes single statements for the node's own sake.
func (db *DB) beats(ctx context.Context) *tx { return &tx{ctx: ctx, db: db, q: db.beat} }

func (n *Node) renewOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, n.db.renew())
	defer cancel()
	started := time.Now()
	var now int64
	err := n.db.beats(ctx).queryRow(`UPDATE nodes SET until = `+dbNow+` + ? WHERE id = ? AND dead_at = 0 RETURNING `+dbNow,
		n.db.ttl().Microseconds(), n.id).Scan(&now)
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("node %s: %w: it was found dead", n.id, ErrFenced)
	}
	if err != nil {
		return err
	}
	n.renewed(started, now)
	return nil
}

// detect buries nodes whose lock is free or whose lease is over, and records
// later that a node whose lease ran out is proved gone.
func (n *Node) detect(ctx context.Context) error {
	type sign struct {
		id         NodeID
		over, free bool
	}
	var signs []sign
	err := n.db.beats(ctx).each(`SELECT id, over, free FROM (SELECT n.id, n.dead_at = 0 AND n.until < `+dbNow+` AS over, NOT EXISTS (
  SELECT 1 FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = n.lock_key) AS free
 FROM nodes n WHERE n.proved_at = 0 AND n.id <> ?) x WHERE over OR free`, []any{n.id}, func(rows *sql.Rows) error {
		var s sign
		err := rows.Scan(&s.id, &s.over, &s.free)
		signs = append(signs, s)
		return err
	})
	if err != nil || len(signs) == 0 {
		return err
	}
	slices.SortFunc(signs, func(a, b sign) int { return strings.Compare(string(a.id), string(b.id)) })
	for _, s := range signs {
		err := n.db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "bury", pool: n.db.beat}, func(t *tx) error {
			now := n.db.Now()
			if s.free {
				if _, err := t.exec(`UPDATE nodes SET proved_at = ? WHERE id = ? AND proved_at = 0`, micros(now), s.id); err != nil {
					return err
				}
			}
			// Compared again: it may have renewed since.
			var dead, until, dbTime int64
			if err := t.queryRow(`SELECT dead_at, until, `+dbNow+` FROM nodes WHERE id = ? FOR NO KEY UPDATE`, s.id).Scan(&dead, &until, &dbTime); err != nil {
				return err
			}
			if dead != 0 || !s.free && until >= dbTime {
				return nil
			}
			return t.bury(s.id, now)
		})
		if err != nil {
			return fmt.Errorf("bury node %s: %w", s.id, err)
		}
		n.db.log.Info("found a node dead", "node", s.id, "lock_free", s.free)
	}
	n.db.wakeNodes()
	n.db.tellOthers(nil, true)
	return nil
}
