package keeper

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"
)

// Limits of one HTTP exchange.
const (
	// MaxHeader bounds the header of an answer.
	MaxHeader = 64 << 10
	// MaxAnswer is the largest answer that is read, in bytes on the wire; a
	// longer one is unreadable. Room for it is left in store.MaxBody.
	MaxAnswer = 16 << 20
	// keepIdle is how long an unused connection is kept. Common servers close
	// theirs after five seconds; a call that met the closing would be in doubt.
	keepIdle = 3 * time.Second
	// maxIdle is how many unused connections are kept for one server.
	maxIdle = 16
	// aliveTime is how long a kept connection is listened to before it is used
	// again: a server that closed it has said so by now.
	aliveTime = 200 * time.Microsecond
	// drainTime and maxDrain bound the wait for the end of a stream that has
	// given its answer already.
	drainTime = 2 * time.Millisecond
	maxDrain  = 4 << 10
	// dialTime bounds connecting with its TLS handshake.
	dialTime = 10 * time.Second
)

// line is one TCP or TLS connection that we hold. We speak HTTP/1.1 on it
// ourselves, one request at a time: http.Transport may send a request again by
// itself (trap P1) and does not tell whether a byte has left.
type line struct {
	net.Conn
	raw  *counted
	in   *limited
	br   *bufio.Reader
	idle time.Time
}

// counted counts the bytes handed to the network.
type counted struct {
	net.Conn
	n atomic.Int64
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.n.Add(int64(n))
	return n, err
}

// limited bounds what one exchange may read.
type limited struct {
	r    io.Reader
	left int64
}

var errTLS = errors.New("tls")

var errTooLarge = errors.New("answer is larger than allowed")

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errTooLarge
	}
	if int64(len(p)) > l.left {
		p = p[:l.left]
	}
	n, err := l.r.Read(p)
	l.left -= int64(n)
	return n, err
}

// dialLine connects to the host of u.
func dialLine(ctx context.Context, dial DialFunc, u *url.URL, roots *tls.Config) (*line, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	c, err := dial(ctx, "tcp", net.JoinHostPort(u.Hostname(), port))
	if err != nil {
		return nil, err
	}
	raw := &counted{Conn: c}
	var conn net.Conn = raw
	if u.Scheme == "https" {
		cfg := roots.Clone()
		cfg.ServerName, cfg.MinVersion, cfg.NextProtos = u.Hostname(), tls.VersionTLS12, []string{"http/1.1"}
		t := tls.Client(raw, cfg)
		if err := t.HandshakeContext(ctx); err != nil {
			c.Close()
			return nil, fmt.Errorf("%w: %w", errTLS, err)
		}
		conn = t
	}
	in := &limited{r: conn}
	return &line{Conn: conn, raw: raw, in: in, br: bufio.NewReader(in)}, nil
}

// alive reports whether a kept line can be used: the other side has neither
// closed it nor said anything.
func (l *line) alive(now time.Time) bool {
	if now.Sub(l.idle) > keepIdle || l.br.Buffered() > 0 {
		return false
	}
	l.in.left = 1
	if l.SetReadDeadline(time.Now().Add(aliveTime)) != nil {
		return false
	}
	_, err := l.br.Peek(1)
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() {
		return false
	}
	l.br.Reset(l.in)
	return l.SetReadDeadline(time.Time{}) == nil
}

// answer is the complete HTTP answer of one exchange.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// readFunc reads a body; ended reports that its end was seen.
type readFunc func(*http.Response) (body []byte, ended bool, err error)

// exchange sends one request, of which nothing has left before gate allows it,
// and reads the answer with read. left reports whether a byte may have left;
// when it is false nothing can have happened. The line is usable again when
// keep is true.
func (l *line) exchange(ctx context.Context, req []byte, deadline time.Time, gate func() error,
	read readFunc) (a answer, left, keep bool, err error) {
	if err := l.SetDeadline(deadline); err != nil {
		return a, false, false, err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := ctx.Err(); err != nil {
		return a, false, true, err
	}
	before := l.raw.n.Load()
	if gate != nil {
		if err := gate(); err != nil {
			return a, false, true, err
		}
	}
	// A server may answer before it has read all; so write beside reading.
	written := make(chan error, 1)
	go func() {
		_, err := l.Write(req)
		written <- err
	}()
	a, keep, err = l.receive(read)
	if err != nil {
		// Frees a writer that is stuck. Below TLS, so that no farewell is counted.
		l.raw.Conn.Close()
		werr := <-written
		left = l.raw.n.Load() != before
		if werr != nil && !left {
			err = werr
		}
		return a, left, false, err
	}
	if !keep {
		l.raw.Conn.Close()
	}
	if werr := <-written; werr != nil {
		l.raw.Conn.Close()
		keep = false
	}
	return a, true, keep, nil
}

// receive reads one final response.
func (l *line) receive(read readFunc) (a answer, keep bool, err error) {
	l.in.left = MaxHeader
	var resp *http.Response
	for {
		// POST stands for any method whose answer may have a body.
		resp, err = http.ReadResponse(l.br, &http.Request{Method: http.MethodPost})
		if err != nil {
			return a, false, err
		}
		if resp.StatusCode >= 200 || resp.StatusCode == http.StatusSwitchingProtocols {
			break
		}
	}
	// The body is not closed: Close would read on to its end, for which a server
	// that keeps its stream open makes us wait. The line is closed instead.
	l.in.left = MaxAnswer
	a = answer{status: resp.StatusCode, header: resp.Header}
	if enc := resp.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
		// We asked for none: what a few bytes would become is not known (trap P7).
		return a, false, fmt.Errorf("answer is compressed (%.20q)", enc)
	}
	body, ended, err := read(resp)
	a.body = body
	if err == nil && !ended {
		ended = l.drained(resp.Body)
	}
	// The line serves again only when the answer's end was seen.
	return a, err == nil && ended && !resp.Close && l.br.Buffered() == 0, err
}

// drained waits a moment for the end of a stream that has given its answer, so
// that the line can be used again.
func (l *line) drained(body io.Reader) bool {
	if l.SetReadDeadline(time.Now().Add(drainTime)) != nil {
		return false
	}
	n, err := io.Copy(io.Discard, io.LimitReader(body, maxDrain))
	return err == nil && n < maxDrain
}

// wireForm writes req as it goes over the line.
func wireForm(req *http.Request) ([]byte, error) {
	var b bytes.Buffer
	if err := req.Write(&b); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}
