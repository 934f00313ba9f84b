package api

import (
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// Optional tells the three things apart that a field of an update can be:
// omitted (the zero value; keep), null (clear) and a value (replace). Use it
// with the option omitzero.
type Optional[T any] struct {
	set, null bool
	value     T
}

// Some is a field with a value.
func Some[T any](v T) Optional[T] { return Optional[T]{set: true, value: v} }

// Null is a field that is explicitly null.
func Null[T any]() Optional[T] { return Optional[T]{set: true, null: true} }

// IsZero reports whether the field was omitted.
func (o Optional[T]) IsZero() bool { return !o.set }

// IsSet reports whether the field was present, null included.
func (o Optional[T]) IsSet() bool { return o.set }

// IsNull reports whether the field was present and null.
func (o Optional[T]) IsNull() bool { return o.null }

// Get returns the value, and whether there is one that is not null.
func (o Optional[T]) Get() (T, bool) { return o.value, o.set && !o.null }

// MarshalJSON writes the value, or null.
func (o Optional[T]) MarshalJSON() ([]byte, error) {
	if !o.set || o.null {
		return []byte("null"), nil
	}
	return Encode(o.value)
}

// UnmarshalJSON notes that the field was there.
func (o *Optional[T]) UnmarshalJSON(data []byte) error {
	*o = Optional[T]{set: true}
	if isNull(data) {
		o.null = true
		return nil
	}
	return unmarshal(data, &o.value)
}

// UnmarshalJSONFrom is UnmarshalJSON that keeps the options of the caller, so
// that strictness reaches the value.
func (o *Optional[T]) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	*o = Optional[T]{set: true}
	if dec.PeekKind() == 'n' {
		o.null = true
		_, err := dec.ReadToken()
		return err
	}
	return jsonv2.UnmarshalDecode(dec, &o.value)
}

// TimeFormat is the one form of times on the wire: UTC, microseconds.
const TimeFormat = "2006-01-02T15:04:05.000000Z"

// Time is a time on the wire. Nullable ones are *Time.
type Time struct{ time.Time }

// At makes a wire time: UTC, cut to microseconds.
func At(t time.Time) Time { return Time{t.UTC().Truncate(time.Microsecond)} }

// AtOrNull is At, and nil for the zero time.
func AtOrNull(t time.Time) *Time {
	if t.IsZero() {
		return nil
	}
	v := At(t)
	return &v
}

// String is the wire form.
func (t Time) String() string { return t.UTC().Format(TimeFormat) }

// MarshalJSON writes the wire form.
func (t Time) MarshalJSON() ([]byte, error) { return []byte(`"` + t.String() + `"`), nil }

// UnmarshalJSON reads any RFC 3339 time.
func (t *Time) UnmarshalJSON(data []byte) error {
	if isNull(data) {
		*t = Time{}
		return nil
	}
	var s string
	if err := unmarshal(data, &s); err != nil {
		return err
	}
	v, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return badField("", "must be an RFC 3339 time such as 2026-11-29T15:14:05Z, got %q", short(s))
	}
	*t = At(v)
	return nil
}
