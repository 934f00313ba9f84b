package server

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
)

// query reads the query string; unknown names, such as beta, are ignored.
type query struct{ values url.Values }

func (q query) get(name string) string { return q.values.Get(name) }

// list reads a repeated name, with brackets or without (reference section 1.8).
func (q query) list(name string) []string {
	return append(slices.Clone(q.values[name+"[]"]), q.values[name]...)
}

func (q query) flag(name string) (bool, error) {
	switch v := q.get(name); v {
	case "", "false", "0":
		return false, nil
	case "true", "1":
		return true, nil
	}
	return false, api.Invalid(name, "must be true or false")
}

// limit reads limit: def when absent, 1 to most else.
func (q query) limit(def, most int) (int, error) {
	v := q.get("limit")
	if v == "" {
		return def, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > most {
		return 0, api.Invalid("limit", "must be a number from 1 to %d", most)
	}
	return n, nil
}

// order reads order; def is "asc" or "desc".
func (q query) order(def string) (string, error) {
	switch v := q.get("order"); v {
	case "":
		return def, nil
	case "asc", "desc":
		return v, nil
	}
	return "", api.Invalid("order", "must be asc or desc")
}

func (q query) time(name string) (time.Time, error) {
	v := q.get(name)
	if v == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339Nano, v)
	if err != nil {
		return time.Time{}, api.Invalid(name, "must be an RFC 3339 time such as 2026-11-29T15:14:05Z")
	}
	return t.UTC().Truncate(time.Microsecond), nil
}

// span is a range of times as created_at[gt], [gte], [lt], [lte] give it.
type span struct{ gt, gte, lt, lte time.Time }

func (q query) span(name string) (sp span, err error) {
	for suffix, into := range map[string]*time.Time{"[gt]": &sp.gt, "[gte]": &sp.gte, "[lt]": &sp.lt, "[lte]": &sp.lte} {
		if *into, err = q.time(name + suffix); err != nil {
			return span{}, err
		}
	}
	return sp, nil
}

// covers reports whether a time is inside.
func (sp span) covers(t time.Time) bool {
	return (sp.gt.IsZero() || t.After(sp.gt)) && (sp.gte.IsZero() || !t.Before(sp.gte)) &&
		(sp.lt.IsZero() || t.Before(sp.lt)) && (sp.lte.IsZero() || !t.After(sp.lte))
}

func (sp span) empty() bool { return sp == span{} }

// cursor is a position in a list. It is opaque to clients: base64 of JSON. It
// says of which list and order it is, so that it opens no other.
type cursor struct {
	List  string `json:"l"`
	Order string `json:"o"`
	At    int64  `json:"t,omitempty"` // UTC microseconds
	ID    string `json:"i,omitempty"`
	N     int64  `json:"n,omitempty"` // a seq, version or number of an inbox row
	M     int64  `json:"m,omitempty"`
	Back  bool   `json:"b,omitempty"` // sessions: towards the first page
}

func (c cursor) String() string {
	b, err := json.Marshal(c)
	if err != nil {
		panic("server: encode a cursor: " + err.Error())
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

func (c cursor) at() time.Time {
	if c.At == 0 {
		return time.Time{}
	}
	return time.UnixMicro(c.At).UTC()
}

// next is the value of next_page or prev_page.
func next(c cursor) *string {
	s := c.String()
	return &s
}

// cursor reads page; a nil cursor means the first page.
func (q query) cursor(list, order string) (*cursor, error) {
	v := q.get("page")
	if v == "" {
		return nil, nil
	}
	bad := api.Invalid("page", "is not a cursor of this list; take it from next_page and leave it as it is")
	b, err := base64.RawURLEncoding.DecodeString(v)
	if err != nil {
		return nil, bad
	}
	var c cursor
	if json.Unmarshal(b, &c) != nil || c.List != list || c.At < 0 || c.N < 0 || c.M < 0 || strings.ContainsRune(c.ID, 0) {
		return nil, bad
	}
	if c.Order != order {
		return nil, api.Invalid("page", "is a cursor of order %q; it cannot be used with order %q", c.Order, order)
	}
	return &c, nil
}

// page reads what lists of configuration objects have in common. One row more
// than asked for is fetched, to know whether there is a next page.
func (q query) page(list string) (p store.Page, limit int, err error) {
	if limit, err = q.limit(20, 100); err != nil {
		return p, 0, err
	}
	if p.IncludeArchived, err = q.flag("include_archived"); err != nil {
		return p, 0, err
	}
	sp, err := q.span("created_at")
	if err != nil {
		return p, 0, err
	}
	if !sp.gt.IsZero() || !sp.lt.IsZero() {
		return p, 0, api.Invalid("created_at", "this list takes [gte] and [lte]")
	}
	c, err := q.cursor(list, "desc")
	if err != nil {
		return p, 0, err
	}
	if c != nil {
		if !sp.covers(c.at()) {
			return p, 0, api.Invalid("page", "lies outside of the created_at filter; start again without page")
		}
		p.AfterAt, p.AfterID = c.at(), c.ID
	}
	p.CreatedGTE, p.CreatedLTE, p.Limit = sp.gte, sp.lte, limit+1
	return p, limit, nil
}

// pageOf makes a page of rows that may be one too many, newest first.
func pageOf[R, W any](list string, rows []R, limit int, wire func(R) (W, error), at func(R) (time.Time, string)) (api.Page[W], error) {
	out := api.Page[W]{Data: api.List[W]{}}
	if len(rows) > limit {
		rows = rows[:limit]
		t, id := at(rows[limit-1])
		out.NextPage = next(cursor{List: list, Order: "desc", At: t.UnixMicro(), ID: id})
	}
	for _, r := range rows {
		w, err := wire(r)
		if err != nil {
			return api.Page[W]{}, err
		}
		out.Data = append(out.Data, w)
	}
	return out, nil
}

// noNUL refuses a text that not every store can hold in a column.
func noNUL(path string, texts ...string) error {
	for _, s := range texts {
		for i := range len(s) {
			if s[i] == 0 {
				return api.Invalid(path, "must not hold a NUL character")
			}
		}
	}
	return nil
}
