package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// TestProcessOne: what root inside can do to the agent. Its key is out of reach,
// and most signals do nothing. One that kills it ends the sandbox, as pulling
// the plug would; its snapshot comes back. One that stops it is undone.
func TestProcessOne(t *testing.T) {
	defer sandbox.SetSilence(time.Second)()
	e := open(t)
	s := e.start("one")
	e.sh(s, "echo kept > f")
	m := e.snapshot(s)
	copied, _ := e.restore(m, "copy")
	for _, s := range []*sandbox.Sandbox{s, copied} {
		for _, command := range []string{
			"head -c 1 /proc/1/mem", "cat /proc/1/environ", "cat /proc/1/maps", "readlink /proc/1/fd/0", "ls /proc/1/root/",
			"unshare -Ur head -c 1 /proc/1/mem", "unshare -Ur ls /proc/1/root/",
			`perl -e 'exit(syscall(101,16,1,0,0) == 0 ? 0 : 1)'`,     // ptrace attach
			`perl -e 'exit(syscall(101,0x4206,1,0,0) == 0 ? 0 : 1)'`, // ptrace seize
			`perl -e '$b="x"x64; $l=pack("QQ",unpack("Q",pack("p",$b)),64); $r=pack("QQ",0x400000,64); exit(syscall(310,1,$l,1,$r,1,0) > 0 ? 0 : 1)'`, // process_vm_readv
			`perl -e '$p=syscall(434,1,0); for (0..40) { exit 0 if syscall(438,$p,$_,0) >= 0 } exit 1'`,                                               // pidfd_getfd
			"mount -o remount,rw /.planaria/bin", "mount -o remount,rw /usr", "pivot_root / /mnt",
			"unshare -Urm sh -c 'mount -o remount,rw /.planaria/bin && touch /.planaria/bin/x'",
		} {
			if r := e.do(s, "bash", in{"command": command, "timeout_ms": 10000}); !r.IsError {
				t.Errorf("%s: %.200q", command, r.Text)
			}
		}
	}
	e.sh(s, "unshare -Urm mount --bind /tmp /.planaria/ctl 2>/dev/null; test -S /.planaria/ctl/ctl.sock")
	e.sh(s, "for x in HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 USR2 SEGV PIPE ALRM TERM STKFLT TSTP TTIN TTOU XCPU XFSZ VTALRM IO PWR SYS; do kill -$x 1; done")
	if got := e.sh(s, "cat f"); got != "kept" {
		t.Errorf("after the signals: %q", got)
	}
	if got := e.sh(s, "kill -STOP 1; echo woken"); got != "woken" {
		t.Errorf("after a stop: %q", got)
	}
	ctx, cancel := contextFor(30 * time.Second)
	defer cancel()
	if _, err := s.Do(ctx, sandbox.Call{ID: "kill", Thread: "main", Tool: "bash", Input: []byte(`{"command":"kill -9 1"}`)}); !errors.Is(err, sandbox.ErrGone) {
		t.Errorf("after a kill: %v", err)
	}
	if err := s.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	s, _ = e.restore(m, "one")
	if got := e.sh(s, "cat f"); got != "kept" {
		t.Errorf("restored: %q", got)
	}
}

// TestStoppedAgent: a process inside stops process 1 between two calls, or in the
// moment of a snapshot. Neither holds up a snapshot, and a copy that comes back
// with a stopped agent is woken.
func TestStoppedAgent(t *testing.T) {
	defer sandbox.SetSilence(time.Second)()
	e := open(t)
	s := e.start("stopped")
	silent := func() {
		t.Helper()
		for {
			ctx, cancel := contextFor(500 * time.Millisecond)
			_, _, err := s.Calls(ctx)
			cancel()
			if err != nil {
				return
			}
			<-time.After(10 * time.Millisecond)
		}
	}
	e.sh(s, "(sleep 0.2; kill -STOP 1) > /dev/null 2>&1 &")
	silent()
	began := time.Now()
	e.snapshot(s)
	t.Logf("a snapshot of a sandbox with a stopped agent took %v", time.Since(began))
	e.sh(s, "echo kept > f; (until [ -e /tmp/go ]; do sleep 0.02; done; kill -STOP 1) > /dev/null 2>&1 &")
	e.r.SetFault(func(at string) error {
		if at != "prepared" {
			return nil
		}
		err := s.PutFile(t.Context(), "/tmp/go", 0, strings.NewReader(""))
		silent()
		return err
	})
	m := e.snapshot(s)
	e.r.SetFault(nil)
	began = time.Now()
	c, _ := e.restore(m, "copy")
	t.Logf("a copy with a stopped agent came back in %v", time.Since(began))
	for _, s := range []*sandbox.Sandbox{s, c} {
		if got := e.sh(s, "cat f"); !strings.HasSuffix(got, "kept") {
			t.Errorf("%s has %q", s.ID(), got)
		}
	}
	// One that its owner has paused cannot be asked; an owner who died leaves it
	// to the next one, who lets it go on.
	if err := c.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Snapshot(t.Context()); err == nil || !strings.Contains(err.Error(), "paused") {
		t.Errorf("a snapshot of a paused sandbox: %v", err)
	}
	// Who lets it go on may be leaving.
	left, leave := context.WithCancel(t.Context())
	leave()
	if err := c.Resume(left); err != nil {
		t.Errorf("resume for one who has left: %v", err)
	}
	if got := e.sh(c, "cat f"); !strings.HasSuffix(got, "kept") {
		t.Errorf("after a resume it has %q", got)
	}
	if err := c.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := e.r.Close(); err != nil {
		t.Fatal(err)
	}
	e.reopen(sandbox.Config{Dir: e.dir, Binary: binary(t), Blobs: e.blobs, StartTimeout: time.Minute})
	c, err := e.r.Find(t.Context(), "w1", "copy", 2)
	if err != nil {
		t.Fatal(err)
	}
	if got := e.sh(c, "cat f"); !strings.HasSuffix(got, "kept") {
		t.Errorf("after a pause it has %q", got)
	}
}

// TestFloods: each ends with a clear error or does no harm; the agent answers
// after each, and what the machine gives stays bounded.
func TestFloods(t *testing.T) {
	t.Parallel()
	e := open(t)
	const memory, disk = 300 << 20, 128 << 20
	s := e.start("floods", func(s *sandbox.Spec) {
		s.Limits = sandbox.Limits{MemoryBytes: memory, DiskBytes: disk, Processes: 64, CallTime: 20 * time.Second}
	})
	for _, tt := range []struct{ name, command, want string }{
		{"files in memory", "head -c 900000000 /dev/zero > /tmp/f; rm /tmp/f", "No space left"},
		{"shared memory", "head -c 900000000 /dev/zero > /dev/shm/f; rm /dev/shm/f", "No space left"},
		{"devices", "head -c 1000 /dev/zero > /dev/f", "Read-only"},
		{"disk", "head -c 900000000 /dev/zero > f; rm f", "No space left"},
		{"inodes", "mkdir i; timeout 2 perl -e 'for (1..1e7) { open(F, \">i/$_\") or die $!; close F }'; rm -rf i; echo done", "done"},
		{"descriptors", "ulimit -n 4096; perl -e 'for (1..1e5) { open($f[$_], \"</dev/null\") or die $! }'", "Too many open files"},
		{"threads", "timeout -s KILL 4 perl -Mthreads=stack_size,65536 -e 'for (1..500) { threads->create(sub { sleep 60 }) or die $! }' 2>&1; echo done", "done"},
		{"arguments", "perl -e 'exec(\"/bin/true\", (\"x\" x 200000) x 200) or die $!'", "exit code"},
		{"signals ignored", "perl -e '$SIG{TERM}=$SIG{INT}=$SIG{HUP}=\"IGNORE\"; sleep 1 while 1'", "timed out"},
		{"output", "timeout 2 yes; true", "output truncated"},
		{"output without lines", "head -c 20000000 /dev/zero", "output truncated"},
		{"wrong system calls", "timeout 1 perl -e 'while (1) { syscall(9999); syscall(16,0,0xdead,0); syscall(101,99,9,9,9) }'; echo done", "done"},
		{"core dumps", "ulimit -c unlimited; sh -c 'kill -SEGV $$'; ls core* 2>&1", "No such file"},
	} {
		began := time.Now()
		timeout := 20000
		if tt.want == "timed out" {
			timeout = 1000
		}
		r := e.do(s, "bash", in{"command": tt.command, "timeout_ms": timeout})
		if !strings.Contains(r.Text, tt.want) || len(r.Text) > 101<<10 {
			t.Errorf("%s: %d bytes, %.300q, want %q", tt.name, len(r.Text), r.Text, tt.want)
		}
		if got := e.sh(s, "echo lives"); !strings.HasSuffix(got, "lives") {
			t.Errorf("after %s: %q", tt.name, got)
		}
		use, err := s.Stats()
		if err != nil || use.Memory > memory+512<<20 {
			t.Errorf("after %s it uses %d MiB, %v", tt.name, use.Memory>>20, err)
		}
		t.Logf("%-20s %v, then %d MiB", tt.name, time.Since(began).Round(time.Millisecond), use.Memory>>20)
	}
	var kept int64
	_ = filepath.WalkDir(s.Dir(), func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			info, _ := d.Info()
			kept += info.Size()
		}
		return nil
	})
	if kept > 1<<20 { // logs; the overlay has no name
		t.Errorf("the sandbox's folder holds %d bytes", kept)
	}
}

// TestNothingLeaks: neither what the host knows goes in, nor what only the host
// was given is in an image (trial R3).
func TestNothingLeaks(t *testing.T) {
	const canary = "canary-of-the-host-88213"
	t.Setenv("PLANARIA_CANARY", canary)
	t.Setenv("HTTPS_PROXY", "http://user:"+canary+"@127.0.0.1:1")
	e := open(t, func(c *sandbox.Config) {
		c.Egress = func(_ context.Context, _ *sandbox.Sandbox, conn io.ReadWriteCloser) {
			_, _ = io.WriteString(conn, "sealed\n")
			_ = conn.Close()
		}
	})
	credential := []byte(canary) // in this process's memory all the time
	s := e.start("leaks")
	for _, command := range []string{
		"env", "cat /proc/mounts /proc/self/mountinfo /proc/self/mounts", "cat /proc/cmdline /proc/version /proc/*/cmdline | tr '\\0' ' '",
		"cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; true", "find / -xdev -name '*planaria*' 2>/dev/null; true", "ls -laR /.planaria /run /var/run 2>/dev/null; true",
		"cat /proc/sentry-meminfo /proc/cgroups; ls /proc/gvisor", "dmesg 2>&1; true", "cat /proc/net/unix /proc/net/tcp; true",
		"cat /.planaria/ctl/nothing /.planaria/ctl/../../../nothing 2>&1; true", "ls -l /proc/self/fd /proc/self/exe /proc/self/cwd",
	} {
		got := e.sh(s, command)
		for _, secret := range []string{canary, e.dir, filepath.Dir(e.dir), s.Dir(), "runsc-sandbox"} {
			if strings.Contains(got, secret) {
				t.Errorf("%s tells %q: %.300q", command, secret, got)
			}
		}
	}
	if got := e.sh(s, "exec 3<>/dev/tcp/127.0.0.1/3128; head -1 <&3"); got != "sealed" {
		t.Fatalf("the way out says %q", got)
	}
	m := e.snapshot(s)
	for _, f := range m.Files {
		b, err := os.ReadFile(filepath.Join(e.r.SnapshotDir(m.ID), f.Name))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(b, credential) {
			t.Errorf("%s of the image holds the credential", f.Name)
		}
	}
}

// TestFailsClosed: an agent that cannot take on its new identity is killed, and
// had no way out before (trial H 115). What merely stands in the way does not
// make a snapshot useless.
func TestFailsClosed(t *testing.T) {
	t.Parallel()
	var out atomic.Int64
	e := open(t, func(c *sandbox.Config) {
		c.Egress = func(_ context.Context, s *sandbox.Sandbox, conn io.ReadWriteCloser) {
			if s.ID() != "closed" {
				out.Add(1)
			}
			_ = conn.Close()
		}
	})
	s := e.start("closed")
	e.sh(s, "(while :; do (exec 3<>/dev/tcp/127.0.0.1/3128) 2>/dev/null; done) & rm -f /etc/machine-id /etc/hosts; mkdir -p /etc/machine-id/x; ln -s /workspace/elsewhere /etc/hosts")
	good := e.snapshot(s)
	e.sh(s, "mv /etc /etc.away; echo > /etc")
	bad := e.snapshot(s)
	_, _, err := e.r.Restore(t.Context(), bad, sandbox.Spec{Workspace: "w1", ID: "refused", Fence: 1})
	if err == nil || !strings.Contains(err.Error(), "identity") && !strings.Contains(err.Error(), "/etc") {
		t.Errorf("a copy without identity: %v", err)
	}
	if n := out.Load(); n != 0 {
		t.Errorf("it had a way out %d times", n)
	}
	if live := e.r.Live(); len(live) != 1 {
		t.Errorf("live: %v", live)
	}
	if list, _ := os.ReadDir(filepath.Join(e.dir, "live")); len(list) != 1 {
		t.Errorf("%d folders", len(list))
	}
	c, _ := e.restore(good, "copy")
	if got := e.sh(c, "grep -c . /etc/machine-id; grep -c planaria- /etc/hosts; test -L /etc/hosts || echo a file; ls /workspace"); got != "1\n1\na file" {
		t.Errorf("what stood in the way: %q", got)
	}
	for deadline := time.Now().Add(5 * time.Second); out.Load() == 0 && time.Now().Before(deadline); {
		<-time.After(10 * time.Millisecond)
	}
	if out.Load() == 0 {
		t.Error("a good copy has no way out")
	}
}

// TestConnectionsNeverClosed: processes inside that never close their connections
// to the way out, although it has ended them, do not keep others from it.
func TestConnectionsNeverClosed(t *testing.T) {
	t.Parallel()
	e := open(t, func(c *sandbox.Config) {
		c.Egress = func(_ context.Context, _ *sandbox.Sandbox, conn io.ReadWriteCloser) {
			_, _ = io.WriteString(conn, strings.Repeat("sealed\n", 1000))
			_ = conn.Close()
		}
	})
	s := e.start("hoarder")
	got := e.sh(s, `cat > hoard.pl <<'EOF'
use IO::Socket::INET;
for (1..520) {
  my $c = IO::Socket::INET->new("127.0.0.1:3128") or die $!;
  push @c, $c;
  $n++ if $_ % 2 && <$c>; # the others read nothing
}
print "$n\n";
close STDOUT;
sleep 1000;
EOF
mkfifo says; perl hoard.pl > says 2> /dev/null & cat says`)
	if n, _ := strconv.Atoi(got); n < 200 {
		t.Fatalf("%q connections were answered", got)
	}
	e.sh(s, `until exec 3<>/dev/tcp/127.0.0.1/3128 && read -t 5 line <&3 && test "$line" = sealed; do sleep 0.2; done`)
}
