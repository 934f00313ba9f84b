package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "rewrite what is generated")

// binary is the real program, built once for all scripts.
var binary string

// machineProgram is what its sandboxes run.
var machineProgram string

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := buildAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func buildAndRun(m *testing.M) (int, error) {
	binary, machineProgram = os.Getenv("PLANARIA_TEST_BINARY"), os.Getenv("PLANARIA_TEST_SANDBOX")
	if (binary == "") != (machineProgram == "") {
		return 1, errors.New("set PLANARIA_TEST_BINARY and PLANARIA_TEST_SANDBOX, as make test does, or neither")
	}
	if binary == "" {
		dir, err := os.MkdirTemp("", "planaria-test-")
		if err != nil {
			return 1, err
		}
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "planaria")
		// Static, as make build makes it: else it runs no sandboxes.
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", binary, ".")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return 1, fmt.Errorf("build the binary: %w\n%s", err, out)
		}
		machineProgram = binary // what carries no other program is it itself
	}
	// The scripts call it by its name.
	if err := os.Setenv("PATH", filepath.Dir(binary)+string(filepath.ListSeparator)+os.Getenv("PATH")); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// exitCode is the exit code of a finished command.
func exitCode(err error) int {
	var e *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &e):
		return e.ExitCode()
	}
	return -1
}
