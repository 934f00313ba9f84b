package sandbox_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/sandbox"
)

func contextFor(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// child is this program as a server that will be killed: it starts sandbox "s"
// in the folder that is its argument, and says what it does, a line each.
//
//	call      runs a long command as call_000001
//	snapshot  takes one snapshot, then kills itself between image and manifest
//	restore   takes a snapshot, kills the sandbox, restores it, leaves it running
//	hold      says so and waits to be killed
//	starts    starts and kills others for ever
//	find      finds the sandbox that another child left, looks at it, kills it
func child(role string) {
	dir := os.Getenv("PLANARIA_TEST_DIR")
	if role == "find" {
		find(dir)
		return
	}
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	fail := func(err error) {
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
	blobs, err := blob.Open(filepath.Join(dir, "blobs"))
	fail(err)
	r, err := sandbox.Open(ctx, sandbox.Config{Dir: filepath.Join(dir, "sandboxes"), Binary: os.Getenv("PLANARIA_TEST_SANDBOX"), Blobs: blobs})
	fail(err)
	s, err := r.Start(ctx, sandbox.Spec{Workspace: "w1", ID: "s", Fence: 7})
	fail(err)
	run := func(id, command string) {
		input, _ := json.Marshal(map[string]string{"command": command})
		_, err := s.Do(ctx, sandbox.Call{ID: id, Thread: "main", Tool: "bash", Input: input, Progress: func(p string) { fmt.Printf("progress: %q\n", p) }})
		fail(err)
	}
	switch role {
	case "restore":
		run("call_000001", "v=kept; echo before > /workspace/file; id -u > /workspace/id")
		m, err := s.Suspend(ctx)
		fail(err)
		s, _, err = r.Restore(ctx, m, sandbox.Spec{Workspace: "w1", ID: "s", Fence: 7})
		fail(err)
		run("call_000002", "echo $v >> /workspace/file; sleep 1; echo of the shell >> /workspace/file")
		_, err = s.Stats()
		fail(err)
		fmt.Println("done:")
	case "hold":
		fmt.Println("done:")
		<-ctx.Done()
	case "starts":
		for i := 0; ; i++ {
			fmt.Println("next:")
			o, err := r.Start(ctx, sandbox.Spec{Workspace: "w1", ID: fmt.Sprint("other-", i), Fence: 7})
			fail(err)
			fail(o.Kill(ctx))
		}
	case "call":
		run("call_000001", "echo begun; echo once >> /workspace/ran; sleep 1.5; echo ended")
	case "snapshot":
		run("call_000001", "echo before > /workspace/file")
		m, err := s.Snapshot(ctx)
		fail(err)
		fmt.Println("good:", m.ID)
		r.SetFault(func(at string) error {
			if at != "checkpointed" {
				return nil
			}
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		})
		_, err = s.Snapshot(ctx)
		fail(err)
	}
}

// find is another server of the same user: it has only the folder.
func find(dir string) {
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	fail := func(err error) {
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
	r, err := sandbox.Open(ctx, sandbox.Config{Dir: filepath.Join(dir, "sandboxes"), Binary: os.Getenv("PLANARIA_TEST_SANDBOX")})
	fail(err)
	s, err := r.Find(ctx, "w1", "s", 8)
	fail(err)
	res, err := s.Do(ctx, sandbox.Call{ID: "call_000003", Thread: "main", Tool: "bash", Input: []byte(`{"command":"cat /workspace/id /workspace/file; echo $v"}`)})
	fail(err)
	fmt.Printf("found: %q\n", res.Text)
	fail(s.Kill(ctx))
	fail(r.Close())
	fmt.Println("done:")
}

// startChild starts this program in a role. lines gives what it says.
func startChild(t *testing.T, role, dir string) (cmd *exec.Cmd, lines *bufio.Scanner) {
	t.Helper()
	cmd = exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childVariable+"="+role, "PLANARIA_TEST_DIR="+dir, "PLANARIA_TEST_SANDBOX="+binary(t))
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

// until reads lines to the first with a prefix and returns its rest.
func until(t *testing.T, lines *bufio.Scanner, prefix string) string {
	t.Helper()
	for lines.Scan() {
		t.Log(lines.Text())
		if rest, ok := strings.CutPrefix(lines.Text(), prefix); ok {
			return rest
		}
		if strings.HasPrefix(lines.Text(), "error:") {
			t.Fatal(lines.Text())
		}
	}
	t.Fatalf("child ended before %q", prefix)
	return ""
}

// take opens the folder of a killed child.
func take(t *testing.T, dir string) *env {
	t.Helper()
	blobs, err := blob.Open(filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	e := &env{t: t, dir: filepath.Join(dir, "sandboxes"), blobs: blobs}
	e.calls.Store(1000)
	e.reopen(sandbox.Config{Dir: e.dir, Binary: binary(t), Blobs: blobs, StartTimeout: time.Minute})
	t.Cleanup(func() {
		e.killAll()
		_ = e.r.Close()
		_ = blobs.Close()
	})
	return e
}

// TestServerKilled: the server is killed while a command runs. The sandbox lives
// on, the next owner gets the result, and it ran once.
func TestServerKilled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd, lines := startChild(t, "call", dir)
	until(t, lines, "progress:")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	e := take(t, dir)
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	if _, err := e.r.Find(ctx, "w1", "s", 6); err == nil {
		t.Error("an older fence was taken")
	}
	if _, err := e.r.Find(ctx, "w2", "s", 8); err == nil {
		t.Error("another workspace found the sandbox")
	}
	began := time.Now()
	s, err := e.r.Find(ctx, "w1", "s", 8)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("reattached in %v", time.Since(began))
	r, err := s.Reattach(ctx, "call_000001", nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Text; got != "begun\nended\n" || r.IsError {
		t.Errorf("result = %+v", r)
	}
	// The same call again, as a call: its result, no second run.
	input, _ := json.Marshal(in{"command": "echo never"})
	if again, err := s.Do(ctx, sandbox.Call{ID: "call_000001", Thread: "main", Tool: "bash", Input: input}); err != nil || again.Text != r.Text {
		t.Errorf("asked again: %+v, %v", again, err)
	}
	if got := e.sh(s, "cat /workspace/ran"); got != "once" {
		t.Errorf("the command ran: %q", got)
	}
	if _, err := s.Reattach(ctx, "call_999999", nil); err == nil || !strings.Contains(err.Error(), sandbox.ErrUnknownCall.Error()) {
		t.Errorf("an unknown call: %v", err)
	}
}

// TestServerKilledInSnapshot: killed between the image and its manifest. The
// image is swept, the older snapshot and the sandbox are as they were.
func TestServerKilledInSnapshot(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd, lines := startChild(t, "snapshot", dir)
	good := until(t, lines, "good: ")
	_ = cmd.Wait()
	images, err := os.ReadDir(filepath.Join(dir, "sandboxes", "snapshots"))
	if err != nil || len(images) != 2 {
		t.Fatalf("%d images, %v: the child should have left one without manifest", len(images), err)
	}
	e := take(t, dir)
	ids, err := e.r.Snapshots()
	if err != nil || len(ids) != 1 || ids[0] != good {
		t.Fatalf("snapshots = %v, %v, want %s", ids, err, good)
	}
	if images, _ = os.ReadDir(filepath.Join(dir, "sandboxes", "snapshots")); len(images) != 1 {
		t.Errorf("%d images after the sweep", len(images))
	}
	ctx, cancel := contextFor(time.Minute)
	defer cancel()
	s, err := e.r.Find(ctx, "w1", "s", 8)
	if err != nil {
		t.Fatal(err)
	}
	if got := e.sh(s, "cat /workspace/file"); got != "before" {
		t.Errorf("the sandbox has %q", got)
	}
	m := e.snapshot(s) // the key that the dead server left is no hindrance
	s2, _ := e.restore(m, "copy")
	if got := e.sh(s2, "cat /workspace/file"); got != "before" {
		t.Errorf("the copy has %q", got)
	}
}
