package blob_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// TestDiskFull: attack E19. The kernel refuses the write in the middle, by a
// limit on the size of files, so that it works without privileges: the error
// says why, nothing half is left, and what was stored stays.
func TestDiskFull(t *testing.T) {
	const child = "BLOB_TEST_FULL_DIR"
	if dir := os.Getenv(child); dir != "" {
		diskFullChild(t, dir)
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDiskFull$", "-test.v")
	cmd.Env = append(os.Environ(), child+"="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "refused as it should be") {
		t.Fatalf("child: %v\n%s", err, out)
	}
}

// diskFullChild runs in a process of its own, since the limit is for the whole
// process.
func diskFullChild(t *testing.T, dir string) {
	ctx := t.Context()
	f := open(t, dir)
	small, err := f.Put(ctx, "default", []byte("small"))
	check(t, err)
	limit := syscall.Rlimit{Cur: 64 << 10, Max: 64 << 10}
	check(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit))
	_, err = f.Put(ctx, "default", bytes.Repeat([]byte("x"), 1<<20))
	if !errors.Is(err, syscall.EFBIG) {
		t.Fatalf("Put = %v, want EFBIG", err)
	}
	if got := files(t, dir); len(got) != 1 {
		t.Errorf("files: %v", got)
	}
	if got, err := f.Get(ctx, "default", small); err != nil || string(got) != "small" {
		t.Errorf("Get of an older blob = %q, %v", got, err)
	}
	_, err = f.Put(ctx, "default", []byte("fits"))
	check(t, err)
	t.Log("refused as it should be")
}
