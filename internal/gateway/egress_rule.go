package gateway

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/net/idna"
)

// RepositoryHost is where processes in a sandbox find the session's
// repositories, over plain HTTP through the proxy. It is no name of the DNS.
const RepositoryHost = "repositories.planaria"

// packageHosts are what allow_package_managers opens: where the six package
// managers of an environment's packages fetch from by default.
var packageHosts = map[string][]string{
	"apt":   {"deb.debian.org", "security.debian.org", "archive.ubuntu.com", "security.ubuntu.com", "ports.ubuntu.com"},
	"cargo": {"index.crates.io", "static.crates.io", "crates.io"},
	"gem":   {"rubygems.org", "index.rubygems.org"},
	"go":    {"proxy.golang.org", "sum.golang.org"},
	"npm":   {"registry.npmjs.org", "registry.yarnpkg.com"},
	"pip":   {"pypi.org", "files.pythonhosted.org"},
}

const (
	portHTTP  = 80
	portHTTPS = 443
)

// place is where a process wants to go: a name in lower-case ASCII without
// trailing dot, or an address, and a port.
type place struct {
	host    string
	port    int
	literal bool // host is an address
}

func (p place) String() string {
	host := p.host
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return host + ":" + strconv.Itoa(p.port)
}

var errHost = errors.New("it is neither a host name nor an address")

// hostName normalises a host once, for everything that compares it: lower
// case, IDNA to ASCII, no trailing dot. Spellings of addresses that only some
// resolvers understand are refused (attack N4).
func hostName(s string) (host string, literal bool, err error) {
	s = strings.TrimSuffix(s, ".")
	if addr, err := netip.ParseAddr(s); err == nil {
		if addr.Zone() != "" {
			return "", false, fmt.Errorf("%w: it has a zone", errHost)
		}
		return addr.Unmap().String(), true, nil
	}
	if len(s) > 1000 {
		return "", false, errHost
	}
	for i := range len(s) {
		if s[i] >= 0x80 {
			if s, err = idna.Lookup.ToASCII(s); err != nil {
				return "", false, errHost
			}
			break
		}
	}
	s = strings.ToLower(s)
	if len(s) > 253 {
		return "", false, errHost
	}
	for label := range strings.SplitSeq(s, ".") {
		if !isLabel(label) {
			return "", false, errHost
		}
	}
	if last := s[strings.LastIndexByte(s, '.')+1:]; last[0] >= '0' && last[0] <= '9' {
		return "", false, errHost
	}
	return s, false, nil
}

func isLabel(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}

// parsePlace reads "host", "host:port" or "[address]:port". usual is the port
// where none is given; 0: one must be.
func parsePlace(s string, usual int) (place, error) {
	host, port, bracket := s, "", false
	if rest, ok := strings.CutPrefix(s, "["); ok {
		if host, port, ok = strings.Cut(rest, "]"); !ok || port != "" && port[0] != ':' {
			return place{}, errHost
		}
		bracket = true
	} else if i := strings.IndexByte(s, ':'); i >= 0 {
		host, port = s[:i], s[i:]
	}
	p := place{port: usual}
	if port != "" {
		// No sign, no leading zero: one spelling for one port.
		n, err := strconv.ParseUint(port[1:], 10, 16)
		if err != nil || n == 0 || strconv.FormatUint(n, 10) != port[1:] {
			return place{}, errors.New("its port is no number from 1 to 65535")
		}
		p.port = int(n)
	}
	if p.port == 0 {
		return place{}, errors.New("it has no port")
	}
	var err error
	if p.host, p.literal, err = hostName(host); err != nil {
		return place{}, err
	}
	if bracket != strings.Contains(p.host, ":") && (!bracket || !p.literal) {
		return place{}, errHost
	}
	return p, nil
}

// hostRules are allowed hosts in the form that is asked for.
type hostRules struct {
	names map[string]bool // the exact names
	below map[string]bool // "*." wildcards, without "*."
	ports map[string]bool // "host:port" with a port of its own
}

func newHostRules() *hostRules {
	return &hostRules{names: map[string]bool{}, below: map[string]bool{}, ports: map[string]bool{}}
}

// add takes a bare name or a "*." wildcard. What is neither matches nothing.
func (r *hostRules) add(entry string) error {
	name, wild := strings.CutPrefix(entry, "*.")
	host, literal, err := hostName(name)
	switch {
	case err != nil:
		return err
	case literal:
		return errors.New("an address matches nothing: name the host")
	case wild:
		r.below[host] = true
	default:
		r.names[host] = true
	}
	return nil
}

// addPlace takes what add does, and "host:port".
func (r *hostRules) addPlace(entry string) error {
	if !strings.Contains(entry, ":") {
		return r.add(entry)
	}
	p, err := parsePlace(entry, 0)
	if err == nil && p.literal {
		err = errors.New("an address matches nothing: name the host")
	}
	if err != nil {
		return err
	}
	r.ports[p.String()] = true
	return nil
}

// has reports whether p is allowed. A wildcard matches names below it at any
// depth, not the bare name.
func (r *hostRules) has(p place) bool {
	if p.literal {
		return false
	}
	if r.ports[p.String()] {
		return true
	}
	if p.port != portHTTP && p.port != portHTTPS {
		return false
	}
	if r.names[p.host] {
		return true
	}
	for rest := p.host; ; {
		_, parent, ok := strings.Cut(rest, ".")
		if !ok {
			return false
		}
		if r.below[parent] {
			return true
		}
		rest = parent
	}
}

// publicPackages makes the rules of allow_package_managers, with the
// operator's own mirrors.
func publicPackages(extra []string) (*hostRules, error) {
	r := newHostRules()
	var errs []error
	for manager, hosts := range packageHosts {
		for _, h := range hosts {
			if err := r.add(h); err != nil {
				panic("gateway: package host of " + manager + ": " + err.Error())
			}
		}
	}
	for _, h := range extra {
		if err := r.addPlace(h); err != nil {
			errs = append(errs, fmt.Errorf("package host %q: %w", h, err))
		}
	}
	return r, errors.Join(errs...)
}

// rules are what one sandbox may reach.
type rules struct {
	network  Network
	hosts    *hostRules
	servers  *hostRules
	packages *hostRules
}

func newRules(n Network, packages *hostRules) *rules {
	r := &rules{network: n, hosts: newHostRules(), servers: newHostRules(), packages: packages}
	for _, h := range n.Hosts {
		_ = r.hosts.add(h) // checked by the API; what it lets through and we do not, matches nothing
	}
	for _, h := range n.Servers {
		_ = r.servers.addPlace(h) // an address matches nothing
	}
	return r
}

// allows reports whether limited networking names p.
func (r *rules) allows(p place) bool {
	return r.hosts.has(p) || r.servers.has(p) || r.network.PackageManagers && r.packages.has(p)
}

// private reports whether p may have a private address: the environment names
// this very host. What a wildcard, the agent's own list of servers or a list of
// ours lets through could be anybody's name for a machine next to us.
func (r *rules) private(p place) bool {
	return !r.network.Unrestricted && r.hosts.names[p.host] && r.hosts.has(p)
}

// deny returns why p may not be reached, with the way out; nil when it may.
func (r *rules) deny(p place) *denial {
	if p.host == RepositoryHost {
		return nil // served here, see egress_git.go
	}
	if r.network.Unrestricted || r.allows(p) {
		return nil
	}
	why, mend := "no allowed host of the environment names it", fmt.Sprintf("add %q to the environment's networking.allowed_hosts", p.host)
	known := place{host: p.host, port: portHTTPS, literal: p.literal}
	switch {
	case p.literal:
		why, mend = "limited networking reaches hosts by name, not by address", "use its name, and add that to the environment's networking.allowed_hosts"
	case r.allows(known):
		why, mend = "limited networking reaches ports 80 and 443 only", "use one of these, or an environment with networking unrestricted"
	case r.packages.has(p):
		mend += ", or set networking.allow_package_managers"
	}
	return &denial{status: 403, reason: "Host not allowed by the environment", token: "http_request_denied",
		text: fmt.Sprintf("%s is not reachable from this sandbox: its environment's networking is limited, and %s.\nWay out: %s.", p, why, mend)}
}
