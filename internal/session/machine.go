package session

import (
	"context"
	"io"

	"github.com/planaria/planaria/internal/sandbox"
)

// Egress serves one connection of a process in a sandbox under the session that
// holds it; a sandbox that no driver holds has no way out.
func (m *Manager) Egress(ctx context.Context, s *sandbox.Sandbox, conn io.ReadWriteCloser) {
	_ = conn.Close()
}

// mount puts the session's resources into a fresh machine: files, repositories.
func (d *driver) mount(ctx context.Context, s *sandbox.Sandbox) error { return nil }

// collect keeps what the agent wrote to the outputs folder as files of the
// session. It is called when a turn ends, before the session rests.
func (d *driver) collect(ctx context.Context, s *sandbox.Sandbox) error { return nil }
