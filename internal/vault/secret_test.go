package vault_test

import (
	"bytes"
	"encoding"
	"encoding/gob"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"strings"
	"testing"

	jsonv2 "github.com/go-json-experiment/json"
	"go.yaml.in/yaml/v3"

	"github.com/planaria/planaria/internal/vault"
)

const canary = "sk-canary-9f8e7d6c5b4a"

// holder keeps a secret in every way a struct can.
type holder struct {
	Open   vault.Secret            `json:"open" yaml:"open" xml:"open"`
	Ptr    *vault.Secret           `json:"ptr" yaml:"ptr" xml:"ptr"`
	Slice  []vault.Secret          `json:"slice" yaml:"slice" xml:"slice"`
	ByName map[string]vault.Secret `json:"by_name" yaml:"by_name" xml:"-"`
	hidden vault.Secret
	deep   struct{ secret vault.Secret }
}

// TestRedacted goes through every route by which a value becomes bytes (law L6).
func TestRedacted(t *testing.T) {
	s := vault.NewSecret(canary)
	h := holder{Open: s, Ptr: &s, Slice: []vault.Secret{s}, ByName: map[string]vault.Secret{"a": s}, hidden: s}
	h.deep.secret = s
	nested := h
	nested.ByName = nil // XML has no maps

	must := func(b []byte, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	logs := func(f func(slog.Handler)) string {
		var b bytes.Buffer
		f(slog.NewTextHandler(&b, nil))
		f(slog.NewJSONHandler(&b, nil))
		return b.String()
	}
	plainLog := func() string {
		var b bytes.Buffer
		log.New(&b, "", 0).Println(s, h, &h)
		return b.String()
	}
	gobbed := func() string {
		var b bytes.Buffer
		if err := gob.NewEncoder(&b).Encode(struct{ S vault.Secret }{s}); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	got := map[string]string{
		"Sprint":   fmt.Sprint(s, h, &h),
		"errors":   errors.Join(fmt.Errorf("send %v: %w", s, errors.New("cut"))).Error(),
		"json":     must(json.Marshal(h)),
		"json v2":  must(jsonv2.Marshal(h)),
		"yaml":     must(yaml.Marshal(h)),
		"xml":      must(xml.Marshal(nested)),
		"gob":      gobbed(),
		"text":     must(encoding.TextMarshaler(s).MarshalText()),
		"binary":   must(encoding.BinaryMarshaler(s).MarshalBinary()),
		"String":   s.String(),
		"GoString": s.GoString(),
		"log":      plainLog(),
		"slog": logs(func(hd slog.Handler) {
			slog.New(hd).With("with", s).WithGroup("g").Info("m", "s", s, "h", h, "p", &h, slog.Group("g", "s", s))
		}),
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "% x", "%d", "%T", "%p", "%08.3f", "%!", "%c", "%U", "%t"} {
		got["secret "+verb] = fmt.Sprintf(verb, s)
		got["pointer "+verb] = fmt.Sprintf(verb, &s)
		got["struct "+verb] = fmt.Sprintf(verb, h)
		got["struct pointer "+verb] = fmt.Sprintf(verb, &h)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
		if g := fmt.Sprintf(verb, s); g != vault.Redacted {
			t.Errorf("Sprintf(%s) = %q, want %s", verb, g, vault.Redacted)
		}
	}
	for _, name := range []string{"Sprint", "errors", "json", "json v2", "yaml", "xml", "gob", "text", "binary", "String", "GoString", "log", "slog"} {
		if !strings.Contains(got[name], vault.Redacted) {
			t.Errorf("%s = %q does not say %s", name, got[name], vault.Redacted)
		}
	}
	forms := []string{canary, fmt.Sprintf("%x", canary), fmt.Sprintf("%X", canary), fmt.Sprintf("% x", canary), fmt.Sprintf("%v", []byte(canary)), "canary"}
	for name, text := range got {
		for _, f := range forms {
			if strings.Contains(text, f) {
				t.Errorf("%s shows the secret: %s", name, text)
			}
		}
	}
}

func TestSecretEqual(t *testing.T) {
	var zero vault.Secret
	tests := []struct {
		a, b vault.Secret
		want bool
	}{
		{vault.NewSecret("a"), vault.NewSecret("a"), true},
		{vault.NewSecret("a"), vault.NewSecret("b"), false},
		{vault.NewSecret("a"), vault.NewSecret("aa"), false},
		{zero, vault.NewSecret(""), true},
		{zero, vault.NewSecret("a"), false},
	}
	for i, tt := range tests {
		if got := tt.a.Equal(tt.b); got != tt.want {
			t.Errorf("case %d: Equal = %v, want %v", i, got, tt.want)
		}
	}
	if !zero.Empty() || vault.NewSecret("a").Empty() {
		t.Error("Empty is wrong")
	}
	if got := vault.NewSecret(canary).Reveal(); got != canary {
		t.Errorf("Reveal = %q", got)
	}
}
