package effect

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// Errors of a ticket. Either way nothing has left.
var (
	// ErrTooLate: send_by has passed, the node's lease may be over, or the
	// session has another owner.
	ErrTooLate = errors.New("too late to send")
	// ErrSpent: the ticket has allowed a send already (traps P1, P2).
	ErrSpent = errors.New("a second send under one attempt")
)

// Ticket allows one send. The sender asks it right before the first byte.
type Ticket struct {
	N      int // attempt; 0 where the class has none
	SendBy time.Time
	lease  *store.Lease
	boot   func() time.Duration
	now    func() time.Time
	until  time.Duration // on the boot clock
	used   atomic.Bool
}

// Use spends the ticket. An error means that nothing may be sent: ErrTooLate,
// ErrSpent.
func (t *Ticket) Use() error {
	if !t.used.CompareAndSwap(false, true) {
		return ErrSpent
	}
	select {
	case <-t.lease.Lost():
		return ErrTooLate
	default:
	}
	// The boot clock counts time spent suspended; the wall clock and the lease
	// are looked at too, because the lease may have been shortened since.
	if t.boot() >= t.until || !t.now().Before(t.lease.Trusted()) {
		return ErrTooLate
	}
	return nil
}

// ticket starts the clock of a send. It is called before the attempt's commit
// begins, so that a slow commit eats its own time.
func (l *Log) ticket(lease *store.Lease) *Ticket {
	boot, now := l.boot(), l.now()
	within := min(l.sendWithin, lease.Trusted().Sub(now))
	return &Ticket{lease: lease, boot: l.boot, now: l.now, SendBy: now.Add(within), until: boot + within}
}

// Ticket allows one send of an idempotent effect or a read, which have no
// attempt record.
func (l *Log) Ticket(lease *store.Lease) *Ticket { return l.ticket(lease) }

func (l *Log) attempt(e store.Effect, deadline time.Duration, sendBy time.Time) (store.Draft, error) {
	return draft(store.KindAttempt, e.ID, e.Thread, store.Attempt{
		V: store.BodyVersion, Effect: e.ID, N: e.Attempts + 1, SendBy: sendBy.UTC(), DeadlineMS: deadline.Milliseconds(),
	})
}

// Attempt commits the attempt record of an irreversible effect and returns the
// ticket for its one send. A crash right after it leaves the effect attempted,
// which the next owner makes in doubt. On ErrUnknown the record may be durable;
// nothing was sent, but only this process knows, so the next owner asks.
func (l *Log) Attempt(ctx context.Context, lease *store.Lease, e store.Effect, deadline time.Duration) (*Ticket, error) {
	ctx, cancel := detached(ctx)
	defer cancel()
	t := l.ticket(lease)
	d, err := l.attempt(e, deadline, t.SendBy)
	if err != nil {
		return nil, err
	}
	_, err = l.db.Append(ctx, lease, store.Append{
		Entries: []store.Draft{d},
		Effects: []store.EffectIs{{ID: e.ID, States: []store.EffectState{store.StateIntended}}},
	})
	if err != nil {
		return nil, fmt.Errorf("attempt %s: %w", e.ID, err)
	}
	t.N = e.Attempts + 1
	return t, nil
}
