package vault_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/vault"
)

// TestK5Header: attack K5, trap P8.
func TestK5Header(t *testing.T) {
	tests := []struct {
		name  string
		check func(string) error
		in    string
		ok    bool
	}{
		{"value", vault.CheckHeaderValue, "Bearer abc.DEF-123_~+/=", true},
		{"value", vault.CheckHeaderValue, "a\tb", true},
		{"value", vault.CheckHeaderValue, "", false},
		{"value", vault.CheckHeaderValue, "abc\r\nX-Evil: 1", false},
		{"value", vault.CheckHeaderValue, "abc\n", false},
		{"value", vault.CheckHeaderValue, "abc\r", false},
		{"value", vault.CheckHeaderValue, "a\x00b", false},
		{"value", vault.CheckHeaderValue, "a\x7fb", false},
		{"value", vault.CheckHeaderValue, "a\u2028b", false},
		{"value", vault.CheckHeaderValue, "caf\u00e9", false},
		{"value", vault.CheckHeaderValue, "a\xe9b", false},
		{"value", vault.CheckHeaderValue, " abc", false},
		{"value", vault.CheckHeaderValue, "abc\t", false},
		{"name", vault.CheckHeaderName, "X-Api-Key", true},
		{"name", vault.CheckHeaderName, "", false},
		{"name", vault.CheckHeaderName, "X Api", false},
		{"name", vault.CheckHeaderName, "X:Api", false},
		{"name", vault.CheckHeaderName, "X\r\nApi", false},
		{"host", vault.CheckHost, "api.example.com:8443", true},
		{"host", vault.CheckHost, "[::1]:80", true},
		{"host", vault.CheckHost, "", false},
		{"host", vault.CheckHost, "exa mple", false},
		{"host", vault.CheckHost, "exa\r\nmple", false},
		{"host", vault.CheckHost, "user@host", false},
		{"host", vault.CheckHost, "host/path", false},
	}
	for _, tt := range tests {
		err := tt.check(tt.in)
		if (err == nil) != tt.ok || err != nil && !errors.Is(err, vault.ErrHeader) {
			t.Errorf("%s %q: %v, want ok %v", tt.name, tt.in, err, tt.ok)
		}
		if err != nil && len(tt.in) > 2 && strings.Contains(err.Error(), tt.in) {
			t.Errorf("error repeats the %s: %v", tt.name, err)
		}
	}
}
