package main

import (
	"context"
	"fmt"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// shellRun is a run that is mostly shell: it makes, sorts, packs, searches and
// changes files, with many short processes.
var shellRun = []string{
	`mkdir -p data src && seq 1 150000 | awk '{print $1*7919%1000003, "row", $1}' > data/rows.txt && wc -l < data/rows.txt`,
	`sort -n data/rows.txt | awk '{s+=$1} END {print s}'`,
	`for i in $(seq 1 40); do echo "value_$i = $((i*i))" > src/m$i.py; done; ls src | wc -l`,
	`grep -c '7 row' data/rows.txt; grep -rl value_3 src | wc -l`,
	`tar czf src.tgz src && tar tzf src.tgz | wc -l`,
	`for f in src/*.py; do sed -i 's/value/result/' "$f"; done; cat src/*.py | sha256sum | cut -c1-12`,
	`find . -type f | sort | xargs wc -c | tail -1`,
	`gzip -kf data/rows.txt && gzip -dc data/rows.txt.gz | tail -1`,
	`for i in $(seq 1 60); do expr $i \* $i; done | tail -1`,
	`split -l 20000 data/rows.txt data/part. && ls data | wc -l && rm data/part.*`,
	`cp -r src copy && diff -r src copy && rm -r copy && echo same`,
	`awk '{c[$1%100]++} END {for (k in c) n++; print n}' data/rows.txt`,
}

// runTimes are those of whole runs: the calls, and with the thinking between them.
type runTimes struct{ work, total sample }

// benchOverhead compares a plain process, a sandbox, and a sandbox with a
// snapshot after each step that is taken while the model thinks.
func benchOverhead(ctx context.Context, b *bench) error {
	const title = "A shell-intensive run"
	x, err := b.boxes(ctx, "overhead")
	if err != nil {
		return skipped(title, err)
	}
	defer x.close()
	steps, think := shellRun, 2*time.Second
	if b.quick {
		steps, think = shellRun[:6], 500*time.Millisecond
	}
	var plain, bare, saved runTimes
	var pauses sample
	snapshots := 0
	// One after the other in each round, so that a slow minute hits all.
	for range b.pick(4, 1) {
		if err := b.plainRun(ctx, steps, think, &plain); err != nil {
			return err
		}
		if _, err := x.boxRun(ctx, steps, think, false, &bare); err != nil {
			return err
		}
		v, err := x.boxRun(ctx, steps, think, true, &saved)
		if err != nil {
			return err
		}
		snapshots += v.taken
		pauses = append(pauses, v.pauses...)
	}
	t := &table{title: title, head: []string{"", "calls: median of runs", "worst", "with thinking: median", "worst", "against the plain process", "against the sandbox alone"}}
	for _, r := range []struct {
		what string
		t    *runTimes
	}{{"baseline: shell of this machine", &plain}, {"in a sandbox", &bare}, {"in a sandbox, a snapshot after each step", &saved}} {
		t.row(r.what, ms(r.t.work.median()), ms(r.t.work.quantile(1)), ms(r.t.total.median()), ms(r.t.total.quantile(1)),
			added(r.t.total.median(), plain.total.median()), added(r.t.total.median(), bare.total.median()))
	}
	t.note("%d steps with %s of thinking after each, in which its snapshot is taken and packed; %d snapshots, pause median %s, p99 %s.",
		len(steps), ms(think), snapshots, ms(pauses.median()), ms(pauses.p99()))
	t.note("Target: snapshots add at most 3 %% to the run in a sandbox: %s.", verdict(float64(saved.total.median()) <= 1.03*float64(bare.total.median())))
	t.print()
	return nil
}

func added(a, b time.Duration) string {
	return fmt.Sprintf("%+.1f %%", 100*(float64(a)/float64(b)-1))
}

func (b *bench) plainRun(ctx context.Context, steps []string, think time.Duration, out *runTimes) error {
	dir, err := b.folder("plain")
	if err != nil {
		return err
	}
	h, err := newHostShell(ctx, dir)
	if err != nil {
		return err
	}
	defer h.close()
	return timedRun(ctx, steps, think, out, h.run, func() {})
}

// timedRun runs the steps one by one; after is called when one has ended and the
// model begins to think.
func timedRun(ctx context.Context, steps []string, think time.Duration, out *runTimes, do func(string) (string, error), after func()) error {
	began := time.Now()
	var work time.Duration
	for _, step := range steps {
		start := time.Now()
		if _, err := do(step); err != nil {
			return err
		}
		work += time.Since(start)
		after()
		if err := pause(ctx, think); err != nil {
			return err
		}
	}
	out.work, out.total = append(out.work, work), append(out.total, time.Since(began))
	return nil
}

func (x *boxes) boxRun(ctx context.Context, steps []string, think time.Duration, save bool, out *runTimes) (*saver, error) {
	s, err := x.start(ctx, 0)
	if err != nil {
		return nil, err
	}
	if _, err := x.sh(ctx, s, "true"); err != nil {
		return nil, err
	}
	v, err := x.saver(s)
	if err != nil {
		return nil, err
	}
	after := func() {}
	if save {
		after = func() { v.begin(ctx) }
	}
	err = timedRun(ctx, steps, think, out, func(c string) (string, error) { return x.sh(ctx, s, c) }, after)
	if err == nil {
		err = v.join()
	}
	if err != nil {
		return nil, err
	}
	return v, s.Kill(ctx)
}

// saver takes the snapshots of one sandbox as a session's driver does: one at a
// time, beside what goes on, when something has changed; then it packs them on
// top of one another.
type saver struct {
	x    *boxes
	s    *sandbox.Sandbox
	key  *aesKey
	done chan error // of the one that is being taken, nil without

	last   *sandbox.Manifest
	packed *sandbox.Packed
	seen   sandbox.Activity

	taken, skipped int
	written        int64 // bytes of images on the local disk
	stored         int64 // bytes of packs
	pauses         sample
}

func (x *boxes) saver(s *sandbox.Sandbox) (*saver, error) {
	key, err := newAESKey()
	return &saver{x: x, s: s, key: key}, err
}

// begin starts a snapshot when the one before has ended.
func (v *saver) begin(ctx context.Context) {
	before := v.done
	v.done = make(chan error, 1)
	go func(done chan<- error) {
		if before != nil {
			if err := <-before; err != nil {
				done <- err
				return
			}
		}
		done <- v.save(ctx)
	}(v.done)
}

// join waits for the snapshots that were begun.
func (v *saver) join() error {
	if v.done == nil {
		return nil
	}
	err := <-v.done
	v.done = nil
	return err
}

// save takes a snapshot if anything has changed, packs it, and drops the image
// that it supersedes.
func (v *saver) save(ctx context.Context) error {
	a, err := v.s.Activity(ctx)
	if err != nil {
		return err
	}
	if v.last != nil && sandbox.Same(a, v.seen) {
		v.skipped++
		return nil
	}
	if err := v.snapshot(ctx); err != nil {
		return err
	}
	v.seen = a
	packed, err := v.x.r.Pack(ctx, v.last, v.packed, v.key)
	if err != nil {
		return err
	}
	v.packed, v.stored = packed, v.stored+packed.Stored
	return nil
}

// snapshot takes one in any case.
func (v *saver) snapshot(ctx context.Context) error {
	m, err := v.s.Snapshot(ctx)
	if err != nil {
		return err
	}
	old := v.last
	v.last = m
	v.taken++
	v.written += m.Size()
	v.pauses = append(v.pauses, time.Duration(m.Took.Checkpoint)*time.Millisecond)
	if old != nil {
		return v.x.r.DropImage(old.ID)
	}
	return nil
}
