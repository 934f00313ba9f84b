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
	"slices"
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
	doubted   error // what somebody said who may have been the agent
	closed    error
	guests    []net.Conn    // in a handshake, the oldest first
	over      chan struct{} // closed with closed set
	wait1     sync.WaitGroup

	running func()          // opens the way out
	runs    <-chan struct{} // closed when it is
}

// maxGuests are handshakes at one time. Processes inside may dial too: those
// that have tried longest make room, so that idle ones never keep the agent out.
const maxGuests = 16

// acceptAgain is the pause after a dial that could not be taken, for want of a
// descriptor.
const acceptAgain = 50 * time.Millisecond

func newHostLink(s *Sandbox) *hostLink {
	runs := make(chan struct{})
	l := &hostLink{
		s: s, connected: make(chan struct{}), over: make(chan struct{}), mode: wire.Greeting{Mode: wire.Attach},
		running: sync.OnceFunc(func() { close(runs) }), runs: runs,
	}
	l.mux = link.New(link.Host, l.accept)
	return l
}

// accept serves a stream that the agent opened. Whatever the agent says, nothing
// goes out before the sandbox runs: a restored one has taken on its identity then.
func (l *hostLink) accept(st *link.Stream) {
	if st.Kind() != wire.KindEgress || l.s.r.cfg.Egress == nil || !l.s.snapshotState().Egress {
		st.Reset()
		return
	}
	select {
	case <-l.runs:
	case <-st.Done():
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
	l.s.r.cfg.Egress(ctx, l.s, st)
	cancel()
	st.Leave(egressLinger, egressStall)
}

const (
	// egressLinger is how long a process inside may keep a connection to the way
	// out when that has ended it and all of its answer has arrived.
	egressLinger = 5 * time.Second
	// egressStall is how long it may read nothing of the rest of an answer.
	egressStall = 15 * time.Minute
)

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
	for {
		c, err := ln.Accept()
		if err == nil {
			l.wait1.Add(1)
			go func() {
				defer l.wait1.Done()
				l.serve(c)
			}()
			continue
		}
		// Whoever could not be taken dials again; an end here would be for ever.
		select {
		case <-l.over:
			return
		case <-time.After(acceptAgain):
		}
	}
}

// receive counts a connection among those in a handshake, which end with the
// link. false: it has ended.
func (l *hostLink) receive(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed != nil {
		return false
	}
	if len(l.guests) == maxGuests {
		_ = l.guests[0].Close() // its handshake ends with an error
		l.guests = l.guests[1:]
	}
	l.guests = append(l.guests, c)
	return true
}

func (l *hostLink) dismiss(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.guests = slices.DeleteFunc(l.guests, func(g net.Conn) bool { return g == c })
}

// serve does the handshake with whoever has dialled, and carries the streams
// when it was the agent.
func (l *hostLink) serve(c net.Conn) {
	if !l.receive(c) {
		_ = c.Close()
		return
	}
	_ = c.SetDeadline(time.Now().Add(handshakeTime))
	peer, fresh, err := l.handshake(c)
	l.dismiss(c)
	if err != nil {
		_ = c.Close()
		l.s.r.log.Debug("handshake came to nothing", "session", l.s.ID(), "err", err)
		return
	}
	if fresh {
		l.mux.Reset(errors.New("the sandbox has another owner or life"))
	}
	_ = c.SetDeadline(time.Time{})
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
			l.doubt(fmt.Errorf("%w: its memory does not know the snapshot", ErrDamaged))
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
	l.refused, l.doubted = nil, nil
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
	if l.closed != nil {
		return // those who wait know
	}
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

// doubt records that somebody inside has no proof. It may be any process: only if
// the agent does not come either, it was the agent.
func (l *hostLink) doubt(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.doubted = why
}

func (l *hostLink) doubts() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.doubted
}

// forgive forgets a refusal of before.
func (l *hostLink) forgive() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused = nil
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
		close(l.over)
		if !l.up {
			close(l.connected)
		}
	}
	ln, conn, guests := l.listener, l.conn, l.guests
	l.guests = nil
	l.mu.Unlock()
	for _, g := range guests {
		_ = g.Close()
	}
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
	higher, err := s.raise(fence)
	if err != nil {
		return err
	}
	if higher {
		s.link.forgive() // a refusal of the lower one
		s.link.drop()    // the next handshake tells the new one
	}
	if err := s.link.listen(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.r.cfg.StartTimeout)
	defer cancel()
	return s.await(ctx)
}

// raise records a fence that is not lower than the last. It is durable before
// the agent hears of it: no older owner comes after.
func (s *Sandbox) raise(fence uint64) (higher bool, err error) {
	s.saving.Lock()
	defer s.saving.Unlock()
	st := s.snapshotState()
	switch {
	case s.ending:
		return false, ErrNotFound
	case fence < st.Fence:
		return false, fmt.Errorf("%w: fence %d, held under %d", ErrFenced, fence, st.Fence)
	case fence == st.Fence:
		return false, nil
	}
	st.Fence = fence
	if err := s.write(st); err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state.Fence = fence
	return true, nil
}

// wakeAfter is how long the agent may not be heard of before it is woken. It
// dials twice a second, unless it was stopped.
var wakeAfter = 5 * time.Second

// await waits until the agent is connected. It may have been stopped by a process
// inside, also in the image that it was restored from, or have been paused by an
// owner who died; nobody inside wakes it.
func (s *Sandbox) await(ctx context.Context) error {
	for {
		short, cancel := context.WithTimeout(ctx, wakeAfter)
		err := s.link.wait(short)
		again := short.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil || !again {
			return err
		}
		if err := s.link.doubts(); err != nil {
			return err
		}
		s.wake(ctx)
	}
}

// detach lets go of the sandbox, which lives on.
func (s *Sandbox) detach(why error) {
	s.link.close(why)
	s.link.wait1.Wait()
}
