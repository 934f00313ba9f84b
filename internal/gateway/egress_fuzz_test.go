package gateway_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/gateway"
)

// What our parser takes, another reader takes for the same: the request that we
// send on has the host, the length and the fields that we ruled, and no more
// than one request is in it (attack F7).
func FuzzEgressHead(f *testing.F) {
	f.Add([]byte("GET http://a.test/x HTTP/1.1\r\nHost: a.test\r\nConnection: x, close\r\nX: y\r\n\r\n"))
	f.Add([]byte("POST http://a.test:8080?q HTTP/1.1\r\nHost: A.test:8080\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc"))
	f.Add([]byte("PUT http://[::1]/ HTTP/1.1\r\nHost: [::1]:80\r\nTransfer-Encoding: chunked\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"))
	f.Add([]byte("OPTIONS http://b\xc3\xbccher.test HTTP/1.0\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		host, length, chunked, sent, ok := gateway.Head(b)
		if !ok {
			return
		}
		in := bufio.NewReader(bytes.NewReader(sent))
		r, err := http.ReadRequest(in)
		if err != nil {
			if strings.Contains(err.Error(), "invalid method") || strings.Contains(err.Error(), "invalid URI") || strings.Contains(err.Error(), "parse") {
				return // refused by one reader, read in one way by the others
			}
			t.Fatalf("%q became %q: %v", b, sent, err)
		}
		if got := strings.TrimSuffix(r.Host, ":80"); got != strings.TrimSuffix(host, ":80") {
			t.Errorf("%q: host %q, ruled %q", b, r.Host, host)
		}
		if chunked != (len(r.TransferEncoding) > 0) || !chunked && r.ContentLength != length {
			t.Errorf("%q: length %d %v, read as %d %v", b, length, chunked, r.ContentLength, r.TransferEncoding)
		}
		if r.Header.Get("Proxy-Authorization") != "" {
			t.Errorf("%q: credentials for the proxy are passed on", b)
		}
		if rest := in.Buffered(); rest != 0 {
			t.Errorf("%q: %d bytes after the head", b, rest)
		}
	})
}

// A host that we take has one spelling, which is taken again as itself.
func FuzzEgressHost(f *testing.F) {
	for _, s := range []string{"a.test", "A.Test.", "10.1.2.3", "::ffff:1.2.3.4", "xn--bcher-kva.test", "bücher.test", "a_b.c", "0x7f.1", "ａ.test", "a。test"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		host, literal, err := gateway.HostName(s)
		if err != nil {
			return
		}
		if again, l, err := gateway.HostName(host); err != nil || again != host || l != literal {
			t.Errorf("%q is %q, then %q, %v", s, host, again, err)
		}
		if literal != (net.ParseIP(host) != nil) {
			t.Errorf("%q is %q, literal %v", s, host, literal)
		}
		if strings.ContainsAny(host, " \r\n\t/@%#?") || host == "" {
			t.Errorf("%q is %q", s, host)
		}
	})
}

// What our reader of a hello finds is what a TLS server finds (attack N7).
func FuzzEgressHello(f *testing.F) {
	good := hello(f, "a.test")
	f.Add(good)
	f.Add(split(good, 100))
	f.Add(hello(f, ""))
	f.Add([]byte("GET / HTTP/1.1\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		name, more, err := gateway.ServerName(b)
		if more && err != nil {
			t.Fatal("more and an error")
		}
		if more || err != nil {
			return
		}
		if theirs, ok := tlsName(b); ok && theirs != name && !strings.EqualFold(strings.TrimSuffix(theirs, "."), name) {
			t.Errorf("we read %q, a server %q", name, theirs)
		}
	})
}

// tlsName is the name that the standard library's server finds.
func tlsName(b []byte) (name string, ok bool) {
	stop := errors.New("seen")
	_ = tls.Server(&said{Reader: bytes.NewReader(b)}, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		name, ok = h.ServerName, true
		return nil, stop
	}}).Handshake()
	return name, ok
}

// said is a connection on which all has been said.
type said struct{ io.Reader }

func (*said) Write(p []byte) (int, error)      { return len(p), nil }
func (*said) Close() error                     { return nil }
func (*said) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (*said) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (*said) SetDeadline(time.Time) error      { return nil }
func (*said) SetReadDeadline(time.Time) error  { return nil }
func (*said) SetWriteDeadline(time.Time) error { return nil }
