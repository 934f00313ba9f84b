package session_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
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
	<-time.After(300 * time.Millisecond)
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
