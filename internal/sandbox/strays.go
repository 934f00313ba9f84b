//go:build linux

package sandbox

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A command of gVisor that is cut short while it makes a sandbox leaves
// processes and files that gVisor itself does not know of. Both carry the name of
// the container, which is drawn at random and never used again.

var containerName = regexp.MustCompile(`sb-[0-9a-f]{32}`)

// createTime bounds the making of a container, which takes a tenth of a second.
const createTime = time.Minute

// createPoll is how often a command of a former server is looked for.
const createPoll = 10 * time.Millisecond

// stray is a process of gVisor that names a container.
type stray struct {
	pid       int
	container string
	creates   bool // it is the command that makes the container
}

// findStrays lists processes of gVisor by the containers that they name in their
// last argument.
func findStrays(wanted func(container string) bool) (out []stray) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, line := range lines {
		b, err := os.ReadFile(line)
		if err != nil || !strings.HasPrefix(string(b), "runsc") {
			continue
		}
		args := strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
		name := args[len(args)-1]
		if containerName.FindString(name) != name || !wanted(name) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(line)))
		if err == nil && pid > 1 {
			out = append(out, stray{pid, name, args[0] == "runsc" && slices.Contains(args, "create")})
		}
	}
	return out
}

// awaitCreates waits for commands that a server which was killed has left making
// sandboxes: what is removed under one that goes on comes back behind it. One
// that takes too long is ended; removeStrays sees to what it leaves.
func (r *Runtime) awaitCreates(ctx context.Context) error {
	late := time.After(createTime)
	for {
		made := findStrays(func(name string) bool { return exists(filepath.Join(r.cfg.Dir, "live", name)) })
		made = slices.DeleteFunc(made, func(s stray) bool { return !s.creates })
		if len(made) == 0 {
			return nil
		}
		select {
		case <-time.After(createPoll):
		case <-late:
			for _, s := range made {
				r.log.Warn("ends the making of a sandbox for a former server", "container", s.container)
				_ = syscall.Kill(s.pid, syscall.SIGKILL)
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// removeStrays removes what is left of a container that gVisor has removed or does
// not know: nothing, unless its making was cut short.
func (r *Runtime) removeStrays(container string) {
	notes, _ := os.ReadDir(filepath.Join(r.cfg.Dir, "run"))
	notes = slices.DeleteFunc(notes, func(e os.DirEntry) bool { return !strings.Contains(e.Name(), container) })
	if len(notes) == 0 {
		return // the first that gVisor makes is a lock
	}
	for _, s := range findStrays(func(name string) bool { return name == container }) {
		r.log.Warn("ends a process of a sandbox that was not made whole", "container", container, "pid", s.pid)
		_ = syscall.Kill(s.pid, syscall.SIGKILL)
	}
	for _, e := range notes {
		_ = os.Remove(filepath.Join(r.cfg.Dir, "run", e.Name())) // one that stays does no harm
	}
}

// sweepStrays does so for all containers that have no folder any more.
func (r *Runtime) sweepStrays() error {
	entries, err := os.ReadDir(filepath.Join(r.cfg.Dir, "run"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if name := containerName.FindString(e.Name()); name != "" && !exists(filepath.Join(r.cfg.Dir, "live", name)) {
			r.removeStrays(name)
		}
	}
	return nil
}
