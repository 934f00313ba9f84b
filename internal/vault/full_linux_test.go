package vault_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/planaria/planaria/internal/vault"
)

// TestKeyDiskFull: attack E19. A key that could not be written is not there:
// no half file, no temporary file, and the next try works.
func TestKeyDiskFull(t *testing.T) {
	const child = "VAULT_TEST_FULL_DIR"
	if dir := os.Getenv(child); dir != "" {
		keyDiskFullChild(t, dir)
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKeyDiskFull$", "-test.v")
	cmd.Env = append(os.Environ(), child+"="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "refused as it should be") {
		t.Fatalf("child: %v\n%s", err, out)
	}
}

// keyDiskFullChild runs in a process of its own, since the limit on the size
// of files is for the whole process.
func keyDiskFullChild(t *testing.T, dir string) {
	var before syscall.Rlimit
	check(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &before))
	full := func(do func() error) {
		t.Helper()
		small := syscall.Rlimit{Cur: 100, Max: before.Max}
		check(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &small))
		err := do()
		check(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &before))
		var hinted interface{ Hint() string }
		if !errors.Is(err, syscall.EFBIG) || !errors.As(err, &hinted) {
			t.Fatalf("CreateMaster = %v, want EFBIG with a hint", err)
		}
	}
	names := func() string {
		t.Helper()
		entries, err := os.ReadDir(dir)
		check(t, err)
		var out []string
		for _, e := range entries {
			out = append(out, e.Name())
		}
		return strings.Join(out, " ")
	}
	create := func() error { _, err := vault.CreateMaster(dir, ""); return err }

	full(create) // at the identity
	if got := names(); got != "" {
		t.Errorf("after a full disk at the identity: %s", got)
	}
	check(t, create())
	check(t, os.Remove(filepath.Join(dir, vault.MasterFile)))
	full(create) // at the key
	if got := names(); got != vault.IdentityFile {
		t.Errorf("after a full disk at the key: %s", got)
	}
	check(t, create())
	if _, err := vault.OpenMaster(dir, ""); err != nil {
		t.Error(err)
	}
	t.Log("refused as it should be")
}
