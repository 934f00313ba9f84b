package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// Causes for which work under way is cut short.
var (
	errInterrupted = errors.New("interrupted by the user")
	errPausing     = errors.New("the session is being paused")
	errDraining    = errors.New("the server is draining")
	errStuck       = errors.New("no progress for too long")
)

// driver drives one session under one lease. Its goroutine owns everything
// but what mu guards.
type driver struct {
	m     *Manager
	lease *store.Lease
	ws    store.WorkspaceID
	id    store.SessionID
	scope gateway.Scope

	takeover bool          // the former owner did not release the session
	silent   time.Duration // from its last entry to our claim
	listed   bool          // tools were listed since the session became running
	seen     int64         // highest inbox row that was read
	consumed bool          // something from the inbox was acted on since the claim
	released bool
	// conflicts counts looks at the inbox in a row that met a conflict.
	conflicts int
	waiting   int // messages that the newest look at the inbox left there
	revived   int // times that a machine that died was brought back to end the turn

	mu      sync.Mutex
	st      *state
	early   map[store.Seq]store.Entry // committed, but their predecessors not seen yet
	foldErr error
	commit  time.Time // of the newest commit
	// box is the session's sandbox, if it runs on this node; see machine. hands is
	// the same with its way out.
	box   *sandbox.Sandbox
	hands *machine
	// leaving: somebody asked for the session or for its place, its machine does
	// not linger.
	leaving bool

	saves saves // snapshots of box
}

// drive is the life of one claim. However it ends, by return or panic, the
// session is released in this function: a session without an owner that has
// work is claimed again by itself (law L7).
func (m *Manager) drive(ctx context.Context, l *store.Lease) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := l.Claimed()
	d := &driver{m: m, lease: l, ws: l.Workspace(), id: l.Session(), commit: m.now(), early: map[store.Seq]store.Entry{}}
	log := m.log.With("session", d.id, "fence", l.Fence())

	stop := d.watch(cancel)
	defer stop()
	if m.cfg.Sandboxes != nil {
		m.holders.add(d)
		defer m.holders.remove(d)
		defer m.lingering.left(d)
	}
	err := d.unpanicked(func() error { return d.live(ctx, s) })
	d.endSaves()
	// That a machine is not ours says nothing about the lease: the next claim sees.
	lost := errors.Is(err, store.ErrFenced) && !errors.Is(err, sandbox.ErrFenced)
	if lost {
		d.pauseLost(ctx)
	}
	d.letGo() // it lives on: the next owner finds it

	var dead *crash
	switch {
	case errors.As(err, &dead):
		log.Debug("driver stopped as if killed", "err", err)
		return
	case lost:
		log.Info("lost session to a newer owner", "err", err)
		return
	case errors.Is(err, store.ErrDamaged):
		log.Error("session is refused", "err", err)
		rerr := m.db.Refuse(context.WithoutCancel(ctx), d.ws, d.id, err.Error())
		if rerr == nil {
			return // refused, and without an owner
		}
		log.Error("cannot mark session as damaged", "err", rerr)
	case err != nil:
		log.Warn("driver ended early", "err", err)
	}
	if d.released {
		return
	}
	d.park(context.WithoutCancel(ctx), err)
}

// unpanicked turns a panic of f into an error. Every goroutine that a driver
// starts needs it: one session must not take the process with it.
func (d *driver) unpanicked(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			d.m.log.Error("driver panicked", "session", d.id, "err", fmt.Sprint(r), "stack", string(debug.Stack()))
			err = &panicked{value: fmt.Sprint(r)}
		}
	}()
	return f()
}

// live rebuilds the session and drives it until it rests or waits.
func (d *driver) live(ctx context.Context, s store.Session) error {
	started := d.m.now()
	err := d.rebuild(ctx, s)
	d.observeTakeover(s, err, d.m.now().Sub(started))
	if err != nil {
		return fmt.Errorf("rebuild session %s: %w", d.id, err)
	}
	d.mend()
	if err := d.reattach(ctx); err != nil {
		return fmt.Errorf("reattach to the machine of session %s: %w", d.id, err)
	}
	return d.loop(ctx)
}

// observeTakeover tells of a session whose former owner had not released it.
func (d *driver) observeTakeover(s store.Session, err error, elapsed time.Duration) {
	if d.m.cfg.Observe == nil || !d.takeover {
		return
	}
	result := "ok"
	if err != nil {
		result = "failed"
	}
	d.m.cfg.Observe.Resumed(s, result, elapsed)
	d.m.cfg.Observe.Lost(s, d.silent)
}

type panicked struct{ value string }

func (p *panicked) Error() string { return "driver panicked: " + p.value }

// park releases a session that is not at rest. After a panic or an error of
// unknown kind it records a wait that grows, so that a fault that repeats at
// one place cannot spin; after Patience.Panics of them the turn ends.
//
// A release that fails (a full disk, a lost connection, relaxed entries that
// are gone) is tried again: a live owner without a driver would wedge the
// session (law L7). What ends the tries ends the ownership too: a newer owner,
// or the node, which frees what it owns when it leaves.
//
// A crash before this commit leaves an owner that the store finds dead.
func (d *driver) park(ctx context.Context, cause error) {
	for try := 1; ; try++ {
		err := d.release(ctx, cause)
		if err == nil || errors.Is(err, store.ErrFenced) {
			break
		}
		d.m.log.Warn("cannot release session", "session", d.id, "err", err)
		wait := time.NewTimer(d.m.patience.backoff(try, 0))
		select {
		case <-wait.C:
			continue
		case <-d.lease.Lost():
		case <-d.m.draining:
		}
		wait.Stop()
		break
	}
	d.released = true
}

// release is one try of park.
func (d *driver) release(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	a := store.Append{Park: true}
	if cause != nil && !errors.Is(cause, errDraining) {
		n := 1
		if st := d.snapshot(); st != nil {
			n = st.tries["driver"] + 1
		}
		until := d.m.now().Add(d.m.patience.backoff(n, 0))
		if errors.As(cause, new(*nodeError)) {
			n, until = n-1, d.m.now().Add(d.m.patience.backoff(nodeTries, 0))
		}
		if d.seen == 0 { // it failed before it looked
			_, _ = d.inbox(ctx) // what cannot be read does not count as seen
		}
		a.Seen = d.seen // what was read does not end the wait
		a.Entries = []store.Draft{record(store.KindWait, d.newID("rec_"), "", store.Wait{
			V: store.BodyVersion, Until: until, Reason: "driver", Tries: n})}
	}
	_, err := d.append(ctx, a)
	return err
}

// rebuildPage is how many entries of a log are in memory while it is folded.
const rebuildPage = 1000

// rebuild reads the log from the newest compaction and folds it, page by page: a
// process inside can make it long (see egressScope).
func (d *driver) rebuild(ctx context.Context, s store.Session) error {
	st, err := newState(s)
	if err != nil {
		return err
	}
	var last, before store.Entry
	for at, more := st.seq, true; more; at = last.Seq {
		page, err := d.m.db.Entries(ctx, d.ws, d.id, store.Range{After: at, Limit: rebuildPage})
		if err != nil {
			return err
		}
		for _, e := range page {
			if err := st.fold(e); err != nil {
				return fmt.Errorf("%w: %w", store.ErrDamaged, err)
			}
			before, last = last, e
		}
		more = len(page) == rebuildPage
	}
	if last.Kind == store.KindClaim {
		var c store.Claim
		if err := json.Unmarshal(last.Body, &c); err != nil {
			return err
		}
		d.takeover = c.Former != ""
		if before.Seq > 0 {
			d.silent = last.At.Sub(before.At)
		}
	}
	d.mu.Lock()
	d.st = st
	d.mu.Unlock()
	d.scope = gateway.Scope{Lease: d.lease, Lineage: s.Lineage, Thread: st.thread,
		Servers: st.agent.servers(), Vaults: st.config.VaultIDs}
	d.lease.OnCommit(d.committed)
	return nil
}

// committed folds entries as they become durable, whoever wrote them under
// this lease: driver and keeper both do.
func (d *driver) committed(entries []store.Entry) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.commit = d.m.now()
	for _, e := range entries {
		if e.Seq > d.st.seq {
			d.early[e.Seq] = e
		}
	}
	for {
		e, ok := d.early[d.st.seq+1]
		if !ok || d.foldErr != nil {
			return
		}
		delete(d.early, e.Seq)
		if err := d.st.fold(e); err != nil {
			d.foldErr = err
		}
	}
}

// append commits entries and has them folded before it returns.
func (d *driver) append(ctx context.Context, a store.Append) ([]store.Entry, error) {
	entries, err := d.m.db.Append(ctx, d.lease, a)
	if err != nil {
		return nil, err
	}
	if d.snapshot() != nil {
		d.committed(entries)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return entries, d.foldErr
}

func (d *driver) snapshot() *state {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.st
}

// read runs f on the state under its lock.
func (d *driver) read(f func(*state)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d.st)
}

func (d *driver) newID(prefix string) string { return store.NewID(prefix, d.m.now()) }

// watch cancels a driver that neither commits nor waits on record.
func (d *driver) watch(cancel context.CancelCauseFunc) (stop func()) {
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		t := time.NewTicker(max(d.m.patience.Silence/10, 10*time.Millisecond))
		defer t.Stop()
		for {
			select {
			case <-done:
				return
			case <-t.C:
			}
			d.mu.Lock()
			silent := d.m.now().Sub(d.commit)
			d.mu.Unlock()
			if silent > d.m.patience.Silence {
				if d.m.cfg.Observe != nil {
					d.m.cfg.Observe.Stuck(d.lease.Claimed())
				}
				cancel(errStuck)
				return
			}
		}
	}()
	return func() { close(done); <-ended }
}

// during runs f and serves the inbox meanwhile. f's context ends when the user
// interrupts or pauses, when the server drains, and when the lease is lost.
func (d *driver) during(ctx context.Context, f func(ctx context.Context)) {
	soft, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan any, 1)
	go func() {
		defer func() { done <- recover() }()
		f(soft)
	}()
	draining, inbox := d.m.draining, d.lease.Inbox()
	lost := d.lease.Lost()
	for {
		select {
		case r := <-done:
			if r != nil {
				panic(r)
			}
			return
		case <-inbox:
			if cause := d.glance(ctx); cause != nil {
				cancel(cause)
			}
		case <-draining:
			draining = nil
			cancel(errDraining)
		case <-lost:
			lost = nil
			cancel(store.ErrFenced)
		}
	}
}

func (d *driver) isDraining() bool {
	select {
	case <-d.m.draining:
		return true
	default:
		return false
	}
}

// loop does what the log and the inbox say comes next, until the session rests
// or waits. Every pass begins with the inbox, so that an interrupt is never
// behind other work.
func (d *driver) loop(ctx context.Context) error {
	for {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		d.mu.Lock()
		err := d.foldErr
		d.mu.Unlock()
		if err != nil {
			return err
		}
		if d.isDraining() {
			return errDraining
		}
		if err := d.m.fault("loop"); err != nil {
			return err
		}
		if err := d.takeInbox(ctx); errors.Is(err, store.ErrConflict) {
			continue
		} else if err != nil {
			return err
		}
		next, err := d.decide(ctx)
		if err != nil || next == nil {
			return err
		}
		if err := next(ctx); errors.Is(err, store.ErrConflict) {
			// Something arrived between the look at the inbox and the commit.
			continue
		} else if err != nil {
			return err
		}
		if d.released {
			return nil
		}
	}
}

// decide reads the state and names the next act; nil when the lease is over.
func (d *driver) decide(ctx context.Context) (act func(context.Context) error, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	st := d.st
	switch {
	case st.status == store.StatusTerminated:
		return d.leave, nil
	case st.paused:
		return d.leave, nil
	case st.tries["driver"] >= d.m.patience.Panics && st.status != store.StatusIdle:
		return func(ctx context.Context) error {
			return d.exhausted(ctx, newSessionError("unknown_error",
				"The session's driver failed repeatedly at the same place. Send a new message or resume to try again.", "exhausted"))
		}, nil
	case len(st.open()) > 0 && st.status == store.StatusIdle && st.stop.Type == stopExhausted && !d.consumed && d.waiting == 0:
		return d.leave, nil // it was given up, and nobody said to go on
	case len(st.open()) > 0:
		return d.calls, nil
	case st.want && (st.rounds >= d.m.patience.Rounds || st.cuts > d.m.patience.Cuts):
		return func(ctx context.Context) error {
			return d.exhausted(ctx, newSessionError("tool_use_limit_reached_error",
				fmt.Sprintf("The turn reached its limit of %d model requests, or its answers were cut off %d times in a row.", d.m.patience.Rounds, d.m.patience.Cuts), "exhausted"))
		}, nil
	case st.want && st.overBudget() && st.status == store.StatusIdle:
		return d.leave, nil // that is said already
	case st.want && st.overBudget():
		return func(ctx context.Context) error { return d.rest(ctx, stopReason{Type: stopBudget}, nil) }, nil
	case st.want:
		return d.step, nil
	case st.status == store.StatusIdle:
		return d.leave, nil
	}
	if refused := st.refused; refused != nil {
		return func(ctx context.Context) error { return d.rest(ctx, stopReason{Type: stopRefusal}, refused) }, nil
	}
	return d.finish, nil
}

// leave releases a session at rest to which nothing new was said, when its
// machine has lingered long enough.
func (d *driver) leave(ctx context.Context) error {
	return d.settleDown(ctx, time.Time{})
}

// unwait ends a wait that is over and that no status event ends: a session at
// rest whose time has come would be claimed again and again.
func (d *driver) unwait() (drafts []store.Draft) {
	d.read(func(st *state) {
		if st.status == store.StatusIdle && !st.wake.IsZero() {
			drafts = append(drafts, record(store.KindWait, d.newID("rec_"), "", store.Wait{V: store.BodyVersion, Reason: "driver"}))
		}
	})
	return drafts
}
