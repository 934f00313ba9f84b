package session

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
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
	d.listed, d.consumed, d.revived = false, false, 0
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
		if err := d.killNamed(ctx); err != nil {
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
// loop looks at, and gives way when its place is needed (d.leaving).
func (d *driver) lingerUntil(ctx context.Context, until time.Time) error {
	b := d.held()
	if b == nil {
		return nil
	}
	defer d.keepAlive(until.Sub(d.m.now()) + time.Minute)()
	give := d.m.lingering.enter(d)
	defer d.m.lingering.exit(d)
	t := time.NewTimer(until.Sub(d.m.now()))
	defer t.Stop()
	for {
		// A signal is no row: one may have been heard while work was under way,
		// another may tell of rows that the loop has looked at.
		rows, seen, err := d.m.db.InboxSeen(ctx, d.ws, d.id)
		if err != nil || len(rows) > 0 && seen > d.seen {
			return err
		}
		select {
		case <-d.lease.Inbox():
			continue
		case <-t.C:
		case <-b.s.Done():
		case <-d.m.draining:
		case <-give:
			d.leaving = true
		case <-d.lease.Lost():
			return store.ErrFenced
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		return nil
	}
}

// lingering are the drivers that do nothing but wait with their machines. Each
// takes one of the places that Config.MaxRunning gives out, and leaves it to a
// session that has work.
type lingering struct {
	mu    sync.Mutex
	list  []lingerer            // longest first
	asked map[*driver]time.Time // drivers that were asked for their place, and when
}

type lingerer struct {
	d    *driver
	give chan struct{} // closed when it is to give way
}

// maxGiving is how many machines are suspended at once to make room: each is an
// image that is written and read again.
const maxGiving = 16

// givingTime is how long a driver that was asked for its place is waited for
// before another one is: what came to it meanwhile may be a turn of hours.
const givingTime = 10 * time.Second

func (l *lingering) enter(d *driver) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	give := make(chan struct{})
	l.list = append(l.list, lingerer{d, give})
	return give
}

func (l *lingering) exit(d *driver) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = slices.DeleteFunc(l.list, func(x lingerer) bool { return x.d == d })
}

// left: the driver's place is free.
func (l *lingering) left(d *driver) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.asked, d)
}

// giveWay asks those that wait longest for n places, less those that were asked
// for already.
func (l *lingering) giveWay(n int, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.asked, func(_ *driver, at time.Time) bool { return now.Sub(at) > givingTime })
	n = min(n, maxGiving) - len(l.asked)
	for ; n > 0 && len(l.list) > 0; n-- {
		x := l.list[0]
		l.list = l.list[1:]
		if l.asked == nil {
			l.asked = map[*driver]time.Time{}
		}
		l.asked[x.d] = now
		close(x.give)
	}
}

// makeRoom asks lingering sessions to give way to those that have work while no
// place is free.
func (m *Manager) makeRoom(ctx context.Context) {
	n, err := m.cfg.Node.Due(ctx, maxGiving)
	if err != nil {
		return // the claim says so
	}
	m.lingering.giveWay(n, m.now())
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
// for that (trial G 111). It lives on, and the session is woken to try again. A
// session that somebody asked for is left all the same: its next owner comes
// then, and finds the machine.
func (d *driver) unsaved(ctx context.Context, b *machine, why error) error {
	var dead *crash
	if errors.As(why, &dead) || errors.Is(why, store.ErrFenced) || errors.Is(why, context.Canceled) || b.dead() {
		return why
	}
	d.m.log.Error("cannot suspend the machine; it lives on", "session", d.id, "err", why)
	until := d.m.now().Add(max(d.m.patience.Max, time.Second))
	a := store.Append{Entries: []store.Draft{d.waitUntil(until, "linger")}}
	if d.leaving {
		a.Rest, a.Seen = true, d.seen
	}
	if _, err := d.append(ctx, a); err != nil {
		return err
	}
	if d.leaving {
		d.released = true
		return nil
	}
	b.setShut(false)
	return d.lingerUntil(ctx, until)
}
