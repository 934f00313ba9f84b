package llm

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// ScriptServer answers POST /v1/messages from a script, streaming or not, and
// refuses what the real API refuses. What it plays follows from the request
// alone; only the counts, and the faults that happen a number of times, are
// kept in memory. GET /stats returns the counts.
type ScriptServer struct {
	script *Script

	mu     sync.Mutex
	stats  ScriptStats
	faults map[string]int // by step and request
}

// ScriptStats counts what a ScriptServer was asked.
type ScriptStats struct {
	Requests   int    `json:"requests"`
	Answered   int    `json:"answered"`   // completely
	Invalid    int    `json:"invalid"`    // requests that the real API refuses
	Unscripted int    `json:"unscripted"` // requests without a step, or with a template that fails
	Faults     int    `json:"faults"`     // injected
	LastError  string `json:"last_error,omitempty"`
}

// maxFaults bounds the memory of counted faults; beyond it counting begins anew.
const maxFaults = 10_000

// maxRequestBytes is the API's limit on a request body.
const maxRequestBytes = 32 << 20

// NewScriptServer returns a server that plays script, which must be valid.
func NewScriptServer(script *Script) *ScriptServer {
	return &ScriptServer{script: script, faults: map[string]int{}}
}

// Stats returns the counts so far.
func (s *ScriptServer) Stats() ScriptStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

func (s *ScriptServer) count(f func(*ScriptStats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.stats)
}

// ServeHTTP implements http.Handler.
func (s *ScriptServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == "/stats" && r.Method == http.MethodGet:
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(encode(s.Stats()))
		return
	case r.URL.Path != "/v1/messages":
		s.fail(w, http.StatusNotFound, "not_found_error", "Not found: "+clip(r.URL.Path, 100))
		return
	case r.Method != http.MethodPost:
		s.fail(w, http.StatusMethodNotAllowed, "invalid_request_error", "Method Not Allowed")
		return
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxRequestBytes+1))
	if err != nil {
		return // the caller left; there is nobody to answer
	}
	s.count(func(st *ScriptStats) { st.Requests++ })
	switch key := credential(r.Header); {
	case len(body) > maxRequestBytes:
		s.invalid(w, http.StatusRequestEntityTooLarge, "request_too_large", "Request exceeds the maximum size")
	case r.Header.Get("anthropic-version") == "":
		s.invalid(w, http.StatusBadRequest, "invalid_request_error", "anthropic-version: header is required")
	case s.script.Key != "" && !hmac.Equal([]byte(key), []byte(s.script.Key)):
		s.invalid(w, http.StatusUnauthorized, "authentication_error", "invalid credential")
	default:
		s.messages(w, r, body)
	}
}

func credential(h http.Header) string {
	if key, ok := strings.CutPrefix(h.Get("Authorization"), "Bearer "); ok {
		return key
	}
	return h.Get("x-api-key")
}

func (s *ScriptServer) messages(w http.ResponseWriter, r *http.Request, body []byte) {
	req, err := readScriptRequest(body)
	if err != nil {
		s.invalid(w, http.StatusBadRequest, "invalid_request_error", err.Error())
		return
	}
	p := newPlay(req)
	step, where, err := s.script.find(p)
	if err != nil {
		s.unscripted(w, err)
		return
	}
	sum := sha256.Sum256(body)
	m, err := newScriptReply(step, p, sum[:], len(body))
	if err != nil {
		s.unscripted(w, fmt.Errorf("%s: %w", where, err))
		return
	}
	if !pause(r.Context(), time.Duration(step.DelayMS)*time.Millisecond) {
		return
	}
	fault := s.fault(step, where, sum[:])
	if fault != nil && fault.Status != 0 {
		s.statusFault(w, fault)
		return
	}
	if fault != nil && fault.Hang {
		<-r.Context().Done()
		return
	}
	w.Header().Set("request-id", requestName(sum[:]))
	if req.Stream {
		s.stream(w, r, m, step, fault)
		return
	}
	out := m.json()
	w.Header().Set("Content-Type", "application/json")
	if fault != nil {
		_, _ = w.Write(out[:min(fault.CutAfter, len(out))])
		flush(w)
		panic(http.ErrAbortHandler)
	}
	if _, err := w.Write(out); err == nil {
		s.count(func(st *ScriptStats) { st.Answered++ })
	}
}

// fault returns the fault that this request meets, nil if none is left.
func (s *ScriptServer) fault(step *Step, where string, sum []byte) *Fault {
	if step.Fault == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := where + string(sum)
	if step.Fault.Times > 0 {
		if s.faults[key] >= step.Fault.Times {
			return nil
		}
		if len(s.faults) >= maxFaults {
			clear(s.faults)
		}
		s.faults[key]++
	}
	s.stats.Faults++
	return step.Fault
}

var statusTypes = map[int]string{
	400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error",
	404: "not_found_error", 409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error",
	504: "timeout_error", 529: "overloaded_error",
}

func (s *ScriptServer) statusFault(w http.ResponseWriter, f *Fault) {
	typ, message := f.Type, f.Message
	if typ == "" {
		if typ = statusTypes[f.Status]; typ == "" {
			typ = "api_error"
		}
	}
	if message == "" {
		message = "scripted " + typ
	}
	if f.RetryAfter != "" {
		w.Header().Set("retry-after", f.RetryAfter)
	}
	s.fail(w, f.Status, typ, message)
}

func (s *ScriptServer) invalid(w http.ResponseWriter, status int, typ, message string) {
	s.count(func(st *ScriptStats) { st.Invalid++; st.LastError = message })
	s.fail(w, status, typ, message)
}

func (s *ScriptServer) unscripted(w http.ResponseWriter, err error) {
	s.count(func(st *ScriptStats) { st.Unscripted++; st.LastError = err.Error() })
	s.fail(w, http.StatusBadRequest, "invalid_request_error", "scripted model: "+err.Error())
}

// fail writes the error envelope of the API.
func (s *ScriptServer) fail(w http.ResponseWriter, status int, typ, message string) {
	id := requestName([]byte(message))
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("request-id", id)
	w.WriteHeader(status)
	_, _ = w.Write(errorEnvelope(typ, message, id))
}

func errorEnvelope(typ, message, id string) []byte {
	return encode(map[string]any{"type": "error", "error": map[string]any{"type": typ, "message": message}, "request_id": id})
}

func requestName(sum []byte) string {
	h := sha256.Sum256(sum)
	return "req_" + hex.EncodeToString(h[:10])
}

// sign makes the signature of thinking text; the server refuses thinking that
// comes back changed.
func sign(text string) string {
	h := hmac.New(sha256.New, []byte("planaria scripted model"))
	h.Write([]byte(text))
	return base64.StdEncoding.EncodeToString(h.Sum(nil))
}

// scriptReply is one answer with its templates filled.
type scriptReply struct {
	id, model string
	blocks    []map[string]any
	inputs    map[int]string // raw input of tool_use blocks by index
	stop      string
	details   any
	usage     map[string]any
	chunk     int
}

func newScriptReply(step *Step, p *play, sum []byte, size int) (*scriptReply, error) {
	m := &scriptReply{id: "msg_" + hex.EncodeToString(sum[:12]), model: p.req.Model, inputs: map[int]string{}, stop: step.Stop, chunk: step.Chunk}
	if m.chunk == 0 {
		m.chunk = 24
	}
	if len(step.StopDetails) > 0 {
		m.details = step.StopDetails
	}
	if m.stop == "" {
		m.stop = "end_turn"
		if len(step.Tools) > 0 {
			m.stop = "tool_use"
		}
	}
	if step.Thinking != "" {
		m.blocks = append(m.blocks, map[string]any{"type": "thinking", "thinking": step.Thinking, "signature": sign(step.Thinking)})
	}
	if step.Redacted != "" {
		m.blocks = append(m.blocks, map[string]any{"type": "redacted_thinking", "data": hex.EncodeToString([]byte(step.Redacted)) + "." + sign(hex.EncodeToString([]byte(step.Redacted)))})
	}
	if step.Text != "" {
		text, err := p.fill(step.Text)
		if err != nil {
			return nil, err
		}
		m.blocks = append(m.blocks, map[string]any{"type": "text", "text": text})
	}
	for i, t := range step.Tools {
		if err := m.tool(t, i, p, sum); err != nil {
			return nil, err
		}
	}
	m.usage = m.usageOf(step.Usage, size)
	return m, nil
}

func (m *scriptReply) tool(t ToolCall, i int, p *play, sum []byte) error {
	if !t.Unoffered && !p.req.tools[t.Name] {
		return fmt.Errorf("tool %s is not offered by the request; set unoffered: true to call it anyway", t.Name)
	}
	input := t.InputJSON
	if input == "" {
		v, err := p.fillValue(t.Input)
		if err != nil {
			return err
		}
		if input = string(encode(v)); t.Input == nil {
			input = "{}"
		}
	}
	id := sha256.Sum256([]byte(fmt.Sprintf("tool %d %x", i, sum)))
	m.inputs[len(m.blocks)] = input
	m.blocks = append(m.blocks, map[string]any{"type": "tool_use", "id": "toolu_" + hex.EncodeToString(id[:12]), "name": t.Name, "input": map[string]any{}})
	return nil
}

func (m *scriptReply) usageOf(u *ScriptUsage, size int) map[string]any {
	if u == nil {
		out := 0
		for i, b := range m.blocks {
			out += len(encode(b)) + len(m.inputs[i])
		}
		u = &ScriptUsage{Input: int64(size/4) + 1, Output: int64(out/4) + 1}
	}
	return map[string]any{
		"input_tokens": u.Input, "output_tokens": u.Output, "cache_read_input_tokens": u.CacheRead,
		"cache_creation_input_tokens": u.CacheCreation5m + u.CacheCreation1h,
		"cache_creation":              map[string]any{"ephemeral_5m_input_tokens": u.CacheCreation5m, "ephemeral_1h_input_tokens": u.CacheCreation1h},
	}
}

func (m *scriptReply) message(content []map[string]any, stop any, usage map[string]any) map[string]any {
	return map[string]any{"id": m.id, "type": "message", "role": "assistant", "model": m.model,
		"content": content, "stop_reason": stop, "stop_sequence": nil, "usage": usage}
}

// json is the whole answer of a request without stream.
func (m *scriptReply) json() []byte {
	blocks := make([]map[string]any, len(m.blocks))
	for i, b := range m.blocks {
		blocks[i] = b
		if in, ok := m.inputs[i]; ok {
			input, _ := toolInput(in)
			blocks[i] = map[string]any{"type": "tool_use", "id": b["id"], "name": b["name"], "input": input}
		}
	}
	out := m.message(blocks, m.stop, m.usage)
	if m.details != nil {
		out["stop_details"] = m.details
	}
	return encode(out)
}

// events is the answer as a stream.
func (m *scriptReply) events() [][]byte {
	var out [][]byte
	add := func(typ string, fields map[string]any) {
		fields["type"] = typ
		out = append(out, []byte("event: "+typ+"\ndata: "+string(encode(fields))+"\n\n"))
	}
	start := map[string]any{}
	for k, v := range m.usage {
		start[k] = v
	}
	start["output_tokens"] = 1
	add("message_start", map[string]any{"message": m.message([]map[string]any{}, nil, start)})
	add("ping", map[string]any{})
	for i, b := range m.blocks {
		empty := map[string]any{}
		for k, v := range b {
			empty[k] = v
		}
		var deltas []map[string]any
		pieces := func(typ, field, text string) {
			for _, part := range split(text, m.chunk) {
				deltas = append(deltas, map[string]any{"type": typ, field: part})
			}
		}
		switch b["type"] {
		case "text":
			empty["text"] = ""
			pieces("text_delta", "text", b["text"].(string))
		case "thinking":
			empty["thinking"], empty["signature"] = "", ""
			pieces("thinking_delta", "thinking", b["thinking"].(string))
			deltas = append(deltas, map[string]any{"type": "signature_delta", "signature": b["signature"]})
		case "tool_use":
			if in := m.inputs[i]; in != "{}" {
				pieces("input_json_delta", "partial_json", in)
			} else {
				deltas = append(deltas, map[string]any{"type": "input_json_delta", "partial_json": ""})
			}
		}
		add("content_block_start", map[string]any{"index": i, "content_block": empty})
		for _, d := range deltas {
			add("content_block_delta", map[string]any{"index": i, "delta": d})
		}
		add("content_block_stop", map[string]any{"index": i})
	}
	delta := map[string]any{"stop_reason": m.stop, "stop_sequence": nil}
	if m.details != nil {
		delta["stop_details"] = m.details
	}
	add("message_delta", map[string]any{"delta": delta, "usage": m.usage})
	add("message_stop", map[string]any{})
	return out
}

func split(text string, n int) (parts []string) {
	runes := []rune(text)
	for len(runes) > n {
		parts = append(parts, string(runes[:n]))
		runes = runes[n:]
	}
	return append(parts, string(runes))
}

func (s *ScriptServer) stream(w http.ResponseWriter, r *http.Request, m *scriptReply, step *Step, fault *Fault) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.Header().Set("Cache-Control", "no-cache")
	sent := 0
	for i, ev := range m.events() {
		if i > 0 && !pause(r.Context(), time.Duration(step.ChunkDelayMS)*time.Millisecond) {
			return
		}
		if fault != nil && fault.CutAfter > 0 && sent+len(ev) > fault.CutAfter {
			_, _ = w.Write(ev[:fault.CutAfter-sent])
			flush(w)
			panic(http.ErrAbortHandler) // the connection drops inside the body
		}
		if _, err := w.Write(ev); err != nil {
			return
		}
		flush(w)
		sent += len(ev)
		if fault != nil && fault.Error != "" && sent >= fault.After {
			message := fault.Message
			if message == "" {
				message = "scripted " + fault.Error
			}
			_, _ = w.Write([]byte("event: error\ndata: " + string(errorEnvelope(fault.Error, message, m.id)) + "\n\n"))
			return
		}
	}
	if fault != nil {
		s.count(func(st *ScriptStats) { st.LastError = "a fault lies beyond the end of its answer" })
	}
	s.count(func(st *ScriptStats) { st.Answered++ })
}

func flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

// pause waits; false means that the caller left.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
