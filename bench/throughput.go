package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/store"
)

// benchThroughput measures effects per second with all projections, beside the
// same rows, bytes and indexes written by a bare group committer.
func benchThroughput(ctx context.Context, b *bench) error {
	t := &table{title: "Durable effects per second (3 commits each, all projections)",
		head: []string{"store", "sessions", "effects/s", "effect median", "effect p99", "bare group commit, effects/s", "share", "CPU an effect", "of the baseline"}}
	ok := true
	run := func(engine string, url func() (string, error)) error {
		for _, n := range []int{1, 64, 1000} {
			u, err := url()
			if err != nil {
				return err
			}
			share, err := b.throughput(ctx, t, engine, u, n)
			if err != nil {
				return fmt.Errorf("%s, %d sessions: %w", engine, n, err)
			}
			ok = ok && (n == 1 || share >= 0.7)
		}
		return nil
	}
	if b.engine != "postgres" {
		if err := run("SQLite", func() (string, error) { return "", nil }); err != nil {
			return err
		}
	}
	if b.engine != "sqlite" {
		switch pg, err := startPostgres(b.dir); {
		case errors.Is(err, errNoPostgres):
			t.note("PostgreSQL: not measured, the machine has none.")
		case err != nil:
			return err
		default:
			defer pg.stop()
			if err := run("PostgreSQL", func() (string, error) { return pg.database(ctx) }); err != nil {
				return err
			}
		}
	}
	t.note("Target: at least 70 %% of the baseline at 64 and 1,000 sessions: %s.", verdict(ok))
	t.print()
	return nil
}

// throughput measures one number of sessions on one store, in turns with its
// baseline, and returns the share.
func (b *bench) throughput(ctx context.Context, t *table, engine, url string, n int) (float64, error) {
	dir, err := b.folder("throughput")
	if err != nil {
		return 0, err
	}
	o, err := open(ctx, filepath.Join(dir, "data"), url)
	if err != nil {
		return 0, err
	}
	defer o.close()
	leases, err := claimable(ctx, o, n)
	if err != nil {
		return 0, err
	}
	p := &protocol{o.db, effect.New(o.db, effect.Config{})}
	if err := p.one(ctx, leases[0], leases[0].Claimed().Thread); err != nil {
		return 0, err
	}
	raw, err := newRaw(ctx, o.url, dir, leases)
	if err != nil {
		return 0, err
	}
	defer raw.close()
	turn := time.Duration(b.pick(4000, 500)) * time.Millisecond
	var ours, base rate
	for range b.pick(3, 1) {
		err := ours.add(ctx, turn, n, func(ctx context.Context, i int) error {
			return p.one(ctx, leases[i], leases[i].Claimed().Thread)
		})
		if err == nil {
			err = base.add(ctx, turn, n, raw.one)
		}
		if err != nil {
			return 0, err
		}
	}
	share := ours.perSecond() / base.perSecond()
	t.row(engine, count(float64(n)), count(ours.perSecond()), ms(ours.each.median()), ms(ours.each.p99()),
		count(base.perSecond()), percent(ours.perSecond(), base.perSecond()), micro(ours.cpuEach()), micro(base.cpuEach()))
	return share, nil
}

// rate counts what n workers did.
type rate struct {
	done    int64
	elapsed time.Duration
	cpu     time.Duration // of this process; a server's is not in it
	each    sample
}

func (r *rate) perSecond() float64 { return float64(r.done) / r.elapsed.Seconds() }

// cpuEach is the CPU time of one.
func (r *rate) cpuEach() time.Duration { return r.cpu / time.Duration(max(r.done, 1)) }

func micro(d time.Duration) string { return fmt.Sprintf("%d µs", d.Microseconds()) }

// add lets n workers repeat f for a time.
func (r *rate) add(ctx context.Context, d time.Duration, n int, f func(ctx context.Context, i int) error) error {
	start, used := time.Now(), cpuTime()
	var mu sync.Mutex
	var done atomic.Int64
	err := each(n, func(i int) error {
		var mine sample
		for time.Since(start) < d {
			begin := time.Now()
			if err := f(ctx, i); err != nil {
				return err
			}
			mine = append(mine, time.Since(begin))
			done.Add(1)
		}
		mu.Lock()
		defer mu.Unlock()
		r.each = append(r.each, mine...)
		return nil
	})
	r.elapsed += time.Since(start)
	r.cpu += cpuTime() - used
	r.done += done.Load()
	return err
}

// raw writes the rows of effects without the protocol: no fence, no hash, no
// seal, no fold. It gathers what all workers have ready into one transaction,
// as the store does, with the same three commits for one effect.
type raw struct {
	write    func(ctx context.Context, batch []*rawAppend) error
	template rawTemplate
	seqs     []int64 // head by session
	sessions []*store.Lease
	count    atomic.Int64
	queue    chan *rawAppend
	done     chan struct{}
	closers  []func()
}

// rawAppend is one of the three writes of one effect.
type rawAppend struct {
	session string
	head    int64
	log     [][]any
	effect  []any // the whole row
	fresh   bool
	err     chan error
}

// rawTemplate is one real effect as the store wrote it.
type rawTemplate struct {
	logs   [][]any // columns of log
	effect []any   // columns of effects
}

// The columns of the two tables, in the order of rawTemplate.
const (
	rawLogColumns = `workspace, session, seq, kind, type, id, thread, at, fence, key_id, salt, body, blob, hash`
	rawEffColumns = `workspace, session, id, lineage, thread, tool, server, connector, class, state, outcome, flags, event, digest, near, idem_key,
 first_seq, intent_seq, attempt_seqs, attempt_fence, send_by, end_seq, evidence_seqs, created_at, updated_at`
)

// Places in those columns.
const (
	logSession, logSeq, logID     = 1, 2, 5
	effSession, effID, effDigest  = 1, 2, 13
	rawSeed                       = 1 << 40 // seqs of the baseline, where both share a table
	intentRows, attemptRows, rows = 2, 1, 5
)

// one writes the rows of one effect in three commits.
func (r *raw) one(ctx context.Context, i int) error {
	id := fmt.Sprintf("eff_%026d", r.count.Add(1))
	logs := make([][]any, rows)
	for k, src := range r.template.logs {
		row := append([]any(nil), src...)
		r.seqs[i]++
		row[logSession], row[logSeq] = string(r.sessions[i].Session()), r.seqs[i]
		row[logID] = id
		logs[k] = row
	}
	eff := append([]any(nil), r.template.effect...)
	eff[effSession], eff[effID], eff[effDigest] = string(r.sessions[i].Session()), id, digestOf(store.EffectID(id))
	from := 0
	for _, n := range []int{intentRows, attemptRows, rows - intentRows - attemptRows} {
		a := &rawAppend{session: string(r.sessions[i].Session()), head: r.seqs[i], log: logs[from : from+n],
			effect: eff, fresh: from == 0, err: make(chan error, 1)}
		from += n
		select {
		case r.queue <- a:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := <-a.err; err != nil {
			return err
		}
	}
	return nil
}

// run commits what is queued, all of it at once.
func (r *raw) run(ctx context.Context) {
	defer close(r.done)
	for a := range r.queue {
		batch := []*rawAppend{a}
	gather:
		for len(batch) < store.MaxBatch {
			select {
			case more, ok := <-r.queue:
				if !ok {
					break gather
				}
				batch = append(batch, more)
			default:
				break gather
			}
		}
		err := r.write(ctx, batch)
		for _, a := range batch {
			a.err <- err
		}
	}
}

func (r *raw) close() {
	close(r.queue)
	<-r.done
	for i := len(r.closers) - 1; i >= 0; i-- {
		r.closers[i]()
	}
}

// newRaw prepares the baseline: SQLite on a copy of the database, PostgreSQL
// in the same one.
func newRaw(ctx context.Context, url, dir string, leases []*store.Lease) (*raw, error) {
	r := &raw{sessions: leases, seqs: make([]int64, len(leases)), queue: make(chan *rawAppend, store.MaxBatch), done: make(chan struct{})}
	for i := range r.seqs {
		r.seqs[i] = rawSeed
	}
	var err error
	if isPostgres(url) {
		err = r.postgres(ctx, url)
	} else {
		err = r.sqlite(ctx, url, filepath.Join(dir, "raw.db"))
	}
	if err != nil {
		return nil, err
	}
	go r.run(ctx)
	return r, nil
}

// scanAll reads the rows of a query as they are.
func scanAll(ctx context.Context, db *sql.DB, query string, args ...any) (out [][]any, err error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	for rows.Next() {
		values, into := make([]any, len(columns)), make([]any, len(columns))
		for i := range values {
			into[i] = &values[i]
		}
		if err := rows.Scan(into...); err != nil {
			return nil, err
		}
		out = append(out, values)
	}
	return out, rows.Err()
}

// learn reads the one effect that the first session holds.
func (r *raw) learn(ctx context.Context, db *sql.DB, mark func(int) string) error {
	first := string(r.sessions[0].Session())
	logs, err := scanAll(ctx, db, `SELECT `+rawLogColumns+` FROM log WHERE session = `+mark(1)+` ORDER BY seq DESC LIMIT 5`, first)
	if err != nil {
		return err
	}
	effects, err := scanAll(ctx, db, `SELECT `+rawEffColumns+` FROM effects WHERE session = `+mark(1), first)
	if err != nil {
		return err
	}
	if len(logs) != rows || len(effects) != 1 {
		return fmt.Errorf("a template of %d entries and %d effects, want %d and 1", len(logs), len(effects), rows)
	}
	r.template = rawTemplate{logs: logs, effect: effects[0]}
	return nil
}
