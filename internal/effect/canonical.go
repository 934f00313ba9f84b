package effect

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/jsonschema-go/jsonschema"
)

// Bounds of arguments. What passes one of them is refused before it is hashed.
const (
	// MaxArguments is the largest text of one call's arguments: a file written
	// by a tool fits, a flood does not.
	MaxArguments = 8 << 20
	// MaxDepth is how deep arguments may nest; deeper ones serve only to
	// exhaust a parser's stack.
	MaxDepth = 64
	// MaxSchema is the largest input schema that is used for validation.
	MaxSchema = 256 << 10
	// SchemaTime is how long one validation may take. Patterns are RE2 and
	// linear, but references can multiply.
	SchemaTime = 2 * time.Second
	// maxSafe is 2^53: beyond it different integers share one float64, and two
	// calls would share one digest (trap P9).
	maxSafe = 1 << 53
)

// ArgumentError says why the arguments of a call were refused. The text goes
// to the model.
type ArgumentError struct{ Reason string }

func (e *ArgumentError) Error() string { return "arguments: " + e.Reason }

func refuse(format string, a ...any) error {
	return &ArgumentError{Reason: fmt.Sprintf(format, a...)}
}

// Canonical reads the arguments of a call strictly, once, and returns them in
// the form of RFC 8785. Everything later uses these bytes, and they are what is
// sent. Refused with *ArgumentError: what is not one JSON object, duplicate
// keys and keys that differ only in case, invalid UTF-8, lone surrogates, NUL,
// numbers beyond 2^53, what passes a bound. Empty text and null are {}.
func Canonical(raw []byte) (json.RawMessage, error) {
	if len(raw) > MaxArguments {
		return nil, refuse("%d bytes are more than the %d allowed", len(raw), MaxArguments)
	}
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return json.RawMessage("{}"), nil
	}
	if raw[0] != '{' {
		return nil, refuse("must be a JSON object")
	}
	if err := scan(raw); err != nil {
		return nil, err
	}
	v := jsontext.Value(bytes.Clone(raw))
	if err := v.Canonicalize(); err != nil {
		return nil, refuse("%v", err)
	}
	return json.RawMessage(v), nil
}

// scan checks every token of raw before anything is made of it.
func scan(raw []byte) error {
	dec := jsontext.NewDecoder(bytes.NewReader(raw))
	var names []map[string]string // per open object: folded key to key
	for {
		// The kind of the parent tells a key from a string value.
		parent, n := dec.StackIndex(dec.StackDepth())
		tok, err := dec.ReadToken()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return refuse("not strict JSON: %s", plain(err))
		}
		switch tok.Kind() {
		case '{', '[':
			if dec.StackDepth() > MaxDepth {
				return refuse("nested deeper than %d", MaxDepth)
			}
			names = append(names, nil)
		case '}', ']':
			names = names[:len(names)-1]
			if len(names) == 0 {
				return trailing(dec)
			}
		case '"':
			if err := text(tok.String(), parent == '{' && n%2 == 0, names); err != nil {
				return err
			}
		case '0':
			if err := number(tok.String()); err != nil {
				return err
			}
		}
	}
}

func trailing(dec *jsontext.Decoder) error {
	if _, err := dec.ReadToken(); !errors.Is(err, io.EOF) {
		return refuse("more than one JSON value")
	}
	return nil
}

// text checks a key or a string value.
func text(s string, key bool, names []map[string]string) error {
	if strings.ContainsRune(s, 0) {
		return refuse("a string holds NUL; encode binary data, for example as base64")
	}
	if !key {
		return nil
	}
	top := len(names) - 1
	if names[top] == nil {
		names[top] = map[string]string{}
	}
	fold := folded(s)
	if other, ok := names[top][fold]; ok {
		return refuse("keys %q and %q differ only in case", other, s)
	}
	names[top][fold] = s
	return nil
}

// folded maps s to one spelling of all that Unicode's simple folding calls
// equal, as lenient readers of JSON do.
func folded(s string) string {
	return strings.Map(func(r rune) rune {
		least := r
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			least = min(least, f)
		}
		return least
	}, s)
}

// number refuses what a float64 cannot hold apart from its neighbours.
func number(s string) error {
	if !strings.ContainsAny(s, ".eE") {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || n > maxSafe || n < -maxSafe {
			return refuse("the integer %.40s is beyond 2^53 and would lose digits: pass it as a string", s)
		}
		return nil
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || math.Abs(f) >= maxSafe {
		return refuse("the number %.40s is beyond 2^53 and would lose digits: pass it as a string", s)
	}
	return nil
}

// plain is the text of a JSON error without its package's name.
func plain(err error) string {
	return strings.TrimPrefix(strings.TrimPrefix(err.Error(), "jsontext: "), "json: ")
}

// CheckSchema validates canonical arguments against a tool's input schema.
// Nothing is loaded from elsewhere. A schema that cannot be used refuses the
// call: an unknown is a denial. A key that differs from a property of the
// schema only in case is refused, because some executors would take it for
// that property (trap P9).
func CheckSchema(ctx context.Context, schema, arguments json.RawMessage) error {
	if len(schema) == 0 || string(schema) == "null" {
		return nil
	}
	if len(schema) > MaxSchema {
		return refuse("the tool's input schema is larger than %d bytes and cannot be checked", MaxSchema)
	}
	ctx, cancel := context.WithTimeout(ctx, SchemaTime)
	defer cancel()
	done := make(chan error, 1)
	// The validator takes no context. When the time is over the call is refused
	// and the goroutine ends by itself: its work is bounded by the sizes of
	// schema and arguments, though maybe not by our patience.
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- refuse("the tool's input schema cannot be checked")
			}
		}()
		done <- validate(schema, arguments)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return refuse("the tool's input schema could not be checked within %v", SchemaTime)
	}
}

func validate(schema, arguments json.RawMessage) error {
	var s jsonschema.Schema
	if err := json.Unmarshal(schema, &s); err != nil {
		return refuse("the tool's input schema cannot be used: %.200s", err)
	}
	var v map[string]any
	if err := json.Unmarshal(arguments, &v); err != nil {
		return refuse("%.200s", err)
	}
	for key := range v {
		if _, ok := s.Properties[key]; ok {
			continue
		}
		for name := range s.Properties {
			if strings.EqualFold(key, name) {
				return refuse("%q must be written %q", key, name)
			}
		}
	}
	var raw any
	if err := json.Unmarshal(schema, &raw); err != nil {
		return refuse("the tool's input schema cannot be used: %.200s", err)
	}
	if err := checkCost(raw, any(v)); err != nil {
		return err
	}
	resolved, err := s.Resolve(nil)
	if err != nil {
		return refuse("the tool's input schema cannot be used: %.200s", err)
	}
	if err := resolved.Validate(v); err != nil {
		return refuse("do not fit the tool's schema: %.500s", err)
	}
	return nil
}
