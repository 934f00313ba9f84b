package tool

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"regexp/syntax"
	"slices"
	"strings"
)

// maxPattern bounds a pattern of glob or grep, in bytes.
const maxPattern = 4096

type searchInput struct {
	Pattern string `json:"pattern"`
	Path    string `json:"path"`
}

var glob = Tool{
	Name: "glob",
	Description: `List files of this session's machine whose path matches a pattern, newest first.

The pattern is relative to path (default /workspace): * matches within one name, ** any number of folders, ? one character, [a-z] a set, {a,b} either. Not absolute, no "..". Example: **/*.{ts,tsx}. Gives at most 200 files, and looks at 50,000 entries at most; links are not followed. Where nothing matches the answer is "no matches".`,
	InputSchema: json.RawMessage(`{"type":"object","properties":{` +
		`"pattern":{"type":"string","description":"The pattern, relative to path."},` +
		`"path":{"type":"string","description":"The folder to search. Default /workspace."}` +
		`},"required":["pattern"],"additionalProperties":false}`),
	Reads: true,
	empty: "no matches",
	check: checked(func(in searchInput) error {
		parts := strings.Split(in.Pattern, "/")
		switch {
		case in.Pattern == "":
			return errors.New("pattern is missing")
		case len(in.Pattern) > maxPattern || strings.ContainsRune(in.Pattern, 0):
			return fmt.Errorf("pattern is longer than %d bytes or contains a zero byte", maxPattern)
		case path.IsAbs(in.Pattern):
			return errors.New("pattern must be relative; give the folder as path")
		case slices.Contains(parts, ".."):
			return errors.New("pattern must not contain ..; give the folder as path")
		}
		return checkPath("path", in.Path)
	}),
}

var grep = Tool{
	Name: "grep",
	Description: `Search the text files of this session's machine for a regular expression.

Gives one path:line:text per matching line. path is a file or folder (default /workspace); hidden files are searched, .git is not, nor binary files, files over 8 MiB, and links. The expression is RE2 syntax: no look-around, no back-references; (?i) ignores case. It is matched line by line. Output stops at 100 KiB, lines are cut at 2,000 bytes. Where nothing matches the answer is "no matches".`,
	InputSchema: json.RawMessage(`{"type":"object","properties":{` +
		`"pattern":{"type":"string","description":"The regular expression."},` +
		`"path":{"type":"string","description":"The file or folder to search. Default /workspace."}` +
		`},"required":["pattern"],"additionalProperties":false}`),
	Reads: true,
	empty: "no matches",
	check: checked(func(in searchInput) error {
		switch {
		case in.Pattern == "":
			return errors.New("pattern is missing")
		case len(in.Pattern) > maxPattern:
			return fmt.Errorf("pattern is longer than %d bytes", maxPattern)
		}
		if _, err := syntax.Parse(in.Pattern, syntax.Perl); err != nil {
			return fmt.Errorf("pattern is no expression that grep understands: %w", err)
		}
		return checkPath("path", in.Path)
	}),
}
