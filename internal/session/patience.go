package session

import (
	"time"

	"github.com/planaria/planaria/internal/gateway"
)

// Patience bounds how long a session tries without progress. Attempts count
// only while nothing new enters the log: an output or a completion starts the
// count over, a restart of the server does not count (trial W3). The zero
// value takes the defaults.
type Patience struct {
	// Tries is how many model requests in a row may fail before the session
	// rests with retries_exhausted. Default 8.
	Tries int
	// Base is the first wait between them, doubling up to Max. Defaults 1 s, 60 s.
	Base, Max time.Duration
	// Rounds is how many model outputs one turn may take. Default 1,000.
	Rounds int
	// Cuts is how many outputs in a row may end at their token limit. Default 3.
	Cuts int
	// Compactions is how many may follow each other without an output. Default 3.
	Compactions int
	// Panics is how many at one place end the turn. Default 3.
	Panics int
	// Silence is how long a driver may go without a commit or a recorded wait
	// before it is cancelled. Default 10 min.
	Silence time.Duration
	// Echo is how long a send waits for the owner to log an answer. Default 2 s.
	Echo time.Duration
	// List bounds the listing of one MCP server's tools. Default 10 s.
	List time.Duration
}

func (p Patience) withDefaults() Patience {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	dur := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	def(&p.Tries, 8)
	def(&p.Rounds, 1000)
	def(&p.Cuts, 3)
	def(&p.Compactions, 3)
	def(&p.Panics, 3)
	dur(&p.Base, time.Second)
	dur(&p.Max, time.Minute)
	dur(&p.Silence, 10*time.Minute)
	dur(&p.Echo, 2*time.Second)
	dur(&p.List, 10*time.Second)
	return p
}

// backoff is the wait before try n+1; a hint of the provider wins where it is longer.
func (p Patience) backoff(n int, hint time.Duration) time.Duration {
	d := p.Base
	for i := 1; i < n && d < p.Max; i++ {
		d *= 2
	}
	return max(min(d, p.Max), min(hint, 10*p.Max))
}

// errorType maps a failed model request to the type of session.error
// (reference section 22.5).
func errorType(e *gateway.ModelError) string {
	switch string(e.Kind) {
	case "overloaded":
		return "model_overloaded_error"
	case "rate_limited":
		return "model_rate_limited_error"
	case "billing":
		return "billing_error"
	}
	return "model_request_failed_error"
}
