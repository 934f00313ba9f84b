package session

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
)

// A message may show the model a file by its id (reference section 9.4). The log
// keeps the id; the content is put into each request, for no model API knows our
// files, and is never looked for outside of the session's workspace.

// maxShown bounds the bytes of files in one request: model APIs take 32 MB, of
// which base64 makes a third.
const maxShown = 20 << 20

// shownRoom is maxShown, where no test sets less.
var shownRoom int64 = maxShown

// imageTypes are the media types that models take as images.
var imageTypes = []string{"image/jpeg", "image/png", "image/gif", "image/webp"}

// mediaTypeOf is a file's media type without parameters.
func mediaTypeOf(f store.File) string {
	t, _, err := mime.ParseMediaType(f.MIME)
	if err != nil {
		return ""
	}
	return t
}

// Unshowable says why a file cannot be shown to the model as a block of a kind,
// image or document; empty when it can.
func Unshowable(kind string, f store.File) string {
	t := mediaTypeOf(f)
	text := strings.HasPrefix(t, "text/") || t == "application/json"
	switch {
	case kind == "image" && !slices.Contains(imageTypes, t):
		return fmt.Sprintf("is of type %q; an image is one of %s", t, strings.Join(imageTypes, ", "))
	case kind == "document" && t != "application/pdf" && !text:
		return fmt.Sprintf("is of type %q; a document is application/pdf or text; give other files to the session as resources", t)
	case f.Size == 0:
		return "is empty"
	case f.Size > maxShown:
		return fmt.Sprintf("has %d bytes; at most %d can be shown to a model; give larger files to the session as resources", f.Size, maxShown)
	}
	return ""
}

// withFiles puts the content of files where messages name them, the newest first
// while there is room. What cannot be shown is told in its place.
func (d *driver) withFiles(ctx context.Context, in []gateway.Message) ([]gateway.Message, error) {
	room := shownRoom
	out := slices.Clone(in)
	for i, m := range slices.Backward(in) {
		if m.Role == "assistant" {
			continue
		}
		var err error
		if out[i].Content, err = d.showAll(ctx, m.Content, &room); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// showAll is withFiles for some blocks and what is in them.
func (d *driver) showAll(ctx context.Context, in []gateway.Block, room *int64) ([]gateway.Block, error) {
	out := slices.Clone(in)
	for i, b := range slices.Backward(in) {
		var err error
		switch b.Type {
		case "tool_result":
			out[i].Content, err = d.showAll(ctx, b.Content, room)
		case "image", "document":
			out[i], err = d.show(ctx, b, room)
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// fileOf is the file that a block names; ok is false when it names none.
func fileOf(b gateway.Block) (id store.FileID, ok bool) {
	var src struct {
		Type   string       `json:"type"`
		FileID store.FileID `json:"file_id"`
	}
	if b.Type != "image" && b.Type != "document" || json.Unmarshal(b.Source, &src) != nil {
		return "", false
	}
	return src.FileID, src.Type == "file"
}

// instead tells of a file that is not shown.
func instead(b gateway.Block, id store.FileID, why string) gateway.Block {
	return gateway.Block{Type: "text", Text: fmt.Sprintf("(the %s %s %s)", b.Type, id, why)}
}

// withoutLong takes files out that come to more than n bytes, the newest first to
// stay: what is kept of a history that did not fit has to fit itself.
func (d *driver) withoutLong(ctx context.Context, in []gateway.Message, n int) ([]gateway.Message, error) {
	room := int64(n)
	var short func(in []gateway.Block) ([]gateway.Block, error)
	short = func(in []gateway.Block) (out []gateway.Block, err error) {
		out = slices.Clone(in)
		for i, b := range slices.Backward(in) {
			if out[i].Content, err = short(b.Content); err != nil {
				return nil, err
			}
			id, ok := fileOf(b)
			if !ok {
				continue
			}
			f, err := d.m.db.File(ctx, d.ws, id)
			switch {
			case errors.Is(err, store.ErrNotFound): // it takes no room
			case err != nil:
				return nil, fmt.Errorf("show file: %w", err)
			case f.Size > room:
				out[i] = instead(b, id, "was left out here: it is too long for the model's context window")
			default:
				room -= f.Size
			}
		}
		return out, nil
	}
	out := slices.Clone(in)
	for i, m := range slices.Backward(in) {
		var err error
		if out[i].Content, err = short(m.Content); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// show is withFiles for one image or document.
func (d *driver) show(ctx context.Context, b gateway.Block, room *int64) (gateway.Block, error) {
	id, ok := fileOf(b)
	if !ok {
		return b, nil
	}
	f, err := d.m.db.File(ctx, d.ws, id)
	var why string
	var content []byte
	switch {
	case errors.Is(err, store.ErrNotFound):
		why = "is not there any more"
	case err != nil:
		return b, fmt.Errorf("show file: %w", err)
	case f.Size > *room:
		why = "is left out, for this conversation shows more files than fit into a request"
	default:
		why = Unshowable(b.Type, f)
	}
	if why == "" {
		if content, err = d.contentOf(ctx, f); errors.Is(err, store.ErrDamaged) || errors.Is(err, store.ErrNotFound) {
			why = "cannot be read any more"
		} else if err != nil {
			return b, fmt.Errorf("show file: %w", err)
		}
	}
	t := mediaTypeOf(f)
	binary := b.Type == "image" || t == "application/pdf"
	if why == "" && !binary && !utf8.Valid(content) {
		why = "is not UTF-8 text"
	}
	if why != "" {
		return instead(b, id, why), nil
	}
	*room -= f.Size
	if binary {
		b.Source = encode(fields{"type": "base64", "media_type": t, "data": base64.StdEncoding.EncodeToString(content)})
	} else {
		b.Source = encode(fields{"type": "text", "media_type": "text/plain", "data": string(content)})
	}
	return b, nil
}

func (d *driver) contentOf(ctx context.Context, f store.File) ([]byte, error) {
	r, err := d.m.db.OpenFile(ctx, f)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}
