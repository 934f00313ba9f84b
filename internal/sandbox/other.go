//go:build !linux

package sandbox

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"time"
)

// Sandboxes need Linux. Elsewhere the program builds without them, and each
// act says so.

func unsupported() error {
	return fmt.Errorf("%w: it runs %s, not Linux", ErrUnsupported, runtime.GOOS)
}

// Probe says what this machine lacks.
func Probe(_ context.Context, cfg Config) []Finding { return Check(cfg) }

// Check says the same.
func Check(Config) []Finding {
	return []Finding{{What: "Linux", Says: unsupported().Error(), Mend: "run the server on Linux", Fatal: true}}
}

func measureMemory(int) int64 { return 0 }

func (s *Sandbox) measureCPU() time.Duration { return 0 }

const ownBinary = ""

func identify(*os.File) (fileIdentity, error) { return fileIdentity{}, unsupported() }

func cloneFile(to, from *os.File) bool { return false }

func unlockFolder(*os.File) error { return nil }

func lockFolder(string) (*os.File, error) { return nil, unsupported() }

func (r *Runtime) awaitCreates(context.Context) error { return nil }

func (r *Runtime) sweepStrays() error { return nil }

func (r *Runtime) create(context.Context, Spec, string) (*Sandbox, error) { return nil, unsupported() }

func (s *Sandbox) boot(context.Context) error { return unsupported() }

func (s *Sandbox) runsc(context.Context, ...string) error { return unsupported() }

func (s *Sandbox) alive() bool { return false }

func (s *Sandbox) watch() {}

func (s *Sandbox) run() error { return unsupported() }

func (s *Sandbox) wake(context.Context) {}

func (s *Sandbox) end() {}

func entropy() []byte { return nil }

// Kill ends the sandbox and removes its folder.
func (s *Sandbox) Kill(context.Context) error { return unsupported() }

// Pause stops all processes inside until Resume.
func (s *Sandbox) Pause(context.Context) error { return unsupported() }

// Resume lets a paused sandbox go on.
func (s *Sandbox) Resume(context.Context) error { return unsupported() }
