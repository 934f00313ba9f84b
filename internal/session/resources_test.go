package session_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

func clientOf(e *testenv.Env) *api.Client {
	return &api.Client{BaseURL: strings.TrimSuffix(e.API.Base, "/"), Key: e.API.Key}
}

func upload(t testing.TB, c *api.Client, name, content string) api.File {
	t.Helper()
	f, err := c.UploadFile(t.Context(), api.FileUpload{Filename: name, Open: func() (io.ReadCloser, error) {
		return io.NopCloser(strings.NewReader(content)), nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// outputsOf are the contents of a session's downloadable files, by name, oldest first.
func outputsOf(t testing.TB, c *api.Client, id string) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	for f, err := range c.AllFiles(t.Context(), api.FileListParams{ScopeID: id}) {
		if err != nil {
			t.Fatal(err)
		}
		if !f.Downloadable {
			continue
		}
		r, err := c.DownloadFile(t.Context(), f.ID)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		_ = r.Close()
		if err != nil {
			t.Fatal(err)
		}
		out[f.Filename] = append([]string{string(b)}, out[f.Filename]...)
	}
	return out
}

// TestResourcesAndOutputs: a session's files are in its machine before the first
// call, one that is added is there at the next call, and what is in the outputs
// folder when a turn ends becomes files: once, the changed one beside the former,
// and no link is followed (attack F2). All of it holds over a crash with the loss
// of the machine.
func TestResourcesAndOutputs(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	c := clientOf(e)
	in := upload(t, c, "in.txt", "first file")
	place := "data/in.txt"
	e.Model.Add(t, testenv.Marked("files", llm.PlayScript{Steps: []llm.Step{
		calls(shell("cat /mnt/session/uploads/data/in.txt; cd /mnt/session/outputs; echo one > a.txt; mkdir d; echo two > d/b.json; ln -s /etc/passwd p; ln -s /etc e; mkfifo q")),
		ending,
		calls(shell("cat /workspace/late.txt; echo three > /mnt/session/outputs/a.txt")),
		ending,
		calls(shell("cat /workspace/late.txt; wc -l < /mnt/session/outputs/a.txt")),
		ending,
	}}))
	s, err := c.CreateSession(t.Context(), api.SessionCreate{Agent: api.AgentRef{ID: e.Agent}, EnvironmentID: e.Environment,
		Resources:     []api.ResourceParams{{Type: "file", FileID: in.ID, MountPath: &place}},
		InitialEvents: api.ClientEvents{&api.UserMessage{Content: api.List[api.Block]{api.Text("[files] Begin.")}}}})
	if err != nil {
		t.Fatal(err)
	}
	e.Finish(s.ID)
	if diff := cmp.Diff(map[string][]string{"a.txt": {"one\n"}, "b.json": {"two\n"}}, outputsOf(t, c, s.ID)); diff != "" {
		t.Errorf("outputs of the first turn (-want +got):\n%s\n%s", diff, e.Describe(s.ID))
	}

	// The original may go: the session has its own copy.
	if _, err := c.DeleteFile(t.Context(), in.ID); err != nil {
		t.Fatal(err)
	}
	late, to := upload(t, c, "late.txt", "late file"), "/workspace/late.txt"
	added, err := c.AddResource(t.Context(), s.ID, api.ResourceParams{Type: "file", FileID: late.ID, MountPath: &to})
	if err != nil || added.FileID == late.ID || added.MountPath != to {
		t.Fatalf("added = %+v, %v", added, err)
	}
	if _, err := c.AddResource(t.Context(), s.ID, api.ResourceParams{Type: "file", FileID: late.ID, MountPath: &to}); err == nil {
		t.Error("two resources at one place were taken")
	}
	e.Say(s.ID, "Go on.")
	e.Finish(s.ID)
	want := map[string][]string{"a.txt": {"one\n", "three\n"}, "b.json": {"two\n"}}
	if diff := cmp.Diff(want, outputsOf(t, c, s.ID)); diff != "" {
		t.Errorf("outputs of the second turn (-want +got):\n%s\n%s", diff, e.Describe(s.ID))
	}

	// The machine is lost with its node; the resources are in what comes back.
	e.Crash()
	e.KillSandbox(s.ID)
	e.Restart()
	c = clientOf(e)
	e.Say(s.ID, "Go on.")
	e.Finish(s.ID)
	got := resultsOf(t, e, s.ID)
	if diff := cmp.Diff([]string{"first file", "late file", "late file1"}, got); diff != "" {
		t.Errorf("results (-want +got):\n%s\n%s", diff, e.Describe(s.ID))
	}
	if diff := cmp.Diff(want, outputsOf(t, c, s.ID)); diff != "" {
		t.Errorf("outputs were added or lost by the crash (-want +got):\n%s", diff)
	}
	if _, err := c.DeleteResource(t.Context(), s.ID, added.ID); err != nil {
		t.Error(err)
	}
	e.Check()
}

// TestOutputsOfDeadMachine: the machine dies when the agent has done its work and
// says so. What it left in the outputs folder becomes files all the same.
func TestOutputsOfDeadMachine(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	slow := ending
	slow.DelayMS = 3000
	id := e.Begin("dead", llm.PlayScript{Steps: []llm.Step{calls(shell("echo one > /mnt/session/outputs/a.txt")), slow}})
	awaitSnapshot(t, e, id, "the step's snapshot", tookPart(store.SnapshotTaken))
	e.KillSandbox(id)
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	if diff := cmp.Diff(map[string][]string{"a.txt": {"one\n"}}, outputsOf(t, clientOf(e), id)); diff != "" {
		t.Errorf("outputs (-want +got):\n%s\n%s", diff, e.Describe(id))
	}
	e.Check()
}

// TestHostileOutputs: whatever lies in the outputs folder, the first files that
// can be kept are kept, nothing is followed or waited for, and the user is told
// once what was left (attacks F2, F5).
func TestHostileOutputs(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	c := clientOf(e)
	e.Model.Add(t, testenv.Marked("hostile", llm.PlayScript{Steps: []llm.Step{
		calls(shell(`cd /mnt/session/outputs; printf x > $'a\nb\e[31m.txt'; printf y > $'bad\xff.txt'; mkfifo c; mknod d c 1 5; ln -s /etc/passwd e; ln -s / f
ln /etc/hostname g; truncate -s 600M h; mkdir n; cd n; seq 10050 | xargs touch`)),
		ending, calls(shell("rm -r /mnt/session/outputs/*")), ending,
	}}))
	s, err := c.CreateSession(t.Context(), api.SessionCreate{Agent: api.AgentRef{ID: e.Agent}, EnvironmentID: e.Environment,
		InitialEvents: api.ClientEvents{&api.UserMessage{Content: api.List[api.Block]{api.Text("[hostile] Begin.")}}}})
	if err != nil {
		t.Fatal(err)
	}
	e.Finish(s.ID)
	kept := map[string]int64{}
	n := 0
	for f, err := range c.AllFiles(t.Context(), api.FileListParams{ScopeID: s.ID}) {
		if err != nil {
			t.Fatal(err)
		}
		kept[f.Filename] = f.SizeBytes
		n++
	}
	if n != 200 || kept["a_b_[31m.txt"] != 1 {
		t.Errorf("%d files are kept, want 200 with a_b_[31m.txt: %v", n, kept)
	}
	told := func() (out []string) {
		for ev, err := range c.AllEvents(t.Context(), s.ID, api.EventListParams{}) {
			if err != nil {
				t.Fatal(err)
			}
			if b, ok := ev.Body.(*api.SessionError); ok && strings.HasPrefix(b.Error.Message, "Not all files") {
				out = append(out, b.Error.Message)
			}
		}
		return out
	}
	if got := told(); len(got) != 1 {
		t.Fatalf("told %q, want one thing\n%s", got, e.Describe(s.ID))
	}
	for _, part := range []string{"beyond the 200 files", "1 larger than 500 MiB", "1 which could not be read", "first 10,000 entries",
		`("h" of 600.0 MiB)`, `("bad�.txt" of 1 byte)`, `ends ("n/1130" of 0 bytes, "n/1131" of 0 bytes, `, " more)"} {
		if !strings.Contains(told()[0], part) {
			t.Errorf("told %q, want %q in it", told()[0], part)
		}
	}
	e.Say(s.ID, "Go on.")
	e.Finish(s.ID)
	if got := told(); len(got) != 1 {
		t.Errorf("told %q, want no more than before", got)
	}
	e.Check()
}

// TestMountFails: a resource that cannot be put into the machine is the result of
// the call that needed the machine; the next call tries again.
func TestMountFails(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	c := clientOf(e)
	in := upload(t, c, "in.txt", "content")
	e.Model.Add(t, testenv.Marked("clash", llm.PlayScript{Steps: []llm.Step{
		calls(shell("mkdir -p /workspace/x")), ending,
		calls(shell("echo ran")), calls(shell("echo ran")), ending,
	}}))
	s, err := c.CreateSession(t.Context(), api.SessionCreate{Agent: api.AgentRef{ID: e.Agent}, EnvironmentID: e.Environment,
		InitialEvents: api.ClientEvents{&api.UserMessage{Content: api.List[api.Block]{api.Text("[clash] Begin.")}}}})
	if err != nil {
		t.Fatal(err)
	}
	e.Finish(s.ID)
	to := "/workspace/x" // is a folder meanwhile
	if _, err := c.AddResource(t.Context(), s.ID, api.ResourceParams{Type: "file", FileID: in.ID, MountPath: &to}); err != nil {
		t.Fatal(err)
	}
	e.Say(s.ID, "Go on.")
	e.Finish(s.ID)
	got := resultsOf(t, e, s.ID)
	if len(got) != 3 || !strings.HasPrefix(got[1], "error: ") || !strings.Contains(got[1], "/workspace/x") || got[2] != got[1] {
		t.Errorf("results %q, want two errors that name the place\n%s", got, e.Describe(s.ID))
	}
	e.Check()
}

// TestWithoutRepository: a session whose repository cannot be fetched says so and
// runs without it (reference section 9.8); nothing of it is wedged.
func TestWithoutRepository(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	c := clientOf(e)
	in, place := upload(t, c, "in.txt", "content"), "/workspace/in.txt"
	e.Model.Add(t, testenv.Marked("without", llm.PlayScript{Steps: []llm.Step{
		calls(shell("cat /workspace/in.txt; ls /workspace")), calls(shell("echo again")), ending,
	}}))
	s, err := c.CreateSession(t.Context(), api.SessionCreate{Agent: api.AgentRef{ID: e.Agent}, EnvironmentID: e.Environment,
		Resources:     []api.ResourceParams{{Type: "github_repository", URL: "https://nowhere.invalid/a/b"}, {Type: "file", FileID: in.ID, MountPath: &place}},
		InitialEvents: api.ClientEvents{&api.UserMessage{Content: api.List[api.Block]{api.Text("[without] Begin.")}}}})
	if err != nil {
		t.Fatal(err)
	}
	e.Finish(s.ID)
	if diff := cmp.Diff([]string{"contentin.txt", "again"}, resultsOf(t, e, s.ID)); diff != "" {
		t.Errorf("results (-want +got):\n%s\n%s", diff, e.Describe(s.ID))
	}
	var told []string
	for ev, err := range c.AllEvents(t.Context(), s.ID, api.EventListParams{}) {
		if err != nil {
			t.Fatal(err)
		}
		if b, ok := ev.Body.(*api.SessionError); ok && b.Error.RepositoryURL != "" {
			told = append(told, b.Error.Type+" "+b.Error.RepositoryURL+" "+b.Error.RetryStatus.Type)
		}
	}
	if diff := cmp.Diff([]string{"repository_clone_error https://nowhere.invalid/a/b retrying"}, told); diff != "" {
		t.Errorf("told (-want +got):\n%s", diff)
	}
	e.Check()
}

// TestRepositoryError: what git says, as the API's types.
func TestRepositoryError(t *testing.T) {
	for says, want := range map[string]string{
		"fatal: could not read Username for 'https://github.com': terminal prompts disabled":              "authentication",
		"remote: Invalid username or token.\nfatal: Authentication failed for 'https://github.com/a/b/'":  "authentication",
		"fatal: unable to access 'https://github.com/a/b/': The requested URL returned error: 403":        "forbidden",
		"remote: Repository not found.\nfatal: repository 'https://github.com/a/b/' not found":            "not_found",
		"warning: Could not find remote branch x to clone.\nfatal: Remote branch x not found in upstream": "checkout",
		"fatal: remote error: upload-pack: not our ref 1111111111111111111111111111111111111111":          "checkout",
		"fatal: unable to access 'https://github.com/a/b/': The requested URL returned error: 502":        "clone",
		"/workspace/b exists and is not an empty folder":                                                  "clone",
	} {
		if got := session.RepositoryError(says); got != "repository_"+want+"_error" {
			t.Errorf("%q: %s, want %s", says, got, want)
		}
	}
}

// TestClone: a repository is fetched through the way out, at a branch or a
// commit; its origin is the real URL; nothing of a failed try stays; a second
// mount finds it.
func TestClone(t *testing.T) {
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("no git here to serve a repository with")
	}
	backend, err := exec.Command(git, "--exec-path").Output()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(git, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b", "GIT_CONFIG_GLOBAL=/dev/null")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	run("init", "-q", "-b", "main", ".")
	commit := func(text string) string {
		if err := os.WriteFile(filepath.Join(dir, "f"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		run("add", "f")
		run("commit", "-q", "-m", text)
		return run("rev-parse", "HEAD")
	}
	first := commit("one")
	commit("two")
	run("checkout", "-q", "-b", "side", first)
	commit("side")
	run("checkout", "-q", "main")

	// The way out: http://repositories.planaria/sesrsc_…/… is this repository.
	serve := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		if r.Host != "repositories.planaria" || !strings.HasPrefix(name, "sesrsc_") || strings.HasSuffix(name, "gone") {
			http.Error(w, "no such repository", http.StatusNotFound)
			return
		}
		r.URL.Path = "/.git/" + rest
		(&cgi.Handler{Path: filepath.Join(strings.TrimSpace(string(backend)), "git-http-backend"),
			Env: []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1"}}).ServeHTTP(w, r)
	})}
	l := &connListener{conns: make(chan net.Conn, 16), closed: make(chan struct{})}
	go func() { _ = serve.Serve(l) }() // ends with the server
	defer serve.Close()
	r, err := sandbox.Open(t.Context(), sandbox.Config{Dir: t.TempDir(), Binary: testenv.Binary(t),
		Egress: func(ctx context.Context, _ *sandbox.Sandbox, conn io.ReadWriteCloser) {
			done := make(chan struct{})
			l.conns <- &pipeConn{ReadWriteCloser: conn, done: done}
			select {
			case <-done:
			case <-ctx.Done():
			}
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	s, err := r.Start(t.Context(), sandbox.Spec{Workspace: "default", ID: "sesn_clone", Fence: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Kill(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	n := 0
	shell := func(command string) *sandbox.Result {
		t.Helper()
		n++
		in, err := json.Marshal(map[string]any{"command": command})
		if err != nil {
			t.Fatal(err)
		}
		res, err := s.Do(t.Context(), sandbox.Call{ID: fmt.Sprintf("call_%d", n), Thread: "t", Tool: "bash", Input: in})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	const url = "https://github.com/a/b'c" // never dialled
	for _, c := range []struct {
		name     string
		path     string
		checkout *api.Checkout
		want     string
	}{
		{"default", "/workspace/it's b", nil, "two main"},
		{"branch", "/workspace/deep/er/c", &api.Checkout{Type: "branch", Name: "side"}, "side side"},
		{"commit", "/workspace/d", &api.Checkout{Type: "commit", SHA: first}, "one HEAD"},
	} {
		res := api.Resource{Type: api.ResourceRepository, ID: "sesrsc_" + c.name, URL: url, MountPath: c.path, Checkout: c.checkout}
		for range 2 {
			if out := shell(session.CloneCommand(res)); out.IsError {
				t.Fatalf("%s: %s", c.name, out.Text)
			}
		}
		q := "'" + strings.ReplaceAll(c.path, "'", `'\''`) + "'"
		out := shell("cd " + q + " && echo $(cat f) $(git rev-parse --abbrev-ref HEAD); git config remote.origin.url; git fetch -q && git status --porcelain; ls -d " + q + ".*")
		lines := strings.Split(strings.TrimSpace(out.Text), "\n")
		if len(lines) < 2 || lines[0] != c.want || lines[1] != url {
			t.Errorf("%s: %q, want %q and %q", c.name, lines, c.want, url)
		}
		if strings.Contains(out.Text, "planaria-clone") {
			t.Errorf("%s: a half clone is left: %s", c.name, out.Text)
		}
	}
	for name, res := range map[string]api.Resource{
		"no repository": {ID: "sesrsc_gone", MountPath: "/workspace/no"},
		"no branch":     {ID: "sesrsc_x", MountPath: "/workspace/no", Checkout: &api.Checkout{Type: "branch", Name: "nope"}},
		"no commit":     {ID: "sesrsc_x", MountPath: "/workspace/no", Checkout: &api.Checkout{Type: "commit", SHA: strings.Repeat("1", 40)}},
		"taken":         {ID: "sesrsc_x", MountPath: "/workspace/d"},
	} {
		res.Type, res.URL = api.ResourceRepository, url
		if out := shell(session.CloneCommand(res)); !out.IsError || out.Text == "" {
			t.Errorf("%s: %+v, want an error that says why", name, out)
		}
	}
	if out := shell("ls /workspace/no; cat /workspace/d/f"); !strings.Contains(out.Text, "No such file") || !strings.HasSuffix(strings.TrimSpace(out.Text), "one") {
		t.Errorf("after failed tries: %s", out.Text)
	}
	if out := shell("echo here"); out.IsError || strings.TrimSpace(out.Text) != "here" {
		t.Errorf("the shell is not usable any more: %+v", out)
	}
}

// connListener accepts the connections that come through the way out.
type connListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (l *connListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}
func (l *connListener) Close() error   { close(l.closed); return nil }
func (l *connListener) Addr() net.Addr { return &net.TCPAddr{} }

// pipeConn makes a connection of what comes from inside.
type pipeConn struct {
	io.ReadWriteCloser
	done chan struct{}
}

func (c *pipeConn) Close() error {
	select {
	case <-c.done:
	default:
		close(c.done)
	}
	return c.ReadWriteCloser.Close()
}
func (c *pipeConn) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *pipeConn) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *pipeConn) SetDeadline(time.Time) error      { return nil }
func (c *pipeConn) SetReadDeadline(time.Time) error  { return nil }
func (c *pipeConn) SetWriteDeadline(time.Time) error { return nil }

// TestResourceChange: what changes of a list keep, replace, refuse.
func TestResourceChange(t *testing.T) {
	put := func(id, path string) *session.ResourceChange {
		raw, err := api.Encode(api.Resource{Type: "file", ID: id, FileID: "f_" + id, MountPath: path})
		if err != nil {
			t.Fatal(err)
		}
		return &session.ResourceChange{ID: id, Put: raw}
	}
	var c store.SessionConfig
	apply := func(r *session.ResourceChange) error {
		t.Helper()
		drafts, err := session.UpdateDrafts(c, session.UpdateParams{Resources: r}, time.Now())
		if err != nil || len(drafts) == 0 {
			return err
		}
		if len(drafts) != 1 || drafts[0].Kind != store.KindConfig {
			t.Errorf("drafts = %+v, want one record and no event", drafts)
		}
		var b store.ConfigChange
		if err := json.Unmarshal(drafts[0].Body, &b); err != nil {
			t.Fatal(err)
		}
		c = b.Config
		return nil
	}
	for _, step := range []struct {
		r    *session.ResourceChange
		fail bool
		want string
	}{
		{put("a", "/workspace/a"), false, "a"},
		{put("b", "/workspace/b"), false, "ab"},
		{put("c", "/workspace/b"), true, "ab"},
		{put("c", "/workspace/b/c"), true, "ab"},
		{put("a", "/workspace/a"), false, "ab"},
		{&session.ResourceChange{ID: "a"}, false, "b"},
		{&session.ResourceChange{ID: "a"}, false, "b"},
		{&session.ResourceChange{ID: "a", Put: put("a", "/workspace/a").Put, Replace: true}, true, "b"},
		{&session.ResourceChange{ID: "b", Put: put("b", "/workspace/b").Put, Replace: true}, false, "b"},
	} {
		if err := apply(step.r); (err != nil) != step.fail {
			t.Errorf("change %+v: %v", step.r, err)
		}
		var all []api.Resource
		if err := json.Unmarshal(c.Resources, &all); err != nil {
			t.Fatal(err)
		}
		var got bytes.Buffer
		for _, r := range all {
			got.WriteString(r.ID)
		}
		if got.String() != step.want {
			t.Errorf("after %+v: %q, want %q", step.r, got.String(), step.want)
		}
	}
}

// TestUpdateThroughInbox: what an update leaves out is kept also when it goes
// through the inbox of a session that somebody owns.
func TestUpdateThroughInbox(t *testing.T) {
	title := "t"
	for _, p := range []session.UpdateParams{
		{Title: &title}, {Budget: json.RawMessage("null")}, {Resources: &session.ResourceChange{ID: "a"}},
		{Tools: json.RawMessage("[]"), MCPServers: json.RawMessage("[]")},
	} {
		raw, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		var got session.UpdateParams
		if err := json.Unmarshal(raw, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(p, got); diff != "" {
			t.Errorf("update changed on its way (-sent +taken):\n%s", diff)
		}
	}
}

// TestAdditionsAtOnePlace: of two files for one place in a session that is at
// work the second is refused. Accepting both would leave one out in silence.
func TestAdditionsAtOnePlace(t *testing.T) {
	arrived, release := make(chan struct{}, 1), make(chan struct{})
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "look", Class: "read"})
	world.Script("look", testenv.MCPFault{Before: true, Kind: "hang", Arrived: arrived, Release: release})
	e := newEnv(t, world, map[string]string{"look": read}, calls(use("look", "1")), done)
	e.pat.Echo = time.Millisecond // the owner is not waited for
	e.restart()
	id := e.begin()
	<-arrived
	add := func(resource, path string) error {
		raw, err := api.Encode(api.Resource{Type: "file", ID: resource, FileID: "f_" + resource, MountPath: path})
		if err != nil {
			t.Fatal(err)
		}
		_, err = e.manager.Update(t.Context(), ws, id, session.UpdateParams{Resources: &session.ResourceChange{ID: resource, Put: raw}})
		return err
	}
	if err := add("first", "/workspace/in"); err != nil {
		t.Error(err)
	}
	if err := add("second", "/workspace/in"); !errors.Is(err, session.ErrInput) {
		t.Errorf("another file at the same place: %v", err)
	}
	if err := add("third", "/workspace/other"); err != nil {
		t.Error(err)
	}
	close(release)
	e.rests(id, 1)
	e.asleep(id)
	var got []string
	var all []api.Resource
	if err := json.Unmarshal(e.session(id).Config.Resources, &all); err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		got = append(got, r.ID)
	}
	if diff := cmp.Diff([]string{"first", "third"}, got); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
}
