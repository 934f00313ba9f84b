package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

func TestTools(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("tools")
	for _, tt := range []struct {
		name, tool string
		input      in
		want       string // contained
		isError    bool
	}{
		{"state is kept 1", "bash", in{"command": "cd /tmp && v=5 && f() { echo f$v; }"}, "", false},
		{"state is kept 2", "bash", in{"command": "pwd; f"}, "/tmp\nf5", false},
		{"exit code", "bash", in{"command": "echo a; (exit 3)"}, "a\nexit code 3", true},
		{"last status", "bash", in{"command": "echo $?"}, "3", false},
		{"syntax error", "bash", in{"command": "if ("}, "syntax error", true},
		{"open quote", "bash", in{"command": "echo 'a"}, "unexpected EOF", true},
		{"no input", "bash", in{"command": "cat; echo end"}, "end", false},
		{"here document", "bash", in{"command": "cat <<X\nhello\nX"}, "hello", false},
		{"shell exits", "bash", in{"command": "exit 4"}, "exit code 4", true},
		{"new shell", "bash", in{"command": "echo ${v:-none} $PWD"}, "none /workspace", false},
		{"timeout", "bash", in{"command": "echo begun; sleep 60", "timeout_ms": 300}, "begun\ntimed out after 300 ms", true},
		{"after timeout", "bash", in{"command": "echo ok"}, "ok", false},
		{"restart", "bash", in{"restart": true}, "restarted", false},
		{"background lives", "bash", in{"command": "(while :; do date +%N > /tmp/bg.new; mv /tmp/bg.new /tmp/bg; sleep 0.05; done) & echo $! > /tmp/bgpid"}, "", false},
		{"kill the shell", "bash", in{"command": "sleep 60", "timeout_ms": 200}, "timed out", true},
		{"background lived", "bash", in{"command": "a=$(cat /tmp/bg); for i in $(seq 100); do sleep 0.05; [ \"$(cat /tmp/bg)\" != \"$a\" ] && break; done; [ \"$a\" != \"$(cat /tmp/bg)\" ] && echo alive; kill $(cat /tmp/bgpid)"}, "alive", false},
		{"long output", "bash", in{"command": "yes 0123456789 | head -c 300000; echo; echo last"}, "last", false},
		{"no command", "bash", in{}, "command is missing", true},
		{"unknown field", "bash", in{"command": "true", "cwd": "/"}, "cwd", true},
		{"write", "write", in{"file_path": "a/b/c.txt", "content": "one\ntwo\nthree\n"}, "wrote 14 bytes to /workspace/a/b/c.txt", false},
		{"read", "read", in{"file_path": "a/b/c.txt"}, "one\ntwo\nthree\n", false},
		{"read range", "read", in{"file_path": "a/b/c.txt", "view_range": []int{2, 0}}, "two\nthree\n", false},
		{"read past the end", "read", in{"file_path": "a/b/c.txt", "view_range": []int{9, 9}}, "has 3 lines", true},
		{"read folder", "read", in{"file_path": "a"}, "a folder", true},
		{"read nothing", "read", in{"file_path": "nope"}, "no such file", true},
		{"read device", "read", in{"file_path": "/dev/zero"}, "a device", true},
		{"make big", "bash", in{"command": "head -c 300000 /dev/zero | tr '\\0' x > big"}, "", false},
		{"read big", "read", in{"file_path": "big"}, "ask for a part", true},
		{"edit", "edit", in{"file_path": "a/b/c.txt", "old_string": "two", "new_string": "2"}, "replaced 1", false},
		{"edit twice", "edit", in{"file_path": "a/b/c.txt", "old_string": "e", "new_string": "E"}, "make it longer", true},
		{"edit all", "edit", in{"file_path": "a/b/c.txt", "old_string": "e", "new_string": "E", "replace_all": true}, "replaced 3", false},
		{"edit none", "edit", in{"file_path": "a/b/c.txt", "old_string": "zzz", "new_string": ""}, "is not in", true},
		{"edited", "read", in{"file_path": "/workspace/a/b/c.txt"}, "onE\n2\nthrEE\n", false},
		{"glob", "glob", in{"pattern": "**/*.txt"}, "/workspace/a/b/c.txt", false},
		{"glob nothing", "glob", in{"pattern": "*.none"}, "no matches", false},
		{"glob up", "glob", in{"pattern": "../*"}, "must not contain ..", true},
		{"glob absolute", "glob", in{"pattern": "/etc/*"}, "must be relative", true},
		{"grep", "grep", in{"pattern": "thr.E"}, "/workspace/a/b/c.txt:3:thrEE", false},
		{"grep bad", "grep", in{"pattern": "("}, "missing closing", true},
		{"no tool", "fly", in{}, "no such tool", true},
	} {
		r := e.do(s, tt.tool, tt.input)
		if !strings.Contains(r.Text, tt.want) || r.IsError != tt.isError {
			t.Errorf("%s: %s %v = %.300q (error %v), want %q (error %v)", tt.name, tt.tool, tt.input, r.Text, r.IsError, tt.want, tt.isError)
		}
		if len(r.Text) > 101<<10 {
			t.Errorf("%s: %d bytes of output", tt.name, len(r.Text))
		}
	}
}

// TestFiles moves files in and out, as resources and outputs do.
func TestFiles(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("files")
	ctx := t.Context()
	body := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB, more than a window
	if err := s.PutFile(ctx, sandbox.Uploads+"/a.bin", 0o640, strings.NewReader(body)); err != nil {
		t.Fatal(err)
	}
	r, size, err := s.GetFile(ctx, sandbox.Uploads+"/a.bin")
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	if err != nil || size != int64(len(body)) || string(got) != body {
		t.Errorf("got %d of %d bytes, %v", len(got), size, err)
	}
	_ = r.Close()
	if _, _, err := s.GetFile(ctx, "/nope"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("get a file that is not there: %v", err)
	}
	files, more, err := s.ListFiles(ctx, sandbox.Uploads)
	if err != nil || more || len(files) != 1 || files[0].Size != size || fs.FileMode(files[0].Mode) != 0o640 {
		t.Errorf("files = %+v, %v", files, err)
	}
	// Half a file is none.
	if err := s.PutFile(ctx, "/workspace/half", 0, io.MultiReader(strings.NewReader("abc"), errReader{})); err == nil {
		t.Error("a broken upload was taken")
	}
	if got := e.sh(s, "ls /workspace"); got != "" {
		t.Errorf("a broken upload left %q", got)
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("broken") }

// TestCall: progress, cancel, acknowledgement, one run per id.
func TestCall(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("call")
	ctx := t.Context()
	progress := make(chan string, 100)
	type end struct {
		r   *sandbox.Result
		err error
	}
	done := make(chan end, 1)
	go func() {
		r, err := s.Do(ctx, sandbox.Call{ID: "c1", Thread: "x", Tool: "bash", Input: []byte(`{"command":"echo begun; sleep 60"}`), Progress: func(p string) { progress <- p }})
		done <- end{r, err}
	}()
	if got := <-progress; got != "begun\n" {
		t.Errorf("progress %q", got)
	}
	running, _, err := s.Calls(ctx)
	if err != nil || len(running) != 1 || running[0] != "c1" {
		t.Errorf("running = %v, %v", running, err)
	}
	if err := s.Cancel(ctx, "c1"); err != nil {
		t.Fatal(err)
	}
	first := <-done
	if first.err != nil || first.r.Reason != "cancelled" || !first.r.IsError {
		t.Errorf("cancelled call = %+v, %v", first.r, first.err)
	}
	if r, err := s.Reattach(ctx, "c1", nil); err != nil || r.Text != first.r.Text {
		t.Errorf("asked again = %+v, %v", r, err)
	}
	if err := s.Ack(ctx, "c1"); err != nil {
		t.Fatal(err)
	}
	r, err := s.Do(ctx, sandbox.Call{ID: "c1", Thread: "x", Tool: "bash", Input: []byte(`{"command":"echo again"}`)})
	if err != nil || r.Reason != "gone" || strings.Contains(r.Text, "again") {
		t.Errorf("an acknowledged call = %+v, %v", r, err)
	}
	// The asker leaves, the call goes on.
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := s.Do(short, sandbox.Call{ID: "c2", Thread: "x", Tool: "bash", Input: []byte(`{"command":"sleep 0.5; echo done"}`)}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a short wait: %v", err)
	}
	if r, err := s.Reattach(ctx, "c2", nil); err != nil || r.Text != "done\n" {
		t.Errorf("after leaving = %+v, %v", r, err)
	}
}

// TestEgressSurvivesSnapshot: a transfer in both directions goes on over
// snapshots of the original; in the copy it ends.
func TestEgressSurvivesSnapshot(t *testing.T) {
	t.Parallel()
	const total = 24 << 20
	var conns atomic.Int64
	release := make(chan struct{})
	e := open(t, func(c *sandbox.Config) {
		c.Egress = func(_ context.Context, _ *sandbox.Sandbox, conn io.ReadWriteCloser) {
			conns.Add(1)
			defer conn.Close()
			// Sends numbered blocks; half of them only after the snapshots.
			block := make([]byte, 1<<16)
			for n := 0; n < total/len(block); n++ {
				if n == total/len(block)/2 {
					<-release
				}
				for i := range block {
					block[i] = byte(n + i)
				}
				if _, err := conn.Write(block); err != nil {
					return
				}
			}
		}
	})
	s := e.start("egress")
	if out := e.do(s, "bash", in{"command": "which python3"}); out.IsError {
		t.Skip("no python3 on this machine")
	}
	e.do(s, "write", in{"file_path": "get.py", "content": `
import socket, sys
c = socket.create_connection(("127.0.0.1", 3128))
n = 0
while True:
    b = c.recv(65536)
    if not b: break
    for i, x in enumerate(b[:: 997]):
        p = n + i * 997
        if x != (p // 65536 + p % 65536) % 256: print("wrong at", p); sys.exit(1)
    n += len(b)
print("got", n)
`})
	e.sh(s, "python3 get.py > out 2>&1 & sleep 0.3")
	m := e.snapshot(s)
	for range 2 {
		m = e.snapshot(s)
	}
	t.Logf("checkpoint %d ms", m.Took.Checkpoint)
	close(release)
	if got := e.sh(s, "wait >/dev/null; cat out"); !strings.HasSuffix(got, fmt.Sprint("got ", total)) {
		t.Errorf("the original: %q", got)
	}
	copied, back := e.restore(m, "copy")
	if len(back.Dead) == 0 {
		t.Error("no dead connection was told")
	}
	if got := e.sh(copied, "wait >/dev/null; cat out"); strings.HasSuffix(got, fmt.Sprint("got ", total)) || got == "" {
		t.Errorf("the copy: %q", got)
	}
	if n := conns.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

// TestActivity: nothing is the same, something is not.
func TestActivity(t *testing.T) {
	e := open(t)
	s := e.start("activity")
	e.sh(s, "echo a > f")
	before, err := s.Activity(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e.do(s, "read", in{"file_path": "f"})
	e.do(s, "grep", in{"pattern": "a"})
	after, err := s.Activity(t.Context())
	if err != nil || !sandbox.Same(before, after) {
		t.Errorf("reading counts: %+v, %+v, %v", before, after, err)
	}
	e.sh(s, "true")
	if after, _ = s.Activity(t.Context()); sandbox.Same(before, after) {
		t.Error("a command does not count")
	}
	before = after
	if err := s.PutFile(t.Context(), "/workspace/put", 0, strings.NewReader("b")); err != nil {
		t.Fatal(err)
	}
	if after, _ = s.Activity(t.Context()); sandbox.Same(before, after) {
		t.Error("a file put inside does not count")
	}
}

// TestProbe: what it finds fits what the tests can do.
func TestProbe(t *testing.T) {
	for _, f := range probed(binary(t)) {
		t.Logf("%-16s ok=%v %s %s", f.What, f.OK, f.Says, f.Mend)
		if !f.OK && f.Mend == "" {
			t.Errorf("%s: nothing to mend it", f.What)
		}
	}
	for _, f := range sandbox.Probe(t.Context(), sandbox.Config{Binary: os.DevNull}) {
		if f.What == "static binary" && f.OK {
			t.Error("a device passes for the binary")
		}
	}
}
