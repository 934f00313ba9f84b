package store_test

import (
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
)

// TestFolderLockIsFreed: the folder is free when Close returns, although a process
// that was being started at that moment still has a copy of the lock's descriptor.
func TestFolderLockIsFreed(t *testing.T) {
	dir := t.TempDir()
	e := newEnv(t, "sqlite:"+dir+"/planaria.db")
	copied := -1
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && to == filepath.Join(dir, "lock") {
			n, _ := strconv.Atoi(fd.Name())
			if copied, err = syscall.Dup(n); err != nil {
				t.Fatal(err)
			}
		}
	}
	if copied < 0 {
		t.Fatal("the lock's descriptor is not found")
	}
	defer syscall.Close(copied)
	e.crash() // and opens again
	e.create(message("go"))
}
