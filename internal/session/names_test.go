package session_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

// A name that could be cut apart in two ways is not shared by two tools.
func TestModelToolNameIsUnique(t *testing.T) {
	for _, c := range [][4]string{{"a.b", "do", "a_b", "do"}, {"a", "b__do", "a__b", "do"}, {"a_", "do", "a", "_do"}} {
		if session.ModelToolName(c[0], c[1]) == session.ModelToolName(c[2], c[3]) {
			t.Errorf("%q of %q and %q of %q share a name", c[1], c[0], c[3], c[2])
		}
	}
}

// A server that takes one name for two tools does not stop the session.
func TestOffersNameOnce(t *testing.T) {
	l := newLog(t)
	object := json.RawMessage(`{"type":"object"}`)
	tools, err := json.Marshal([]gateway.Tool{{Server: "cloud", Name: "do", InputSchema: object}, {Server: "cloud", Name: "do", InputSchema: object}})
	if err != nil {
		t.Fatal(err)
	}
	l.add(session.Record(store.KindTools, "rec_t", "", store.Tools{V: 1, Server: "cloud", Digest: "x", Tools: tools}))
	var names []string
	for _, o := range l.st.Tools() {
		names = append(names, o.Name)
	}
	if diff := cmp.Diff([]string{"mcp__cloud__do", "ask"}, names); diff != "" {
		t.Errorf("offered tools (-want +got):\n%s", diff)
	}
}
