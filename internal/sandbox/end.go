package sandbox

import (
	"context"
	"math"
)

// End kills the sandbox that lives under this name, whether or not it answers,
// and removes what dead ones of this name left. None is no error.
func (r *Runtime) End(ctx context.Context, workspace, id string) error {
	return r.EndUnder(ctx, workspace, id, math.MaxUint64)
}

// EndUnder is End for one who knows of owners up to a fence: a sandbox that a
// newer one has found, or started, is left to it.
func (r *Runtime) EndUnder(ctx context.Context, workspace, id string, fence uint64) error {
	r.mu.Lock()
	var named []*Sandbox
	for _, s := range r.sandboxes {
		if st := s.snapshotState(); st.Workspace == workspace && st.ID == id {
			named = append(named, s)
		}
	}
	r.mu.Unlock()
	var first error
	for _, s := range named {
		if !s.giveUp(fence) {
			continue
		}
		if err := s.Kill(ctx); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// giveUp says that nobody may become the sandbox's owner any more, unless one
// above the fence has.
func (s *Sandbox) giveUp(fence uint64) bool {
	s.saving.Lock()
	defer s.saving.Unlock()
	if s.Fence() > fence {
		return false
	}
	s.ending = true
	return true
}
