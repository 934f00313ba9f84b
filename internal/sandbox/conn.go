package sandbox

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/sandbox/guest"
	"github.com/planaria/planaria/internal/sandbox/link"
	"github.com/planaria/planaria/internal/sandbox/wire"
)

// handshakeTime bounds a handshake; the other end may be anybody inside.
const handshakeTime = 10 * time.Second

// hostLink is the host's end of a sandbox's one socket.
type hostLink struct {
	s     *Sandbox
	mux   *link.Mux
	setup *os.File // pipe to the agent's standard input, until it has started

	mu        sync.Mutex
	listener  *net.UnixListener
	mode      wire.Greeting // of the next handshake
	key       []byte        // of the next handshake; nil: the state's
	conn      net.Conn      // the one that is served
	serving   chan struct{}
	connected chan struct{} // closed while connected; replaced at a cut
	up        bool
	refused   error // why the agent does not want us
	closed    error
	wait1     sync.WaitGroup
}

func newHostLink(s *Sandbox) *hostLink {
	l := &hostLink{s: s, connected: make(chan struct{}), mode: wire.Greeting{Mode: wire.Attach}}
	l.mux = link.New(link.Host, l.accept)
	return l
}

// accept serves a stream that the agent opened.
func (l *hostLink) accept(st *link.Stream) {
	if st.Kind() != wire.KindEgress || l.s.r.cfg.Egress == nil || !l.s.snapshotState().Egress {
		st.Reset()
		return
	}
	ctx, cancel := context.WithCancel(l.s.r.ctx)
	defer cancel()
	go func() {
		select {
		case <-st.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	defer st.Close()
	l.s.r.cfg.Egress(ctx, l.s, st)
}

// listen puts a socket of this process in the place that the agent dials. The
// rename replaces one of an earlier owner at once; the agent notices.
func (l *hostLink) listen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed != nil {
		return l.closed
	}
	if l.listener != nil {
		return nil
	}
	ctl, err := os.Open(filepath.Join(l.s.dir, "ctl"))
	if err != nil {
		return err
	}
	defer ctl.Close()
	// Names of sockets are short; folders of users are not.
	short := fmt.Sprintf("/proc/self/fd/%d/", ctl.Fd())
	temp := ".new-" + randomID("")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: short + temp, Net: "unix"})
	if err != nil {
		return err
	}
	ln.SetUnlinkOnClose(false)
	if err := os.Chmod(filepath.Join(ctl.Name(), temp), 0o666); err != nil {
		_ = ln.Close()
		return err
	}
	if err := os.Rename(filepath.Join(ctl.Name(), temp), filepath.Join(ctl.Name(), guest.SocketName)); err != nil {
		_ = ln.Close()
		return err
	}
	l.listener = ln
	l.wait1.Add(1)
	go l.run(ln)
	return nil
}

// run accepts connections. Each proves itself; the newest one that did is served.
func (l *hostLink) run(ln *net.UnixListener) {
	defer l.wait1.Done()
	slots := make(chan struct{}, 8) // processes inside may dial too
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		select {
		case slots <- struct{}{}:
			l.wait1.Add(1)
			go func() {
				defer l.wait1.Done()
				free := sync.OnceFunc(func() { <-slots })
				defer free()
				l.serve(c, free)
			}()
		default:
			_ = c.Close()
		}
	}
}

// serve does the handshake with whoever has dialled, and carries the streams
// when it was the agent. free gives the slot of strangers back.
func (l *hostLink) serve(c net.Conn, free func()) {
	_ = c.SetDeadline(time.Now().Add(handshakeTime))
	peer, fresh, err := l.handshake(c)
	if err != nil {
		_ = c.Close()
		l.s.r.log.Debug("handshake came to nothing", "session", l.s.ID(), "err", err)
		return
	}
	if fresh {
		l.mux.Reset(errors.New("the sandbox has another owner or life"))
	}
	_ = c.SetDeadline(time.Time{})
	free()
	done, ok := l.enter(c)
	if !ok {
		_ = c.Close()
		return
	}
	err = l.mux.Serve(c, peer)
	l.leave(c, err)
	close(done)
}

// handshake finds out whether the agent has dialled, and offers to be its owner.
func (l *hostLink) handshake(c net.Conn) (peer link.State, fresh bool, err error) {
	greeting, key := l.greeting()
	if err := wire.WriteMessage(c, greeting); err != nil {
		return peer, false, err
	}
	var hello wire.Hello
	if err := wire.ReadMessage(c, wire.MaxHandshake, &hello); err != nil {
		return peer, false, err
	}
	if !hmac.Equal(hello.Proof, wire.Prove(key, "agent", greeting.Challenge, hello.Fence)) || len(hello.Challenge) != 32 {
		if greeting.Mode == wire.Restore && len(hello.Proof) == 0 {
			l.refuse(fmt.Errorf("%w: its memory does not know the snapshot", ErrDamaged))
		}
		return peer, false, errors.New("not the agent of this sandbox")
	}
	// The connection of before must have ended before we tell how far we are.
	// There it has, or the agent would not dial.
	l.drop()
	fence := l.s.Fence()
	offer := wire.Offer{Fence: fence, Owner: l.s.r.owner, Proof: wire.Prove(key, "host", hello.Challenge, fence), State: l.mux.State()}
	if err := wire.WriteMessage(c, offer); err != nil {
		return peer, false, err
	}
	var answer wire.Accept
	if err := wire.ReadMessage(c, wire.MaxHandshake, &answer); err != nil {
		return peer, false, err
	}
	if answer.Refused != "" {
		err := fmt.Errorf("%w: %s", ErrFenced, answer.Refused)
		l.refuse(err)
		return peer, false, err
	}
	return answer.State, answer.Fresh, nil
}

// greeting makes the first message, and the key it stands for.
func (l *hostLink) greeting() (wire.Greeting, []byte) {
	st := l.s.snapshotState()
	l.mu.Lock()
	defer l.mu.Unlock()
	g, key := l.mode, l.key
	if key == nil {
		key = st.Key
	}
	g.Version = wire.Version
	g.Challenge = make([]byte, 32)
	_, _ = rand.Read(g.Challenge)
	return g, key
}

// drop ends the connection that is served and waits for its end.
func (l *hostLink) drop() {
	l.mu.Lock()
	conn, serving := l.conn, l.serving
	l.mu.Unlock()
	if conn != nil {
		_ = conn.Close()
		<-serving
	}
}

func (l *hostLink) enter(c net.Conn) (chan struct{}, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed != nil || l.conn != nil {
		return nil, false
	}
	if l.mode.Mode == wire.Restore {
		// The agent has given up the former key for this one; a later cut is
		// answered as by any owner.
		l.mode = wire.Greeting{Mode: wire.Attach}
	}
	l.conn, l.serving = c, make(chan struct{})
	l.refused = nil
	if !l.up {
		l.up = true
		close(l.connected)
	}
	return l.serving, true
}

func (l *hostLink) leave(c net.Conn, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == c {
		l.conn, l.serving = nil, nil
	}
	if l.up && l.closed == nil {
		l.up = false
		l.connected = make(chan struct{})
	}
	if errors.Is(why, link.ErrProtocol) {
		l.s.r.log.Warn("agent broke the link's protocol", "session", l.s.ID(), "err", why)
	} else if why != nil && !errors.Is(why, io.EOF) {
		l.s.r.log.Debug("link was cut", "session", l.s.ID(), "err", why)
	}
}

// refuse records why the agent does not take us, for those who wait.
func (l *hostLink) refuse(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused = why
	if !l.up {
		close(l.connected)
		l.connected = make(chan struct{})
	}
}

// wait returns when the agent is connected, or why it will not be.
func (l *hostLink) wait(ctx context.Context) error {
	for {
		l.mu.Lock()
		up, ch, refused, closed := l.up, l.connected, l.refused, l.closed
		l.mu.Unlock()
		switch {
		case closed != nil:
			return closed
		case up:
			return nil
		case refused != nil:
			return refused
		}
		select {
		case <-ch:
		case <-l.s.dead:
			return ErrGone
		case <-ctx.Done():
			return fmt.Errorf("wait for the agent: %w", context.Cause(ctx))
		}
	}
}

// expect sets how the next handshake goes.
func (l *hostLink) expect(mode wire.Greeting, key []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mode, l.key = mode, key
}

// useStateKey says that the state's key is valid from now on.
func (l *hostLink) useStateKey() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.key = nil
}

// close ends the link: streams fail with why.
func (l *hostLink) close(why error) {
	l.mu.Lock()
	if l.closed == nil {
		l.closed = why
		if !l.up {
			close(l.connected)
		}
	}
	ln, conn := l.listener, l.conn
	l.mu.Unlock()
	if ln != nil {
		_ = ln.Close()
	}
	l.mux.Close()
	if conn != nil {
		_ = conn.Close()
	}
}

// own makes this process the owner with a fence: at Find, or when the session
// was claimed again in this process.
func (s *Sandbox) own(ctx context.Context, fence uint64) error {
	s.mu.Lock()
	if fence < s.state.Fence {
		held := s.state.Fence
		s.mu.Unlock()
		return fmt.Errorf("%w: fence %d, held under %d", ErrFenced, fence, held)
	}
	// The state is durable before the agent obeys: no older owner comes after.
	before := s.state.Fence
	s.state.Fence = fence
	s.mu.Unlock()
	if before != fence {
		if err := s.save(); err != nil {
			s.mu.Lock()
			s.state.Fence = before // the next attempt saves again
			s.mu.Unlock()
			return err
		}
		s.link.drop() // the next handshake tells the new fence
	}
	if err := s.link.listen(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.r.cfg.StartTimeout)
	defer cancel()
	half, cancelHalf := context.WithTimeout(ctx, s.r.cfg.StartTimeout/2)
	defer cancelHalf()
	err := s.link.wait(half)
	if err != nil && half.Err() != nil && ctx.Err() == nil {
		s.wake(ctx) // it dials every half second, unless it was stopped
		err = s.link.wait(ctx)
	}
	return err
}

// detach lets go of the sandbox, which lives on.
func (s *Sandbox) detach(why error) {
	s.link.close(why)
	s.link.wait1.Wait()
}
