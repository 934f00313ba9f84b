package testenv

import (
	"errors"
	"fmt"
	"sync"
)

// ErrFault is what an injected fault says.
var ErrFault = errors.New("injected fault")

// Fault is one fault to inject: at the Nth time (from 1) that a life of the
// process comes to a named point.
type Fault struct {
	// Point is "store:append.before", "keeper:after_attempt", "session:loop", …:
	// a package and the name that it gives the point.
	Point string
	N     int
	// Survive lets the process live on: only this one step fails. It says what
	// is true only of steps of the store; elsewhere an error means death.
	Survive bool
}

func (f Fault) String() string {
	s := fmt.Sprintf("%s#%d", f.Point, f.N)
	if f.Survive {
		s += " survived"
	}
	return s
}

// faults injects faults and counts points. A dead process does nothing any
// more: every point that it comes to fails.
type faults struct {
	mu    sync.Mutex
	plan  []Fault // the first is for this life
	hits  map[string]int
	total map[string]int // over all lives
	dead  bool
	fired chan struct{} // closed when this life's fault happened
	die   func()        // cuts connections
	holds map[string]*hold
}

// hold stops whoever comes to a point.
type hold struct{ arrived, gone chan struct{} }

func newFaults() *faults {
	return &faults{hits: map[string]int{}, total: map[string]int{}, fired: make(chan struct{})}
}

// arm replaces the plan and counts anew.
func (f *faults) arm(plan []Fault) (left int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	left = len(f.plan)
	f.plan, f.hits, f.total = plan, map[string]int{}, map[string]int{}
	f.renew()
	return left
}

// renew makes the signal of the next fault. The caller holds the lock.
func (f *faults) renew() {
	select {
	case <-f.fired:
		f.fired = make(chan struct{})
	default:
	}
}

func (f *faults) isDead() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead
}

// at is the hook of one package.
func (f *faults) at(pkg string) func(string) error {
	return func(point string) error { return f.hit(pkg + ":" + point) }
}

func (f *faults) hit(point string) error {
	f.held(point)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dead {
		return ErrFault
	}
	f.hits[point]++
	f.total[point]++
	if len(f.plan) == 0 || f.plan[0].Point != point || f.plan[0].N != f.hits[point] {
		return nil
	}
	survive := f.plan[0].Survive
	f.plan = f.plan[1:]
	f.renew() // a survived fault may be followed by another in the same life
	close(f.fired)
	if !survive {
		f.dead = true
		go f.die() // takes locks of its own; Crash waits for what it does
	}
	return fmt.Errorf("%w at %s", ErrFault, point)
}

// held waits at a point that is held, the first time that it is come to.
func (f *faults) held(point string) {
	f.mu.Lock()
	h := f.holds[point]
	delete(f.holds, point)
	f.mu.Unlock()
	if h != nil {
		close(h.arrived)
		<-h.gone
	}
}

// hold makes whoever comes to a point next wait there until release is called.
func (f *faults) hold(point string) (arrived <-chan struct{}, release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := &hold{make(chan struct{}), make(chan struct{})}
	if f.holds == nil {
		f.holds = map[string]*hold{}
	}
	f.holds[point] = h
	return h.arrived, sync.OnceFunc(func() { close(h.gone) })
}

// kill makes the process dead at once.
func (f *faults) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead = true
}

// reborn begins the next life; die ends its connections.
func (f *faults) reborn(die func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead, f.hits, f.die = false, map[string]int{}, die
	f.renew()
}

func (f *faults) firedCh() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fired
}

// points returns how often each point was come to, over all lives.
func (f *faults) points() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make(map[string]int, len(f.total))
	for k, v := range f.total {
		out[k] = v
	}
	return out
}
