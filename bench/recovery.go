package main

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// benchRecovery measures how long a session takes from its claim to the first
// new entry, by the length of its log, beside reading that log.
func benchRecovery(ctx context.Context, b *bench) error {
	t := &table{title: "Recovery: from claim to the first new entry (SQLite)",
		head: []string{"entries", "compacted", "recovery median", "worst", "reading and verifying the whole log", "ratio"}}
	w, err := newWorld("act", 3, 0)
	if err != nil {
		return err
	}
	defer w.close()
	dir, err := b.folder("recovery")
	if err != nil {
		return err
	}
	sys, err := openSystem(ctx, filepath.Join(dir, "data"), w.rules())
	if err != nil {
		return err
	}
	defer sys.close()
	if err := connect(ctx, sys.db, w.mcpURL); err != nil {
		return err
	}
	turn, err := templateTurn(ctx, sys)
	if err != nil {
		return err
	}
	var at10k time.Duration
	var compacted sample
	for _, n := range []int{100, 1000, 10_000, b.pick(100_000, 10_000)} {
		for _, small := range []bool{false, true} {
			r, err := b.recovery(ctx, sys, turn, n, small)
			if err != nil {
				return fmt.Errorf("%d entries: %w", n, err)
			}
			yes := "no"
			if small {
				yes = "yes"
				compacted = append(compacted, r.ours.median())
			}
			if n == 10_000 {
				at10k = max(at10k, r.ours.median())
			}
			t.row(count(float64(r.entries)), yes, ms(r.ours.median()), ms(r.ours.quantile(1)), ms(r.read.median()), ratio(r.ours.median(), r.read.median()))
		}
		if b.quick && n == 10_000 {
			break
		}
	}
	t.note("Logs are made of copies of one real turn (%d entries) under fresh ids. A compacted session was compacted by its own driver.", len(turn.drafts))
	t.note("Target: at most 150 ms at 10,000 entries: %s; flat when compacted (longest against shortest at most 3 ×): %s.",
		verdict(at10k <= 150*time.Millisecond), verdict(compacted[len(compacted)-1] <= 3*compacted[0]))
	t.print()
	return nil
}

// turnTemplate is the entries of one real turn.
type turnTemplate struct {
	session string
	thread  string
	drafts  []store.Draft
	ids     []string // all ids in them
}

var idForm = regexp.MustCompile(`\b(?:sevt|eff|rec|toolu|msg)_[0-9A-Za-z]{16,}`)

// templateTurn lets a session run one turn and reads its entries back.
func templateTurn(ctx context.Context, sys *system) (*turnTemplate, error) {
	s, err := sys.create(ctx, agentOf("template", "scripted", "planaria:world"), "[s0]")
	if err != nil {
		return nil, err
	}
	if err := sys.idle(ctx, s.ID, 0); err != nil {
		return nil, err
	}
	entries, err := sys.db.Entries(ctx, workspace, s.ID, store.Range{})
	if err != nil {
		return nil, err
	}
	t := &turnTemplate{session: string(s.ID), thread: string(s.Thread)}
	seen := map[string]bool{}
	for _, e := range entries {
		if e.Kind == store.KindCreated || e.Kind == store.KindClaim {
			continue
		}
		t.drafts = append(t.drafts, e.Draft)
		for _, id := range append(idForm.FindAllString(string(e.Body), -1), e.ID) {
			if !seen[id] {
				seen[id] = true
				t.ids = append(t.ids, id)
			}
		}
	}
	return t, nil
}

// copy returns the turn's drafts for another session under fresh ids.
func (t *turnTemplate) copy(now time.Time, thread store.ThreadID) []store.Draft {
	pairs := []string{t.thread, string(thread)}
	for _, id := range t.ids {
		prefix, _, _ := strings.Cut(id, "_")
		pairs = append(pairs, id, store.NewID(prefix+"_", now))
	}
	r := strings.NewReplacer(pairs...)
	out := make([]store.Draft, len(t.drafts))
	for i, d := range t.drafts {
		out[i] = store.Draft{Kind: d.Kind, Type: d.Type, ID: r.Replace(d.ID), Thread: store.ThreadID(r.Replace(string(d.Thread))), Body: []byte(r.Replace(string(d.Body)))}
	}
	return out
}

// recovered is one row.
type recovered struct {
	entries int
	ours    sample
	read    sample
}

// recovery fills a session's log, lets its driver compact it where wanted, and
// then wakes it some times.
func (b *bench) recovery(ctx context.Context, sys *system, turn *turnTemplate, n int, small bool) (recovered, error) {
	model := "scripted"
	if small {
		model = "scripted-small"
	}
	// The manager must not drive the session while it is filled: it begins
	// without work, and rows are appended as nobody's.
	s, err := sys.create(ctx, agentOf("recovery", model, "planaria:world"), "")
	if err != nil {
		return recovered{}, err
	}
	now := sys.db.Now()
	for filled := 1; filled < n; {
		var drafts []store.Draft
		for len(drafts) < min(4000, n-filled) {
			drafts = append(drafts, turn.copy(now, s.Thread)...)
		}
		if _, err := sys.db.AppendUnowned(ctx, workspace, s.ID, store.Append{Entries: drafts}, nil); err != nil {
			return recovered{}, fmt.Errorf("fill: %w", err)
		}
		filled += len(drafts) + 1
	}
	if small { // the first turn compacts
		if _, _, err := wakeUp(ctx, sys, s.ID); err != nil {
			return recovered{}, fmt.Errorf("compact: %w", err)
		}
	}
	var r recovered
	for range b.pick(7, 3) {
		before, took, err := wakeUp(ctx, sys, s.ID)
		if err != nil {
			return recovered{}, err
		}
		if r.entries == 0 {
			r.entries = int(before.Head)
			if small != (before.Compacted > 0) {
				return recovered{}, fmt.Errorf("compacted at %d, wanted compacted: %t", before.Compacted, small)
			}
		}
		r.ours = append(r.ours, took)
	}
	for range 3 {
		start := time.Now()
		if _, err := sys.db.Entries(ctx, workspace, s.ID, store.Range{}); err != nil {
			return recovered{}, err
		}
		r.read = append(r.read, time.Since(start))
	}
	return r, nil
}

// wakeUp sends a message to a session at rest and measures from the moment its
// claim is durable to the moment its first new entry is. It returns the row
// from before, and leaves the session at rest again.
func wakeUp(ctx context.Context, sys *system, id store.SessionID) (before store.Session, took time.Duration, err error) {
	if before, err = sys.db.Session(ctx, workspace, id); err != nil {
		return before, 0, err
	}
	f, err := sys.db.Follow(ctx, workspace, id, before.Head)
	if err != nil {
		return before, 0, err
	}
	defer f.Close()
	if _, err := sys.db.Deliver(ctx, workspace, id, []store.Delivery{messageFor(sys.db, "[s0]")}, nil); err != nil {
		return before, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, idleTimeout)
	defer cancel()
	var claimed time.Time
	for {
		items, err := f.Next(ctx)
		if err != nil {
			return before, 0, err
		}
		for _, it := range items {
			switch {
			case it.Entry == nil:
			case it.Entry.Kind == store.KindClaim:
				claimed = time.Now()
			case took == 0:
				took = time.Since(claimed)
			}
			if it.Entry != nil && it.Entry.Type == "session.status_idle" {
				return before, took, restedWell(it.Entry)
			}
		}
	}
}

func restedWell(e *store.Entry) error {
	var body struct {
		StopReason struct {
			Type string `json:"type"`
		} `json:"stop_reason"`
	}
	if err := json.Unmarshal(e.Body, &body); err != nil {
		return err
	}
	if body.StopReason.Type != "end_turn" {
		return fmt.Errorf("the session rests with %s", body.StopReason.Type)
	}
	return nil
}
