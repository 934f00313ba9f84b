package main

import (
	"bufio"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/sandbox"
)

// errNoBoxes: this machine runs no sandboxes.
var errNoBoxes = errors.New("this machine runs no sandboxes")

// boxes is a runtime of sandboxes that one section measures.
type boxes struct {
	r     *sandbox.Runtime
	blobs *blob.Folder
	dir   string
	names int
	calls int
}

// boxes opens a runtime on a folder of its own. errNoBoxes where none can run.
func (b *bench) boxes(ctx context.Context, name string) (*boxes, error) {
	program, err := b.sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	if b.probed == nil {
		b.probed = sandbox.Probe(ctx, sandbox.Config{Binary: program})
	}
	for _, f := range b.probed {
		if f.Fatal && !f.OK {
			return nil, fmt.Errorf("%w: %s: %s", errNoBoxes, f.What, f.Says)
		}
	}
	dir, err := b.folder(name)
	if err != nil {
		return nil, err
	}
	x := &boxes{dir: filepath.Join(dir, "sandboxes")}
	if x.blobs, err = blob.Open(filepath.Join(dir, "blobs")); err != nil {
		return nil, err
	}
	x.r, err = sandbox.Open(ctx, sandbox.Config{Dir: x.dir, Blobs: x.blobs, Binary: program, StartTimeout: 2 * time.Minute})
	if err != nil {
		_ = x.blobs.Close()
		return nil, err
	}
	return x, nil
}

// close kills what is left.
func (x *boxes) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	for _, l := range x.r.Live() {
		if s, err := x.r.Find(ctx, l[0], l[1], 1<<40); err == nil {
			_ = s.Kill(ctx)
		}
	}
	_ = x.r.Close()
	_ = x.blobs.Close()
}

// spec names a further sandbox with so much memory, 0 for the default.
func (x *boxes) spec(memory int64) sandbox.Spec {
	x.names++
	return sandbox.Spec{Workspace: "bench", ID: fmt.Sprintf("s%05d", x.names), Fence: 1, Limits: sandbox.Limits{MemoryBytes: memory}}
}

func (x *boxes) start(ctx context.Context, memory int64) (*sandbox.Sandbox, error) {
	return x.r.Start(ctx, x.spec(memory))
}

// call runs a tool as a session does: to its result, which is then acknowledged.
func (x *boxes) call(ctx context.Context, s *sandbox.Sandbox, tool string, input map[string]any) (string, error) {
	in, err := json.Marshal(input)
	if err != nil {
		return "", err
	}
	x.calls++
	id := fmt.Sprintf("call%09d", x.calls)
	res, err := s.Do(ctx, sandbox.Call{ID: id, Thread: "main", Tool: tool, Input: in})
	if err != nil {
		return "", err
	}
	if res.IsError {
		return "", fmt.Errorf("%s %s: %s", tool, in, res.Text)
	}
	return strings.TrimSpace(res.Text), s.Ack(ctx, id)
}

func (x *boxes) sh(ctx context.Context, s *sandbox.Sandbox, command string) (string, error) {
	return x.call(ctx, s, "bash", map[string]any{"command": command})
}

// sigkill ends a sandbox as the kernel's memory killer would, from outside.
func (x *boxes) sigkill(s *sandbox.Sandbox) error {
	states, err := filepath.Glob(filepath.Join(x.dir, "live", "*", "state.json"))
	if err != nil {
		return err
	}
	for _, name := range states {
		var st struct {
			ID  string `json:"id"`
			PID int    `json:"pid"`
		}
		raw, err := os.ReadFile(name)
		if err == nil {
			err = json.Unmarshal(raw, &st)
		}
		if err != nil || st.ID != s.ID() || st.PID < 2 {
			continue
		}
		if err := syscall.Kill(st.PID, syscall.SIGKILL); err != nil {
			return err
		}
		<-s.Done()
		return nil
	}
	return fmt.Errorf("sandbox %s has no state", s.ID())
}

// aesKey seals packs as a session's lineage does: AES-256-GCM bound to the use.
type aesKey struct{ gcm cipher.AEAD }

func newAESKey() (*aesKey, error) {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	gcm, err := cipher.NewGCMWithRandomNonce(block)
	return &aesKey{gcm}, err
}

func (k *aesKey) Seal(name string, plain []byte) ([]byte, error) {
	return k.gcm.Seal(nil, nil, plain, []byte(name)), nil
}

func (k *aesKey) Open(name string, sealed []byte) ([]byte, error) {
	return k.gcm.Open(nil, nil, sealed, []byte(name))
}

// hostShell is the baseline: a shell of this machine that takes commands over
// pipes and says when each has ended.
type hostShell struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func newHostShell(ctx context.Context, dir string) (*hostShell, error) {
	h := &hostShell{cmd: exec.CommandContext(ctx, "bash", "--noprofile", "--norc")}
	h.cmd.Dir = dir
	in, err := h.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	h.in, h.out = in, bufio.NewReader(out)
	return h, h.cmd.Start()
}

const endMark = "-- the command has ended --"

func (h *hostShell) run(command string) (string, error) {
	if _, err := fmt.Fprintf(h.in, "%s\necho '%s'\n", command, endMark); err != nil {
		return "", err
	}
	var said strings.Builder
	for {
		line, err := h.out.ReadString('\n')
		if err != nil {
			return "", fmt.Errorf("shell of this machine: %s: %w", command, err)
		}
		if strings.TrimSuffix(line, "\n") == endMark {
			return strings.TrimSpace(said.String()), nil
		}
		said.WriteString(line)
	}
}

func (h *hostShell) close() {
	_ = h.in.Close()
	_ = h.cmd.Wait()
}

// timed does something n times.
func timed(n int, do func() error) (sample, error) {
	var out sample
	for range n {
		start := time.Now()
		if err := do(); err != nil {
			return nil, err
		}
		out = append(out, time.Since(start))
	}
	return out, nil
}

// skipped prints that a section was not measured where no sandbox, or no browser
// in one, can run.
func skipped(title string, err error) error {
	if !errors.Is(err, errNoBoxes) && !errors.Is(err, errNoChromium) {
		return err
	}
	t := &table{title: title, head: []string{"not measured"}}
	t.row(err.Error())
	t.print()
	return nil
}
