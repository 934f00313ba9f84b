//go:build !linux || race

package main

// multicall does nothing here: sandboxes need Linux, and gVisor cannot run under
// the race detector.
func multicall() {}
