package sandbox_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/sandbox"
)

// childVariable makes this test program another one: see child_test.go.
const childVariable = "PLANARIA_TEST_CHILD"

func TestMain(m *testing.M) {
	if role := os.Getenv(childVariable); role != "" {
		child(role)
		return
	}
	// Tests of sandboxes wait more than they compute.
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("6")
	}
	code := m.Run()
	if buildDir != "" {
		_ = os.RemoveAll(buildDir)
	}
	os.Exit(code)
}

var buildDir string

// build makes the real program that sandboxes run. With a version, gVisor calls
// itself that, and the program is the whole of planaria, as go install makes it.
func build(name, version string) (string, error) {
	if buildDir == "" {
		var err error
		if buildDir, err = os.MkdirTemp("", "planaria-sandbox-"); err != nil {
			return "", err
		}
	}
	out := filepath.Join(buildDir, name)
	flags, program := "-ldflags=-s -w", "../../cmd/planaria-sandbox"
	if version != "" {
		flags += " -X gvisor.dev/gvisor/runsc/version.version=" + version
		program = "../../cmd/planaria"
	}
	// As the Makefile does, so that what it compiled is used.
	cmd := exec.Command("go", "build", "-trimpath", "-gcflags=github.com/openai/openai-go/v3/...=-N -l", "-o", out, flags, program)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the binary: %w: %s", err, b)
	}
	return out, nil
}

var buildOnce = sync.OnceValues(func() (string, error) {
	if b := os.Getenv("PLANARIA_TEST_SANDBOX"); b != "" {
		return b, nil
	}
	return build("planaria", "")
})

// binary is the real program; the test is skipped where no sandbox can run.
func binary(t testing.TB) string {
	t.Helper()
	b, err := buildOnce()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range probed(b) {
		if f.Fatal && !f.OK {
			t.Skipf("this machine runs no sandbox: %s: %s (%s)", f.What, f.Says, f.Mend)
		}
	}
	return b
}

var (
	probeOnce sync.Once
	findings  []sandbox.Finding
)

func probed(b string) []sandbox.Finding {
	probeOnce.Do(func() {
		ctx, cancel := contextFor(2 * time.Minute)
		defer cancel()
		findings = sandbox.Probe(ctx, sandbox.Config{Binary: b})
	})
	return findings
}

type env struct {
	t     testing.TB
	r     *sandbox.Runtime
	blobs *blob.Folder
	dir   string
	calls atomic.Int64
}

type testLog struct{ t testing.TB }

func (l testLog) Write(p []byte) (int, error) {
	l.t.Log(string(bytes.TrimSpace(p)))
	return len(p), nil
}

// open makes a runtime in a folder of its own. Every sandbox that is left at the
// end is killed.
func open(t testing.TB, change ...func(*sandbox.Config)) *env {
	t.Helper()
	b := binary(t)
	dir := t.TempDir()
	blobs, err := blob.Open(filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	e := &env{t: t, dir: filepath.Join(dir, "sandboxes"), blobs: blobs}
	cfg := sandbox.Config{Dir: e.dir, Binary: b, Blobs: blobs, StartTimeout: time.Minute}
	for _, c := range change {
		c(&cfg)
	}
	e.reopen(cfg)
	t.Cleanup(func() {
		if e.r != nil {
			e.killAll()
			if err := e.r.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		}
		_ = blobs.Close()
	})
	return e
}

func (e *env) reopen(cfg sandbox.Config) {
	e.t.Helper()
	if testing.Verbose() {
		cfg.Log = slog.New(slog.NewTextHandler(testLog{e.t}, nil))
	}
	var err error
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	if e.r, err = sandbox.Open(ctx, cfg); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) killAll() {
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	for _, l := range e.r.Live() {
		s, err := e.r.Find(ctx, l[0], l[1], 1<<40)
		if err != nil {
			e.t.Errorf("find %v to kill it: %v", l, err)
			continue
		}
		if err := s.Kill(ctx); err != nil {
			e.t.Error(err)
		}
	}
}

func (e *env) start(id string, change ...func(*sandbox.Spec)) *sandbox.Sandbox {
	e.t.Helper()
	spec := sandbox.Spec{Workspace: "w1", ID: id, Fence: 1}
	for _, c := range change {
		c(&spec)
	}
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	s, err := e.r.Start(ctx, spec)
	if err != nil {
		e.t.Fatal(err)
	}
	return s
}

func (e *env) snapshot(s *sandbox.Sandbox) *sandbox.Manifest {
	e.t.Helper()
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	m, err := s.Snapshot(ctx)
	if err != nil {
		e.t.Fatal(err)
	}
	return m
}

func (e *env) restore(m *sandbox.Manifest, id string) (*sandbox.Sandbox, *sandbox.Restored) {
	e.t.Helper()
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	s, back, err := e.r.Restore(ctx, m, sandbox.Spec{Workspace: m.Workspace, ID: id, Fence: 1})
	if err != nil {
		e.t.Fatal(err)
	}
	return s, back
}

func (e *env) id() string { return fmt.Sprintf("call_%06d", e.calls.Add(1)) }

// do runs a tool to its result.
func (e *env) do(s *sandbox.Sandbox, tool string, input any) *sandbox.Result {
	e.t.Helper()
	in, err := json.Marshal(input)
	if err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := contextFor(2 * time.Minute)
	defer cancel()
	r, err := s.Do(ctx, sandbox.Call{ID: e.id(), Thread: "main", Tool: tool, Input: in})
	if err != nil {
		e.t.Fatalf("%s %s: %v", tool, in, err)
	}
	return r
}

type in = map[string]any

// sh runs a shell command that must end well, and returns what it says.
func (e *env) sh(s *sandbox.Sandbox, command string) string {
	e.t.Helper()
	r := e.do(s, "bash", in{"command": command})
	if r.IsError {
		e.t.Fatalf("%s: %s", command, r.Text)
	}
	return strings.TrimSpace(r.Text)
}
