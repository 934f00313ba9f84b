package gateway

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/keeper"
)

// maxInterim bounds the answers of status 1xx before the final one.
const maxInterim = 8

// bodyTime is how long an answer waits for the end of its request's body; then
// it is taken for one that came early.
const bodyTime = 100 * time.Millisecond

// request serves a plain HTTP request: one record, one dial, one connection
// that carries it and nothing else, so that no library sends it again (trap
// P1). It reports whether another request may follow.
func (e *egress) request(ctx context.Context, h *head) bool {
	p, path, err := h.url(e.within)
	if err != nil {
		return e.refuse(h, malformed(err))
	}
	if no := e.rules.deny(p); no != nil {
		return e.denied(h, p, no)
	}
	if p.host == RepositoryHost {
		return e.repository(ctx, h, path)
	}
	w, no := e.open(ctx, p)
	if no != nil {
		return e.refuse(h, no)
	}
	keep, err := e.exchange(ctx, h, w, h.rebuilt(p, path))
	if cause := context.Cause(ctx); cause != nil {
		err, keep = fmt.Errorf("ended: %w", cause), false
	}
	w.end(text(err))
	return keep
}

// exchange sends a request and passes its answer on. An error is for the
// record: the process has its answer, or sees its connection cut.
func (e *egress) exchange(ctx context.Context, h *head, w *way, rebuilt []byte) (keep bool, err error) {
	if _, err := w.Write(rebuilt); err != nil {
		return e.refuse(h, upstreamEnded), errCut
	}
	if err := e.goOn(h); err != nil {
		return false, err
	}
	sent := e.sendBody(h, func(body io.Reader) error {
		if h.chunked {
			return copyChunked(w, body)
		}
		return copyPlain(w, body)
	})
	defer func() {
		if !keep {
			// What is still on its way in would be read as the next request.
			_, _ = w.Close(), e.raw.Close()
		}
		<-sent.over
	}()
	limit := &io.LimitedReader{R: w, N: keeper.MaxHeader}
	in := bufio.NewReader(limit)
	resp, err := answerTo(h, in)
	if err != nil {
		return e.refuse(h, upstreamEnded), fmt.Errorf("answer: %w", errCut)
	}
	limit.N = math.MaxInt64
	if resp.StatusCode == http.StatusSwitchingProtocols {
		if _, err := e.conn.Write(answerHead(resp, h, false, false)); err != nil {
			return false, errCut
		}
		return false, e.splice(ctx, w, in, nil)
	}
	return e.answer(resp, h, !h.close && sent.whole())
}

var upstreamEnded = &denial{status: http.StatusBadGateway, token: "connection_terminated",
	text: "the host ended the connection, or its answer is no HTTP. The request may have been acted on."}

// goOn tells a process that waits with its body for our word to send it.
func (e *egress) goOn(h *head) error {
	if h.expect {
		if _, err := io.WriteString(e.conn, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
			return errCut
		}
	}
	return nil
}

// sendBody passes the body of a request on, beside the reading of its answer. A
// body that does not go out to its end cuts everything: no upstream takes half of
// one for a whole one, and nothing of it is read as the next request. After it,
// the process is listened to.
func (e *egress) sendBody(h *head, send func(body io.Reader) error) *sending {
	s := &sending{over: make(chan struct{})}
	e.ear = make(chan struct{})
	go func() {
		defer close(e.ear)
		var err error
		if h.hasBody() {
			err = send(e.body(h))
		}
		var read *readError
		if errors.As(err, &read) {
			e.cut(errBody)
		}
		s.all = err == nil
		close(s.over)
		if s.all && h.upgrade == "" { // else what comes next is the tunnel's
			e.listen()
		}
	}()
	return s
}

// listen notices that a process leaves while it waits for its answer: nobody else
// reads what it says then, and an answer that never comes would keep its place
// for EgressIdle. One that has only ended its direction has EgressHalfIdle left.
func (e *egress) listen() {
	if _, err := e.in.Peek(1); err != nil {
		e.watch.idle(EgressHalfIdle) // a stream that was reset ends ctx by itself
	}
}

// heard waits until nobody listens: what comes next is read by the caller.
func (e *egress) heard() {
	if e.ear != nil {
		<-e.ear
		e.ear = nil
	}
}

// sending is a body on its way.
type sending struct {
	over chan struct{}
	all  bool // all of it was read and sent; valid once over is closed
}

// whole reports whether the body has gone out to its end by now. An answer that
// has come to all of it may be a moment ahead of that news.
func (s *sending) whole() bool {
	select {
	case <-s.over:
		return s.all
	case <-time.After(bodyTime):
		return false
	}
}

var errBody = errors.New("the process sent half a body, or one in no proper form")

// body reads the body of h; io.EOF is its proper end.
func (e *egress) body(h *head) io.Reader {
	if h.chunked {
		return &chunks{r: e.in}
	}
	return &exactly{e.in, h.length}
}

// exactly reads so many bytes.
type exactly struct {
	r    io.Reader
	left int64
}

func (x *exactly) Read(p []byte) (int, error) {
	if x.left == 0 {
		return 0, io.EOF
	}
	n, err := x.r.Read(p[:min(int64(len(p)), x.left)])
	x.left -= int64(n)
	if errors.Is(err, io.EOF) && x.left > 0 {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// readError is one of the reading side of a copy.
type readError struct{ error }

// copyPlain writes what from gives. Errors of from are *readError.
func copyPlain(to io.Writer, from io.Reader) error {
	buf := make([]byte, egressBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return &readError{err}
		}
	}
}

// copyChunked writes what from gives, in chunks, each at once. Only a good end
// is written as one. Errors of from are *readError.
func copyChunked(to io.Writer, from io.Reader) error {
	out := bufio.NewWriterSize(to, egressBuffer+64)
	chunked := httputil.NewChunkedWriter(out)
	buf := make([]byte, egressBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, err := chunked.Write(buf[:n]); err != nil {
				return err
			}
			if err := out.Flush(); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return &readError{err}
		}
	}
	if err := chunked.Close(); err != nil {
		return err
	}
	if _, err := out.WriteString("\r\n"); err != nil {
		return err
	}
	return out.Flush()
}

// answerTo reads the head of the answer to h; interim ones are dropped.
func answerTo(h *head, in *bufio.Reader) (*http.Response, error) {
	for range maxInterim {
		resp, err := http.ReadResponse(in, &http.Request{Method: h.method})
		switch {
		case err != nil:
			return nil, err
		case resp.StatusCode == http.StatusSwitchingProtocols && h.upgrade == "":
			return nil, errors.New("another protocol that nobody asked for")
		case resp.StatusCode >= 200 && resp.StatusCode <= 599, resp.StatusCode == http.StatusSwitchingProtocols:
			return resp, nil
		case resp.StatusCode < 100 || resp.StatusCode > 599:
			return nil, fmt.Errorf("status %d", resp.StatusCode)
		}
	}
	return nil, errors.New("too many interim answers")
}

// answer passes an answer on and reports whether the connection can be used
// again, which it can be only where whole is true.
func (e *egress) answer(resp *http.Response, h *head, whole bool) (keep bool, err error) {
	body := h.method != http.MethodHead && resp.StatusCode != http.StatusNoContent && resp.StatusCode != http.StatusNotModified
	chunked := body && resp.ContentLength < 0 && h.minor == 1
	keep = whole && (!body || chunked || resp.ContentLength >= 0)
	if _, err := e.conn.Write(answerHead(resp, h, chunked, keep)); err != nil {
		return false, errCut
	}
	if !body {
		return keep, nil
	}
	if chunked {
		err = copyChunked(e.conn, resp.Body)
	} else {
		err = copyPlain(e.conn, resp.Body)
	}
	if err != nil {
		e.cut(errCut) // so that half an answer is not taken for a whole one
		return false, errCut
	}
	return keep, nil
}

// answerHead is the head of an answer as it goes inside.
func answerHead(resp *http.Response, h *head, chunked, keep bool) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %03d %s\r\n", resp.StatusCode, http.StatusText(resp.StatusCode))
	for _, v := range resp.Header.Values("Connection") {
		for name := range strings.SplitSeq(v, ",") {
			resp.Header.Del(strings.Trim(name, " \t"))
		}
	}
	for name := range resp.Header {
		if n := strings.ToLower(name); hopByHop[n] && n != "upgrade" || !isToken(name) {
			delete(resp.Header, name)
		}
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		resp.Header.Set("Connection", "Upgrade")
		resp.Header.Set("Upgrade", h.upgrade)
		keep = true
	} else {
		resp.Header.Del("Upgrade")
	}
	_ = resp.Header.Write(&b) // takes line ends out of values
	switch {
	case resp.StatusCode == http.StatusSwitchingProtocols || resp.StatusCode == http.StatusNoContent:
	case chunked:
		b.WriteString("Transfer-Encoding: chunked\r\n")
	case resp.ContentLength >= 0 && (resp.ContentLength > 0 || resp.StatusCode != http.StatusNotModified):
		fmt.Fprintf(&b, "Content-Length: %d\r\n", resp.ContentLength)
	}
	if !keep {
		b.WriteString("Connection: close\r\n")
	}
	b.WriteString("\r\n")
	return b.Bytes()
}
