package sandbox_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// TestIsolation: what is tried from inside against the machine and against
// another tenant (design L11, attacks F1 to F3, trial X1).
func TestIsolation(t *testing.T) {
	e := open(t, func(c *sandbox.Config) {
		c.Egress = func(_ context.Context, s *sandbox.Sandbox, conn io.ReadWriteCloser) {
			fmt.Fprintf(conn, "this is %s/%s\n", s.Workspace(), s.ID())
			_ = conn.Close()
		}
	})
	const canary = "canary-5512"
	t.Setenv("PLANARIA_CANARY", canary)
	outside := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(outside, []byte(canary), 0o644); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	s := e.start("inside")
	other := e.start("other", func(s *sandbox.Spec) { s.Workspace = "w2" })
	e.sh(other, "echo "+canary+" > /workspace/secret; echo "+canary+" > /tmp/secret; echo "+canary+" > /dev/shm/secret")

	for _, tt := range []struct{ name, command string }{
		{"a path of the machine", "cat " + outside},
		{"a folder of the machine", "ls " + filepath.Dir(outside)},
		{"up from the root", "cat /../../.." + outside},
		{"a link out", "ln -s " + outside + " l; cat l"},
		{"a link to the root of process 1", "cat /proc/1/root" + outside},
		{"its descriptors", "for f in /proc/1/fd/*; do cat $f" + outside + "; done"},
		{"the environment of all", "cat /proc/*/environ | tr '\\0' '\\n'"},
		{"command lines of the machine", "cat /proc/*/cmdline | tr '\\0' ' ' | grep -v planaria-agent | grep -v 'cat /proc' | grep runsc"},
		{"a port of the machine", "exec 3<>/dev/tcp/127.0.0.1/" + port},
		{"the metadata service", "timeout 2 bash -c 'exec 3<>/dev/tcp/169.254.169.254/80'"},
		{"a name", "getent hosts example.com"},
		{"a device", "mknod d b 254 0 && head -c 1 d"},
		{"memory of process 1", "head -c 100 /proc/1/mem"},
		{"a mount", "mkdir -p m && mount -t proc none m"},
		{"a bind of the socket's folder", "mount --bind /.planaria/ctl /mnt"},
		{"the socket's place", "touch /.planaria/ctl/x"},
		{"the binary", "echo x >> /.planaria/bin/planaria-agent"},
		{"kernel modules", "echo x > /proc/sys/kernel/core_pattern"},
	} {
		r := e.do(s, "bash", in{"command": tt.command, "timeout_ms": 20000})
		if !r.IsError && tt.name != "the environment of all" || strings.Contains(r.Text, canary) {
			t.Errorf("%s: %s: %.300q", tt.name, tt.command, r.Text)
		}
	}
	if r := e.do(s, "bash", in{"command": "grep -rs " + canary + " /workspace /tmp /dev/shm /run /var /root /home /mnt /etc"}); !r.IsError {
		t.Errorf("the other tenant's canary was found: %q", r.Text)
	}
	for _, tool := range []string{"read", "grep"} {
		r := e.do(s, tool, map[string]in{"read": {"file_path": "/workspace/../../../" + outside}, "grep": {"pattern": canary, "path": "/proc/1/root/" + outside}}[tool])
		if !r.IsError {
			t.Errorf("%s out: %+v", tool, r)
		}
	}
	// The machine's /usr is as it was, although inside it can be written.
	e.sh(s, "echo x > /usr/bin/planaria-was-here; rm /usr/bin/env")
	if _, err := os.Stat("/usr/bin/planaria-was-here"); err == nil {
		t.Error("a write to /usr arrived outside")
	}
	if _, err := os.Stat("/usr/bin/env"); err != nil {
		t.Error("a file of the machine is gone")
	}
	if r := e.do(other, "bash", in{"command": "ls /usr/bin/planaria-was-here"}); !r.IsError {
		t.Error("a write to /usr arrived in another sandbox")
	}
	// The way out is the identity: each sandbox is known by its own socket.
	for s, want := range map[*sandbox.Sandbox]string{s: "this is w1/inside", other: "this is w2/other"} {
		if got := e.sh(s, "exec 3<>/dev/tcp/127.0.0.1/3128; head -1 <&3"); got != want {
			t.Errorf("the way out says %q, want %q", got, want)
		}
	}
	// A process inside cannot pass for the agent.
	if !e.do(s, "bash", in{"command": "which python3"}).IsError {
		e.sh(s, `python3 - <<'X'
import socket, time
for i in range(20):
    c = socket.socket(socket.AF_UNIX); c.connect("/.planaria/ctl/ctl.sock")
    c.sendall(b"\0\0\0\2{}"); c.settimeout(1)
    try: c.recv(100000)
    except OSError: pass
    c.close()
X`)
		if got := e.sh(s, "echo still here"); got != "still here" {
			t.Errorf("after strangers on the socket: %q", got)
		}
	}
}

// TestLimits: who hits a limit is told, and the sandbox lives on.
func TestLimits(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("limits", func(s *sandbox.Spec) {
		s.Limits = sandbox.Limits{MemoryBytes: 300 << 20, DiskBytes: 64 << 20, Processes: 64, CPUs: 1, CallTime: 5 * time.Second}
	})
	neighbour := e.start("neighbour")
	for _, tt := range []struct{ name, command, want string }{
		{"disk", "head -c 200000000 /dev/zero > /workspace/fill; rc=$?; rm -f /workspace/fill; (exit $rc)", "No space left on device"},
		{"fork bomb", "bomb() { bomb | bomb & }; bomb; sleep 4", "more than 64 processes"},
		{"memory", "head -c 1000000000 /dev/zero | tail -c 900000000 | wc -c", "MiB of memory"},
		{"time", "sleep 60", "timed out after 5000 ms"},
	} {
		began := time.Now()
		r := e.do(s, "bash", in{"command": tt.command, "timeout_ms": 3600_000})
		if !r.IsError || !strings.Contains(r.Text, tt.want) {
			t.Errorf("%s: %+v, want %q", tt.name, r, tt.want)
		}
		t.Logf("%s: %v: %.200q", tt.name, time.Since(began), r.Text)
		if got := e.sh(s, "echo lives"); !strings.HasSuffix(got, "lives") {
			t.Errorf("after %s: %q", tt.name, got)
		}
		if got := e.sh(neighbour, "echo lives"); got != "lives" {
			t.Errorf("the neighbour after %s: %q", tt.name, got)
		}
	}
}

// TestDensity: twenty at once, each its own.
func TestDensity(t *testing.T) {
	t.Parallel()
	e := open(t)
	const n = 20
	before := available(t)
	began := time.Now()
	all := make([]*sandbox.Sandbox, n)
	slots := make(chan struct{}, 2)
	var wait sync.WaitGroup
	for i := range n {
		wait.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			var err error
			if all[i], err = e.r.Start(t.Context(), sandbox.Spec{Workspace: "w1", ID: fmt.Sprintf("d%02d", i), Fence: 1}); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if t.Failed() {
		return
	}
	t.Logf("%d started in %v, %d KiB each", n, time.Since(began), (before-available(t))/n)
	for i, s := range all {
		e.sh(s, fmt.Sprintf("echo %d > /workspace/me", i))
	}
	for i, s := range all {
		if got := e.sh(s, "cat /workspace/me"); got != fmt.Sprint(i) {
			t.Errorf("sandbox %d says %q", i, got)
		}
	}
}

// available is the machine's free memory in KiB.
func available(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var n int64
		if _, err := fmt.Sscanf(line, "MemAvailable: %d kB", &n); err == nil {
			return n
		}
	}
	t.Fatal("no MemAvailable")
	return 0
}
