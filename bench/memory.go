package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/planaria/planaria/internal/llm"
)

// benchMemory measures a server with many sessions asleep, and with many that
// are in a model call at the same time.
func benchMemory(ctx context.Context, b *bench) error {
	program, err := b.build(ctx)
	if err != nil {
		return err
	}
	t := &table{title: "Memory (SQLite, resident, no sandboxes)", head: []string{"", "resident", "ready after"}}
	var few, many int64
	n := b.pick(100_000, 2000)
	for _, sleeping := range []int{10, n} {
		rss, ready, err := b.asleep(ctx, program, sleeping)
		if err != nil {
			return fmt.Errorf("%d sleeping sessions: %w", sleeping, err)
		}
		if sleeping == 10 {
			few = rss
		}
		many = rss
		t.row(count(float64(sleeping))+" sessions asleep", mib(rss), ms(ready))
	}
	running := b.pick(1000, 100)
	now, peak, err := b.running(ctx, program, running)
	if err != nil {
		return fmt.Errorf("%d running sessions: %w", running, err)
	}
	t.row(count(float64(running))+" sessions in a model call at once", mib(now), "")
	t.row("the same, peak", mib(peak), "")
	t.note("Baseline of the first rows is the first: %s sleeping sessions cost %s more than 10.", count(float64(n)), mib(many-few))
	t.note("Targets: no growth beyond caches with sessions asleep (at most 32 MiB more): %s; 1,000 running sessions in at most 1 GiB: %s.",
		verdict(many-few <= 32<<20), verdict(peak <= 1<<30))
	t.print()
	return nil
}

// asleep fills a data folder with sessions at rest and serves it.
func (b *bench) asleep(ctx context.Context, program string, n int) (rss int64, ready time.Duration, err error) {
	dir, err := b.folder("asleep")
	if err != nil {
		return 0, 0, err
	}
	data := filepath.Join(dir, "data")
	o, err := open(ctx, data, "")
	if err != nil {
		return 0, 0, err
	}
	for range n {
		s, err := newSession(o.db, agentOf("asleep", "scripted", ""), "")
		if err == nil {
			_, err = o.db.CreateSession(ctx, workspace, s)
		}
		if err != nil {
			o.close()
			return 0, 0, err
		}
	}
	o.close()
	p, err := serve(program, data)
	if err != nil {
		return 0, 0, err
	}
	if err := pause(ctx, settle); err != nil {
		return 0, 0, err
	}
	if rss, err = p.status("VmRSS"); err != nil {
		return 0, 0, err
	}
	return rss, p.ready, p.stop()
}

// running lets n sessions wait for a model at once, the model outside of the
// process that is measured.
func (b *bench) running(ctx context.Context, program string, n int) (now, peak int64, err error) {
	dir, err := b.folder("running")
	if err != nil {
		return 0, 0, err
	}
	var waiting atomic.Int64
	release := make(chan struct{})
	script := llm.NewScriptServer(&llm.Script{Scripts: []llm.PlayScript{{Name: "wait", Steps: []llm.Step{{Text: "At last."}}}}})
	addr, stop, err := serveHTTP(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		waiting.Add(1)
		select {
		case <-release:
			script.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}))
	if err != nil {
		return 0, 0, err
	}
	defer stop()
	config := filepath.Join(dir, "planaria.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, "models:\n  - pattern: \"*\"\n    base_url: http://%s\n", addr), 0o600); err != nil {
		return 0, 0, err
	}
	p, err := serve(program, filepath.Join(dir, "data"), "--config", config)
	if err != nil {
		return 0, 0, err
	}
	defer func() {
		if serr := p.stop(); err == nil {
			err = serr
		}
	}()
	defer close(release)
	if err := p.begin(ctx, n); err != nil {
		return 0, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, idleTimeout)
	defer cancel()
	for waiting.Load() < int64(n) {
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return 0, 0, fmt.Errorf("only %d sessions came to their model call: %w", waiting.Load(), err)
		}
	}
	if err := pause(ctx, settle); err != nil {
		return 0, 0, err
	}
	if now, err = p.status("VmRSS"); err != nil {
		return 0, 0, err
	}
	peak, err = p.status("VmHWM")
	return now, peak, err
}

// begin creates n sessions that start at once.
func (p *process) begin(ctx context.Context, n int) error {
	agent, err := p.post(ctx, "/v1/agents", map[string]any{"name": "running", "model": "scripted"})
	if err != nil {
		return err
	}
	environment, err := p.post(ctx, "/v1/environments", map[string]any{"name": "running"})
	if err != nil {
		return err
	}
	for range n {
		_, err := p.post(ctx, "/v1/sessions", map[string]any{"agent": agent, "environment_id": environment,
			"initial_events": []any{map[string]any{"type": "user.message", "content": []any{map[string]string{"type": "text", "text": "Begin."}}}}})
		if err != nil {
			return err
		}
	}
	return nil
}
