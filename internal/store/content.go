package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"time"
)

// FileBlobs is what Config.Blobs must also be where files are kept: contents
// are streamed, never held whole. *blob.Folder is.
type FileBlobs interface {
	PutReader(ctx context.Context, ws string, r io.Reader) (name string, size int64, err error)
	Stream(ctx context.Context, ws, name string) (io.ReadCloser, error)
}

// blobSweep is what Config.Blobs may also be: what a crash left in it is removed
// then. *blob.Folder is.
type blobSweep interface {
	// Before lists the blobs that were last put before a time.
	Before(ctx context.Context, ws string, before time.Time) (names []string, err error)
	// Sweep removes what never became a blob and was last written before a time.
	Sweep(ctx context.Context, before time.Time) (removed int, err error)
}

// contentSpace is where the contents of a workspace's files lie in the blob
// store: apart, so that what no row of files names there is of no use to anybody.
// No workspace has such an id.
func contentSpace(ws WorkspaceID) string { return string(ws) + "-files" }

// contentChunk is how much of a content is sealed in one piece: large enough
// that nonce and tag do not count, small enough that a hundred at once fit.
const contentChunk = 256 << 10

// Content is sealed bytes in the blob store that no row names yet.
type Content struct {
	Size   int64
	SHA256 string // of the plain bytes, hex

	ws      WorkspaceID
	blob    string
	keyID   KeyID
	key     *dataKey
	wrapped []byte
	used    bool // a file names it
}

// PutContent seals all of r under a key of its own into the blob store, and is
// durable when it returns. The caller bounds r and makes a file of it, or drops
// it. A crash before that leaves a blob that no row names and whose key is gone:
// SweepContents removes it.
func (db *DB) PutContent(ctx context.Context, ws WorkspaceID, r io.Reader) (*Content, error) {
	blobs, ok := db.cfg.Blobs.(FileBlobs)
	if !ok {
		return nil, errors.New("put content: the blob store does not stream")
	}
	if db.cfg.ReadOnly {
		return nil, errReadOnly
	}
	c := &Content{ws: ws, keyID: KeyID(NewID("dkey_", db.Now()))}
	var err error
	if c.key, c.wrapped, err = db.keys.mint(c.keyID); err != nil {
		return nil, fmt.Errorf("put content: %w", err)
	}
	s := &sealing{key: c.key, ws: ws, r: r, digest: sha256.New()}
	if c.blob, _, err = blobs.PutReader(ctx, contentSpace(ws), s); err != nil {
		return nil, fmt.Errorf("put content: %w", err)
	}
	c.Size, c.SHA256 = s.size, hex.EncodeToString(s.digest.Sum(nil))
	return c, nil
}

// DropContent removes a content of which no file was made; one that a file
// names stays.
func (db *DB) DropContent(ctx context.Context, c *Content) {
	if c == nil || c.used {
		return
	}
	db.keys.drop(c.keyID)
	if err := db.cfg.Blobs.Delete(ctx, contentSpace(c.ws), c.blob); err != nil {
		db.log.Warn("left a blob of an unused content", "err", err)
	}
}

// Times of what crashes left in the blob store.
const (
	// contentKept is the age at which a content that no row names is removed. One
	// that is still to get its row is minutes old.
	contentKept = 24 * time.Hour
	// halfKept is the age at which a blob that was never finished is removed. One
	// that is being written was written to a minute ago.
	halfKept = time.Hour
	// sweepContentsEvery is the time between two looks for them.
	sweepContentsEvery = time.Hour
)

// SweepContents removes what crashes left in the blob store: half-written blobs,
// and contents that no row names, be it that none came to or that the last one
// went. It may run in several processes at once.
func (db *DB) SweepContents(ctx context.Context) (removed int, err error) {
	blobs, ok := db.cfg.Blobs.(blobSweep)
	if !ok {
		return 0, nil
	}
	removed, err = blobs.Sweep(ctx, db.Now().Add(-halfKept))
	if err != nil {
		return removed, fmt.Errorf("sweep contents: %w", err)
	}
	var all []WorkspaceID
	err = db.peek(ctx).each(`SELECT id FROM workspaces`, nil, func(r *sql.Rows) error {
		var ws WorkspaceID
		err := r.Scan(&ws)
		all = append(all, ws)
		return err
	})
	for _, ws := range all {
		if err != nil {
			break
		}
		var n int
		n, err = db.sweepContents(ctx, blobs, ws)
		removed += n
	}
	if err != nil {
		return removed, fmt.Errorf("sweep contents: %w", err)
	}
	return removed, nil
}

// sweepContents lists the blobs before the rows: a row that came in between
// names a content that is too young.
func (db *DB) sweepContents(ctx context.Context, blobs blobSweep, ws WorkspaceID) (removed int, err error) {
	old, err := blobs.Before(ctx, contentSpace(ws), db.Now().Add(-contentKept))
	if err != nil || len(old) == 0 {
		return 0, err
	}
	named := map[string]bool{}
	if err := db.peek(ctx).each(`SELECT blob FROM files WHERE workspace = ? AND blob <> ''`, []any{ws}, func(r *sql.Rows) error {
		var name string
		err := r.Scan(&name)
		named[name] = true
		return err
	}); err != nil {
		return 0, err
	}
	for _, name := range old {
		if named[name] {
			continue
		}
		if err := db.cfg.Blobs.Delete(ctx, contentSpace(ws), name); err != nil {
			return removed, err
		}
		removed++
	}
	return removed, nil
}

// aadOfChunk binds a chunk to its content, place and being the last, so that
// chunks can neither be moved, repeated, nor cut off.
func aadOfChunk(ws WorkspaceID, id KeyID, n int64, last bool) []byte {
	return number(number(fields(make([]byte, 0, 96), "content", string(ws), string(id)), n), b2i(last))
}

// sealing reads a content as it is stored: chunks of nonce, text and tag, each
// of contentChunk bytes of text but the last, which may be empty.
type sealing struct {
	key    *dataKey
	ws     WorkspaceID
	r      io.Reader
	digest hash.Hash
	size   int64

	n    int64 // chunks so far
	next []byte
	have bool // next holds a chunk that is not sealed yet
	out  bytes.Buffer
	done bool
}

func (s *sealing) Read(p []byte) (int, error) {
	for s.out.Len() == 0 {
		if s.done {
			return 0, io.EOF
		}
		if err := s.chunk(); err != nil {
			return 0, err
		}
	}
	return s.out.Read(p)
}

// chunk seals the chunk in hand once it is known whether another one follows.
func (s *sealing) chunk() error {
	next, err := fill(s.r, contentChunk)
	if err != nil && err != io.EOF {
		return err
	}
	s.digest.Write(next)
	s.size += int64(len(next))
	s.done = err == io.EOF
	if s.have && s.done && len(next) == 0 {
		s.seal(s.next, true)
		return nil
	}
	if s.have {
		s.seal(s.next, false)
	}
	s.next, s.have = next, true
	if s.done {
		s.seal(s.next, true)
	}
	return nil
}

// fill reads size bytes, fewer with io.EOF at the end. io.ReadFull does not tell
// the end from a reader that was itself cut short.
func fill(r io.Reader, size int) ([]byte, error) {
	buf := make([]byte, size)
	for n := 0; ; {
		m, err := r.Read(buf[n:])
		n += m
		if err != nil || n == size {
			if n == size && err == io.EOF {
				err = nil // it will say so again
			}
			return buf[:n], err
		}
	}
}

func (s *sealing) seal(plain []byte, last bool) {
	s.out.Write(s.key.seal(plain, aadOfChunk(s.ws, s.key.id, s.n, last)))
	s.n++
}

// opening reads the plain bytes of a content: nothing is handed on that was not
// sealed there. ErrDamaged.
type opening struct {
	key  *dataKey
	ws   WorkspaceID
	blob io.ReadCloser
	n    int64
	left []byte // of the open chunk
	next []byte // the sealed chunk that follows, nil at the end
	done bool
	err  error
}

func newOpening(key *dataKey, ws WorkspaceID, blob io.ReadCloser) *opening {
	o := &opening{key: key, ws: ws, blob: blob}
	o.next, o.err = o.read()
	return o
}

// read takes one sealed chunk; nil when there is none.
func (o *opening) read() ([]byte, error) {
	buf, err := fill(o.blob, contentChunk+o.key.aead.NonceSize()+o.key.aead.Overhead())
	switch {
	case err != nil && err != io.EOF:
		return nil, fmt.Errorf("%w: read a content: %w", ErrDamaged, err)
	case len(buf) == 0:
		return nil, nil
	}
	return buf, nil
}

func (o *opening) Read(p []byte) (int, error) {
	for len(o.left) == 0 {
		if o.err != nil {
			return 0, o.err
		}
		if o.done {
			return 0, io.EOF
		}
		o.advance()
	}
	n := copy(p, o.left)
	o.left = o.left[n:]
	return n, nil
}

func (o *opening) advance() {
	if o.next == nil {
		o.err = fmt.Errorf("%w: a content ends too early", ErrDamaged)
		return
	}
	sealed := o.next
	if o.next, o.err = o.read(); o.err != nil {
		return
	}
	o.done = o.next == nil
	o.left, o.err = o.key.open(sealed, aadOfChunk(o.ws, o.key.id, o.n, o.done))
	o.n++
}

func (o *opening) Close() error { return o.blob.Close() }
