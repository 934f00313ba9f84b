package store_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// failSyncs makes every fsync and fdatasync of this process fail with EIO from
// now on: the kernel answers, no code of ours is asked.
func failSyncs() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		ret   = unix.BPF_RET | unix.BPF_K
	)
	filter := []unix.SockFilter{
		{Code: load, K: 0}, // the number of the system call
		{Code: equal, K: unix.SYS_FSYNC, Jt: 2},
		{Code: equal, K: unix.SYS_FDATASYNC, Jt: 1},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
		{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EIO)},
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return errno
	}
	return nil
}

// TestSyncError is trial K5 and attack E19: a disk that does not take a sync.
// Nothing is acknowledged that is not durable, what was acknowledged before is
// there, and the store goes on once the disk does.
func TestSyncError(t *testing.T) {
	if f, err := os.CreateTemp(t.TempDir(), ""); err != nil || errors.Is(f.Sync(), unix.EIO) {
		t.Fatalf("this process cannot sync: %v", err)
	}
	e := newEnv(t, "sqlite:"+filepath.Join(t.TempDir(), "data", "planaria.db"))
	id := e.create(message("go")).ID
	e.close()

	c := newChild(t, e.cfg.URL, time.Hour)
	if got := c.tell("claim", "claimed"); !strings.HasPrefix(got, "1") {
		t.Fatalf("claimed %s", got)
	}
	if got := c.tell("append", "appended"); got != "true fenced false" {
		t.Fatalf("append on a sound disk = %s", got)
	}
	if got := c.tell("fail-sync", "syncs-fail"); got != "<nil>" {
		t.Skipf("this kernel takes no seccomp filter: %s", got)
	}
	for range 3 {
		if got := c.tell("append", "appended"); !strings.HasPrefix(got, "false") {
			t.Fatalf("an append was acknowledged whose sync had failed: %s", got)
		}
	}
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	c.cmd.Wait()

	e.open()
	s := e.session(id)
	// created, claim, and one event were acknowledged. What came after may be
	// there or not: nobody was told either.
	if s.Damaged != "" || s.Head < 3 {
		t.Fatalf("session after the disk failed: head %d, damaged %q; want at least 3, sound", s.Head, s.Damaged)
	}
	e.sound(id)
	l := e.claim()
	if l.Fence() != 2 {
		t.Errorf("fence = %d, want 2", l.Fence())
	}
	e.must(l, entries(event("after")))
	e.sound(id)
}
