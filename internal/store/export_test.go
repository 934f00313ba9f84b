package store

import "context"

// Exec runs a statement past all checks: tests damage rows with it.
func (db *DB) Exec(ctx context.Context, query string, args ...any) (n int64, err error) {
	err = db.write(ctx, writeOpt{step: "test"}, func(t *tx) error {
		n, err = t.exec(query, args...)
		return err
	})
	return n, err
}

// CopyConfig gives a session the configuration of another of its lineage.
func (db *DB) CopyConfig(ctx context.Context, ws WorkspaceID, from, to SessionID) error {
	return db.tx(ctx, func(t *tx) error {
		row, err := t.fullRow(ws, from, false)
		if err != nil {
			return err
		}
		key, err := t.dataKey(ws, row.keyID)
		if err != nil {
			return err
		}
		row.ID = to
		sealed, err := newChange(*row, key, nil).sealedConfig()
		if err != nil {
			return err
		}
		_, err = t.exec(upsertConfig, ws, to, sealed)
		return err
	})
}

// RawStep writes the rows of one append of BenchmarkEffect with nothing around
// them: no precondition, hash, seal or fold. What is measured against it is the
// protocol's own cost.
type RawStep struct {
	Session SessionID
	Effect  EffectID
	Seq     Seq
	Step    int // 0 intent, 1 attempt, 2 completion with its event
	Body    []byte
}

// RawCommit commits steps in one transaction.
func (db *DB) RawCommit(ctx context.Context, steps []RawStep) error {
	salt, hash := make([]byte, saltSize), make([]byte, 32)
	now := micros(db.Now())
	write := func(t *tx, s *RawStep) error {
		entries := 1 + s.Step/2
		for k := range entries {
			if _, err := t.exec(insertLog, "default", string(s.Session), int64(s.Seq)+int64(k), "completion", "", string(s.Effect), "sthr_1", now, int64(1), "dkey_01m8m8ww2jq2jqvnz338dg3326", salt, s.Body, "", hash); err != nil {
				return err
			}
		}
		x := Effect{Workspace: "default", Session: s.Session, Lineage: s.Session, ID: s.Effect, Thread: "sthr_1", Tool: "delete_database", Server: "aws",
			Class: ClassIrreversible, State: StateIntended, Event: EventID("sevt_" + s.Effect), Digest: "d1", Near: "n1", Key: "key-" + string(s.Effect), CreatedAt: db.Now()}
		args := x.args()
		var err error
		if s.Step == 0 {
			_, err = t.exec(insertEffect, args...)
		} else {
			_, err = t.exec(updateEffect, append(args[4:], args[0], args[2])...)
		}
		if err != nil {
			return err
		}
		r := &sessionRow{}
		r.Owner, r.Fence, r.Status, r.nextAt = "node", 1, StatusRunning, 1
		r.Head = s.Seq + Seq(entries) - 1
		_, err = t.exec(updateSession, append(r.setArgs(), "default", string(s.Session), int64(1), int64(s.Seq)-1)...)
		return err
	}
	return db.transact(ctx, 0, func(t *tx) error {
		for i := range steps {
			if err := write(t, &steps[i]); err != nil {
				return err
			}
		}
		return nil
	})
}
