package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Lease is the right of one owner to write one session's log. Methods are safe
// for concurrent use: keeper and driver write under the same lease.
type Lease struct {
	db      *DB
	node    *Node
	key     sessionKey
	fence   Fence
	dataKey *dataKey
	claimed sessionRow
	inbox   chan struct{}
	lost    chan struct{}

	// Owned by the committer.
	row  sessionRow          // as last committed
	open map[EffectID]Effect // open effects, as last committed
	// SQLite: the writer's count of other transactions when row was known to be
	// what the table holds. While it stands, nobody else has written.
	others int64

	// Guarded by committer.mu.
	queue   []*item
	queued  bool
	retryAt time.Time
	over    bool

	mu          sync.Mutex // guards the fields below
	onCommit    func([]Entry)
	relaxedErrs []error // of relaxed appends, for the next critical one
	ended       bool

	polled int64 // newest inbox row that a poll told of; guarded by DB.mu
}

// Workspace is the session's workspace.
func (l *Lease) Workspace() WorkspaceID { return l.key.ws }

// Session is the session that the lease is for.
func (l *Lease) Session() SessionID { return l.key.id }

// Fence is the fencing token of this ownership.
func (l *Lease) Fence() Fence { return l.fence }

// Node is the owner.
func (l *Lease) Node() NodeID { return l.node.id }

// Claimed is the row as it was right after the claim.
func (l *Lease) Claimed() Session { return l.claimed.view() }

// Trusted is the node's Trusted: no send may leave at or after it. It is the
// zero time when the lease is over.
func (l *Lease) Trusted() time.Time {
	select {
	case <-l.lost:
		return time.Time{}
	default:
		return l.node.Trusted()
	}
}

// Lost is closed when the lease is over: fenced, rested, parked or its node lost trust.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// OnCommit sets the function that gets every entry committed under this lease
// or read back after a lost commit, in seq order, once each. It is called by
// the committer and must be quick. Set it before the first append.
func (l *Lease) OnCommit(f func([]Entry)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.onCommit = f
}

// Inbox is signalled (size one, merging) when a row was accepted for this session.
func (l *Lease) Inbox() <-chan struct{} { return l.inbox }

// deliver hands committed entries to the owner.
func (l *Lease) deliver(entries []Entry) {
	l.mu.Lock()
	f := l.onCommit
	l.mu.Unlock()
	if f != nil && len(entries) > 0 {
		f(entries)
	}
}

// end closes Lost, once.
func (l *Lease) end(cause error) {
	l.mu.Lock()
	ended := l.ended
	l.ended = true
	l.mu.Unlock()
	if ended {
		return
	}
	l.db.mu.Lock()
	if l.db.leases[l.key] == l {
		delete(l.db.leases, l.key)
	}
	l.db.mu.Unlock()
	close(l.lost)
	if cause != nil {
		l.node.drop(holding{l.key, l.fence})
		l.db.log.Warn("lost lease", "session", l.key.id, "fence", l.fence, "err", cause)
	}
}

// Claim claims up to max sessions that have work and no live owner, oldest
// first. In one transaction: owner, fence+1, a claim entry for each. A session
// that cannot be read is refused (Damaged) and does not disturb the others.
func (n *Node) Claim(ctx context.Context, max int) ([]*Lease, error) {
	db := n.db
	if may, err := n.mayClaim(ctx); !may || max <= 0 {
		return nil, err
	}
	n.mu.Lock()
	dropped := slices.Clone(n.dropped)
	n.mu.Unlock()
	var changes []*change
	var bad map[sessionKey]string
	err := db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "claim", waits: true, landed: func(t *tx) (bool, error) {
		for _, c := range changes {
			if there, err := c.landed(t); err != nil || !there {
				return false, err
			}
		}
		return true, nil
	}}, func(t *tx) error {
		changes, bad = nil, map[sessionKey]string{}
		if err := t.holdNode(n); err != nil {
			return err
		}
		if err := t.freeDropped(n, dropped); err != nil {
			return err
		}
		list, err := t.claimable(max)
		if err != nil {
			return err
		}
		now := db.Now()
		for _, r := range list {
			c, err := t.claim(ctx, r, n, now)
			if errors.Is(err, ErrDamaged) {
				bad[sessionKey{r.Workspace, r.ID}] = err.Error()
				continue
			}
			if err != nil {
				return fmt.Errorf("session %s: %w", r.ID, err)
			}
			changes = append(changes, c)
		}
		return t.writeChanges(changes)
	})
	if err != nil {
		if errors.Is(err, errLostCommit) {
			// They may be this node's, now or in a moment, and have no lease.
			for _, c := range changes {
				n.drop(holding{sessionKey{c.row.Workspace, c.row.ID}, c.row.Fence})
			}
		}
		return nil, fmt.Errorf("claim sessions: %w", err)
	}
	// Durable: the sessions are this node's. A crash right here: the next node
	// finds this one dead and claims them again.
	n.mu.Lock()
	n.dropped = slices.DeleteFunc(n.dropped, func(h holding) bool { return slices.Contains(dropped, h) })
	n.mu.Unlock()
	for key, why := range bad {
		db.log.Error("refused damaged session", "session", key.id, "err", why)
		if err := db.Refuse(ctx, key.ws, key.id, why); err != nil {
			return nil, err
		}
	}
	leases := make([]*Lease, len(changes))
	var told []*sessionRow
	for _, c := range changes {
		told = append(told, &c.row)
	}
	db.saw(told)
	for i, c := range changes {
		leases[i] = n.lease(c)
		db.hub.publish(leases[i].key, c.entries, nil)
	}
	db.tell(told)
	return leases, nil
}

// lease makes the handle of a claim that is durable.
func (n *Node) lease(c *change) *Lease {
	l := &Lease{db: n.db, node: n, key: sessionKey{c.row.Workspace, c.row.ID}, fence: c.row.Fence,
		dataKey: c.key, claimed: c.row, row: c.row, open: c.openAfter(),
		inbox: make(chan struct{}, 1), lost: make(chan struct{})}
	if c.row.inboxN > 0 {
		wake(l.inbox)
	}
	n.db.mu.Lock()
	n.db.leases[l.key] = l
	n.db.mu.Unlock()
	if n.isLost() {
		n.db.com.end(l, ErrFenced)
	}
	return l
}

// claimable lists sessions that have work and no owner. Owners that died were
// taken from their sessions when their node was found dead.
func (t *tx) claimable(max int) ([]*sessionRow, error) {
	q := `SELECT ` + sessionColumns + ` FROM sessions WHERE owner = '' AND next_at > 0 AND next_at <= ? AND format <= ? ORDER BY next_at LIMIT ?`
	if t.db.pg {
		q += ` FOR NO KEY UPDATE SKIP LOCKED`
	}
	var list []*sessionRow
	err := t.each(q, []any{micros(t.db.Now()), BodyVersion, max}, func(rows *sql.Rows) error {
		r, err := scanRow(rows)
		list = append(list, r)
		return err
	})
	return list, err
}

// claim builds the change that makes n the owner of a locked row.
func (t *tx) claim(ctx context.Context, r *sessionRow, n *Node, now time.Time) (*change, error) {
	if err := t.loadConfig(r); err != nil {
		return nil, err
	}
	key, err := t.dataKey(r.Workspace, r.keyID)
	if err != nil {
		return nil, err
	}
	it, err := t.db.claimItem(ctx, r, key, n.id)
	if err != nil {
		return nil, err
	}
	return t.claimChange(r, key, it, now)
}

func (db *DB) claimItem(ctx context.Context, r *sessionRow, key *dataKey, node NodeID) (*item, error) {
	body, err := json.Marshal(Claim{V: BodyVersion, Node: node, Former: r.former})
	if err != nil {
		return nil, err
	}
	return db.prepare(ctx, r, key, &Append{Entries: []Draft{{Kind: KindClaim, ID: recID(db.Now()), Body: body}}})
}

// claimChange raises the fence and applies the claim entry.
func (t *tx) claimChange(r *sessionRow, key *dataKey, it *item, now time.Time) (*change, error) {
	xs, err := t.openEffects(r.Workspace, r.ID, string(r.openFrom))
	if err != nil {
		return nil, err
	}
	open := map[EffectID]Effect{}
	for _, x := range xs {
		open[x.ID] = x
	}
	c := newChange(*r, key, open)
	var claim Claim
	if err := json.Unmarshal(it.entries[0].draft.Body, &claim); err != nil {
		return nil, err
	}
	c.row.Fence++
	c.row.Owner, c.row.former, c.row.inboxSeen = claim.Node, "", 0
	return c, c.apply(t, it, now)
}
