package session

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"
	"unicode"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// What the agent leaves in the outputs folder becomes files of the session when
// a turn ends. A changed file is a new one beside the old: whoever has an id
// reads what it named. The same bytes at the same path are one file however
// often they are met, and one that somebody deleted does not come back.

// Limits of what one turn may add. What is over is left in the machine and is
// looked at again when the next turn ends.
const (
	maxOutputs     = 200     // files
	maxOutputBytes = 1 << 30 // of all of them
	// outputTime bounds how long collecting may take: the turn's end waits.
	outputTime = 5 * time.Minute
	// sniffed is how much of a file its type is told by.
	sniffed = 512
)

// outputSeen is a file of the outputs folder as it was when it was collected.
type outputSeen struct {
	size     int64
	modified int64
}

// left says what was not collected and why. It is compared by value.
type left struct {
	over, large, unreadable leftFiles
	more                    bool // the folder was not listed to its end
	late                    bool // there was no time for all
}

// Limits of what is said of files that were left, in each of their lists.
const (
	maxLeftNamed = 5   // files
	maxLeftPath  = 160 // bytes of a path
)

// leftFiles are files that were left for one reason: how many, and the first of
// them in the order of the listing, by path and size.
type leftFiles struct {
	n     int
	named string
}

// add counts a file. Its name is the agent's: it is quoted and cut.
func (l *leftFiles) add(f sandbox.File) {
	if l.n++; l.n > maxLeftNamed {
		return
	}
	if l.named != "" {
		l.named += ", "
	}
	p := strings.TrimPrefix(f.Path, sandbox.Outputs+"/")
	cut := ""
	if len(p) > maxLeftPath {
		p, cut = clip(p, maxLeftPath), "…"
	}
	l.named += fmt.Sprintf("%q%s of %s", p, cut, sizeOf(f.Size))
}

// sizeOf is a size in bytes for people.
func sizeOf(n int64) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	case n == 1:
		return "1 byte"
	}
	return fmt.Sprintf("%d bytes", n)
}

// words name the files.
func (l leftFiles) words() string {
	if l.n > maxLeftNamed {
		return fmt.Sprintf("(%s, and %d more)", l.named, l.n-maxLeftNamed)
	}
	return "(" + l.named + ")"
}

// words tell the user what was left, and the way out.
func (l left) words() string {
	var why []string
	for _, x := range []struct {
		files leftFiles
		what  string
	}{
		{l.over, fmt.Sprintf("beyond the %d files or %d MiB that one turn may add: they follow when the next turn ends", maxOutputs, maxOutputBytes>>20)},
		{l.large, fmt.Sprintf("larger than %d MiB: split or compress them", api.MaxFile>>20)},
		{l.unreadable, "which could not be read, for they changed meanwhile or their names are not UTF-8"},
	} {
		if x.files.n > 0 {
			why = append(why, fmt.Sprintf("%d %s %s", x.files.n, x.what, x.files.words()))
		}
	}
	if l.more {
		why = append(why, "those behind the first 10,000 entries of the folder: pack them into an archive, or remove what is not needed")
	}
	if l.late {
		why = append(why, fmt.Sprintf("those that did not fit into %v: they follow when the next turn ends", outputTime))
	}
	return "Not all files of " + sandbox.Outputs + " are kept as files of the session. Left in the machine are " + strings.Join(why, "; ") + "."
}

// collect keeps what the agent wrote to the outputs folder as files of the
// session. It is called when a turn ends, before the session rests. Links are
// not followed, and what is no regular file is left alone. What could not be kept
// is told to the user, once as long as it stays the same.
func (d *driver) collect(ctx context.Context, s *sandbox.Sandbox) error {
	b := d.held()
	if b == nil || b.s != s {
		return nil
	}
	soft, cancel := context.WithTimeout(ctx, outputTime)
	defer cancel()
	list, more, err := s.ListFiles(soft, sandbox.Outputs)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list outputs of session %s: %w", d.id, err)
	}
	rest, err := d.collectAll(soft, b, list)
	if err != nil && (ctx.Err() != nil || soft.Err() == nil) {
		return err
	}
	rest.more, rest.late = more, err != nil
	if rest == b.told {
		return nil
	}
	b.told = rest
	if rest == (left{}) {
		return nil
	}
	d.m.log.Warn("left outputs in the machine", "session", d.id, "over", rest.over.n, "large", rest.large.n, "unreadable", rest.unreadable.n,
		"more", rest.more, "late", rest.late)
	_, err = d.append(ctx, store.Append{Entries: []store.Draft{event(d.newID("sevt_"), evError, "",
		fields{"error": newSessionError("unknown_error", rest.words(), "retrying")})}})
	return err
}

// collectAll collects what was listed, as far as one turn may. An error means
// that nothing more can be read now.
func (d *driver) collectAll(ctx context.Context, b *machine, list []sandbox.File) (rest left, err error) {
	seen := map[string]outputSeen{} // of what is there now, so that it does not grow
	defer func() { b.collected = seen }()
	files, room := 0, int64(maxOutputBytes)
	for _, f := range list {
		now := outputSeen{f.Size, f.UnixMicro}
		switch {
		case !os.FileMode(f.Mode).IsRegular() || f.Link != "":
			continue
		case b.collected[f.Path] == now:
			seen[f.Path] = now
			continue
		case err != nil:
			continue
		case f.Size > api.MaxFile:
			rest.large.add(f)
			continue
		case files == maxOutputs || f.Size > room:
			rest.over.add(f)
			continue
		}
		size, cerr := d.collectFile(ctx, b.s, f.Path, min(room, api.MaxFile))
		switch {
		case cerr == nil:
			seen[f.Path] = now
		case errors.Is(cerr, fs.ErrNotExist) && utf8Name(f.Path):
			// It went away meanwhile.
		case ctx.Err() != nil || errors.Is(cerr, sandbox.ErrGone) || errors.Is(cerr, sandbox.ErrFenced) || d.over(cerr):
			err = cerr // the rest is only looked at for what is there
		default:
			rest.unreadable.add(f)
			d.m.log.Warn("cannot collect an output", "session", d.id, "err", cerr)
		}
		if size >= 0 && cerr == nil {
			files, room = files+1, room-size
		}
	}
	return rest, err
}

// utf8Name reports whether a path came over the link as it is.
func utf8Name(p string) bool { return !strings.ContainsRune(p, unicode.ReplacementChar) }

// known is the size of an output that added nothing.
const known = int64(-1)

// collectFile makes a file of an output of at most limit bytes, unless it is one
// already, and returns how many bytes that added.
//
//  1. its digest: known bytes at this path are not stored again
//  2. the content, durable. A crash here leaves a content that no row names.
//  3. the row, under a key of session, path and digest: a repetition of this
//     whole thing adds nothing
func (d *driver) collectFile(ctx context.Context, s *sandbox.Sandbox, p string, limit int64) (added int64, err error) {
	head, sum, err := digestOf(ctx, s, p, limit)
	if err != nil {
		return known, err
	}
	if has, err := d.m.db.HasOutput(ctx, d.ws, d.id, p, sum); err != nil || has {
		return known, err
	}
	r, err := openOutput(ctx, s, p, limit) // again, and it may be another one by now
	if err != nil {
		return known, err
	}
	defer r.Close()
	c, err := d.m.db.PutContent(ctx, d.ws, r)
	if err != nil {
		return known, err
	}
	defer d.m.db.DropContent(context.WithoutCancel(ctx), c)
	if err := d.m.fault("output_stored"); err != nil {
		return known, err
	}
	now, name := d.m.now(), outputName(p)
	_, err = d.m.db.CreateOutput(ctx, store.File{Workspace: d.ws, ID: store.FileID(store.NewID("file_", now)), Session: d.id, Filename: name,
		MIME: api.MediaType("", name, head), Path: p, Downloadable: true, CreatedAt: now.UTC().Truncate(time.Microsecond)}, c)
	if errors.Is(err, store.ErrDuplicate) {
		return known, nil
	}
	return c.Size, err
}

// outputName is the name of an output as a file, with an underscore for each
// character that such a name cannot hold.
func outputName(p string) string {
	name := strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == unicode.ReplacementChar {
			return '_'
		}
		return r
	}, path.Base(p))
	if name, err := api.CleanFilename(strings.ReplaceAll(name, `\`, "_")); err == nil && name != "" {
		return name
	}
	return "unnamed"
}

// openOutput opens a file inside. It was listed before, and the agent's programs
// may have changed it since: what is too large by now is refused.
func openOutput(ctx context.Context, s *sandbox.Sandbox, p string, limit int64) (io.ReadCloser, error) {
	r, size, err := s.GetFile(ctx, p)
	if err == nil && size > limit {
		_ = r.Close()
		return nil, fmt.Errorf("output %q has %d bytes by now, and %d are left", p, size, limit)
	}
	return r, err
}

// digestOf reads a file inside for its digest and its first bytes.
func digestOf(ctx context.Context, s *sandbox.Sandbox, p string, limit int64) (head []byte, sum string, err error) {
	r, err := openOutput(ctx, s, p, limit)
	if err != nil {
		return nil, "", err
	}
	defer r.Close()
	h := sha256.New()
	b := bufio.NewReaderSize(io.TeeReader(r, h), 64<<10)
	if head, err = b.Peek(sniffed); err != nil && err != io.EOF {
		return nil, "", fmt.Errorf("read output %q: %w", p, err)
	}
	head = bytes.Clone(head)
	if _, err := io.Copy(io.Discard, b); err != nil {
		return nil, "", fmt.Errorf("read output %q: %w", p, err)
	}
	return head, hex.EncodeToString(h.Sum(nil)), nil
}
