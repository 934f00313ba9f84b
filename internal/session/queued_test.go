package session_test

import (
	"testing"

	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// A message waits behind a question while rows that came after it were taken by
// a former owner: the next one comes to rest all the same (law L7). What it has
// to have seen is all that ever arrived, not the newest row that is left.
func TestCrashBeforeQueuedMessage(t *testing.T) {
	e := newEnv(t, nil, nil, calls(client), done, done)
	id := e.begin()
	e.rests(id, 1)
	e.send(id, message("and this"))
	e.asleep(id)
	if _, err := e.manager.Pause(t.Context(), ws, id, "test"); err != nil {
		t.Fatal(err)
	}
	e.rests(id, 2)
	e.asleep(id)
	dead := e.at("after_row", 1) // right behind the append that resumes
	if _, err := e.manager.Resume(t.Context(), ws, id, "test"); err != nil {
		t.Fatal(err)
	}
	<-dead
	e.restart()
	reason, asked := e.rests(id, 3)
	if reason != "requires_action" || len(asked) != 1 {
		t.Fatalf("rests with %s %v\n%s", reason, asked, e.tell(id))
	}
	quiet(e, id)
	e.send(id, answer(asked[0]))
	e.until(id, "both messages are answered", ends(2))
	quiet(e, id)
}

// The same with a newer answer that was taken while another call ran.
func TestAnswerTakenBeforeQueuedMessage(t *testing.T) {
	arrived, release := make(chan struct{}, 1), make(chan struct{})
	world := testenv.NewMCPWorld(t, testenv.MCPTool{Name: "look", Class: "read"})
	world.Script("look", testenv.MCPFault{Before: true, Kind: "hang", Arrived: arrived, Release: release})
	second := client
	second.Input = map[string]any{"id": "2"}
	e := newEnv(t, world, map[string]string{"look": read}, calls(client, second, use("look", "1")), done, done)
	id := e.begin()
	<-arrived
	var asked []store.EventID
	for _, en := range e.until(id, "the client is asked", func(all []store.Entry) bool { return count(all, "agent.custom_tool_use") == 2 }) {
		if en.Type == "agent.custom_tool_use" {
			asked = append(asked, store.EventID(en.ID))
		}
	}
	e.send(id, message("and this"))
	e.send(id, answer(asked[0]))
	e.until(id, "the first answer is taken", func(all []store.Entry) bool { return count(all, "user.custom_tool_result") == 1 })
	close(release)
	if reason, left := e.rests(id, 1); reason != "requires_action" || len(left) != 1 || left[0] != asked[1] {
		t.Fatalf("rests with %s %v\n%s", reason, left, e.tell(id))
	}
	quiet(e, id)
	e.send(id, answer(asked[1]))
	e.until(id, "both messages are answered", ends(2))
	quiet(e, id)
}
