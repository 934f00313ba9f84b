package store

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// FileID names a file, "file_…".
type FileID string

// Times of files.
const (
	// goneKept is how long a file that expired or was deleted is remembered, so
	// that a client is told why it is not there.
	goneKept = 7 * 24 * time.Hour
	// sweepEvery is the time between two looks for files that expired.
	sweepEvery = time.Minute
	// sweepBatch is how many are erased in one transaction.
	sweepBatch = 100
)

// ErrExpired: the file's time is over; its content is gone. It is an ErrNotFound.
var ErrExpired = fmt.Errorf("file expired: %w", ErrNotFound)

// File is a file that a client uploaded or that a session made.
type File struct {
	Workspace    WorkspaceID
	ID           FileID
	Session      SessionID // whose it is; empty: the workspace's
	Filename     string
	MIME         string
	Path         string // where it lay in the sandbox; outputs only
	SHA256       string // of its bytes, hex
	Size         int64
	Downloadable bool
	CreatedAt    time.Time
	ExpiresAt    time.Time // zero: never

	blob  string
	keyID KeyID
}

// fileMeta is what is sealed in the row.
type fileMeta struct {
	V        int    `json:"v"`
	Filename string `json:"filename"`
	MIME     string `json:"mime_type"`
	Path     string `json:"path,omitempty"`
	SHA256   string `json:"sha256"`
}

func aadOfFile(ws WorkspaceID, id FileID) []byte {
	return fields(make([]byte, 0, 96), "file", string(ws), string(id))
}

const fileColumns = `workspace, id, session, key_id, blob, size, meta, downloadable, created_at, expires_at`

// scanFile reads fileColumns; the meta is opened by its caller.
func scanFile(r interface{ Scan(...any) error }) (f File, meta []byte, err error) {
	var down, created, expires int64
	err = r.Scan(&f.Workspace, &f.ID, &f.Session, &f.keyID, &f.blob, &f.Size, &meta, &down, &created, &expires)
	f.Downloadable, f.CreatedAt, f.ExpiresAt = down != 0, fromMicros(created), fromMicros(expires)
	return f, meta, err
}

func (t *tx) openMeta(f *File, meta []byte) error {
	key, err := t.dataKey(f.Workspace, f.keyID)
	if err != nil {
		return fmt.Errorf("file %s: %w", f.ID, err)
	}
	plain, err := key.open(meta, aadOfFile(f.Workspace, f.ID))
	if err != nil {
		return fmt.Errorf("file %s: %w", f.ID, err)
	}
	var m fileMeta
	if err := json.Unmarshal(plain, &m); err != nil {
		return fmt.Errorf("%w: file %s: %w", ErrDamaged, f.ID, err)
	}
	f.Filename, f.MIME, f.Path, f.SHA256 = m.Filename, m.MIME, m.Path, m.SHA256
	return nil
}

func (t *tx) insertFile(f *File, key *dataKey, origin string) error {
	meta, err := json.Marshal(fileMeta{V: BodyVersion, Filename: f.Filename, MIME: f.MIME, Path: f.Path, SHA256: f.SHA256})
	if err != nil {
		return err
	}
	_, err = t.exec(`INSERT INTO files (workspace, id, session, key_id, blob, size, meta, origin, downloadable, created_at, expires_at)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`, f.Workspace, f.ID, f.Session, f.keyID, f.blob, f.Size,
		key.seal(meta, aadOfFile(f.Workspace, f.ID)), origin, b2i(f.Downloadable), micros(f.CreatedAt), micros(f.ExpiresAt))
	return err
}

// CreateFile makes a file of a content, which is durable already. A crash before
// the commit leaves that content without a row, to SweepContents. ErrConflict: the id is taken.
func (db *DB) CreateFile(ctx context.Context, f File, c *Content) (File, error) {
	return db.createFile(ctx, f, c, "")
}

// CreateOutput is CreateFile for what a session made at f.Path. ErrDuplicate:
// these bytes at this path are a file of the session already, or were one that
// somebody deleted.
func (db *DB) CreateOutput(ctx context.Context, f File, c *Content) (File, error) {
	origin, err := db.origin(ctx, f.Workspace, f.Session, f.Path, c.SHA256)
	if err != nil {
		return File{}, fmt.Errorf("create file %s: %w", f.ID, err)
	}
	return db.createFile(ctx, f, c, origin)
}

func (db *DB) createFile(ctx context.Context, f File, c *Content, origin string) (File, error) {
	f.Size, f.SHA256, f.blob, f.keyID = c.Size, c.SHA256, c.blob, c.keyID
	err := db.tx(ctx, func(t *tx) error {
		if f.Session != "" { // locked: it is not deleted before this commits
			if _, err := t.sessionRow(f.Workspace, f.Session, true); err != nil {
				return err
			}
		}
		if _, err := t.exec(`INSERT INTO data_keys (workspace, id, lineage, wrapped, created_at) VALUES (?, ?, ?, ?, ?)`,
			f.Workspace, c.keyID, string(f.ID), c.wrapped, micros(db.Now())); err != nil {
			return err
		}
		if err := t.insertFile(&f, c.key, origin); err != nil {
			return err
		}
		return db.written(ctx, t, f)
	})
	switch {
	case db.isUnique(err) && origin != "":
		err = ErrDuplicate
	case db.isUnique(err):
		err = fmt.Errorf("%w: %w", ErrConflict, err)
	}
	// Only an error that says so proves that no row names the content.
	c.used = !errors.Is(err, ErrDuplicate) && !errors.Is(err, ErrConflict) && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrRepeated)
	if err != nil {
		return File{}, fmt.Errorf("create file %s: %w", f.ID, err)
	}
	return f, nil
}

// origin is the keyed digest of what an output was made of.
func (db *DB) origin(ctx context.Context, ws WorkspaceID, id SessionID, path, sha string) (string, error) {
	secret, err := db.WorkspaceSecret(ctx, ws)
	if err != nil {
		return "", err
	}
	m := hmac.New(sha256.New, secret)
	m.Write(fields(nil, "output", string(id), path, sha))
	return hex.EncodeToString(m.Sum(nil)), nil
}

// HasOutput says whether these bytes at this path are, or were, a file of the session.
func (db *DB) HasOutput(ctx context.Context, ws WorkspaceID, id SessionID, path, sha string) (bool, error) {
	origin, err := db.origin(ctx, ws, id, path, sha)
	if err != nil {
		return false, fmt.Errorf("output of session %s: %w", id, err)
	}
	var n int64
	if err := db.peek(ctx).queryRow(`SELECT count(*) FROM files WHERE workspace = ? AND origin = ? AND origin <> ''`, ws, origin).Scan(&n); err != nil {
		return false, fmt.Errorf("output of session %s: %w", id, db.mapErr(err))
	}
	return n > 0, nil
}

// contents runs a write that makes or drops the use of a content. The lock on its
// data key is what orders such writes, so on PostgreSQL each statement must see
// what was committed before it: the count behind the lock sees what the lock
// waited for. In a transaction with one view of the database it would miss a copy
// that a session was created with meanwhile, and take its content.
func (db *DB) contents(ctx context.Context, f func(*tx) error) error {
	return db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "tx"}, f)
}

// FileCopy is a copy of a file for a session: a new id for the same content.
type FileCopy struct {
	From FileID
	To   FileID
}

// CopyFile copies a file into a session, which holds it until the copy or the
// session is deleted, also when the original expires. ErrNotFound, ErrExpired.
// It joins no audit row and no idempotency record: it prepares the write that
// names the copy. A crash between the two leaves a copy that goes with its session.
func (db *DB) CopyFile(ctx context.Context, ws WorkspaceID, id SessionID, c FileCopy) (File, error) {
	var out File
	err := db.contents(ctx, func(t *tx) error {
		if _, err := t.sessionRow(ws, id, true); err != nil {
			return err
		}
		var err error
		out, err = t.copyFile(ws, id, c)
		return err
	})
	if err != nil {
		return File{}, fmt.Errorf("copy file %s: %w", c.From, err)
	}
	return out, nil
}

func (t *tx) copyFile(ws WorkspaceID, id SessionID, c FileCopy) (File, error) {
	f, err := t.file(ws, c.From)
	if err != nil {
		return f, err
	}
	// Held until we commit, so that a deletion meanwhile does not take the
	// content that the copy names.
	var kept string
	if err := t.queryRow(`SELECT id FROM data_keys WHERE workspace = ? AND id = ?`+t.db.lockRow(), ws, f.keyID).Scan(&kept); err != nil {
		return f, notFound(t.db.mapErr(err))
	}
	key, err := t.dataKey(ws, f.keyID)
	if err != nil {
		return f, err
	}
	f.ID, f.Session, f.Downloadable, f.CreatedAt, f.ExpiresAt, f.Path = c.To, id, false, t.db.Now(), time.Time{}, ""
	return f, t.insertFile(&f, key, "")
}

// DropCopy removes a copy that no resource came to name. It joins no audit row.
func (db *DB) DropCopy(ctx context.Context, ws WorkspaceID, id FileID) error {
	var g gone
	err := db.contents(ctx, func(t *tx) error {
		g = gone{ws: ws}
		f, err := t.file(ws, id)
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		return t.dropFile(&g, f, true)
	})
	if err != nil {
		return fmt.Errorf("drop copy %s: %w", id, err)
	}
	db.dropContents(ctx, g)
	return nil
}

// File returns a file. ErrNotFound, ErrExpired.
func (db *DB) File(ctx context.Context, ws WorkspaceID, id FileID) (File, error) {
	f, err := db.peek(ctx).file(ws, id)
	if err != nil {
		return File{}, fmt.Errorf("file %s: %w", id, err)
	}
	return f, nil
}

// file reads a file. One that is deleted between the reads of its row and of its
// key is gone, not damaged.
func (t *tx) file(ws WorkspaceID, id FileID) (File, error) {
	f, meta, err := t.fileRow(ws, id)
	if err != nil {
		return f, err
	}
	if err = t.openMeta(&f, meta); errors.Is(err, ErrDamaged) {
		if _, _, now := t.fileRow(ws, id); now != nil {
			err = now
		}
	}
	return f, err
}

// fileRow reads the row of a file that is there; its meta is still sealed.
func (t *tx) fileRow(ws WorkspaceID, id FileID) (File, []byte, error) {
	var gone int64
	f, meta, err := scanFile(with(t.queryRow(`SELECT `+fileColumns+`, gone_at FROM files WHERE workspace = ? AND id = ?`, ws, id), &gone))
	switch {
	case err != nil:
		err = notFound(t.db.mapErr(err))
	case !f.ExpiresAt.IsZero() && !t.db.Now().Before(f.ExpiresAt):
		err = ErrExpired
	case gone != 0:
		err = ErrNotFound
	}
	return f, meta, err
}

// with scans more columns behind those that a scan function knows.
func with(r scanner, extra ...any) scanner { return extended{r, extra} }

type extended struct {
	scanner
	extra []any
}

func (e extended) Scan(into ...any) error { return e.scanner.Scan(append(into, e.extra...)...) }

// OpenFile opens the content of a file that File or Files returned. It is
// streamed; what is read was sealed there. ErrDamaged, ErrNotFound.
func (db *DB) OpenFile(ctx context.Context, f File) (io.ReadCloser, error) {
	blobs, ok := db.cfg.Blobs.(FileBlobs)
	if !ok {
		return nil, fmt.Errorf("open file %s: the blob store does not stream", f.ID)
	}
	r, err := db.openContent(ctx, blobs, f)
	if errors.Is(err, ErrDamaged) {
		if _, _, now := db.peek(ctx).fileRow(f.Workspace, f.ID); now != nil {
			err = now // deleted since the caller read it
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open file %s: %w", f.ID, err)
	}
	return r, nil
}

func (db *DB) openContent(ctx context.Context, blobs FileBlobs, f File) (io.ReadCloser, error) {
	key, err := db.peek(ctx).dataKey(f.Workspace, f.keyID)
	if err != nil {
		return nil, err
	}
	r, err := blobs.Stream(ctx, contentSpace(f.Workspace), f.blob)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return newOpening(key, f.Workspace, r), nil
}

// FileFilter selects files, newest first.
type FileFilter struct {
	Session SessionID // empty = all
	IDs     []FileID  // nil = all
	AfterAt time.Time // position: of the last row of the former page
	AfterID FileID
	Asc     bool // oldest first
	Limit   int  // 0 = all
}

// Files lists the files that have neither expired nor been deleted.
func (db *DB) Files(ctx context.Context, ws WorkspaceID, f FileFilter) ([]File, error) {
	w := where{}
	w.add("workspace = ? AND gone_at = 0 AND (expires_at = 0 OR expires_at > ?)", ws, micros(db.Now()))
	w.equal("session", string(f.Session))
	if f.IDs != nil {
		w.add("id IN ("+marks(len(f.IDs))+")", anys(f.IDs)...)
	}
	order, op := "DESC", "<"
	if f.Asc {
		order, op = "ASC", ">"
	}
	if !f.AfterAt.IsZero() {
		w.add("(created_at "+op+" ? OR created_at = ? AND id "+op+" ?)", micros(f.AfterAt), micros(f.AfterAt), f.AfterID)
	}
	var out []File
	err := db.read(ctx, func(t *tx) error {
		out = nil
		var metas [][]byte
		err := t.each(`SELECT `+fileColumns+` FROM files`+w.sql()+` ORDER BY created_at `+order+`, id `+order+w.limit(f.Limit), w.args, func(r *sql.Rows) error {
			x, meta, err := scanFile(r)
			out, metas = append(out, x), append(metas, meta)
			return err
		})
		for i := range out {
			if err == nil {
				err = t.openMeta(&out[i], metas[i])
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list files: %w", err)
	}
	return out, nil
}

// gone are contents that no row names any more.
type gone struct {
	ws    WorkspaceID
	keys  []KeyID
	blobs []string
}

// DeleteFile erases a file. Copies of it in sessions stay. ErrNotFound.
func (db *DB) DeleteFile(ctx context.Context, ws WorkspaceID, id FileID) error {
	var g gone
	err := db.contents(ctx, func(t *tx) error {
		g = gone{ws: ws}
		f, err := t.file(ws, id)
		if err != nil {
			return err
		}
		if err := t.dropFile(&g, f, true); err != nil {
			return err
		}
		return db.written(ctx, t, f)
	})
	if err != nil {
		return fmt.Errorf("delete file %s: %w", id, err)
	}
	db.dropContents(ctx, g)
	return nil
}

// dropFile erases one file and the content when nothing else names it. Its row
// stays for a while without meta; forget makes it look as if it had never expired.
func (t *tx) dropFile(g *gone, f File, forget bool) error {
	expires := micros(f.ExpiresAt)
	if forget {
		expires = 0
	}
	if _, err := t.exec(`UPDATE files SET gone_at = ?, expires_at = ?, meta = ?, blob = '', key_id = '' WHERE workspace = ? AND id = ?`,
		micros(t.db.Now()), expires, []byte{}, f.Workspace, f.ID); err != nil {
		return err
	}
	return t.dropContent(g, f)
}

func (t *tx) dropContent(g *gone, f File) error {
	// The lock makes a copy that is being made wait for us, or us for it.
	var kept string
	err := t.queryRow(`SELECT id FROM data_keys WHERE workspace = ? AND id = ?`+t.db.lockRow(), f.Workspace, f.keyID).Scan(&kept)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return t.db.mapErr(err)
	}
	var n int64
	if err := t.queryRow(`SELECT count(*) FROM files WHERE workspace = ? AND key_id = ?`, f.Workspace, f.keyID).Scan(&n); err != nil || n > 0 {
		return err
	}
	if _, err := t.exec(`DELETE FROM data_keys WHERE workspace = ? AND id = ?`, f.Workspace, f.keyID); err != nil {
		return err
	}
	g.keys, g.blobs = append(g.keys, f.keyID), append(g.blobs, f.blob)
	return nil
}

// dropContents removes contents whose keys are destroyed. A crash before it
// leaves blobs that nobody can open: SweepContents removes them.
func (db *DB) dropContents(ctx context.Context, g gone) {
	for i, id := range g.keys {
		db.keys.drop(id)
		if err := db.cfg.Blobs.Delete(context.WithoutCancel(ctx), contentSpace(g.ws), g.blobs[i]); err != nil {
			db.log.Warn("left a blob of an erased file", "err", err)
		}
	}
}

// dropSession removes the files and resource secrets of a session that is being
// deleted.
func (t *tx) dropSession(g *gone, ws WorkspaceID, id SessionID) error {
	g.ws = ws
	var all []File
	if err := t.each(`SELECT `+fileColumns+` FROM files WHERE workspace = ? AND session = ?`, []any{ws, id}, func(r *sql.Rows) error {
		f, _, err := scanFile(r)
		all = append(all, f)
		return err
	}); err != nil {
		return err
	}
	if _, err := t.exec(`DELETE FROM files WHERE workspace = ? AND session = ?`, ws, id); err != nil {
		return err
	}
	for _, f := range all {
		if f.blob == "" {
			continue
		}
		if err := t.dropContent(g, f); err != nil {
			return err
		}
	}
	_, err := t.exec(`DELETE FROM resource_secrets WHERE workspace = ? AND session = ?`, ws, id)
	return err
}

// SweepFiles erases files whose time is over, and forgets those that are gone
// for long. It may run in several processes at once.
func (db *DB) SweepFiles(ctx context.Context) (erased int, err error) {
	for {
		n, err := db.sweepFiles(ctx)
		erased += n
		if err != nil || n < sweepBatch {
			return erased, err
		}
	}
}

func (db *DB) sweepFiles(ctx context.Context) (n int, err error) {
	now := db.Now()
	var due []File
	err = db.peek(ctx).each(`SELECT `+fileColumns+` FROM files WHERE expires_at > 0 AND expires_at <= ? AND gone_at = 0 ORDER BY expires_at LIMIT ?`,
		[]any{micros(now), int64(sweepBatch)}, func(r *sql.Rows) error {
			f, _, err := scanFile(r)
			due = append(due, f)
			return err
		})
	for _, f := range due {
		if err != nil {
			break
		}
		g := gone{ws: f.Workspace}
		err = db.contents(ctx, func(t *tx) error {
			g = gone{ws: f.Workspace}
			var left int64 // a sweep of another process, or a deletion, may have been first
			if err := t.queryRow(`SELECT count(*) FROM files WHERE workspace = ? AND id = ? AND gone_at = 0`, f.Workspace, f.ID).Scan(&left); err != nil || left == 0 {
				return err
			}
			return t.dropFile(&g, f, false)
		})
		if err == nil {
			db.dropContents(ctx, g)
			n++
		}
	}
	if err == nil && len(due) < sweepBatch {
		err = db.tx(ctx, func(t *tx) error {
			_, err := t.exec(`DELETE FROM files WHERE gone_at > 0 AND gone_at < ? AND origin = ''`, micros(now.Add(-goneKept)))
			return err
		})
	}
	if err != nil {
		return n, fmt.Errorf("sweep files: %w", err)
	}
	return n, nil
}

// sweeper sweeps files and contents until ctx ends.
func (db *DB) sweeper(ctx context.Context) error {
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	var contents time.Time // when they were last swept
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		if n, err := db.SweepFiles(ctx); err != nil && ctx.Err() == nil {
			db.log.Warn("cannot sweep files", "err", err)
		} else if n > 0 {
			db.log.Info("erased expired files", "files", n)
		}
		if time.Since(contents) < sweepContentsEvery {
			continue
		}
		contents = time.Now()
		if n, err := db.SweepContents(ctx); err != nil && ctx.Err() == nil {
			db.log.Warn("cannot sweep the blob store", "err", err)
		} else if n > 0 {
			db.log.Info("removed what crashes left in the blob store", "blobs", n)
		}
	}
}
