package gateway_test

import (
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// statusWorld has an irreversible tool and a probe whose answer the test sets.
func statusWorld(t testing.TB, status *atomic.Value) *testenv.MCPWorld {
	return testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible"},
		testenv.MCPTool{Name: "look", Class: "read", Do: func(args map[string]any) (any, error) {
			s, _ := status.Load().(string)
			if s == "error" {
				return nil, errors.New(`{"error":"down"}`)
			}
			return map[string]any{"status": s, "asked": args}, nil
		}})
}

const statusContract = `{"class":"irreversible","timeout_seconds":10,"reconcile":{"tool":"look",
 "arguments":{"x":"${args.x}","key":"${effect.key}","id":"${effect.id}","at":"since ${effect.intended_at}"},
 "happened":[{"pointer":"/status","equals":"done"}],"not_happened":[{"pointer":"/status","in":["absent","none"]}],"settle_seconds":30}}`

// doubtful brings an effect in doubt: by its owner's death, or under a living owner.
func doubtful(t *testing.T, status *atomic.Value, kill bool) (*testenv.MCPWorld, *env, store.EffectID) {
	t.Helper()
	w := statusWorld(t, status)
	e := newEnv(t, w, contracts{"act": statusContract, "look": `{"class":"read"}`})
	id := e.intend("act", `{"x":1}`)
	if kill {
		e.killAt("after_send", 1)
		if _, err := e.go1(id); !errors.Is(err, errKill) {
			t.Fatalf("got %v, want the kill", err)
		}
		e.crash()
		return w, e, id
	}
	status.Store("") // the probe that follows at once says nothing
	w.Script("act", testenv.MCPFault{Kind: "status", Status: 502})
	if p := e.goOn(id); p.Done || p.RetryAt.IsZero() {
		t.Fatalf("got %+v, want a retry", p)
	}
	return w, e, id
}

func TestProbe(t *testing.T) {
	t.Run("happened", func(t *testing.T) {
		var s atomic.Value
		s.Store("done")
		w, e, id := doubtful(t, &s, true)
		p := e.goOn(id)
		if !p.Done || p.Answer.IsError || !strings.Contains(text(p.Answer), "It happened") || !strings.Contains(text(p.Answer), "not known") {
			t.Errorf("got %+v %s", p, text(p.Answer))
		}
		e.want(id, store.StateCompleted, store.OutcomeOK)
		if got, want := e.kinds(id), "intent attempt doubt evidence settlement result"; got != want {
			t.Errorf("log has %q, want %q", got, want)
		}
		asked := w.Calls("look")[0].Arguments
		if !strings.Contains(asked, `"x":1`) || !strings.Contains(asked, string(id)) || !strings.Contains(asked, `"at":"since 20`) {
			t.Errorf("probe asked %s", asked)
		}
	})
	// Attack E13: "did not happen" is not believed before the settle time, which
	// counts from the proof of death ...
	t.Run("too early, owner dead", func(t *testing.T) {
		var s atomic.Value
		s.Store("absent")
		w, e, id := doubtful(t, &s, true)
		start := e.now()
		p := e.goOn(id)
		if p.Done || p.RetryAt.IsZero() || p.Person {
			t.Fatalf("got %+v, want a retry", p)
		}
		p = e.finish(id)
		if waited := e.now().Sub(start); waited < 29*time.Second || waited > 45*time.Second {
			t.Errorf("believed after %v, want about 30 s", waited)
		}
		if !p.Done || !p.Answer.IsError || !strings.Contains(text(p.Answer), "did not happen") || strings.Contains(text(p.Answer), "failed") {
			t.Errorf("got %+v %s", p, text(p.Answer))
		}
		e.want(id, store.StateVoid, "")
		if n := len(w.Calls("act")); n != 1 {
			t.Errorf("arrived %d times", n)
		}
		if n := strings.Count(e.kinds(id), "evidence"); n > 3 {
			t.Errorf("%d records of evidence, want only news: %s", n, e.kinds(id))
		}
	})
	// ... or, without that proof, from send_by and the deadline.
	t.Run("too early, owner alive", func(t *testing.T) {
		var s atomic.Value
		_, e, id := doubtful(t, &s, false)
		s.Store("absent")
		sendBy := e.effect(id).SendBy
		p := e.finish(id)
		if !p.Done {
			t.Fatalf("got %+v", p)
		}
		if at := e.now(); at.Before(sendBy.Add(40 * time.Second)) {
			t.Errorf("believed at send_by + %v, want at least 40 s", at.Sub(sendBy))
		}
	})
	t.Run("happened later", func(t *testing.T) {
		var s atomic.Value
		_, e, id := doubtful(t, &s, false)
		s.Store("absent")
		e.later(time.Second)
		if p := e.goOn(id); p.Done {
			t.Fatalf("got %+v, want a retry", p)
		}
		s.Store("done")
		e.later(time.Second)
		if p := e.goOn(id); !p.Done || p.Answer.IsError {
			t.Errorf("got %+v", p)
		}
	})
	for _, says := range []string{"neither", "error"} {
		t.Run(says, func(t *testing.T) {
			var s atomic.Value
			s.Store(says)
			w, e, id := doubtful(t, &s, true)
			if p := e.finish(id); !p.Person {
				t.Errorf("got %+v, want a person in the end", p)
			}
			e.want(id, store.StateInDoubt, "")
			// The person asks again, when the target has recovered.
			s.Store("done")
			p, err := e.gw.Settle(t.Context(), e.scope(), id, gateway.SettleRequest{Outcome: "probe", Person: "p"}, nil, e.result)
			if err != nil || !p.Done {
				t.Errorf("probe by a person: %+v, %v", p, err)
			}
			if n := len(w.Calls("act")); n != 1 {
				t.Errorf("arrived %d times", n)
			}
		})
	}
}

func TestTellByContract(t *testing.T) {
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible"})
	e := newEnv(t, w, contracts{"act": `{"class":"irreversible","in_doubt":"tell"}`})
	w.Script("act", testenv.MCPFault{Kind: "cut"})
	id := e.intend("act", `{"x":1}`)
	if p := e.goOn(id); !p.Tell || p.Person {
		t.Fatalf("got %+v, want tell", p)
	}
	p, err := e.gw.Settle(t.Context(), e.scope(), id, gateway.SettleRequest{Outcome: "tell", Person: "contract"}, nil, e.result)
	if err != nil || !p.Done || p.Answer.IsError || !strings.Contains(text(p.Answer), "Do not repeat") {
		t.Errorf("tell: %+v %s, %v", p, text(p.Answer), err)
	}
	if x := e.effect(id); x.State != store.StateInDoubt || !x.Told {
		t.Errorf("effect is %s, told %v; want in doubt and told", x.State, x.Told)
	}
	if p := e.goOn(id); !p.Person || p.Tell {
		t.Errorf("told already: got %+v, want a person", p)
	}
}

func TestPersonSettles(t *testing.T) {
	for outcome, want := range map[string]store.EffectState{"happened": store.StateCompleted, "did_not_happen": store.StateVoid} {
		w, e := oneTool(t, "irreversible", `{"class":"irreversible"}`)
		w.Script("act", testenv.MCPFault{Kind: "cut"})
		id := e.intend("act", `{"x":1}`)
		e.goOn(id)
		row := store.NewID("inb_", e.now())
		if _, err := e.db.Deliver(t.Context(), ws, e.session, []store.Delivery{{ID: row, Kind: store.InboxSettle, Target: string(id), Body: []byte(`{}`)}}, nil); err != nil {
			t.Fatal(err)
		}
		r := gateway.SettleRequest{Outcome: outcome, Person: "apikey_1", Evidence: "saw it", Response: json.RawMessage(`{"order":7}`)}
		p, err := e.gw.Settle(t.Context(), e.scope(), id, r, []string{row}, e.result)
		if err != nil || !p.Done {
			t.Fatalf("settle: %+v, %v", p, err)
		}
		if outcome == "happened" && text(p.Answer) != `{"order":7}` {
			t.Errorf("answer is %s, want the known response", text(p.Answer))
		}
		if x := e.effect(id); x.State != want {
			t.Errorf("state is %s, want %s", x.State, want)
		}
		if rows, err := e.db.Inbox(t.Context(), ws, e.session); err != nil || len(rows) > 1 {
			t.Errorf("inbox has %d rows, want only the message; %v", len(rows), err)
		}
		if _, err := e.gw.Settle(t.Context(), e.scope(), id, r, nil, e.result); !errors.Is(err, gateway.ErrSettled) {
			t.Errorf("second settlement: got %v, want ErrSettled", err)
		}
		// Evidence that disagrees changes nothing and is marked.
		says := map[string]string{"happened": "did_not_happen", "did_not_happen": "happened"}[outcome]
		if err := e.gw.Evidence(t.Context(), e.scope(), store.Evidence{Effect: id, Kind: "late", Says: says}, nil); err != nil {
			t.Fatal(err)
		}
		if x := e.effect(id); x.State != want {
			t.Errorf("after evidence: state is %s, want %s", x.State, want)
		}
		if !strings.Contains(e.log(), `"contradicts":true`) || !strings.Contains(e.logs.String(), "contradicts") {
			t.Error("the contradiction was neither recorded nor reported")
		}
	}
}

// Attack E10: the answer of a fenced owner is kept as evidence, which settles
// the effect for the new one.
func TestLateAnswer(t *testing.T) {
	for _, c := range []struct {
		name  string
		fault testenv.MCPFault
		state store.EffectState
	}{
		{"executed", testenv.MCPFault{Kind: "hang"}, store.StateCompleted},
		{"refused", testenv.MCPFault{Before: true, Kind: "hang"}, store.StateVoid},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, e := oneTool(t, "irreversible", `{"class":"irreversible"}`)
			arrived, release := make(chan struct{}), make(chan struct{})
			f := c.fault
			f.Arrived, f.Release = arrived, release
			if c.name == "refused" {
				// The sender is held right before its first byte, past its fence.
				e.fault = func(p string) error {
					if p == "before_send" {
						arrived <- struct{}{}
						<-release
					}
					return nil
				}
			} else {
				w.Script("act", f)
			}
			id := e.intend("act", `{"x":1}`)
			old := e.scope()
			failed := make(chan error, 1)
			go func() {
				_, err := e.gw.Continue(t.Context(), old, id, e.result)
				failed <- err
			}()
			<-arrived
			// Another owner takes over while the call is out.
			if err := e.steal(); err != nil {
				t.Fatal(err)
			}
			if c.name == "refused" {
				e.later(2 * time.Minute) // it was stopped past its send_by
			}
			close(release)
			if err := <-failed; !errors.Is(err, store.ErrFenced) {
				t.Errorf("zombie: got %v, want ErrFenced", err)
			}
			rows, err := e.db.Inbox(t.Context(), ws, e.session)
			if err != nil {
				t.Fatal(err)
			}
			var ev store.Evidence
			for _, r := range rows {
				if r.Kind == store.InboxEvidence {
					if err := json.Unmarshal(r.Body, &ev); err != nil {
						t.Fatal(err)
					}
					if err := e.gw.Evidence(t.Context(), e.scope(), ev, []string{r.ID}); err != nil {
						t.Fatal(err)
					}
				}
			}
			if ev.Effect != id || ev.Kind != "late" {
				t.Fatalf("inbox holds evidence %+v", ev)
			}
			p := e.goOn(id)
			if !p.Done {
				t.Errorf("got %+v, want it settled by the late answer", p)
			}
			if x := e.effect(id); x.State != c.state {
				t.Errorf("state is %s, want %s", x.State, c.state)
			}
			if n := w.Executions("act"); (n == 1) != (c.state == store.StateCompleted) {
				t.Errorf("executed %d times", n)
			}
			if c.state == store.StateCompleted && text(p.Answer) != `{"done":true}` {
				t.Errorf("answer is %s, want the late one", text(p.Answer))
			}
		})
	}
}

func TestVoid(t *testing.T) {
	w, e := oneTool(t, "idempotent", `{"class":"idempotent","idempotency":{"argument":"token"}}`)
	id := e.intend("act", `{"x":1}`)
	p, err := e.gw.Void(t.Context(), e.scope(), id, "Interrupted by the user.", nil, e.result)
	if err != nil || !p.Done || !p.Answer.IsError {
		t.Errorf("void unsent: %+v, %v", p, err)
	}
	e.want(id, store.StateVoid, "")
	if _, err := e.gw.Void(t.Context(), e.scope(), id, "x", nil, e.result); !errors.Is(err, store.ErrConflict) {
		t.Errorf("void again: %v", err)
	}
	// One that may have left is not said to have been voided.
	id = e.intend("act", `{"x":2}`)
	e.killAt("after_send", 1)
	_, _ = e.go1(id)
	e.crash()
	p, err = e.gw.Void(t.Context(), e.scope(), id, "Interrupted by the user.", nil, e.result)
	if err != nil || !p.Done || !strings.Contains(text(p.Answer), "Outcome unknown") {
		t.Errorf("void sent: %+v %s, %v", p, text(p.Answer), err)
	}
	if x := e.effect(id); x.State != store.StateInDoubt || !x.Told {
		t.Errorf("state is %s, told %v", x.State, x.Told)
	}
	if n := len(w.Calls("act")); n != 1 {
		t.Errorf("arrived %d times", n)
	}
}

// An approval that is too old does not outlive a crash (recovery of an intent
// without attempt).
func TestRecheckedIntent(t *testing.T) {
	w, e := oneTool(t, "irreversible", `{"class":"irreversible"}`)
	r := e.rule(e.calls("always_ask", "act", `{"x":1}`)...)[0]
	drafts, is, err := e.gw.Intend(t.Context(), e.scope(), r.Effect, "sevt_1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.db.Append(t.Context(), e.lease, store.Append{Entries: drafts, Effects: is}); err != nil {
		t.Fatal(err)
	}
	e.later(25 * time.Hour)
	e.crash()
	p := e.goOn(r.Effect)
	if !p.Done || !strings.Contains(text(p.Answer), "approval has expired") {
		t.Errorf("got %+v %s", p, text(p.Answer))
	}
	e.want(r.Effect, store.StateVoid, "")
	if n := len(w.Calls("act")); n != 0 {
		t.Errorf("arrived %d times", n)
	}
}

// Design section 4, step 6: a sender that was stopped between its attempt and
// its first byte, past send_by, sends nothing, and says so.
func TestSendBy(t *testing.T) {
	for _, class := range []string{`{"class":"irreversible"}`, `{"class":"idempotent","idempotency":{"argument":"token"}}`} {
		w, e := oneTool(t, "irreversible", class)
		id := e.intend("act", `{"x":1}`)
		e.fault = func(p string) error {
			if p == "before_send" {
				e.later(2 * time.Minute) // the boot clock goes on while we are stopped
			}
			return nil
		}
		p := e.goOn(id)
		if !p.Done || p.Answer.Outcome != store.OutcomeRefused || !strings.Contains(text(p.Answer), "nothing was done") {
			t.Errorf("%s: got %+v %s, want refused", class, p, text(p.Answer))
		}
		e.want(id, store.StateCompleted, store.OutcomeRefused)
		if n := len(w.Calls("act")); n != 0 {
			t.Errorf("%s: arrived %d times, want 0", class, n)
		}
	}
}
