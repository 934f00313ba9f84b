package llm_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/llm"
)

const testKey = "sk-test-0123456789abcdef"

// upstream serves h on loopback and returns a configuration for it.
func upstream(t testing.TB, h http.Handler) llm.Config {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	tr := llm.Transport(nil)
	t.Cleanup(tr.CloseIdleConnections)
	return llm.Config{BaseURL: srv.URL, Client: &http.Client{Transport: tr}, Key: func() string { return testKey }}
}

func anthropicAt(t testing.TB, cfg llm.Config) *llm.Anthropic {
	t.Helper()
	p, err := llm.NewAnthropic(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// sse answers each request with a fixed event stream.
func sse(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("request-id", "req_1")
		_, _ = io.WriteString(w, body)
	}
}

// ev is one event; fields is a JSON object, "" for none.
func ev(typ, fields string) string {
	data := `{"type":"` + typ + `"}`
	if fields != "" {
		data = `{"type":"` + typ + `",` + strings.TrimPrefix(fields, "{")
	}
	return "event: " + typ + "\ndata: " + data + "\n\n"
}

const (
	start = `{"message":{"id":"msg_1","type":"message","role":"assistant","model":"m-1","content":[],"stop_reason":null,"usage":{"input_tokens":10,"output_tokens":1,"cache_creation_input_tokens":30,"cache_read_input_tokens":5,"cache_creation":{"ephemeral_5m_input_tokens":10,"ephemeral_1h_input_tokens":20}}}}`
	stopE = `{"delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":7}}`
)

func hello(text string) string {
	return ev("message_start", start) +
		ev("content_block_start", `{"index":0,"content_block":{"type":"text","text":""}}`) +
		ev("content_block_delta", `{"index":0,"delta":{"type":"text_delta","text":"`+text+`"}}`) +
		ev("content_block_stop", `{"index":0}`) + ev("message_delta", stopE) + ev("message_stop", "")
}

var simple = llm.Request{Model: "m-1", System: "be good", Messages: []llm.Message{
	{Role: llm.RoleUser, Content: []llm.Block{{Type: "text", Text: "hi"}}}}}

// streamErr makes a call that must fail and returns its error.
func streamErr(t *testing.T, p llm.Provider, req llm.Request) *llm.Error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r, err := p.Stream(ctx, req, nil)
	var e *llm.Error
	if !errors.As(err, &e) {
		t.Fatalf("Stream = %+v, %v; want an *llm.Error", r, err)
	}
	return e
}

// The blocks come back to the server byte for byte, and usage, deltas and
// unknown events are treated as the reference says.
func TestAnthropicStream(t *testing.T) {
	redacted := `{"type":"redacted_thinking","data":"a<b>&c==", "x" : 1}`
	unknown := `{"type":"mystery_block","weird":{"z":1,"a":[1, 2]}}`
	body := ": a comment\n\n" + ev("message_start", start) + ev("ping", "") +
		ev("content_block_start", `{"index":0,"content_block":{"type":"thinking","thinking":"","signature":"","extra":{"b":1,"a":2}}}`) +
		ev("content_block_delta", `{"index":0,"delta":{"type":"thinking_delta","thinking":"I <think>"}}`) +
		ev("content_block_delta", `{"index":0,"delta":{"type":"new_delta","zzz":"?"}}`) +
		ev("content_block_delta", `{"index":0,"delta":{"type":"signature_delta","signature":"Eq=="}}`) +
		ev("content_block_stop", `{"index":0}`) +
		ev("content_block_start", `{"index":1,"content_block":`+redacted+`}`) + ev("content_block_stop", `{"index":1}`) +
		ev("content_block_start", `{"index":2,"content_block":`+unknown+`}`) + ev("content_block_stop", `{"index":2}`) +
		"event: brand_new\ndata: not json\n\n" +
		ev("content_block_start", `{"index":3,"content_block":{"type":"text","text":"","citations":null}}`) +
		ev("content_block_delta", `{"index":3,"delta":{"type":"text_delta","text":"Hello & "}}`) +
		ev("content_block_delta", `{"index":3,"delta":{"type":"citations_delta","citation":{"url":"u"}}}`) +
		ev("content_block_delta", `{"index":3,"delta":{"type":"text_delta","text":"bye"}}`) +
		ev("content_block_stop", `{"index":3}`) +
		ev("content_block_start", `{"index":4,"content_block":{"type":"tool_use","id":"toolu_1","name":"f","input":{}}}`) +
		ev("content_block_delta", `{"index":4,"delta":{"type":"input_json_delta","partial_json":"{\"a\":"}}`) +
		ev("content_block_delta", `{"index":4,"delta":{"type":"input_json_delta","partial_json":" 1}"}}`) +
		ev("content_block_stop", `{"index":4}`) +
		ev("content_block_start", `{"index":5,"content_block":{"type":"tool_use","id":"toolu_2","name":"g","input":{}}}`) +
		ev("content_block_delta", `{"index":5,"delta":{"type":"input_json_delta","partial_json":""}}`) +
		ev("content_block_stop", `{"index":5}`) +
		ev("message_delta", `{"delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":3}}`) +
		ev("message_delta", `{"delta":{},"usage":{"input_tokens":11,"output_tokens":9}}`) +
		ev("message_stop", "")
	var sent [][]byte
	cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		sent = append(sent, b)
		sse(body)(w, r)
	}))
	p := anthropicAt(t, cfg)
	var deltas []llm.Delta
	got, err := p.Stream(t.Context(), simple, func(d llm.Delta) { deltas = append(deltas, d) })
	if err != nil {
		t.Fatal(err)
	}
	want := &llm.Reply{Model: "m-1", StopReason: "tool_use", RequestID: "req_1",
		Usage: llm.Usage{Input: 11, Output: 9, CacheRead: 5, CacheCreation5m: 10, CacheCreation1h: 20},
		Content: []llm.Block{
			{Type: "thinking", Raw: json.RawMessage(`{"type":"thinking","thinking":"I <think>","signature":"Eq==","extra":{"b":1,"a":2}}`)},
			{Type: "redacted_thinking", Raw: json.RawMessage(redacted)},
			{Type: "mystery_block", Raw: json.RawMessage(unknown)},
			{Type: "text", Text: "Hello & bye", Raw: json.RawMessage(`{"type":"text","text":"Hello & bye","citations":[{"url":"u"}]}`)},
			{Type: "tool_use", ID: "toolu_1", Name: "f", Input: json.RawMessage(`{"a": 1}`), Raw: json.RawMessage(`{"type":"tool_use","id":"toolu_1","name":"f","input":{"a": 1}}`)},
			{Type: "tool_use", ID: "toolu_2", Name: "g", Input: json.RawMessage(`{}`), Raw: json.RawMessage(`{"type":"tool_use","id":"toolu_2","name":"g","input":{}}`)},
		}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("reply (-want +got):\n%s", diff)
	}
	wantDeltas := []llm.Delta{{Index: 0, Type: "thinking", Start: true}, {Index: 0, Type: "thinking"}, {Index: 1, Type: "thinking", Start: true},
		{Index: 3, Type: "text", Start: true}, {Index: 3, Type: "text", Text: "Hello & "}, {Index: 3, Type: "text", Text: "bye"}}
	if diff := cmp.Diff(wantDeltas, deltas); diff != "" {
		t.Errorf("deltas (-want +got):\n%s", diff)
	}
	next := simple
	next.Messages = append(next.Messages, llm.Message{Role: llm.RoleAssistant, Content: got.Content},
		llm.Message{Role: llm.RoleUser, Content: []llm.Block{{Type: "text", Text: "after"},
			{Type: "tool_result", ToolUseID: "toolu_1", Content: []llm.Block{{Type: "text", Text: ""}}}, {Type: "tool_result", ToolUseID: "toolu_2", IsError: true, Content: []llm.Block{{Type: "text", Text: "no"}}}}})
	if _, err := p.Stream(t.Context(), next, nil); err != nil {
		t.Fatal(err)
	}
	for _, b := range got.Content {
		if !bytes.Contains(sent[1], b.Raw) {
			t.Errorf("the second request does not carry this block byte for byte: %s", b.Raw)
		}
	}
	tail := `{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_1"},{"type":"tool_result","tool_use_id":"toolu_2","content":[{"type":"text","text":"no"}],"is_error":true},{"type":"text","text":"after","cache_control":{"type":"ephemeral"}}]}]}`
	if !bytes.HasSuffix(sent[1], []byte(tail)) {
		t.Errorf("second request ends with\n%s\nwant\n%s", sent[1][max(0, len(sent[1])-len(tail)):], tail)
	}
}

func TestAnthropicRequest(t *testing.T) {
	var got map[string]any
	var header http.Header
	cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header = r.Header.Clone()
		got = nil
		_ = json.NewDecoder(r.Body).Decode(&got)
		got["path"] = r.URL.String()
		sse(hello("x"))(w, r)
	}))
	cfg.CacheTTL = "1h"
	cfg.BaseURL += "/prefix"
	req := llm.Request{Model: "m", Effort: "high", Speed: "fast", InferenceGeo: "eu", System: "sys", MaxTokens: 99,
		Tools: []llm.Tool{{Name: "a", Description: "d", InputSchema: json.RawMessage(`{"type":"object"}`)}},
		Messages: []llm.Message{
			{Role: llm.RoleUser, Content: []llm.Block{{Type: "text", Text: "one"}}},
			{Role: llm.RoleUser, Content: []llm.Block{{Type: "text", Text: "two"}, {Type: "text", Text: "  "}}},
			{Role: llm.RoleAssistant, Content: []llm.Block{{Type: "thinking", Text: "foreign"}, {Type: "text", Text: ""}}},
			{Role: llm.RoleUser, Content: []llm.Block{{Type: "image", Source: json.RawMessage(`{"type":"url","url":"u"}`)}}},
			{Role: llm.RoleAssistant, Content: []llm.Block{{Type: "text", Text: "ok"}}},
			{Role: llm.RoleUser, Content: []llm.Block{{Type: "text", Text: "three \xff"}}},
		}}
	if _, err := anthropicAt(t, cfg).Stream(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
	cc := map[string]any{"type": "ephemeral", "ttl": "1h"}
	text := func(s string) map[string]any { return map[string]any{"type": "text", "text": s} }
	cached := func(m map[string]any) map[string]any { m["cache_control"] = cc; return m }
	want := map[string]any{"path": "/prefix/v1/messages", "model": "m", "max_tokens": 99.0, "stream": true, "speed": "fast", "inference_geo": "eu",
		"output_config": map[string]any{"effort": "high"}, "system": []any{cached(text("sys"))},
		"tools": []any{map[string]any{"name": "a", "description": "d", "input_schema": map[string]any{"type": "object"}}},
		"messages": []any{
			map[string]any{"role": "user", "content": []any{text("one"), text("two"), cached(map[string]any{"type": "image", "source": map[string]any{"type": "url", "url": "u"}})}},
			map[string]any{"role": "assistant", "content": []any{text("ok")}},
			map[string]any{"role": "user", "content": []any{cached(text("three \uFFFD"))}}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
	if a, v := header.Get("Authorization"), header.Get("anthropic-version"); a != "Bearer "+testKey || v != "2026-10-21" || header.Get("X-Api-Key") != "" {
		t.Errorf("bearer: Authorization %q, version %q, x-api-key %q", a, v, header.Get("X-Api-Key"))
	}
	cfg.Auth, cfg.Headers = "x-api-key", map[string]string{"anthropic-beta": "b-1"}
	if _, err := anthropicAt(t, cfg).Stream(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
	if header.Get("X-Api-Key") != testKey || header.Get("anthropic-version") != "2023-06-01" || header.Get("Authorization") != "" || header.Get("anthropic-beta") != "b-1" {
		t.Errorf("x-api-key headers: %v", header)
	}
}

// Attack N16 and the trap of reference section 22: nothing comes from the environment.
func TestEnvironmentIgnored(t *testing.T) {
	hostile := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("request went to the address in the environment: %s %s", r.Method, r.URL)
	}))
	defer hostile.Close()
	for k, v := range map[string]string{
		"ANTHROPIC_BASE_URL": hostile.URL, "ANTHROPIC_API_KEY": "env-key", "ANTHROPIC_AUTH_TOKEN": "env-token", "ANTHROPIC_PROFILE": "nope",
		"ANTHROPIC_CUSTOM_HEADERS": "X-Env: 1\nAuthorization: Bearer env", "ANTHROPIC_OPEN_TELEMETRY_TRACES_CONTENT_MODE": "content",
		"OPENAI_BASE_URL": hostile.URL, "OPENAI_API_KEY": "env-key", "OPENAI_ADMIN_KEY": "env-admin", "OPENAI_ORG_ID": "env-org", "OPENAI_PROJECT_ID": "env-project",
		"OPENAI_CUSTOM_HEADERS": "X-Env: 1",
		"HTTP_PROXY":            hostile.URL, "HTTPS_PROXY": hostile.URL, "ALL_PROXY": hostile.URL, "http_proxy": hostile.URL,
	} {
		t.Setenv(k, v)
	}
	var header http.Header
	cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header = r.Header.Clone()
		if strings.HasSuffix(r.URL.Path, "completions") {
			sse("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")(w, r)
			return
		}
		sse(hello("x"))(w, r)
	}))
	// A name that is not loopback, so that a proxy setting would apply.
	real := strings.TrimPrefix(cfg.BaseURL, "http://")
	cfg.BaseURL = "http://model.invalid"
	cfg.Client = &http.Client{Transport: llm.Transport(func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr != "model.invalid:80" {
			t.Errorf("dialled %s", addr)
		}
		return (&net.Dialer{}).DialContext(ctx, network, real)
	})}
	defer cfg.Client.CloseIdleConnections()
	o, err := llm.NewOpenAI(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]llm.Provider{"anthropic": anthropicAt(t, cfg), "openai": o} {
		if _, err := p.Stream(t.Context(), simple, nil); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := header.Values("Authorization"); !cmp.Equal(got, []string{"Bearer " + testKey}) {
			t.Errorf("%s: Authorization = %q", name, got)
		}
		for k, v := range header {
			if s := strings.Join(v, " "); strings.Contains(s, "env") || k == "X-Env" || strings.HasPrefix(k, "Traceparent") {
				t.Errorf("%s: header %s = %q comes from the environment", name, k, s)
			}
		}
	}
}

func TestErrorRows(t *testing.T) {
	env := func(typ, msg string) string {
		return `{"type":"error","error":{"type":"` + typ + `","message":"` + msg + `"},"request_id":"req_b"}`
	}
	tests := []struct {
		name   string
		status int
		header map[string]string
		body   string
		want   llm.Error
	}{
		{"400", 400, nil, env("invalid_request_error", "bad"), llm.Error{Kind: llm.ErrRequest, Message: "bad"}},
		{"400 window", 400, nil, env("invalid_request_error", "prompt is too long: 200001 tokens > 200000 maximum"), llm.Error{Kind: llm.ErrContextWindow, Message: "prompt is too long: 200001 tokens > 200000 maximum"}},
		{"400 window by max_tokens", 400, nil, env("invalid_request_error", "input length and `max_tokens` exceed context limit: 1"), llm.Error{Kind: llm.ErrContextWindow, Message: "input length and `max_tokens` exceed context limit: 1"}},
		{"401 never tells the key", 401, nil, env("authentication_error", "bad key "+testKey), llm.Error{Kind: llm.ErrRequest, Message: "bad key REDACTED"}},
		{"402", 402, nil, env("billing_error", "pay"), llm.Error{Kind: llm.ErrBilling, Message: "pay"}},
		{"403", 403, nil, env("permission_error", "no"), llm.Error{Kind: llm.ErrRequest, Message: "no"}},
		{"404", 404, nil, env("not_found_error", "model"), llm.Error{Kind: llm.ErrRequest, Message: "model"}},
		{"408", 408, nil, env("timeout_error", "slow"), llm.Error{Kind: llm.ErrServer, Retryable: true, Message: "slow"}},
		{"409", 409, nil, env("conflict_error", "again"), llm.Error{Kind: llm.ErrServer, Retryable: true, Message: "again"}},
		{"413", 413, nil, env("request_too_large", "big"), llm.Error{Kind: llm.ErrRequest, Message: "big"}},
		{"429", 429, map[string]string{"retry-after": "7"}, env("rate_limit_error", "slow down"), llm.Error{Kind: llm.ErrRateLimited, Retryable: true, RetryAfter: 7 * time.Second, Message: "slow down"}},
		{"429 ms", 429, map[string]string{"retry-after-ms": "1500"}, env("rate_limit_error", "slow down"), llm.Error{Kind: llm.ErrRateLimited, Retryable: true, RetryAfter: 1500 * time.Millisecond, Message: "slow down"}},
		{"429 hostile hint", 429, map[string]string{"retry-after": "1e300"}, env("rate_limit_error", "x"), llm.Error{Kind: llm.ErrRateLimited, Retryable: true, RetryAfter: time.Hour, Message: "x"}},
		{"429 spend cap", 429, nil, env("rate_limit_error", "spend cap"), llm.Error{Kind: llm.ErrBilling, Message: "spend cap"}},
		{"500", 500, nil, env("api_error", "oops"), llm.Error{Kind: llm.ErrServer, Retryable: true, Message: "oops"}},
		{"500 told not to retry", 500, map[string]string{"x-should-retry": "false"}, env("api_error", "oops"), llm.Error{Kind: llm.ErrServer, Message: "oops"}},
		{"502 html", 502, nil, "<html>bad gateway</html>", llm.Error{Kind: llm.ErrServer, Retryable: true, Message: "Bad Gateway <html>bad gateway</html>"}},
		{"503", 503, map[string]string{"retry-after": "2"}, "", llm.Error{Kind: llm.ErrServer, Retryable: true, RetryAfter: 2 * time.Second, Message: "Service Unavailable"}},
		{"504", 504, nil, env("timeout_error", "t"), llm.Error{Kind: llm.ErrServer, Retryable: true, Message: "t"}},
		{"529", 529, nil, env("overloaded_error", "Overloaded"), llm.Error{Kind: llm.ErrOverloaded, Retryable: true, Message: "Overloaded"}},
		{"204", 204, nil, "", llm.Error{Kind: llm.ErrRequest, Message: "No Content"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var n atomic.Int32
			cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				n.Add(1)
				for k, v := range tt.header {
					w.Header().Set(k, v)
				}
				w.Header().Set("request-id", "req_h")
				w.WriteHeader(tt.status)
				_, _ = io.WriteString(w, tt.body)
			}))
			got := streamErr(t, anthropicAt(t, cfg), simple)
			tt.want.Status, tt.want.RequestID = tt.status, "req_h"
			if diff := cmp.Diff(tt.want, *got); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
			if n.Load() != 1 {
				t.Errorf("the server saw %d requests, want 1", n.Load())
			}
		})
	}
}

func TestBrokenStreams(t *testing.T) {
	usage := llm.Usage{Input: 10, Output: 1, CacheRead: 5, CacheCreation5m: 10, CacheCreation1h: 20}
	begin := ev("message_start", start) + ev("content_block_start", `{"index":0,"content_block":{"type":"text","text":""}}`)
	fail := func(typ, msg string) string {
		return ev("error", `{"error":{"type":"`+typ+`","message":"`+msg+`"}}`)
	}
	big := `data: {"type":"x","pad":"` + strings.Repeat("x", 1<<20) + "\"}\n\n"
	tests := []struct {
		name, body string
		want       llm.ErrorKind
		retryable  bool
		usage      llm.Usage
	}{
		{"empty", "", llm.ErrServer, true, llm.Usage{}},
		{"no message_stop", begin, llm.ErrServer, true, usage},
		{"delta but no message_stop", begin + ev("content_block_stop", `{"index":0}`) + ev("message_delta", stopE), llm.ErrServer, true, llm.Usage{Input: 10, Output: 7, CacheRead: 5, CacheCreation5m: 10, CacheCreation1h: 20}},
		{"overloaded", begin + fail("overloaded_error", "Overloaded"), llm.ErrOverloaded, true, usage},
		{"rate limit has no header here", begin + fail("rate_limit_error", "x"), llm.ErrRateLimited, true, usage},
		{"billing", begin + fail("billing_error", "x"), llm.ErrBilling, false, usage},
		{"api_error", begin + fail("api_error", "x"), llm.ErrServer, true, usage},
		{"unknown error", begin + fail("new_error", "x"), llm.ErrServer, true, usage},
		{"invalid", begin + fail("invalid_request_error", "x"), llm.ErrRequest, false, usage},
		{"window", begin + fail("invalid_request_error", "prompt is too long"), llm.ErrContextWindow, false, usage},
		{"not JSON", "event: message_start\ndata: {\n\n", llm.ErrServer, true, llm.Usage{}},
		{"two starts", begin + ev("message_start", start), llm.ErrServer, true, usage},
		{"delta for no block", ev("message_start", start) + ev("content_block_delta", `{"index":5,"delta":{"type":"text_delta","text":"x"}}`), llm.ErrServer, true, usage},
		{"block twice", begin + ev("content_block_start", `{"index":0,"content_block":{"type":"text"}}`), llm.ErrServer, true, usage},
		{"block is no object", ev("message_start", start) + ev("content_block_start", `{"index":0,"content_block":7}`), llm.ErrServer, true, usage},
		{"stop inside a block", begin + ev("message_delta", stopE) + ev("message_stop", ""), llm.ErrServer, true, llm.Usage{Input: 10, Output: 7, CacheRead: 5, CacheCreation5m: 10, CacheCreation1h: 20}},
		{"too large", begin + strings.Repeat(big, 3), llm.ErrServer, false, usage},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := upstream(t, sse(tt.body))
			cfg.MaxBytes = 2 << 20
			got := streamErr(t, anthropicAt(t, cfg), simple)
			if got.Kind != tt.want || got.Retryable != tt.retryable || got.Usage != tt.usage {
				t.Errorf("got %s retryable %v usage %+v (%v); want %s %v %+v", got.Kind, got.Retryable, got.Usage, got, tt.want, tt.retryable, tt.usage)
			}
		})
	}
}

// Attack F6: pings, comments, unknown events and slow bytes are no progress.
func TestIdleAndDeadline(t *testing.T) {
	busy := ev("message_start", start) + ev("content_block_start", `{"index":0,"content_block":{"type":"text","text":""}}`)
	tests := []struct {
		name, forever string
		idle, total   time.Duration
		want          string
	}{
		{"silence", "", 150 * time.Millisecond, time.Minute, "idle"},
		{"pings", "event: ping\ndata: {\"type\":\"ping\"}\n\n", 150 * time.Millisecond, time.Minute, "idle"},
		{"comments", ": still here\n\n", 150 * time.Millisecond, time.Minute, "idle"},
		{"unknown events", "event: other\ndata: {\"type\":\"other\"}\n\n", 150 * time.Millisecond, time.Minute, "idle"},
		{"bytes without an event", "data: x\n", 150 * time.Millisecond, time.Minute, "idle"},
		{"endless text", ev("content_block_delta", `{"index":0,"delta":{"type":"text_delta","text":"x"}}`), 10 * time.Second, 200 * time.Millisecond, "deadline"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = io.WriteString(w, busy)
				tick := time.NewTicker(5 * time.Millisecond)
				defer tick.Stop()
				for {
					_ = http.NewResponseController(w).Flush()
					select {
					case <-r.Context().Done():
						return
					case <-tick.C:
						_, _ = io.WriteString(w, tt.forever)
					}
				}
			}))
			cfg.Idle, cfg.Deadline = tt.idle, tt.total
			got := streamErr(t, anthropicAt(t, cfg), simple)
			if got.Kind != llm.ErrServer || !got.Retryable || !strings.Contains(got.Message, tt.want) || got.Usage.Input != 10 {
				t.Errorf("got %+v, want a retryable server error that names %q, with usage", got, tt.want)
			}
		})
	}
}

func TestCancel(t *testing.T) {
	for _, early := range []bool{true, false} {
		t.Run(fmt.Sprintf("before the answer %v", early), func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				if !early {
					w.Header().Set("Content-Type", "text/event-stream")
					_, _ = io.WriteString(w, ev("message_start", start))
					_ = http.NewResponseController(w).Flush()
				}
				time.AfterFunc(20*time.Millisecond, func() { cancel(errors.New("interrupted by the user")) })
				<-r.Context().Done()
			}))
			began := time.Now()
			_, err := anthropicAt(t, cfg).Stream(ctx, simple, nil)
			var e *llm.Error
			if !errors.As(err, &e) || e.Kind != llm.ErrCancelled || e.Retryable || !errors.Is(err, context.Canceled) || !strings.Contains(e.Message, "interrupted") {
				t.Errorf("err = %#v, want cancelled with its cause", err)
			}
			if !early && e.Usage.Input != 10 {
				t.Errorf("usage = %+v, want what was reported", e.Usage)
			}
			if d := time.Since(began); d > 5*time.Second {
				t.Errorf("cancel took %v", d)
			}
		})
	}
}

// Trap P1: a reused connection that drops must not make the transport send the
// request again, whatever headers are set.
func TestNoResendOnDroppedConnection(t *testing.T) {
	var posts atomic.Int32
	var mu sync.Mutex
	conns := map[string]int{}
	cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		posts.Add(1)
		mu.Lock()
		conns[r.RemoteAddr]++
		second := conns[r.RemoteAddr] > 1
		mu.Unlock()
		if second {
			c, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				c.Close()
			}
			return
		}
		sse(hello("x"))(w, r)
	}))
	cfg.Headers = map[string]string{"Idempotency-Key": "k", "X-Idempotency-Key": "k"}
	p := anthropicAt(t, cfg)
	if _, err := p.Stream(t.Context(), simple, nil); err != nil {
		t.Fatal(err)
	}
	e := streamErr(t, p, simple)
	mu.Lock()
	defer mu.Unlock()
	if len(conns) != 1 {
		t.Fatalf("the connection was not reused (%v): the test proves nothing", conns)
	}
	if posts.Load() != 2 || e.Kind != llm.ErrServer || !e.Retryable {
		t.Errorf("server executed %d requests for 2 calls; second error %+v", posts.Load(), e)
	}
}

// Trap P6, attack N5: redirects are returned as errors and not followed.
func TestRedirectNotFollowed(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("the redirect was followed with %v", r.Header)
	}))
	defer other.Close()
	for _, status := range []int{301, 302, 303, 307, 308} {
		cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, other.URL, status)
		}))
		cfg.Auth = "x-api-key"
		if e := streamErr(t, anthropicAt(t, cfg), simple); e.Kind != llm.ErrRequest || e.Retryable || e.Status != status {
			t.Errorf("%d: %+v", status, e)
		}
	}
}

// Trap P7: compressed answers are refused, endless ones cut, endless headers too.
func TestHostileAnswers(t *testing.T) {
	tests := []struct {
		name string
		h    http.HandlerFunc
		want string
	}{
		{"gzip", func(w http.ResponseWriter, r *http.Request) {
			if got := r.Header.Get("Accept-Encoding"); got != "identity" {
				t.Errorf("Accept-Encoding = %q", got)
			}
			w.Header().Set("Content-Encoding", "gzip")
			sse("\x1f\x8b")(w, r)
		}, "compressed"},
		{"json instead of a stream", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"type":"message"}`)
		}, "content type"},
		{"endless line", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 200 {
				if _, err := io.WriteString(w, strings.Repeat("x", 1<<16)); err != nil {
					return
				}
			}
		}, "larger than the limit"},
		{"endless headers", func(w http.ResponseWriter, r *http.Request) {
			for i := range 2000 {
				w.Header().Set(fmt.Sprintf("X-H-%d", i), strings.Repeat("y", 100))
			}
			sse(hello("x"))(w, r)
		}, "header"},
		{"endless error body", func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(500)
			for range 1000 {
				if _, err := io.WriteString(w, strings.Repeat("z", 1<<16)); err != nil {
					return
				}
			}
		}, "Internal Server Error zzz"},
		{"deep nesting", sse("event: message_start\ndata: " + strings.Repeat("[", 100_000) + "\n\n"), "message_start"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := upstream(t, tt.h)
			cfg.MaxBytes = 4 << 20
			if e := streamErr(t, anthropicAt(t, cfg), simple); e.Kind != llm.ErrServer || !strings.Contains(e.Message, tt.want) || len(e.Message) > 4096 {
				t.Errorf("got %+v, want a server error that says %q", e, tt.want)
			}
		})
	}
}

// A tool input that is no object stays readable and goes back as an object.
func TestBrokenToolInput(t *testing.T) {
	for _, text := range []string{`{"a": `, `[1]`, `"x"`, `{"a":1}}`, `nope "<`} {
		body := ev("message_start", start) + ev("content_block_start", `{"index":0,"content_block":{"type":"tool_use","id":"toolu_1","name":"f","input":{}}}`)
		quoted, _ := json.Marshal(text)
		body += ev("content_block_delta", `{"index":0,"delta":{"type":"input_json_delta","partial_json":`+string(quoted)+`}}`) +
			ev("content_block_stop", `{"index":0}`) + ev("message_delta", `{"delta":{"stop_reason":"max_tokens"}}`) + ev("message_stop", "")
		r, err := anthropicAt(t, upstream(t, sse(body))).Stream(t.Context(), simple, nil)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		b := r.Content[0]
		var got map[string]string
		if err := json.Unmarshal(b.Input, &got); err != nil || got["INVALID_JSON"] != text || b.InputText != text || !json.Valid(b.Raw) {
			t.Errorf("%s: block %+v (%v)", text, b, err)
		}
		if r.StopReason != "max_tokens" {
			t.Errorf("stop = %s", r.StopReason)
		}
	}
}

func FuzzMessageStream(f *testing.F) {
	f.Add([]byte(hello("x")))
	f.Add([]byte("event: error\ndata: {\"type\":\"error\"}\n\n"))
	f.Add([]byte("data: {\"type\":\"message_start\"}\n\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"b\",\"input\":1}}\n\ndata: {\"type\":\"content_block_stop\"}\n\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, read := range []func([]byte) (*llm.Reply, error){llm.ReadMessageStream, llm.ReadChatStream} {
			r, err := read(data)
			if err != nil {
				continue
			}
			for _, b := range r.Content {
				if len(b.Raw) > 0 && !json.Valid(b.Raw) || b.Type == "tool_use" && !json.Valid(b.Input) {
					t.Errorf("block %+v carries no JSON", b)
				}
			}
		}
	})
}
