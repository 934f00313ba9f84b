package sandbox

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/planaria/planaria/internal/blob"
)

// CollectBinaries removes binaries that nothing needs: those in the folder that
// this program, a living sandbox, an image in the folder and needed do not name,
// and, with shared false, the same of the blob store, which then nobody else may
// be using. needed are the runtimes of all snapshots that may be restored.
// Nothing that was kept or stored after before is touched: its first snapshot
// may not be named yet.
func (r *Runtime) CollectBinaries(ctx context.Context, needed []string, before time.Time, shared bool) error {
	r.bin.mu.Lock()
	defer r.bin.mu.Unlock()
	keep, err := r.usedBinaries()
	if err != nil {
		return fmt.Errorf("collect runtimes: %w", err)
	}
	for _, d := range needed {
		keep[d] = true
	}
	entries, err := os.ReadDir(filepath.Join(r.cfg.Dir, "runtimes"))
	if err != nil {
		return fmt.Errorf("collect runtimes: %w", err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if !isDigest(e.Name()) || keep[e.Name()] || err != nil || !info.ModTime().Before(before) {
			continue
		}
		// A sandbox that runs it has it open.
		if err := os.RemoveAll(r.binaryDir(e.Name())); err != nil {
			return fmt.Errorf("collect runtimes: %w", err)
		}
		r.log.Info("removed a runtime that nothing needs", "runtime", e.Name())
	}
	if shared || r.cfg.Blobs == nil {
		return nil
	}
	if err := r.collectStored(ctx, keep, before); err != nil {
		return fmt.Errorf("collect stored runtimes: %w", err)
	}
	return nil
}

func isDigest(name string) bool {
	b, err := hex.DecodeString(name)
	return err == nil && len(b) == 32
}

// usedBinaries are those that this folder needs now. r.bin.mu is held.
func (r *Runtime) usedBinaries() (map[string]bool, error) {
	keep := map[string]bool{r.bin.digest: true}
	// Before the first sandbox of this process: what it will most likely run.
	if k, ok := r.index().Kept[r.binaryKey()]; ok {
		keep[k.Digest] = true
	}
	for d := range r.bin.store {
		keep[d] = true
	}
	// Sandboxes, pooled ones too, by their files: one that is being made has
	// its own before it runs.
	states, err := filepath.Glob(filepath.Join(r.cfg.Dir, "live", "*", stateFile))
	if err != nil {
		return nil, err
	}
	for _, path := range states {
		var st state
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it ended meanwhile
		}
		if err := json.Unmarshal(b, &st); err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		keep[st.Binary] = true
	}
	images, err := r.manifests()
	if err != nil {
		return nil, err
	}
	for _, m := range images {
		keep[m.Runtime] = true
	}
	return keep, nil
}

// manifests are those of all images in this folder, of templates too.
func (r *Runtime) manifests() (all []*Manifest, err error) {
	ids, err := r.Snapshots()
	if err != nil {
		return nil, err
	}
	templates, err := r.ofTemplates()
	if err != nil {
		return nil, err
	}
	for id := range templates {
		ids = append(ids, id)
	}
	for _, id := range ids {
		if m, err := r.ReadSnapshot(id); err == nil {
			all = append(all, m)
		}
	}
	return all, nil
}

// collectStored removes binaries from the blob store. r.bin.mu is held.
func (r *Runtime) collectStored(ctx context.Context, keep map[string]bool, before time.Time) error {
	store, ok := r.cfg.Blobs.(interface {
		List(ctx context.Context, workspace string) ([]blob.Info, error)
		Delete(ctx context.Context, workspace, name string) error
	})
	if !ok {
		return nil
	}
	list, err := store.List(ctx, runtimeSpace)
	if err != nil {
		return err
	}
	for _, b := range list {
		if keep[b.Name] || !b.At.Before(before) {
			continue
		}
		// The index first: what a crash leaves is stored once more when needed.
		if err := r.note(func(x *binaryIndex) { delete(x.Stored, b.Name) }); err != nil {
			return err
		}
		if err := store.Delete(ctx, runtimeSpace, b.Name); err != nil {
			return err
		}
	}
	return nil
}
