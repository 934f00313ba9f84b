//go:build linux

package guest

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// reaper collects the exits of all processes, as process 1 must, and hands out
// those that somebody waits for. Nobody else may wait: exec.Cmd.Wait would race
// with it.
type reaper struct {
	mu    sync.Mutex
	waits map[int]chan syscall.WaitStatus
}

func newReaper() *reaper { return &reaper{waits: map[int]chan syscall.WaitStatus{}} }

// start runs a process and returns its id and where its end will arrive. The
// lock is held over the start, so that an end cannot come before its channel.
func (r *reaper) start(argv []string, attr *syscall.ProcAttr) (int, <-chan syscall.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(argv[0], argv, attr)
	if err != nil {
		return 0, nil, err
	}
	c := make(chan syscall.WaitStatus, 1)
	r.waits[pid] = c
	return pid, c, nil
}

func (r *reaper) run() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGCHLD)
	r.collect()
	for range c {
		r.collect()
	}
}

func (r *reaper) collect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err != nil || pid <= 0 {
			return
		}
		if c := r.waits[pid]; c != nil {
			c <- ws
			delete(r.waits, pid)
		}
	}
}

// shield keeps process 1 alive. The system would spare it, but gVisor treats it
// as any other process: a "kill 1" inside would end or stop the whole sandbox.
// Signals that are caught do nothing, and processes start with their defaults.
// Nothing helps against SIGKILL (the sandbox is gone, as after a power cut) and
// SIGSTOP (the host wakes it again).
func shield() {
	signal.Notify(make(chan os.Signal, 1),
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGSEGV, syscall.SIGPIPE, syscall.SIGALRM, syscall.SIGTERM, syscall.SIGSTKFLT, syscall.SIGTSTP,
		syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGXCPU, syscall.SIGXFSZ, syscall.SIGVTALRM, syscall.SIGIO, syscall.SIGPWR, syscall.SIGSYS)
}
