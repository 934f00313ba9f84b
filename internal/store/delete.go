package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
)

// DeleteSession hides the session and erases what no living descendant reads:
// bodies, salts, data key; tombstones of effects stay. Its files and the tokens of
// its resources go too. Refused (ErrConflict) while it runs.
func (db *DB) DeleteSession(ctx context.Context, ws WorkspaceID, id SessionID, principal string) error {
	var last *sessionRow
	var blobs []string
	var files gone
	var erased KeyID
	err := db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "delete", landed: func(t *tx) (bool, error) {
		var at int64
		err := t.queryRow(`SELECT deleted_at FROM sessions WHERE workspace = ? AND id = ?`, ws, id).Scan(&at)
		return at != 0, err
	}}, func(t *tx) error {
		blobs, files, erased = nil, gone{}, ""
		r, err := t.sessionRow(ws, id, true)
		if err != nil {
			return err
		}
		// A damaged session cannot come to rest by itself: this is its way out.
		if v := r.view(); r.Owner != "" || r.Damaged == "" && (v.Status == StatusRunning || v.Status == StatusRescheduling) {
			return fmt.Errorf("%w: session %s is %s", ErrConflict, id, v.Status)
		}
		now := micros(db.Now())
		if _, err := t.exec(`UPDATE sessions SET deleted_at = ?, next_at = 0, inbox_n = 0, inbox_urgent = 0 WHERE workspace = ? AND id = ?`, now, ws, id); err != nil {
			return err
		}
		if err := t.dropSession(&files, ws, id); err != nil {
			return err
		}
		if err := db.written(ctx, t, nil); err != nil {
			return err
		}
		r.deletedAt = now
		last = r
		// Told before it is so: a witness that knows more than the database
		// raises no alarm, one that knows less would.
		db.saw([]*sessionRow{r})
		var living int64
		if err := t.queryRow(`SELECT count(*) FROM sessions WHERE workspace = ? AND (id = ? OR parent <> '' AND lineage = ?) AND deleted_at = 0`, ws, r.Lineage, r.Lineage).Scan(&living); err != nil {
			return err
		}
		if blobs, err = t.eraseUnread(r, living); err != nil || living > 0 {
			return err
		}
		erased = r.keyID
		_, err = t.exec(`UPDATE data_keys SET wrapped = ?, destroyed_at = ? WHERE workspace = ? AND id = ?`, []byte{}, now, ws, r.keyID)
		return err
	})
	if err != nil {
		return fmt.Errorf("delete session %s: %w", id, err)
	}
	// Hidden and erased for good. A crash right here leaves the large bodies in
	// the blob store, sealed under a key that is gone.
	if erased != "" {
		db.keys.drop(erased)
	}
	db.dropContents(ctx, files)
	for _, name := range blobs {
		if err := db.cfg.Blobs.Delete(ctx, string(ws), name); err != nil {
			db.log.Warn("left a blob of an erased session", "session", id, "err", err)
		}
	}
	db.log.Info("deleted session", "session", id, "principal", principal)
	db.hub.poke(sessionKey{ws, id})
	db.tell([]*sessionRow{last})
	return nil
}

// eraseUnread erases a deleted session that no fork reads, and with the last
// living session of a lineage all of it.
func (t *tx) eraseUnread(r *sessionRow, living int64) (blobs []string, err error) {
	if living > 0 {
		var readers int64
		if err := t.queryRow(`SELECT count(*) FROM sessions WHERE workspace = ? AND parent = ? AND lineage = ?`, r.Workspace, r.ID, r.Lineage).Scan(&readers); err != nil || readers > 0 {
			return nil, err
		}
		return t.erase(r)
	}
	var all []*sessionRow
	err = t.each(`SELECT `+sessionColumns+` FROM sessions WHERE workspace = ? AND (id = ? OR parent <> '' AND lineage = ?)`, []any{r.Workspace, r.Lineage, r.Lineage}, func(rows *sql.Rows) error {
		s, err := scanRow(rows)
		all = append(all, s)
		return err
	})
	for _, s := range all {
		var more []string
		if err == nil {
			more, err = t.erase(s)
			blobs = append(blobs, more...)
		}
	}
	return blobs, err
}

// erase removes bodies and salts and keeps their digests, so that the chain
// still verifies and says erased.
func (t *tx) erase(row *sessionRow) (blobs []string, err error) {
	var after Seq
	for {
		var got []logRow
		err := t.each(`SELECT `+readColumns+` FROM log WHERE workspace = ? AND session = ? AND seq > ? AND digest IS NULL ORDER BY seq LIMIT ?`,
			[]any{row.Workspace, row.ID, int64(after), verifyPage}, func(rows *sql.Rows) error {
				r, err := scanLog(rows)
				got = append(got, r)
				return err
			})
		if err != nil {
			return nil, err
		}
		if len(got) == 0 {
			break
		}
		for i := range got {
			r := &got[i]
			after = r.Seq
			digest, err := t.open(row.Workspace, r)
			if err != nil {
				if !errors.Is(err, ErrDamaged) {
					return nil, err // it can be read another time
				}
				// Damage must not keep a body that somebody wants gone.
				t.db.log.Warn("erased a damaged body", "session", row.ID, "seq", r.Seq, "err", err)
				digest = [32]byte{}
			}
			if r.blob != "" {
				blobs = append(blobs, r.blob)
			}
			if _, err := t.exec(`UPDATE log SET body = NULL, salt = NULL, blob = '', digest = ? WHERE workspace = ? AND session = ? AND seq = ?`,
				digest[:], row.Workspace, row.ID, int64(r.Seq)); err != nil {
				return nil, err
			}
		}
	}
	err = t.each(`SELECT blob FROM inbox WHERE workspace = ? AND session = ? AND blob <> ''`, []any{row.Workspace, row.ID}, func(rows *sql.Rows) error {
		var name string
		err := rows.Scan(&name)
		blobs = append(blobs, name)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := t.eraseSnapshots(row); err != nil {
		return nil, err
	}
	for _, q := range []string{`DELETE FROM inbox WHERE workspace = ? AND session = ?`, `DELETE FROM answers WHERE workspace = ? AND session = ?`,
		`DELETE FROM session_configs WHERE workspace = ? AND session = ?`} {
		if _, err := t.exec(q, row.Workspace, row.ID); err != nil {
			return nil, err
		}
	}
	return blobs, nil
}
