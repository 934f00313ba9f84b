package link_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox/link"
)

// cutter cuts a connection after a number of bytes.
type cutter struct {
	net.Conn
	mu   sync.Mutex
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	c.mu.Lock()
	n := min(len(p), c.left)
	c.left -= n
	c.mu.Unlock()
	if n < len(p) {
		if n > 0 {
			_, _ = c.Conn.Write(p[:n])
		}
		_ = c.Conn.Close()
		return n, io.ErrClosedPipe
	}
	return c.Conn.Write(p)
}

// connect serves both ends over new connections until stop, each cut somewhere.
func connect(host, guest *link.Mux, r *rand.Rand, stop <-chan struct{}) (cuts int) {
	for ; ; cuts++ {
		select {
		case <-stop:
			return cuts
		default:
		}
		a, b := net.Pipe()
		left := 1 + r.IntN(400_000)
		ca, cb := &cutter{Conn: a, left: left}, &cutter{Conn: b, left: 1 + r.IntN(400_000)}
		hs, gs := host.State(), guest.State()
		done := make(chan struct{})
		var wait sync.WaitGroup
		wait.Go(func() { _ = host.Serve(ca, gs) })
		wait.Go(func() { _ = guest.Serve(cb, hs) })
		go func() {
			select {
			case <-stop:
				_ = a.Close()
			case <-done:
			}
		}()
		wait.Wait()
		close(done)
	}
}

// TestStreamsSurviveCuts: many streams in both directions, cut at random bytes;
// every byte arrives once, in order, and every end.
func TestStreamsSurviveCuts(t *testing.T) {
	for seed := range uint64(5) {
		r := rand.New(rand.NewPCG(seed, 1))
		echo := func(s *link.Stream) {
			_, _ = io.Copy(struct{ io.Writer }{s}, struct{ io.Reader }{s})
			_ = s.Close()
		}
		host, guest := link.New(link.Host, echo), link.New(link.Guest, echo)
		stop := make(chan struct{})
		cuts := make(chan int, 1)
		go func() { cuts <- connect(host, guest, r, stop) }()
		var wait sync.WaitGroup
		for i := range 12 {
			m := host
			if i%2 == 1 {
				m = guest
			}
			body := make([]byte, i*i*9000)
			for j := range body {
				body[j] = byte(j*7 + i)
			}
			wait.Go(func() {
				s, err := m.Open("echo")
				if err != nil {
					t.Error(err)
					return
				}
				go func() {
					_, _ = s.Write(body)
					s.CloseWrite()
				}()
				got, err := io.ReadAll(s)
				if err != nil || !bytes.Equal(got, body) {
					t.Errorf("seed %d stream %d: %d of %d bytes, %v", seed, i, len(got), len(body), err)
				}
			})
		}
		wait.Wait()
		close(stop)
		t.Logf("seed %d: %d cuts", seed, <-cuts)
		host.Close()
		guest.Close()
	}
}

// TestWriterWaits: an unread stream takes a window and holds up no other.
func TestWriterWaits(t *testing.T) {
	accepted := make(chan *link.Stream, 2)
	host := link.New(link.Host, func(*link.Stream) {})
	guest := link.New(link.Guest, func(s *link.Stream) { accepted <- s })
	a, b := net.Pipe()
	var wait sync.WaitGroup
	wait.Go(func() { _ = host.Serve(a, link.State{}) })
	wait.Go(func() { _ = guest.Serve(b, link.State{}) })
	defer wait.Wait()
	defer a.Close()
	slow, _ := host.Open("slow")
	if _, err := slow.Write(make([]byte, link.Window)); err != nil {
		t.Fatal(err)
	}
	blocked := make(chan error, 1)
	go func() {
		_, err := slow.Write([]byte("x"))
		blocked <- err
	}()
	fast, _ := host.Open("fast")
	_, _ = fast.Write([]byte("hello"))
	fast.CloseWrite()
	for range 2 {
		s := <-accepted
		if s.Kind() == "fast" {
			if got, err := io.ReadAll(s); string(got) != "hello" || err != nil {
				t.Errorf("fast: %q, %v", got, err)
			}
		}
	}
	select {
	case err := <-blocked:
		t.Errorf("a write beyond the window returned: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	slow.Reset()
	if err := <-blocked; !errors.Is(err, link.ErrReset) {
		t.Errorf("a write on a reset stream: %v", err)
	}
}

// FuzzServe: no bytes of a peer break this end or make it keep more than it may.
func FuzzServe(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 'k'})
	f.Add([]byte{3, 1, 0, 0, 0, 0, 0, 0, 0, 1, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		m := link.New(link.Host, func(s *link.Stream) { _, _ = io.Copy(io.Discard, s) })
		s, err := m.Open("x")
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = s.Write([]byte("hello")) }()
		_ = m.Serve(rw{bytes.NewReader(data)}, link.State{})
		m.Close()
	})
}

type rw struct{ io.Reader }

func (rw) Write(p []byte) (int, error) { return len(p), nil }
func (rw) Close() error                { return nil }

// TestFloodOfStreams: a peer that opens streams and reads nothing is cut off; it
// costs a bounded number of them.
func TestFloodOfStreams(t *testing.T) {
	host := link.New(link.Host, func(s *link.Stream) { <-s.Done() })
	defer host.Close()
	a, b := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- host.Serve(a, link.State{}) }()
	frame := make([]byte, 22) // open, no flags, id, offset 0, no payload
	frame[0] = 1
	for id := uint64(2); id < 200_000; id += 2 {
		binary.BigEndian.PutUint64(frame[2:], id)
		if _, err := b.Write(frame); err != nil {
			break
		}
	}
	_ = b.Close()
	if err := <-served; !errors.Is(err, link.ErrProtocol) {
		t.Errorf("served until %v", err)
	}
	if n := len(host.State().Streams); n > 10_000 {
		t.Errorf("%d streams", n)
	}
}

// TestFairTurns: streams that always have something to send leave room for one
// that was opened after them, also where the connection is what is slow: a call
// must come through beside any number of downloads.
func TestFairTurns(t *testing.T) {
	const busy = 40
	accepted := make(chan *link.Stream, 1)
	host := link.New(link.Host, func(*link.Stream) {})
	guest := link.New(link.Guest, func(s *link.Stream) {
		if s.Kind() == "call" {
			accepted <- s
			return
		}
		_, _ = io.Copy(io.Discard, s)
	})
	defer host.Close()
	defer guest.Close()
	a, b := net.Pipe()
	go func() { _ = host.Serve(a, link.State{}) }()
	go func() { _ = guest.Serve(&slowReader{Conn: b}, link.State{}) }()
	var full sync.WaitGroup
	for range busy {
		s, err := host.Open("download")
		if err != nil {
			t.Fatal(err)
		}
		full.Add(1)
		go func() {
			for n, body := 0, make([]byte, 64<<10); ; n++ {
				if n == 4 { // one that begins to wait for its window
					full.Done()
				}
				if _, err := s.Write(body); err != nil {
					return
				}
			}
		}()
	}
	full.Wait()
	s, err := host.Open("call")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = s.Write([]byte("hello")); s.CloseWrite() }()
	select {
	case s := <-accepted:
		got := make(chan string, 1)
		go func() { b, _ := io.ReadAll(s); got <- string(b) }()
		select {
		case g := <-got:
			if g != "hello" {
				t.Errorf("got %q", g)
			}
		case <-time.After(5 * time.Second):
			t.Error("the call's bytes do not come through")
		}
	case <-time.After(5 * time.Second):
		t.Error("the call does not come through")
	}
}

// slowReader is an end that takes 32 KiB a millisecond.
type slowReader struct{ net.Conn }

func (c *slowReader) Read(p []byte) (int, error) {
	<-time.After(time.Millisecond)
	return c.Conn.Read(p[:min(len(p), 32<<10)])
}
