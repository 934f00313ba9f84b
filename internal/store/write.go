package store

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
)

// guards reads what appends compare. On PostgreSQL it locks the rows in the
// order of their keys, and a row that another transaction holds is missing from
// the answer: it waits for the next batch.
func (t *tx) guards(keys []sessionKey) (map[sessionKey]guard, error) {
	const columns = `s.workspace, s.id, s.owner, s.fence, s.head, s.starting, s.inbox_n, s.inbox_urgent, s.inbox_last, s.next_at, s.deleted_at, s.damaged`
	found := make(map[sessionKey]guard, len(keys))
	scan := func(row scanner) error {
		var k sessionKey
		var g guard
		var starting int64
		if err := row.Scan(&k.ws, &k.id, &g.owner, &g.fence, &g.head, &starting, &g.inboxN, &g.inboxUrgent, &g.inboxLast, &g.nextAt, &g.deleted, &g.damaged); err != nil {
			return t.db.mapErr(err)
		}
		g.starting = starting != 0
		found[k] = g
		return nil
	}
	if t.db.pg {
		ws, ids := make([]string, len(keys)), make([]string, len(keys))
		for i, k := range keys {
			ws[i], ids[i] = string(k.ws), string(k.id)
		}
		err := t.each(`SELECT `+columns+` FROM sessions s JOIN unnest(?::text[], ?::text[]) AS u (ws, sid) ON s.workspace = u.ws COLLATE "C" AND s.id = u.sid COLLATE "C"
 ORDER BY s.workspace, s.id FOR NO KEY UPDATE OF s SKIP LOCKED`, []any{ws, ids}, func(rows *sql.Rows) error { return scan(rows) })
		return found, err
	}
	for _, k := range keys {
		if err := scan(t.queryRow(`SELECT `+columns+` FROM sessions s WHERE workspace = ? AND id = ?`, string(k.ws), string(k.id))); err != nil {
			return nil, fmt.Errorf("session %s: %w", k.id, notFound(err))
		}
	}
	return found, nil
}

const (
	logColumns   = `workspace, session, seq, kind, type, id, thread, at, fence, key_id, salt, body, blob, hash`
	usageColumns = `workspace, id, session, kind, name, at, input_tokens, output_tokens, cache_read_tokens, cache_5m_tokens, cache_1h_tokens, cost_nusd, waste`
)

// The statements of an append, made once.
var (
	insertLog    = `INSERT INTO log (` + logColumns + `) VALUES (` + marks(14) + `)`
	insertEffect = `INSERT INTO effects (` + effectColumns + `) VALUES (` + marks(25) + `)`
	updateEffect = `UPDATE effects SET (thread, tool, server, connector, class, state, outcome, flags, event, digest, near, idem_key, first_seq, intent_seq, attempt_seqs, attempt_fence, send_by, end_seq, evidence_seqs, created_at, updated_at) = (` +
		marks(21) + `) WHERE workspace = ? AND id = ?`
	moveEffect    = `UPDATE effects SET ` + strings.Join(movedColumns, " = ?, ") + ` = ? WHERE workspace = ? AND id = ?`
	updateSession = map[int]string{ // by the number of columns
		setEvery:        updateSessionOf(setEvery),
		setIndexed:      updateSessionOf(setIndexed),
		len(setColumns): updateSessionOf(len(setColumns)),
	}
	insertUsage  = `INSERT INTO usage (` + usageColumns + `) VALUES (` + marks(13) + `) ON CONFLICT (workspace, id) DO NOTHING`
	deleteInbox  = `DELETE FROM inbox WHERE workspace = ? AND session = ? AND id = ?`
	upsertConfig = `INSERT INTO session_configs (workspace, session, config) VALUES (?, ?, ?) ON CONFLICT (workspace, session) DO UPDATE SET config = excluded.config`
	setAgent     = `UPDATE sessions SET agent_id = ?, agent_version = ? WHERE workspace = ? AND id = ?`
)

func updateSessionOf(n int) string {
	return `UPDATE sessions SET ` + strings.Join(setColumns[:n], " = ?, ") + ` = ? WHERE workspace = ? AND id = ? AND fence = ? AND head = ?`
}

func (c *change) logArgs(i int) []any {
	e, p := &c.entries[i], &c.prepared[i]
	return []any{string(c.row.Workspace), string(c.row.ID), int64(e.Seq), string(e.Kind), e.Type, e.ID, string(e.Thread),
		micros(e.At), int64(e.Fence), string(c.key.id), p.salt, c.sealedBody(i), p.blob, e.Hash[:]}
}

func (c *change) usageArgs(u *usageRow) []any {
	return []any{string(c.row.Workspace), u.id, string(c.row.ID), u.kind, u.name, micros(u.at),
		u.usage.Input, u.usage.Output, u.usage.CacheRead, u.usage.CacheCreation5m, u.usage.CacheCreation1h, u.cost, b2i(u.waste)}
}

// writeChanges writes all rows of changes whose fate is decided.
func (t *tx) writeChanges(cs []*change) error {
	if t.db.pg {
		return t.writeUnnest(cs)
	}
	for _, c := range cs {
		if err := t.writeChange(c); err != nil {
			return fmt.Errorf("session %s: %w", c.row.ID, err)
		}
	}
	return nil
}

func (t *tx) writeChange(c *change) error {
	for i := range c.entries {
		if _, err := t.exec(insertLog, c.logArgs(i)...); err != nil {
			return err
		}
	}
	for id, x := range c.rows.effects {
		if c.rows.fresh[id] {
			if _, err := t.exec(insertEffect, x.args()...); err != nil {
				return err
			}
			continue
		}
		update, set := moveEffect, x.movedArgs()
		if c.rows.headed[id] {
			update, set = updateEffect, x.args()[4:]
		}
		if n, err := t.exec(update, append(set, string(x.Workspace), string(x.ID))...); err != nil || n != 1 {
			return orMissing(err, "effect "+string(id))
		}
	}
	if err := t.writeRare(c); err != nil {
		return err
	}
	sets := c.sets()
	update := updateSession[len(sets)]
	n, err := t.exec(update, append(slices.Clip(sets), string(c.row.Workspace), string(c.row.ID), int64(c.old.Fence), int64(c.old.Head))...)
	if err == nil && n == 0 {
		err = ErrFenced
	}
	return err
}

// writeRare writes what few appends have.
func (t *tx) writeRare(c *change) error {
	for i := range c.rows.usage {
		if _, err := t.exec(insertUsage, c.usageArgs(&c.rows.usage[i])...); err != nil {
			return err
		}
	}
	for _, id := range c.consumed {
		if n, err := t.exec(deleteInbox, string(c.row.Workspace), string(c.row.ID), id); err != nil || n != 1 {
			return orMissing(err, "inbox row "+id)
		}
	}
	if err := t.writeSnapshots(c); err != nil {
		return err
	}
	return t.writeConfig(c)
}

// writeConfig writes the configuration when it changed.
func (t *tx) writeConfig(c *change) error {
	if !c.rows.config {
		return nil
	}
	sealed, err := c.sealedConfig()
	if err != nil {
		return err
	}
	if _, err := t.exec(upsertConfig, string(c.row.Workspace), string(c.row.ID), sealed); err != nil {
		return err
	}
	agent, version := agentOf(&c.row.Config)
	_, err = t.exec(setAgent, agent, version, string(c.row.Workspace), string(c.row.ID))
	return err
}

// orMissing is the error of a row that was read and is then not there: damage
// of an index, or a hole in the locking.
func orMissing(err error, what string) error {
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: %s vanished inside its transaction", ErrDamaged, what)
}

// published tells followers, owners and nodes of a durable change outside the committer.
func (db *DB) published(r *sessionRow, entries []Entry, queued []Inbox) {
	key := sessionKey{r.Workspace, r.ID}
	db.saw([]*sessionRow{r})
	db.hub.publish(key, entries, queued)
	if len(queued) > 0 || r.inboxN > 0 {
		db.wakeOwner(key)
	}
	db.tell([]*sessionRow{r})
}

// wakeOwner signals the lease of this process on a session, if there is one.
func (db *DB) wakeOwner(key sessionKey) {
	db.mu.Lock()
	l := db.leases[key]
	db.mu.Unlock()
	if l != nil {
		wake(l.inbox)
	}
}

// tell wakes whoever may claim, and on PostgreSQL the other nodes.
func (db *DB) tell(rs []*sessionRow) {
	work := false
	for _, r := range rs {
		work = work || r.Owner == "" && r.nextAt > 0 && r.deletedAt == 0
	}
	if work {
		db.wakeNodes()
	}
	if db.pg {
		db.tellOthers(rs, work)
	}
}

func (db *DB) wakeNodes() {
	db.mu.Lock()
	defer db.mu.Unlock()
	for _, n := range db.nodes {
		wake(n.work)
	}
}
