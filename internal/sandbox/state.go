package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
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
	// CPUFeatures that programs inside may have seen; CPUMask are those that
	// gVisor shows, nil for all.
	CPUFeatures []string `json:"cpu_features,omitempty"`
	CPUMask     []string `json:"cpu_mask,omitempty"`
	Parent      string   `json:"parent,omitempty"` // snapshot it was restored from, or that was taken last
}

const stateFile = "state.json"

// save makes the state durable. A crash leaves the old or the new one. One save
// at a time, or an older state could come to lie over a newer one.
func (s *Sandbox) save() error {
	s.saving.Lock()
	defer s.saving.Unlock()
	return s.write(s.snapshotState())
}

// write is save for a state that is not in force yet. s.saving is held.
func (s *Sandbox) write(st state) error {
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
	if err := r.awaitCreates(ctx); err != nil {
		return err
	}
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
			s.link.running()
			s.watch()
			continue
		}
		if err := s.Kill(ctx); err != nil {
			// No reason to start nothing at all; it is tried again by End and by
			// the next Open.
			r.log.Error("cannot remove what is left of a sandbox", "session", s.ID(), "folder", s.dir, "err", err)
		}
	}
	if err := r.sweepStrays(); err != nil {
		return err
	}
	if err := r.sweepTemporary(); err != nil {
		return err
	}
	return r.sweepSnapshots()
}

// tempPrefix begins the names of folders that are not whole yet.
const tempPrefix = ".tmp-"

// sweepTemporary removes what makers of binaries and roots left half-made, and
// images whose removal was cut short: this process has the folder for itself.
func (r *Runtime) sweepTemporary() error {
	for _, d := range []string{"runtimes", "roots"} {
		entries, err := os.ReadDir(filepath.Join(r.cfg.Dir, d))
		if err != nil {
			return err
		}
		for _, e := range entries {
			half := false
			if d == "roots" && strings.HasPrefix(e.Name(), imagePrefix) {
				_, err := os.Stat(filepath.Join(r.cfg.Dir, d, e.Name(), imageFile))
				half = errors.Is(err, fs.ErrNotExist) // see makeRoom
			}
			if half || strings.HasPrefix(e.Name(), tempPrefix) {
				if err := os.RemoveAll(filepath.Join(r.cfg.Dir, d, e.Name())); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// sweepSnapshots removes images without manifest, whose maker died before they
// were proved, and those whose removal was cut short.
func (r *Runtime) sweepSnapshots() error {
	dir := filepath.Join(r.cfg.Dir, "snapshots")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		_, err := os.Stat(filepath.Join(dir, e.Name(), manifestFile))
		if errors.Is(err, fs.ErrNotExist) || !snapshotName.MatchString(e.Name()) {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// randomID makes a name of fixed length from 128 random bits.
func randomID(prefix string) string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails (crypto/rand)
	return prefix + hex.EncodeToString(b)
}
