package server

import (
	"net/url"

	"github.com/planaria/planaria/internal/policy"
)

// Route is one line of the API.
type Route struct {
	Pattern string
	Action  policy.Action
}

// Routes lists the API.
func Routes() []Route {
	var out []Route
	for _, r := range (&server{}).routes() {
		out = append(out, Route{r.pattern, r.action})
	}
	return out
}

// WireError is the table of errors.
var WireError = wireError

// NewCursor makes a cursor.
func NewCursor(list, order string, at int64, id string) string {
	return cursor{List: list, Order: order, At: at, ID: id}.String()
}

// ReadCursor reads a cursor and returns its list and order.
func ReadCursor(q url.Values, list, order string) (string, string, error) {
	c, err := query{q}.cursor(list, order)
	if err != nil || c == nil {
		return "", "", err
	}
	return c.List, c.Order, nil
}
