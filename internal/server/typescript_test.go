package server_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/testenv"
)

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
		for _, script := range []string{"agents", "environments", "vaults", "sessions", "events", "files"} {
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
