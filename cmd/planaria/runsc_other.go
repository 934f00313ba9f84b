//go:build !linux

package main

// multicall does nothing here: sandboxes need Linux.
func multicall() {}
