package link

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Stream is a two-way byte stream. Reads and writes may run concurrently with
// each other; neither is cut off by a cut of the connection.
type Stream struct {
	mux  *Mux
	id   uint64
	kind string
	cond *sync.Cond // on mux.mu
	done chan struct{}

	// All below is guarded by mux.mu.

	out   []byte // from offset acked: not yet consumed by the peer
	acked uint64
	sent  uint64 // end of what this connection has carried

	in       []byte // received and not yet read
	received uint64

	openPending, finQueued, finPending, finAcked bool
	finReceived, ackPending, resetPending        bool

	discard bool // the reader has left: what comes is dropped
	err     error
}

func newStream(m *Mux, id uint64, kind string) *Stream {
	return &Stream{mux: m, id: id, kind: kind, cond: sync.NewCond(&m.mu), done: make(chan struct{})}
}

// Kind is what the opener said that the stream is for.
func (s *Stream) Kind() string { return s.kind }

// Done is closed when the stream is over in both directions, or was reset.
func (s *Stream) Done() <-chan struct{} { return s.done }

// Read implements io.Reader; io.EOF after the peer's CloseWrite, ErrReset when
// the rest is lost.
func (s *Stream) Read(p []byte) (int, error) {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	for len(s.in) == 0 {
		switch {
		case s.finReceived:
			return 0, io.EOF
		case s.err != nil:
			return 0, s.err
		case s.discard:
			return 0, ErrClosed
		}
		s.cond.Wait()
	}
	n := copy(p, s.in)
	if s.in = s.in[n:]; len(s.in) == 0 {
		s.in = nil // an idle stream holds no memory
	}
	s.ackPending = true
	s.mux.work.Broadcast()
	return n, nil
}

// Write implements io.Writer: it returns when all of p is kept for sending,
// which waits while the peer does not read.
func (s *Stream) Write(p []byte) (n int, err error) {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	for {
		if s.err != nil {
			return n, s.err
		}
		if s.finQueued {
			return n, ErrClosed
		}
		if room := Window - len(s.out); room > 0 && len(p) > 0 {
			k := min(room, len(p))
			s.out = append(s.out, p[:k]...)
			p = p[k:]
			n += k
			s.mux.work.Broadcast()
		}
		if len(p) == 0 {
			return n, nil
		}
		s.cond.Wait()
	}
}

// CloseWrite says that nothing more will be written.
func (s *Stream) CloseWrite() {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	if !s.finQueued && s.err == nil {
		s.finQueued, s.finPending = true, true
		s.mux.work.Broadcast()
		s.cond.Broadcast()
	}
}

// Close ends writing and drops what is still to be read. What was written still
// goes out.
func (s *Stream) Close() error {
	s.CloseWrite()
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	s.discard = true
	s.in = nil
	s.ackPending = true
	s.cond.Broadcast()
	s.mux.work.Broadcast()
	return nil
}

// Leave closes the stream for one who reads no more of it, and returns when it is
// over. A peer that has taken all that was written, and does not end its side
// within linger, is told so by a reset; one that has not, when it takes nothing for
// stall.
func (s *Stream) Leave(linger, stall time.Duration) {
	_ = s.Close()
	t := time.NewTicker(linger)
	defer t.Stop()
	last, _ := s.taken()
	for quiet := linger; ; quiet += linger {
		select {
		case <-s.done:
			return
		case <-t.C:
		}
		switch now, all := s.taken(); {
		case now != last:
			last, quiet = now, 0
		case all || quiet >= stall:
			s.Reset()
			return
		}
	}
}

// taken tells how far the peer has consumed what was written, and whether that is
// all of it with its end.
func (s *Stream) taken() (off uint64, all bool) {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	return s.acked, s.finAcked && len(s.out) == 0
}

// Reset ends the stream in both directions at once.
func (s *Stream) Reset() {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	if s.err == nil && s.mux.streams[s.id] == s {
		s.end(ErrReset)
		s.resetPending = true
		s.mux.work.Broadcast()
	}
}

// end records why the stream is over. mux.mu is held.
func (s *Stream) end(why error) {
	if s.err == nil {
		s.err = why
	}
	s.finish()
}

// finish tells all who wait. mux.mu is held.
func (s *Stream) finish() {
	select {
	case <-s.done:
	default:
		close(s.done)
	}
	s.cond.Broadcast()
}

func (s *Stream) pending() bool {
	return s.openPending || s.ackPending || s.resetPending || s.sent < s.acked+uint64(len(s.out)) || s.finPending
}

// collectOpen appends the frame that opens this stream, where it is due. mux.mu
// is held.
func (s *Stream) collectOpen(buf []byte) []byte {
	if !s.openPending {
		return buf
	}
	s.openPending = false
	return appendFrame(buf, frame{typ: typeOpen, id: s.id, payload: []byte(s.kind)})
}

// collect appends this stream's next frames. mux.mu is held.
func (s *Stream) collect(buf []byte) []byte {
	if s.resetPending {
		return buf
	}
	end := s.acked + uint64(len(s.out))
	if s.sent < end {
		n := min(end-s.sent, chunk)
		from := s.sent - s.acked
		buf = appendFrame(buf, frame{typ: typeData, id: s.id, off: s.sent, payload: s.out[from : from+n]})
		s.sent += n
	}
	if s.finPending && s.sent == end {
		s.finPending = false
		buf = appendFrame(buf, frame{typ: typeFin, id: s.id, off: end})
	}
	if s.ackPending {
		s.ackPending = false
		f := frame{typ: typeAck, id: s.id, off: s.received - uint64(len(s.in))}
		if s.finReceived {
			f.flags = flagFin
		}
		buf = appendFrame(buf, f)
	}
	return buf
}

// takeData keeps what is new of a frame. mux.mu is held.
func (s *Stream) takeData(f frame) error {
	end := f.off + uint64(len(f.payload))
	switch {
	case f.off > s.received || end < f.off:
		return fmt.Errorf("%w: data at %d, received %d", ErrProtocol, f.off, s.received)
	case end <= s.received:
		return nil
	case s.finReceived:
		return fmt.Errorf("%w: data after the end", ErrProtocol)
	}
	fresh := f.payload[s.received-f.off:]
	if len(s.in)+len(fresh) > Window {
		return fmt.Errorf("%w: more than %d bytes unread", ErrProtocol, Window)
	}
	s.received = end
	if s.discard || s.err != nil {
		s.ackPending = true
		s.mux.work.Broadcast()
		return nil
	}
	s.in = append(s.in, fresh...)
	s.cond.Broadcast()
	return nil
}
