package gateway_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
)

var anywhere = gateway.Network{Unrestricted: true}

// Requests to several hosts follow each other on one connection, each with a
// record and a connection of its own; what concerns us does not go on.
func TestEgressHTTP(t *testing.T) {
	o := newOutside(t)
	seen := make(chan string, 10)
	show := func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Errorf("body: %v", err)
		}
		for _, name := range []string{"Proxy-Authorization", "Proxy-Connection", "Keep-Alive", "Te", "X-Hop", "Upgrade", "Via", "X-Forwarded-For"} {
			if v := r.Header.Get(name); v != "" {
				t.Errorf("%s: %s was passed on", name, v)
			}
		}
		seen <- fmt.Sprintf("%s %s%s %q %s %v", r.Method, r.Host, r.RequestURI, b, r.Header.Get("X-Kept"), r.TransferEncoding)
		w.Header().Set("X-Up", "1")
		w.Header().Set("Proxy-Authenticate", "Basic")
		switch r.URL.Path {
		case "/stream":
			_, _ = io.WriteString(w, "one")
			w.(http.Flusher).Flush()
			_, _ = io.WriteString(w, "two")
		case "/none":
			w.WriteHeader(http.StatusNoContent)
		default:
			_, _ = io.WriteString(w, "full")
		}
	}
	o.serve("a.test:80", show)
	o.serve("b.test:8080", show)
	p := o.inside(anywhere).dial()
	for _, c := range []struct{ send, method, seen, body string }{
		{"GET http://a.test/x?y=%20z HTTP/1.1\r\nHost: a.test\r\nX-Kept: yes\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nProxy-Authorization: Basic eDp5\r\nTE: trailers\r\nUpgrade: h2c\r\n\r\n",
			"GET", `GET a.test/x?y=%20z "" yes []`, "full"},
		{"POST http://b.test:8080 HTTP/1.1\r\nHost: B.test:8080\r\nContent-Length: 3\r\nProxy-Connection: keep-alive\r\n\r\nabc", "POST", `POST b.test:8080/ "abc"  []`, "full"},
		{"PUT http://a.test/c HTTP/1.1\r\nhost: a.test:80\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\nA\r\n0123456789\r\n0\r\nX-Trailer: 1\r\n\r\n", "PUT", `PUT a.test/c "abc0123456789"  [chunked]`, "full"},
		{"GET http://a.test/stream HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET", `GET a.test/stream ""  []`, "onetwo"},
		{"HEAD http://a.test?q HTTP/1.1\r\nHost: a.test\r\n\r\n", "HEAD", `HEAD a.test/?q ""  []`, ""},
		{"DELETE http://a.test/none HTTP/1.1\r\nHost: a.test\r\n\r\n", "DELETE", `DELETE a.test/none ""  []`, ""},
		{"GET http://nowhere.test/ HTTP/1.1\r\nHost: nowhere.test\r\n\r\n", "GET", "", "planaria: nowhere.test:80 was not reached: its name cannot be resolved.\n"},
		{"POST http://a.test/e HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n", "POST", `POST a.test/e ""  []`, "full"},
	} {
		p.say(c.send)
		resp, body := p.answer(c.method)
		got := ""
		if c.seen != "" {
			got = <-seen
			if resp.Header.Get("X-Up") != "1" || resp.Header.Get("Proxy-Authenticate") != "" {
				t.Errorf("%q: header %v", c.send, resp.Header)
			}
		}
		if got != c.seen || body != c.body {
			t.Errorf("%q:\n the host saw %q, want %q\n the process got %q, want %q", c.send, got, c.seen, body, c.body)
		}
	}
	p.say("GET http://a.test/old HTTP/1.0\r\n\r\n")
	if resp, body := p.answer("GET"); body != "full" || !resp.Close {
		t.Errorf("HTTP/1.0: %q, close %v", body, resp.Close)
	}
	p.wait()
	if n := o.tunnels(); n != 9 {
		t.Errorf("%d records", n)
	}
	if last := o.last(); last.Host != "a.test" || last.Port != 80 || last.Sent == 0 || last.Received == 0 || last.Failed != "" {
		t.Errorf("record %+v", last)
	}
}

// What two readers could read in two ways, and what is no request to a proxy,
// is answered by us and nothing is dialled (attacks F5, F7, N7, N8).
func TestEgressRefusesRequests(t *testing.T) {
	get := "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n"
	for name, c := range map[string]struct {
		send string
		want int
	}{
		"length and chunked":    {"POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
		"two lengths":           {get + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400},
		"list of lengths":       {get + "Content-Length: 3, 3\r\n\r\nabc", 400},
		"signed length":         {get + "Content-Length: +3\r\n\r\nabc", 400},
		"length with blank":     {get + "Content-Length : 3\r\n\r\nabc", 400},
		"huge length":           {get + "Content-Length: 99999999999999999999\r\n\r\n", 400},
		"two codings":           {get + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
		"coding list":           {get + "Transfer-Encoding: gzip, chunked\r\n\r\n", 501},
		"odd coding":            {get + "Transfer-Encoding: xchunked\r\n\r\n", 501},
		"coding in 1.0":         {"POST http://a.test/ HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
		"bare LF":               {"GET http://a.test/ HTTP/1.1\nHost: a.test\n\n", 400},
		"bare LF in fields":     {"GET http://a.test/ HTTP/1.1\r\nHost: a.test\nX: y\r\n\r\n", 400},
		"bare CR":               {get + "X: a\rb\r\n\r\n", 400},
		"zero byte":             {get + "X: a\x00b\r\n\r\n", 400},
		"folded":                {get + "X: a\r\n b\r\n\r\n", 400},
		"no name":               {get + ": a\r\n\r\n", 400},
		"no colon":              {get + "nothing\r\n\r\n", 400},
		"two hosts":             {get + "Host: a.test\r\n\r\n", 400},
		"no host":               {"GET http://a.test/ HTTP/1.1\r\n\r\n", 400},
		"empty host":            {"GET http://a.test/ HTTP/1.1\r\nHost:\r\n\r\n", 400},
		"other host":            {"GET http://a.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n", 400},
		"other port":            {"GET http://a.test/ HTTP/1.1\r\nHost: a.test:81\r\n\r\n", 400},
		"other host of CONNECT": {"CONNECT a.test:443 HTTP/1.1\r\nHost: b.test:443\r\n\r\n", 400},
		"body of CONNECT":       {"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1\r\n\r\n", 400},
		"user in URL":           {"GET http://u:p@a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n", 400},
		"https URL":             {"GET https://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n", 400},
		"ftp URL":               {"GET ftp://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n", 400},
		"path only":             {"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", 400},
		"fragment":              {"GET http://a.test/#x HTTP/1.1\r\nHost: a.test\r\n\r\n", 400},
		"blank in target":       {"GET http://a.test/a b HTTP/1.1\r\nHost: a.test\r\n\r\n", 400},
		"two blanks":            {"GET  http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n", 400},
		"HTTP/2":                {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505},
		"lower version":         {"GET http://a.test/ http/1.1\r\nHost: a.test\r\n\r\n", 505},
		"TLS":                   {"\x16\x03\x01\x00\x05hello\r\n\r\n", 400},
		"expectation":           {get + "Expect: more\r\n\r\n", 417},
		"long head":             {get + "X: " + strings.Repeat("x", gateway.EgressHeaderBytes) + "\r\n\r\n", 431},
		"long line":             {"GET http://a.test/" + strings.Repeat("x", 2*gateway.EgressHeaderBytes), 431},
		"many fields":           {get + strings.Repeat("X: y\r\n", gateway.EgressFields) + "\r\n", 431},
		"long method":           {strings.Repeat("M", 33) + " http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n", 400},
		"literal spelling":      {"GET http://0x7f.1/ HTTP/1.1\r\nHost: 0x7f.1\r\n\r\n", 400},
		"encoded host":          {"GET http://a%2etest/ HTTP/1.1\r\nHost: a%2etest\r\n\r\n", 400},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOutside(t)
			p := o.inside(anywhere).dial()
			p.say(c.send)
			resp, body := p.answer("GET")
			if resp.StatusCode != c.want || !strings.HasPrefix(body, "planaria: ") {
				t.Errorf("%q: %s %q, want %d", c.send, resp.Status, body, c.want)
			}
			if len(o.asked) > 0 || o.tunnels() > 0 {
				t.Errorf("%q: dialled %v, %d records", c.send, o.asked, o.tunnels())
			}
		})
	}
}

// A body that is not in proper form never passes for a whole one (attack F7).
func TestEgressBadBody(t *testing.T) {
	for name, body := range map[string]string{
		"extension":     "3;x=y\r\nabc\r\n0\r\n\r\n",
		"bare LF":       "3\nabc\r\n0\r\n\r\n",
		"bare LF after": "3\r\nabc\n0\r\n\r\n",
		"too long":      "3\r\nabcd\r\n0\r\n\r\n",
		"no number":     "x\r\nabc\r\n0\r\n\r\n",
		"signed":        "+3\r\nabc\r\n0\r\n\r\n",
		"prefixed":      "0x3\r\nabc\r\n0\r\n\r\n",
		"huge":          "ffffffffffffffffff\r\nabc\r\n0\r\n\r\n",
		"cut":           "3\r\nab",
	} {
		t.Run(name, func(t *testing.T) {
			o := newOutside(t)
			got := make(chan string, 1)
			o.listen("a.test:80", func(c *net.TCPConn) {
				b, _ := io.ReadAll(c)
				got <- string(b)
			})
			p := o.inside(anywhere).dial()
			p.say("POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
			_ = p.CloseWrite()
			if said, err := p.end(); said != "" && !strings.HasPrefix(said, "HTTP/1.1 502") {
				t.Errorf("the process heard %q, %v", said, err)
			}
			p.wait()
			if sent := <-got; strings.HasSuffix(sent, "0\r\n\r\n") {
				t.Errorf("the host got a whole body: %q", sent)
			}
			if last := o.last(); !strings.Contains(last.Failed, "half a body") {
				t.Errorf("record %+v", last)
			}
		})
	}
}

// An answer is rebuilt too: what is cut is seen as cut, what is no HTTP is ours.
func TestEgressAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		answer, want string
		cut          bool
	}{
		"length":          {"HTTP/1.1 200 Fine\r\nContent-Length: 2\r\nX: y\r\n\r\nhi", "HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 2\r\n\r\nhi", false},
		"until the end":   {"HTTP/1.0 200 OK\r\n\r\nhi", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", false},
		"chunked":         {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\nhi\r\n0\r\nT: 1\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", false},
		"both":            {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 99\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", false},
		"interim":         {"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 204 No\r\n\r\n", "HTTP/1.1 204 No Content\r\n\r\n", false},
		"hop by hop":      {"HTTP/1.1 204 No\r\nConnection: X, keep-alive\r\nX: y\r\nKeep-Alive: 1\r\nProxy-Authenticate: Basic\r\n\r\n", "HTTP/1.1 204 No Content\r\n\r\n", false},
		"cut in length":   {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi", true},
		"cut in chunks":   {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhi", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n", true},
		"no HTTP":         {"SSH-2.0-x\r\n", "HTTP/1.1 502 ", false},
		"nothing":         {"", "HTTP/1.1 502 ", false},
		"endless head":    {"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", keeper.MaxHeader), "HTTP/1.1 502 ", false},
		"endless interim": {strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 20), "HTTP/1.1 502 ", false},
		"switches":        {"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", "HTTP/1.1 502 ", false},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOutside(t)
			o.listen("a.test:80", func(conn *net.TCPConn) {
				_, _ = http.ReadRequest(bufio.NewReader(conn))
				_, _ = io.WriteString(conn, c.answer)
			})
			p := o.inside(anywhere).dial()
			p.say("GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
			p.hear(c.want)
			if c.cut {
				if more, _ := p.end(); more != "" {
					t.Errorf("after the cut: %q", more)
				}
			} else if !strings.Contains(c.want, "502") {
				// It is whole: the connection serves on.
				p.say("GET http://b.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n")
				p.hear("HTTP/1.1 502 Bad Gateway\r\n")
			}
			p.Close()
			p.wait()
			if failed := o.ended[0].Failed; c.cut != strings.Contains(failed, "cut") && !strings.Contains(c.want, "502") {
				t.Errorf("record: %q", failed)
			}
		})
	}
}

// Why a host was not reached is said without any address; it is on record
// before and after.
func TestEgressUnreached(t *testing.T) {
	refused := &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.IPv4(10, 9, 8, 7), Port: 443}, Err: syscall.ECONNREFUSED}
	for _, c := range []struct {
		fail  error
		want  int
		token string
		says  string
	}{
		{&net.DNSError{Err: "no such host", Name: "a.test", Server: "10.9.8.7:53", IsNotFound: true}, 502, "dns_error", "cannot be resolved"},
		{refused, 502, "connection_refused", "refused the connection"},
		{fmt.Errorf("dial a.test:443 (10.9.8.7:443): %w", keeper.ErrForbidden), 403, "destination_ip_prohibited", "private, special or this server's own"},
		{fmt.Errorf("dial 10.9.8.7: %w", context.DeadlineExceeded), 504, "connection_timeout", "did not answer"},
		{errors.New("10.9.8.7 is odd"), 502, "connection_refused", "cannot be reached"},
	} {
		for _, send := range []string{"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET http://a.test:443/ HTTP/1.1\r\nHost: a.test:443\r\n\r\n"} {
			o := newOutside(t)
			o.fail["a.test:443"] = c.fail
			p := o.inside(anywhere).dial()
			p.say(send)
			resp, body := p.answer("GET")
			if resp.StatusCode != c.want || !strings.Contains(resp.Header.Get("Proxy-Status"), c.token) || !strings.Contains(body, c.says) {
				t.Errorf("%v: %s %v %q", c.fail, resp.Status, resp.Header, body)
			}
			p.Close()
			p.wait()
			last := o.last()
			if all := fmt.Sprint(resp, body, last); strings.Contains(all, "10.9.8.7") {
				t.Errorf("%v: an address shows: %s", c.fail, all)
			}
			if !strings.Contains(last.Failed, c.says) || last.Sent != 0 {
				t.Errorf("record %+v", last)
			}
		}
	}
}

// Without its record nothing is dialled.
func TestEgressClosed(t *testing.T) {
	for _, send := range []string{"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n"} {
		o := newOutside(t)
		o.closed = store.ErrFenced
		p := o.inside(anywhere).dial()
		p.say(send)
		if resp, body := p.answer("GET"); resp.StatusCode != 503 || !strings.Contains(body, "nothing was sent") {
			t.Errorf("%s: %s %q", send, resp.Status, body)
		}
		p.Close()
		p.wait()
		if len(o.asked) > 0 || len(o.ended) > 0 {
			t.Errorf("dialled %v, ended %v", o.asked, o.ended)
		}
	}
}

// The real guard stands before every dial (attacks N1, N3, N4, N9): names that
// resolve to what is private and our own addresses are refused, however the
// environment allows them; with --allow-private-networks those are reached that
// a limited environment names itself, and no others.
func TestEgressGuard(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	own := l.Addr().String()
	_, port, _ := net.SplitHostPort(own)
	guard := func(private bool) func(*keeper.Config) {
		return func(k *keeper.Config) {
			k.Dial = keeper.Guard(func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("dialled") }, []string{own, ":80"})
			k.AllowPrivateNetworks = private
		}
	}
	named := gateway.Network{Hosts: []string{"localhost"}}
	for _, c := range []struct {
		network gateway.Network
		target  string
		reached bool // with --allow-private-networks; without, nothing is
	}{
		{named, "localhost:443", true},
		{named, "LOCALHOST.:443", true},
		{named, "localhost:80", false}, // our own
		{gateway.Network{Hosts: []string{"*.localhost", "localhost"}}, "localhost:443", true},
		{gateway.Network{Servers: []string{"localhost"}}, "localhost:443", false},
		{gateway.Network{Servers: []string{"localhost:8443"}}, "localhost:8443", false},
		{gateway.Network{PackageManagers: true}, "localhost:443", false},
		{gateway.Network{PackageManagers: true}, "localhost:8081", false},
		{gateway.Network{PackageManagers: true, Hosts: []string{"localhost"}}, "localhost:8081", false},
		{anywhere, "localhost:" + port, false}, {anywhere, own, false},
		{anywhere, "localhost:1", false}, {anywhere, "localhost:443", false}, {anywhere, "127.0.0.1:1", false}, {anywhere, "[::1]:1", false},
		{anywhere, "10.1.2.3:1", false}, {anywhere, "[::ffff:10.1.2.3]:443", false},
		{anywhere, "169.254.169.254:80", false}, {anywhere, "[fd00:ec2::254]:80", false}, {anywhere, "[::ffff:a9fe:a9fe]:80", false},
		{anywhere, "[64:ff9b::a9fe:a9fe]:80", false}, {anywhere, "168.63.129.16:80", false},
	} {
		for _, private := range []bool{false, true} {
			for _, send := range []string{"CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", "GET http://%s/ HTTP/1.1\r\nHost: %s\r\n\r\n"} {
				o := newOutside(t)
				i := o.inside(c.network, guard(private))
				if strings.HasPrefix(send, "CONNECT") && strings.HasSuffix(c.target, ":80") && !c.network.Unrestricted {
					continue // it is no tunnel
				}
				p := i.dial()
				p.say(fmt.Sprintf(send, c.target, c.target))
				resp, body := p.answer("GET")
				if want := map[bool]int{true: 502, false: 403}[private && c.reached]; resp.StatusCode != want || strings.Contains(body, "not reachable from this sandbox") {
					t.Errorf(send+" under %+v, private %v: %s %q, want %d", c.target, c.target, c.network, private, resp.Status, body, want)
				}
			}
		}
	}
}

// A websocket goes through as a tunnel.
func TestEgressWebsocket(t *testing.T) {
	o := newOutside(t)
	o.listen("a.test:80", func(c *net.TCPConn) {
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		if err != nil || r.Header.Get("Upgrade") != "websocket" || r.Header.Get("Connection") != "Upgrade" || r.Header.Get("Sec-Websocket-Key") != "k" {
			t.Errorf("request %+v, %v", r, err)
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: a\r\n\r\nfirst")
		_, _ = io.Copy(c, in)
		_ = c.CloseWrite()
	})
	p := o.inside(gateway.Network{Hosts: []string{"a.test"}}).dial()
	p.say("GET http://a.test/ws HTTP/1.1\r\nHost: a.test\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Key: k\r\n\r\nsecond")
	p.hear("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nSec-Websocket-Accept: a\r\nUpgrade: websocket\r\n\r\nfirstsecond")
	_ = p.CloseWrite()
	if rest, err := p.end(); rest != "" || err != nil {
		t.Errorf("end: %q, %v", rest, err)
	}
	p.wait()
	if last := o.last(); last.Failed != "" {
		t.Errorf("record %+v", last)
	}
}

// A request with a body changes to no other protocol: body and tunnel would be
// read from one stream by two at once, which a host that answers early could make
// a process bring the whole server down with (attack F7).
func TestEgressUpgradeWithBody(t *testing.T) {
	for _, body := range []string{"Transfer-Encoding: chunked\r\n\r\n", "Content-Length: 1000\r\n\r\n"} {
		o := newOutside(t)
		offered := make(chan string, 1)
		o.listen("a.test:80", func(c *net.TCPConn) {
			r, _ := http.ReadRequest(bufio.NewReader(c))
			offered <- r.Header.Get("Upgrade")
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		})
		p := o.inside(anywhere).dial()
		p.say("POST http://a.test/ws HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + body)
		if got := <-offered; got != "" {
			t.Errorf("%q: the host was offered %q", body, got)
		}
		if resp, _ := p.answer("POST"); resp.StatusCode != http.StatusBadGateway {
			t.Errorf("%q: %s", body, resp.Status)
		}
	}
}

// An answer that comes before the request was all sent is passed on, and ends
// the connection.
func TestEgressEarlyAnswer(t *testing.T) {
	o := newOutside(t)
	o.listen("a.test:80", func(c *net.TCPConn) {
		_, _ = http.ReadRequest(bufio.NewReader(c))
		_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
	})
	p := o.inside(anywhere).dial()
	p.say("POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\nContent-Length: 1000\r\n\r\n")
	p.hear("HTTP/1.1 100 Continue\r\n\r\n")
	if resp, body := p.answer("POST"); resp.StatusCode != 413 || body != "no" || !resp.Close {
		t.Errorf("%s %q, close %v", resp.Status, body, resp.Close)
	}
	p.wait()
}
