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

// SnapshotRow is a snapshot of a session's sandbox, derived from the log.
type SnapshotRow struct {
	Workspace WorkspaceID `json:"-"`
	Session   SessionID   `json:"-"` // whose log names it: a fork reads its ancestors'
	ID        string      `json:"id"`

	Seq        Seq             `json:"seq"` // of the entry that names it first
	At         time.Time       `json:"at"`
	Node       NodeID          `json:"node"` // process that took it
	Why        string          `json:"why"`
	Name       string          `json:"name,omitempty"` // of a checkpoint that a person named
	Through    Seq             `json:"through"`        // see Snapshot
	Running    []EventID       `json:"running,omitempty"`
	Parent     string          `json:"parent,omitempty"`
	Root       string          `json:"root"`
	Runtime    string          `json:"runtime"` // binary that restores it, by digest
	Generation uint64          `json:"generation"`
	Activity   json.RawMessage `json:"activity,omitempty"`
	Bytes      int64           `json:"bytes"` // of the image
	PauseMS    int64           `json:"pause_ms"`

	PackedAt  time.Time       `json:"packed_at,omitzero"` // zero: only the image is there
	Packed    json.RawMessage `json:"packed,omitempty"`   // sandbox.Packed
	Stored    int64           `json:"stored,omitzero"`    // bytes that packing added
	TestedAt  time.Time       `json:"tested_at,omitzero"` // newest time that a copy was restored
	Failed    string          `json:"failed,omitempty"`   // why the newest restore did not succeed
	DroppedAt time.Time       `json:"dropped_at,omitzero"`
	Reason    string          `json:"reason,omitempty"` // of dropping it
}

// savedRows are a session's snapshots while entries are applied to them.
type savedRows struct {
	rows  map[string]*SnapshotRow // that were not dropped before, and changed ones
	fresh map[string]bool         // of these: new
	moved map[string]bool         // of these: changed
}

func (s *savedRows) clone() *savedRows {
	if s == nil {
		return nil
	}
	c := &savedRows{map[string]*SnapshotRow{}, map[string]bool{}, map[string]bool{}}
	for id, x := range s.rows {
		v := *x
		c.rows[id] = &v
		c.fresh[id], c.moved[id] = s.fresh[id], s.moved[id]
	}
	return c
}

// load reads the session's snapshots at the first entry about one.
func (r *rows) load() (*savedRows, error) {
	if r.saved != nil {
		return r.saved, nil
	}
	s := (&savedRows{}).clone()
	if r.snapshots != nil {
		list, err := r.snapshots()
		if err != nil {
			return nil, err
		}
		for i := range list {
			s.rows[list[i].ID] = &list[i]
		}
	}
	r.saved = s
	return s, nil
}

// snapshot applies an entry about a snapshot.
func (r *rows) snapshot(e *Entry, b *Snapshot) error {
	s, err := r.load()
	if err != nil {
		return err
	}
	x := s.rows[b.Snapshot]
	if b.Name != "" {
		for id, o := range s.rows {
			if o.Name == b.Name && o.DroppedAt.IsZero() && id != b.Snapshot {
				return fmt.Errorf("%w: another snapshot of the session has the name", ErrConflict)
			}
		}
	}
	switch {
	case b.Act == SnapshotTaken && x == nil && b.Snapshot != "":
		x = &SnapshotRow{Workspace: r.session.Workspace, Session: r.session.ID, ID: b.Snapshot, Seq: e.Seq, At: e.At, Node: b.Node, Why: b.Why,
			Through: b.Through, Running: b.Running, Parent: b.Parent, Root: b.Root, Runtime: b.Runtime, Generation: b.Generation,
			Activity: b.Activity, Bytes: b.Bytes, PauseMS: b.PauseMS, Name: b.Name}
		s.rows[x.ID], s.fresh[x.ID] = x, true
		return nil
	case x == nil || !x.DroppedAt.IsZero():
		return fmt.Errorf("%w: snapshot %q, which is to be %s, is not there", ErrConflict, b.Snapshot, b.Act)
	}
	switch b.Act {
	case SnapshotTaken:
		// Again: nothing has changed since, so it holds what came meanwhile.
		if b.Through > x.Through {
			x.Through = b.Through
		}
	case SnapshotNamed:
		x.Name = b.Name
	case SnapshotPacked:
		// What it shares with an earlier one must not be on its way out.
		if p := s.rows[b.Parent]; b.Parent != "" && (p == nil || !p.DroppedAt.IsZero()) {
			return fmt.Errorf("%w: snapshot %s shares packs with %q, which is not there", ErrConflict, x.ID, b.Parent)
		}
		x.PackedAt, x.Packed, x.Stored = e.At, b.Packed, b.Bytes
	case SnapshotTested:
		if x.Failed = b.Failed; b.Failed == "" {
			x.TestedAt = e.At
		}
	case SnapshotDropped:
		x.DroppedAt, x.Reason = e.At, b.Why
	default:
		return fmt.Errorf("%w: snapshot %s is to be %q", ErrConflict, x.ID, b.Act)
	}
	s.moved[x.ID] = true
	return nil
}

const (
	insertSnapshot = `INSERT INTO snapshots (runtime, packed, dropped_at, body, lineage, seq, workspace, session, id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`
	updateSnapshot = `UPDATE snapshots SET runtime = ?, packed = ?, dropped_at = ?, body = ? WHERE workspace = ? AND session = ? AND id = ?`
)

func aadOfSnapshot(ws WorkspaceID, id SessionID, snapshot string) []byte {
	return aadOf("snapshot", ws, id, snapshot)
}

// writeSnapshots writes the rows of snapshots that changed. Few appends have one.
func (t *tx) writeSnapshots(c *change) error {
	s := c.rows.saved
	if s == nil {
		return nil
	}
	for id, x := range s.rows {
		if !s.fresh[id] && !s.moved[id] {
			continue
		}
		body, err := json.Marshal(x)
		if err != nil {
			return err
		}
		args := []any{x.Runtime, string(x.Packed), micros(x.DroppedAt), c.key.seal(body, aadOfSnapshot(c.row.Workspace, c.row.ID, id))}
		key := []any{string(c.row.Workspace), string(c.row.ID), id}
		if s.fresh[id] {
			if _, err := t.exec(insertSnapshot, append(append(args, string(c.row.Lineage), int64(x.Seq)), key...)...); err != nil {
				return err
			}
			continue
		}
		if n, err := t.exec(updateSnapshot, append(args, key...)...); err != nil || n != 1 {
			return orMissing(err, "snapshot "+id)
		}
	}
	return nil
}

// Which snapshots of a session are read.
const (
	liveSnapshots = ` AND dropped_at = 0`
	allSnapshots  = ``
)

// snapshots reads rows of one session's own log, in the order of their seqs.
func (t *tx) snapshots(r *sessionRow, key *dataKey, which string) (list []SnapshotRow, err error) {
	err = t.each(`SELECT id, body FROM snapshots WHERE workspace = ? AND session = ?`+which+` ORDER BY seq`,
		[]any{string(r.Workspace), string(r.ID)}, func(rows *sql.Rows) error {
			var id string
			var body []byte
			if err := rows.Scan(&id, &body); err != nil {
				return err
			}
			plain, err := key.open(body, aadOfSnapshot(r.Workspace, r.ID, id))
			x := SnapshotRow{Workspace: r.Workspace, Session: r.ID}
			if err == nil {
				err = json.Unmarshal(plain, &x)
			}
			if err == nil && x.ID != id {
				err = errors.New("it is another one's row")
			}
			if err != nil {
				return fmt.Errorf("%w: snapshot %s: %w", ErrDamaged, id, err)
			}
			list = append(list, x)
			return nil
		})
	return list, err
}

// Snapshots lists the snapshots of a session that are not dropped, newest
// first, a fork's with those of its ancestors before the fork.
func (db *DB) Snapshots(ctx context.Context, ws WorkspaceID, id SessionID) (list []SnapshotRow, err error) {
	err = db.read(ctx, func(t *tx) error {
		row, err := t.sessionRow(ws, id, false)
		if err != nil {
			return err
		}
		segs, err := t.segments(row)
		if err != nil {
			return err
		}
		for _, s := range slices.Backward(segs) {
			key, err := t.dataKey(ws, s.row.keyID)
			if err != nil {
				return err
			}
			own, err := t.snapshots(s.row, key, liveSnapshots)
			if err != nil {
				return err
			}
			for _, x := range slices.Backward(own) {
				if x.Seq <= s.upto {
					list = append(list, x)
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("snapshots of session %s: %w", id, err)
	}
	return list, nil
}

// ForkPoints lists where the living forks of a session begin: each needs the
// newest snapshot at or before its point.
func (db *DB) ForkPoints(ctx context.Context, ws WorkspaceID, id SessionID) (forks []Seq, err error) {
	err = db.peek(ctx).each(`SELECT fork_seq FROM sessions WHERE workspace = ? AND parent = ? AND deleted_at = 0`,
		[]any{string(ws), string(id)}, func(rows *sql.Rows) error {
			var s Seq
			err := rows.Scan(&s)
			forks = append(forks, s)
			return err
		})
	if err != nil {
		return nil, fmt.Errorf("forks of session %s: %w", id, err)
	}
	return forks, nil
}

// SnapshotLives reports whether a session's log names a snapshot that is not
// dropped. A node asks it for each image on its disk.
func (db *DB) SnapshotLives(ctx context.Context, ws WorkspaceID, id SessionID, snapshot string) (bool, error) {
	var n int64
	err := db.peek(ctx).queryRow(`SELECT count(*) FROM snapshots WHERE workspace = ? AND session = ? AND id = ? AND dropped_at = 0`,
		string(ws), string(id), snapshot).Scan(&n)
	if err != nil {
		return false, fmt.Errorf("look for snapshot %s: %w", snapshot, db.mapErr(err))
	}
	return n > 0, nil
}

// NeededRuntimes lists the digests of binaries that snapshots need.
func (db *DB) NeededRuntimes(ctx context.Context) (digests []string, err error) {
	err = db.peek(ctx).each(`SELECT DISTINCT runtime FROM snapshots WHERE dropped_at = 0`, nil, func(rows *sql.Rows) error {
		var s string
		err := rows.Scan(&s)
		digests = append(digests, s)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("runtimes of snapshots: %w", err)
	}
	return digests, nil
}

// DroppedSnapshot is one whose entry "dropped" is durable, or whose session was
// deleted, and whose bytes may still be there.
type DroppedSnapshot struct {
	Workspace WorkspaceID
	Session   SessionID
	ID        string
	// Blobs are those of its packs that no snapshot of the lineage needs.
	Blobs []string
}

// packedNames is what the store reads of sandbox.Packed.
type packedNames struct {
	Recipe string   `json:"recipe"`
	Blobs  []string `json:"blobs"`
}

func namesOf(packed string) ([]string, error) {
	if packed == "" {
		return nil, nil
	}
	var p packedNames
	if err := json.Unmarshal([]byte(packed), &p); err != nil {
		return nil, err
	}
	return append(p.Blobs, p.Recipe), nil
}

// DroppedSnapshots lists up to limit of them, oldest first. What no row needs
// now nobody will need: a pack that refers to an earlier one is logged only
// while that one is not dropped.
func (db *DB) DroppedSnapshots(ctx context.Context, limit int) (list []DroppedSnapshot, err error) {
	err = db.read(ctx, func(t *tx) error {
		list = nil
		var lineages []SessionID
		var packs []string
		err := t.each(`SELECT workspace, session, id, lineage, packed FROM snapshots WHERE dropped_at > 0 AND removed = 0 ORDER BY dropped_at LIMIT ?`,
			[]any{int64(limit)}, func(rows *sql.Rows) error {
				var d DroppedSnapshot
				var lineage SessionID
				var packed string
				err := rows.Scan(&d.Workspace, &d.Session, &d.ID, &lineage, &packed)
				list, lineages, packs = append(list, d), append(lineages, lineage), append(packs, packed)
				return err
			})
		if err != nil {
			return err
		}
		for i := range list {
			if list[i].Blobs, err = t.unneeded(list[i].Workspace, lineages[i], packs[i]); err != nil {
				return fmt.Errorf("snapshot %s: %w", list[i].ID, err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list dropped snapshots: %w", err)
	}
	return list, nil
}

// unneeded are the blobs of a pack that no snapshot of the lineage needs.
func (t *tx) unneeded(ws WorkspaceID, lineage SessionID, packed string) ([]string, error) {
	names, err := namesOf(packed)
	if err != nil || len(names) == 0 {
		return nil, err
	}
	needed := map[string]bool{}
	err = t.each(`SELECT packed FROM snapshots WHERE workspace = ? AND lineage = ? AND dropped_at = 0 AND packed <> ''`,
		[]any{string(ws), string(lineage)}, func(rows *sql.Rows) error {
			var packed string
			if err := rows.Scan(&packed); err != nil {
				return err
			}
			names, err := namesOf(packed)
			for _, n := range names {
				needed[n] = true
			}
			return err
		})
	return slices.DeleteFunc(names, func(n string) bool { return needed[n] }), err
}

// RemovedSnapshot notes that nothing of a dropped snapshot is left. It is
// forgotten after a crash before, and then removed once more.
func (db *DB) RemovedSnapshot(ctx context.Context, d DroppedSnapshot) error {
	err := db.tx(ctx, func(t *tx) error {
		_, err := t.exec(`UPDATE snapshots SET removed = 1 WHERE workspace = ? AND session = ? AND id = ? AND dropped_at > 0`,
			string(d.Workspace), string(d.Session), d.ID)
		return err
	})
	if err != nil {
		return fmt.Errorf("note that snapshot %s is removed: %w", d.ID, err)
	}
	return nil
}

// eraseSnapshots drops the snapshots of a session that is erased. Their rows
// keep the names of blobs until those are removed.
func (t *tx) eraseSnapshots(row *sessionRow) error {
	_, err := t.exec(`UPDATE snapshots SET dropped_at = ?, body = NULL WHERE workspace = ? AND session = ? AND dropped_at = 0`,
		micros(t.db.Now()), string(row.Workspace), string(row.ID))
	if err == nil {
		_, err = t.exec(`UPDATE snapshots SET body = NULL WHERE workspace = ? AND session = ?`, string(row.Workspace), string(row.ID))
	}
	return err
}

// compareSnapshots is differences' part for snapshots.
func (t *tx) compareSnapshots(row *sessionRow, r *rows, compare func(what string, stored, derived any)) error {
	key, err := t.dataKey(row.Workspace, row.keyID)
	if err != nil {
		return err
	}
	stored, err := t.snapshots(row, key, allSnapshots)
	if err != nil {
		return err
	}
	var derived []*SnapshotRow
	if r.saved != nil {
		for _, x := range r.saved.rows {
			derived = append(derived, x)
		}
	}
	slices.SortFunc(derived, func(a, b *SnapshotRow) int { return int(a.Seq - b.Seq) })
	compare("count of snapshots", len(stored), len(derived))
	for i := range min(len(stored), len(derived)) {
		s, err := json.Marshal(stored[i])
		if err != nil {
			return err
		}
		d, err := json.Marshal(derived[i])
		if err != nil {
			return err
		}
		compare("snapshot "+stored[i].ID, string(s), string(d))
	}
	return nil
}
