package gateway

import (
	"context"
	"log/slog"
	"sync"
)

const (
	// refusedHosts is how many hosts are told apart in what one session was
	// refused; further ones are counted together.
	refusedHosts = 32
	// refusedSessions bounds how many sessions are remembered.
	refusedSessions = 1000
)

// refusals counts what sandboxes were refused, so that an operator learns of it
// and a process that tries for ever does not fill the log: of each session, host
// and reason the 1st, 10th, 100th, … refusal is told.
type refusals struct {
	mu  sync.Mutex
	all map[egressKey]map[refusedWay]int
}

type refusedWay struct{ host, why string }

// count counts a refusal and says as which one of its kind it is told, if it is.
func (r *refusals) count(key egressKey, what refusedWay) (_ refusedWay, times int, tell bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := r.all[key]
	if of == nil {
		if r.all == nil || len(r.all) >= refusedSessions {
			r.all = map[egressKey]map[refusedWay]int{} // counting begins anew
		}
		of = map[refusedWay]int{}
		r.all[key] = of
	}
	if of[what] == 0 && len(of) >= refusedHosts {
		what = refusedWay{host: "others"}
	}
	of[what]++
	times = of[what]
	for n := 1; n <= times; n *= 10 {
		tell = tell || n == times
	}
	return what, times, tell
}

// refused tells the operator that this sandbox was refused a host. err may hold
// addresses.
func (e *egress) refused(level slog.Level, host, why string, err error) {
	what, times, tell := e.g.refusals.count(egressKey{e.scope.Workspace, e.scope.Session}, refusedWay{host, why})
	if !tell {
		return
	}
	attrs := []any{"session", e.scope.Session, "host", what.host, "times", times}
	if what.why != "" {
		attrs = append(attrs, "why", what.why)
	}
	if err != nil {
		attrs = append(attrs, "err", err)
	}
	e.g.log.Log(context.Background(), level, "refused a way out of a sandbox", attrs...)
}
