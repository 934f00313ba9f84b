// Package link carries streams between a sandbox's host and its agent over one
// socket that may be cut at any byte and dialled again.
//
// Every checkpoint cuts the sockets of a sandbox, in the original too. So a
// stream does not belong to a connection: each side keeps what it has sent
// until the other has consumed it (at most Window bytes a stream), both say in
// the handshake how far they have received, and each sends the rest again. A
// reader sees every byte once, in order, or an error.
//
// The bound on unacknowledged bytes is the flow control as well: a writer whose
// peer does not read waits, and other streams go on.
//
// The package knows nothing of fences, calls or files; what a stream is for is
// its kind. Bytes from the other side are taken as hostile: what breaks the
// protocol cuts the connection.
package link

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
)

// Limits of the protocol.
const (
	// Window is how many bytes of a stream may be on their way, unread, in
	// each direction; as many are kept for sending again.
	Window = 256 << 10
	// maxStreams bounds the streams that the peer may hold open.
	maxStreams = 4096
	// maxKind bounds the name of a stream's kind, in bytes.
	maxKind = 256
	// chunk is the largest payload of a frame.
	chunk = 32 << 10
	// headerSize: type, flags, stream id, offset, payload length.
	headerSize = 1 + 1 + 8 + 8 + 4
)

// Side says which end of the link a Mux is: it decides the parity of the ids of
// the streams it opens.
type Side uint64

// The two ends.
const (
	Host  Side = 1
	Guest Side = 2
)

// Errors of streams and links.
var (
	// ErrReset: the stream ended before its end; what was read is right, what
	// follows will never come.
	ErrReset = errors.New("stream reset")
	// ErrClosed: the link or this end of the stream was closed by its user.
	ErrClosed = errors.New("closed")
	// ErrProtocol: the peer sent what no right peer sends.
	ErrProtocol = errors.New("link protocol broken")
)

// State is how far one side has received, told in a handshake.
type State struct {
	// Seen is the highest id of the peer's own streams that has arrived.
	Seen uint64 `json:"seen"`
	// Streams are the open ones.
	Streams []StreamState `json:"streams,omitempty"`
}

// StreamState is one stream of a State.
type StreamState struct {
	ID       uint64 `json:"id"`
	Received uint64 `json:"received"` // bytes
	Fin      bool   `json:"fin,omitempty"`
}

const (
	typeOpen byte = iota + 1
	typeData
	typeAck
	typeFin
	typeReset
)

const flagFin = 1 // of an ack: the end has arrived too

type frame struct {
	typ, flags byte
	id, off    uint64
	payload    []byte
}

// Mux is one end of a link. Its methods may be called concurrently, but Serve
// only by one connection after the other.
type Mux struct {
	side   Side
	accept func(*Stream)

	mu      sync.Mutex
	work    *sync.Cond // something to send, a new connection, an end
	streams map[uint64]*Stream
	next    uint64 // id of the next stream opened here
	seen    uint64 // highest id of the peer
	turn    uint64 // id of the stream that sent last
	epoch   uint64 // counts connections; a writer of an older one ends
	err     error  // closed for good
}

// New makes an end without connection. accept is called in a goroutine of its
// own for every stream that the peer opens.
func New(side Side, accept func(*Stream)) *Mux {
	m := &Mux{side: side, accept: accept, streams: map[uint64]*Stream{}, next: uint64(side)}
	m.work = sync.NewCond(&m.mu)
	return m
}

// State returns what the peer needs to go on. No connection may be served.
func (m *Mux) State() State {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := State{Seen: m.seen}
	for id, st := range m.streams {
		s.Streams = append(s.Streams, StreamState{id, st.received, st.finReceived})
	}
	slices.SortFunc(s.Streams, func(a, b StreamState) int { return cmp.Compare(a.ID, b.ID) })
	return s
}

// Open opens a stream. It never waits: without connection the stream begins
// when there is one.
func (m *Mux) Open(kind string) (*Stream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return nil, m.err
	}
	if len(kind) > maxKind {
		return nil, fmt.Errorf("open stream: kind of %d bytes: %w", len(kind), ErrProtocol)
	}
	s := newStream(m, m.next, kind)
	s.openPending = true
	m.next += 2
	m.streams[s.id] = s
	m.work.Broadcast()
	return s, nil
}

// Reset ends all streams with an error: the peer is another one than before.
func (m *Mux) Reset(why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, s := range m.streams {
		s.end(fmt.Errorf("%w: %w", ErrReset, why))
		delete(m.streams, id)
	}
	m.seen = 0
	m.next = uint64(m.side)
}

// Close ends the link and all its streams.
func (m *Mux) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		m.err = ErrClosed
	}
	for id, s := range m.streams {
		s.end(ErrClosed)
		delete(m.streams, id)
	}
	m.work.Broadcast()
}

// Serve carries the streams over conn until it is cut, and says why it was. The
// peer's state is what it told in the handshake. conn is closed on return, and
// nobody writes to it any more.
func (m *Mux) Serve(conn io.ReadWriteCloser, peer State) error {
	m.mu.Lock()
	if err := m.err; err != nil {
		m.mu.Unlock()
		_ = conn.Close()
		return err
	}
	m.epoch++
	epoch := m.epoch
	m.resume(peer)
	m.work.Broadcast()
	m.mu.Unlock()

	written := make(chan struct{})
	go func() {
		defer close(written)
		if err := m.write(conn, epoch); err != nil {
			_ = conn.Close() // wakes the reader
		}
	}()
	err := m.read(conn)
	m.mu.Lock()
	m.epoch++ // ends the writer
	m.work.Broadcast()
	m.mu.Unlock()
	_ = conn.Close()
	<-written
	return err
}

// resume sets every stream to what the peer has received. m.mu is held.
func (m *Mux) resume(peer State) {
	have := map[uint64]StreamState{}
	for _, p := range peer.Streams {
		have[p.ID] = p
	}
	for id, s := range m.streams {
		p, ok := have[id]
		switch {
		case ok && p.Received >= s.acked && p.Received <= s.acked+uint64(len(s.out)):
			s.openPending = false
			s.sent = p.Received
			s.finPending = s.finQueued && !p.Fin
			s.finAcked = s.finAcked || p.Fin
			s.ackPending = true
		case ok:
			s.end(fmt.Errorf("%w: peer received %d of [%d, %d]", ErrReset, p.Received, s.acked, s.acked+uint64(len(s.out))))
			s.resetPending = true
		case m.ours(id) && id > peer.Seen: // it never arrived: again from its beginning
			s.openPending = true
			s.sent = s.acked
			s.finPending = s.finQueued
		case s.finQueued && s.finReceived: // the peer had everything and forgot it
			delete(m.streams, id)
			s.finish()
		default:
			s.end(fmt.Errorf("%w: the other side dropped it", ErrReset))
			delete(m.streams, id)
		}
		m.forget(s)
	}
}

func (m *Mux) ours(id uint64) bool { return id%2 == uint64(m.side)%2 }

// forget drops a stream that both sides are done with. m.mu is held.
func (m *Mux) forget(s *Stream) {
	if s.finAcked && s.finReceived && !s.ackPending && !s.resetPending && m.streams[s.id] == s {
		delete(m.streams, s.id)
		s.finish()
	}
}

// write sends what streams have until the connection's time is over. An error
// is one of the connection.
func (m *Mux) write(conn io.Writer, epoch uint64) error {
	buf := make([]byte, 0, 2*chunk)
	for {
		m.mu.Lock()
		for {
			if err := m.err; err != nil || m.epoch != epoch {
				m.mu.Unlock()
				return err
			}
			if buf = m.collect(buf[:0]); len(buf) > 0 {
				break
			}
			m.work.Wait()
		}
		m.mu.Unlock()
		if _, err := conn.Write(buf); err != nil {
			return err
		}
	}
}

// collect gathers frames: what opens streams, in the order of ids, and then a
// chunk of each stream in turn. It goes on behind the one that was served last:
// streams that always have something to send hold up no other. m.mu is held.
func (m *Mux) collect(buf []byte) []byte {
	var ids []uint64
	for id, s := range m.streams {
		if s.pending() {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	for _, id := range ids {
		buf = m.streams[id].collectOpen(buf)
	}
	next, _ := slices.BinarySearch(ids, m.turn+1)
	for i := range ids {
		id := ids[(next+i)%len(ids)]
		s := m.streams[id]
		m.turn = id
		buf = s.collect(buf)
		if s.resetPending {
			s.resetPending = false
			buf = appendFrame(buf, frame{typ: typeReset, id: id})
			delete(m.streams, id)
			continue
		}
		m.forget(s)
		if len(buf) > 8*chunk {
			break
		}
	}
	return buf
}

func appendFrame(buf []byte, f frame) []byte {
	buf = append(buf, f.typ, f.flags)
	buf = binary.BigEndian.AppendUint64(buf, f.id)
	buf = binary.BigEndian.AppendUint64(buf, f.off)
	buf = binary.BigEndian.AppendUint32(buf, uint32(len(f.payload)))
	return append(buf, f.payload...)
}

// read takes frames until the connection ends.
func (m *Mux) read(conn io.Reader) error {
	r := bufio.NewReaderSize(conn, 2*chunk)
	var head [headerSize]byte
	payload := make([]byte, chunk)
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return err
		}
		f := frame{typ: head[0], flags: head[1], id: binary.BigEndian.Uint64(head[2:]), off: binary.BigEndian.Uint64(head[10:])}
		n := binary.BigEndian.Uint32(head[18:])
		if n > chunk {
			return fmt.Errorf("%w: frame of %d bytes", ErrProtocol, n)
		}
		f.payload = payload[:n]
		if _, err := io.ReadFull(r, f.payload); err != nil {
			return err
		}
		if err := m.take(f); err != nil {
			return err
		}
	}
}

// take acts on one frame.
func (m *Mux) take(f frame) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if f.typ == typeOpen {
		return m.takeOpen(f)
	}
	s := m.streams[f.id]
	if s == nil {
		return nil // it was reset or is done; the peer will learn it
	}
	switch f.typ {
	case typeData:
		return s.takeData(f)
	case typeAck:
		if f.off < s.acked || f.off > s.sent {
			return fmt.Errorf("%w: ack of %d, sent %d", ErrProtocol, f.off, s.sent)
		}
		if s.out = s.out[f.off-s.acked:]; len(s.out) == 0 {
			s.out = nil // an idle stream holds no memory
		}
		s.acked = f.off
		if f.flags&flagFin != 0 {
			if !s.finQueued {
				return fmt.Errorf("%w: ack of an end that was not sent", ErrProtocol)
			}
			s.finAcked = true
		}
		s.cond.Broadcast()
	case typeFin:
		if f.off != s.received {
			return fmt.Errorf("%w: end at %d, received %d", ErrProtocol, f.off, s.received)
		}
		s.finReceived = true
		s.ackPending = true
		s.cond.Broadcast()
		m.work.Broadcast()
	case typeReset:
		s.end(ErrReset)
		delete(m.streams, s.id)
	default:
		return fmt.Errorf("%w: frame type %d", ErrProtocol, f.typ)
	}
	m.forget(s)
	return nil
}

func (m *Mux) takeOpen(f frame) error {
	if m.ours(f.id) || f.id == 0 || len(f.payload) > maxKind {
		return fmt.Errorf("%w: opens stream %d", ErrProtocol, f.id)
	}
	if f.id <= m.seen {
		return nil // sent again
	}
	if len(m.streams) >= 2*maxStreams {
		// It was told to stop, and reads nothing.
		return fmt.Errorf("%w: more than %d streams", ErrProtocol, 2*maxStreams)
	}
	m.seen = f.id
	s := newStream(m, f.id, string(f.payload))
	m.streams[f.id] = s
	if len(m.streams) > maxStreams {
		s.end(ErrReset)
		s.resetPending = true
		m.work.Broadcast()
		return nil
	}
	go m.accept(s)
	return nil
}
