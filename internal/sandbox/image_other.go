//go:build !linux

package sandbox

func syncFiles(string) error { return unsupported() }

func isNotFolder(error) bool { return false }
