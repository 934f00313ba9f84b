package store

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// hub hands committed entries and queued events to the followers of this
// process. It is a convenience: a follower that misses something reads the store.
type hub struct {
	mu        sync.Mutex // guards the field below and Follower's fields that say so
	followers map[sessionKey]map[*Follower]struct{}
}

func newHub() *hub { return &hub{followers: map[sessionKey]map[*Follower]struct{}{}} }

// maxPushed bounds what waits in memory for one slow follower.
const maxPushed = 512

// maxSeenIDs bounds the client events that a follower remembers having given as
// entries, so that their queued form never comes after.
const maxSeenIDs = 1024

func (h *hub) publish(key sessionKey, entries []Entry, queued []Inbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for f := range h.followers[key] {
		for i := range entries {
			f.push(FollowItem{Entry: &entries[i]})
		}
		for i := range queued {
			if queued[i].Kind == InboxEvent {
				f.push(FollowItem{Queued: &queued[i]})
			}
		}
		wake(f.signal)
	}
}

// push adds an item; the hub's mutex is held. On overflow the follower reads
// the store again.
func (f *Follower) push(it FollowItem) {
	if it.Entry != nil {
		f.have = max(f.have, it.Entry.Seq)
	} else {
		f.haveN = max(f.haveN, it.Queued.N)
	}
	if f.stale {
		return
	}
	if len(f.pushed) >= maxPushed {
		f.pushed, f.stale = nil, true
		return
	}
	f.pushed = append(f.pushed, it)
}

// poke makes followers read the store: another node wrote.
func (h *hub) poke(key sessionKey) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for f := range h.followers[key] {
		f.stale = true
		wake(f.signal)
	}
}

// behind pokes those followers that have not what the store has.
func (h *hub) behind(key sessionKey, head Seq, lastN int64, deleted bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for f := range h.followers[key] {
		if deleted || f.have < head || f.haveN < lastN {
			f.stale, f.have, f.haveN = true, head, lastN
			wake(f.signal)
		}
	}
}

// pokeAll makes all followers read the store.
func (h *hub) pokeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, fs := range h.followers {
		for f := range fs {
			f.stale = true
			wake(f.signal)
		}
	}
}

// keys lists the sessions that are followed.
func (h *hub) keys() []sessionKey {
	h.mu.Lock()
	defer h.mu.Unlock()
	keys := make([]sessionKey, 0, len(h.followers))
	for k := range h.followers {
		keys = append(keys, k)
	}
	return keys
}

// Follower reads a session's log as it grows. Next and Close may be called
// from different goroutines, Next from one at a time.
type Follower struct {
	db     *DB
	key    sessionKey
	signal chan struct{}
	closed chan struct{}
	once   sync.Once

	// Guarded by hub.mu.
	pushed []FollowItem
	stale  bool  // pushed is not complete: read the store
	have   Seq   // newest entry pushed or read
	haveN  int64 // newest queued row pushed or read

	// Owned by Next.
	seq     Seq   // given up to here
	queuedN int64 // queued events given up to here
	seen    map[string]struct{}
	seenIDs []string
}

// Follow starts after a seq. The first Next reads what is already there.
func (db *DB) Follow(ctx context.Context, ws WorkspaceID, id SessionID, after Seq) (*Follower, error) {
	f := &Follower{db: db, key: sessionKey{ws, id}, signal: make(chan struct{}, 1), closed: make(chan struct{}),
		seq: after, stale: true, seen: map[string]struct{}{}}
	// Registered before the first read: what is committed between is not missed.
	db.hub.mu.Lock()
	if db.hub.followers[f.key] == nil {
		db.hub.followers[f.key] = map[*Follower]struct{}{}
	}
	db.hub.followers[f.key][f] = struct{}{}
	db.hub.mu.Unlock()
	wake(f.signal)
	if _, err := db.peek(ctx).sessionRow(ws, id, false); err != nil {
		f.Close()
		return nil, fmt.Errorf("follow: %w", err)
	}
	return f, nil
}

var errFollowerClosed = errors.New("follower is closed")

// Next blocks until there is something: entries in seq order without a gap,
// and client events as they are queued (never after their entry). A deleted
// session is ErrNotFound; when ctx is done, the error is its cause and nothing
// is lost for a later Next.
func (f *Follower) Next(ctx context.Context) ([]FollowItem, error) {
	for {
		select {
		case <-f.signal:
		case <-f.closed:
			return nil, errFollowerClosed
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		items, err := f.gather(ctx)
		if err != nil {
			wake(f.signal) // a later Next tries again
			if ctx.Err() != nil {
				// What a driver says of it depends on where it was cut.
				return nil, context.Cause(ctx)
			}
			return nil, err
		}
		if len(items) > 0 {
			return items, nil
		}
	}
}

func (f *Follower) gather(ctx context.Context) ([]FollowItem, error) {
	f.db.hub.mu.Lock()
	pushed, stale := f.pushed, f.stale
	f.pushed, f.stale = nil, false
	f.db.hub.mu.Unlock()
	if !stale {
		items, ok := f.take(pushed)
		if ok {
			return items, nil
		}
	}
	items, err := f.reread(ctx)
	if err != nil {
		f.db.hub.mu.Lock()
		f.stale = true
		f.db.hub.mu.Unlock()
	}
	return items, err
}

// take passes on what was pushed; false when it leaves a gap.
func (f *Follower) take(pushed []FollowItem) (items []FollowItem, ok bool) {
	for _, it := range pushed {
		if it.Entry != nil && it.Entry.Seq > f.seq+1 {
			// Give what came before; the store has the rest.
			f.db.hub.mu.Lock()
			f.stale = true
			f.db.hub.mu.Unlock()
			wake(f.signal)
			return items, len(items) > 0
		}
		if f.admit(it) {
			items = append(items, it)
		}
	}
	return items, true
}

// admit keeps seqs dense and each item single.
func (f *Follower) admit(it FollowItem) bool {
	if e := it.Entry; e != nil {
		if e.Seq <= f.seq {
			return false
		}
		f.seq = e.Seq
		if e.Kind == KindEvent {
			f.remember(e.ID)
		}
		return true
	}
	if it.Queued.N <= f.queuedN {
		return false
	}
	f.queuedN = it.Queued.N
	_, logged := f.seen[it.Queued.ID]
	return !logged
}

func (f *Follower) remember(id string) {
	f.seen[id] = struct{}{}
	f.seenIDs = append(f.seenIDs, id)
	if len(f.seenIDs) > maxSeenIDs {
		delete(f.seen, f.seenIDs[0])
		f.seenIDs = f.seenIDs[1:]
	}
}

// followPage bounds the entries that one reading brings into memory.
const followPage = 1000

// reread reads the store: what is queued first, so that an event that is logged
// meanwhile is given in both forms and in this order.
func (f *Follower) reread(ctx context.Context) (items []FollowItem, err error) {
	var queued []Inbox
	var entries []Entry
	more := false
	err = f.db.read(ctx, func(t *tx) error {
		row, err := t.sessionRow(f.key.ws, f.key.id, false)
		if err != nil {
			return err
		}
		if queued, err = t.inbox(row); err != nil {
			return err
		}
		entries, err = t.entries(row, Range{After: f.seq, Limit: followPage})
		more = err == nil && len(entries) == followPage
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("follow session %s: %w", f.key.id, err)
	}
	if more {
		f.db.hub.mu.Lock()
		f.stale = true
		f.db.hub.mu.Unlock()
		wake(f.signal)
	}
	for i := range entries {
		if it := (FollowItem{Entry: &entries[i]}); f.admit(it) {
			items = append(items, it)
		}
	}
	// Urgent rows stand first in the inbox; here the order of arrival counts.
	last := f.queuedN
	for i := range queued {
		q := &queued[i]
		if more || q.Kind != InboxEvent || q.N <= f.queuedN {
			continue
		}
		last = max(last, q.N)
		if _, logged := f.seen[q.ID]; !logged {
			items = append(items, FollowItem{Queued: q})
		}
	}
	f.queuedN = last
	return items, nil
}

// Close ends following.
func (f *Follower) Close() {
	f.once.Do(func() {
		close(f.closed)
		h := f.db.hub
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.followers[f.key], f)
		if len(h.followers[f.key]) == 0 {
			delete(h.followers, f.key)
		}
	})
}
