package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Limits and times of streams.
const (
	// StreamRetries is how often in a row a stream is opened again without
	// anything new having come.
	StreamRetries = 10
	// StreamSilence is how long a stream may be silent before it counts as cut;
	// the server sends a ping every 10 to 15 seconds.
	StreamSilence = 45 * time.Second
)

// StreamOptions says what a stream carries.
type StreamOptions struct {
	// After is the seq after which the stream begins; 0 is the whole log.
	After int64
	// Live begins with what happens from now on; After is not looked at.
	Live bool
	// Thread follows one thread of the session.
	Thread string
	// Deltas are the types that are previewed: TypeAgentMessage, TypeAgentThinking,
	// TypeAgentToolUse (what a command prints). What is under way when a connection
	// opens begins with EventStart and what there is of it, so also again after a cut.
	Deltas []EventType
	// Silence replaces StreamSilence when not 0.
	Silence time.Duration
}

// Stream follows a session's log: what is there already, then what comes. It
// opens the connection again when it is cut and goes on where it was, so that
// nothing is missing and nothing but a queued client event shows twice. A
// cursor that the server does not know (stream.reset, which is yielded) is
// made good from the list. Frames without a place in the log (deltas, queued
// events) may be lost when the connection is cut.
//
// The sequence ends after session.deleted and session.status_terminated, after
// an error, and when the caller leaves or ctx ends (which is an error).
func (c *Client) Stream(ctx context.Context, session string, o StreamOptions) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		s := &follower{c: c, session: session, o: o, yield: yield, cursor: strconv.FormatInt(o.After, 10)}
		if err := s.run(ctx); err != nil {
			yield(Event{}, plain(err))
		}
	}
}

// follower is one running Stream. It is used by one goroutine.
type follower struct {
	c       *Client
	session string
	o       StreamOptions
	yield   func(Event, error) bool

	cursor string    // Last-Event-ID of the next connection
	last   time.Time // processed_at of the newest event that was yielded
	fails  int       // connections in a row that brought nothing new
}

// Why a connection was left, other than by an error.
var (
	errLeft  = errors.New("caller left")
	errEnded = errors.New("session ended")
)

func (s *follower) run(ctx context.Context) error {
	if s.o.Live {
		if err := s.findHead(ctx); err != nil {
			return err
		}
	}
	for {
		err := s.connect(ctx)
		switch {
		case errors.Is(err, errLeft), errors.Is(err, errEnded):
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
		again, after := retryable(err)
		if s.fails++; !again || s.fails > StreamRetries {
			return fmt.Errorf("follow session %s: %w", s.session, err)
		}
		if err := s.c.pause(ctx, s.fails-1, after); err != nil {
			return context.Cause(ctx)
		}
	}
}

// findHead makes the newest event of the log the cursor.
func (s *follower) findHead(ctx context.Context) error {
	s.cursor = "0" // of an empty log
	p := EventListParams{Order: "desc", Limit: 20}
	if s.o.Thread != "" {
		p = EventListParams{} // lists of threads only go up
	}
	for e, err := range s.events(ctx, p) {
		if err != nil {
			return err
		}
		if e.ProcessedAt == nil || !e.ProcessedAt.After(s.last) {
			continue
		}
		s.cursor, s.last = e.ID, e.ProcessedAt.Time
		if s.o.Thread == "" {
			return nil
		}
	}
	return nil
}

func (s *follower) path() string {
	if s.o.Thread != "" {
		return sessionPath(s.session, "/threads/"+pathID(s.o.Thread))
	}
	return sessionPath(s.session, "/events")
}

// events lists what the stream shows.
func (s *follower) events(ctx context.Context, p EventListParams) iter.Seq2[Event, error] {
	path := s.path()
	if s.o.Thread != "" {
		path += "/events"
	}
	return all[Event](ctx, s.c, path, p.Query())
}

// connect opens the stream once and yields until it ends.
func (s *follower) connect(ctx context.Context) error {
	q := url.Values{}
	for _, t := range s.o.Deltas {
		q.Add("event_deltas[]", string(t))
	}
	silence := s.o.Silence
	if silence == 0 {
		silence = StreamSilence
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(silence, func() { cancel(fmt.Errorf("stream was silent for %s", silence)) })
	defer silent.Stop()

	resp, err := s.c.send(ctx, request{method: http.MethodGet, path: s.path() + "/stream", query: q,
		header: http.Header{"Last-Event-Id": {s.cursor}}})
	if err != nil {
		return causeOf(ctx, err)
	}
	defer resp.Body.Close()
	r := newFrameReader(resp.Body, maxFrame)
	r.alive = func() { silent.Reset(silence) }
	for {
		f, err := r.next()
		if err == io.EOF {
			return io.ErrUnexpectedEOF
		}
		if err != nil {
			return causeOf(ctx, err)
		}
		silent.Stop() // the caller may take its time
		if err := s.take(ctx, f); err != nil {
			return err
		}
		silent.Reset(silence)
	}
}

// causeOf prefers why the connection was given up to how that looked.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

// take handles one frame.
func (s *follower) take(ctx context.Context, f frame) error {
	if len(f.Data) == 0 || f.Event == "ping" || f.Event == "" {
		return nil
	}
	if f.Event == "error" {
		return s.errorFrame(f.Data)
	}
	var e Event
	if err := unmarshal(f.Data, &e); err != nil {
		return finalError{fmt.Errorf("read frame %s of session %s: %w", f.Event, s.session, err)}
	}
	_, deleted := e.Body.(*SessionDeleted) // is not in the log
	if e.ID != "" && e.ProcessedAt != nil && !deleted {
		if !e.ProcessedAt.After(s.last) {
			return nil // shown already
		}
		s.last = e.ProcessedAt.Time
		s.cursor = e.ID
		if f.HasID {
			s.cursor = f.ID
			e.Seq, _ = strconv.ParseInt(f.ID, 10, 64)
		}
		s.fails = 0
	}
	if !s.yield(e, nil) {
		return errLeft
	}
	switch e.Body.(type) {
	case *SessionDeleted, *SessionStatusTerminated:
		return errEnded
	case *StreamReset:
		return s.catchUp(ctx)
	}
	return nil
}

// catchUp yields from the list what came after the newest event that was
// yielded. The stream is open already, so there is no gap behind it.
func (s *follower) catchUp(ctx context.Context) error {
	p := EventListParams{Order: "asc"}
	if !s.last.IsZero() {
		p.CreatedAt.GT = At(s.last)
	}
	for e, err := range s.events(ctx, p) {
		if err != nil {
			return err
		}
		if e.ProcessedAt == nil || !e.ProcessedAt.After(s.last) {
			continue
		}
		s.last, s.cursor, s.fails = e.ProcessedAt.Time, e.ID, 0
		if !s.yield(e, nil) {
			return errLeft
		}
		if _, ok := e.Body.(*SessionStatusTerminated); ok {
			return errEnded
		}
	}
	return nil
}

// errorFrame reads the error that ends a stream.
func (s *follower) errorFrame(data []byte) error {
	var b ErrorBody
	if err := unmarshal(data, &b); err != nil || b.Error.Message == "" {
		return finalError{fmt.Errorf("stream of session %s ended with an unreadable error", s.session)}
	}
	e := b.Error
	e.Status, e.RequestID = statusOf(e.Type), b.RequestID
	if again, _ := retryable(&answerError{err: &e}); again {
		return &answerError{err: &e}
	}
	return finalError{&e}
}
