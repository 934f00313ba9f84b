package effect

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// Facts fill the templates of a reconcile call.
type Facts struct {
	Arguments  json.RawMessage // canonical, of the effect
	Key        string
	Effect     store.EffectID
	IntendedAt time.Time
}

var placeholder = regexp.MustCompile(`\$\{([^}]*)\}`)

// checkTemplate validates the placeholders in a template of arguments.
func checkTemplate(t json.RawMessage) error {
	var v any
	if err := json.Unmarshal(t, &v); err != nil {
		return err
	}
	if _, ok := v.(map[string]any); !ok {
		return fmt.Errorf("must be an object")
	}
	_, err := fill(v, func(name string) (any, error) {
		if strings.HasPrefix(name, "args.") && len(name) > len("args.") {
			return "", nil
		}
		switch name {
		case "effect.key", "effect.id", "effect.intended_at":
			return "", nil
		}
		return nil, fmt.Errorf("unknown placeholder ${%s}", name)
	})
	return err
}

// Fill fills a template of arguments. A string that is one placeholder takes
// the value as it is; inside a longer string the value is written as text.
// ${args.NAME} of an argument that the call did not have is an error: a probe
// about something else proves nothing.
func Fill(t json.RawMessage, f Facts) (json.RawMessage, error) {
	var v any
	if len(t) == 0 {
		return json.RawMessage("{}"), nil
	}
	if err := json.Unmarshal(t, &v); err != nil {
		return nil, fmt.Errorf("fill template: %w", err)
	}
	var args map[string]any
	if err := json.Unmarshal(f.Arguments, &args); err != nil {
		return nil, fmt.Errorf("fill template: %w", err)
	}
	v, err := fill(v, func(name string) (any, error) {
		if arg, ok := strings.CutPrefix(name, "args."); ok {
			val, ok := args[arg]
			if !ok {
				return nil, fmt.Errorf("fill template: the call has no argument %q", arg)
			}
			return val, nil
		}
		switch name {
		case "effect.key":
			return f.Key, nil
		case "effect.id":
			return string(f.Effect), nil
		case "effect.intended_at":
			return f.IntendedAt.UTC().Format(time.RFC3339Nano), nil
		}
		return nil, fmt.Errorf("fill template: unknown placeholder ${%s}", name)
	})
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("fill template: %w", err)
	}
	return Canonical(b)
}

func fill(v any, look func(string) (any, error)) (any, error) {
	switch t := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(t))
		for k, e := range t {
			f, err := fill(e, look)
			if err != nil {
				return nil, err
			}
			out[k] = f
		}
		return out, nil
	case []any:
		out := make([]any, len(t))
		for i, e := range t {
			f, err := fill(e, look)
			if err != nil {
				return nil, err
			}
			out[i] = f
		}
		return out, nil
	case string:
		return fillText(t, look)
	}
	return v, nil
}

func fillText(s string, look func(string) (any, error)) (any, error) {
	m := placeholder.FindStringSubmatchIndex(s)
	if m == nil {
		return s, nil
	}
	if m[0] == 0 && m[1] == len(s) {
		return look(s[m[2]:m[3]])
	}
	var failed error
	out := placeholder.ReplaceAllStringFunc(s, func(p string) string {
		v, err := look(p[2 : len(p)-1])
		if err != nil {
			failed = err
			return ""
		}
		if text, ok := v.(string); ok {
			return text
		}
		b, err := json.Marshal(v)
		if err != nil {
			failed = err
		}
		return string(b)
	})
	return out, failed
}
