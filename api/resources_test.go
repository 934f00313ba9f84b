package api_test

import (
	"strings"
	"testing"

	sdk "github.com/anthropics/anthropic-sdk-go/v2"

	"github.com/planaria/planaria/api"
)

// Reference sections 6.1 and 7, attack F1: where a resource is put, and what is
// refused and where.
func TestResources(t *testing.T) {
	repo := func(s string) string {
		return `{"type":"github_repository","url":"https://github.com/a/b.git",` + s + `}`
	}
	file := func(s string) string { return `{"type":"file","file_id":"file_1","mount_path":"` + s + `"}` }
	for name, c := range map[string]struct{ in, path, mount string }{
		"file":           {`{"type":"file","file_id":"file_1"}`, "", "/mnt/session/uploads/file_1"},
		"file, strange":  {`{"type":"file","file_id":"../x"}`, "", "/mnt/session/uploads/file"},
		"relative":       {file("a/b.txt"), "", "/mnt/session/uploads/a/b.txt"},
		"absolute":       {file("/workspace//data/./x.csv"), "", "/workspace/data/x.csv"},
		"home":           {file("/home/agent/.netrc"), "", "/home/agent/.netrc"},
		"dots":           {file("../x"), "mount_path", ""},
		"dots inside":    {file("/workspace/../etc/passwd"), "mount_path", ""},
		"system":         {file("/etc/passwd"), "mount_path", ""},
		"sibling":        {file("/workspace-x/a"), "mount_path", ""},
		"root itself":    {file("/workspace"), "mount_path", ""},
		"outputs":        {file("/mnt/session/outputs/x"), "mount_path", ""},
		"above outputs":  {file("/mnt/session"), "mount_path", ""},
		"uploads":        {file("/mnt/session/uploads"), "mount_path", ""},
		"uploads, dot":   {file("."), "mount_path", ""},
		"memory":         {file("/mnt/memory/x"), "mount_path", ""},
		"folder":         {file("/workspace/x/"), "mount_path", ""},
		"line":           {file(`/workspace/a\nb`), "mount_path", ""},
		"NUL":            {file(`/workspace/a\u0000b`), "mount_path", ""},
		"repository":     {`{"type":"github_repository","url":"https://github.com/a/b.git"}`, "", "/workspace/b"},
		"slash":          {`{"type":"github_repository","url":"https://github.com/a/b.c/"}`, "", "/workspace/b.c"},
		"with all":       {repo(`"mount_path":"/workspace/x/","authorization_token":"t","checkout":{"type":"branch","name":"feature/x"}`), "", "/workspace/x"},
		"commit":         {repo(`"checkout":{"type":"commit","sha":"0123456789012345678901234567890123456789"}`), "", "/workspace/b"},
		"http":           {`{"type":"github_repository","url":"http://github.com/a/b"}`, "url", ""},
		"ssh":            {`{"type":"github_repository","url":"ssh://git@github.com/a/b"}`, "url", ""},
		"credentials":    {`{"type":"github_repository","url":"https://user:pw@github.com/a/b"}`, "url", ""},
		"query":          {`{"type":"github_repository","url":"https://github.com/a/b?x=1"}`, "url", ""},
		"no name":        {`{"type":"github_repository","url":"https://github.com/"}`, "url", ""},
		"name of dots":   {`{"type":"github_repository","url":"https://github.com/a/..git"}`, "url", ""},
		"strange name":   {`{"type":"github_repository","url":"https://github.com/a/b%27c"}`, "url", ""},
		"short commit":   {repo(`"checkout":{"type":"commit","sha":"0123456"}`), "checkout.sha", ""},
		"commit option":  {repo(`"checkout":{"type":"commit","sha":"--upload-pack=x"}`), "checkout.sha", ""},
		"branch option":  {repo(`"checkout":{"type":"branch","name":"--upload-pack=x"}`), "checkout.name", ""},
		"branch dots":    {repo(`"checkout":{"type":"branch","name":"a..b"}`), "checkout.name", ""},
		"token line":     {repo(`"authorization_token":"a\nb"`), "authorization_token", ""},
		"token too long": {repo(`"authorization_token":"` + strings.Repeat("x", 5000) + `"`), "authorization_token", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var in api.ResourceParams
			if err := api.Decode([]byte(c.in), &in); err != nil {
				t.Fatal(err)
			}
			err := in.Validate()
			if c.path != "" {
				if err == nil || field(t, err) != c.path {
					t.Errorf("error = %v, want one at %s", err, c.path)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			r, err := in.Resolve("sesrsc_1", "file_copy", when)
			if err != nil || r.MountPath != c.mount {
				t.Errorf("resource = %+v, %v, want it at %s", r, err, c.mount)
			}
			if in.Type == api.ResourceFile {
				decodeOfficial[sdk.BetaManagedAgentsFileResource](t, r, 6)
			} else {
				decodeOfficial[sdk.BetaManagedAgentsGitHubRepositoryResource](t, r, 7)
			}
		})
	}
	for name, c := range map[string]struct{ in, path string }{
		"same place":   {`{"type":"file","file_id":"a","mount_path":"x"},{"type":"file","file_id":"b","mount_path":"/mnt/session/uploads/x"}`, "resources[1].mount_path"},
		"inside":       {`{"type":"github_repository","url":"https://github.com/a/b"},{"type":"file","file_id":"b","mount_path":"/workspace/b/x"}`, "resources[1].mount_path"},
		"around":       {`{"type":"file","file_id":"b","mount_path":"/workspace/b/x"},{"type":"github_repository","url":"https://github.com/a/b"}`, "resources[1].mount_path"},
		"same name":    {`{"type":"github_repository","url":"https://github.com/a/b"},{"type":"github_repository","url":"https://github.com/c/b"}`, "resources[1].mount_path"},
		"side by side": {`{"type":"file","file_id":"b","mount_path":"/workspace/bc"},{"type":"github_repository","url":"https://github.com/a/b"}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var in api.SessionCreate
			if err := api.Decode([]byte(`{"agent":"a","environment_id":"e","resources":[`+c.in+`]}`), &in); err != nil {
				t.Fatal(err)
			}
			err := in.Validate()
			if (err != nil) != (c.path != "") || err != nil && field(t, err) != c.path {
				t.Errorf("error = %v, want one at %q", err, c.path)
			}
		})
	}
}

// A repository's checkout is null when there is none, and its token is nowhere.
func TestRepositoryOnTheWire(t *testing.T) {
	var in api.ResourceParams
	if err := api.Decode([]byte(`{"type":"github_repository","url":"https://github.com/a/b","authorization_token":"ghp_secret"}`), &in); err != nil {
		t.Fatal(err)
	}
	r, err := in.Resolve("sesrsc_1", "", when)
	if err != nil {
		t.Fatal(err)
	}
	wantJSON(t, "repository", r, `{"type":"github_repository","id":"sesrsc_1","url":"https://github.com/a/b","mount_path":"/workspace/b","checkout":null,"created_at":"2026-11-29T15:14:05.123456Z","updated_at":"2026-11-29T15:14:05.123456Z"}`)
}
