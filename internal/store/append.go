package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// prepared is a draft that is parsed and digested, before the committer's turn.
type prepared struct {
	draft  Draft
	parsed parsed
	salt   []byte
	digest [32]byte
	blob   string // where a large body is, else empty
}

// item is one append on its way.
type item struct {
	entries []prepared
	append  Append // its preconditions
	relaxed bool
	due     time.Time // relaxed: when it is committed without company
	done    chan struct{}
	out     []Entry
	err     error
}

func (it *item) finish(out []Entry, err error) {
	it.out, it.err = out, err
	close(it.done)
}

// prepare parses, salts and digests the drafts of an append. A large body is
// durable in Config.Blobs when it returns; a crash before the commit leaves a
// blob that no row names, which is garbage and harmless.
func (db *DB) prepare(ctx context.Context, row *sessionRow, key *dataKey, a *Append) (*item, error) {
	it := &item{append: *a, done: make(chan struct{}), entries: make([]prepared, len(a.Entries))}
	salts := random(saltSize * len(a.Entries))
	for i := range a.Entries {
		d := &a.Entries[i]
		if len(d.Body) > MaxBody {
			return nil, fmt.Errorf("body of %s %s has %d bytes, at most %d are allowed", d.Kind, d.ID, len(d.Body), MaxBody)
		}
		p, err := parse(d)
		if err != nil {
			return nil, err
		}
		salt := salts[i*saltSize : (i+1)*saltSize : (i+1)*saltSize]
		pr := prepared{draft: *d, parsed: p, salt: salt, digest: bodyDigest(salt, d.Body)}
		if len(d.Body) > MaxInlineBody {
			pr.blob, err = db.putBlob(ctx, row.Workspace, key.seal(d.Body, aadOfBlob(row.Workspace, row.ID, salt)))
			if err != nil {
				return nil, err
			}
		}
		it.entries[i] = pr
	}
	return it, nil
}

func (db *DB) putBlob(ctx context.Context, ws WorkspaceID, sealed []byte) (string, error) {
	if err := db.fault("blob.before"); err != nil {
		return "", err
	}
	name, err := db.cfg.Blobs.Put(ctx, string(ws), sealed)
	if err == nil {
		err = db.fault("blob.after")
	}
	if err != nil {
		return "", fmt.Errorf("store large body: %w", err)
	}
	return name, nil
}

// change is what one transaction does to one session.
type change struct {
	old, row sessionRow
	key      *dataKey
	open     map[EffectID]Effect // open effects before
	pre      *prefetch           // what was read ahead; nil: read when asked
	rows     *rows
	entries  []Entry
	prepared []prepared
	consumed []string
	buf      []byte
}

func newChange(row sessionRow, key *dataKey, open map[EffectID]Effect) *change {
	return &change{old: row, row: row, key: key, open: open}
}

// begin makes rows that are bound to the transaction that reads for them.
func (c *change) begin(t *tx) *rows {
	r := newRows(c.row.Session, func(id EffectID, fresh bool) (Effect, bool, error) {
		if x, ok := c.open[id]; ok {
			return x, true, nil
		}
		if id == "" || fresh {
			return Effect{}, false, nil
		}
		if c.pre != nil {
			x, ok := c.pre.effects[id]
			return x, ok && x.Session == c.row.ID, nil
		}
		x, err := t.effect(c.row.Workspace, id)
		if errors.Is(err, ErrNotFound) || err == nil && x.Session != c.row.ID {
			return Effect{}, false, nil
		}
		return x, err == nil, err
	})
	r.snapshots = func() ([]SnapshotRow, error) { return t.snapshots(&c.row, c.key, liveSnapshots) }
	return r
}

// apply checks an append's preconditions against the transaction and folds its
// entries. On error the change is as before.
func (c *change) apply(t *tx, it *item, now time.Time) error {
	a := &it.append
	var r *rows
	if c.rows == nil {
		r = c.begin(t)
	} else {
		r = c.rows.clone()
	}
	for _, is := range a.Effects {
		if err := r.check(is); err != nil {
			return err
		}
	}
	urgent, err := c.consumable(t, a.Consume)
	if err != nil {
		return err
	}
	entries := make([]Entry, len(it.entries))
	for i := range it.entries {
		p := &it.entries[i]
		s := &r.session
		e := &entries[i]
		*e = Entry{Draft: p.draft, Session: s.ID, Seq: s.Head + 1, At: now, Fence: c.row.Fence}
		if !e.At.After(s.UpdatedAt) {
			e.At = s.UpdatedAt.Add(time.Microsecond)
		}
		e.Hash = chainHash(s.HeadHash, s.Workspace, e, c.key.id, p.digest, &c.buf)
		if err := fold(r, e, p.parsed); err != nil {
			return err
		}
	}
	row := c.row
	row.Session = r.session
	row.inboxN -= int64(len(a.Consume))
	row.inboxUrgent -= urgent
	if r.status {
		row.starting = false
	}
	if a.Rest || a.Park {
		if err := row.release(a, a.Rest); err != nil {
			return err
		}
	}
	row.openFrom = c.openFrom(r)
	row.schedule(now)
	c.rows, c.row = r, row
	c.entries = append(c.entries, entries...)
	c.prepared = append(c.prepared, it.entries...)
	c.consumed = append(c.consumed, a.Consume...)
	it.out = entries
	return nil
}

// check is a precondition on an effect's row.
func (r *rows) check(is EffectIs) error {
	x, err := r.find(is.ID)
	if err != nil {
		return err
	}
	switch {
	case x == nil:
		return fmt.Errorf("%w: effect %s is not in this session", ErrConflict, is.ID)
	case len(is.States) > 0 && !slices.Contains(is.States, x.State):
		return fmt.Errorf("%w: effect %s is %s", ErrConflict, is.ID, x.State)
	case is.Attempt != 0 && is.Attempt != x.Attempts:
		return fmt.Errorf("%w: effect %s is at attempt %d, not %d", ErrConflict, is.ID, x.Attempts, is.Attempt)
	case is.Fence != 0 && is.Fence != x.AttemptFence:
		return fmt.Errorf("%w: effect %s was attempted under fence %d, not %d", ErrConflict, is.ID, x.AttemptFence, is.Fence)
	}
	return nil
}

// consumable checks that the inbox rows are there and counts the urgent ones.
func (c *change) consumable(t *tx, ids []string) (urgent int64, err error) {
	for i, id := range ids {
		if slices.Contains(c.consumed, id) || slices.Contains(ids[:i], id) {
			return 0, fmt.Errorf("%w: inbox row %s is consumed already", ErrConflict, id)
		}
		if c.pre != nil {
			u, ok := c.pre.inbox[id]
			if !ok {
				return 0, fmt.Errorf("%w: inbox row %s is not there", ErrConflict, id)
			}
			urgent += u
			continue
		}
		var u int64
		err := t.queryRow(`SELECT urgent FROM inbox WHERE workspace = ? AND session = ? AND id = ?`, c.row.Workspace, c.row.ID, id).Scan(&u)
		if errors.Is(err, sql.ErrNoRows) {
			return 0, fmt.Errorf("%w: inbox row %s is not there", ErrConflict, id)
		}
		if err != nil {
			return 0, t.db.mapErr(err)
		}
		urgent += u
	}
	return urgent, nil
}

// release ends the ownership.
func (r *sessionRow) release(a *Append, rest bool) error {
	if rest {
		if r.Status != StatusIdle && r.Status != StatusTerminated {
			return fmt.Errorf("%w: rest of session %s, which is %s", ErrConflict, r.ID, r.Status)
		}
		if r.Status == StatusIdle && r.unseen(a.Seen) {
			return fmt.Errorf("%w: rest of session %s, whose inbox is not empty", ErrConflict, r.ID)
		}
		r.starting = false // whoever rests has seen what wanted to start a turn
		if a.Keep {
			return nil
		}
	}
	r.Owner, r.former, r.inboxSeen = "", "", a.Seen
	return nil
}

// unseen reports whether the inbox holds rows that the owner must look at.
func (r *sessionRow) unseen(seen int64) bool {
	if r.Paused {
		return r.inboxUrgent > 0
	}
	return r.inboxN > 0 && r.inboxLast > seen
}

// schedule sets when the session wants to be claimed (design section 5,
// "Work"). A time that is over already stays as it is, so that the oldest is
// first and the index is left alone.
func (r *sessionRow) schedule(now time.Time) {
	next := int64(0)
	switch {
	case r.Damaged != "" || r.deletedAt != 0 || r.Status == StatusTerminated:
	case r.Paused && r.Status == StatusIdle && r.inboxUrgent == 0:
	case r.unseen(r.inboxSeen):
		next = micros(now)
	case !r.WakeAt.IsZero(): // also of a driver that failed before it ran
		next = micros(r.WakeAt)
	case r.Status != StatusIdle, r.starting && !r.Paused:
		next = micros(now)
	}
	if next != 0 && next <= micros(now) && r.nextAt != 0 && r.nextAt <= next {
		return
	}
	r.nextAt = next
}

// openFrom is the smallest id of an effect that is not ended.
func (c *change) openFrom(r *rows) (from EffectID) {
	consider := func(x *Effect) {
		if !x.ended() && (from == "" || x.ID < from) {
			from = x.ID
		}
	}
	for id, x := range c.open {
		if _, changed := r.effects[id]; !changed {
			consider(&x)
		}
	}
	for _, x := range r.effects {
		consider(x)
	}
	return from
}

// openAfter is the set of open effects after the change.
func (c *change) openAfter() map[EffectID]Effect {
	open := c.open
	if open == nil {
		open = map[EffectID]Effect{}
	}
	for id, x := range c.rows.effects {
		if x.ended() {
			delete(open, id)
		} else {
			open[id] = *x
		}
	}
	return open
}

// sealedBody is what the row of an entry holds.
func (c *change) sealedBody(i int) []byte {
	p := &c.prepared[i]
	if p.blob != "" {
		return nil
	}
	return c.key.seal(p.draft.Body, aadOfEntry(c.row.Workspace, c.row.ID, c.entries[i].Seq))
}

// sealedConfig is the configuration's row.
func (c *change) sealedConfig() ([]byte, error) {
	plain, err := json.Marshal(c.row.Config)
	if err != nil {
		return nil, err
	}
	return c.key.seal(plain, aadOf("config", c.row.Workspace, c.row.ID, "")), nil
}

// agentOf reads what lists filter by out of the wire agent.
func agentOf(s *SessionConfig) (id string, version int64) {
	var a struct {
		ID      string `json:"id"`
		Version int64  `json:"version"`
	}
	if json.Unmarshal(s.Agent, &a) != nil {
		return "", 0 // not a wire agent: lists do not find it by agent
	}
	return a.ID, a.Version
}

// Append is critical: it returns when the entries are durable. ErrFenced,
// ErrConflict (nothing written), ErrUnknown.
func (db *DB) Append(ctx context.Context, l *Lease, a Append) ([]Entry, error) {
	return db.Submit(l, a).Wait(ctx)
}

// Pending is a submitted append.
type Pending struct {
	it *item
	l  *Lease
}

// Wait returns what Append returns. A caller that leaves early does not undo it.
func (p *Pending) Wait(ctx context.Context) ([]Entry, error) {
	select {
	case <-p.it.done:
	case <-ctx.Done():
		select {
		case <-p.it.done: // both are ready: the outcome is worth more
		default:
			return nil, fmt.Errorf("append to session %s: %w: %w", p.l.key.id, ErrUnknown, context.Cause(ctx))
		}
	}
	if p.it.err != nil {
		return nil, fmt.Errorf("append to session %s: %w", p.l.key.id, p.it.err)
	}
	return p.it.out, nil
}

// Submit hands a critical append to the committer without waiting, so that the
// completion of one call and the attempt of the next share a commit. Appends
// of one lease commit in the order of submission.
func (db *DB) Submit(l *Lease, a Append) *Pending {
	it, err := db.prepare(context.Background(), &l.claimed, l.dataKey, &a)
	if err != nil {
		it = &item{done: make(chan struct{})}
		it.finish(nil, err)
		return &Pending{it, l}
	}
	db.com.submit(l, it)
	return &Pending{it, l}
}

// AppendRelaxed queues entries for the session's next critical commit, at the
// latest after RelaxedDelay. They are invisible until then. An error shows at
// the next critical append. No preconditions, no release.
func (db *DB) AppendRelaxed(l *Lease, entries []Draft) {
	it, err := db.prepare(context.Background(), &l.claimed, l.dataKey, &Append{Entries: entries})
	if err != nil {
		l.relaxedFailed(err)
		return
	}
	it.relaxed, it.due = true, time.Now().Add(RelaxedDelay)
	db.com.submit(l, it)
}

// AppendUnowned claims, appends and releases in one transaction when nobody
// owns the session; else ErrOwned. Session status is not changed but by the entries.
// check, if not nil, sees the row under its lock and may refuse with its error.
func (db *DB) AppendUnowned(ctx context.Context, ws WorkspaceID, id SessionID, a Append, check func(Session) error) ([]Entry, error) {
	fail := func(err error) ([]Entry, error) {
		return nil, fmt.Errorf("append to session %s: %w", id, err)
	}
	row, err := db.peek(ctx).sessionRow(ws, id, false)
	if err != nil {
		return fail(err)
	}
	key, err := db.peek(ctx).dataKey(ws, row.keyID)
	if err != nil {
		return fail(err)
	}
	a.Rest, a.Park = false, true
	it, err := db.prepare(ctx, row, key, &a)
	if err != nil {
		return fail(err)
	}
	var c *change
	var out []Entry
	err = db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "unowned", waits: true, landed: func(t *tx) (bool, error) {
		return c.landed(t)
	}}, func(t *tx) error {
		r, err := t.fullRow(ws, id, true)
		if err != nil {
			return err
		}
		if r.Damaged != "" {
			return fmt.Errorf("%w: %s", ErrDamaged, r.Damaged)
		}
		if r.Owner != "" {
			return ErrOwned
		}
		if check != nil {
			if err := check(r.view()); err != nil {
				return err
			}
		}
		now := db.Now()
		claim, err := db.claimItem(ctx, r, key, "")
		if err != nil {
			return err
		}
		seen := r.inboxSeen
		if c, err = t.claimChange(r, key, claim, now); err != nil {
			return err
		}
		it.append.Seen = max(a.Seen, seen)
		if err := c.apply(t, it, now); err != nil {
			return err
		}
		out = it.out
		if err := t.writeChanges([]*change{c}); err != nil {
			return err
		}
		return db.written(ctx, t, c.row.view())
	})
	if err != nil {
		return fail(err)
	}
	db.published(&c.row, c.entries, nil)
	return out, nil
}

// landed reports whether the change is there after an error of COMMIT.
func (c *change) landed(t *tx) (bool, error) {
	var head Seq
	var hash []byte
	err := t.queryRow(`SELECT head, head_hash FROM sessions WHERE workspace = ? AND id = ?`+t.db.lockRow(), c.row.Workspace, c.row.ID).Scan(&head, &hash)
	if err != nil {
		return false, err
	}
	return head == c.row.Head && string(hash) == string(c.row.HeadHash[:]), nil
}

// recID is the id of a record that is not about one effect.
func recID(now time.Time) string { return NewID("rec_", now) }
