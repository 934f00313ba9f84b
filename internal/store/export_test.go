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
