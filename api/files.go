package api

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"iter"
	"mime"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// Limits of files (reference sections 1.7, 1.9 and 17).
const (
	// MaxFile is the largest file in bytes.
	MaxFile = 500 << 20
	// MinFileLife and MaxFileLife bound expires_in_seconds.
	MinFileLife = 3600
	MaxFileLife = 7_776_000
	MaxFilename = 255
	MaxFileIDs  = 100
	MaxFilePage = 1000
)

// Error codes of files.
const (
	CodeFileExpired         = "file_expired"
	CodeFileNotDownloadable = "file_not_downloadable"
)

// FilesLegacyBeta is the beta header value that selects the old shape of lists.
const FilesLegacyBeta = "files-api-2025-04-14"

// File is the file object (reference section 17).
type File struct {
	Type         string     `json:"type"`
	ID           string     `json:"id"`
	Filename     string     `json:"filename"`
	MimeType     string     `json:"mime_type"`
	SizeBytes    int64      `json:"size_bytes"`
	CreatedAt    Time       `json:"created_at"`
	Downloadable bool       `json:"downloadable"`
	ExpiresAt    *Time      `json:"expires_at"`
	Scope        *FileScope `json:"scope"`
}

// FileScope says which session a file belongs to.
type FileScope struct {
	Type string `json:"type"` // session
	ID   string `json:"id"`
}

// MarshalJSON sets the type.
func (f File) MarshalJSON() ([]byte, error) {
	type shadow File
	f.Type = "file"
	return Encode(shadow(f))
}

// LegacyFilePage is one page of files in the old shape.
type LegacyFilePage struct {
	Data    List[File] `json:"data"`
	HasMore bool       `json:"has_more"`
	FirstID *string    `json:"first_id"`
	LastID  *string    `json:"last_id"`
}

// CleanFilename is the name under which a file is kept: the last component of a
// path, of either kind of separator. It is an error when that cannot be a name.
func CleanFilename(name string) (string, error) {
	if i := strings.LastIndexAny(name, `/\`); i >= 0 {
		name = name[i+1:]
	}
	name = strings.TrimSpace(name)
	switch {
	case name == "" || name == "." || name == "..":
		return "", nil
	case runes(name) > MaxFilename:
		return "", Invalid("file", "its filename has %d characters; at most %d are allowed", runes(name), MaxFilename)
	case strings.ContainsFunc(name, func(r rune) bool { return unicode.IsControl(r) || r == unicode.ReplacementChar }):
		return "", Invalid("file", "its filename holds control characters; rename it")
	}
	return name, nil
}

// maxMediaType is the longest media type that is kept as it was said.
const maxMediaType = 255

// MediaType is the type of a file: what is said of it, else that of the name's
// extension, else what its first bytes (512 count) look like.
func MediaType(said, name string, head []byte) string {
	if t, params, err := mime.ParseMediaType(said); err == nil && t != "application/octet-stream" && strings.Contains(t, "/") {
		if f := mime.FormatMediaType(t, params); f != "" && len(f) <= maxMediaType {
			return f
		}
	}
	if t := mime.TypeByExtension(strings.ToLower(path.Ext(name))); t != "" {
		return t
	}
	return http.DetectContentType(head)
}

// Extension is an extension that files of a type have, empty when none is known.
func Extension(mediaType string) string {
	all, err := mime.ExtensionsByType(mediaType)
	if err != nil || len(all) == 0 {
		return ""
	}
	return all[0]
}

// ValidateFileLife checks expires_in_seconds.
func ValidateFileLife(seconds int64) error {
	if seconds < MinFileLife || seconds > MaxFileLife {
		return Invalid("expires_in_seconds", "must be from %d to %d", MinFileLife, MaxFileLife)
	}
	return nil
}

// FileListParams selects files; IDs excludes Page and Limit.
type FileListParams struct {
	ScopeID string // a session
	IDs     []string
	Limit   int
	Page    string
}

// Query is the query string.
func (p FileListParams) Query() url.Values {
	q := url.Values{}
	setString(q, "scope_id", p.ScopeID)
	for _, id := range p.IDs {
		q.Add("ids[]", id)
	}
	setPage(q, p.Limit, p.Page)
	return q
}

// FileUpload is a file to be uploaded.
type FileUpload struct {
	Filename string
	MimeType string // empty: the server finds out
	// Open opens the content; it is called once per try.
	Open func() (io.ReadCloser, error)
	// ExpiresIn is the time after which it ends; 0 is never.
	ExpiresIn time.Duration
}

// UploadFile uploads a file. It is streamed, and repeated under one key like
// every other POST.
func (c *Client) UploadFile(ctx context.Context, f FileUpload) (File, error) {
	var out File
	r, err := c.newRequest(ctx, http.MethodPost, "/v1/files", nil, nil)
	if err != nil {
		return out, err
	}
	boundary := rand.Text()
	r.header.Set("Content-Type", "multipart/form-data; boundary="+boundary)
	r.stream = func() (io.ReadCloser, error) { return f.form(boundary) }
	body, err := c.do(ctx, r)
	if err != nil {
		return out, err
	}
	if err := unmarshal(body, &out); err != nil {
		return out, fmt.Errorf("read answer of POST /v1/files: %w", err)
	}
	return out, nil
}

// form is the multipart body, made while it is read.
func (f FileUpload) form(boundary string) (io.ReadCloser, error) {
	content, err := f.Open()
	if err != nil {
		return nil, err
	}
	r, w := io.Pipe()
	go func() { // ends when all is read, or when the reader is closed
		defer content.Close()
		w.CloseWithError(f.write(w, boundary, content))
	}()
	return r, nil
}

func (f FileUpload) write(w io.Writer, boundary string, content io.Reader) error {
	m := multipart.NewWriter(w)
	if err := m.SetBoundary(boundary); err != nil {
		return err
	}
	if f.ExpiresIn > 0 {
		if err := m.WriteField("expires_in_seconds", strconv.FormatInt(int64(f.ExpiresIn/time.Second), 10)); err != nil {
			return err
		}
	}
	h := textproto.MIMEHeader{}
	h.Set("Content-Disposition", multipart.FileContentDisposition("file", path.Base(f.Filename)))
	if f.MimeType != "" {
		h.Set("Content-Type", f.MimeType)
	}
	part, err := m.CreatePart(h)
	if err == nil {
		_, err = io.Copy(part, content)
	}
	if err != nil {
		return err
	}
	return m.Close()
}

// GetFile returns a file's object.
func (c *Client) GetFile(ctx context.Context, id string) (File, error) {
	return get[File](ctx, c, "/v1/files/"+pathID(id), nil)
}

// ListFiles returns one page of files.
func (c *Client) ListFiles(ctx context.Context, p FileListParams) (Page[File], error) {
	return get[Page[File]](ctx, c, "/v1/files", p.Query())
}

// AllFiles walks all files.
func (c *Client) AllFiles(ctx context.Context, p FileListParams) iter.Seq2[File, error] {
	return all[File](ctx, c, "/v1/files", p.Query())
}

// DeleteFile deletes a file.
func (c *Client) DeleteFile(ctx context.Context, id string) (Deleted, error) {
	return remove(ctx, c, "/v1/files/"+pathID(id))
}

// DownloadFile opens a file's content; the caller closes it. A content that is
// cut off ends with an error other than io.EOF.
func (c *Client) DownloadFile(ctx context.Context, id string) (io.ReadCloser, error) {
	r, err := c.newRequest(ctx, http.MethodGet, "/v1/files/"+pathID(id)+"/content", nil, nil)
	if err != nil {
		return nil, err
	}
	for try := 0; ; try++ {
		resp, err := c.send(ctx, r)
		if err == nil {
			return resp.Body, nil
		}
		again, after := retryable(err)
		if !again || try >= c.retries() || ctx.Err() != nil || c.pause(ctx, try, after) != nil {
			return nil, plain(err)
		}
	}
}
