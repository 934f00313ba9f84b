package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// ErrFull: the sandboxes that run leave no room for another; the error is a
// *FullError.
var ErrFull = errors.New("no room for another sandbox")

// FullError says how much room there is. It is ErrFull.
type FullError struct {
	Need  int64 // bytes that the sandbox is expected to take at once
	Free  int64 // bytes that may be given away now
	Limit int64 // bytes for all sandboxes together
	Ahead int   // others that wait for room
}

func (e *FullError) Error() string {
	ahead := ""
	if e.Ahead > 0 {
		ahead = fmt.Sprintf(", and %d others wait for it", e.Ahead)
	}
	return fmt.Sprintf("%v: it needs %d MiB, %d MiB of %d MiB are free%s; end or suspend another one, let them linger for a shorter time, or give sandboxes more memory",
		ErrFull, e.Need>>20, e.Free>>20, e.Limit>>20, ahead)
}

func (e *FullError) Unwrap() error { return ErrFull }

const (
	// startMemory is what a sandbox takes until its first call: gVisor, its
	// file server, the agent.
	startMemory = 32 << 20
	// reserveShare of all memory stays free at an admission, so that those that
	// run can grow; never more than the newcomer's own limit.
	reserveShare = 16
	// roomPoll is how often the first who waits looks by itself: memory comes
	// back without a word.
	roomPoll = 250 * time.Millisecond
)

// room is the admission by memory. The rule: a sandbox counts with what it uses
// (Stats.Memory), one that is being started with what it is expected to use
// (32 MiB, and the image of a restore), and its limit does not count at all;
// 1/16 of all memory stays free at each admission. So 1,000 sandboxes with a
// limit of 2 GiB that use 22 MiB each fit into 24 GiB. What those that run grow
// by later is bounded by the limit of each alone: nobody is killed for others,
// but nobody is admitted either until there is room again.
type room struct {
	limit int64 // bytes

	mu       sync.Mutex
	promised int64 // to those that are being started
	queue    []*waiter
}

type waiter struct {
	need, reserve int64
	poke          chan struct{} // size 1
}

// admit returns when there is room, and holds it until done is called: then the
// sandbox runs and is counted by what it uses. Who does not wait never overtakes
// who does.
func (r *Runtime) admit(ctx context.Context, need int64, limits Limits, wait bool) (done func(), err error) {
	reserve := min(r.room.limit/reserveShare, limits.filled().MemoryBytes)
	r.room.mu.Lock()
	if len(r.room.queue) == 0 && need <= r.free(reserve) {
		defer r.room.mu.Unlock()
		return r.promise(need), nil
	}
	full := &FullError{Need: need, Free: r.free(reserve), Limit: r.room.limit, Ahead: len(r.room.queue)}
	if !wait || need > r.room.limit-reserve {
		r.room.mu.Unlock()
		return nil, full
	}
	w := &waiter{need: need, reserve: reserve, poke: make(chan struct{}, 1)}
	r.room.queue = append(r.room.queue, w)
	r.room.mu.Unlock()
	tick := time.NewTicker(roomPoll)
	defer tick.Stop()
	for {
		select {
		case <-w.poke:
		case <-tick.C:
		case <-ctx.Done():
			return nil, r.leave(w, fmt.Errorf("%w: %w", full, context.Cause(ctx)))
		case <-r.ctx.Done():
			return nil, r.leave(w, errors.New("runtime closed"))
		}
		r.room.mu.Lock()
		if r.room.queue[0] == w && need <= r.free(reserve) {
			r.room.queue = r.room.queue[1:]
			r.pokeFirst()
			defer r.room.mu.Unlock()
			return r.promise(need), nil
		}
		r.room.mu.Unlock()
	}
}

// promise counts room that is given away. room.mu is held.
func (r *Runtime) promise(need int64) func() {
	r.room.promised += need
	return sync.OnceFunc(func() {
		r.room.mu.Lock()
		defer r.room.mu.Unlock()
		r.room.promised -= need
		r.pokeFirst()
	})
}

func (r *Runtime) leave(w *waiter, why error) error {
	r.room.mu.Lock()
	defer r.room.mu.Unlock()
	r.room.queue = slices.DeleteFunc(r.room.queue, func(x *waiter) bool { return x == w })
	r.pokeFirst()
	return why
}

// pokeFirst lets the first who waits look again. room.mu is held.
func (r *Runtime) pokeFirst() {
	if len(r.room.queue) > 0 {
		select {
		case r.room.queue[0].poke <- struct{}{}:
		default:
		}
	}
}

// freed says that a sandbox is gone.
func (r *Runtime) freed() {
	r.room.mu.Lock()
	defer r.room.mu.Unlock()
	r.pokeFirst()
}

// free is what may be given away. room.mu is held.
func (r *Runtime) free(reserve int64) int64 {
	return max(0, r.room.limit-reserve-r.room.promised-r.used())
}

// used is the memory of all sandboxes of the folder, pooled ones too.
func (r *Runtime) used() (n int64) {
	r.mu.Lock()
	all := make([]*Sandbox, 0, len(r.sandboxes))
	for _, s := range r.sandboxes {
		all = append(all, s)
	}
	r.mu.Unlock()
	for _, s := range all {
		n += s.memory()
	}
	return n
}

// memoryLimit is the default of Config.MemoryBytes: 4/5 of what the machine has
// left, or of what a control group of this process allows.
func memoryLimit() int64 {
	least := int64(meminfo("MemAvailable:")) << 10
	for _, path := range memoryGroups() {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil && n > 0 && (least == 0 || n < least) {
			least = n
		}
	}
	return least / 5 * 4
}

// memoryGroups are the files with the limits that may hold for this process: of
// its own group, and of the root, which in a container is the container's.
func memoryGroups() []string {
	const v1, v2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"
	out := []string{filepath.Join(v1, "memory.limit_in_bytes"), filepath.Join(v2, "memory.max")}
	b, _ := os.ReadFile("/proc/self/cgroup")
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(f) < 3:
		case f[1] == "":
			out = append(out, filepath.Join(v2, f[2], "memory.max"))
		case slices.Contains(strings.Split(f[1], ","), "memory"):
			out = append(out, filepath.Join(v1, f[2], "memory.limit_in_bytes"))
		}
	}
	return out
}

// meminfo is a line of /proc/meminfo in KiB, 0 where it is missing.
func meminfo(name string) uint64 {
	b, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == name {
			n, _ := strconv.ParseUint(f[1], 10, 64)
			return n
		}
	}
	return 0
}
