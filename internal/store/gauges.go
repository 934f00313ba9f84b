package store

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// Gauges are numbers over the whole installation, without tenants.
type Gauges struct {
	Sessions    map[Status]int64 // that are not deleted, by effective status
	Stuck       int64            // owned or wanting an owner, and silent for longer than asked
	Damaged     int64            // whose log is refused
	InDoubt     int64            // effects
	OldestDoubt time.Time        // since when the oldest of them is; zero when none
}

// Gauges counts. A session is stuck when it runs or wants to run and nothing
// was written for longer than silent, though no time to wake is set ahead.
// Effects are read from each session's oldest open one on, so that the cost is
// that of the sessions' rows, not of their histories.
func (db *DB) Gauges(ctx context.Context, silent time.Duration) (Gauges, error) {
	g := Gauges{Sessions: map[Status]int64{StatusIdle: 0, StatusRunning: 0, StatusRescheduling: 0, StatusTerminated: 0}}
	now := db.Now()
	err := db.read(ctx, func(t *tx) error {
		err := t.each(`SELECT CASE WHEN starting = 1 AND status = 'idle' AND paused = 0 THEN 'running' ELSE status END AS st, count(*) FROM sessions
			WHERE deleted_at = 0 GROUP BY 1`, nil, func(r *sql.Rows) error {
			var st Status
			var n int64
			err := r.Scan(&st, &n)
			g.Sessions[st] = n
			return err
		})
		if err != nil {
			return err
		}
		err = t.queryRow(`SELECT coalesce(sum(CASE WHEN damaged <> '' THEN 1 ELSE 0 END), 0),
			coalesce(sum(CASE WHEN damaged = '' AND updated_at < ? AND wake_at < ? AND (owner <> '' OR (next_at > 0 AND next_at < ?)) THEN 1 ELSE 0 END), 0)
			FROM sessions WHERE deleted_at = 0`, micros(now.Add(-silent)), micros(now), micros(now.Add(-silent))).Scan(&g.Damaged, &g.Stuck)
		if err != nil {
			return err
		}
		var oldest int64
		err = t.queryRow(`SELECT count(*), coalesce(min(x.updated_at), 0) FROM sessions s
			JOIN effects x ON x.workspace = s.workspace AND x.session = s.id AND x.id >= s.open_from
			WHERE s.open_from <> '' AND x.state = ?`, string(StateInDoubt)).Scan(&g.InDoubt, &oldest)
		g.OldestDoubt = fromMicros(oldest)
		return err
	})
	if err != nil {
		return Gauges{}, fmt.Errorf("read gauges: %w", db.mapErr(err))
	}
	return g, nil
}
