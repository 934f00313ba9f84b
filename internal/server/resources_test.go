package server_test

import (
	"fmt"
	"strings"
	"testing"

	anthropic "github.com/anthropics/anthropic-sdk-go/v2"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
)

// secretToken is nowhere but sealed in its row.
const secretToken = "ghp_SecretTokenOfTheTests0123456789"

// Reference section 7: resources at creation and later, their calls, and the
// token that is in no answer, log line, event or record.
func TestResourceCalls(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	s := e.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":%q,"environment_id":%q,"resources":[{"type":"file","file_id":%q},
		{"type":"github_repository","url":"https://github.com/a/b","authorization_token":%q}]}`, o.agent, o.environment, o.file, secretToken))
	var session api.Session
	s.get(t, &session)
	if len(session.Resources) != 2 {
		t.Fatalf("resources = %s", s.body)
	}
	var file, repo api.Resource
	for raw, into := range map[int]*api.Resource{0: &file, 1: &repo} {
		if err := api.Decode(session.Resources[raw], into); err != nil {
			t.Fatal(err)
		}
	}
	if file.FileID == o.file || file.MountPath != "/mnt/session/uploads/"+o.file || repo.MountPath != "/workspace/b" || repo.Checkout != nil {
		t.Errorf("resources = %s", s.body)
	}
	var cp api.File
	e.do("GET", "/v1/files/"+file.FileID, "").get(t, &cp)
	if cp.Scope == nil || cp.Scope.ID != session.ID || cp.Filename != "in.txt" {
		t.Errorf("copy = %+v", cp)
	}
	at := "/v1/sessions/" + session.ID + "/resources"
	sealed := func() string {
		t.Helper()
		b, err := e.db.ResourceSecret(t.Context(), "default", store.SessionID(session.ID), repo.ID)
		if err != nil {
			t.Fatal(err)
		}
		secret, err := e.master.Open("default", repo.ID, b)
		if err != nil {
			t.Fatal(err)
		}
		return secret.Reveal()
	}
	if got := sealed(); got != secretToken {
		t.Errorf("sealed token = %q", got)
	}

	add := e.do("POST", at, fmt.Sprintf(`{"type":"file","file_id":%q,"mount_path":"/workspace/x.txt"}`, o.file), "Idempotency-Key", "add")
	again := e.do("POST", at, fmt.Sprintf(`{"type":"file","file_id":%q,"mount_path":"/workspace/x.txt"}`, o.file), "Idempotency-Key", "add")
	if add.id(t) == "" || add.id(t) != again.id(t) {
		t.Errorf("repetition of an addition: %s, %s", add.body, again.body)
	}
	for body, status := range map[string]int{
		fmt.Sprintf(`{"type":"file","file_id":%q,"mount_path":"/workspace/x.txt"}`, o.file): 400,
		fmt.Sprintf(`{"type":"file","file_id":%q,"mount_path":"/etc/passwd"}`, o.file):      400,
		`{"type":"file","file_id":"file_none"}`:                                             404,
		`{"type":"github_repository","url":"https://github.com/a/c"}`:                       400,
		`{"type":"memory_store","memory_store_id":"memstore_1"}`:                            400,
	} {
		if a := e.do("POST", at, body); a.status != status {
			t.Errorf("add %s: status %d, want %d: %s", body, a.status, status, a.body)
		}
	}
	var list api.Page[api.Resource]
	e.do("GET", at, "").get(t, &list)
	if len(list.Data) != 3 || list.NextPage != nil {
		t.Errorf("list = %+v", list)
	}
	// A resource is found in its own session only.
	for _, method := range []string{"GET", "POST", "DELETE"} {
		if a := e.do(method, "/v1/sessions/"+o.session+"/resources/"+repo.ID, `{"authorization_token":"x"}`); a.status != 404 {
			t.Errorf("%s of a resource at another session: status %d: %s", method, a.status, a.body)
		}
	}
	rotated := e.do("POST", at+"/"+repo.ID, fmt.Sprintf(`{"authorization_token":%q}`, secretToken+"2"))
	if rotated.status != 200 || sealed() != secretToken+"2" {
		t.Errorf("rotation: %s, token %q", rotated.body, sealed())
	}
	if a := e.do("POST", at+"/"+file.ID, `{"authorization_token":"x"}`); a.status != 400 {
		t.Errorf("a token for a file: status %d", a.status)
	}
	if a := e.do("POST", at+"/"+repo.ID, `{"authorization_token":"a b"}`); a.status != 400 {
		t.Errorf("a token that is no header: status %d", a.status)
	}
	var d api.Deleted
	e.do("DELETE", at+"/"+repo.ID, "").get(t, &d)
	if d.Type != "session_resource_deleted" || d.ID != repo.ID {
		t.Errorf("deleted = %+v", d)
	}
	if _, err := e.db.ResourceSecret(t.Context(), "default", store.SessionID(session.ID), repo.ID); err == nil {
		t.Error("the token of a deleted resource is there")
	}
	if a := e.do("GET", at+"/"+repo.ID, ""); a.status != 404 {
		t.Errorf("deleted resource: status %d", a.status)
	}

	entries, err := e.db.Entries(t.Context(), "default", store.SessionID(session.ID), store.Range{})
	if err != nil {
		t.Fatal(err)
	}
	everything := string(s.body) + string(rotated.body) + e.logs.String() + string(e.do("GET", at, "").body) +
		string(e.do("GET", "/v1/audit?limit=100", "").body) + string(e.do("GET", "/v1/sessions/"+session.ID, "").body)
	for _, en := range entries {
		everything += string(en.Body)
	}
	if strings.Contains(everything, secretToken) {
		t.Error("the token is somewhere else than in its row (law L6)")
	}

	self := e.do("POST", "/v1/environments", `{"name":"own","config":{"type":"self_hosted"}}`).id(t)
	if a := e.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":%q,"environment_id":%q,"resources":[{"type":"file","file_id":%q}]}`, o.agent, self, o.file)); a.status != 400 {
		t.Errorf("a file for a self-hosted environment: status %d: %s", a.status, a.body)
	}
}

// Whoever deletes resources while walking them page by page meets every one.
func TestResourcePages(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	var all []string
	for i := range 5 {
		all = append(all, fmt.Sprintf(`{"type":"github_repository","url":"https://github.com/a/%d"}`, i))
	}
	s := e.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":%q,"environment_id":%q,"resources":[%s]}`, o.agent, o.environment, strings.Join(all, ",")))
	at := "/v1/sessions/" + s.id(t) + "/resources"
	var walked []string
	for page, n := "", 0; n < 10; n++ {
		var p api.Page[api.Resource]
		e.do("GET", at+"?limit=2"+page, "").get(t, &p)
		for _, r := range p.Data {
			walked = append(walked, r.MountPath)
			if a := e.do("DELETE", at+"/"+r.ID, ""); a.status != 200 {
				t.Fatalf("delete: %d %s", a.status, a.body)
			}
		}
		if p.NextPage == nil {
			break
		}
		page = "&page=" + *p.NextPage
	}
	if got := strings.Join(walked, " "); got != "/workspace/0 /workspace/1 /workspace/2 /workspace/3 /workspace/4" {
		t.Errorf("walked %s", got)
	}
}

// The official client uploads a file, gives it to a session, adds another one and
// takes it away.
func TestSDKFiles(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	c, ctx := e.sdk(), t.Context()
	f, err := c.Files.Upload(ctx, anthropic.FileUploadParams{File: anthropic.File(strings.NewReader(`{"a":1}`), "some/data.json", "application/json"),
		ExpiresInSeconds: anthropic.Int(7200)})
	if err != nil || f.Filename != "data.json" || f.MimeType != "application/json" || f.SizeBytes != 7 || f.Downloadable || f.ExpiresAt.Sub(f.CreatedAt).Hours() != 2 {
		t.Fatalf("upload = %+v, %v", f, err)
	}
	if got, err := c.Files.GetMetadata(ctx, f.ID, anthropic.FileGetMetadataParams{}); err != nil || got.ID != f.ID {
		t.Errorf("metadata = %+v, %v", got, err)
	}
	_, err = c.Files.Download(ctx, f.ID, anthropic.FileDownloadParams{})
	if ae := apiError(t, err, 400); ae.ErrorCode() != "file_not_downloadable" {
		t.Errorf("error code = %q", ae.ErrorCode())
	}
	if list, err := c.Files.List(ctx, anthropic.FileListParams{IDs: []string{f.ID, "file_none"}}); err != nil || len(list.Data) != 1 {
		t.Errorf("list by ids = %+v, %v", list, err)
	}
	s, err := c.Beta.Sessions.New(ctx, anthropic.BetaSessionNewParams{Agent: anthropic.BetaSessionNewParamsAgentUnion{OfString: anthropic.String(o.agent)},
		EnvironmentID: o.environment, Resources: []anthropic.BetaSessionNewParamsResourceUnion{
			{OfFile: &anthropic.BetaManagedAgentsFileResourceParams{FileID: f.ID, MountPath: anthropic.String("/workspace/data.json")}}}})
	if err != nil || len(s.Resources) != 1 || s.Resources[0].MountPath != "/workspace/data.json" || s.Resources[0].FileID == f.ID {
		t.Fatalf("session = %+v, %v", s.Resources, err)
	}
	list, err := c.Beta.Files.List(ctx, anthropic.BetaFileListParams{ScopeID: anthropic.String(s.ID)})
	if err != nil || len(list.Data) != 1 || list.Data[0].ID != s.Resources[0].FileID || list.Data[0].Scope.ID != s.ID {
		t.Errorf("files of the session = %+v, %v", list, err)
	}
	added, err := c.Beta.Sessions.Resources.Add(ctx, s.ID, anthropic.BetaSessionResourceAddParams{
		BetaManagedAgentsFileResourceParams: anthropic.BetaManagedAgentsFileResourceParams{FileID: f.ID}})
	if err != nil || added.MountPath != "/mnt/session/uploads/"+f.ID {
		t.Fatalf("added = %+v, %v", added, err)
	}
	del, err := c.Beta.Sessions.Resources.Delete(ctx, added.ID, anthropic.BetaSessionResourceDeleteParams{SessionID: s.ID})
	if err != nil || del.Type != "session_resource_deleted" {
		t.Errorf("delete = %+v, %v", del, err)
	}
	if gone, err := c.Files.Delete(ctx, f.ID, anthropic.FileDeleteParams{}); err != nil || gone.Type != "file_deleted" {
		t.Errorf("delete file = %+v, %v", gone, err)
	}
}
