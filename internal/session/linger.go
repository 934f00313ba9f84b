package session

import (
	"context"
	"errors"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// A session whose machine lives keeps its owner at rest, so that the next
// message finds the machine as it is. Each such rest has a time to wake on
// record: should the owner die, the next one comes then, finds the machine and
// suspends it.

// controlLeave asks the owner of a session at rest to suspend its machine and
// leave it, for somebody wants to write to the session.
const controlLeave = "leave"

// lingerEnd is when the machine of a session at rest is suspended.
func (st *state) lingerEnd() time.Time {
	if st.paused || st.rested.IsZero() {
		return st.rested // a pause is no short rest
	}
	return st.rested.Add(st.env.linger())
}

// restWith commits a rest. With a living machine it keeps the owner: the rest
// is said, the time to suspend is on record, and the loop goes on to wait.
// again is when the session wants to be woken for another reason; zero: it does
// not.
func (d *driver) restWith(ctx context.Context, a store.Append, again time.Time) error {
	a.Rest = true
	if d.held() == nil {
		if !again.IsZero() {
			a.Entries = append(a.Entries, d.waitUntil(again, "reconcile"))
		}
		if _, err := d.append(ctx, a); err != nil {
			return err
		}
		d.released = true
		return nil
	}
	a.Keep = true
	var linger time.Duration
	d.read(func(st *state) { linger = st.env.linger() })
	a.Entries = append(a.Entries, d.waitUntil(earlier(d.m.now().Add(linger), again), "linger"))
	if _, err := d.append(ctx, a); err != nil {
		return err
	}
	// The next turn begins as after a claim.
	d.listed, d.consumed = false, false
	return nil
}

func (d *driver) waitUntil(at time.Time, reason string) store.Draft {
	return record(store.KindWait, d.newID("rec_"), "", store.Wait{V: store.BodyVersion, Until: at, Reason: reason})
}

// earlier is the earlier of two times, of which the zero one does not count.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// settleDown ends the lease of a session at rest to which nothing new was said.
// Its machine is waited with until it has lingered long enough, then suspended.
func (d *driver) settleDown(ctx context.Context, again time.Time) error {
	if d.held() == nil {
		return d.settleWithout(ctx, again)
	}
	var end, wake time.Time
	var leaving bool
	d.read(func(st *state) { end, wake, leaving = st.lingerEnd(), st.wake, d.leaving })
	now := d.m.now()
	if leaving || !end.After(now) {
		return d.suspend(ctx, again)
	}
	if want := earlier(end, again); wake.IsZero() || want.Before(wake) {
		// The time to wake is on record before it is waited for.
		_, err := d.append(ctx, store.Append{Entries: []store.Draft{d.waitUntil(want, "linger")}})
		if err != nil {
			return err
		}
	}
	return d.lingerUntil(ctx, earlier(end, again))
}

// settleWithout ends the lease of a session at rest without a machine. One that
// died while it was waited with is on record as lost.
func (d *driver) settleWithout(ctx context.Context, again time.Time) error {
	drafts := d.unwait()
	if !again.IsZero() {
		drafts = []store.Draft{d.waitUntil(again, "reconcile")}
	}
	var was bool
	d.read(func(st *state) { was = liveAct(st.machine.Act) })
	if was && d.m.cfg.Sandboxes != nil {
		d.letGo()
		if err := d.m.killNamed(ctx, d.key()); err != nil {
			d.m.log.Warn("cannot clean up after a dead machine", "session", d.id, "err", err)
		}
		drafts = append(drafts, record(store.KindMachine, d.newID("rec_"), "", store.Machine{V: store.BodyVersion,
			Act: store.MachineLost, Node: d.lease.Node(), Reason: "it is not there any more"}))
	}
	_, err := d.append(ctx, store.Append{Entries: drafts, Rest: true, Seen: d.seen})
	if err == nil {
		d.released = true
	}
	return err
}

// lingerUntil waits with the machine. It returns when something came that the
// loop looks at.
func (d *driver) lingerUntil(ctx context.Context, until time.Time) error {
	b := d.held()
	if b == nil {
		return nil
	}
	defer d.keepAlive(until.Sub(d.m.now()) + time.Minute)()
	t := time.NewTimer(until.Sub(d.m.now()))
	defer t.Stop()
	select {
	case <-t.C:
	case <-d.lease.Inbox():
	case <-b.s.Done():
	case <-d.m.draining:
	case <-d.lease.Lost():
		return store.ErrFenced
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// suspend saves the machine, ends the lease and then the machine.
//
//  1. its way out is closed; tunnels end in the log. What its processes asked of
//     the world after 2 they would ask again when they are brought back.
//  2. the snapshot is durable and verified. A crash from here to 3 leaves the
//     machine alive and a time to wake on record: the next owner comes to this
//     same point.
//  3. one append: the snapshot, that the machine is suspended into it, the rest.
//     A message that came meanwhile refuses it (ErrConflict): the session goes on
//     with the machine that it has.
//  4. the machine is ended. A crash before leaves one that the log says is
//     suspended: the next owner or the sweeper ends it.
func (d *driver) suspend(ctx context.Context, again time.Time) error {
	b := d.held()
	if b == nil {
		return nil
	}
	defer d.keepAlive(saveTime + time.Minute)()
	if err := d.m.fault("before_suspend"); err != nil {
		return err
	}
	b.close()
	saved, err := d.saveForSuspend(ctx)
	if err != nil {
		b = b.reopened() // what its processes had open was closed, they have a way out again
		d.hold(b)
		return d.unsaved(ctx, b, err)
	}
	drafts := d.unwait()
	if !again.IsZero() {
		drafts = []store.Draft{d.waitUntil(again, "reconcile")}
	}
	drafts = append(drafts, record(store.KindSnapshot, d.newID("rec_"), "", saved),
		record(store.KindMachine, d.newID("rec_"), "", store.Machine{V: store.BodyVersion, Act: store.MachineSuspended,
			Node: d.lease.Node(), Generation: b.s.Generation(), Snapshot: saved.Snapshot}))
	if _, err := d.append(ctx, store.Append{Entries: drafts, Rest: true, Seen: d.seen}); err != nil {
		d.hold(b.reopened())
		return err
	}
	d.released = true
	if err := d.m.fault("suspended"); err != nil {
		return err
	}
	d.drop(b)
	if err := b.s.Kill(context.WithoutCancel(ctx)); err != nil {
		d.m.log.Warn("cannot end a suspended machine; it is tried again", "session", d.id, "err", err)
	}
	return d.m.fault("suspend_killed")
}

// unsaved is what becomes of a machine that cannot be saved: it is never ended
// for that (trial G 111). It lives on, and the session is woken to try again.
func (d *driver) unsaved(ctx context.Context, b *machine, why error) error {
	var dead *crash
	if errors.As(why, &dead) || errors.Is(why, store.ErrFenced) || errors.Is(why, context.Canceled) || b.dead() {
		return why
	}
	d.m.log.Error("cannot suspend the machine; it lives on", "session", d.id, "err", why)
	until := d.m.now().Add(max(d.m.patience.Max, time.Second))
	if _, err := d.append(ctx, store.Append{Entries: []store.Draft{d.waitUntil(until, "linger")}}); err != nil {
		return err
	}
	b.setShut(false)
	return d.lingerUntil(ctx, until)
}
