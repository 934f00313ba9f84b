package server

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
)

// Limits of uploads and downloads.
const (
	// maxForm is what the fields and heads of a form may take beside the file.
	maxForm = 64 << 10
	// maxParts is how many parts are read; the API knows two.
	maxParts = 16
	// maxField is the longest value of a field.
	maxField = 1 << 10
	// stallTime is how long an upload may send nothing. It has no other limit:
	// lines are slow.
	stallTime = time.Minute
	// downloadBuffer is written to a reader within WriteTimeout.
	downloadBuffer = 256 << 10
)

// upload is a file of a form: its content is durable, no row names it.
type upload struct {
	Filename string `json:"filename"`
	MIME     string `json:"mime_type"`
	Expires  int64  `json:"expires_in_seconds"`
	SHA256   string `json:"sha256"`
	Size     int64  `json:"size_bytes"`

	content *store.Content
}

// receiveFile reads the form of an upload. The content goes into the blob store
// as it comes. What stands for the body of the request, so that a repetition is
// known by it, is the description of what was sent: the bytes of a form differ on
// every try, for its boundary does.
//
// A crash here leaves a content that no row names.
func (s *server) receiveFile(w http.ResponseWriter, c *call) error {
	if c.r.ContentLength > s.cfg.MaxFile+maxForm {
		return tooLarge(s.cfg.MaxFile)
	}
	c.r.Body = http.MaxBytesReader(w, &patientBody{c.r.Body, http.NewResponseController(w)}, s.cfg.MaxFile+maxForm)
	form, err := c.r.MultipartReader()
	if err != nil {
		return api.Invalid("", "a file is uploaded as multipart/form-data with the part \"file\"")
	}
	u := &upload{}
	c.drop = func() { s.db.DropContent(context.WithoutCancel(c.r.Context()), u.content) }
	for n := 0; ; n++ {
		part, err := form.NextPart()
		if err == io.EOF {
			break
		}
		switch {
		case err != nil:
			err = fmt.Errorf("%w: %w", errForm, err)
		case n >= maxParts:
			err = api.Invalid("", "the form has more than %d parts", maxParts)
		default:
			err = s.takePart(c, u, part)
		}
		if err != nil {
			return s.formError(err)
		}
	}
	if u.content == nil {
		return api.Invalid("file", "is required; send it as a part of the form")
	}
	u.SHA256, u.Size = u.content.SHA256, u.content.Size
	c.upload = u
	c.body, err = api.Encode(u)
	return err
}

// formError blames the client for what it did not send to its end.
func (s *server) formError(err error) error {
	var over *http.MaxBytesError
	var own *api.Error
	switch {
	case errors.As(err, &own):
		return own
	case errors.As(err, &over):
		return tooLarge(s.cfg.MaxFile)
	case errors.Is(err, errForm):
		return api.Invalid("", "the form could not be read to its end")
	}
	return err
}

// errForm: reading from the client failed.
var errForm = errors.New("read form")

// formReader marks the errors of the client's side.
type formReader struct{ r io.Reader }

func (f formReader) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	if err != nil && err != io.EOF {
		err = fmt.Errorf("%w: %w", errForm, err)
	}
	return n, err
}

func (s *server) takePart(c *call, u *upload, part *multipart.Part) error {
	switch part.FormName() {
	case "file":
		return s.takeContent(c, u, part)
	case "expires_in_seconds":
		text, err := io.ReadAll(io.LimitReader(formReader{part}, maxField+1))
		if err != nil {
			return err
		}
		if len(text) > maxField { // what was cut off could say something else (attack F5)
			return api.Invalid("expires_in_seconds", "has more than %d bytes; it is a number of seconds", maxField)
		}
		if u.Expires, err = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err != nil {
			return api.Invalid("expires_in_seconds", "must be a number of seconds")
		}
		return api.ValidateFileLife(u.Expires)
	}
	_, err := io.Copy(io.Discard, io.LimitReader(formReader{part}, maxForm)) // unknown fields are ignored, as everywhere
	return err
}

func (s *server) takeContent(c *call, u *upload, part *multipart.Part) error {
	if u.content != nil {
		return api.Invalid("file", "stands twice in the form; upload one file at a time")
	}
	_, disposition, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
	if err != nil {
		return api.Invalid("file", "its Content-Disposition cannot be read")
	}
	if u.Filename, err = api.CleanFilename(disposition["filename"]); err != nil {
		return err
	}
	head := make([]byte, 512) // what http.DetectContentType looks at
	n, err := io.ReadFull(formReader{part}, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF { // those two are ReadFull's: the file is short
		return err
	}
	u.MIME = api.MediaType(part.Header.Get("Content-Type"), u.Filename, head[:n])
	if u.Filename == "" {
		u.Filename = "unnamed" + api.Extension(u.MIME)
	}
	over := &overReader{r: io.MultiReader(bytes.NewReader(head[:n]), formReader{part}), left: s.cfg.MaxFile}
	u.content, err = s.db.PutContent(c.r.Context(), c.caller.ws(), over)
	if over.left < 0 {
		return tooLarge(s.cfg.MaxFile)
	}
	return err
}

// overReader fails when more than so many bytes come.
type overReader struct {
	r    io.Reader
	left int64
}

func (o *overReader) Read(p []byte) (int, error) {
	n, err := o.r.Read(p)
	if o.left -= int64(n); o.left < 0 {
		return n, errForm
	}
	return n, err
}

// patientBody gives each read of a body stallTime.
type patientBody struct {
	io.ReadCloser
	rc *http.ResponseController
}

func (b *patientBody) Read(p []byte) (int, error) {
	_ = b.rc.SetReadDeadline(time.Now().Add(stallTime)) // where it cannot be set there is no stalled line either
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		_ = b.rc.SetReadDeadline(time.Time{}) // the connection may carry another request
	}
	return n, err
}

func wireFile(f store.File) (api.File, error) {
	w := api.File{ID: string(f.ID), Filename: f.Filename, MimeType: f.MIME, SizeBytes: f.Size, CreatedAt: api.At(f.CreatedAt),
		Downloadable: f.Downloadable, ExpiresAt: api.AtOrNull(f.ExpiresAt)}
	if f.Session != "" {
		w.Scope = &api.FileScope{Type: "session", ID: string(f.Session)}
	}
	return w, nil
}

// createFile makes a file of what was received. Its record keeps the id only:
// names of files lie sealed.
func (s *server) createFile(ctx context.Context, c *call) (any, error) {
	now := s.db.Now()
	f := store.File{Workspace: c.caller.ws(), ID: store.FileID(store.NewID("file_", now)), Filename: c.upload.Filename, MIME: c.upload.MIME, CreatedAt: now}
	if c.upload.Expires > 0 {
		f.ExpiresAt = now.Add(time.Duration(c.upload.Expires) * time.Second)
	}
	c.keeps(func(any) (any, error) { return created{string(f.ID)}, nil })
	f, err := s.db.CreateFile(ctx, f, c.upload.content)
	if err != nil {
		return nil, err
	}
	return wireFile(f)
}

// createdFile answers an upload that was done before.
func (s *server) createdFile(ctx context.Context, c *call) (any, error) {
	id, err := c.keptID()
	if err != nil {
		return nil, err
	}
	f, err := s.fileByID(ctx, c, id)
	if err != nil {
		return nil, err
	}
	return wireFile(f)
}

// fileByID reads a file of the caller's workspace.
func (s *server) fileByID(ctx context.Context, c *call, id string) (store.File, error) {
	f, err := s.db.File(ctx, c.caller.ws(), store.FileID(plainID(id)))
	return f, missingFile(err, id)
}

func missingFile(err error, id string) error {
	if errors.Is(err, store.ErrExpired) {
		return api.Coded(api.ErrNotFound, api.CodeFileExpired, "file %q has expired; upload it again", id)
	}
	return missing(err, "file", id)
}

func (s *server) getFile(ctx context.Context, c *call) (any, error) {
	f, err := s.fileByID(ctx, c, c.id("file"))
	if err != nil {
		return nil, err
	}
	return wireFile(f)
}

func (s *server) deleteFile(ctx context.Context, c *call) (any, error) {
	id := c.id("file")
	if err := s.db.DeleteFile(ctx, c.caller.ws(), store.FileID(id)); err != nil {
		return nil, missingFile(err, id)
	}
	return api.Deleted{ID: id, Type: api.DeletedFile}, nil
}

// listFiles lists files, newest first: page by page, by their ids, or in the
// shape that clients of the former API ask for.
func (s *server) listFiles(ctx context.Context, c *call) (any, error) {
	limit, err := c.query.limit(20, api.MaxFilePage)
	if err != nil {
		return nil, err
	}
	f := store.FileFilter{Limit: limit + 1}
	if id := c.query.get("scope_id"); id != "" {
		f.Session = store.SessionID(plainID(id))
	}
	if ids := c.query.list("ids"); len(ids) > 0 {
		return s.filesByID(ctx, c, f, ids)
	}
	if strings.Contains(strings.Join(c.r.Header.Values("anthropic-beta"), ","), api.FilesLegacyBeta) && c.query.get("page") == "" {
		return s.legacyFiles(ctx, c, f, limit)
	}
	at, err := c.query.cursor("files", "desc")
	if err != nil {
		return nil, err
	}
	if at != nil {
		f.AfterAt, f.AfterID = at.at(), store.FileID(at.ID)
	}
	rows, err := s.db.Files(ctx, c.caller.ws(), f)
	if err != nil {
		return nil, err
	}
	return pageOf("files", rows, limit, wireFile, func(f store.File) (time.Time, string) { return f.CreatedAt, string(f.ID) })
}

// filesByID is one page of the files that are there.
func (s *server) filesByID(ctx context.Context, c *call, f store.FileFilter, ids []string) (any, error) {
	if c.query.get("page") != "" || c.query.get("limit") != "" {
		return nil, api.Invalid("ids", "cannot be used together with page or limit")
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	if len(ids) > api.MaxFileIDs {
		return nil, api.Invalid("ids", "holds %d ids; at most %d are allowed", len(ids), api.MaxFileIDs)
	}
	for _, id := range ids {
		f.IDs = append(f.IDs, store.FileID(plainID(id)))
	}
	f.Limit = 0
	rows, err := s.db.Files(ctx, c.caller.ws(), f)
	if err != nil {
		return nil, err
	}
	return pageOf("files", rows, len(rows)+1, wireFile, nil)
}

// legacyFiles is the list with id cursors.
func (s *server) legacyFiles(ctx context.Context, c *call, f store.FileFilter, limit int) (any, error) {
	after, before := c.query.get("after_id"), c.query.get("before_id")
	if after != "" && before != "" {
		return nil, api.Invalid("before_id", "cannot be used together with after_id")
	}
	if after+before != "" {
		from, err := s.fileByID(ctx, c, after+before)
		if err != nil {
			return nil, err
		}
		f.AfterAt, f.AfterID, f.Asc = from.CreatedAt, from.ID, before != ""
	}
	rows, err := s.db.Files(ctx, c.caller.ws(), f)
	if err != nil {
		return nil, err
	}
	out := api.LegacyFilePage{Data: api.List[api.File]{}, HasMore: len(rows) > limit}
	rows = rows[:min(len(rows), limit)]
	if f.Asc {
		slices.Reverse(rows)
	}
	for _, r := range rows {
		w, err := wireFile(r)
		if err != nil {
			return nil, err
		}
		out.Data = append(out.Data, w)
	}
	if n := len(out.Data); n > 0 {
		out.FirstID, out.LastID = &out.Data[0].ID, &out.Data[n-1].ID
	}
	return out, nil
}

// fileContent sends the bytes of a file. An error after the first byte cuts the
// connection: the length was promised.
func (s *server) fileContent(ctx context.Context, c *call) (any, error) {
	f, err := s.fileByID(ctx, c, c.id("file"))
	if err != nil {
		return nil, err
	}
	if !f.Downloadable {
		return nil, api.Coded(api.ErrInvalidRequest, api.CodeFileNotDownloadable,
			"file %s was uploaded and cannot be downloaded; files that a session made can", f.ID)
	}
	r, err := s.db.OpenFile(ctx, f)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	// What is damaged from its first byte on is told, not cut off.
	content := bufio.NewReaderSize(r, downloadBuffer)
	if _, err := content.Peek(1); err != nil && err != io.EOF {
		return nil, err
	}
	h := c.w.Header()
	h.Set("Content-Type", f.MIME)
	h.Set("Content-Length", strconv.FormatInt(f.Size, 10))
	h.Set("Content-Disposition", attachment(f.Filename))
	// What agents wrote is not to run in anybody's browser.
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	if err := s.sendContent(c.w, content); err != nil {
		s.log.Warn("cannot send a file to its end", "request", c.request, "err", err)
		panic(http.ErrAbortHandler)
	}
	return nil, nil
}

func attachment(name string) string {
	if v := mime.FormatMediaType("attachment", map[string]string{"filename": name}); v != "" {
		return v
	}
	return "attachment"
}

// sendContent copies in pieces, each with a deadline of its own.
func (s *server) sendContent(w http.ResponseWriter, r io.Reader) error {
	rc := http.NewResponseController(w)
	defer func() { _ = rc.SetWriteDeadline(time.Time{}) }()
	buf := make([]byte, downloadBuffer)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if derr := rc.SetWriteDeadline(time.Now().Add(s.cfg.WriteTimeout)); derr != nil && !errors.Is(derr, http.ErrNotSupported) {
				return derr
			}
			if _, werr := w.Write(buf[:n]); werr != nil {
				return werr
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
