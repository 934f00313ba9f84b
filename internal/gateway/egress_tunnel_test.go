package gateway_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
)

// hello is what a TLS client says first.
func hello(t testing.TB, name string) []byte {
	t.Helper()
	a, b := net.Pipe()
	go func() {
		defer a.Close()
		_ = tls.Client(a, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
	}()
	defer b.Close()
	head := make([]byte, 5)
	if _, err := io.ReadFull(b, head); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, int(head[3])<<8|int(head[4]))
	if _, err := io.ReadFull(b, body); err != nil {
		t.Fatal(err)
	}
	return append(head, body...)
}

// split cuts the first record of a hello into records of n bytes.
func split(b []byte, n int) []byte {
	var out []byte
	for body := b[5:]; len(body) > 0; {
		part := body[:min(n, len(body))]
		body = body[len(part):]
		out = append(append(out, 22, 3, 1, byte(len(part)>>8), byte(len(part))), part...)
	}
	return out
}

// endless begins a hello of the largest size, in records of one byte, n of them.
func endless(n int) []byte {
	out := []byte{22, 3, 1, 0, 4, 1, 0, 0x40, 0}
	for range n {
		out = append(out, 22, 3, 1, 0, 1, 0)
	}
	return out
}

// What a process sends first in a tunnel decides whether anything of it goes on
// (attacks N7, N8): limited networking takes TLS to the tunnel's host on port
// 443, and a tunnel inside a tunnel is never served.
func TestEgressOpening(t *testing.T) {
	limited := gateway.Network{Hosts: []string{"a.test"}}
	alert := "\x15\x03\x01\x00\x02\x02\x70"
	good, other, none := hello(t, "a.test"), hello(t, "b.test"), hello(t, "")
	for name, c := range map[string]struct {
		network gateway.Network
		host    string
		send    []byte
		passes  bool
		hears   string
		failed  string
	}{
		"same name":              {limited, "a.test:443", good, true, "", ""},
		"same name, small parts": {limited, "a.test:443", split(good, 7), true, "", ""},
		"upper case":             {limited, "a.test:443", hello(t, "A.TEST"), true, "", ""},
		"other name":             {limited, "a.test:443", other, false, alert, "name in TLS"},
		"other name, in parts":   {limited, "a.test:443", split(other, 50), false, alert, "name in TLS"},
		"no name":                {limited, "a.test:443", none, false, alert, "name in TLS"},
		"no TLS":                 {limited, "a.test:443", []byte("GET / HTTP/1.1\r\n\r\n"), false, "", "not TLS"},
		"SSH":                    {limited, "a.test:443", []byte("SSH-2.0-x\r\n"), false, "", "not TLS"},
		"SSLv2":                  {limited, "a.test:443", []byte{0x80, 0x2e, 1, 0, 2}, false, "", "not TLS"},
		"TLS, no hello":          {limited, "a.test:443", []byte{22, 3, 1, 0, 4, 2, 0, 0, 0}, false, "", "not TLS"},
		"empty record":           {limited, "a.test:443", []byte{22, 3, 1, 0, 0}, false, "", "not TLS"},
		"two messages":           {limited, "a.test:443", append([]byte{22, 3, 1, byte((len(good) - 1) >> 8), byte(len(good) - 1)}, append(good[5:], 1, 0, 0, 0)...), false, "", "not TLS"},
		"nested":                 {limited, "a.test:443", []byte("CONNECT b.test:443 HTTP/1.1\r\n\r\n"), false, "", "CONNECT"},
		"open, other name":       {anywhere, "a.test:443", other, false, alert, "name in TLS"},
		"open, no name":          {anywhere, "a.test:443", none, true, "", ""},
		"open, no TLS":           {anywhere, "a.test:443", []byte("SSH-2.0-x\r\n"), true, "", ""},
		"open, address":          {anywhere, "8.8.8.8:443", other, true, "", ""},
		"open, nested":           {anywhere, "a.test:3128", []byte("connect b.test:443 HTTP/1.1\r\n\r\n"), false, "", "CONNECT"},
		"open, NATS":             {anywhere, "a.test:4222", []byte("CONNECT {\"verbose\":false}\r\nPING\r\n"), true, "", ""},
		"limited, NATS":          {limited, "a.test:443", []byte("CONNECT {}\r\n"), false, "", "not TLS"},
		"endless small records":  {limited, "a.test:443", endless(6 << 10), false, "", "not TLS"},
		"open, other port":       {anywhere, "a.test:22", []byte("C\r\n"), true, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOutside(t)
			got := make(chan []byte, 1)
			o.listen(c.host, func(conn *net.TCPConn) {
				b, _ := io.ReadAll(conn)
				got <- b
			})
			p := o.inside(c.network).dial()
			p.say("CONNECT " + c.host + " HTTP/1.1\r\nHost: " + c.host + "\r\n\r\n")
			if resp, body := p.answer(http.MethodConnect); resp.StatusCode != 200 {
				t.Fatalf("%s %s", resp.Status, body)
			}
			// Byte by byte: a verdict does not depend on how they come.
			for _, b := range c.send {
				if _, err := p.Write([]byte{b}); err != nil {
					break
				}
			}
			_ = p.CloseWrite()
			heard, _ := p.end()
			p.wait()
			want := c.send
			if !c.passes {
				want = nil
			}
			if b := <-got; !bytes.Equal(b, want) {
				t.Errorf("the host got %d bytes %.40q, want %d", len(b), b, len(want))
			}
			if heard != c.hears {
				t.Errorf("the process heard %q, want %q", heard, c.hears)
			}
			if last := o.last(); (c.failed == "") != (last.Failed == "") || !strings.Contains(last.Failed, c.failed) {
				t.Errorf("record %+v", last)
			}
		})
	}
}

// Under limited networking what goes through a tunnel to port 80 is read like
// any other plain HTTP.
func TestEgressTunnelOfHTTP(t *testing.T) {
	o := newOutside(t)
	o.serve("a.test:80", func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Host+r.RequestURI) })
	i := o.inside(gateway.Network{Hosts: []string{"a.test", "b.test"}})
	p := i.dial()
	p.say("CONNECT a.test:80 HTTP/1.1\r\nHost: a.test:80\r\n\r\n")
	p.answer(http.MethodConnect)
	for _, target := range []string{"/one?x", "http://a.test/two"} {
		p.say("GET " + target + " HTTP/1.1\r\nHost: a.test\r\n\r\n")
		if resp, body := p.answer("GET"); resp.StatusCode != 200 || body != "a.test"+strings.TrimPrefix(target, "http://a.test") {
			t.Errorf("%s: %s %q", target, resp.Status, body)
		}
	}
	if o.tunnels() != 2 {
		t.Errorf("%d records", o.tunnels())
	}
	for _, send := range []string{
		"GET / HTTP/1.1\r\nHost: b.test\r\n\r\n", "GET http://b.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n",
		"CONNECT b.test:443 HTTP/1.1\r\nHost: b.test\r\n\r\n", "SSH-2.0-x\r\n\r\n",
	} {
		p := i.dial()
		p.say("CONNECT a.test:80 HTTP/1.1\r\nHost: a.test:80\r\n\r\n")
		p.answer(http.MethodConnect)
		p.say(send)
		if resp, body := p.answer("GET"); resp.StatusCode != 400 {
			t.Errorf("%q: %s %q", send, resp.Status, body)
		}
	}
	if o.tunnels() != 2 {
		t.Errorf("%d records", o.tunnels())
	}
}

// Either side may end its direction first; the other goes on.
func TestEgressHalfClose(t *testing.T) {
	o := newOutside(t)
	o.listen("first.test:1", func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "hi")
		_ = c.CloseWrite()
		b, _ := io.ReadAll(c)
		if string(b) != "late" {
			t.Errorf("the host got %q", b)
		}
	})
	o.listen("last.test:1", func(c *net.TCPConn) {
		b, _ := io.ReadAll(c)
		_, _ = c.Write(b)
	})
	i := o.inside(anywhere)
	p := i.dial()
	p.say("CONNECT first.test:1 HTTP/1.1\r\nHost: first.test\r\n\r\n")
	p.answer(http.MethodConnect)
	if b, err := p.end(); b != "hi" || err != nil {
		t.Errorf("heard %q, %v", b, err)
	}
	p.say("late")
	_ = p.CloseWrite()
	p.wait()
	p = i.dial()
	p.say("CONNECT last.test:1 HTTP/1.1\r\nHost: last.test\r\n\r\nearly")
	p.answer(http.MethodConnect)
	_ = p.CloseWrite()
	if b, err := p.end(); b != "early" || err != nil {
		t.Errorf("heard %q, %v", b, err)
	}
	p.wait()
	for _, e := range o.ended {
		if e.Failed != "" {
			t.Errorf("record %+v", e)
		}
	}
}

// When ctx ends, everything that is open ends within 250 ms: tunnels, answers,
// dials, and what waits for a request.
func TestEgressCut(t *testing.T) {
	o := newOutside(t)
	o.at["hangs.test:443"] = "hangs"
	o.listen("stream.test:443", func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
	o.serve("stream.test:80", func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	i := o.inside(anywhere)
	why := errors.New("the lease was lost")
	ctx, cancel := context.WithCancelCause(t.Context())
	i.ctx = ctx
	var ps []*process
	for _, send := range []string{
		"CONNECT stream.test:443 HTTP/1.1\r\nHost: stream.test\r\n\r\n", "CONNECT hangs.test:443 HTTP/1.1\r\nHost: hangs.test\r\n\r\n",
		"GET http://stream.test/ HTTP/1.1\r\nHost: stream.test\r\n\r\n", "POST http://stream.test/ HTTP/1.1\r\nHost: stream.test\r\nContent-Length: 5\r\n\r\n", "GET http:", "",
	} {
		p := i.dial()
		p.say(send)
		ps = append(ps, p)
	}
	ps[0].hear("HTTP/1.1 200 Connection established\r\n\r\n")
	ps[2].hear("HTTP/1.1 200 OK\r\n")
	for range 4 {
		<-o.news
	}
	cancel(why)
	begin := time.Now()
	for _, p := range ps {
		p.wait()
	}
	// Less than any time that a connection waits for by itself (the shortest is 5 s).
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("cut after %v", took)
	}
	o.last()
	for _, e := range o.ended {
		if !strings.Contains(e.Failed, why.Error()) && !strings.Contains(e.Failed, "connection ended") {
			t.Errorf("record %+v", e)
		}
	}
}

// One sandbox has so many connections and no more; another has its own.
func TestEgressConns(t *testing.T) {
	o := newOutside(t)
	i := o.inside(anywhere)
	for range gateway.EgressConns {
		p := i.dial()
		p.say("GET http://nowhere.test/ HTTP/1.1\r\nHost: nowhere.test\r\n\r\n")
		p.answer("GET") // it is served now
	}
	p := i.dial()
	if resp, body := p.answer("GET"); resp.StatusCode != 503 || !strings.Contains(body, "256 connections") {
		t.Errorf("one more: %s %q", resp.Status, body)
	}
	i.scope.Session = "sesn_2"
	p = i.dial()
	p.say("GET http://nowhere.test/ HTTP/1.1\r\nHost: nowhere.test\r\n\r\n")
	if resp, _ := p.answer("GET"); resp.StatusCode != 502 {
		t.Errorf("another sandbox: %s", resp.Status)
	}
}

// slow is a way out in a bubble of fake time: both ends are pipes.
func slow(t *testing.T, n gateway.Network, act func(p net.Conn, host net.Conn)) (lasted time.Duration, failed string) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		k := keeper.New(keeper.Config{Dial: func(ctx context.Context, _, addr string) (net.Conn, error) {
			if strings.HasPrefix(addr, "hangs") {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return near, nil
		}})
		g := gateway.New(gateway.Config{Keeper: k})
		process, proxy := net.Pipe()
		var wg sync.WaitGroup
		begin := time.Now()
		wg.Go(func() {
			g.Egress(t.Context(), gateway.EgressScope{Session: "sesn_1", Network: n,
				Opened: func(context.Context, store.Tunnel) error { return nil },
				Ended:  func(e store.Tunnel) { failed = e.Failed }}, proxy)
			lasted = time.Since(begin)
		})
		act(process, far)
		_, _ = io.Copy(io.Discard, process)
		wg.Wait()
		process.Close()
		far.Close()
		near.Close()
	})
	return lasted, failed
}

// Each wait has its limit; only data gives more time (attack F6).
func TestEgressTimes(t *testing.T) {
	say := func(c net.Conn, s string) { _, _ = io.WriteString(c, s) }
	connected := func(p net.Conn) *bufio.Reader {
		in := bufio.NewReader(p)
		_, _ = http.ReadResponse(in, &http.Request{Method: "CONNECT"})
		return in
	}
	const connect = "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n"
	limited := gateway.Network{Hosts: []string{"a.test"}}
	for name, c := range map[string]struct {
		network gateway.Network
		act     func(p, host net.Conn)
		want    time.Duration
		failed  string
	}{
		"nothing": {anywhere, func(net.Conn, net.Conn) {}, gateway.EgressKeep, ""},
		"slow head": {anywhere, func(p, _ net.Conn) {
			for _, err := p.Write([]byte("G")); err == nil; _, err = p.Write([]byte("G")) {
				<-time.After(time.Second)
			}
		}, gateway.EgressHeaderTime, ""},
		"slow hello":  {limited, func(p, _ net.Conn) { say(p, connect); connected(p); say(p, "\x16\x03") }, gateway.EgressHelloTime, "no data"},
		"no hello":    {limited, func(p, _ net.Conn) { say(p, connect); connected(p) }, gateway.EgressHelloTime, "no data"},
		"idle tunnel": {anywhere, func(p, _ net.Conn) { say(p, connect); connected(p) }, gateway.EgressIdle, "no data"},
		"tunnel with data": {anywhere, func(p, host net.Conn) {
			say(p, connect)
			in := connected(p)
			for range 3 {
				<-time.After(gateway.EgressIdle - time.Minute)
				go say(host, "x")
				_, _ = in.ReadByte()
			}
		}, 3*(gateway.EgressIdle-time.Minute) + gateway.EgressIdle, "no data"},
		"idle answer": {anywhere, func(p, host net.Conn) {
			say(p, "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
			_, _ = http.ReadRequest(bufio.NewReader(host))
			say(host, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nx")
		}, gateway.EgressIdle, "no data"},
		"left before the answer": {anywhere, func(p, host net.Conn) {
			say(p, "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
			_, _ = http.ReadRequest(bufio.NewReader(host))
			p.Close()
		}, gateway.EgressHalfIdle, "no data"},
		"left after its body": {anywhere, func(p, host net.Conn) {
			say(p, "POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1\r\n\r\n")
			go say(p, "x")
			r, _ := http.ReadRequest(bufio.NewReader(host))
			_, _ = io.ReadAll(r.Body)
			p.Close()
		}, gateway.EgressHalfIdle, "no data"},
		"dial": {anywhere, func(p, _ net.Conn) { say(p, "CONNECT hangs.test:443 HTTP/1.1\r\nHost: hangs.test\r\n\r\n") }, keeper.TunnelTime, "did not answer in time"},
	} {
		t.Run(name, func(t *testing.T) {
			lasted, failed := slow(t, c.network, c.act)
			if lasted != c.want || !strings.Contains(failed, c.failed) || c.failed == "" && failed != "" {
				t.Errorf("lasted %v, failed %q; want %v, %q", lasted, failed, c.want, c.failed)
			}
		})
	}
}

// The end of a stream in both directions ends its ctx (package link): that is no
// cut, and the record does not call it one.
func TestEgressEndOfStream(t *testing.T) {
	o := newOutside(t)
	o.listen("a.test:1", echo)
	i := o.inside(anywhere)
	near, far := net.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	s := &endsCtx{Conn: near, end: cancel}
	over := make(chan struct{})
	go func() { defer close(over); i.g.Egress(ctx, i.scope, s) }()
	_, _ = io.WriteString(far, "CONNECT a.test:1 HTTP/1.1\r\nHost: a.test\r\n\r\n")
	in := bufio.NewReader(far)
	if resp, err := http.ReadResponse(in, &http.Request{Method: "CONNECT"}); err != nil || resp.StatusCode != 200 {
		t.Fatal(resp, err)
	}
	s.eof.Store(true)
	_, _ = io.WriteString(far, "x")
	_, _ = io.Copy(io.Discard, in)
	<-over
	far.Close()
	if last := o.last(); last.Failed != "" || last.Sent != 1 || last.Received != 1 {
		t.Errorf("record %+v", last)
	}
}

// endsCtx is a stream whose reader ends after one more read, and which ends its
// ctx when both directions have ended.
type endsCtx struct {
	net.Conn
	eof, over atomic.Bool
	end       context.CancelFunc
}

func (s *endsCtx) Read(p []byte) (int, error) {
	if s.over.Load() {
		return 0, io.EOF
	}
	n, err := s.Conn.Read(p)
	s.over.Store(s.eof.Load())
	return n, err
}

func (s *endsCtx) CloseWrite() {
	s.end()
}
