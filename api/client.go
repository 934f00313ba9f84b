package api

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/big"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Limits and times of the client.
const (
	// maxAnswer bounds an answer that is read whole: the wire limit of a body
	// (32 MiB) and room for a page of them.
	maxAnswer = 128 << 20
	// maxErrorBody bounds what is read of an answer that is not a success.
	maxErrorBody = 1 << 20
	// DefaultRetries is how often a safe request is repeated.
	DefaultRetries = 4
	// DefaultTimeout bounds one try of a request that is not a stream.
	DefaultTimeout = 60 * time.Second
	firstBackoff   = 250 * time.Millisecond
	maxBackoff     = 8 * time.Second
	// maxRetryAfter is the longest hint of a server that is followed.
	maxRetryAfter = 60 * time.Second
)

// Client speaks to a server. The zero value of everything but BaseURL and Key
// works. Safe for concurrent use; copy it before changing fields.
//
// Errors of the server are *Error. Any other error means that no readable
// answer came back: a request that is not safe may or may not have happened.
type Client struct {
	// BaseURL is the server's address, such as http://127.0.0.1:4747.
	BaseURL string
	// Key is the API key.
	Key string
	// HTTP does the requests; nil is a client that follows no redirects.
	HTTP *http.Client
	// Retries is how often a safe request is repeated: a GET, or a POST, which
	// carries an Idempotency-Key. 0 is DefaultRetries, negative is never.
	Retries int
	// Timeout bounds one try; 0 is DefaultTimeout. Streams have none.
	Timeout time.Duration
	// UserAgent is sent if not empty.
	UserAgent string

	wait func(context.Context, time.Duration) error // sleeps; a hook of tests
}

var defaultHTTP = &http.Client{
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

type keyOfContext struct{}

// WithIdempotencyKey makes the POST under this context carry a key of the
// caller, so that it can be repeated by another process.
func WithIdempotencyKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, keyOfContext{}, key)
}

// request is one call: what is sent is the same on every try.
type request struct {
	method, path string
	query        url.Values
	body         []byte // nil = none
	header       http.Header
	// stream makes the body of a try in place of body. It may be large, so that
	// such a try has no time limit of its own.
	stream func() (io.ReadCloser, error)
}

func (c *Client) newRequest(ctx context.Context, method, path string, query url.Values, in any) (request, error) {
	r := request{method: method, path: path, query: query, header: http.Header{}}
	if in != nil {
		body, err := Encode(in)
		if err != nil {
			return r, fmt.Errorf("encode request %s %s: %w", method, path, err)
		}
		r.body = body
		r.header.Set("Content-Type", "application/json")
	}
	if method == http.MethodPost {
		key, ok := ctx.Value(keyOfContext{}).(string)
		if !ok || key == "" {
			key = "idem_" + rand.Text()
		}
		r.header.Set("Idempotency-Key", key)
	}
	return r, nil
}

// safe reports whether a request may be repeated though the first may have happened.
func (r request) safe() bool {
	return r.method == http.MethodGet || r.header.Get("Idempotency-Key") != ""
}

// send makes one try and returns the answer of a success; the caller closes it.
func (c *Client) send(ctx context.Context, r request) (*http.Response, error) {
	err := validateURL("server address", c.BaseURL)
	if err != nil {
		return nil, finalError{err}
	}
	u := strings.TrimRight(c.BaseURL, "/") + r.path
	if len(r.query) > 0 {
		u += "?" + r.query.Encode()
	}
	var body io.Reader = bytes.NewReader(r.body)
	if r.stream != nil {
		if body, err = r.stream(); err != nil {
			return nil, finalError{fmt.Errorf("%s %s: %w", r.method, r.path, err)}
		}
	}
	req, err := http.NewRequestWithContext(ctx, r.method, u, body)
	if err != nil {
		return nil, finalError{fmt.Errorf("%s %s: %w", r.method, r.path, err)}
	}
	req.Header = r.header.Clone()
	req.Header.Set("Accept", "application/json")
	if c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.Key)
	}
	if c.UserAgent != "" {
		req.Header.Set("User-Agent", c.UserAgent)
	}
	h := c.HTTP
	if h == nil {
		h = defaultHTTP
	}
	resp, err := h.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", r.method, r.path, errors.Unwrap(err))
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // a cut body gives an error without a reason
	return nil, &answerError{err: errorFromAnswer(resp.StatusCode, resp.Header, said), should: resp.Header.Get("x-should-retry")}
}

// answerError is an error of the server with its hint.
type answerError struct {
	err    *Error
	should string // x-should-retry
}

func (e *answerError) Error() string { return e.err.Error() }
func (e *answerError) Unwrap() error { return e.err }

// finalError is an error that trying again would not mend.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// retryable reports whether trying again may help, and after what time at least.
func retryable(err error) (bool, time.Duration) {
	var final finalError
	if errors.As(err, &final) || errors.Is(err, context.Canceled) {
		return false, 0
	}
	var a *answerError
	if !errors.As(err, &a) {
		return true, 0
	}
	switch a.should {
	case "false":
		return false, 0
	case "true":
		return true, a.err.RetryAfter
	}
	s := a.err.Status
	return s == http.StatusRequestTimeout || s == http.StatusTooManyRequests || s >= 500, a.err.RetryAfter
}

// plain hands the server's error itself to the caller.
func plain(err error) error {
	var a *answerError
	if errors.As(err, &a) {
		return a.err
	}
	var final finalError
	if errors.As(err, &final) {
		return final.error
	}
	return err
}

// do sends a request, again while that is safe and may help, and reads the answer.
func (c *Client) do(ctx context.Context, r request) ([]byte, error) {
	for try := 0; ; try++ {
		body, err := c.try(ctx, r)
		if err == nil {
			return body, nil
		}
		again, after := retryable(err)
		if !again || !r.safe() || try >= c.retries() || ctx.Err() != nil {
			return nil, plain(err)
		}
		if c.pause(ctx, try, after) != nil {
			return nil, plain(err)
		}
	}
}

func (c *Client) try(ctx context.Context, r request) ([]byte, error) {
	timeout := c.Timeout
	if timeout == 0 {
		timeout = DefaultTimeout
	}
	if r.stream == nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	resp, err := c.send(ctx, r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("read answer of %s %s: %w", r.method, r.path, err)
	}
	if len(body) > maxAnswer {
		return nil, finalError{fmt.Errorf("the answer of %s %s is larger than %d bytes", r.method, r.path, maxAnswer)}
	}
	return body, nil
}

func (c *Client) retries() int {
	switch {
	case c.Retries < 0:
		return 0
	case c.Retries == 0:
		return DefaultRetries
	}
	return c.Retries
}

// pause waits before try n+1: a doubling time with jitter, or the server's hint.
func (c *Client) pause(ctx context.Context, n int, hint time.Duration) error {
	d := min(firstBackoff<<min(n, 10), maxBackoff)
	d -= jitter(d / 4)
	if hint > 0 {
		d = min(max(hint, d), maxRetryAfter)
	}
	if c.wait != nil {
		return c.wait(ctx, d)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

func jitter(max time.Duration) time.Duration {
	n, err := rand.Int(rand.Reader, big.NewInt(int64(max)+1))
	if err != nil {
		return 0
	}
	return time.Duration(n.Int64())
}

// call is a request with a typed answer.
func call[T any](ctx context.Context, c *Client, method, path string, query url.Values, in any) (T, error) {
	var out T
	r, err := c.newRequest(ctx, method, path, query, in)
	if err != nil {
		return out, err
	}
	body, err := c.do(ctx, r)
	if err != nil {
		return out, err
	}
	if err := unmarshal(body, &out); err != nil {
		return out, fmt.Errorf("read answer of %s %s: %w", method, path, err)
	}
	return out, nil
}

func get[T any](ctx context.Context, c *Client, path string, query url.Values) (T, error) {
	return call[T](ctx, c, http.MethodGet, path, query, nil)
}

func post[T any](ctx context.Context, c *Client, path string, in any) (T, error) {
	return call[T](ctx, c, http.MethodPost, path, nil, in)
}

func remove(ctx context.Context, c *Client, path string) (Deleted, error) {
	return call[Deleted](ctx, c, http.MethodDelete, path, nil, nil)
}

// all walks every page of a list, through empty ones too.
func all[T any](ctx context.Context, c *Client, path string, query url.Values) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		for {
			page, err := get[Page[T]](ctx, c, path, query)
			if err != nil {
				yield(zero, err)
				return
			}
			for _, v := range page.Data {
				if !yield(v, nil) {
					return
				}
			}
			if page.NextPage == nil || *page.NextPage == "" {
				return
			}
			if *page.NextPage == query.Get("page") {
				yield(zero, fmt.Errorf("list %s: the server gave the same page again", path))
				return
			}
			query = cloneQuery(query)
			query.Set("page", *page.NextPage)
		}
	}
}

func cloneQuery(q url.Values) url.Values {
	out := url.Values{}
	for k, v := range q {
		out[k] = append([]string(nil), v...)
	}
	return out
}

// Healthz returns nil when the server lives.
func (c *Client) Healthz(ctx context.Context) error { return c.probe(ctx, "/healthz") }

// Readyz returns nil when the server takes requests.
func (c *Client) Readyz(ctx context.Context) error { return c.probe(ctx, "/readyz") }

// probe makes one try: whoever waits for a server repeats it.
func (c *Client) probe(ctx context.Context, path string) error {
	_, err := c.try(ctx, request{method: http.MethodGet, path: path, header: http.Header{}})
	return plain(err)
}
