package effect

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootClock is CLOCK_BOOTTIME: unlike Go's monotonic clock it goes on while
// the machine is suspended, so that a send_by cannot be slept through.
func bootClock() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("effect: no boot clock: " + err.Error()) // every Linux since 2.6.39 has it
	}
	return time.Duration(ts.Nano())
}
