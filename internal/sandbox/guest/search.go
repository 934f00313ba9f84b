//go:build linux

package guest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// Limits of searching (REF 11.4).
const (
	maxMatches  = 200
	maxVisited  = 50_000
	maxGrepFile = 8 << 20
	maxLine     = 2000 // bytes of a line that grep shows
)

type globInput struct {
	Pattern string `json:"pattern"`
	Path    string `json:"path"`
}

type grepInput struct {
	Pattern string `json:"pattern"`
	Path    string `json:"path"`
}

// glob lists the files that match a pattern with **, newest first.
func glob(in globInput) wire.Result {
	switch {
	case in.Pattern == "":
		return failure("pattern is missing")
	case strings.HasPrefix(in.Pattern, "/"):
		return failure("glob: the pattern must be relative; give the folder as path")
	}
	parts := strings.Split(in.Pattern, "/")
	for _, p := range parts {
		if p == ".." {
			return failure("glob: the pattern must not contain ..")
		}
		if _, err := path.Match(p, ""); err != nil {
			return failure("glob: %v", err)
		}
	}
	type match struct {
		name string
		at   time.Time
	}
	var found []match
	visited := 0
	root := at(in.Path)
	err := filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			if name == root {
				return err
			}
			return nil
		}
		if visited++; visited > maxVisited {
			return errLong
		}
		rel, _ := filepath.Rel(root, name)
		if e.IsDir() || !matchParts(parts, strings.Split(rel, "/")) {
			return nil
		}
		if info, err := e.Info(); err == nil {
			found = append(found, match{name, info.ModTime()})
		}
		return nil
	})
	if err != nil && !errors.Is(err, errLong) {
		return failure("glob: %v", err)
	}
	sort.SliceStable(found, func(i, j int) bool { return found[i].at.After(found[j].at) })
	var out strings.Builder
	for i, m := range found {
		if i == maxMatches {
			fmt.Fprintf(&out, "[the newest %d of %d]\n", maxMatches, len(found))
			break
		}
		out.WriteString(m.name + "\n")
	}
	if errors.Is(err, errLong) {
		fmt.Fprintf(&out, "[stopped after %d entries: give a narrower path]\n", maxVisited)
	}
	if out.Len() == 0 {
		return wire.Result{Text: "no matches"}
	}
	return wire.Result{Text: out.String()}
}

// matchParts matches a path against a pattern, part by part; ** stands for any
// number of folders.
func matchParts(pattern, name []string) bool {
	for len(pattern) > 0 {
		if pattern[0] == "**" {
			for len(pattern) > 1 && pattern[1] == "**" {
				pattern = pattern[1:]
			}
			for i := 0; i <= len(name); i++ {
				if matchParts(pattern[1:], name[i:]) {
					return true
				}
			}
			return false
		}
		if len(name) == 0 {
			return false
		}
		if ok, _ := path.Match(pattern[0], name[0]); !ok {
			return false
		}
		pattern, name = pattern[1:], name[1:]
	}
	return len(name) == 0
}

var errFull = errors.New("enough")

// grep lists the lines that match a regular expression, as path:line:text.
func grep(in grepInput, cancel <-chan struct{}) wire.Result {
	if in.Pattern == "" {
		return failure("pattern is missing")
	}
	re, err := regexp.Compile(in.Pattern)
	if err != nil {
		return failure("grep: %v", err)
	}
	var out bytes.Buffer
	root := at(in.Path)
	skipped, visited := 0, 0
	err = filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			if name == root {
				return err
			}
			return nil
		}
		select {
		case <-cancel:
			return errCancelled
		default:
		}
		if visited++; visited > maxVisited {
			return errLong
		}
		if e.IsDir() && name != root && e.Name() == ".git" {
			return fs.SkipDir
		}
		if !e.Type().IsRegular() && name != root {
			return nil
		}
		info, err := os.Stat(name)
		if err != nil || !info.Mode().IsRegular() {
			return nil
		}
		if info.Size() > maxGrepFile {
			skipped++
			return nil
		}
		return grepFile(re, name, &out)
	})
	switch {
	case errors.Is(err, errCancelled):
		return wire.Result{Text: "cancelled", IsError: true, Reason: "cancelled"}
	case errors.Is(err, errFull):
		fmt.Fprintf(&out, "[stopped at %d KiB of matches: search for less]\n", maxOutput>>10)
	case errors.Is(err, errLong):
		fmt.Fprintf(&out, "[stopped after %d entries: give a narrower path]\n", maxVisited)
	case err != nil:
		return failure("grep: %v", err)
	}
	if skipped > 0 {
		fmt.Fprintf(&out, "[%d files over %d MiB were not searched]\n", skipped, maxGrepFile>>20)
	}
	if out.Len() == 0 {
		return wire.Result{Text: "no matches"}
	}
	return wire.Result{Text: out.String()}
}

var errCancelled = errors.New("cancelled")

// grepFile appends the matches of one file; what looks binary has none.
func grepFile(re *regexp.Regexp, name string, out *bytes.Buffer) error {
	f, err := os.Open(name)
	if err != nil {
		return nil // unreadable files have no matches
	}
	defer f.Close()
	r := bufio.NewReaderSize(f, 64<<10)
	if head, _ := r.Peek(8 << 10); bytes.IndexByte(head, 0) >= 0 {
		return nil
	}
	for n := 1; ; n++ {
		line, err := readLine(r, true, maxGrepFile)
		line = bytes.TrimRight(line, "\r\n")
		if len(line) > 0 && re.Match(line) && utf8.Valid(line) {
			if len(line) > maxLine {
				line = append(line[:maxLine:maxLine], "…"...)
			}
			fmt.Fprintf(out, "%s:%d:%s\n", name, n, clean(line))
			if out.Len() > maxOutput {
				out.Truncate(bytes.LastIndexByte(out.Bytes()[:maxOutput], '\n') + 1)
				return errFull
			}
		}
		if err != nil {
			return nil
		}
	}
}
