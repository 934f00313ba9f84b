package session

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// State lets tests fold a log.
type State struct{ st *state }

func NewState(s store.Session) (State, error) {
	st, err := newState(s)
	return State{st}, err
}

func (s State) Fold(e store.Entry) error       { return s.st.fold(e) }
func (s State) Messages() []gateway.Message    { return s.st.request().Messages }
func (s State) Tools() []gateway.ModelTool     { return s.st.request().Tools }
func (s State) Want() bool                     { return s.st.want }
func (s State) Open() int                      { return len(s.st.open()) }
func (s State) Usage() store.SessionUsage      { return s.st.usage }
func (s State) Tries(reason string) int        { return s.st.tries[reason] }
func (s State) Status() store.Status           { return s.st.status }
func (s State) Request() gateway.ModelRequest  { return s.st.request() }
func (s State) Newest(n int) []gateway.Message { return newest(s.st.messages, n) }
func (s State) Render(n int) string            { return render(s.st.messages, n) }

// Compaction makes the state that a compaction entry carries.
func (s State) Compaction(summary string) json.RawMessage {
	st := s.st
	return encode(compactState{
		Messages: merge(gateway.Message{Role: "user", Content: []gateway.Block{{Type: "text", Text: summary}}}, lastInput(st.messages)),
		Tools:    st.tools, Told: st.told, Usage: st.usage, Status: st.status, Running: st.running, Want: st.want, Rounds: st.rounds, Shrunk: st.shrunk + 1})
}

// Decision names what a driver that holds this state would do next.
func (s State) Decision(waiting int) string {
	d := &driver{m: &Manager{patience: Patience{}.withDefaults()}, st: s.st, waiting: waiting}
	act, err := d.decide(context.Background())
	if err != nil || act == nil {
		return fmt.Sprint(err)
	}
	name := runtime.FuncForPC(reflect.ValueOf(act).Pointer()).Name()
	return strings.TrimSuffix(name[strings.LastIndexByte(name, '.')+1:], "-fm")
}

var (
	Paired        = paired
	ModelToolName = modelToolName
	UpdateDrafts  = updateDrafts
	Event         = func(id, typ string, f map[string]any) store.Draft { return event(id, typ, "", f) }
	Record        = record
)

// Backoff exposes Patience.backoff.
func Backoff(p Patience, n int, hint time.Duration) time.Duration {
	return p.withDefaults().backoff(n, hint)
}

// ShowOnly bounds the bytes of files in a request until the test ends.
func ShowOnly(t testing.TB, n int64) {
	shownRoom = n
	t.Cleanup(func() { shownRoom = maxShown })
}

// LeftNamed is what is said of files that were left for one reason.
func LeftNamed(files []sandbox.File) string {
	var l leftFiles
	for _, f := range files {
		l.add(f)
	}
	return l.words()
}

// Limits of previews.
const (
	MaxPreviewText  = maxPreviewText
	MaxPreviews     = maxPreviews
	MaxPreviewBytes = maxPreviewBytes
)

// Publish hands out a preview as a driver does, EndPreviews ends some.
func (m *Manager) Publish(id store.SessionID, d Delta)                     { m.hub.publish(id, d) }
func (m *Manager) EndPreviews(id store.SessionID, events ...store.EventID) { m.hub.end(id, events...) }

// PreviewBytes is how much text is kept of previews, as it is counted; it is
// counted anew and must be the same.
func (m *Manager) PreviewBytes() (n int) {
	m.hub.mu.Lock()
	defer m.hub.mu.Unlock()
	for _, list := range m.hub.open {
		for _, p := range list {
			n += p.size()
		}
	}
	if n != m.hub.kept {
		panic(fmt.Sprintf("%d bytes are kept, %d are counted", n, m.hub.kept))
	}
	return n
}
