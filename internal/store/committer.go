package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// errClosed answers appends after Run has ended.
var errClosed = errors.New("store is closing")

// maxCommitTries bounds how often a batch is written again after COMMIT gave an
// error and nothing of it was there.
const maxCommitTries = 3

// skipDelay is how soon a session whose row was locked is tried again.
const skipDelay = time.Millisecond

// committer writes what all owners have ready in one transaction, while the
// next appends gather (group commit, no knob).
type committer struct {
	db   *DB
	wake chan struct{}

	mu     sync.Mutex // guards the fields below and Lease.queue, Lease.queued
	ready  []*Lease   // with something in their queue
	closed bool
}

func newCommitter(db *DB) *committer {
	return &committer{db: db, wake: make(chan struct{}, 1)}
}

// submit queues an item behind those of its lease.
func (c *committer) submit(l *Lease, it *item) {
	c.mu.Lock()
	switch {
	case c.closed:
		c.mu.Unlock()
		it.finish(nil, errClosed)
		return
	case l.over:
		c.mu.Unlock()
		it.finish(nil, ErrFenced)
		return
	}
	l.queue = append(l.queue, it)
	if !l.queued {
		l.queued = true
		c.ready = append(c.ready, l)
	}
	c.mu.Unlock()
	wake(c.wake)
}

// load is what one lease has in a batch.
type load struct {
	l     *Lease
	items []*item
}

// take removes up to MaxBatch appends of leases that have a critical one or an
// overdue relaxed one, and says when to look again (zero: when woken).
func (c *committer) take(all bool) (batch []load, next time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	n := 0
	left := c.ready[:0]
	for _, l := range c.ready {
		due, ok := l.due(now, all)
		if !ok || n >= MaxBatch {
			if ok {
				due = now
			}
			if next.IsZero() || due.Before(next) {
				next = due
			}
			left = append(left, l)
			continue
		}
		take := min(len(l.queue), MaxBatch-n)
		batch = append(batch, load{l, l.queue[:take:take]})
		n += take
		l.queue = l.queue[take:]
		if len(l.queue) > 0 {
			left = append(left, l)
			next = now
		} else {
			l.queue, l.queued = nil, false
		}
	}
	clear(c.ready[len(left):])
	c.ready = left
	return batch, next
}

// due reports whether the lease's queue is to be written now, else when.
func (l *Lease) due(now time.Time, all bool) (time.Time, bool) {
	if l.retryAt.After(now) && !all {
		return l.retryAt, false
	}
	for _, it := range l.queue {
		if !it.relaxed {
			return now, true
		}
	}
	first := l.queue[0].due
	return first, all || !first.After(now)
}

// putBack returns a load whose row was locked to the front of its queue.
func (c *committer) putBack(ld load) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ld.l.queue = append(ld.items, ld.l.queue...)
	ld.l.retryAt = time.Now().Add(skipDelay)
	if !ld.l.queued {
		ld.l.queued = true
		c.ready = append(c.ready, ld.l)
	}
}

// run commits until ctx ends, then what was submitted before, and refuses the rest.
func (c *committer) run(ctx context.Context) error {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for ctx.Err() == nil {
		batch, next := c.take(false)
		if len(batch) > 0 {
			c.commit(batch)
			continue
		}
		wait := time.Hour
		if !next.IsZero() {
			wait = max(time.Until(next), 0)
		}
		timer.Reset(wait)
		select {
		case <-c.wake:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	for {
		batch, _ := c.take(true)
		if len(batch) == 0 {
			return nil
		}
		c.commit(batch)
	}
}

// commit writes a batch. A statement that fails takes the transaction with it,
// so the loads are then written one by one, then their items, until only what
// fails has failed.
func (c *committer) commit(batch []load) {
	batch, err := c.attempt(batch)
	switch {
	case err == nil:
	case errors.Is(err, errLostCommit) || len(batch) == 1 && len(batch[0].items) == 1:
		if c.db.uncertain(err) {
			err = fmt.Errorf("%w: %w", ErrUnknown, err)
		}
		for _, ld := range batch {
			c.fail(ld, err)
			if errors.Is(err, ErrUnknown) {
				c.end(ld.l, err)
			}
		}
	case len(batch) > 1:
		for _, ld := range batch {
			c.commit([]load{ld})
		}
	default:
		for _, it := range batch[0].items {
			c.commit([]load{{batch[0].l, []*item{it}}})
		}
	}
}

func (c *committer) fail(ld load, err error) {
	if c.db.isUnique(err) {
		err = fmt.Errorf("%w: %w", ErrConflict, err)
	}
	for _, it := range ld.items {
		c.done(ld.l, it, nil, err)
	}
}

// done answers an item that was not tried or not written. A relaxed one's
// error waits for the next critical append.
func (c *committer) done(l *Lease, it *item, out []Entry, err error) {
	if it.relaxed && err != nil {
		l.relaxedFailed(err)
	}
	it.finish(out, err)
}

// verdict is what one attempt at a batch found for one load.
type verdict struct {
	load
	c    *change
	err  error   // the lease is over
	errs []error // per item
	// Errors of relaxed entries: those that the lease had before, and those
	// that no critical append was told of yet.
	had  int
	left []error
	skip bool // the row was locked: next batch

	others int64 // see Lease.others
}

// appendContext is the committer's: an append is not cut by whoever asked for it.
var appendContext = context.WithValue(context.Background(), commitStep{}, "append.commit")

// attempt writes a batch in one transaction and answers it. With an error it
// returns what is not there and not answered.
func (c *committer) attempt(batch []load) ([]load, error) {
	for try := 1; ; try++ {
		var vs []*verdict
		if err := c.db.fault("append.before"); err != nil {
			return batch, fmt.Errorf("%w: %w", errLostCommit, err) // nothing is there
		}
		err := c.db.transact(appendContext, sql.LevelReadCommitted, func(t *tx) (err error) {
			vs, err = c.build(t, batch)
			return err
		})
		if err == nil {
			// Durable now. A crash right here: the entries are there, their
			// owner's successor reads them.
			if ferr := c.db.fault("append.after"); ferr != nil {
				err = fmt.Errorf("%w: %w", errLostCommit, ferr)
			}
		}
		switch {
		case err == nil:
			c.answer(vs)
			return nil, nil
		case c.db.isRetry(err) && try < maxTries:
		case !errors.Is(err, errLostCommit) && c.db.isConn(err) && try < connTries:
		case errors.Is(err, errLostCommit):
			if batch = c.compare(vs, err); len(batch) == 0 {
				return nil, nil
			}
			if try >= maxCommitTries {
				return batch, err
			}
		default:
			return batch, err
		}
	}
}

// build reads every session's row, checks fence, head and preconditions, folds,
// and writes all rows. Only reads happen before a session's fate is decided, so
// that one that fails needs no savepoint.
func (c *committer) build(t *tx, batch []load) ([]*verdict, error) {
	var keys []sessionKey
	for _, ld := range batch {
		if !t.unchanged(ld.l) {
			keys = append(keys, ld.l.key)
		}
	}
	found, err := t.guards(keys)
	if err != nil {
		return nil, err
	}
	var pre *prefetch
	if c.db.pg {
		if pre, err = t.prefetch(batch); err != nil {
			return nil, err
		}
	}
	now := c.db.Now()
	var vs []*verdict
	var changes []*change
	for _, ld := range batch {
		v := &verdict{load: ld}
		vs = append(vs, v)
		g, ok := found[ld.l.key]
		if !ok && t.unchanged(ld.l) {
			g, ok = guardOf(&ld.l.row), true
		}
		if !ok {
			v.skip = true
			continue
		}
		if v.err = ld.l.guard(g); v.err != nil {
			continue
		}
		row := ld.l.row
		row.starting, row.inboxN, row.inboxUrgent, row.inboxLast, row.nextAt = g.starting, g.inboxN, g.inboxUrgent, g.inboxLast, g.nextAt
		ch := newChange(row, ld.l.dataKey, ld.l.open)
		ch.pre = pre
		v.errs = make([]error, len(ld.items))
		v.left = ld.l.relaxedErrors()
		v.had = len(v.left)
		for i, it := range ld.items {
			if ch.row.Owner == "" {
				v.errs[i] = ErrFenced // behind a release of its own lease
				continue
			}
			if len(v.left) > 0 && !it.relaxed {
				// Never a conflict of this append, whatever the relaxed ones met: an
				// owner that tried again would go on from entries that are not there.
				v.errs[i] = fmt.Errorf("entries appended relaxed before are not there: %v", errors.Join(v.left...))
				v.left = nil
				continue
			}
			err := ch.apply(t, it, now)
			if err != nil && !errors.Is(err, ErrConflict) {
				return nil, err
			}
			v.errs[i] = err
			if it.relaxed && err != nil {
				v.left = append(v.left, err)
			}
		}
		if len(ch.entries) > 0 || ch.row.Owner == "" || len(ch.consumed) > 0 {
			v.c, v.others = ch, t.others()
			changes = append(changes, ch)
		}
	}
	return vs, t.writeChanges(changes)
}

func (l *Lease) relaxedErrors() []error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.relaxedErrs)
}

func (l *Lease) relaxedFailed(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.relaxedErrs = append(l.relaxedErrs, err)
}

// relaxedTold keeps those errors that came while a batch was written and those
// that it did not pass on.
func (l *Lease) relaxedTold(had int, left []error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.relaxedErrs = append(left, l.relaxedErrs[had:]...)
}

// guard is what an append compares and what others may have changed.
type guard struct {
	owner                          NodeID
	fence                          Fence
	head                           Seq
	starting                       bool
	inboxN, inboxUrgent, inboxLast int64
	nextAt                         int64
	deleted                        int64
	damaged                        string
}

// guardOf is the guard of a row in memory.
func guardOf(r *sessionRow) guard {
	return guard{owner: r.Owner, fence: r.Fence, head: r.Head, starting: r.starting, inboxN: r.inboxN, inboxUrgent: r.inboxUrgent,
		inboxLast: r.inboxLast, nextAt: r.nextAt, deleted: r.deletedAt, damaged: r.Damaged}
}

// others is the writer's count on SQLite, never 0; on PostgreSQL 0.
func (t *tx) others() int64 {
	if t.db.pg {
		return 0
	}
	return t.db.writer.others
}

// unchanged reports that nobody can have written the lease's row since the
// committer wrote it, so that it need not be read again. The caller is in the
// writer's turn. The statement that writes the row compares fence and head
// even so.
func (t *tx) unchanged(l *Lease) bool { return l.others != 0 && l.others == t.others() }

// guard compares fence, owner and head with what the lease knows.
func (l *Lease) guard(g guard) error {
	switch {
	case g.damaged != "":
		return fmt.Errorf("%w: %s", ErrDamaged, g.damaged)
	case g.deleted != 0, g.fence != l.fence, g.owner != l.node.id, g.head != l.row.Head, l.node.isLost():
		return ErrFenced
	}
	return nil
}

// answer tells everybody what is durable.
func (c *committer) answer(vs []*verdict) {
	var told []*sessionRow
	for _, v := range vs {
		if v.c != nil && v.err == nil {
			told = append(told, &v.c.row)
		}
	}
	c.db.saw(told)
	for _, v := range vs {
		switch {
		case v.skip:
			c.putBack(v.load)
			continue
		case v.err != nil:
			c.end(v.l, v.err)
			for _, it := range v.items {
				c.done(v.l, it, nil, v.err)
			}
			continue
		}
		if v.c != nil {
			v.l.row, v.l.open, v.l.others = v.c.row, v.c.openAfter(), v.others
			v.l.deliver(v.c.entries)
			c.db.hub.publish(v.l.key, v.c.entries, nil)
		}
		v.l.relaxedTold(v.had, v.left)
		for i, it := range v.items {
			if v.errs[i] != nil {
				it.out = nil
			}
			it.finish(it.out, v.errs[i])
		}
		if v.l.row.Owner == "" {
			c.end(v.l, nil)
		}
	}
	c.db.tell(told)
}

// end ends a lease; what is still queued is refused.
func (c *committer) end(l *Lease, cause error) {
	c.mu.Lock()
	l.over = true
	queue := l.queue
	l.queue = nil
	if l.queued {
		for i, r := range c.ready {
			if r == l {
				c.ready = append(c.ready[:i], c.ready[i+1:]...)
				break
			}
		}
		l.queued = false
	}
	c.mu.Unlock()
	for _, it := range queue {
		c.done(l, it, nil, ErrFenced)
	}
	l.end(cause)
}

// compare finds out after an error of COMMIT what is there, session by session:
// our new head: committed; the former head: to be written again; else fenced.
// What cannot be found out is ErrUnknown and ends the lease. It returns what is
// to be written again. On PostgreSQL the row is locked, and so a COMMIT that the
// server is still at is waited for.
func (c *committer) compare(vs []*verdict, lost error) (again []load) {
	var there []*verdict
	for _, v := range vs {
		if v.c == nil {
			there = append(there, v) // nothing was written for it
			continue
		}
		var owner NodeID
		var fence Fence
		var head Seq
		var hash []byte
		err := c.db.fault("append.compare")
		if err == nil {
			err = c.db.peek(context.Background()).queryRow(`SELECT owner, fence, head, head_hash FROM sessions WHERE workspace = ? AND id = ?`+c.db.lockRow(),
				v.l.key.ws, v.l.key.id).Scan(&owner, &fence, &head, &hash)
		}
		switch {
		case err != nil:
			v.err = fmt.Errorf("%w: %w: %w", ErrUnknown, lost, err)
			there = append(there, v)
		case head == v.c.row.Head && string(hash) == string(v.c.row.HeadHash[:]) && owner == v.c.row.Owner:
			there = append(there, v)
		case head == v.c.old.Head && string(hash) == string(v.c.old.HeadHash[:]) && owner == v.c.old.Owner && fence == v.c.old.Fence:
			again = append(again, v.load)
		default:
			v.err = ErrFenced
			there = append(there, v)
		}
	}
	c.answer(there)
	return again
}
