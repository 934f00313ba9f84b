package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"time"
)

// benchStart measures from serve to ready on an existing data folder, and the
// memory of the idle process.
func benchStart(ctx context.Context, b *bench) error {
	program, err := b.build(ctx)
	if err != nil {
		return err
	}
	dir, err := b.folder("start")
	if err != nil {
		return err
	}
	data := filepath.Join(dir, "data")
	p, err := serve(program, data)
	if err != nil {
		return err
	}
	first := p.ready
	if err := p.stop(); err != nil {
		return err
	}
	var ready, bare sample
	for range b.pick(20, 3) {
		if p, err = serve(program, data); err != nil {
			return err
		}
		ready = append(ready, p.ready)
		if err := p.stop(); err != nil {
			return err
		}
		start := time.Now()
		if err := exec.CommandContext(ctx, program, "version").Run(); err != nil {
			return fmt.Errorf("planaria version: %w", err)
		}
		bare = append(bare, time.Since(start))
	}
	if p, err = serve(program, data); err != nil {
		return err
	}
	if err := pause(ctx, settle); err != nil {
		return err
	}
	rss, err := p.status("VmRSS")
	if err != nil {
		return err
	}
	if err := p.stop(); err != nil {
		return err
	}
	t := &table{title: "Start and idle process (SQLite)", head: []string{"", "median", "worst"}}
	t.row("from `serve` to ready, existing data folder", ms(ready.median()), ms(ready.quantile(1)))
	t.row("baseline: `planaria version`, from start to end of the process", ms(bare.median()), ms(bare.quantile(1)))
	t.row("from `serve` to ready, new data folder (once)", ms(first), "")
	t.row("idle process, resident", mib(rss), "")
	t.note("Targets: ready within 300 ms: %s; idle at most 60 MiB: %s.", verdict(ready.median() <= 300*time.Millisecond), verdict(rss <= 60<<20))
	t.print()
	return nil
}
