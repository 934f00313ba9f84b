//go:build !linux

package effect

import "time"

// bootClock is the wall clock where the system has no clock that counts
// suspension: it may jump, but it does not stand still.
func bootClock() time.Duration { return time.Duration(time.Now().UnixNano()) }
