package effect

import (
	"reflect"
	"strconv"
	"strings"
)

// maxChecks is how many times one validation may apply a schema to a value.
const maxChecks = 200_000

// meter counts what a validation would do before it is done. The validator
// follows references without a limit: one that leads to itself overflows the
// stack, which kills the process, and a chain of doubling ones takes years. A
// schema comes from a server that we do not trust (attack F10).
type meter struct {
	root   any
	known  map[pair]int
	active map[pair]bool
	steps  int
}

// pair is a schema, by the identity of its map, and the place of a value.
type pair struct {
	schema uintptr
	path   string
}

// checkCost refuses a schema that would be too much work on a value, or that
// uses references which the meter cannot follow.
func checkCost(schema, value any) error {
	m := &meter{root: schema, known: map[pair]int{}, active: map[pair]bool{}}
	n, err := m.cost(schema, value, "")
	if err == nil && n > maxChecks {
		err = tooMuch()
	}
	return err
}

func tooMuch() error { return refuse("the tool's input schema is too much work to check") }

func (m *meter) cost(schema, value any, path string) (int, error) {
	s, ok := schema.(map[string]any)
	if !ok {
		return 1, nil
	}
	p := pair{reflect.ValueOf(s).Pointer(), path}
	if n, ok := m.known[p]; ok {
		return n, nil
	}
	if m.active[p] {
		return 0, refuse("the tool's input schema refers to itself without end")
	}
	if m.steps++; m.steps > maxChecks {
		return 0, tooMuch()
	}
	m.active[p] = true
	defer delete(m.active, p)
	total := 1
	add := func(schema, value any, path string) error {
		n, err := m.cost(schema, value, path)
		if total += n; err == nil && total > maxChecks {
			err = tooMuch()
		}
		return err
	}
	if err := m.inPlace(s, value, path, add); err != nil {
		return 0, err
	}
	if err := children(s, value, path, add); err != nil {
		return 0, err
	}
	m.known[p] = total
	return total, nil
}

// inPlace adds the schemas that apply to the same value.
func (m *meter) inPlace(s map[string]any, value any, path string, add func(any, any, string) error) error {
	for key := range s {
		switch key {
		case "$dynamicRef", "$recursiveRef":
			return refuse("the tool's input schema uses %s, which is not followed", key)
		case "$id", "id":
			if _, text := s[key].(string); text && reflect.ValueOf(s).Pointer() != reflect.ValueOf(m.root).Pointer() {
				return refuse("the tool's input schema has an inner %s, which is not followed", key)
			}
		}
	}
	if ref, ok := s["$ref"].(string); ok {
		target, err := m.follow(ref)
		if err != nil {
			return err
		}
		if err := add(target, value, path); err != nil {
			return err
		}
	}
	for _, key := range []string{"not", "if", "then", "else"} {
		if sub, ok := s[key]; ok {
			if err := add(sub, value, path); err != nil {
				return err
			}
		}
	}
	for _, key := range []string{"allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies"} {
		for _, sub := range values(s[key]) {
			if err := add(sub, value, path); err != nil {
				return err
			}
		}
	}
	return nil
}

// values are the members of a list or of an object.
func values(v any) []any {
	switch v := v.(type) {
	case []any:
		return v
	case map[string]any:
		out := make([]any, 0, len(v))
		for _, x := range v {
			out = append(out, x)
		}
		return out
	}
	return nil
}

// follow resolves "#" and "#/pointer".
func (m *meter) follow(ref string) (any, error) {
	pointer, ok := strings.CutPrefix(ref, "#")
	if !ok || (pointer != "" && pointer[0] != '/') || strings.Contains(pointer, "%") {
		return nil, refuse("the tool's input schema has the reference %.100q, which is not followed", ref)
	}
	target, ok := point(m.root, pointer)
	if !ok {
		return nil, refuse("the tool's input schema has the reference %.100q, which leads nowhere", ref)
	}
	return target, nil
}

// children adds the schemas that apply to parts of the value.
func children(s map[string]any, value any, path string, add func(any, any, string) error) error {
	each := func(sub, part any, name string) error {
		if sub == nil {
			return nil
		}
		return add(sub, part, path+"/"+name)
	}
	switch v := value.(type) {
	case map[string]any:
		properties, _ := s["properties"].(map[string]any)
		for name, part := range v {
			subs := append([]any{properties[name], s["additionalProperties"], s["unevaluatedProperties"]}, values(s["patternProperties"])...)
			for _, sub := range subs {
				if err := each(sub, part, name); err != nil {
					return err
				}
			}
			if err := each(s["propertyNames"], name, name+"\x00"); err != nil {
				return err
			}
		}
	case []any:
		for i, part := range v {
			subs := []any{s["additionalItems"], s["unevaluatedItems"], s["contains"]}
			for _, key := range []string{"items", "prefixItems"} {
				if list, ok := s[key].([]any); !ok {
					subs = append(subs, s[key])
				} else if i < len(list) {
					subs = append(subs, list[i])
				}
			}
			for _, sub := range subs {
				if err := each(sub, part, strconv.Itoa(i)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
