package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

// maxDeltaTypes is how many values event_deltas may have (reference section 10.1).
const maxDeltaTypes = 100

// streamEvents shows a session's log as it grows (reference section 10).
func (s *server) streamEvents(ctx context.Context, c *call) (any, error) {
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	return nil, s.stream(ctx, c, x)
}

// streamThread shows the primary thread, which sees what its session sees.
func (s *server) streamThread(ctx context.Context, c *call) (any, error) {
	x, err := s.thread(ctx, c)
	if err != nil {
		return nil, err
	}
	return nil, s.stream(ctx, c, x)
}

// stream follows the log from the cursor of the request, or from now. An error
// is returned only before the answer has begun; after that the stream just
// ends, and the client comes back with its cursor.
func (s *server) stream(ctx context.Context, c *call, x store.Session) error {
	previews, err := c.query.deltas()
	if err != nil {
		return err
	}
	from, reset, err := s.begin(ctx, c, x)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f, err := s.db.Follow(ctx, x.Workspace, x.ID, from.seq)
	if err != nil {
		return missing(err, "session", string(x.ID))
	}
	defer f.Close()
	var deltas <-chan session.Delta
	if len(previews) > 0 {
		ch, stop := s.sessions.Deltas(x.ID)
		defer stop()
		deltas = ch
	}
	st := &eventStream{s: s, c: c, w: c.w, rc: http.NewResponseController(c.w), session: x, seq: from.seq, skip: from.queued,
		previews: previews, done: map[string]bool{}}
	st.terminated = x.Status == store.StatusTerminated
	if err := st.open(); err != nil {
		return nil // the client is gone
	}
	if reset != nil {
		if s.cfg.Reset != nil {
			s.cfg.Reset()
		}
		if st.frame("", reset) != nil || st.flush() != nil {
			return nil
		}
	}
	defer func() { _ = st.rc.SetWriteDeadline(time.Time{}) }() // the connection may carry another request
	if st.terminated && from.seq >= x.Head {
		return nil // nothing follows
	}
	if err := st.run(ctx, f, deltas); err != nil && ctx.Err() == nil && !errors.Is(err, errSlow) {
		s.log.Warn("stream ended", "session", x.ID, "request", c.request, "err", err)
	}
	return nil
}

// deltas reads event_deltas: the types whose previews are wanted.
func (q query) deltas() (map[string]bool, error) {
	values := q.list("event_deltas")
	if len(values) > maxDeltaTypes {
		return nil, api.Invalid("event_deltas", "holds %d values; at most %d are allowed", len(values), maxDeltaTypes)
	}
	out := map[string]bool{}
	for _, v := range values {
		// agent.tool_use is an extension: the output of a command while it runs.
		// Official clients do not ask for it.
		switch api.EventType(v) {
		case api.TypeAgentMessage, api.TypeAgentThinking, api.TypeAgentToolUse:
		default:
			return nil, api.Invalid("event_deltas", "%q has no previews; use agent.message, agent.thinking or agent.tool_use", v)
		}
		out[v] = true
	}
	return out, nil
}

// start is where a stream begins.
type start struct {
	seq    store.Seq
	queued map[string]bool // queued events that are older than the stream
}

// begin finds where the stream starts: after Last-Event-ID, which is a seq or
// the id of an event, or now. A cursor that the log does not know begins now
// too, with a reset before it.
func (s *server) begin(ctx context.Context, c *call, x store.Session) (start, []byte, error) {
	last := strings.TrimSpace(c.r.Header.Get("Last-Event-ID"))
	if last == "" {
		last = c.query.get("last_event_id") // for clients that cannot set headers
	}
	var reset []byte
	if last != "" {
		seq, err := s.position(ctx, x, last)
		if err == nil {
			return start{seq: seq}, nil, nil
		}
		if !errors.Is(err, store.ErrNotFound) {
			return start{}, nil, err
		}
		// The log is complete, so the oldest cursor is the one before its first entry.
		if reset, err = api.Encode(map[string]string{"type": string(api.TypeStreamReset), "reason": "the cursor is not known to this session",
			"last_event_id": plainID(last), "oldest_cursor": "0"}); err != nil {
			return start{}, nil, err
		}
	}
	queued, err := s.db.Inbox(ctx, x.Workspace, x.ID)
	if err != nil {
		return start{}, nil, missing(err, "session", string(x.ID))
	}
	from := start{seq: x.Head, queued: map[string]bool{}}
	for _, in := range queued {
		from.queued[in.ID] = true
	}
	return from, reset, nil
}

func (s *server) position(ctx context.Context, x store.Session, last string) (store.Seq, error) {
	if n, err := strconv.ParseInt(last, 10, 64); err == nil {
		if n < 0 || store.Seq(n) > x.Head {
			return 0, store.ErrNotFound
		}
		return store.Seq(n), nil
	}
	return s.db.SeqOf(ctx, x.Workspace, x.ID, store.EventID(plainID(last)))
}

// errSlow: the reader did not take a frame in time and was cut off.
var errSlow = errors.New("reader is too slow")

// eventStream writes one stream. It is used by one goroutine.
type eventStream struct {
	s          *server
	c          *call
	w          http.ResponseWriter
	rc         *http.ResponseController
	session    store.Session
	seq        store.Seq       // of the newest entry that was taken
	skip       map[string]bool // queued events not to be shown as queued
	previews   map[string]bool
	done       map[string]bool // previews that are over: the final event was sent
	terminated bool            // the log has nothing after session.Head
	buf        bytes.Buffer
}

// open flushes the headers before any event, so that a client may begin to list.
func (st *eventStream) open() error {
	h := st.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	st.w.WriteHeader(http.StatusOK)
	return st.flush()
}

// flush writes what was gathered, in at most WriteTimeout.
func (st *eventStream) flush() error {
	if err := st.rc.SetWriteDeadline(time.Now().Add(st.s.cfg.WriteTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("%w: %w", errSlow, err)
	}
	if st.buf.Len() > 0 {
		_, err := st.w.Write(st.buf.Bytes())
		st.buf.Reset()
		if err != nil {
			return fmt.Errorf("%w: %w", errSlow, err)
		}
	}
	if err := st.rc.Flush(); err != nil {
		return fmt.Errorf("%w: %w", errSlow, err)
	}
	return nil
}

// maxDone bounds how many events are remembered as sent.
const maxDone = 1000

// maxGathered bounds the bytes gathered before they are written.
const maxGathered = 256 << 10

// frame gathers one frame: the name is the JSON's type, id the cursor or empty.
func (st *eventStream) frame(id string, data []byte) error {
	name := typeOf(data)
	if name == "" {
		return fmt.Errorf("event without type in session %s", st.session.ID)
	}
	if id != "" {
		fmt.Fprintf(&st.buf, "id: %s\n", id)
	}
	fmt.Fprintf(&st.buf, "event: %s\ndata: %s\n\n", name, data)
	if st.buf.Len() >= maxGathered {
		return st.flush()
	}
	return nil
}

func typeOf(data []byte) string {
	var head struct {
		Type string `json:"type"`
	}
	if api.Decode(data, &head) != nil || strings.ContainsAny(head.Type, "\r\n") {
		return ""
	}
	return head.Type
}

// batch is what one Next of the follower gave.
type batch struct {
	items []store.FollowItem
	err   error
}

// run writes until the session ends, the client leaves or is too slow.
func (st *eventStream) run(ctx context.Context, f *store.Follower, deltas <-chan session.Delta) error {
	batches := make(chan batch)
	stopped := make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	go func() { // ends with ctx, which run cancels and then waits for it
		defer close(stopped)
		for {
			items, err := f.Next(ctx)
			select {
			case batches <- batch{items, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	defer func() { cancel(); <-stopped }()
	ping := time.NewTicker(st.s.cfg.PingEvery)
	defer ping.Stop()
	for {
		var end bool
		var err error
		live := deltas
		if st.seq < st.session.Head {
			live = nil // previews are of what comes behind the log that is still to be shown
		}
		select {
		case b := <-batches:
			end, err = st.takeInOrder(b, live)
		case d := <-live:
			err = st.delta(d)
		case <-ping.C:
			end, err = st.ping()
		case <-ctx.Done():
			return ctx.Err()
		}
		if err == nil {
			err = st.flush()
		}
		if end || err != nil {
			return err
		}
	}
}

// ping says that the stream lives, as long as its key does: a revoked key sees
// nothing later than the next ping.
func (st *eventStream) ping() (end bool, err error) {
	if _, err := st.s.cfg.WhoIs(st.c.r); err != nil {
		if e, _ := wireError(err); e.Type == api.ErrAuthentication {
			return true, st.fail(e)
		}
		// The store does not answer now; that does not make the key a bad one.
	}
	_, err = st.buf.WriteString("event: ping\ndata: {\"type\":\"ping\"}\n\n")
	return false, err
}

// fail writes an error frame, with which official clients end the stream.
func (st *eventStream) fail(e *api.Error) error {
	body, err := api.Encode(e.Body(st.c.request))
	if err != nil {
		return fmt.Errorf("encode error: %w", err)
	}
	return st.frame("", body)
}

// takeInOrder writes a batch where it belongs among the previews. What was
// published of an event before it was committed waits in deltas by now: previews
// of answers come before what ends them, those of a tool use behind its event,
// and not at all behind its result.
func (st *eventStream) takeInOrder(b batch, deltas <-chan session.Delta) (end bool, err error) {
	var behind []session.Delta
	for range cap(deltas) {
		if len(deltas) == 0 {
			break
		}
		d := <-deltas
		if d.Type == string(api.TypeAgentToolUse) {
			behind = append(behind, d)
		} else if err := st.delta(d); err != nil {
			return false, err
		}
	}
	if end, err = st.take(b); end || err != nil {
		return end, err
	}
	for _, d := range behind {
		if err := st.delta(d); err != nil {
			return false, err
		}
	}
	return false, nil
}

// take writes a batch; end says that nothing will follow.
func (st *eventStream) take(b batch) (end bool, err error) {
	if errors.Is(b.err, store.ErrNotFound) {
		return true, st.deleted()
	}
	if errors.Is(b.err, store.ErrDamaged) {
		e, _ := wireError(b.err)
		return true, errors.Join(st.fail(e), st.flush(), b.err)
	}
	if b.err != nil {
		return true, b.err
	}
	for _, it := range b.items {
		switch {
		case it.Queued != nil:
			err = st.queued(*it.Queued)
		case it.Entry.Kind == store.KindEvent:
			end, err = st.event(*it.Entry)
		}
		if it.Entry != nil {
			st.seq = it.Entry.Seq
			end = end || st.terminated && st.seq >= st.session.Head
		}
		if end || err != nil {
			return end, err
		}
	}
	return false, nil
}

func (st *eventStream) queued(in store.Inbox) error {
	if in.Kind != store.InboxEvent || st.skip[in.ID] {
		return nil
	}
	w, err := wireQueued(in)
	if err != nil {
		return err
	}
	return st.frame("", w)
}

func (st *eventStream) event(e store.Entry) (end bool, err error) {
	w, err := wireEntry(e)
	if err != nil {
		return true, err
	}
	delete(st.skip, e.ID)
	if id := st.closes(e); id != "" {
		if len(st.done) >= maxDone {
			clear(st.done) // previews come with their event or not at all
		}
		st.done[id] = true
	}
	return e.Type == string(api.TypeSessionStatusTerminated), st.frame(strconv.FormatInt(int64(e.Seq), 10), w)
}

// closes is the id whose previews an event ends: its own, or of a tool use, which
// is followed by its previews, that of its result.
func (st *eventStream) closes(e store.Entry) string {
	switch typ := api.EventType(e.Type); {
	case typ == api.TypeAgentToolResult && st.previews[string(api.TypeAgentToolUse)]:
		var b struct {
			ToolUseID string `json:"tool_use_id"`
		}
		if len(e.Body) == 0 || json.Unmarshal(e.Body, &b) != nil {
			return "" // erased
		}
		return b.ToolUseID
	case typ == api.TypeAgentToolUse || !st.previews[e.Type]:
		return ""
	}
	return e.ID
}

// delta writes a preview, if it was asked for and its event is not there yet; of
// a tool use, what its command prints while it runs. Text may be lost under load;
// the final event, and of a tool use its result, is authoritative.
func (st *eventStream) delta(d session.Delta) error {
	if !st.previews[d.Type] || st.done[string(d.Event)] {
		return nil
	}
	var body api.EventBody
	switch {
	case d.Start:
		body = &api.EventStart{Event: api.EventPreview{Type: api.EventType(d.Type), ID: string(d.Event)}}
	case d.Type != string(api.TypeAgentThinking) && d.Text != "":
		body = api.TextDelta(string(d.Event), int64(d.Index), d.Text)
	default:
		return nil
	}
	w, err := api.Encode(api.Event{Body: body})
	if err != nil {
		return fmt.Errorf("encode preview: %w", err)
	}
	return st.frame("", w)
}

// deleted is the last frame of every stream of a deleted session. It is not in
// the log, which is gone; its id is made of the session's, so that all streams agree.
func (st *eventStream) deleted() error {
	id := "sevt_" + strings.TrimPrefix(string(st.session.ID), "sesn_")
	now := st.s.db.Now()
	w, err := wireBody(id, string(api.TypeSessionDeleted), &now, nil)
	if err != nil {
		return err
	}
	return st.frame("", w)
}
