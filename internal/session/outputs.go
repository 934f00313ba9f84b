package session

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

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

// left says what was not collected and why.
type left struct {
	tooMany, tooLarge, unreadable int
}

// collect keeps what the agent wrote to the outputs folder as files of the
// session. It is called when a turn ends, before the session rests. Links are
// not followed, and what is no regular file is left alone.
func (d *driver) collect(ctx context.Context, s *sandbox.Sandbox) error {
	b := d.held()
	if b == nil || b.s != s {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, outputTime)
	defer cancel()
	list, err := s.ListFiles(ctx, sandbox.Outputs)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list outputs of session %s: %w", d.id, err)
	}
	if b.collected == nil {
		b.collected = map[string]outputSeen{}
	}
	var over left
	files, bytes := 0, int64(0)
	for _, f := range list {
		now := outputSeen{f.Size, f.UnixMicro}
		if !os.FileMode(f.Mode).IsRegular() || f.Link != "" || b.collected[f.Path] == now {
			continue
		}
		switch {
		case f.Size > api.MaxFile:
			over.tooLarge++
			continue
		case files == maxOutputs || bytes+f.Size > maxOutputBytes:
			over.tooMany++
			continue
		}
		added, err := d.collectFile(ctx, s, f.Path)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, sandbox.ErrGone) || errors.Is(err, sandbox.ErrFenced) {
				return err
			}
			over.unreadable++
			d.m.log.Warn("cannot collect an output", "session", d.id, "err", err)
			continue
		}
		if added {
			files, bytes = files+1, bytes+f.Size
		}
		b.collected[f.Path] = now
	}
	if over != (left{}) {
		d.m.log.Warn("left outputs in the machine", "session", d.id, "too_many", over.tooMany, "too_large", over.tooLarge,
			"unreadable", over.unreadable, "limit_files", maxOutputs, "limit_bytes", maxOutputBytes, "limit_file_bytes", api.MaxFile)
	}
	return nil
}

// collectFile makes a file of an output unless it is one already.
//
//  1. its digest: known bytes at this path are not stored again
//  2. the content, durable. A crash here leaves a content that no row names.
//  3. the row, under a key of session, path and digest: a repetition of this
//     whole thing adds nothing
func (d *driver) collectFile(ctx context.Context, s *sandbox.Sandbox, p string) (added bool, err error) {
	head, sum, err := digestOf(ctx, s, p)
	if err != nil {
		return false, err
	}
	if has, err := d.m.db.HasOutput(ctx, d.ws, d.id, p, sum); err != nil || has {
		return false, err
	}
	r, _, err := s.GetFile(ctx, p)
	if err != nil {
		return false, err
	}
	defer r.Close()
	c, err := d.m.db.PutContent(ctx, d.ws, r)
	if err != nil {
		return false, err
	}
	defer d.m.db.DropContent(context.WithoutCancel(ctx), c)
	name, err := api.CleanFilename(p)
	if err != nil || name == "" {
		name = "unnamed"
	}
	if err := d.m.fault("output_stored"); err != nil {
		return false, err
	}
	now := d.m.now()
	_, err = d.m.db.CreateOutput(ctx, store.File{Workspace: d.ws, ID: store.FileID(store.NewID("file_", now)), Session: d.id, Filename: name,
		MIME: api.MediaType("", name, head), Path: p, Downloadable: true, CreatedAt: now.UTC().Truncate(time.Microsecond)}, c)
	if errors.Is(err, store.ErrDuplicate) {
		return false, nil
	}
	return err == nil, err
}

// digestOf reads a file inside for its digest and its first bytes.
func digestOf(ctx context.Context, s *sandbox.Sandbox, p string) (head []byte, sum string, err error) {
	r, size, err := s.GetFile(ctx, p)
	if err != nil {
		return nil, "", err
	}
	defer r.Close()
	if size > api.MaxFile {
		return nil, "", fmt.Errorf("output %s has %d bytes", p, size)
	}
	h := sha256.New()
	head = make([]byte, sniffed)
	n, err := io.ReadFull(r, head)
	if err != nil && err != io.EOF && (err != io.ErrUnexpectedEOF || int64(n) != size) {
		return nil, "", err
	}
	head = head[:n]
	h.Write(head)
	if _, err := io.Copy(h, r); err != nil {
		return nil, "", fmt.Errorf("read output %s: %w", p, err)
	}
	return head, hex.EncodeToString(h.Sum(nil)), nil
}
