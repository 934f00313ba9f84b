package gateway_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// takeEvidence consumes late evidence as an owner does and returns the newest.
func takeEvidence(e *env) (ev store.Evidence) {
	e.t.Helper()
	rows, err := e.db.Inbox(e.t.Context(), ws, e.session)
	if err != nil {
		e.t.Fatal(err)
	}
	for _, r := range rows {
		if r.Kind != store.InboxEvidence {
			continue
		}
		if err := json.Unmarshal(r.Body, &ev); err != nil {
			e.t.Fatal(err)
		}
		if err := e.gw.Evidence(e.t.Context(), e.scope(), ev, []string{r.ID}); err != nil {
			e.t.Fatal(err)
		}
	}
	return ev
}

// Laws L3 and L4, attack E10: that a fenced owner sent nothing is no proof about an
// idempotent effect, which the new owner has sent again.
func TestLateRefusalOfIdempotent(t *testing.T) {
	w, e := oneTool(t, "idempotent", `{"class":"idempotent","idempotency":{"argument":"token"}}`)
	arrived, release := make(chan struct{}), make(chan struct{})
	first := true
	e.fault = func(p string) error {
		if p != "before_send" {
			return nil
		}
		e.mu.Lock()
		held := first
		first = false
		e.mu.Unlock()
		if held {
			arrived <- struct{}{}
			<-release
		}
		return nil
	}
	w.Script("act", testenv.MCPFault{Kind: "cut"}, testenv.MCPFault{Kind: "cut"})
	id := e.intend("act", `{"x":1}`)
	old := e.scope()
	failed := make(chan error, 1)
	go func() {
		_, err := e.gw.Continue(t.Context(), old, id, e.result)
		failed <- err
	}()
	<-arrived
	if err := e.steal(); err != nil {
		t.Fatal(err)
	}
	// The new owner's gateway is another process.
	gw := gateway.New(gateway.Config{DB: e.db, Keeper: e.keeper, Effects: e.effects})
	if p, err := gw.Continue(t.Context(), e.scope(), id, e.result); err != nil || p.RetryAt.IsZero() {
		t.Fatalf("new owner: %+v, %v, want to try again", p, err)
	}
	e.later(2 * time.Minute) // the old owner was stopped past its send_by
	close(release)
	if err := <-failed; !errors.Is(err, store.ErrFenced) {
		t.Errorf("zombie: got %v, want ErrFenced", err)
	}
	if ev := takeEvidence(e); ev.Says != "did_not_happen" {
		t.Fatalf("inbox holds evidence %+v", ev)
	}
	if p, err := gw.Continue(t.Context(), e.scope(), id, e.result); err != nil || !p.Done || p.Answer.IsError {
		t.Errorf("new owner: %+v, %v", p, err)
	}
	e.want(id, store.StateCompleted, store.OutcomeOK)
	if n := w.Executions("act"); n != 1 {
		t.Errorf("executed %d times", n)
	}
}

// The late answer of a call that was left to the agent settles it.
func TestLateAnswerAfterTold(t *testing.T) {
	w, e := oneTool(t, "irreversible", `{"class":"irreversible"}`)
	w.Script("act", testenv.MCPFault{Kind: "cut"})
	id := e.intend("act", `{"x":1}`)
	if p := e.goOn(id); !p.Person {
		t.Fatalf("got %+v, want a person", p)
	}
	if _, err := e.gw.Settle(t.Context(), e.scope(), id, gateway.SettleRequest{Outcome: "tell"}, nil, e.result); err != nil {
		t.Fatal(err)
	}
	late := func(says string) {
		body, err := json.Marshal(store.Evidence{V: 1, Effect: id, Kind: "late", Says: says})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.Deliver(t.Context(), ws, e.session, []store.Delivery{
			{ID: store.NewID("inb_", e.now()), Kind: store.InboxEvidence, Body: body}}, nil); err != nil {
			t.Fatal(err)
		}
		takeEvidence(e)
	}
	late("unknown")
	e.want(id, store.StateInDoubt, "")
	late("happened")
	e.want(id, store.StateCompleted, store.OutcomeOK)
	late("did_not_happen")
	e.want(id, store.StateCompleted, store.OutcomeOK)
	if !strings.Contains(e.logs.String(), "contradicts") {
		t.Error("evidence against the settlement does not alarm")
	}
	if got, want := e.kinds(id), "intent attempt doubt settlement result evidence evidence settlement evidence"; got != want {
		t.Errorf("records are %s, want %s", got, want)
	}
}

// Another call may find the connection dead between this one's attempt and its
// send. Nothing leaves, and nothing is in doubt.
func TestConnectionDiesUnderAttempt(t *testing.T) {
	w, e := oneTool(t, "irreversible", `{"class":"irreversible"}`)
	id := e.intend("act", `{"x":1}`)
	e.mu.Lock()
	e.fault = func(p string) error {
		if p == "after_attempt" {
			w.RequireBearer("another token")
			if _, err := e.gw.List(t.Context(), e.scope(), "world"); err == nil {
				t.Error("the server lists its tools without its token")
			}
		}
		return nil
	}
	e.mu.Unlock()
	if p := e.goOn(id); !p.Done || p.Answer.Outcome != store.OutcomeRefused {
		t.Errorf("got %+v", p)
	}
	e.want(id, store.StateCompleted, store.OutcomeRefused)
	if n := w.Executions("act"); n != 0 {
		t.Errorf("executed %d times", n)
	}
}

// A caller that leaves while it lists takes the connection from nobody.
func TestListerLeaves(t *testing.T) {
	w, e := oneTool(t, "irreversible", `{"class":"irreversible"}`)
	id := e.intend("act", `{"x":1}`)
	e.mu.Lock()
	e.fault = func(p string) error {
		if p == "after_attempt" {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := e.gw.List(ctx, e.scope(), "world"); !errors.Is(err, context.Canceled) {
				t.Errorf("list: %v", err)
			}
		}
		return nil
	}
	e.mu.Unlock()
	if p := e.goOn(id); !p.Done || p.Answer.IsError {
		t.Errorf("got %+v", p)
	}
	e.want(id, store.StateCompleted, store.OutcomeOK)
	if n := w.Executions("act"); n != 1 {
		t.Errorf("executed %d times", n)
	}
}

// An effect may outlive its session in doubt: what comes in late is kept where
// the operator looks, although no owner will ever read the inbox there.
func TestLateAnswerOfArchivedSession(t *testing.T) {
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible"})
	e := newEnv(t, w, contracts{"act": `{"class":"irreversible"}`})
	w.Script("act", testenv.MCPFault{Kind: "cut"})
	id := e.intend("act", `{}`)
	e.goOn(id)
	e.want(id, store.StateInDoubt, "")
	was := e.effect(id)
	if _, err := e.db.Append(t.Context(), e.lease, store.Append{Park: true, Entries: []store.Draft{
		{Kind: store.KindEvent, Type: "session.status_terminated", ID: store.NewID("sevt_", e.now()), Body: []byte(`{"v":1,"type":"session.status_terminated"}`)}}}); err != nil {
		t.Fatal(err)
	}
	if err := e.effects.Late(t.Context(), was, store.Evidence{Kind: "late", Says: "happened"}); err != nil {
		t.Fatalf("late evidence: %v", err)
	}
	if x, err := e.db.Effect(t.Context(), ws, id); err != nil || len(x.EvidenceSeqs) != 1 || x.State != store.StateInDoubt {
		t.Errorf("effect is %s with evidence %v (%v), want in doubt with one piece", x.State, x.EvidenceSeqs, err)
	}
}

// Attack E19: the disk refuses the completion for a moment and the process
// lives. What the target answered is not lost: it goes to the inbox and settles
// the effect, although nobody can ask the target.
func TestAnswerSurvivesFailedCompletion(t *testing.T) {
	w := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "act", Class: "irreversible"})
	e := newEnv(t, w, contracts{"act": `{"class":"irreversible"}`})
	id := e.intend("act", `{}`)
	full := errors.New("no space left")
	e.mu.Lock()
	e.fault = func(p string) error {
		if p == "before_completion" {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.step = func(step string) error {
				if step == "append.before" {
					return full
				}
				return nil
			}
		}
		return nil
	}
	e.mu.Unlock()
	if _, err := e.go1(id); err == nil {
		t.Fatal("the completion was committed on a full disk")
	}
	e.mu.Lock()
	e.step, e.fault = nil, nil
	e.mu.Unlock()
	if ev := takeEvidence(e); ev.Says != "happened" || ev.Kind != "late" {
		t.Fatalf("evidence = %+v, want a late answer that it happened", ev)
	}
	if p := e.goOn(id); !p.Done || p.Answer.IsError {
		t.Errorf("got %+v, want it settled by its own answer", p)
	}
	e.want(id, store.StateCompleted, store.OutcomeOK)
	if n := w.Executions("act"); n != 1 {
		t.Errorf("act was executed %d times, want 1", n)
	}
}
