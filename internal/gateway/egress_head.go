package gateway

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// Limits of a request that comes out of a sandbox.
const (
	// EgressHeaderBytes bounds the head of a request, its first line included.
	EgressHeaderBytes = 64 << 10
	// EgressFields bounds the header fields of a request.
	EgressFields = 100
	// maxMethod bounds a method's name.
	maxMethod = 32
)

// head is the head of one request, taken apart. What two readers could read in
// two ways is refused (attack F7); nothing of the bytes that came is passed on
// as it is.
type head struct {
	method, target string
	minor          int // of HTTP/1.x
	fields         []field
	host           string // the Host field, as it came
	hosts          int    // how many Host fields

	length  int64 // of the body; 0 when there is none
	chunked bool
	close   bool
	upgrade string // the protocol asked for, lower case
	expect  bool   // 100-continue

	hop map[string]bool // fields that the Connection field names
}

type field struct{ name, value string }

// badHead says what is wrong with a request.
type badHead struct {
	status int
	text   string
}

func (e *badHead) Error() string { return e.text }

func bad(format string, args ...any) error {
	return &badHead{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// readHead reads the head of a request. Errors are *badHead, or the reader's.
func readHead(r *bufio.Reader) (*head, error) {
	left := EgressHeaderBytes
	line, err := readLine(r, &left)
	if err != nil {
		return nil, err
	}
	h := &head{hop: map[string]bool{}}
	if err := h.first(line); err != nil {
		return nil, err
	}
	for {
		if line, err = readLine(r, &left); err != nil {
			return nil, err
		}
		if line == "" {
			return h, h.judge()
		}
		if len(h.fields) == EgressFields {
			return nil, &badHead{http.StatusRequestHeaderFieldsTooLarge, fmt.Sprintf("the request has more than %d header fields", EgressFields)}
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok || !isToken(name) {
			return nil, bad("a header field of the request has no proper name")
		}
		value = strings.Trim(value, " \t")
		if !isText(value) {
			return nil, bad("header field %s of the request holds control characters", name)
		}
		h.fields = append(h.fields, field{name, value})
	}
}

// readLine reads one line, ended by CR and LF and nothing else.
func readLine(r *bufio.Reader, left *int) (string, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if *left -= len(part); *left < 0 {
			return "", &badHead{http.StatusRequestHeaderFieldsTooLarge, fmt.Sprintf("the head of the request is longer than %d bytes", EgressHeaderBytes)}
		}
		line = append(line, part...)
		if err == nil {
			break
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return "", err
		}
	}
	s, ok := strings.CutSuffix(string(line), "\r\n")
	if !ok || strings.ContainsAny(s, "\r\n") {
		return "", bad("a line of the request does not end in CR LF")
	}
	return s, nil
}

// first reads the request line.
func (h *head) first(line string) error {
	method, rest, ok := strings.Cut(line, " ")
	target, version, ok2 := strings.Cut(rest, " ")
	if !ok || !ok2 || strings.Contains(version, " ") || !isToken(method) || len(method) > maxMethod || !isTarget(target) {
		return bad("the first line is not one of an HTTP request; this is a proxy for HTTP and CONNECT")
	}
	switch version {
	case "HTTP/1.1":
		h.minor = 1
	case "HTTP/1.0":
	default:
		return &badHead{http.StatusHTTPVersionNotSupported, "the proxy speaks HTTP/1.1"}
	}
	h.method, h.target = method, target
	return nil
}

// judge reads the fields that say where the request ends and what becomes of
// the connection.
func (h *head) judge() error {
	lengths, codings, expects := 0, 0, 0
	h.close = h.minor == 0
	for _, f := range h.fields {
		switch strings.ToLower(f.name) {
		case "host":
			h.hosts++
			h.host = f.value
		case "content-length":
			lengths++
			n, err := strconv.ParseUint(f.value, 10, 62)
			if err != nil || strings.TrimLeft(f.value, "0123456789") != "" {
				return bad("Content-Length is no number")
			}
			h.length = int64(n)
		case "transfer-encoding":
			codings++
			h.chunked = true
			if !strings.EqualFold(f.value, "chunked") {
				return &badHead{http.StatusNotImplemented, "Transfer-Encoding is something else than chunked"}
			}
		case "connection", "proxy-connection":
			for v := range strings.SplitSeq(f.value, ",") {
				v = strings.ToLower(strings.Trim(v, " \t"))
				h.hop[v] = true
				h.close = h.close || v == "close"
			}
		case "upgrade":
			if h.upgrade != "" {
				return bad("the request has two Upgrade fields")
			}
			h.upgrade = strings.ToLower(f.value)
		case "expect":
			expects++
			h.expect = true
			if !strings.EqualFold(f.value, "100-continue") {
				return &badHead{http.StatusExpectationFailed, "Expect is something else than 100-continue"}
			}
		}
	}
	switch {
	case h.hosts > 1 || h.hosts == 0 && h.minor == 1:
		return bad("the request has %d Host fields, not one", h.hosts)
	case lengths > 1:
		return bad("the request has %d Content-Length fields", lengths)
	case codings > 1:
		return bad("the request has %d Transfer-Encoding fields", codings)
	case codings > 0 && lengths > 0:
		return bad("the request has Content-Length and Transfer-Encoding")
	case codings > 0 && h.minor == 0:
		return bad("the request has Transfer-Encoding in HTTP/1.0")
	case expects > 1:
		return bad("the request has %d Expect fields", expects)
	case h.method == http.MethodConnect && (h.length > 0 || h.chunked):
		return bad("CONNECT has a body")
	}
	h.expect = h.expect && h.minor == 1
	if h.upgrade != "websocket" || !h.hop["upgrade"] || h.minor == 0 || h.hasBody() {
		h.upgrade = "" // an offer that nobody need take; a body and a tunnel would be read at once
	}
	return nil
}

// hasBody reports whether bytes follow the head.
func (h *head) hasBody() bool { return h.chunked || h.length > 0 }

// value is that of the first field of a name in lower case.
func (h *head) value(name string) string {
	for _, f := range h.fields {
		if strings.EqualFold(f.name, name) {
			return f.value
		}
	}
	return ""
}

// url takes the target of a request apart that is not CONNECT: where to, and
// the path with query. within is where a tunnel of plain HTTP leads; there the
// target may be a path alone.
func (h *head) url(within *place) (place, string, error) {
	scheme, rest, ok := strings.Cut(h.target, "://")
	if !ok {
		if within == nil {
			return place{}, "", bad("the request names no host: this is a proxy; give it the whole URL, or CONNECT")
		}
		if h.target != "*" && !strings.HasPrefix(h.target, "/") {
			return place{}, "", bad("the target of the request is no path")
		}
		return *within, h.target, h.sameHost(*within)
	}
	if !strings.EqualFold(scheme, "http") {
		return place{}, "", bad("the proxy takes URLs of http; for https use CONNECT")
	}
	end := strings.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	if strings.ContainsRune(rest[:end], '@') {
		return place{}, "", bad("the URL holds a user name; send it as Authorization")
	}
	p, err := parsePlace(rest[:end], portHTTP)
	if err != nil {
		return place{}, "", bad("host of the URL: %v", err)
	}
	if within != nil && p != *within {
		return place{}, "", bad("the URL names another host than the tunnel")
	}
	path := rest[end:]
	switch {
	case path == "" && h.method == http.MethodOptions:
		path = "*"
	case !strings.HasPrefix(path, "/"):
		path = "/" + path
	}
	return p, path, h.sameHost(p)
}

// sameHost refuses a Host field that names another place (attack N7).
func (h *head) sameHost(p place) error {
	if h.hosts == 0 {
		return nil // HTTP/1.0
	}
	if got, err := parsePlace(h.host, portHTTP); err != nil || got != p {
		return bad("the Host field names another host than the URL")
	}
	return nil
}

// hopByHop are fields that concern one connection only, or us.
var hopByHop = map[string]bool{
	"connection": true, "proxy-connection": true, "keep-alive": true, "te": true, "trailer": true,
	"transfer-encoding": true, "upgrade": true, "proxy-authenticate": true, "proxy-authorization": true,
	"proxy-authentication-info": true, "proxy-status": true, "expect": true, "content-length": true, "host": true,
}

// rebuilt is the head as it goes to p.
func (h *head) rebuilt(p place, path string) []byte {
	var b strings.Builder
	host := strings.TrimSuffix(p.String(), ":80")
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\n", h.method, path, host)
	for _, f := range h.fields {
		if n := strings.ToLower(f.name); !hopByHop[n] && !h.hop[n] {
			fmt.Fprintf(&b, "%s: %s\r\n", f.name, f.value)
		}
	}
	switch {
	case h.chunked:
		b.WriteString("Transfer-Encoding: chunked\r\n")
	case h.length > 0 || h.method == http.MethodPost || h.method == http.MethodPut || h.method == http.MethodPatch:
		fmt.Fprintf(&b, "Content-Length: %d\r\n", h.length)
	}
	if h.upgrade != "" {
		fmt.Fprintf(&b, "Connection: Upgrade\r\nUpgrade: %s\r\n\r\n", h.upgrade)
	} else {
		b.WriteString("Connection: close\r\n\r\n")
	}
	return []byte(b.String())
}

func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return s != ""
}

// isText reports whether s may stand in a header field.
func isText(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// isTarget reports whether s may stand in a request line: no blanks, no control
// characters, no fragment.
func isTarget(s string) bool {
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c == 0x7f || c == '#' {
			return false
		}
	}
	return s != ""
}

// chunks reads a chunked body strictly: no extensions, no bare LF. Trailers are
// dropped.
type chunks struct {
	r    *bufio.Reader
	left int64
	err  error
}

func (c *chunks) Read(p []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	if c.left == 0 {
		if c.err = c.next(); c.err != nil {
			return 0, c.err
		}
	}
	if int64(len(p)) > c.left {
		p = p[:c.left]
	}
	n, err := c.r.Read(p)
	c.left -= int64(n)
	if err == nil && c.left == 0 {
		err = c.line("")
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	c.err = err
	return n, c.err
}

// next reads the size of a chunk; after the last one, the trailers.
func (c *chunks) next() error {
	left := 16 + len("\r\n")
	size, err := readLine(c.r, &left)
	if err != nil {
		return err
	}
	n, err := strconv.ParseUint(size, 16, 62)
	if err != nil {
		return bad("the size of a chunk is no number")
	}
	if c.left = int64(n); n > 0 {
		return nil
	}
	left = EgressHeaderBytes
	for {
		line, err := readLine(c.r, &left)
		if err != nil {
			return err
		}
		if line == "" {
			return io.EOF
		}
	}
}

// line reads a line that must be want.
func (c *chunks) line(want string) error {
	left := len(want) + len("\r\n")
	got, err := readLine(c.r, &left)
	if err == nil && got != want {
		err = bad("a chunk is longer than its size")
	}
	return err
}
