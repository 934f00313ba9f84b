package gateway

import (
	"bufio"
	"bytes"
)

// HostName shows how a host is normalised.
var HostName = hostName

// ServerName shows what is read of a TLS hello.
var ServerName = serverName

// Head shows how the head of a plain HTTP request is read, and what is sent for it.
func Head(b []byte) (host string, length int64, chunked bool, sent []byte, ok bool) {
	h, err := readHead(bufio.NewReader(bytes.NewReader(b)))
	if err != nil {
		return "", 0, false, nil, false
	}
	p, path, err := h.url(nil)
	if err != nil {
		return "", 0, false, nil, false
	}
	return p.String(), h.length, h.chunked, h.rebuilt(p, path), true
}
