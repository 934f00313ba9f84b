package server_test

import (
	"strings"
	"testing"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/testenv"
)

// TestSandboxShown: a session's machine is shown as it comes, a checkpoint of it
// is named once, and stands in the list.
func TestSandboxShown(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true})
	c := &api.Client{BaseURL: strings.TrimSuffix(e.API.Base, "/"), Key: e.API.Key}
	id := e.Begin("shown", llm.PlayScript{Steps: []llm.Step{
		{Tools: []llm.ToolCall{{Name: "bash", Input: map[string]any{"command": "echo x > /workspace/f"}}}}, {Text: "Done."}}})
	e.Finish(id)
	s, err := c.GetSandbox(t.Context(), id)
	if err != nil || s.State != api.SandboxRunning || s.Node == nil || s.Generation != 1 || s.Since == nil {
		t.Fatalf("sandbox = %+v, %v\n%s", s, err, e.Describe(id))
	}
	x, err := c.CreateCheckpoint(t.Context(), id, "before")
	if err != nil || x.Name == nil || *x.Name != "before" || x.Seq == 0 || x.SizeBytes == 0 {
		t.Fatalf("checkpoint = %+v, %v", x, err)
	}
	if _, err := c.CreateCheckpoint(t.Context(), id, "before"); err == nil {
		t.Error("a name was given twice")
	}
	if _, err := c.CreateCheckpoint(t.Context(), id, "12"); err == nil {
		t.Error("a number was taken for a name")
	}
	var names []string
	for p, err := range c.AllCheckpoints(t.Context(), id) {
		if err != nil {
			t.Fatal(err)
		}
		if p.Type != "checkpoint" {
			t.Errorf("checkpoint = %+v", p)
		}
		if p.Name != nil {
			names = append(names, *p.Name)
		}
	}
	if len(names) != 1 || names[0] != "before" {
		t.Errorf("named checkpoints = %v", names)
	}
	if s, err = c.GetSandbox(t.Context(), id); err != nil || len(s.Snapshots) == 0 || s.Image == nil || *s.Image == "" {
		t.Errorf("sandbox = %+v, %v", s, err)
	}
	e.Check()
}
