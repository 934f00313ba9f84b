package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// adminKey opens the servers that are measured.
const adminKey = "admin-key-of-the-benchmark-0123456789"

// build returns the binary to measure: the one that -planaria names, else the
// one of make build, which is made now.
func (b *bench) build(ctx context.Context) (string, error) {
	if b.program != "" {
		return filepath.Abs(b.program)
	}
	root, err := b.make(ctx)
	if err != nil {
		return "", err
	}
	b.program = filepath.Join(root, "bin", "planaria")
	return b.program, nil
}

// sandboxes returns what sandboxes run: what -inside names, else what the
// binary of make build carries.
func (b *bench) sandboxes(ctx context.Context) (string, error) {
	if b.inside != "" {
		return filepath.Abs(b.inside)
	}
	root, err := b.make(ctx)
	if err != nil {
		return "", err
	}
	b.inside = filepath.Join(root, "cmd", "planaria", "planaria-sandbox")
	return b.inside, nil
}

// make runs make build, once, and returns the root of the module.
func (b *bench) make(ctx context.Context) (root string, err error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("find the module: %w", err)
	}
	root = strings.TrimSpace(string(out))
	if b.made {
		return root, nil
	}
	if out, err := exec.CommandContext(ctx, "make", "-C", root, "build").CombinedOutput(); err != nil {
		return "", fmt.Errorf("make build: %w: %s", err, out)
	}
	b.made = true
	return root, nil
}

// process is a running `planaria serve`.
type process struct {
	url   string
	ready time.Duration // from the start of the process to its line
	cmd   *exec.Cmd
	ended chan error
}

// serve starts the server on a data folder and waits until it is ready.
func serve(program, data string, flags ...string) (*process, error) {
	cmd := exec.Command(program, append([]string{"serve", "--listen", "127.0.0.1:0", "--data", data}, flags...)...)
	cmd.Env = append(os.Environ(), "PLANARIA_API_KEY="+adminKey)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	var words bytes.Buffer
	cmd.Stderr = &words // read after the process ended only
	p := &process{cmd: cmd, ended: make(chan error, 1)}
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ready := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(stdout)
		for lines.Scan() {
			if url, ok := strings.CutPrefix(lines.Text(), "planaria: ready on "); ok {
				ready <- url
			}
		}
		if err := cmd.Wait(); err != nil {
			p.ended <- fmt.Errorf("planaria serve: %w: %s", err, words.Bytes())
			return
		}
		p.ended <- nil
	}()
	timer := time.NewTimer(startTimeout)
	defer timer.Stop()
	select {
	case p.url = <-ready:
		p.ready = time.Since(start)
		return p, nil
	case err := <-p.ended:
		return nil, errors.Join(errors.New("planaria serve ended before it was ready"), err)
	case <-timer.C:
		_ = cmd.Process.Kill()
		return nil, fmt.Errorf("planaria serve is not ready after %s: %s", startTimeout, errors.Join(<-p.ended))
	}
}

// stop drains the server.
func (p *process) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return <-p.ended
}

// status reads a field of /proc/PID/status that is given in kB.
func (p *process) status(field string) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("no %s in the status of the process", field)
}

// post sends JSON and returns the id of the answer.
func (p *process) post(ctx context.Context, path string, body any) (string, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+path, bytes.NewReader(b))
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+adminKey)
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		return "", err
	}
	if res.StatusCode != http.StatusOK {
		return "", fmt.Errorf("POST %s: %s: %s", path, res.Status, answer)
	}
	var out struct {
		ID string `json:"id"`
	}
	err = json.Unmarshal(answer, &out)
	return out.ID, err
}

// settle is how long a process may calm down before its memory is read.
const settle = 3 * time.Second

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
