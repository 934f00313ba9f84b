package sandbox_test

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/sandbox"
)

// counter counts up once a tick into a file, in memory only; it keeps one file
// open and writes at its offset.
const counter = `
import time, os
n = 0
log = open("/workspace/log", "w")
secret = os.urandom(8).hex()
while True:
    n += 1
    log.write("%d %s\n" % (n, secret)); log.flush()
    with open("/workspace/count.new", "w") as f: f.write("%d %s" % (n, secret))
    os.rename("/workspace/count.new", "/workspace/count")
    time.sleep(0.02)
`

// fill makes a machine with everything that must come back.
func fill(e *env, s *sandbox.Sandbox) {
	e.do(s, "write", in{"file_path": "/opt/counter.py", "content": counter})
	e.sh(s, `cd /opt; name=planaria; greet() { echo "hello $name from $PWD"; }; export EXPORTED=yes
mkdir -p /tree/deep/er; cd /tree; git init -q . 2>/dev/null; echo tracked > a; echo untracked > deep/b; echo gone > c; rm c
ln -s a link; ln -s /nowhere dangling; ln a hard; chmod 4751 deep/b; mkfifo pipe; chown 12:34 a; touch -d '2001-02-03 04:05:06.789' deep/er
rm -f /etc/mime.types; echo changed >> /etc/services; head -c 100000 /dev/urandom > deep/er/random
cd /opt; exec 9<>/tmp/nine; printf abcdef >&9; rm /tmp/nine
(while :; do sleep 0.05; date +%s%N > /dev/shm/beat; done) &`)
	if e.do(s, "bash", in{"command": "which python3"}).IsError {
		e.sh(s, `(n=0; while :; do n=$((n+1)); echo "$n shell" >> /workspace/log; echo "$n shell" > /workspace/count.new; mv /workspace/count.new /workspace/count; sleep 0.02; done) &`)
	} else {
		e.sh(s, "python3 /opt/counter.py > /dev/null 2>&1 &")
	}
	e.sh(s, "until [ -s /workspace/count ] && [ $(cut -d' ' -f1 /workspace/count) -gt 5 ]; do sleep 0.02; done")
}

func count(e *env, s *sandbox.Sandbox) (n int, secret string) {
	e.t.Helper()
	a, b, _ := strings.Cut(e.sh(s, "cat /workspace/count"), " ")
	n, err := strconv.Atoi(a)
	if err != nil {
		e.t.Fatal(err)
	}
	return n, b
}

// check compares a restored machine with what fill made.
func check(e *env, s *sandbox.Sandbox, tree string, least int, secret string) {
	t := e.t
	t.Helper()
	if got, err := s.HashTree(context.Background(), "/tree"); err != nil || got != tree {
		t.Errorf("tree hash %s, %v, want %s", got, err, tree)
	}
	n, again := count(e, s)
	if n < least || again != secret {
		t.Errorf("counter is %d with %s, was %d with %s", n, again, least, secret)
	}
	e.sh(s, "a=$(cat /workspace/count); b=$a; for i in $(seq 100); do [ \"$a\" != \"$b\" ] && break; sleep 0.02; b=$(cat /workspace/count); done; [ \"$a\" != \"$b\" ]")
	// The log has every number once: the offset of the open file was kept.
	if got := e.sh(s, `awk '$1 != NR { print "line " NR " is " $0; exit }' /workspace/log`); got != "" {
		t.Errorf("log of the counter: %s", got)
	}
	for command, want := range map[string]string{
		"greet":                             "hello planaria from /opt",
		"printf ghi >&9; cat /proc/$$/fd/9": "abcdefghi",
		"echo $EXPORTED":                    "yes",
		"test -e /etc/mime.types || echo deleted": "deleted",
		"tail -1 /etc/services":                   "changed",
		"a=$(cat /dev/shm/beat); for i in $(seq 100); do [ \"$(cat /dev/shm/beat)\" != \"$a\" ] && break; sleep 0.02; done; [ \"$(cat /dev/shm/beat)\" != \"$a\" ] && echo beats": "beats",
	} {
		if got := e.sh(s, command); got != want && !(strings.HasPrefix(command, "printf") && strings.HasPrefix(got, want)) {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
}

// TestRestoreIsExact: trials R1 and R3.
func TestRestoreIsExact(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("exact")
	fill(e, s)
	tree, err := s.HashTree(t.Context(), "/tree")
	if err != nil {
		t.Fatal(err)
	}
	m := e.snapshot(s)
	least, secret := count(e, s)
	t.Logf("snapshot: %+v, %d KiB", m.Took, m.Size()>>10)
	e.sh(s, "echo later > /tree/a") // after the snapshot: the copy must not have it
	if err := s.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	least -= 50 // the counter went on between image and look
	a, back := e.restore(m, "exact")
	t.Logf("restore: %v", back.Took)
	b, _ := e.restore(m, "fork")
	check(e, a, tree, least, secret)
	check(e, b, tree, least, secret)

	// And what must not be the same is not.
	for _, command := range []string{"hostname", "cat /etc/machine-id", "head -c 16 /dev/urandom | od -An -tx1", "cat /proc/sys/kernel/random/uuid", "cat /etc/hostname", "grep planaria- /etc/hosts"} {
		if x, y := e.sh(a, command), e.sh(b, command); x == y || x == "" {
			t.Errorf("%s is %q in both", command, x)
		}
	}
	for _, s := range []*sandbox.Sandbox{a, b} {
		inside, err := strconv.ParseInt(e.sh(s, "date +%s%N"), 10, 64)
		if off := time.Since(time.Unix(0, inside)); err != nil || off < -500*time.Millisecond || off > 500*time.Millisecond {
			t.Errorf("clock is off by %v, %v", off, err)
		}
		if s.Generation() != 2 {
			t.Errorf("generation %d", s.Generation())
		}
	}
	// A fork does not touch the other.
	e.sh(b, "echo b > /tree/a")
	if got, _ := a.HashTree(t.Context(), "/tree"); got != tree {
		t.Error("a write in one copy shows in the other")
	}
}

// TestRunningCall: a command that runs during a snapshot ends once in each life,
// with its result under its id.
func TestRunningCall(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("running")
	ctx := t.Context()
	began := make(chan string, 100)
	done := make(chan *sandbox.Result, 1)
	go func() {
		r, err := s.Do(ctx, sandbox.Call{ID: "long", Thread: "a", Tool: "bash", Input: []byte(`{"command":"echo begun; sleep 1; echo ended; echo x >> /workspace/ran","timeout_ms":3000}`), Progress: func(p string) { began <- p }})
		if err != nil {
			t.Error(err)
		}
		done <- r
	}()
	<-began
	m := e.snapshot(s)
	if len(m.Running) != 1 || m.Running[0] != "long" {
		t.Errorf("running in the manifest: %v", m.Running)
	}
	if r := <-done; r == nil || r.Text != "begun\nended\n" || r.Restored != 0 {
		t.Errorf("in the original: %+v", r)
	}
	select { // the snapshot lies longer than the command's timeout
	case <-time.After(3 * time.Second):
	case <-ctx.Done():
	}
	c, _ := e.restore(m, "copy")
	r, err := c.Reattach(ctx, "long", nil)
	if err != nil || r.Text != "begun\nended\n" || r.Reason != "" {
		t.Errorf("in the copy: %+v, %v", r, err)
	}
	if got := e.sh(c, "cat /workspace/ran"); got != "x" {
		t.Errorf("ran in the copy: %q", got)
	}
}

// TestSandboxKilled: what waits is told, and the newest snapshot comes back
// (trial R2).
func TestSandboxKilled(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("killed")
	e.sh(s, "echo kept > /workspace/f")
	m := e.snapshot(s)
	e.sh(s, "echo lost > /workspace/g")
	began := make(chan string, 100)
	done := make(chan error, 1)
	go func() {
		_, err := s.Do(t.Context(), sandbox.Call{ID: "cut", Thread: "a", Tool: "bash", Input: []byte(`{"command":"echo x; sleep 60"}`), Progress: func(p string) { began <- p }})
		done <- err
	}()
	<-began
	if err := syscall.Kill(s.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, sandbox.ErrGone) {
		t.Errorf("the call that was cut: %v", err)
	}
	if _, err := e.r.Find(t.Context(), "w1", "killed", 2); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("find a dead sandbox: %v", err)
	}
	if _, err := s.Snapshot(t.Context()); !errors.Is(err, sandbox.ErrGone) {
		t.Errorf("snapshot of a dead sandbox: %v", err)
	}
	if err := s.Kill(t.Context()); err != nil {
		t.Errorf("clean up after it: %v", err)
	}
	back, _ := e.restore(m, "killed")
	if got := e.sh(back, "cd /workspace; cat *"); got != "kept" {
		t.Errorf("files = %q", got)
	}
	if _, err := back.Reattach(t.Context(), "cut", nil); !errors.Is(err, sandbox.ErrUnknownCall) {
		t.Errorf("the call after the snapshot: %v", err)
	}
}

// TestClientKilled: gVisor's own command is killed in the middle of a
// checkpoint. The sandbox lives, and the next snapshot works.
func TestClientKilled(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("client")
	e.sh(s, "head -c 100000000 /dev/urandom > /dev/shm/big; echo here > f")
	for _, after := range []time.Duration{5, 20, 60} {
		ctx, cancel := context.WithTimeout(t.Context(), after*time.Millisecond)
		_, err := s.Snapshot(ctx) // exec kills the command when ctx ends
		cancel()
		t.Logf("killed after %v ms: %v", int64(after), err)
	}
	m := e.snapshot(s)
	c, _ := e.restore(m, "copy")
	for _, s := range []*sandbox.Sandbox{s, c} {
		if got := e.sh(s, "cat f; stat -c %s /dev/shm/big"); got != "here\n100000000" {
			t.Errorf("it has %q", got)
		}
	}
}

// TestDamaged: no byte of an image may be wrong, and no other memory passes for
// it.
func TestDamaged(t *testing.T) {
	t.Parallel()
	e := open(t)
	s := e.start("damaged")
	m := e.snapshot(s)
	spec := sandbox.Spec{Workspace: "w1", ID: "copy", Fence: 1}
	// Another workspace's snapshot looks like none (trial X1).
	foreign := spec
	foreign.Workspace = "w2"
	if _, _, err := e.r.Restore(t.Context(), m, foreign); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("another workspace: %v", err)
	}
	// The proof is another one: of a manifest that does not belong to the image.
	wrong := *m
	wrong.ProofKey = bytes.Repeat([]byte{1}, 32)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	if _, _, err := e.r.Restore(ctx, &wrong, spec); err == nil {
		t.Error("a sandbox without proof was taken")
	}
	cancel()
	// Another root.
	root := *m
	root.Root.Digest = strings.Repeat("0", 64)
	if _, _, err := e.r.Restore(t.Context(), &root, spec); !errors.Is(err, sandbox.ErrRoot) {
		t.Errorf("another root: %v", err)
	}
	// One bit.
	path := filepath.Join(e.r.SnapshotDir(m.ID), "pages.img")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := e.r.Restore(t.Context(), m, spec); !errors.Is(err, sandbox.ErrDamaged) {
		t.Errorf("a wrong bit: %v", err)
	}
	if live := e.r.Live(); len(live) != 1 {
		t.Errorf("live: %v", live)
	}
	if err := e.r.Test(t.Context(), m); !errors.Is(err, sandbox.ErrDamaged) {
		t.Errorf("test of a damaged one: %v", err)
	}
	if err := e.r.Test(t.Context(), e.snapshot(s)); err != nil {
		t.Errorf("test of a good one: %v", err)
	}
}

// gcm seals for tests.
type gcm struct{ cipher.AEAD }

func newSealer(t *testing.T) gcm {
	t.Helper()
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	block, err := aes.NewCipher(key)
	if err != nil {
		t.Fatal(err)
	}
	a, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		t.Fatal(err)
	}
	return gcm{a}
}

func (g gcm) Seal(name string, plain []byte) ([]byte, error) {
	return g.AEAD.Seal(nil, nil, plain, []byte(name)), nil
}

func (g gcm) Open(name string, sealed []byte) ([]byte, error) {
	return g.AEAD.Open(nil, nil, sealed, []byte(name))
}

// TestPack: a further snapshot stores what changed; both come back from the blob
// store, byte for byte, and only with the key.
func TestPack(t *testing.T) {
	t.Parallel()
	e := open(t)
	key := newSealer(t)
	s := e.start("pack")
	e.sh(s, "head -c 30000000 /dev/urandom > /dev/shm/big; echo canary-7391 > /workspace/f")
	ctx := t.Context()
	m1 := e.snapshot(s)
	p1, err := e.r.Pack(ctx, m1, nil, key)
	if err != nil {
		t.Fatal(err)
	}
	e.sh(s, "echo more >> /workspace/f")
	m2 := e.snapshot(s)
	began := time.Now()
	p2, err := e.r.Pack(ctx, m2, p1, key)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("image %d KiB stored as %d KiB; the next one as %d KiB in %v", p1.Image>>10, p1.Stored>>10, p2.Stored>>10, time.Since(began))
	if p2.Stored > p1.Stored/4 {
		t.Errorf("the second stored %d bytes, the first %d", p2.Stored, p1.Stored)
	}
	names, err := e.blobs.List(ctx, "w1")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if b, err := e.blobs.Get(ctx, "w1", n.Name); err != nil || bytes.Contains(b, []byte("canary-7391")) {
			t.Errorf("blob %s: %v, or not sealed", n.Name, err)
		}
	}
	if _, err := e.r.Unpack(ctx, "w2", p2, key); err == nil {
		t.Log("the image lies here, in its own workspace")
	}
	for _, m := range []*sandbox.Manifest{m1, m2} {
		if err := e.r.DropImage(m.ID); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := e.r.Unpack(ctx, "w1", p2, newSealer(t)); !errors.Is(err, sandbox.ErrDamaged) {
		t.Errorf("with another key: %v", err)
	}
	if _, err := e.r.Unpack(ctx, "w2", p2, key); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("for another workspace: %v", err)
	}
	for p, want := range map[*sandbox.Packed]string{p1: "canary-7391", p2: "canary-7391\nmore"} {
		m, err := e.r.Unpack(ctx, "w1", p, key)
		if err != nil {
			t.Fatal(err)
		}
		c, _ := e.restore(m, "copy-"+p.Snapshot)
		if got := e.sh(c, "cat /workspace/f"); got != want {
			t.Errorf("from the store: %q, want %q", got, want)
		}
	}
}

// TestOlderBinary: an upgrade orphans no snapshot. A sandbox of the older binary
// (one that is gVisor and agent itself and carries neither) lives on under the newer server, and its snapshot is restored by a copy of the
// older one from the blob store; by the newer it cannot be.
func TestOlderBinary(t *testing.T) {
	t.Parallel()
	newer := binary(t)
	older, err := build("older", "older")
	if err != nil {
		t.Fatal(err)
	}
	e := open(t, func(c *sandbox.Config) { c.Binary = older })
	s := e.start("old")
	e.sh(s, "v=kept; echo file > /workspace/f")
	m := e.snapshot(s)
	if err := e.r.Close(); err != nil {
		t.Fatal(err)
	}
	e.reopen(sandbox.Config{Dir: e.dir, Binary: newer, Blobs: e.blobs, StartTimeout: time.Minute})
	current, err := e.r.Binary(t.Context())
	if err != nil || current == m.Runtime {
		t.Fatalf("both binaries are the same, %v", err)
	}
	s, err = e.r.Find(t.Context(), "w1", "old", 2)
	if err != nil {
		t.Fatal(err)
	}
	if got := e.sh(s, "echo $v"); got != "kept" {
		t.Errorf("the old sandbox: %q", got)
	}
	if err := s.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(e.dir, "runtimes", m.Runtime)); err != nil {
		t.Fatal(err)
	}
	c, back := e.restore(m, "old")
	t.Logf("restored in %v", back.Took)
	if got := e.sh(c, "echo $v; cat /workspace/f"); got != "kept\nfile" {
		t.Errorf("restored: %q", got)
	}
	// It can be saved and restored again by its own binary.
	c2, _ := e.restore(e.snapshot(c), "again")
	if got := e.sh(c2, "echo $v"); got != "kept" {
		t.Errorf("restored again: %q", got)
	}
	// The newer binary refuses the image.
	wrong := *m
	wrong.Runtime = current
	if _, _, err := e.r.Restore(t.Context(), &wrong, sandbox.Spec{Workspace: "w1", ID: "wrong", Fence: 1}); err == nil || !strings.Contains(err.Error(), "version") {
		t.Errorf("the newer binary: %v", err)
	}
}

// TestPool: a start and a restore take what was created ahead; what nobody took
// goes with the runtime.
func TestPool(t *testing.T) {
	t.Parallel()
	e := open(t)
	first := e.start("first")
	m := e.snapshot(first)
	if err := e.r.Warm(t.Context(), sandbox.Spec{}, 3); err != nil {
		t.Fatal(err)
	}
	folders := func() int {
		list, err := os.ReadDir(filepath.Join(e.dir, "live"))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	if n := folders(); n != 4 {
		t.Fatalf("%d sandboxes, want the first and three in the pool", n)
	}
	e.sh(e.start("second"), "true")
	c, _ := e.restore(m, "third")
	e.sh(c, "true")
	if n := folders(); n != 4 {
		t.Errorf("%d sandboxes: the pool was not used", n)
	}
	if live := e.r.Live(); len(live) != 3 {
		t.Errorf("live: %v", live)
	}
	if err := e.r.Close(); err != nil {
		t.Fatal(err)
	}
	if n := folders(); n != 3 {
		t.Errorf("%d sandboxes after closing, want the three that live", n)
	}
	e.reopen(sandbox.Config{Dir: e.dir, Binary: binary(t), Blobs: e.blobs})
	for _, id := range []string{"first", "second", "third"} {
		s, err := e.r.Find(t.Context(), "w1", id, 2)
		if err != nil {
			t.Fatal(err)
		}
		e.sh(s, "true")
		if _, err := e.r.Find(t.Context(), "w1", id, 1); !errors.Is(err, sandbox.ErrFenced) {
			t.Errorf("an older fence: %v", err)
		}
		// The same process claims it again, under a higher fence.
		if s, err = e.r.Find(t.Context(), "w1", id, 3); err != nil {
			t.Fatal(err)
		}
		e.sh(s, "true")
	}
}
