package session

import (
	"context"

	"github.com/planaria/planaria/api"
)

// BuildEnv sets variables of every build and of what comes of it.
func (m *Manager) BuildEnv(env ...string) { m.builds.env = env }

// DropTemplates removes templates that no environment asks for.
func (m *Manager) DropTemplates(ctx context.Context) error { return m.tryDropTemplates(ctx) }

// PackageEnv is what shells need to find the packages.
func PackageEnv(p api.Packages, root []string) []string { return packageEnv(p, root) }

// PackageCommand is a manager's command for its packages.
func PackageCommand(name string, p api.Packages) string {
	for _, m := range managers {
		if m.name == name {
			return m.command(quote(m.list(p)))
		}
	}
	return ""
}

// PackageManagers are their names in the order in which they run.
func PackageManagers() (out []string) {
	for _, m := range managers {
		out = append(out, m.name)
	}
	return out
}
