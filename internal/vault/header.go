package vault

import (
	"errors"
	"fmt"
	"strings"
)

// ErrHeader: a header name, header value or host that must not be sent.
var ErrHeader = errors.New("not a valid header")

// CheckHeaderValue refuses what could end a header or be read in two ways:
// CR, LF, NUL and other control bytes, bytes beyond ASCII, blanks at the ends,
// and the empty value. Go's HTTP client would pass some of these on (attack
// K5). The error says where, never what.
func CheckHeaderValue(v string) error {
	if v == "" {
		return fmt.Errorf("%w: value is empty", ErrHeader)
	}
	for i := range len(v) {
		if c := v[i]; (c < ' ' || c > '~') && c != '\t' {
			return fmt.Errorf("%w: value has a byte at position %d that is not printable ASCII", ErrHeader, i)
		}
	}
	if strings.Trim(v, " \t") != v {
		return fmt.Errorf("%w: value begins or ends with a blank", ErrHeader)
	}
	return nil
}

// CheckHeaderName refuses what is not a token of RFC 9110 section 5.6.2.
func CheckHeaderName(name string) error {
	if name == "" {
		return fmt.Errorf("%w: name is empty", ErrHeader)
	}
	for i := range len(name) {
		if !alnum(name[i]) && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(name[i])) {
			return fmt.Errorf("%w: name has a byte at position %d that is not of a token", ErrHeader, i)
		}
	}
	return nil
}

// CheckHost refuses a Host value that is empty or holds anything but a name or
// address and a port: Go's client sends an empty Host in place of one with CR,
// LF or a blank (trap P8).
func CheckHost(host string) error {
	if host == "" {
		return fmt.Errorf("%w: host is empty", ErrHeader)
	}
	for i := range len(host) {
		if !alnum(host[i]) && !strings.ContainsRune(".-_:[]", rune(host[i])) {
			return fmt.Errorf("%w: host has a byte at position %d that is not of a name, address or port", ErrHeader, i)
		}
	}
	return nil
}

func alnum(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}
