package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
)

// Limits of the way out of one sandbox; those of a request's head are in
// egress_head.go, that of a dial is keeper.TunnelTime.
const (
	// EgressConns is how many connections of one session are served at once.
	// Each has one upstream at most.
	EgressConns = 256
	// EgressHeaderTime bounds the head of a request, from its first byte.
	EgressHeaderTime = 30 * time.Second
	// EgressKeep is how long a connection may stay between two requests.
	EgressKeep = 2 * time.Minute
	// EgressHelloTime bounds the wait for the first bytes of TLS in a tunnel
	// that must carry it.
	EgressHelloTime = 15 * time.Second
	// EgressIdle ends what no data has passed for.
	EgressIdle = 15 * time.Minute
	// EgressHalfIdle is EgressIdle once one direction has ended.
	EgressHalfIdle = time.Minute
	// egressBuffer is what one direction reads at a time, in bytes.
	egressBuffer = 32 << 10
	// lastWords bounds the time for an answer to reach a process that does not read.
	lastWords = 5 * time.Second
)

// Network is where the processes of a sandbox may connect to (reference section 4.1).
type Network struct {
	// Unrestricted: to every public host, on every port.
	Unrestricted bool
	// Hosts are the environment's allowed_hosts: bare names or "*." wildcards;
	// ports 80 and 443. Bare ones may have private addresses, where the operator
	// allows private networks at all.
	Hosts []string
	// Servers are the hosts of the agent's MCP servers, where the environment
	// allows them: bare names, or "host:port".
	Servers []string
	// PackageManagers adds the public package registries.
	PackageManagers bool
}

// Repository is a git repository that a sandbox may fetch through us: its token
// never enters the sandbox. Inside it is http://repositories.planaria/{Resource}.
type Repository struct {
	Resource string // "sesrsc_…", names the stored token too
	URL      string
}

// EgressScope says for which sandbox a connection is served.
type EgressScope struct {
	Workspace    store.WorkspaceID
	Session      store.SessionID
	Network      Network
	Repositories []Repository
	// Opened records a tunnel before it is dialled; an error refuses it. Ended
	// records its end, once for each that was opened.
	Opened func(ctx context.Context, t store.Tunnel) error
	Ended  func(t store.Tunnel)
}

// Egress serves one connection of a process in a sandbox to the proxy: CONNECT
// and plain HTTP requests, until it ends or ctx does; it closes conn. Nothing
// leaves that the environment's networking does not allow, and nothing is
// dialled before scope.Opened has returned.
func (g *Gateway) Egress(ctx context.Context, s EgressScope, conn io.ReadWriteCloser) {
	ctx, cut := context.WithCancelCause(ctx)
	e := &egress{g: g, scope: s, raw: conn, cut: cut}
	e.watch = newWatch(func() { cut(errIdle) })
	e.conn = &metered{rw: conn, watch: e.watch}
	e.in = bufio.NewReaderSize(e.conn, egressBuffer)
	// A read or write that hangs returns in the moment in which ctx ends.
	stop := context.AfterFunc(ctx, func() { abort(conn) })
	defer func() {
		e.watch.stop()
		if !stop() {
			abort(conn)
		}
		_ = conn.Close()
		cut(nil)
		e.heard()
	}()
	leave, ok := g.admit(s)
	if !ok {
		e.refused(slog.LevelWarn, "any", "too many connections", nil)
		e.watch.within(lastWords)
		e.refuse(nil, &denial{status: http.StatusServiceUnavailable, token: "connection_limit_reached",
			text: fmt.Sprintf("this sandbox has %d connections open already; close some.", EgressConns)})
		return
	}
	defer leave()
	e.rules = newRules(s.Network, g.packages)
	for e.next(ctx) {
	}
}

var errIdle = errors.New("no data has passed for too long")

// egress is one connection of a process to the proxy.
type egress struct {
	g     *Gateway
	scope EgressScope
	raw   io.ReadWriteCloser
	conn  *metered // raw, watched
	in    *bufio.Reader
	watch *watch
	cut   context.CancelCauseFunc // ends all of it at once
	rules *rules
	// within is where a tunnel leads whose plain HTTP we read ourselves.
	within *place
	// ear is closed when nobody listens to in any more; nil when nobody did.
	ear chan struct{}
}

// admit counts a connection of a session in, until leave is called.
func (g *Gateway) admit(s EgressScope) (leave func(), ok bool) {
	key := egressKey{s.Workspace, s.Session}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ways[key] >= EgressConns {
		return nil, false
	}
	g.ways[key]++
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.ways[key]--; g.ways[key] == 0 {
			delete(g.ways, key)
		}
	}, true
}

type egressKey struct {
	workspace store.WorkspaceID
	session   store.SessionID
}

// next serves one request and reports whether another may follow.
func (e *egress) next(ctx context.Context) bool {
	e.watch.within(EgressKeep)
	e.heard()
	if _, err := e.in.Peek(1); err != nil {
		return false
	}
	e.watch.within(EgressHeaderTime)
	h, err := readHead(e.in)
	if err != nil {
		e.refuse(nil, malformed(err))
		return false
	}
	e.watch.idle(EgressIdle)
	if h.method != http.MethodConnect {
		return e.request(ctx, h)
	}
	if e.within != nil {
		e.refuse(nil, malformed(errNested))
		return false
	}
	return e.connect(ctx, h)
}

// errNested: a proxy behind this one is not asked for (attack N8).
var errNested = bad("a CONNECT inside a tunnel is not served")

// denial is an answer of our own. It names no address.
type denial struct {
	status int
	reason string // the usual one when empty
	token  string // of RFC 9209
	text   string
}

// malformed makes the answer to bytes that are no request; nil where reading
// them failed.
func malformed(err error) *denial {
	var b *badHead
	if !errors.As(err, &b) {
		return nil
	}
	return &denial{status: b.status, token: "http_request_error", text: b.text + "."}
}

// refuse answers instead of the world and reports whether another request may
// follow h: nil, or one whose body was not read, must be the last.
func (e *egress) refuse(h *head, r *denial) bool {
	if r == nil {
		return false
	}
	keep := h != nil && !h.close && !h.hasBody() && h.method != http.MethodConnect
	reason := r.reason
	if reason == "" {
		reason = http.StatusText(r.status)
	}
	var b strings.Builder
	text := "planaria: " + r.text + "\n"
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nProxy-Status: planaria; error=%s\r\nCache-Control: no-store\r\n",
		r.status, reason, len(text), r.token)
	if !keep {
		b.WriteString("Connection: close\r\n")
	}
	b.WriteString("\r\n")
	if h == nil || h.method != http.MethodHead {
		b.WriteString(text)
	}
	e.watch.within(lastWords)
	_, err := io.WriteString(e.conn, b.String())
	return keep && err == nil
}

// way is one connection to the world with its record.
type way struct {
	net.Conn
	watch          *watch
	sent, received atomic.Int64
	record         store.Tunnel
	began          time.Time
	ended          func(store.Tunnel)
	stop           func() bool
}

func (w *way) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	w.received.Add(int64(n))
	w.watch.touch(n)
	return n, err
}

func (w *way) Write(p []byte) (int, error) {
	n, err := w.Conn.Write(p)
	w.sent.Add(int64(n))
	w.watch.touch(n)
	return n, err
}

// open records a way to p and dials it. The write order, with what a crash right
// after each step leaves:
//
//  1. Opened has returned: a record without end; nothing was sent, and a re-run
//     of the call takes it for sent.
//  2. dialled: the same; the world sees its connection end.
//  3. Ended: the record is whole.
func (e *egress) open(ctx context.Context, p place) (*way, *denial) {
	w, no := e.record(ctx, p)
	if no != nil {
		return nil, no
	}
	conn, err := e.g.keeper.Tunnel(ctx, p.host, p.port, e.rules.private(p))
	if err != nil {
		no := e.unreached(p, err)
		w.end(no.text)
		return nil, no
	}
	w.Conn = conn
	w.stop = context.AfterFunc(ctx, func() { _ = conn.Close() })
	return w, nil
}

// record makes the durable record of a way that is about to be taken.
func (e *egress) record(ctx context.Context, p place) (*way, *denial) {
	now := time.Now()
	w := &way{watch: e.watch, began: now, ended: e.scope.Ended, stop: func() bool { return true },
		record: store.Tunnel{V: 1, Tunnel: store.NewID("tun_", now), Host: p.host, Port: p.port}}
	if err := e.scope.Opened(ctx, w.record); err != nil {
		e.g.log.Debug("refused a way out", "session", e.scope.Session, "err", err)
		return nil, &denial{status: http.StatusServiceUnavailable, token: "proxy_internal_error",
			text: "the way out is closed now; nothing was sent. Try again later."}
	}
	return w, nil
}

// end closes the way and records its end.
func (w *way) end(failed string) {
	w.stop()
	if w.Conn != nil {
		_ = w.Conn.Close()
	}
	t := w.record
	t.Ended, t.Failed = true, failed
	t.Sent, t.Received, t.ElapsedMS = w.sent.Load(), w.received.Load(), time.Since(w.began).Milliseconds()
	w.ended(t)
}

// unreached says inside why a host was not reached. What holds addresses goes
// to the log only.
func (e *egress) unreached(p place, err error) *denial {
	r := &denial{status: http.StatusBadGateway, token: "destination_unavailable", text: p.String() + " was not reached: the connection ended."}
	says := func(status int, token string, why error) *denial {
		return &denial{status: status, token: token, text: fmt.Sprintf("%s was not reached: %v.", p, why)}
	}
	switch {
	case errors.Is(err, keeper.ErrForbidden):
		e.refused(slog.LevelWarn, p.String(), "its address is not allowed", err)
		r = says(http.StatusForbidden, "destination_ip_prohibited",
			errors.New("its address is private, special or this server's own. Private ones are reached only where the operator allows it and the environment's networking.allowed_hosts names the host itself, the others never"))
		r.reason = "Address not allowed"
	case errors.Is(err, keeper.ErrNoName):
		r = says(http.StatusBadGateway, "dns_error", keeper.ErrNoName)
	case errors.Is(err, keeper.ErrUnanswered):
		r = says(http.StatusGatewayTimeout, "connection_timeout", keeper.ErrUnanswered)
	case errors.Is(err, keeper.ErrUnreachable):
		r = says(http.StatusBadGateway, "connection_refused", keeper.ErrUnreachable)
	}
	e.g.log.Debug("did not reach a host", "session", e.scope.Session, "err", err)
	return r
}

// metered is a stream whose bytes keep the watch awake.
type metered struct {
	rw    io.ReadWriter
	watch *watch
}

func (m *metered) Read(p []byte) (int, error) {
	n, err := m.rw.Read(p)
	m.watch.touch(n)
	return n, err
}

func (m *metered) Write(p []byte) (int, error) {
	n, err := m.rw.Write(p)
	m.watch.touch(n)
	return n, err
}

// abort ends a stream so that its reader sees it was cut, where it can say so.
func abort(c io.Closer) {
	if r, ok := c.(interface{ Reset() }); ok {
		r.Reset()
	}
	_ = c.Close()
}

// watch calls late when its time has passed. Only data gives more time: not that
// a connection exists.
type watch struct {
	start time.Time
	last  atomic.Int64 // when data passed, after start

	mu      sync.Mutex
	timer   *time.Timer
	until   time.Duration // after start
	sliding time.Duration // data gives this much more time; 0: it gives none
}

func newWatch(late func()) *watch {
	w := &watch{start: time.Now(), until: EgressKeep}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(EgressKeep, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		until := w.until
		if w.sliding > 0 {
			until = max(until, time.Duration(w.last.Load())+w.sliding)
		}
		if left := until - time.Since(w.start); left > 0 {
			w.timer.Reset(left)
			return
		}
		late()
	})
	return w
}

// within gives time d from now, whatever passes.
func (w *watch) within(d time.Duration) { w.set(d, 0) }

// idle gives time d from now, and again with each byte.
func (w *watch) idle(d time.Duration) { w.set(d, d) }

func (w *watch) set(d, sliding time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.until, w.sliding = time.Since(w.start)+d, sliding
	w.timer.Reset(d)
}

func (w *watch) touch(n int) {
	if n > 0 {
		w.last.Store(int64(time.Since(w.start)))
	}
}

func (w *watch) stop() { w.timer.Stop() }
