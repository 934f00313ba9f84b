//go:build linux

package sandbox

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// cgroupRoot holds the groups of all sandboxes, below each controller.
const cgroupRoot = "planaria"

// headroom is what gVisor itself needs beside the memory of the processes
// inside. The agent keeps those within the limit; the group is the wall behind.
const headroom = 512 << 20

// joinCgroups makes the groups that limit a sandbox and returns their folders,
// for its first process to join. Without the right to, or without the
// controllers, there are none: the agent's own limits stay.
func (s *Sandbox) joinCgroups(l Limits) []string {
	if os.Geteuid() != 0 {
		return nil
	}
	name := s.snapshotState().Container
	var out []string
	make1 := func(base string, files map[string]string) {
		dir := filepath.Join(base, cgroupRoot, name)
		if os.MkdirAll(dir, 0o755) != nil {
			return
		}
		for f, v := range files {
			if os.WriteFile(filepath.Join(dir, f), []byte(v), 0o644) != nil {
				_ = os.Remove(dir)
				return
			}
		}
		out = append(out, dir)
	}
	memory := strconv.FormatInt(l.MemoryBytes+headroom, 10)
	if v2() {
		files := map[string]string{"memory.max": memory}
		if l.CPUs > 0 {
			files["cpu.max"] = strconv.FormatInt(int64(l.CPUs*100_000), 10) + " 100000"
		}
		base := "/sys/fs/cgroup"
		_ = os.MkdirAll(filepath.Join(base, cgroupRoot), 0o755)
		for _, d := range []string{base, filepath.Join(base, cgroupRoot)} {
			_ = os.WriteFile(filepath.Join(d, "cgroup.subtree_control"), []byte("+memory +cpu"), 0o644)
		}
		make1(base, files)
		return out
	}
	if exists("/sys/fs/cgroup/memory") {
		make1("/sys/fs/cgroup/memory", map[string]string{"memory.limit_in_bytes": memory})
	}
	if exists("/sys/fs/cgroup/cpuacct") {
		make1("/sys/fs/cgroup/cpuacct", nil) // counts, see Stats
	}
	if l.CPUs > 0 && exists("/sys/fs/cgroup/cpu") {
		make1("/sys/fs/cgroup/cpu", map[string]string{"cpu.cfs_quota_us": strconv.FormatInt(int64(l.CPUs*100_000), 10)})
	}
	return out
}

func v2() bool { return exists("/sys/fs/cgroup/cgroup.controllers") }

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// removeCgroups removes a sandbox's groups when its last process has ended.
func removeCgroups(name string) {
	if name == "" || strings.Contains(name, "/") {
		return
	}
	for _, base := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup/cpu"} {
		_ = os.Remove(filepath.Join(base, cgroupRoot, name))
		_ = os.Remove(filepath.Join(base, cgroupRoot)) // when it was the last
	}
}
