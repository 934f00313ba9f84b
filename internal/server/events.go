package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

// maxEventPage is the largest page of events (reference section 1.7).
const maxEventPage = 1000

// wireEntry is the wire form of an event of the log.
func wireEntry(e store.Entry) (json.RawMessage, error) {
	at := e.At
	return wireBody(e.ID, e.Type, &at, e.Body)
}

// wireQueued is the wire form of a client event that is accepted and not yet logged.
func wireQueued(in store.Inbox) (json.RawMessage, error) {
	return wireBody(in.ID, in.Type, nil, in.Body)
}

func wireBody(id, typ string, at *time.Time, body []byte) (json.RawMessage, error) {
	if len(body) == 0 { // erased
		var err error
		if body, err = api.Encode(map[string]string{"type": typ}); err != nil {
			return nil, err
		}
	}
	w, err := api.WireEvent(id, at, body)
	if err != nil {
		return nil, fmt.Errorf("read event %s: %w", id, internal(err))
	}
	return w, nil
}

// eventQuery is a list of events as a request asks for it.
type eventQuery struct {
	list  string // of which list cursors are
	limit int
	desc  bool
	types []string
	at    span
	from  *cursor
}

// eventQuery reads the query of reference section 1.7.
func (q query) eventQuery(list string) (e eventQuery, err error) {
	e.list = list
	if e.limit, err = q.limit(maxEventPage, maxEventPage); err != nil {
		return e, err
	}
	order, err := q.order("asc")
	if err != nil {
		return e, err
	}
	e.desc = order == "desc"
	for _, t := range q.list("types") {
		if !api.KnownEventType(api.EventType(t)) {
			return e, api.Invalid("types", "%q is not a type of stored events", t)
		}
		e.types = append(e.types, t)
	}
	if e.at, err = q.span("created_at"); err != nil {
		return e, err
	}
	if e.from, err = q.cursor(list, order); err != nil {
		return e, err
	}
	if e.from != nil && e.from.At != 0 && !e.at.covers(e.from.at()) {
		return e, api.Invalid("page", "lies outside of the created_at filter; start again without page")
	}
	return e, nil
}

func (s *server) listEvents(ctx context.Context, c *call) (any, error) {
	q, err := c.query.eventQuery("events of " + c.id("session"))
	if err != nil {
		return nil, err
	}
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	return s.events(ctx, x, q)
}

// events reads one page: the log, and what is queued behind it. In the cursor N
// is the seq of the last event given (0: none), M the number of the last queued
// one (0: none).
//
// The inbox is read before the log: an event that is logged between the two
// readings shows in both, under one id, and is left out of the queued ones. In
// the other order it could show in neither.
func (s *server) events(ctx context.Context, x store.Session, q eventQuery) (any, error) {
	queued, err := s.queued(ctx, x, q)
	if err != nil {
		return nil, err
	}
	if q.desc {
		return s.eventsDesc(ctx, x, q, queued)
	}
	var after store.Seq
	var seenN int64
	var lastAt time.Time
	if q.from != nil {
		after, seenN, lastAt = store.Seq(q.from.N), q.from.M, q.from.at()
	}
	entries, err := s.db.Entries(ctx, x.Workspace, x.ID, q.span(after, 0))
	if err != nil {
		return nil, missing(err, "session", string(x.ID))
	}
	out := api.Page[json.RawMessage]{Data: api.List[json.RawMessage]{}}
	logged := map[string]bool{}
	for _, e := range entries[:min(len(entries), q.limit)] {
		if err := add(&out, wireEntry, e); err != nil {
			return nil, err
		}
		after, lastAt = e.Seq, e.At
		logged[e.ID] = true
	}
	more := len(entries) > q.limit
	for _, in := range queued {
		if more || in.N <= seenN || logged[in.ID] {
			continue
		}
		if len(out.Data) == q.limit {
			more = true
			break
		}
		if err := add(&out, wireQueued, in); err != nil {
			return nil, err
		}
		seenN = in.N
	}
	if more {
		out.NextPage = next(cursor{List: q.list, Order: "asc", At: micros(lastAt), N: int64(after), M: seenN})
	}
	return out, nil
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// eventsDesc gives what is queued first, newest first, then the log backwards.
func (s *server) eventsDesc(ctx context.Context, x store.Session, q eventQuery, queued []store.Inbox) (any, error) {
	out := api.Page[json.RawMessage]{Data: api.List[json.RawMessage]{}}
	pos := cursor{List: q.list, Order: "desc"}
	if q.from != nil {
		pos = *q.from
	}
	entries, err := s.entriesBefore(ctx, x, q, pos.N)
	if err != nil {
		return nil, missing(err, "session", string(x.ID))
	}
	logged := map[string]bool{}
	for _, e := range entries {
		logged[e.ID] = true
	}
	slices.Reverse(queued)
	for _, in := range queued {
		if pos.N != 0 || pos.M != 0 && in.N >= pos.M || logged[in.ID] {
			continue
		}
		if len(out.Data) == q.limit {
			out.NextPage = next(pos)
			return out, nil
		}
		if err := add(&out, wireQueued, in); err != nil {
			return nil, err
		}
		pos.M = in.N
	}
	for _, e := range entries {
		if len(out.Data) == q.limit {
			out.NextPage = next(pos)
			return out, nil
		}
		if err := add(&out, wireEntry, e); err != nil {
			return nil, err
		}
		pos.N, pos.At = int64(e.Seq), e.At.UnixMicro()
	}
	return out, nil
}

func (s *server) entriesBefore(ctx context.Context, x store.Session, q eventQuery, before int64) ([]store.Entry, error) {
	if before == 1 {
		return nil, nil
	}
	return s.db.Entries(ctx, x.Workspace, x.ID, q.span(0, store.Seq(max(0, before-1))))
}

func add[R any](out *api.Page[json.RawMessage], wire func(R) (json.RawMessage, error), r R) error {
	w, err := wire(r)
	if err == nil {
		out.Data = append(out.Data, w)
	}
	return err
}

// span is the range of the log that a query reads, one entry more than it shows.
func (q eventQuery) span(after, until store.Seq) store.Range {
	return store.Range{After: after, Until: until, Limit: q.limit + 1, Desc: q.desc, Kinds: []store.Kind{store.KindEvent},
		Types: q.types, AtGT: q.at.gt, AtGTE: q.at.gte, AtLT: q.at.lt, AtLTE: q.at.lte}
}

// queued lists the client events that are accepted and not yet logged, by
// arrival. A filter by time leaves them out: they have none yet.
func (s *server) queued(ctx context.Context, x store.Session, q eventQuery) ([]store.Inbox, error) {
	if !q.at.empty() {
		return nil, nil
	}
	rows, err := s.db.Inbox(ctx, x.Workspace, x.ID)
	if err != nil {
		return nil, missing(err, "session", string(x.ID))
	}
	rows = slices.DeleteFunc(rows, func(in store.Inbox) bool {
		return in.Kind != store.InboxEvent || len(q.types) > 0 && !slices.Contains(q.types, in.Type)
	})
	slices.SortFunc(rows, func(a, b store.Inbox) int { return int(a.N - b.N) })
	return rows, nil
}

// sent is the answer of a send.
type sent struct {
	Data api.List[json.RawMessage] `json:"data"`
}

func (s *server) sendEvents(ctx context.Context, c *call) (any, error) {
	var req api.SendEvents
	if err := api.Decode(c.body, &req); err != nil {
		return nil, err
	}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	if err := s.showable(ctx, c, "events", req.Events); err != nil {
		return nil, err
	}
	evs, err := bodies(req.Events)
	if err != nil {
		return nil, err
	}
	ctx, err = s.approved(ctx, c, req.Events)
	if err != nil {
		return nil, err
	}
	c.keeps(keptEvents)
	id := c.id("session")
	done, err := s.sessions.Send(ctx, c.caller.ws(), store.SessionID(id), evs)
	if err != nil {
		return nil, missing(err, "session", id)
	}
	out := sent{Data: api.List[json.RawMessage]{}}
	for _, d := range done {
		var at *time.Time
		if !d.ProcessedAt.IsZero() {
			at = &d.ProcessedAt
		}
		w, err := wireBody(d.ID, "", at, d.Body)
		if err != nil {
			return nil, err
		}
		out.Data = append(out.Data, w)
	}
	return out, nil
}

// showable looks up the files that events show the model: they are those of the
// caller's workspace, and of a type that models take.
func (s *server) showable(ctx context.Context, c *call, at string, events api.ClientEvents) error {
	for i, e := range events {
		var content []api.Block
		switch b := e.(type) {
		case *api.UserMessage:
			content = b.Content
		case *api.UserCustomToolResult:
			content = b.Content
		case *api.UserToolResult:
			content = b.Content
		}
		for j, b := range content {
			if b.Source == nil || b.Source.Type != "file" {
				continue
			}
			f, err := s.fileByID(ctx, c, b.Source.FileID)
			if err != nil {
				return err
			}
			if why := session.Unshowable(b.Type, f); why != "" {
				return api.Invalid(fmt.Sprintf("%s[%d].content[%d].source.file_id", at, i, j), "file %s %s", f.ID, why)
			}
		}
	}
	return nil
}

// approved makes a confirmation an audited act: a person's answer. Other events
// are proved by the session's own log.
func (s *server) approved(ctx context.Context, c *call, events api.ClientEvents) (context.Context, error) {
	answers := map[string]string{}
	for _, e := range events {
		if a, ok := e.(*api.UserToolConfirmation); ok {
			answers[a.ToolUseID] = a.Result
		}
	}
	if len(answers) == 0 {
		return ctx, nil
	}
	detail, err := api.Encode(map[string]any{"request_id": c.request, "answers": answers})
	if err != nil {
		return ctx, err
	}
	return store.WithAct(ctx, store.Act{Workspace: c.caller.ws(), Node: s.cfg.Node, Principal: c.caller.ID,
		Action: "approvals.answer", Resource: c.id("session"), Detail: detail}), nil
}

// keptEvents keeps the ids of accepted events; their content stays in the
// sealed inbox and log alone.
func keptEvents(result any) (any, error) {
	accepted, ok := result.([]store.Accepted)
	if !ok {
		return nil, nil
	}
	ids := make([]string, len(accepted))
	for i, a := range accepted {
		ids[i] = a.ID
	}
	return ids, nil
}

// sentEvents answers a send that was done before: the same events, as they
// stand now.
func (s *server) sentEvents(ctx context.Context, c *call) (any, error) {
	var ids []string
	if err := json.Unmarshal(c.kept, &ids); err != nil {
		return nil, fmt.Errorf("read idempotency record: %w", err)
	}
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	queued, err := s.db.Inbox(ctx, x.Workspace, x.ID) // before the log, see events
	if err != nil {
		return nil, err
	}
	out := sent{Data: api.List[json.RawMessage]{}}
	for _, id := range ids {
		w, err := s.oneEvent(ctx, x, id, queued)
		if err != nil {
			return nil, err
		}
		out.Data = append(out.Data, w)
	}
	return out, nil
}

func (s *server) oneEvent(ctx context.Context, x store.Session, id string, queued []store.Inbox) (json.RawMessage, error) {
	seq, err := s.db.SeqOf(ctx, x.Workspace, x.ID, store.EventID(id))
	if err == nil {
		e, err := s.db.EntryAt(ctx, x.Workspace, x.ID, seq)
		if err != nil {
			return nil, err
		}
		return wireEntry(e)
	}
	if !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	for _, in := range queued {
		if in.ID == id {
			return wireQueued(in)
		}
	}
	return nil, fmt.Errorf("event %s was accepted and is neither queued nor logged", id)
}
