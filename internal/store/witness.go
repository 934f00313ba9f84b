package store

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// A witness is a file beside the SQLite database that says which head each
// session had when it was last acknowledged. The engine repairs a torn tail of
// its own files silently, and a file from a backup looks sound too; compared
// with the witness, a session that lost what was acknowledged is refused by
// name and no other is touched. The file is written after each commit and not
// synced: it outlives the process, and after a power cut it may lag behind the
// database, never be ahead of it.
type witness struct {
	dir string

	mu   sync.Mutex // guards the fields below
	f    *os.File
	size int64
	buf  []byte
	err  error // the first failure; the witness then falls silent
}

// witnessSize is where a new file is begun; the one before is kept. Together
// they hold more than the WAL, the only part of the database that can be torn,
// and the start, which compares all of it, stays quick.
const witnessSize = 1 << 20

// testimony is one record: what a session had.
type testimony struct {
	Workspace WorkspaceID
	Session   SessionID
	Head      Seq
	Hash      []byte // the first hashPart bytes of the head's hash
	Inbox     int64  // arrivals
	Deleted   bool
}

// hashPart tells entries apart that have one seq.
const hashPart = 8

// encode appends the record: length, checksum, then the fields.
func (t *testimony) encode(b []byte) []byte {
	start := len(b)
	b = append(b, make([]byte, 8)...)
	b = binary.BigEndian.AppendUint64(b, uint64(t.Head))
	b = binary.BigEndian.AppendUint64(b, uint64(t.Inbox))
	b = append(b, byte(b2i(t.Deleted)))
	b = append(b, t.Hash...)
	b = append(b, t.Workspace...)
	b = append(b, 0)
	b = append(b, t.Session...)
	text := b[start+8:]
	binary.BigEndian.PutUint32(b[start:], uint32(len(text)))
	binary.BigEndian.PutUint32(b[start+4:], crc32.ChecksumIEEE(text))
	return b
}

// decode is the inverse of encode, of the fields.
func (t *testimony) decode(b []byte) bool {
	if len(b) < 17+hashPart {
		return false
	}
	t.Head, t.Inbox = Seq(binary.BigEndian.Uint64(b)), int64(binary.BigEndian.Uint64(b[8:]))
	t.Deleted, t.Hash = b[16] != 0, b[17:17+hashPart]
	ws, id, ok := bytes.Cut(b[17+hashPart:], []byte{0})
	t.Workspace, t.Session = WorkspaceID(ws), SessionID(id)
	return ok
}

func (w *witness) path(former bool) string {
	if former {
		return filepath.Join(w.dir, "witness.1")
	}
	return filepath.Join(w.dir, "witness")
}

func openWitness(dir string) (*witness, error) {
	w := &witness{dir: dir}
	// A torn tail goes: what is written behind it would not be believed.
	whole, err := w.each(false, func(testimony) {})
	if err == nil {
		err = os.Truncate(w.path(false), whole)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open witness: %w", err)
	}
	f, err := os.OpenFile(w.path(false), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open witness: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open witness: %w", err)
	}
	w.f, w.size = f, st.Size()
	return w, nil
}

func (w *witness) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(w.err, w.f.Close())
}

// saw records rows that are durable, before anybody is told.
func (db *DB) saw(rs []*sessionRow) {
	w := db.wit
	if w == nil || len(rs) == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return
	}
	w.buf = w.buf[:0]
	for _, r := range rs {
		t := testimony{r.Workspace, r.ID, r.Head, r.HeadHash[:hashPart], r.inboxLast, r.deletedAt != 0}
		w.buf = t.encode(w.buf)
	}
	n, err := w.f.Write(w.buf)
	w.size += int64(n)
	if err == nil && w.size > witnessSize {
		err = w.turn()
	}
	if err != nil {
		// Nothing that was acknowledged is at risk; only damage would be
		// noticed less well.
		w.err = err
		db.log.Error("the witness of the data folder cannot be written", "err", err)
	}
}

// turn begins a new file.
func (w *witness) turn() error {
	if err := w.f.Close(); err != nil {
		return err
	}
	if err := os.Rename(w.path(false), w.path(true)); err != nil {
		return err
	}
	f, err := os.OpenFile(w.path(false), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	w.f, w.size = f, 0
	return err
}

// read gives the newest testimony per session. A torn or damaged record ends
// its file: what follows it is not believed.
func (w *witness) read() (map[sessionKey]testimony, error) {
	last := map[sessionKey]testimony{}
	for _, former := range []bool{true, false} {
		_, err := w.each(former, func(t testimony) { last[sessionKey{t.Workspace, t.Session}] = t })
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return last, nil
}

// each calls f per record and returns the size of the sound part of the file.
func (w *witness) each(former bool, f func(testimony)) (whole int64, err error) {
	file, err := os.Open(w.path(former))
	if err != nil {
		return 0, err
	}
	defer file.Close()
	in := bufio.NewReader(file)
	for {
		t, size, ok := readTestimony(in)
		if !ok {
			return whole, nil
		}
		f(t)
		whole += size
	}
}

func readTestimony(in *bufio.Reader) (t testimony, size int64, ok bool) {
	var head [8]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return t, 0, false
	}
	n := binary.BigEndian.Uint32(head[:4])
	if n > 4096 {
		return t, 0, false
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(in, b); err != nil || crc32.ChecksumIEEE(b) != binary.BigEndian.Uint32(head[4:]) {
		return t, 0, false
	}
	return t, int64(len(head)) + int64(n), t.decode(b)
}

// compareWitness refuses sessions that have less than was acknowledged.
func (db *DB) compareWitness(ctx context.Context) error {
	last, err := db.wit.read()
	if err != nil {
		return fmt.Errorf("read witness: %w", err)
	}
	keys := slices.Collect(maps.Keys(last))
	for some := range slices.Chunk(keys, witnessBatch) {
		for _, key := range db.suspects(ctx, some, last) {
			why, err := db.contradicts(ctx, key, last[key])
			if err != nil {
				return fmt.Errorf("compare with witness: %w", err)
			}
			if why == "" {
				continue
			}
			db.log.Error("refused session: acknowledged entries are missing", "session", key.id, "err", why)
			if err := db.refuse(ctx, key, why); err != nil {
				return fmt.Errorf("compare with witness: %w", err)
			}
		}
	}
	return nil
}

// witnessBatch is how many sessions one query compares.
const witnessBatch = 200

// suspects leaves out the sessions that plainly have what was acknowledged.
// When the query fails all are suspects: each is then looked at alone. CROSS
// JOIN looks rows up by their keys, as everybody else does: a damaged index
// that hides a row is to be noticed.
func (db *DB) suspects(ctx context.Context, keys []sessionKey, last map[sessionKey]testimony) []sessionKey {
	var args []any
	for _, key := range keys {
		args = append(args, string(key.ws), string(key.id), int64(last[key].Head))
	}
	sound := map[sessionKey]bool{}
	err := db.peek(ctx).each(`WITH w (ws, id, seq) AS (VALUES `+strings.Repeat("(?, ?, ?), ", len(keys)-1)+`(?, ?, ?))
 SELECT w.ws, w.id, s.inbox_last, s.deleted_at, l.hash FROM w
 CROSS JOIN sessions s ON s.workspace = w.ws AND s.id = w.id AND s.head >= w.seq AND s.damaged = ''
 CROSS JOIN log l ON l.workspace = w.ws AND l.session = w.id AND l.seq = w.seq`, args, func(rows *sql.Rows) error {
		var key sessionKey
		var inbox, deleted int64
		var hash []byte
		if err := rows.Scan(&key.ws, &key.id, &inbox, &deleted, &hash); err != nil {
			return err
		}
		want := last[key]
		sound[key] = inbox >= want.Inbox && (deleted == 0 || want.Deleted) && bytes.HasPrefix(hash, want.Hash)
		return nil
	})
	if err != nil {
		return keys
	}
	return slices.DeleteFunc(slices.Clone(keys), func(key sessionKey) bool { return sound[key] })
}

// contradicts says what of a testimony is missing; empty when nothing is.
func (db *DB) contradicts(ctx context.Context, key sessionKey, want testimony) (why string, err error) {
	t := db.peek(ctx)
	var head Seq
	var inbox, deleted int64
	var damaged string
	err = t.queryRow(`SELECT head, inbox_last, deleted_at, damaged FROM sessions WHERE workspace = ? AND id = ?`, key.ws, key.id).Scan(&head, &inbox, &deleted, &damaged)
	switch err = notFound(db.mapErr(err)); {
	case errors.Is(err, ErrNotFound):
		return "the session was acknowledged and is missing from the database", nil
	case errors.Is(err, ErrDamaged):
		return err.Error(), nil
	case err != nil || damaged != "":
		return "", err
	case deleted != 0 && !want.Deleted:
		// After a power cut the witness may not know of a deletion; what was
		// erased was deleted.
		var kept, forks int64
		if err := t.queryRow(`SELECT (SELECT count(*) FROM session_configs WHERE workspace = ? AND session = ?), (SELECT count(*) FROM sessions WHERE workspace = ? AND parent = ?)`,
			key.ws, key.id, key.ws, key.id).Scan(&kept, &forks); err != nil {
			return "", db.mapErr(err)
		}
		if kept > 0 && forks == 0 {
			return "the session is hidden, but nobody deleted it", nil
		}
		return "", nil
	case head < want.Head:
		return fmt.Sprintf("entries up to seq %d were acknowledged, the log ends at seq %d", want.Head, head), nil
	case inbox < want.Inbox:
		return fmt.Sprintf("%d inbox rows were accepted, %d are known", want.Inbox, inbox), nil
	}
	var hash []byte
	err = t.queryRow(`SELECT hash FROM log WHERE workspace = ? AND session = ? AND seq = ?`, key.ws, key.id, int64(want.Head)).Scan(&hash)
	if err = notFound(db.mapErr(err)); errors.Is(err, ErrNotFound) || errors.Is(err, ErrDamaged) {
		return fmt.Sprintf("seq %d, which was acknowledged, cannot be read", want.Head), nil
	}
	if err == nil && !bytes.HasPrefix(hash, want.Hash) {
		return fmt.Sprintf("seq %d is another entry than the one that was acknowledged", want.Head), nil
	}
	return "", err
}

// refuse marks a session damaged; one that is missing gets a row that says so.
func (db *DB) refuse(ctx context.Context, key sessionKey, why string) error {
	return db.tx(ctx, func(t *tx) error {
		now := micros(db.Now())
		_, err := t.exec(`INSERT INTO sessions (workspace, id, lineage, key_id, status, head_hash, created_at, updated_at, damaged) VALUES (?, ?, ?, '', ?, ?, ?, ?, ?)
 ON CONFLICT (workspace, id) DO UPDATE SET damaged = excluded.damaged, next_at = 0, owner = '', deleted_at = 0`,
			key.ws, key.id, key.id, string(StatusIdle), make([]byte, 32), now, now, why)
		return err
	})
}
