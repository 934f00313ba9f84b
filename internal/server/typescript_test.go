//go:build systemwip

package server_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/testenv"
)

// tsFolder holds the scripts, the lock file and the model script.
const tsFolder = "../testenv/ts"

// TestTypeScript drives the whole system with the official TypeScript SDK: the
// newest and one of the 0.x line, which sends x-api-key, an older version
// header and ?beta=true (reference section 24, item 19).
func TestTypeScript(t *testing.T) {
	modules := nodeModules(t)
	e := testenv.New(t, testenv.Options{})
	plays, err := llm.LoadScript(filepath.Join(tsFolder, "model.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range plays.Scripts {
		e.Model.Add(t, p)
	}
	scripts := scriptFolder(t, modules)
	for _, sdk := range []string{"sdk-new", "sdk-old"} {
		for _, script := range []string{"agents", "environments", "vaults", "sessions", "events"} {
			t.Run(sdk+"/"+script, func(t *testing.T) {
				runNode(t, scripts, script+".mjs", "SDK="+sdk, "VAULT="+e.Vault, "SECRET="+e.World.Token,
					"ANTHROPIC_BASE_URL="+e.API.Base, "ANTHROPIC_API_KEY="+e.API.Key)
			})
		}
	}
	e.Check()
	if st := e.Model.Stats(); st.Invalid+st.Unscripted > 0 {
		t.Errorf("the model refused requests: %+v", st)
	}
}

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

// scriptFolder copies the scripts beside a link to node_modules: Node looks
// for packages beside the script, and the repository holds none.
func scriptFolder(t *testing.T, modules string) string {
	t.Helper()
	dir := t.TempDir()
	scripts, err := filepath.Glob(filepath.Join(tsFolder, "*.mjs"))
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts in %s: %v", tsFolder, err)
	}
	for _, s := range scripts {
		copyFile(t, s, filepath.Join(dir, filepath.Base(s)))
	}
	if err := os.Symlink(modules, filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	return dir
}

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

// runNode runs a script; it must exit with 0 and have printed ok lines.
func runNode(t *testing.T, dir, script string, env ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "node", script)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	t.Logf("%s:\n%s", script, strings.TrimSpace(out.String()))
	if err != nil {
		t.Fatalf("node %s: %v", script, err)
	}
	if !strings.Contains(out.String(), "ok ") {
		t.Fatalf("node %s checked nothing", script)
	}
}

// TestLockFile: the lock file names packages and their digests, no host.
func TestLockFile(t *testing.T) {
	lock, err := os.ReadFile(filepath.Join(tsFolder, "package-lock.json"))
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(lock, []byte(`"resolved"`)) || bytes.Contains(lock, []byte("http")) {
		t.Error("package-lock.json names a host; keep omit-lockfile-registry-resolved in .npmrc")
	}
	for _, want := range []string{"sdk-new", "sdk-old", "integrity"} {
		if !bytes.Contains(lock, []byte(want)) {
			t.Error(fmt.Errorf("package-lock.json does not name %s", want))
		}
	}
}
