package session_test

import (
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// TestLongAnswer: an answer from outside that is too long for the context is
// kept in the machine, and log and model get one short form of it; without a
// machine it is cut, and says so.
func TestLongAnswer(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("0123456789", 15_000)
	t.Run("machine", func(t *testing.T) {
		e := testenv.New(t, testenv.Options{Sandboxes: true})
		id := e.Begin("long", llm.PlayScript{Steps: []llm.Step{
			calls(shell("true")), acting("look", long), calls(shell("grep -c 0123456789 /tmp/.planaria/*.txt; wc -c < $(ls /tmp/.planaria/*.txt)")), ending}})
		e.Finish(id)
		got := resultsOf(t, e, id)
		if len(got) != 3 || len(got[1]) > 50_000 || !strings.Contains(got[1], "all of it is in /tmp/.planaria/") || !strings.HasPrefix(got[2], "1\n15") {
			t.Errorf("%d results, the answer has %d characters, the file %s", len(got), len(got[1]), got[len(got)-1])
		}
		bodies := e.Model.Bodies()
		if last := string(bodies[len(bodies)-1]); !strings.Contains(last, "all of it is in /tmp/.planaria/") {
			t.Error("the model got another form of the answer than the log")
		}
		e.Check()
	})
	t.Run("no machine", func(t *testing.T) {
		e := testenv.New(t, testenv.Options{})
		id := e.Begin("whole", llm.PlayScript{Steps: []llm.Step{acting("look", long), ending}})
		e.Finish(id)
		if got := resultsOf(t, e, id); len(got) != 1 || !strings.Contains(got[0], "(cut after 100000 characters") {
			t.Errorf("%d results, of %d characters", len(got), len(got[0]))
		}
		e.Check()
	})
}

// TestCrashBehindRefusal: a model refuses, and the process dies before the rest
// is said: the machine's outputs were still to be kept. The rest says so even then.
func TestCrashBehindRefusal(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	e.Model.Add(t, testenv.Marked("refuses", llm.PlayScript{Steps: []llm.Step{
		calls(shell("true")), {Text: "No.", Stop: "refusal", StopDetails: map[string]any{"type": "refusal", "category": "cyber", "explanation": "not this"}}}}))
	e.Arm(testenv.Fault{Point: "session:before_rest", N: 1})
	id, err := e.Create("refuses", "")
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the crash", e.Fired())
	e.Crash()
	e.Restart()
	if stop := e.Finish(id); stop.Type != "refusal" {
		t.Errorf("rests with %v\n%s", stop, e.Describe(id))
	}
	for _, en := range entriesOf(t, e, id) {
		if en.Kind == store.KindEvent && en.Type == "session.status_idle" && !strings.Contains(string(en.Body), "not this") {
			t.Errorf("the rest tells %s", en.Body)
		}
	}
	e.Check()
}
