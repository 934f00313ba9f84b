//go:build linux

package guest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/sandbox/link"
	"github.com/planaria/planaria/internal/sandbox/wire"
)

const (
	// maxKept bounds the results that wait for acknowledgement; beyond it the
	// oldest are dropped, and asking for one of them says so.
	maxKept = 64 << 20
	// maxGone is how many ids of acknowledged calls are remembered.
	maxGone = 10_000
	// progressEvery and progressMax bound the live output of a call.
	progressEvery = 100 * time.Millisecond
	progressMax   = 8 << 10
)

// call is one tool call: running, or done and not yet acknowledged.
type call struct {
	id, thread, tool string
	done             chan struct{} // closed when result is set
	cancel           chan struct{} // closed to stop it
	out              *output

	mu       sync.Mutex
	stopped  bool
	result   *wire.Result
	restores int
	limits   []string // what the guard did to it
	gone     bool     // acknowledged: only the id is left
}

// restored notes that the sandbox came back from a snapshot meanwhile.
func (c *call) restored() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.result == nil {
		c.restores++
	}
}

func (c *call) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.stopped {
		c.stopped = true
		close(c.cancel)
	}
}

// hit notes that a limit of the sandbox struck while the call ran.
func (c *call) hit(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.result == nil && !slices.Contains(c.limits, what) {
		c.limits = append(c.limits, what)
	}
}

// serveCall answers one request for a call: it starts it unless it was started
// before, tells its progress, and at last its result.
func (a *Agent) serveCall(s *link.Stream) {
	defer s.Close()
	var req wire.Call
	if err := wire.ReadMessage(s, wire.MaxMessage, &req); err != nil {
		s.Reset()
		return
	}
	c, started := a.find(&req)
	if c == nil {
		_ = wire.WriteMessage(s, wire.Reply{Unknown: true})
		return
	}
	if wire.WriteMessage(s, wire.Reply{Started: started}) != nil {
		return
	}
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	var told int64
	for {
		select {
		case <-s.Done():
			return // asked again later
		case <-c.done:
			_ = wire.WriteMessage(s, wire.Reply{Result: c.result})
			return
		case <-tick.C:
			var text string
			if text, told = c.out.since(told, progressMax); text != "" {
				if wire.WriteMessage(s, wire.Reply{Progress: text}) != nil {
					return
				}
			}
		}
	}
}

// find returns the call of a request, starting it where it is new.
func (a *Agent) find(req *wire.Call) (c *call, started bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.calls[req.ID]; c != nil {
		return c, false
	}
	if req.Only {
		return nil, false
	}
	c = &call{id: req.ID, thread: req.Thread, tool: req.Tool, done: make(chan struct{}), cancel: make(chan struct{}), out: newOutput(req.ID)}
	a.calls[req.ID] = c
	select {
	case a.stir <- struct{}{}:
	default:
	}
	if req.Tool != "read" && req.Tool != "glob" && req.Tool != "grep" {
		a.changes++
	}
	input := slices.Clone(req.Input)
	go a.perform(c, input)
	return c, true
}

// perform runs a call to its result.
func (a *Agent) perform(c *call, input json.RawMessage) {
	w := newWatch()
	var r wire.Result
	func() {
		defer func() {
			if p := recover(); p != nil {
				r = failure("the tool broke: %v", p)
			}
		}()
		r = a.tool(c, input, w)
	}()
	if c.tool != "bash" { // which writes through the output
		r.Text = c.out.bound(r.Text)
	}
	r.Millis = w.elapsed().Milliseconds()
	c.out.closeSpill()
	c.mu.Lock()
	if len(c.limits) > 0 {
		r.IsError, r.Reason = true, "limit"
		r.Text = strings.TrimRight(r.Text, "\n") + "\n\nlimit of the sandbox: " + strings.Join(c.limits, "; ")
		r.Text = strings.TrimLeft(r.Text, "\n")
	}
	r.Restored = c.restores
	c.result = &r
	c.mu.Unlock()
	close(c.done)

	a.mu.Lock()
	defer a.mu.Unlock()
	a.kept += size(&r)
	for a.kept > maxKept {
		if !a.dropOldest() {
			return
		}
	}
}

// size of what a result keeps in memory, in bytes.
func size(r *wire.Result) int64 {
	n := len(r.Text)
	for _, i := range r.Images {
		n += len(i.Data)
	}
	return int64(n)
}

// dropOldest gives up the result that has waited longest. a.mu is held.
func (a *Agent) dropOldest() bool {
	var oldest *call
	for _, c := range a.calls {
		if c.result != nil && !c.gone && size(c.result) > 0 && (oldest == nil || c.id < oldest.id) {
			oldest = c
		}
	}
	if oldest == nil {
		return false
	}
	a.release(oldest, "the result was not fetched in time and had to be dropped")
	return true
}

// release replaces a result by a word on why it is gone. a.mu is held.
func (a *Agent) release(c *call, why string) {
	a.kept -= size(c.result)
	r := failure("%s", why)
	r.Reason = "gone"
	c.gone, c.result, c.out = true, &r, newOutput(c.id)
}

// ack forgets results that the host has made durable. The ids stay known, so
// that none of them runs a second time.
func (a *Agent) ack(ids []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range ids {
		if c := a.calls[id]; c != nil && !c.gone {
			select {
			case <-c.done:
				a.release(c, "the result of this call was already acknowledged")
			default:
			}
		}
	}
	if len(a.calls) > 2*maxGone {
		a.forgetGone()
	}
}

// forgetGone drops the older half of the ids that are only remembered. Ids are
// ordered by time. a.mu is held.
func (a *Agent) forgetGone() {
	var ids []string
	for id, c := range a.calls {
		if c.gone {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	for _, id := range ids[:len(ids)/2] {
		delete(a.calls, id)
	}
}

// tool runs the named tool.
func (a *Agent) tool(c *call, input json.RawMessage, w *watch) wire.Result {
	switch c.tool {
	case "bash":
		return a.bash(c, input, w)
	case "read":
		return with(input, a.readFile)
	case "write":
		return with(input, a.writeFile)
	case "edit":
		return with(input, a.editFile)
	case "glob":
		return with(input, func(in searchInput) wire.Result { return a.glob(in, c, w) })
	case "grep":
		return with(input, func(in searchInput) wire.Result { return a.grep(in, c, w) })
	case "browser":
		return with(input, func(in browserInput) wire.Result { return a.browse(in, c) })
	}
	return failure("no such tool: %s", c.tool)
}

// with decodes a tool's input, refusing what the tool does not know.
func with[T any](input json.RawMessage, do func(T) wire.Result) wire.Result {
	var in T
	if err := decode(input, &in); err != nil {
		return failure("%v", err)
	}
	return do(in)
}

func decode(input json.RawMessage, v any) error {
	if len(input) == 0 {
		input = json.RawMessage("{}")
	}
	d := json.NewDecoder(bytes.NewReader(input))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("input of the tool: %w", err)
	}
	return nil
}

func failure(format string, args ...any) wire.Result {
	return wire.Result{Text: fmt.Sprintf(format, args...), IsError: true}
}

// watch measures how long a call runs, without the time that it was frozen: the
// clock of a restored sandbox jumps by all the time the snapshot lay there, and
// no call may time out for that.
type watch struct {
	mu    sync.Mutex
	last  time.Time
	total time.Duration
}

// maxGap is the longest time between two looks that counts.
const maxGap = time.Second

func newWatch() *watch { return &watch{last: time.Now()} }

func (w *watch) elapsed() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	w.total += min(now.Sub(w.last), maxGap)
	w.last = now
	return w.total
}
