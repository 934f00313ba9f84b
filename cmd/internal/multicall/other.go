//go:build !linux || race

package multicall

// Run does nothing here: sandboxes need Linux, and gVisor cannot run under
// the race detector.
func Run() {}
