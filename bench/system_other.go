//go:build !linux

package main

import (
	"os"
	"runtime"
)

// syncData makes what was written durable.
func syncData(f *os.File) error { return f.Sync() }

// hardware names this machine's system.
func hardware() string { return ", " + runtime.GOOS }
