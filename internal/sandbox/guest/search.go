//go:build linux

package guest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// Limits of searching (REF 11.4).
const (
	maxMatches  = 200
	maxGrepFile = 8 << 20
	maxLine     = 2000 // bytes of a line that grep shows
)

type searchInput struct {
	Pattern string `json:"pattern"`
	Path    string `json:"path"`
}

// glob lists the files that match a pattern, newest first.
func (a *Agent) glob(in searchInput, c *call, w *watch) wire.Result {
	p, err := parsePattern(in.Pattern)
	if err != nil {
		return failure("glob: %v", err)
	}
	root := at(in.Path)
	dir, real, err := openFolder(root)
	if err != nil {
		return failure("glob: %v", err)
	}
	defer dir.Close()
	if err := a.mayRead(real); err != nil {
		return failure("glob: %v", err)
	}
	type match struct {
		name string
		at   time.Time
	}
	var found []match
	states := []state{p.start()} // of the folders on the way down
	walk := walker{call: c, watch: w, filesFirst: true, visit: func(dir *os.Root, path string, e fs.DirEntry) error {
		if _, ok, _ := p.next(states[len(states)-1], e.Name()); !ok {
			return nil
		}
		if info, err := dir.Lstat(e.Name()); err == nil {
			found = append(found, match{filepath.Join(root, path), info.ModTime()})
		}
		return nil
	}}
	err = walk.walk(dir, "", 0, func(_, name string) (func(), bool) {
		n, _, below := p.next(states[len(states)-1], name)
		if !below {
			return nil, false
		}
		states = append(states, n)
		return func() { states = states[:len(states)-1] }, true
	})
	if errors.Is(err, errCancelled) {
		return cancelled()
	}
	sort.SliceStable(found, func(i, j int) bool { return found[i].at.After(found[j].at) })
	var out strings.Builder
	for i, m := range found {
		if i == maxMatches {
			fmt.Fprintf(&out, "[the newest %d of %d]\n", maxMatches, len(found))
			break
		}
		out.WriteString(clean([]byte(m.name)) + "\n")
	}
	return searched(out.String(), "", err)
}

func cancelled() wire.Result {
	return wire.Result{Text: "cancelled", IsError: true, Reason: "cancelled"}
}

// searched ends the result of a search with what it left out, and why.
func searched(text, note string, err error) wire.Result {
	if text == "" {
		text = "no matches"
		if note != "" || err != nil {
			text += "\n"
		}
	}
	text += note
	switch {
	case errors.Is(err, errVisited):
		text += fmt.Sprintf("[stopped after %d entries: give a narrower path]\n", maxVisited)
	case errors.Is(err, errLate):
		text += fmt.Sprintf("[stopped after %v: give a narrower path]\n", searchTime)
	case errors.Is(err, errFull):
		text += fmt.Sprintf("[stopped at %d KiB of matches: search for less]\n", maxOutput>>10)
	case err != nil:
		text += fmt.Sprintf("[stopped: %v]\n", err)
	}
	return wire.Result{Text: text}
}

// grep lists the lines that match a regular expression, as path:line:text.
func (a *Agent) grep(in searchInput, c *call, w *watch) wire.Result {
	if in.Pattern == "" {
		return failure("pattern is missing")
	}
	re, err := regexp.Compile(in.Pattern)
	if err != nil {
		return failure("grep: %v", err)
	}
	path := at(in.Path)
	g := &grepper{re: re, walker: walker{call: c, watch: w}}
	if info, serr := os.Stat(path); serr == nil && !info.IsDir() {
		f, _, ferr := openRegular(path, a.mayRead)
		if ferr != nil {
			return failure("grep: %v", ferr)
		}
		defer f.Close()
		err = g.file(f, path)
	} else {
		dir, real, oerr := openFolder(path)
		if oerr != nil {
			return failure("grep: %v", oerr)
		}
		defer dir.Close()
		if err := a.mayRead(real); err != nil {
			return failure("grep: %v", err)
		}
		if rg := findRipgrep(); rg != "" {
			err = g.ripgrep(a.reap, rg, in.Pattern, dir, path)
		} else {
			err = g.folder(dir, path)
		}
	}
	if errors.Is(err, errCancelled) {
		return cancelled()
	}
	note := ""
	if g.skipped > 0 {
		note = fmt.Sprintf("[files over %d MiB are not searched: %d]\n", maxGrepFile>>20, g.skipped)
	}
	return searched(g.out.String(), note, err)
}

// grepper collects matches.
type grepper struct {
	walker
	re      *regexp.Regexp
	out     bytes.Buffer
	chars   int
	skipped int // files that are too large
}

// folder searches what lies below an open folder.
func (g *grepper) folder(dir *os.Root, root string) error {
	g.visit = func(dir *os.Root, path string, e fs.DirEntry) error {
		if !e.Type().IsRegular() {
			return nil
		}
		// It may have become a pipe meanwhile, which must not hold us.
		f, err := dir.OpenFile(e.Name(), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
		if err != nil {
			return nil // unreadable files have no matches
		}
		defer f.Close()
		return g.file(f, filepath.Join(root, path))
	}
	return g.walk(dir, "", 0, func(_, name string) (func(), bool) { return func() {}, name != ".git" })
}

// file adds the matches of one file; what looks binary has none.
func (g *grepper) file(f *os.File, name string) error {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return nil
	}
	if info.Size() > maxGrepFile {
		g.skipped++
		return nil
	}
	r := bufio.NewReaderSize(io.LimitReader(f, maxGrepFile), 64<<10)
	if head, _ := r.Peek(8 << 10); bytes.IndexByte(head, 0) >= 0 {
		return nil
	}
	for n := 1; ; n++ {
		line, err := readLine(r, true, maxGrepFile)
		if err != nil && len(line) == 0 {
			return nil
		}
		line = bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r"))
		if utf8.Valid(line) && g.re.Match(line) {
			if err := g.add(name, n, line); err != nil {
				return err
			}
		}
		if n%1000 == 0 || len(line) > 64<<10 {
			if err := g.check(); err != nil {
				return err
			}
		}
		if err != nil {
			return nil
		}
	}
}

// add adds one match; errFull when there is no room for it.
func (g *grepper) add(name string, n int, line []byte) error {
	if len(line) > maxLine {
		line = line[:maxLine]
		line = append(line[:len(line)-torn(line, false):maxLine], "…"...)
	}
	text := fmt.Sprintf("%s:%d:%s\n", clean([]byte(name)), n, clean(line))
	chars := utf8.RuneCountInString(text)
	if g.out.Len()+len(text) > maxOutput || g.chars+chars > maxChars-noteChars {
		return errFull
	}
	g.out.WriteString(text)
	g.chars += chars
	return nil
}
