package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	newest *store.Snapshot
	at     time.Time        // when newest was taken
	state  sandbox.Activity // what the sandbox had done when newest was taken
	read   bool             // the log was asked for newest
	stop   func()           // of the interval's goroutine
	held   func()           // lets go of an image that is not named yet, see saveForSuspend
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

// saving is what the environment says of snapshots, with the defaults.
func (d *driver) saving() (m api.Machine) {
	var config struct {
		Planaria api.Machine `json:"planaria"`
	}
	d.read(func(st *state) {
		if len(st.config.Environment) > 0 {
			_ = json.Unmarshal(st.config.Environment, &config) // checked when it was created
		}
	})
	m = config.Planaria
	if m.Snapshot == "" {
		m.Snapshot = api.SnapshotStep
	}
	if m.IntervalSeconds == 0 {
		m.IntervalSeconds = 300
	}
	if m.OutputCommit == "" {
		m.OutputCommit = api.CommitLocal
	}
	if m.KeepSnapshots == 0 {
		m.KeepSnapshots = 5
	}
	return m
}

// thinking is called right before the model is asked: no contained call runs,
// and the time is free. Under policy step a snapshot is started when the step
// changed something; under policy interval a timer is. It returns at once.
func (d *driver) thinking(ctx context.Context) {
	if d.machine() == nil {
		return
	}
	switch s := d.saving(); s.Snapshot {
	case api.SnapshotStep:
		d.startSave(ctx, whyStep)
	case api.SnapshotInterval:
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
			if d.machine() != nil {
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
	if held != nil {
		held()
	}
}

// save takes a snapshot if anything changed since the newest one, and logs it.
// nil: the log names a snapshot that holds the state as it was when save was
// called, or later.
func (d *driver) save(ctx context.Context, why string, through store.Seq) error {
	d.saves.take.Lock()
	defer d.saves.take.Unlock()
	body, release, err := d.takeSnapshot(ctx, why, through)
	defer release()
	if err != nil || body == nil {
		return err
	}
	return d.logSnapshot(ctx, body)
}

// logSnapshot names a taken snapshot in the log. A crash before this commit
// leaves an image that nobody names; after it there is nothing to repair.
func (d *driver) logSnapshot(ctx context.Context, body *store.Snapshot) error {
	if err := d.m.fault("before_snapshot"); err != nil {
		return err
	}
	if _, err := d.append(ctx, store.Append{Entries: []store.Draft{record(store.KindSnapshot, d.newID("rec_"), "", body)}}); err != nil {
		return fmt.Errorf("log snapshot %s: %w", body.Snapshot, err)
	}
	d.saves.mu.Lock()
	d.saves.newest, d.saves.read = body, true
	d.saves.mu.Unlock()
	return d.m.fault("after_snapshot")
}

// takeSnapshot makes an image if anything changed since the newest snapshot;
// nil when nothing did. saves.take is held. Until release is called the image
// is not swept though no entry names it.
func (d *driver) takeSnapshot(ctx context.Context, why string, through store.Seq) (body *store.Snapshot, release func(), err error) {
	release = func() {}
	box := d.machine()
	if box == nil {
		return nil, release, nil
	}
	ctx, cancel := context.WithTimeout(ctx, saveTime)
	defer cancel()
	activity, changed, err := d.changed(ctx, box)
	if err == nil && !changed {
		return nil, release, nil
	}
	began := time.Now()
	var m *sandbox.Manifest
	if err == nil {
		m, err = box.Snapshot(ctx)
	}
	d.observeSaved(ctx, why, m, time.Since(began), err)
	if err != nil {
		return nil, release, err
	}
	body = &store.Snapshot{V: store.BodyVersion, Act: store.SnapshotTaken, Snapshot: m.ID, Why: why, Node: d.lease.Node(),
		Through: through, Parent: m.Parent, Root: m.Root.Digest, Runtime: m.Runtime, Generation: m.Generation,
		Bytes: m.Size(), PauseMS: m.Took.Checkpoint}
	for _, id := range append(m.Running, m.Kept...) {
		body.Running = append(body.Running, store.EventID(id))
	}
	d.saves.mu.Lock()
	d.saves.at, d.saves.state = m.At, activity
	d.saves.mu.Unlock()
	return body, release, nil
}

// changed asks the sandbox whether anything happened since the newest snapshot.
func (d *driver) changed(ctx context.Context, box *sandbox.Sandbox) (sandbox.Activity, bool, error) {
	now, err := box.Activity(ctx)
	if err != nil {
		return now, false, err
	}
	d.saves.mu.Lock()
	defer d.saves.mu.Unlock()
	return now, d.saves.newest == nil || d.saves.newest.Generation != box.Generation() || !sandbox.Same(now, d.saves.state), nil
}

// observeSaved counts a try. A missing checkpoint is an alarm and never the
// session's failure (trial G 95); that the driver is leaving is neither.
func (d *driver) observeSaved(ctx context.Context, why string, m *sandbox.Manifest, elapsed time.Duration, err error) {
	if err != nil && errors.Is(context.Cause(ctx), context.Canceled) {
		return
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
	s := d.saving()
	if s.OutputCommit == api.CommitOff || d.machine() == nil {
		return nil
	}
	var err error
	for range commitTries {
		d.joinSave(ctx)
		if err = d.save(ctx, whyCommit, d.through()); err == nil || d.over(err) {
			break
		}
	}
	if err != nil && !d.over(err) {
		return fmt.Errorf("%w: %w", errUnsaved, err)
	}
	return err
}

// over tells errors that end the lease or the driver.
func (d *driver) over(err error) bool {
	var dead *crash
	return errors.As(err, &dead) || errors.Is(err, store.ErrFenced) || errors.Is(err, context.Canceled)
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
	policy := d.saving().Snapshot
	if policy != api.SnapshotTurn && !(policy == api.SnapshotStep && failed) {
		return nil
	}
	why := whyTurn
	if policy == api.SnapshotStep {
		why = whyStep
	}
	if err := d.save(ctx, why, d.through()); d.over(err) {
		return err
	}
	return nil
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
	if d.machine() == nil {
		return store.Snapshot{}, fmt.Errorf("suspend: %w", sandbox.ErrNotFound)
	}
	through := d.through()
	body, release, err := d.takeSnapshot(ctx, whySuspend, through)
	if err != nil {
		return store.Snapshot{}, fmt.Errorf("suspend: %w", err)
	}
	d.saves.mu.Lock()
	defer d.saves.mu.Unlock()
	if body == nil {
		again := *d.saves.newest
		again.Through, again.Why = max(again.Through, through), whySuspend
		return again, nil
	}
	d.saves.newest, d.saves.held = body, release
	return *body, nil
}
