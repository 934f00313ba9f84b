package sandbox

import "context"

// End kills the sandbox that lives under this name, whether or not it answers,
// and removes what dead ones of this name left. None is no error.
func (r *Runtime) End(ctx context.Context, workspace, id string) error {
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
		if err := s.Kill(ctx); err != nil && first == nil {
			first = err
		}
	}
	return first
}
