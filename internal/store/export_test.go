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
