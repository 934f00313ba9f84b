package sandbox

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

const manifestFile = "manifest.json"

// Manifest describes a verified image. Its ProofKey is what the restored
// agent has to know; it is a secret of the sandbox, so a manifest is stored as
// carefully as the image.
type Manifest struct {
	Version    int       `json:"version"`
	ID         string    `json:"id"`
	Workspace  string    `json:"workspace"`
	Sandbox    string    `json:"sandbox"`    // id of the one it was taken of
	Generation uint64    `json:"generation"` // of the same
	Fence      uint64    `json:"fence"`
	At         time.Time `json:"at"`
	Parent     string    `json:"parent,omitzero"`
	Runtime    string    `json:"runtime"` // digest of the binary
	Platform   string    `json:"platform"`
	Root       rootRef   `json:"root"`
	Limits     Limits    `json:"limits"`
	CPU        string    `json:"cpu"` // digest of the processor's features
	// CPUFeatures that programs inside may rely on: where it is restored they
	// must all be there.
	CPUFeatures []string        `json:"cpu_features,omitempty"`
	Files       []ImageFile     `json:"files"`
	Running     []string        `json:"running,omitempty"` // calls without result at that moment
	Kept        []string        `json:"kept,omitempty"`    // with a result that was not acknowledged
	ProofKey    []byte          `json:"proof_key"`
	Took        SnapshotTimings `json:"took"`
}

// ImageFile is one file of an image.
type ImageFile struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// SnapshotTimings are milliseconds.
type SnapshotTimings struct {
	Checkpoint int64 `json:"checkpoint"` // the sandbox stands still for at most this long
	Sync       int64 `json:"sync"`
	Verify     int64 `json:"verify"`
}

// Size of the image in bytes.
func (m *Manifest) Size() (n int64) {
	for _, f := range m.Files {
		n += f.Size
	}
	return n
}

var snapshotName = regexp.MustCompile(`^snap-[0-9a-f]{32}$`)

func (r *Runtime) snapshotDir(id string) string {
	return filepath.Join(r.cfg.Dir, "snapshots", id)
}

// Snapshot saves the whole sandbox, which goes on running: memory, processes,
// files. On return the image is synced, read back and proved. One at a time per
// sandbox; a second waits.
func (s *Sandbox) Snapshot(ctx context.Context) (*Manifest, error) {
	ctx, end, err := s.r.begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("snapshot sandbox %s: %w", s.ID(), err)
	}
	defer end()
	s.snapshotting.Lock()
	defer s.snapshotting.Unlock()
	m, err := s.snapshot(ctx)
	if err != nil {
		return nil, fmt.Errorf("snapshot sandbox %s: %w", s.ID(), err)
	}
	return m, nil
}

func (s *Sandbox) snapshot(ctx context.Context) (m *Manifest, err error) {
	if s.paused.Load() {
		return nil, errors.New("it is paused, and its agent cannot answer")
	}
	st := s.snapshotState()
	m = &Manifest{
		Version: 1, ID: randomID("snap-"), Workspace: st.Workspace, Sandbox: st.ID, Generation: st.Generation, Fence: st.Fence,
		At: time.Now().UTC().Truncate(time.Microsecond), Parent: st.Parent, Runtime: st.Binary, Platform: "systrap",
		Root: st.Root, Limits: st.Limits, CPU: cpuDigest(), CPUFeatures: st.CPUFeatures, ProofKey: make([]byte, 32),
	}
	_, _ = rand.Read(m.ProofKey)
	id := m.ID
	dir := s.r.snapshotDir(id)
	// A crash before step 4 leaves a folder without manifest, which the next
	// Open removes, and a key in the agent's memory, which the next snapshot
	// replaces.
	defer func() {
		if err != nil {
			m, _ = nil, os.RemoveAll(dir)
		}
	}()
	// 1. The proof is in the sandbox's memory.
	reply, err := s.admin(ctx, wire.Admin{Op: wire.OpPrepare, Snapshot: m.ID, Key: m.ProofKey})
	if err != nil {
		return nil, err
	}
	m.Running, m.Kept = reply.Running, reply.Kept
	defer func() {
		// The original forgets what its copy is known by. One that does not
		// answer now keeps it until the next snapshot; the snapshot is good.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), preparedTime)
		defer cancel()
		if _, perr := s.admin(ctx, wire.Admin{Op: wire.OpPrepared, Snapshot: id}); perr != nil {
			s.r.log.Warn("agent was not told that its snapshot is over", "session", st.ID, "err", perr)
		}
	}()
	if err := s.r.hook("prepared"); err != nil {
		return nil, err
	}
	// 2. The image, in a new folder. leave-running, always: without it a failed
	// checkpoint destroys the sandbox.
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	began := time.Now()
	s.frozen.Store(true)
	err = s.runsc(ctx, "checkpoint", "--leave-running", "--image-path="+dir, st.Container)
	s.frozen.Store(false)
	if err != nil {
		return nil, err
	}
	m.Took.Checkpoint = time.Since(began).Milliseconds()
	if err := s.r.hook("checkpointed"); err != nil {
		return nil, err
	}
	// 3. Its bytes are durable, and proved to be: digests are of what is read
	// back.
	began = time.Now()
	if err := syncTree(dir); err != nil {
		return nil, err
	}
	m.Took.Sync = time.Since(began).Milliseconds()
	began = time.Now()
	if m.Files, err = digestImage(dir); err != nil {
		return nil, err
	}
	m.Took.Verify = time.Since(began).Milliseconds()
	// The binary that can restore it is in the blob store before it is needed.
	if err := s.r.storedBinary(ctx, st.Binary); err != nil {
		return nil, err
	}
	// 4. The manifest: from here on the snapshot exists.
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if err := writeDurable(filepath.Join(dir, manifestFile), b); err != nil {
		return nil, err
	}
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.state.Parent = m.ID
	s.mu.Unlock()
	if err := s.save(); err != nil {
		// The snapshot is good, whatever has become of the sandbox meanwhile; the
		// next process would only name an older parent.
		s.r.log.Warn("cannot save which snapshot is the newest", "session", st.ID, "err", err)
	}
	return m, nil
}

// preparedTime bounds the last word to the agent about a snapshot.
const preparedTime = 10 * time.Second

// Suspend takes a snapshot and kills the sandbox when it is verified. It returns
// when the state can be restored (trial G 99).
func (s *Sandbox) Suspend(ctx context.Context) (*Manifest, error) {
	m, err := s.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.Kill(ctx); err != nil {
		return nil, err
	}
	return m, nil
}

func syncTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := syncDir(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return syncDir(dir)
}

// digestImage reads an image's files and hashes them.
func digestImage(dir string) ([]ImageFile, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []ImageFile
	for _, e := range entries {
		if e.Name() == manifestFile || !e.Type().IsRegular() {
			continue
		}
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		h := sha256.New()
		n, err := io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{f}, make([]byte, 1<<20))
		_ = f.Close()
		if err != nil {
			return nil, err
		}
		out = append(out, ImageFile{e.Name(), n, hex.EncodeToString(h.Sum(nil))})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("image is empty: %w", ErrDamaged)
	}
	return out, nil
}

// ReadSnapshot returns the manifest of a snapshot whose image lies in this
// folder. ErrNotFound.
func (r *Runtime) ReadSnapshot(id string) (*Manifest, error) {
	if !snapshotName.MatchString(id) {
		return nil, fmt.Errorf("read snapshot %.80q: %w", id, ErrNotFound)
	}
	b, err := os.ReadFile(filepath.Join(r.snapshotDir(id), manifestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read snapshot %s: %w", id, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("read snapshot %s: %w", id, err)
	}
	m := new(Manifest)
	if err := json.Unmarshal(b, m); err != nil || m.ID != id {
		return nil, fmt.Errorf("read snapshot %s: manifest: %w", id, ErrDamaged)
	}
	return m, nil
}

// Snapshots lists the ids of the images that lie in this folder, but for those
// of templates.
func (r *Runtime) Snapshots() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(r.cfg.Dir, "snapshots"))
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	templates, err := r.ofTemplates()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if templates[e.Name()] {
			continue
		}
		if _, err := os.Stat(filepath.Join(r.snapshotDir(e.Name()), manifestFile)); err == nil && snapshotName.MatchString(e.Name()) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// DropImage removes a snapshot's image from this folder: it was packed, or a
// fenced entry of the log says that it is deleted. One that is not there is no
// error.
func (r *Runtime) DropImage(id string) error {
	remove, err := r.HideImage(id)
	if err == nil {
		err = remove()
	}
	return err
}

// HideImage does the first, quick half of DropImage: the image is not found any
// more. remove does the other half. What a crash in between leaves is removed by
// the next Open.
func (r *Runtime) HideImage(id string) (remove func() error, err error) {
	if !snapshotName.MatchString(id) {
		return nil, fmt.Errorf("drop image %.80q: %w", id, ErrNotFound)
	}
	dir := r.snapshotDir(randomID("drop-"))
	err = os.Rename(r.snapshotDir(id), dir)
	if errors.Is(err, fs.ErrNotExist) {
		return func() error { return nil }, nil
	}
	if err != nil {
		return nil, fmt.Errorf("drop image %s: %w", id, err)
	}
	return func() error {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("drop image %s: %w", id, err)
		}
		return nil
	}, nil
}

// NewestSnapshot is the snapshot that was taken of the sandbox last, or that it
// was restored from; empty when there is none.
func (s *Sandbox) NewestSnapshot() string { return s.snapshotState().Parent }

// VerifyImage reads an image and compares it with its manifest. ErrDamaged.
func (r *Runtime) VerifyImage(m *Manifest) error {
	return m.verify(r.snapshotDir(m.ID))
}

// verify compares an image in a folder with the manifest.
func (m *Manifest) verify(dir string) error {
	files, err := digestImage(dir)
	if err == nil && !slices.Equal(files, m.Files) {
		err = ErrDamaged
	}
	if err != nil {
		return fmt.Errorf("verify snapshot %s: %w", m.ID, err)
	}
	return nil
}

// hook lets a test fail between two durable steps.
func (r *Runtime) hook(at string) error {
	if r.cfg.fault == nil {
		return nil
	}
	return r.cfg.fault(at)
}
