// Package sandbox runs an agent's machine: processes, shells and files in gVisor
// that can be stopped, copied and brought back exactly. It keeps no rows; what
// it needs to find a sandbox again lies in a folder.
//
// A sandbox is a process tree of its own. It lives on when the process that
// started it dies; the next Runtime on the same folder finds it, proves the
// higher fence to the agent inside, and asks for running calls by id.
//
//	Start    nothing -> running          generation 1
//	Find     running -> running          a new owner, a higher fence
//	Snapshot running -> running          a verified image beside it
//	Kill     running -> nothing
//	Restore  image   -> running          a new generation, a new identity
//
// Invariants:
//
//   - A snapshot exists when its manifest does; the manifest is written after
//     the image is synced, read back and hashed. Before that a crash leaves a
//     folder that the next Open removes.
//   - A restored sandbox has no way out until it has proved a key that the
//     snapshot placed in its memory and has taken on its new identity; in any
//     doubt it is killed.
//   - An image is restored by the very binary that took it, found by digest.
//   - A call runs at most once per id and sandbox; its result is kept inside
//     until acknowledged.
//   - The only way out of a sandbox is its socket.
//
// What root inside can do to itself: end its agent (kill -9 1), which ends the
// sandbox as pulling the plug would, and make its own results and snapshots
// worthless. The link's key lies in the agent's memory, which nobody inside can
// read; who had it could make up results of that one sandbox, which its
// processes can anyway, and nothing else: the way out is known by its socket.
//
// What copies of one snapshot share in spite of a new identity: the boot id, all
// that programs have drawn from the system's randomness before, and timers that
// came due while it lay there, which fire at once (gVisor counts frozen time).
//
// The package does not decide when to take snapshots, keeps no credential, and
// knows nothing of tools' permissions.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"

	"github.com/planaria/planaria/internal/sandbox/guest"
)

// Errors of the package. Callers test with errors.Is.
var (
	// ErrNotFound: no such sandbox lives here, or no such snapshot.
	ErrNotFound = errors.New("sandbox not found")
	// ErrGone: the sandbox has died; its newest snapshot can be restored.
	ErrGone = errors.New("sandbox is gone")
	// ErrFenced: a newer owner holds the sandbox.
	ErrFenced = errors.New("a newer owner holds the sandbox")
	// ErrUnknownCall: the sandbox has never started this call.
	ErrUnknownCall = errors.New("call is not known to the sandbox")
	// ErrDamaged: an image does not match its manifest, or a restored sandbox
	// did not prove itself.
	ErrDamaged = errors.New("snapshot is damaged")
	// ErrRoot: the root file system is not the one that the snapshot was taken on.
	ErrRoot = errors.New("root file system has changed")
	// ErrRuntime: the binary that took a snapshot is not kept here.
	ErrRuntime = errors.New("runtime of the snapshot is missing")
	// ErrLocked: another process has the folder.
	ErrLocked = errors.New("another process has the folder of sandboxes")
	// ErrUnsupported: this machine cannot run sandboxes; Probe says why.
	ErrUnsupported = errors.New("sandboxes are not supported on this machine")
)

// Blobs keeps runtimes and packs; *blob.Folder does.
type Blobs interface {
	PutReader(ctx context.Context, workspace string, r io.Reader) (name string, size int64, err error)
	Get(ctx context.Context, workspace, name string) ([]byte, error)
}

// runtimeSpace is the space in the blob store of binaries, which hold no
// tenant's bytes.
const runtimeSpace = "planaria-runtimes"

// Config of a Runtime.
type Config struct {
	// Dir is the folder of all state; this process has it for itself.
	Dir string
	// Blobs keeps binaries and packs. Nil: snapshots stay in Dir.
	Blobs Blobs
	// Binary holds gVisor and the agent. Default: this program, as it was when
	// it started: an upgrade of the installed file does not reach it.
	Binary string
	// Program is what sandboxes run where Binary is not that itself but carries
	// it: its bytes, a static executable that is gVisor and the agent and nothing
	// else. Each process of a sandbox then sets up that much less.
	Program string
	// Egress serves one connection from inside to the way out, until it
	// returns. Nil: there is none.
	Egress func(ctx context.Context, s *Sandbox, conn io.ReadWriteCloser)
	// Transport reaches the registries of images. A tenant names the image, so it
	// must refuse addresses that a tenant may not reach. Nil: images come from
	// Layouts alone.
	Transport http.RoundTripper
	// Keychain has the operator's credentials of registries, for the images of
	// all tenants. Nil: none.
	Keychain authn.Keychain
	// Layouts is a folder below which OCI layouts lie that environments may
	// name. Empty: they may name none.
	Layouts string
	// RootBytes is what unpacked images may take before those that nobody uses
	// are removed. Default 64 GiB.
	RootBytes int64
	// MemoryBytes bounds what all sandboxes of the folder use together when
	// another one is admitted (see room). Default: 4/5 of what the machine has
	// left at Open, or of what a control group of this process allows.
	MemoryBytes int64
	// CPUFeatures are the only features of the processor that programs inside
	// see, as /proc/cpuinfo names them or as levels ("x86-64-v2", "x86-64-v3"):
	// an image can be restored on every machine that has these. Default: all of
	// this machine, and an image moves to machines that have at least as many.
	// amd64 only, and only where the processor can hide them (features.go).
	CPUFeatures []string
	// StartTimeout bounds a start or restore. Default 30 s.
	StartTimeout time.Duration
	// Log. Default: none.
	Log *slog.Logger

	fault func(at string) error // tests only, see hook
}

// Limits of one sandbox. Zero means the default.
type Limits struct {
	MemoryBytes int64         `json:"memory_bytes,omitzero"` // default 2 GiB
	CPUs        float64       `json:"cpus,omitzero"`         // default: all
	DiskBytes   int64         `json:"disk_bytes,omitzero"`   // of what it writes, below /usr of the host root counted apart; default 10 GiB
	Processes   int           `json:"processes,omitzero"`    // default 512
	CallTime    time.Duration `json:"call_time,omitzero"`    // longest timeout of a call; default 10 min
}

func (l Limits) filled() Limits {
	if l.MemoryBytes == 0 {
		l.MemoryBytes = 2 << 30
	}
	if l.DiskBytes == 0 {
		l.DiskBytes = 10 << 30
	}
	if l.Processes == 0 {
		l.Processes = 512
	}
	if l.CallTime == 0 {
		l.CallTime = 10 * time.Minute
	}
	return l
}

// Spec says what sandbox to start or restore.
type Spec struct {
	Workspace string // tenant
	ID        string // of the sandbox in its workspace: the session's
	Fence     uint64 // of the owner
	Root      Root
	Limits    Limits
	Env       []string // of its shells; no secrets
	// NoEgress: a restored copy that is only tested gets no way out.
	NoEgress bool
	// Wait for room until the context ends, in the order of asking. Otherwise
	// ErrFull comes at once.
	Wait bool
}

// Runtime runs the sandboxes of one folder. Its methods may run concurrently.
type Runtime struct {
	cfg    Config
	log    *slog.Logger
	bin    binaries
	room   room
	mask   []string // what new sandboxes show of the processor; nil: all
	owner  string   // of this open Runtime
	lock   *os.File
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wait   sync.WaitGroup
	roots  sync.Mutex // one maker of root folders
	images images
	host   hostRoot

	mu        sync.Mutex
	closed    bool
	sandboxes map[string]*Sandbox // by folder name
	pool      map[string][]*Sandbox
	unpacking map[string]chan struct{} // by snapshot; closed at its end
}

// errClosed: the Runtime was closed by this process.
var errClosed = errors.New("the runtime of sandboxes is closed")

// add counts something that Close waits for; r.wait.Done ends it. false: the
// Runtime is closed.
func (r *Runtime) add() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.wait.Add(1)
	return true
}

// begin counts an act that makes something in the folder. Its context ends with
// the Runtime, and Close waits for end: nothing is made in a folder that the next
// process may have.
func (r *Runtime) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	if !r.add() {
		return nil, nil, errClosed
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(r.ctx, func() { cancel(errClosed) })
	return ctx, func() { stop(); cancel(nil); r.wait.Done() }, nil
}

// Open opens the folder and takes it over: sandboxes that live on are found
// again with Find; what a crash left half-made is removed. It starts nothing.
// ErrLocked while another process has it, even a stopped one: two owners of one
// folder would sweep each other's work.
func Open(ctx context.Context, cfg Config) (*Runtime, error) {
	if cfg.StartTimeout == 0 {
		cfg.StartTimeout = 30 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Binary == "" {
		cfg.Binary = ownBinary
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("open sandboxes: %w", err)
	}
	cfg.Dir = dir
	for _, d := range []string{"run", "live", "snapshots", "runtimes", "roots"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("open sandboxes: %w", err)
		}
	}
	shown, err := mask(cfg.CPUFeatures)
	if err != nil {
		return nil, fmt.Errorf("open sandboxes: %w", err)
	}
	r := &Runtime{cfg: cfg, mask: shown, log: cfg.Log, owner: randomID("own_"), sandboxes: map[string]*Sandbox{}, pool: map[string][]*Sandbox{}}
	if r.lock, err = lockFolder(dir); err != nil {
		return nil, fmt.Errorf("open sandboxes: %w", err)
	}
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := r.load(ctx); err != nil {
		_ = r.Close()
		return nil, fmt.Errorf("open sandboxes: %w", err)
	}
	r.listHost()
	if r.room.limit = cfg.MemoryBytes; r.room.limit == 0 {
		r.room.limit = memoryLimit() + r.used() // which is gone from what the machine has left
	}
	return r, nil
}

// Close lets go of all sandboxes; they live on. Pooled ones are killed, and acts
// under way end with an error.
func (r *Runtime) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	r.cancel()
	var pooled []*Sandbox
	for _, p := range r.pool {
		pooled = append(pooled, p...)
	}
	r.pool = map[string][]*Sandbox{}
	all := make([]*Sandbox, 0, len(r.sandboxes))
	for _, s := range r.sandboxes {
		all = append(all, s)
	}
	r.mu.Unlock()
	var first error
	for _, s := range pooled {
		if err := s.Kill(context.WithoutCancel(r.ctx)); err != nil && first == nil {
			first = err
		}
	}
	for _, s := range all {
		s.detach(errClosed)
	}
	r.wait.Wait()
	if err := unlockFolder(r.lock); err != nil && first == nil {
		first = err
	}
	return first
}

// Sandbox is one running sandbox with this process as its owner.
type Sandbox struct {
	r    *Runtime
	dir  string // its folder
	link *hostLink

	snapshotting sync.Mutex  // one snapshot at a time
	saving       sync.Mutex  // one save of the state at a time
	ending       bool        // see giveUp; guarded by saving
	frozen       atomic.Bool // by a checkpoint
	paused       atomic.Bool // by Pause
	killing      sync.Mutex  // one end at a time
	killed       bool        // whole; guarded by killing

	use struct { // memory, for admission
		mu    sync.Mutex
		at    time.Time
		bytes int64
	}

	mu    sync.Mutex
	state state
	dead  chan struct{} // closed when the sandbox's process is gone
}

// Workspace and ID name the sandbox.
func (s *Sandbox) Workspace() string { return s.snapshotState().Workspace }

// ID of the sandbox in its workspace.
func (s *Sandbox) ID() string { return s.snapshotState().ID }

// Generation counts the restores of this line of sandboxes, from 1. Everything
// that is cached about a sandbox is keyed by it.
func (s *Sandbox) Generation() uint64 { return s.snapshotState().Generation }

// Fence under which this process owns the sandbox.
func (s *Sandbox) Fence() uint64 { return s.snapshotState().Fence }

// Done is closed when the sandbox's process is gone, for whatever reason.
func (s *Sandbox) Done() <-chan struct{} { return s.dead }

func (s *Sandbox) snapshotState() state {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// Start starts a fresh sandbox and waits until its agent answers. One with the
// same workspace and id must not live: Find or Kill comes first. ErrFull.
func (r *Runtime) Start(ctx context.Context, spec Spec) (*Sandbox, error) {
	ctx, end, err := r.begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("start sandbox %s: %w", spec.ID, err)
	}
	defer end()
	admitted, err := r.admit(ctx, startMemory, spec.Limits, spec.Wait)
	if err != nil {
		return nil, fmt.Errorf("start sandbox %s: %w", spec.ID, err)
	}
	defer admitted()
	ctx, cancel := context.WithTimeout(ctx, r.cfg.StartTimeout)
	defer cancel()
	binary, err := r.Binary(ctx)
	if err != nil {
		return nil, fmt.Errorf("start sandbox %s: %w", spec.ID, err)
	}
	s, err := r.take(ctx, spec, binary)
	if err != nil {
		return nil, fmt.Errorf("start sandbox %s: %w", spec.ID, err)
	}
	// A crash from here on leaves a running sandbox in phase "starting": the
	// next Open kills it, for no call has run in it.
	if err := s.boot(ctx); err != nil {
		_ = s.Kill(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("start sandbox %s: %w", spec.ID, err)
	}
	return s, nil
}

// Find returns the sandbox that lives under this name and takes it over with a
// fence that is not lower than its last. ErrNotFound when none lives, ErrFenced
// when the agent knows a newer owner.
func (r *Runtime) Find(ctx context.Context, workspace, id string, fence uint64) (*Sandbox, error) {
	s := r.lookup(workspace, id)
	if s == nil {
		return nil, fmt.Errorf("find sandbox %s: %w", id, ErrNotFound)
	}
	if err := s.own(ctx, fence); err != nil {
		return nil, fmt.Errorf("find sandbox %s: %w", id, err)
	}
	return s, nil
}

func (r *Runtime) lookup(workspace, id string) *Sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sandboxes {
		st := s.snapshotState()
		if st.Workspace == workspace && st.ID == id && st.Phase == phaseRunning && s.alive() {
			return s
		}
	}
	return nil
}

// Live lists the sandboxes that live in this folder, as (workspace, id).
func (r *Runtime) Live() [][2]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out [][2]string
	for _, s := range r.sandboxes {
		if st := s.snapshotState(); st.Phase == phaseRunning && s.alive() {
			out = append(out, [2]string{st.Workspace, st.ID})
		}
	}
	slices.SortFunc(out, func(a, b [2]string) int { return slices.Compare(a[:], b[:]) })
	return out
}

// Warm fills the pool for a template up to size: created, not yet started
// sandboxes that Start and Restore take. The spec's name and fence are ignored.
// ErrFull.
func (r *Runtime) Warm(ctx context.Context, spec Spec, size int) error {
	ctx, end, err := r.begin(ctx)
	if err != nil {
		return fmt.Errorf("warm the pool: %w", err)
	}
	defer end()
	binary, err := r.Binary(ctx)
	if err != nil {
		return fmt.Errorf("warm the pool: %w", err)
	}
	key := templateKey(spec, binary)
	for {
		r.mu.Lock()
		n := len(r.pool[key])
		r.mu.Unlock()
		if n >= size {
			return nil
		}
		admitted, err := r.admit(ctx, startMemory, spec.Limits, false)
		if err != nil {
			return fmt.Errorf("warm the pool: %w", err)
		}
		s, err := r.create(ctx, spec, binary)
		admitted()
		if err != nil {
			return fmt.Errorf("warm the pool: %w", err)
		}
		r.mu.Lock()
		closed := r.closed
		if !closed {
			r.pool[key] = append(r.pool[key], s)
		}
		r.mu.Unlock()
		if closed {
			_ = s.Kill(ctx) // Close did not see it
			return fmt.Errorf("warm the pool: %w", errClosed)
		}
	}
}

// take returns a created sandbox, from the pool where it has one, under the
// spec's name.
func (r *Runtime) take(ctx context.Context, spec Spec, binary string) (*Sandbox, error) {
	if spec.Workspace == "" || spec.ID == "" {
		return nil, errors.New("workspace or id is missing")
	}
	if r.lookup(spec.Workspace, spec.ID) != nil {
		return nil, fmt.Errorf("a sandbox of this name lives: %w", ErrFenced)
	}
	root, err := r.root(ctx, spec.Root)
	if err != nil {
		return nil, err
	}
	key := templateKey(spec, binary)
	var s *Sandbox
	for s == nil {
		r.mu.Lock()
		pool := r.pool[key]
		if len(pool) == 0 {
			r.mu.Unlock()
			break
		}
		s = pool[len(pool)-1]
		r.pool[key] = pool[:len(pool)-1]
		r.mu.Unlock()
		// One that was made before the machine's programs changed would name
		// them wrongly in its snapshots.
		if !s.alive() || s.snapshotState().Root.Digest != root.Digest {
			_ = s.Kill(ctx)
			s = nil
		}
	}
	if s == nil {
		if s, err = r.create(ctx, spec, binary); err != nil {
			return nil, err
		}
	}
	err = r.name(s, spec)
	if err == nil {
		err = s.save()
	}
	if err != nil {
		_ = s.Kill(context.WithoutCancel(ctx))
		return nil, err
	}
	return s, nil
}

// name gives a created sandbox its name, which no other one that starts or runs
// may have.
func (r *Runtime) name(s *Sandbox, spec Spec) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.sandboxes {
		st := o.snapshotState()
		if st.Workspace == spec.Workspace && st.ID == spec.ID && st.Phase != phaseCreated && o.alive() {
			return fmt.Errorf("a sandbox of this name lives: %w", ErrFenced)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state.Workspace, s.state.ID, s.state.Fence = spec.Workspace, spec.ID, spec.Fence
	s.state.Egress = !spec.NoEgress && r.cfg.Egress != nil
	s.state.Env = append(slices.Clone(spec.Root.Env), spec.Env...)
	s.state.Phase = phaseStarting
	return nil
}

// Paths inside a sandbox (REF 4.4).
const (
	Workspace = guest.Workspace
	Outputs   = guest.Outputs
	Uploads   = guest.Uploads
	// ProxyURL is where processes inside reach the way out.
	ProxyURL = "http://" + guest.EgressAddress
)

// Finding is what Probe says about one thing that sandboxes need.
type Finding struct {
	What string // in a few words
	OK   bool
	Says string // what was found
	Mend string // what a person can do; empty when OK
	// Fatal: without it no sandbox runs. Else something is missing that can be
	// done without.
	Fatal bool
}
