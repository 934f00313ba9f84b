package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// provePack reports whether a snapshot's packs make its image. Where they do not
// the image, which is here, is packed anew, upon nothing; what the old pack had
// for itself is removed. Crashes are those of pack, and one behind the entry
// leaves the old pack's blobs. sandbox.ErrDamaged: the image is damaged, too.
func (m *Manager) provePack(ctx context.Context, key sessionKey, x *store.SnapshotRow, image *sandbox.Manifest) (bool, error) {
	var p sandbox.Packed
	if err := json.Unmarshal(x.Packed, &p); err != nil {
		return false, fmt.Errorf("read pack of snapshot %s: %w: %w", x.ID, store.ErrDamaged, err)
	}
	sealer, err := m.db.Sealer(ctx, key.ws, key.id)
	if err != nil {
		return false, err
	}
	m.keep.packing.Lock()
	defer m.keep.packing.Unlock()
	err = m.cfg.Sandboxes.Prove(ctx, string(key.ws), &p, sealer)
	if err == nil {
		return true, nil
	}
	if ctx.Err() != nil || !errors.Is(err, sandbox.ErrDamaged) && !errors.Is(err, blob.ErrDamaged) && !errors.Is(err, blob.ErrNotFound) {
		return false, err
	}
	m.log.Error("a pack does not make its image, which is packed anew", "session", key.id, "snapshot", x.ID, "err", err)
	next, err := m.cfg.Sandboxes.Pack(ctx, image, nil, sealer)
	if err != nil {
		return false, err
	}
	if err := m.logPack(ctx, key, next, nil, func(ctx context.Context, bodies ...store.Snapshot) error {
		return m.noteSnapshot(ctx, key, bodies...)
	}); err != nil {
		return false, err
	}
	return false, m.removeFormer(ctx, key, &p)
}

// removeFormer removes what only a pack that is no more had.
func (m *Manager) removeFormer(ctx context.Context, key sessionKey, former *sandbox.Packed) error {
	rows, err := m.db.Snapshots(ctx, key.ws, key.id)
	if err != nil {
		return err
	}
	named := map[string]bool{}
	for _, x := range rows {
		var p sandbox.Packed
		if len(x.Packed) > 0 && json.Unmarshal(x.Packed, &p) != nil {
			return nil // what it names is not known
		}
		for _, b := range append(p.Blobs, p.Recipe) {
			named[b] = true
		}
	}
	own := slices.DeleteFunc(append(former.Blobs, former.Recipe), func(b string) bool { return named[b] })
	return m.cfg.Sandboxes.RemoveBlobs(ctx, string(key.ws), own)
}

// testSnapshot proves a snapshot's pack, which is what stays of it, restores a
// copy, without a way out and under a name of its own, and logs what came of it.
// What this machine cannot restore another may: only damage counts against the
// snapshot.
func (m *Manager) testSnapshot(ctx context.Context, key sessionKey, x *store.SnapshotRow) error {
	image, err := m.cfg.Sandboxes.ReadSnapshot(x.ID)
	if errors.Is(err, sandbox.ErrNotFound) || !m.keep.mayTest(x.ID) {
		return nil // it is tested where the image lies, or later
	}
	if err != nil {
		return err
	}
	began := time.Now()
	switch proved, err := m.provePack(ctx, key, x, image); {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, sandbox.ErrDamaged):
		return m.failed(ctx, key, x, err)
	case err != nil:
		m.log.Error("the pack of a snapshot could not be proved here", "session", key.id, "snapshot", x.ID, "err", err)
		m.keep.testedInVain(x.ID, true)
		return nil
	case !proved:
		return fmt.Errorf("%w: its new pack is not proved yet", errLater)
	}
	m.keep.proved(x.ID)
	err = m.cfg.Sandboxes.Test(ctx, image)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if m.cfg.Observe != nil {
		m.cfg.Observe.Kept(store.SnapshotTested, image.Size(), time.Since(began), err)
	}
	switch {
	case errors.Is(err, sandbox.ErrDamaged):
		return m.failed(ctx, key, x, err)
	case err != nil:
		m.log.Error("a snapshot could not be tested here", "session", key.id, "snapshot", x.ID, "err", err)
		m.keep.testedInVain(x.ID, false)
		return nil
	}
	return m.noteSnapshot(ctx, key, store.Snapshot{Act: store.SnapshotTested, Snapshot: x.ID})
}

// failed logs that nothing can be restored from a snapshot.
func (m *Manager) failed(ctx context.Context, key sessionKey, x *store.SnapshotRow, why error) error {
	m.log.Error("a snapshot failed its test", "session", key.id, "snapshot", x.ID, "err", why)
	return m.noteSnapshot(ctx, key, store.Snapshot{Act: store.SnapshotTested, Snapshot: x.ID, Failed: clip(why.Error(), 500)})
}

// maxInVain bounds what is remembered of tests that came to nothing.
const maxInVain = 1000

// inVain is a test that came to nothing.
type inVain struct {
	at       time.Time
	unproved bool // for the pack could not be read back
}

// mayTest reports whether a test of the snapshot has not just come to nothing.
func (k *keeping) mayTest(snapshot string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	v, ok := k.inVain[snapshot]
	if v.unproved {
		return time.Since(v.at) > imageStays
	}
	return !ok || time.Since(v.at) > testAgain
}

// unproved reports whether the newest try to read a snapshot's pack back failed:
// the image may be all that there is.
func (k *keeping) unproved(snapshot string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.inVain[snapshot].unproved
}

func (k *keeping) testedInVain(snapshot string, unproved bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.inVain == nil || len(k.inVain) >= maxInVain {
		k.inVain = map[string]inVain{}
	}
	k.inVain[snapshot] = inVain{time.Now(), unproved}
}

func (k *keeping) proved(snapshot string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.inVain, snapshot)
}
