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
	"strings"
)

// Phases of a sandbox's folder.
const (
	phaseCreated  = "created"  // pooled; nobody's yet
	phaseStarting = "starting" // its agent has not answered yet
	phaseRunning  = "running"
)

// state is what the next process needs to find a sandbox again: state.json in
// its folder. It holds the link's key, so the folder is for its owner only.
type state struct {
	Version    int      `json:"version"`
	Phase      string   `json:"phase"`
	Workspace  string   `json:"workspace"`
	ID         string   `json:"id"`
	Container  string   `json:"container"` // gVisor's name; fixed length, for it looks names up by prefix
	Binary     string   `json:"binary"`    // digest
	PID        int      `json:"pid"`
	PIDStart   string   `json:"pid_start"` // so that a reused pid is not taken for it
	Fence      uint64   `json:"fence"`
	Generation uint64   `json:"generation"`
	Key        []byte   `json:"key"` // of the link
	Hostname   string   `json:"hostname"`
	MachineID  string   `json:"machine_id"`
	Root       rootRef  `json:"root"`
	Limits     Limits   `json:"limits"`
	Env        []string `json:"env,omitempty"`
	Egress     bool     `json:"egress"`
	Parent     string   `json:"parent,omitempty"` // snapshot it was restored from, or that was taken last
}

const stateFile = "state.json"

// save makes the state durable. A crash leaves the old or the new one.
func (s *Sandbox) save() error {
	st := s.snapshotState()
	b, err := json.Marshal(st)
	if err != nil {
		return err
	}
	return writeDurable(filepath.Join(s.dir, stateFile), b)
}

// writeDurable replaces a file: temporary name, write, sync, rename, sync of
// the folder.
func writeDurable(path string, b []byte) error {
	temp := path + ".tmp"
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

// load finds what earlier processes left: live sandboxes are kept for Find,
// everything half-made or dead is removed.
func (r *Runtime) load(ctx context.Context) error {
	entries, err := os.ReadDir(filepath.Join(r.cfg.Dir, "live"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		s := &Sandbox{r: r, dir: filepath.Join(r.cfg.Dir, "live", e.Name()), dead: make(chan struct{})}
		b, err := os.ReadFile(filepath.Join(s.dir, stateFile))
		if err == nil {
			err = json.Unmarshal(b, &s.state)
		}
		s.link = newHostLink(s)
		r.sandboxes[e.Name()] = s
		if err == nil && s.state.Phase == phaseRunning && s.alive() {
			s.watch()
			continue
		}
		if err := s.Kill(ctx); err != nil {
			return fmt.Errorf("remove what is left of sandbox %s: %w", e.Name(), err)
		}
	}
	return r.sweepSnapshots()
}

// sweepSnapshots removes images without manifest: their maker died before they
// were proved.
func (r *Runtime) sweepSnapshots() error {
	dir := filepath.Join(r.cfg.Dir, "snapshots")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, err := os.Stat(filepath.Join(dir, e.Name(), manifestFile)); errors.Is(err, fs.ErrNotExist) {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// keepBinary puts the binary into the folder and the blob store under its
// digest, and returns it. Sandboxes run the kept file and never the installed
// one: an upgrade replaces that while they live.
func (r *Runtime) keepBinary(ctx context.Context) (string, error) {
	f, err := os.Open(r.cfg.Binary)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	digest := hex.EncodeToString(h.Sum(nil))
	if _, err := os.Stat(r.binaryPath(digest)); err != nil {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return "", err
		}
		if err := r.installBinary(digest, f); err != nil {
			return "", err
		}
	}
	if r.cfg.Blobs != nil {
		// Durable before the first snapshot that will need it.
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return "", err
		}
		name, _, err := r.cfg.Blobs.PutReader(ctx, runtimeSpace, f)
		if err != nil {
			return "", err
		}
		if name != digest {
			return "", fmt.Errorf("%s changed while it was read", r.cfg.Binary)
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

// installBinary writes a binary's folder. A crash leaves a temporary folder or
// the whole one.
func (r *Runtime) installBinary(digest string, content io.Reader) error {
	temp, err := os.MkdirTemp(filepath.Join(r.cfg.Dir, "runtimes"), ".tmp-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	f, err := os.OpenFile(filepath.Join(temp, agentName), os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	h := sha256.New()
	_, err = io.Copy(io.MultiWriter(f, h), content)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != digest {
		return fmt.Errorf("binary %s has digest %s: %w", digest, got, ErrDamaged)
	}
	if err := os.Chmod(temp, 0o755); err != nil {
		return err
	}
	if err := os.Rename(temp, r.binaryDir(digest)); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(filepath.Join(r.cfg.Dir, "runtimes"))
}

// needBinary makes sure that a binary is here, from the blob store if need be.
func (r *Runtime) needBinary(ctx context.Context, digest string) error {
	if b, err := hex.DecodeString(digest); err != nil || len(b) != sha256.Size {
		return fmt.Errorf("runtime %.80q: %w", digest, ErrRuntime)
	}
	if _, err := os.Stat(r.binaryPath(digest)); err == nil {
		return nil
	}
	if r.cfg.Blobs == nil {
		return fmt.Errorf("runtime %s: %w", digest, ErrRuntime)
	}
	b, err := r.cfg.Blobs.Get(ctx, runtimeSpace, digest)
	if err != nil {
		return fmt.Errorf("runtime %s: %w: %w", digest, ErrRuntime, err)
	}
	return r.installBinary(digest, strings.NewReader(string(b)))
}

// randomID makes a name of fixed length from 128 random bits.
func randomID(prefix string) string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails (crypto/rand)
	return prefix + hex.EncodeToString(b)
}
