package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// sessionRow is the whole row. Session.Status in it is what the log says.
type sessionRow struct {
	Session
	starting    bool // input that starts a turn was accepted and not yet acted on
	keyID       KeyID
	former      NodeID // the owner that died with it
	nextAt      int64  // when it wants to be claimed, 0 = never
	inboxN      int64  // rows in the inbox
	inboxUrgent int64  // of these: urgent
	inboxLast   int64  // the newest row's n, also of consumed ones
	inboxSeen   int64  // rows up to it were left on purpose
	openFrom    EffectID
	deletedAt   int64
}

// view is the session as callers see it: with the effective status.
func (r *sessionRow) view() Session {
	s := r.Session
	if r.starting && s.Status == StatusIdle && !s.Paused {
		s.Status = StatusRunning
	}
	return s
}

const sessionColumns = `workspace, id, parent, fork_seq, lineage, key_id, thread, status, starting, stop_reason, paused,
 owner, former, fence, head, head_hash, compacted, format, wake_at, next_at, inbox_n, inbox_urgent, inbox_last, inbox_seen, open_from,
 input_tokens, output_tokens, cache_read_tokens, cache_5m_tokens, cache_1h_tokens, cost_nusd, active_us, wasted_tokens,
 created_at, updated_at, running_since, terminated_at, archived_at, deleted_at, damaged`

// scanRow reads sessionColumns and then extra.
func scanRow(row scanner, extra ...any) (*sessionRow, error) {
	r := &sessionRow{}
	var starting, paused, wake, created, updated, running, terminated, archived int64
	var stop string
	var hash []byte
	u := &r.Usage
	err := row.Scan(append([]any{&r.Workspace, &r.ID, &r.Parent, &r.ForkSeq, &r.Lineage, &r.keyID, &r.Thread, &r.Status, &starting, &stop, &paused,
		&r.Owner, &r.former, &r.Fence, &r.Head, &hash, &r.Compacted, &r.Format, &wake, &r.nextAt, &r.inboxN, &r.inboxUrgent, &r.inboxLast, &r.inboxSeen, &r.openFrom,
		&u.Input, &u.Output, &u.CacheRead, &u.CacheCreation5m, &u.CacheCreation1h, &u.CostNanoUSD, &u.ActiveMicros, &u.WastedTokens,
		&created, &updated, &running, &terminated, &archived, &r.deletedAt, &r.Damaged}, extra...)...)
	if err != nil {
		return nil, err
	}
	if stop != "" {
		r.StopReason = json.RawMessage(stop)
	}
	copy(r.HeadHash[:], hash)
	r.starting, r.Paused = starting != 0, paused != 0
	r.WakeAt, r.CreatedAt, r.UpdatedAt, r.RunningSince = fromMicros(wake), fromMicros(created), fromMicros(updated), fromMicros(running)
	r.TerminatedAt, r.ArchivedAt = fromMicros(terminated), fromMicros(archived)
	return r, nil
}

// setColumns are the columns that an append may change, in the order of
// setArgs: first those that every append changes, last those that stand in an
// index, which SQLite writes anew for each column that a statement names.
var setColumns = []string{"head", "head_hash", "updated_at", "open_from",
	"thread", "status", "starting", "stop_reason", "paused", "former", "fence", "compacted", "format", "wake_at", "inbox_n", "inbox_urgent", "inbox_seen",
	"input_tokens", "output_tokens", "cache_read_tokens", "cache_5m_tokens", "cache_1h_tokens", "cost_nusd", "active_us", "wasted_tokens",
	"running_since", "terminated_at", "archived_at",
	"owner", "next_at", "created_at"}

// Where the parts of setColumns end.
var (
	setEvery   = 4
	setIndexed = len(setColumns) - 3
)

func (r *sessionRow) setArgs() []any {
	u := &r.Usage
	return []any{int64(r.Head), r.HeadHash[:], micros(r.UpdatedAt), string(r.openFrom),
		string(r.Thread), string(r.Status), b2i(r.starting), string(r.StopReason), b2i(r.Paused), string(r.former), int64(r.Fence), int64(r.Compacted), int64(r.Format), micros(r.WakeAt), r.inboxN, r.inboxUrgent, r.inboxSeen,
		u.Input, u.Output, u.CacheRead, u.CacheCreation5m, u.CacheCreation1h, u.CostNanoUSD, u.ActiveMicros, u.WastedTokens,
		micros(r.RunningSince), micros(r.TerminatedAt), micros(r.ArchivedAt),
		string(r.Owner), r.nextAt, micros(r.CreatedAt)}
}

// sets returns the values of the columns to be written: the part of setColumns
// behind which nothing changed.
func (c *change) sets() []any {
	args := c.row.setArgs()
	if c.old.Head == 0 {
		return args // the row was made in this transaction
	}
	old := c.old.setArgs()
	switch {
	case !slices.Equal(args[setIndexed:], old[setIndexed:]):
		return args
	case !slices.Equal(args[setEvery:setIndexed], old[setEvery:setIndexed]):
		return args[:setIndexed]
	}
	return args[:setEvery]
}

// sessionRow reads a row without its configuration. On PostgreSQL lock holds it
// against other writers until the transaction ends; the one writer of SQLite
// needs none.
func (t *tx) sessionRow(ws WorkspaceID, id SessionID, lock bool) (*sessionRow, error) {
	q := `SELECT ` + sessionColumns + ` FROM sessions WHERE workspace = ? AND id = ? AND deleted_at = 0`
	if lock {
		q += t.db.lockRow()
	}
	r, err := scanRow(t.queryRow(q, ws, id))
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", id, notFound(t.db.mapErr(err)))
	}
	return r, nil
}

// lockRow ends a query that holds its row against other writers.
func (db *DB) lockRow() string {
	if db.pg {
		return ` FOR NO KEY UPDATE`
	}
	return ""
}

// fullRow reads a row with its configuration.
func (t *tx) fullRow(ws WorkspaceID, id SessionID, lock bool) (*sessionRow, error) {
	r, err := t.sessionRow(ws, id, lock)
	if err != nil {
		return nil, err
	}
	return r, t.loadConfig(r)
}

func (t *tx) loadConfig(r *sessionRow) error {
	var sealed []byte
	if err := t.queryRow(`SELECT config FROM session_configs WHERE workspace = ? AND session = ?`, r.Workspace, r.ID).Scan(&sealed); err != nil {
		return fmt.Errorf("configuration of session %s: %w", r.ID, missing(t.db.mapErr(err)))
	}
	return t.openConfig(r, sealed)
}

func (t *tx) openConfig(r *sessionRow, sealed []byte) error {
	key, err := t.dataKey(r.Workspace, r.keyID)
	if err != nil {
		return err
	}
	plain, err := key.open(sealed, aadOf("config", r.Workspace, r.ID, ""))
	if err != nil {
		return fmt.Errorf("configuration of session %s: %w", r.ID, err)
	}
	if err := json.Unmarshal(plain, &r.Config); err != nil {
		return fmt.Errorf("%w: configuration of session %s: %w", ErrDamaged, r.ID, err)
	}
	return nil
}

// NewSession is what CreateSession writes.
type NewSession struct {
	ID      SessionID
	Created Created
	Inbox   []Delivery // initial events: all accepted or none
	// Attach are the files and tokens that its resources name.
	Attach Attachments
	Now    time.Time
}

// CreateSession writes row, data key, the created entry and the initial inbox in one transaction.
func (db *DB) CreateSession(ctx context.Context, ws WorkspaceID, s NewSession) (Session, error) {
	fail := func(err error) (Session, error) {
		return Session{}, fmt.Errorf("create session %s: %w", s.ID, err)
	}
	now := s.Now
	if now.IsZero() {
		now = db.Now()
	}
	now = now.UTC().Truncate(time.Microsecond)
	if s.Created.V == 0 {
		s.Created.V = BodyVersion
	}
	body, err := json.Marshal(s.Created)
	if err != nil {
		return fail(err)
	}
	keyID := KeyID(NewID("dkey_", now))
	key, wrapped, err := db.keys.mint(keyID)
	if err != nil {
		return fail(err)
	}
	row := &sessionRow{keyID: keyID}
	row.Workspace, row.ID, row.Lineage, row.Status = ws, s.ID, s.ID, StatusIdle
	row.CreatedAt, row.UpdatedAt = now, now.Add(-time.Microsecond)
	items, err := db.prepare(ctx, row, key, &Append{Entries: []Draft{{
		Kind: KindCreated, ID: NewID("rec_", now), Thread: "", Body: body}}})
	if err != nil {
		return fail(err)
	}
	sealed, err := db.sealDeliveries(ctx, row, key, s.Inbox)
	if err != nil {
		return fail(err)
	}
	var out *sessionRow
	var queued []Inbox
	var entries []Entry
	err = db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "create", landed: func(t *tx) (bool, error) {
		r, err := t.fullRow(ws, s.ID, false)
		if errors.Is(err, ErrNotFound) {
			return false, nil
		}
		out = r
		return err == nil, err
	}}, func(t *tx) error {
		var n int64
		if err := t.queryRow(`SELECT count(*) FROM workspaces WHERE id = ? AND archived_at = 0`, ws).Scan(&n); err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("workspace %s: %w", ws, ErrNotFound)
		}
		if _, err := t.exec(`INSERT INTO data_keys (workspace, id, lineage, wrapped, created_at) VALUES (?, ?, ?, ?, ?)`,
			ws, keyID, s.ID, wrapped, micros(now)); err != nil {
			return err
		}
		if _, err := t.exec(`INSERT INTO sessions (workspace, id, lineage, key_id, status, head_hash, created_at, updated_at, agent_id, agent_version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			ws, s.ID, s.ID, keyID, string(StatusIdle), row.HeadHash[:], micros(now), micros(row.UpdatedAt), "", 0); err != nil {
			return err
		}
		if err := t.attach(ws, s.ID, s.Attach, now); err != nil {
			return err
		}
		c := newChange(*row, key, nil)
		if err := c.apply(t, items, now); err != nil {
			return err
		}
		if err := t.writeChanges([]*change{c}); err != nil {
			return err
		}
		r := c.row
		_, queued, err = t.accept(&r, sealed, now)
		if err != nil {
			return err
		}
		out, entries = &r, c.entries
		if err := t.setInbox(&r); err != nil {
			return err
		}
		return db.written(ctx, t, r.view())
	})
	if db.isUnique(err) {
		err = fmt.Errorf("%w: %w", ErrConflict, err)
	}
	if err != nil {
		return fail(err)
	}
	db.published(out, entries, queued)
	return out.view(), nil
}

// Session returns a session that is not deleted.
func (db *DB) Session(ctx context.Context, ws WorkspaceID, id SessionID) (Session, error) {
	r, err := scanSession(db.peek(ctx), `s.workspace = ? AND s.id = ? AND s.deleted_at = 0`, ws, id)
	if err != nil {
		return Session{}, fmt.Errorf("session %s: %w", id, err)
	}
	if len(r) == 0 {
		return Session{}, fmt.Errorf("session %s: %w", id, ErrNotFound)
	}
	return r[0], nil
}

// scanSession reads sessions with their configurations. A configuration that
// does not open makes its session damaged and hides no other.
func scanSession(t *tx, where string, args ...any) ([]Session, error) {
	var rows []*sessionRow
	var sealed [][]byte
	err := t.each(`SELECT `+sessionColumns+`, (SELECT config FROM session_configs c WHERE c.workspace = s.workspace AND c.session = s.id) FROM sessions s WHERE `+where,
		args, func(rs *sql.Rows) error {
			var config []byte
			r, err := scanRow(rs, &config)
			if err != nil {
				return err
			}
			rows, sealed = append(rows, r), append(sealed, config)
			return nil
		})
	if err != nil {
		return nil, err
	}
	out := make([]Session, len(rows))
	for i, r := range rows {
		if err := t.openConfig(r, sealed[i]); err != nil {
			if !errors.Is(err, ErrDamaged) {
				return nil, err
			}
			if r.Damaged == "" {
				r.Damaged = err.Error()
			}
		}
		out[i] = r.view()
	}
	return out, nil
}

// Sessions lists, newest first unless f.Asc.
func (db *DB) Sessions(ctx context.Context, ws WorkspaceID, f SessionFilter) ([]Session, error) {
	where, args := "s.workspace = ? AND s.deleted_at = 0", []any{ws}
	add := func(cond string, values ...any) { where += " AND " + cond; args = append(args, values...) }
	if !f.IncludeArchived {
		add("archived_at = 0")
	}
	if f.AgentID != "" {
		add("agent_id = ?", f.AgentID)
	}
	if f.AgentVersion != 0 {
		add("agent_version = ?", f.AgentVersion)
	}
	if len(f.Statuses) > 0 {
		add("CASE WHEN starting = 1 AND status = 'idle' AND paused = 0 THEN 'running' ELSE status END IN ("+marks(len(f.Statuses))+")", anys(f.Statuses)...)
	}
	for _, b := range []struct {
		op string
		at time.Time
	}{{">", f.CreatedGT}, {">=", f.CreatedGTE}, {"<", f.CreatedLT}, {"<=", f.CreatedLTE}} {
		if !b.at.IsZero() {
			add("s.created_at "+b.op+" ?", micros(b.at))
		}
	}
	order, op := "DESC", "<"
	if f.Asc {
		order, op = "ASC", ">"
	}
	if f.AfterID != "" {
		add("(s.created_at, s.id) "+op+" (?, ?)", micros(f.AfterAt), f.AfterID)
	}
	where += " ORDER BY s.created_at " + order + ", s.id " + order
	if f.Limit > 0 {
		where += " LIMIT " + strconv.Itoa(f.Limit)
	}
	list, err := scanSession(db.peek(ctx), where, args...)
	if err != nil {
		return nil, fmt.Errorf("list sessions: %w", err)
	}
	return list, nil
}

// Refuse marks a session damaged so that nobody claims it. It stays listed with
// its reason, has no owner any more, and the former owner's appends are refused.
func (db *DB) Refuse(ctx context.Context, ws WorkspaceID, id SessionID, why string) error {
	return db.write(ctx, writeOpt{iso: sql.LevelReadCommitted, step: "refuse"}, func(t *tx) error {
		n, err := t.exec(`UPDATE sessions SET damaged = ?, next_at = 0, owner = '' WHERE workspace = ? AND id = ? AND deleted_at = 0`, why, ws, id)
		if err == nil && n == 0 {
			err = ErrNotFound
		}
		if err != nil {
			return fmt.Errorf("refuse session %s: %w", id, err)
		}
		return nil
	})
}
