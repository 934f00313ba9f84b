package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/planaria/planaria/internal/store"
)

// Names of spans and attributes: the GenAI conventions of OpenTelemetry where
// they have a name, ours else. This is the one table of them.
const (
	spanAgent  = "invoke_agent"
	spanModel  = "chat"
	spanTool   = "execute_tool"
	spanResume = "resume"

	attrOperation = attribute.Key("gen_ai.operation.name")

	attrAgentID      = attribute.Key("gen_ai.agent.id")
	attrConversation = attribute.Key("gen_ai.conversation.id")
	attrModel        = attribute.Key("gen_ai.request.model")
	attrTool         = attribute.Key("gen_ai.tool.name")
	attrToolCall     = attribute.Key("gen_ai.tool.call.id")
	attrErrorType    = attribute.Key("error.type")
	attrEffect       = attribute.Key("planaria.effect.id")
	attrClass        = attribute.Key("planaria.effect.class")
	attrVerdict      = attribute.Key("planaria.effect.outcome")
	attrFence        = attribute.Key("planaria.session.fence")
)

// traces exports spans by OTLP over HTTP when the environment names an
// endpoint, and does nothing else. Each claim of a session is one trace. Its id
// follows from session and fence, so that the trace of a resumed run links to
// the former one though the process that wrote that is gone.
type traces struct {
	provider *sdktrace.TracerProvider // nil: nothing is exported
	tracer   trace.Tracer

	mu   sync.Mutex
	runs map[store.SessionID]store.Fence // guarded by mu: the newest claim that has a root span
}

// maxRuns bounds the memory of runs; beyond it it begins anew, at the price of
// a root span that is exported twice.
const maxRuns = 100_000

// newTraces reads the standard variables of OpenTelemetry.
func newTraces(ctx context.Context, getenv func(string) string) (*traces, error) {
	t := &traces{runs: map[store.SessionID]store.Fence{}}
	if getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" && getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" {
		return t, nil
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("export traces: %w", err)
	}
	res, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", "planaria"),
		attribute.String("service.version", version)), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("export traces: %w", err)
	}
	t.use(sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res), sdktrace.WithIDGenerator(runIDs{})))
	return t, nil
}

func (t *traces) use(p *sdktrace.TracerProvider) {
	t.provider, t.tracer = p, p.Tracer("github.com/planaria/planaria")
}

// close exports what is left.
func (t *traces) close(ctx context.Context) error {
	if t.provider == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	return t.provider.Shutdown(ctx)
}

// resumed is the recovery of a session whose owner was gone.
func (t *traces) resumed(s store.Session, result string, elapsed time.Duration) {
	if t.provider == nil {
		return
	}
	_, span := t.start(t.run(s, elapsed), spanResume, elapsed, attrConversation.String(string(s.ID)), attrFence.Int64(int64(s.Fence)))
	if result != "ok" {
		span.SetStatus(codes.Error, result)
	}
	span.End()
}

// step is one model request.
func (t *traces) step(s store.Session, model string, elapsed time.Duration, err error) {
	if t.provider == nil {
		return
	}
	_, span := t.start(t.run(s, elapsed), spanModel+" "+model, elapsed, attrOperation.String(spanModel),
		attrModel.String(model), attrConversation.String(string(s.ID)))
	if err != nil {
		// The text of an error may hold content; its type does not.
		span.SetStatus(codes.Error, "")
		span.SetAttributes(attrErrorType.String(strings.TrimPrefix(fmt.Sprintf("%T", err), "*")))
	}
	span.End()
}

// effect is one call that left.
func (t *traces) effect(e store.Effect, verdict string, elapsed time.Duration) {
	if t.provider == nil {
		return
	}
	t.mu.Lock()
	fence := t.runs[e.Session]
	t.mu.Unlock()
	_, span := t.start(runContext(e.Session, max(fence, e.AttemptFence)), spanTool+" "+e.Tool, elapsed, attrOperation.String(spanTool),
		attrTool.String(e.Tool), attrToolCall.String(string(e.Event)), attrConversation.String(string(e.Session)),
		attrEffect.String(string(e.ID)), attrClass.String(string(e.Class)), attrVerdict.String(verdict))
	if verdict == "in_doubt" {
		span.SetStatus(codes.Error, verdict)
	}
	span.End()
}

// start begins a span that has just ended.
func (t *traces) start(ctx context.Context, name string, elapsed time.Duration, attrs ...attribute.KeyValue) (context.Context, trace.Span) {
	return t.tracer.Start(ctx, name, trace.WithTimestamp(time.Now().Add(-elapsed)), trace.WithAttributes(attrs...),
		trace.WithSpanKind(trace.SpanKindInternal))
}

// run is the context of a claim's root span, which is exported at its first
// use: what follows hangs below it. It links to the claim before.
func (t *traces) run(s store.Session, elapsed time.Duration) context.Context {
	t.mu.Lock()
	known := t.runs[s.ID] == s.Fence
	if len(t.runs) >= maxRuns {
		clear(t.runs)
	}
	t.runs[s.ID] = s.Fence
	t.mu.Unlock()
	if !known {
		opts := []trace.SpanStartOption{trace.WithNewRoot(), trace.WithTimestamp(time.Now().Add(-elapsed)), trace.WithAttributes(
			attrOperation.String(spanAgent), attrConversation.String(string(s.ID)), attrFence.Int64(int64(s.Fence)))}
		if s.Fence > 1 {
			opts = append(opts, trace.WithLinks(trace.Link{SpanContext: runSpan(s.ID, s.Fence-1)}))
		}
		_, span := t.tracer.Start(context.WithValue(context.Background(), runKey{}, runSpan(s.ID, s.Fence)), spanAgent, opts...)
		span.End()
	}
	return runContext(s.ID, s.Fence)
}

func runContext(id store.SessionID, fence store.Fence) context.Context {
	return trace.ContextWithRemoteSpanContext(context.Background(), runSpan(id, fence))
}

// runSpan is the root span of one claim.
func runSpan(id store.SessionID, fence store.Fence) trace.SpanContext {
	sum := sha256.Sum256(fmt.Appendf(nil, "planaria run %s %d", id, fence))
	return trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID(sum[:16]), SpanID: trace.SpanID(sum[16:24]),
		TraceFlags: trace.FlagsSampled, Remote: true})
}

type runKey struct{}

// runIDs gives root spans the ids of their run, all others random ones.
type runIDs struct{}

// NewIDs implements sdktrace.IDGenerator.
func (runIDs) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	if s, ok := ctx.Value(runKey{}).(trace.SpanContext); ok {
		return s.TraceID(), s.SpanID()
	}
	return randomTraceID(), randomSpanID()
}

// NewSpanID implements sdktrace.IDGenerator.
func (runIDs) NewSpanID(context.Context, trace.TraceID) trace.SpanID { return randomSpanID() }

func randomTraceID() (id trace.TraceID) {
	random(id[:])
	return id
}

func randomSpanID() (id trace.SpanID) {
	random(id[:])
	return id
}

// random fills b; crypto/rand never fails on a working system.
func random(b []byte) {
	if _, err := rand.Read(b); err != nil {
		panic("no entropy: " + err.Error())
	}
}
