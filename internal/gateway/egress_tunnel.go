package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
)

// connect serves CONNECT: a tunnel to a host that is allowed.
func (e *egress) connect(ctx context.Context, h *head) bool {
	p, err := parsePlace(h.target, 0)
	if err != nil {
		e.refuse(nil, malformed(bad("target of CONNECT: %v", err)))
		return false
	}
	if h.hosts > 0 {
		// The Host field says the same, or nothing can be said of the rest (attack N7).
		if got, err := parsePlace(h.host, p.port); err != nil || got.host != p.host {
			e.refuse(nil, malformed(bad("the Host field names another host than CONNECT")))
			return false
		}
	}
	if no := e.rules.deny(p); no != nil {
		return e.denied(h, p, no)
	}
	if p.host == RepositoryHost && p.port != portHTTP {
		e.refuse(nil, &denial{status: http.StatusForbidden, token: "http_request_denied", text: repositoryUse})
		return false
	}
	if p.port == portHTTP && (!e.rules.network.Unrestricted || p.host == RepositoryHost) {
		// What goes through is read like any other plain HTTP, so that the hosts
		// of its requests are ruled too.
		e.within = &p
		_, err := io.WriteString(e.conn, established)
		return err == nil
	}
	w, no := e.open(ctx, p)
	if no != nil {
		return e.refuse(h, no)
	}
	failed := errors.New("the process left")
	if _, err := io.WriteString(e.conn, established); err == nil {
		failed = e.splice(ctx, w, w, e.opening(p))
	}
	w.end(text(failed))
	return false
}

const established = "HTTP/1.1 200 Connection established\r\n\r\n"

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// denied answers what the environment does not allow.
func (e *egress) denied(h *head, p place, no *denial) bool {
	e.refused(slog.LevelInfo, p.String(), "not allowed by the environment", nil)
	return e.refuse(h, no)
}

// Why a tunnel was ended.
var (
	errCut    = errors.New("cut")
	errNotTLS = errors.New("refused: what the process sent is not TLS")
	errSNI    = errors.New("refused: the name in TLS is not the host of the tunnel")
	errInner  = errors.New("refused: a CONNECT inside the tunnel")
)

// opening judges the first bytes of a process in a tunnel to p: more asks for
// further ones, err refuses the tunnel. Nothing of them has left before.
func (e *egress) opening(p place) func(b []byte) (more bool, err error) {
	strict := !e.rules.network.Unrestricted
	return func(b []byte) (bool, error) {
		if yes, more := nested(b); yes || more {
			if yes {
				return false, errInner
			}
			return true, nil
		}
		if p.port != portHTTPS && !strict {
			return false, nil
		}
		name, more, err := serverName(b)
		switch {
		case more:
			return true, nil
		case err != nil && strict:
			return false, errNotTLS
		case err != nil, p.literal, name == "" && !strict:
			return false, nil
		case name != p.host:
			return false, errSNI
		}
		return false, nil
	}
}

const connectLine = "CONNECT "

// nested reports whether b asks a proxy for a tunnel. NATS too begins with
// CONNECT, but with an object behind it.
func nested(b []byte) (yes, more bool) {
	n := min(len(b), len(connectLine))
	if !bytes.EqualFold(b[:n], []byte(connectLine[:n])) {
		return false, false
	}
	rest := b[n:]
	return len(rest) > 0 && rest[0] != '{', len(rest) == 0
}

// splice carries bytes both ways between the process and the world until both
// directions have ended, each by itself, or one breaks. from reads the world: w,
// or what is buffered of it. Its error says why it did not end well.
func (e *egress) splice(ctx context.Context, w *way, from io.Reader, opening func([]byte) (bool, error)) error {
	results := make(chan error, 2)
	if opening == nil {
		e.watch.idle(EgressIdle)
	} else if !e.rules.network.Unrestricted {
		e.watch.within(EgressHelloTime)
	}
	go func() { results <- e.outward(w, opening) }()
	go func() { results <- e.inward(from) }()
	first := <-results
	switch {
	case first == nil:
		e.watch.idle(EgressHalfIdle)
	case errors.Is(first, errCut):
		e.cut(first)
	default:
		// The process was told why; it may not listen.
		e.watch.within(lastWords)
		_ = w.Close()
	}
	second := <-results
	if first == nil && second == nil {
		return nil // the end of the stream, which may end ctx, is no cut
	}
	if first == nil {
		e.cut(second)
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errCut) {
		return fmt.Errorf("ended: %w", cause)
	}
	if first == nil {
		first = second
	}
	return first
}

// outward carries what the process sends.
func (e *egress) outward(w *way, opening func([]byte) (bool, error)) error {
	var held []byte
	buf := make([]byte, egressBuffer)
	for {
		n, err := e.in.Read(buf)
		b := buf[:n]
		if opening != nil && n > 0 {
			held = append(held, b...)
			more, no := opening(held)
			if no != nil {
				e.refused(slog.LevelInfo, w.record.Host, no.Error(), nil)
				e.tell(no)
				return no
			}
			if more && err == nil {
				continue
			}
			if more {
				return errCut // the process left in the middle of its first words
			}
			b, held, opening = held, nil, nil
			e.watch.idle(EgressIdle)
		}
		if len(b) > 0 {
			if _, err := w.Write(b); err != nil {
				return errCut
			}
		}
		if errors.Is(err, io.EOF) {
			halfClose(w.Conn)
			return nil
		}
		if err != nil {
			return errCut
		}
	}
}

// tell says in the tunnel why it is refused, in the language of TLS: alert
// unrecognized_name, fatal. Other clients see the end.
func (e *egress) tell(no error) {
	if errors.Is(no, errSNI) {
		_, _ = e.conn.Write([]byte{21, 3, 1, 0, 2, 2, 112})
	}
	halfClose(e.raw)
}

// inward carries what the world sends.
func (e *egress) inward(from io.Reader) error {
	buf := make([]byte, egressBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, err := e.conn.Write(buf[:n]); err != nil {
				return errCut
			}
		}
		if errors.Is(err, io.EOF) {
			halfClose(e.raw)
			return nil
		}
		if err != nil {
			return errCut
		}
	}
}

// halfClose ends one direction; all of a stream that cannot.
func halfClose(c io.Closer) {
	switch s := c.(type) {
	case interface{ CloseWrite() error }:
		_ = s.CloseWrite()
	case interface{ CloseWrite() }:
		s.CloseWrite()
	default:
		_ = c.Close()
	}
}
