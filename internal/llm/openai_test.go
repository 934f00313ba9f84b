package llm_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/llm"
)

func openaiAt(t testing.TB, cfg llm.Config) *llm.OpenAI {
	t.Helper()
	p, err := llm.NewOpenAI(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func chunks(data ...string) string {
	return "data: " + strings.Join(data, "\n\ndata: ") + "\n\n"
}

func TestOpenAIRequest(t *testing.T) {
	var raw string
	var got map[string]any
	cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		raw, got = string(b), nil
		_ = json.Unmarshal(b, &got)
		got["path"] = r.URL.Path
		sse(chunks(`{"choices":[{"index":0,"delta":{"content":"ok"},"finish_reason":"stop"}]}`, "[DONE]"))(w, r)
	}))
	cfg.BaseURL += "/v1"
	image := json.RawMessage(`{"type":"base64","media_type":"image/png","data":"AAAA"}`)
	req := llm.Request{Model: "m", System: "sys", Effort: "low", MaxTokens: 50,
		Tools: []llm.Tool{{Name: "f", Description: "d", InputSchema: json.RawMessage(`{"type":"object"}`)}},
		Messages: []llm.Message{
			{Role: llm.RoleUser, Content: []llm.Block{{Type: "text", Text: "look"}, {Type: "image", Source: image}}},
			{Role: llm.RoleAssistant, Content: []llm.Block{
				{Type: "thinking", Raw: json.RawMessage(`{"type":"thinking","thinking":"secret of another provider","signature":"s"}`)},
				{Type: "text", Text: "calling", Raw: json.RawMessage(`{"type":"text","text":"calling"}`)},
				{Type: "tool_use", ID: "t1", Name: "f", Input: json.RawMessage(`{"a":1}`), Raw: json.RawMessage(`{"type":"tool_use"}`)},
				{Type: "tool_use", ID: "t2", Name: "f", Input: json.RawMessage(`{"INVALID_JSON":"{"}`), InputText: "{"}}},
			{Role: llm.RoleUser, Content: []llm.Block{{Type: "text", Text: "and"},
				{Type: "tool_result", ToolUseID: "t1", Content: []llm.Block{{Type: "text", Text: "r"}, {Type: "image", Source: image}}},
				{Type: "tool_result", ToolUseID: "t2", IsError: true, Content: []llm.Block{{Type: "text", Text: "bad"}}}}},
		}}
	if _, err := openaiAt(t, cfg).Stream(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
	img := map[string]any{"type": "image_url", "image_url": map[string]any{"url": "data:image/png;base64,AAAA"}}
	call := func(id, args string) any {
		return map[string]any{"id": id, "type": "function", "function": map[string]any{"name": "f", "arguments": args}}
	}
	want := map[string]any{"path": "/v1/chat/completions", "model": "m", "stream": true, "stream_options": map[string]any{"include_usage": true}, "max_tokens": 50.0, "reasoning_effort": "low",
		"tools": []any{map[string]any{"type": "function", "function": map[string]any{"name": "f", "description": "d", "parameters": map[string]any{"type": "object"}}}},
		"messages": []any{
			map[string]any{"role": "system", "content": "sys"},
			map[string]any{"role": "user", "content": []any{map[string]any{"type": "text", "text": "look"}, img}},
			map[string]any{"role": "assistant", "content": "calling", "tool_calls": []any{call("t1", `{"a":1}`), call("t2", "{")}},
			map[string]any{"role": "tool", "tool_call_id": "t1", "content": "r\n(see the image below)"},
			map[string]any{"role": "tool", "tool_call_id": "t2", "content": "Error:\nbad"},
			map[string]any{"role": "user", "content": []any{img, map[string]any{"type": "text", "text": "and"}}},
		}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
	if strings.Contains(raw, "secret of another provider") {
		t.Error("a thinking block of another provider was sent")
	}
}

func TestOpenAIStream(t *testing.T) {
	tests := []struct {
		name, body string
		want       llm.Reply
	}{
		{"text, usage, cached", chunks(`{"model":"m-9","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`,
			`{"choices":[{"index":0,"delta":{"content":"Hel"}}]}`, `{"choices":[{"index":0,"delta":{"content":"lo"}}]}`,
			`{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}`,
			`{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":60,"cache_write_tokens":10}}}`, "[DONE]"),
			llm.Reply{Model: "m-9", StopReason: "end_turn", Content: []llm.Block{{Type: "text", Text: "Hello"}},
				Usage: llm.Usage{Input: 30, Output: 8, CacheRead: 60, CacheCreation5m: 10}}},
		{"tools", chunks(`{"choices":[{"index":0,"delta":{"content":"x","tool_calls":[{"index":0,"id":"c1","function":{"name":"f","arguments":""}}]}}]}`,
			`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\""}},{"index":1,"id":"c2","function":{"name":"g"}}]}}]}`,
			`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]},"finish_reason":"tool_calls"}]}`, "[DONE]"),
			llm.Reply{StopReason: "tool_use", Content: []llm.Block{{Type: "text", Text: "x"},
				{Type: "tool_use", ID: "c1", Name: "f", Input: json.RawMessage(`{"a":1}`)}, {Type: "tool_use", ID: "c2", Name: "g", Input: json.RawMessage(`{}`)}}}},
		{"arguments as an object, finish stop", chunks(`{"choices":[{"index":0,"delta":{"tool_calls":[{"id":"c1","function":{"name":"f","arguments":{"a":1}}}]},"finish_reason":"stop"}]}`),
			llm.Reply{StopReason: "tool_use", Content: []llm.Block{{Type: "tool_use", ID: "c1", Name: "f", Input: json.RawMessage(`{"a":1}`)}}}},
		{"length with a cut call", chunks(`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1","function":{"name":"f","arguments":"{\"a"}}]},"finish_reason":"length"}]}`, "[DONE]"),
			llm.Reply{StopReason: "max_tokens", Content: []llm.Block{{Type: "tool_use", ID: "c1", Name: "f", Input: json.RawMessage(`{"INVALID_JSON":"{\"a"}`), InputText: `{"a`}}}},
		{"filter", chunks(`{"choices":[{"index":0,"delta":{"content":"no"},"finish_reason":"content_filter"}]}`, "[DONE]"),
			llm.Reply{StopReason: "refusal", StopDetails: json.RawMessage(`{"type":"refusal","category":null,"explanation":null}`), Content: []llm.Block{{Type: "text", Text: "no"}}}},
		{"refusal text", chunks(`{"choices":[{"index":0,"delta":{"refusal":"I cannot"},"finish_reason":"stop"}]}`, "[DONE]"),
			llm.Reply{StopReason: "refusal", StopDetails: json.RawMessage(`{"type":"refusal","category":null,"explanation":null}`), Content: []llm.Block{{Type: "text", Text: "I cannot"}}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := openaiAt(t, upstream(t, sse(tt.body))).Stream(t.Context(), simple, nil)
			if err != nil {
				t.Fatal(err)
			}
			tt.want.RequestID = "req_1"
			if diff := cmp.Diff(&tt.want, got); diff != "" {
				t.Errorf("reply (-want +got):\n%s", diff)
			}
		})
	}
}

// Missing and repeated ids: what we mint is unique in the conversation and the
// same for the same request.
func TestOpenAIMintsIDs(t *testing.T) {
	body := chunks(`{"choices":[{"index":0,"delta":{"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}}]}`,
		`{"choices":[{"index":0,"delta":{"tool_calls":[{"function":{"name":"g","arguments":"{}"}}]}}]}`,
		`{"choices":[{"index":0,"delta":{"tool_calls":[{"id":"call_0","function":{"name":"h","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}`, "[DONE]")
	p := openaiAt(t, upstream(t, sse(body)))
	ids := func(req llm.Request) (out []string) {
		r, err := p.Stream(t.Context(), req, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range r.Content {
			out = append(out, b.ID)
		}
		return out
	}
	one, again := ids(simple), ids(simple)
	if !cmp.Equal(one, again) || len(one) != 3 || one[0] == "" || one[0] == one[1] || one[2] != "call_0" {
		t.Fatalf("ids %q, then %q", one, again)
	}
	next := simple
	next.Messages = append(next.Messages, llm.Message{Role: llm.RoleAssistant, Content: []llm.Block{{Type: "tool_use", ID: "call_0", Name: "h", Input: json.RawMessage(`{}`)}}},
		llm.Message{Role: llm.RoleUser, Content: []llm.Block{{Type: "tool_result", ToolUseID: "call_0"}}})
	for i, id := range ids(next) {
		if id == "call_0" || id == one[min(i, 2)] {
			t.Errorf("id %d = %q repeats one of the conversation", i, id)
		}
	}
}

func TestOpenAIErrors(t *testing.T) {
	env := func(code, typ, msg string) string {
		return `{"error":{"message":"` + msg + `","type":"` + typ + `","code":` + code + `}}`
	}
	tests := []struct {
		name      string
		status    int
		body      string
		want      llm.ErrorKind
		retryable bool
	}{
		{"window", 400, env(`"context_length_exceeded"`, "invalid_request_error", "too many tokens"), llm.ErrContextWindow, false},
		{"window by words", 400, env("null", "BadRequestError", "This model's maximum context length is 10 tokens"), llm.ErrContextWindow, false},
		{"400", 400, env("400", "BadRequestError", "no"), llm.ErrRequest, false},
		{"401", 401, env(`"invalid_api_key"`, "x", "Incorrect API key provided: "+testKey), llm.ErrRequest, false},
		{"429", 429, env(`"rate_limit_exceeded"`, "requests", "slow"), llm.ErrRateLimited, true},
		{"quota", 429, env(`"insufficient_quota"`, "insufficient_quota", "pay"), llm.ErrBilling, false},
		{"402", 402, "", llm.ErrBilling, false},
		{"500", 500, "", llm.ErrServer, true},
		{"503", 503, "", llm.ErrServer, true},
		{"stream error", 200, chunks(`{"choices":[{"index":0,"delta":{"content":"x"}}]}`, env("500", "server_error", "boom")), llm.ErrServer, true},
		{"stream window", 200, chunks(env(`"context_length_exceeded"`, "x", "m")), llm.ErrContextWindow, false},
		{"stream 400", 200, chunks(env("400", "x", "m")), llm.ErrRequest, false},
		{"stream error as text", 200, chunks(`{"error":"boom"}`), llm.ErrServer, true},
		{"cut", 200, chunks(`{"choices":[{"index":0,"delta":{"content":"x"}}]}`), llm.ErrServer, true},
		{"done without reason", 200, chunks("[DONE]"), llm.ErrServer, true},
		{"tool call without name", 200, chunks(`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a"}]},"finish_reason":"tool_calls"}]}`), llm.ErrServer, true},
		{"not JSON", 200, chunks("{"), llm.ErrServer, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var n atomic.Int32
			cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				n.Add(1)
				if tt.status == 200 {
					sse(tt.body)(w, r)
					return
				}
				w.WriteHeader(tt.status)
				_, _ = io.WriteString(w, tt.body)
			}))
			got := streamErr(t, openaiAt(t, cfg), simple)
			if got.Kind != tt.want || got.Retryable != tt.retryable || n.Load() != 1 || strings.Contains(got.Error(), testKey) {
				t.Errorf("got %v retryable %v after %d requests; want %s %v", got, got.Retryable, n.Load(), tt.want, tt.retryable)
			}
		})
	}
}

func TestOpenAIIdle(t *testing.T) {
	cfg := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for r.Context().Err() == nil {
			_, _ = io.WriteString(w, ": working\n\n")
			_ = http.NewResponseController(w).Flush()
			<-tick.C
		}
	}))
	cfg.Idle = 150 * time.Millisecond
	if e := streamErr(t, openaiAt(t, cfg), simple); e.Kind != llm.ErrServer || !strings.Contains(e.Message, "idle") {
		t.Errorf("got %+v", e)
	}
}
