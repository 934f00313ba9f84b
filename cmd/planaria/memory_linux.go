package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// forgetStart gives back the pages of the program's own file that only its start
// has touched. Some 900 packages initialise themselves, gVisor's among them, and
// the kernel maps 64 KiB around each touch: 60 MiB that no later work needs.
// They are clean copies of the file, and what is needed again is mapped again.
func forgetStart() error {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return err
	}
	defer maps.Close()
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || fields[5] != exe || strings.Contains(fields[1], "w") {
			continue
		}
		var from, to uintptr
		if _, err := fmt.Sscanf(fields[0], "%x-%x", &from, &to); err != nil {
			return fmt.Errorf("read memory map %s: %w", fields[0], err)
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_DONTNEED); errno != 0 {
			return fmt.Errorf("give back memory of %s: %w", fields[0], errno)
		}
	}
	return lines.Err()
}
