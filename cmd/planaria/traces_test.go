package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/planaria/planaria/internal/store"
)

func newTestTraces() (*traces, *tracetest.InMemoryExporter) {
	out := tracetest.NewInMemoryExporter()
	t := &traces{runs: map[store.SessionID]store.Fence{}}
	t.use(sdktrace.NewTracerProvider(sdktrace.WithSyncer(out), sdktrace.WithIDGenerator(runIDs{})))
	return t, out
}

// TestResumedRunIsALinkedTrace: a session that another process resumes gets a
// trace of its own, linked to the former one, though nothing is shared.
func TestResumedRunIsALinkedTrace(t *testing.T) {
	s := store.Session{ID: "sesn_1", Fence: 1}
	before, first := newTestTraces()
	before.step(s, "m", time.Second, nil)
	after, second := newTestTraces()
	s.Fence = 2
	after.resumed(s, "ok", time.Millisecond)
	after.step(s, "m", time.Second, nil)
	after.effect(store.Effect{Session: s.ID, Tool: "delete_database", ID: "eff_1", Class: store.ClassIrreversible}, "in_doubt", time.Second)

	a, b := first.GetSpans(), second.GetSpans()
	if len(a) != 2 || len(b) != 4 {
		t.Fatalf("got %d and %d spans, want 2 and 4", len(a), len(b))
	}
	root, former := b[0], a[0]
	if root.Name != spanAgent || former.Name != spanAgent {
		t.Fatalf("the first spans are %q and %q, want %q", former.Name, root.Name, spanAgent)
	}
	if len(root.Links) != 1 || root.Links[0].SpanContext.TraceID() != former.SpanContext.TraceID() || root.Links[0].SpanContext.SpanID() != former.SpanContext.SpanID() {
		t.Errorf("the resumed run links to %v, want %v", root.Links, former.SpanContext)
	}
	if len(former.Links) != 0 {
		t.Errorf("the first run has links: %v", former.Links)
	}
	for _, span := range b[1:] {
		if span.SpanContext.TraceID() != root.SpanContext.TraceID() || span.Parent.SpanID() != root.SpanContext.SpanID() {
			t.Errorf("span %q does not hang below its run", span.Name)
		}
	}
}

// TestTracesCarryNoContent: neither texts of errors nor arguments leave.
func TestTracesCarryNoContent(t *testing.T) {
	tr, out := newTestTraces()
	tr.step(store.Session{ID: "sesn_1", Fence: 1}, "m", time.Second, errors.New("the secret is sesame"))
	for _, s := range out.GetSpans() {
		text := s.Name + s.Status.Description
		for _, a := range s.Attributes {
			text += a.Value.String()
		}
		if strings.Contains(text, "sesame") {
			t.Errorf("span %q carries the text of an error: %s", s.Name, text)
		}
	}
}

// TestNoEndpointNoTraces: without a variable nothing is exported.
func TestNoEndpointNoTraces(t *testing.T) {
	tr, err := newTraces(context.Background(), func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	tr.step(store.Session{ID: "sesn_1", Fence: 1}, "m", time.Second, nil)
	tr.effect(store.Effect{}, "ok", time.Second)
	if tr.provider != nil || len(tr.runs) > 0 {
		t.Error("traces are kept without an endpoint")
	}
	if err := tr.close(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestExport: with the standard variable set, spans arrive by OTLP over HTTP.
func TestExport(t *testing.T) {
	var got atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost && r.URL.Path == "/v1/traces" {
			got.Add(1)
		}
	}))
	defer srv.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", srv.URL)
	tr, err := newTraces(t.Context(), os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	tr.step(store.Session{ID: "sesn_1", Fence: 1}, "m", time.Second, nil)
	if err := tr.close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got.Load() != 1 {
		t.Errorf("%d exports arrived, want 1", got.Load())
	}
}
