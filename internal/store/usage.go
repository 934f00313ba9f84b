package store

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"time"
)

// UsageFilter selects metered rows and how they are summed.
type UsageFilter struct {
	From, To time.Time // zero = open; To is exclusive
	GroupBy  string    // model, session, agent, day (UTC)
	After    string    // last group of the former page
	Limit    int
}

// UsageSum is what one group used. What a failure made us pay again stands
// apart, in the fields named Wasted, and in no other.
type UsageSum struct {
	Group string // model name, session id, agent id, or 2006-01-02
	TokenUsage
	CostNanoUSD       int64
	ModelRequests     int64
	Effects           int64 // effects other than model calls, by the time of their creation
	WastedTokens      int64
	WastedCostNanoUSD int64
}

const dayMicros = 24 * 60 * 60 * 1_000_000

// usageGroups maps each grouping to its SQL over usage u and over effects x.
// A day is its number since 1970.
var usageGroups = map[string]struct{ usage, effects string }{
	"model":   {`u.name`, ``},
	"session": {`u.session`, `x.session`},
	"agent":   {`coalesce((SELECT s.agent_id FROM sessions s WHERE s.workspace = u.workspace AND s.id = u.session), '')`, `coalesce((SELECT s.agent_id FROM sessions s WHERE s.workspace = x.workspace AND s.id = x.session), '')`},
	"day":     {`u.at / 86400000000`, `x.created_at / 86400000000`},
}

// Usage sums the metered rows of a workspace by group, ordered by group.
// ErrNotFound for a grouping that is not known.
func (db *DB) Usage(ctx context.Context, ws WorkspaceID, f UsageFilter) ([]UsageSum, error) {
	g, ok := usageGroups[f.GroupBy]
	if !ok {
		return nil, fmt.Errorf("usage by %q: %w", f.GroupBy, ErrNotFound)
	}
	var out []UsageSum
	err := db.read(ctx, func(t *tx) error {
		sums, order, err := sumUsage(t, ws, f, g.usage)
		if err != nil {
			return err
		}
		if g.effects != "" {
			if err := countEffects(t, ws, f, g.effects, sums); err != nil {
				return err
			}
		}
		out = out[:0]
		for _, group := range order {
			out = append(out, *sums[group])
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("usage by %s: %w", f.GroupBy, err)
	}
	return out, nil
}

func sumUsage(t *tx, ws WorkspaceID, f UsageFilter, group string) (map[string]*UsageSum, []string, error) {
	w := where{}
	w.add("u.workspace = ?", ws)
	w.span("u.at", f.From, f.To)
	if err := w.afterGroup(group, f); err != nil {
		return nil, nil, err
	}
	tokens := `u.input_tokens + u.output_tokens + u.cache_read_tokens + u.cache_5m_tokens + u.cache_1h_tokens`
	paid := func(expr string) string {
		return `coalesce(sum(CASE WHEN u.waste = 0 THEN ` + expr + ` ELSE 0 END), 0)`
	}
	lost := func(expr string) string {
		return `coalesce(sum(CASE WHEN u.waste <> 0 THEN ` + expr + ` ELSE 0 END), 0)`
	}
	sums := map[string]*UsageSum{}
	var order []string
	err := t.each(`SELECT `+group+` AS grp, `+paid(`u.input_tokens`)+`, `+paid(`u.output_tokens`)+`, `+
		paid(`u.cache_read_tokens`)+`, `+paid(`u.cache_5m_tokens`)+`, `+paid(`u.cache_1h_tokens`)+`, `+
		paid(`u.cost_nusd`)+`, `+paid(`CASE WHEN u.kind = 'model' THEN 1 ELSE 0 END`)+`, `+lost(tokens)+`, `+lost(`u.cost_nusd`)+
		` FROM usage u`+w.sql()+` GROUP BY 1 ORDER BY 1`+w.limit(f.Limit), w.args, func(r *sql.Rows) error {
		var s UsageSum
		if err := r.Scan(&s.Group, &s.Input, &s.Output, &s.CacheRead, &s.CacheCreation5m, &s.CacheCreation1h,
			&s.CostNanoUSD, &s.ModelRequests, &s.WastedTokens, &s.WastedCostNanoUSD); err != nil {
			return err
		}
		s.Group = groupText(f.GroupBy, s.Group)
		sums[s.Group] = &s
		order = append(order, s.Group)
		return nil
	})
	return sums, order, err
}

// countEffects adds the number of effects other than model calls to the groups
// that are there.
func countEffects(t *tx, ws WorkspaceID, f UsageFilter, group string, sums map[string]*UsageSum) error {
	w := where{}
	w.add("x.workspace = ? AND x.event <> ''", ws)
	w.span("x.created_at", f.From, f.To)
	return t.each(`SELECT `+group+` AS grp, count(*) FROM effects x`+w.sql()+` GROUP BY 1`, w.args, func(r *sql.Rows) error {
		var name string
		var n int64
		if err := r.Scan(&name, &n); err != nil {
			return err
		}
		if s := sums[groupText(f.GroupBy, name)]; s != nil {
			s.Effects = n
		}
		return nil
	})
}

// span bounds a time from below inclusively and from above exclusively.
func (w *where) span(column string, from, to time.Time) {
	if !from.IsZero() {
		w.add(column+" >= ?", micros(from))
	}
	if !to.IsZero() {
		w.add(column+" < ?", micros(to))
	}
}

func (w *where) afterGroup(group string, f UsageFilter) error {
	switch {
	case f.After == "":
	case f.GroupBy == "day":
		day, err := time.Parse(time.DateOnly, f.After)
		if err != nil {
			return fmt.Errorf("read day: %w", err)
		}
		w.add(group+" > ?", micros(day)/dayMicros)
	default:
		w.add(group+" > ?", f.After)
	}
	return nil
}

// groupText is a group as it is shown: a day's number becomes its date.
func groupText(by, s string) string {
	if by != "day" {
		return s
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return s
	}
	return fromMicros(n * dayMicros).Format(time.DateOnly)
}

// InDoubt counts the effects in doubt of sessions; one without any is left out.
func (db *DB) InDoubt(ctx context.Context, ws WorkspaceID, ids []SessionID) (map[SessionID]int64, error) {
	out := map[SessionID]int64{}
	if len(ids) == 0 {
		return out, nil
	}
	args := []any{ws, string(StateInDoubt)}
	for _, id := range ids {
		args = append(args, string(id))
	}
	err := db.read(ctx, func(t *tx) error {
		return t.each(`SELECT session, count(*) FROM effects WHERE workspace = ? AND state = ? AND session IN (`+marks(len(ids))+`) GROUP BY session`,
			args, func(r *sql.Rows) error {
				var id SessionID
				var n int64
				err := r.Scan(&id, &n)
				out[id] = n
				return err
			})
	})
	if err != nil {
		return nil, fmt.Errorf("count effects in doubt: %w", err)
	}
	return out, nil
}
