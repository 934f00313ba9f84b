package gateway_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// refusedFaults prove that nothing happened; doubtFaults prove nothing.
var (
	refusedFaults = map[string]testenv.MCPFault{
		"status 400": {Before: true, Kind: "status", Status: 400}, "status 401": {Before: true, Kind: "status", Status: 401},
		"status 403": {Before: true, Kind: "status", Status: 403}, "status 404": {Before: true, Kind: "status", Status: 404},
		"status 422": {Before: true, Kind: "status", Status: 422}, "status 429": {Before: true, Kind: "status", Status: 429},
		"unknown method": {Before: true, Kind: "error", Code: -32601}, "invalid params": {Before: true, Kind: "error", Code: -32602},
	}
	doubtFaults = map[string]testenv.MCPFault{
		"cut after":        {Kind: "cut"},                                       // attack E1
		"cut before":       {Before: true, Kind: "cut"},                         // nobody can tell it from the former
		"partial":          {Kind: "partial"},                                   // mid-body
		"status 408":       {Kind: "status", Status: 408},                       //
		"status 409":       {Kind: "status", Status: 409},                       //
		"status 425":       {Kind: "status", Status: 425},                       //
		"status 500":       {Kind: "status", Status: 500},                       //
		"status 502":       {Kind: "status", Status: 502},                       // trap P3, attack E4
		"status 503":       {Kind: "status", Status: 503},                       // trap P3
		"status 504":       {Kind: "status", Status: 504},                       //
		"hang":             {Kind: "hang"},                                      // deadline
		"input required":   {Kind: "input_required"},                            // trap P2, attack E3
		"internal error":   {Kind: "error", Code: -32603},                       //
		"server error":     {Kind: "error", Code: -32000},                       //
		"error code 0":     {Kind: "error", Code: 0},                            //
		"redirect":         {Kind: "redirect", Body: "http://127.0.0.1:1/mcp"},  // attack N5, trap P6
		"compressed":       {Kind: "gzip"},                                      // trap P7
		"oversized":        {Kind: "oversized", Size: keeper.MaxAnswer + 1<<20}, // attack F5
		"garbage":          {Kind: "garbage"},                                   //
		"answer to other":  {Kind: "other"},                                     //
		"empty":            {Kind: "empty"},                                     //
		"executed, status": {Kind: "status", Status: 599},                       //
	}
)

func oneTool(t testing.TB, class, contract string) (*testenv.MCPWorld, *env) {
	tool := testenv.MCPTool{Name: "act", Class: class}
	if strings.Contains(contract, `"argument"`) {
		tool.KeyArgument = "token"
	}
	if strings.Contains(contract, `"header"`) {
		tool.KeyHeader = "Idempotency-Key"
	}
	w := testenv.NewMCPWorld(t, tool)
	return w, newEnv(t, w, contracts{"act": contract})
}

// Attacks E1 to E4, traps P2, P3: an irreversible call whose answer proves
// nothing is in doubt, and is not sent again by anything that follows.
func TestIrreversibleDoubt(t *testing.T) {
	for name, f := range doubtFaults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, e := oneTool(t, "irreversible", `{"class":"irreversible","timeout_seconds":1}`)
			w.Script("act", f)
			id := e.intend("act", `{"x":1}`)
			p := e.goOn(id)
			if p.Done || !p.Person {
				t.Errorf("continue: got %+v, want a person to be needed", p)
			}
			e.want(id, store.StateInDoubt, "")
			for range 2 {
				e.crash()
				if p := e.goOn(id); !p.Person {
					t.Errorf("continue after a crash: got %+v, want a person", p)
				}
			}
			if n := len(w.Calls("act")); n != 1 {
				t.Errorf("the call arrived %d times, want 1", n)
			}
			if e.results != 0 {
				t.Errorf("%d results were committed, want none", e.results)
			}
		})
	}
}

func TestIrreversibleRefused(t *testing.T) {
	for name, f := range refusedFaults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, e := oneTool(t, "irreversible", `{"class":"irreversible"}`)
			w.Script("act", f)
			id := e.intend("act", `{"x":1}`)
			p := e.goOn(id)
			if !p.Done || !p.Answer.IsError || p.Answer.Outcome != store.OutcomeRefused {
				t.Errorf("continue: got %+v, want a refusal", p)
			}
			e.want(id, store.StateCompleted, store.OutcomeRefused)
			// The model may call again; the connection has healed.
			again := e.intend("act", `{"x":1}`)
			if p := e.goOn(again); !p.Done || p.Answer.IsError {
				t.Errorf("call again: got %+v %s", p, text(p.Answer))
			}
			if n := w.Executions("act"); n != 1 {
				t.Errorf("executed %d times, want 1", n)
			}
		})
	}
}

// Idempotent calls are sent again under the same key until they are answered.
func TestIdempotentResent(t *testing.T) {
	for _, contract := range []string{
		`{"class":"idempotent","idempotency":{"argument":"token"},"timeout_seconds":1}`,
		`{"class":"idempotent","idempotency":{"header":"Idempotency-Key"},"timeout_seconds":1}`,
		`{"class":"idempotent","idempotency":{"natural":true},"timeout_seconds":1}`,
	} {
		for name, f := range doubtFaults {
			if f.Kind == "oversized" && strings.Contains(contract, "natural") {
				continue // slow, and the same as with a key
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				w, e := oneTool(t, "idempotent", contract)
				w.Script("act", f)
				id := e.intend("act", `{"x":1,"token":"the model's own"}`)
				p := e.finish(id)
				if !p.Done || p.Answer.IsError {
					t.Errorf("continue: got %+v, want it done", p)
				}
				e.want(id, store.StateCompleted, store.OutcomeOK)
				calls := w.Calls("act")
				if len(calls) != 2 {
					t.Fatalf("arrived %d times, want 2", len(calls))
				}
				if calls[0].Key != calls[1].Key || calls[0].Arguments != calls[1].Arguments {
					t.Errorf("sent %+v and then %+v, want the same", calls[0], calls[1])
				}
				natural := strings.Contains(contract, "natural")
				if !natural && (len(calls[0].Key) != 43 || strings.Contains(calls[0].Key, "model")) {
					t.Errorf("key is %q, want one of the gateway's", calls[0].Key) // attack E7, trial row 17
				}
				if e.results != 1 {
					t.Errorf("%d results, want 1", e.results)
				}
			})
		}
	}
}

// A refusal of a resend does not prove that the first send did nothing.
func TestIdempotentRefusedAgain(t *testing.T) {
	w, e := oneTool(t, "idempotent", `{"class":"idempotent","idempotency":{"argument":"token","window_seconds":600},"timeout_seconds":1}`)
	w.Script("act", testenv.MCPFault{Kind: "cut"})
	for range 100 {
		w.Script("act", testenv.MCPFault{Before: true, Kind: "status", Status: 403})
	}
	id := e.intend("act", `{"x":1}`)
	if p := e.finish(id); !p.Person {
		t.Errorf("got %+v, want a person once the window is over", p)
	}
	e.want(id, store.StateInDoubt, "")
}

// Attack E9: after the target's window the key is not sent again.
func TestIdempotentWindow(t *testing.T) {
	w, e := oneTool(t, "idempotent", `{"class":"idempotent","idempotency":{"argument":"token","window_seconds":60},"timeout_seconds":10}`)
	id := e.intend("act", `{"x":1}`)
	e.killAt("after_send", 1)
	if _, err := e.go1(id); !errors.Is(err, errKill) {
		t.Fatalf("continue: got %v, want the kill", err)
	}
	e.crash()
	e.later(51 * time.Second) // a resend would not end inside the window
	if p := e.goOn(id); !p.Person {
		t.Errorf("got %+v, want a person", p)
	}
	e.want(id, store.StateInDoubt, "")
	if n := len(w.Calls("act")); n != 1 {
		t.Errorf("arrived %d times, want 1", n)
	}
}

// A read's bad answer is an answer: it may be called again.
func TestReadFaults(t *testing.T) {
	for name, f := range doubtFaults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, e := oneTool(t, "read", `{"class":"read","timeout_seconds":1}`)
			w.Script("act", f)
			id := e.intend("act", `{"x":1}`)
			if p := e.goOn(id); !p.Done || !p.Answer.IsError {
				t.Errorf("continue: got %+v, want an error answer", p)
			}
			if n := len(w.Calls("act")); n != 1 {
				t.Errorf("arrived %d times, want 1", n)
			}
			if got := e.effect(id); got.State != store.StateCompleted {
				t.Errorf("state is %s, want completed", got.State)
			}
		})
	}
}

// The server cannot be reached at all: refused, on record, nothing happened.
func TestNoConnection(t *testing.T) {
	for _, class := range []string{`{"class":"irreversible"}`, `{"class":"idempotent","idempotency":{"natural":true}}`, `{"class":"read"}`} {
		w, e := oneTool(t, "irreversible", class)
		id := e.intend("act", `{"x":1}`)
		w.Stop()
		e.crash() // a new process: no connection is kept
		id2 := id
		p := e.goOn(id2)
		if strings.Contains(class, "idempotent") {
			if p.Done || p.RetryAt.IsZero() {
				t.Errorf("%s: got %+v, want a retry", class, p) // the former owner may have sent it
			}
			continue
		}
		if !p.Done || p.Answer.Outcome != store.OutcomeRefused {
			t.Errorf("%s: got %+v, want refused", class, p)
		}
		e.want(id, store.StateCompleted, store.OutcomeRefused)
	}
}

// Interrupt before the attempt: nothing is committed. After it the call runs on.
func TestContextEnds(t *testing.T) {
	w, e := oneTool(t, "irreversible", `{"class":"irreversible"}`)
	id := e.intend("act", `{"x":1}`)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("interrupted")
	cancel(cause)
	if _, err := e.gw.Continue(ctx, e.scope(), id, e.result); !errors.Is(err, cause) {
		t.Errorf("cancelled before: got %v, want the cause", err)
	}
	e.want(id, store.StateIntended, "")
	ctx, cancel = context.WithCancelCause(t.Context())
	arrived := make(chan struct{})
	release := make(chan struct{})
	w.Script("act", testenv.MCPFault{Kind: "hang", Arrived: arrived, Release: release})
	go func() {
		<-arrived
		cancel(cause)
		close(release)
	}()
	p, err := e.gw.Continue(ctx, e.scope(), id, e.result)
	if err != nil || !p.Done || p.Answer.IsError {
		t.Errorf("cancelled after the send: got %+v, %v, want it done", p, err)
	}
}

// kills are the points of one call in their order.
var kills = []string{"before_attempt", "after_attempt", "before_send", "after_send", "before_completion", "after_completion"}

// Trials K1 to K3, attack E11: the process dies at every point of every class,
// twice where it can; then recovery goes on.
func TestKillMatrix(t *testing.T) {
	classes := map[string]string{
		"read":            `{"class":"read"}`,
		"keyed":           `{"class":"idempotent","idempotency":{"argument":"token"}}`,
		"natural":         `{"class":"idempotent","idempotency":{"natural":true}}`,
		"natural probed":  `{"class":"idempotent","idempotency":{"natural":true},` + probed + `}`,
		"irreversible":    `{"class":"irreversible"}`,
		"mixed":           `{"class":"mixed"}`,
		"irreversible pr": `{"class":"irreversible",` + probed + `}`,
	}
	for name, contract := range classes {
		for _, first := range kills {
			for _, second := range []string{"", first, "after_send"} {
				t.Run(fmt.Sprintf("%s %s %s", name, first, second), func(t *testing.T) {
					t.Parallel()
					killTwice(t, name, contract, first, second)
				})
			}
		}
	}
}

// probed is a reconcile call that reads the world's count.
const probed = `"reconcile":{"tool":"look","arguments":{"x":"${args.x}"},"happened":[{"pointer":"/done","equals":true}],"not_happened":[{"pointer":"/done","equals":false}],"settle_seconds":5}`

// probedWorld has one tool and one that tells whether it was executed.
func probedWorld(t testing.TB, tool testenv.MCPTool) *testenv.MCPWorld {
	var w *testenv.MCPWorld
	w = testenv.NewMCPWorld(t, tool, testenv.MCPTool{Name: "look", Class: "read", Do: func(map[string]any) (any, error) {
		return map[string]any{"done": w.Did(tool.Name) > 0}, nil
	}})
	return w
}

func killTwice(t *testing.T, name, contract, first, second string) {
	class := strings.Fields(name)[0]
	tool := testenv.MCPTool{Name: "act", Class: class}
	if class == "mixed" {
		tool.Class = "irreversible"
	}
	if class == "keyed" {
		tool.KeyArgument = "token"
	}
	w := probedWorld(t, tool)
	e := newEnv(t, w, contracts{"act": contract, "look": `{"class":"read"}`})
	id := e.intend("act", `{"x":1}`)
	e.killAt(first, 1)
	if _, err := e.go1(id); !errors.Is(err, errKill) {
		t.Fatalf("continue: got %v, want the kill at %s", err, first)
	}
	e.crash()
	if second != "" {
		e.killAt(second, 1)
		_, _ = e.go1(id) // dies there, or does not come there
		e.crash()
	}
	p := e.finish(id)
	n := w.Executions("act")
	state := e.effect(id).State
	switch {
	case tool.Class == "irreversible":
		if n > 1 {
			t.Errorf("executed %d times, want at most 1", n)
		}
		if want := n == 1; p.Done && !p.Answer.IsError != want {
			t.Errorf("executed %d times, and the model is told %s", n, text(p.Answer))
		}
		if strings.HasSuffix(name, "pr") && !p.Done {
			t.Errorf("probed: got %+v, want it settled", p)
		}
		if !p.Done && state != store.StateInDoubt {
			t.Errorf("not done and %s, want in doubt", state)
		}
	default:
		if !p.Done || p.Answer.IsError || n < 1 {
			t.Errorf("got %+v after %d executions, want it done", p, n)
		}
		if class == "keyed" && n != 1 {
			t.Errorf("executed %d times under one key, want 1", n)
		}
	}
	results := strings.Count(e.kinds(id), "result")
	if want := map[bool]int{true: 1, false: 0}[p.Done]; results != want {
		t.Errorf("log has %d results (%s), want %d", results, e.kinds(id), want)
	}
	if strings.Count(e.kinds(id), "completion") > 1 {
		t.Errorf("log has two completions: %s", e.kinds(id))
	}
	checkLog(t, e, id)
}

// checkLog: no completion of an irreversible effect without attempt, rows
// equal to what the log says.
func checkLog(t *testing.T, e *env, id store.EffectID) {
	t.Helper()
	x := e.effect(id)
	if effect.Attempted(x.Class) && x.State == store.StateCompleted && x.Attempts == 0 {
		t.Errorf("completed without attempt: %s", e.kinds(id))
	}
	if diff, err := e.db.Rebuild(t.Context(), ws, e.session); err != nil || diff != "" {
		t.Errorf("rebuild: %v %s", err, diff)
	}
}

// Fault pairs: each append of a call fails and is not there, or fails and is there.
func TestAppendFaults(t *testing.T) {
	for name, contract := range map[string]string{
		"read":         `{"class":"read"}`,
		"keyed":        `{"class":"idempotent","idempotency":{"argument":"token"}}`,
		"natural":      `{"class":"idempotent","idempotency":{"natural":true}}`,
		"mixed":        `{"class":"mixed",` + probed + `}`,
		"irreversible": `{"class":"irreversible",` + probed + `}`,
	} {
		for _, side := range []string{"append.before", "append.after"} {
			for nth := 1; nth <= 4; nth++ {
				t.Run(fmt.Sprintf("%s %s %d", name, side, nth), func(t *testing.T) {
					t.Parallel()
					tool := testenv.MCPTool{Name: "act", Class: name}
					if name == "mixed" {
						tool.Class = "irreversible"
					}
					if name == "keyed" {
						tool.KeyArgument = "token"
					}
					w := probedWorld(t, tool)
					e := newEnv(t, w, contracts{"act": contract, "look": `{"class":"read"}`})
					id := e.intend("act", `{"x":1}`)
					n := 0
					e.mu.Lock()
					e.step = func(step string) error {
						e.mu.Lock()
						defer e.mu.Unlock()
						if step == side {
							if n++; n >= nth {
								return errKill // from here on the disk is bad
							}
						}
						return nil
					}
					e.mu.Unlock()
					for range 3 {
						if p, err := e.go1(id); err != nil || p.Done {
							break
						}
					}
					e.crash()
					p := e.finish(id)
					if !p.Done {
						t.Errorf("got %+v, want it to come to an end", p)
					}
					checkLog(t, e, id)
					n = w.Executions("act")
					if once := name != "read" && name != "natural"; once && n > 1 || (p.Answer.Outcome == store.OutcomeOK) != (n > 0) {
						t.Errorf("executed %d times, answer is %s", n, text(p.Answer))
					}
					if got := strings.Count(e.kinds(id), "result"); got != 1 {
						t.Errorf("log has %d results, want 1: %s", got, e.kinds(id))
					}
				})
			}
		}
	}
}
