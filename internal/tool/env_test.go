package tool_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/tool"
)

var buildDir string

func TestMain(m *testing.M) {
	code := m.Run()
	if buildDir != "" {
		_ = os.RemoveAll(buildDir)
	}
	os.Exit(code)
}

// binary is the real program with gVisor and the agent.
var binary = sync.OnceValues(func() (string, error) {
	if b := os.Getenv("PLANARIA_TEST_SANDBOX"); b != "" {
		return b, nil
	}
	var err error
	if buildDir, err = os.MkdirTemp("", "planaria-tool-"); err != nil {
		return "", err
	}
	out := filepath.Join(buildDir, "planaria")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "../../cmd/planaria-sandbox")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the binary: %w: %s", err, b)
	}
	return out, nil
})

var findings = sync.OnceValue(func() []sandbox.Finding {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	b, _ := binary()
	return sandbox.Probe(ctx, sandbox.Config{Binary: b})
})

// env is a runtime with its sandboxes, all killed at the end.
type env struct {
	t     testing.TB
	r     *sandbox.Runtime
	calls atomic.Int64
}

func open(t testing.TB, change ...func(*sandbox.Config)) *env {
	t.Helper()
	b, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings() {
		if f.Fatal && !f.OK {
			t.Skipf("this machine runs no sandbox: %s: %s (%s)", f.What, f.Says, f.Mend)
		}
	}
	cfg := sandbox.Config{Dir: filepath.Join(t.TempDir(), "sandboxes"), Binary: b, StartTimeout: time.Minute}
	for _, c := range change {
		c(&cfg)
	}
	e := &env{t: t}
	if e.r, err = sandbox.Open(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.r.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func (e *env) start(spec sandbox.Spec) *sandbox.Sandbox {
	e.t.Helper()
	spec.Workspace, spec.Fence = "w1", 1
	s, err := e.r.Start(e.t.Context(), spec)
	if err != nil {
		e.t.Fatal(err)
	}
	e.killAtEnd(s)
	return s
}

func (e *env) killAtEnd(s *sandbox.Sandbox) {
	e.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.Kill(ctx); err != nil {
			e.t.Error(err)
		}
	})
}

type in = map[string]any

func sorted(names []string) string {
	slices.Sort(names)
	return strings.Join(names, " ")
}

// run runs a tool to its answer.
func (e *env) run(s *sandbox.Sandbox, name string, input any) gateway.Answer {
	e.t.Helper()
	b, err := json.Marshal(input)
	if err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(e.t.Context(), 2*time.Minute)
	defer cancel()
	a, err := tool.Run(ctx, s, tool.Call{ID: fmt.Sprintf("call_%06d", e.calls.Add(1)), Thread: "main", Name: name, Input: b}, nil)
	if err != nil {
		e.t.Fatalf("%s %s: %v", name, b, err)
	}
	return a
}

// sh runs a command that must end well, and returns what it says.
func (e *env) sh(s *sandbox.Sandbox, command string) string {
	e.t.Helper()
	a := e.run(s, "bash", in{"command": command})
	if a.IsError {
		e.t.Fatalf("%s: %s", command, text(e.t, a))
	}
	return strings.TrimSpace(text(e.t, a))
}

type block struct {
	Type   string `json:"type"`
	Text   string `json:"text"`
	Source struct {
		Type      string `json:"type"`
		MediaType string `json:"media_type"`
		Data      []byte `json:"data"`
	} `json:"source"`
}

func blocks(t testing.TB, a gateway.Answer) []block {
	t.Helper()
	var out []block
	if err := json.Unmarshal(a.Content, &out); err != nil || len(out) == 0 {
		t.Fatalf("content %.200s: %v", a.Content, err)
	}
	return out
}

// text is the text of an answer's first block, which is never empty.
func text(t testing.TB, a gateway.Answer) string {
	t.Helper()
	b := blocks(t, a)[0]
	if b.Type != "text" || b.Text == "" {
		t.Fatalf("first block %.200s is no text", a.Content)
	}
	return b.Text
}
