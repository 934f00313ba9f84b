package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/store"
)

// Create creates a session; initial events are accepted with it or nothing is.
func (m *Manager) Create(ctx context.Context, ws store.WorkspaceID, principal string, p CreateParams) (store.Session, error) {
	now := m.now()
	if p.Metadata == nil {
		p.Metadata = map[string]string{}
	}
	if p.VaultIDs == nil {
		p.VaultIDs = []store.VaultID{}
	}
	n := store.NewSession{ID: store.SessionID(store.NewID("sesn_", now)), Now: now, Attach: p.Attach, Created: store.Created{
		V: store.BodyVersion, Thread: store.ThreadID(store.NewID("sthr_", now)), Creator: principal,
		Config: store.SessionConfig{Title: p.Title, Metadata: p.Metadata, Agent: p.Agent, EnvironmentID: p.EnvironmentID,
			Environment: p.Environment, VaultIDs: p.VaultIDs, Resources: p.Resources, Budget: p.Budget}}}
	if _, err := parseAgent(p.Agent); err != nil {
		return store.Session{}, fmt.Errorf("%w: %w", ErrInput, err)
	}
	for i, raw := range p.InitialEvents {
		d, ev, err := delivery(raw, now)
		if err != nil {
			return store.Session{}, &Problem{Text: fmt.Sprintf("initial_events[%d]: %v", i, err), Err: ErrInput}
		}
		if ev.Type != inMessage {
			return store.Session{}, &Problem{Err: ErrInput, Text: fmt.Sprintf(
				"initial_events[%d]: type %q cannot begin a session here; use user.message", i, ev.Type)}
		}
		d.Starts = true
		n.Inbox = append(n.Inbox, d)
	}
	s, err := m.db.CreateSession(ctx, ws, n)
	if err != nil {
		return store.Session{}, fmt.Errorf("create session: %w", err)
	}
	return s, nil
}

// delivery makes an inbox row of a wire event. The body is kept in one
// canonical form, so that a repeated answer is known by its digest.
func delivery(raw json.RawMessage, now time.Time) (store.Delivery, clientEvent, error) {
	var ev clientEvent
	if err := json.Unmarshal(raw, &ev); err != nil {
		return store.Delivery{}, ev, fmt.Errorf("not a JSON object: %w", err)
	}
	var body fields
	if err := json.Unmarshal(raw, &body); err != nil {
		return store.Delivery{}, ev, fmt.Errorf("not a JSON object: %w", err)
	}
	delete(body, "id")
	delete(body, "processed_at")
	body["v"] = store.BodyVersion
	d := store.Delivery{ID: store.NewID("sevt_", now), Kind: store.InboxEvent, Type: ev.Type, Body: encode(body)}
	if t := ev.target(); t != "" {
		d.Target = "answer:" + string(t)
	}
	d.Urgent = ev.Type == inInterrupt
	return d, ev, nil
}

// Send accepts events (validated wire events, in order, all or none). It
// returns when they are durable; answers whose echo is processed (reference
// section 9.1) are waited for as long as Patience.Echo.
func (m *Manager) Send(ctx context.Context, ws store.WorkspaceID, id store.SessionID, events []json.RawMessage) ([]Sent, error) {
	now := m.now()
	ds := make([]store.Delivery, len(events))
	evs := make([]clientEvent, len(events))
	echo := false
	for i, raw := range events {
		var err error
		if ds[i], evs[i], err = delivery(raw, now); err != nil {
			return nil, &Problem{Text: fmt.Sprintf("events[%d]: %v", i, err), Err: ErrInput}
		}
		echo = echo || evs[i].Type == inCustomResult || evs[i].Type == inToolResult
	}
	s, err := m.db.Session(ctx, ws, id)
	if err != nil {
		return nil, err
	}
	asked, err := m.contained(ctx, ws, id, evs)
	if err != nil {
		return nil, err
	}
	acc, err := m.db.Deliver(ctx, ws, id, ds, func(v store.View) error { return m.check(v, ds, evs, asked) })
	if err != nil {
		return nil, m.explain(err, id)
	}
	sent := make([]Sent, len(acc))
	wanted := map[string]int{}
	for i, a := range acc {
		sent[i] = Sent{ID: a.ID, Body: ds[i].Body}
		if a.Duplicate || evs[i].Type == inCustomResult || evs[i].Type == inToolResult {
			wanted[a.ID] = i
		}
	}
	if echo {
		m.await(ctx, ws, id, s.Head, wanted, sent)
	}
	return sent, nil
}

// await fills in the processed time of events as the owner logs them. It gives
// up silently: the events are accepted, their echo says queued.
func (m *Manager) await(ctx context.Context, ws store.WorkspaceID, id store.SessionID, after store.Seq, wanted map[string]int, sent []Sent) {
	for i, s := range wanted {
		if seq, err := m.db.SeqOf(ctx, ws, id, store.EventID(i)); err == nil {
			if e, err := m.db.EntryAt(ctx, ws, id, seq); err == nil {
				sent[s].ProcessedAt = e.At
				delete(wanted, i)
			}
		}
	}
	if len(wanted) == 0 {
		return
	}
	m.follow(ctx, ws, id, after, func(e store.Entry) bool {
		if i, ok := wanted[e.ID]; ok && e.Kind == store.KindEvent {
			sent[i].ProcessedAt = e.At
			delete(wanted, e.ID)
		}
		return len(wanted) == 0
	})
}

// follow reads entries after a seq until done says so or Patience.Echo is over.
func (m *Manager) follow(ctx context.Context, ws store.WorkspaceID, id store.SessionID, after store.Seq, done func(store.Entry) bool) {
	ctx, cancel := context.WithTimeout(ctx, m.patience.Echo)
	defer cancel()
	f, err := m.db.Follow(ctx, ws, id, after)
	if err != nil {
		return
	}
	defer f.Close()
	for {
		items, err := f.Next(ctx)
		if err != nil {
			return
		}
		for _, it := range items {
			if it.Entry != nil && done(*it.Entry) {
				return
			}
		}
	}
}

// explain turns store errors of an acceptance into words.
func (m *Manager) explain(err error, id store.SessionID) error {
	switch {
	case errors.Is(err, store.ErrTerminated):
		return &Problem{Text: fmt.Sprintf("session %s is terminated and takes no more events; create a new session", id), Err: ErrState}
	case errors.Is(err, store.ErrAnswered):
		return &Problem{Text: "this call was already answered differently; the first answer stands", Err: ErrState}
	}
	return err
}

// check validates events under the session's row lock and decides which of
// them start a turn.
func (m *Manager) check(v store.View, ds []store.Delivery, evs []clientEvent, asked map[store.EventID]question) error {
	s := v.Session()
	var stop stopReason
	if len(s.StopReason) > 0 {
		if err := json.Unmarshal(s.StopReason, &stop); err != nil {
			return fmt.Errorf("read stop reason: %w", err)
		}
	}
	waiting := s.Status == store.StatusIdle && stop.Type == stopAction
	for i, ev := range evs {
		ds[i].Starts = false
		var err error
		switch ev.Type {
		case inMessage, inSystem:
			if s.Status == store.StatusIdle && stop.Type == stopBudget {
				err = &Problem{Text: "the session's budget is used up; raise or remove it with an update of the session", Code: "budget_reached", Err: ErrState}
			}
			ds[i].Starts = ev.Type == inMessage && !waiting && !s.Paused
		case inInterrupt:
		case inConfirmation:
			err = checkConfirmation(v, &ds[i], ev, asked[ev.ToolUseID])
		case inCustomResult:
			err = checkResult(v, ds[i], ev)
		case inToolResult:
			err = &Problem{Text: "user.tool_result is only taken in self_hosted environments, which this server does not run tools for yet", Err: ErrInput}
		case inOutcome:
			err = &Problem{Text: "user.define_outcome is not available on this server yet; say the goal in a user.message", Err: ErrInput}
		default:
			err = &Problem{Text: fmt.Sprintf("unknown event type %q", ev.Type), Err: ErrInput}
		}
		if err != nil {
			var p *Problem
			if errors.As(err, &p) {
				return &Problem{Text: fmt.Sprintf("events[%d]: %s", i, p.Text), Code: p.Code, Err: p.Err}
			}
			return err
		}
	}
	if waiting && !s.Paused {
		return startsLast(v, stop, ds)
	}
	return nil
}

// startsLast makes the answer after which nothing is waited for any more start
// the turn (reference section 9.9): the session is running from its acceptance.
func startsLast(v store.View, stop stopReason, ds []store.Delivery) error {
	given := map[string]bool{}
	last := -1
	for i, d := range ds {
		if d.Target != "" {
			given[d.Target], last = true, i
		}
	}
	if last < 0 {
		return nil
	}
	for _, id := range stop.EventIDs {
		e, err := v.EffectByEvent(id)
		contained := errors.Is(err, store.ErrNotFound) // a question about a contained call
		if err != nil && !contained {
			return err
		}
		target := "answer:" + string(id)
		switch {
		case contained:
		case e.State == store.StateInDoubt:
			target = doubtTarget(id)
		case e.State != store.StateAwaitingApproval && !(e.Client && e.State == store.StateIntended):
			continue // answered and taken
		}
		if given[target] {
			continue
		}
		if answered, err := v.Answered(target); err != nil || !answered {
			return err
		}
	}
	ds[last].Starts = true
	return nil
}

// doubtTarget is what a denial answers that leaves a call in doubt to the
// agent: another question than the approval, which may have been given before.
func doubtTarget(event store.EventID) string { return "doubt:" + string(event) }

// question is what the log says of a tool use that asks and is contained: no
// effect's row tells of it.
type question struct {
	asks   bool
	closed bool // it has its result
}

// contained reads the questions that confirmations answer. What it reads can
// only go from open to closed: an answer that comes in between is accepted, and
// the owner logs it without acting on it, as for every call.
func (m *Manager) contained(ctx context.Context, ws store.WorkspaceID, id store.SessionID, evs []clientEvent) (map[store.EventID]question, error) {
	out := map[store.EventID]question{}
	for _, ev := range evs {
		if ev.Type != inConfirmation || ev.ToolUseID == "" {
			continue
		}
		q, err := m.question(ctx, ws, id, ev.ToolUseID)
		if err != nil {
			return nil, err
		}
		out[ev.ToolUseID] = q
	}
	return out, nil
}

func (m *Manager) question(ctx context.Context, ws store.WorkspaceID, id store.SessionID, use store.EventID) (q question, err error) {
	seq, err := m.db.SeqOf(ctx, ws, id, use)
	if errors.Is(err, store.ErrNotFound) {
		return q, nil
	}
	if err != nil {
		return q, err
	}
	e, err := m.db.EntryAt(ctx, ws, id, seq)
	if err != nil || e.Type != evToolUse {
		return q, err
	}
	var body struct {
		Permission string `json:"evaluated_permission"`
	}
	if err := json.Unmarshal(e.Body, &body); err != nil {
		return q, err
	}
	q.asks = body.Permission == string(policy.Ask)
	results, err := m.db.Entries(ctx, ws, id, store.Range{After: seq, Types: []string{evToolResult}})
	if err != nil {
		return q, err
	}
	for _, r := range results {
		var b eventBody
		if err := json.Unmarshal(r.Body, &b); err != nil {
			return q, err
		}
		q.closed = q.closed || b.ToolUseID == use
	}
	return q, nil
}

func checkConfirmation(v store.View, d *store.Delivery, ev clientEvent, q question) error {
	e, err := v.EffectByEvent(ev.ToolUseID)
	if err == nil && e.State == store.StateInDoubt && ev.Result == "deny" {
		d.Target = doubtTarget(ev.ToolUseID)
	}
	if answered, err := v.Answered(d.Target); err != nil || answered {
		return err // the store compares it with the first answer
	}
	switch {
	case q.asks && q.closed:
		return &Problem{Text: fmt.Sprintf("tool_use_id %q is closed: its call has a result", ev.ToolUseID), Err: ErrState}
	case q.asks:
		return nil
	}
	if errors.Is(err, store.ErrNotFound) {
		return &Problem{Text: fmt.Sprintf("tool_use_id %q names no tool use of this session that waits for a confirmation", ev.ToolUseID), Err: ErrState}
	}
	if err != nil {
		return err
	}
	switch {
	case e.State == store.StateAwaitingApproval:
		return nil
	case e.State == store.StateInDoubt && !e.Told && ev.Result == "deny":
		return nil
	case e.State == store.StateInDoubt && !e.Told:
		return &Problem{Err: ErrState, Text: fmt.Sprintf(
			"the outcome of this call is in doubt; allowing it could do it twice. Settle it with POST /v1/effects/%s/settle, or deny it here to leave it to the agent", e.ID)}
	}
	return &Problem{Text: fmt.Sprintf("tool_use_id %q is closed: its call is %s", ev.ToolUseID, e.State), Err: ErrState}
}

func checkResult(v store.View, d store.Delivery, ev clientEvent) error {
	if answered, err := v.Answered(d.Target); err != nil || answered {
		return err
	}
	e, err := v.EffectByEvent(ev.CustomToolUseID)
	if errors.Is(err, store.ErrNotFound) || err == nil && !e.Client {
		return &Problem{Text: fmt.Sprintf("custom_tool_use_id %q names no custom tool use of this session", ev.CustomToolUseID), Err: ErrState}
	}
	if err != nil {
		return err
	}
	if e.State != store.StateIntended {
		return &Problem{Text: fmt.Sprintf("custom_tool_use_id %q is closed: its call is %s", ev.CustomToolUseID, e.State), Err: ErrState}
	}
	return nil
}

// Pause asks the session to rest at the next point where nothing is under
// way; reads and unsent calls are cut short. Input queues until Resume.
func (m *Manager) Pause(ctx context.Context, ws store.WorkspaceID, id store.SessionID, principal string) (store.Session, error) {
	return m.control(ctx, ws, id, controlPause, store.Delivery{Urgent: true}, evPaused, func(s store.Session) bool { return s.Paused })
}

// Resume goes on with a session that is paused, that used up its retries or
// its patience, or that waits for a retry; it needs no new message.
func (m *Manager) Resume(ctx context.Context, ws store.WorkspaceID, id store.SessionID, principal string) (store.Session, error) {
	return m.control(ctx, ws, id, controlResume, store.Delivery{Urgent: true}, evResumed, func(s store.Session) bool {
		return !s.Paused && s.Status == store.StatusRunning
	})
}

// control delivers a control row, unless the session is already there, and
// waits a little for the owner to act on it.
func (m *Manager) control(ctx context.Context, ws store.WorkspaceID, id store.SessionID, name string, d store.Delivery, seen string, already func(store.Session) bool) (store.Session, error) {
	s, err := m.db.Session(ctx, ws, id)
	if err != nil {
		return s, err
	}
	if already(s) {
		return s, nil
	}
	d.ID, d.Kind, d.Type, d.Body = store.NewID("inb_", m.now()), store.InboxControl, name, []byte(`{"v":1}`)
	if _, err := m.db.Deliver(ctx, ws, id, []store.Delivery{d}, nil); err != nil {
		return store.Session{}, m.explain(err, id)
	}
	m.follow(ctx, ws, id, s.Head, func(e store.Entry) bool { return e.Type == seen })
	return m.db.Session(ctx, ws, id)
}

// Settle gives an effect in doubt its outcome by a person's word.
func (m *Manager) Settle(ctx context.Context, ws store.WorkspaceID, id store.EffectID, r SettleRequest) (store.Effect, error) {
	switch r.Outcome {
	case "happened", "did_not_happen", "probe", "tell":
	default:
		return store.Effect{}, &Problem{Text: fmt.Sprintf("outcome: %q is not one of happened, did_not_happen, probe, tell", r.Outcome), Err: ErrInput}
	}
	e, err := m.db.Effect(ctx, ws, id)
	if err != nil {
		return store.Effect{}, err
	}
	if e.State != store.StateInDoubt {
		return store.Effect{}, &Problem{Text: fmt.Sprintf("effect %s is %s; only an effect in doubt can be settled", id, e.State), Err: ErrState}
	}
	if r.Outcome == "tell" && e.Told {
		return store.Effect{}, &Problem{Text: fmt.Sprintf("effect %s was already left to the agent", id), Err: ErrState}
	}
	s, err := m.db.Session(ctx, ws, e.Session)
	if err != nil {
		return store.Effect{}, err
	}
	if s.Status == store.StatusTerminated {
		return m.settleTerminated(ctx, ws, e, r)
	}
	d := store.Delivery{ID: store.NewID("inb_", m.now()), Kind: store.InboxSettle, Type: "settle", Urgent: true, Body: encode(struct {
		V      int            `json:"v"`
		Effect store.EffectID `json:"effect"`
		SettleRequest
	}{store.BodyVersion, id, r})}
	if r.Outcome == "happened" || r.Outcome == "did_not_happen" {
		d.Target = "settle:" + string(id) // a person's word is said once
	}
	acc, err := m.db.Deliver(ctx, ws, e.Session, []store.Delivery{d}, func(v store.View) error {
		now, err := v.Effect(id)
		if err == nil && now.State != store.StateInDoubt {
			err = &Problem{Text: fmt.Sprintf("effect %s is %s; only an effect in doubt can be settled", id, now.State), Err: ErrState}
		}
		return err
	})
	if errors.Is(err, store.ErrAnswered) || err == nil && acc[0].Duplicate {
		return store.Effect{}, &Problem{Text: fmt.Sprintf("effect %s was already settled", id), Err: ErrState}
	}
	if err != nil {
		return store.Effect{}, m.explain(err, e.Session)
	}
	m.follow(ctx, ws, e.Session, s.Head, func(en store.Entry) bool {
		return en.ID == string(id) && (en.Kind == store.KindSettlement || en.Kind == store.KindCompletion || en.Kind == store.KindEvidence)
	})
	return m.db.Effect(ctx, ws, id)
}

// settleTerminated settles an effect that outlived its session: no driver will
// ever read an inbox there, so the entry is written at once.
func (m *Manager) settleTerminated(ctx context.Context, ws store.WorkspaceID, e store.Effect, r SettleRequest) (store.Effect, error) {
	if r.Outcome != "happened" && r.Outcome != "did_not_happen" {
		return store.Effect{}, &Problem{Text: fmt.Sprintf("session %s is terminated; say happened or did_not_happen", e.Session), Err: ErrState}
	}
	_, err := m.db.AppendUnowned(ctx, ws, e.Session, store.Append{
		Entries: []store.Draft{record(store.KindSettlement, string(e.ID), e.Thread, store.Settlement{V: store.BodyVersion, Effect: e.ID,
			Outcome: r.Outcome, By: "person", Person: r.Person, Reason: r.Evidence, Response: r.Response})},
		Effects: []store.EffectIs{{ID: e.ID, States: []store.EffectState{store.StateInDoubt}}}}, nil)
	if errors.Is(err, store.ErrConflict) {
		return store.Effect{}, &Problem{Text: fmt.Sprintf("effect %s was already settled", e.ID), Err: ErrState}
	}
	if err != nil {
		return store.Effect{}, err
	}
	return m.db.Effect(ctx, ws, e.ID)
}

// Archive terminates a session that is not running; its log stays readable.
func (m *Manager) Archive(ctx context.Context, ws store.WorkspaceID, id store.SessionID, principal string) (store.Session, error) {
	s, err := m.db.Session(ctx, ws, id)
	if err != nil {
		return s, err
	}
	if !s.ArchivedAt.IsZero() {
		return s, nil
	}
	now := m.now()
	name := ""
	if a, err := parseAgent(s.Config.Agent); err == nil {
		name = a.Name
	}
	err = m.unowned(ctx, ws, id, func() error {
		_, err := m.db.AppendUnowned(ctx, ws, id, store.Append{Entries: []store.Draft{
			event(store.NewID("sevt_", now), evThreadTerminated, s.Thread, fields{"session_thread_id": s.Thread, "agent_name": name}),
			event(store.NewID("sevt_", now), evTerminated, "", nil),
			record(store.KindArchive, store.NewID("rec_", now), "", store.Archive{V: store.BodyVersion, By: principal}),
		}}, notRunning(id, "archived"))
		return err
	})
	if errors.Is(err, store.ErrOwned) {
		err = runningProblem(id, "archived")
	}
	if err != nil {
		return store.Session{}, err
	}
	return m.db.Session(ctx, ws, id)
}

func runningProblem(id store.SessionID, what string) error {
	return &Problem{Text: fmt.Sprintf("session %s is running and cannot be %s; send user.interrupt, wait for session.status_idle, then try again", id, what), Err: ErrState}
}

func notRunning(id store.SessionID, what string) func(store.Session) error {
	return func(s store.Session) error {
		if s.Status == store.StatusRunning || s.Status == store.StatusRescheduling {
			return runningProblem(id, what)
		}
		return nil
	}
}

// Delete hides and erases a session that is not running.
func (m *Manager) Delete(ctx context.Context, ws store.WorkspaceID, id store.SessionID, principal string) error {
	err := m.unowned(ctx, ws, id, func() error {
		err := m.db.DeleteSession(ctx, ws, id, principal)
		if errors.Is(err, store.ErrConflict) {
			return fmt.Errorf("%w: %w", store.ErrOwned, err) // it may only linger
		}
		return err
	})
	if errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrOwned) {
		return runningProblem(id, "deleted")
	}
	return err
}

// errStale: the session has changed since its update was drafted.
var errStale = errors.New("the session has changed meanwhile")

// Update changes title, metadata, tools, servers or budget.
func (m *Manager) Update(ctx context.Context, ws store.WorkspaceID, id store.SessionID, p UpdateParams) (store.Session, error) {
	for {
		s, err := m.update(ctx, ws, id, p)
		if !errors.Is(err, errStale) {
			return s, err
		}
	}
}

func (m *Manager) update(ctx context.Context, ws store.WorkspaceID, id store.SessionID, p UpdateParams) (store.Session, error) {
	s, err := m.db.Session(ctx, ws, id)
	if err != nil {
		return s, err
	}
	agentChanged := p.Tools != nil || p.MCPServers != nil
	check := func(s store.Session) error {
		if s.Status == store.StatusTerminated {
			return &Problem{Text: fmt.Sprintf("session %s is terminated and read-only", id), Err: ErrState}
		}
		if agentChanged && s.Status != store.StatusIdle {
			return &Problem{Text: "agent: tools and mcp_servers can only be changed while the session is idle; send user.interrupt first", Err: ErrState}
		}
		return checkBudget(s, p)
	}
	if err := check(s); err != nil {
		return s, err
	}
	drafts, err := updateDrafts(s.Config, p, m.now())
	if err != nil || len(drafts) == 0 {
		return s, err
	}
	raised := s.Status == store.StatusIdle && p.Budget != nil && stopType(s) == stopBudget
	write := func() error {
		_, err := m.db.AppendUnowned(ctx, ws, id, store.Append{Entries: drafts}, func(now store.Session) error {
			if now.Head != s.Head {
				return errStale // the drafts hold the whole configuration: another update would be undone
			}
			return check(now)
		})
		return err
	}
	if agentChanged {
		err = m.unowned(ctx, ws, id, write)
	} else {
		err = write()
	}
	if errors.Is(err, store.ErrOwned) {
		if agentChanged {
			return s, runningProblem(id, "given another agent")
		}
		d := store.Delivery{ID: store.NewID("inb_", m.now()), Kind: store.InboxControl, Type: controlUpdate, Body: encode(p)}
		if _, err := m.db.Deliver(ctx, ws, id, []store.Delivery{d}, func(v store.View) error {
			if err := check(v.Session()); err != nil {
				return err
			}
			return p.Resources.fitsBehind(v)
		}); err != nil {
			return s, m.explain(err, id)
		}
		m.follow(ctx, ws, id, s.Head, func(e store.Entry) bool { return e.Kind == store.KindConfig })
	} else if err != nil {
		return s, err
	}
	if raised {
		// It goes on by itself after the budget was raised or removed (reference section 14).
		return m.Resume(ctx, ws, id, "")
	}
	return m.db.Session(ctx, ws, id)
}

func stopType(s store.Session) string {
	var stop stopReason
	if len(s.StopReason) > 0 && json.Unmarshal(s.StopReason, &stop) != nil {
		return ""
	}
	return stop.Type
}

// checkBudget applies the rules of reference section 6.3.
func checkBudget(s store.Session, p UpdateParams) error {
	if p.Budget == nil {
		return nil
	}
	if _, has := budgetLimit(s.Config.Budget); !has {
		return &Problem{Text: "budget: it can only be set when the session is created", Code: "budget_create_only", Err: ErrInput}
	}
	limit, set := budgetLimit(p.Budget)
	if set && limit <= s.Usage.CostNanoUSD {
		return &Problem{Text: "budget: it must exceed what the session has cost so far", Code: "budget_not_raised", Err: ErrInput}
	}
	return nil
}

// updateDrafts makes the entries of an update: the whole configuration, and
// the event with only what changed. None when nothing did.
func updateDrafts(c store.SessionConfig, p UpdateParams, now time.Time) ([]store.Draft, error) {
	changed := fields{}
	if p.NoTitle && c.Title != nil {
		c.Title = nil
		changed["title"] = nil
	}
	if p.Title != nil && (c.Title == nil || *c.Title != *p.Title) {
		c.Title = p.Title
		changed["title"] = *p.Title
	}
	if len(p.Metadata) > 0 {
		next := maps.Clone(c.Metadata)
		if next == nil {
			next = map[string]string{}
		}
		for k, v := range p.Metadata {
			if v == nil {
				delete(next, k)
			} else {
				next[k] = *v
			}
		}
		if !maps.Equal(next, c.Metadata) {
			c.Metadata = next
			changed["metadata"] = next
		}
	}
	if p.Tools != nil || p.MCPServers != nil {
		var a map[string]json.RawMessage
		if err := json.Unmarshal(c.Agent, &a); err != nil {
			return nil, fmt.Errorf("read agent snapshot: %w", err)
		}
		if p.Tools != nil {
			a["tools"] = p.Tools
		}
		if p.MCPServers != nil {
			a["mcp_servers"] = p.MCPServers
		}
		if next := encode(a); string(next) != string(c.Agent) {
			c.Agent = next
			changed["agent"] = a
		}
	}
	if p.Budget != nil && string(p.Budget) != string(c.Budget) {
		c.Budget = p.Budget
		changed["budget"] = p.Budget
	}
	put, err := p.Resources.apply(&c)
	if err != nil {
		return nil, err
	}
	if put && len(changed) == 0 {
		// No event tells of resources (reference section 9.6).
		return []store.Draft{record(store.KindConfig, store.NewID("rec_", now), "", store.ConfigChange{V: store.BodyVersion, Config: c})}, nil
	}
	if len(changed) == 0 {
		return nil, nil
	}
	return []store.Draft{
		record(store.KindConfig, store.NewID("rec_", now), "", store.ConfigChange{V: store.BodyVersion, Config: c}),
		event(store.NewID("sevt_", now), evUpdated, "", changed),
	}, nil
}
