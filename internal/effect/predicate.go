package effect

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// Predicate is one test on a tool's answer: {"pointer": "/status", "equals":
// v}, or with in, exists or matches instead of equals; or {"is_error": true}.
// The pointer reads structuredContent, else the first text block as JSON.
type Predicate struct {
	Pointer *string           `json:"pointer,omitempty"`
	Equals  json.RawMessage   `json:"equals,omitempty"`
	In      []json.RawMessage `json:"in,omitempty"`
	Exists  *bool             `json:"exists,omitempty"`
	Matches *string           `json:"matches,omitempty"` // RE2, anywhere in the string
	IsError *bool             `json:"is_error,omitempty"`
}

// check validates p; the error says what is wrong, without the field's path.
func (p Predicate) check() error {
	ops := 0
	for _, set := range []bool{p.Equals != nil, p.In != nil, p.Exists != nil, p.Matches != nil} {
		if set {
			ops++
		}
	}
	switch {
	case p.IsError != nil && (p.Pointer != nil || ops > 0):
		return errors.New("is_error stands alone")
	case p.IsError != nil:
		return nil
	case p.Pointer == nil:
		return errors.New("needs pointer or is_error")
	case *p.Pointer != "" && !strings.HasPrefix(*p.Pointer, "/"):
		return errors.New("pointer must be empty or begin with /")
	case ops != 1:
		return errors.New("needs exactly one of equals, in, exists, matches")
	}
	if p.Matches != nil {
		if _, err := regexp.Compile(*p.Matches); err != nil {
			return fmt.Errorf("matches: %w", err)
		}
	}
	return nil
}

// answerDoc is what predicates look at.
type answerDoc struct {
	isError bool
	doc     any
	has     bool
}

// maxPredicateDoc bounds the text block that is read as JSON for predicates.
const maxPredicateDoc = 4 << 20

func readAnswer(result json.RawMessage) answerDoc {
	var r struct {
		Content []struct {
			Type string `json:"type"`
			Text string `json:"text"`
		} `json:"content"`
		Structured json.RawMessage `json:"structuredContent"`
		IsError    bool            `json:"isError"`
	}
	if json.Unmarshal(result, &r) != nil {
		return answerDoc{}
	}
	a := answerDoc{isError: r.IsError}
	if len(r.Structured) > 0 && string(r.Structured) != "null" {
		a.has = json.Unmarshal(r.Structured, &a.doc) == nil
		return a
	}
	for _, b := range r.Content {
		if b.Type == "text" {
			a.has = len(b.Text) <= maxPredicateDoc && json.Unmarshal([]byte(b.Text), &a.doc) == nil
			return a
		}
	}
	return a
}

// Hold reports whether all predicates hold on a tool's answer. None hold when
// the list is empty: nothing proves nothing.
func Hold(ps []Predicate, result json.RawMessage) bool {
	if len(ps) == 0 {
		return false
	}
	a := readAnswer(result)
	// The text of an error proves nothing, unless the list speaks of errors.
	if a.isError && !slices.ContainsFunc(ps, func(p Predicate) bool { return p.IsError != nil }) {
		return false
	}
	for _, p := range ps {
		if !p.holds(a) {
			return false
		}
	}
	return true
}

func (p Predicate) holds(a answerDoc) bool {
	if p.IsError != nil {
		return a.isError == *p.IsError
	}
	if !a.has || p.Pointer == nil {
		return false
	}
	v, ok := point(a.doc, *p.Pointer)
	switch {
	case p.Exists != nil:
		return ok == *p.Exists
	case !ok:
		return false
	case p.Equals != nil:
		return same(v, p.Equals)
	case p.In != nil:
		for _, want := range p.In {
			if same(v, want) {
				return true
			}
		}
		return false
	case p.Matches != nil:
		s, isText := v.(string)
		re, err := regexp.Compile(*p.Matches)
		return isText && err == nil && re.MatchString(s)
	}
	return false
}

// point follows a JSON pointer (RFC 6901).
func point(doc any, pointer string) (any, bool) {
	if pointer == "" {
		return doc, true
	}
	for _, tok := range strings.Split(pointer[1:], "/") {
		tok = strings.ReplaceAll(strings.ReplaceAll(tok, "~1", "/"), "~0", "~")
		switch d := doc.(type) {
		case map[string]any:
			v, ok := d[tok]
			if !ok {
				return nil, false
			}
			doc = v
		case []any:
			i, err := strconv.Atoi(tok)
			if err != nil || i < 0 || i >= len(d) || strconv.Itoa(i) != tok {
				return nil, false
			}
			doc = d[i]
		default:
			return nil, false
		}
	}
	return doc, true
}

// same compares a decoded value with JSON text, whatever its spelling.
func same(v any, want json.RawMessage) bool {
	b, err := json.Marshal(v)
	if err != nil {
		return false
	}
	x, y := jsontext.Value(b), jsontext.Value(append([]byte(nil), want...))
	if x.Canonicalize() != nil || y.Canonicalize() != nil {
		return false
	}
	return string(x) == string(y)
}
