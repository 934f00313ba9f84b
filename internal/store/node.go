package store

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Node is this process as an owner of sessions.
type Node struct {
	db   *DB
	id   NodeID
	work chan struct{}
	lock *nodeLock // PostgreSQL: the advisory lock on its own connection

	mu    sync.Mutex // guards the fields below
	until time.Time  // trusted until, by the local clock, less the margin
	lost  bool
	skew  time.Duration // of the local clock against the database's
	// dropped are sessions that nobody drives here although the store may name
	// this node as their owner (a commit of unknown outcome). The next claim
	// frees them.
	dropped []holding
}

// holding is a session under one fence.
type holding struct {
	key   sessionKey
	fence Fence
}

// drop makes the next claim free sessions that are held on the other side only:
// otherwise a living node would own them without a driver (law L7).
func (n *Node) drop(hs ...holding) {
	n.mu.Lock()
	n.dropped = append(n.dropped, hs...)
	n.mu.Unlock()
	wake(n.work)
}

// freeDropped frees dropped sessions that are still this node's under the same fence.
func (t *tx) freeDropped(n *Node, hs []holding) error {
	for _, h := range hs {
		if t.db.pg {
			// A transaction whose connection broke may still be committing: the
			// row's lock waits for it.
			if _, err := t.exec(`SELECT 1 FROM sessions WHERE workspace = ? AND id = ? FOR NO KEY UPDATE`, h.key.ws, h.key.id); err != nil {
				return err
			}
		}
		if _, err := t.exec(`UPDATE sessions SET owner = '', former = owner WHERE workspace = ? AND id = ? AND owner = ? AND fence = ?`,
			h.key.ws, h.key.id, n.id, int64(h.fence)); err != nil {
			return err
		}
	}
	return nil
}

// Join registers this process. On SQLite the folder lock already made it the only
// node, so all owners of earlier nodes are freed; their fences grow at the next claim.
func (db *DB) Join(ctx context.Context, info NodeInfo) (*Node, error) {
	n := &Node{db: db, id: NodeID(NewID("node_", db.Now())), work: make(chan struct{}, 1)}
	fail := func(err error) (*Node, error) { return nil, fmt.Errorf("join as %s: %w", n.id, err) }
	if db.cfg.ReadOnly {
		return fail(errReadOnly)
	}
	if db.pg {
		if err := n.joinPostgres(ctx, info); err != nil {
			return fail(err)
		}
	} else if err := n.joinSQLite(ctx, info); err != nil {
		return fail(err)
	}
	db.mu.Lock()
	db.nodes[n.id] = n
	db.mu.Unlock()
	wake(n.work)
	return n, nil
}

func (n *Node) joinSQLite(ctx context.Context, info NodeInfo) error {
	n.until = time.Now().Add(forever)
	db := n.db
	now := db.Now()
	var former []NodeID
	err := db.write(ctx, writeOpt{step: "join"}, func(t *tx) error {
		former = nil
		err := t.each(`SELECT id FROM nodes WHERE dead_at = 0`, nil, func(rows *sql.Rows) error {
			var id NodeID
			err := rows.Scan(&id)
			former = append(former, id)
			return err
		})
		if err != nil {
			return err
		}
		for _, id := range former {
			if err := t.bury(id, now); err != nil {
				return err
			}
			if _, err := t.exec(`UPDATE nodes SET proved_at = ? WHERE id = ?`, micros(now), id); err != nil {
				return err
			}
		}
		_, err = t.exec(`INSERT INTO nodes (id, address, roles, version, lock_key, joined_at, until) VALUES (?, ?, ?, ?, 0, ?, ?)`,
			n.id, info.Address, strings.Join(info.Roles, ","), info.Version, micros(now), micros(now.Add(forever)))
		return err
	})
	if err != nil {
		return err
	}
	for _, id := range former {
		db.mu.Lock()
		old := db.nodes[id]
		delete(db.nodes, id)
		db.mu.Unlock()
		if old != nil {
			old.lose(ErrFenced)
		}
	}
	return nil
}

// bury frees the sessions of a node that is dead.
func (t *tx) bury(id NodeID, now time.Time) error {
	if _, err := t.exec(`UPDATE nodes SET dead_at = ? WHERE id = ? AND dead_at = 0`, micros(now), id); err != nil {
		return err
	}
	// A session keeps the time since when it wants an owner. One that is at
	// rest has none and stays asleep.
	_, err := t.exec(`UPDATE sessions SET owner = '', former = owner WHERE owner = ?`, id)
	return err
}

// ID is this node's id; a restart is a new node.
func (n *Node) ID() NodeID { return n.id }

// Run renews the node's lease (PostgreSQL) and detects dead nodes until ctx
// ends; then it leaves. It returns ErrFenced when the node lost its lease.
func (n *Node) Run(ctx context.Context) error {
	var err error
	if n.db.pg {
		err = n.runPostgres(ctx)
	} else {
		<-ctx.Done()
	}
	n.lose(err)
	n.db.mu.Lock()
	delete(n.db.nodes, n.id)
	n.db.mu.Unlock()
	if err != nil {
		return err
	}
	return n.leave(context.WithoutCancel(ctx))
}

// leaveTimeout bounds the goodbye: without it the others see the lock gone.
const leaveTimeout = 2 * time.Second

// leave frees what the node still owns; the next owners need not wait.
func (n *Node) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	err := n.db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "leave"}, func(t *tx) error {
		now := n.db.Now()
		if err := t.bury(n.id, now); err != nil {
			return err
		}
		_, err := t.exec(`UPDATE nodes SET left_at = ?, proved_at = ? WHERE id = ?`, micros(now), micros(now), n.id)
		return err
	})
	if err != nil {
		return fmt.Errorf("leave as %s: %w", n.id, err)
	}
	n.db.wakeNodes()
	return nil
}

// lose ends all leases of the node: whoever holds one must stop. cause is nil
// when the node leaves by itself.
func (n *Node) lose(cause error) {
	n.mu.Lock()
	n.lost = true
	n.mu.Unlock()
	n.db.mu.Lock()
	var mine []*Lease
	for _, l := range n.db.leases {
		if l.node == n {
			mine = append(mine, l)
		}
	}
	n.db.mu.Unlock()
	for _, l := range mine {
		n.db.com.end(l, cause)
	}
}

func (n *Node) isLost() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost
}

// Trusted reports until when this node may trust its lease, from before the
// renewing request, less the margin; on SQLite a year from now. Zero when lost.
func (n *Node) Trusted() time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	switch {
	case n.lost:
		return time.Time{}
	case !n.db.pg:
		return now.Add(forever)
	case !now.Before(n.until):
		return time.Time{} // over by the clock that does not jump
	}
	return n.until.Round(0) // compared by the clock that counts suspension
}

// Work is signalled (size one, merging) when a session may have become claimable.
func (n *Node) Work() <-chan struct{} { return n.work }

// NextWake is the earliest time at which a session of the store wants to be
// claimed; zero when none.
func (n *Node) NextWake(ctx context.Context) (time.Time, error) {
	var us int64
	err := n.db.peek(ctx).queryRow(`SELECT coalesce(min(next_at), 0) FROM sessions WHERE owner = '' AND next_at > 0`).Scan(&us)
	if err != nil {
		return time.Time{}, fmt.Errorf("next wake: %w", n.db.mapErr(err))
	}
	return fromMicros(us), nil
}

// Due counts up to max sessions that want to be claimed now.
func (n *Node) Due(ctx context.Context, max int) (count int, err error) {
	err = n.db.peek(ctx).queryRow(`SELECT count(*) FROM (SELECT 1 FROM sessions WHERE owner = '' AND next_at > 0 AND next_at <= ? AND format <= ? LIMIT ?) x`,
		micros(n.db.Now()), BodyVersion, max).Scan(&count)
	if err != nil {
		return 0, fmt.Errorf("count what is due: %w", n.db.mapErr(err))
	}
	return count, nil
}

// Dead reports when the store proved that node's process gone (its advisory
// lock was free, it left, or on SQLite: the folder lock changed hands), zero when
// it is not proved. A lease that only ran out proves nothing: the process may be
// stopped and go on.
func (db *DB) Dead(ctx context.Context, node NodeID) (time.Time, error) {
	var us int64
	err := db.peek(ctx).queryRow(`SELECT proved_at FROM nodes WHERE id = ?`, node).Scan(&us)
	if err != nil {
		return time.Time{}, fmt.Errorf("node %s: %w", node, notFound(db.mapErr(err)))
	}
	return fromMicros(us), nil
}
