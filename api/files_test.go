package api_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	sdk "github.com/anthropics/anthropic-sdk-go/v2"

	"github.com/planaria/planaria/api"
)

// Attack F1: what is kept of a file's name is its last component, whatever
// separators lead to it.
func TestCleanFilename(t *testing.T) {
	for in, want := range map[string]string{
		"a.txt": "a.txt", "/etc/passwd": "passwd", "../../x": "x", `..\..\x`: "x", `C:\a/b\c.d`: "c.d", " a b ": "a b",
		"": "", "..": "", ".": "", "a/..": "", "a/": "", ".env": ".env", "räp\u00a0ort": "räp\u00a0ort",
	} {
		if got, err := api.CleanFilename(in); err != nil || got != want {
			t.Errorf("name of %q = %q, %v, want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"a\x00b", "a\nb", "\x1b[2J", strings.Repeat("x", 256), "\xff"} {
		if got, err := api.CleanFilename(in); err == nil || field(t, err) != "file" {
			t.Errorf("name of %q = %q, %v, want a refusal", in, got, err)
		}
	}
}

func TestOfficialTypesDecodeFiles(t *testing.T) {
	for _, f := range []api.File{
		{ID: "file_1", Filename: "a", MimeType: "text/plain", SizeBytes: 3, CreatedAt: when, ExpiresAt: &when},
		{ID: "file_2", Filename: "b", MimeType: "text/plain", CreatedAt: when, Downloadable: true, Scope: &api.FileScope{Type: "session", ID: "sesn_1"}},
	} {
		decodeOfficial[sdk.FileMetadata](t, f, 6, "scope")
		decodeOfficial[sdk.BetaFileMetadata](t, f, 6)
	}
}

// The client streams a file, gives the same bytes and key on every try, and
// tells a content that ends from one that is cut off.
func TestClientFiles(t *testing.T) {
	var keys, bodies []string
	h := http.NewServeMux()
	h.HandleFunc("POST /v1/files", func(w http.ResponseWriter, r *http.Request) {
		part, err := r.MultipartReader()
		if err != nil {
			t.Error(err)
		}
		var all []string
		for {
			p, err := part.NextPart()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Errorf("read form: %v", err)
				break
			}
			b, err := io.ReadAll(p)
			if err != nil {
				t.Errorf("read part: %v", err)
			}
			all = append(all, p.FormName()+" "+p.FileName()+" "+p.Header.Get("Content-Type")+" "+string(b))
		}
		keys, bodies = append(keys, r.Header.Get("Idempotency-Key")), append(bodies, strings.Join(all, "|"))
		if len(keys) == 1 {
			http.Error(w, `{"type":"error","error":{"type":"api_error","message":"once more"}}`, 500)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"file_1","type":"file","filename":"a.txt"}`)
	})
	h.HandleFunc("GET /v1/files/file_1/content", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "whole") })
	h.HandleFunc("GET /v1/files/file_2/content", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = io.WriteString(w, "part")
	})
	s := httptest.NewServer(h)
	defer s.Close()
	c := &api.Client{BaseURL: s.URL, Key: "k"}
	opened := 0
	f, err := c.UploadFile(t.Context(), api.FileUpload{Filename: "some/a.txt", MimeType: "text/x", ExpiresIn: time.Hour,
		Open: func() (io.ReadCloser, error) { opened++; return io.NopCloser(strings.NewReader("content")), nil }})
	if err != nil || f.ID != "file_1" {
		t.Fatalf("upload = %+v, %v", f, err)
	}
	want := "expires_in_seconds   3600|file a.txt text/x content"
	if opened != 2 || len(keys) != 2 || keys[0] == "" || keys[0] != keys[1] || bodies[0] != want || bodies[1] != want {
		t.Errorf("tries: keys %v, bodies %q, want %q", keys, bodies, want)
	}
	broken := errors.New("disk broke")
	if _, err := c.UploadFile(t.Context(), api.FileUpload{Filename: "a", Open: func() (io.ReadCloser, error) { return nil, broken }}); !errors.Is(err, broken) {
		t.Errorf("upload of what does not open = %v", err)
	}
	read := func(id string) (string, error) {
		r, err := c.DownloadFile(context.WithoutCancel(t.Context()), id)
		if err != nil {
			return "", err
		}
		defer r.Close()
		var b bytes.Buffer
		_, err = b.ReadFrom(r)
		return b.String(), err
	}
	if got, err := read("file_1"); err != nil || got != "whole" {
		t.Errorf("download = %q, %v", got, err)
	}
	if got, err := read("file_2"); err == nil {
		t.Errorf("a content that is cut off = %q without error", got)
	}
}
