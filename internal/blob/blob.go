// Package blob keeps immutable files named by the SHA-256 of their bytes:
// large bodies of the log, snapshots, uploads.
//
// The contract, which any other backend has to keep too:
//
//   - Put and PutReader are durable when they return a name. An error means
//     that nothing is promised: the blob may be there or not, and putting it
//     again is always safe.
//   - Get returns exactly the bytes that were put, or an error: ErrNotFound
//     when there are none, ErrDamaged when they do not match their name. It
//     never returns other bytes.
//   - Names are unique within one workspace. Nothing is shared or found across
//     workspaces (design L11): equal bytes of two tenants are two blobs, and
//     the blob of another tenant looks like one that does not exist.
//   - A blob never changes. Putting equal bytes again heals a damaged one.
//   - Deleting what is not there is no error. Nobody else keeps count of uses:
//     who deletes has made sure that nothing refers to the blob any more.
//   - All methods may run concurrently, in several processes on one folder too.
//
// What the bytes mean, whether they are sealed, and who may read them is the
// caller's business.
package blob

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Errors of the package. Callers test with errors.Is.
var (
	// ErrNotFound: the workspace has no such blob.
	ErrNotFound = errors.New("blob not found")
	// ErrDamaged: the stored bytes do not match their name.
	ErrDamaged = errors.New("blob is damaged")
	// ErrName: not a name of a blob, or not a workspace id.
	ErrName = errors.New("not a valid name")
)

// maxWorkspace is the longest workspace id, in bytes; file systems take 255.
const maxWorkspace = 128

// copyBuffer is how much is written between two looks at the context.
const copyBuffer = 256 << 10

// tempPrefix begins the names of files that are not blobs yet. No blob's name
// begins with a dot.
const tempPrefix = ".tmp-"

// Folder keeps blobs in a folder: <workspace>/<name>. Access is confined to it
// by os.Root, so that no symlink and no name leads out.
type Folder struct {
	root  *os.Root
	fault func(step string) error // tests only, see step

	mu    sync.Mutex
	ready map[string]bool // workspaces whose folder is durable
}

// Open opens the folder, and makes it, durably, where it is missing. It starts
// nothing.
func Open(dir string) (*Folder, error) {
	if err := makeDir(dir); err != nil {
		return nil, fmt.Errorf("open blobs: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open blobs: %w", err)
	}
	return &Folder{root: root, ready: map[string]bool{}}, nil
}

// makeDir makes a folder with its parents and syncs the parent of each that it
// made, or a power cut could take the folder with all that was put into it.
func makeDir(dir string) error {
	var parents []string
	for d := filepath.Clean(dir); ; d = filepath.Dir(d) {
		if _, err := os.Lstat(d); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		parents = append(parents, filepath.Dir(d))
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	for _, p := range parents {
		d, err := os.Open(p)
		if err != nil {
			return err
		}
		err = d.Sync()
		if cerr := d.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Close releases the folder. Readers that are open go on.
func (f *Folder) Close() error { return f.root.Close() }

// Put stores data and returns its name.
func (f *Folder) Put(ctx context.Context, ws string, data []byte) (name string, err error) {
	name, _, err = f.PutReader(ctx, ws, bytes.NewReader(data))
	return name, err
}

// PutReader stores all of r and returns its name and size. The caller bounds r.
func (f *Folder) PutReader(ctx context.Context, ws string, r io.Reader) (name string, size int64, err error) {
	if err := checkWorkspace(ws); err != nil {
		return "", 0, fmt.Errorf("put blob: %w", err)
	}
	if err := f.prepare(ws); err != nil {
		return "", 0, fmt.Errorf("put blob: %w", err)
	}

	// 1. The bytes, durable under a temporary name. A crash here leaves a file
	// that Sweep removes.
	temp := ws + "/" + tempPrefix + rand.Text()
	name, size, err = f.writeTemp(ctx, temp, r)
	if err == nil {
		// 2. The name. A rename replaces an equal blob; had that one been
		// damaged, it is healed. It is done even where the name exists, since
		// another process may have renamed and not yet synced. A crash here
		// leaves no name or the whole blob.
		err = f.step("rename", func() error { return f.root.Rename(temp, ws+"/"+name) })
	}
	if err != nil {
		_ = f.root.Remove(temp) // what cannot be removed is swept
		return "", 0, fmt.Errorf("put blob: %w", err)
	}

	// 3. The name is durable.
	if err := f.syncDir(ws); err != nil {
		return "", 0, fmt.Errorf("put blob %s: %w", name, err)
	}
	return name, size, nil
}

func (f *Folder) writeTemp(ctx context.Context, temp string, r io.Reader) (name string, size int64, err error) {
	file, err := f.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", 0, err
	}
	digest := sha256.New()
	err = f.step("write", func() error {
		size, err = io.CopyBuffer(onlyWriter{io.MultiWriter(file, digest)}, ctxReader{ctx, r}, make([]byte, copyBuffer))
		return err
	})
	if err == nil {
		err = f.step("sync", file.Sync)
	}
	if cerr := file.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return "", 0, err
	}
	return hex.EncodeToString(digest.Sum(nil)), size, nil
}

// Get returns the bytes of a blob, verified. ErrNotFound, ErrDamaged.
func (f *Folder) Get(ctx context.Context, ws, name string) ([]byte, error) {
	r, err := f.Open(ctx, ws, name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data := bytes.NewBuffer(make([]byte, 0, r.Size()+bytes.MinRead))
	if _, err := data.ReadFrom(ctxReader{ctx, r}); err != nil {
		return nil, fmt.Errorf("get blob %s: %w", name, err)
	}
	return data.Bytes(), nil
}

// Open opens a blob for reading as a stream. ErrNotFound. The bytes are proved
// only when Read returns io.EOF; a damaged blob ends in ErrDamaged instead.
func (f *Folder) Open(ctx context.Context, ws, name string) (*Reader, error) {
	if err := check(ws, name); err != nil {
		return nil, fmt.Errorf("open blob: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("open blob %s: %w", name, context.Cause(ctx))
	}
	file, err := f.root.Open(ws + "/" + name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open blob %s: %w", name, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("open blob %s: %w", name, err)
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%w: not a regular file", ErrDamaged)
	}
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("open blob %s: %w", name, err)
	}
	return &Reader{file: file, name: name, size: info.Size(), digest: sha256.New()}, nil
}

// Stream is Open for those who state the contract as an interface.
func (f *Folder) Stream(ctx context.Context, ws, name string) (io.ReadCloser, error) {
	r, err := f.Open(ctx, ws, name)
	if err != nil {
		return nil, err // not r: a nil *Reader is no nil interface
	}
	return r, nil
}

// Delete removes a blob; durable on return. One that is not there is no error.
func (f *Folder) Delete(ctx context.Context, ws, name string) error {
	if err := check(ws, name); err != nil {
		return fmt.Errorf("delete blob: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("delete blob %s: %w", name, context.Cause(ctx))
	}
	err := f.step("remove", func() error { return f.root.Remove(ws + "/" + name) })
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete blob %s: %w", name, err)
	}
	// Also when it was gone: an earlier delete may not have been synced.
	if err := f.syncDir(ws); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete blob %s: %w", name, err)
	}
	return nil
}

// Info describes a stored blob. Its bytes are not verified.
type Info struct {
	Name string
	Size int64     // bytes
	At   time.Time // when it was last put
}

// List lists the blobs of a workspace, sorted by name. One that comes or goes
// meanwhile may or may not be listed.
func (f *Folder) List(ctx context.Context, ws string) ([]Info, error) {
	if err := checkWorkspace(ws); err != nil {
		return nil, fmt.Errorf("list blobs: %w", err)
	}
	var out []Info
	err := f.each(ctx, ws, func(info fs.FileInfo) error {
		if checkName(info.Name()) == nil {
			out = append(out, Info{info.Name(), info.Size(), info.ModTime()})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list blobs: %w", err)
	}
	return out, nil
}

// Before lists the names of the workspace's blobs that were last put before a time.
func (f *Folder) Before(ctx context.Context, ws string, before time.Time) ([]string, error) {
	all, err := f.List(ctx, ws)
	var out []string
	for _, b := range all {
		if b.At.Before(before) {
			out = append(out, b.Name)
		}
	}
	return out, err
}

// Sweep removes temporary files that were last written before a time, in all
// workspaces, and returns how many. A Put that takes longer than that loses its
// file and returns an error; give it an hour, or now when no other process uses
// the folder.
func (f *Folder) Sweep(ctx context.Context, before time.Time) (removed int, err error) {
	entries, err := fs.ReadDir(f.root.FS(), ".")
	if err != nil {
		return 0, fmt.Errorf("sweep blobs: %w", err)
	}
	for _, ws := range entries {
		if !ws.IsDir() || checkWorkspace(ws.Name()) != nil {
			continue
		}
		err := f.each(ctx, ws.Name(), func(info fs.FileInfo) error {
			if !strings.HasPrefix(info.Name(), tempPrefix) || !info.ModTime().Before(before) {
				return nil
			}
			if err := f.root.Remove(ws.Name() + "/" + info.Name()); err != nil {
				return err
			}
			removed++
			return nil
		})
		if err != nil {
			return removed, fmt.Errorf("sweep blobs: %w", err)
		}
	}
	return removed, nil
}

// each calls do for every file of a workspace, sorted by name. A workspace
// without folder has none.
func (f *Folder) each(ctx context.Context, ws string, do func(fs.FileInfo) error) error {
	entries, err := fs.ReadDir(f.root.FS(), ws)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted meanwhile
		}
		if err == nil {
			err = do(info)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// prepare makes the workspace's folder durable, once per process.
func (f *Folder) prepare(ws string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ready[ws] {
		return nil
	}
	err := f.step("mkdir", func() error { return f.root.Mkdir(ws, 0o700) })
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	// Also when it existed: its maker may have died before the sync.
	if err := f.syncDir("."); err != nil {
		return err
	}
	f.ready[ws] = true
	return nil
}

func (f *Folder) syncDir(name string) error {
	return f.step("sync folder", func() error {
		d, err := f.root.Open(name)
		if err != nil {
			return err
		}
		defer d.Close()
		return d.Sync()
	})
}

// step does one durable step. A test's fault before it means that it fails and
// is not there, one after it that it fails and is there.
func (f *Folder) step(name string, do func() error) error {
	if f.fault == nil {
		return do()
	}
	if err := f.fault(name + ".before"); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	return f.fault(name + ".after")
}

// Reader reads one blob and proves it at its end. Not safe for concurrent use.
type Reader struct {
	file   *os.File
	name   string
	size   int64
	digest hash.Hash
}

// Size is the stored size in bytes.
func (r *Reader) Size() int64 { return r.size }

// Read implements io.Reader; ErrDamaged stands in place of io.EOF when what was
// read does not match the name.
func (r *Reader) Read(p []byte) (int, error) {
	n, err := r.file.Read(p)
	r.digest.Write(p[:n])
	if err == io.EOF && hex.EncodeToString(r.digest.Sum(nil)) != r.name {
		err = fmt.Errorf("blob %s: %w", r.name, ErrDamaged)
	}
	return n, err
}

// Close closes the file.
func (r *Reader) Close() error { return r.file.Close() }

func check(ws, name string) error {
	if err := checkWorkspace(ws); err != nil {
		return err
	}
	return checkName(name)
}

// checkWorkspace takes lower-case ids only, so that two workspaces stay two
// folders on file systems that ignore case.
func checkWorkspace(ws string) error {
	ok := ws != "" && len(ws) <= maxWorkspace
	for i := range len(ws) {
		c := ws[i]
		ok = ok && ('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '_' || c == '-')
	}
	if !ok {
		return fmt.Errorf("workspace %.40q: %w", ws, ErrName)
	}
	return nil
}

func checkName(name string) error {
	b, err := hex.DecodeString(name)
	if err != nil || len(b) != sha256.Size || strings.ToLower(name) != name {
		return fmt.Errorf("%.80q: %w", name, ErrName)
	}
	return nil
}

// ctxReader stops reading when its context ends.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (r ctxReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.r.Read(p)
}

// onlyWriter hides ReadFrom, so that the copy goes through the buffer and the
// digest sees every byte.
type onlyWriter struct{ io.Writer }
