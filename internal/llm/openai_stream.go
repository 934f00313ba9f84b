package llm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"sort"
	"strings"

	"github.com/openai/openai-go/v3/packages/ssestream"
)

// chatChunk holds the fields of a chunk that we know.
type chatChunk struct {
	Model   string          `json:"model"`
	Error   json.RawMessage `json:"error"`
	Choices []struct {
		Index int `json:"index"`
		Delta struct {
			Content          string `json:"content"`
			Refusal          string `json:"refusal"`
			ReasoningContent string `json:"reasoning_content"`
			Reasoning        string `json:"reasoning"`
			ToolCalls        []struct {
				Index    *int   `json:"index"`
				ID       string `json:"id"`
				Function struct {
					Name      string          `json:"name"`
					Arguments json.RawMessage `json:"arguments"`
				} `json:"function"`
			} `json:"tool_calls"`
		} `json:"delta"`
		FinishReason string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		Prompt     int64 `json:"prompt_tokens"`
		Completion int64 `json:"completion_tokens"`
		Details    struct {
			Cached  int64 `json:"cached_tokens"`
			Written int64 `json:"cache_write_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

type chatToolCall struct {
	id, name string
	args     strings.Builder
}

// chatStream assembles one reply from the chunks of a stream.
type chatStream struct {
	onDelta func(Delta)
	used    map[string]bool // tool call ids of the conversation
	seed    []byte          // of minted ids
	reply   Reply
	text    strings.Builder
	calls   map[int]*chatToolCall
	last    int // index of the newest tool call
	refused bool
	thought bool
	reason  string
}

type chatDecoder interface {
	Next() bool
	Event() ssestream.Event
	Err() error
}

func (s *chatStream) read(dec chatDecoder, progress func()) error {
	for dec.Next() {
		data := bytes.TrimSpace(dec.Event().Data)
		if string(data) == "[DONE]" {
			return s.ended()
		}
		known, err := s.chunk(data)
		if err != nil {
			return err
		}
		if known {
			progress()
		}
	}
	if err := dec.Err(); err != nil {
		return fmt.Errorf("read stream: %w", err)
	}
	return s.ended() // some servers close without [DONE]
}

func (s *chatStream) ended() error {
	if s.reason == "" {
		return fmt.Errorf("read stream: it ended without a finish reason: %w", io.ErrUnexpectedEOF)
	}
	for i, c := range s.calls {
		if c.name == "" {
			return fmt.Errorf("read stream: tool call %d has no name", i)
		}
	}
	return nil
}

func (s *chatStream) chunk(data []byte) (known bool, err error) {
	if len(data) == 0 {
		return false, nil
	}
	var c chatChunk
	if err := json.Unmarshal(data, &c); err != nil {
		return false, fmt.Errorf("read stream chunk: %w", err)
	}
	if len(c.Error) > 0 && string(c.Error) != "null" {
		return false, chatError(data)
	}
	if c.Model != "" {
		s.reply.Model = c.Model
	}
	if u := c.Usage; u != nil {
		known = true
		cached, written := max(u.Details.Cached, 0), max(u.Details.Written, 0)
		s.reply.Usage = Usage{Input: max(u.Prompt-cached-written, 0), Output: max(u.Completion, 0),
			CacheRead: cached, CacheCreation5m: written}
	}
	for _, ch := range c.Choices {
		if ch.Index != 0 {
			continue // one choice is asked for
		}
		known = true
		d := ch.Delta
		if d.ReasoningContent != "" || d.Reasoning != "" {
			s.emit(Delta{Type: "thinking", Start: !s.thought})
			s.thought = true
		}
		if d.Refusal != "" {
			s.refused = true
		}
		s.write(d.Content + d.Refusal)
		for _, t := range d.ToolCalls {
			if err := s.call(t.Index, t.ID, t.Function.Name, t.Function.Arguments); err != nil {
				return known, err
			}
		}
		if ch.FinishReason != "" {
			s.reason = ch.FinishReason
		}
	}
	return known, nil
}

// call takes a fragment of a tool call. A fragment without index belongs to
// the newest call, or begins one if it brings an id or a name of its own.
func (s *chatStream) call(index *int, id, name string, args json.RawMessage) error {
	i := s.last
	switch {
	case index != nil:
		i = *index
	case len(s.calls) > 0 && (id != "" && id != s.calls[s.last].id || id == "" && name != ""):
		i = s.last + 1
	}
	if s.calls == nil {
		s.calls = map[int]*chatToolCall{}
	}
	c := s.calls[i]
	if c == nil {
		if len(s.calls) >= maxBlocks {
			return fmt.Errorf("read stream: more than %d tool calls", maxBlocks)
		}
		c = &chatToolCall{}
		s.calls[i] = c
	}
	s.last = i
	if id != "" {
		c.id = id
	}
	if name != "" {
		c.name = name
	}
	var text string
	switch {
	case len(args) == 0 || string(args) == "null":
	case json.Unmarshal(args, &text) == nil:
		c.args.WriteString(text)
	default:
		c.args.Write(args) // some servers send an object instead of a string
	}
	return nil
}

func (s *chatStream) write(text string) {
	if text == "" {
		return
	}
	s.emit(Delta{Type: "text", Text: text, Start: s.text.Len() == 0})
	s.text.WriteString(text)
}

func (s *chatStream) emit(d Delta) {
	if s.onDelta != nil {
		s.onDelta(d)
	}
}

// chatError classifies an error chunk: it carries a code or a type, no status.
func chatError(data []byte) *Error {
	var env envelope
	if json.Unmarshal(data, &env) != nil {
		return &Error{Kind: ErrServer, Retryable: true, Message: "error in stream: " + clip(string(data), 200)}
	}
	e := &Error{Message: env.Error.Message, Kind: ErrServer, Retryable: true}
	switch code := env.code(); {
	case tooLong(code, e.Message):
		e.Kind, e.Retryable = ErrContextWindow, false
	case code == "insufficient_quota" || env.Error.Type == "insufficient_quota" || code == "402":
		e.Kind, e.Retryable = ErrBilling, false
	case code == "rate_limit_exceeded" || env.Error.Type == "rate_limit_error" || code == "429":
		e.Kind = ErrRateLimited
	case env.Error.Type == "overloaded_error" || code == "529":
		e.Kind = ErrOverloaded
	case env.Error.Type == "invalid_request_error" || len(code) == 3 && code[0] == '4' && code != "408" && code != "409":
		e.Kind, e.Retryable = ErrRequest, false
	}
	if e.Message == "" {
		e.Message = "error in stream: " + clip(string(data), 200)
	}
	return e
}

func (s *chatStream) finish() *Reply {
	r := &s.reply
	if s.text.Len() > 0 {
		r.Content = append(r.Content, Block{Type: "text", Text: strings.ToValidUTF8(s.text.String(), "\uFFFD")})
	}
	order := make([]int, 0, len(s.calls))
	for i := range s.calls {
		order = append(order, i)
	}
	sort.Ints(order)
	for n, i := range order {
		c := s.calls[i]
		b := Block{Type: "tool_use", ID: c.id, Name: c.name, Input: json.RawMessage(`{}`)}
		if b.ID == "" || s.used[b.ID] {
			b.ID = mintID(s.seed, n)
		}
		s.used[b.ID] = true
		if args := c.args.String(); strings.TrimSpace(args) != "" {
			b.Input, b.InputText = toolInput(args)
		}
		r.Content = append(r.Content, b)
	}
	r.StopReason = s.stopReason()
	if r.StopReason == "refusal" {
		r.StopDetails = json.RawMessage(`{"type":"refusal","category":null,"explanation":null}`)
	}
	return r
}

func (s *chatStream) stopReason() string {
	switch {
	case s.reason == "content_filter" || s.refused:
		return "refusal"
	case s.reason == "length":
		return "max_tokens"
	case len(s.calls) > 0:
		return "tool_use" // whatever the server calls it
	}
	return "end_turn"
}
