package api

import (
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// runes counts characters as the API does.
func runes(s string) int { return utf8.RuneCountInString(s) }

// short cuts a string for an error text.
func short(s string) string {
	if runes(s) <= 80 {
		return s
	}
	return string([]rune(s)[:80]) + "…"
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func blank(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return !unicode.IsSpace(r) }) < 0
}

// required refuses an empty or blank string, or one longer than max characters.
func required(path, s string, max int) error {
	if blank(s) {
		return Invalid(path, "is required and must not be blank")
	}
	return atMost(path, s, max)
}

func atMost(path, s string, max int) error {
	if max > 0 && runes(s) > max {
		return Invalid(path, "has %d characters; at most %d are allowed", runes(s), max)
	}
	return nil
}

func atMostPtr(path string, s *string, max int) error {
	if s == nil {
		return nil
	}
	return atMost(path, *s, max)
}

// oneOf refuses a value that is not in the list.
func oneOf(path, s string, allowed ...string) error {
	if slices.Contains(allowed, s) {
		return nil
	}
	if s == "" {
		return Invalid(path, "is required; use one of %s", strings.Join(allowed, ", "))
	}
	return Invalid(path, "is %q; use one of %s", short(s), strings.Join(allowed, ", "))
}

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

func sub(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// maxURL is the longest URL that a server is declared with (reference section 11.5).
const maxURL = 2048

// connectorScheme names a connector instead of an address: planaria:<name>.
const connectorScheme = "planaria:"

var connectorName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9-]{1,63}$`) })

// validateURL wants an absolute http or https URL without credentials or fragment.
func validateURL(path, s string) error {
	if s == "" {
		return Invalid(path, "is required; give an http or https URL")
	}
	if len(s) > maxURL {
		return Invalid(path, "has %d bytes; at most %d are allowed", len(s), maxURL)
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return Invalid(path, "is not a URL; give one such as https://mcp.example.com/mcp")
	case !strings.EqualFold(u.Scheme, "http") && !strings.EqualFold(u.Scheme, "https") || u.Hostname() == "":
		return Invalid(path, "must be an absolute http or https URL")
	case u.User != nil:
		return Invalid(path, "must not hold credentials; put them into a vault")
	case u.Fragment != "":
		return Invalid(path, "must not have a fragment")
	}
	return nil
}

// NormalizeURL is the form in which URLs of servers are compared (reference
// section 11.5): scheme and host in lower case, default port and trailing
// slash removed. A connector reference, planaria:<name>, stays as it is.
func NormalizeURL(s string) (string, error) {
	if strings.HasPrefix(s, connectorScheme) {
		return s, nil
	}
	u, err := url.Parse(s)
	if err != nil {
		return "", fmt.Errorf("parse url: %w", err)
	}
	u.Scheme = strings.ToLower(u.Scheme)
	host, port := strings.ToLower(u.Hostname()), u.Port()
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if port != "" && !(u.Scheme == "http" && port == "80") && !(u.Scheme == "https" && port == "443") {
		host += ":" + port
	}
	u.Host, u.Fragment = host, ""
	u.Path, u.RawPath = strings.TrimRight(u.Path, "/"), strings.TrimRight(u.RawPath, "/")
	return u.String(), nil
}

var hostLabel = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)

// validateHost wants a bare host name or IPv4 address, or "*." and a name.
func validateHost(path, h string) error {
	name := strings.TrimPrefix(h, "*.")
	if addr, err := netip.ParseAddr(name); err == nil && addr.Is4() && name == h {
		return nil
	}
	bad := name == "" || len(name) > 253
	for label := range strings.SplitSeq(name, ".") {
		bad = bad || !hostLabel.MatchString(label)
	}
	if bad {
		return Invalid(path, "%q is not a host name; give a bare name such as api.example.com or *.example.com, without scheme, port or path", short(h))
	}
	return nil
}
