package sandbox_test

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// nobody is an ordinary user without rights on this machine.
const nobody = 65534

// TestOrdinaryUser runs the core as a user who is not root: start, shell,
// snapshot, restore, and a second server that finds the sandbox again from
// another user namespace.
func TestOrdinaryUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("all other tests run as an ordinary user already")
	}
	b := binary(t)
	// A folder that the user can reach; those of the test are for root only.
	dir, err := os.MkdirTemp("", "planaria-user-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{b: "planaria", "/proc/self/exe": "test"} {
		if err := copyProgram(from, filepath.Join(dir, to)); err != nil {
			t.Fatal(err)
		}
	}
	home := filepath.Join(dir, "home")
	if err := os.Mkdir(home, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(home, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	as := func(role string) (*exec.Cmd, *bufio.Scanner) {
		cmd := exec.Command(filepath.Join(dir, "test"))
		cmd.Dir = dir
		cmd.Env = []string{"PATH=/usr/bin:/bin", "TMPDIR=" + home, childVariable + "=" + role, "PLANARIA_TEST_DIR=" + home, "PLANARIA_TEST_SANDBOX=" + filepath.Join(dir, "planaria")}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = testLog{t}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
		return cmd, bufio.NewScanner(out)
	}
	first, lines := as("restore")
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "done:") {
		if strings.Contains(lines.Text(), "operation not permitted") && strings.Contains(lines.Text(), "fork/exec") {
			t.Skipf("this machine gives ordinary users no user namespace: %s", lines.Text())
		}
		if strings.HasPrefix(lines.Text(), "error:") {
			t.Fatal(lines.Text())
		}
	}
	_ = first.Wait()
	began := time.Now()
	_, lines = as("find")
	if got := until(t, lines, "found: "); got != `"0\nbefore\nkept\nof the shell\nkept\n"` {
		t.Errorf("the second server finds %s", got)
	}
	until(t, lines, "done:")
	t.Logf("found, asked and killed in %v", time.Since(began))
	if left, _ := os.ReadDir(filepath.Join(home, "sandboxes", "live")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func copyProgram(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	return err
}
