//go:build linux

package guest

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// proc is one process inside, from /proc/<pid>/stat.
type proc struct {
	pid, session int
	name         string
	ticks        uint64
	rssKiB       int64
}

// processes lists all but the agent.
func processes() []proc {
	names, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var out []proc
	for _, e := range names {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == 1 {
			continue
		}
		if p, ok := readProc(pid); ok {
			out = append(out, p)
		}
	}
	return out
}

func readProc(pid int) (proc, bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return proc{}, false
	}
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return proc{}, false
	}
	f := strings.Fields(string(b[end+1:])) // f[0] is field 3, the state
	if len(f) < 22 || f[0] == "Z" {
		return proc{}, false
	}
	p := proc{pid: pid, name: string(b[open+1 : end])}
	p.session, _ = strconv.Atoi(f[3])
	for _, i := range []int{11, 12, 13, 14} { // own and waited-for time
		n, _ := strconv.ParseUint(f[i], 10, 64)
		p.ticks += n
	}
	p.rssKiB, _ = strconv.ParseInt(f[21], 10, 64)
	p.rssKiB *= int64(os.Getpagesize()) >> 10
	return p, true
}

// activity tells what the host compares to see whether anything happened.
func (a *Agent) activity() *wire.Activity {
	out := &wire.Activity{MemoryKiB: usedKiB()}
	var ids []string
	for _, p := range processes() {
		out.Ticks += p.ticks
		ids = append(ids, strconv.Itoa(p.pid))
	}
	sort.Strings(ids)
	out.Processes = strings.Join(ids, " ")
	a.mu.Lock()
	defer a.mu.Unlock()
	out.Calls = a.changes
	return out
}

// usedKiB is the memory that the sandbox uses, as it sees it itself.
func usedKiB() int64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	var total, free int64
	for _, line := range strings.Split(string(b), "\n") {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "MemTotal:":
			total = n
		case "MemAvailable:":
			free = n
		}
	}
	return total - free
}

// Intervals of the guard: while calls run, when only those in the background do,
// and when there is nobody but shells that wait for a command. A look costs 1.4 ms
// of the processor: five in a second are nothing for one sandbox, and all of two
// processors for 300 that sleep.
const (
	guardBusy  = 10 * time.Millisecond
	guardIdle  = 200 * time.Millisecond
	guardAlone = 30 * time.Second
	// guardSettle lets the memory of who was killed come back before the next
	// one is looked at.
	guardSettle = 300 * time.Millisecond
)

// guard keeps the number of processes and the memory within the limits: gVisor
// enforces neither for one sandbox, and the host's own limit would kill it as a
// whole. What it does shows in the results of the calls that run.
func (a *Agent) guard() {
	for {
		switch {
		case a.busy():
			time.Sleep(guardBusy)
		case a.alone():
			select {
			case <-a.stir: // a call that began meanwhile is not missed
			case <-time.After(guardAlone):
			}
		default:
			time.Sleep(guardIdle)
		}
		// The system's own count has threads too, but is cheap to ask.
		var info syscall.Sysinfo_t
		if syscall.Sysinfo(&info) == nil && int(info.Procs) > a.limits.Processes && countProcesses() > a.limits.Processes {
			a.tooMany()
		}
		if limit := a.limits.MemoryBytes; limit > 0 && usedKiB()<<10 > limit {
			a.killLargest(processes(), limit)
			time.Sleep(guardSettle)
		}
	}
}

func countProcesses() (n int) {
	names, err := os.ReadDir("/proc")
	if err != nil {
		return 0
	}
	for _, e := range names {
		if c := e.Name()[0]; c >= '0' && c <= '9' {
			n++
		}
	}
	return n - 1
}

// tooMany stops everything, ends whoever has made so many, and lets the rest go
// on. One that forks while it is stopped is stopped in the next round.
func (a *Agent) tooMany() {
	a.hit(fmt.Sprintf("more than %d processes; they were killed", a.limits.Processes))
	for attempt := 0; attempt < 20; attempt++ {
		for range 2 {
			_ = syscall.Kill(-1, syscall.SIGSTOP)
		}
		ps := processes()
		if len(ps) <= a.limits.Processes {
			break
		}
		killMany(ps, attempt)
	}
	_ = syscall.Kill(-1, syscall.SIGCONT)
}

func (a *Agent) busy() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.calls {
		if !c.gone {
			select {
			case <-c.done:
			default:
				return true
			}
		}
	}
	return false
}

// alone reports whether no process is there but shells that wait for a command:
// nothing happens then before the next call.
func (a *Agent) alone() bool {
	a.mu.Lock()
	shells := slices.Collect(maps.Values(a.shells))
	a.mu.Unlock()
	waiting := map[string]bool{"1": true}
	for _, s := range shells {
		if !s.turn.TryLock() {
			return false
		}
		waiting[strconv.Itoa(s.pid)] = true
		s.turn.Unlock()
	}
	names, err := os.ReadDir("/proc")
	if err != nil {
		return false
	}
	for _, e := range names {
		if n := e.Name(); n[0] >= '0' && n[0] <= '9' && !waiting[n] {
			return false
		}
	}
	return true
}

// hit tells all running calls.
func (a *Agent) hit(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.calls {
		c.hit(what)
	}
}

// killMany ends the session with the most processes; one that forks faster than
// that, or begins sessions, takes everything with it.
func killMany(ps []proc, attempt int) {
	if attempt >= 2 {
		_ = syscall.Kill(-1, syscall.SIGKILL)
		return
	}
	count, worst := map[int]int{}, 0
	for _, p := range ps {
		if count[p.session]++; count[p.session] > count[worst] {
			worst = p.session
		}
	}
	for _, p := range ps {
		if p.session == worst {
			_ = syscall.Kill(p.pid, syscall.SIGKILL)
		}
	}
}

// killLargest ends the process that holds the most memory.
func (a *Agent) killLargest(ps []proc, limit int64) {
	var worst proc
	for _, p := range ps {
		if p.rssKiB > worst.rssKiB {
			worst = p
		}
	}
	if worst.pid == 0 || syscall.Kill(worst.pid, syscall.SIGKILL) != nil {
		return
	}
	a.hit(fmt.Sprintf("more than %d MiB of memory; %s (pid %d, %d MiB) was killed", limit>>20, worst.name, worst.pid, worst.rssKiB>>10))
}
