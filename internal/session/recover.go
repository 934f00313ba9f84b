package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// machineState is what the log says of the session's machine.
type machineState struct {
	Act        string       `json:"act,omitempty"` // of the newest record; empty: it never had one
	Node       store.NodeID `json:"node,omitempty"`
	Generation uint64       `json:"generation,omitempty"`
	Life       string       `json:"life,omitempty"` // sandbox.Life
	// Base is the newest start of a fresh machine: nothing older is in any snapshot.
	Base store.Seq `json:"base,omitempty"`
	// Snapshots that were not dropped, oldest first.
	Snapshots []savedState `json:"snapshots,omitempty"`
}

// savedState is a snapshot as the log tells of it.
type savedState struct {
	store.Snapshot
	At     time.Time `json:"at"`
	Tested bool      `json:"tested,omitempty"`
	Failed bool      `json:"failed,omitempty"` // its newest test found it damaged
}

// liveAct reports whether a machine runs after a record with this act.
func liveAct(act string) bool {
	return act == store.MachineStarted || act == store.MachineAttached || act == store.MachineRestored
}

func (st *state) foldMachine(e store.Entry) error {
	var b store.Machine
	if err := json.Unmarshal(e.Body, &b); err != nil {
		return err
	}
	m := &st.machine
	m.Act, m.Node = b.Act, b.Node
	if b.Generation != 0 {
		m.Generation = b.Generation
	}
	if b.Life != "" {
		m.Life = b.Life
	}
	if b.Act == store.MachineStarted && (m.Base == 0 || len(b.Missing) > 0) {
		m.Base = e.Seq // else it holds all that ran since the former start, again
	}
	if b.Reason != "" && (b.Act == store.MachineStarted || b.Act == store.MachineRestored) {
		for _, c := range st.open() {
			if c.tool != "" && !c.waitsForPerson() {
				c.losses++ // it was the next to end
				break
			}
		}
	}
	if len(b.Missing) > 0 {
		for _, c := range st.open() {
			c.behind = true
		}
	}
	delete(st.tries, "machine")
	if b.Note != "" {
		st.note(b.Note)
	}
	return nil
}

func (st *state) foldSnapshot(e store.Entry) error {
	var b store.Snapshot
	if err := json.Unmarshal(e.Body, &b); err != nil {
		return err
	}
	list := st.machine.Snapshots
	i := slices.IndexFunc(list, func(s savedState) bool { return s.Snapshot.Snapshot == b.Snapshot })
	switch {
	case b.Act == store.SnapshotTaken && i < 0:
		st.machine.Snapshots = append(list[:len(list):len(list)], savedState{Snapshot: b, At: e.At})
	case b.Act == store.SnapshotTaken:
		// Nothing has changed since: it holds what came later, too.
		s := list[i]
		s.Through, s.Running = b.Through, b.Running
		st.machine.Snapshots = append(slices.Delete(slices.Clone(list), i, i+1), s)
	case i < 0: // of a snapshot of another time: nothing to keep
	case b.Act == store.SnapshotDropped:
		st.machine.Snapshots = slices.Delete(slices.Clone(list), i, i+1)
	default:
		list = slices.Clone(list)
		if b.Act == store.SnapshotPacked {
			list[i].Packed = b.Packed
		}
		if b.Act == store.SnapshotTested {
			list[i].Tested, list[i].Failed = list[i].Tested || b.Failed == "", b.Failed != ""
		}
		st.machine.Snapshots = list
	}
	return nil
}

// reattach takes the session's machine into this driver's hands when it lives
// here: its owner was gone, or had parked the session. What runs inside went on.
//
//  1. the sandbox is found, under our fence: no older owner is obeyed any more
//  2. a record says so. A crash before it leaves the machine to the next owner.
//
// A sandbox that no record tells of was started or restored by an owner that
// died before it said so: no call has ended in it, and it is ended.
func (d *driver) reattach(ctx context.Context) error {
	if d.m.cfg.Sandboxes == nil {
		return nil
	}
	d.m.unpause(ctx, d.key())
	s, err := d.m.cfg.Sandboxes.Find(ctx, string(d.ws), string(d.id), uint64(d.lease.Fence()))
	switch {
	case errors.Is(err, sandbox.ErrNotFound):
		return d.killNamed(ctx) // a dead one leaves its folder
	case errors.Is(err, sandbox.ErrFenced):
		return d.disown(ctx, err)
	case ofNode(err):
		// That says nothing of the machine, which is not ended for it (trial G 111).
		// It is tried again.
		return &nodeError{err}
	case err != nil:
		// It lives and does not answer. What is brought back does.
		d.m.log.Warn("the machine does not answer and is given up", "session", d.id, "err", err)
		return d.killNamed(ctx)
	}
	var m machineState
	var terminated bool
	d.read(func(st *state) { m, terminated = st.machine, st.status == store.StatusTerminated })
	// Generations repeat when a snapshot is restored again, or a machine begins
	// anew; a life does not. Records of former versions name none.
	if terminated || !liveAct(m.Act) || m.Generation != s.Generation() || m.Life != "" && m.Life != s.Life() {
		return s.Kill(context.WithoutCancel(ctx))
	}
	if err := d.machineRecord(ctx, store.Machine{Act: store.MachineAttached, Generation: s.Generation(), Life: s.Life()}); err != nil {
		return err
	}
	d.hold(newMachine(s))
	return nil
}

// nodeError: what kept a driver from its work is not the session's but this
// node's, and passes when a person sees to it. It uses up no patience.
type nodeError struct{ error }

func (e *nodeError) Unwrap() error { return e.error }

// nodeTries is the wait after it, in failures in a row.
const nodeTries = 5

// disown ends a machine that does not take us for its owner, unless we are not:
// that is for the store to say. Its agent may be told of fences by anybody who
// speaks for it, and a store that was put back knows lower ones.
func (d *driver) disown(ctx context.Context, why error) error {
	row, err := d.m.db.Session(ctx, d.ws, d.id)
	if err != nil {
		return err
	}
	if row.Fence != d.lease.Fence() {
		return fmt.Errorf("%w: %w", store.ErrFenced, why)
	}
	d.m.log.Warn("the machine is not this owner's and is given up", "session", d.id, "err", why)
	return d.m.cfg.Sandboxes.End(context.WithoutCancel(ctx), string(d.ws), string(d.id))
}

// ofNode tells errors of this node's system, such as a full disk: they say
// nothing of the machine or its snapshots.
func ofNode(err error) bool {
	return errors.As(err, new(syscall.Errno)) && !errors.Is(err, fs.ErrNotExist)
}

// machineRecord commits what became of the machine.
func (d *driver) machineRecord(ctx context.Context, m store.Machine, more ...store.Draft) error {
	m.V, m.Node = store.BodyVersion, d.lease.Node()
	drafts := append([]store.Draft{record(store.KindMachine, d.newID("rec_"), "", m)}, more...)
	// What is known of the machine must not depend on who leaves meanwhile.
	_, err := d.append(context.WithoutCancel(ctx), store.Append{Entries: drafts})
	return err
}

// machineTries is how often the machine is tried to be made before the calls
// that need it are answered with the error.
const machineTries = 3

// ready sees to it that the session has a machine: the one that it holds, a
// fresh one, or the one that it had, brought back. false: something else is to
// be looked at first, or a wait is on record.
func (d *driver) ready(ctx context.Context, needing []*call) (bool, error) {
	if b := d.held(); b != nil {
		return d.mountedNow(ctx, b, needing)
	}
	d.letGo()
	var tries int
	d.read(func(st *state) { tries = st.tries["machine"] })
	err, cut := d.makeNow(ctx)
	var dead *crash
	switch {
	case err == nil:
		return true, nil
	case errors.As(err, &dead), errors.Is(err, store.ErrFenced), errors.Is(err, store.ErrConflict), errors.Is(err, store.ErrUnknown):
		return false, err
	case errors.Is(cut, store.ErrFenced):
		return false, cut
	case cut != nil:
		return false, nil // the loop sees why
	}
	return false, d.noMachine(ctx, err, tries+1, needing)
}

// makeNow is make while the inbox is served. cut is why it was to be cut short.
func (d *driver) makeNow(ctx context.Context) (err, cut error) {
	d.during(ctx, func(soft context.Context) {
		defer d.keepAlive(time.Hour)()
		err = d.make(soft)
		cut = context.Cause(soft)
	})
	return err, cut
}

// make makes the machine, where the driver holds none, and puts the session's
// resources into it, as far as they are not there.
func (d *driver) make(ctx context.Context) (err error) {
	if d.held() == nil {
		d.letGo()
		// What was saved of the one that died is in the log first: it is what is
		// brought back, and never stands there as a state of the next one.
		if err := d.savesOver(ctx); err != nil {
			return err
		}
		var m machineState
		var tries int
		d.read(func(st *state) { m, tries = st.machine, st.tries["machine"] })
		if m.Act == "" {
			err = d.start(ctx, store.Machine{})
		} else {
			err = d.bringBack(ctx, m, tries)
		}
		if err != nil {
			return err
		}
	}
	b := d.held()
	if b == nil {
		return errMachineGone
	}
	if err := d.mountInto(ctx, b); err != nil {
		return fmt.Errorf("mount the session's resources: %w", err)
	}
	return nil
}

// noMachine waits after a failed try, or answers the calls that need the machine.
func (d *driver) noMachine(ctx context.Context, err error, tries int, needing []*call) error {
	d.m.log.Warn("cannot make the session's machine", "session", d.id, "err", err)
	what := "The session's machine could not be started: " + err.Error()
	limit := machineTries
	if errors.Is(err, errElsewhere) {
		limit = elsewhereTries
	}
	if tries < limit && !final(err) {
		return d.reschedule(ctx, newSessionError("unknown_error", what+". It is tried again.", "retrying"),
			store.Wait{Until: d.m.now().Add(d.m.patience.backoff(tries, 0)), Reason: "machine", Tries: tries})
	}
	var drafts []store.Draft
	if final(err) {
		drafts = append(drafts, event(d.newID("sevt_"), evError, "", fields{"error": newSessionError("unknown_error",
			what+". The next call that needs it tries again.", "retrying")}))
	}
	for _, c := range needing {
		drafts = append(drafts, d.unrun(c, gateway.Answer{IsError: true, Content: text(what + ". Nothing was run.")})...)
	}
	_, aerr := d.append(ctx, store.Append{Entries: drafts})
	return aerr
}

// final reports whether an error of making a machine stays what it is however
// often it is tried: the model and the user read it.
func final(err error) bool {
	return errors.Is(err, sandbox.ErrImage) && !errors.Is(err, sandbox.ErrRegistry) || errors.As(err, new(*BuildError)) ||
		errors.As(err, new(*MountError))
}

// start makes a fresh machine. rec says why, when it is not the session's first.
//
//  1. the sandbox. A crash from here to 2 leaves a sandbox that no record tells
//     of; the next owner ends it.
//  2. the record: from here on the session's resources are put into it, and calls
//     run in it.
func (d *driver) start(ctx context.Context, rec store.Machine) error {
	began := d.m.now()
	b, err := d.freshMachine(ctx)
	if err != nil {
		return err
	}
	if err := d.m.fault("machine_started"); err != nil {
		return err // it is left as a crash would leave it
	}
	rec.Act, rec.Generation, rec.Life, rec.ElapsedMS = store.MachineStarted, b.s.Generation(), b.s.Life(), d.m.now().Sub(began).Milliseconds()
	if err := d.machineRecord(ctx, rec); err != nil {
		return d.abort(b, err)
	}
	if err := d.m.fault("machine_recorded"); err != nil {
		return err
	}
	d.hold(b)
	return nil
}

func (d *driver) freshMachine(ctx context.Context) (*machine, error) {
	// One that another try of this driver left does not come between.
	if err := d.killNamed(ctx); err != nil {
		return nil, err
	}
	s, err := d.fresh(ctx, d.spec())
	if err != nil {
		return nil, err
	}
	return newMachine(s), nil
}

// abort ends a machine that no record tells of and passes the reason on. After a
// simulated death it touches nothing.
func (d *driver) abort(b *machine, why error) error {
	var dead *crash
	if errors.As(why, &dead) || errors.Is(why, store.ErrUnknown) {
		return why // the next owner finds it
	}
	d.drop(b)
	b.close()
	if err := b.s.Kill(context.Background()); err != nil {
		return errors.Join(why, err)
	}
	return why
}

// recovery is one bringing back of a machine.
type recovery struct {
	rec   store.Machine
	b     *machine
	after store.Seq   // results up to here are inside
	saved *savedState // what it was restored from; nil: it is fresh
	// Calls that came back with it: running ones, and those whose results it keeps.
	running, kept []store.EventID
	stopped       []store.EventID // of the running ones: half done, see endStray
	gap           string          // why calls are missing
}

// knows reports whether a call goes on in it, or has its result there.
func (r *recovery) knows(id store.EventID) bool {
	return slices.Contains(r.running, id) || slices.Contains(r.kept, id)
}

// bringBack makes the session's machine again after it was suspended or lost:
// from its newest snapshot that can be restored, else fresh, and runs again what
// ended after that, as far as that can be done without touching the world.
//
//  1. the sandbox is restored. A crash from here to 3 leaves a sandbox whose
//     life no record tells of; the next owner ends it and begins again.
//  2. calls are run again in it; its processes have no way out meanwhile
//  3. one append: what was done, what is missing, the note for the model, and
//     the honest results of open calls that cannot be run again
func (d *driver) bringBack(ctx context.Context, m machineState, tries int) error {
	began := d.m.now()
	not := map[store.EventID]string{} // calls that must not be run again, and why
	r, past, err := d.restoreAndRepeat(ctx, m, tries, not)
	for e := (*badRepeat)(nil); errors.As(err, &e) && len(not) < machineTries; {
		d.m.log.Warn("a call is left out when calls are run again", "session", d.id, "err", e)
		not[e.event] = e.why
		r, past, err = d.restoreAndRepeat(ctx, m, tries, not)
	}
	if err != nil {
		return err
	}
	drafts := d.stillOpen(r, past)
	r.rec.Generation, r.rec.Life, r.rec.ElapsedMS = r.b.s.Generation(), r.b.s.Life(), d.m.now().Sub(began).Milliseconds()
	r.rec.Note = noteOf(r, past)
	if err := d.machineRecord(ctx, r.rec, drafts...); err != nil {
		return d.abort(r.b, err)
	}
	if err := d.m.fault("machine_recorded"); err != nil {
		return err
	}
	r.b.setPartial(false)
	r.b.setShut(false)
	d.hold(r.b)
	return nil
}

// badRepeat: a call was run again and should not have been. The machine begins
// anew without it.
type badRepeat struct {
	event store.EventID
	why   string
}

func (e *badRepeat) Error() string { return fmt.Sprintf("call %s: %s", e.event, e.why) }

// restoreAndRepeat does the first two steps of bringBack. A machine of which it
// reports an error is ended.
func (d *driver) restoreAndRepeat(ctx context.Context, m machineState, tries int, not map[store.EventID]string) (*recovery, past, error) {
	r, err := d.restore(ctx, m, tries)
	if err != nil {
		return nil, past{}, err
	}
	r.b.setPartial(true)
	r.b.setShut(true)
	var dead *crash
	if err := d.m.fault("machine_restored"); errors.As(err, &dead) {
		return nil, past{}, err
	}
	if m.Act != store.MachineSuspended {
		r.rec.Reason = "the machine died"
		if m.Node != d.lease.Node() && liveAct(m.Act) {
			r.rec.Reason = "the machine was not there any more when the session was taken over"
		}
	}
	past, err := d.since(ctx, r.after)
	if err == nil {
		err = d.endStray(ctx, r, past)
	}
	if err == nil && len(past.calls) > 0 {
		// They found the resources in it, so those come first.
		r.b.setShut(false)
		d.hold(r.b)
		if err = d.mountInto(ctx, r.b); err != nil {
			err = fmt.Errorf("mount the session's resources: %w", err)
		}
	}
	if err == nil {
		err = d.repeat(ctx, r, past, not)
	}
	if err != nil {
		return nil, past, d.abort(r.b, err)
	}
	return r, past, nil
}

// endStray ends what runs in a machine that was brought back and must not go on:
// calls that reached out after the state that it is in, for they would again,
// and those that nobody waits for. What they did until then stays inside.
func (d *driver) endStray(ctx context.Context, r *recovery, p past) error {
	var stray []store.EventID
	for _, id := range r.running {
		wanted := slices.ContainsFunc(p.calls, func(c *pastCall) bool { return c.event == id && !c.cut && !slices.Contains(r.rec.Missing, id) })
		if slices.Contains(r.rec.Repeated, id) {
			continue // it has ended by now
		}
		d.read(func(st *state) {
			c := st.call(id)
			wanted = wanted || c != nil && !c.closed
		})
		if !wanted || p.reachedOut(id, r.after) != "" {
			stray = append(stray, id)
		}
	}
	if len(stray) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, cancelledCallEnd)
	defer cancel()
	names := make([]string, len(stray))
	for i, id := range stray {
		names[i] = string(id)
	}
	if err := r.b.s.Cancel(ctx, names...); err != nil {
		return fmt.Errorf("end calls that must not go on: %w", err)
	}
	for _, id := range names {
		if _, err := r.b.s.Reattach(ctx, id, nil); err != nil && !errors.Is(err, sandbox.ErrUnknownCall) {
			return fmt.Errorf("end call %s, which must not go on: %w", id, err)
		}
	}
	d.ack(ctx, r.b, stray...)
	r.stopped = append(r.stopped, stray...)
	r.running = slices.DeleteFunc(r.running, func(id store.EventID) bool { return slices.Contains(stray, id) })
	return nil
}

// restore brings back the newest snapshot that can be, else a fresh machine.
// While an error may pass by itself nothing older is taken.
func (d *driver) restore(ctx context.Context, m machineState, tries int) (*recovery, error) {
	r := &recovery{rec: store.Machine{Act: store.MachineRestored}}
	if err := d.killNamed(ctx); err != nil {
		return nil, err
	}
	for _, saved := range slices.Backward(m.Snapshots) {
		id := saved.Snapshot.Snapshot
		s, back, err := d.revive(ctx, saved)
		if err == nil {
			r.b, r.after, r.saved = newMachine(s), saved.Through, &saved
			r.rec.Snapshot, r.rec.Dead = id, back.Dead
			for _, id := range back.Running {
				r.running = append(r.running, store.EventID(id))
			}
			for _, id := range back.Kept {
				r.kept = append(r.kept, store.EventID(id))
			}
			return r, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if d.elsewhere(ctx, saved, err) {
			return nil, fmt.Errorf("%w: %w", errElsewhere, err)
		}
		if !unrestorable(err) && tries < machineTries-1 || errors.Is(err, sandbox.ErrRegistry) || errors.Is(err, sandbox.ErrFull) || ofNode(err) {
			return nil, err // nothing is given up because a registry is away, or this node has no room or no disk
		}
		d.m.log.Error("snapshot cannot be restored", "session", d.id, "snapshot", id, "err", err)
		r.rec.Tried = append(r.rec.Tried, store.TriedSnapshot{Snapshot: id, Reason: clip(err.Error(), 500)})
	}
	b, err := d.freshMachine(ctx)
	if err != nil {
		return nil, err
	}
	r.b, r.after, r.rec.Act = b, m.Base, store.MachineStarted
	return r, nil
}

// errElsewhere: another node has the session's newest state, lives, and has not
// brought it into the blob store yet (keepSession). Nothing older is taken.
var errElsewhere = errors.New("its newest state lies on another node, which has not stored it yet")

// elsewhereTries is machineTries where another node is waited for: half a minute.
const elsewhereTries = 6

// elsewhere reports whether a snapshot that is not found lies, undamaged as far as
// is known, on a living node.
func (d *driver) elsewhere(ctx context.Context, s savedState, err error) bool {
	if !errors.Is(err, sandbox.ErrNotFound) || len(s.Packed) > 0 || s.Failed || s.Node == "" || s.Node == d.lease.Node() {
		return false
	}
	nodes, err := d.m.db.Nodes(ctx, 1000)
	return err != nil || slices.ContainsFunc(nodes, func(n store.NodeRow) bool {
		return n.ID == s.Node && n.LeftAt.IsZero() && n.DeadAt.IsZero()
	})
}

// unrestorable tells errors that stay what they are.
func unrestorable(err error) bool {
	return errors.Is(err, sandbox.ErrDamaged) || errors.Is(err, sandbox.ErrRoot) || errors.Is(err, sandbox.ErrRuntime) ||
		errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrUnsupported)
}

// revive restores one snapshot: its image lies here, or is rebuilt from its pack.
func (d *driver) revive(ctx context.Context, saved savedState) (*sandbox.Sandbox, *sandbox.Restored, error) {
	m, err := d.manifest(ctx, saved.Snapshot)
	if err != nil {
		return nil, nil, err
	}
	s, back, err := d.m.cfg.Sandboxes.Restore(ctx, m, d.spec())
	if errors.Is(err, sandbox.ErrDamaged) && len(saved.Packed) > 0 {
		return d.reviveFromPack(ctx, saved, err)
	}
	return s, back, err
}

// manifest finds a snapshot's image.
func (d *driver) manifest(ctx context.Context, s store.Snapshot) (*sandbox.Manifest, error) {
	m, err := d.m.cfg.Sandboxes.ReadSnapshot(s.Snapshot)
	if !unrestorable(err) || len(s.Packed) == 0 {
		return m, err
	}
	return d.unpack(ctx, s)
}
