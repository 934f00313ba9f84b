//go:build linux

package sandbox

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// probeTime bounds each trial; a broken platform hangs for ever.
const probeTime = time.Minute

// Probe looks at what this machine offers to sandboxes. It changes nothing, and
// starts one throw-away sandbox in a temporary folder where nothing else is
// wrong. Of cfg, Binary and Program count.
func Probe(ctx context.Context, cfg Config) []Finding {
	out := Check(cfg)
	for _, f := range out {
		if f.Fatal && !f.OK {
			return out
		}
	}
	return append(out, probeRun(ctx, cfg))
}

// Check is the part of Probe that takes a few milliseconds: it starts no sandbox.
func Check(cfg Config) []Finding {
	return []Finding{probeStatic(cfg), probeUser(), probeShell(), probeCgroups(), probeFeatures()}
}

func probeStatic(cfg Config) Finding {
	f := Finding{What: "static binary", Fatal: true}
	name := cfg.Binary
	if name == "" {
		name, _ = os.Executable()
	}
	file, err := openELF(name, cfg.Program)
	if err != nil {
		f.Says, f.Mend = err.Error(), "install planaria again"
		return f
	}
	defer file.Close()
	for _, p := range file.Progs {
		if p.Type == elf.PT_INTERP {
			f.Says = name + " needs the system's libraries, which a sandbox does not have"
			f.Mend = "build it with CGO_ENABLED=0"
			return f
		}
	}
	f.OK, f.Says = true, name
	return f
}

// openELF opens the program where there is one, else the binary.
func openELF(binary, program string) (*elf.File, error) {
	if program != "" {
		return elf.NewFile(strings.NewReader(program))
	}
	return elf.Open(binary)
}

// probeUser: root, or a user namespace that makes us root.
func probeUser() Finding {
	f := Finding{What: "user", Fatal: true}
	if os.Geteuid() == 0 {
		f.OK, f.Says = true, "root"
		return f
	}
	cmd := exec.Command("/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	err := cmd.Start()
	if err != nil {
		f.Says = fmt.Sprintf("no user namespace can be made: %v", err)
		f.Mend = "run as root, or allow user namespaces: sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=15000 (Ubuntu 24.04: kernel.apparmor_restrict_unprivileged_userns=0)"
		return f
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	f.OK, f.Says = true, "an ordinary user, in a user namespace"
	return f
}

func probeShell() Finding {
	f := Finding{What: "host root"}
	if _, err := os.Stat("/usr" + shell); err != nil {
		f.Says, f.Mend = "/usr"+shell+" is missing", "install bash, or give environments an image of their own"
		return f
	}
	f.OK, f.Says = true, "/usr with bash"
	return f
}

const shell = "/bin/bash"

func probeCgroups() Finding {
	f := Finding{What: "control groups"}
	none := "the limits of memory are kept by the agent inside alone, those of the processor not at all"
	if os.Geteuid() != 0 {
		f.Says, f.Mend = none, "run as root where sandboxes must be limited from outside"
		return f
	}
	base := "/sys/fs/cgroup/memory"
	if v2() {
		base = "/sys/fs/cgroup"
	}
	dir := filepath.Join(base, cgroupRoot, "probe")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		f.Says, f.Mend = fmt.Sprintf("%v; %s", err, none), "mount the memory and cpu controllers writable at /sys/fs/cgroup"
		return f
	}
	_ = os.Remove(dir)
	_ = os.Remove(filepath.Dir(dir))
	f.OK, f.Says = true, base
	return f
}

// probeRun starts a sandbox for real.
func probeRun(ctx context.Context, cfg Config) (f Finding) {
	f = Finding{What: "a sandbox", Fatal: true}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	dir, err := os.MkdirTemp("", "planaria-probe-")
	if err == nil {
		defer os.RemoveAll(dir)
		err = tryOne(ctx, Config{Dir: dir, Binary: cfg.Binary, Program: cfg.Program, StartTimeout: probeTime})
	}
	if err != nil {
		f.Says = err.Error()
		f.Mend = "gVisor needs Linux 4.14.77 or newer on amd64 or arm64, ptrace, and user and mount namespaces; in a container allow them (Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined --cap-add SYS_ADMIN)"
		return f
	}
	f.OK, f.Says = true, "starts and answers"
	return f
}

func tryOne(ctx context.Context, cfg Config) error {
	r, err := Open(ctx, cfg)
	if err != nil {
		return err
	}
	defer r.Close()
	s, err := r.Start(ctx, Spec{Workspace: "probe", ID: "probe", Fence: 1})
	if err != nil {
		return err
	}
	defer s.Kill(context.WithoutCancel(ctx))
	res, err := s.Do(ctx, Call{ID: "probe", Tool: "bash", Input: []byte(`{"command":"echo $((6*7))"}`)})
	if err != nil {
		return err
	}
	if !bytes.Equal([]byte(strings.TrimSpace(res.Text)), []byte("42")) {
		return errors.New("its shell says: " + res.Text)
	}
	return nil
}
