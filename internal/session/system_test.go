package session_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// engines are what every system test runs on.
var engines = []string{testenv.SQLite, testenv.PostgreSQL}

// acting is a step that calls one tool of the world.
func acting(tool, id string) llm.Step {
	return llm.Step{Text: "I do it.", Tools: []llm.ToolCall{{Name: "mcp__w__" + tool, Input: map[string]any{"id": id}}}}
}

var ending = llm.Step{Text: "Done."}

// onBoth runs a system test on both engines.
func onBoth(t *testing.T, f func(t *testing.T, e *testenv.Env)) {
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			f(t, testenv.New(t, testenv.Options{Engine: engine}))
		})
	}
}

// entriesOf reads a session's whole log.
func entriesOf(t testing.TB, e *testenv.Env, id string) []store.Entry {
	t.Helper()
	list, err := e.DB().Entries(context.Background(), "default", store.SessionID(id), store.Range{})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// waitFor waits for a signal.
func waitFor(t testing.TB, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(testenv.Deadline):
		t.Fatalf("%s did not come", what)
	}
}

// await waits until an entry that f takes is committed.
func await(t testing.TB, e *testenv.Env, id string, what string, f func(store.Entry) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Deadline)
	defer cancel()
	fo, err := e.DB().Follow(ctx, "default", store.SessionID(id), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer fo.Close()
	for {
		items, err := fo.Next(ctx)
		if err != nil {
			t.Fatalf("wait for %s: %v\n%s", what, err, e.Describe(id))
		}
		for _, it := range items {
			if it.Entry != nil && f(*it.Entry) {
				return
			}
		}
	}
}

// TestK2CrashAtTheWorld: killed while the answer of an irreversible call is
// kept back. It is in doubt, the probe says that it happened, it is not
// repeated (trial K2, attack E1).
func TestK2CrashAtTheWorld(t *testing.T) {
	onBoth(t, func(t *testing.T, e *testenv.Env) {
		gate := e.World.HoldAfter("buy", "k2")
		id := e.Begin("k2", llm.PlayScript{Steps: []llm.Step{acting("buy", "k2"), ending}})
		waitFor(t, "the call", gate.Arrived())
		e.Crash()
		gate.Release()
		e.Restart()
		if stop := e.Finish(id); stop.Type != "end_turn" {
			t.Errorf("rests with %v", stop)
		}
		e.Check()
		if n := e.World.Executions("buy", "k2"); n != 1 {
			t.Errorf("it happened %d times", n)
		}
		var doubts, settled int
		for _, en := range entriesOf(t, e, id) {
			switch en.Kind {
			case store.KindDoubt:
				doubts++
			case store.KindSettlement:
				settled++
			}
		}
		if doubts != 1 || settled != 1 {
			t.Errorf("%d doubts and %d settlements, want one each\n%s", doubts, settled, e.Describe(id))
		}
	})
}

// TestE1CutAnswer: the target executes and the connection drops, while the
// process lives: in doubt, the probe settles it, one execution (attack E1); the
// same with a 502 (attack E4, trap P3).
func TestE1E4CutAnswer(t *testing.T) {
	onBoth(t, func(t *testing.T, e *testenv.Env) {
		for _, mode := range []string{"cut", "502"} {
			for _, tool := range []string{"buy", "put", "swap"} {
				tag := mode + "-" + tool
				e.World.Spoil(testenv.Spoil{Tool: tool, ID: tag, Mode: mode, Times: 1})
				id := e.Begin(tag, llm.PlayScript{Steps: []llm.Step{acting(tool, tag), ending}})
				if stop := e.Finish(id); stop.Type != "end_turn" {
					t.Errorf("%s rests with %v", tag, stop)
				}
				if n := e.World.Executions(tool, tag); n != 1 {
					t.Errorf("%s happened %d times\n%s", tag, n, e.Describe(id))
				}
			}
		}
		e.Check()
	})
}

// TestE13ProbeTooEarly: the request is still on its way through the target when
// the probe first says that nothing happened. That is not believed before the
// settle time; by then it has happened (attack E13).
func TestE13ProbeTooEarly(t *testing.T) {
	onBoth(t, func(t *testing.T, e *testenv.Env) {
		slow := e.World.HoldBefore("buy", "slow")
		probed := e.World.HoldAfter("status_of", "slow")
		id := e.Begin("slow", llm.PlayScript{Steps: []llm.Step{acting("buy", "slow"), ending}})
		waitFor(t, "the call", slow.Arrived())
		e.Crash()
		e.Restart()
		waitFor(t, "the probe", probed.Arrived())
		executed := e.World.HoldAfter("buy", "slow")
		slow.Release() // it executes now, behind the probe's look
		waitFor(t, "the execution", executed.Arrived())
		executed.Release()
		probed.Release()
		e.Finish(id)
		e.Check()
		for _, en := range entriesOf(t, e, id) {
			var s store.Settlement
			if en.Kind == store.KindSettlement && json.Unmarshal(en.Body, &s) == nil && s.Outcome != "happened" {
				t.Errorf("settled as %s", s.Outcome)
			}
		}
	})
}

// TestK4CrashInModelStream: killed in the middle of a model's stream. Nothing
// of the half answer is in the transcript, the model is asked again, usage of
// the finished answers is counted once (trial K4).
func TestK4CrashInModelStream(t *testing.T) {
	onBoth(t, func(t *testing.T, e *testenv.Env) {
		slow := llm.Step{Text: "This answer is long enough to be cut in its middle, somewhere behind the first words.", Chunk: 4, ChunkDelayMS: 20,
			Usage: &llm.ScriptUsage{Input: 100, Output: 30}}
		deltas := make(chan struct{})
		id := e.Begin("k4", llm.PlayScript{Steps: []llm.Step{slow}})
		ch, cancel := e.Sessions().Deltas(store.SessionID(id))
		go func() {
			defer close(deltas)
			n := 0
			for d := range ch {
				if !d.Start {
					if n++; n == 3 {
						return
					}
				}
			}
		}()
		waitFor(t, "the third fragment", deltas)
		cancel()
		e.Crash()
		e.Restart()
		e.Finish(id)
		e.Check()
		messages, output := 0, int64(0)
		for _, en := range entriesOf(t, e, id) {
			if en.Type == "agent.message" {
				messages++
			}
			var o store.Output
			if en.Kind == store.KindOutput && json.Unmarshal(en.Body, &o) == nil && o.Failed == "" {
				output += o.Usage.Output
			}
		}
		s, err := e.DB().Session(context.Background(), "default", store.SessionID(id))
		if err != nil {
			t.Fatal(err)
		}
		if messages != 1 || output != 30 || s.Usage.Output != 30 {
			t.Errorf("%d messages, %d output tokens in the log, %d in the row; want 1, 30, 30\n%s", messages, output, s.Usage.Output, e.Describe(id))
		}
	})
}

// TestP1KillBetweenAnswers: parallel calls, killed when some have answered and
// one is held at the world. Each is judged by itself (trial P1).
func TestP1KillBetweenAnswers(t *testing.T) {
	onBoth(t, func(t *testing.T, e *testenv.Env) {
		gate := e.World.HoldAfter("buy", "p1")
		var cs []llm.ToolCall
		for _, tool := range []string{"look", "put", "buy", "swap"} {
			cs = append(cs, llm.ToolCall{Name: "mcp__w__" + tool, Input: map[string]any{"id": "p1"}})
		}
		id := e.Begin("p1", llm.PlayScript{Steps: []llm.Step{{Tools: cs}, ending}})
		waitFor(t, "the held call", gate.Arrived())
		await(t, e, id, "the idempotent call's end", func(en store.Entry) bool {
			x, err := e.DB().Effect(context.Background(), "default", store.EffectID(en.ID))
			return en.Kind == store.KindCompletion && err == nil && x.Tool == "put"
		})
		e.Crash()
		gate.Release()
		e.Restart()
		e.Finish(id)
		e.Check()
		for _, tool := range []string{"put", "buy", "swap"} {
			if n := e.World.Executions(tool, "p1"); n != 1 {
				t.Errorf("%s happened %d times\n%s", tool, n, e.Describe(id))
			}
		}
	})
}

// TestA1A2Approvals: an approval waits through a restart with the same
// arguments; it is burnt once; answers after it are refused with a reason.
func TestA1A2Approvals(t *testing.T) {
	onBoth(t, func(t *testing.T, e *testenv.Env) {
		ctx := t.Context()
		id := e.Begin("a2", llm.PlayScript{Steps: []llm.Step{acting("pay", "a2"), ending}})
		stop, err := e.API.Await(ctx, id)
		if err != nil || stop.Type != "requires_action" || len(stop.EventIDs) != 1 {
			t.Fatalf("rests with %v, %v", stop, err)
		}
		e.Crash()
		e.Restart()
		e.Check()
		again, err := e.API.Await(ctx, id)
		if err != nil || !slices.Equal(again.EventIDs, stop.EventIDs) {
			t.Fatalf("after the restart it waits for %v, before it for %v (%v)", again, stop, err)
		}
		confirm := func(result string) error {
			_, err := e.API.Send(ctx, id, "", testenv.M{"type": "user.tool_confirmation", "tool_use_id": stop.EventIDs[0], "result": result})
			return err
		}
		// A race of ten: one is accepted, equal ones are repeats, others are refused.
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() { _ = confirm("allow") })
		}
		wg.Wait()
		if err := confirm("deny"); !isStatus(err, http.StatusBadRequest) {
			t.Errorf("a denial after the approval: %v", err)
		}
		e.Finish(id)
		if err := confirm("deny"); !isStatus(err, http.StatusBadRequest) {
			t.Errorf("a denial after the end: %v", err)
		}
		e.Check()
		if n := e.World.Executions("pay", "a2"); n != 1 {
			t.Errorf("pay happened %d times", n)
		}
	})
}

func isStatus(err error, status int) bool {
	var api *testenv.APIError
	return errors.As(err, &api) && api.Status == status
}

// TestW2ManyStarters: many clients send and resume at once: every message is
// taken once, in one run at a time, and each step's acts happen once (trial W2).
func TestW2ManyStarters(t *testing.T) {
	onBoth(t, func(t *testing.T, e *testenv.Env) {
		ctx := t.Context()
		id := e.Begin("w2", llm.PlayScript{Repeat: true, Steps: []llm.Step{acting("look", "w2"), ending}})
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				if _, err := e.API.Send(ctx, id, fmt.Sprint("w2-", i), testenv.Message(fmt.Sprint("message ", i))); err != nil {
					t.Error(err)
				}
				if err := e.API.Do(ctx, http.MethodPost, "/v1/sessions/"+id+"/resume", testenv.M{}, nil); err != nil && !isStatus(err, http.StatusBadRequest) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		deadline := time.After(testenv.Deadline)
		for {
			e.Finish(id)
			seen := 0
			for _, en := range entriesOf(t, e, id) {
				if en.Type == "user.message" {
					seen++
				}
			}
			if seen == 9 {
				break
			}
			select {
			case <-deadline:
				t.Fatalf("%d of 9 messages were taken\n%s", seen, e.Describe(id))
			default:
			}
		}
		e.Finish(id)
		e.Check()
	})
}

// TestW3RollingRestarts: a turn of many steps under restarts every few steps,
// in good order and by kill in turns. It makes progress, and restarts do not
// count as failed attempts although few of these are allowed (trial W3).
func TestW3RollingRestarts(t *testing.T) {
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			e := testenv.New(t, testenv.Options{Engine: engine, Patience: session.Patience{
				Base: 5 * time.Millisecond, Max: 20 * time.Millisecond, Tries: 2, Panics: 2}})
			const steps = 12
			var script llm.PlayScript
			for i := range steps {
				script.Steps = append(script.Steps, acting("put", fmt.Sprint("w3-", i)))
			}
			script.Steps = append(script.Steps, ending)
			id := e.Begin("w3", script)
			restarts := 0
			for i := range steps {
				// Restart while step i is at the world, by kill or in good order.
				if i%2 == 0 {
					gate := e.World.HoldAfter("put", fmt.Sprint("w3-", i))
					if e.World.Executions("put", fmt.Sprint("w3-", i)) == 0 {
						waitFor(t, fmt.Sprint("step ", i), gate.Arrived())
					}
					if i%4 == 0 {
						e.Crash()
						gate.Release()
					} else {
						gate.Release()
						e.Stop()
					}
					e.Restart()
					e.Check()
					restarts++
				}
			}
			if stop := e.Finish(id); stop.Type != "end_turn" {
				t.Errorf("after %d restarts it rests with %v\n%s", restarts, stop, e.Describe(id))
			}
			e.Check()
			for i := range steps {
				if n := e.World.Executions("put", fmt.Sprint("w3-", i)); n != 1 {
					t.Errorf("step %d happened %d times", i, n)
				}
			}
		})
	}
}

// TestE19NoIntentNoCall: when nothing can be made durable, nothing is sent:
// the disk is full from the model's answer on, and has room again later (attack
// E19).
func TestE19NoIntentNoCall(t *testing.T) {
	e := testenv.New(t, testenv.Options{Faults: []testenv.Fault{{Point: "store:append.before", N: 3, Survive: true},
		{Point: "store:append.before", N: 4, Survive: true}, {Point: "store:append.before", N: 5, Survive: true}}})
	id := e.Begin("e19", llm.PlayScript{Steps: []llm.Step{acting("buy", "e19"), ending}})
	e.Finish(id)
	e.Check()
	if n := e.World.Executions("buy", "e19"); n != 1 {
		t.Errorf("it happened %d times\n%s", n, e.Describe(id))
	}
}
