package vault

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"io"
	"log/slog"
)

// Redacted is what a secret looks like everywhere but to Reveal.
const Redacted = "REDACTED"

// Secret is a credential in clear. However it is printed, logged or marshalled
// it reads REDACTED; Reveal alone gives it away, so a search for Reveal finds
// every place that handles plaintext.
//
// The bytes sit behind a closure. fmt, reflection-based dumpers and encoders
// cannot look into one, not even where a Secret is an unexported field, whose
// methods they may not call. It also makes == a compile error: use Equal.
//
// The zero value is the empty secret. Values may be copied and shared.
type Secret struct {
	reveal func() string
}

// NewSecret keeps s.
func NewSecret(s string) Secret {
	return Secret{reveal: func() string { return s }}
}

// Reveal returns the plaintext. Hand it to the one call that needs it; do not
// keep it.
func (s Secret) Reveal() string {
	if s.reveal == nil {
		return ""
	}
	return s.reveal()
}

// Empty reports whether there is nothing to keep.
func (s Secret) Empty() bool { return s.Reveal() == "" }

// Equal compares in a time that depends on neither contents nor position of
// the first difference.
func (s Secret) Equal(o Secret) bool {
	a, b := sha256.Sum256([]byte(s.Reveal())), sha256.Sum256([]byte(o.Reveal()))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// Format implements fmt.Formatter: every verb and flag prints REDACTED.
func (s Secret) Format(f fmt.State, verb rune) { _, _ = io.WriteString(f, Redacted) }

// String implements fmt.Stringer.
func (s Secret) String() string { return Redacted }

// GoString implements fmt.GoStringer.
func (s Secret) GoString() string { return Redacted }

// LogValue implements slog.LogValuer.
func (s Secret) LogValue() slog.Value { return slog.StringValue(Redacted) }

// MarshalText implements encoding.TextMarshaler (XML, maps, flags).
func (s Secret) MarshalText() ([]byte, error) { return []byte(Redacted), nil }

// MarshalJSON implements json.Marshaler.
func (s Secret) MarshalJSON() ([]byte, error) { return []byte(`"` + Redacted + `"`), nil }

// MarshalYAML implements the Marshaler of the YAML packages.
func (s Secret) MarshalYAML() (any, error) { return Redacted, nil }

// MarshalBinary implements encoding.BinaryMarshaler.
func (s Secret) MarshalBinary() ([]byte, error) { return []byte(Redacted), nil }

// GobEncode implements gob.GobEncoder.
func (s Secret) GobEncode() ([]byte, error) { return []byte(Redacted), nil }
