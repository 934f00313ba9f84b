package llm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/anthropics/anthropic-sdk-go/v2"
	"github.com/anthropics/anthropic-sdk-go/v2/option"
	"github.com/anthropics/anthropic-sdk-go/v2/packages/ssestream"
)

// Anthropic asks a Messages API. It uses the official SDK for the request
// (address, headers, credential) and for the frames of the stream. Blocks are
// read and written as raw JSON by us, because the SDK's typed parameters cannot
// carry every block back unchanged, and its typed stream drops the usage of a
// request that failed and events without an event line.
type Anthropic struct {
	cfg    Config
	client anthropic.Client
}

// NewAnthropic returns a provider for cfg. It reads nothing from the environment.
func NewAnthropic(cfg Config) (*Anthropic, error) {
	cfg, err := cfg.check()
	if err != nil {
		return nil, fmt.Errorf("configure anthropic provider: %w", err)
	}
	opts := []option.RequestOption{
		option.WithoutEnvironmentDefaults(),
		option.WithBaseURL(cfg.BaseURL),
		option.WithMaxRetries(0),
		option.WithHTTPClient(newDoer(cfg, classifyStatus)),
		// The SDK would else write spans, with content if a variable says so.
		option.WithoutOpenTelemetry(),
		option.WithOpenTelemetryPropagation(false),
	}
	if cfg.Version != "" {
		opts = append(opts, option.WithHeader("anthropic-version", cfg.Version))
	}
	for k, v := range cfg.Headers {
		opts = append(opts, option.WithHeader(k, v))
	}
	return &Anthropic{cfg: cfg, client: anthropic.NewClient(opts...)}, nil
}

// Stream implements Provider.
func (a *Anthropic) Stream(parent context.Context, req Request, onDelta func(Delta)) (*Reply, error) {
	ctx, w := newWatch(parent, a.cfg.Idle, a.cfg.Deadline)
	defer w.stop()
	key, err := a.cfg.key()
	if err != nil {
		return nil, finish(parent, ctx, err, Usage{}, "", key)
	}
	body, err := a.body(req)
	if err != nil {
		return nil, finish(parent, ctx, &Error{Kind: ErrRequest, Message: err.Error(), Err: err}, Usage{}, "", key)
	}
	auth := option.WithHeader("Authorization", "Bearer "+key)
	switch {
	case key == "":
		auth = option.WithHeaderDel("Authorization")
	case a.cfg.Auth == "x-api-key":
		auth = option.WithHeader("X-Api-Key", key)
	}

	// The only send of this call. Whatever fails from here on is reported, not repeated.
	var res *http.Response
	if err := a.client.Post(ctx, "v1/messages", body, &res, auth); err != nil {
		return nil, finish(parent, ctx, err, Usage{}, "", key)
	}
	defer res.Body.Close()
	s := &messageStream{onDelta: onDelta, longCache: a.cfg.CacheTTL == "1h"}
	s.reply.RequestID = requestID(res.Header)
	if err := s.read(ssestream.NewDecoder(res), w.progress); err != nil {
		return nil, finish(parent, ctx, err, s.usage(), s.reply.RequestID, key)
	}
	w.drain(res.Body)
	return s.finish(), nil
}

// sseDecoder is what both SDKs' frame decoders offer.
type sseDecoder interface {
	Next() bool
	Event() ssestream.Event
	Err() error
}

// streamEvent holds the fields of all events that we know.
type streamEvent struct {
	Type         string          `json:"type"`
	Index        int             `json:"index"`
	ContentBlock json.RawMessage `json:"content_block"`
	Message      struct {
		Model string    `json:"model"`
		Usage wireUsage `json:"usage"`
	} `json:"message"`
	Delta struct {
		Type        string          `json:"type"`
		Text        string          `json:"text"`
		PartialJSON string          `json:"partial_json"`
		Thinking    string          `json:"thinking"`
		Signature   string          `json:"signature"`
		Citation    json.RawMessage `json:"citation"`
		StopReason  string          `json:"stop_reason"`
		StopDetails json.RawMessage `json:"stop_details"`
	} `json:"delta"`
	Usage wireUsage `json:"usage"`
}

// wireUsage is usage as the API reports it; what is absent was not reported.
type wireUsage struct {
	Input         *int64 `json:"input_tokens"`
	Output        *int64 `json:"output_tokens"`
	CacheCreation *int64 `json:"cache_creation_input_tokens"`
	CacheRead     *int64 `json:"cache_read_input_tokens"`
	Split         *struct {
		M5 int64 `json:"ephemeral_5m_input_tokens"`
		H1 int64 `json:"ephemeral_1h_input_tokens"`
	} `json:"cache_creation"`
}

// merge takes over what n reports: message_delta is cumulative.
func (u *wireUsage) merge(n wireUsage) {
	for _, f := range []struct{ to, from **int64 }{
		{&u.Input, &n.Input}, {&u.Output, &n.Output}, {&u.CacheCreation, &n.CacheCreation}, {&u.CacheRead, &n.CacheRead},
	} {
		if *f.from != nil && **f.from >= 0 {
			*f.to = *f.from
		}
	}
	if n.Split != nil {
		u.Split = n.Split
	}
}

// messageStream assembles one reply from the events of a stream.
type messageStream struct {
	onDelta   func(Delta)
	longCache bool // cache writes without a split are one-hour ones
	reply     Reply
	wire      wireUsage
	open      map[int]*partial
	started   bool
	stopped   bool
}

func (s *messageStream) read(dec sseDecoder, progress func()) error {
	for dec.Next() {
		known, err := s.event(dec.Event())
		if err != nil {
			return err
		}
		if known {
			progress()
		}
		if s.stopped {
			return nil
		}
	}
	if err := dec.Err(); err != nil {
		return fmt.Errorf("read stream: %w", err)
	}
	return fmt.Errorf("read stream: it ended without message_stop: %w", io.ErrUnexpectedEOF)
}

// event takes one frame; known is false for pings and events of no meaning to us.
func (s *messageStream) event(f ssestream.Event) (known bool, err error) {
	var ev streamEvent
	if f.Type == "ping" || len(f.Data) == 0 {
		return false, nil
	}
	if err := json.Unmarshal(f.Data, &ev); err != nil {
		if !knownEvent(f.Type) && f.Type != "" {
			return false, nil
		}
		return false, fmt.Errorf("read stream event %.40q: %w", f.Type, err)
	}
	if ev.Type == "" {
		ev.Type = f.Type
	}
	if ev.Type == "error" {
		return false, streamError(f.Data)
	}
	if !knownEvent(ev.Type) {
		return false, nil
	}
	if ev.Type != "message_start" && !s.started {
		return false, errors.New("read stream: content before message_start")
	}
	switch ev.Type {
	case "message_start":
		if s.started {
			return false, errors.New("read stream: a second message_start")
		}
		s.started = true
		s.reply.Model = ev.Message.Model
		s.wire.merge(ev.Message.Usage)
	case "content_block_start":
		err = s.blockStart(ev)
	case "content_block_delta":
		err = s.blockDelta(ev)
	case "content_block_stop":
		err = s.blockStop(ev.Index)
	case "message_delta":
		if ev.Delta.StopReason != "" {
			s.reply.StopReason = ev.Delta.StopReason
		}
		if d := ev.Delta.StopDetails; len(d) > 0 && string(d) != "null" {
			s.reply.StopDetails = d
		}
		s.wire.merge(ev.Usage)
	case "message_stop":
		if len(s.open) > 0 {
			return false, errors.New("read stream: message_stop inside a content block")
		}
		if s.reply.StopReason == "" {
			return false, errors.New("read stream: message_stop without a stop reason")
		}
		s.stopped = true
	}
	return true, err
}

func knownEvent(typ string) bool {
	switch typ {
	case "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop", "error":
		return true
	}
	return false
}

// streamError is the error that a mid-stream error event tells: it has no status.
func streamError(data []byte) *Error {
	var env envelope
	if err := json.Unmarshal(data, &env); err != nil {
		return &Error{Kind: ErrServer, Retryable: true, Message: "unreadable error event: " + clip(string(data), 200)}
	}
	e := &Error{Message: env.Error.Message, RequestID: clip(env.RequestID, 200)}
	e.Kind, e.Retryable = classifyType(env.Error.Type)
	if e.Kind == ErrRequest && tooLong(env.code(), e.Message) {
		e.Kind = ErrContextWindow
	}
	if e.Message == "" {
		e.Message = clip(env.Error.Type, 100)
	}
	return e
}

func (s *messageStream) blockStart(ev streamEvent) error {
	if s.open[ev.Index] != nil || len(s.open)+len(s.reply.Content) >= maxBlocks {
		return fmt.Errorf("read stream: block %d begins twice, or more than %d blocks", ev.Index, maxBlocks)
	}
	p, err := newPartial(ev.ContentBlock)
	if err != nil {
		return fmt.Errorf("read stream: block %d: %w", ev.Index, err)
	}
	if s.open == nil {
		s.open = map[int]*partial{}
	}
	s.open[ev.Index] = p
	switch p.typ {
	case "text":
		s.emit(Delta{Index: ev.Index, Type: "text", Text: p.str("text"), Start: true})
	case "thinking", "redacted_thinking":
		s.emit(Delta{Index: ev.Index, Type: "thinking", Start: true})
	}
	return nil
}

func (s *messageStream) blockDelta(ev streamEvent) error {
	p := s.open[ev.Index]
	if p == nil {
		return fmt.Errorf("read stream: delta for block %d, which is not open", ev.Index)
	}
	switch d := ev.Delta; d.Type {
	case "text_delta":
		p.text.WriteString(d.Text)
		s.emit(Delta{Index: ev.Index, Type: "text", Text: d.Text})
	case "input_json_delta":
		p.input.WriteString(d.PartialJSON)
	case "thinking_delta":
		p.thinking.WriteString(d.Thinking)
		s.emit(Delta{Index: ev.Index, Type: "thinking"})
	case "signature_delta":
		p.signature.WriteString(d.Signature)
	case "citations_delta":
		p.citations = append(p.citations, d.Citation)
	}
	return nil // an unknown delta is ignored
}

func (s *messageStream) blockStop(index int) error {
	p := s.open[index]
	if p == nil {
		return fmt.Errorf("read stream: block %d stops, which is not open", index)
	}
	delete(s.open, index)
	b, err := p.block()
	if err != nil {
		return fmt.Errorf("read stream: block %d: %w", index, err)
	}
	s.reply.Content = append(s.reply.Content, b)
	return nil
}

func (s *messageStream) emit(d Delta) {
	if s.onDelta != nil {
		s.onDelta(d)
	}
}

// usage is what was reported so far.
func (s *messageStream) usage() Usage {
	val := func(p *int64) int64 {
		if p == nil {
			return 0
		}
		return *p
	}
	u := Usage{Input: val(s.wire.Input), Output: val(s.wire.Output), CacheRead: val(s.wire.CacheRead)}
	if sp := s.wire.Split; sp != nil {
		u.CacheCreation5m, u.CacheCreation1h = max(sp.M5, 0), max(sp.H1, 0)
	}
	// What the total has beyond the split was written with our own lifetime.
	if rest := val(s.wire.CacheCreation) - u.CacheCreation5m - u.CacheCreation1h; rest > 0 {
		if s.longCache {
			u.CacheCreation1h += rest
		} else {
			u.CacheCreation5m += rest
		}
	}
	return u
}

func (s *messageStream) finish() *Reply {
	s.reply.Usage = s.usage()
	return &s.reply
}
