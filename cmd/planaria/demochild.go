package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// demoKeyEnv names the variable through which the server gets the model's key.
const demoKeyEnv = "PLANARIA_DEMO_MODEL_KEY"

// Times of the demo's server process.
const (
	startTime = 30 * time.Second
	stopTime  = 20 * time.Second
)

// child is 'planaria serve' as a process of its own, started from this binary.
type child struct {
	a                            *app
	data, config, log, addr, key string
	verbose                      bool

	cmd    *exec.Cmd
	url    string
	exited chan struct{} // closed when the process is gone; err is set then
	err    error
}

// start starts the server and waits until it is ready. The second start takes
// the first one's port, so that clients find it again.
func (c *child) start(ctx context.Context) (time.Duration, error) {
	exe, err := os.Executable()
	if err != nil {
		return 0, fmt.Errorf("find our own binary: %w", err)
	}
	out, err := os.OpenFile(c.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer out.Close()
	c.cmd = exec.Command(exe, "serve", "--config", c.config, "--data", c.data, "--listen", c.addr)
	c.cmd.Env = append(withoutOurs(os.Environ()), "PLANARIA_API_KEY="+c.key, demoKeyEnv+"="+demoKey)
	c.cmd.Stderr = out
	if c.verbose {
		c.cmd.Stderr = io.MultiWriter(out, c.a.stderr)
	}
	// A Ctrl-C in the terminal is ours to handle: the server must not end by it.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := c.cmd.Start(); err != nil {
		return 0, fmt.Errorf("start the server: %w", err)
	}
	ready := make(chan string, 1)
	c.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan struct{}) { // ends with the process
		lines := bufio.NewScanner(stdout)
		for lines.Scan() {
			if url, ok := strings.CutPrefix(lines.Text(), "planaria: ready on "); ok {
				ready <- url
			}
		}
		c.err = cmd.Wait()
		close(exited)
	}(c.cmd, c.exited)
	t := time.NewTimer(startTime)
	defer t.Stop()
	select {
	case c.url = <-ready:
		c.addr = strings.TrimPrefix(c.url, "http://")
		return time.Since(began), nil
	case <-c.exited:
		return 0, fmt.Errorf("the server ended at its start: %w\n%s", c.err, c.tail())
	case <-t.C:
		c.kill()
		return 0, fmt.Errorf("the server was not ready within %s\n%s", startTime, c.tail())
	case <-ctx.Done():
		c.kill()
		return 0, context.Cause(ctx)
	}
}

// withoutOurs removes what would steer the server another way than the demo's.
func withoutOurs(env []string) []string {
	var out []string
	for _, e := range env {
		if !strings.HasPrefix(e, "PLANARIA_") && !strings.HasPrefix(e, "ANTHROPIC_") {
			out = append(out, e)
		}
	}
	return out
}

// kill kills the process with SIGKILL and waits until it is gone.
func (c *child) kill() {
	if c.cmd == nil || c.cmd.Process == nil {
		return
	}
	_ = c.cmd.Process.Kill() // already gone is as good
	<-c.exited
	c.cmd = nil
}

// stop ends the process with SIGTERM.
func (c *child) stop() error {
	if c.cmd == nil {
		return errors.New("the server does not run")
	}
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop the server: %w", err)
	}
	t := time.NewTimer(stopTime)
	defer t.Stop()
	select {
	case <-c.exited:
		c.cmd = nil
		if c.err != nil {
			return fmt.Errorf("the server did not end well: %w\n%s", c.err, c.tail())
		}
		return nil
	case <-t.C:
		c.kill()
		return fmt.Errorf("the server did not drain within %s\n%s", stopTime, c.tail())
	}
}

// tail is the end of the server's log.
func (c *child) tail() string {
	data, err := os.ReadFile(c.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}
