package main

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"strings"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib" // sql.Open("pgx")
)

// postgres writes to the same tables as the store, under seqs and ids of its
// own, in batches by unnest.
func (r *raw) postgres(ctx context.Context, url string) error {
	db, err := sql.Open("pgx", url)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := r.learn(ctx, db, func(i int) string { return fmt.Sprintf("$%d", i) }); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	r.closers = append(r.closers, func() { conn.Close(context.WithoutCancel(ctx)) })
	types, err := columnTypes(ctx, db)
	if err != nil {
		return err
	}
	log := unnestInsert("log", rawLogColumns, types)
	insert := unnestInsert("effects", rawEffColumns, types)
	const update = `UPDATE effects e SET state = u.a, outcome = u.b, attempt_seqs = u.c, attempt_fence = u.d, send_by = u.e, end_seq = u.f, updated_at = u.g
 FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[]) AS u (ws, eid, a, b, c, d, e, f, g)
 WHERE e.workspace = u.ws COLLATE "C" AND e.id = u.eid COLLATE "C"`
	const session = `UPDATE sessions s SET head = u.head, head_hash = u.hash, updated_at = u.at
 FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bytea[], $5::bigint[]) AS u (ws, sid, head, hash, at)
 WHERE s.workspace = u.ws COLLATE "C" AND s.id = u.sid COLLATE "C"`
	// The sessions' heads are the store's: the baseline writes theirs back
	// unchanged, which costs the same row.
	r.write = func(ctx context.Context, batch []*rawAppend) error {
		var logs, fresh, changed, sessions [][]any
		for _, a := range batch {
			logs = append(logs, a.log...)
			e := a.effect
			if a.fresh {
				fresh = append(fresh, e)
			} else {
				changed = append(changed, []any{e[0], e[effID], e[9], e[10], e[18], e[19], e[20], e[21], e[24]})
			}
			sessions = append(sessions, []any{e[0], shadowOf(a.session), a.head, a.log[0][13], e[24]})
		}
		tx, err := conn.Begin(ctx)
		if err != nil {
			return err
		}
		defer tx.Rollback(ctx) //nolint:errcheck // done after a commit
		for _, s := range []struct {
			query string
			rows  [][]any
		}{{log, logs}, {insert, fresh}, {update, changed}, {session, sessions}} {
			if len(s.rows) == 0 {
				continue
			}
			if _, err := tx.Exec(ctx, s.query, columns(s.rows)...); err != nil {
				return err
			}
		}
		return tx.Commit(ctx)
	}
	return r.shadows(ctx, conn)
}

// shadowOf names the copy of a session's row that the baseline updates, so
// that it does not disturb the store's.
func shadowOf(session string) string { return session + "_raw" }

func (r *raw) shadows(ctx context.Context, conn *pgx.Conn) error {
	const columns = `lineage, key_id, thread, status, fence, head, head_hash, created_at, updated_at`
	_, err := conn.Exec(ctx, `INSERT INTO sessions (workspace, id, `+columns+`) SELECT workspace, id || '_raw', `+columns+` FROM sessions`)
	return err
}

// columnTypes reads the types of the columns of both tables.
func columnTypes(ctx context.Context, db *sql.DB) (map[string]string, error) {
	rows, err := scanAll(ctx, db, `SELECT table_name || '.' || column_name, data_type FROM information_schema.columns WHERE table_name IN ('log', 'effects')`)
	if err != nil {
		return nil, err
	}
	types := map[string]string{}
	for _, r := range rows {
		types[fmt.Sprint(r[0])] = fmt.Sprint(r[1])
	}
	return types, nil
}

func unnestInsert(table, list string, types map[string]string) string {
	var args []string
	for i, c := range strings.Split(list, ",") {
		args = append(args, fmt.Sprintf("$%d::%s[]", i+1, types[table+"."+strings.TrimSpace(c)]))
	}
	return `INSERT INTO ` + table + ` (` + list + `) SELECT * FROM unnest(` + strings.Join(args, ", ") + `)`
}

// columns turns rows into one typed array for each column.
func columns(rows [][]any) []any {
	out := make([]any, len(rows[0]))
	for c := range out {
		typ := reflect.TypeOf(rows[0][c])
		list := reflect.MakeSlice(reflect.SliceOf(typ), 0, len(rows))
		for _, r := range rows {
			list = reflect.Append(list, reflect.ValueOf(r[c]))
		}
		out[c] = list.Interface()
	}
	return out
}
