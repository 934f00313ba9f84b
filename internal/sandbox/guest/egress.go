//go:build linux

package guest

import (
	"errors"
	"io"
	"net"
	"time"

	"github.com/planaria/planaria/internal/sandbox/link"
	"github.com/planaria/planaria/internal/sandbox/wire"
)

// maxEgress bounds the connections to the proxy at one time.
const maxEgress = 512

// lastRead is how long a process may take to read the rest of a connection that
// is over.
const lastRead = 15 * time.Minute

// egress takes connections of processes at the proxy's address inside and
// carries each over a stream of its own. The inner leg is loopback and survives
// a snapshot; so does the stream in the original. In a restored copy streams are
// reset, and the process sees its connection end.
func (a *Agent) egress() {
	slots := make(chan struct{}, maxEgress)
	for {
		l, err := net.Listen("tcp", EgressAddress)
		if err != nil {
			time.Sleep(time.Second)
			continue
		}
		for {
			c, err := l.Accept()
			if err != nil {
				time.Sleep(100 * time.Millisecond) // no descriptors are free, say
				break
			}
			select {
			case slots <- struct{}{}:
				go func() {
					a.carry(c)
					<-slots
				}()
			default:
				_ = c.Close()
			}
		}
		_ = l.Close()
	}
}

// wayOut opens the stream of a connection; there is none before the new identity
// is set. The lock is held over both: a stream is opened before a restore, and
// ended by it, or finds the way shut.
func (a *Agent) wayOut(c net.Conn) (*link.Stream, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.egressOpen {
		return nil, errors.New("no way out")
	}
	s, err := a.mux.Open(wire.KindEgress)
	if err == nil {
		a.carried[c.RemoteAddr().String()] = true
	}
	return s, err
}

// carry joins a connection inside with a stream.
func (a *Agent) carry(c net.Conn) {
	defer c.Close()
	s, err := a.wayOut(c)
	if err != nil {
		return
	}
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.carried, c.RemoteAddr().String())
	}()
	defer s.Close()
	up := make(chan struct{})
	go func() {
		defer close(up)
		if _, err := io.Copy(struct{ io.Writer }{s}, c); err != nil {
			s.Reset()
			return
		}
		s.CloseWrite()
	}()
	down := make(chan struct{})
	go func() {
		defer close(down)
		_, err := io.Copy(c, struct{ io.Reader }{s})
		if t, ok := c.(*net.TCPConn); ok && err == nil {
			_ = t.CloseWrite()
		} else {
			_ = c.Close()
		}
	}()
	// When the stream is over nobody reads what the process still sends: its
	// connection ends, also where it never closes it. What has come for it is
	// handed on before.
	select {
	case <-down:
	case <-s.Done():
		_ = c.SetWriteDeadline(time.Now().Add(lastRead))
		<-down
	}
	select {
	case <-up:
	case <-s.Done():
		_ = c.Close()
		<-up
	}
}
