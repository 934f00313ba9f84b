package session

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// errUnsaved: the machine's state could not be made durable, so what depends on
// it was not sent.
var errUnsaved = errors.New("the state of the machine could not be saved")

// Why a snapshot was taken (store.Snapshot.Why).
const (
	whyStep     = "step"
	whyTurn     = "turn"
	whyInterval = "interval"
	whyManual   = "manual"
	whyCommit   = "commit"
	whySuspend  = "suspend"
)

// commitTries is how often output commit tries to take a snapshot before it
// gives up the call: what fails twice in a row (a full disk) will not pass soon.
const commitTries = 2

// saveTime bounds one snapshot, so that a sandbox that does not answer holds up
// nobody for longer: 16 GiB at the speed of a slow disk.
const saveTime = 5 * time.Minute

// saves are the snapshots of one driver's sandbox. At most one is under way.
type saves struct {
	take sync.Mutex // held while one is taken and logged

	mu     sync.Mutex // guards the fields below
	flight *flight    // newest one that was started in the background
	failed bool       // the newest try failed
	newest *savedAs   // nil: there is none
	read   bool       // the store was asked for newest
	stop   func()     // of the interval's goroutine
	held   []func()   // let go of images that no entry names yet, see saveForSuspend

	brought int // times in a row that an irreversible call had the machine brought back; the driver's
}

// savedAs is the newest snapshot of the sandbox.
type savedAs struct {
	store.Snapshot
	activity sandbox.Activity // what had happened inside when it was taken
	logged   bool             // the log names it
}

// flight is a snapshot under way in the background.
type flight struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// machine is the session's running sandbox; nil when it has none here.
func (d *driver) machine() *sandbox.Sandbox {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.box
}

// saving is what the session's environment says of snapshots.
func (d *driver) saving() (m api.Machine) {
	d.read(func(st *state) { m = st.env.saving() })
	return m
}

// saving is the environment's machine with the defaults of snapshots filled in.
func (e environment) saving() api.Machine {
	m := e.machine
	m.Snapshot = cmp.Or(m.Snapshot, api.SnapshotStep)
	m.IntervalSeconds = cmp.Or(m.IntervalSeconds, 300)
	m.OutputCommit = cmp.Or(m.OutputCommit, api.CommitLocal)
	m.KeepSnapshots = cmp.Or(m.KeepSnapshots, 5)
	return m
}

// thinking is called right before the model is asked: no contained call runs,
// and the time is free. Under policy step a snapshot is started when the step
// changed something. It returns at once.
func (d *driver) thinking(ctx context.Context) {
	if d.machine() == nil {
		return
	}
	if d.saving().Snapshot == api.SnapshotStep {
		d.startSave(ctx, whyStep)
	}
	d.working(ctx)
}

// working is called when there is a machine: the timer of policy interval runs
// from now on.
func (d *driver) working(ctx context.Context) {
	if s := d.saving(); s.Snapshot == api.SnapshotInterval {
		d.startInterval(ctx, time.Duration(s.IntervalSeconds)*time.Second)
	}
}

// startSave takes a snapshot in the background, unless one is under way.
func (d *driver) startSave(ctx context.Context, why string) {
	d.saves.mu.Lock()
	defer d.saves.mu.Unlock()
	if f := d.saves.flight; f != nil {
		select {
		case <-f.done:
		default:
			return
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	f := &flight{cancel: cancel, done: make(chan struct{})}
	d.saves.flight = f
	through := d.through()
	go func() {
		defer close(f.done)
		defer cancel()
		_ = d.unpanicked(func() error { return d.save(ctx, why, through) }) // counted and logged there
	}()
}

// through is the newest entry that the machine's state is known to hold.
func (d *driver) through() (seq store.Seq) {
	d.read(func(st *state) { seq = st.seq })
	return seq
}

// shut reports whether the machine is not to be looked at from aside: calls are
// run again in it, or it is being suspended.
func (d *driver) shut() bool {
	b := d.held()
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.shut
}

// startInterval starts the timer of policy interval, once.
func (d *driver) startInterval(ctx context.Context, every time.Duration) {
	d.saves.mu.Lock()
	defer d.saves.mu.Unlock()
	if d.saves.stop != nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	d.saves.stop = func() { cancel(); <-done }
	go func() {
		defer close(done)
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			if d.machine() != nil && !d.shut() {
				_ = d.unpanicked(func() error { return d.save(ctx, whyInterval, d.through()) })
			}
		}
	}()
}

// joinSave waits for the snapshot that is under way in the background.
func (d *driver) joinSave(ctx context.Context) {
	d.saves.mu.Lock()
	f := d.saves.flight
	d.saves.mu.Unlock()
	if f == nil {
		return
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		f.cancel()
		<-f.done
	}
}

// savesOver waits until no snapshot is taken or logged. None begins while no
// machine is held.
func (d *driver) savesOver(ctx context.Context) error {
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for !d.saves.take.TryLock() {
		select {
		case <-t.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	d.saves.take.Unlock()
	return nil
}

// endSaves ends what is under way; the driver leaves. What was cut short is an
// image that no entry names, which is swept.
func (d *driver) endSaves() {
	d.saves.mu.Lock()
	f, stop, held := d.saves.flight, d.saves.stop, d.saves.held
	d.saves.stop, d.saves.held = nil, nil
	d.saves.mu.Unlock()
	if f != nil {
		f.cancel()
		<-f.done
	}
	if stop != nil {
		stop()
	}
	for _, release := range held {
		release()
	}
}

// save takes a snapshot if anything changed since the newest one, and logs it.
// nil: the log names a snapshot that holds the state as it was when save was
// called, or later.
//
//  1. the image, durable and verified. A crash from here to 2 leaves an image
//     that no entry names; the keeper of snapshots removes it.
//  2. the entry, critical: from here on it can be restored.
func (d *driver) save(ctx context.Context, why string, through store.Seq) error {
	d.saves.take.Lock()
	defer d.saves.take.Unlock()
	s, release, err := d.takeSnapshot(ctx, why, through, false)
	defer release()
	if err != nil || s == nil || s.logged {
		return err
	}
	if err := d.m.fault("before_snapshot"); err != nil {
		return err
	}
	if err := d.logSnapshots(ctx, nil, s.Snapshot); err != nil {
		return err
	}
	d.saves.mu.Lock()
	s.logged = true
	d.saves.mu.Unlock()
	d.m.keep.look(d.ws, d.id, packAfter)
	return d.m.fault("after_snapshot")
}

// logSnapshots appends entries about snapshots.
func (d *driver) logSnapshots(ctx context.Context, consume []string, bodies ...store.Snapshot) error {
	a := store.Append{Consume: consume}
	for _, b := range bodies {
		b.V = store.BodyVersion
		a.Entries = append(a.Entries, record(store.KindSnapshot, d.newID("rec_"), "", b))
	}
	if _, err := d.append(ctx, a); err != nil {
		return fmt.Errorf("log snapshots: %w", err)
	}
	return nil
}

// takeSnapshot makes an image if anything changed since the newest one, and
// returns the newest; nil when there is none and nothing to save, unless must
// is set. saves.take is held. Until release is called the image is not swept
// though no entry names it.
func (d *driver) takeSnapshot(ctx context.Context, why string, through store.Seq, must bool) (s *savedAs, release func(), err error) {
	release = func() {}
	b := d.held()
	if b == nil || b.isPartial() {
		return nil, release, nil
	}
	box := b.s
	ctx, cancel := context.WithTimeout(ctx, saveTime)
	defer cancel()
	release = d.m.keep.taking() // before the image is looked for, or made
	newest, activity, changed, err := d.changed(ctx, box)
	if err == nil && !changed {
		if changed, err = d.unsound(ctx, newest, why); err == nil && !changed && (newest != nil || !must) {
			return newest, release, nil
		}
	}
	began := time.Now()
	var m *sandbox.Manifest
	if err == nil {
		m, err = box.Snapshot(ctx)
	}
	if err == nil {
		s, err = d.describe(ctx, m, why, through)
	}
	d.observeSaved(ctx, why, m, time.Since(began), err)
	if err != nil {
		return nil, release, err
	}
	s.activity, s.Activity = activity, encode(activity)
	d.saves.mu.Lock()
	d.saves.newest = s
	d.saves.mu.Unlock()
	return s, release, nil
}

// describe makes the record of a taken image. through was read before it was
// begun; calls that ended meanwhile may be inside or not, so they are listed
// with those that ran: whoever restores it asks the sandbox for them.
func (d *driver) describe(ctx context.Context, m *sandbox.Manifest, why string, through store.Seq) (*savedAs, error) {
	s := &savedAs{Snapshot: store.Snapshot{V: store.BodyVersion, Act: store.SnapshotTaken, Snapshot: m.ID, Why: why, Node: d.lease.Node(),
		Through: through, Parent: m.Parent, Root: m.Root.Digest, Runtime: m.Runtime, Generation: m.Generation,
		Bytes: m.Size(), PauseMS: m.Took.Checkpoint}}
	add := func(id store.EventID) {
		if id != "" && !slices.Contains(s.Running, id) {
			s.Running = append(s.Running, id)
		}
	}
	for _, id := range append(m.Running, m.Kept...) {
		add(store.EventID(id))
	}
	ended, err := d.m.db.Entries(ctx, d.ws, d.id, store.Range{After: through, Types: []string{evToolResult}})
	if err != nil {
		return nil, fmt.Errorf("read what ended meanwhile: %w", err)
	}
	for _, e := range ended {
		var b eventBody
		if json.Unmarshal(e.Body, &b) == nil {
			add(b.ToolUseID)
		}
	}
	return s, nil
}

// changed asks the sandbox whether anything happened since its newest snapshot.
// Without one, only calls that may change something count: a machine that was
// just made can be made again.
func (d *driver) changed(ctx context.Context, box *sandbox.Sandbox) (newest *savedAs, now sandbox.Activity, changed bool, err error) {
	if newest, err = d.newest(ctx); err != nil {
		return nil, now, false, err
	}
	if now, err = box.Activity(ctx); err != nil {
		return nil, now, false, err
	}
	if newest == nil {
		return nil, now, now.Calls > 0, nil
	}
	if newest.Snapshot.Snapshot != box.NewestSnapshot() || newest.Generation != box.Generation() {
		return nil, now, true, nil // it is of an earlier life
	}
	// One that was taken while calls ran holds them half done.
	return newest, now, len(newest.Running) > 0 || !sandbox.Same(now, newest.activity), nil
}

// unsound reports whether a snapshot since which nothing is known to have
// happened inside does not do.
func (d *driver) unsound(ctx context.Context, s *savedAs, why string) (bool, error) {
	if s == nil {
		return false, nil
	}
	if s.logged {
		good := false
		d.read(func(st *state) {
			good = slices.ContainsFunc(st.machine.Snapshots, func(x savedState) bool {
				return x.Snapshot.Snapshot == s.Snapshot.Snapshot && !x.Failed
			})
		})
		if !good {
			return true, nil // dropped meanwhile, or found damaged
		}
	} else if _, err := d.m.cfg.Sandboxes.ReadSnapshot(s.Snapshot.Snapshot); err != nil {
		return true, nil // the log did not take it, and its image was swept
	}
	if why != whyCommit && why != whySuspend {
		return false, nil // the machine goes on from what it is
	}
	// What the model read since may have been written by a process that used too
	// little of the processor to be noticed, or put there by ourselves.
	seen, err := d.m.db.Entries(ctx, d.ws, d.id, store.Range{After: s.Through, Types: []string{evToolResult}, Limit: 1})
	if err != nil {
		return false, fmt.Errorf("read what was seen since: %w", err)
	}
	return len(seen) > 0, nil
}

// newest is the session's newest snapshot, from the store at the first look.
func (d *driver) newest(ctx context.Context) (*savedAs, error) {
	d.saves.mu.Lock()
	defer d.saves.mu.Unlock()
	if d.saves.newest != nil || d.saves.read {
		return d.saves.newest, nil
	}
	rows, err := d.m.db.Snapshots(ctx, d.ws, d.id)
	if err != nil {
		return nil, err
	}
	d.saves.read = true
	if len(rows) > 0 {
		r := rows[0]
		s := &savedAs{logged: true, Snapshot: store.Snapshot{V: store.BodyVersion, Act: store.SnapshotTaken, Snapshot: r.ID, Why: r.Why,
			Node: r.Node, Through: r.Through, Parent: r.Parent, Root: r.Root, Runtime: r.Runtime, Running: r.Running,
			Generation: r.Generation, Bytes: r.Bytes, PauseMS: r.PauseMS, Activity: r.Activity}}
		_ = json.Unmarshal(r.Activity, &s.activity) // else it looks changed
		d.saves.newest = s
	}
	return d.saves.newest, nil
}

// observeSaved counts a try. A missing checkpoint is an alarm and never the
// session's failure (trial G 95); that the driver is leaving is neither.
func (d *driver) observeSaved(ctx context.Context, why string, m *sandbox.Manifest, elapsed time.Duration, err error) {
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return // cut short, by whoever had a reason to
	}
	d.saves.mu.Lock()
	d.saves.failed = err != nil
	d.saves.mu.Unlock()
	if err != nil {
		d.m.log.Warn("cannot take a snapshot", "session", d.id, "err", err)
	}
	if d.m.cfg.Observe != nil {
		var pause time.Duration
		if m != nil {
			pause = time.Duration(m.Took.Checkpoint) * time.Millisecond
		}
		d.m.cfg.Observe.Saved(d.lease.Claimed(), why, pause, elapsed, err)
	}
}

// durable is output commit: it returns nil when the state that the next
// irreversible call can depend on is as durable as the environment demands.
// errUnsaved: it could not be made so, and the call must not be attempted; it
// gets an honest error, for a session never waits for ever for a disk.
func (d *driver) durable(ctx context.Context) error {
	policy := d.saving().OutputCommit
	if policy == api.CommitOff || d.m.cfg.Sandboxes == nil {
		return nil
	}
	defer d.keepAlive(time.Hour)()
	var err error
	for range commitTries {
		d.joinSave(ctx)
		if err = d.whole(ctx); err == nil {
			err = d.save(ctx, whyCommit, d.through())
		}
		if err == nil && policy == api.CommitStored {
			err = d.store(ctx)
		}
		switch {
		case err == nil || d.over(err):
			return err
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, errMachineGone):
			return err // it is back: the loop looks at what else is open
		case errors.Is(err, errElsewhere):
			return err // the other node stores it as soon as this driver has parked the session
		case errors.Is(err, errBehind):
			return fmt.Errorf("%w: %w", errUnsaved, err)
		}
	}
	return fmt.Errorf("%w: %w", errUnsaved, err)
}

// errBehind: the model asked for a call before it knew what its machine has lost.
var errBehind = errors.New("the machine was lost, and what was brought back does not contain all that this call may build upon")

// whole sees to it that all that the model has seen of its machine is there or in
// a snapshot. A machine that died is brought back first where it may have done
// something since its newest one: what an irreversible call builds upon must not
// be found missing after it. errMachineGone: it was brought back, which may have
// closed other open calls.
func (d *driver) whole(ctx context.Context) error {
	var m machineState
	d.read(func(st *state) { m = st.machine })
	if d.held() == nil && m.Act != "" {
		needed, err := d.dependsOn(ctx, m)
		switch {
		case err != nil:
			return err
		case needed && d.saves.brought >= maxLosses:
			return errors.New("the machine dies each time that it is brought back")
		case needed:
			d.saves.brought++
			if err := d.make(ctx); err != nil {
				return err
			}
			return errMachineGone
		}
	}
	d.saves.brought = 0
	behind := false
	d.read(func(st *state) {
		behind = slices.ContainsFunc(st.open(), func(c *call) bool { return c.tool == "" && c.behind })
	})
	if behind {
		return errBehind
	}
	return nil
}

// dependsOn reports whether the model has seen something of a machine that is not
// there any more which no snapshot holds.
func (d *driver) dependsOn(ctx context.Context, m machineState) (bool, error) {
	through := m.Base
	if n := len(m.Snapshots); n > 0 {
		newest := m.Snapshots[n-1]
		if _, err := d.m.cfg.Sandboxes.ReadSnapshot(newest.Snapshot.Snapshot); newest.Failed || err != nil && len(newest.Packed) == 0 {
			return true, nil // it may not come back
		}
		through = newest.Through
	}
	p, err := d.since(ctx, through)
	return len(p.calls) > 0, err
}

// store packs the newest snapshot.
func (d *driver) store(ctx context.Context) error {
	s, err := d.newest(ctx)
	if err != nil || s == nil {
		return err
	}
	return d.m.pack(ctx, d.ws, d.id, s.Snapshot.Snapshot, d.noteSnapshots)
}

// over tells errors that end the lease or the driver.
func (d *driver) over(err error) bool {
	var dead *crash
	return errors.As(err, &dead) || errors.Is(err, store.ErrFenced) || errors.Is(err, store.ErrUnknown) || errors.Is(err, context.Canceled)
}

// turnEnds is called before the turn's rest is appended: it waits for the
// snapshot under way and takes the one of policy turn. A snapshot that failed
// at the last step is tried again.
func (d *driver) turnEnds(ctx context.Context) error {
	if d.machine() == nil {
		return nil
	}
	d.joinSave(ctx)
	d.saves.mu.Lock()
	failed := d.saves.failed
	d.saves.mu.Unlock()
	var why string
	switch policy := d.saving().Snapshot; {
	case policy == api.SnapshotTurn:
		why = whyTurn
	case policy == api.SnapshotStep && failed:
		why = whyStep
	default:
		return nil
	}
	if err := d.save(ctx, why, d.through()); d.over(err) {
		return err
	}
	return nil // else counted and logged: it fails no session
}

// saveForSuspend returns the record of the snapshot that the machine is
// suspended into: its image is durable and verified, and the caller appends the
// record together with the machine's and the rest before it ends the sandbox.
// When nothing changed since the newest snapshot it is that one's record again,
// which says so with a later Through. A crash before the append leaves a living
// sandbox and an image that nobody names.
func (d *driver) saveForSuspend(ctx context.Context) (store.Snapshot, error) {
	d.joinSave(ctx)
	d.saves.take.Lock()
	defer d.saves.take.Unlock()
	through := d.through()
	s, release, err := d.takeSnapshot(ctx, whySuspend, through, true)
	if err == nil && s == nil {
		err = sandbox.ErrNotFound
	}
	if err != nil {
		release()
		return store.Snapshot{}, fmt.Errorf("suspend: %w", err)
	}
	d.saves.mu.Lock()
	d.saves.held = append(d.saves.held, release)
	body := s.Snapshot
	d.saves.mu.Unlock()
	body.Through, body.Why = max(body.Through, through), whySuspend
	d.m.keep.look(d.ws, d.id, time.Second)
	return body, nil
}
