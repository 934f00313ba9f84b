package testenv_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/testenv"
)

var (
	matrixAll  = flag.Bool("matrix.all", false, "crash at every occurrence of every point, on both engines")
	matrixOnly = flag.String("matrix.only", "", "stop at this point only, as it is printed: point#n")
	matrixSeed = flag.Uint64("matrix.seed", 1, "seed of the second crashes")
)

// scenario is one way through a session, able to go on after a crash.
type scenario struct {
	name  string
	trial string // what it is about, in the words of the trials
	small bool   // the agent with the small context window
	steps func(tag string) llm.PlayScript
	// run goes on with the session until it rests for good.
	run func(ctx context.Context, e *testenv.Env, id string) error
	// every stops at every occurrence of the durable steps, not at first and last.
	every bool
	// thin keeps one of so many stops in a normal run: it is like another scenario.
	thin int
	// acts are the tools whose act on the tag must have happened exactly once at
	// the end; mayNot are those that may have been found not to have happened.
	acts, mayNot []string
}

func finish(ctx context.Context, e *testenv.Env, id string) error {
	stop, err := e.Person.Finish(ctx, id)
	if err == nil && stop.Type != "end_turn" {
		err = fmt.Errorf("%s rests with %s", id, stop.Type)
	}
	return err
}

func one(tool string) func(string) llm.PlayScript {
	return func(tag string) llm.PlayScript {
		return llm.PlayScript{Steps: []llm.Step{calls(use(tool, tag)), done}}
	}
}

// scenarios: one for each class and each way in which a session waits. An act
// that a crash kept from being sent is void or done afterwards; which of them
// depends on the contract's probe, so only the number is law.
func scenarios() []scenario {
	custom := llm.ToolCall{Name: "client_act"}
	return []scenario{
		{name: "read", thin: 2, trial: "E11", steps: one("look"), run: finish},
		{name: "idempotent", every: true, trial: "E11, K2", steps: one("put"), run: finish, acts: []string{"put"}},
		{name: "natural", thin: 3, trial: "E11, K2", steps: one("set"), run: finish, acts: []string{"set"}},
		{name: "irreversible_probe", every: true, trial: "E11, K1, K2, K3", steps: one("buy"), run: finish, mayNot: []string{"buy"}},
		{name: "irreversible_person", thin: 3, trial: "E11, E12, K2", steps: one("fire"), run: finish, mayNot: []string{"fire"}},
		{name: "irreversible_tell", thin: 3, trial: "E11, E12", steps: one("tell"), run: finish, mayNot: []string{"tell"}},
		{name: "uncontracted", thin: 3, trial: "E11, E16", steps: one("plain"), run: finish, mayNot: []string{"plain"}},
		{name: "mixed", thin: 3, trial: "E11, K2", steps: one("swap"), run: finish, mayNot: []string{"swap"}},
		{name: "approval", every: true, trial: "A1, A2", steps: one("pay"), run: finish, mayNot: []string{"pay"}},
		{name: "denial", thin: 3, trial: "A1, A2", steps: one("pay"), run: func(ctx context.Context, e *testenv.Env, id string) error {
			p := *e.Person
			p.Deny = func(v testenv.EffectView) bool { return v.Tool == "pay" }
			_, err := p.Finish(ctx, id)
			return err
		}},
		{name: "custom", thin: 3, trial: "A2", run: finish, steps: func(tag string) llm.PlayScript {
			return llm.PlayScript{Steps: []llm.Step{calls(custom), done}}
		}},
		{name: "parallel", every: true, trial: "P1", run: finish, acts: []string{"put", "set"}, mayNot: []string{"buy", "swap"}, steps: func(tag string) llm.PlayScript {
			return llm.PlayScript{Steps: []llm.Step{calls(use("look", tag), use("buy", tag), use("put", tag), use("swap", tag), use("set", tag)), done}}
		}},
		{name: "large", thin: 3, trial: "E11", steps: func(tag string) llm.PlayScript {
			return llm.PlayScript{Steps: []llm.Step{calls(use("look", "large-"+tag)), done}}
		}, run: finish},
		{name: "interrupt", thin: 2, trial: "H1", run: interrupt, steps: func(tag string) llm.PlayScript {
			return llm.PlayScript{Steps: []llm.Step{calls(custom, use("pay", tag)), done, done}}
		}},
		{name: "pause", thin: 3, trial: "A2", run: pauseResume, mayNot: []string{"buy"}, steps: func(tag string) llm.PlayScript {
			return llm.PlayScript{Steps: []llm.Step{calls(custom), calls(use("buy", tag)), done}}
		}},
		{name: "compaction", thin: 2, trial: "C1", small: true, run: finish, mayNot: []string{"buy"}, steps: func(tag string) llm.PlayScript {
			heavy, light := &llm.ScriptUsage{Input: 850, Output: 20}, &llm.ScriptUsage{Input: 90, Output: 20}
			return llm.PlayScript{
				Rules: []llm.Step{{When: &llm.When{System: "You compress the history"}, Text: "[" + tag + "] looked. [script-position: 1]"}},
				Steps: []llm.Step{{Text: "First I look.", Tools: []llm.ToolCall{use("look", tag)}, Usage: heavy},
					{Tools: []llm.ToolCall{use("buy", tag)}, Usage: light}, {Text: "Done.", Usage: light}},
			}
		}},
		{name: "queue", thin: 3, trial: "W2", run: queue, steps: func(tag string) llm.PlayScript {
			return llm.PlayScript{Steps: []llm.Step{calls(use("look", tag)), done, done, done}, Repeat: true}
		}},
	}
}

// sent reports whether an event of a type is in the session, logged or queued.
func sent(ctx context.Context, e *testenv.Env, id, typ string) (bool, error) {
	events, err := e.API.Events(ctx, id)
	return slices.ContainsFunc(events, func(ev testenv.Event) bool { return ev.Type == typ }), err
}

func interrupt(ctx context.Context, e *testenv.Env, id string) error {
	is, err := sent(ctx, e, id, "user.interrupt")
	if err != nil {
		return err
	}
	if !is {
		if stop, err := e.API.Await(ctx, id); err != nil || stop.Type != "requires_action" || len(stop.EventIDs) != 2 {
			return fmt.Errorf("before the interrupt it rests with %v: %w", stop, err)
		}
		if _, err := e.API.Send(ctx, id, "stop-"+id, testenv.M{"type": "user.interrupt"}, testenv.Message("Go on.")); err != nil {
			return err
		}
	}
	// It is accepted; until it is acted on the session rests as before.
	if err := e.Until(ctx, id, "user.interrupt"); err != nil {
		return err
	}
	return finish(ctx, e, id)
}

func pauseResume(ctx context.Context, e *testenv.Env, id string) error {
	paused, err := sent(ctx, e, id, "session.paused")
	if err != nil {
		return err
	}
	if !paused {
		if _, err := e.API.Await(ctx, id); err != nil {
			return err
		}
		if err := e.API.Do(ctx, "POST", "/v1/sessions/"+id+"/pause", testenv.M{}, nil); err != nil {
			return err
		}
	}
	resumed, err := sent(ctx, e, id, "session.resumed")
	if err != nil {
		return err
	}
	if !resumed {
		if err := e.API.Do(ctx, "POST", "/v1/sessions/"+id+"/resume", testenv.M{}, nil); err != nil {
			return err
		}
		if err := e.Until(ctx, id, "session.resumed"); err != nil {
			return err
		}
	}
	return finish(ctx, e, id)
}

// queue sends two more messages, which are answered one turn after the other
// or together, and never lost.
func queue(ctx context.Context, e *testenv.Env, id string) error {
	for _, text := range []string{"second", "third"} {
		if _, err := e.API.Send(ctx, id, text+"-"+id, testenv.Message(text)); err != nil {
			return err
		}
	}
	for {
		if err := finish(ctx, e, id); err != nil {
			return err
		}
		events, err := e.API.Events(ctx, id)
		if err != nil {
			return err
		}
		n, open := 0, 0
		for _, ev := range events {
			if ev.Type == "user.message" {
				n++
				if ev.ProcessedAt == nil {
					open++
				}
			}
		}
		if n != 3 {
			return fmt.Errorf("%d user messages, want 3", n)
		}
		if s, err := e.API.Session(ctx, id); err != nil || open == 0 && s.Status == "idle" {
			return err
		}
	}
}

// coverage is what the matrix stopped at.
var coverage struct {
	mu    sync.Mutex
	fired map[string]int
	cases int
}

func TestCrashMatrixSQLite(t *testing.T)   { crashMatrix(t, testenv.SQLite) }
func TestCrashMatrixPostgres(t *testing.T) { crashMatrix(t, testenv.PostgreSQL) }

// crashMatrix stops every scenario at every named point, goes on, checks all
// laws and counts what happened outside (attack E11; trials K1, K2, K3, K4, P1,
// A1, A2, C1, H1).
func crashMatrix(t *testing.T, engine string) {
	for _, sc := range scenarios() {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			e := testenv.New(t, testenv.Options{Engine: engine})
			rnd := rand.New(rand.NewPCG(*matrixSeed, uint64(len(sc.name))))
			points := sc.play(t, e, "dry")
			n := 0
			for _, plan := range plans(points, engine, sc.every, max(1, sc.thin), rnd) {
				n++
				if *matrixOnly != "" && !strings.Contains(fmt.Sprint(plan), *matrixOnly) {
					continue
				}
				name := strings.ReplaceAll(fmt.Sprint(plan), "/", "_")
				t.Run(name, func(t *testing.T) {
					e.Under(t)
					sc.play(t, e, fmt.Sprintf("%s-%d", sc.name, n), plan...)
				})
				e.Under(t)
				if t.Failed() {
					return
				}
			}
			t.Logf("%s (%s): %d crashes at %d points", sc.name, sc.trial, n, len(points))
		})
	}
}

// play runs a scenario through its faults and returns the points that it came to.
func (sc scenario) play(t *testing.T, e *testenv.Env, tag string, plan ...testenv.Fault) map[string]int {
	t.Helper()
	agent := ""
	if sc.small {
		agent = e.SmallAgent
	}
	e.Model.Add(t, testenv.Marked(tag, sc.steps(tag)))
	e.Arm(plan...)
	id := ""
	e.Through(func(ctx context.Context) (err error) {
		if id, err = e.Create(tag, agent); err != nil {
			return err
		}
		if err = sc.run(ctx, e, id); err != nil && ctx.Err() == context.DeadlineExceeded {
			err = fmt.Errorf("%w\n%s", err, e.Describe(id))
		}
		return err
	})
	points := e.Points()
	left := e.Arm()
	e.Check()
	for _, tool := range sc.acts {
		if got := e.World.Executions(tool, tag); got != 1 && !(tool == "set" && got > 0) {
			t.Errorf("%s happened %d times, want 1\n%s", tool, got, e.Describe(id))
		}
	}
	for _, tool := range sc.mayNot {
		if got := e.World.Executions(tool, tag); got > 1 || len(plan) == 0 && got != 1 {
			t.Errorf("%s happened %d times\n%s", tool, got, e.Describe(id))
		}
	}
	coverage.mu.Lock()
	defer coverage.mu.Unlock()
	if coverage.fired == nil {
		coverage.fired = map[string]int{}
	}
	for _, f := range plan[:len(plan)-min(left, len(plan))] {
		coverage.fired[f.Point]++
		coverage.cases++
	}
	if len(plan) > 0 && left == len(plan) {
		// Relaxed entries travel with whatever commits next, so that the number of
		// commits differs from run to run by the last one or two.
		t.Logf("the session came to its end without coming to %v", plan[0])
	}
	if t.Failed() {
		t.Logf("log of %s:\n%s", tag, e.Describe(id))
	}
	return points
}

// rarePoint matches points that few scenarios come to: none of them is thinned out.
var rarePoint = regexp.MustCompile(`^store:(blob|deliver)|_(compaction|interrupt|approval|row)$`)

// plans lists what to do at the points of a dry run: die at the first and the
// last occurrence of each (at every one of the durable steps), let each
// durable step fail without dying, and for some die a second time on the way.
func plans(points map[string]int, engine string, every bool, thin int, rnd *rand.Rand) (out [][]testenv.Fault) {
	names := slices.Sorted(maps.Keys(points))
	for _, p := range names {
		durable := p == "store:append.before" || p == "store:append.after"
		for n := 1; n <= points[p]; n++ {
			sample := n == 1 || n == points[p]
			if !*matrixAll && !sample && !(durable && every && engine == testenv.SQLite) {
				continue
			}
			if engine == testenv.PostgreSQL {
				thin = 12
			}
			rare := engine == testenv.SQLite && rarePoint.MatchString(p)
			if !*matrixAll && !rare && rnd.IntN(thin) != 0 {
				continue
			}
			plan := []testenv.Fault{{Point: p, N: n}}
			if rnd.IntN(4) == 0 { // and once more in the life after it
				plan = append(plan, testenv.Fault{Point: names[rnd.IntN(len(names))], N: 1})
			}
			out = append(out, plan)
			if durable && sample {
				out = append(out, []testenv.Fault{{Point: p, N: n, Survive: true}})
			}
		}
	}
	return out
}

// unreached lists the points at which the matrix does not stop, with the reason.
var unreached = map[string]string{
	"store:append.compare":  "after a lost commit only; append.after with Survive comes to it",
	"store:claim.compare":   "as append.compare",
	"store:create.compare":  "as append.compare",
	"store:deliver.compare": "as append.compare",
	"store:join":            "while a process starts",
	"store:leave":           "while a process ends in good order",
	"store:bury":            "by another node, which needs two",
	"store:unowned":         "updates and archives, which are not part of a turn",
	"store:refuse":          "damage",
	"store:delete":          "deletion",
	"store:tx":              "configuration objects, which are not part of a turn",

	"session:packages_installed": "a build begins anew, as behind template_saved",
	"session:template_saved":     "while packages are built; session's TestPackagesCrash dies there",
	"session:output_stored":      "a content without a row; store's TestSweepContents removes it",
}

// elsewhere reads where the tests of session stop: the steps of a machine's life
// need a sandbox, which the matrix here has none of.
func elsewhere(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob("../session/*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("read the tests of session: %v", err)
	}
	named := regexp.MustCompile(`"(session:[a-z_]+)"`)
	points := map[string]bool{}
	for _, f := range files {
		src, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range named.FindAllSubmatch(src, -1) {
			points[string(m[1])] = true
		}
	}
	return points
}

// TestMatrixIsWhole reads the names of all points from the code and compares
// them with where the matrix has stopped. It runs behind the matrix.
func TestMatrixIsWhole(t *testing.T) {
	coverage.mu.Lock()
	defer coverage.mu.Unlock()
	if coverage.cases == 0 {
		t.Skip("the matrix did not run")
	}
	call := regexp.MustCompile(`fault\("([a-z_.]+)"\)`)
	step := regexp.MustCompile(`step: "([a-z_]+)"`)
	var want []string
	for _, pkg := range []string{"store", "session", "keeper"} {
		files, err := filepath.Glob("../" + pkg + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatalf("read %s: %v", pkg, err)
		}
		for _, f := range files {
			if strings.HasSuffix(f, "_test.go") {
				continue
			}
			src, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range call.FindAllSubmatch(src, -1) {
				want = append(want, pkg+":"+string(m[1]))
			}
			for _, m := range step.FindAllSubmatch(src, -1) {
				want = append(want, pkg+":"+string(m[1])+".before", pkg+":"+string(m[1])+".after")
			}
		}
	}
	slices.Sort(want)
	want = slices.Compact(want)
	machines := elsewhere(t)
	covered, _ := json.MarshalIndent(coverage.fired, "", " ")
	t.Logf("%d crashes at %d of %d named points: %s", coverage.cases, len(coverage.fired), len(want), covered)
	for _, p := range want {
		base := strings.TrimSuffix(strings.TrimSuffix(p, ".before"), ".after")
		if coverage.fired[p] == 0 && unreached[p] == "" && unreached[base] == "" && !machines[p] {
			t.Errorf("the matrix never stopped at %s", p)
		}
	}
}
