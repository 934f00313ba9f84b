package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

// runTimes are the times of calls, by round and by step.
type runTimes [][]time.Duration

// work is the sum of the medians of the steps: what a step loses to other work
// of the machine in one round is not in it.
func (t runTimes) work() (sum time.Duration) {
	for i := range t[0] {
		var of sample
		for _, r := range t {
			of = append(of, r[i])
		}
		sum += of.median()
	}
	return sum
}

// rounds are the sums of whole rounds.
func (t runTimes) rounds() (out sample) {
	for _, r := range t {
		var sum time.Duration
		for _, d := range r {
			sum += d
		}
		out = append(out, sum)
	}
	return out
}

// beyond is what each step took more than its fellow, which ran right before or
// behind it: both share the load of that moment.
func (t runTimes) beyond(than runTimes) runTimes {
	out := make(runTimes, len(t))
	for r := range t {
		for i := range t[r] {
			out[r] = append(out[r], t[r][i]-than[r][i])
		}
	}
	return out
}

// overhead is one measurement of three in step.
type overhead struct {
	plain, bare, saved runTimes
	pauses             sample
	snapshots          int
}

// benchOverhead compares a plain process, a sandbox, and a sandbox with a
// snapshot after each step that is taken while the model thinks.
func benchOverhead(ctx context.Context, b *bench) error {
	const title = "A shell-intensive run"
	x, err := b.boxes(ctx, "overhead")
	if err != nil {
		return skipped(title, err)
	}
	defer x.close()
	steps, think, rounds := shellRun, 400*time.Millisecond, b.pick(6, 2)
	if b.quick {
		steps = shellRun[:6]
	}
	o := &overhead{}
	for began := time.Now(); len(o.bare) < rounds && (len(o.bare) < 3 || time.Since(began) < overheadTime); {
		if err := o.round(ctx, b, x, steps, think); err != nil {
			return err
		}
	}
	thought := time.Duration(len(steps)) * think
	extra := o.saved.beyond(o.bare)
	bare := o.bare.work() + thought
	t := &table{title: title, head: []string{"", "calls: sum of the steps' medians", "rounds: best", "worst", "with thinking", "against the sandbox alone"}}
	for _, r := range []struct {
		what string
		of   runTimes
		more time.Duration
	}{{"baseline: shell of this machine", o.plain, o.plain.work() - o.bare.work()}, {"in a sandbox", o.bare, 0},
		{"in a sandbox, a snapshot after each step", o.saved, extra.work()}} {
		all := r.of.rounds()
		t.row(r.what, ms(r.of.work()), ms(all.quantile(0)), ms(all.quantile(1)), ms(bare+r.more), percentMore(r.more, bare))
	}
	t.note("%d rounds of %d steps, with %s of thinking between them, in which a snapshot is taken and packed; %d snapshots, pause median %s, p99 %s. The three run in step; a step with snapshots is compared with the same step of the same moment without, and what is added is the sum of the medians of these differences.",
		len(o.bare), len(steps), ms(think), o.snapshots, ms(o.pauses.median()), ms(o.pauses.p99()))
	low, high := spread(extra, o.bare, thought)
	longer := o.bare.work() + 2*time.Second*time.Duration(len(steps))
	t.note("Snapshots add %.1f ms to a step; with 2 s of thinking the same would be %s. Target: at most %.0f %% of the run in a sandbox: %s; from round to round (middle half) they add %+.1f to %+.1f %%.",
		extra.work().Seconds()*1000/float64(len(steps)), percentMore(extra.work(), longer), overheadTarget, decided(share(extra.work(), bare), low, high), low, high)
	t.print()
	return nil
}

// overheadTime ends the rounds on a busy machine: the last one begins before it.
const overheadTime = 95 * time.Second

// overheadTarget is what snapshots may add to a run in a sandbox, percent.
const overheadTarget = 3.0

// share is what more adds to base, percent.
func share(more, base time.Duration) float64 { return 100 * float64(more) / float64(base) }

func percentMore(more, base time.Duration) string { return fmt.Sprintf("%+.1f %%", share(more, base)) }

// spread is what snapshots add in the middle half of the rounds.
func spread(extra, bare runTimes, thought time.Duration) (low, high float64) {
	var each []float64
	without := bare.rounds()
	for i, more := range extra.rounds() {
		each = append(each, share(more, without[i]+thought))
	}
	slices.Sort(each)
	return each[len(each)/4], each[len(each)-1-len(each)/4]
}

// decided is the verdict where the rounds agree on it, and else says that they
// do not.
func decided(sum, low, high float64) string {
	if (low <= overheadTarget) != (high <= overheadTarget) || (sum <= overheadTarget) != (low <= overheadTarget) {
		return fmt.Sprintf("not decided (%+.1f %%), the rounds disagree", sum)
	}
	return fmt.Sprintf("%s (%+.1f %%)", verdict(sum <= overheadTarget), sum)
}

// round runs the steps once in a fresh shell and two fresh sandboxes. Each
// sandbox has rested for the time of a thought when its step begins. The one with
// snapshots begins its step whether or not its snapshot is done; the other one
// waits for that, so that it pays nothing for it.
func (o *overhead) round(ctx context.Context, b *bench, x *boxes, steps []string, think time.Duration) error {
	dir, err := b.folder("plain")
	if err != nil {
		return err
	}
	h, err := newHostShell(ctx, dir)
	if err != nil {
		return err
	}
	defer h.close()
	var pair [2]*sandbox.Sandbox
	for i := range pair {
		if pair[i], err = x.start(ctx, 0); err != nil {
			return err
		}
		if _, err := x.sh(ctx, pair[i], "true"); err != nil {
			return err
		}
	}
	v, err := x.saver(pair[1])
	if err != nil {
		return err
	}
	var plain, bare, saved sample
	for _, step := range steps {
		if err := clock(&saved, func() error { _, err := x.sh(ctx, pair[1], step); return err }); err != nil {
			return err
		}
		if err := errors.Join(v.join(), pause(ctx, think)); err != nil {
			return err
		}
		if err := clock(&bare, func() error { _, err := x.sh(ctx, pair[0], step); return err }); err != nil {
			return err
		}
		if err := clock(&plain, func() error { _, err := h.run(step); return err }); err != nil {
			return err
		}
		v.begin(ctx)
		if err := pause(ctx, think); err != nil {
			return err
		}
	}
	if err := v.join(); err != nil {
		return err
	}
	o.plain, o.bare, o.saved = append(o.plain, plain), append(o.bare, bare), append(o.saved, saved)
	o.snapshots, o.pauses = o.snapshots+v.taken, append(o.pauses, v.pauses...)
	return errors.Join(pair[0].Kill(ctx), pair[1].Kill(ctx))
}

// clock adds the time that something takes.
func clock(to *sample, do func() error) error {
	start := time.Now()
	err := do()
	*to = append(*to, time.Since(start))
	return err
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
