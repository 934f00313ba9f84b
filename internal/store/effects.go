package store

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"
)

const effectColumns = `workspace, session, id, lineage, thread, tool, server, connector, class, state, outcome, flags,
 event, digest, near, idem_key, first_seq, intent_seq, attempt_seqs, attempt_fence, send_by, end_seq, evidence_seqs, created_at, updated_at`

// Flags of an effect's row.
const (
	flagIsError = 1 << iota
	flagShadow
	flagClient
	flagTold
)

func (x *Effect) flags() int64 {
	return b2i(x.IsError)*flagIsError | b2i(x.Shadow)*flagShadow | b2i(x.Client)*flagClient | b2i(x.Told)*flagTold
}

// args are the values of effectColumns.
func (x *Effect) args() []any {
	return []any{string(x.Workspace), string(x.Session), string(x.ID), string(x.Lineage), string(x.Thread), x.Tool, x.Server,
		string(x.Connector), string(x.Class), string(x.State), string(x.Outcome), x.flags(),
		string(x.Event), x.Digest, x.Near, x.Key, int64(x.FirstSeq), int64(x.IntentSeq), seqText(x.AttemptSeqs),
		int64(x.AttemptFence), micros(x.SendBy), int64(x.EndSeq), seqText(x.EvidenceSeqs), micros(x.CreatedAt), micros(x.UpdatedAt)}
}

// movedColumns are what changes of an effect after its intent, none of them in
// an index.
var movedColumns = []string{"state", "outcome", "flags", "attempt_seqs", "attempt_fence", "send_by", "end_seq", "evidence_seqs", "updated_at"}

// movedArgs are the values of movedColumns.
func (x *Effect) movedArgs() []any {
	return []any{string(x.State), string(x.Outcome), x.flags(), seqText(x.AttemptSeqs), int64(x.AttemptFence), micros(x.SendBy),
		int64(x.EndSeq), seqText(x.EvidenceSeqs), micros(x.UpdatedAt)}
}

type scanner interface{ Scan(...any) error }

func scanEffect(row scanner) (x Effect, err error) {
	var flags, sendBy, created, updated int64
	var attempts, evidence string
	err = row.Scan(&x.Workspace, &x.Session, &x.ID, &x.Lineage, &x.Thread, &x.Tool, &x.Server,
		&x.Connector, &x.Class, &x.State, &x.Outcome, &flags,
		&x.Event, &x.Digest, &x.Near, &x.Key, &x.FirstSeq, &x.IntentSeq, &attempts,
		&x.AttemptFence, &sendBy, &x.EndSeq, &evidence, &created, &updated)
	if err != nil {
		return x, err
	}
	x.IsError, x.Shadow, x.Client, x.Told = flags&flagIsError != 0, flags&flagShadow != 0, flags&flagClient != 0, flags&flagTold != 0
	x.SendBy, x.CreatedAt, x.UpdatedAt = fromMicros(sendBy), fromMicros(created), fromMicros(updated)
	if x.AttemptSeqs, err = seqsOf(attempts); err != nil {
		return x, err
	}
	x.Attempts = len(x.AttemptSeqs)
	x.EvidenceSeqs, err = seqsOf(evidence)
	return x, err
}

// seqText stores seqs as "4,9".
func seqText(seqs []Seq) string {
	if len(seqs) == 0 {
		return ""
	}
	var b []byte
	for i, s := range seqs {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(s), 10)
	}
	return string(b)
}

func seqsOf(text string) ([]Seq, error) {
	if text == "" {
		return nil, nil
	}
	var seqs []Seq
	for part := range strings.SplitSeq(text, ",") {
		n, err := strconv.ParseInt(part, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%w: list of seqs %q", ErrDamaged, text)
		}
		seqs = append(seqs, Seq(n))
	}
	return seqs, nil
}

func (t *tx) effects(where string, args ...any) ([]Effect, error) {
	var xs []Effect
	err := t.each(`SELECT `+effectColumns+` FROM effects WHERE `+where, args, func(rows *sql.Rows) error {
		x, err := scanEffect(rows)
		xs = append(xs, x)
		return err
	})
	return xs, err
}

func (t *tx) effect(ws WorkspaceID, id EffectID) (Effect, error) {
	x, err := scanEffect(t.queryRow(`SELECT `+effectColumns+` FROM effects WHERE workspace = ? AND id = ?`, ws, id))
	if err != nil {
		return x, fmt.Errorf("effect %s: %w", id, notFound(t.db.mapErr(err)))
	}
	return x, nil
}

const openFrom = `workspace = ? AND session = ? AND id >= ? AND state NOT IN ('completed', 'denied', 'void') ORDER BY id`

// openEffects reads from the oldest open effect on (sessions.open_from), so
// that it costs the same at any length of history.
func (t *tx) openEffects(ws WorkspaceID, id SessionID, from string) ([]Effect, error) {
	if from == "" {
		return nil, nil
	}
	return t.effects(openFrom, ws, id, from)
}

// Effect returns one effect of the workspace.
func (db *DB) Effect(ctx context.Context, ws WorkspaceID, id EffectID) (Effect, error) {
	return db.peek(ctx).effect(ws, id)
}

// Effects lists effects, by id, which is by time.
func (db *DB) Effects(ctx context.Context, ws WorkspaceID, f EffectFilter) ([]Effect, error) {
	where, args := "workspace = ?", []any{ws}
	add := func(cond string, values ...any) { where += " AND " + cond; args = append(args, values...) }
	if f.Session != "" {
		add("session = ?", f.Session)
	}
	if len(f.States) > 0 {
		add("state IN ("+marks(len(f.States))+")", anys(f.States)...)
	}
	if len(f.Classes) > 0 {
		add("class IN ("+marks(len(f.Classes))+")", anys(f.Classes)...)
	}
	if len(f.Tools) > 0 {
		add("tool IN ("+marks(len(f.Tools))+")", anys(f.Tools)...)
	}
	if f.Living {
		add("EXISTS (SELECT 1 FROM sessions s WHERE s.workspace = effects.workspace AND s.id = effects.session AND s.deleted_at = 0 AND s.status <> 'terminated')")
	}
	order := " ORDER BY id"
	if f.Desc {
		order += " DESC"
	}
	switch {
	case f.After != "" && f.Desc:
		add("id < ?", f.After)
	case f.After != "":
		add("id > ?", f.After)
	}
	if f.Limit > 0 {
		order += " LIMIT " + strconv.Itoa(f.Limit)
	}
	return db.peek(ctx).effects(where+order, args...)
}

// anys makes arguments of a list of strings.
func anys[T ~string](list []T) []any {
	out := make([]any, len(list))
	for i, v := range list {
		out[i] = string(v)
	}
	return out
}

// OpenEffects lists the session's effects that are not denied, completed or void.
func (db *DB) OpenEffects(ctx context.Context, ws WorkspaceID, id SessionID) (xs []Effect, err error) {
	err = db.read(ctx, func(t *tx) error {
		var from string
		err := t.queryRow(`SELECT open_from FROM sessions WHERE workspace = ? AND id = ? AND deleted_at = 0`, ws, id).Scan(&from)
		if err != nil {
			return fmt.Errorf("session %s: %w", id, notFound(err))
		}
		xs, err = t.openEffects(ws, id, from)
		return err
	})
	return xs, err
}

// byDigest orders by time before id: by id alone SQLite would walk the primary
// key, all effects of the workspace, instead of the index of digests.
const byDigest = `workspace = ? AND lineage = ? AND digest = ? AND class <> 'read' ORDER BY created_at, id`

// EffectsByDigest lists non-read effects of a lineage with this intent digest, oldest first.
func (db *DB) EffectsByDigest(ctx context.Context, ws WorkspaceID, lineage SessionID, digest string) ([]Effect, error) {
	return db.peek(ctx).effects(byDigest, ws, lineage, digest)
}
