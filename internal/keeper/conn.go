package keeper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// Limits of MCP connections.
const (
	// ConnectTime bounds connecting, initialising and listing, together.
	ConnectTime = 20 * time.Second
	// MaxTools is how many tools of one server are looked at.
	MaxTools = 1000
	// maxPages bounds the pages of one listing.
	maxPages = 50
	// connIdle is how long an unused MCP connection is kept.
	connIdle = 10 * time.Minute
	// checkIdle is how long an MCP connection may be unused before it is asked
	// again for its tools ahead of a call. A server that has restarted forgets
	// its sessions; asking is a read, finding out with a call is not.
	checkIdle = 15 * time.Second
	// maxConns bounds the connections kept at once.
	maxConns = 4096
	// farewellTime bounds ending an MCP session.
	farewellTime = 2 * time.Second
)

// Target is an MCP server as seen by one session.
type Target struct {
	Workspace store.WorkspaceID
	Server    string // name in the agent's mcp_servers
	Connector store.ConnectorID
	URL       string // normalised
	// Operator: the URL was given by an operator (a connector), not by an agent.
	Operator bool
	Vaults   []store.VaultID
}

// Tool is one tool of a server, as listed.
type Tool struct {
	Name        string
	Description string
	InputSchema json.RawMessage
	Annotations json.RawMessage
	Digest      string // of the whole definition
}

// ConnectError says that a server cannot be used now. Nothing but reads was sent.
type ConnectError struct {
	Server string
	Auth   bool // credentials were refused
	Err    error
}

func (e *ConnectError) Error() string { return "connect to " + e.Server + ": " + e.Err.Error() }
func (e *ConnectError) Unwrap() error { return e.Err }

// connKey names a connection. It is never shared across workspaces or
// credentials (attack K9), nor between an operator's URL and an agent's.
type connKey struct {
	ws         store.WorkspaceID
	url        string
	operator   bool
	credential store.CredentialID
	// since tells a rotated credential from its former self: a call that is out
	// keeps the connection, and the scrubber, of the token that it was sent with.
	since int64
}

// credential is what is added on the way out.
type credential struct {
	token vault.Secret
	scrub *vault.Scrubber
}

// conn is one MCP connection: a session of the protocol over lines of ours. It
// is the http.RoundTripper below the SDK's client.
type conn struct {
	k    *Keeper
	key  connKey
	url  *url.URL
	name string
	cred atomic.Pointer[credential]

	opening chan struct{} // full while the session is opened or checked
	session atomic.Pointer[mcp.ClientSession]
	gone    atomic.Bool  // the server does not know our session any more, or refuses us
	status  atomic.Int32 // of the newest answer that was not a tool's

	mu    sync.Mutex
	lines []*line         // unused
	tools map[string]Tool // as last listed
	order []Tool
	used  time.Time
}

// open returns a connection that is initialised and listed. fresh asks the
// server for its tools again. Errors are *ConnectError or ctx's.
func (k *Keeper) open(ctx context.Context, t Target, fresh bool) (*conn, error) {
	c, err := k.find(ctx, t)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, ConnectTime, errSlow)
	defer cancel()
	select {
	case c.opening <- struct{}{}:
		defer func() { <-c.opening }()
	case <-ctx.Done(): // another caller is at it, and its server is slow
		if err := context.Cause(ctx); !errors.Is(err, errSlow) {
			return nil, err
		}
		return nil, &ConnectError{Server: t.Server, Err: errSlow}
	}
	if c.session.Load() == nil || c.gone.Load() {
		err = c.start(ctx)
	} else if fresh || c.idle() > checkIdle {
		err = c.list(ctx)
		if err != nil && ctx.Err() == nil {
			err = c.start(ctx) // the session may be gone: a new one, once
		}
	}
	if err != nil {
		if ctx.Err() != nil && !errors.Is(context.Cause(ctx), errSlow) {
			// The caller left, which says nothing about the connection: other
			// sessions use it too.
			return nil, context.Cause(ctx)
		}
		k.drop(c)
		status := int(c.status.Load())
		return nil, &ConnectError{
			Server: t.Server,
			Auth:   status == http.StatusUnauthorized || status == http.StatusForbidden,
			Err:    c.clean(err),
		}
	}
	c.touch()
	return c, nil
}

var errSlow = fmt.Errorf("no answer within %v", ConnectTime)

// find returns the kept connection for a target or a new, unopened one.
func (k *Keeper) find(ctx context.Context, t Target) (*conn, error) {
	u, err := url.Parse(t.URL)
	if err != nil {
		return nil, &ConnectError{Server: t.Server, Err: errors.New("its address is not a URL")}
	}
	if err := vault.CheckHost(u.Host); err != nil {
		return nil, &ConnectError{Server: t.Server, Err: err}
	}
	if !t.Operator && !k.cfg.AllowPrivateNetworks && literal(u.Hostname()) {
		return nil, &ConnectError{Server: t.Server, Err: errors.New("a literal address is used through a connector, or with --allow-private-networks")}
	}
	key := connKey{ws: t.Workspace, url: t.URL, operator: t.Operator}
	cred, err := k.credential(ctx, t, &key)
	if err != nil {
		return nil, &ConnectError{Server: t.Server, Err: err}
	}
	k.mu.Lock()
	c := k.conns[key]
	if c == nil {
		c = &conn{k: k, key: key, url: u, name: t.Server, used: time.Now(), opening: make(chan struct{}, 1)}
		c.cred.Store(cred)
		k.conns[key] = c
	}
	stale := k.sweep()
	k.mu.Unlock()
	for _, s := range stale {
		k.background(s.close)
	}
	return c, nil
}

// literal reports whether host is an IP address in any spelling that a
// resolver may take for one (attack N4): its last label begins with a digit.
func literal(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	last := host[strings.LastIndexByte(host, '.')+1:]
	return last != "" && last[0] >= '0' && last[0] <= '9'
}

// credential returns the session's credential for the server, nil when none matches.
func (k *Keeper) credential(ctx context.Context, t Target, key *connKey) (*credential, error) {
	if len(t.Vaults) == 0 {
		return nil, nil
	}
	row, err := k.cfg.DB.CredentialFor(ctx, t.Workspace, t.Vaults, t.URL)
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up credential: %w", err)
	}
	if row.AuthType != "static_bearer" {
		return nil, fmt.Errorf("credential %s has type %s, which is not supported yet", row.ID, row.AuthType)
	}
	token, err := k.cfg.Vault.Open(string(row.Workspace), string(row.ID), row.Sealed)
	if err != nil {
		return nil, err
	}
	if err := vault.CheckHeaderValue(token.Reveal()); err != nil {
		return nil, fmt.Errorf("credential %s: %w", row.ID, err)
	}
	key.credential, key.since = row.ID, row.UpdatedAt.UnixMicro()
	return &credential{token: token, scrub: vault.NewScrubber(token)}, nil
}

// sweep takes connections out of the map that are unused for long, or the
// oldest when there are too many. Callers hold k.mu.
func (k *Keeper) sweep() []*conn {
	var stale []*conn
	if time.Since(k.swept) < time.Minute && len(k.conns) <= maxConns {
		return nil
	}
	k.swept = time.Now()
	for key, c := range k.conns {
		if c.idle() > connIdle || len(k.conns) > maxConns && c.idle() > keepIdle {
			delete(k.conns, key)
			stale = append(stale, c)
		}
	}
	return stale
}

// drop forgets a connection that cannot be used. Calls that are under way on
// it run to their end.
func (k *Keeper) drop(c *conn) {
	c.gone.Store(true)
	k.mu.Lock()
	known := k.conns[c.key] == c
	if known {
		delete(k.conns, c.key)
	}
	k.mu.Unlock()
	if known {
		k.background(c.close)
	}
}

func (c *conn) touch() {
	c.mu.Lock()
	c.used = time.Now()
	c.mu.Unlock()
}

func (c *conn) idle() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Since(c.used)
}

// start opens a new MCP session and lists the tools. Callers hold c.opening.
func (c *conn) start(ctx context.Context) error {
	if old := c.session.Swap(nil); old != nil {
		c.k.background(func() { _ = old.Close() })
	}
	c.gone.Store(false)
	s, err := c.k.client.Connect(ctx, &mcp.StreamableClientTransport{
		Endpoint:             c.url.String(),
		HTTPClient:           &http.Client{Transport: c, CheckRedirect: noRedirect},
		MaxRetries:           -1, // no resumption: what was cut is in doubt
		DisableStandaloneSSE: true,
	}, nil)
	if err != nil {
		return err
	}
	c.session.Store(s)
	return c.list(ctx)
}

// noRedirect returns a redirect as what it is (trap P6, attack N5).
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

type listKey struct{}

// list asks for the server's tools, all pages. Callers hold c.opening.
func (c *conn) list(ctx context.Context) error {
	var raw []json.RawMessage
	ctx = context.WithValue(ctx, listKey{}, &raw)
	cursor := ""
	for page := 0; ; page++ {
		if page == maxPages || len(raw) > MaxTools {
			return fmt.Errorf("the server lists more than %d tools or %d pages", MaxTools, maxPages)
		}
		res, err := c.session.Load().ListTools(ctx, &mcp.ListToolsParams{Cursor: cursor})
		if err != nil {
			return fmt.Errorf("list tools: %w", err)
		}
		if cursor = res.NextCursor; cursor == "" {
			break
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(raw) == 0 && len(c.order) > 0 {
		return nil // answered from the SDK's cache: the server said that its list still holds
	}
	c.tools, c.order = map[string]Tool{}, nil
	for _, r := range raw {
		t, err := readTool(r)
		if err != nil {
			continue // a tool without a usable definition is not offered
		}
		if _, twice := c.tools[t.Name]; twice {
			return fmt.Errorf("the server lists tool %.128q twice", t.Name)
		}
		c.tools[t.Name] = t
		c.order = append(c.order, t)
	}
	return nil
}

func readTool(raw json.RawMessage) (Tool, error) {
	var d struct {
		Name        string          `json:"name"`
		Description string          `json:"description"`
		InputSchema json.RawMessage `json:"inputSchema"`
		Annotations json.RawMessage `json:"annotations"`
	}
	if err := json.Unmarshal(raw, &d); err != nil {
		return Tool{}, err
	}
	if d.Name == "" || len(d.Name) > 128 || !offerable(d.InputSchema) {
		return Tool{}, errors.New("no usable definition")
	}
	return Tool{Name: d.Name, Description: Plain(d.Description), InputSchema: d.InputSchema,
		Annotations: d.Annotations, Digest: effect.DefinitionDigest(raw)}, nil
}

// offerable reports whether model APIs take a tool of this schema: an object at
// the root, no root combinator, property names of at most 64 plain characters
// (reference section 11.1 has the same rules for custom tools). They refuse the
// whole request for one bad tool, so that it would stop the session.
func offerable(schema json.RawMessage) bool {
	var s struct {
		Type       string                     `json:"type"`
		OneOf      json.RawMessage            `json:"oneOf"`
		AnyOf      json.RawMessage            `json:"anyOf"`
		AllOf      json.RawMessage            `json:"allOf"`
		Properties map[string]json.RawMessage `json:"properties"`
	}
	if json.Unmarshal(schema, &s) != nil || s.Type != "object" || s.OneOf != nil || s.AnyOf != nil || s.AllOf != nil {
		return false
	}
	for name := range s.Properties {
		if name == "" || len(name) > 64 || strings.ContainsFunc(name, func(r rune) bool {
			return r != '_' && r != '.' && r != '-' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
		}) {
			return false
		}
	}
	return true
}

// tool returns a tool as last listed.
func (c *conn) tool(name string) (Tool, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, ok := c.tools[name]
	return t, ok
}

// line returns a connection to the server's host: a kept one that still lives,
// or a new one.
func (c *conn) line(ctx context.Context) (*line, error) {
	for {
		c.mu.Lock()
		var l *line
		if n := len(c.lines); n > 0 {
			l, c.lines = c.lines[n-1], c.lines[:n-1]
		}
		c.mu.Unlock()
		if l == nil {
			break
		}
		if l.alive(time.Now()) {
			return l, nil
		}
		l.raw.Conn.Close()
	}
	if c.key.operator || c.k.cfg.AllowPrivateNetworks {
		ctx = Private(ctx)
	}
	return dialLine(ctx, c.k.cfg.Dial, c.url, c.k.tls)
}

// keep puts a line back that has ended its exchange well. One that nobody
// takes up is closed after keepIdle.
func (c *conn) keep(l *line) {
	l.idle = time.Now()
	c.mu.Lock()
	full := len(c.lines) >= maxIdle || c.gone.Load()
	if !full {
		c.lines = append(c.lines, l)
	}
	c.mu.Unlock()
	if full {
		l.raw.Conn.Close()
		return
	}
	time.AfterFunc(keepIdle+time.Millisecond, c.expire)
}

// expire closes the lines that were unused for too long.
func (c *conn) expire() {
	now := time.Now()
	c.mu.Lock()
	var old []*line
	c.lines = slices.DeleteFunc(c.lines, func(l *line) bool {
		if now.Sub(l.idle) <= keepIdle {
			return false
		}
		old = append(old, l)
		return true
	})
	c.mu.Unlock()
	for _, l := range old {
		l.raw.Conn.Close()
	}
}

// close ends the MCP session and closes the lines.
func (c *conn) close() {
	c.opening <- struct{}{}
	defer func() { <-c.opening }()
	if s := c.session.Swap(nil); s != nil {
		_ = s.Close() // best effort: the server forgets idle sessions by itself
	}
	c.gone.Store(true)
	c.mu.Lock()
	lines := c.lines
	c.lines = nil
	c.mu.Unlock()
	for _, l := range lines {
		l.raw.Conn.Close()
	}
}

// clean removes the credential from an error's text and bounds it.
func (c *conn) clean(err error) error {
	text := err.Error()
	if cred := c.cred.Load(); cred != nil {
		b, n := cred.scrub.Scrub([]byte(text))
		if n > 0 {
			c.k.log.Warn("scrubbed a credential", slog.String("server", c.name), slog.Int("count", n))
		}
		text = string(b)
	}
	text = Plain(text)
	if len(text) > 500 {
		text = strings.ToValidUTF8(text[:500], "") + "…"
	}
	return &cleaned{text, err}
}

// cleaned shows a scrubbed text and is still what it was to errors.Is.
type cleaned struct {
	text string
	err  error
}

func (e *cleaned) Error() string        { return e.text }
func (e *cleaned) Is(target error) bool { return errors.Is(e.err, target) }

// maxRequest bounds what the SDK may want to send.
const maxRequest = effect.MaxArguments + 1<<20

// message is what we must know of a JSON-RPC message that goes out.
type message struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params struct {
		Name string `json:"name"`
	} `json:"params"`
}

// RoundTrip sends one request of the SDK on a line of ours. A tools/call is
// recognised by its body, never by a header, and leaves only under a call that
// was prepared for it, once. The whole answer is read here; the SDK gets one
// complete message and nothing to resume.
func (c *conn) RoundTrip(req *http.Request) (*http.Response, error) {
	var body []byte
	if req.Body != nil {
		var err error
		body, err = io.ReadAll(io.LimitReader(req.Body, maxRequest+1))
		req.Body.Close()
		if err != nil {
			return nil, err
		}
		if len(body) > maxRequest {
			return nil, errTooLarge
		}
	}
	var msg message
	if len(body) > 0 {
		if err := json.Unmarshal(body, &msg); err != nil {
			return nil, fmt.Errorf("read own request: %w", err)
		}
	}
	out, err := c.outgoing(req, body)
	if err != nil {
		return nil, err
	}
	if msg.Method == methodCall {
		return c.sendCall(req, out, msg)
	}
	return c.sendRead(req, out, msg)
}

const methodCall = "tools/call"

// outgoing builds the request anew from what the SDK wants to send: headers by
// allowlist, our credential, nothing that lets a library send it again.
func (c *conn) outgoing(req *http.Request, body []byte) (*http.Request, error) {
	ctx := context.WithoutCancel(req.Context())
	var r io.Reader
	if req.Method == http.MethodPost {
		r = bytes.NewReader(body)
	}
	out, err := http.NewRequestWithContext(ctx, req.Method, c.url.String(), r)
	if err != nil {
		return nil, err
	}
	out.GetBody = nil
	// Mcp-Param-* is not here: a server's schema cannot make us copy an argument
	// into a header (attack K14).
	for _, h := range []string{"Content-Type", "Accept", "Mcp-Protocol-Version", "Mcp-Session-Id", "Mcp-Method", "Mcp-Name"} {
		if v := req.Header.Get(h); v != "" {
			if err := vault.CheckHeaderValue(v); err != nil {
				return nil, fmt.Errorf("header %s: %w", h, err)
			}
			out.Header.Set(h, v)
		}
	}
	out.Header.Set("Accept-Encoding", "identity")
	out.Header.Set("User-Agent", "planaria")
	if cred := c.cred.Load(); cred != nil {
		out.Header.Set("Authorization", "Bearer "+cred.token.Reveal())
	}
	return out, nil
}

// sendRead sends what may be repeated: handshake, listing, farewell. It ends
// with the request's context.
func (c *conn) sendRead(req *http.Request, out *http.Request, msg message) (*http.Response, error) {
	wire, err := wireForm(out)
	if err != nil {
		return nil, err
	}
	ctx := req.Context()
	limit := ConnectTime
	if req.Method == http.MethodDelete {
		limit = farewellTime
	}
	l, err := c.line(ctx)
	if err != nil {
		return nil, err
	}
	a, _, keep, err := l.exchange(ctx, wire, time.Now().Add(limit), nil, c.reader(ctx, out, msg.ID))
	if keep {
		c.keep(l)
	}
	if err != nil {
		return nil, err
	}
	c.status.Store(int32(a.status))
	a.body = c.scrub(a.body)
	switch msg.Method {
	case "tools/list":
		collect(ctx, a.body)
	case "server/discover":
		// A server of an older protocol may answer anything to what it does not
		// know; the SDK falls back to initialize only for some of it.
		if m, err := readMessage(a.body); a.status < 300 && (err != nil || !sameID(m.ID, msg.ID)) {
			return over(req, msg), nil
		}
	}
	return a.response(req), nil
}

// collect keeps the raw definitions of one page for list.
func collect(ctx context.Context, body []byte) {
	raw, ok := ctx.Value(listKey{}).(*[]json.RawMessage)
	if !ok {
		return
	}
	var page struct {
		Result struct {
			Tools []json.RawMessage `json:"tools"`
		} `json:"result"`
	}
	if json.Unmarshal(body, &page) == nil {
		*raw = append(*raw, page.Result.Tools...)
	}
}

func (c *conn) scrub(b []byte) []byte {
	cred := c.cred.Load()
	if cred == nil {
		return b
	}
	b, n := cred.scrub.Scrub(b)
	if n > 0 {
		// A server that shows its credential does so by mistake or on purpose (attack K2).
		c.k.log.Warn("scrubbed a credential", slog.String("server", c.name), slog.Int("count", n))
	}
	return b
}

// response is what the SDK gets: one complete message.
func (a answer) response(req *http.Request) *http.Response {
	h := http.Header{}
	if id := a.header.Get("Mcp-Session-Id"); id != "" {
		h.Set("Mcp-Session-Id", id)
	}
	if len(a.body) > 0 {
		h.Set("Content-Type", "application/json")
	}
	return &http.Response{
		Status: http.StatusText(a.status), StatusCode: a.status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Body: io.NopCloser(bytes.NewReader(a.body)), ContentLength: int64(len(a.body)), Request: req,
	}
}
