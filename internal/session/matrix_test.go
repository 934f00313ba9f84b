package session_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// TestMachineCrashMatrix kills the process at every step of a machine's life:
// start, calls, snapshots, suspending, bringing back. Whatever the step, each
// command ran once in what the session ends with, and nothing is missing.
func TestMachineCrashMatrix(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0}})
	for i, f := range []testenv.Fault{
		{Point: "session:machine_started", N: 1},
		{Point: "session:machine_recorded", N: 1},
		{Point: "session:call_begun", N: 2},
		{Point: "session:before_result", N: 1},
		{Point: "session:after_result", N: 1},
		{Point: "session:before_snapshot", N: 1},
		{Point: "session:after_snapshot", N: 1},
		{Point: "session:after_rest", N: 1},
		{Point: "session:before_suspend", N: 1},
		{Point: "session:suspended", N: 1},
		{Point: "session:suspend_killed", N: 1},
		{Point: "session:machine_restored", N: 1},
		{Point: "session:machine_recorded", N: 2},
	} {
		t.Run(fmt.Sprint(f), func(t *testing.T) {
			e.Under(t)
			crashOnce(t, e, fmt.Sprintf("m%d", i), f)
		})
	}
	e.Under(t)
}

// leftAlone waits until a session is left and its machine is ended.
func leftAlone(ctx context.Context, e *testenv.Env, id string) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		s, err := e.DB().Session(ctx, "default", store.SessionID(id))
		if err != nil || s.Owner == "" && s.Status == store.StatusIdle && e.SandboxPID(id) == 0 {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func crashOnce(t *testing.T, e *testenv.Env, tag string, f testenv.Fault) {
	add := func(s string) llm.Step { return calls(shell("echo " + s + " >> /tmp/log; echo $(cat /tmp/log)")) }
	e.Model.Add(t, testenv.Marked(tag, llm.PlayScript{Steps: []llm.Step{
		add("a"), acting("buy", tag), add("b"), ending, add("c"), ending}}))
	e.Arm(f)
	var id string
	e.Through(func(ctx context.Context) (err error) {
		if id == "" {
			if id, err = e.Create(tag, ""); err != nil {
				return err
			}
		}
		if _, err := e.Person.Finish(ctx, id); err != nil {
			return err
		}
		if err := leftAlone(ctx, e, id); err != nil {
			return err
		}
		if _, err := e.API.Send(ctx, id, "more-"+id, testenv.Message("more")); err != nil {
			return err
		}
		if _, err := e.Person.Finish(ctx, id); err != nil {
			return err
		}
		return leftAlone(ctx, e, id)
	})
	if e.Arm() != 0 {
		t.Error("the fault did not happen")
	}
	got := slices.DeleteFunc(resultsOf(t, e, id), func(s string) bool { return strings.Contains(s, tag) })
	if want := []string{"a", "a b", "a b c"}; !slices.Equal(got, want) {
		t.Errorf("commands came to %q, want %q\n%s", got, want, e.Describe(id))
	}
	for _, m := range machinesOf(t, e, id) {
		if len(m.Missing) > 0 || m.Note != "" {
			t.Errorf("the machine is told of as %+v", m)
		}
	}
	if n := e.World.Executions("buy", tag); n != 1 {
		t.Errorf("it was bought %d times", n)
	}
	e.Check()
}
