package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
)

// syncData makes what was written durable, without what no reader needs.
func syncData(f *os.File) error { return syscall.Fdatasync(int(f.Fd())) }

// hardware describes this machine's memory and kernel.
func hardware() (out string) {
	var info syscall.Sysinfo_t
	if syscall.Sysinfo(&info) == nil {
		out += fmt.Sprintf(", %d GiB", (uint64(info.Totalram)*uint64(info.Unit)+1<<29)>>30)
	}
	var uts syscall.Utsname
	if syscall.Uname(&uts) == nil {
		var release []byte
		for _, c := range uts.Release {
			if c == 0 {
				break
			}
			release = append(release, byte(c))
		}
		version, _, _ := strings.Cut(string(release), "-")
		out += ", Linux " + version
	}
	return out
}
