package store

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
)

// shape is a table's name and columns.
type shape struct {
	name  string
	names []string
	kinds string // per column: t text, i bigint, b bytea
}

// table is a set of rows on their way to PostgreSQL as one array per column.
type table struct {
	*shape
	cols []any // per column: []string, []int64, [][]byte
	n    int64
}

// newShape declares columns, "name, name, …", of the kinds given.
func newShape(name, columns, kinds string) *shape {
	s := &shape{name: name, names: strings.Split(strings.ReplaceAll(strings.ReplaceAll(columns, "\n", ""), " ", ""), ","), kinds: kinds}
	if len(s.names) != len(s.kinds) {
		panic(fmt.Sprintf("store: table %s has %d columns and %d kinds", name, len(s.names), len(s.kinds)))
	}
	return s
}

func newTable(name, columns, kinds string) *table { return newShape(name, columns, kinds).table() }

// table is an empty set of rows.
func (s *shape) table() *table {
	t := &table{shape: s, cols: make([]any, len(s.kinds))}
	for i, k := range s.kinds {
		switch k {
		case 't':
			t.cols[i] = []string(nil)
		case 'i':
			t.cols[i] = []int64(nil)
		case 'b':
			t.cols[i] = [][]byte(nil)
		}
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
func (s *shape) unnest() string {
	casts := make([]string, len(s.kinds))
	for i, k := range s.kinds {
		casts[i] = map[rune]string{'t': "?::text[]", 'i': "?::bigint[]", 'b': "?::bytea[]"}[k]
	}
	return "unnest(" + strings.Join(casts, ", ") + ") AS u (" + strings.Join(s.names, ", ") + ")"
}

// insert is the statement that inserts the rows.
func (s *shape) insert() string {
	return "INSERT INTO " + s.name + " (" + strings.Join(s.names, ", ") + ") SELECT u." + strings.Join(s.names, ", u.") + " FROM " + s.unnest()
}

// set is "a = u.a, b = u.b" for the columns from..to.
func (s *shape) set(from, to int) string {
	parts := make([]string, 0, to-from)
	for _, n := range s.names[from:to] {
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

// What an append writes on PostgreSQL: shapes and statements, made once.
var (
	logShape    = newShape("log", logColumns, logKinds)
	effectShape = newShape("effects", effectColumns, effectKinds)
	movedShape  = newShape("effects", strings.Join(movedColumns, ", ")+", workspace, id", movedKinds+"tt")
	usageShape  = newShape("usage", usageColumns, usageKinds)
	goneShape   = newShape("inbox", "workspace, session, id", "ttt")

	pgLog     = logShape.insert()
	pgFresh   = effectShape.insert()
	pgChanged = "UPDATE effects e SET " + effectShape.set(4, len(effectShape.names)) + " FROM " + effectShape.unnest() + " WHERE e.workspace = u.workspace AND e.id = u.id"
	pgMoved   = "UPDATE effects e SET " + movedShape.set(0, len(movedColumns)) + " FROM " + movedShape.unnest() + " WHERE e.workspace = u.workspace AND e.id = u.id"
	pgUsed    = usageShape.insert() + " ON CONFLICT (workspace, id) DO NOTHING"
	pgGone    = "DELETE FROM inbox i USING " + goneShape.unnest() + " WHERE i.workspace = u.workspace AND i.session = u.session AND i.id = u.id"

	setEveryShape   = setShape(setEvery)
	setUnindexed    = setShape(setIndexed)
	setAllShape     = setShape(len(setColumns))
	pgSetEvery      = setEveryShape.setSessions(setEvery)
	pgSetUnindexed  = setUnindexed.setSessions(setIndexed)
	pgSetAllColumns = setAllShape.setSessions(len(setColumns))
)

func setShape(n int) *shape {
	return newShape("sessions", strings.Join(setColumns[:n], ", ")+", workspace, id, old_fence, old_head", setKinds[:n]+"ttii")
}

func (s *shape) setSessions(n int) string {
	return "UPDATE sessions s SET " + s.set(0, n) + " FROM " + s.unnest() + " WHERE s.workspace = u.workspace AND s.id = u.id AND s.fence = u.old_fence AND s.head = u.old_head"
}

// writeUnnest writes the rows of all changes with one statement per table. The
// sessions' rows are locked by guards or by their reader.
func (t *tx) writeUnnest(cs []*change) error {
	logs, fresh, changed, moved := logShape.table(), effectShape.table(), effectShape.table(), movedShape.table()
	used, gone := usageShape.table(), goneShape.table()
	every, unindexed, all := setEveryShape.table(), setUnindexed.table(), setAllShape.table()
	sets := map[int]*table{setEvery: every, setIndexed: unindexed, len(setColumns): all} // by the number of columns
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
		if err := t.writeSnapshots(c); err != nil {
			return err
		}
	}
	for _, w := range []struct {
		tab  *table
		text string
		any  bool
	}{
		{logs, pgLog, false},
		{fresh, pgFresh, false},
		{changed, pgChanged, false},
		{moved, pgMoved, false},
		{used, pgUsed, true},
		{gone, pgGone, false},
		{every, pgSetEvery, false},
		{unindexed, pgSetUnindexed, false},
		{all, pgSetAllColumns, false},
	} {
		if err := t.write(w.tab, w.text, w.any); err != nil {
			return fmt.Errorf("write %s: %w", w.tab.name, err)
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
