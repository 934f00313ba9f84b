package session

import (
	"context"

	"github.com/planaria/planaria/internal/sandbox"
)

// fresh starts the session's first machine, which nothing has run in yet: from
// the template of its environment where that has packages, else from the root
// file system alone. The caller sets name, fence, limits and env of spec; its
// root is filled in here, from the environment's image.
//
// An error that unwraps to *BuildError or sandbox.ErrImage is for the model and
// the user to read: the tool call that needed the machine is answered with its
// text, and the next one tries again. Other errors are the node's.
func (d *driver) fresh(ctx context.Context, spec sandbox.Spec) (*sandbox.Sandbox, error) {
	return d.m.cfg.Sandboxes.Start(ctx, spec)
}
