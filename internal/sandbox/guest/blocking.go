//go:build linux

package guest

import (
	"io"
	"sync"
	"syscall"
)

// blockingConn is a unix socket with plain blocking system calls.
type blockingConn struct {
	fd int

	mu     sync.Mutex
	users  int // system calls under way
	closed bool
}

func dialBlocking(path string) (*blockingConn, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := syscall.Connect(fd, &syscall.SockaddrUnix{Name: path}); err != nil {
		_ = syscall.Close(fd)
		return nil, err
	}
	return &blockingConn{fd: fd}, nil
}

// enter guards the descriptor: its number is free for others only when nobody
// uses it any more.
func (b *blockingConn) enter() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	b.users++
	return true
}

func (b *blockingConn) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.users--
	if b.closed && b.users == 0 {
		_ = syscall.Close(b.fd)
	}
}

func (b *blockingConn) Read(p []byte) (int, error) {
	if !b.enter() {
		return 0, io.ErrClosedPipe
	}
	defer b.leave()
	for {
		n, err := syscall.Read(b.fd, p)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (b *blockingConn) Write(p []byte) (total int, err error) {
	if !b.enter() {
		return 0, io.ErrClosedPipe
	}
	defer b.leave()
	for total < len(p) {
		n, err := syscall.Write(b.fd, p[total:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return total, err
		}
		total += n
	}
	return total, nil
}

// shut wakes those who read or write.
func (b *blockingConn) shut() { _ = syscall.Shutdown(b.fd, syscall.SHUT_RDWR) }

func (b *blockingConn) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	_ = syscall.Shutdown(b.fd, syscall.SHUT_RDWR)
	if b.users == 0 {
		return syscall.Close(b.fd)
	}
	return nil
}
