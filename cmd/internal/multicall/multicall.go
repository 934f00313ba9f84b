//go:build linux && !race

package multicall

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"
	_ "unsafe" // for the link to gVisor's version

	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"

	_ "gvisor.dev/gvisor/runsc/version"

	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/sandbox/guest"
)

// runscVersion is what gVisor writes into an image and compares at restore. It
// is only set by a link flag; without it every build would take the images of
// every other.
//
//go:linkname runscVersion gvisor.dev/gvisor/runsc/version.version
var runscVersion string

// Run turns this program into another one when it was started under that one's
// name: gVisor, which starts itself as "runsc-…" and "exe", or the agent inside
// a sandbox. It then never returns. Nothing may run before it.
func Run() {
	switch name := filepath.Base(os.Args[0]); {
	case name == guest.Name:
		guest.Main()
	case name == "runsc", strings.HasPrefix(name, "runsc-"), name == "exe":
		joinCgroups()
		if name == "runsc-sandbox" || name == "runsc-gofer" {
			time.AfterFunc(trimAfter, debug.FreeOSMemory)
		}
		runsc()
		os.Exit(1) // cli.Run does not return
	}
}

// trimAfter is when the processes that stay give back what their start needed:
// 2 MB of each sandbox, which Go would keep for ever in a heap that hardly
// grows. By then a first call has its answer.
const trimAfter = 2 * time.Second

// joinCgroups moves this process, and so all that it starts, into the groups
// that limit a sandbox.
func joinCgroups() {
	groups := os.Getenv(sandbox.CgroupsVariable)
	_ = os.Unsetenv(sandbox.CgroupsVariable)
	for dir := range strings.SplitSeq(groups, ":") {
		if dir == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0o644); err != nil {
			util.Fatalf("join control group: %v", err)
		}
	}
}

// runsc is gVisor's own command line, with the commands that are used.
func runsc() {
	if info, ok := debug.ReadBuildInfo(); ok && runscVersion == "VERSION_MISSING" {
		for _, m := range info.Deps {
			if m.Path == "gvisor.dev/gvisor" {
				runscVersion = m.Version
			}
		}
	}
	commands := map[util.SubCommand]string{}
	for _, c := range []util.SubCommand{
		new(cmd.Checkpoint), new(cmd.Create), new(cmd.Delete), new(cmd.Kill), new(cmd.Pause), new(cmd.Restore), new(cmd.Resume),
		new(cmd.Start), new(cmd.State), new(cmd.List), new(sentrycmd.Boot), new(cmd.Gofer), new(sentrycmd.Umount),
	} {
		commands[c] = ""
	}
	cli.Run(nil, commands, []subcommands.Command{new(cmd.Platforms)})
}
