package llm

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Limits of one model request. A provider that passes one of them is cut off
// and the request is a failed one; none of them truncates silently.
const (
	// DefaultIdle is how long an answer may make no progress. Pings, comments
	// and unknown events are no progress: a server cannot hold us with them. It
	// is this long because a model that thinks unseen sends nothing but pings.
	DefaultIdle = 10 * time.Minute
	// DefaultDeadline ends a request however busy it is. Sixty minutes is more
	// than 128,000 output tokens take at the slowest speed seen in practice.
	DefaultDeadline = 60 * time.Minute
	// DefaultMaxBytes bounds the decoded bytes of one answer.
	DefaultMaxBytes = 64 << 20
	// maxErrorBytes is how much of an error answer is read.
	maxErrorBytes = 64 << 10
	// maxMessage bounds the text of an error that we keep.
	maxMessage = 2 << 10
	// maxBlocks bounds the content blocks (and tool calls) of one answer.
	maxBlocks = 4096
	// drainTime is how long a finished answer may take to close its body, so
	// that the connection can be used again. After it the connection is dropped.
	drainTime = 50 * time.Millisecond
)

var (
	errIdle     = errors.New("no progress within the idle limit")
	errDeadline = errors.New("the request's total deadline passed")
	errTooLarge = errors.New("the answer is larger than the limit")
)

// Transport returns the HTTP transport for model requests. It dials with dial
// (nil: a plain dialer with 10 s), ignores proxy variables, asks for no
// compression, bounds headers, and speaks HTTP/1.1 only, one request per
// connection at a time, so that a lost connection costs one request. The
// providers clear GetBody, so a reused connection that drops never makes it
// send a request again.
func Transport(dial func(ctx context.Context, network, addr string) (net.Conn, error)) *http.Transport {
	if dial == nil {
		dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	return &http.Transport{
		Proxy:                  nil,
		DialContext:            dial,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    10 * time.Second,
		DisableCompression:     true,
		MaxIdleConns:           256,
		MaxIdleConnsPerHost:    128,
		IdleConnTimeout:        60 * time.Second,
		MaxResponseHeaderBytes: 64 << 10,
		ForceAttemptHTTP2:      false,
		TLSNextProto:           map[string]func(string, *tls.Conn) http.RoundTripper{},
	}
}

// Config describes one upstream. BaseURL and Client are required: nothing is
// taken from the environment.
type Config struct {
	// BaseURL is the API's root; paths are appended to it: "v1/messages" for
	// anthropic, "chat/completions" for openai.
	BaseURL string
	// Auth is "bearer" (default) or "x-api-key".
	Auth string
	// Version is the anthropic-version header; default: the SDK's own with
	// bearer, 2023-06-01 with x-api-key.
	Version string
	// Headers are sent with each request. They must not carry credentials.
	Headers map[string]string
	// Key returns the credential. Nil: none is sent. It is called once per request.
	Key func() string
	// Client sends. Redirects are never followed whatever it says.
	Client *http.Client
	// CacheTTL is the lifetime of cache breakpoints: "5m" (default), "1h", or
	// "off" for no breakpoints. Provider anthropic only.
	CacheTTL string
	// MaxTokens is used where a request names none; default 16,000.
	MaxTokens int
	// MaxTokensField is the field that carries it to an openai-compatible
	// server: "max_completion_tokens" (default at api.openai.com) or
	// "max_tokens" (default elsewhere).
	MaxTokensField string
	// Idle, Deadline and MaxBytes default to the constants above.
	Idle     time.Duration
	Deadline time.Duration
	MaxBytes int64
}

const defaultMaxTokens = 16_000

// check validates c and fills its defaults; errors name the field.
func (c Config) check() (Config, error) {
	u, err := url.Parse(c.BaseURL)
	switch {
	case c.BaseURL == "":
		return c, errors.New("base url: is empty; name the API's address, the environment is not read")
	case err != nil:
		return c, fmt.Errorf("base url: %w", err)
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "":
		return c, fmt.Errorf("base url %q: must begin with http:// or https:// and name a host", u.Redacted())
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return c, fmt.Errorf("base url %q: must not carry user, query or fragment; give the key apart", u.Redacted())
	case c.Client == nil:
		return c, errors.New("client: is nil; pass an http.Client with llm.Transport")
	}
	for name := range c.Headers {
		switch strings.ToLower(name) {
		case "authorization", "x-api-key", "host", "content-length", "transfer-encoding", "accept-encoding":
			return c, fmt.Errorf("headers: %s may not be set here; use auth and key", name)
		}
	}
	switch c.Auth {
	case "", "bearer":
		c.Auth = "bearer"
	case "x-api-key":
		if c.Version == "" {
			c.Version = "2023-06-01"
		}
	default:
		return c, fmt.Errorf("auth %q: must be bearer or x-api-key", c.Auth)
	}
	switch c.CacheTTL {
	case "", "5m", "1h", "off":
	default:
		return c, fmt.Errorf("cache ttl %q: must be 5m, 1h or off", c.CacheTTL)
	}
	if c.MaxTokens <= 0 {
		c.MaxTokens = defaultMaxTokens
	}
	if c.Idle <= 0 {
		c.Idle = DefaultIdle
	}
	if c.Deadline <= 0 {
		c.Deadline = DefaultDeadline
	}
	if c.MaxBytes <= 0 {
		c.MaxBytes = DefaultMaxBytes
	}
	return c, nil
}

// key returns the credential of one request, or an error when one is
// configured but empty.
func (c Config) key() (string, error) {
	if c.Key == nil {
		return "", nil
	}
	k := c.Key()
	if k == "" {
		return "", &Error{Kind: ErrRequest, Message: "the key for " + c.BaseURL + " is empty; set its variable or file and start again"}
	}
	return k, nil
}

// doer sends the one request of a call under our rules, and turns every answer
// that is not a 200 into an *Error, with the body's size bounded.
type doer struct {
	client   *http.Client
	maxBytes int64
	classify func(status int, header http.Header, body []byte) *Error
}

func newDoer(c Config, classify func(int, http.Header, []byte) *Error) *doer {
	client := *c.Client
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	client.Jar = nil
	client.Timeout = 0 // the watch bounds the request; a client timeout would blur the cause
	return &doer{client: &client, maxBytes: c.MaxBytes, classify: classify}
}

// Do implements the SDKs' HTTPClient.
func (d *doer) Do(req *http.Request) (*http.Response, error) {
	req.GetBody = nil                             // trap P1: nothing below us can send again
	req.Header.Set("Accept-Encoding", "identity") // trap P7: nothing below us decompresses
	res, err := d.client.Do(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		defer res.Body.Close()
		body, _ := io.ReadAll(io.LimitReader(res.Body, maxErrorBytes))
		return nil, d.classify(res.StatusCode, res.Header, body)
	}
	if enc := res.Header.Get("Content-Encoding"); enc != "" && !strings.EqualFold(enc, "identity") {
		res.Body.Close()
		return nil, &Error{Kind: ErrServer, Status: res.StatusCode, Retryable: true, RequestID: requestID(res.Header),
			Message: fmt.Sprintf("the server compressed its answer (%.40q) though identity was asked for", enc)}
	}
	if ct := res.Header.Get("Content-Type"); !strings.HasPrefix(strings.ToLower(ct), "text/event-stream") {
		res.Body.Close()
		return nil, &Error{Kind: ErrServer, Status: res.StatusCode, Retryable: true, RequestID: requestID(res.Header),
			Message: fmt.Sprintf("the server answered with content type %.80q instead of an event stream", ct)}
	}
	res.Body = &boundedBody{rc: res.Body, left: d.maxBytes}
	return res, nil
}

// boundedBody fails with errTooLarge once more than left bytes were read.
type boundedBody struct {
	rc   io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		var one [1]byte
		if n, err := b.rc.Read(one[:]); n == 0 {
			return 0, err
		}
		return 0, errTooLarge
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.rc.Read(p)
	b.left -= int64(n)
	return n, err
}

func (b *boundedBody) Close() error { return b.rc.Close() }

// watch bounds one request in time: idle between two signs of progress, and in total.
type watch struct {
	cancel   context.CancelCauseFunc
	idle     time.Duration
	idleT    *time.Timer
	deadline *time.Timer
}

func newWatch(ctx context.Context, idle, total time.Duration) (context.Context, *watch) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watch{cancel: cancel, idle: idle}
	w.idleT = time.AfterFunc(idle, func() { cancel(errIdle) })
	w.deadline = time.AfterFunc(total, func() { cancel(errDeadline) })
	return ctx, w
}

func (w *watch) progress() { w.idleT.Reset(w.idle) }

func (w *watch) stop() {
	w.idleT.Stop()
	w.deadline.Stop()
	w.cancel(nil)
}

// drain reads the rest of a finished answer for a moment, so that its
// connection can carry the next request.
func (w *watch) drain(body io.Reader) {
	w.idleT.Reset(drainTime)
	_, _ = io.Copy(io.Discard, io.LimitReader(body, 4<<10))
}
