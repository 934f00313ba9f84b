package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// errNoChromium: the root file system of the sandboxes has no browser.
var errNoChromium = errors.New("there is no Chromium in the sandboxes")

// Pages with state of their own: a random id and a counter that never rests; the
// first one has a long list and 8 MB of random numbers. They need no server.
const (
	firstPage = `data:text/html,<title>First</title><p id=state></p><input name=q><ol id=list></ol><script>` +
		`const made=Math.random().toString(36).slice(2),kept=new Float64Array(1<<20).map(Math.random);let n=0;` +
		`for(let i=0;i<500;i++)list.insertAdjacentHTML("beforeend","<li>item "+i+" of "+made);` +
		`setInterval(()=>{n++;state.textContent="made="+made+" n="+n+" sum="+kept[n]},100)</script>`
	nextPage = `data:text/html,<title>Next %d</title><h1>Another page</h1><table id=t></table><script>` +
		`const made=Math.random().toString(36).slice(2);let n=0;` +
		`for(let i=0;i<300;i++)t.insertAdjacentHTML("beforeend","<tr><td>"+i+"<td>"+Math.random());` +
		`document.querySelector("h1").insertAdjacentHTML("afterend","<p id=state></p>");` +
		`setInterval(()=>{n++;state.textContent="made="+made+" n="+n+" sum=0"},100)</script>`
)

// pageTarget bounds what a further snapshot of a browser stores, in bytes.
const pageTarget = 12_000_000

// pageFigures are of one Chromium with a page.
type pageFigures struct {
	opened         time.Duration // from the start of Chromium to the page
	pause, restore sample
	image, first   int64
	still, moved   []int64 // stored by a further snapshot
	packed         sample

	copied, read sample // baselines
}

// benchBrowser measures snapshots of a sandbox in which Chromium runs.
func benchBrowser(ctx context.Context, b *bench) error {
	const title = "Sandbox: Chromium with a page"
	x, err := b.boxes(ctx, "browser")
	if err != nil {
		return skipped(title, err)
	}
	defer x.close()
	f, err := b.pages(ctx, x)
	if err != nil {
		return skipped(title, err)
	}
	t := &table{title: title, head: []string{"", "median", "worst", "baseline on this machine", "median", "target (median)", ""}}
	t.row("restore to first answer (pool)", ms(f.restore.median()), ms(f.restore.quantile(1)), "start of Chromium to the same answer (once)", ms(f.opened),
		"≤ "+ms(1200*time.Millisecond), verdict(f.restore.median() <= 1200*time.Millisecond))
	t.row("pause of a snapshot", ms(f.pause.median()), ms(f.pause.quantile(1)), "copy of the image, synced", ms(f.copied.median()), "", "")
	t.note("The first answer is the text of the page, by the built-in tool: its counter has gone on, and its random id is the same. A restore reads and hashes the image first; reading it takes %s.", ms(f.read.median()))
	t.print()
	z := &table{title: "Sandbox: bytes of a snapshot of Chromium", head: []string{"image", "packed and sealed, first", "a further one after 2 s without action", "worst", "a further one after a navigation and a file of 5 MB", "worst", "packing took (median)", "target", ""}}
	z.row(mib(f.image), mib(f.first), mib(middle(f.still)), mib(slices.Max(f.still)), mib(middle(f.moved)), mib(slices.Max(f.moved)), ms(f.packed.median()),
		"≤ "+mib(pageTarget), verdict(slices.Max(f.still) <= pageTarget && slices.Max(f.moved) <= pageTarget))
	z.note("The first page holds 8 MB of random numbers; every page changes its text ten times a second. The file is of random bytes, which do not compress.")
	z.print()
	return nil
}

// middle is the median of some bytes.
func middle(v []int64) int64 {
	s := slices.Sorted(slices.Values(v))
	return s[len(s)/2]
}

func (b *bench) pages(ctx context.Context, x *boxes) (*pageFigures, error) {
	s, err := x.start(ctx, 0)
	if err != nil {
		return nil, err
	}
	f := &pageFigures{}
	start := time.Now()
	if _, err := x.call(ctx, s, "browser", map[string]any{"action": "open", "url": firstPage}); err != nil {
		if strings.Contains(err.Error(), "there is no Chromium") {
			return nil, errNoChromium
		}
		return nil, err
	}
	f.opened = time.Since(start)
	if _, err := x.call(ctx, s, "browser", map[string]any{"action": "type", "selector": "[name=q]", "text": "typed"}); err != nil {
		return nil, err
	}
	if err := pause(ctx, 2*time.Second); err != nil { // what a start does behind its first page
		return nil, err
	}
	m, err := b.pageBytes(ctx, x, s, f)
	if err != nil {
		return nil, err
	}
	if err := b.pageRestores(ctx, x, s, m, f); err != nil {
		return nil, err
	}
	of := &snapshotFigures{}
	if err := b.baselines(x, m, b.pick(5, 2), of); err != nil {
		return nil, err
	}
	f.copied, f.read = of.copied, of.read
	return f, x.r.DropImage(m.ID)
}

// pageBytes takes snapshots and packs each on top of the one before.
func (b *bench) pageBytes(ctx context.Context, x *boxes, s *sandbox.Sandbox, f *pageFigures) (*sandbox.Manifest, error) {
	key, err := newAESKey()
	if err != nil {
		return nil, err
	}
	var m *sandbox.Manifest
	var packed *sandbox.Packed
	further := func() (int64, error) {
		next, err := s.Snapshot(ctx)
		if err != nil {
			return 0, err
		}
		f.pause = append(f.pause, time.Duration(next.Took.Checkpoint)*time.Millisecond)
		start := time.Now()
		p, err := x.r.Pack(ctx, next, packed, key)
		if err != nil {
			return 0, err
		}
		if packed != nil {
			f.packed = append(f.packed, time.Since(start))
		}
		old := m
		m, packed = next, p
		if old != nil {
			err = x.r.DropImage(old.ID)
		}
		return p.Stored, err
	}
	if f.first, err = further(); err != nil {
		return nil, err
	}
	for i := range b.pick(4, 1) {
		if err := pause(ctx, 2*time.Second); err != nil {
			return nil, err
		}
		n, err := further()
		if err != nil {
			return nil, err
		}
		f.still = append(f.still, n)
		page := fmt.Sprintf(nextPage, i)
		if _, err := x.call(ctx, s, "browser", map[string]any{"action": "open", "url": page}); err != nil {
			return nil, err
		}
		if _, err := x.sh(ctx, s, fmt.Sprintf("head -c 5000000 /dev/urandom > file%d", i)); err != nil {
			return nil, err
		}
		if n, err = further(); err != nil {
			return nil, err
		}
		f.moved = append(f.moved, n)
	}
	f.image = m.Size()
	return m, nil
}

var pageState = regexp.MustCompile(`made=(\w+) n=(\d+)`)

// pageOf reads which page a sandbox shows.
func (x *boxes) pageOf(ctx context.Context, s *sandbox.Sandbox) (made string, err error) {
	text, err := x.call(ctx, s, "browser", map[string]any{"action": "read"})
	if err != nil {
		return "", err
	}
	got := pageState.FindStringSubmatch(text)
	if got == nil {
		return "", fmt.Errorf("the page has no state: %.300s", text)
	}
	return got[1], nil
}

// pageRestores brings the image back in place of its original, n times.
func (b *bench) pageRestores(ctx context.Context, x *boxes, s *sandbox.Sandbox, m *sandbox.Manifest, f *pageFigures) error {
	want, err := x.pageOf(ctx, s)
	if err != nil {
		return err
	}
	if err := s.Kill(ctx); err != nil {
		return err
	}
	for range b.pick(10, 2) {
		if err := x.r.Warm(ctx, sandbox.Spec{Limits: m.Limits}, 1); err != nil {
			return err
		}
		start := time.Now()
		c, _, err := x.r.Restore(ctx, m, sandbox.Spec{Workspace: m.Workspace, ID: m.Sandbox, Fence: 2, Limits: m.Limits})
		if err != nil {
			return err
		}
		made, err := x.pageOf(ctx, c)
		if err != nil {
			return err
		}
		f.restore = append(f.restore, time.Since(start))
		if made != want {
			return fmt.Errorf("the restored page is %q, want %q", made, want)
		}
		if err := c.Kill(ctx); err != nil {
			return err
		}
	}
	return nil
}
