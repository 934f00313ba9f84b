package sandbox

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// fileServerMemory is what the file server of a sandbox takes; it does nothing
// that grows.
const fileServerMemory = 8 << 20

// clockTick is the unit of times in /proc/<pid>/stat (USER_HZ).
const clockTick = time.Second / 100

// measureMemory sums up the memory of a sandbox's first process: its own, and
// the memory files that hold the memory of all processes inside.
func measureMemory(pid int) int64 {
	n := int64(fileServerMemory)
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if _, rest, ok := bytes.Cut(b, []byte("RssAnon:")); ok {
		if f := bytes.Fields(rest); len(f) > 0 {
			kib, _ := strconv.ParseInt(string(f[0]), 10, 64)
			n += kib << 10
		}
	}
	dir := "/proc/" + strconv.Itoa(pid) + "/fd"
	fds, _ := os.ReadDir(dir)
	for _, fd := range fds {
		name := filepath.Join(dir, fd.Name())
		if to, err := os.Readlink(name); err != nil || !strings.HasPrefix(to, "/memfd:") {
			continue
		}
		var st syscall.Stat_t
		if syscall.Stat(name, &st) == nil {
			n += st.Blocks * 512
		}
	}
	return n
}

// measureCPU asks the control group, else sums up what is there.
func (s *Sandbox) measureCPU() time.Duration {
	st := s.snapshotState()
	if b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup/cpuacct", cgroupRoot, st.Container, "cpuacct.usage")); err == nil {
		n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		return time.Duration(n)
	}
	if b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", cgroupRoot, st.Container, "cpu.stat")); err == nil {
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) == 2 && f[0] == "usage_usec" {
				n, _ := strconv.ParseInt(f[1], 10, 64)
				return time.Duration(n) * time.Microsecond
			}
		}
	}
	return familyCPU(st.PID)
}

// familyCPU is the processor time of a process, of its children that ended, and
// of those that live.
func familyCPU(pid int) time.Duration {
	dir := "/proc/" + strconv.Itoa(pid)
	b, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	var n time.Duration
	for _, i := range []int{11, 12, 13, 14} {
		if i < len(f) {
			t, _ := strconv.ParseInt(f[i], 10, 64)
			n += time.Duration(t) * clockTick
		}
	}
	tasks, _ := os.ReadDir(dir + "/task")
	for _, t := range tasks {
		b, _ := os.ReadFile(dir + "/task/" + t.Name() + "/children")
		for _, c := range strings.Fields(string(b)) {
			if child, err := strconv.Atoi(c); err == nil {
				n += familyCPU(child)
			}
		}
	}
	return n
}
