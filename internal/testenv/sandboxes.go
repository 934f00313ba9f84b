package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// program is the real binary, which holds gVisor and the agent inside: the one
// that PLANARIA_TEST_SANDBOX names, else built once in a test process.
var program = sync.OnceValues(func() (string, error) {
	if b := os.Getenv("PLANARIA_TEST_SANDBOX"); b != "" {
		return b, nil
	}
	_, here, _, ok := runtime.Caller(0)
	if !ok {
		return "", errors.New("the source of testenv is not found")
	}
	dir, err := os.MkdirTemp("", "planaria-program-")
	if err != nil {
		return "", err
	}
	// The file goes at once and its descriptor stays, so that nothing is left
	// behind however the test process ends.
	defer os.RemoveAll(dir)
	out := filepath.Join(dir, "planaria")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "./cmd/planaria-sandbox")
	cmd.Dir = filepath.Join(filepath.Dir(here), "..", "..")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the binary: %w: %s", err, b)
	}
	fd, err := syscall.Open(out, syscall.O_RDONLY|syscall.O_CLOEXEC, 0) // never closed
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd), nil
})

var probed = sync.OnceValue(func() []sandbox.Finding {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	b, err := program()
	if err != nil {
		return nil
	}
	return sandbox.Probe(ctx, sandbox.Config{Binary: b})
})

// Binary is the real program. The test is skipped where no sandbox can run, and
// says what is missing.
func Binary(t testing.TB) string {
	t.Helper()
	b, err := program()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range probed() {
		if f.Fatal && !f.OK {
			t.Skipf("this machine runs no sandbox: %s: %s (%s)", f.What, f.Says, f.Mend)
		}
	}
	return b
}

// sandboxAgent has the built-in tools, the world's and the client's.
func sandboxAgent() M {
	return M{"name": "worker", "model": "scripted-1", "system": "You are under test.",
		"mcp_servers": []M{{"type": "url", "name": "w", "url": "planaria:outside"}},
		"tools": []M{
			{"type": "agent_toolset_20260401"},
			{"type": "mcp_toolset", "mcp_server_name": "w", "default_config": M{"permission_policy": M{"type": "always_allow"}}},
		}}
}

// openSandboxes opens the folder of sandboxes for one life.
func (e *Env) openSandboxes(ctx context.Context, l *life, log *slog.Logger) (err error) {
	b, err := program()
	if err != nil {
		return err
	}
	l.machines, err = sandbox.Open(ctx, sandbox.Config{Dir: filepath.Join(e.dir, "sandboxes"), Blobs: l.blobs, Binary: b, Log: log,
		Egress: func(ctx context.Context, s *sandbox.Sandbox, conn io.ReadWriteCloser) {
			l.Sessions.Egress(ctx, s, conn)
		}})
	return err
}

// endSandboxes ends every sandbox that lives on.
func (e *Env) endSandboxes() {
	if !e.opts.Sandboxes {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), Deadline)
	defer cancel()
	b, err := program()
	if err != nil {
		return
	}
	r, err := sandbox.Open(ctx, sandbox.Config{Dir: filepath.Join(e.dir, "sandboxes"), Binary: b})
	if err != nil {
		e.t.Errorf("open sandboxes to end them: %v", err)
		return
	}
	for _, key := range r.Live() {
		if err := r.End(ctx, key[0], key[1]); err != nil {
			e.t.Error(err)
		}
	}
	if err := r.Close(); err != nil {
		e.t.Error(err)
	}
}

// Without makes the lives from the next one on run no sandboxes, or run them
// again. Those that live go on.
func (e *Env) Without(yes bool) { e.without = yes }

// Machines runs the sandboxes of this life.
func (e *Env) Machines() *sandbox.Runtime { return e.life.machines }

// KillSandbox ends a session's sandbox as its host's death would: the processes
// of gVisor get SIGKILL, nobody is told.
func (e *Env) KillSandbox(id string) {
	e.t.Helper()
	pid := e.SandboxPID(id)
	if pid == 0 {
		e.t.Fatalf("session %s has no sandbox", id)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		e.t.Fatal(err)
	}
}

// SandboxPID is the process of a session's sandbox; 0 when it has none.
func (e *Env) SandboxPID(id string) int {
	states, err := filepath.Glob(filepath.Join(e.dir, "sandboxes", "live", "*", "state.json"))
	if err != nil {
		e.t.Fatal(err)
	}
	for _, file := range states {
		var st struct {
			ID    string `json:"id"`
			Phase string `json:"phase"`
			PID   int    `json:"pid"`
		}
		b, err := os.ReadFile(file)
		if err != nil {
			continue // it went meanwhile
		}
		if json.Unmarshal(b, &st) == nil && st.ID == id && st.Phase == "running" && lives(st.PID) {
			return st.PID
		}
	}
	return 0
}

// lives reports whether a process runs; one that waits to be reaped does not.
func lives(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	return len(f) > 0 && f[0] != "Z" && f[0] != "X"
}

// Say sends a message to a session.
func (e *Env) Say(id, text string) {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Deadline)
	defer cancel()
	if _, err := e.API.Send(ctx, id, "", Message(text)); err != nil {
		e.t.Fatal(err)
	}
}
