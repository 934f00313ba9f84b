package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Report is what verifying one session found.
type Report struct {
	Workspace WorkspaceID
	Session   SessionID
	Entries   int    // that are there and match
	Erased    int    // of these: bodies are gone, their digests match
	Problem   string // empty when sound
}

// Verify walks a session's chain from its first entry to its head, opens every
// body, and compares the head and the rows that follow from the log. A session
// that is marked damaged is walked too.
func (db *DB) Verify(ctx context.Context, ws WorkspaceID, id SessionID) (Report, error) {
	rep := Report{Workspace: ws, Session: id}
	err := db.read(ctx, func(t *tx) error {
		row, err := scanRow(t.queryRow(`SELECT `+sessionColumns+` FROM sessions WHERE workspace = ? AND id = ?`, ws, id))
		if err != nil {
			return fmt.Errorf("session %s: %w", id, notFound(t.db.mapErr(err)))
		}
		return t.verify(row, &rep)
	})
	if errors.Is(err, ErrDamaged) {
		rep.Problem = err.Error()
		return rep, nil
	}
	if err != nil {
		return rep, fmt.Errorf("verify session %s: %w", id, err)
	}
	return rep, nil
}

// verifyPage bounds the rows that verifying holds in memory.
const verifyPage = 500

func (t *tx) verify(row *sessionRow, rep *Report) error {
	c, err := t.chainAt(row, row.ForkSeq)
	if err != nil {
		return err
	}
	// What is erased tells nothing any more; a fork's rows begin in its ancestors' logs.
	derive := row.deletedAt == 0 && row.Parent == ""
	r := derived(row)
	for c.seq < row.Head {
		var got []logRow
		err := t.each(`SELECT `+readColumns+` FROM log WHERE workspace = ? AND session = ? AND seq > ? ORDER BY seq LIMIT ?`,
			[]any{row.Workspace, row.ID, int64(c.seq), verifyPage}, func(rows *sql.Rows) error {
				r, err := scanLog(rows)
				got = append(got, r)
				return err
			})
		if err != nil {
			return err
		}
		if len(got) == 0 {
			break
		}
		for i := range got {
			if err := c.next(t, &got[i]); err != nil {
				return err
			}
			rep.Entries++
			if got[i].Erased {
				rep.Erased++
				derive = false
			}
			if derive {
				if err := r.refold(&got[i].Entry); err != nil {
					return fmt.Errorf("%w: %w", ErrDamaged, err)
				}
			}
		}
	}
	if c.seq != row.Head || c.hash != row.HeadHash {
		return fmt.Errorf("%w: the log ends at seq %d, the head is %d", ErrDamaged, c.seq, row.Head)
	}
	if row.deletedAt != 0 {
		return nil
	}
	if err := t.loadConfig(row); err != nil {
		return err
	}
	if _, err = t.inbox(row); err != nil || !derive {
		return err
	}
	diffs, err := t.differences(row, r)
	if err != nil || len(diffs) == 0 {
		return err
	}
	names := make([]string, len(diffs))
	for i, d := range diffs {
		names[i] = d.what
	}
	return fmt.Errorf("%w: does not follow from the log: %s", ErrDamaged, strings.Join(names, ", "))
}

// VerifyAll verifies every session of every workspace, deleted ones too. It
// goes on behind damage; f's error ends it.
func (db *DB) VerifyAll(ctx context.Context, f func(Report) error) error {
	var last sessionKey
	for {
		var keys []sessionKey
		err := db.peek(ctx).each(`SELECT workspace, id FROM sessions WHERE (workspace, id) > (?, ?) ORDER BY workspace, id LIMIT ?`,
			[]any{string(last.ws), string(last.id), verifyPage}, func(rows *sql.Rows) error {
				var k sessionKey
				err := rows.Scan(&k.ws, &k.id)
				keys = append(keys, k)
				return err
			})
		if err != nil {
			return fmt.Errorf("verify all: %w", err)
		}
		if len(keys) == 0 {
			return nil
		}
		for _, k := range keys {
			rep, err := db.Verify(ctx, k.ws, k.id)
			if err != nil {
				return err
			}
			if err := f(rep); err != nil {
				return err
			}
		}
		last = keys[len(keys)-1]
	}
}

// Rebuild derives the session's rows anew from its log and compares them with
// the stored ones; differences are returned, nothing is written.
func (db *DB) Rebuild(ctx context.Context, ws WorkspaceID, id SessionID) (diff string, err error) {
	err = db.read(ctx, func(t *tx) error {
		row, err := t.fullRow(ws, id, false)
		if err != nil {
			return err
		}
		diff, err = t.rebuild(row)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("rebuild session %s: %w", id, err)
	}
	return diff, nil
}

func (t *tx) rebuild(row *sessionRow) (string, error) {
	r := derived(row)
	entries, err := t.entries(row, Range{})
	if err != nil {
		return "", err
	}
	for i := range entries {
		if err := r.refold(&entries[i]); err != nil {
			return "", err
		}
	}
	diffs, err := t.differences(row, r)
	texts := make([]string, len(diffs))
	for i, d := range diffs {
		texts[i] = fmt.Sprintf("%s:\n stored  %s\n derived %s", d.what, d.stored, d.derived)
	}
	return strings.Join(texts, "\n"), err
}

// derived are the rows of a session before its first entry.
func derived(row *sessionRow) *rows {
	start := Session{Workspace: row.Workspace, ID: row.ID, Parent: row.Parent, ForkSeq: row.ForkSeq, Lineage: row.Lineage, Status: StatusIdle}
	return newRows(start, func(EffectID, bool) (Effect, bool, error) { return Effect{}, false, nil })
}

// refold applies an entry that was read back.
func (r *rows) refold(e *Entry) error {
	p, err := parse(&e.Draft)
	if err == nil {
		err = fold(r, e, p)
	}
	if err != nil {
		return fmt.Errorf("seq %d: %w", e.Seq, err)
	}
	return nil
}

// difference is a stored row that is not what the log says.
type difference struct{ what, stored, derived string }

// differences compares the stored rows with the derived ones.
func (t *tx) differences(row *sessionRow, r *rows) (diffs []difference, err error) {
	compare := func(what string, stored, derived any) {
		if s, d := fmt.Sprintf("%+v", stored), fmt.Sprintf("%+v", derived); s != d {
			diffs = append(diffs, difference{what, s, d})
		}
	}
	compare("session", projected(row.Session), projected(r.session))
	stored, err := t.effects(`workspace = ? AND session = ? ORDER BY id`, row.Workspace, row.ID)
	if err != nil {
		return nil, err
	}
	var ids []EffectID
	for id := range r.effects {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	var derived []Effect
	open := EffectID("")
	for _, id := range ids {
		derived = append(derived, *r.effects[id])
		if open == "" && !r.effects[id].ended() {
			open = id
		}
	}
	compare("count of effects", len(stored), len(derived))
	for i := range min(len(stored), len(derived)) {
		compare("effect "+string(stored[i].ID), stored[i], derived[i])
	}
	compare("oldest open effect", row.openFrom, open)
	return diffs, t.compareSnapshots(row, r, compare)
}

// projected is the part of a row that the log determines.
func projected(s Session) string {
	s.Owner, s.Fence, s.Damaged = "", 0, ""
	config := fmt.Sprintf("%+v", s.Config)
	title := "none"
	if s.Config.Title != nil {
		title = *s.Config.Title
	}
	s.Config = SessionConfig{}
	return fmt.Sprintf("%+v title %q config of %d bytes", s, title, len(config))
}
