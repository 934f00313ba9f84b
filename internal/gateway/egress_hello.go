package gateway

import (
	"encoding/binary"
	"errors"
)

// maxHello bounds what is read of a ClientHello, in bytes. Those with
// post-quantum keys have about 2 KiB.
const maxHello = 16 << 10

// maxHeld bounds what is held of a tunnel until its hello is whole, headers of
// records included: it is read from its beginning with each part that comes.
const maxHeld = 2 * maxHello

var errHello = errors.New("not a TLS ClientHello")

// serverName reads the name that the first bytes of a TLS client ask for
// (RFC 8446 section 4.1.2, RFC 6066 section 3). more: b is a beginning and not
// enough. An empty name: the client names none.
func serverName(b []byte) (name string, more bool, err error) {
	msg, more, err := firstMessage(b)
	if more && len(b) > maxHeld {
		return "", false, errHello
	}
	if more || err != nil {
		return "", more, err
	}
	in := cursor(msg)
	in.skip(2 + 32) // version, random
	in.vector(1)    // session id
	in.vector(2)    // cipher suites
	in.vector(1)    // compression methods
	if in.ok() && len(in) == 0 {
		return "", false, nil // no extensions
	}
	extensions := in.vector(2)
	if !in.ok() || len(in) > 0 {
		return "", false, errHello
	}
	seen := false
	for extensions.ok() && len(extensions) > 0 {
		kind := extensions.uint16()
		body := extensions.vector(2)
		if kind != 0 || !extensions.ok() {
			continue
		}
		if seen {
			return "", false, errHello
		}
		seen = true
		if name, err = oneName(body); err != nil {
			return "", false, err
		}
	}
	if !extensions.ok() {
		return "", false, errHello
	}
	return name, false, nil
}

// oneName reads the server_name extension, which must hold one host name in the
// form that a tunnel's host has.
func oneName(body cursor) (string, error) {
	list := body.vector(2)
	if !body.ok() || len(body) > 0 {
		return "", errHello
	}
	if kind := list.uint8(); kind != 0 {
		return "", errHello
	}
	raw := list.vector(2)
	if !list.ok() || len(list) > 0 {
		return "", errHello
	}
	name, literal, err := hostName(string(raw))
	if err != nil || literal {
		return "", errHello
	}
	return name, nil
}

// firstMessage joins the records of the first handshake message and returns its
// body.
func firstMessage(b []byte) (msg []byte, more bool, err error) {
	for {
		if len(b) > 0 && b[0] != 22 || len(b) > 1 && b[1] != 3 {
			return nil, false, errHello
		}
		if len(b) < 5 {
			return nil, true, nil
		}
		n := int(binary.BigEndian.Uint16(b[3:5]))
		if n == 0 || n > 1<<14 {
			return nil, false, errHello
		}
		part, all := b[5:min(len(b), 5+n)], len(msg)+n
		msg = append(msg, part...)
		if len(msg) > 0 && msg[0] != 1 {
			return nil, false, errHello
		}
		if len(msg) >= 4 {
			size := int(msg[1])<<16 | int(msg[2])<<8 | int(msg[3])
			switch {
			case size > maxHello, all > 4+size: // more than a hello before an answer
				return nil, false, errHello
			case len(msg) == 4+size:
				return msg[4:], false, nil
			}
		}
		if len(part) < n {
			return nil, true, nil
		}
		b = b[5+n:]
	}
}

// cursor reads a message from its beginning. Once something was missing it is
// nil and not ok.
type cursor []byte

var broken = cursor(nil)

func (c *cursor) ok() bool { return *c != nil }

func (c *cursor) skip(n int) cursor {
	if len(*c) < n || *c == nil {
		*c = broken
		return broken
	}
	out := (*c)[:n:n]
	*c = (*c)[n:]
	return out
}

func (c *cursor) uint8() int {
	if b := c.skip(1); b != nil {
		return int(b[0])
	}
	return -1
}

func (c *cursor) uint16() int {
	if b := c.skip(2); b != nil {
		return int(b[0])<<8 | int(b[1])
	}
	return -1
}

// vector reads a length of n bytes and what follows it.
func (c *cursor) vector(n int) cursor {
	size := c.uint8()
	if n == 2 {
		size = size<<8 | c.uint8()
	}
	if size < 0 {
		*c = broken
		return broken
	}
	return c.skip(size)
}
