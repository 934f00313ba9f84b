package main

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

// telemetry makes metrics and traces of what the rooms observe. Metrics carry
// neither tenants nor sessions as labels; traces carry ids, never content.
type telemetry struct {
	registry *prometheus.Registry
	log      *slog.Logger
	traces   *traces

	resumes     *prometheus.CounterVec
	resumeTime  prometheus.Histogram
	lostWork    prometheus.Histogram
	wasted      prometheus.Counter
	resets      prometheus.Counter
	effects     *prometheus.CounterVec
	duplicated  prometheus.Counter
	contradicts prometheus.Counter
	stuck       prometheus.Counter
	modelTime   *prometheus.HistogramVec
	effectTime  *prometheus.HistogramVec
	snapshots   *prometheus.CounterVec
	snapPause   prometheus.Histogram
	snapTime    prometheus.Histogram
	verified    *prometheus.CounterVec
	packed      prometheus.Counter
}

var _ session.Observer = (*telemetry)(nil)

// newTelemetry makes the registry, and the exporter of traces if the
// environment names one.
func newTelemetry(ctx context.Context, getenv func(string) string, log *slog.Logger) (*telemetry, error) {
	t := &telemetry{registry: prometheus.NewRegistry(), log: log}
	t.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	t.resumes = counters(t, "planaria_session_resumes_total", "Claims that took a session over whose former owner had not released it.", "result")
	t.resumeTime = histogram(t, "planaria_session_resume_duration_seconds", "Time from the claim to a rebuilt session.")
	t.lostWork = histogram(t, "planaria_session_lost_work_seconds", "Time from the last entry of an owner that was lost to the next claim: an upper bound of the work that was lost.")
	t.resets = counter(t, "planaria_stream_resets_total", "Streams whose cursor was unknown.")
	t.wasted = counter(t, "planaria_wasted_tokens_total", "Tokens that a failure made us pay again.")
	t.effects = counters(t, "planaria_effects_total", "Effects by class and the state that they came to.", "class", "state")
	t.duplicated = counter(t, "planaria_effects_duplicated_total", "Irreversible effects that were attempted more than once; must be 0.")
	t.contradicts = counter(t, "planaria_effects_contradicted_total", "Evidence that disagrees with a settlement.")
	t.stuck = counter(t, "planaria_sessions_stuck_total", "Drivers that the watchdog cancelled.")
	t.modelTime = histograms(t, "planaria_model_request_duration_seconds", "Time of model requests.", "result")
	t.effectTime = histograms(t, "planaria_effect_duration_seconds", "Time from the send of an effect to its answer.", "class")
	t.snapshots = counters(t, "planaria_sandbox_snapshots_total", "Snapshots of sandboxes that were tried; a failed one is a missing checkpoint.", "why", "result")
	t.snapPause = histogram(t, "planaria_sandbox_snapshot_pause_seconds", "Time that a sandbox stood still for a snapshot.")
	t.snapTime = histogram(t, "planaria_sandbox_snapshot_duration_seconds", "Time from the begin of a snapshot until it was verified and logged.")
	t.verified = counters(t, "planaria_sandbox_restore_verifications_total", "Snapshots that were restored as a test, or rebuilt from the blob store.", "result")
	t.packed = counter(t, "planaria_sandbox_snapshot_stored_bytes_total", "Bytes that packed snapshots added to the blob store.")
	for _, result := range []string{"ok", "failed"} {
		t.verified.WithLabelValues(result)
		for _, why := range []string{"step", "turn", "interval", "commit", "suspend", "manual"} {
			t.snapshots.WithLabelValues(why, result)
		}
	}
	for _, class := range []store.Class{store.ClassRead, store.ClassIdempotent, store.ClassMixed, store.ClassIrreversible} {
		t.effects.WithLabelValues(string(class), string(store.StateCompleted)) // so that a rate has a beginning
	}
	t.resumes.WithLabelValues("ok")
	t.resumes.WithLabelValues("failed")
	var err error
	t.traces, err = newTraces(ctx, getenv)
	return t, err
}

func counter(t *telemetry, name, help string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	t.registry.MustRegister(c)
	return c
}

func counters(t *telemetry, name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	t.registry.MustRegister(c)
	return c
}

// buckets reach from a loopback call to the longest deadline of one.
var buckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 600}

func histogram(t *telemetry, name, help string) prometheus.Histogram {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
	t.registry.MustRegister(h)
	return h
}

func histograms(t *telemetry, name, help string, labels ...string) *prometheus.HistogramVec {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	t.registry.MustRegister(h)
	return h
}

// handler answers GET /metrics.
func (t *telemetry) handler() http.Handler {
	return promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{ErrorLog: slog.NewLogLogger(t.log.Handler(), slog.LevelWarn)})
}

// close sends what is left of the traces.
func (t *telemetry) close(ctx context.Context) {
	if err := t.traces.close(ctx); err != nil {
		t.log.Warn("cannot export the last traces", "err", err)
	}
}

// Resumed implements session.Observer.
func (t *telemetry) Resumed(s store.Session, result string, elapsed time.Duration) {
	t.resumes.WithLabelValues(result).Inc()
	t.resumeTime.Observe(elapsed.Seconds())
	t.traces.resumed(s, result, elapsed)
}

// Lost implements session.Observer.
func (t *telemetry) Lost(_ store.Session, silent time.Duration) { t.lostWork.Observe(silent.Seconds()) }

// Reset is told of every stream whose cursor was unknown.
func (t *telemetry) Reset() { t.resets.Inc() }

// Step implements session.Observer.
func (t *telemetry) Step(s store.Session, model string, elapsed time.Duration, err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	t.modelTime.WithLabelValues(result).Observe(elapsed.Seconds())
	t.traces.step(s, model, elapsed, err)
}

// Wasted implements session.Observer.
func (t *telemetry) Wasted(tokens int64) { t.wasted.Add(float64(tokens)) }

// Stuck implements session.Observer.
func (t *telemetry) Stuck(store.Session) { t.stuck.Inc() }

// Saved implements session.Observer.
func (t *telemetry) Saved(_ store.Session, why string, pause, elapsed time.Duration, err error) {
	t.snapshots.WithLabelValues(why, resultOf(err)).Inc()
	if err == nil {
		t.snapPause.Observe(pause.Seconds())
		t.snapTime.Observe(elapsed.Seconds())
	}
}

// Kept implements session.Observer.
func (t *telemetry) Kept(act string, bytes int64, _ time.Duration, err error) {
	if act == "packed" {
		t.packed.Add(float64(bytes))
		return
	}
	t.verified.WithLabelValues(resultOf(err)).Inc()
}

func resultOf(err error) string {
	if err != nil {
		return "failed"
	}
	return "ok"
}

// machines adds the gauge of the sandboxes that live on this node.
func (t *telemetry) machines(r *sandbox.Runtime) {
	t.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "planaria_sandboxes", Help: "Sandboxes of this node.", ConstLabels: prometheus.Labels{"state": "running"},
	}, func() float64 { return float64(len(r.Live())) }))
}

// Ended is told of every effect that the keeper ended.
func (t *telemetry) Ended(e store.Effect, v effect.Verdict, elapsed time.Duration) {
	state := store.StateCompleted
	if v == effect.InDoubt {
		state = store.StateInDoubt
	}
	t.effects.WithLabelValues(string(e.Class), string(state)).Inc()
	t.effectTime.WithLabelValues(string(e.Class)).Observe(elapsed.Seconds())
	if e.Attempts > 1 && (e.Class == store.ClassIrreversible || e.Class == store.ClassMixed) {
		t.duplicated.Inc()
		t.log.Error("an irreversible effect was attempted twice", "effect", e.ID, "session", e.Session)
	}
	t.traces.effect(e, string(v), elapsed)
}

// Settled is told of every effect that ended without a send.
func (t *telemetry) Settled(e store.Effect, state store.EffectState) {
	t.effects.WithLabelValues(string(e.Class), string(state)).Inc()
}

// Contradicted is told of evidence that disagrees with a settlement.
func (t *telemetry) Contradicted(e store.Effect) {
	t.contradicts.Inc()
	t.log.Error("evidence contradicts the settlement of an effect", "effect", e.ID, "session", e.Session)
}

// Times of the gauges.
const (
	// stuckAfter is for how long a session that should do something may be silent.
	stuckAfter = 10 * time.Minute
	// gaugeTime bounds the counting of one scrape.
	gaugeTime = 5 * time.Second
)

// gauges counts in the store when it is scraped.
type gauges struct {
	db  *store.DB
	log *slog.Logger

	sessions, stuck, damaged, doubt, age *prometheus.Desc

	detection prometheus.Histogram
	started   time.Time

	mu   sync.Mutex
	dead map[store.NodeID]bool // guarded by mu: deaths that were counted
}

// watch adds the gauges that the store knows.
func (t *telemetry) watch(db *store.DB) {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	t.registry.MustRegister(&gauges{db: db, log: t.log, started: db.Now(), dead: map[store.NodeID]bool{},
		detection: histogram(t, "planaria_lease_detection_seconds", "Time from the last renewal of a lost node's lease to its detection."),
		sessions:  desc("planaria_sessions", "Sessions by status.", "state"),
		stuck:     desc("planaria_sessions_stuck", "Sessions that should do something and have been silent for ten minutes."),
		damaged:   desc("planaria_sessions_damaged", "Sessions whose log is refused."),
		doubt:     desc("planaria_effects_in_doubt", "Effects in doubt."),
		age:       desc("planaria_effect_in_doubt_age_seconds", "Age of the oldest effect in doubt; 0 when there is none."),
	})
}

// Describe implements prometheus.Collector.
func (g *gauges) Describe(c chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{g.sessions, g.stuck, g.damaged, g.doubt, g.age} {
		c <- d
	}
}

// Collect implements prometheus.Collector. When the store does not answer, the
// gauges are missing, which an alarm can see; no number is invented.
func (g *gauges) Collect(c chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), gaugeTime)
	defer cancel()
	n, err := g.db.Gauges(ctx, stuckAfter)
	if err != nil {
		g.log.Warn("cannot count for metrics", "err", err)
		return
	}
	add := func(d *prometheus.Desc, v float64, labels ...string) {
		c <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for status, count := range n.Sessions {
		add(g.sessions, float64(count), string(status))
	}
	add(g.stuck, float64(n.Stuck))
	add(g.damaged, float64(n.Damaged))
	add(g.doubt, float64(n.InDoubt))
	age := 0.0
	if !n.OldestDoubt.IsZero() {
		age = g.db.Now().Sub(n.OldestDoubt).Seconds()
	}
	add(g.age, age)
	g.deaths(ctx)
}

// maxNodes bounds the nodes that are looked at for deaths.
const maxNodes = 200

// deaths observes the nodes that were found dead since we started. On a store
// in a file there are none: the folder's lock tells at once.
func (g *gauges) deaths(ctx context.Context) {
	nodes, err := g.db.Nodes(ctx, maxNodes)
	if err != nil {
		g.log.Warn("cannot look at nodes for metrics", "err", err)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, n := range nodes {
		renewed := n.Until.Add(-store.LeaseTTL)
		if n.DeadAt.Before(g.started) || !n.LeftAt.IsZero() || g.dead[n.ID] || renewed.After(n.DeadAt) {
			continue
		}
		g.dead[n.ID] = true
		g.detection.Observe(n.DeadAt.Sub(renewed).Seconds())
	}
}
