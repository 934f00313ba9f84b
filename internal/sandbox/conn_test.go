//go:build linux

package sandbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/sandbox/guest"
	"github.com/planaria/planaria/internal/sandbox/link"
	"github.com/planaria/planaria/internal/sandbox/wire"
)

// linked is a sandbox without gVisor: the test is what runs inside.
type linked struct {
	t    *testing.T
	s    *sandbox.Sandbox
	sock string
	key  []byte
}

func newLinked(t *testing.T, cfg sandbox.Config) *linked {
	t.Helper()
	dir, err := os.MkdirTemp("", "link") // names of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l := &linked{t: t, sock: filepath.Join(dir, "ctl", guest.SocketName), key: bytes.Repeat([]byte{7}, 32)}
	if l.s, err = sandbox.NewLink(dir, l.key, cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.s.CloseLink)
	return l
}

// dial connects as anybody inside can, and reads what the host says first.
func (l *linked) dial() (net.Conn, wire.Greeting) {
	l.t.Helper()
	c, err := net.Dial("unix", l.sock)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = c.Close() })
	var g wire.Greeting
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if err := wire.ReadMessage(c, wire.MaxHandshake, &g); err != nil {
		l.t.Fatal(err)
	}
	return c, g
}

// agent does the handshake as the agent, which refuses fences below least.
func (l *linked) agent(mux *link.Mux, least uint64) {
	l.t.Helper()
	c, g := l.dial()
	challenge := make([]byte, 32)
	if err := wire.WriteMessage(c, wire.Hello{Version: 1, Fence: least, Challenge: challenge, Proof: wire.Prove(l.key, "agent", g.Challenge, least)}); err != nil {
		l.t.Fatal(err)
	}
	var o wire.Offer
	if err := wire.ReadMessage(c, wire.MaxHandshake, &o); err != nil {
		l.t.Fatal(err)
	}
	accept := wire.Accept{State: mux.State()}
	if o.Fence < least {
		accept.Refused = "a newer owner"
	}
	if err := wire.WriteMessage(c, accept); err != nil {
		l.t.Fatal(err)
	}
	_ = c.SetDeadline(time.Time{})
	if accept.Refused == "" {
		go func() { _ = mux.Serve(c, o.State) }()
	}
}

// TestStrangerAtTheEnd: a process inside answers a restore's greeting without
// proof when the copy has just been given up. It once ended the server.
func TestStrangerAtTheEnd(t *testing.T) {
	for range 20 {
		l := newLinked(t, sandbox.Config{})
		l.s.ExpectRestore("snap", l.key)
		c, _ := l.dial()
		l.s.CloseLink()
		_ = wire.WriteMessage(c, wire.Hello{})
		if _, err := io.ReadAll(c); err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("a stranger is still served")
		}
		l.s.Detach()
	}
}

// TestStrangersAtRestore: processes inside that answer a restore's greeting
// without proof do not make the snapshot a damaged one; that the agent itself
// has none does.
func TestStrangersAtRestore(t *testing.T) {
	defer sandbox.SetSilence(300 * time.Millisecond)()
	for _, comes := range []bool{true, false} {
		l := newLinked(t, sandbox.Config{Binary: "/nonexistent"})
		l.s.ExpectRestore("snap", l.key)
		for range 3 {
			c, _ := l.dial()
			_ = wire.WriteMessage(c, wire.Hello{})
			_, _ = io.ReadAll(c) // to its end: the host has heard it
		}
		mux := link.New(link.Guest, func(*link.Stream) {})
		defer mux.Close()
		if comes {
			l.agent(mux, 1)
		}
		ctx, cancel := contextFor(20 * time.Second)
		defer cancel()
		err := l.s.Await(ctx)
		if comes && err != nil || !comes && !errors.Is(err, sandbox.ErrDamaged) {
			t.Errorf("the agent comes: %v: %v", comes, err)
		}
	}
}

// TestIdleStrangers: connections of processes inside that say nothing neither
// keep the agent out nor hold up the server's end.
func TestIdleStrangers(t *testing.T) {
	l := newLinked(t, sandbox.Config{})
	for range 40 {
		l.dial()
	}
	l.agent(link.New(link.Guest, func(*link.Stream) {}), 1)
	ctx, cancel := contextFor(20 * time.Second)
	defer cancel()
	if err := l.s.WaitLink(ctx); err != nil {
		t.Fatal(err)
	}
	l.dial()
	began := time.Now()
	l.s.Detach()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("letting go took %v", took)
	}
}

// TestNoWayOutYet: what a restored agent opens before its new identity is set
// waits, whatever it believes itself (law L9).
func TestNoWayOutYet(t *testing.T) {
	served := make(chan struct{})
	l := newLinked(t, sandbox.Config{Egress: func(_ context.Context, _ *sandbox.Sandbox, conn io.ReadWriteCloser) {
		close(served)
		_ = conn.Close()
	}})
	l.s.ExpectRestore("snap", l.key)
	mux := link.New(link.Guest, func(*link.Stream) {})
	defer mux.Close()
	l.agent(mux, 1)
	if _, err := mux.Open(wire.KindEgress); err != nil {
		t.Fatal(err)
	}
	select {
	case <-served:
		t.Fatal("a copy without identity has a way out")
	case <-time.After(300 * time.Millisecond):
	}
	if err := l.s.Run(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-served:
	case <-time.After(20 * time.Second):
		t.Fatal("a copy with its identity has no way out")
	}
}

// TestRefusedThenHigher: that the agent refused an owner says nothing about the
// next one.
func TestRefusedThenHigher(t *testing.T) {
	l := newLinked(t, sandbox.Config{})
	mux := link.New(link.Guest, func(*link.Stream) {})
	defer mux.Close()
	ctx, cancel := contextFor(20 * time.Second)
	defer cancel()
	own := func(fence uint64) error {
		owned := make(chan error, 1)
		go func() { owned <- l.s.Own(ctx, fence) }()
		for l.s.Fence() != fence {
			<-time.After(time.Millisecond)
		}
		for {
			l.agent(mux, 7) // which dials again and again
			select {
			case err := <-owned:
				return err
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	if err := own(5); !errors.Is(err, sandbox.ErrFenced) {
		t.Fatalf("fence 5: %v", err)
	}
	if err := own(8); err != nil {
		t.Errorf("fence 8: %v", err)
	}
}

// TestStateIsSavedInOrder: whoever saves last has not overwritten a higher fence
// with what it saw before.
func TestStateIsSavedInOrder(t *testing.T) {
	l := newLinked(t, sandbox.Config{})
	const highest = 60
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			for range highest {
				if err := l.s.Save(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for fence := uint64(2); fence < highest && !t.Failed(); fence++ {
		if err := l.s.Raise(fence); err != nil {
			t.Error(err)
		}
		var st struct {
			Fence uint64 `json:"fence"`
		}
		b, err := os.ReadFile(filepath.Join(l.s.Dir(), "state.json"))
		if err == nil {
			err = json.Unmarshal(b, &st)
		}
		if err != nil || st.Fence != fence {
			t.Errorf("fence %d is held, %d is kept, %v", fence, st.Fence, err)
		}
	}
	wait.Wait()
}

// TestSwollenAnswers: an agent that says as much as it may, in as many values as
// fit, costs the server little more than that.
func TestSwollenAnswers(t *testing.T) {
	l := newLinked(t, sandbox.Config{})
	swell := func(head, value, tail string) []byte {
		n := (wire.MaxMessage - len(head) - len(value) - len(tail)) / (len(value) + 1)
		var out bytes.Buffer
		if err := wire.WriteMessage(&out, json.RawMessage(head+strings.Repeat(value+",", n)+value+tail)); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	answers := map[string][]byte{
		wire.KindAdmin: swell(`{"files":[`, `{}`, `]}`),
		wire.KindCall:  swell(`{"result":{"images":[`, `{}`, `]}}`),
	}
	mux := link.New(link.Guest, func(s *link.Stream) {
		_, _ = s.Write(answers[s.Kind()])
		s.CloseWrite()
		_, _ = io.Copy(io.Discard, s)
	})
	defer mux.Close()
	l.agent(mux, 1)
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	for name, ask := range map[string]func() error{
		"list": func() error { _, _, err := l.s.ListFiles(ctx, "/"); return err },
		"call": func() error { _, err := l.s.Do(ctx, sandbox.Call{ID: "c", Tool: "bash"}); return err },
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := ask()
		runtime.ReadMemStats(&after)
		took := (after.TotalAlloc - before.TotalAlloc) >> 20
		t.Logf("%s: %d MiB, %v", name, took, err)
		if !errors.Is(err, wire.ErrTooLarge) || took > 8*wire.MaxMessage>>20 {
			t.Errorf("%s: took %d MiB, %v", name, took, err)
		}
	}
}

// TestResetsAreNotHurried: an agent that resets whatever is asked of it is asked
// again, and not as fast as both can.
func TestResetsAreNotHurried(t *testing.T) {
	l := newLinked(t, sandbox.Config{})
	var asked atomic.Int64
	mux := link.New(link.Guest, func(s *link.Stream) {
		asked.Add(1)
		s.Reset()
	})
	defer mux.Close()
	l.agent(mux, 1)
	ctx, cancel := contextFor(time.Second)
	defer cancel()
	if _, _, err := l.s.Calls(ctx); err == nil {
		t.Error("an agent without answers has answered")
	}
	if _, err := l.s.Do(ctx, sandbox.Call{ID: "c", Tool: "bash"}); err == nil {
		t.Error("an agent without results has given one")
	}
	if n := asked.Load(); n < 2 || n > 100 {
		t.Errorf("it was asked %d times in a second", n)
	}
}

// TestLargeAnswers: what an agent says beyond what one of ours may goes to nobody:
// not to those who watch a call, nor with its result to the log and the model.
func TestLargeAnswers(t *testing.T) {
	l := newLinked(t, sandbox.Config{})
	results := map[string]*wire.Result{
		"one":  {Text: "fine", Images: []wire.Image{{MediaType: "image/png", Data: make([]byte, wire.MaxImages)}}},
		"huge": {Text: "large", Images: []wire.Image{{MediaType: "image/png", Data: make([]byte, 2*wire.MaxImages)}}},
		"many": {Text: "many", Images: make([]wire.Image, 10_000)},
		"type": {Text: "type", Images: []wire.Image{{MediaType: strings.Repeat("x", 2*wire.MaxImages)}}},
	}
	mux := link.New(link.Guest, func(s *link.Stream) {
		defer s.Close()
		var call wire.Call
		if wire.ReadMessage(s, wire.MaxMessage, &call) == nil {
			_ = wire.WriteMessage(s, wire.Reply{Progress: strings.Repeat("x", 8<<20) + "end"})
			_ = wire.WriteMessage(s, wire.Reply{Result: results[call.ID]})
		}
	})
	defer mux.Close()
	l.agent(mux, 1)
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	for id, said := range results {
		told := ""
		r, err := l.s.Do(ctx, sandbox.Call{ID: id, Tool: "bash", Progress: func(s string) { told = s }})
		if err != nil {
			t.Fatal(err)
		}
		if n := len(told); n > 64<<10 || !strings.HasSuffix(told, "xend") {
			t.Errorf("%s: %d bytes were told", id, n)
		}
		if good := id == "one"; good != (r.Text == said.Text) || good != (len(r.Images) > 0) || good == r.IsError {
			t.Errorf("%s: %q with %d images", id, r.Text, len(r.Images))
		}
	}
}
