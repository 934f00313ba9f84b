package tool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
)

// checked makes a tool's check: the input is decoded into the tool's own type,
// with errors that name the field, then the rules of the tool are applied.
func checked[T any](rules func(T) error) func(json.RawMessage) error {
	return func(input json.RawMessage) error {
		var in T
		if err := decode(input, &in); err != nil {
			return err
		}
		return rules(in)
	}
}

// decode reads an input strictly: a field that the tool does not have would be
// passed over, and the model would think that it worked.
func decode(input json.RawMessage, in any) error {
	if len(bytes.TrimSpace(input)) == 0 {
		input = json.RawMessage("{}")
	}
	known := fields(reflect.TypeOf(in).Elem())
	var given map[string]json.RawMessage
	if err := json.Unmarshal(input, &given); err != nil || given == nil {
		return errors.New("the input must be a JSON object")
	}
	for name := range given {
		if !slices.Contains(known, name) {
			return fmt.Errorf("%s is no field of this tool; it takes %s", short(name), strings.Join(known, ", "))
		}
	}
	d := json.NewDecoder(bytes.NewReader(input))
	err := d.Decode(in)
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong):
		return fmt.Errorf("%s must be %s, not %s", wrong.Field, kind(wrong.Type), wrong.Value)
	case err != nil:
		return fmt.Errorf("the input is not valid: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("the input must be one JSON object")
	}
	return nil
}

// fields lists the JSON names of a struct, in order.
func fields(t reflect.Type) (names []string) {
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}

// kind says in words what a field takes.
func kind(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Pointer:
		return kind(t.Elem())
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Slice:
		return "a list"
	}
	return "a string"
}

// short keeps a name from filling the answer.
func short(s string) string {
	if r := []rune(s); len(r) > 60 {
		return string(r[:60]) + "…"
	}
	return s
}

// maxPath is the longest path that Linux takes, in bytes.
const maxPath = 4096

// checkPath refuses what can be no path inside.
func checkPath(field, p string) error {
	switch {
	case strings.ContainsRune(p, 0):
		return fmt.Errorf("%s contains a zero byte", field)
	case len(p) >= maxPath:
		return fmt.Errorf("%s has %d bytes; a path has fewer than %d", field, len(p), maxPath)
	}
	return nil
}

// needPath is checkPath for a field that must be there.
func needPath(field, p string) error {
	if p == "" {
		return fmt.Errorf("%s is missing", field)
	}
	return checkPath(field, p)
}

// checkRange checks a view_range.
func checkRange(r []int64) error {
	switch {
	case r == nil:
		return nil
	case len(r) != 2:
		return fmt.Errorf("view_range must have two numbers, [start, end], not %d", len(r))
	case r[0] < 1:
		return fmt.Errorf("view_range starts at %d; lines count from 1", r[0])
	case r[1] > 0 && r[1] < r[0]:
		return fmt.Errorf("view_range ends at %d, before its start %d; 0 or less means the last line", r[1], r[0])
	case r[0] > math.MaxInt32 || r[1] > math.MaxInt32:
		return errors.New("view_range is beyond any file that this tool reads")
	}
	return nil
}
