//go:build linux

package sandbox

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/planaria/planaria/internal/sandbox/guest"
	"github.com/planaria/planaria/internal/sandbox/wire"
)

// CgroupsVariable names the control groups, separated by ":", that the binary
// joins before it becomes gVisor. gVisor's own handling of them costs 50 ms a
// start.
const CgroupsVariable = "PLANARIA_CGROUPS"

// command makes a gVisor command with the flags that every one of a sandbox
// must repeat.
func (s *Sandbox) command(ctx context.Context, args ...string) *exec.Cmd {
	st := s.snapshotState()
	all := []string{
		"--root=" + filepath.Join(s.r.cfg.Dir, "run"),
		"--network=none", "--gofer-network-namespace=new", "--host-uds=open", "--ignore-cgroups", "--platform=systrap",
		"--overlay2=all:dir=" + filepath.Join(s.dir, "overlay") + ",size=" + strconv.FormatInt(st.Limits.DiskBytes, 10),
		"--log=" + filepath.Join(s.dir, "runsc.log"), "--log-format=text",
	}
	cmd := exec.CommandContext(ctx, s.r.binaryPath(st.Binary))
	cmd.Args = append([]string{"runsc"}, append(all, args...)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if os.Geteuid() != 0 {
		// gVisor refuses to restore without root; root of a user namespace is
		// enough for it.
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	cmd.WaitDelay = time.Second
	return cmd
}

// runsc runs a gVisor command to its end.
func (s *Sandbox) runsc(ctx context.Context, args ...string) error {
	cmd := s.command(ctx, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("runsc %s: %w: %w", args[0], err, context.Cause(ctx)) // which killed it
	}
	return s.explain(args[0], err, out.String())
}

// explain adds the first line of what gVisor said; the rest is stack traces.
func (s *Sandbox) explain(what string, err error, said string) error {
	if err == nil {
		return nil
	}
	if strings.TrimSpace(said) == "" {
		b, _ := os.ReadFile(filepath.Join(s.dir, "runsc.log"))
		lines := strings.Split(strings.TrimSpace(string(b)), "\n")
		said = lines[len(lines)-1]
	}
	line, _, _ := strings.Cut(strings.TrimSpace(said), "\n")
	if len(line) > 400 {
		line = line[:400]
	}
	return fmt.Errorf("runsc %s: %w: %s", what, err, line)
}

// create makes a sandbox whose agent does not run yet.
func (r *Runtime) create(ctx context.Context, spec Spec, binary string) (*Sandbox, error) {
	root, err := r.root(ctx, spec.Root)
	if err != nil {
		return nil, err
	}
	name := randomID("sb-")
	s := &Sandbox{r: r, dir: filepath.Join(r.cfg.Dir, "live", name), dead: make(chan struct{})}
	key := make([]byte, 32)
	id := make([]byte, 16)
	_, _ = rand.Read(key)
	_, _ = rand.Read(id)
	s.state = state{
		Version: 1, Phase: phaseCreated, Container: name, Binary: binary, Generation: 1, Key: key,
		Hostname: "planaria-" + hex.EncodeToString(id[:4]), MachineID: hex.EncodeToString(id),
		Root: root, Limits: spec.Limits.filled(), CPUFeatures: r.relied(), CPUMask: r.mask,
	}
	s.link = newHostLink(s)
	// 1. The folder with its state. A crash from here until the sandbox is in
	// phase running leaves what the next Open removes.
	for _, d := range []string{"", "ctl", "overlay"} {
		if err == nil {
			err = os.MkdirAll(filepath.Join(s.dir, d), 0o700)
		}
	}
	if err == nil {
		err = s.save()
	}
	if err != nil {
		_ = os.RemoveAll(s.dir)
		return nil, err
	}
	r.mu.Lock()
	r.sandboxes[name] = s
	r.mu.Unlock()
	if err := s.createContainer(ctx); err != nil {
		_ = s.Kill(context.WithoutCancel(ctx))
		return nil, err
	}
	return s, nil
}

func (s *Sandbox) createContainer(ctx context.Context) error {
	st := s.snapshotState()
	bundle := filepath.Join(s.dir, "bundle")
	if err := writeBundle(bundle, &st, s.r.binaryDir(st.Binary), filepath.Join(s.dir, "ctl")); err != nil {
		return err
	}
	// The agent's standard input is a pipe of which we keep the writing end
	// until the sandbox is somebody's. The others lead nowhere: gVisor keeps
	// them open, and a file would be overwritten.
	in, out, err := os.Pipe()
	if err != nil {
		return err
	}
	defer in.Close()
	pidFile := filepath.Join(s.dir, "pid")
	// Whoever asks may leave meanwhile: half a container has processes that
	// gVisor does not find again. So it is made whole and then given up.
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTime)
	defer cancel()
	cmd := s.command(whole, "create", "--bundle="+bundle, "--pid-file="+pidFile, st.Container)
	cmd.Stdin = in
	groups := s.joinCgroups(st.Limits)
	if len(groups) > 0 {
		cmd.Env = append(cmd.Env, CgroupsVariable+"="+strings.Join(groups, ":"))
	}
	if err := s.explain("create", cmd.Run(), ""); err != nil {
		_ = out.Close()
		return err
	}
	b, err := os.ReadFile(pidFile)
	if err != nil {
		_ = out.Close()
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		_ = out.Close()
		return fmt.Errorf("read %s: %w", pidFile, err)
	}
	s.mu.Lock()
	s.state.PID, s.state.PIDStart = pid, processStart(pid)
	s.mu.Unlock()
	s.link.setup = out
	s.watch()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return s.save()
}

// boot starts the agent of a created sandbox and waits for it.
func (s *Sandbox) boot(ctx context.Context) error {
	st := s.snapshotState()
	setup := guest.Setup{
		Key: st.Key, Fence: st.Fence, Owner: s.r.owner, Env: s.environment(st),
		Limits: guest.Limits{MemoryBytes: st.Limits.MemoryBytes, Processes: st.Limits.Processes, CallMillis: st.Limits.CallTime.Milliseconds()},
		Identity: wire.Identity{
			Hostname: st.Hostname, MachineID: st.MachineID, Entropy: entropy(), Egress: st.Egress, UnixMicro: time.Now().UnixMicro(),
		},
	}
	if err := s.link.listen(); err != nil {
		return err
	}
	if err := s.runsc(ctx, "start", st.Container); err != nil {
		return err
	}
	err := json.NewEncoder(s.link.setup).Encode(setup)
	if cerr := s.link.setup.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("write the agent's set-up: %w", err)
	}
	if err := s.await(ctx); err != nil {
		return err
	}
	// Running from here on: a crash leaves a sandbox that Find takes over.
	return s.run()
}

func (s *Sandbox) environment(st state) []string {
	env := []string{}
	if st.Egress {
		for _, n := range []string{"http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"} {
			env = append(env, n+"="+ProxyURL)
		}
		env = append(env, "no_proxy=localhost,127.0.0.1,::1", "NO_PROXY=localhost,127.0.0.1,::1",
			"NODE_USE_ENV_PROXY=1") // Node's own fetch, from 22.21 and 24 on
	}
	return append(env, st.Env...)
}

func entropy() []byte {
	b := make([]byte, 64)
	_, _ = rand.Read(b)
	return b
}

// run puts the sandbox in phase running, durably, and opens its way out.
func (s *Sandbox) run() error {
	s.mu.Lock()
	s.state.Phase = phaseRunning
	s.mu.Unlock()
	if err := s.save(); err != nil {
		return err
	}
	s.link.running()
	return nil
}

// alive asks the system, not a record: the process of the pid, started when
// ours was.
func (s *Sandbox) alive() bool {
	select {
	case <-s.dead:
		return false
	default:
	}
	st := s.snapshotState()
	return st.PID > 1 && st.PIDStart != "" && processStart(st.PID) == st.PIDStart
}

// processStart tells when a process was started; empty when there is none or it
// is a zombie.
func processStart(pid int) string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ""
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return ""
	}
	return f[19]
}

// watch closes dead when the sandbox's process ends.
func (s *Sandbox) watch() {
	st := s.snapshotState()
	fd, err := unix.PidfdOpen(st.PID, unix.PIDFD_NONBLOCK)
	if err != nil || !s.alive() {
		if err == nil {
			_ = unix.Close(fd)
		}
		close(s.dead)
		return
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	s.r.wait.Add(1)
	go func() {
		defer s.r.wait.Done()
		defer f.Close()
		for {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(fds, 500)
			if n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
				close(s.dead)
				s.link.close(ErrGone)
				return
			}
			if s.r.ctx.Err() != nil {
				return
			}
		}
	}()
}

// killTime bounds an end.
const killTime = time.Minute

// Kill ends the sandbox and removes its folder, also when ctx has ended: half an
// end helps nobody. What was not in a snapshot is lost. Killing what is dead
// cleans up after it.
func (s *Sandbox) Kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	s.link.close(ErrGone)
	s.killing.Lock()
	defer s.killing.Unlock()
	if s.killed {
		return nil
	}
	if s.link.setup != nil {
		_ = s.link.setup.Close()
	}
	st := s.snapshotState()
	if st.Container != "" {
		if s.alive() {
			_ = syscall.Kill(st.PID, syscall.SIGKILL)
		}
		if _, err := os.Stat(s.r.binaryPath(st.Binary)); err == nil {
			if err := s.runsc(ctx, "delete", "--force", st.Container); err != nil && !strings.Contains(err.Error(), "does not exist") {
				return fmt.Errorf("kill sandbox %s: %w", st.ID, err)
			}
			s.r.removeStrays(st.Container)
		}
		removeCgroups(st.Container)
	}
	if err := os.RemoveAll(s.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("kill sandbox %s: %w", st.ID, err)
	}
	s.killed = true
	s.r.mu.Lock()
	delete(s.r.sandboxes, filepath.Base(s.dir))
	s.r.mu.Unlock()
	s.r.freed()
	return nil
}

// Pause stops all processes inside until Resume, without a word to them.
func (s *Sandbox) Pause(ctx context.Context) error {
	s.paused.Store(true)
	err := s.runsc(ctx, "pause", s.snapshotState().Container)
	if err != nil {
		s.paused.Store(false) // its agent is watched over as before
	}
	return err
}

// resumeTime bounds a Resume.
const resumeTime = 30 * time.Second

// Resume lets a paused sandbox go on, also when ctx has ended: one that stays
// paused answers nobody, and nobody would know why.
func (s *Sandbox) Resume(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resumeTime)
	defer cancel()
	if err := s.runsc(ctx, "resume", s.snapshotState().Container); err != nil {
		return err
	}
	s.paused.Store(false)
	return nil
}

// ownBinary is the file of this process, also after it was replaced by another.
const ownBinary = "/proc/self/exe"

func identify(f *os.File) (fileIdentity, error) {
	info, err := f.Stat()
	if err != nil {
		return fileIdentity{}, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() {
		return fileIdentity{}, fmt.Errorf("%s is not a regular file", f.Name())
	}
	return fileIdentity{uint64(st.Dev), st.Ino, info.Size(), info.ModTime().UnixNano(), time.Unix(st.Ctim.Unix()).UnixNano()}, nil
}

// cloneFile shares the blocks of a file with an empty one, where the file
// system can; each is its own when it is written.
func cloneFile(to, from *os.File) bool {
	return unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil
}

// wake lets the agent go on when a process inside has stopped it (gVisor does not
// spare process 1), or an owner who died had paused the sandbox.
func (s *Sandbox) wake(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if !s.paused.Load() {
		_ = s.runsc(ctx, "resume", s.snapshotState().Container) // one that is not paused cannot be
	}
	if err := s.runsc(ctx, "kill", s.snapshotState().Container, "CONT"); err != nil {
		s.r.log.Warn("agent cannot be woken", "session", s.ID(), "err", err)
	}
}

// end kills the sandbox's first process and leaves the rest to Kill: for one
// whose agent is silent for good.
func (s *Sandbox) end() {
	if s.alive() {
		_ = syscall.Kill(s.snapshotState().PID, syscall.SIGKILL)
	}
}

// unlockFolder lets others have the folder at once: a process that is being
// started has a copy of the descriptor until it becomes another program.
func unlockFolder(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_UN)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// lockFolder makes this process the only one in the folder.
func lockFolder(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		owner, _ := os.ReadFile(f.Name())
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w: process %s; one that is stopped or hangs has it until it ends", dir, ErrLocked, strings.TrimSpace(string(owner)))
	}
	// For the error of the next; what is in it decides nothing, so that a full
	// disk is no hindrance.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return f, nil
}
