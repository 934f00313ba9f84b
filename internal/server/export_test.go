package server

import "github.com/planaria/planaria/internal/policy"

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
