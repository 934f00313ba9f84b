//go:build linux

package guest

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

const (
	// maxOutput is how much of a tool's output goes into its result, in bytes,
	// and maxChars in characters (REF 11.4).
	maxOutput = 100 << 10
	maxChars  = 100_000
	// headBytes of an output that is too long are shown before its tail: the
	// cause of an error often stands there.
	headBytes = 8 << 10
	// noteChars is what the note on a truncated output takes at most.
	noteChars = 1000
	// maxSpill bounds the file that takes an output too long for a result, and
	// maxSpills all of them: they lie in /tmp, which is memory.
	maxSpill  = 64 << 20
	maxSpills = 128 << 20
)

// output keeps the beginning and the end of what a command said, and all of it
// in a file where that is not enough.
type output struct {
	id string

	mu     sync.Mutex
	head   []byte // the first headBytes
	tail   []byte // at least the last maxOutput bytes
	total  int64
	spill  *os.File
	failed bool // no spill file could be made
	cut    bool // the result leaves something out: the spill stays
}

func newOutput(id string) *output { return &output{id: id} }

func (o *output) write(p []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.total+int64(len(p)) > maxChars && o.spill == nil && !o.failed {
		o.openSpill() // the tail still holds everything
	}
	if o.spill != nil && o.total < maxSpill {
		if _, err := o.spill.Write(p); err != nil {
			o.failed = true
		}
	}
	if n := headBytes - len(o.head); n > 0 {
		o.head = append(o.head, p[:min(n, len(p))]...)
	}
	o.total += int64(len(p))
	o.tail = append(o.tail, p...)
	if len(o.tail) > 2*maxOutput {
		o.tail = slices.Clone(o.tail[len(o.tail)-maxOutput:])
	}
}

// openSpill makes the file with all that was written until now. o.mu is held.
func (o *output) openSpill() {
	err := os.MkdirAll(SpillDir, 0o755)
	if err == nil {
		dropSpills(maxSpills - maxSpill)
		// Never through a link that a command has put there.
		_ = os.Remove(spillPath(o.id))
		o.spill, err = os.OpenFile(spillPath(o.id), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	}
	if err == nil {
		_, err = o.spill.Write(o.tail)
	}
	o.failed = err != nil
}

// dropSpills removes the oldest files of long outputs, until they have no more
// bytes than room.
func dropSpills(room int64) {
	names, err := filepath.Glob(filepath.Join(SpillDir, "*.txt"))
	if err != nil {
		return
	}
	var all []fs.FileInfo
	for _, n := range names {
		if info, err := os.Lstat(n); err == nil && info.Mode().IsRegular() {
			all = append(all, info)
			room -= info.Size()
		}
	}
	slices.SortFunc(all, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, info := range all {
		if room >= 0 {
			return
		}
		if os.Remove(filepath.Join(SpillDir, info.Name())) == nil {
			room += info.Size()
		}
	}
}

func spillPath(id string) string {
	return filepath.Join(SpillDir, strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' {
			return r
		}
		return '_'
	}, id)+".txt")
}

// closeSpill closes the file, and removes it when the result shows everything.
func (o *output) closeSpill() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.spill == nil {
		return
	}
	_ = o.spill.Close()
	if !o.cut {
		_ = os.Remove(spillPath(o.id))
	}
}

// text is all of the output, or its beginning and end with a word on what they
// leave out; and behind it a note of the tool, if any.
func (o *output) text(note string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.cut = false
	if o.total <= maxOutput {
		if all := join(clean(o.tail), note); utf8.RuneCountInString(all) <= maxChars {
			return all
		}
	}
	o.cut = true
	where := "the rest is lost"
	if o.spill != nil && !o.failed {
		where = "all of it is in " + spillPath(o.id)
		if o.total > maxSpill {
			where = fmt.Sprintf("the first %d MiB are in %s", maxSpill>>20, spillPath(o.id))
		}
	}
	head := wholeLines(o.head, false)
	// Every character has a byte: what fits in bytes fits in characters.
	room := maxChars - noteChars - len(note) - len(head)
	tail := wholeLines(o.tail[len(o.tail)-min(len(o.tail), max(0, room)):], true)
	return join(fmt.Sprintf("[output truncated: %d bytes, the first %d and the last %d follow; %s]\n%s\n[… %d bytes left out …]\n%s",
		o.total, len(head), len(tail), where, clean(head), o.total-int64(len(head)+len(tail)), clean(tail)), note)
}

// maxRagged is how much is given up to begin or end with a line.
const maxRagged = 2000

// wholeLines drops the torn line at the beginning or the end, if it is not too
// long, else the torn character.
func wholeLines(b []byte, front bool) []byte {
	if front {
		if i := bytes.IndexByte(b, '\n'); i >= 0 && i < maxRagged {
			return b[i+1:]
		}
		return b[torn(b, true):]
	}
	if i := bytes.LastIndexByte(b, '\n'); i >= 0 && len(b)-i <= maxRagged {
		return b[:i]
	}
	return b[:len(b)-torn(b, false)]
}

// torn counts the bytes of a character that is cut off at the beginning or end.
func torn(b []byte, front bool) int {
	for n := range min(utf8.UTFMax, len(b)) {
		if front {
			if utf8.RuneStart(b[n]) {
				return n
			}
			continue
		}
		if i := len(b) - 1 - n; utf8.RuneStart(b[i]) {
			if utf8.FullRune(b[i:]) {
				return 0
			}
			return n + 1
		}
	}
	return 0
}

// bound shortens the text of a tool that does not write through the output.
func (o *output) bound(text string) string {
	if len(text) <= maxChars || utf8.RuneCountInString(text) <= maxChars {
		return text
	}
	o.write([]byte(text))
	return o.text("")
}

// since returns what came after a position, at most limit bytes of it, and the
// new position.
func (o *output) since(pos int64, limit int) (string, int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := int(min(o.total-pos, int64(limit), int64(len(o.tail))))
	if n <= 0 {
		return "", o.total
	}
	b := o.tail[len(o.tail)-n:]
	b = b[torn(b, true):]
	late := torn(b, false) // its end is still to come
	return clean(b[:len(b)-late]), o.total - int64(late)
}

// join sets a note of the tool below what a command said.
func join(text, note string) string {
	switch {
	case note == "":
		return text
	case text == "":
		return note
	}
	return strings.TrimRight(text, "\n") + "\n" + note
}

// clean makes text of bytes: results travel as JSON.
func clean(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	return strings.ToValidUTF8(string(b), "\uFFFD")
}
