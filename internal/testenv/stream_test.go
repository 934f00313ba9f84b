package testenv_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/testenv"
)

// seen is what a client has collected: events by id, in the order in which
// their processed form first came.
type seen struct {
	order []string
	known map[string]bool
}

func (s *seen) add(t *testing.T, e testenv.Event, strict bool) {
	t.Helper()
	if e.ProcessedAt == nil {
		return // queued: it comes again under the same id
	}
	if s.known[e.ID] {
		if strict {
			t.Errorf("event %s (%s) came twice", e.ID, e.Type)
		}
		return
	}
	if s.known == nil {
		s.known = map[string]bool{}
	}
	s.known[e.ID] = true
	s.order = append(s.order, e.ID)
}

// TestS1Streams cuts event streams at random frames while sessions run, come
// to rest and lose their server, and reconnects by both ways: by cursor, and by
// the documented recipe (open the stream, list, skip what is known). What each
// client collected is the log: no gap, no other order, nothing twice (trial S1,
// law L10).
func TestS1Streams(t *testing.T) {
	const seed = 7
	for _, engine := range []string{testenv.SQLite, testenv.PostgreSQL} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			e := testenv.New(t, testenv.Options{Engine: engine})
			script := llm.PlayScript{Repeat: true, Steps: []llm.Step{calls(use("look", "s")), calls(use("look", "t"), use("look", "u")), done}}
			id := e.Begin("streams", script)
			ctx, cancel := context.WithTimeout(context.Background(), 2*testenv.Deadline)
			defer cancel()
			over, stop := context.WithCancel(ctx) // no more turns are coming

			cursor, recipe := new(seen), new(seen)
			ended := make(chan error, 2)
			go func() { ended <- byCursor(ctx, t, e, id, cursor, over, rand.New(rand.NewPCG(seed, 1))) }()
			go func() { ended <- byRecipe(ctx, t, e, id, recipe, over, rand.New(rand.NewPCG(seed, 2))) }()
			for turn := range 6 {
				e.Finish(id)
				if turn == 2 || turn == 4 { // and a dead server on the way
					e.Crash()
					e.Restart()
				}
				if _, err := e.API.Send(ctx, id, fmt.Sprint("turn-", turn), testenv.Message(fmt.Sprint("turn ", turn))); err != nil {
					t.Fatal(err)
				}
			}
			e.Finish(id)
			stop()
			for range 2 {
				if err := <-ended; err != nil {
					t.Fatal(err)
				}
			}
			var want []string
			events, err := e.API.Events(ctx, id)
			if err != nil {
				t.Fatal(err)
			}
			for _, ev := range events {
				want = append(want, ev.ID)
			}
			if !slices.Equal(cursor.order, want) {
				t.Errorf("by cursor: %d events, the log has %d, or their order differs", len(cursor.order), len(want))
			}
			if slices.Sort(recipe.order); !slices.Equal(recipe.order, slices.Sorted(slices.Values(want))) {
				t.Errorf("by the recipe: %d events, the log has %d", len(recipe.order), len(want))
			}
			e.Check()
		})
	}
}

// retry waits a little before the next connection to a dead server.
func retry(ctx context.Context) error {
	timer := time.NewTimer(10 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// byCursor reconnects with Last-Event-ID: the cursor of the last frame that
// came whole.
func byCursor(ctx context.Context, t *testing.T, e *testenv.Env, id string, got *seen, over context.Context, rnd *rand.Rand) error {
	last := "0"
	for {
		s, err := e.API.Stream(ctx, id, last)
		if err != nil {
			if err := retry(ctx); err != nil {
				return err
			}
			continue
		}
		stop := context.AfterFunc(over, s.Close)
		for n := 1 + rnd.IntN(9); n > 0; n-- {
			f, err := s.Next()
			if err != nil {
				break
			}
			if f.Name == "stream.reset" {
				t.Errorf("the cursor %s is not known", last)
			}
			if f.ID != "" {
				last = f.ID
				got.add(t, f.Event, true)
			}
		}
		stop()
		s.Close()
		if over.Err() != nil {
			return collect(ctx, t, e, id, last, got)
		}
	}
}

// collect reads what is left behind a cursor.
func collect(ctx context.Context, t *testing.T, e *testenv.Env, id, last string, got *seen) error {
	events, err := e.API.Events(ctx, id)
	if err != nil {
		return err
	}
	s, err := e.API.Stream(ctx, id, last)
	if err != nil {
		return err
	}
	defer s.Close()
	for len(got.order) < len(events) {
		f, err := s.Next()
		if err != nil {
			return err
		}
		if f.ID != "" {
			got.add(t, f.Event, true)
		}
	}
	return nil
}

// byRecipe opens the stream, then lists, and skips what it knows.
func byRecipe(ctx context.Context, t *testing.T, e *testenv.Env, id string, got *seen, over context.Context, rnd *rand.Rand) error {
	for {
		s, err := e.API.Stream(ctx, id, "")
		if err == nil {
			var list []testenv.Event
			if list, err = e.API.Events(ctx, id); err == nil {
				for _, ev := range list {
					got.add(t, ev, false)
				}
				if over.Err() != nil {
					s.Close()
					return nil
				}
				stop := context.AfterFunc(over, s.Close)
				for n := 1 + rnd.IntN(9); n > 0; n-- {
					f, err := s.Next()
					if err != nil {
						break
					}
					got.add(t, f.Event, false)
				}
				stop()
			}
			s.Close()
		}
		if err != nil {
			if err := retry(ctx); err != nil {
				return err
			}
		}
	}
}

// TestS1Reset: a cursor that the log does not have is said so, and the stream
// then brings everything.
func TestS1Reset(t *testing.T) {
	e := testenv.New(t, testenv.Options{})
	id := e.Begin("reset", llm.PlayScript{Steps: []llm.Step{done}})
	e.Finish(id)
	events, err := e.API.Events(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	for _, cursor := range []string{"999999", "sevt_00000000000000000000000000", "not a cursor"} {
		s, err := e.API.Stream(t.Context(), id, cursor)
		if err != nil {
			t.Fatalf("cursor %q: %v", cursor, err)
		}
		f, err := s.Next()
		if err != nil || f.Name != "stream.reset" {
			t.Errorf("cursor %q: the first frame is %s, %v", cursor, f.Name, err)
		}
		s.Close()
	}
	// An event id is a cursor too.
	s, err := e.API.Stream(t.Context(), id, events[2].ID)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if f, err := s.Next(); err != nil || f.Event.ID != events[3].ID {
		t.Errorf("behind %s came %s (%v), want %s", events[2].ID, f.Event.ID, err, events[3].ID)
	}
}
