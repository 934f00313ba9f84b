package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/planaria/planaria/api"
)

// printEvent prints one event: a JSON line for machines, one line for people.
func (a *app) printEvent(e api.Event) error {
	if a.json {
		return a.printJSON(e)
	}
	at := "queued"
	if e.ProcessedAt != nil {
		at = e.ProcessedAt.UTC().Format("15:04:05.000")
	}
	_, err := fmt.Fprintf(a.stdout, "%-12s  %-30s  %s  %s\n", at, e.ID, e.Type(), oneLine(describe(e)))
	return err
}

// describe says in one line what an event says.
func describe(e api.Event) string {
	switch b := e.Body.(type) {
	case *api.UserMessage:
		return quote(b.Content)
	case *api.SystemMessage:
		return quote(b.Content)
	case *api.AgentMessage:
		return quote(b.Content)
	case *api.AgentMCPToolUse:
		return fmt.Sprintf("%s %s.%s %s", b.EvaluatedPermission, b.MCPServerName, b.Name, cut(string(b.Input), 200))
	case *api.AgentToolUse:
		return fmt.Sprintf("%s %s %s", b.EvaluatedPermission, b.Name, cut(string(b.Input), 200))
	case *api.AgentCustomToolUse:
		return fmt.Sprintf("%s %s", b.Name, cut(string(b.Input), 200))
	case *api.AgentMCPToolResult:
		return resultText(b.MCPToolUseID, b.IsError, b.Content)
	case *api.AgentToolResult:
		return resultText(b.ToolUseID, b.IsError, b.Content)
	case *api.UserCustomToolResult:
		return resultText(b.CustomToolUseID, b.IsError != nil && *b.IsError, b.Content)
	case *api.UserToolResult:
		return resultText(b.ToolUseID, b.IsError != nil && *b.IsError, b.Content)
	case *api.UserToolConfirmation:
		return fmt.Sprintf("%s %s %s", b.Result, b.ToolUseID, deref(b.DenyMessage))
	case *api.SessionStatusIdle:
		return stopWords(b.StopReason)
	case *api.ThreadStatusIdle:
		return stopWords(b.StopReason)
	case *api.SessionError:
		return fmt.Sprintf("%s (%s): %s", b.Error.Type, b.Error.RetryStatus.Type, b.Error.Message)
	case *api.SessionUsage:
		return fmt.Sprintf("%d tokens in, %d out %s", b.Usage.InputTokens, b.Usage.OutputTokens, money(b.Usage.ListCost))
	case *api.ModelRequestEnd:
		if b.IsError {
			return "failed"
		}
		return fmt.Sprintf("%d tokens in, %d out", b.ModelUsage.InputTokens, b.ModelUsage.OutputTokens)
	case *api.SessionPaused:
		return b.Reason
	case *api.SessionResumed:
		return b.Reason
	}
	return ""
}

func resultText(id string, isError bool, content []api.Block) string {
	state := "ok"
	if isError {
		state = "error"
	}
	return fmt.Sprintf("%s %s %s", id, state, quote(content))
}

func stopWords(s api.StopReason) string {
	if s.Type == api.StopRequiresAction {
		return s.Type + " " + strings.Join(s.EventIDs, " ")
	}
	return s.Type
}

// quote is the text of blocks, shortened to a line.
func quote(blocks []api.Block) string { return cut(oneLine(blockText(blocks)), 300) }

// blockText is the text of blocks; what is no text is named.
func blockText(blocks []api.Block) string {
	var parts []string
	for _, b := range blocks {
		switch {
		case b.Type == api.BlockText:
			parts = append(parts, b.Text)
		case b.Type == api.BlockSearchResult && b.Title != nil:
			parts = append(parts, "["+b.Type+": "+*b.Title+"]")
		default:
			parts = append(parts, "["+b.Type+"]")
		}
	}
	return strings.Join(parts, "\n")
}

// effectWords says in words where an effect stands.
func effectWords(e api.Effect) string {
	switch e.State {
	case api.EffectCompleted:
		switch {
		case e.Outcome != nil && *e.Outcome == "refused":
			return "refused: nothing happened"
		case e.Completion != nil && e.Completion.IsError:
			return "completed with an error of the tool"
		}
		return "completed"
	case api.EffectInDoubt:
		return "IN DOUBT: it may or may not have happened"
	case api.EffectVoid:
		return "void: it did not happen"
	case api.EffectAwaitingApproval:
		return "awaits approval"
	}
	return string(e.State)
}

// isModel reports whether an effect is a request to a model.
func isModel(e api.Effect) bool { return strings.HasPrefix(e.Tool, "model:") }

// target names what an effect acts on, for people.
func target(e api.Effect) string { return e.Tool }

// effectFields are the lines that show one effect.
func effectFields(e api.Effect) [][2]string {
	f := [][2]string{
		{"effect", e.ID}, {"tool", target(e)}, {"connector", deref(e.Connector)}, {"class", string(e.Class)}, {"state", effectWords(e)},
		{"session", e.SessionID}, {"event", e.EventID}, {"seq", fmt.Sprint(e.Seq)},
		{"arguments", indent(e.Arguments)}, {"digest", e.Digest}, {"key", deref(e.IdempotencyKey)},
	}
	for _, at := range e.Attempts {
		f = append(f, [2]string{"attempt", fmt.Sprintf("seq %d, fence %d, %s", at.Seq, at.Fence, shortTime(at.At.Time))})
	}
	for _, ev := range e.Evidence {
		f = append(f, [2]string{"evidence", fmt.Sprintf("seq %d, %s says: %s, %s", ev.Seq, ev.Kind, ev.Says, shortTime(ev.At.Time))})
	}
	if ap := e.Approval; ap != nil {
		f = append(f, [2]string{"approval", fmt.Sprintf("%s by %s, %s", ap.Result, ap.EventID, shortTime(ap.At.Time))})
	}
	if c := e.Completion; c != nil {
		f = append(f, [2]string{"completed", fmt.Sprintf("seq %d, %s", c.Seq, shortTime(c.At.Time))}, [2]string{"response", indent(c.Response)})
	}
	return f
}

// indent is JSON as people read it.
func indent(raw json.RawMessage) string {
	if len(raw) == 0 || string(raw) == "null" {
		return ""
	}
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		return string(raw)
	}
	out, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return string(raw)
	}
	return string(out)
}

// wayOut says what a person can do about an effect in doubt.
func wayOut(e api.Effect) string {
	return fmt.Sprintf(`  planaria settle %[1]s probe            ask the target again
  planaria settle %[1]s happened         it did happen (say how you know with --evidence)
  planaria settle %[1]s did_not_happen   it did not
  planaria settle %[1]s tell             leave it to the agent: outcome unknown, do not repeat`, e.ID)
}
