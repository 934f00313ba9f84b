package keeper_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/keeper"
)

// Attacks N1, N3, N4, trap P10: what is refused, with and without an
// operator's word. Nothing is dialled but by the function given.
func TestGuard(t *testing.T) {
	dialled := ""
	dial := keeper.Guard(func(_ context.Context, _, addr string) (net.Conn, error) {
		dialled = addr
		return nil, errors.New("dialled")
	}, []string{"127.0.0.1:4747", "[::]:9000", ":9100", "localhost:9200"})
	const public, private, never = 0, 1, 2
	for addr, want := range map[string]int{
		"8.8.8.8:443":                   public,
		"[2606:4700:4700::1111]:443":    public,
		"127.0.0.1:80":                  private,
		"localhost:80":                  private,
		"10.1.2.3:80":                   private,
		"192.168.1.1:8080":              private,
		"172.16.0.1:80":                 private,
		"100.64.0.1:80":                 private,
		"[::1]:80":                      private,
		"[::ffff:127.0.0.1]:80":         private,
		"[fc00::1]:80":                  private,
		"169.254.169.254:80":            never,
		"169.254.170.2:80":              never,
		"168.63.129.16:80":              never,
		"100.100.100.200:80":            never,
		"[fd00:ec2::254]:80":            never,
		"[::ffff:a9fe:a9fe]:80":         never,
		"[64:ff9b::a9fe:a9fe]:80":       never,
		"[2002:a9fe:a9fe::1]:80":        never,
		"[2001:0:0:0:0:0:5601:5601]:80": never, // Teredo carries the address inverted
		"[::a9fe:a9fe]:80":              never,
		"[fe80::1]:80":                  never,
		"0.0.0.0:80":                    never,
		"[::]:80":                       never,
		"127.0.0.1:4747":                never,
		"[::ffff:127.0.0.1]:4747":       never,
		"127.0.0.1:04747":               never,
		"8.8.8.8:domain":                never,
		"[::1]:9000":                    never,
		"127.0.0.1:9100":                never,
		"127.0.0.1:9200":                never,
		"[64:ff9b::7f00:1]:4747":        never,
		"255.255.255.255:80":            never,
		"224.0.0.1:80":                  never,
	} {
		for _, operator := range []bool{false, true} {
			ctx := t.Context()
			if operator {
				ctx = keeper.Private(ctx)
			}
			dialled = ""
			_, err := dial(ctx, "tcp", addr)
			allowed := want == public || want == private && operator
			if allowed != (dialled != "") || allowed == errors.Is(err, keeper.ErrForbidden) {
				t.Errorf("%s, operator %v: dialled %q, error %v; want allowed %v", addr, operator, dialled, err, allowed)
			}
			if host, _, _ := net.SplitHostPort(dialled); dialled != "" && net.ParseIP(host) == nil {
				t.Errorf("%s: next was given the name %q, and would look it up again", addr, dialled)
			}
		}
	}
	// Spellings that a resolver may take for an address either do not resolve or
	// are checked as what they resolve to.
	for _, host := range []string{"2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.169.254.", "0", "127.1"} {
		dialled = ""
		_, _ = dial(t.Context(), "tcp", host+":80")
		if dialled != "" {
			t.Errorf("%s: dialled %s", host, dialled)
		}
	}
}

func TestLiteral(t *testing.T) {
	for host, want := range map[string]bool{
		"example.com": false, "a1.example.com": false, "8.8.8.8": true, "::1": true, "2852039166": true,
		"0xa9fea9fe": true, "127.1": true, "0251.0376.0251.0376": true, "localhost": false, "1.example": false,
	} {
		if got := keeper.Literal(host); got != want {
			t.Errorf("%s: got %v, want %v", host, got, want)
		}
	}
}

// Attack M10.
func TestPlain(t *testing.T) {
	for in, want := range map[string]string{
		"plain text\twith\nlines, ünïcödé, 👩‍👩‍👧 and ❤️": "plain text\twith\nlines, ünïcödé, 👩‍👩‍👧 and ❤️",
		"a\x1b[1;31mb\x1b[0m":              "ab",
		"a\x1b]8;;http://evil\x1b\\b":      "ab",
		"a\x1b]0;t\x07b":                   "ab",
		"a\u009b31mb":                      "ab",
		"a\x1bPq\x1b\\b":                   "ab",
		"a\x1b(Bb":                         "ab",
		"a\x00b\x08c\rd\x7fe":              "abcde",
		"a\u202eb\u2066c\u2069":            "abc",
		"a\u200bb\ufeffc\u00add\u2060":     "abcd",
		"a\U000E0061\U000E007F\U000E0100b": "ab",
		"a\x1b":                            "a",
		"a\x1b]0;t\nb":                     "a\nb", // one without an end hides no further line
		"a\x1bPq\n\nb\x1b\\c":              "a\n\nbc",
		"a\u0090b\nexit code 3":            "a\nexit code 3",
		"bad\xffutf":                       "bad\uFFFDutf",
	} {
		if got := keeper.Plain(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func FuzzPlain(f *testing.F) {
	f.Add("a\x1b[1;31mb\u202e")
	f.Add("\x1b]\x1b]\x07\x07")
	f.Fuzz(func(t *testing.T, s string) {
		out := keeper.Plain(s)
		if strings.ContainsFunc(out, keeper.Hidden) {
			t.Errorf("%q: %q still hides something", s, out)
		}
		if keeper.Plain(out) != out {
			t.Errorf("%q: not stable", s)
		}
	})
}
