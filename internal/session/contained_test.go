package session_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
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

// agentWith makes an agent whose built-in tools have a permission policy.
func agentWith(t testing.TB, e *testenv.Env, policy string) string {
	t.Helper()
	var out struct{ ID string }
	err := e.API.Do(t.Context(), http.MethodPost, "/v1/agents", testenv.M{"name": policy, "model": "scripted-1", "tools": []testenv.M{
		{"type": "agent_toolset_20260401", "default_config": testenv.M{"permission_policy": testenv.M{"type": policy}},
			"configs": []testenv.M{{"name": "read", "permission_policy": testenv.M{"type": "always_allow"}}, {"name": "grep", "enabled": false}}}}}, &out)
	if err != nil {
		t.Fatal(err)
	}
	return out.ID
}

func confirm(event, result string) testenv.M {
	c := testenv.M{"type": "user.tool_confirmation", "tool_use_id": event, "result": result}
	if result == "deny" {
		c["deny_message"] = "not like this"
	}
	return c
}

// TestContainedAsks: always_ask rests with requires_action and names the calls.
// An answer is unique: the identical one again is accepted, another one is not.
// A denied call gets the person's words, an allowed one runs, in order.
func TestContainedAsks(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	agent := agentWith(t, e, "always_ask")
	e.Model.Add(t, testenv.Marked("asks", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo one > /tmp/f"), shell("echo two > /tmp/f"),
			llm.ToolCall{Name: "read", Input: map[string]any{"file_path": "/tmp/f"}}),
		ending}}))
	id, err := e.Create("asks", agent)
	if err != nil {
		t.Fatal(err)
	}
	stop, err := e.API.Await(t.Context(), id)
	if err != nil || stop.Type != "requires_action" || len(stop.EventIDs) != 2 {
		t.Fatalf("rests with %v: %v\n%s", stop, err, e.Describe(id))
	}
	if e.SandboxPID(id) != 0 {
		t.Error("a machine runs for calls that nobody allowed")
	}
	send := func(event, result string, want int) {
		t.Helper()
		_, err := e.API.Send(t.Context(), id, "", confirm(event, result))
		got := http.StatusOK
		if api := (*testenv.APIError)(nil); errors.As(err, &api) {
			got = api.Status
		} else if err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("%s of %s is answered with %d, want %d", result, event, got, want)
		}
	}
	send("sevt_nobody", "allow", 400)
	send(stop.EventIDs[1], "deny", 200)
	send(stop.EventIDs[1], "deny", 200)
	send(stop.EventIDs[1], "allow", 400)
	if stop, err = e.API.Await(t.Context(), id); err != nil || stop.Type != "requires_action" {
		t.Fatalf("with one answer of two it rests with %v: %v\n%s", stop, err, e.Describe(id))
	}
	e.Crash()
	e.Restart()
	send(stop.EventIDs[0], "allow", 200)
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v", stop)
	}
	send(stop.EventIDs[0], "deny", 400)
	want := []string{"error: not like this", "(no output)", "one"}
	if got := resultsOf(t, e, id); !slices.Equal(got, want) {
		t.Errorf("results %q, want %q\n%s", got, want, e.Describe(id))
	}
	e.Check()
}

// TestContainedInterrupted: an interrupt while a call waits for a person closes
// it; a later answer is refused.
func TestContainedInterrupted(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	agent := agentWith(t, e, "always_ask")
	e.Model.Add(t, testenv.Marked("cut", llm.PlayScript{Steps: []llm.Step{calls(shell("true")), ending}}))
	id, err := e.Create("cut", agent)
	if err != nil {
		t.Fatal(err)
	}
	stop, err := e.API.Await(t.Context(), id)
	if err != nil || len(stop.EventIDs) != 1 {
		t.Fatalf("rests with %v: %v", stop, err)
	}
	if _, err := e.API.Send(t.Context(), id, "", testenv.M{"type": "user.interrupt"}); err != nil {
		t.Fatal(err)
	}
	await(t, e, id, "the end of the turn", func(en store.Entry) bool {
		return en.Type == "session.status_idle" && strings.Contains(string(en.Body), "end_turn")
	})
	_, err = e.API.Send(t.Context(), id, "", confirm(stop.EventIDs[0], "allow"))
	if api := (*testenv.APIError)(nil); !errors.As(err, &api) || api.Status != 400 {
		t.Errorf("an answer after the interrupt: %v", err)
	}
	e.Check()
}
