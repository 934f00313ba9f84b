package gateway_test

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
)

// outside is a world of names: each "host:port" is a server on loopback.
type outside struct {
	t testing.TB

	mu     sync.Mutex
	at     map[string]string
	fail   map[string]error
	asked  []string // "host:port", as dialled
	opened []store.Tunnel
	ended  []store.Tunnel
	closed error       // what Opened returns
	news   chan string // hosts, as their records are opened
}

func newOutside(t testing.TB) *outside {
	return &outside{t: t, at: map[string]string{}, fail: map[string]error{}, news: make(chan string, 10000)}
}

func (o *outside) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	o.mu.Lock()
	o.asked = append(o.asked, addr)
	host, _, _ := net.SplitHostPort(addr)
	if !slices.ContainsFunc(o.opened, func(t store.Tunnel) bool { return t.Host == host }) {
		o.t.Errorf("%s is dialled before its record is made", addr)
	}
	to, err := o.at[addr], o.fail[addr]
	o.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case to == "":
		return nil, &net.DNSError{Err: "no such host", Name: addr, Server: "10.9.8.7:53", IsNotFound: true}
	case to == "hangs":
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return (&net.Dialer{}).DialContext(ctx, network, to)
}

// serve puts a server of HTTP in the world.
func (o *outside) serve(host string, h http.HandlerFunc) {
	s := httptest.NewServer(h)
	o.t.Cleanup(s.Close)
	o.at[host] = s.Listener.Addr().String()
}

// listen puts a server of bytes in the world.
func (o *outside) listen(host string, serve func(c *net.TCPConn)) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		o.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { defer c.Close(); serve(c.(*net.TCPConn)) })
		}
	})
	o.t.Cleanup(func() { l.Close(); wg.Wait() })
	o.at[host] = l.Addr().String()
}

// echo answers each byte with itself, until it is told that no more come.
func echo(c *net.TCPConn) {
	_, _ = io.Copy(c, c)
	_ = c.CloseWrite()
}

// inside is a sandbox's end of the way out.
type inside struct {
	t     testing.TB
	o     *outside
	g     *gateway.Gateway
	scope gateway.EgressScope
	ctx   context.Context
}

func (o *outside) inside(n gateway.Network, change ...func(*keeper.Config)) *inside {
	o.t.Helper()
	cfg := keeper.Config{Dial: o.dial, Logger: slog.New(slog.DiscardHandler)}
	for _, c := range change {
		c(&cfg)
	}
	i := &inside{t: o.t, o: o, ctx: o.t.Context()}
	i.g = gateway.New(gateway.Config{Keeper: keeper.New(cfg), Logger: cfg.Logger, PackageHosts: []string{"mirror.test", "mirror.test:8081", "*.mirrors.test", "localhost", "localhost:8081"}})
	i.scope = gateway.EgressScope{Workspace: ws, Session: "sesn_1", Network: n,
		Opened: func(_ context.Context, t store.Tunnel) error {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.opened = append(o.opened, t)
			o.news <- t.Host
			return o.closed
		},
		Ended: func(t store.Tunnel) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.ended = append(o.ended, t)
		}}
	return i
}

// process is a connection of a process to the proxy.
type process struct {
	*net.TCPConn
	t    testing.TB
	in   *bufio.Reader
	over chan struct{} // closed when Egress has returned
}

// dial connects a process to the proxy.
func (i *inside) dial() *process {
	i.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		i.t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		i.t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		i.t.Fatal(err)
	}
	p := &process{TCPConn: c.(*net.TCPConn), t: i.t, in: bufio.NewReader(c), over: make(chan struct{})}
	go func() {
		defer close(p.over)
		i.g.Egress(i.ctx, i.scope, s)
	}()
	i.t.Cleanup(func() { c.Close(); <-p.over })
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	return p
}

func (p *process) say(s string) {
	p.t.Helper()
	if _, err := io.WriteString(p, s); err != nil {
		p.t.Fatal(err)
	}
}

// answer reads an answer with its body to a request of method.
func (p *process) answer(method string) (*http.Response, string) {
	p.t.Helper()
	resp, err := http.ReadResponse(p.in, &http.Request{Method: method})
	if err != nil {
		p.t.Fatalf("no answer: %v", err)
	}
	if method == http.MethodConnect && resp.StatusCode == http.StatusOK {
		return resp, ""
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		p.t.Fatalf("answer %s: %v", resp.Status, err)
	}
	return resp, string(b)
}

// hear reads exactly want.
func (p *process) hear(want string) {
	p.t.Helper()
	b := make([]byte, len(want))
	if n, err := io.ReadFull(p.in, b); err != nil || string(b) != want {
		p.t.Fatalf("heard %q, %v; want %q", b[:n], err, want)
	}
}

// end reads to the end.
func (p *process) end() (string, error) {
	b, err := io.ReadAll(p.in)
	return string(b), err
}

func (p *process) wait() {
	p.t.Helper()
	select {
	case <-p.over:
	case <-time.After(20 * time.Second):
		p.t.Fatal("the connection is served still")
	}
}

// last waits until every record has its end and returns the newest one.
func (o *outside) last() store.Tunnel {
	o.t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.opened) != len(o.ended) || len(o.ended) == 0 {
		o.t.Fatalf("%d records opened, %d ended", len(o.opened), len(o.ended))
	}
	return o.ended[len(o.ended)-1]
}

func (o *outside) tunnels() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.opened)
}

// A tunnel carries bytes both ways, each direction ends by itself, and its
// record says how much passed.
func TestEgressConnect(t *testing.T) {
	o := newOutside(t)
	o.listen("echo.test:7", echo)
	p := o.inside(gateway.Network{Unrestricted: true}).dial()
	p.say("CONNECT echo.test:7 HTTP/1.1\r\nHost: echo.test:7\r\nProxy-Authorization: Basic eDp5\r\n\r\nearly ")
	if resp, _ := p.answer(http.MethodConnect); resp.StatusCode != 200 {
		t.Fatalf("connect: %s", resp.Status)
	}
	p.hear("early ")
	p.say("hello")
	p.hear("hello")
	_ = p.CloseWrite()
	if rest, err := p.end(); rest != "" || err != nil {
		t.Errorf("after the end: %q, %v", rest, err)
	}
	p.wait()
	got := o.last()
	if got.Tunnel == "" || got.Tunnel != o.opened[0].Tunnel || o.opened[0].Ended {
		t.Errorf("records %+v, %+v", o.opened[0], got)
	}
	got.Tunnel, got.ElapsedMS = "", 0
	if diff := cmp.Diff(store.Tunnel{V: 1, Host: "echo.test", Port: 7, Ended: true, Sent: 11, Received: 11}, got); diff != "" {
		t.Errorf("record: %s", diff)
	}
}

// What an environment's networking lets through (reference section 4.1).
func TestEgressRules(t *testing.T) {
	limited := gateway.Network{Hosts: []string{"a.test", "*.wild.test", "Upper.TEST.", "bücher.test", "10.1.1.1", "8.8.8.8"}}
	packages := gateway.Network{PackageManagers: true}
	servers := gateway.Network{Servers: []string{"mcp.test", "mcp2.test:8443", "8.8.8.8", "[::1]:443"}}
	open := gateway.Network{Unrestricted: true}
	for _, c := range []struct {
		network gateway.Network
		target  string
		want    int    // of CONNECT
		says    string // where refused
	}{
		{limited, "a.test:443", 200, ""},
		{limited, "A.Test:443", 200, ""},
		{limited, "a.test.:443", 200, ""},
		{limited, "upper.test:443", 200, ""},
		{limited, "xn--bcher-kva.test:443", 200, ""},
		{limited, "bücher.test:443", 200, ""},
		{limited, "BÜCHER.test:443", 200, ""},
		{limited, "x.wild.test:443", 200, ""},
		{limited, "y.x.wild.test:443", 200, ""},
		{limited, "wild.test:443", 403, `add "wild.test" to the environment's networking.allowed_hosts`},
		{limited, "xwild.test:443", 403, `add "xwild.test"`},
		{limited, "b.a.test:443", 403, `add "b.a.test"`},
		{limited, "a.test.evil.test:443", 403, `add "a.test.evil.test"`},
		{limited, "a.test:22", 403, "ports 80 and 443 only"},
		{limited, "a.test:8443", 403, "ports 80 and 443 only"},
		{limited, "8.8.8.8:443", 403, "not by address"},
		{limited, "10.1.1.1:443", 403, "not by address"},
		{limited, "[::1]:443", 403, "not by address"},
		{limited, "[::ffff:a9fe:a9fe]:80", 403, "not by address"},
		{limited, "pypi.org:443", 403, "allow_package_managers"},
		{limited, "mirror.test:443", 403, "allow_package_managers"},
		{packages, "pypi.org:443", 200, ""},
		{packages, "registry.npmjs.org:443", 200, ""},
		{packages, "deb.debian.org:80", 200, ""},
		{packages, "mirror.test:443", 200, ""},
		{packages, "mirror.test:8081", 200, ""},
		{packages, "mirror.test:8082", 403, "ports 80 and 443 only"},
		{packages, "de.mirrors.test:443", 200, ""},
		{packages, "upload.pypi.org:443", 403, `add "upload.pypi.org"`},
		{servers, "mcp.test:443", 200, ""},
		{servers, "mcp2.test:8443", 200, ""},
		{servers, "mcp2.test:443", 403, `add "mcp2.test"`},
		{servers, "8.8.8.8:443", 403, "not by address"},
		{open, "anything.test:25", 200, ""},
		{open, "8.8.8.8:53", 200, ""},
		{open, "[2606:4700:4700::1111]:443", 200, ""},
		// Spellings of addresses that some resolver may take (attack N4).
		{open, "2852039166:80", 400, "neither"},
		{open, "0xa9fea9fe:80", 400, "neither"},
		{open, "0251.0376.0251.0376:80", 400, "neither"},
		{open, "127.1:80", 400, "neither"},
		{open, "0:80", 400, "neither"},
		{open, "[fe80::1%25eth0]:80", 400, "neither"},
		{open, "[a.test]:443", 400, "neither"},
		{open, "::1:443", 400, ""},
		{open, "a.test", 400, "port"},
		{open, "a.test:0", 400, "port"},
		{open, "a.test:0443", 400, "port"},
		{open, "a.test:65536", 400, "port"},
		{open, "a.test:+443", 400, "port"},
		{open, "a..test:443", 400, "neither"},
		{open, "a_b.test:443", 200, ""},
		{open, "-a.test:443", 400, "neither"},
		{open, "a%2etest:443", 400, "neither"},
		{open, "user@a.test:443", 400, "neither"},
		{open, "a.test:443/", 400, "port"},
		{open, "http://a.test:443", 400, "port"},
		{open, strings.Repeat("a.", 127) + "test:443", 400, "neither"},
	} {
		o := newOutside(t)
		for _, at := range []string{"a.test:443", "upper.test:443", "xn--bcher-kva.test:443", "x.wild.test:443", "y.x.wild.test:443", "pypi.org:443",
			"mcp.test:443", "mcp2.test:8443",
			"registry.npmjs.org:443", "mirror.test:443", "mirror.test:8081", "de.mirrors.test:443", "anything.test:25", "8.8.8.8:53",
			"[2606:4700:4700::1111]:443", "a_b.test:443"} {
			o.fail[at] = nil
			o.at[at] = "pipe"
		}
		i := o.inside(c.network, func(k *keeper.Config) {
			k.Dial = func(_ context.Context, _, addr string) (net.Conn, error) {
				o.mu.Lock()
				defer o.mu.Unlock()
				o.asked = append(o.asked, addr)
				if o.at[addr] == "" {
					t.Errorf("%s: dialled %s", c.target, addr)
				}
				a, b := net.Pipe()
				b.Close()
				return a, nil
			}
		})
		p := i.dial()
		p.say("CONNECT " + c.target + " HTTP/1.1\r\nHost: " + c.target + "\r\n\r\n")
		resp, body := p.answer(http.MethodConnect)
		if resp.StatusCode != c.want || !strings.Contains(body, c.says) {
			t.Errorf("%s under %+v: %s %q; want %d with %q", c.target, c.network, resp.Status, body, c.want, c.says)
		}
		if c.want != 200 && (len(o.asked) > 0 || o.tunnels() > 0) {
			t.Errorf("%s: refused, but dialled %v with %d records", c.target, o.asked, o.tunnels())
		}
		if c.want == 403 && !strings.Contains(resp.Header.Get("Proxy-Status"), "http_request_denied") {
			t.Errorf("%s: Proxy-Status %q", c.target, resp.Header.Get("Proxy-Status"))
		}
		p.Close()
	}
}
