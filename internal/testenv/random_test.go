package testenv_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/testenv"
)

// reference is the small model beside a session: what a client may rely on.
type reference struct {
	sent   []string // texts of accepted messages, in order
	paused bool
}

// TestRandomOperations drives one session by random operations (send,
// interrupt, answer, pause, resume, kill, restart) and compares it with a small
// reference model; all laws are checked after each (trials W2, W3, A1, A2, H1).
// The seed is in the failure text of rapid.
func TestRandomOperationsSQLite(t *testing.T)   { randomOperations(t, testenv.SQLite) }
func TestRandomOperationsPostgres(t *testing.T) { randomOperations(t, testenv.PostgreSQL) }

func randomOperations(t *testing.T, engine string) {
	e := testenv.New(t, testenv.Options{Engine: engine})
	run := 0
	limit := time.Now().Add(25 * time.Second) // of a normal run; a longer one has its flags
	rapid.Check(t, func(r *rapid.T) {
		if time.Now().After(limit) {
			return
		}
		run++
		tag := fmt.Sprint("random-", engine, "-", run)
		// Ids are unlike each other per turn by what the model is told: the tag, and
		// the step's place in the script.
		script := llm.PlayScript{Repeat: true, Steps: []llm.Step{
			calls(use("look", tag)), calls(use("put", tag+"-p"), use("look", tag)), calls(llm.ToolCall{Name: "client_act"}), done,
			calls(use("pay", tag+"-y")), done}}
		id := e.Begin(tag, script)
		m := &reference{sent: []string{"[" + tag + "] Begin."}}
		steps := rapid.IntRange(3, 8).Draw(r, "operations")
		for range steps {
			op := rapid.SampledFrom([]string{"send", "send", "interrupt", "answer", "answer", "pause", "resume", "kill", "restart"}).Draw(r, "operation")
			if err := m.operate(e, id, op); err != nil {
				r.Fatalf("%s: %v\n%s", op, err, e.Describe(id))
			}
			e.Check()
			if t.Failed() {
				r.Fatalf("after %s a law is broken\n%s", op, e.Describe(id))
			}
		}
		if err := m.end(e, id); err != nil {
			r.Fatalf("end: %v\n%s", err, e.Describe(id))
		}
		e.Check()
		if t.Failed() {
			r.Fatalf("at the end a law is broken\n%s", e.Describe(id))
		}
	})
	t.Logf("%d sequences", run)
}

func (m *reference) operate(e *testenv.Env, id, op string) error {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Deadline)
	defer cancel()
	post := func(what string) error {
		return e.API.Do(ctx, http.MethodPost, "/v1/sessions/"+id+"/"+what, testenv.M{}, nil)
	}
	switch op {
	case "send":
		text := fmt.Sprint("message ", len(m.sent))
		if _, err := e.API.Send(ctx, id, fmt.Sprint(id, "-", len(m.sent)), testenv.Message(text)); err != nil {
			return err
		}
		m.sent = append(m.sent, text)
	case "interrupt":
		_, err := e.API.Send(ctx, id, "", testenv.M{"type": "user.interrupt"})
		return err
	case "answer":
		stop, rests, err := e.API.Rested(ctx, id)
		if err != nil || !rests || stop.Type != "requires_action" {
			return err
		}
		// What was asked may have been closed since: that is said with a 400.
		if err := e.Person.Answer(ctx, id, stop); err != nil && !is400(err) {
			return err
		}
	case "pause":
		if err := post("pause"); err != nil && !is400(err) {
			return err
		}
		m.paused = true
	case "resume":
		if err := post("resume"); err != nil && !is400(err) {
			return err
		}
		m.paused = false
	case "kill":
		e.Crash()
		e.Restart()
	case "restart":
		e.Stop()
		e.Restart()
	}
	return nil
}

func is400(err error) bool {
	var api *testenv.APIError
	return errors.As(err, &api) && api.Status == http.StatusBadRequest
}

// end resumes and answers until the session rests, then compares: every
// accepted message is in the log once, in the order in which it was accepted.
func (m *reference) end(e *testenv.Env, id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Deadline)
	defer cancel()
	if m.paused {
		if err := m.operate(e, id, "resume"); err != nil {
			return err
		}
	}
	for {
		if _, err := e.Person.Finish(ctx, id); err != nil {
			return err
		}
		events, err := e.API.Events(ctx, id)
		if err != nil {
			return err
		}
		var got []string
		queued := 0
		for _, ev := range events {
			if ev.Type != "user.message" {
				continue
			}
			if ev.ProcessedAt == nil {
				queued++
			}
			got = append(got, textOf(ev))
		}
		s, err := e.API.Session(ctx, id)
		if err != nil {
			return err
		}
		if queued > 0 || s.Status != "idle" {
			if ctx.Err() != nil {
				return fmt.Errorf("%d messages stay queued in status %s", queued, s.Status)
			}
			continue
		}
		if !slices.Equal(got, m.sent) {
			return fmt.Errorf("the log holds the messages %q, accepted were %q", got, m.sent)
		}
		return nil
	}
}
