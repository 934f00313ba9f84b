package session_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"pgregory.net/rapid"
)

const agentJSON = `{"type":"agent","id":"agent_1","version":1,"name":"worker","model":{"id":"m","effort":{"type":"high"},"speed":"standard"},
 "system":"Be careful.","tools":[{"type":"mcp_toolset","mcp_server_name":"cloud","default_config":{"enabled":true,"permission_policy":{"type":"always_allow"}},
 "configs":[{"name":"hidden","enabled":false}]},{"type":"custom","name":"ask","description":"d","input_schema":{"type":"object"}}],
 "mcp_servers":[{"type":"url","name":"cloud","url":"planaria:cloud"}]}`

// logOf numbers drafts as a log.
type logOf struct {
	t       testing.TB
	st      session.State
	entries []store.Entry
	at      time.Time
}

func newLog(t testing.TB) *logOf {
	t.Helper()
	st, err := session.NewState(store.Session{Thread: "sthr_1", Config: store.SessionConfig{Agent: json.RawMessage(agentJSON)}})
	if err != nil {
		t.Fatalf("new state: %v", err)
	}
	l := &logOf{t: t, st: st, at: time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)}
	l.add(session.Record(store.KindCreated, "rec_0", "", store.Created{V: 1, Thread: "sthr_1", Config: store.SessionConfig{Agent: json.RawMessage(agentJSON)}}))
	return l
}

func (l *logOf) add(ds ...store.Draft) {
	l.t.Helper()
	for _, d := range ds {
		l.at = l.at.Add(time.Second)
		e := store.Entry{Draft: d, Seq: store.Seq(len(l.entries) + 1), At: l.at}
		l.entries = append(l.entries, e)
		if err := l.st.Fold(e); err != nil {
			l.t.Fatalf("fold %s %s: %v", d.Kind, d.Type, err)
		}
	}
}

func (l *logOf) say(s string) {
	l.add(session.Event("sevt_u"+fmt.Sprint(len(l.entries)), "user.message", map[string]any{"content": []map[string]any{{"type": "text", "text": s}}}))
}

// output adds an answer that calls tools with the given model ids.
func (l *logOf) output(text string, ids ...string) {
	var content []gateway.Block
	if text != "" {
		content = append(content, gateway.Block{Type: "text", Text: text})
	}
	o := store.Output{V: 1, Effect: store.EffectID(fmt.Sprintf("eff_m%d", len(l.entries))), Purpose: "turn", Model: "m", StopReason: "end_turn",
		Usage: store.TokenUsage{Input: 10, Output: 5}}
	var events []store.Draft
	for _, id := range ids {
		o.StopReason = "tool_use"
		content = append(content, gateway.Block{Type: "tool_use", ID: id, Name: "mcp__cloud__do", Input: json.RawMessage(`{}`)})
		o.Calls = append(o.Calls, store.OutputCall{ModelID: id, Event: store.EventID("sevt_" + id), Effect: store.EffectID("eff_" + id)})
		events = append(events, session.Event("sevt_"+id, "agent.mcp_tool_use", map[string]any{"name": "do", "mcp_server_name": "cloud", "input": map[string]any{}}))
	}
	b, err := json.Marshal(content)
	if err != nil {
		l.t.Fatal(err)
	}
	o.Content = b
	l.add(session.Record(store.KindOutput, string(o.Effect), "sthr_1", o))
	l.add(events...)
}

func (l *logOf) result(id, text string) {
	l.add(session.Event("sevt_r_"+id, "agent.mcp_tool_result", map[string]any{"mcp_tool_use_id": "sevt_" + id,
		"content": []map[string]any{{"type": "text", "text": text}}, "is_error": false}))
}

// checkPairing is the rule of reference section 22.4.
func checkPairing(t interface{ Fatalf(string, ...any) }, ms []gateway.Message) {
	var owed []string
	for i, m := range ms {
		if m.Role == "assistant" {
			if len(owed) > 0 {
				t.Fatalf("message %d: tool uses %v have no result", i, owed)
			}
			for _, b := range m.Content {
				if b.Type == "tool_use" {
					owed = append(owed, b.ID)
				}
			}
			continue
		}
		words := false
		for _, b := range m.Content {
			if b.Type != "tool_result" {
				words = true
				continue
			}
			if words {
				t.Fatalf("message %d: a result stands behind text", i)
			}
			if len(owed) == 0 || !strings.Contains(strings.Join(owed, " ")+" ", b.ToolUseID+" ") {
				t.Fatalf("message %d: orphan result %s", i, b.ToolUseID)
			}
			if len(b.Content) == 0 {
				t.Fatalf("message %d: empty result %s", i, b.ToolUseID)
			}
			for j, id := range owed {
				if id == b.ToolUseID {
					owed = append(owed[:j], owed[j+1:]...)
					break
				}
			}
		}
		if len(owed) > 0 {
			t.Fatalf("message %d: no result for %v", i, owed)
		}
	}
	if len(owed) > 0 {
		t.Fatalf("tool uses %v have no result", owed)
	}
}

// TestFoldParallelCalls is trial P1 at the fold: results are counted call by
// call, and enter the context together in the order of the calls.
func TestFoldParallelCalls(t *testing.T) {
	l := newLog(t)
	l.say("go")
	l.output("", "a", "b", "c")
	l.result("c", "three")
	l.result("a", "one")
	if got := l.st.Open(); got != 1 || l.st.Want() {
		t.Fatalf("after two of three results: open %d, want %v; want 1, false", got, l.st.Want())
	}
	l.result("b", "two")
	if l.st.Open() != 0 || !l.st.Want() {
		t.Fatalf("after all results: open %d, want %v", l.st.Open(), l.st.Want())
	}
	ms := l.st.Messages()
	checkPairing(t, ms)
	var got []string
	for _, b := range ms[len(ms)-1].Content {
		got = append(got, b.ToolUseID+"="+b.Content[0].Text)
	}
	if diff := cmp.Diff([]string{"a=one", "b=two", "c=three"}, got); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	l.result("b", "again")
	if n := len(l.st.Messages()); n != len(ms) {
		t.Errorf("a second result for one call changed the context: %d messages, want %d", n, len(ms))
	}
}

// TestPairedRepairs is trial H1: whatever a history looks like, the request is
// valid, and what is not known is said to be unknown, not failed.
func TestPairedRepairs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var ms []gateway.Message
		n := rapid.IntRange(0, 8).Draw(t, "messages")
		id := 0
		for range n {
			role := rapid.SampledFrom([]string{"user", "assistant", "system"}).Draw(t, "role")
			m := gateway.Message{Role: "user"}
			switch role {
			case "assistant":
				m.Role = "assistant"
				for range rapid.IntRange(0, 3).Draw(t, "uses") {
					id++
					m.Content = append(m.Content, gateway.Block{Type: "tool_use", ID: fmt.Sprintf("t%d", id), Input: json.RawMessage(`{}`)})
				}
			case "system":
				m.Role = "system"
			default:
				for range rapid.IntRange(0, 3).Draw(t, "results") {
					m.Content = append(m.Content, gateway.Block{Type: "tool_result", ToolUseID: fmt.Sprintf("t%d", rapid.IntRange(1, id+2).Draw(t, "id")),
						Content: []gateway.Block{{Type: "text", Text: "r"}}})
				}
			}
			if rapid.Bool().Draw(t, "words") || len(m.Content) == 0 {
				m.Content = append(m.Content, gateway.Block{Type: "text", Text: "w"})
			}
			ms = append(ms, m)
		}
		out := session.Paired(ms)
		checkPairing(t, out)
		for _, m := range out {
			for _, b := range m.Content {
				if b.IsError && strings.Contains(strings.ToLower(b.Content[0].Text), "it failed") &&
					!strings.Contains(b.Content[0].Text, "Do not assume") {
					t.Fatalf("a repaired result claims a failure: %q", b.Content[0].Text)
				}
			}
		}
	})
}

// TestFoldIsRebuild: folding from a compaction gives what folding everything
// gives from there on (trial C1).
func TestFoldIsRebuild(t *testing.T) {
	l := newLog(t)
	l.add(session.Event("sevt_1", "session.status_running", nil))
	l.say("task")
	l.output("on it", "a")
	l.result("a", "done")
	l.add(session.Record(store.KindCompaction, "rec_c", "sthr_1", store.Compaction{V: 1, Summary: "S", Method: "summary", State: l.st.Compaction("S")}))
	at := store.Seq(len(l.entries))
	l.output("next", "b")
	l.result("b", "done too")

	st, err := session.NewState(store.Session{Thread: "sthr_1", Compacted: at, Config: store.SessionConfig{Agent: json.RawMessage(agentJSON)}})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range l.entries[at-1:] {
		if err := st.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(l.st.Request(), st.Request()); diff != "" {
		t.Errorf("request after rebuild from the compaction (-whole log +rebuild):\n%s", diff)
	}
	if diff := cmp.Diff(l.st.Usage(), st.Usage()); diff != "" {
		t.Errorf("usage (-whole log +rebuild):\n%s", diff)
	}
	checkPairing(t, st.Messages())
}

// TestFoldRefusesGap: a hole in the log is damage, not a shorter history (trial K5).
func TestFoldRefusesGap(t *testing.T) {
	l := newLog(t)
	l.say("one")
	e := l.entries[len(l.entries)-1]
	e.Seq += 2
	if err := l.st.Fold(e); err == nil {
		t.Fatal("fold took an entry behind a gap")
	}
}

func TestSettledLaterIsNoted(t *testing.T) {
	l := newLog(t)
	l.say("go")
	l.output("", "a")
	l.add(session.Record(store.KindSettlement, "eff_a", "", store.Settlement{V: 1, Effect: "eff_a", Outcome: store.Told, By: "person"}))
	l.result("a", "outcome unknown, eff_a, do not repeat")
	l.add(session.Event("sevt_i", "session.status_idle", map[string]any{"stop_reason": map[string]any{"type": "end_turn"}}))
	if l.st.Want() {
		t.Fatal("an idle session wants the model")
	}
	l.add(session.Record(store.KindSettlement, "eff_a", "", store.Settlement{V: 1, Effect: "eff_a", Outcome: "happened", By: "person"}))
	if l.st.Want() {
		t.Fatal("a settlement at rest woke the model")
	}
	ms := l.st.Messages()
	last := ms[len(ms)-1].Content
	if got := last[len(last)-1].Text; !strings.Contains(got, "eff_a") || !strings.Contains(got, "it happened") {
		t.Errorf("last block = %q, want a note that eff_a happened", got)
	}
	checkPairing(t, ms)
}

func TestTriesCountOnlyWithoutProgress(t *testing.T) {
	l := newLog(t)
	l.say("go")
	for i := 1; i <= 3; i++ {
		l.add(session.Record(store.KindWait, "rec_w", "", store.Wait{V: 1, Reason: "model", Tries: i}))
		l.add(session.Record(store.KindClaim, "rec_k", "", store.Claim{V: 1})) // a restart is not a failure (trial W3)
	}
	if got := l.st.Tries("model"); got != 3 {
		t.Fatalf("tries = %d, want 3", got)
	}
	l.output("progress")
	if got := l.st.Tries("model"); got != 0 {
		t.Errorf("tries after an output = %d, want 0", got)
	}
}

func TestCompactionCutsAtClosedPairs(t *testing.T) {
	l := newLog(t)
	l.say("task")
	for i := range 20 {
		id := fmt.Sprintf("x%d", i)
		l.output(strings.Repeat("word ", 40), id)
		l.result(id, strings.Repeat("result ", 40))
	}
	for n := 0; n < 30000; n += 700 {
		kept := l.st.Newest(n)
		checkPairing(t, append([]gateway.Message{{Role: "user", Content: []gateway.Block{{Type: "text", Text: "S"}}}}, kept...))
		if got := len(l.st.Render(n)); got > n+len("…")+1 {
			t.Fatalf("render(%d) has %d bytes", n, got)
		}
	}
}

func TestModelToolName(t *testing.T) {
	for _, c := range []struct{ server, tool, want string }{
		{"cloud", "do", "mcp__cloud__do"},
		{"a.b", "do", ""},
		{"a_b", "do", "mcp__a_b__do"},
		{"s", strings.Repeat("x", 200), ""},
	} {
		got := session.ModelToolName(c.server, c.tool)
		if c.want != "" && got != c.want {
			t.Errorf("name(%q, %q) = %q, want %q", c.server, c.tool, got, c.want)
		}
		if len(got) > 128 {
			t.Errorf("name(%q, %q) has %d characters", c.server, c.tool, len(got))
		}
	}
	if session.ModelToolName("a.b", "do") == session.ModelToolName("a_b", "do") {
		t.Error("two servers share a name")
	}
}

func TestOffersFollowTheLog(t *testing.T) {
	l := newLog(t)
	if got := len(l.st.Tools()); got != 1 {
		t.Fatalf("tools before a listing = %d, want the custom one", got)
	}
	tools, _ := json.Marshal([]gateway.Tool{{Server: "cloud", Name: "do", Description: "d", InputSchema: json.RawMessage(`{"type":"object"}`)},
		{Server: "cloud", Name: "hidden"}, {Server: "cloud", Name: "changed", Quarantined: "its definition changed"}})
	l.add(session.Record(store.KindTools, "rec_t", "", store.Tools{V: 1, Server: "cloud", Digest: "x", Tools: tools}))
	var names []string
	for _, o := range l.st.Tools() {
		names = append(names, o.Name)
	}
	if diff := cmp.Diff([]string{"mcp__cloud__do", "ask"}, names); diff != "" {
		t.Errorf("offered tools (-want +got):\n%s", diff)
	}
}

func TestBackoff(t *testing.T) {
	p := session.Patience{Base: time.Second, Max: 10 * time.Second}
	for _, c := range []struct {
		n          int
		hint, want time.Duration
	}{{1, 0, time.Second}, {2, 0, 2 * time.Second}, {4, 0, 8 * time.Second}, {9, 0, 10 * time.Second},
		{1, 30 * time.Second, 30 * time.Second}, {1, time.Hour, 100 * time.Second}} {
		if got := session.Backoff(p, c.n, c.hint); got != c.want {
			t.Errorf("backoff(%d, hint %v) = %v, want %v", c.n, c.hint, got, c.want)
		}
	}
}

func TestUpdateDrafts(t *testing.T) {
	title, v := "new", "1"
	c := store.SessionConfig{Agent: json.RawMessage(agentJSON), Metadata: map[string]string{"a": "x"}}
	ds, err := session.UpdateDrafts(c, session.UpdateParams{Title: &title, Metadata: map[string]*string{"a": nil, "b": &v}}, time.Now())
	if err != nil || len(ds) != 2 {
		t.Fatalf("drafts = %d, err %v; want 2", len(ds), err)
	}
	var got struct {
		Title    string            `json:"title"`
		Metadata map[string]string `json:"metadata"`
		Agent    json.RawMessage   `json:"agent"`
	}
	if err := json.Unmarshal(ds[1].Body, &got); err != nil {
		t.Fatal(err)
	}
	if got.Title != "new" || len(got.Metadata) != 1 || got.Metadata["b"] != "1" || got.Agent != nil {
		t.Errorf("event = %s, want only what changed", ds[1].Body)
	}
	c.Title = &title
	if ds, err = session.UpdateDrafts(c, session.UpdateParams{NoTitle: true}, time.Now()); err != nil || len(ds) != 2 || !strings.Contains(string(ds[1].Body), `"title":null`) {
		t.Errorf("clearing the title made %d entries, err %v; want the event to say null", len(ds), err)
	}
	if ds, err := session.UpdateDrafts(c, session.UpdateParams{Metadata: map[string]*string{"zz": nil}}, time.Now()); err != nil || len(ds) != 0 {
		t.Errorf("an update that changes nothing made %d entries, err %v", len(ds), err)
	}
}
