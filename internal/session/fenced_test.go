package session_test

import (
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/testenv"
)

// TestHigherFence: a sandbox knows of a higher fence than the store, which was put
// back to an older state, or is told so by whoever speaks for its agent. The
// session's owner is the one that the store names: it goes on without that sandbox.
func TestHigherFence(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 60}})
	id := e.Begin("fenced", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo kept > /tmp/f")), ending,
		calls(shell("cat /tmp/f")), ending}})
	e.Finish(id)
	if _, err := e.Machines().Find(t.Context(), "default", id, 1<<40); err != nil {
		t.Fatal(err)
	}
	e.Crash()
	e.Restart()
	e.Say(id, "go on")
	if stop := e.Finish(id); stop.Type != "end_turn" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	if got := resultsOf(t, e, id); len(got) != 2 || got[1] != "kept" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	e.Check()
}
