package server_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// tsFolder holds the scripts, the lock file and the model script.
const tsFolder = "../testenv/ts"

// nodeModules installs what the lock file names, once for each lock file, into
// the user's cache folder, and returns the node_modules folder. The test skips
// where the machine has no Node.
func nodeModules(t *testing.T) string {
	t.Helper()
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s in PATH: the TypeScript SDK is not tested", program)
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	lock, err := os.ReadFile(filepath.Join(tsFolder, "package-lock.json"))
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(lock)
	folder := filepath.Join(cache, "planaria-ts-"+hex.EncodeToString(sum[:8]))
	modules := filepath.Join(folder, "node_modules")
	if _, err := os.Stat(modules); err == nil {
		return modules
	}
	install(t, folder)
	return modules
}

// install runs npm ci beside folder and renames the result, so that a test
// that is stopped leaves nothing half installed and two tests do not meet.
func install(t *testing.T, folder string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(folder), 0o755); err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(folder), "planaria-ts-new-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(tmp) })
	for _, name := range []string{"package.json", "package-lock.json", ".npmrc"} {
		copyFile(t, filepath.Join(tsFolder, name), filepath.Join(tmp, name))
	}
	cmd := exec.CommandContext(t.Context(), "npm", "ci", "--ignore-scripts")
	cmd.Dir = tmp
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("npm ci: %v\n%s", err, out)
	}
	if err := os.Rename(tmp, folder); err != nil && !errors.Is(err, fs.ErrExist) {
		if _, statErr := os.Stat(filepath.Join(folder, "node_modules")); statErr != nil {
			t.Fatal(err) // else another test was faster
		}
	}
}

// copyFile copies a small file.
func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}
