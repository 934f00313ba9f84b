package server_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// startTimeout bounds how long the binary may take to say that it is ready.
const startTimeout = time.Minute

// planaria is a real server process under test.
type planaria struct {
	URL, Key string
	Program  string // the binary
	Data     string // its data folder

	process *os.Process
	ended   chan error
}

// buildPlanaria builds the binary into a folder of the test's own.
func buildPlanaria(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "planaria")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/planaria/planaria/cmd/planaria")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build planaria: %v\n%s", err, out)
	}
	return program
}

// startPlanaria builds the binary and serves a new data folder on a free
// loopback port. It is drained when the test ends.
func startPlanaria(t *testing.T, flags ...string) *planaria {
	t.Helper()
	p := &planaria{Program: buildPlanaria(t), Data: filepath.Join(t.TempDir(), "data"), Key: "admin-key-of-this-test-0123456789"}
	p.start(t, flags...)
	t.Cleanup(func() { p.stop(t) })
	return p
}

// env is the environment with which SDKs and the command line find the server.
func (p *planaria) env(more ...string) []string {
	return append([]string{"ANTHROPIC_BASE_URL=" + p.URL, "ANTHROPIC_API_KEY=" + p.Key,
		"PLANARIA_SERVER=" + p.URL, "PLANARIA_API_KEY=" + p.Key}, more...)
}

func (p *planaria) start(t *testing.T, flags ...string) {
	t.Helper()
	cmd := exec.Command(p.Program, append([]string{"serve", "--listen", "127.0.0.1:0", "--data", p.Data}, flags...)...)
	cmd.Env = append(os.Environ(), "PLANARIA_API_KEY="+p.Key)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	cmd.Stderr = &logged // read after the process ended only
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.process, p.ended = cmd.Process, make(chan error, 1)
	ready := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(stdout)
		for lines.Scan() {
			if url, ok := strings.CutPrefix(lines.Text(), "planaria: ready on "); ok {
				ready <- url
			}
		}
		err := cmd.Wait()
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, logged.Bytes())
		}
		p.ended <- err
	}()
	timer := time.NewTimer(startTimeout)
	defer timer.Stop()
	select {
	case p.URL = <-ready:
	case err := <-p.ended:
		t.Fatalf("planaria serve ended: %v", err)
	case <-timer.C:
		t.Fatalf("planaria serve is not ready after %v", startTimeout)
	}
}

// stop drains the server.
func (p *planaria) stop(t *testing.T) {
	t.Helper()
	if err := p.process.Signal(syscall.SIGTERM); err != nil {
		t.Errorf("stop planaria: %v", err)
	}
	if err := <-p.ended; err != nil {
		t.Errorf("planaria serve: %v", err)
	}
}

// post sends JSON and reads the answer into into, unless that is nil.
func (p *planaria) post(t *testing.T, path string, body, into any) {
	t.Helper()
	b, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.URL+path, bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+p.Key)
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != http.StatusOK {
		t.Fatalf("POST %s: %s: %s", path, res.Status, answer)
	}
	if into == nil {
		return
	}
	if err := json.Unmarshal(answer, into); err != nil {
		t.Fatalf("POST %s: %v", path, err)
	}
}
