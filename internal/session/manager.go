package session

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// Limits of a manager.
const (
	// defaultMaxRunning is how many sessions one process drives at once.
	defaultMaxRunning = 1000
	// claimBatch is how many sessions are claimed in one go.
	claimBatch = 64
	// idlePoll bounds the wait between looks for work: a lost wake-up costs at most this.
	idlePoll = time.Second
	// overdue is the wait where a session wants to be claimed and could not be:
	// all slots are taken, another node is at it, or it is not for us.
	overdue = 50 * time.Millisecond
)

// Manager drives the sessions that this process owns, and offers the
// operations on all sessions of the store. New starts nothing; Run does.
type Manager struct {
	cfg      Config
	db       *store.DB
	log      *slog.Logger
	now      func() time.Time
	patience Patience

	draining  chan struct{} // closed when Run's context ended
	hub       hub
	holders   holders
	lingering lingering
	keep      keeping // of snapshots
	paused    paused
	builds    builds // of environments' packages
}

// New makes a manager.
func New(cfg Config) *Manager {
	m := &Manager{cfg: cfg, db: cfg.DB, log: cfg.Logger, now: cfg.Now,
		patience: cfg.Patience.withDefaults(), draining: make(chan struct{})}
	if m.log == nil {
		m.log = slog.Default()
	}
	if m.now == nil {
		m.now = time.Now
	}
	if m.cfg.MaxRunning == 0 {
		m.cfg.MaxRunning = defaultMaxRunning
	}
	return m
}

// Run claims and drives sessions until ctx ends, then drains: it claims no
// more, cancels reads and unsent calls, lets attempted effects run to their
// answer or deadline, releases every session and returns. A process that is
// killed instead leaves nothing that the next claim does not repair.
func (m *Manager) Run(ctx context.Context) error {
	if m.cfg.Node == nil {
		<-ctx.Done()
		return nil
	}
	var drivers sync.WaitGroup
	slots := make(chan struct{}, m.cfg.MaxRunning)
	freed := make(chan struct{}, 1)
	// Drivers outlive ctx: draining is asked of them, not done to them.
	work := context.WithoutCancel(ctx)

	var sweeper sync.WaitGroup
	if m.cfg.Sandboxes != nil {
		sweeper.Go(func() { m.sweep(ctx) })
		sweeper.Go(func() { m.keepSnapshots(ctx) })
	}
	var fatal error
	for ctx.Err() == nil && fatal == nil {
		n := min(cap(slots)-len(slots), claimBatch)
		leases, err := m.claim(ctx, n)
		for _, l := range leases {
			slots <- struct{}{}
			drivers.Go(func() {
				m.drive(work, l)
				<-slots
				wake(freed)
			})
		}
		switch {
		case errors.Is(err, store.ErrFenced):
			fatal = err // this node is not trusted any more: cmd ends the process
		case err != nil && ctx.Err() == nil:
			m.log.Warn("cannot claim sessions", "err", err)
		case len(leases) == claimBatch:
			continue
		}
		if len(slots) == cap(slots) {
			m.makeRoom(ctx)
		}
		m.rest(ctx, freed, err)
	}
	close(m.draining)
	drivers.Wait()
	sweeper.Wait()
	return fatal
}

func (m *Manager) claim(ctx context.Context, n int) ([]*store.Lease, error) {
	if n <= 0 {
		return nil, nil
	}
	return m.cfg.Node.Claim(ctx, n)
}

// rest waits for work, for the next wake-up of a sleeping session, or for a
// slot. After a failed claim it only waits: nobody is helped by asking a store
// in trouble a thousand times a second.
func (m *Manager) rest(ctx context.Context, freed <-chan struct{}, failed error) {
	d := idlePoll
	if failed == nil {
		if at, err := m.cfg.Node.NextWake(ctx); err == nil && !at.IsZero() {
			if until := time.Until(at); until > 0 {
				d = min(d, until)
			} else {
				d = overdue
			}
		}
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-m.cfg.Node.Work():
	case <-freed:
	case <-t.C:
	}
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// fault is a named point of the crash matrix. An error means: the process
// died here. The driver then leaves without releasing anything.
func (m *Manager) fault(point string) error {
	if m.cfg.Fault == nil {
		return nil
	}
	if err := m.cfg.Fault(point); err != nil {
		return &crash{point: point, err: err}
	}
	return nil
}

// crash is the error of a simulated death.
type crash struct {
	point string
	err   error
}

func (c *crash) Error() string { return "stopped at " + c.point + ": " + c.err.Error() }
func (c *crash) Unwrap() error { return c.err }
