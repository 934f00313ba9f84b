//go:build linux

package guest

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// defaultTimeout of a shell command (REF 11.4).
const defaultTimeout = 120 * time.Second

// shellPath is the shell of the bash tool.
const shellPath = "/bin/bash"

// loop is what the shell runs. It reads a marker and a command, each ended by a
// zero byte, evaluates the command in itself, so that directory, variables and
// functions stay, and says its exit code and then the marker. The command gets
// no input and none of the loop's descriptors. Job control gives every command
// a process group of its own: it can be killed without those left in the
// background. Its own words are builtins, whatever functions the agent has made,
// and say nothing of themselves where it traces its commands (set -x, trap DEBUG).
const loop = `exec 200<&3 201>&4 3<&- 4>&-
set -m
__planaria_status() { return $__planaria_code; }
__planaria_code=0
while { IFS= builtin read -r -d '' -u 200 __planaria_mark && IFS= builtin read -r -d '' -u 200 __planaria_command; } >/dev/null 2>&1; do
{ __planaria_status; } >/dev/null 2>&1
builtin eval "$__planaria_command" </dev/null 200<&- 201>&-
{ __planaria_code=$?
builtin printf '%d\n' "$__planaria_code" >&201
builtin printf '%s' "$__planaria_mark" >/dev/tty; } >/dev/null 2>&1
done`

// shell is the persistent shell of one thread.
type shell struct {
	agent *Agent
	turn  sync.Mutex // one command at a time

	// Of the process; owned by who holds turn. pid 0: none runs.
	pid      int
	exited   <-chan syscall.WaitStatus
	commands *os.File
	codes    chan int
	master   *os.File
	owed     []byte // marker of the last command, which ended without it

	mu   sync.Mutex
	seen []byte        // output of nobody yet
	more chan struct{} // size 1: seen has grown
}

type bashInput struct {
	Command   string `json:"command"`
	Restart   bool   `json:"restart"`
	TimeoutMS int64  `json:"timeout_ms"`
}

func (a *Agent) shellOf(thread string) *shell {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.shells[thread]
	if s == nil {
		s = &shell{agent: a, more: make(chan struct{}, 1)}
		a.shells[thread] = s
	}
	return s
}

// bash runs a command in the thread's shell.
func (a *Agent) bash(c *call, input json.RawMessage, w *watch) wire.Result {
	var in bashInput
	if err := decode(input, &in); err != nil {
		return failure("%v", err)
	}
	asked := defaultTimeout.Milliseconds()
	if in.TimeoutMS > 0 {
		asked = in.TimeoutMS
	}
	timeout := time.Duration(min(asked, a.limits.CallMillis)) * time.Millisecond // after min: what is asked for may be any number
	s := a.shellOf(c.thread)
	s.turn.Lock()
	defer s.turn.Unlock()
	w.elapsed()
	begin := w.total // waiting for the turn does not count
	if in.Restart {
		s.kill()
		if in.Command == "" {
			return wire.Result{Text: "shell restarted"}
		}
	}
	switch {
	case in.Command == "":
		return failure("command is missing")
	case strings.ContainsRune(in.Command, 0):
		return failure("command contains a zero byte")
	}
	if err := s.ensure(); err != nil {
		return failure("start the shell: %v", err)
	}
	return s.run(c, in.Command, func() bool { return w.elapsed()-begin >= timeout }, timeout)
}

// ensure starts the shell where none runs.
func (s *shell) ensure() error {
	if s.pid != 0 {
		select {
		case <-s.exited: // between two calls
			s.drop()
		default:
			return nil
		}
	}
	master, slave, err := openPty()
	if err != nil {
		return fmt.Errorf("open terminal: %w", err)
	}
	defer slave.Close()
	cr, cw, err := os.Pipe()
	if err != nil {
		_ = master.Close()
		return err
	}
	defer cr.Close()
	sr, sw, err := os.Pipe()
	if err != nil {
		_, _ = master.Close(), cw.Close()
		return err
	}
	defer sw.Close()
	dir := Workspace
	if _, err := os.Stat(dir); err != nil {
		dir = "/"
	}
	pid, exited, err := s.agent.reap.start([]string{shellPath, "--noprofile", "--norc", "-c", loop}, &syscall.ProcAttr{
		Dir: dir, Env: s.agent.environment(),
		Files: []uintptr{slave.Fd(), slave.Fd(), slave.Fd(), cr.Fd(), sw.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0},
	})
	if err != nil {
		_, _, _ = master.Close(), cw.Close(), sr.Close()
		return err
	}
	s.pid, s.exited, s.commands, s.master = pid, exited, cw, master
	s.codes = make(chan int, 1)
	go readCodes(sr, s.codes)
	go s.readOutput(master)
	return nil
}

func (a *Agent) environment() []string {
	env := []string{
		"HOME=/root", "USER=root", "LOGNAME=root", "SHELL=" + shellPath, "TERM=dumb", "LANG=C.UTF-8",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"PAGER=cat", "GIT_PAGER=cat", "MANPAGER=cat", "GIT_TERMINAL_PROMPT=0", "DEBIAN_FRONTEND=noninteractive", "PS1=",
	}
	for _, v := range a.env {
		// The model's own keys are of no use inside and would only leak (REF 11.4).
		if !strings.HasPrefix(v, "ANTHROPIC_") {
			env = append(env, v)
		}
	}
	return env
}

// maxCode is more than an exit code takes, in bytes.
const maxCode = 64

// readCodes hands on the exit codes that the shell says, the newest where nobody
// waits. A command can find the pipe and write to it whatever it likes.
func readCodes(r *os.File, codes chan int) {
	defer r.Close()
	in := bufio.NewReaderSize(r, maxCode)
	for {
		line, err := in.ReadSlice('\n')
		if err == bufio.ErrBufferFull {
			continue
		}
		if err != nil {
			return
		}
		code, err := strconv.Atoi(strings.TrimSpace(string(line)))
		if err != nil {
			code = -1
		}
		select {
		case <-codes:
		default:
		}
		codes <- code // nobody else sends
	}
}

// readOutput reads the terminal until its last user is gone, also after the
// shell has died: those in the background must be able to write.
func (s *shell) readOutput(master *os.File) {
	defer master.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := master.Read(buf)
		if n > 0 {
			s.mu.Lock()
			s.seen = append(s.seen, buf[:n]...)
			if len(s.seen) > 2*maxOutput {
				// Nobody listens: only the end is kept.
				s.seen = append([]byte(nil), s.seen[len(s.seen)-maxOutput:]...)
			}
			full := len(s.seen) > maxOutput
			s.mu.Unlock()
			select {
			case s.more <- struct{}{}:
			default:
			}
			if full {
				// A listener needs a moment; the writer inside waits meanwhile.
				time.Sleep(time.Millisecond)
			}
		}
		if err != nil {
			return
		}
	}
}

func (s *shell) takeSeen() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.seen
	s.seen = nil
	return b
}

// run gives the shell a command and waits for its end.
func (s *shell) run(c *call, command string, late func() bool, timeout time.Duration) wire.Result {
	mark := "\x1eplanaria-" + rand.Text() + "\x1e"
	// A shell that was stopped reads nothing, and a pipe holds less than a command
	// may have.
	wrote := make(chan error, 1)
	go func(to *os.File) {
		_, err := io.WriteString(to, mark+"\x00"+command+"\x00")
		wrote <- err
	}(s.commands)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	p := &pending{out: c.out, mark: []byte(mark), owed: s.owed}
	s.owed = nil
	code, coded := 0, false
	var patience <-chan time.Time // for the marker after the code
	interrupted := time.Duration(0)
	cancel := c.cancel
	for {
		select {
		case err := <-wrote:
			if err != nil {
				s.kill()
				return failure("write to the shell: %v; it was restarted", err)
			}
		case <-s.more:
			p.add(s.takeSeen())
			if p.found && coded {
				return finished(c, code)
			}
		case code = <-s.codes:
			coded = true
			p.add(s.takeSeen())
			if p.found {
				return finished(c, code)
			}
			patience = time.After(time.Second)
		case <-patience: // the command took the terminal away, or the shell is slow
			p.flush()
			s.owed = p.mark
			return finished(c, code)
		case ws := <-s.exited:
			s.settle(p)
			return s.gone(c, ws)
		case <-cancel:
			s.interrupt()
			cancel = nil // once
			interrupted = 1
		case <-tick.C:
			if interrupted > 0 {
				if interrupted += 50 * time.Millisecond; interrupted < 2*time.Second {
					continue
				}
			}
			if interrupted == 0 && !late() {
				continue
			}
			s.kill()
			s.settle(p)
			why, reason := fmt.Sprintf("timed out after %d ms", timeout.Milliseconds()), "timeout"
			if interrupted > 0 {
				why, reason = "cancelled", "cancelled"
			}
			return wire.Result{Text: c.out.text(why + "; the shell was restarted"), IsError: true, ExitCode: -1, Reason: reason}
		}
	}
}

// settle takes what a dead shell has still said.
func (s *shell) settle(p *pending) {
	for {
		select {
		case <-s.more:
			p.add(s.takeSeen())
		case <-time.After(20 * time.Millisecond):
			p.add(s.takeSeen())
			p.flush()
			return
		}
	}
}

// gone makes the result of a command that ended the shell itself.
func (s *shell) gone(c *call, ws syscall.WaitStatus) wire.Result {
	s.drop()
	code, how := ws.ExitStatus(), "exited"
	if ws.Signaled() {
		code, how = 128+int(ws.Signal()), "was killed by "+ws.Signal().String()
	}
	return wire.Result{
		Text:    c.out.text(fmt.Sprintf("the shell %s; the next command gets a new one\nexit code %d", how, code)),
		IsError: code != 0, ExitCode: code, Reason: "shell_exited",
	}
}

func finished(c *call, code int) wire.Result {
	note := ""
	if code != 0 {
		note = fmt.Sprintf("exit code %d", code)
	}
	r := wire.Result{Text: c.out.text(note), IsError: code != 0, ExitCode: code}
	if c.wasStopped() {
		r.IsError, r.Reason = true, "cancelled"
	}
	return r
}

func (c *call) wasStopped() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stopped
}

// interrupt asks the command in the foreground to end.
func (s *shell) interrupt() {
	if pg := s.foreground(); pg > 1 && pg != s.pid {
		_ = syscall.Kill(-pg, syscall.SIGINT)
	}
}

// foreground is the process group that has the terminal, 0 when unknown.
func (s *shell) foreground() int {
	var pg int32
	conn, err := s.master.SyscallConn()
	if err != nil {
		return 0
	}
	_ = conn.Control(func(fd uintptr) {
		_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, syscall.TIOCGPGRP, uintptr(unsafe.Pointer(&pg)))
		if errno != 0 {
			pg = 0
		}
	})
	return int(pg)
}

// kill ends the shell and its command in the foreground; what it left in the
// background lives on.
func (s *shell) kill() {
	if s.pid == 0 {
		return
	}
	if pg := s.foreground(); pg > 1 && pg != s.pid {
		_ = syscall.Kill(-pg, syscall.SIGKILL)
	}
	_ = syscall.Kill(-s.pid, syscall.SIGKILL)
	<-s.exited
	s.drop()
}

func (s *shell) drop() {
	_ = s.commands.Close()
	s.pid, s.exited, s.commands, s.master, s.codes, s.owed = 0, nil, nil, nil, nil, nil
}

// pending passes output on to a call until the marker comes. The end of what it
// has may be the marker's beginning and is held back.
type pending struct {
	out   *output
	mark  []byte
	owed  []byte // marker of the command before, which is no output; nil: none
	held  []byte
	found bool
}

func (p *pending) add(b []byte) {
	if p.found {
		return // of the background, after the end
	}
	p.held = append(p.held, b...)
	if i := bytes.Index(p.held, p.owed); i >= 0 && p.owed != nil {
		p.held = slices.Delete(p.held, i, i+len(p.owed))
		p.owed = nil
	}
	if i := bytes.Index(p.held, p.mark); i >= 0 {
		p.out.write(p.held[:i])
		p.held, p.found = nil, true
		return
	}
	keep := 0
	for n := min(len(p.held), len(p.mark)-1); n > 0; n-- {
		if end := p.held[len(p.held)-n:]; bytes.HasPrefix(p.mark, end) || bytes.HasPrefix(p.owed, end) {
			keep = n
			break
		}
	}
	p.out.write(p.held[:len(p.held)-keep])
	p.held = append([]byte(nil), p.held[len(p.held)-keep:]...)
}

func (p *pending) flush() {
	if !p.found {
		p.out.write(p.held)
		p.held = nil
	}
}

// openPty makes a terminal that passes bytes through as they are.
func openPty() (master, slave *os.File, err error) {
	fd, err := syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var n, unlock int32
	if err := ioctl(fd, syscall.TIOCGPTN, unsafe.Pointer(&n)); err != nil {
		_ = syscall.Close(fd)
		return nil, nil, err
	}
	if err := ioctl(fd, syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)); err != nil {
		_ = syscall.Close(fd)
		return nil, nil, err
	}
	sfd, err := syscall.Open("/dev/pts/"+strconv.Itoa(int(n)), syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	if err != nil {
		_ = syscall.Close(fd)
		return nil, nil, err
	}
	var t syscall.Termios
	if err = ioctl(sfd, syscall.TCGETS, unsafe.Pointer(&t)); err == nil {
		t.Oflag &^= syscall.OPOST
		t.Lflag &^= syscall.ECHO | syscall.ECHONL
		err = ioctl(sfd, syscall.TCSETS, unsafe.Pointer(&t))
	}
	if err == nil {
		size := [4]uint16{50, 200, 0, 0}
		err = ioctl(sfd, syscall.TIOCSWINSZ, unsafe.Pointer(&size))
	}
	if err == nil {
		err = syscall.SetNonblock(fd, true)
	}
	if err != nil {
		_, _ = syscall.Close(fd), syscall.Close(sfd)
		return nil, nil, err
	}
	return os.NewFile(uintptr(fd), "/dev/ptmx"), os.NewFile(uintptr(sfd), "/dev/pts"), nil
}

func ioctl(fd int, op uintptr, arg unsafe.Pointer) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), op, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}
