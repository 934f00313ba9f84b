package server_test

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/server"
	"github.com/planaria/planaria/internal/store"
)

// form is a multipart body: name, filename (empty: a plain field) and content in turn.
func form(t testing.TB, parts ...string) (body, contentType string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i+2 < len(parts); i += 3 {
		var part io.Writer
		var err error
		if parts[i+1] == "" {
			part, err = w.CreateFormField(parts[i])
		} else {
			part, err = w.CreateFormFile(parts[i], parts[i+1])
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(part, parts[i+2]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String(), w.FormDataContentType()
}

// send uploads a form.
func (e *env) send(parts []string, headers ...string) answer {
	e.t.Helper()
	body, typ := form(e.t, parts...)
	return e.do("POST", "/v1/files", body, append([]string{"Content-Type", typ}, headers...)...)
}

// blobCount counts the contents of files of the home workspace.
func (e *env) blobCount() int {
	e.t.Helper()
	all, err := filepath.Glob(filepath.Join(e.dir, "blobs", "default-files", "*"))
	if err != nil {
		e.t.Fatal(err)
	}
	return len(all)
}

// Reference section 17: what an upload makes of a form.
func TestUpload(t *testing.T) {
	e := newEnv(t)
	for name, c := range map[string]struct {
		parts          []string
		filename, mime string
		status         int
		field          string
	}{
		"text":        {[]string{"file", "a.json", `{}`}, "a.json", "application/json", 200, ""},
		"no ending":   {[]string{"file", "README", "plain words"}, "README", "text/plain; charset=utf-8", 200, ""},
		"picture":     {[]string{"file", "x", "\x89PNG\r\n\x1a\n"}, "x", "image/png", 200, ""},
		"empty":       {[]string{"file", "empty.json", ""}, "empty.json", "application/json", 200, ""},
		"path":        {[]string{"file", "../../etc/passwd.json", "x"}, "passwd.json", "application/json", 200, ""},
		"windows":     {[]string{"file", `C:\Users\me\r.json`, "x"}, "r.json", "application/json", 200, ""},
		"dots":        {[]string{"file", "..", `{"a":1}`}, "unnamed.", "", 200, ""},
		"life before": {[]string{"expires_in_seconds", "", "3600", "file", "a.json", "{}"}, "a.json", "application/json", 200, ""},
		"life behind": {[]string{"file", "a.json", "{}", "expires_in_seconds", "", "7776000"}, "a.json", "application/json", 200, ""},
		"unknown":     {[]string{"purpose", "", "x", "file", "a.json", "{}"}, "a.json", "application/json", 200, ""},
		"short life":  {[]string{"file", "a", "x", "expires_in_seconds", "", "3599"}, "", "", 400, "expires_in_seconds"},
		"long life":   {[]string{"file", "a", "x", "expires_in_seconds", "", "7776001"}, "", "", 400, "expires_in_seconds"},
		"no life":     {[]string{"file", "a", "x", "expires_in_seconds", "", "soon"}, "", "", 400, "expires_in_seconds"},
		"spaced life": {[]string{"file", "a", "x", "expires_in_seconds", "", "3600" + strings.Repeat(" ", 2000) + "0"}, "", "", 400, "expires_in_seconds"},
		"no file":     {[]string{"other", "a", "x"}, "", "", 400, "file"},
		"two files":   {[]string{"file", "a", "x", "file", "b", "y"}, "", "", 400, "file"},
		"long name":   {[]string{"file", strings.Repeat("x", 256), "x"}, "", "", 400, "file"},
	} {
		t.Run(name, func(t *testing.T) {
			before := e.blobCount()
			a := e.send(c.parts)
			if a.status != c.status {
				t.Fatalf("status %d, want %d: %s", a.status, c.status, a.body)
			}
			if c.status != 200 {
				var b api.ErrorBody
				if err := api.Decode(a.body, &b); err != nil || b.Error.Field() != c.field {
					t.Errorf("error = %s, want one at %s", a.body, c.field)
				}
				e.wait("a refused upload to leave no blob", func() bool { e.do("GET", "/healthz", ""); return e.blobCount() == before })
				return
			}
			var f api.File
			a.get(t, &f)
			if !strings.HasPrefix(f.Filename, c.filename) || c.mime != "" && f.MimeType != c.mime || f.Downloadable || f.Scope != nil || f.Type != "file" {
				t.Errorf("file = %+v, want %q of type %q", f, c.filename, c.mime)
			}
			if life := strings.HasPrefix(name, "life"); life != (f.ExpiresAt != nil) {
				t.Errorf("expires_at = %v", f.ExpiresAt)
			}
			var got api.File
			e.do("GET", "/v1/files/"+f.ID, "").get(t, &got)
			if got.Filename != f.Filename || got.SizeBytes != f.SizeBytes {
				t.Errorf("get = %+v, want %+v", got, f)
			}
		})
	}
	for _, typ := range []string{"application/json", "multipart/form-data", "multipart/form-data; boundary=x"} {
		if a := e.do("POST", "/v1/files", `{}`, "Content-Type", typ); a.status != 400 {
			t.Errorf("content type %s: status %d: %s", typ, a.status, a.body)
		}
	}
}

// Attack F5: a file beyond the limit is refused whether its length was said or
// not, and nothing of it stays.
func TestUploadTooLarge(t *testing.T) {
	e := newEnv(t)
	e.stop()
	e.start(func(c *server.Config) { c.MaxFile = 300 << 10 })
	if a := e.send([]string{"file", "a", strings.Repeat("x", 300<<10)}); a.status != 200 {
		t.Fatalf("largest file: status %d: %s", a.status, a.body)
	}
	before := e.blobCount()
	for _, size := range []int{300<<10 + 1, 300<<10 + 200<<10} {
		a := e.send([]string{"file", "a", strings.Repeat("x", size)})
		if a.status != http.StatusRequestEntityTooLarge || !strings.Contains(string(a.body), "request_too_large") {
			t.Errorf("file of %d bytes: status %d: %s", size, a.status, a.body)
		}
		body, typ := form(t, "file", "a", strings.Repeat("x", size))
		req, err := http.NewRequest("POST", e.url+"/v1/files", io.MultiReader(strings.NewReader(body))) // its length is not known
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", typ)
		req.Header.Set("Authorization", "Bearer "+adminKey)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("file of %d bytes in chunks: status %d", size, resp.StatusCode)
		}
	}
	// A form that is cut off.
	body, typ := form(t, "file", "a", "some content")
	if a := e.do("POST", "/v1/files", body[:len(body)-30], "Content-Type", typ); a.status != 400 {
		t.Errorf("cut form: status %d: %s", a.status, a.body)
	}
	e.wait("the contents to be gone", func() bool { e.do("GET", "/healthz", ""); return e.blobCount() == before })
}

// A connection that breaks off in the middle of an upload leaves nothing, not even
// what is no blob yet.
func TestUploadBreaksOff(t *testing.T) {
	e := newEnv(t)
	body, typ := form(t, "file", "big.bin", strings.Repeat("x", 2<<20))
	for _, sent := range []int{len(body) / 2, len(body) - 1} {
		c, err := net.Dial("tcp", strings.TrimPrefix(e.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s",
			adminKey, typ, len(body), body[:sent])
		e.wait("the upload to be on its way", func() bool { e.do("GET", "/healthz", ""); return e.blobCount() > 0 })
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		e.wait("nothing to be left", func() bool { e.do("GET", "/healthz", ""); return e.blobCount() == 0 })
	}
	var list api.Page[api.File]
	e.do("GET", "/v1/files", "").get(t, &list)
	if len(list.Data) != 0 {
		t.Errorf("files %+v", list.Data)
	}
}

// An upload happens once: by the client's key, though the boundary and so the
// bytes differ on every try, and by the retry of an official client.
func TestUploadOnce(t *testing.T) {
	e := newEnv(t)
	parts := []string{"file", "report.txt", "the same content"}
	first := e.send(parts, "Idempotency-Key", "k1")
	again := e.send(parts, "Idempotency-Key", "k1")
	if first.id(t) != again.id(t) || again.header.Get("idempotent-replayed") != "true" {
		t.Errorf("repetition = %s, want %s", again.body, first.body)
	}
	if a := e.send([]string{"file", "report.txt", "another content"}, "Idempotency-Key", "k1"); a.status != 400 {
		t.Errorf("another file under the key: status %d: %s", a.status, a.body)
	}
	if a := e.send([]string{"file", "other.txt", "the same content"}, "Idempotency-Key", "k1"); a.status != 400 {
		t.Errorf("another name under the key: status %d: %s", a.status, a.body)
	}
	e.wait("repetitions to leave no blob", func() bool { e.do("GET", "/healthz", ""); return e.blobCount() == 1 })
	// The answer of the first try was lost on the way.
	body, typ := form(t, "file", "lost.txt", "lost")
	if _, err := e.try("POST", "/v1/files", body, "Content-Type", typ, "x-lose-answer", "1"); err == nil {
		t.Fatal("the answer was not lost")
	}
	a := e.send([]string{"file", "lost.txt", "lost"}, "X-Stainless-Retry-Count", "1")
	if a.status != 200 {
		t.Errorf("retry: status %d: %s", a.status, a.body)
	}
	e.wait("the retry to leave no blob", func() bool { e.do("GET", "/healthz", ""); return e.blobCount() == 2 })
	var list api.Page[api.File]
	e.do("GET", "/v1/files", "").get(t, &list)
	if len(list.Data) != 2 {
		t.Errorf("%d files, want 2: %+v", len(list.Data), list.Data)
	}
}

// Lists in pages, by ids, by session and in the former shape; deletion; the row
// of the audit.
func TestFileLists(t *testing.T) {
	e := newEnv(t)
	var ids []string
	for i := range 5 {
		ids = append([]string{e.send([]string{"file", fmt.Sprintf("%d.txt", i), "x"}).id(t)}, ids...)
	}
	var walked []string
	for page, n := "", 0; n < 10; n++ {
		var p api.Page[api.File]
		e.do("GET", "/v1/files?limit=2"+page, "").get(t, &p)
		for _, f := range p.Data {
			walked = append(walked, f.ID)
		}
		if p.NextPage == nil {
			break
		}
		page = "&page=" + *p.NextPage
	}
	if strings.Join(walked, " ") != strings.Join(ids, " ") {
		t.Errorf("walked %v, want %v", walked, ids)
	}
	var p api.Page[api.File]
	e.do("GET", "/v1/files?ids%5B%5D="+ids[1]+"&ids[]="+ids[3]+"&ids[]=file_no&ids[]="+ids[1], "").get(t, &p)
	if len(p.Data) != 2 || p.NextPage != nil {
		t.Errorf("by ids = %+v", p)
	}
	e.do("GET", "/v1/files?scope_id=sesn_none", "").get(t, &p)
	if len(p.Data) != 0 {
		t.Errorf("of an unknown session = %+v", p)
	}
	for path, field := range map[string]string{"?limit=0": "limit", "?limit=1001": "limit", "?page=x": "page", "?ids[]=a&limit=3": "ids",
		"?after_id=a&before_id=b": "before_id", "?ids[]=" + strings.Join(many(101), "&ids[]="): "ids"} {
		a := e.do("GET", "/v1/files"+path, "", "anthropic-beta", api.FilesLegacyBeta)
		var b api.ErrorBody
		if err := api.Decode(a.body, &b); err != nil || a.status != 400 || b.Error.Field() != field {
			t.Errorf("%.60s: %d %s, want an error at %s", path, a.status, a.body, field)
		}
	}
	legacy := func(query string) (l api.LegacyFilePage) {
		t.Helper()
		e.do("GET", "/v1/files?limit=2"+query, "", "anthropic-beta", "x, "+api.FilesLegacyBeta).get(t, &l)
		return l
	}
	one := legacy("")
	two := legacy("&after_id=" + *one.LastID)
	back := legacy("&before_id=" + *two.FirstID)
	if !one.HasMore || *one.FirstID != ids[0] || *two.FirstID != ids[2] || *back.FirstID != ids[0] || *back.LastID != ids[1] || back.HasMore {
		t.Errorf("former lists: %+v, %+v, %+v", one, two, back)
	}

	var d api.Deleted
	e.do("DELETE", "/v1/files/"+ids[0], "").get(t, &d)
	if d.Type != "file_deleted" || d.ID != ids[0] {
		t.Errorf("deleted = %+v", d)
	}
	if a := e.do("GET", "/v1/files/"+ids[0], ""); a.status != 404 {
		t.Errorf("deleted file: status %d", a.status)
	}
	a := e.do("GET", "/v1/files/"+ids[1]+"/content", "")
	if a.status != 400 || !strings.Contains(string(a.body), api.CodeFileNotDownloadable) {
		t.Errorf("content of an upload: %d %s", a.status, a.body)
	}
	var audit struct {
		Data []struct{ Action, Resource string }
	}
	e.do("GET", "/v1/audit?limit=100", "").get(t, &audit)
	n := map[string]int{}
	for _, r := range audit.Data {
		if r.Action == "files.write" {
			n[r.Resource]++
		}
	}
	if n[ids[0]] != 2 || n[ids[1]] != 1 {
		t.Errorf("audit rows by file: %v", n)
	}
}

func many(n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("file_%d", i))
	}
	return out
}

// A file that a session made is downloaded as it was; a damaged one breaks off
// instead of ending.
func TestDownload(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	e.do("DELETE", "/v1/files/"+o.file, "")
	data := bytes.Repeat([]byte("planaria\n"), 100_000)
	now := e.db.Now()
	c, err := e.db.PutContent(t.Context(), "default", bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	f, err := e.db.CreateOutput(t.Context(), store.File{Workspace: "default", ID: store.FileID(store.NewID("file_", now)), Session: store.SessionID(o.session),
		Filename: "räport\".html", MIME: "text/html", Path: "/mnt/session/outputs/r.html", Downloadable: true, CreatedAt: now}, c)
	if err != nil {
		t.Fatal(err)
	}
	a := e.do("GET", "/v1/files/"+string(f.ID)+"/content", "")
	if a.status != 200 || !bytes.Equal(a.body, data) {
		t.Errorf("content: status %d, %d bytes", a.status, len(a.body))
	}
	for name, want := range map[string]string{"Content-Type": "text/html", "X-Content-Type-Options": "nosniff"} {
		if got := a.header.Get(name); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
	if got := a.header.Get("Content-Disposition"); !strings.HasPrefix(got, "attachment; filename*=utf-8''r%C3%A4port%22.html") {
		t.Errorf("Content-Disposition = %q", got)
	}
	var list api.Page[api.File]
	e.do("GET", "/v1/files?scope_id="+o.session, "").get(t, &list)
	if len(list.Data) != 1 || list.Data[0].Scope == nil || list.Data[0].Scope.ID != o.session || !list.Data[0].Downloadable {
		t.Errorf("files of the session = %+v", list.Data)
	}
	all, err := filepath.Glob(filepath.Join(e.dir, "blobs", "default-files", "*"))
	if err != nil || len(all) != 1 {
		t.Fatalf("blobs: %v, %v", all, err)
	}
	stored, err := os.ReadFile(all[0])
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(stored, []byte("planaria")) {
		t.Error("the blob holds plain bytes")
	}
	stored[len(stored)-100] ^= 1
	if err := os.WriteFile(all[0], stored, 0o600); err != nil {
		t.Fatal(err)
	}
	if a, err := e.try("GET", "/v1/files/"+string(f.ID)+"/content", ""); err == nil {
		t.Errorf("a damaged file ended well: status %d, %d bytes", a.status, len(a.body))
	}
	stored[20] ^= 1
	if err := os.WriteFile(all[0], stored, 0o600); err != nil {
		t.Fatal(err)
	}
	if a := e.do("GET", "/v1/files/"+string(f.ID)+"/content", ""); a.status != 500 || !strings.Contains(string(a.body), "damaged") {
		t.Errorf("a file damaged at its beginning: %d %.200s", a.status, a.body)
	}
}

// A message shows files by their ids (reference section 9.4): those of the
// caller's workspace that a model can be shown, and no others.
func TestFilesInMessages(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	zip := e.send([]string{"file", "a.zip", "PK\x03\x04"}).id(t)
	foreign := e.send([]string{"file", "in.txt", "secret"}, bearer(e.workspace("tenant two"))...).id(t)
	for _, c := range []struct {
		kind, file string
		status     int
		says       string
	}{
		{"document", o.file, 200, ""},
		{"image", o.file, 400, "content[0].source.file_id: file " + o.file + " is of type \\\"text/plain\\\"; an image is"},
		{"document", zip, 400, "give other files to the session as resources"},
		{"document", "file_none", 404, "file_none"},
		{"document", foreign, 404, foreign},
	} {
		message := fmt.Sprintf(`{"type":"user.message","content":[{"type":%q,"source":{"type":"file","file_id":%q}}]}`, c.kind, c.file)
		for path, body := range map[string]string{
			"/v1/sessions/" + o.session + "/events": `{"events":[` + message + `]}`,
			"/v1/sessions":                          fmt.Sprintf(`{"agent":%q,"environment_id":%q,"initial_events":[%s]}`, o.agent, o.environment, message),
		} {
			if a := e.do("POST", path, body); a.status != c.status || !strings.Contains(string(a.body), c.says) {
				t.Errorf("%s %s at %s: %d %s, want %d that says %q", c.kind, c.file, path, a.status, a.body, c.status, c.says)
			}
		}
	}
}

// A file whose time is over says so.
func TestFileExpired(t *testing.T) {
	e := newEnv(t)
	c, err := e.db.PutContent(t.Context(), "default", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	now := e.db.Now()
	if _, err := e.db.CreateFile(t.Context(), store.File{Workspace: "default", ID: "file_old", Filename: "x", MIME: "text/plain",
		CreatedAt: now, ExpiresAt: now.Add(-time.Second)}, c); err != nil {
		t.Fatal(err)
	}
	for _, method := range []string{"GET", "DELETE"} {
		a := e.do(method, "/v1/files/file_old", "")
		if a.status != 404 || !strings.Contains(string(a.body), api.CodeFileExpired) {
			t.Errorf("%s: %d %s", method, a.status, a.body)
		}
	}
}
