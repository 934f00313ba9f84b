package testenv_test

import (
	"encoding/json"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/testenv"
)

// use is a call of a tool of the world.
func use(tool, id string) llm.ToolCall {
	return llm.ToolCall{Name: "mcp__w__" + tool, Input: map[string]any{"id": id}}
}

func calls(c ...llm.ToolCall) llm.Step { return llm.Step{Text: "I do it.", Tools: c} }

var done = llm.Step{Text: "Done."}

// TestOneOfEach is one turn with one call of each class, through a crash at rest.
func TestOneOfEach(t *testing.T) {
	for _, engine := range []string{testenv.SQLite, testenv.PostgreSQL} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			e := testenv.New(t, testenv.Options{Engine: engine})
			id := e.Begin("each", llm.PlayScript{Steps: []llm.Step{
				calls(use("look", "a")), calls(use("put", "a")), calls(use("buy", "a")), calls(use("swap", "a")), calls(use("pay", "a")), done}})
			if stop := e.Finish(id); stop.Type != "end_turn" {
				t.Errorf("rests with %v", stop)
			}
			e.Check()
			e.Crash()
			e.Restart()
			e.Check()
			if n := e.World.Unauthorized(); n > 0 {
				t.Errorf("%d requests came without the credential", n)
			}
		})
	}
}

// textOf is the text of a message event.
func textOf(ev testenv.Event) string {
	var b struct {
		Content []struct {
			Text string `json:"text"`
		} `json:"content"`
	}
	if err := json.Unmarshal(ev.Raw, &b); err != nil || len(b.Content) == 0 {
		return ""
	}
	return b.Content[0].Text
}
