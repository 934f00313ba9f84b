package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/planaria/planaria/internal/sandbox"
)

// benchDensity measures many small sandboxes at once: each has its agent and a
// shell that has run a command.
func benchDensity(ctx context.Context, b *bench) error {
	const title = "Many sandboxes at once"
	x, err := b.boxes(ctx, "density")
	if err != nil {
		return skipped(title, err)
	}
	defer x.close()
	n := b.many
	if n == 0 {
		n = b.pick(50, 10)
	}
	plain, err := b.plainShells(ctx, n)
	if err != nil {
		return err
	}
	// The first one makes what all share.
	if s, err := x.start(ctx, 0); err != nil {
		return err
	} else if _, err := x.sh(ctx, s, "true"); err != nil {
		return err
	}
	before, err := available(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	all, starts, err := x.startMany(ctx, n)
	if err != nil {
		return err
	}
	took := time.Since(began)
	after, err := available(ctx)
	if err != nil {
		return err
	}
	own, err := proportional(x.dir)
	if err != nil {
		return err
	}
	var answers sample
	for _, s := range all {
		start := time.Now()
		if _, err := x.sh(ctx, s, "/bin/true"); err != nil {
			return err
		}
		answers = append(answers, time.Since(start))
	}
	each := max(0, before-after) / int64(n)
	t := &table{title: title, head: []string{"", "at once", "memory each: less free", "of its processes", "start to first answer: median", "p99", "all started in", "then `/bin/true` in each: median", "p99"}}
	t.row("sandbox with agent and shell", count(float64(n)), mib(each), mib(own/int64(n+1)), ms(starts.median()), ms(starts.p99()), ms(took), ms(answers.median()), ms(answers.p99()))
	t.row("baseline: shell of this machine", count(float64(n)), mib(plain.each), "", ms(plain.starts.median()), ms(plain.starts.p99()), ms(plain.took), ms(plain.answers.median()), ms(plain.answers.p99()))
	t.note("Memory is what the kernel could give away less, and the proportional share of all processes of a sandbox, divided by their number; what else goes on on the machine is in the first. By that 1,000 sandboxes take %.1f GiB; target: 1,000 in 24 GiB: %s.",
		float64(each)*1000/(1<<30), verdict(each*1000 < 22<<30))
	t.print()
	return nil
}

// startMany starts n sandboxes, two at a time.
func (x *boxes) startMany(ctx context.Context, n int) ([]*sandbox.Sandbox, sample, error) {
	all := make([]*sandbox.Sandbox, n)
	var mu sync.Mutex
	var starts sample
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(2)
	for i := range n {
		spec := x.spec(0)
		g.Go(func() error {
			start := time.Now()
			s, err := x.r.Start(ctx, spec)
			if err != nil {
				return fmt.Errorf("sandbox %d of %d: %w", i+1, n, err)
			}
			res, err := s.Do(ctx, sandbox.Call{ID: "first", Thread: "main", Tool: "bash", Input: []byte(`{"command":"true"}`)})
			if err != nil || res.IsError {
				return fmt.Errorf("sandbox %d of %d: its shell: %v %w", i+1, n, res, err)
			}
			mu.Lock()
			defer mu.Unlock()
			all[i], starts = s, append(starts, time.Since(start))
			return nil
		})
	}
	return all, starts, g.Wait()
}

type plainFigures struct {
	each            int64
	took            time.Duration
	starts, answers sample
}

// plainShells is the baseline: as many shells of this machine.
func (b *bench) plainShells(ctx context.Context, n int) (f plainFigures, err error) {
	before, err := available(ctx)
	if err != nil {
		return f, err
	}
	var all []*hostShell
	defer func() {
		for _, h := range all {
			h.close()
		}
	}()
	began := time.Now()
	for range n {
		start := time.Now()
		h, err := newHostShell(ctx, b.dir)
		if err != nil {
			return f, err
		}
		all = append(all, h)
		if _, err := h.run("true"); err != nil {
			return f, err
		}
		f.starts = append(f.starts, time.Since(start))
	}
	f.took = time.Since(began)
	after, err := available(ctx)
	if err != nil {
		return f, err
	}
	f.each = max(0, before-after) / int64(n)
	for _, h := range all {
		start := time.Now()
		if _, err := h.run("/bin/true"); err != nil {
			return f, err
		}
		f.answers = append(f.answers, time.Since(start))
	}
	return f, nil
}

// available is what the kernel could still give to programs, when it is calm.
func available(ctx context.Context) (int64, error) {
	if err := exec.CommandContext(ctx, "sync").Run(); err != nil {
		return 0, err
	}
	if err := pause(ctx, 2*time.Second); err != nil {
		return 0, err
	}
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	raw, err := io.ReadAll(f)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("no MemAvailable in /proc/meminfo")
}

// proportional sums the memory of all processes that have the folder in their
// command line, and of what they have started; shared pages count by their share.
func proportional(dir string) (int64, error) {
	names, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	ours, parent := map[string]bool{}, map[string]string{}
	for _, name := range names {
		pid := filepath.Base(name)
		line, err := os.ReadFile(filepath.Join(name, "cmdline"))
		if err != nil {
			continue // it has ended
		}
		ours[pid] = bytes.Contains(line, []byte(dir))
		if stat, err := os.ReadFile(filepath.Join(name, "stat")); err == nil {
			if f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])); len(f) > 1 {
				parent[pid] = f[1]
			}
		}
	}
	var sum int64
	for pid := range ours {
		mine := false
		for p := pid; p != "" && !mine; p = parent[p] {
			mine = ours[p]
		}
		if !mine {
			continue
		}
		rollup, err := os.ReadFile("/proc/" + pid + "/smaps_rollup")
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(rollup)) {
			if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
				kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
				if err != nil {
					return 0, err
				}
				sum += kb << 10
			}
		}
	}
	return sum, nil
}
