package sandbox

import "context"

// End kills the sandbox that lives under this name, whether or not it answers.
// None is no error.
func (r *Runtime) End(ctx context.Context, workspace, id string) error {
	s := r.lookup(workspace, id)
	if s == nil {
		return nil
	}
	return s.Kill(ctx)
}
