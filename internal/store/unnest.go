package store

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
)

// table is a set of rows on their way to PostgreSQL as one array per column.
type table struct {
	name  string
	names []string
	kinds string // per column: t text, i bigint, b bytea
	cols  []any  // per column: []string, []int64, [][]byte
	n     int64
}

// newTable declares columns, "name, name, …", of the kinds given.
func newTable(name, columns, kinds string) *table {
	t := &table{name: name, names: strings.Split(strings.ReplaceAll(strings.ReplaceAll(columns, "\n", ""), " ", ""), ","), kinds: kinds}
	for _, k := range kinds {
		switch k {
		case 't':
			t.cols = append(t.cols, []string(nil))
		case 'i':
			t.cols = append(t.cols, []int64(nil))
		case 'b':
			t.cols = append(t.cols, [][]byte(nil))
		}
	}
	if len(t.names) != len(t.cols) {
		panic(fmt.Sprintf("store: table %s has %d columns and %d kinds", name, len(t.names), len(t.cols)))
	}
	return t
}

// add adds a row; values are of the columns' kinds.
func (t *table) add(values []any) {
	t.n++
	for i, v := range values {
		switch c := t.cols[i].(type) {
		case []string:
			t.cols[i] = append(c, v.(string))
		case []int64:
			t.cols[i] = append(c, v.(int64))
		case [][]byte:
			t.cols[i] = append(c, v.([]byte))
		}
	}
}

// unnest is the rows as a relation u of the columns' names.
func (t *table) unnest() string {
	casts := make([]string, len(t.kinds))
	for i, k := range t.kinds {
		casts[i] = map[rune]string{'t': "?::text[]", 'i': "?::bigint[]", 'b': "?::bytea[]"}[k]
	}
	return "unnest(" + strings.Join(casts, ", ") + ") AS u (" + strings.Join(t.names, ", ") + ")"
}

// insert is the statement that inserts the rows.
func (t *table) insert() string {
	return "INSERT INTO " + t.name + " (" + strings.Join(t.names, ", ") + ") SELECT u." + strings.Join(t.names, ", u.") + " FROM " + t.unnest()
}

// set is "a = u.a, b = u.b" for the columns from..to.
func (t *table) set(from, to int) string {
	parts := make([]string, 0, to-from)
	for _, n := range t.names[from:to] {
		parts = append(parts, n+" = u."+n)
	}
	return strings.Join(parts, ", ")
}

// write runs a statement over the rows, if there are any, and checks the count
// of changed rows unless any count is right.
func (t *tx) write(tab *table, statement string, anyCount bool) error {
	if tab.n == 0 {
		return nil
	}
	n, err := t.exec(statement, tab.cols...)
	if err != nil {
		return err
	}
	if n != tab.n && !anyCount {
		return fmt.Errorf("%w: %d of %d rows of %s vanished inside their transaction", ErrDamaged, tab.n-n, tab.n, tab.name)
	}
	return nil
}

// The shapes of what an append writes on PostgreSQL.
const (
	logKinds    = "ttitttt" + "iit" + "bbtb"
	effectKinds = "ttttttttttt" + "i" + "tttt" + "iit" + "iii" + "t" + "ii"
	usageKinds  = "ttttti" + "iiiiiii"
	movedKinds  = "ttitiiiti"
	setKinds    = "ibit" + "ttiti" + "tiiiiiii" + "iiiiiiii" + "iii" + "tii"
)

// writeUnnest writes the rows of all changes with one statement per table. The
// sessions' rows are locked by guards or by their reader.
func (t *tx) writeUnnest(cs []*change) error {
	logs := newTable("log", logColumns, logKinds)
	fresh := newTable("effects", effectColumns, effectKinds)
	changed := newTable("effects", effectColumns, effectKinds)
	used := newTable("usage", usageColumns, usageKinds)
	gone := newTable("inbox", "workspace, session, id", "ttt")
	moved := newTable("effects", strings.Join(movedColumns, ", ")+", workspace, id", movedKinds+"tt")
	sets := map[int]*table{} // by the number of columns
	for _, n := range []int{setEvery, setIndexed, len(setColumns)} {
		sets[n] = newTable("sessions", strings.Join(setColumns[:n], ", ")+", workspace, id, old_fence, old_head", setKinds[:n]+"ttii")
	}
	for _, c := range cs {
		for i := range c.entries {
			logs.add(c.logArgs(i))
		}
		for id, x := range c.rows.effects {
			switch {
			case c.rows.fresh[id]:
				fresh.add(x.args())
			case c.rows.headed[id]:
				changed.add(x.args())
			default:
				moved.add(append(x.movedArgs(), string(x.Workspace), string(x.ID)))
			}
		}
		for i := range c.rows.usage {
			used.add(c.usageArgs(&c.rows.usage[i]))
		}
		for _, id := range c.consumed {
			gone.add([]any{string(c.row.Workspace), string(c.row.ID), id})
		}
		values := c.sets()
		sets[len(values)].add(append(slices.Clip(values), string(c.row.Workspace), string(c.row.ID), int64(c.old.Fence), int64(c.old.Head)))
		if err := t.writeConfig(c); err != nil {
			return err
		}
	}
	for _, w := range []struct {
		tab  *table
		text string
		any  bool
	}{
		{logs, logs.insert(), false},
		{fresh, fresh.insert(), false},
		{changed, "UPDATE effects e SET " + changed.set(4, len(changed.names)) + " FROM " + changed.unnest() + " WHERE e.workspace = u.workspace AND e.id = u.id", false},
		{moved, "UPDATE effects e SET " + moved.set(0, len(movedColumns)) + " FROM " + moved.unnest() + " WHERE e.workspace = u.workspace AND e.id = u.id", false},
		{used, used.insert() + " ON CONFLICT (workspace, id) DO NOTHING", true},
		{gone, "DELETE FROM inbox i USING " + gone.unnest() + " WHERE i.workspace = u.workspace AND i.session = u.session AND i.id = u.id", false},
	} {
		if err := t.write(w.tab, w.text, w.any); err != nil {
			return fmt.Errorf("write %s: %w", w.tab.name, err)
		}
	}
	for n, set := range sets {
		text := "UPDATE sessions s SET " + set.set(0, n) + " FROM " + set.unnest() + " WHERE s.workspace = u.workspace AND s.id = u.id AND s.fence = u.old_fence AND s.head = u.old_head"
		if err := t.write(set, text, false); err != nil {
			return fmt.Errorf("write sessions: %w", err)
		}
	}
	return nil
}

// prefetch reads with two queries what the appends of a batch look at besides
// their sessions' rows, because on PostgreSQL each query is a round trip.
type prefetch struct {
	inbox   map[string]int64 // id of an inbox row that is there: urgent
	effects map[EffectID]Effect
}

func (t *tx) prefetch(batch []load) (*prefetch, error) {
	p := &prefetch{inbox: map[string]int64{}, effects: map[EffectID]Effect{}}
	rows := newTable("inbox", "workspace, session, id", "ttt")
	effects := newTable("effects", "workspace, id", "tt")
	for _, ld := range batch {
		key := ld.l.key
		want := func(id EffectID) {
			if _, ok := ld.l.open[id]; !ok && id != "" {
				effects.add([]any{string(key.ws), string(id)})
			}
		}
		for _, it := range ld.items {
			for _, id := range it.append.Consume {
				rows.add([]any{string(key.ws), string(key.id), id})
			}
			for _, is := range it.append.Effects {
				want(is.ID)
			}
			for i := range it.entries {
				switch it.entries[i].parsed.body.(type) {
				case *Intent, *Proposal, *Output: // expected to be new
				default:
					want(it.entries[i].parsed.effect)
				}
			}
		}
	}
	if rows.n > 0 {
		err := t.each("SELECT i.id, i.urgent FROM inbox i JOIN "+rows.unnest()+" ON i.workspace = u.workspace AND i.session = u.session AND i.id = u.id", rows.cols, func(r *sql.Rows) error {
			var id string
			var urgent int64
			err := r.Scan(&id, &urgent)
			p.inbox[id] = urgent
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if effects.n > 0 {
		err := t.each("SELECT e."+strings.ReplaceAll(effectColumns, ", ", ", e.")+" FROM effects e JOIN "+effects.unnest()+" ON e.workspace = u.workspace AND e.id = u.id", effects.cols, func(r *sql.Rows) error {
			x, err := scanEffect(r)
			p.effects[x.ID] = x
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return p, nil
}
