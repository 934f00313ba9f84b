package session_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// shell is a call of bash.
func shell(command string) llm.ToolCall {
	return llm.ToolCall{Name: "bash", Input: map[string]any{"command": command}}
}

// resultsOf are the texts of a session's tool results, in order.
func resultsOf(t testing.TB, e *testenv.Env, id string) (out []string) {
	t.Helper()
	for _, en := range entriesOf(t, e, id) {
		if en.Type != "agent.tool_result" && en.Type != "agent.mcp_tool_result" {
			continue
		}
		var b struct {
			Content []struct{ Text string }
			IsError bool `json:"is_error"`
		}
		if err := json.Unmarshal(en.Body, &b); err != nil {
			t.Fatal(err)
		}
		text := ""
		for _, c := range b.Content {
			text += c.Text
		}
		if b.IsError {
			text = "error: " + text
		}
		out = append(out, strings.TrimSpace(text))
	}
	return out
}

// machinesOf are the acts of a session's machine records, in order.
func machinesOf(t testing.TB, e *testenv.Env, id string) (out []store.Machine) {
	t.Helper()
	for _, en := range entriesOf(t, e, id) {
		if en.Kind != store.KindMachine {
			continue
		}
		var b store.Machine
		if err := json.Unmarshal(en.Body, &b); err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}

// TestContainedCalls: built-in tools run in the session's sandbox, in order, in
// one shell, and come to results.
func TestContainedCalls(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	id := e.Begin("work", llm.PlayScript{Steps: []llm.Step{
		calls(shell("cd /tmp; x=5; echo made > f"), shell("echo $x; pwd; cat f")),
		calls(shell("false")),
		ending}})
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	got := resultsOf(t, e, id)
	if len(got) != 3 || got[0] != "(no output)" || got[1] != "5\n/tmp\nmade" || !strings.HasPrefix(got[2], "error: ") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}
