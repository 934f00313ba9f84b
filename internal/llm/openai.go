package llm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
)

// OpenAI asks a Chat Completions API, the official one or a compatible server.
// Request and chunks are our own structs: compatible servers leave out or add
// fields that the SDK's typed form rejects or cannot send.
type OpenAI struct {
	cfg    Config
	client openai.Client
}

// NewOpenAI returns a provider for cfg. It reads nothing from the environment.
func NewOpenAI(cfg Config) (*OpenAI, error) {
	cfg, err := cfg.check()
	if err != nil {
		return nil, fmt.Errorf("configure openai provider: %w", err)
	}
	switch cfg.MaxTokensField {
	case "":
		cfg.MaxTokensField = "max_tokens"
		if u, _ := url.Parse(cfg.BaseURL); u != nil && strings.EqualFold(u.Hostname(), "api.openai.com") {
			cfg.MaxTokensField = "max_completion_tokens"
		}
	case "max_tokens", "max_completion_tokens":
	default:
		return nil, fmt.Errorf("configure openai provider: max tokens field %q: must be max_tokens or max_completion_tokens", cfg.MaxTokensField)
	}
	// A bare client: openai.NewClient reads the environment and has no switch for it.
	opts := []option.RequestOption{
		option.WithBaseURL(cfg.BaseURL),
		option.WithMaxRetries(0),
		option.WithHTTPClient(newDoer(cfg, classifyOpenAI)),
	}
	for k, v := range cfg.Headers {
		opts = append(opts, option.WithHeader(k, v))
	}
	return &OpenAI{cfg: cfg, client: openai.Client{Options: opts}}, nil
}

// Stream implements Provider.
func (o *OpenAI) Stream(parent context.Context, req Request, onDelta func(Delta)) (*Reply, error) {
	ctx, w := newWatch(parent, o.cfg.Idle, o.cfg.Deadline)
	defer w.stop()
	key, err := o.cfg.key()
	if err != nil {
		return nil, finish(parent, ctx, err, Usage{}, "", key)
	}
	body, err := o.body(req)
	if err != nil {
		return nil, finish(parent, ctx, &Error{Kind: ErrRequest, Message: err.Error(), Err: err}, Usage{}, "", key)
	}
	var auth []option.RequestOption
	switch {
	case key == "":
	case o.cfg.Auth == "x-api-key":
		auth = append(auth, option.WithHeader("X-Api-Key", key))
	default:
		auth = append(auth, option.WithHeader("Authorization", "Bearer "+key))
	}

	// The only send of this call. Whatever fails from here on is reported, not repeated.
	var res *http.Response
	if err := o.client.Post(ctx, "chat/completions", body, &res, auth...); err != nil {
		return nil, finish(parent, ctx, err, Usage{}, "", key)
	}
	defer res.Body.Close()
	s := &chatStream{onDelta: onDelta, used: toolIDs(req.Messages), seed: body}
	s.reply.RequestID = requestID(res.Header)
	if err := s.read(ssestream.NewDecoder(res), w.progress); err != nil {
		return nil, finish(parent, ctx, err, s.reply.Usage, s.reply.RequestID, key)
	}
	w.drain(res.Body)
	return s.finish(), nil
}

type chatRequest struct {
	Model           string        `json:"model"`
	Messages        []chatMessage `json:"messages"`
	Tools           []chatTool    `json:"tools,omitempty"`
	Stream          bool          `json:"stream"`
	StreamOptions   any           `json:"stream_options"`
	MaxTokens       int           `json:"max_tokens,omitempty"`
	MaxCompletion   int           `json:"max_completion_tokens,omitempty"`
	ReasoningEffort string        `json:"reasoning_effort,omitempty"`
}

type chatMessage struct {
	Role       string     `json:"role"`
	Content    any        `json:"content"` // string, []chatPart or null
	ToolCalls  []chatCall `json:"tool_calls,omitempty"`
	ToolCallID string     `json:"tool_call_id,omitempty"`
}

type chatPart struct {
	Type     string    `json:"type"`
	Text     string    `json:"text,omitempty"`
	ImageURL *imageURL `json:"image_url,omitempty"`
	File     *chatFile `json:"file,omitempty"`
}

type imageURL struct {
	URL string `json:"url"`
}

type chatFile struct {
	Filename string `json:"filename"`
	FileData string `json:"file_data"`
}

type chatCall struct {
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function chatFunction `json:"function"`
}

type chatFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

type chatTool struct {
	Type     string `json:"type"`
	Function struct {
		Name        string          `json:"name"`
		Description string          `json:"description,omitempty"`
		Parameters  json.RawMessage `json:"parameters"`
	} `json:"function"`
}

func (o *OpenAI) body(req Request) ([]byte, error) {
	r := chatRequest{Model: req.Model, Stream: true, ReasoningEffort: req.Effort,
		StreamOptions: map[string]bool{"include_usage": true}}
	n := req.MaxTokens
	if n <= 0 {
		n = o.cfg.MaxTokens
	}
	if o.cfg.MaxTokensField == "max_tokens" {
		r.MaxTokens = n
	} else {
		r.MaxCompletion = n
	}
	for _, t := range req.Tools {
		if !json.Valid(t.InputSchema) {
			return nil, fmt.Errorf("write request: tool %s: input schema is not JSON", t.Name)
		}
		var c chatTool
		c.Type = "function"
		c.Function.Name, c.Function.Description, c.Function.Parameters = t.Name, t.Description, t.InputSchema
		r.Tools = append(r.Tools, c)
	}
	if strings.TrimSpace(req.System) != "" {
		r.Messages = append(r.Messages, chatMessage{Role: "system", Content: req.System})
	}
	for i, m := range tidyMessages(req.Messages) {
		out, err := chatMessages(m)
		if err != nil {
			return nil, fmt.Errorf("write request: message %d: %w", i, err)
		}
		r.Messages = append(r.Messages, out...)
	}
	return encode(r), nil
}

// chatMessages writes one message; tool results become messages of their own.
func chatMessages(m Message) ([]chatMessage, error) {
	if m.Role == RoleAssistant {
		return assistantMessage(m), nil
	}
	var out []chatMessage
	var parts []chatPart
	for _, b := range m.Content {
		if b.Type != "tool_result" {
			p, err := chatContent(b)
			if err != nil {
				return nil, err
			}
			parts = append(parts, p)
			continue
		}
		text, media, err := resultText(b)
		if err != nil {
			return nil, err
		}
		out = append(out, chatMessage{Role: "tool", ToolCallID: b.ToolUseID, Content: text})
		parts = append(parts, media...) // a tool message takes text only
	}
	if len(parts) == 0 {
		return out, nil
	}
	// Plain text goes as a string: many compatible servers take nothing else.
	var content any = parts
	if texts, ok := allText(parts); ok {
		content = texts
	}
	return append(out, chatMessage{Role: string(m.Role), Content: content}), nil
}

func allText(parts []chatPart) (string, bool) {
	texts := make([]string, len(parts))
	for i, p := range parts {
		if p.Type != "text" {
			return "", false
		}
		texts[i] = p.Text
	}
	return strings.Join(texts, "\n\n"), true
}

// assistantMessage writes text and tool calls. Blocks of other providers, such
// as thinking, are left out, and nothing of their raw form is sent.
func assistantMessage(m Message) []chatMessage {
	var texts []string
	out := chatMessage{Role: "assistant"}
	for _, b := range m.Content {
		switch b.Type {
		case "text":
			texts = append(texts, b.Text)
		case "tool_use":
			args := string(b.Input)
			if b.InputText != "" {
				args = b.InputText
			} else if !isObject(b.Input) {
				args = "{}"
			}
			out.ToolCalls = append(out.ToolCalls, chatCall{ID: b.ID, Type: "function", Function: chatFunction{b.Name, args}})
		}
	}
	if len(texts) == 0 && len(out.ToolCalls) == 0 {
		return nil
	}
	if len(texts) > 0 {
		out.Content = strings.Join(texts, "\n\n")
	}
	return []chatMessage{out}
}

// resultText is a tool result as text, and what of it is not text.
func resultText(b Block) (text string, media []chatPart, err error) {
	var texts []string
	if b.IsError {
		texts = append(texts, "Error:") // Chat Completions has no flag for it
	}
	for _, c := range b.Content {
		p, err := chatContent(c)
		switch {
		case err != nil:
			return "", nil, err
		case p.Type == "text":
			texts = append(texts, p.Text)
		default:
			texts = append(texts, "(see the "+c.Type+" below)")
			media = append(media, p)
		}
	}
	return strings.Join(texts, "\n"), media, nil
}

// chatContent maps text, image and document blocks.
func chatContent(b Block) (chatPart, error) {
	var src struct {
		Type      string `json:"type"`
		MediaType string `json:"media_type"`
		Data      string `json:"data"`
		URL       string `json:"url"`
	}
	if len(b.Source) > 0 && b.Source[0] == '{' {
		if err := json.Unmarshal(b.Source, &src); err != nil {
			return chatPart{}, fmt.Errorf("read source of %s block: %w", b.Type, err)
		}
	}
	dataURL := "data:" + src.MediaType + ";base64," + src.Data
	switch {
	case b.Type == "text":
		return chatPart{Type: "text", Text: b.Text}, nil
	case b.Type == "image" && src.Type == "base64":
		return chatPart{Type: "image_url", ImageURL: &imageURL{dataURL}}, nil
	case b.Type == "image" && src.Type == "url":
		return chatPart{Type: "image_url", ImageURL: &imageURL{src.URL}}, nil
	case b.Type == "document" && src.Type == "text":
		return chatPart{Type: "text", Text: src.Data}, nil
	case b.Type == "document" && src.Type == "base64":
		return chatPart{Type: "file", File: &chatFile{"document.pdf", dataURL}}, nil
	case b.Type == "search_result":
		return chatPart{Type: "text", Text: string(encode(b.Content))}, nil
	}
	return chatPart{}, fmt.Errorf("a %s block with source %q has no form in Chat Completions", b.Type, src.Type)
}

// toolIDs are the ids of tool calls that a conversation has used.
func toolIDs(messages []Message) map[string]bool {
	used := map[string]bool{}
	for _, m := range messages {
		for _, b := range m.Content {
			if b.Type == "tool_use" {
				used[b.ID] = true
			}
		}
	}
	return used
}

// mintID makes the id of a tool call whose server sent none, or one that the
// conversation has used before. It depends on the request and the place only.
func mintID(seed []byte, index int) string {
	sum := sha256.Sum256(append([]byte(fmt.Sprintf("call %d\n", index)), seed...))
	return "call_" + hex.EncodeToString(sum[:12])
}
