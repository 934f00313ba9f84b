package sandbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/planaria/planaria/internal/blob"
)

// binaries keeps what sandboxes run: copies under their digests, in the folder
// and in the blob store. Nothing of it happens before the first start or
// restore, for every server opens a Runtime and many never start a sandbox.
//
// A copy is a copy (a clone of the blocks where the file system can), never a
// hard link: a program that is installed by writing over the old one would
// change it under the sandboxes and snapshots that need it.
type binaries struct {
	mu     sync.Mutex
	digest string              // of Config.Binary, once it is kept
	store  map[string]*storing // by digest: on the way into the blob store, or in it
}

// storing is one upload. err is set when done is closed.
type storing struct {
	done chan struct{}
	err  error
}

// binaryIndex is runtimes/index.json: what spares the next process from reading
// all of it. Losing it costs that time.
type binaryIndex struct {
	// Kept tells the digest of what was kept of a file that has not changed since.
	Kept map[string]keptFile `json:"kept"` // by path, and whether the file carries it
	// Stored are the binaries that this folder has put into its blob store.
	Stored map[string]bool `json:"stored"`
}

type keptFile struct {
	fileIdentity
	Digest string `json:"digest"`
}

// fileIdentity changes when a file's bytes do, for all that a stat can tell.
type fileIdentity struct {
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
	Size   int64  `json:"size"`
	MTime  int64  `json:"mtime"` // ns
	CTime  int64  `json:"ctime"` // ns
}

func (r *Runtime) indexPath() string { return filepath.Join(r.cfg.Dir, "runtimes", "index.json") }

// index reads the index; one that cannot be read is empty.
func (r *Runtime) index() binaryIndex {
	var x binaryIndex
	if b, err := os.ReadFile(r.indexPath()); err != nil || json.Unmarshal(b, &x) != nil {
		x = binaryIndex{}
	}
	if x.Kept == nil {
		x.Kept = map[string]keptFile{}
	}
	if x.Stored == nil {
		x.Stored = map[string]bool{}
	}
	return x
}

// note changes the index. r.bin.mu is held.
func (r *Runtime) note(change func(*binaryIndex)) error {
	x := r.index()
	change(&x)
	b, err := json.Marshal(x)
	if err != nil {
		return err
	}
	return writeDurable(r.indexPath(), b)
}

// Binary is the digest of the binary that new sandboxes run. The first call
// keeps it in the folder, which takes as long as copying it; its way into the
// blob store goes on in the background, and every snapshot waits for that.
func (r *Runtime) Binary(ctx context.Context) (string, error) {
	r.bin.mu.Lock()
	defer r.bin.mu.Unlock()
	if r.bin.digest != "" {
		return r.bin.digest, nil
	}
	digest, err := r.keepBinary(ctx)
	if err != nil {
		return "", fmt.Errorf("keep the runtime: %w", err)
	}
	r.bin.digest = digest
	r.storeBinary(digest)
	return digest, nil
}

// binaryKey names in the index what this process runs in sandboxes.
func (r *Runtime) binaryKey() string {
	if r.cfg.Program != "" {
		return r.cfg.Binary + " carries"
	}
	return r.cfg.Binary
}

// keepBinary copies the binary, or the program that it carries, into the folder
// unless that lies there, and returns its digest. r.bin.mu is held.
func (r *Runtime) keepBinary(ctx context.Context) (string, error) {
	f, err := os.Open(r.cfg.Binary)
	if err != nil {
		return "", err
	}
	defer f.Close()
	before, err := identify(f)
	if err != nil {
		return "", err
	}
	key := r.binaryKey()
	if k, ok := r.index().Kept[key]; ok && k.fileIdentity == before {
		if info, err := os.Stat(r.binaryPath(k.Digest)); err == nil && info.Size() == k.Size {
			return k.Digest, nil
		}
	}
	var content io.Reader = f
	if r.cfg.Program != "" {
		content = strings.NewReader(r.cfg.Program)
	}
	digest, err := r.installBinary(ctx, "", content)
	if err != nil {
		return "", err
	}
	// What was hashed is the copy, so it is right in any case; it is remembered
	// under the file only if that has not changed meanwhile.
	if after, err := identify(f); err == nil && after == before {
		err = r.note(func(x *binaryIndex) { x.Kept[key] = keptFile{before, digest} })
		if err != nil {
			return "", err
		}
	}
	return digest, nil
}

func (r *Runtime) binaryDir(digest string) string {
	return filepath.Join(r.cfg.Dir, "runtimes", digest)
}

func (r *Runtime) binaryPath(digest string) string {
	return filepath.Join(r.binaryDir(digest), agentName)
}

// installBinary writes a binary's folder and returns the digest of what was
// written, which must be want where that is given. A crash leaves a temporary
// folder, which the next Open removes, or the whole one.
func (r *Runtime) installBinary(ctx context.Context, want string, content io.Reader) (string, error) {
	temp, err := os.MkdirTemp(filepath.Join(r.cfg.Dir, "runtimes"), tempPrefix)
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temp)
	f, err := os.OpenFile(filepath.Join(temp, agentName), os.O_CREATE|os.O_RDWR, 0o755)
	if err != nil {
		return "", err
	}
	digest, err := copyBinary(ctx, f, content)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return "", err
	}
	if want != "" && digest != want {
		return "", fmt.Errorf("binary %s has digest %s: %w", want, digest, ErrDamaged)
	}
	if err := os.Chmod(temp, 0o755); err != nil {
		return "", err
	}
	err = os.Rename(temp, r.binaryDir(digest))
	if errors.Is(err, fs.ErrExist) {
		// One is there, perhaps cut short by a full disk of before: each
		// sandbox that runs it has it open, so it can be replaced.
		err = os.Rename(filepath.Join(temp, agentName), r.binaryPath(digest))
	}
	if err != nil {
		return "", err
	}
	return digest, syncDir(filepath.Join(r.cfg.Dir, "runtimes"))
}

// copyBinary fills an empty file and returns the digest of what it holds then.
func copyBinary(ctx context.Context, to *os.File, from io.Reader) (string, error) {
	h := sha256.New()
	buf := make([]byte, 256<<10)
	if f, ok := from.(*os.File); ok && cloneFile(to, f) {
		if _, err := io.CopyBuffer(struct{ io.Writer }{h}, readerUntil{ctx, to}, buf); err != nil {
			return "", err
		}
		return hex.EncodeToString(h.Sum(nil)), nil
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(to, h)}, readerUntil{ctx, from}, buf); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// readerUntil reads until the context ends.
type readerUntil struct {
	ctx context.Context
	r   io.Reader
}

func (r readerUntil) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.r.Read(p)
}

// needBinary makes sure that a binary is here, from the blob store if need be.
func (r *Runtime) needBinary(ctx context.Context, digest string) error {
	if b, err := hex.DecodeString(digest); err != nil || len(b) != sha256.Size {
		return fmt.Errorf("runtime %.80q: %w", digest, ErrRuntime)
	}
	if _, err := os.Stat(r.binaryPath(digest)); err == nil {
		return nil
	}
	// A snapshot of this folder's own first binary, before any start.
	if own, err := r.Binary(ctx); err == nil && own == digest {
		return nil
	}
	if r.cfg.Blobs == nil {
		return fmt.Errorf("runtime %s: %w", digest, ErrRuntime)
	}
	from, err := r.openBlob(ctx, digest)
	if err != nil {
		return fmt.Errorf("runtime %s: %w: %w", digest, ErrRuntime, err)
	}
	defer from.Close()
	r.bin.mu.Lock()
	defer r.bin.mu.Unlock()
	if _, err := r.installBinary(ctx, digest, from); err != nil {
		return fmt.Errorf("runtime %s: %w", digest, err)
	}
	return r.note(func(x *binaryIndex) { x.Stored[digest] = true })
}

// streams is what a blob store may offer besides Blobs: a blob that is not held
// in memory as a whole. *blob.Folder does.
type streams interface {
	Open(ctx context.Context, workspace, name string) (*blob.Reader, error)
}

func (r *Runtime) openBlob(ctx context.Context, digest string) (io.ReadCloser, error) {
	if o, ok := r.cfg.Blobs.(streams); ok {
		return o.Open(ctx, runtimeSpace, digest)
	}
	b, err := r.cfg.Blobs.Get(ctx, runtimeSpace, digest)
	if err != nil {
		return nil, err
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

// storeBinary begins to put a kept binary into the blob store, unless that was
// done. r.bin.mu is held.
func (r *Runtime) storeBinary(digest string) *storing {
	if s := r.bin.store[digest]; s != nil {
		return s
	}
	s := &storing{done: make(chan struct{})}
	if r.bin.store == nil {
		r.bin.store = map[string]*storing{}
	}
	r.bin.store[digest] = s
	switch {
	case r.cfg.Blobs == nil:
		close(s.done)
	case !r.add():
		s.err = errClosed
		close(s.done)
	default:
		go func() {
			defer r.wait.Done()
			defer close(s.done)
			s.err = r.putBinary(r.ctx, digest)
		}()
	}
	return s
}

// putBinary puts a kept binary into the blob store. It is there on return, and
// the index says so; a crash in between costs a second upload.
func (r *Runtime) putBinary(ctx context.Context, digest string) error {
	f, err := os.Open(r.binaryPath(digest))
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if o, ok := r.cfg.Blobs.(streams); ok && r.index().Stored[digest] {
		if b, err := o.Open(ctx, runtimeSpace, digest); err == nil {
			size := b.Size()
			_ = b.Close()
			if size == info.Size() {
				return nil
			}
		}
	}
	name, _, err := r.cfg.Blobs.PutReader(ctx, runtimeSpace, f)
	if err != nil {
		return err
	}
	if name != digest {
		return fmt.Errorf("kept binary %s has digest %s: %w", digest, name, ErrDamaged)
	}
	r.bin.mu.Lock()
	defer r.bin.mu.Unlock()
	return r.note(func(x *binaryIndex) { x.Stored[digest] = true })
}

// storedBinary returns when the blob store has a binary. An upload that failed
// is tried once more.
func (r *Runtime) storedBinary(ctx context.Context, digest string) error {
	for attempt := 0; ; attempt++ {
		r.bin.mu.Lock()
		s := r.storeBinary(digest)
		r.bin.mu.Unlock()
		select {
		case <-s.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if s.err == nil {
			return nil
		}
		r.bin.mu.Lock()
		if r.bin.store[digest] == s {
			delete(r.bin.store, digest)
		}
		r.bin.mu.Unlock()
		if attempt > 0 {
			return fmt.Errorf("store the runtime: %w", s.err)
		}
	}
}
