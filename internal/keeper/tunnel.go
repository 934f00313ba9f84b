package keeper

import (
	"context"
	"errors"
	"net"
	"strconv"
	"time"
)

// TunnelTime bounds the look-up and the dial of a connection out of a sandbox,
// all addresses of its host together.
const TunnelTime = 10 * time.Second

// Why a connection out of a sandbox did not come to be; besides ErrForbidden.
// Their texts name no address: they may be shown inside.
var (
	// ErrNoName: the host's name has no address.
	ErrNoName = errors.New("its name cannot be resolved")
	// ErrUnanswered: nothing answered within TunnelTime.
	ErrUnanswered = errors.New("it did not answer in time")
	// ErrUnreachable: it refused the connection, or no way leads there.
	ErrUnreachable = errors.New("it refused the connection or cannot be reached")
)

// TunnelError says why there is no connection. Why is one of ErrForbidden,
// ErrNoName, ErrUnanswered and ErrUnreachable; Err holds addresses and is for the
// operator's log only.
type TunnelError struct {
	Host string
	Why  error
	Err  error
}

func (e *TunnelError) Error() string   { return "reach " + e.Host + ": " + e.Err.Error() }
func (e *TunnelError) Unwrap() []error { return []error{e.Why, e.Err} }

// Tunnel connects to a host for a process in a sandbox, once. The name is
// resolved once and the address that is dialled was checked (Guard). Private
// addresses are reached only where the caller says private, which means that the
// environment names this host itself, and AllowPrivateNetworks is set. Errors
// are *TunnelError or ctx's.
func (k *Keeper) Tunnel(ctx context.Context, host string, port int, private bool) (net.Conn, error) {
	dialCtx, cancel := context.WithTimeout(ctx, TunnelTime)
	defer cancel()
	if private && k.cfg.AllowPrivateNetworks {
		dialCtx = Private(dialCtx)
	}
	c, err := k.cfg.Dial(dialCtx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err == nil {
		return c, nil
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return nil, &TunnelError{Host: host, Why: whyNot(dialCtx, err), Err: err}
}

func whyNot(ctx context.Context, err error) error {
	var timeout net.Error
	var dns *net.DNSError
	switch {
	case errors.Is(err, ErrForbidden):
		return ErrForbidden
	case errors.As(err, &dns) && !dns.IsTimeout:
		return ErrNoName
	case ctx.Err() != nil || errors.As(err, &timeout) && timeout.Timeout():
		return ErrUnanswered
	}
	return ErrUnreachable
}

// share gives one of the addresses that are left its part of the time, so that
// one which does not answer leaves some to the next.
func share(ctx context.Context, left int) (context.Context, context.CancelFunc) {
	const least = 2 * time.Second
	deadline, ok := ctx.Deadline()
	if !ok || left < 2 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, max(time.Until(deadline)/time.Duration(left), least))
}
