package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// logRow is a row of the log with its body still sealed.
type logRow struct {
	Entry
	keyID  KeyID
	salt   []byte
	body   []byte
	blob   string
	digest []byte // erased: all that is left of the body
}

const readColumns = `session, seq, kind, type, id, thread, at, fence, key_id, salt, body, blob, digest, hash`

func scanLog(row scanner) (r logRow, err error) {
	var at int64
	var hash []byte
	err = row.Scan(&r.Session, &r.Seq, &r.Kind, &r.Type, &r.ID, &r.Thread, &at, &r.Fence, &r.keyID, &r.salt, &r.body, &r.blob, &r.digest, &hash)
	r.At = fromMicros(at)
	copy(r.Hash[:], hash)
	r.Erased = len(r.digest) > 0
	return r, err
}

// open opens the body and returns its digest.
func (t *tx) open(ws WorkspaceID, r *logRow) (digest [32]byte, err error) {
	if r.Erased {
		copy(digest[:], r.digest)
		return digest, nil
	}
	key, err := t.dataKey(ws, r.keyID)
	if err != nil {
		return digest, err
	}
	aad := aadOfEntry(ws, r.Session, r.Seq)
	if r.blob != "" {
		aad = aadOfBlob(ws, r.Session, r.salt)
	}
	if r.Body, err = t.openBody(ws, key, r.body, r.blob, aad); err != nil {
		return digest, err
	}
	return bodyDigest(r.salt, r.Body), nil
}

// segment is a part of a branch's log that one session holds.
type segment struct {
	row         *sessionRow
	after, upto Seq // exclusive, inclusive
}

// segments lists the parts of a session's log, the oldest ancestor first.
func (t *tx) segments(r *sessionRow) ([]segment, error) {
	upto := r.Head
	var segs []segment
	for range maxDepth {
		segs = append(segs, segment{r, r.ForkSeq, upto})
		if r.Parent == "" {
			slices.Reverse(segs)
			return segs, nil
		}
		upto = r.ForkSeq
		// A deleted ancestor is still read by its descendants.
		p, err := scanRow(t.queryRow(`SELECT `+sessionColumns+` FROM sessions WHERE workspace = ? AND id = ?`, r.Workspace, r.Parent))
		if err != nil {
			return nil, fmt.Errorf("ancestor %s: %w", r.Parent, notFound(t.db.mapErr(err)))
		}
		r = p
	}
	return nil, fmt.Errorf("%w: session %s has more than %d ancestors", ErrDamaged, r.ID, maxDepth)
}

// maxDepth bounds forks of forks.
const maxDepth = 1000

// Entries reads a session's log (a fork: through its ancestors), bodies opened,
// hashes verified against the chain for contiguous ranges. ErrDamaged.
func (db *DB) Entries(ctx context.Context, ws WorkspaceID, id SessionID, r Range) (list []Entry, err error) {
	err = db.read(ctx, func(t *tx) error {
		row, err := t.sessionRow(ws, id, false)
		if err != nil {
			return err
		}
		list, err = t.entries(row, r)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read log of session %s: %w", id, err)
	}
	return list, nil
}

func (t *tx) entries(row *sessionRow, r Range) ([]Entry, error) {
	segs, err := t.segments(row)
	if err != nil {
		return nil, err
	}
	if r.Desc {
		slices.Reverse(segs)
	}
	var list []Entry
	for _, s := range segs {
		lo, hi := max(s.after, r.After), s.upto
		if r.Until != 0 {
			hi = min(hi, r.Until)
		}
		if lo >= hi {
			continue
		}
		limit := 0
		if r.Limit > 0 {
			if limit = r.Limit - len(list); limit <= 0 {
				break
			}
		}
		if list, err = t.readSegment(s.row, r, lo, hi, limit, list); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// contiguous reports whether a range leaves nothing out between its ends.
func (r *Range) contiguous() bool {
	return len(r.Kinds) == 0 && len(r.Types) == 0 && r.Thread == "" &&
		r.AtGT.IsZero() && r.AtGTE.IsZero() && r.AtLT.IsZero() && r.AtLTE.IsZero()
}

// readAhead bounds the rows that room is made for before any is read: a head
// that is damaged may promise more than there are.
const readAhead = 1 << 14

func (t *tx) readSegment(row *sessionRow, r Range, lo, hi Seq, limit int, list []Entry) ([]Entry, error) {
	where, args := `workspace = ? AND session = ? AND seq > ? AND seq <= ?`, []any{row.Workspace, row.ID, int64(lo), int64(hi)}
	add := func(cond string, values ...any) { where += " AND " + cond; args = append(args, values...) }
	if len(r.Kinds) > 0 {
		add("kind IN ("+marks(len(r.Kinds))+")", anys(r.Kinds)...)
	}
	if len(r.Types) > 0 {
		add("type IN ("+marks(len(r.Types))+")", anys(r.Types)...)
	}
	if r.Thread != "" {
		add("thread = ?", r.Thread)
	}
	for _, b := range []struct {
		op string
		at time.Time
	}{{">", r.AtGT}, {">=", r.AtGTE}, {"<", r.AtLT}, {"<=", r.AtLTE}} {
		if !b.at.IsZero() {
			add("at "+b.op+" ?", micros(b.at))
		}
	}
	where += " ORDER BY seq"
	if r.Desc {
		where += " DESC"
	}
	if limit > 0 {
		where += " LIMIT " + strconv.Itoa(limit)
	}
	var got []logRow
	if r.contiguous() {
		n := int(min(hi-lo, readAhead))
		if limit > 0 {
			n = min(n, limit)
		}
		got = make([]logRow, 0, n)
	}
	err := t.each(`SELECT `+readColumns+` FROM log WHERE `+where, args, func(rows *sql.Rows) error {
		lr, err := scanLog(rows)
		got = append(got, lr)
		return err
	})
	if err != nil {
		return nil, err
	}
	if r.contiguous() {
		return t.verified(row, got, lo, hi, limit, r.Desc, list)
	}
	for i := range got {
		if _, err := t.open(row.Workspace, &got[i]); err != nil {
			return nil, fmt.Errorf("seq %d: %w", got[i].Seq, err)
		}
		list = append(list, got[i].Entry)
	}
	return list, nil
}

// verified opens rows of one session and checks that they are dense and chained.
func (t *tx) verified(row *sessionRow, got []logRow, lo, hi Seq, limit int, desc bool, list []Entry) ([]Entry, error) {
	if desc {
		slices.Reverse(got)
	}
	want := int(hi - lo)
	if limit > 0 {
		want = min(want, limit)
	}
	if len(got) != want {
		return nil, fmt.Errorf("%w: %d entries of %d between seq %d and %d are there", ErrDamaged, len(got), want, lo, hi)
	}
	c, err := t.chainAt(row, got[0].Seq-1)
	if err != nil {
		return nil, err
	}
	for i := range got {
		if err := c.next(t, &got[i]); err != nil {
			return nil, err
		}
	}
	if c.seq == row.Head && c.hash != row.HeadHash {
		return nil, fmt.Errorf("%w: seq %d does not have the hash of the session's head", ErrDamaged, c.seq)
	}
	if desc {
		slices.Reverse(got)
	}
	list = slices.Grow(list, len(got))
	for i := range got {
		list = append(list, got[i].Entry)
	}
	return list, nil
}

// chain walks a log and checks it.
type chain struct {
	ws   WorkspaceID
	id   SessionID
	seq  Seq
	hash [32]byte
	at   time.Time
	buf  []byte
}

// chainAt stands behind seq: at the start, at the parent's hash, or at the row's.
func (t *tx) chainAt(row *sessionRow, seq Seq) (*chain, error) {
	c := &chain{ws: row.Workspace, id: row.ID, seq: seq}
	if seq == 0 {
		return c, nil
	}
	holder := row.ID
	if seq == row.ForkSeq && row.Parent != "" {
		holder = row.Parent
	}
	var hash []byte
	err := t.queryRow(`SELECT hash FROM log WHERE workspace = ? AND session = ? AND seq = ?`, row.Workspace, holder, int64(seq)).Scan(&hash)
	if err != nil {
		return nil, fmt.Errorf("seq %d: %w", seq, missing(t.db.mapErr(err)))
	}
	copy(c.hash[:], hash)
	return c, nil
}

// next opens a row and checks that it is the next one.
func (c *chain) next(t *tx, r *logRow) error {
	if r.Seq != c.seq+1 {
		return fmt.Errorf("%w: after seq %d comes seq %d", ErrDamaged, c.seq, r.Seq)
	}
	digest, err := t.open(c.ws, r)
	if err != nil {
		return fmt.Errorf("seq %d: %w", r.Seq, err)
	}
	if chainHash(c.hash, c.ws, &r.Entry, r.keyID, digest, &c.buf) != r.Hash {
		return fmt.Errorf("%w: seq %d does not match its hash", ErrDamaged, r.Seq)
	}
	if !r.At.After(c.at) {
		return fmt.Errorf("%w: seq %d is not later than the one before", ErrDamaged, r.Seq)
	}
	c.seq, c.hash, c.at = r.Seq, r.Hash, r.At
	return nil
}

// EntryAt reads one entry by seq.
func (db *DB) EntryAt(ctx context.Context, ws WorkspaceID, id SessionID, seq Seq) (Entry, error) {
	list, err := db.Entries(ctx, ws, id, Range{After: seq - 1, Until: seq, Limit: 1})
	if err != nil {
		return Entry{}, err
	}
	if seq < 1 || len(list) == 0 {
		return Entry{}, fmt.Errorf("seq %d of session %s: %w", seq, id, ErrNotFound)
	}
	return list[0], nil
}

// SeqOf finds the seq of the event with this id in the session's log; ErrNotFound.
func (db *DB) SeqOf(ctx context.Context, ws WorkspaceID, id SessionID, event EventID) (seq Seq, err error) {
	err = db.read(ctx, func(t *tx) error {
		row, err := t.sessionRow(ws, id, false)
		if err != nil {
			return err
		}
		segs, err := t.segments(row)
		if err != nil {
			return err
		}
		slices.Reverse(segs) // the newest part first
		for _, s := range segs {
			seq, err = t.seqOf(ws, s.row.ID, string(event), timeOfID(string(event)))
			if err == nil && seq > s.upto {
				err = ErrNotFound
			}
			if !errors.Is(err, ErrNotFound) {
				return err
			}
		}
		return ErrNotFound
	})
	if err != nil {
		return 0, fmt.Errorf("event %s in session %s: %w", event, id, err)
	}
	return seq, nil
}

// idSkew is how far the clock that made an id may be ahead of the one that
// logged the entry.
const idSkew = time.Second

// seqOf looks for an id from the entry on that was logged when the id was made:
// there is no index on ids, which would cost every append. An id without a
// believable time is looked for from the start.
func (t *tx) seqOf(ws WorkspaceID, id SessionID, event string, made time.Time) (Seq, error) {
	from, err := t.seqAtTime(ws, id, made)
	if err != nil {
		return 0, err
	}
	for _, q := range []struct{ lo, hi Seq }{{from, 1 << 62}, {0, from}} {
		var seq Seq
		err := t.queryRow(`SELECT seq FROM log WHERE workspace = ? AND session = ? AND seq > ? AND seq <= ? AND id = ? AND kind = 'event' ORDER BY seq LIMIT 1`,
			ws, id, int64(q.lo), int64(q.hi), event).Scan(&seq)
		if err == nil {
			return seq, nil
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return 0, t.db.mapErr(err)
		}
	}
	return 0, ErrNotFound
}

// seqAtTime is the last seq that was logged clearly before a time, by halving.
func (t *tx) seqAtTime(ws WorkspaceID, id SessionID, at time.Time) (Seq, error) {
	if at.IsZero() {
		return 0, nil
	}
	limit := micros(at.Add(-idSkew))
	var lo, hi Seq
	if err := t.queryRow(`SELECT coalesce(min(seq), 1), coalesce(max(seq), 0) FROM log WHERE workspace = ? AND session = ?`, ws, id).Scan(&lo, &hi); err != nil {
		return 0, t.db.mapErr(err)
	}
	for lo--; lo < hi; {
		mid := lo + (hi-lo+1)/2
		var us int64
		if err := t.queryRow(`SELECT at FROM log WHERE workspace = ? AND session = ? AND seq = ?`, ws, id, int64(mid)).Scan(&us); err != nil {
			return 0, t.db.mapErr(err)
		}
		if us < limit {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	return lo, nil
}

// timeOfID reads the time out of an id that NewID made; zero when it is not one.
func timeOfID(id string) time.Time {
	if len(id) < 27 || id[len(id)-27] != '_' {
		return time.Time{}
	}
	var ms int64
	// The first 10 of 26 characters hold 50 bits: two leading zeros and 48 of time.
	for _, c := range []byte(id[len(id)-26 : len(id)-16]) {
		i := slices.Index([]byte(crockford), c)
		if i < 0 {
			return time.Time{}
		}
		ms = ms<<5 | int64(i)
	}
	return time.UnixMilli(ms).UTC()
}
