package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"code.dny.dev/ssrf"
)

// DialFunc is the shape of net.Dialer.DialContext.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// ErrForbidden: the address must not be dialled.
var ErrForbidden = errors.New("address is not allowed")

type privateKey struct{}

// Private marks dials under ctx as allowed to reach private and loopback
// addresses: the URL was given by an operator, not by an agent.
func Private(ctx context.Context) context.Context { return context.WithValue(ctx, privateKey{}, true) }

// never lists what no dial may reach, whoever gave the URL: the metadata
// services of clouds (attack N1) and what is no address of a host. The prefix
// of link-local addresses covers 169.254.169.254 and fe80::a9fe:a9fe.
var never = []netip.Prefix{
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("168.63.129.16/32"),   // Azure; not in ssrf's list (trap P10)
	netip.MustParsePrefix("100.100.100.200/32"), // Alibaba Cloud
	netip.MustParsePrefix("192.0.0.192/32"),     // Oracle Cloud
	netip.MustParsePrefix("fd00:ec2::/32"),      // AWS
	netip.MustParsePrefix("fd20:ce::254/128"),   // Google Cloud
	netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("255.255.255.255/32"),
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("ff00::/8"),
}

// inV6 lists prefixes whose addresses carry an IPv4 address, and where
// (attack N4).
var inV6 = []struct {
	prefix netip.Prefix
	at     int
	flip   bool
}{
	{netip.MustParsePrefix("64:ff9b::/96"), 12, false},   // NAT64
	{netip.MustParsePrefix("64:ff9b:1::/48"), 12, false}, // NAT64, local
	{netip.MustParsePrefix("2002::/16"), 2, false},       // 6to4
	{netip.MustParsePrefix("2001::/32"), 12, true},       // Teredo
	{netip.MustParsePrefix("::/96"), 12, false},          // IPv4-compatible
}

// Guard returns the program's one dial function for what agents can steer. It
// resolves a name once, checks every address it would connect to, and passes
// next an address, never a name, so that no second look-up can answer
// differently (attack N3). Metadata addresses and own, the program's listen
// addresses ("host:port"; an empty or unspecified host is every address of this
// machine), are refused always; private, loopback and other special addresses
// unless ctx is Private.
func Guard(next DialFunc, own []string) DialFunc {
	g := &guard{public: ssrf.New(ssrf.WithAnyPort(), ssrf.WithAnyNetwork()), own: own}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, fmt.Errorf("dial %s: %w", addr, err)
		}
		// 04747 is 4747 to a dialer, and must be to the checks.
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("dial %s: %w: its port is no number", addr, ErrForbidden)
		}
		port = strconv.FormatUint(n, 10)
		ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		if err != nil {
			return nil, fmt.Errorf("dial %s: %w", addr, err)
		}
		var last error
		for i, ip := range ips {
			target := net.JoinHostPort(ip.Unmap().String(), port)
			if err := g.check(ctx, ip, port); err != nil {
				last = fmt.Errorf("dial %s (%s): %w", addr, target, err)
				continue
			}
			one, cancel := share(ctx, len(ips)-i)
			c, err := next(one, network, target)
			cancel()
			if err == nil {
				return c, nil
			}
			last = err
		}
		if last == nil {
			last = fmt.Errorf("dial %s: no address", addr)
		}
		return nil, last
	}
}

type guard struct {
	public *ssrf.Guardian
	own    []string
}

func (g *guard) check(ctx context.Context, ip netip.Addr, port string) error {
	if ip.Zone() != "" {
		return fmt.Errorf("%w: it has a zone", ErrForbidden)
	}
	ip = ip.Unmap()
	forms := append([]netip.Addr{ip}, embedded(ip)...)
	for _, f := range forms {
		if slices.ContainsFunc(never, func(p netip.Prefix) bool { return p.Contains(f) }) || f.IsUnspecified() {
			return fmt.Errorf("%w: metadata services and special addresses are never reached", ErrForbidden)
		}
		if g.isOwn(f, port) {
			return fmt.Errorf("%w: it is this server's own", ErrForbidden)
		}
	}
	if ok, _ := ctx.Value(privateKey{}).(bool); ok {
		return nil
	}
	if err := g.public.SafeAddr(ip); err != nil {
		return fmt.Errorf("%w: private and special addresses are reached through a connector, or under --allow-private-networks (from a sandbox: only hosts that its environment's allowed_hosts names)", ErrForbidden)
	}
	return nil
}

// embedded returns the IPv4 address that an IPv6 address carries.
func embedded(ip netip.Addr) []netip.Addr {
	if !ip.Is6() || ip == netip.IPv6Loopback() {
		return nil
	}
	b := ip.As16()
	for _, f := range inV6 {
		if f.prefix.Contains(ip) {
			v4 := [4]byte(b[f.at : f.at+4])
			if f.flip {
				for i := range v4 {
					v4[i] = ^v4[i]
				}
			}
			return []netip.Addr{netip.AddrFrom4(v4)}
		}
	}
	return nil
}

func (g *guard) isOwn(ip netip.Addr, port string) bool {
	for _, own := range g.own {
		host, p, err := net.SplitHostPort(own)
		if err != nil || p != port {
			continue
		}
		addr, err := netip.ParseAddr(host)
		if err == nil && !addr.IsUnspecified() {
			if addr.Unmap() == ip {
				return true
			}
			continue
		}
		if host == "localhost" && ip.IsLoopback() {
			return true
		}
		if (host == "" || err == nil) && isLocal(ip) {
			return true
		}
	}
	return false
}

// isLocal reports whether ip is an address of this machine.
func isLocal(ip netip.Addr) bool {
	if ip.IsLoopback() {
		return true
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return true // not knowing is a refusal
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Unmap() == ip {
			return true
		}
	}
	return false
}
