package main

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/planaria/planaria/internal/effect"
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
	wasted      prometheus.Counter
	effects     *prometheus.CounterVec
	duplicated  prometheus.Counter
	contradicts prometheus.Counter
	stuck       prometheus.Counter
	modelTime   *prometheus.HistogramVec
	effectTime  *prometheus.HistogramVec
}

var _ session.Observer = (*telemetry)(nil)

// newTelemetry makes the registry, and the exporter of traces if the
// environment names one.
func newTelemetry(ctx context.Context, getenv func(string) string, log *slog.Logger) (*telemetry, error) {
	t := &telemetry{registry: prometheus.NewRegistry(), log: log}
	t.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	t.resumes = counters(t, "planaria_session_resumes_total", "Claims that took a session over whose former owner had not released it.", "result")
	t.resumeTime = histogram(t, "planaria_session_resume_duration_seconds", "Time from the claim to a rebuilt session.")
	t.wasted = counter(t, "planaria_wasted_tokens_total", "Tokens that a failure made us pay again.")
	t.effects = counters(t, "planaria_effects_total", "Effects by class and the state that they came to.", "class", "state")
	t.duplicated = counter(t, "planaria_effects_duplicated_total", "Irreversible effects that were attempted more than once; must be 0.")
	t.contradicts = counter(t, "planaria_effects_contradicted_total", "Evidence that disagrees with a settlement.")
	t.stuck = counter(t, "planaria_sessions_stuck_total", "Drivers that the watchdog cancelled.")
	t.modelTime = histograms(t, "planaria_model_request_duration_seconds", "Time of model requests.", "result")
	t.effectTime = histograms(t, "planaria_effect_duration_seconds", "Time from the send of an effect to its answer.", "class")
	for _, class := range []store.Class{store.ClassRead, store.ClassIdempotent, store.ClassMixed, store.ClassIrreversible} {
		t.effects.WithLabelValues(string(class), string(store.StateCompleted)) // so that a rate has a beginning
	}
	t.resumes.WithLabelValues("ok")
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
