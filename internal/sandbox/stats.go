package sandbox

import (
	"fmt"
	"time"
)

// Stats are numbers of one sandbox for metering and admission. They come from
// the machine, not from inside, and cost some system calls.
type Stats struct {
	// Memory in bytes: of the processes inside with their files in memory
	// (/tmp, /dev/shm), of gVisor and of its file server. Without the page cache
	// of files, which the machine takes back by itself.
	Memory int64
	// CPU is the processor time of this life of the sandbox, gVisor's included.
	// Where there are no control groups (an ordinary user) that of processes
	// which have ended inside may be missing.
	CPU time.Duration
}

// Stats measures the sandbox. ErrGone when it has died.
func (s *Sandbox) Stats() (Stats, error) {
	if !s.alive() {
		return Stats{}, fmt.Errorf("measure sandbox %s: %w", s.ID(), ErrGone)
	}
	return Stats{Memory: measureMemory(s.snapshotState().PID), CPU: s.measureCPU()}, nil
}

// RuntimeStats are the sums of a folder.
type RuntimeStats struct {
	Sandboxes int   // that live, pooled ones not counted
	Pooled    int   // created ahead
	Memory    int64 // bytes, of all
	Limit     int64 // bytes that they may use together
	Waiting   int   // starts and restores that wait for room
}

// Stats sums up. Numbers of a sandbox may be a second old.
func (r *Runtime) Stats() RuntimeStats {
	out := RuntimeStats{Sandboxes: len(r.Live()), Memory: r.used(), Limit: r.room.limit}
	r.mu.Lock()
	for _, p := range r.pool {
		out.Pooled += len(p)
	}
	r.mu.Unlock()
	r.room.mu.Lock()
	out.Waiting = len(r.room.queue)
	r.room.mu.Unlock()
	return out
}

// measuredFor is how long a sandbox's memory is taken to be what it was, so that
// admissions among a thousand stay cheap.
const measuredFor = time.Second

// memory is the sandbox's memory for admission; 0 when it is dead.
func (s *Sandbox) memory() int64 {
	if !s.alive() {
		return 0
	}
	pid := s.snapshotState().PID
	s.use.mu.Lock()
	defer s.use.mu.Unlock()
	if time.Since(s.use.at) > measuredFor {
		s.use.at, s.use.bytes = time.Now(), measureMemory(pid)
	}
	return s.use.bytes
}
