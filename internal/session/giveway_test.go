package session_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// idles counts how often a session came to rest.
func idles(t testing.TB, e *testenv.Env, id string) (n int) {
	for _, en := range entriesOf(t, e, id) {
		if en.Type == "session.status_idle" {
			n++
		}
	}
	return n
}

// TestBudgetWithMachine: a session that used up its budget rests once, with its
// machine, and goes on when the budget is raised.
func TestBudgetWithMachine(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	dear := llm.ScriptUsage{Input: 400_000}
	e.Model.Add(t, testenv.Marked("dear", llm.PlayScript{Steps: []llm.Step{
		{Tools: []llm.ToolCall{shell("echo one")}, Usage: &dear}, ending}}))
	budget := func(cents string) testenv.M {
		return testenv.M{"type": "limit", "max_list_cost": testenv.M{"amount": cents, "currency": "USD"}}
	}
	var out testenv.SessionView
	if err := e.API.Do(t.Context(), http.MethodPost, "/v1/sessions", testenv.M{"agent": e.Agent, "environment_id": e.Environment,
		"vault_ids": []string{e.Vault}, "budget": budget("100"), "initial_events": []testenv.M{testenv.Message("[dear] Begin.")}}, &out); err != nil {
		t.Fatal(err)
	}
	stop, err := e.API.Await(t.Context(), out.ID)
	if err != nil || stop.Type != "budget_reached" {
		t.Fatalf("rests with %v: %v\n%s", stop, err, e.Describe(out.ID))
	}
	// Meanwhile another session is claimed, runs a turn and rests.
	e.Finish(e.Begin("other", llm.PlayScript{Steps: []llm.Step{{Tools: []llm.ToolCall{shell("true")}}, ending}}))
	if n := idles(t, e, out.ID); n != 1 {
		t.Fatalf("it came to rest %d times\n%s", n, e.Describe(out.ID))
	}
	if err := e.API.Do(t.Context(), http.MethodPost, "/v1/sessions/"+out.ID, testenv.M{"budget": budget("10000")}, nil); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the end of the turn", func() bool { return idles(t, e, out.ID) == 2 })
	if stop, _, err := e.API.Rested(t.Context(), out.ID); err != nil || stop.Type != "end_turn" {
		t.Errorf("it ends with %v: %v", stop, err)
	}
	e.Check()
}

// TestLingeringGivesWay: a session that only waits with its machine leaves its
// place to one that has work, long before it would leave by itself.
func TestLingeringGivesWay(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, MaxRunning: 1, Machine: testenv.M{"linger_seconds": 600}})
	var ids []string
	for i := range 2 {
		id := e.Begin(fmt.Sprintf("way%d", i), llm.PlayScript{Steps: []llm.Step{calls(shell("echo kept > /tmp/f")), ending, calls(shell("cat /tmp/f")), ending}})
		e.Finish(id)
		ids = append(ids, id)
	}
	s, err := e.DB().Session(t.Context(), "default", store.SessionID(ids[0]))
	if err != nil || s.Owner != "" {
		t.Errorf("owner %q: %v\n%s", s.Owner, err, e.Describe(ids[0]))
	}
	if got := strings.Join(actsOf(machinesOf(t, e, ids[0])), " "); got != "started suspended" {
		t.Errorf("the machine was %s", got)
	}
	e.Say(ids[0], "again")
	e.Finish(ids[0])
	if got := resultsOf(t, e, ids[0]); len(got) != 2 || got[1] != "kept" {
		t.Errorf("results %q\n%s", got, e.Describe(ids[0]))
	}
	e.Check()
}

// TestGivenUp: calls of a session that was given up are not run again by
// itself, also where its machine keeps the owner, but when somebody goes on.
func TestGivenUp(t *testing.T) {
	l := newLog(t)
	l.add(session.Event("sevt_1", "session.status_running", nil))
	l.say("go")
	l.output("", "a")
	idle := func(stop string) store.Draft {
		return session.Event("sevt_"+stop, "session.status_idle", map[string]any{"stop_reason": map[string]any{"type": stop}})
	}
	decided := func(waiting int, want string) {
		t.Helper()
		if got := l.st.Decision(waiting); got != want {
			t.Errorf("it decides to %s, want %s", got, want)
		}
	}
	decided(0, "calls")
	l.add(idle("retries_exhausted"))
	decided(0, "leave")
	decided(1, "calls")
	l.add(idle("requires_action"))
	decided(0, "calls")
}

// TestMessageWhileProbed: a message that comes while a lingering session looks
// at the world is answered then, not when the lingering ends (law L7).
func TestMessageWhileProbed(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 600}})
	e.World.Spoil(testenv.Spoil{Tool: "buy", Mode: "cut", Times: 1})
	first := e.World.HoldAfter("status_of", "w")
	id := e.Begin("probed", llm.PlayScript{Steps: []llm.Step{calls(shell("true")), acting("buy", "w"), ending, ending}})
	waitFor(t, "the first probe", first.Arrived())
	if _, err := e.API.Send(t.Context(), id, "", testenv.M{"type": "user.interrupt"}); err != nil {
		t.Fatal(err)
	}
	e.Finish(id)
	first.Release()
	effects, err := e.API.Effects(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	second := e.World.HoldAfter("status_of", "w")
	var settled sync.WaitGroup
	for _, x := range effects {
		if x.State == "in_doubt" {
			settled.Go(func() {
				_ = e.API.Do(context.Background(), http.MethodPost, "/v1/effects/"+x.ID+"/settle", testenv.M{"outcome": "probe"}, nil)
			})
		}
	}
	waitFor(t, "the second probe", second.Arrived())
	e.Say(id, "now") // the driver hears of it and goes on waiting for the probe
	second.Release()
	settled.Wait()
	if e.Finish(id); idles(t, e, id) != 2 {
		t.Errorf("it came to rest %d times\n%s", idles(t, e, id), e.Describe(id))
	}
	e.Check()
}

// TestMovedWithoutSandboxes: a session whose command runs comes to a process
// that runs no sandboxes. The call gets an honest result, the model is offered
// no such tools any more, and when there are sandboxes again it goes on with
// the machine that it left.
func TestMovedWithoutSandboxes(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	id := e.Begin("moved", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo there > /tmp/f")), calls(shell("sleep 2")), ending, calls(shell("cat /tmp/f")), ending, ending, ending}})
	waitUntil(t, "the second command", func() bool { return len(resultsOf(t, e, id)) == 1 && running(e, id) })
	e.Crash()
	e.Without(true)
	e.Restart()
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	if got := resultsOf(t, e, id); len(got) != 2 || !strings.Contains(got[1], "is unknown") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	if n := count(entriesOf(t, e, id), "session.error"); n != 1 {
		t.Errorf("the user is told %d times\n%s", n, e.Describe(id))
	}
	bodies := e.Model.Bodies()
	if last := string(bodies[len(bodies)-1]); strings.Contains(last, `"name":"bash","description"`) {
		t.Error("bash is offered where there is no machine")
	}
	e.Stop()
	e.Without(false)
	e.Restart()
	e.Say(id, "go on")
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 3 || got[2] != "there" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	// There and gone again is said again, once.
	e.Stop()
	e.Without(true)
	e.Restart()
	for range 2 {
		e.Say(id, "go on")
		e.Finish(id)
	}
	if got := errorsSaid(t, entriesOf(t, e, id)); len(got) != 2 {
		t.Errorf("told %q, want it twice\n%s", got, e.Describe(id))
	}
	e.Check()
}

// TestMixedOutput: one answer that calls everything there is. What may run
// runs, nothing inside overtakes a question before it, answers come one by one
// and through a crash, and every call gets its one result in the model's order.
func TestMixedOutput(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	var agent struct{ ID string }
	if err := e.API.Do(t.Context(), http.MethodPost, "/v1/agents", testenv.M{"name": "mixed", "model": "scripted-1",
		"mcp_servers": []testenv.M{{"type": "url", "name": "w", "url": "planaria:outside"}},
		"tools": []testenv.M{
			{"type": "agent_toolset_20260401", "configs": []testenv.M{{"name": "write", "permission_policy": testenv.M{"type": "always_ask"}}}},
			{"type": "mcp_toolset", "mcp_server_name": "w", "default_config": testenv.M{"permission_policy": testenv.M{"type": "always_allow"}},
				"configs": []testenv.M{{"name": "pay", "permission_policy": testenv.M{"type": "always_ask"}}}},
			{"type": "custom", "name": "client_act", "description": "d", "input_schema": testenv.M{"type": "object"}},
		}}, &agent); err != nil {
		t.Fatal(err)
	}
	mcp := func(tool, id string) llm.ToolCall {
		return llm.ToolCall{Name: "mcp__w__" + tool, Input: map[string]any{"id": id}}
	}
	e.Model.Add(t, testenv.Marked("mixed", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo a > /tmp/f"), mcp("pay", "x"), mcp("look", "x"), llm.ToolCall{Name: "client_act", Input: map[string]any{"id": "c"}},
			llm.ToolCall{Name: "write", Input: map[string]any{"file_path": "/tmp/g", "content": "g"}},
			shell("echo b >> /tmp/f; cat /tmp/f /tmp/g"), llm.ToolCall{Name: "read", Input: map[string]any{"file_path": "/tmp/f"}},
			mcp("buy", "x")),
		ending}}))
	id, err := e.Create("mixed", agent.ID)
	if err != nil {
		t.Fatal(err)
	}
	rest := func(n int) []string {
		t.Helper()
		stop, err := e.API.Await(t.Context(), id)
		if err != nil || stop.Type != "requires_action" || len(stop.EventIDs) != n {
			t.Fatalf("rests with %v: %v\n%s", stop, err, e.Describe(id))
		}
		return stop.EventIDs
	}
	send := func(ev testenv.M) {
		t.Helper()
		if _, err := e.API.Send(t.Context(), id, "", ev); err != nil {
			t.Fatal(err)
		}
	}
	asked := rest(3) // pay, client_act, write
	if got := resultsOf(t, e, id); len(got) != 3 {
		t.Errorf("results %q before any answer, want those of bash, look and buy\n%s", got, e.Describe(id))
	}
	send(confirm(asked[2], "allow"))
	waitUntil(t, "the question taken", func() bool {
		stop, ok, err := e.API.Rested(t.Context(), id)
		return err == nil && ok && len(stop.EventIDs) == 2
	})
	e.Crash()
	e.Restart()
	send(testenv.M{"type": "user.custom_tool_result", "custom_tool_use_id": asked[1], "content": []testenv.M{{"type": "text", "text": "acted"}}})
	waitUntil(t, "the answer taken", func() bool {
		stop, ok, err := e.API.Rested(t.Context(), id)
		return err == nil && ok && len(stop.EventIDs) == 1
	})
	if _, err := e.API.Send(t.Context(), e.Begin("other", llm.PlayScript{Steps: []llm.Step{ending}}), "", confirm(asked[0], "allow")); err == nil {
		t.Error("another session's question was answered")
	}
	send(confirm(asked[0], "deny"))
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	got := resultsOf(t, e, id)
	if len(got) != 7 || !slices.Contains(got, "a\nb\ng") || !slices.Contains(got, "error: not like this") {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	if n := e.World.Executions("buy", "x"); n != 1 {
		t.Errorf("it was bought %d times", n)
	}
	if n := e.World.Executions("pay", "x"); n != 0 {
		t.Errorf("it was paid %d times", n)
	}
	e.Check() // H1: the request holds each result once, in order
}
