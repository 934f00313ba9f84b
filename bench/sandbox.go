package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// benchSandbox measures the latencies and sizes of design section 6, one
// sandbox at a time.
func benchSandbox(ctx context.Context, b *bench) error {
	const title = "Sandbox: start and calls"
	x, err := b.boxes(ctx, "sandbox")
	if err != nil {
		return skipped(title, err)
	}
	defer x.close()
	if err := b.startsAndCalls(ctx, x, title); err != nil {
		return err
	}
	return b.snapshots(ctx, x)
}

// startsAndCalls measures starts and small calls beside a shell of this machine.
func (b *bench) startsAndCalls(ctx context.Context, x *boxes, title string) error {
	t := &table{title: title, head: []string{"", "median", "p99", "baseline on this machine", "median", "p99", "target (median)", ""}}
	row := func(what string, got sample, base string, than sample, target time.Duration) {
		limit, met := "", ""
		if target > 0 {
			limit, met = "≤ "+ms(target), verdict(got.median() <= target)
		}
		t.row(what, ms(got.median()), ms(got.p99()), base, ms(than.median()), ms(than.p99()), limit, met)
	}
	n := b.pick(20, 4)
	plain, err := timed(n, func() error { return exec.CommandContext(ctx, "bash", "-c", "true").Run() })
	if err != nil {
		return err
	}
	if _, err := x.starts(ctx, 1, 0); err != nil { // the root file system is made once
		return err
	}
	cold, err := x.starts(ctx, n, 0)
	if err != nil {
		return err
	}
	pooled, err := x.starts(ctx, n, 1)
	if err != nil {
		return err
	}
	row("start to first tool answer", cold, "start of `bash -c true` to its end", plain, 0)
	row("the same, from the pool", pooled, "the same", plain, 120*time.Millisecond)
	if err := b.smallCalls(ctx, x, row); err != nil {
		return err
	}
	t.print()
	return nil
}

// starts times n sandboxes one after the other, from start to the first answer.
// The pool holds so many before each.
func (x *boxes) starts(ctx context.Context, n, pool int) (sample, error) {
	var out sample
	for range n {
		if err := x.r.Warm(ctx, sandbox.Spec{}, pool); err != nil {
			return nil, err
		}
		start := time.Now()
		s, err := x.start(ctx, 0)
		if err == nil {
			_, err = x.sh(ctx, s, "true")
		}
		if err != nil {
			return nil, err
		}
		out = append(out, time.Since(start))
		if err := s.Kill(ctx); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (b *bench) smallCalls(ctx context.Context, x *boxes, row func(string, sample, string, sample, time.Duration)) error {
	s, err := x.start(ctx, 0)
	if err != nil {
		return err
	}
	dir, err := b.folder("host")
	if err != nil {
		return err
	}
	h, err := newHostShell(ctx, dir)
	if err != nil {
		return err
	}
	defer h.close()
	if _, err := x.call(ctx, s, "write", map[string]any{"file_path": "f", "content": strings.Repeat("line\n", 200)}); err != nil {
		return err
	}
	file := filepath.Join(dir, "f")
	if err := os.WriteFile(file, []byte(strings.Repeat("line\n", 200)), 0o600); err != nil {
		return err
	}
	n := b.pick(300, 50)
	for _, c := range []struct {
		what, base string
		inside     func() error
		outside    func() error
		target     time.Duration
	}{
		{"`read` of a file of 1 kB", "reading it", func() error {
			_, err := x.call(ctx, s, "read", map[string]any{"file_path": "f"})
			return err
		}, func() error { _, err := os.ReadFile(file); return err }, 0},
		{"tool call: shell builtin", "the same in a shell over pipes",
			func() error { _, err := x.sh(ctx, s, ":"); return err }, func() error { _, err := h.run(":"); return err }, 2 * time.Millisecond},
		{"tool call: exec of `/bin/true`", "the same in a shell over pipes",
			func() error { _, err := x.sh(ctx, s, "/bin/true"); return err }, func() error { _, err := h.run("/bin/true"); return err }, 15 * time.Millisecond},
	} {
		got, err := timed(n, c.inside)
		if err != nil {
			return err
		}
		than, err := timed(n, c.outside)
		if err != nil {
			return err
		}
		row(c.what, got, c.base, than, c.target)
	}
	return nil
}

// snapshotFigures are of one size of touched memory.
type snapshotFigures struct {
	pause, whole, copied, restore, fork, read sample

	image, first, further int64
	packed                time.Duration
}

// snapshots measures snapshot, restore and packing for growing memory.
func (b *bench) snapshots(ctx context.Context, x *boxes) error {
	sizes := []int{10, 200, 1000}
	if b.quick {
		sizes = sizes[:2]
	}
	pauses := map[int]time.Duration{10: 50 * time.Millisecond, 200: 150 * time.Millisecond, 1000: 500 * time.Millisecond}
	restores := map[int]time.Duration{10: 120 * time.Millisecond, 200: 350 * time.Millisecond}
	t := &table{title: "Sandbox: snapshot and restore by touched memory", head: []string{"touched", "pause", "p99", "target", "",
		"until verified", "p99", "baseline: copy of the image, synced", "p99",
		"restore to first answer (pool)", "p99", "target", "", "fork beside the running original", "p99", "baseline: reading the image", "p99"}}
	z := &table{title: "Sandbox: bytes of a snapshot", head: []string{"touched", "image", "packed and sealed, first", "packing took", "a further one after a small change"}}
	for _, mb := range sizes {
		f, err := b.snapshotOf(ctx, x, mb)
		if err != nil {
			return fmt.Errorf("%d MB: %w", mb, err)
		}
		limit, met := "", ""
		if r := restores[mb]; r > 0 {
			limit, met = "≤ "+ms(r), verdict(f.restore.median() <= r)
		}
		t.row(fmt.Sprintf("%d MB", mb), ms(f.pause.median()), ms(f.pause.p99()), "≤ "+ms(pauses[mb]), verdict(f.pause.median() <= pauses[mb]),
			ms(f.whole.median()), ms(f.whole.p99()), ms(f.copied.median()), ms(f.copied.p99()),
			ms(f.restore.median()), ms(f.restore.p99()), limit, met, ms(f.fork.median()), ms(f.fork.p99()), ms(f.read.median()), ms(f.read.p99()))
		z.row(fmt.Sprintf("%d MB", mb), mib(f.image), mib(f.first), ms(f.packed), mib(f.further))
	}
	t.note("Touched memory is random bytes in /dev/shm. The sandbox stands still during the pause only; then its image is synced, read back and hashed while it goes on. A restore hashes the image too.")
	t.print()
	z.note("Random bytes do not compress: the first pack is about what was touched. The change is a file of one line, written by the shell.")
	z.print()
	return nil
}

// bigLimit leaves room for the largest size: a quarter of it is /dev/shm.
const bigLimit = 5 << 30

func (b *bench) snapshotOf(ctx context.Context, x *boxes, mb int) (*snapshotFigures, error) {
	s, err := x.start(ctx, bigLimit)
	if err != nil {
		return nil, err
	}
	if _, err := x.sh(ctx, s, fmt.Sprintf("head -c %d /dev/urandom > /dev/shm/big", mb<<20)); err != nil {
		return nil, err
	}
	n := b.pick(20, 3)
	if mb >= 1000 {
		n = b.pick(5, 2)
	}
	f := &snapshotFigures{}
	var m *sandbox.Manifest
	f.whole, err = timed(n, func() error {
		if m != nil {
			if err := x.r.DropImage(m.ID); err != nil {
				return err
			}
		}
		var err error
		if m, err = s.Snapshot(ctx); err == nil {
			f.pause = append(f.pause, time.Duration(m.Took.Checkpoint)*time.Millisecond)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	f.image = m.Size()
	if err := b.baselines(x, m, n, f); err != nil {
		return nil, err
	}
	if err := b.sizes(ctx, x, s, m, f); err != nil {
		return nil, err
	}
	if err := b.restores(ctx, x, s, m, n, f); err != nil {
		return nil, err
	}
	return f, x.r.DropImage(m.ID)
}

// baselines copies and reads the image's bytes.
func (b *bench) baselines(x *boxes, m *sandbox.Manifest, n int, f *snapshotFigures) (err error) {
	dir := filepath.Join(x.dir, "snapshots", m.ID)
	copies, err := b.folder("copy")
	if err != nil {
		return err
	}
	defer os.RemoveAll(copies)
	f.copied, err = timed(n, func() error {
		for _, file := range m.Files {
			if err := copySynced(filepath.Join(dir, file.Name), filepath.Join(copies, file.Name)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	f.read, err = timed(n, func() error {
		for _, file := range m.Files {
			r, err := os.Open(filepath.Join(dir, file.Name))
			if err != nil {
				return err
			}
			_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, make([]byte, 1<<20))
			_ = r.Close()
			if err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

func copySynced(from, to string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	if err == nil {
		err = w.Sync()
	}
	return errors.Join(err, w.Close())
}

// sizes packs the image, then the one of a small change on top.
func (b *bench) sizes(ctx context.Context, x *boxes, s *sandbox.Sandbox, m *sandbox.Manifest, f *snapshotFigures) error {
	key, err := newAESKey()
	if err != nil {
		return err
	}
	start := time.Now()
	first, err := x.r.Pack(ctx, m, nil, key)
	if err != nil {
		return err
	}
	f.packed = time.Since(start)
	if _, err := x.sh(ctx, s, "echo changed > note"); err != nil {
		return err
	}
	next, err := s.Snapshot(ctx)
	if err != nil {
		return err
	}
	further, err := x.r.Pack(ctx, next, first, key)
	if err != nil {
		return err
	}
	f.first, f.further = first.Stored, further.Stored
	return x.r.DropImage(next.ID)
}

// restores brings the image back beside its running original, which is a fork,
// and, when that is killed, in its place.
func (b *bench) restores(ctx context.Context, x *boxes, s *sandbox.Sandbox, m *sandbox.Manifest, n int, f *snapshotFigures) error {
	one := func(spec sandbox.Spec) error {
		if err := x.r.Warm(ctx, sandbox.Spec{Limits: m.Limits}, 1); err != nil {
			return err
		}
		start := time.Now()
		c, _, err := x.r.Restore(ctx, m, spec)
		if err == nil {
			_, err = x.sh(ctx, c, "true")
		}
		if err != nil {
			return err
		}
		took := time.Since(start)
		if spec.ID == m.Sandbox {
			f.restore = append(f.restore, took)
		} else {
			f.fork = append(f.fork, took)
		}
		return c.Kill(ctx)
	}
	for range n {
		if err := one(x.spec(bigLimit)); err != nil {
			return fmt.Errorf("fork: %w", err)
		}
	}
	if err := s.Kill(ctx); err != nil {
		return err
	}
	again := sandbox.Spec{Workspace: m.Workspace, ID: m.Sandbox, Fence: 2, Limits: m.Limits}
	for range n {
		if err := one(again); err != nil {
			return fmt.Errorf("restore: %w", err)
		}
	}
	return nil
}
