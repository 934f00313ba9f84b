package sandbox

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// SetFault makes a named step between two durable ones fail.
func (r *Runtime) SetFault(f func(at string) error) { r.cfg.fault = f }

// Dir is the sandbox's folder.
func (s *Sandbox) Dir() string { return s.dir }

// PID of the sandbox's first process.
func (s *Sandbox) PID() int { return s.snapshotState().PID }

// SnapshotDir is where an image lies.
func (r *Runtime) SnapshotDir(id string) string { return r.snapshotDir(id) }

// Admit asks for room as a start does.
func (r *Runtime) Admit(ctx context.Context, need int64, limits Limits, wait bool) (func(), error) {
	return r.admit(ctx, need, limits, wait)
}

// StartMemory is what a start asks for.
const StartMemory = startMemory

// SetSilence shortens a call's watch over the agent.
func SetSilence(d time.Duration) (back func()) {
	a, b, c := silence, answer, wakeAfter
	silence, answer, wakeAfter = d, d, d
	return func() { silence, answer, wakeAfter = a, b, c }
}

// NewLink makes a sandbox that is nothing but its folder and its end of the link;
// the test is its agent.
func NewLink(dir string, key []byte, cfg Config) (*Sandbox, error) {
	if err := os.MkdirAll(filepath.Join(dir, "ctl"), 0o700); err != nil {
		return nil, err
	}
	cfg.StartTimeout, cfg.Log = time.Minute, slog.New(slog.DiscardHandler)
	r := &Runtime{cfg: cfg, log: cfg.Log, owner: "own_test", ctx: context.Background(), sandboxes: map[string]*Sandbox{}}
	s := &Sandbox{r: r, dir: dir, dead: make(chan struct{})}
	s.state = state{Version: 1, Workspace: "w1", ID: "linked", Key: key, Fence: 1, Egress: cfg.Egress != nil}
	s.link = newHostLink(s)
	return s, s.link.listen()
}

// ExpectRestore makes the next handshake one of a restore.
func (s *Sandbox) ExpectRestore(snapshot string, key []byte) {
	s.link.expect(wire.Greeting{Mode: wire.Restore, Snapshot: snapshot, Generation: 2}, key)
}

// WaitLink waits for the agent.
func (s *Sandbox) WaitLink(ctx context.Context) error { return s.link.wait(ctx) }

// Await waits for the agent as a start, a restore or Find does.
func (s *Sandbox) Await(ctx context.Context) error { return s.await(ctx) }

// CloseLink is what Kill does first, Detach what Close of the Runtime does.
func (s *Sandbox) CloseLink() { s.link.close(ErrGone) }

// Detach lets go of the sandbox.
func (s *Sandbox) Detach() { s.detach(errClosed) }

// Run is the last step of a start or restore.
func (s *Sandbox) Run() error { return s.run() }

// Own raises the fence and waits for the agent.
func (s *Sandbox) Own(ctx context.Context, fence uint64) error { return s.own(ctx, fence) }

// Raise only raises it.
func (s *Sandbox) Raise(fence uint64) error { _, err := s.raise(fence); return err }

// Save makes the state durable.
func (s *Sandbox) Save() error { return s.save() }

// AgePool makes pooled sandboxes ones of another state of the machine's programs.
func (r *Runtime) AgePool() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.pool {
		for _, s := range p {
			s.mu.Lock()
			s.state.Root.Digest = "of yesterday"
			s.mu.Unlock()
		}
	}
}
