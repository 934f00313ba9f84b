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

func TestSmoke(t *testing.T) {
	e := testenv.New(t, testenv.Options{})
	id := e.Begin("smoke", llm.PlayScript{Steps: []llm.Step{calls(use("look", "a")), calls(use("put", "a")), calls(use("buy", "a")), calls(use("pay", "a")), done}})
	stop := e.Finish(id)
	if stop.Type != "end_turn" {
		t.Errorf("rests with %v", stop)
	}
	e.Check()
	t.Log(e.Describe(id))
	t.Log(e.Points())
	e.Crash()
	e.Restart()
	e.Check()
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
