package store

import (
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// mapErr maps what the engines say about damage and space to clear errors.
func (db *DB) mapErr(err error) error {
	switch {
	case err == nil, errors.Is(err, ErrDamaged):
		return err
	case db.pg:
		return pgErr(err)
	}
	return sqliteErr(err)
}

// isUnique reports a row whose key is already there.
func (db *DB) isUnique(err error) bool {
	var p *pgconn.PgError
	if errors.As(err, &p) {
		return p.Code == "23505"
	}
	var s *sqlite.Error
	return errors.As(err, &s) && (s.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY || s.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE)
}

// uncertain reports that COMMIT failed in a way that may still turn out as
// committed after a crash: SQLite could not sync a commit that it has written
// and then took back in memory. A full disk is not of this kind: the frame that
// commits is written last.
func (db *DB) uncertain(err error) bool {
	var s *sqlite.Error
	return !db.pg && errors.As(err, &s) && s.Code()&0xff == sqlite3.SQLITE_IOERR
}
