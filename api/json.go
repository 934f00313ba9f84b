package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// Decode reads one JSON value into a request or an object of the Managed
// Agents API. Fields that it does not know are ignored. The error is an *Error
// with status 400 that names the place by its path.
func Decode(data []byte, into any) error {
	return decode(data, into)
}

// DecodeStrict is Decode for objects of our own: an unknown field is an error
// with its path, and so is a field whose time has not come.
func DecodeStrict(data []byte, into any) error {
	return decode(data, into, rejectUnknown)
}

// Encode writes a value as the API does: maps in the order of their keys,
// empty lists and maps instead of null, no HTML escapes. What a model or a
// target said never makes it fail: bytes that are not UTF-8 become U+FFFD, and
// raw JSON may hold a name twice.
func Encode(v any) ([]byte, error) {
	return jsonv2.Marshal(v, jsonv2.Deterministic(true), lenient)
}

// lenient is for text that is ours already, or that a strict reader has passed.
var lenient = jsonv2.JoinOptions(jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))

// rejectUnknown refuses fields that the object does not have.
var rejectUnknown = jsonv2.RejectUnknownMembers(true)

// laterFields is implemented by objects that know fields of a later version.
type laterFields interface {
	// later says whether the unknown field at this path is a known one whose
	// time has not come.
	later(path []string) bool
}

func decode(data []byte, into any, opts ...jsonv2.Options) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return Invalid("", "the request body is empty; send a JSON object")
	}
	err := jsonv2.Unmarshal(data, into, opts...)
	if err == nil {
		return nil
	}
	fe := locate(err)
	if l, ok := into.(laterFields); ok && fe.unknown && l.later(fe.path) {
		return Invalid(joinPath(fe.path), "this field is not supported yet by this version; leave it out")
	}
	return Invalid(joinPath(fe.path), "%s", fe.text)
}

// fieldError says what is wrong with one place of a JSON text.
type fieldError struct {
	path    []string // names, and "[n]" for array elements
	text    string
	unknown bool // the place is a name that the object does not have
}

func (e *fieldError) Error() string {
	if len(e.path) == 0 {
		return e.text
	}
	return joinPath(e.path) + ": " + e.text
}

func badField(path, format string, args ...any) error {
	e := &fieldError{text: fmt.Sprintf(format, args...)}
	if path != "" {
		e.path = []string{path}
	}
	return e
}

// unmarshal is what every UnmarshalJSON here uses, so that the path survives
// nesting. It is lenient: where text comes from outside, decode reads the whole
// of it strictly first.
func unmarshal(data []byte, into any, opts ...jsonv2.Options) error {
	if err := jsonv2.Unmarshal(data, into, append(opts, lenient)...); err != nil {
		return locate(err)
	}
	return nil
}

// locate turns an error of the JSON library into a *fieldError.
func locate(err error) *fieldError {
	var sem *jsonv2.SemanticError
	if errors.As(err, &sem) {
		path := pointerPath(sem.JSONPointer)
		var inner *fieldError
		switch {
		case errors.As(sem.Err, &inner):
			return &fieldError{path: append(path, inner.path...), text: inner.text, unknown: inner.unknown}
		case errors.Is(sem.Err, jsonv2.ErrUnknownName):
			return &fieldError{path: path, text: "unknown field", unknown: true}
		}
		return &fieldError{path: path, text: "must be " + goTypeWord(sem.GoType) + ", got " + kindWord(sem.JSONKind)}
	}
	var syn *jsontext.SyntacticError
	if errors.As(err, &syn) {
		path := pointerPath(syn.JSONPointer)
		switch {
		case errors.Is(syn.Err, jsontext.ErrDuplicateName):
			return &fieldError{path: path, text: "the name appears twice in one object; send it once"}
		case syn.Err != nil && strings.Contains(syn.Err.Error(), "surrogate"):
			return &fieldError{path: path, text: "holds a lone surrogate escape; send text as valid Unicode"}
		case syn.Err != nil && strings.Contains(syn.Err.Error(), "UTF-8"):
			return &fieldError{path: path, text: "holds bytes that are not valid UTF-8; send text as UTF-8"}
		}
		return &fieldError{path: path, text: fmt.Sprintf("not valid JSON at byte %d: %v", syn.ByteOffset, syn.Err)}
	}
	var inner *fieldError
	if errors.As(err, &inner) {
		return inner
	}
	return &fieldError{text: "not valid JSON: " + err.Error()}
}

func pointerPath(p jsontext.Pointer) []string {
	var path []string
	for tok := range p.Tokens() {
		if n, err := strconv.Atoi(tok); err == nil && n >= 0 {
			tok = "[" + tok + "]"
		}
		path = append(path, tok)
	}
	return path
}

// joinPath writes a path as people do: tools[2].configs[0].name.
func joinPath(path []string) string {
	var b strings.Builder
	for i, p := range path {
		if i > 0 && !strings.HasPrefix(p, "[") {
			b.WriteByte('.')
		}
		b.WriteString(p)
	}
	return b.String()
}

func kindWord(k jsontext.Kind) string {
	switch k {
	case 'n':
		return "null"
	case 't', 'f':
		return "a boolean"
	case '"':
		return "a string"
	case '0':
		return "a number"
	case '{':
		return "an object"
	case '[':
		return "an array"
	}
	return "something else"
}

func goTypeWord(t reflect.Type) string {
	if t == nil {
		return "another type"
	}
	switch t.Kind() {
	case reflect.Pointer:
		return goTypeWord(t.Elem())
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "a boolean"
	case reflect.Int, reflect.Int32, reflect.Int64:
		return "an integer"
	case reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		return "an array"
	case reflect.Map, reflect.Struct:
		return "an object"
	}
	return "another type"
}

// isNull reports whether raw JSON is absent or null.
func isNull(raw json.RawMessage) bool {
	t := bytes.TrimSpace(raw)
	return len(t) == 0 || string(t) == "null"
}

// firstByte is the first byte of a JSON value, 0 when there is none.
func firstByte(data []byte) byte {
	if t := bytes.TrimSpace(data); len(t) > 0 {
		return t[0]
	}
	return 0
}

// sameJSON reports whether two values encode to the same text.
func sameJSON(a, b any) bool {
	x, errX := canonical(a)
	y, errY := canonical(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

func canonical(v any) ([]byte, error) {
	b, err := Encode(v)
	if err != nil {
		return nil, err
	}
	val := jsontext.Value(b) // numbers stay as they are written
	if err := val.Format(jsontext.ReorderRawObjects(true), lenient); err != nil {
		return nil, err
	}
	return val, nil
}

// List is an array that is never null on the wire.
type List[T any] []T

// MarshalJSON writes an empty list as [].
func (l List[T]) MarshalJSON() ([]byte, error) {
	if l == nil {
		return []byte("[]"), nil
	}
	return Encode([]T(l))
}

// Metadata is a map of a user's own strings; never null on the wire.
type Metadata map[string]string

// MarshalJSON writes an empty map as {}.
func (m Metadata) MarshalJSON() ([]byte, error) {
	if m == nil {
		return []byte("{}"), nil
	}
	return Encode(map[string]string(m))
}

// Limits of metadata (reference section 1.8).
const (
	MaxMetadataPairs = 16
	MaxMetadataKey   = 64
	MaxMetadataValue = 512
)

func validateMetadata(path string, m map[string]string) error {
	if len(m) > MaxMetadataPairs {
		return Invalid(path, "holds %d pairs; at most %d are allowed", len(m), MaxMetadataPairs).withCode("invalid_metadata")
	}
	for _, k := range sortedKeys(m) {
		if k == "" || runes(k) > MaxMetadataKey {
			return Invalid(path, "key %q must have 1 to %d characters", short(k), MaxMetadataKey).withCode("invalid_metadata")
		}
		if runes(m[k]) > MaxMetadataValue {
			return Invalid(path+"."+k, "must have at most %d characters", MaxMetadataValue).withCode("invalid_metadata")
		}
	}
	return nil
}

// MetadataPatch changes metadata key by key: a nil value deletes the key.
type MetadataPatch map[string]*string

// apply returns a patched copy. emptyDeletes makes an empty value delete its
// key too (environments, reference section 4.3).
func (p MetadataPatch) apply(m Metadata, emptyDeletes bool) Metadata {
	out := make(Metadata, len(m)+len(p))
	for k, v := range m {
		out[k] = v
	}
	for k, v := range p {
		if v == nil || emptyDeletes && *v == "" {
			delete(out, k)
		} else {
			out[k] = *v
		}
	}
	return out
}
