package keeper_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/keeper"
)

// Why a host was not reached is one of four reasons, or the caller's own end.
func TestTunnelErrors(t *testing.T) {
	for _, c := range []struct{ fail, want error }{
		{fmt.Errorf("dial: %w: special", keeper.ErrForbidden), keeper.ErrForbidden},
		{&net.DNSError{Err: "no such host", IsNotFound: true}, keeper.ErrNoName},
		{&net.DNSError{Err: "server misbehaving"}, keeper.ErrNoName},
		{&net.DNSError{Err: "timeout", IsTimeout: true}, keeper.ErrUnanswered},
		{&net.OpError{Op: "dial", Err: syscall.ETIMEDOUT}, keeper.ErrUnanswered},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, keeper.ErrUnreachable},
		{&net.OpError{Op: "dial", Err: syscall.ENETUNREACH}, keeper.ErrUnreachable},
	} {
		asked := ""
		k := keeper.New(keeper.Config{Dial: func(_ context.Context, _, addr string) (net.Conn, error) {
			asked = addr
			return nil, c.fail
		}})
		_, err := k.Tunnel(t.Context(), "2001:db8::1", 443, true)
		var why *keeper.TunnelError
		if !errors.As(err, &why) || !errors.Is(why.Why, c.want) || !errors.Is(err, c.fail) || asked != "[2001:db8::1]:443" {
			t.Errorf("%v: got %v, dialled %s; want %v", c.fail, err, asked, c.want)
		}
	}
	left := errors.New("the session was paused")
	ctx, cancel := context.WithCancelCause(t.Context())
	k := keeper.New(keeper.Config{Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		cancel(left)
		<-ctx.Done()
		return nil, ctx.Err()
	}})
	if _, err := k.Tunnel(ctx, "a.test", 443, false); !errors.Is(err, left) {
		t.Errorf("after the caller's end: %v", err)
	}
}

// An address that does not answer leaves time to the next one.
func TestShare(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for left, want := range map[int]time.Duration{1: 10 * time.Second, 2: 5 * time.Second, 4: 2500 * time.Millisecond, 100: 2 * time.Second} {
		one, stop := keeper.Share(ctx, left)
		deadline, _ := one.Deadline()
		if got := time.Until(deadline); got > want || got < want-time.Second {
			t.Errorf("%d left: %v, want %v", left, got, want)
		}
		stop()
	}
}
