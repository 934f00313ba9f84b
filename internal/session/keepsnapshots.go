package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// The keeper of snapshots works in the background of a node with sandboxes: it
// packs images into the blob store, restores one now and then to see that it can
// be, lets go of what is not needed any more, and removes the bytes of what the
// log says is dropped. One thing at a time, with pauses: the agents come first.
//
// Nothing is removed before the log says so:
//
//  1. entry "dropped", fenced or in the name of nobody's session
//  2. the image, on every node that has it
//  3. blobs that no snapshot of the lineage needs
//
// A crash after 1 or 2 leaves bytes that the next look at the store removes.

// Times and bounds of the keeper.
const (
	// packAfter is how long a snapshot must have been the newest before it is
	// packed while its session works: most are superseded by then.
	packAfter = 30 * time.Second
	// rawKept images that were never packed are kept, the newest: one to go on
	// from, and one in case that one is damaged.
	rawKept = 2
	// imageStays is how long the image of a packed snapshot stays on the disk
	// beside its pack while the session rests.
	imageStays = time.Hour
	// testAgain is how old the newest restore-tested snapshot may become.
	testAgain = 24 * time.Hour
	// lookAgain is how soon a session is looked at again that could not be
	// dealt with.
	lookAgain = time.Minute
	// lookSoon is the same where somebody may wait for it.
	lookSoon = time.Second
	// sweepImagesEvery is how often images and dropped snapshots are looked for.
	sweepImagesEvery = 5 * time.Minute
	// collectRuntimesEvery is how often runtimes that nothing needs are removed,
	// and runtimeStays how old they must be.
	collectRuntimesEvery = time.Hour
	runtimeStays         = 7 * 24 * time.Hour
	// droppedBatch is how many dropped snapshots are removed in one go.
	droppedBatch = 100
)

// keeping is the state of the keeper of snapshots.
type keeping struct {
	packing sync.Mutex // one pack at a time

	mu      sync.Mutex // guards the fields below
	next    uint64
	takers  map[uint64]bool // snapshots under way whose image no entry names yet
	due     map[sessionKey]time.Time
	answers map[string]chan error // of checkpoints asked for, by inbox id
	inVain  map[string]inVain     // snapshots whose test said nothing of them
	wake    chan struct{}
}

type sessionKey struct {
	ws store.WorkspaceID
	id store.SessionID
}

// taking says that a snapshot is taken; release, that its entry is in the log or
// never will be.
func (k *keeping) taking() (release func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.takers == nil {
		k.takers = map[uint64]bool{}
	}
	k.next++
	n := k.next
	k.takers[n] = true
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.takers, n)
	}
}

// mark is what passed must be asked for later: all takers up to now.
func (k *keeping) mark() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.next
}

// passed reports whether all takers of a mark have finished.
func (k *keeping) passed(mark uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for n := range k.takers {
		if n <= mark {
			return false
		}
	}
	return true
}

// signal is the channel that wakes the keeper. mu is held.
func (k *keeping) signal() chan struct{} {
	if k.wake == nil {
		k.wake = make(chan struct{}, 1)
	}
	return k.wake
}

// look has a session looked at after a while, or earlier if that is due anyway.
func (k *keeping) look(ws store.WorkspaceID, id store.SessionID, after time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.due == nil {
		k.due = map[sessionKey]time.Time{}
	}
	at := time.Now().Add(after)
	key := sessionKey{ws, id}
	if old, ok := k.due[key]; !ok || at.Before(old) {
		k.due[key] = at
		wake(k.signal())
	}
}

// take returns a session that is due, else how long to wait.
func (k *keeping) take() (key sessionKey, ok bool, wait time.Duration, woken <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	wait = sweepImagesEvery
	for s, at := range k.due {
		left := time.Until(at)
		if left <= 0 {
			delete(k.due, s)
			return s, true, 0, nil
		}
		wait = min(wait, left)
	}
	return key, false, wait, k.signal()
}

// keepSnapshots runs until ctx ends.
func (m *Manager) keepSnapshots(ctx context.Context) {
	w := imageSweep{m: m}
	next := time.Now()
	for ctx.Err() == nil {
		if !time.Now().Before(next) {
			next = time.Now().Add(sweepImagesEvery)
			if err := w.sweep(ctx); err != nil && ctx.Err() == nil {
				m.log.Warn("cannot sweep images of snapshots", "err", err)
			}
		}
		key, ok, wait, woken := m.keep.take()
		if ok {
			began := time.Now()
			if err := m.keepSession(ctx, key); err != nil && ctx.Err() == nil {
				m.log.Warn("cannot keep the snapshots of a session", "session", key.id, "err", err)
				m.keep.look(key.ws, key.id, lookAgain)
			}
			// As long a pause as the work took: half of one processor at most.
			wait, woken = time.Since(began), nil
		}
		t := time.NewTimer(min(wait, max(time.Until(next), 0)))
		if ok {
			t.Reset(wait)
		}
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-woken:
		}
		t.Stop()
	}
}

// errLater: the session is in the hands of somebody who cannot be asked now.
var errLater = errors.New("the session cannot be written to now")

// noteSnapshot appends entries about snapshots, through the session's driver
// if this node has one that holds its machine, or in nobody's name.
func (m *Manager) noteSnapshot(ctx context.Context, key sessionKey, bodies ...store.Snapshot) error {
	if d := m.holders.of(string(key.ws), string(key.id)); d != nil {
		if d.machine() == nil {
			return errLater // it is being rebuilt, or brings its machine back
		}
		err := d.noteSnapshots(ctx, bodies...)
		if errors.Is(err, store.ErrFenced) {
			return fmt.Errorf("%w: %w", errLater, err)
		}
		return err
	}
	var drafts []store.Draft
	for _, b := range bodies {
		b.V = store.BodyVersion
		drafts = append(drafts, record(store.KindSnapshot, store.NewID("rec_", m.now()), "", b))
	}
	_, err := m.db.AppendUnowned(ctx, key.ws, key.id, store.Append{Entries: drafts}, nil)
	if errors.Is(err, store.ErrOwned) {
		return errLater
	}
	return err
}

// noteSnapshots appends entries about snapshots that were taken before.
func (d *driver) noteSnapshots(ctx context.Context, bodies ...store.Snapshot) error {
	d.saves.take.Lock() // a compaction carries all snapshots that were logged before it
	defer d.saves.take.Unlock()
	return d.logSnapshots(ctx, nil, bodies...)
}

// keepSession does for one session's snapshots what is due.
func (m *Manager) keepSession(ctx context.Context, key sessionKey) error {
	s, err := m.db.Session(ctx, key.ws, key.id)
	if errors.Is(err, store.ErrNotFound) || err == nil && s.Damaged != "" {
		return nil // deleted: its images are swept; damaged: nothing of it is touched
	}
	if err != nil {
		return err
	}
	rows, err := m.ownSnapshots(ctx, key)
	if err != nil || len(rows) == 0 {
		return err
	}
	forks, err := m.db.ForkPoints(ctx, key.ws, key.id)
	if err != nil {
		return err
	}
	held := m.holders.of(string(key.ws), string(key.id))
	if s.Owner != "" && (held == nil || held.machine() == nil) {
		// Another's, which may wait for what lies here, or it brings its machine back.
		again := lookAgain
		if held == nil && m.hasUnstored(rows[0]) {
			again = lookSoon
		}
		m.keep.look(key.ws, key.id, again)
		return nil
	}
	env, err := parseEnvironment(s.Config.Environment)
	if err != nil {
		return err
	}
	if err := m.dropSnapshots(ctx, key, expired(rows, env.saving().KeepSnapshots, forks)); err != nil {
		return m.later(key, err)
	}
	return m.later(key, m.keepNewest(ctx, key, rows, s.Owner == ""))
}

// hasUnstored reports whether a snapshot's image lies here and not in the blob
// store, so that no other node can bring it back.
func (m *Manager) hasUnstored(x store.SnapshotRow) bool {
	if !x.PackedAt.IsZero() || x.Failed != "" || !m.cfg.Sandboxes.Stores() {
		return false
	}
	_, err := m.cfg.Sandboxes.ReadSnapshot(x.ID)
	return err == nil
}

// later turns errLater into another look.
func (m *Manager) later(key sessionKey, err error) error {
	if errors.Is(err, errLater) || errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrNotFound) {
		m.keep.look(key.ws, key.id, lookSoon)
		return nil
	}
	return err
}

// ownSnapshots are those that the session's own log names, newest first.
func (m *Manager) ownSnapshots(ctx context.Context, key sessionKey) (own []store.SnapshotRow, err error) {
	rows, err := m.db.Snapshots(ctx, key.ws, key.id)
	for _, x := range rows {
		if x.Session == key.id {
			own = append(own, x)
		}
	}
	return own, err
}

// expired names the snapshots that are not kept. rows are the newest first.
//
// Kept are: the newest of which nothing bad is known, the newest that was
// restored in a test, named ones, what a fork begins with, and the newest keep
// ones, of which only rawKept may be unpacked: others were superseded before
// they were packed. One that failed its test is kept only while there is no
// other.
func expired(rows []store.SnapshotRow, keep int, forks []store.Seq) []store.SnapshotRow {
	kept := map[string]bool{}
	first := func(is func(store.SnapshotRow) bool) {
		for _, x := range rows {
			if is(x) {
				kept[x.ID] = true
				return
			}
		}
	}
	first(func(x store.SnapshotRow) bool { return x.Failed == "" })
	first(func(x store.SnapshotRow) bool { return x.Failed == "" && !x.TestedAt.IsZero() })
	for _, f := range forks {
		first(func(x store.SnapshotRow) bool { return x.Failed == "" && x.Seq <= f })
	}
	if len(kept) == 0 && len(rows) > 0 {
		kept[rows[0].ID] = true
	}
	n := 0
	for i, x := range rows {
		if x.Name != "" {
			kept[x.ID] = true
		}
		if x.Failed != "" {
			continue
		}
		if n < keep && (!x.PackedAt.IsZero() || i < rawKept) {
			kept[x.ID] = true
		}
		n++
	}
	var out []store.SnapshotRow
	for _, x := range rows {
		if !kept[x.ID] {
			out = append(out, x)
		}
	}
	return out
}

// dropSnapshots lets snapshots go: the entries, then their bytes here. What lies
// elsewhere is removed by the sweeps.
func (m *Manager) dropSnapshots(ctx context.Context, key sessionKey, rows []store.SnapshotRow) error {
	var bodies []store.Snapshot
	for _, x := range rows {
		why := "expired"
		switch {
		case x.Failed != "":
			why = "damaged"
		case x.PackedAt.IsZero():
			why = "superseded"
		}
		bodies = append(bodies, store.Snapshot{Act: store.SnapshotDropped, Snapshot: x.ID, Why: why})
	}
	if len(bodies) == 0 {
		return nil
	}
	if err := m.noteSnapshot(ctx, key, bodies...); err != nil {
		return err
	}
	if err := m.fault("snapshot_dropped"); err != nil {
		return err
	}
	for _, x := range rows {
		if err := m.cfg.Sandboxes.DropImage(x.ID); err != nil {
			return err
		}
	}
	return nil
}

// keepNewest packs and tests what is to be kept for long. rest: nobody owns the
// session.
func (m *Manager) keepNewest(ctx context.Context, key sessionKey, rows []store.SnapshotRow, rest bool) error {
	var newest *store.SnapshotRow
	var tested time.Time
	for i := range rows {
		if rows[i].Failed == "" && newest == nil {
			newest = &rows[i]
		}
		if rows[i].Failed == "" && rows[i].TestedAt.After(tested) {
			tested = rows[i].TestedAt
		}
	}
	for i := range rows {
		x := &rows[i]
		if !x.PackedAt.IsZero() || x.Failed != "" || !m.cfg.Sandboxes.Stores() || x.Name == "" && x != newest {
			continue
		}
		if left := packAfter - m.now().Sub(x.At); left > 0 && !rest {
			m.keep.look(key.ws, key.id, left)
			continue
		}
		err := m.pack(ctx, key.ws, key.id, x.ID, func(ctx context.Context, bodies ...store.Snapshot) error {
			return m.noteSnapshot(ctx, key, bodies...)
		})
		lost := errors.Is(err, sandbox.ErrNotFound)
		if lost && (m.cfg.Node == nil || x.Node != m.cfg.Node.ID()) {
			continue // its image lies on another node, or is lost
		}
		if lost || errors.Is(err, sandbox.ErrDamaged) {
			// Nobody waits for it any more, and an older one is taken.
			err = m.failed(ctx, key, x, err)
		}
		if err != nil {
			return err
		}
		m.keep.look(key.ws, key.id, time.Millisecond) // what it superseded
		return nil
	}
	if newest == nil {
		return nil
	}
	if m.now().Sub(tested) > testAgain && !newest.PackedAt.IsZero() && newest.TestedAt.IsZero() {
		if err := m.testSnapshot(ctx, key, newest); err != nil {
			return err
		}
	}
	return m.dropImages(key, rows, newest, rest)
}

// dropImages removes images whose snapshots are packed: of older ones at once,
// of the newest when the session has rested for a while. What may be all that there
// is of a snapshot stays.
func (m *Manager) dropImages(key sessionKey, rows []store.SnapshotRow, newest *store.SnapshotRow, rest bool) error {
	for i := range rows {
		x := &rows[i]
		if x.PackedAt.IsZero() {
			continue
		}
		if x == newest {
			left := imageStays - m.now().Sub(x.PackedAt)
			if !rest || left > 0 {
				m.keep.look(key.ws, key.id, max(left, lookAgain))
				continue
			}
			if m.keep.unproved(x.ID) {
				m.keep.look(key.ws, key.id, imageStays)
				continue
			}
		}
		if err := m.hideImage(key, x.ID, x != newest); err != nil {
			return err
		}
	}
	return nil
}

// hideImage removes the image of a packed snapshot. A driver that may be about
// to restore it stands in the way: one that is there and, unless held is set,
// one that holds a machine.
func (m *Manager) hideImage(key sessionKey, id string, held bool) error {
	var remove func() error
	err := m.holders.during([2]string{string(key.ws), string(key.id)}, func(d *driver) (err error) {
		if d == nil || held && d.machine() != nil {
			remove, err = m.cfg.Sandboxes.HideImage(id)
		}
		return err
	})
	if err == nil && remove != nil {
		err = remove()
	}
	return err
}

// during runs f, which must be quick, while no driver can come or go.
func (h *holders) during(key [2]string, f func(d *driver) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return f(h.all[key])
}

// noter appends entries about a session's snapshots.
type noter func(ctx context.Context, bodies ...store.Snapshot) error

// pack brings a snapshot into the blob store and logs it. It is there on return.
//
//  1. the packs, durable in the blob store. A crash from here to 2 leaves blobs
//     that nothing names, sealed under the lineage's key.
//  2. the entry. It is refused when the earlier snapshot whose packs it shares
//     was dropped meanwhile; what was stored is removed and the next try begins
//     without it.
//
// note appends the entry.
func (m *Manager) pack(ctx context.Context, ws store.WorkspaceID, id store.SessionID, snapshot string, note noter) error {
	m.keep.packing.Lock()
	defer m.keep.packing.Unlock()
	key := sessionKey{ws, id}
	rows, err := m.ownSnapshots(ctx, key)
	if err != nil {
		return err
	}
	var earlier *sandbox.Packed
	for _, x := range rows {
		switch {
		case x.ID == snapshot && !x.PackedAt.IsZero():
			return nil
		case earlier == nil && x.ID != snapshot && !x.PackedAt.IsZero() && x.Failed == "":
			earlier = new(sandbox.Packed)
			if err := json.Unmarshal(x.Packed, earlier); err != nil {
				return fmt.Errorf("read pack of snapshot %s: %w: %w", x.ID, store.ErrDamaged, err)
			}
		}
	}
	image, err := m.cfg.Sandboxes.ReadSnapshot(snapshot)
	if err != nil {
		return err
	}
	sealer, err := m.db.Sealer(ctx, ws, id)
	if err != nil {
		return err
	}
	began := time.Now()
	p, err := m.cfg.Sandboxes.Pack(ctx, image, earlier, sealer)
	if err != nil && earlier != nil && ctx.Err() == nil {
		m.log.Warn("cannot build on an earlier pack", "session", id, "err", err)
		earlier = nil
		p, err = m.cfg.Sandboxes.Pack(ctx, image, nil, sealer)
	}
	if err == nil {
		err = m.logPack(ctx, key, p, earlier, note)
	}
	if m.cfg.Observe != nil && ctx.Err() == nil {
		var stored int64
		if p != nil {
			stored = p.Stored
		}
		m.cfg.Observe.Kept(store.SnapshotPacked, stored, time.Since(began), err)
	}
	return err
}

func (m *Manager) logPack(ctx context.Context, key sessionKey, p *sandbox.Packed, earlier *sandbox.Packed, note noter) error {
	if err := m.fault("snapshot_packed"); err != nil {
		return err
	}
	body := store.Snapshot{Act: store.SnapshotPacked, Snapshot: p.Snapshot, Bytes: p.Stored, Packed: encode(p)}
	shared := map[string]bool{}
	if earlier != nil {
		body.Parent = earlier.Snapshot
		for _, b := range earlier.Blobs {
			shared[b] = true
		}
	}
	err := note(ctx, body)
	var gone bool
	switch {
	case err == nil:
		return nil
	case errors.Is(err, store.ErrFenced):
		// The entry may have landed all the same, its answer lost before the claim.
	case errors.Is(err, store.ErrConflict), errors.Is(err, errLater), errors.Is(err, store.ErrNotFound):
		gone = true // certainly not there
	}
	if gone {
		var own []string
		for _, b := range append(p.Blobs, p.Recipe) {
			if !shared[b] {
				own = append(own, b)
			}
		}
		if rerr := m.cfg.Sandboxes.RemoveBlobs(context.WithoutCancel(ctx), string(key.ws), own); rerr != nil {
			m.log.Warn("left blobs of a pack", "session", key.id, "err", rerr)
		}
	}
	return err
}

// unpack rebuilds a packed snapshot's image on this node. ErrDamaged,
// ErrNotFound: the caller tries an older one.
func (d *driver) unpack(ctx context.Context, s store.Snapshot) (*sandbox.Manifest, error) {
	var p sandbox.Packed
	if err := json.Unmarshal(s.Packed, &p); err != nil || p.Snapshot != s.Snapshot {
		return nil, fmt.Errorf("unpack snapshot %s: what is known of its pack: %w", s.Snapshot, sandbox.ErrDamaged)
	}
	sealer, err := d.m.db.Sealer(ctx, d.ws, d.id)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	image, err := d.m.cfg.Sandboxes.Unpack(ctx, string(d.ws), &p, sealer)
	if d.m.cfg.Observe != nil && ctx.Err() == nil {
		d.m.cfg.Observe.Kept("unpacked", p.Image, time.Since(began), err)
	}
	if errors.Is(err, blob.ErrNotFound) || errors.Is(err, blob.ErrDamaged) {
		err = fmt.Errorf("%w: %w", sandbox.ErrDamaged, err)
	}
	return image, err
}

// reviveFromPack restores a snapshot whose image on this node is damaged from its
// pack. why is what was found.
func (d *driver) reviveFromPack(ctx context.Context, saved savedState, why error) (*sandbox.Sandbox, *sandbox.Restored, error) {
	d.m.log.Error("image is damaged and is rebuilt from its pack", "session", d.id, "snapshot", saved.Snapshot.Snapshot, "err", why)
	if err := d.m.cfg.Sandboxes.DropImage(saved.Snapshot.Snapshot); err != nil {
		return nil, nil, errors.Join(why, err)
	}
	m, err := d.unpack(ctx, saved.Snapshot)
	if err != nil {
		return nil, nil, err
	}
	return d.m.cfg.Sandboxes.Restore(ctx, m, d.spec())
}

// imageSweep removes what the log says is dropped, and images that no entry
// names: their taker died before it could log them.
type imageSweep struct {
	m *Manager
	// unnamed images of the last sweep, each with the takers of that time.
	unnamed map[string]uint64
	// collected is when runtimes were looked at.
	collected time.Time
}

func (w *imageSweep) sweep(ctx context.Context) error {
	images, err := w.m.cfg.Sandboxes.Snapshots()
	if err != nil {
		return err
	}
	unnamed := map[string]uint64{}
	for _, id := range images {
		if err := w.image(ctx, id, unnamed); err != nil {
			return err
		}
	}
	w.unnamed = unnamed
	if err := w.dropped(ctx); err != nil {
		return err
	}
	if time.Since(w.collected) < collectRuntimesEvery {
		return nil
	}
	w.collected = time.Now()
	return w.m.collectRuntimes(ctx)
}

// collectRuntimes removes binaries that no snapshot needs. Those in the blob
// store stay while another node lives, whose first snapshot may not be named yet.
func (m *Manager) collectRuntimes(ctx context.Context) error {
	nodes, err := m.db.Nodes(ctx, 1000)
	if err != nil {
		return err
	}
	shared := len(nodes) == 1000
	for _, n := range nodes {
		shared = shared || n.ID != m.cfg.Node.ID() && n.LeftAt.IsZero() && n.DeadAt.IsZero()
	}
	needed, err := m.db.NeededRuntimes(ctx)
	if err != nil {
		return err
	}
	return m.cfg.Sandboxes.CollectBinaries(ctx, needed, m.now().Add(-runtimeStays), shared)
}

// image looks at one image. A live taker is never overtaken: an image is removed
// only when it was unnamed before, every snapshot that was under way then has
// ended since, and the store, asked after that, still does not name it.
func (w *imageSweep) image(ctx context.Context, id string, unnamed map[string]uint64) error {
	image, err := w.m.cfg.Sandboxes.ReadSnapshot(id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err != nil {
		w.m.log.Warn("image cannot be read", "snapshot", id, "err", err)
		return nil // of nobody that we know: left to a person
	}
	mark, before := w.unnamed[id]
	over := before && w.m.keep.passed(mark)
	key := sessionKey{store.WorkspaceID(image.Workspace), store.SessionID(image.Sandbox)}
	lives, err := w.m.db.SnapshotLives(ctx, key.ws, key.id, id)
	switch {
	case err != nil:
		return err
	case lives:
		w.m.keep.look(key.ws, key.id, packAfter)
	case over:
		w.m.log.Info("removed an image that no entry names", "session", key.id, "snapshot", id)
		return w.m.cfg.Sandboxes.DropImage(id)
	case before:
		unnamed[id] = mark
	default:
		unnamed[id] = w.m.keep.mark()
	}
	return nil
}

// dropped removes the bytes of dropped snapshots.
func (w *imageSweep) dropped(ctx context.Context) error {
	list, err := w.m.db.DroppedSnapshots(ctx, droppedBatch)
	if err != nil {
		return err
	}
	for _, x := range list {
		if err := w.m.cfg.Sandboxes.DropImage(x.ID); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
		if err := w.m.cfg.Sandboxes.RemoveBlobs(ctx, string(x.Workspace), x.Blobs); err != nil {
			return err
		}
		if err := w.m.fault("snapshot_removed"); err != nil {
			return err
		}
		if err := w.m.db.RemovedSnapshot(ctx, x); err != nil {
			return err
		}
	}
	return nil
}
