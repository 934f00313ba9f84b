package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"
)

// View is what a check sees inside Deliver's transaction, under the session's row lock.
type View interface {
	Session() Session
	EffectByEvent(event EventID) (Effect, error) // ErrNotFound
	Effect(id EffectID) (Effect, error)
	Inbox() ([]Inbox, error)
	// Answered reports the answer already accepted for a target.
	Answered(target string) (bool, error)
}

type view struct {
	t *tx
	r *sessionRow
}

func (v view) Session() Session { return v.r.view() }

func (v view) EffectByEvent(event EventID) (Effect, error) {
	xs, err := v.t.effects(`workspace = ? AND session = ? AND event = ? ORDER BY id DESC LIMIT 1`, v.r.Workspace, v.r.ID, event)
	if err != nil {
		return Effect{}, err
	}
	if event == "" || len(xs) == 0 {
		return Effect{}, fmt.Errorf("effect of event %s: %w", event, ErrNotFound)
	}
	return xs[0], nil
}

func (v view) Effect(id EffectID) (Effect, error) {
	x, err := v.t.effect(v.r.Workspace, id)
	if err == nil && x.Session != v.r.ID {
		return Effect{}, fmt.Errorf("effect %s: %w", id, ErrNotFound)
	}
	return x, err
}

func (v view) Inbox() ([]Inbox, error) { return v.t.inbox(v.r) }

func (v view) Answered(target string) (bool, error) {
	_, _, ok, err := v.t.answer(v.r, target)
	return ok, err
}

// answer finds the answer accepted for a target.
func (t *tx) answer(r *sessionRow, target string) (a Accepted, digest []byte, ok bool, err error) {
	var at int64
	err = t.queryRow(`SELECT digest, id, at FROM answers WHERE workspace = ? AND session = ? AND target = ?`,
		r.Workspace, r.ID, target).Scan(&digest, &a.ID, &at)
	if errors.Is(err, sql.ErrNoRows) {
		return a, nil, false, nil
	}
	a.At, a.Duplicate = fromMicros(at), true
	return a, digest, err == nil, t.db.mapErr(err)
}

// inbox reads the rows not consumed yet: urgent ones first, then by arrival.
func (t *tx) inbox(r *sessionRow) ([]Inbox, error) {
	key, err := t.dataKey(r.Workspace, r.keyID)
	if err != nil {
		return nil, err
	}
	var list []Inbox
	var bodies [][]byte
	var blobs []string
	err = t.each(`SELECT n, id, kind, type, thread, target, starts, urgent, body, blob, created_at FROM inbox WHERE workspace = ? AND session = ? ORDER BY urgent DESC, n`,
		[]any{r.Workspace, r.ID}, func(rows *sql.Rows) error {
			var in Inbox
			var starts, urgent, created int64
			var body []byte
			var blob string
			if err := rows.Scan(&in.N, &in.ID, &in.Kind, &in.Type, &in.Thread, &in.Target, &starts, &urgent, &body, &blob, &created); err != nil {
				return err
			}
			in.Starts, in.Urgent, in.CreatedAt = starts != 0, urgent != 0, fromMicros(created)
			list, bodies, blobs = append(list, in), append(bodies, body), append(blobs, blob)
			return nil
		})
	if err != nil {
		return nil, err
	}
	for i := range list {
		if list[i].Body, err = t.openBody(r.Workspace, key, bodies[i], blobs[i], aadOf("inbox", r.Workspace, r.ID, list[i].ID)); err != nil {
			return nil, fmt.Errorf("inbox row %s: %w", list[i].ID, err)
		}
	}
	return list, nil
}

// openBody opens a sealed body of a row or of the blob that the row names.
func (t *tx) openBody(ws WorkspaceID, key *dataKey, body []byte, blob string, aad []byte) ([]byte, error) {
	if blob != "" {
		var err error
		body, err = t.db.cfg.Blobs.Get(t.ctx, string(ws), blob)
		switch {
		case err != nil && (t.ctx.Err() != nil || unreachable(err)):
			return nil, fmt.Errorf("large body %s: %w", blob, err)
		case err != nil:
			return nil, fmt.Errorf("%w: large body %s: %w", ErrDamaged, blob, err)
		}
	}
	return key.open(body, aad)
}

// sealedDelivery is a delivery before its transaction.
type sealedDelivery struct {
	Delivery
	sealed []byte
	blob   string
	digest []byte
}

// sealDeliveries seals bodies; a large one is durable as a blob when it returns.
func (db *DB) sealDeliveries(ctx context.Context, r *sessionRow, key *dataKey, ds []Delivery) ([]sealedDelivery, error) {
	out := make([]sealedDelivery, len(ds))
	for i, d := range ds {
		if len(d.Body) > MaxBody {
			return nil, fmt.Errorf("body of %s has %d bytes, at most %d are allowed", d.ID, len(d.Body), MaxBody)
		}
		s := sealedDelivery{Delivery: d, sealed: key.seal(d.Body, aadOf("inbox", r.Workspace, r.ID, d.ID))}
		if d.Target != "" {
			s.digest = key.digest(d.Body)
		}
		if len(d.Body) > MaxInlineBody {
			blob, err := db.putBlob(ctx, r.Workspace, s.sealed)
			if err != nil {
				return nil, err
			}
			s.blob, s.sealed = blob, nil
		}
		out[i] = s
	}
	return out, nil
}

// accept inserts rows into the inbox of a locked session and changes r for setInbox.
func (t *tx) accept(r *sessionRow, ds []sealedDelivery, now time.Time) (accepted []Accepted, queued []Inbox, err error) {
	for i := range ds {
		d := &ds[i]
		if again, err := t.arrived(r, d.ID); err != nil {
			return nil, nil, err
		} else if again != nil {
			accepted = append(accepted, *again)
			continue
		}
		if d.Target != "" {
			former, digest, ok, err := t.answer(r, d.Target)
			if err != nil {
				return nil, nil, err
			}
			if ok && !slices.Equal(digest, d.digest) {
				return nil, nil, fmt.Errorf("%w: %s", ErrAnswered, d.Target)
			}
			if ok {
				accepted = append(accepted, former)
				continue
			}
			if _, err := t.exec(`INSERT INTO answers (workspace, session, target, digest, id, at) VALUES (?, ?, ?, ?, ?, ?)`,
				r.Workspace, r.ID, d.Target, d.digest, d.ID, micros(now)); err != nil {
				return nil, nil, err
			}
		}
		r.inboxLast++
		r.inboxN++
		if d.Urgent {
			r.inboxUrgent++
		}
		if d.Starts && r.Status == StatusIdle && !r.Paused {
			r.starting = true
		}
		if _, err := t.exec(`INSERT INTO inbox (workspace, session, n, id, kind, type, thread, target, starts, urgent, body, blob, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			r.Workspace, r.ID, r.inboxLast, d.ID, string(d.Kind), d.Type, d.Thread, d.Target, b2i(d.Starts), b2i(d.Urgent), d.sealed, d.blob, micros(now)); err != nil {
			return nil, nil, err
		}
		accepted = append(accepted, Accepted{ID: d.ID, At: now})
		queued = append(queued, Inbox{Delivery: d.Delivery, N: r.inboxLast, CreatedAt: now})
	}
	r.schedule(now)
	return accepted, queued, nil
}

// arrived finds a queued row of the same id: the delivery is a repetition.
func (t *tx) arrived(r *sessionRow, id string) (*Accepted, error) {
	if r.inboxN == 0 {
		return nil, nil
	}
	var at int64
	err := t.queryRow(`SELECT created_at FROM inbox WHERE workspace = ? AND session = ? AND id = ?`, r.Workspace, r.ID, id).Scan(&at)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	return &Accepted{ID: id, Duplicate: true, At: fromMicros(at)}, t.db.mapErr(err)
}

// setInbox writes what accept changed in the session's row.
func (t *tx) setInbox(r *sessionRow) error {
	_, err := t.exec(`UPDATE sessions SET inbox_n = ?, inbox_urgent = ?, inbox_last = ?, starting = ?, next_at = ? WHERE workspace = ? AND id = ?`,
		r.inboxN, r.inboxUrgent, r.inboxLast, b2i(r.starting), r.nextAt, r.Workspace, r.ID)
	return err
}

// Deliver accepts rows into a session's inbox: durable on return, no fence. An
// answer to a target that has the same answer is a duplicate (nothing written,
// the former id returned), another one is ErrAnswered. A terminated session is
// ErrTerminated. check runs first, inside, may run twice; its error refuses all.
// All rows are accepted or none.
func (db *DB) Deliver(ctx context.Context, ws WorkspaceID, id SessionID, ds []Delivery, check func(View) error) ([]Accepted, error) {
	fail := func(err error) ([]Accepted, error) {
		return nil, fmt.Errorf("deliver to session %s: %w", id, err)
	}
	row, err := db.peek(ctx).sessionRow(ws, id, false)
	if err != nil {
		return fail(err)
	}
	key, err := db.peek(ctx).dataKey(ws, row.keyID)
	if err != nil {
		return fail(err)
	}
	sealed, err := db.sealDeliveries(ctx, row, key, ds)
	if err != nil {
		return fail(err)
	}
	var out []Accepted
	var queued []Inbox
	var last *sessionRow
	err = db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "deliver", waits: true, landed: func(t *tx) (bool, error) {
		return t.accepted(last, queued)
	}}, func(t *tx) error {
		r, err := t.fullRow(ws, id, true)
		if err != nil {
			return err
		}
		if r.Damaged != "" {
			return fmt.Errorf("%w: %s", ErrDamaged, r.Damaged)
		}
		if r.Status == StatusTerminated {
			return ErrTerminated
		}
		if check != nil {
			if err := check(view{t, r}); err != nil {
				return err
			}
			// check decides, under the lock, which rows start a turn, and what the
			// answers answer.
			for i := range ds {
				sealed[i].Starts, sealed[i].Target = ds[i].Starts, ds[i].Target
				if ds[i].Target != "" && sealed[i].digest == nil {
					sealed[i].digest = key.digest(ds[i].Body)
				}
			}
		}
		if out, queued, err = t.accept(r, sealed, db.Now()); err != nil {
			return err
		}
		last = r
		if len(queued) > 0 {
			if err := t.setInbox(r); err != nil {
				return err
			}
		}
		return db.written(ctx, t, out)
	})
	if err != nil {
		return fail(err)
	}
	// Accepted for good. A crash right here: the rows are in the inbox, the
	// session is claimable, the client that got no answer sends again.
	db.published(last, nil, queued)
	return out, nil
}

// accepted reports, after an error of COMMIT, whether rows are in the inbox or
// were already consumed: the session counts arrivals.
func (t *tx) accepted(r *sessionRow, queued []Inbox) (bool, error) {
	if len(queued) == 0 {
		return true, nil
	}
	first := queued[0]
	var last int64
	if err := t.queryRow(`SELECT inbox_last FROM sessions WHERE workspace = ? AND id = ?`+t.db.lockRow(), r.Workspace, r.ID).Scan(&last); err != nil {
		return false, err
	}
	var id string
	err := t.queryRow(`SELECT id FROM inbox WHERE workspace = ? AND session = ? AND n = ?`, r.Workspace, r.ID, first.N).Scan(&id)
	if err == nil {
		return id == first.ID, nil
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return false, err
	}
	if last < first.N {
		return false, nil
	}
	// Consumed, by an entry of the same id if it is an event; a settle or
	// control row leaves no such entry, and then nobody can tell.
	if first.Kind != InboxEvent {
		return false, errors.New("the row was consumed or another took its place")
	}
	_, err = t.seqOf(r.Workspace, r.ID, first.ID, first.CreatedAt)
	if errors.Is(err, ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// Inbox lists the rows not consumed yet: urgent ones first, then by arrival.
func (db *DB) Inbox(ctx context.Context, ws WorkspaceID, id SessionID) ([]Inbox, error) {
	list, _, err := db.InboxSeen(ctx, ws, id)
	return list, err
}

// InboxSeen lists what Inbox lists. seen is what Append.Seen is to be of an
// owner that has looked at these rows: the number of the newest row that ever
// arrived, which a former owner may have consumed while older ones stayed.
func (db *DB) InboxSeen(ctx context.Context, ws WorkspaceID, id SessionID) (list []Inbox, seen int64, err error) {
	// Mostly it is empty, and owners look often.
	var empty bool
	err = db.peek(ctx).queryRow(`SELECT inbox_n = 0, inbox_last FROM sessions WHERE workspace = ? AND id = ? AND deleted_at = 0 AND damaged = ''`, ws, id).Scan(&empty, &seen)
	if err == nil && empty {
		return nil, seen, nil
	}
	err = db.read(ctx, func(t *tx) error {
		r, err := t.sessionRow(ws, id, false)
		if err == nil {
			list, err = t.inbox(r)
			seen = r.inboxLast
		}
		return err
	})
	if err != nil {
		return nil, 0, fmt.Errorf("inbox of session %s: %w", id, err)
	}
	for _, in := range list {
		seen = max(seen, in.N) // where the row was read before them
	}
	return list, seen, nil
}
