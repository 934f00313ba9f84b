package llm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// body writes the request body. Blocks with Raw are written as they are, byte
// for byte; the rest is ours.
func (a *Anthropic) body(req Request) ([]byte, error) {
	w := &objectWriter{}
	w.add("model", req.Model)
	if req.MaxTokens > 0 {
		w.add("max_tokens", req.MaxTokens)
	} else {
		w.add("max_tokens", a.cfg.MaxTokens)
	}
	w.add("stream", true)
	if req.Effort != "" {
		w.add("output_config", map[string]string{"effort": req.Effort})
	}
	if req.Speed != "" {
		w.add("speed", req.Speed)
	}
	if req.InferenceGeo != "" {
		w.add("inference_geo", req.InferenceGeo)
	}
	cache := a.cacheControl()
	hasSystem := strings.TrimSpace(req.System) != ""
	if hasSystem {
		w.add("system", []wireBlock{{Type: "text", Text: req.System, CacheControl: cache}})
	}
	if len(req.Tools) > 0 {
		tools := make([]wireTool, len(req.Tools))
		for i, t := range req.Tools {
			tools[i] = wireTool{Name: t.Name, Description: t.Description, InputSchema: t.InputSchema}
			if !json.Valid(t.InputSchema) {
				return nil, fmt.Errorf("write request: tool %s: input schema is not JSON", t.Name)
			}
		}
		// The system prompt follows the tools, so its breakpoint covers them.
		if !hasSystem {
			tools[len(tools)-1].CacheControl = cache
		}
		w.add("tools", tools)
	}
	messages, err := wireMessages(req.Messages, cache)
	if err != nil {
		return nil, fmt.Errorf("write request: %w", err)
	}
	w.raw("messages", messages)
	return w.bytes(), nil
}

type cacheControl struct {
	Type string `json:"type"`
	TTL  string `json:"ttl,omitempty"`
}

func (a *Anthropic) cacheControl() *cacheControl {
	switch a.cfg.CacheTTL {
	case "off":
		return nil
	case "":
		return &cacheControl{Type: "ephemeral"}
	}
	return &cacheControl{Type: "ephemeral", TTL: a.cfg.CacheTTL}
}

type wireTool struct {
	Name         string          `json:"name"`
	Description  string          `json:"description,omitempty"`
	InputSchema  json.RawMessage `json:"input_schema"`
	CacheControl *cacheControl   `json:"cache_control,omitempty"`
}

type wireBlock struct {
	Type         string          `json:"type"`
	Text         string          `json:"text,omitempty"`
	ID           string          `json:"id,omitempty"`
	Name         string          `json:"name,omitempty"`
	Input        json.RawMessage `json:"input,omitempty"`
	ToolUseID    string          `json:"tool_use_id,omitempty"`
	Content      json.RawMessage `json:"content,omitempty"`
	IsError      bool            `json:"is_error,omitempty"`
	Source       json.RawMessage `json:"source,omitempty"`
	Title        string          `json:"title,omitempty"`
	Context      string          `json:"context,omitempty"`
	CacheControl *cacheControl   `json:"cache_control,omitempty"`
}

// objectWriter writes a JSON object whose raw members keep their bytes.
type objectWriter struct{ buf bytes.Buffer }

func (w *objectWriter) add(name string, v any) { w.raw(name, encode(v)) }

func (w *objectWriter) raw(name string, v json.RawMessage) {
	w.buf.WriteByte("{,"[min(w.buf.Len(), 1)])
	w.buf.Write(encode(name))
	w.buf.WriteByte(':')
	w.buf.Write(v)
}

func (w *objectWriter) bytes() []byte { return append(w.buf.Bytes(), '}') }

// tidyMessages brings messages into the form that both APIs take: no empty
// text, no empty message, one message per role in a row, and in a user message
// the tool results first. Assistant content keeps its order.
func tidyMessages(in []Message) []Message {
	var out []Message
	for _, m := range in {
		blocks := make([]Block, 0, len(m.Content))
		for _, b := range m.Content {
			if b.Type == "text" && strings.TrimSpace(b.Text) == "" {
				continue // both APIs refuse it, and it says nothing
			}
			if (b.Type == "thinking" || b.Type == "redacted_thinking") && len(b.Raw) == 0 {
				continue // without the provider's own bytes its signature cannot hold
			}
			blocks = append(blocks, b)
		}
		if len(blocks) == 0 {
			continue
		}
		if n := len(out); n > 0 && out[n-1].Role == m.Role {
			out[n-1].Content = append(out[n-1].Content, blocks...)
			continue
		}
		out = append(out, Message{Role: m.Role, Content: blocks})
	}
	for i, m := range out {
		if m.Role != RoleUser {
			continue
		}
		sorted := make([]Block, 0, len(m.Content))
		for _, results := range []bool{true, false} {
			for _, b := range m.Content {
				if (b.Type == "tool_result") == results {
					sorted = append(sorted, b)
				}
			}
		}
		out[i].Content = sorted
	}
	return out
}

// wireMessages writes the messages with breakpoints on the last blocks of the
// two newest user messages: with the one on system or tools at most three of
// the four that the API allows, and the older of the two finds the cache that
// the request before wrote.
func wireMessages(in []Message, cache *cacheControl) (json.RawMessage, error) {
	messages := tidyMessages(in)
	points := map[int]bool{}
	for i := len(messages) - 1; i >= 0 && len(points) < 2; i-- {
		if messages[i].Role == RoleUser {
			points[i] = true
		}
	}
	var buf bytes.Buffer
	buf.WriteByte('[')
	for i, m := range messages {
		if i > 0 {
			buf.WriteByte(',')
		}
		var at *cacheControl
		if points[i] {
			at = cache
		}
		blocks, err := wireBlocks(m.Content, at)
		if err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
		buf.WriteString(`{"role":`)
		buf.Write(encode(m.Role))
		buf.WriteString(`,"content":`)
		buf.Write(blocks)
		buf.WriteByte('}')
	}
	buf.WriteByte(']')
	return buf.Bytes(), nil
}

// maxTitle is how long a document's title may be, in characters.
const maxTitle = 500

// shortTitle is a title that the API takes: it refuses the whole request for a
// longer one.
func shortTitle(s string) string {
	if r := []rune(s); len(r) > maxTitle {
		return string(r[:maxTitle-1]) + "…"
	}
	return s
}

// wireBlocks writes blocks; cache goes on the last one that is ours.
func wireBlocks(blocks []Block, cache *cacheControl) (json.RawMessage, error) {
	parts := make([]json.RawMessage, 0, len(blocks))
	for i := len(blocks) - 1; i >= 0; i-- {
		b := blocks[i]
		if len(b.Raw) > 0 {
			if !isObject(b.Raw) {
				return nil, fmt.Errorf("block %d: its raw form is not a JSON object", i)
			}
			parts = append(parts, b.Raw)
			continue
		}
		w := wireBlock{Type: b.Type, Text: b.Text, ID: b.ID, Name: b.Name,
			ToolUseID: b.ToolUseID, IsError: b.IsError, Source: b.Source, Title: shortTitle(b.Title), Context: b.Context, CacheControl: cache}
		if b.Type == "tool_use" {
			if w.Input = b.Input; !isObject(b.Input) {
				w.Input = json.RawMessage(`{}`)
			}
		}
		if b.Type == "tool_result" {
			content, err := wireBlocks(tidyResult(b.Content), nil)
			if err != nil {
				return nil, fmt.Errorf("block %d: %w", i, err)
			}
			if string(content) != "[]" {
				w.Content = content
			}
		}
		if len(w.Source) > 0 && !json.Valid(w.Source) {
			return nil, fmt.Errorf("block %d: its source is not JSON", i)
		}
		parts = append(parts, encode(w))
		cache = nil
	}
	var buf bytes.Buffer
	buf.WriteByte('[')
	for i := len(parts) - 1; i >= 0; i-- {
		buf.Write(parts[i])
		if i > 0 {
			buf.WriteByte(',')
		}
	}
	buf.WriteByte(']')
	return buf.Bytes(), nil
}

// tidyResult drops the empty texts of a tool result, which the API refuses.
func tidyResult(in []Block) []Block {
	out := make([]Block, 0, len(in))
	for _, b := range in {
		if b.Type != "text" || strings.TrimSpace(b.Text) != "" {
			out = append(out, b)
		}
	}
	return out
}
