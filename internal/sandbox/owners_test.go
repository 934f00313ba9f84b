//go:build linux

package sandbox_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// TestStoppedOwner: a server that is stopped keeps its folder. Another on the
// same folder is refused and says who has it; once the first is gone it finds
// the sandbox as it was (trial W1).
func TestStoppedOwner(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd, lines := startChild(t, "hold", dir)
	until(t, lines, "done:")
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	cfg := sandbox.Config{Dir: filepath.Join(dir, "sandboxes"), Binary: binary(t)}
	began := time.Now()
	_, err := sandbox.Open(t.Context(), cfg)
	if !errors.Is(err, sandbox.ErrLocked) || !strings.Contains(err.Error(), "process "+strconv.Itoa(cmd.Process.Pid)) {
		t.Errorf("a second owner beside a stopped one: %v", err)
	}
	t.Logf("after %v: %v", time.Since(began), err)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	e := take(t, dir)
	s, err := e.r.Find(t.Context(), "w1", "s", 8)
	if err != nil {
		t.Fatal(err)
	}
	e.sh(s, "true")
}

// TestEndedUnder: who ends a sandbox that nobody seems to hold does not end the one
// that a newer owner finds in the same moment: either it is ended or it is found.
func TestEndedUnder(t *testing.T) {
	t.Parallel()
	e := open(t)
	found, ended := 0, 0
	for round := uint64(0); round < 12; round++ {
		s := e.start("contested")
		fence, ok := e.r.FenceOf("w1", "contested")
		if !ok || fence != 1 {
			t.Fatalf("held under %d, %v", fence, ok)
		}
		var ferr, eerr error
		var wait sync.WaitGroup
		first := time.After(time.Duration(round/2%3) * 100 * time.Microsecond)
		wait.Go(func() {
			if round%2 == 0 {
				<-first
			}
			eerr = e.r.EndUnder(t.Context(), "w1", "contested", fence)
		})
		if round%2 == 1 {
			<-first
		}
		_, ferr = e.r.Find(t.Context(), "w1", "contested", 2)
		wait.Wait()
		if eerr != nil {
			t.Fatal(eerr)
		}
		if ferr == nil {
			found++
			if got := e.sh(s, "echo lives"); got != "lives" {
				t.Errorf("it says %q", got)
			}
			if err := e.r.EndUnder(t.Context(), "w1", "contested", 2); err != nil {
				t.Fatal(err)
			}
		} else if ended++; !errors.Is(ferr, sandbox.ErrNotFound) {
			t.Errorf("not found: %v", ferr)
		}
		select {
		case <-s.Done():
		case <-time.After(10 * time.Second):
			t.Fatal("an ended sandbox lives")
		}
	}
	t.Logf("%d were found, %d ended", found, ended)
}

// TestPartsKilled: the file server of a sandbox dies, or its first process. In
// both cases nothing hangs, the rest is cleaned up, and the snapshot helps.
func TestPartsKilled(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("parts")
	e.sh(s, "echo kept > f")
	m := e.snapshot(s)
	server := fileServer(t, s)
	if err := syscall.Kill(server, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// Its files in memory and in the overlay stay; what it served may fail.
	ctx, cancel := contextFor(20 * time.Second)
	defer cancel()
	res, err := s.Do(ctx, sandbox.Call{ID: "after", Thread: "main", Tool: "bash", Input: []byte(`{"command":"cat f; ls /usr/bin | wc -l","timeout_ms":10000}`)})
	t.Logf("without its file server: %+v, %v", res, err)
	if errors.Is(err, ctx.Err()) && ctx.Err() != nil {
		t.Error("a sandbox without its file server hangs")
	}
	if err := s.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	s, _ = e.restore(m, "parts")
	if got := e.sh(s, "cat f"); got != "kept" {
		t.Errorf("restored: %q", got)
	}
	if l := e.left(); l.folders != 1 {
		t.Errorf("left: %+v", l)
	}
}

// fileServer finds the process that serves the files of a sandbox.
func fileServer(t *testing.T, s *sandbox.Sandbox) int {
	t.Helper()
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, line := range lines {
		b, _ := os.ReadFile(line)
		if strings.HasPrefix(string(b), "runsc-gofer") && strings.Contains(string(b), s.Dir()) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(line)))
			return pid
		}
	}
	t.Skip("no file server can be found")
	return 0
}

// TestLeftovers: what dead makers left is swept at Open, and nothing else.
func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"live/sb-dead", "live/sb-half/ctl", "snapshots/snap-0123", "snapshots/.tmp-4", "runtimes/.tmp-1", "roots/.tmp-2", "roots/oci-3/root/bin", "runtimes/kept"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "live/sb-dead/state.json"), []byte(`{"version":1,"phase":"running","pid":1,"pid_start":"0","container":"sb-dead"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := sandbox.Open(t.Context(), sandbox.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for d, want := range map[string]int{"live": 0, "snapshots": 0, "runtimes": 1} {
		if list, err := os.ReadDir(filepath.Join(dir, d)); err != nil || len(list) != want {
			t.Errorf("%s holds %v, %v", d, list, err)
		}
	}
	if list, _ := filepath.Glob(filepath.Join(dir, "roots", "[.o]*")); len(list) != 0 {
		t.Errorf("roots holds %v", list)
	}
}

// TestDiskFull: at each durable step an act fails with a clear error, leaves
// nothing half-made, and works once there is room.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a small disk")
	}
	b := binary(t)
	info, err := os.Stat(b)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := syscall.Mount("none", dir, "tmpfs", 0, "size="+strconv.FormatInt(info.Size()+60<<20, 10)); err != nil {
		t.Skipf("no small disk can be mounted: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	e := &env{t: t, dir: filepath.Join(dir, "sandboxes")}
	cfg := sandbox.Config{Dir: e.dir, Binary: b, StartTimeout: 20 * time.Second}
	fill, free := filler(t, dir)
	e.reopen(cfg)
	t.Cleanup(func() { e.killAll(); _ = e.r.Close() })
	refuse := func(what string, err error) {
		t.Helper()
		t.Logf("%s: %v", what, err)
		if err == nil || !strings.Contains(err.Error(), "no space left") {
			t.Errorf("%s on a full disk: %v", what, err)
		}
	}
	spec := sandbox.Spec{Workspace: "w1", ID: "full", Fence: 1}
	fill()
	_, err = e.r.Start(t.Context(), spec)
	refuse("keep the binary", err)
	free()
	first := e.start("first")
	fill()
	_, err = e.r.Start(t.Context(), spec)
	refuse("start", err)
	if live := e.r.Live(); len(live) != 1 {
		t.Errorf("live: %v", live)
	}
	_, err = e.r.Find(t.Context(), "w1", "first", 2)
	refuse("a higher fence", err)
	_, err = first.Snapshot(t.Context())
	refuse("snapshot", err)
	free()
	e.sh(first, "head -c 90000000 /dev/urandom > /dev/shm/big; echo here > f")
	_, err = first.Snapshot(t.Context()) // its image is larger than the disk
	if err == nil {
		t.Error("a snapshot without room")
	}
	t.Logf("image: %v", err)
	if l := e.left(); l.images != 0 || l.folders != 1 {
		t.Errorf("left: %+v", l)
	}
	e.sh(first, "rm /dev/shm/big")
	if first, err = e.r.Find(t.Context(), "w1", "first", 2); err != nil {
		t.Fatal(err)
	}
	if got := e.sh(first, "cat f"); got != "here" {
		t.Errorf("it has %q", got)
	}
	m := e.snapshot(first)
	c, _ := e.restore(m, "copy")
	if got := e.sh(c, "cat f"); got != "here" {
		t.Errorf("the copy has %q", got)
	}
}

// filler takes all room on a disk and gives it back.
func filler(t *testing.T, dir string) (fill, free func()) {
	name := filepath.Join(dir, "filler")
	return func() {
			f, err := os.Create(name)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			for size := 1 << 20; size > 0; size /= 16 {
				for err = nil; err == nil; {
					_, err = f.Write(make([]byte, size))
				}
			}
		}, func() {
			if err := os.Remove(name); err != nil {
				t.Fatal(err)
			}
		}
}
