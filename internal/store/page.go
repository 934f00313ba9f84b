package store

import (
	"strconv"
	"strings"
	"time"
)

// Page selects a page of configuration objects, newest first, by the
// (created_at, id) of the last row of the former page.
type Page struct {
	AfterAt         time.Time
	AfterID         string
	Limit           int // 0 = all
	IncludeArchived bool
	CreatedGTE      time.Time
	CreatedLTE      time.Time
}

// where collects the conditions of a query with their arguments.
type where struct {
	conds []string
	args  []any
}

func (w *where) add(cond string, args ...any) {
	w.conds = append(w.conds, cond)
	w.args = append(w.args, args...)
}

// equal adds a condition unless v is empty.
func (w *where) equal(column, v string) {
	if v != "" {
		w.add(column+" = ?", v)
	}
}

// between bounds a time on both sides, inclusive; zero = no bound.
func (w *where) between(column string, from, to time.Time) {
	if !from.IsZero() {
		w.add(column+" >= ?", micros(from))
	}
	if !to.IsZero() {
		w.add(column+" <= ?", micros(to))
	}
}

// before goes on after the last row of the former page, newest first.
func (w *where) before(column string, at time.Time, id string) {
	if !at.IsZero() {
		w.add("("+column+" < ? OR "+column+" = ? AND id < ?)", micros(at), micros(at), id)
	}
}

func (w *where) sql() string { return " WHERE " + strings.Join(w.conds, " AND ") }

func (w *where) limit(n int) string {
	if n <= 0 {
		return ""
	}
	return " LIMIT " + strconv.Itoa(n)
}

// page is the where clause, order and limit of a list of objects; prefix is
// the table's alias with its dot, or empty.
func (w *where) page(p Page, prefix string) string {
	if !p.IncludeArchived {
		w.add(prefix + "archived_at = 0")
	}
	w.between(prefix+"created_at", p.CreatedGTE, p.CreatedLTE)
	if !p.AfterAt.IsZero() {
		w.add("("+prefix+"created_at < ? OR "+prefix+"created_at = ? AND "+prefix+"id < ?)",
			micros(p.AfterAt), micros(p.AfterAt), p.AfterID)
	}
	return w.sql() + " ORDER BY " + prefix + "created_at DESC, " + prefix + "id DESC" + w.limit(p.Limit)
}

// orNull stores bytes, and NULL for none.
func orNull(b []byte) any {
	if len(b) == 0 {
		return nil
	}
	return b
}
