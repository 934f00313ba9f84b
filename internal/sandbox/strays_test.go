//go:build linux

package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// creating waits until gVisor makes a sandbox in a folder and has started its
// first process, and returns the command that does; 0 when over is closed before.
func creating(t *testing.T, dir string, over <-chan struct{}) int {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		select {
		case <-over:
			return 0
		default:
		}
		maker, booted := map[string]int{}, map[string]bool{}
		lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, line := range lines {
			b, _ := os.ReadFile(line)
			args := strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
			name := args[len(args)-1]
			switch {
			case !strings.Contains(string(b), dir):
			case args[0] == "runsc-sandbox":
				booted[name] = true
			case args[0] == "runsc" && strings.Contains(string(b), "\x00create\x00"):
				maker[name], _ = strconv.Atoi(filepath.Base(filepath.Dir(line)))
			}
		}
		for name, pid := range maker {
			if booted[name] {
				return pid
			}
		}
	}
	t.Fatal("no sandbox is made")
	return 0
}

// TestStartCutShort: who asked for a sandbox leaves while gVisor makes it, or
// gVisor's command is killed then (for want of memory, say). Nothing is left of it:
// no process that no record names, and none of gVisor's own notes.
func TestStartCutShort(t *testing.T) {
	t.Parallel()
	e := open(t)
	e.start("first")
	before := e.left()
	for _, tt := range []struct {
		name string
		cut  func(leave func(error), maker int) error
	}{
		{"left", func(leave func(error), _ int) error { leave(errors.New("interrupted")); return nil }},
		{"killed", func(_ func(error), maker int) error { return syscall.Kill(maker, syscall.SIGKILL) }},
	} {
		for {
			err := e.cutShort(t, tt.cut)
			if err == nil {
				continue // it was whole before it could be cut short
			}
			t.Logf("%s: %v", tt.name, err)
			break
		}
		var l left
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); <-time.After(20 * time.Millisecond) {
			if l = e.left(); l.processes == before.processes {
				break
			}
		}
		if l.processes != before.processes || l.folders != before.folders || l.state != before.state {
			t.Errorf("%s: left %+v, before %+v", tt.name, l, before)
		}
	}
}

// cutShort starts a sandbox and cuts it short. nil: it was too late for that.
func (e *env) cutShort(t *testing.T, cut func(leave func(error), maker int) error) error {
	t.Helper()
	ctx, leave := context.WithCancelCause(t.Context())
	defer leave(nil)
	over := make(chan struct{})
	var s *sandbox.Sandbox
	var err error
	go func() {
		defer close(over)
		s, err = e.r.Start(ctx, sandbox.Spec{Workspace: "w1", ID: "cut", Fence: 1})
	}()
	if maker := creating(t, e.dir, over); maker != 0 {
		if err := cut(leave, maker); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
	<-over
	if err == nil {
		if err := s.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return err
}

// stops stops a process; false: it has ended.
func stops(pid int) bool {
	if syscall.Kill(pid, syscall.SIGSTOP) != nil {
		return false
	}
	for {
		b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		switch {
		case err != nil || len(f) == 0 || f[0] == "Z" || f[0] == "X":
			return false
		case f[0] == "T":
			return true
		}
	}
}

// TestServerKilledInStart: the server is killed while gVisor makes a sandbox for
// it, which goes on. The next server waits for that, and then sweeps: it once
// swept too early, and what came behind it ran for ever.
func TestServerKilledInStart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd, lines := startChild(t, "starts", dir)
	until(t, lines, "next:")
	maker := creating(t, dir, nil)
	for !stops(maker) { // it had ended before; there is a next one
		maker = creating(t, dir, nil)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	goOn := time.AfterFunc(time.Second, func() { _ = syscall.Kill(maker, syscall.SIGCONT) })
	e := take(t, dir)
	if goOn.Stop() {
		_ = syscall.Kill(maker, syscall.SIGCONT)
		t.Error("the next server did not wait")
	}
	s, err := e.r.Find(t.Context(), "w1", "s", 8)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if l := e.left(); l.processes > 0 || l.folders > 0 || l.state > 0 {
		t.Errorf("left %+v", l)
	}
}
