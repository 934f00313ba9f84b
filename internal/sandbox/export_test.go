package sandbox

import (
	"context"
	"time"
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
	a, b := silence, answer
	silence, answer = d, d
	return func() { silence, answer = a, b }
}
