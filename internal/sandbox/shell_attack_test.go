//go:build linux

package sandbox_test

import (
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// TestShellAttacked: what a command can do to the shell that it runs in costs the
// agent neither its memory, which no limit of the sandbox counts, nor the end of a
// call.
func TestShellAttacked(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("attacked", func(s *sandbox.Spec) { s.Limits.MemoryBytes = 200 << 20 })
	// A shell that reads no more, and a command that it would have to read.
	e.sh(s, "(sleep 0.5; kill -STOP $$) > /dev/null 2>&1 & sleep 0.1")
	<-time.After(time.Second)
	began := time.Now()
	got := e.do(s, "bash", in{"command": "true " + strings.Repeat("x", 300_000), "timeout_ms": 1000})
	t.Logf("%v: %.200q", time.Since(began), got.Text)
	if took := time.Since(began); took > 20*time.Second || !got.IsError {
		t.Errorf("a command that nobody reads took %v: %.200q", took, got.Text)
	}
	if got := e.sh(s, "echo lives"); got != "lives" {
		t.Errorf("after a stopped shell: %q", got)
	}
	// Exit codes that have no end.
	before, err := s.Stats()
	if err != nil {
		t.Fatal(err)
	}
	got = e.do(s, "bash", in{"command": "for f in /proc/$$/fd/*; do [ -p $f ] && timeout -s KILL 2 cat /dev/zero > $f; done 2>/dev/null; echo wrote", "timeout_ms": 20000})
	after, err := s.Stats()
	if err != nil {
		t.Fatalf("%v after %.200q", err, got.Text)
	}
	t.Logf("%.100q: %d MiB, then %d MiB", got.Text, before.Memory>>20, after.Memory>>20)
	if after.Memory > before.Memory+100<<20 {
		t.Errorf("it took %d MiB, then %d MiB", before.Memory>>20, after.Memory>>20)
	}
	if got := e.do(s, "bash", in{"restart": true, "command": "echo lives"}); !strings.Contains(got.Text, "lives") {
		t.Errorf("after codes without end: %+v", got)
	}
}
