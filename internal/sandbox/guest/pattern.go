//go:build linux

package guest

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// maxAlternatives bounds what the braces of one pattern may come to.
const maxAlternatives = 256

// pattern is a glob pattern: its alternatives, each split at the slashes. **
// as a whole part stands for any number of folders.
type pattern [][]string

// parsePattern reads a pattern: *, ?, [set], [!set], {a,b}, ** and \ to escape.
func parsePattern(text string) (pattern, error) {
	switch {
	case text == "":
		return nil, errors.New("pattern is missing")
	case strings.HasPrefix(text, "/"):
		return nil, errors.New("the pattern must be relative; give the folder as path")
	}
	all, err := expand(text, nil)
	if err != nil {
		return nil, err
	}
	var p pattern
	for _, one := range all {
		var parts []string
		for _, part := range strings.Split(one, "/") {
			switch {
			case part == "" || part == "." || part == "**" && len(parts) > 0 && parts[len(parts)-1] == "**":
				continue
			case part == "..":
				return nil, errors.New("the pattern must not contain ..; give the folder as path")
			}
			if _, err := path.Match(part, ""); err != nil {
				return nil, fmt.Errorf("the part %q of the pattern is not closed", part)
			}
			parts = append(parts, part)
		}
		if len(parts) > 0 {
			p = append(p, parts)
		}
	}
	if len(p) == 0 {
		return nil, errors.New("the pattern names no file")
	}
	return p, nil
}

// expand writes out the alternatives of the braces.
func expand(text string, out []string) ([]string, error) {
	open, commas, end, err := braces(text)
	if err != nil {
		return nil, err
	}
	if open < 0 {
		if len(out) == maxAlternatives {
			return nil, fmt.Errorf("the braces of the pattern come to more than %d alternatives", maxAlternatives)
		}
		return append(out, negated(text)), nil
	}
	from := open + 1
	for _, to := range append(commas, end) {
		if out, err = expand(text[:open]+text[from:to]+text[end+1:], out); err != nil {
			return nil, err
		}
		from = to + 1
	}
	return out, nil
}

// braces finds the first pair of braces and the commas that separate its
// alternatives.
func braces(text string) (open int, commas []int, end int, err error) {
	open = -1
	depth, class := 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\\':
			i++
		case class:
			class = c != ']'
		case c == '[':
			class = true
		case c == '{':
			if depth++; depth == 1 {
				open = i
			}
		case c == ',' && depth == 1:
			commas = append(commas, i)
		case c == '}' && depth > 0:
			if depth--; depth == 0 {
				return open, commas, i, nil
			}
		}
	}
	if depth > 0 {
		return 0, nil, 0, errors.New("a brace of the pattern is not closed")
	}
	return -1, nil, 0, nil
}

// negated writes [!set] as path.Match knows it.
func negated(text string) string {
	var out strings.Builder
	for i := 0; i < len(text); i++ {
		out.WriteByte(text[i])
		switch {
		case text[i] == '\\' && i+1 < len(text):
			i++
			out.WriteByte(text[i])
		case text[i] == '[' && i+1 < len(text) && text[i+1] == '!':
			i++
			out.WriteByte('^')
		}
	}
	return out.String()
}

// state is how far each alternative is matched by the folders on the way down:
// the positions in it that may come next.
type state []map[int]bool

// start is the state before the first name.
func (p pattern) start() state {
	s := make(state, len(p))
	for i := range p {
		s[i] = map[int]bool{}
		p.reach(s, i, 0)
	}
	return s
}

// reach adds a position and those behind any ** that stands for nothing.
func (p pattern) reach(s state, i, pos int) {
	s[i][pos] = true
	if pos < len(p[i]) && p[i][pos] == "**" {
		s[i][pos+1] = true
	}
}

// next is the state after one more name: whether the path up to it matches, and
// whether anything below it can.
func (p pattern) next(s state, name string) (n state, match, below bool) {
	n = make(state, len(p))
	for i, parts := range p {
		n[i] = map[int]bool{}
		for pos := range s[i] {
			switch {
			case pos == len(parts):
			case parts[pos] == "**":
				p.reach(n, i, pos)
			default:
				if ok, _ := path.Match(parts[pos], name); ok {
					p.reach(n, i, pos+1)
				}
			}
		}
		match = match || n[i][len(parts)]
		for pos := range n[i] {
			below = below || pos < len(parts)
		}
	}
	return n, match, below
}
