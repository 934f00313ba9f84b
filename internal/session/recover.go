package session

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/tool"
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
		return d.m.killNamed(ctx, d.key()) // a dead one leaves its folder
	case errors.Is(err, sandbox.ErrFenced):
		return fmt.Errorf("%w: %w", store.ErrFenced, err)
	case err != nil:
		// It lives and does not answer. What is brought back does.
		d.m.log.Warn("the machine does not answer and is given up", "session", d.id, "err", err)
		return d.m.killNamed(ctx, d.key())
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
	var m machineState
	var tries int
	d.read(func(st *state) { m, tries = st.machine, st.tries["machine"] })
	var err error
	var cut error
	d.during(ctx, func(soft context.Context) {
		defer d.keepAlive(time.Hour)()
		err = d.make(soft, m, tries)
		cut = context.Cause(soft)
	})
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

// make makes the machine, where the driver holds none, and puts the session's
// resources into it, as far as they are not there.
func (d *driver) make(ctx context.Context, m machineState, tries int) (err error) {
	if d.held() == nil {
		d.letGo()
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
	if tries < machineTries && !final(err) {
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
	if err := d.m.killNamed(ctx, d.key()); err != nil {
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
	var fatal []store.EventID // calls that end the machine when they are run again
	r, past, err := d.restoreAndRepeat(ctx, m, tries, fatal)
	for e := (*fatalCall)(nil); errors.As(err, &e) && len(fatal) < machineTries; {
		d.m.log.Error("a call ends the machine when it is run again, and is left out", "session", d.id, "call", e.event)
		fatal = append(fatal, e.event)
		r, past, err = d.restoreAndRepeat(ctx, m, tries, fatal)
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

// fatalCall: the machine died while a call was run again in it.
type fatalCall struct{ event store.EventID }

func (e *fatalCall) Error() string {
	return fmt.Sprintf("the machine died while call %s was run again", e.event)
}

// restoreAndRepeat does the first two steps of bringBack. A machine of which it
// reports an error is ended.
func (d *driver) restoreAndRepeat(ctx context.Context, m machineState, tries int, fatal []store.EventID) (*recovery, past, error) {
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
		err = d.repeat(ctx, r, past, fatal)
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
	if err := d.m.killNamed(ctx, d.key()); err != nil {
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
		if !unrestorable(err) && tries < machineTries-1 || errors.Is(err, sandbox.ErrRegistry) || errors.Is(err, sandbox.ErrFull) {
			return nil, err // nothing is given up because a registry is away, or this node has no room
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

// pastCall is a contained call that ended after the state that was brought back.
type pastCall struct {
	event   store.EventID
	tool    string
	input   json.RawMessage
	content json.RawMessage
	isError bool
	ended   bool
	unrun   bool
	cut     bool      // the user may have ended it
	at      store.Seq // of its result
}

// past is what happened since a seq.
type past struct {
	calls   []*pastCall // ended ones, in the order of their results
	tunnels []tunnelAt
	output  store.Seq // of the newest output that was read
}

type tunnelAt struct {
	seq store.Seq
	store.Tunnel
}

// since reads what ended after a seq, from the output before it on: a call may
// have been under way then.
func (d *driver) since(ctx context.Context, after store.Seq) (past, error) {
	var p past
	from := after
	before, err := d.m.db.Entries(ctx, d.ws, d.id, store.Range{Until: after, Kinds: []store.Kind{store.KindOutput}, Desc: true, Limit: 1})
	if err != nil {
		return p, err
	}
	if len(before) > 0 {
		from = before[0].Seq - 1
	}
	entries, err := d.m.db.Entries(ctx, d.ws, d.id, store.Range{After: from,
		Kinds: []store.Kind{store.KindOutput, store.KindEvent, store.KindTunnel}})
	if err != nil {
		return p, err
	}
	byID := map[store.EventID]*pastCall{}
	for _, e := range entries {
		if err := p.entry(e, after, byID); err != nil {
			return p, err
		}
	}
	return p, nil
}

func (p *past) entry(e store.Entry, after store.Seq, byID map[store.EventID]*pastCall) error {
	switch {
	case e.Kind == store.KindOutput:
		var o store.Output
		if err := json.Unmarshal(e.Body, &o); err != nil {
			return err
		}
		p.output = e.Seq
		for _, c := range o.Calls {
			if c.Tool != "" {
				byID[c.Event] = &pastCall{event: c.Event, tool: c.Tool}
			}
		}
	case e.Kind == store.KindTunnel:
		t := tunnelAt{seq: e.Seq}
		if err := json.Unmarshal(e.Body, &t.Tunnel); err != nil {
			return err
		}
		if !t.Ended {
			p.tunnels = append(p.tunnels, t)
		}
	case e.Type == inInterrupt, e.Type == evPaused:
		// They end what runs, and stand behind its result. What the user stopped
		// is not to be done after all.
		for _, c := range p.calls {
			c.cut = c.cut || c.isError && c.at > p.output
		}
	case e.Type == evToolUse:
		var b eventBody
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return err
		}
		if c := byID[store.EventID(e.ID)]; c != nil {
			c.input = b.Input
		}
	case e.Type == evToolResult:
		var b struct {
			eventBody
			Unrun bool `json:"not_run"`
		}
		if err := json.Unmarshal(e.Body, &b); err != nil {
			return err
		}
		if c := byID[b.ToolUseID]; c != nil {
			c.ended, c.unrun, c.content, c.isError, c.at = true, b.Unrun, b.Content, b.IsError, e.Seq
			if e.Seq > after && !b.Unrun {
				p.calls = append(p.calls, c)
			}
		}
	}
	return nil
}

// shutOff closes the way out of a machine that is brought back: new connections
// are refused at once, and those that its processes opened while its resources
// were mounted end.
func (d *driver) shutOff(b *machine) *machine {
	b.close()
	n := b.reopened()
	n.setPartial(true)
	n.setShut(true)
	d.hold(n)
	return n
}

// outside tells why a call may not be run again: it reached out, or a process
// that no call can be named for did after the state that was brought back. That
// process may have done later what the call left to it, and would again.
func (p *past) outside(c *pastCall, after store.Seq) string {
	for _, t := range p.tunnels {
		if slices.Contains(t.Calls, c.event) {
			return "it had a connection to " + t.Host
		}
		if len(t.Calls) == 0 && t.seq > after {
			return "a process had a connection to " + t.Host
		}
	}
	return ""
}

// reachedOut names the host to which a call had a connection after a seq.
func (p *past) reachedOut(id store.EventID, after store.Seq) (host string) {
	for _, t := range p.tunnels {
		if t.seq > after && slices.Contains(t.Calls, id) {
			host = t.Host
		}
	}
	return host
}

// maxRepeat bounds how long calls are run again in all.
const maxRepeat = 10 * time.Minute

// repeat runs again, in order, the calls that ended after the state that was
// brought back, while each result equals the recorded one and none of them
// touched the world (design section 5, recovery, step 3). Reading calls are
// skipped: there is nothing of them to bring back.
func (d *driver) repeat(ctx context.Context, r *recovery, p past, fatal []store.EventID) error {
	if len(p.calls) > 0 {
		r.b = d.shutOff(r.b) // what is run again must not reach out
	}
	end := d.m.now().Add(maxRepeat)
	for _, c := range p.calls {
		if reads(c.tool) {
			continue
		}
		if there, err := d.isInside(ctx, r, c); err != nil {
			return err
		} else if there {
			continue
		}
		switch {
		case r.gap != "":
		case c.cut:
			r.gap = "the user had it ended while it ran"
		case p.outside(c, r.after) != "":
			r.gap = p.outside(c, r.after)
		case slices.Contains(fatal, c.event):
			r.gap = "run again, it ended the machine"
		default:
			same, err := d.again(ctx, r.b, c, end.Sub(d.m.now()))
			switch {
			case errors.Is(err, errTooLong):
				r.gap = "running calls again took too long"
			case err != nil && r.b.dead() && ctx.Err() == nil:
				return &fatalCall{c.event}
			case err != nil:
				return err
			case same:
				r.rec.Repeated = append(r.rec.Repeated, c.event)
				continue
			default:
				r.gap = "run again, it had another result"
			}
		}
		r.rec.Missing = append(r.rec.Missing, c.event)
	}
	return d.endStray(ctx, r, p)
}

// isInside reports whether a call that ended behind Through has ended in the
// image all the same: it did so while the snapshot was taken. The snapshot lists
// those that may have; what was acknowledged meanwhile only the machine knows.
func (d *driver) isInside(ctx context.Context, r *recovery, c *pastCall) (bool, error) {
	switch {
	case slices.Contains(r.kept, c.event):
		d.ack(ctx, r.b, c.event)
		return true, nil
	case r.saved == nil || !slices.Contains(r.saved.Running, c.event):
		return false, nil
	case slices.Contains(r.running, c.event), slices.Contains(r.stopped, c.event):
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, cancelledCallEnd)
	defer cancel()
	_, err := r.b.s.Reattach(ctx, string(c.event), nil)
	if errors.Is(err, sandbox.ErrUnknownCall) {
		return false, nil
	}
	return err == nil, err
}

// errTooLong: a call that is run again does not end in time.
var errTooLong = errors.New("running calls again takes too long")

// again runs one call again, for at most the time that is left, and compares.
func (d *driver) again(ctx context.Context, b *machine, c *pastCall, left time.Duration) (same bool, err error) {
	run, cancel := context.WithTimeoutCause(ctx, left, errTooLong)
	defer cancel()
	a, err := tool.Run(run, b.s, tool.Call{ID: string(c.event), Thread: string(d.scope.Thread), Name: c.tool, Input: c.input}, nil)
	if err != nil && errors.Is(context.Cause(run), errTooLong) {
		d.cancelCall(ctx, b, c.event)
		return false, errTooLong
	}
	if err != nil {
		return false, fmt.Errorf("run call %s again: %w", c.event, err)
	}
	d.ack(ctx, b, c.event)
	return a.IsError == c.isError && sameJSON(a.Content, c.content), nil
}

func sameJSON(a, b json.RawMessage) bool {
	var x, y bytes.Buffer
	if json.Compact(&x, a) != nil || json.Compact(&y, b) != nil {
		return false
	}
	if bytes.Equal(x.Bytes(), y.Bytes()) {
		return true
	}
	// One may have been written with other escapes.
	var u, v any
	if json.Unmarshal(a, &u) != nil || json.Unmarshal(b, &v) != nil {
		return false
	}
	return string(encode(u)) == string(encode(v))
}

// Texts of calls that were under way when their machine was lost.
const (
	lostOutside = "The machine died while this call was under way or about to begin, and was brought back as it was before. The call had a connection to %s, so it was not run again: what it did inside is undone, what it did outside is not known. Look before you repeat it."
	lostBefore  = "The machine died before this call ended, and what was brought back does not contain all that the call builds upon. It was not run again."
)

// stillOpen answers those open calls that cannot be run again. The others run in
// the machine that was brought back: what they did in the former one is undone.
func (d *driver) stillOpen(r *recovery, p past) (drafts []store.Draft) {
	d.read(func(st *state) {
		for _, c := range st.open() {
			if c.tool == "" || c.waitsForPerson() || r.knows(c.event) {
				continue
			}
			why := ""
			if host := p.reachedOut(c.event, 0); host != "" {
				why = fmt.Sprintf(lostOutside, host)
			}
			if why == "" && len(r.rec.Missing) > 0 {
				why = lostBefore
			}
			if why != "" {
				cp := *c
				drafts = append(drafts, d.unrun(&cp, gateway.Answer{IsError: true, Content: text(why)})...)
			}
		}
	})
	return drafts
}

// noteOf says what the model has to know of a machine that was brought back;
// empty when there is nothing: it was suspended and is as it was.
func noteOf(r *recovery, p past) string {
	var b strings.Builder
	switch {
	case r.saved == nil:
		b.WriteString("Your machine was lost and nothing of it could be brought back. It is a new one: files, processes and shell state of before are gone.")
	case r.rec.Reason != "":
		fmt.Fprintf(&b, "Your machine was lost and was brought back as it was at %s: what its processes did after that is undone.", r.saved.At.UTC().Format(time.RFC3339))
	case len(r.rec.Missing)+len(r.rec.Tried) > 0:
		fmt.Fprintf(&b, "Your machine was suspended and was brought back as it was at %s.", r.saved.At.UTC().Format(time.RFC3339))
	}
	if n := len(r.rec.Tried); n > 0 {
		fmt.Fprintf(&b, " %d newer snapshots of it could not be used.", n)
	}
	if n := len(r.rec.Repeated); n > 0 {
		fmt.Fprintf(&b, " %d tool calls after that were run again with the same results.", n)
	}
	if len(r.rec.Missing) > 0 {
		fmt.Fprintf(&b, " It does not contain what these calls did, although their results stand above (%s):", r.gap)
		for _, c := range p.calls {
			if slices.Contains(r.rec.Missing, c.event) {
				fmt.Fprintf(&b, "\n- %s %s", c.tool, clip(string(c.input), 200))
			}
		}
		b.WriteString("\nCheck before you build on them.")
	}
	if len(r.rec.Dead) > 0 {
		fmt.Fprintf(&b, " These outside connections of its processes have ended: %s.", strings.Join(r.rec.Dead, ", "))
	}
	return strings.TrimSpace(b.String())
}
