package session

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/planaria/planaria/internal/gateway"
)

// Purposes of a model request.
const (
	purposeTurn       = "turn"
	purposeCompaction = "compaction"
)

// cutNote follows an answer that ended at its token limit, so that the
// conversation never ends with an assistant turn (reference section 22.4).
const cutNote = "Your last answer was cut off at its length limit. Go on from where it ended."

// modelArguments are the arguments of a model call's effect: enough to tell
// requests apart, not the request, which the log yields again.
type modelArguments struct {
	Purpose  string `json:"purpose"`
	Model    string `json:"model"`
	Through  int64  `json:"through_seq"` // the context goes up to here
	Messages int    `json:"messages"`
}

func isModel(tool string) bool { return strings.HasPrefix(tool, "model:") }

// contentRefused is why a model request failed whose context held content that
// not every model takes, or not in every size: images, documents, what we do
// not know, system turns.
const contentRefused = "content_refused"

// leftOut stands for content that the model API refused.
const leftOut = "(content of type %s was left out here: the model API refused it)"

// plain tells whether the context holds such content and, with change, leaves
// it out for good: a tool that answers with a broken image must not brick the
// session, nor must too many of them (trials, section A).
func (st *state) plain(change bool) (found bool) {
	var blocks func(in []gateway.Block) []gateway.Block
	blocks = func(in []gateway.Block) []gateway.Block {
		out := make([]gateway.Block, len(in))
		for i, b := range in {
			switch b.Type {
			case "text":
			case "tool_result":
				b.Content = blocks(b.Content)
			default:
				found = true
				b = gateway.Block{Type: "text", Text: fmt.Sprintf(leftOut, b.Type)}
			}
			out[i] = b
		}
		return out
	}
	messages := make([]gateway.Message, len(st.messages))
	for i, m := range st.messages {
		if m.Role != "assistant" {
			m.Content = blocks(m.Content)
		}
		if m.Role == "system" {
			found, m.Role = true, "user"
		}
		messages[i] = m
	}
	if change && found {
		st.messages = messages
	}
	return found
}

// blocksOf reads wire content blocks; wire and model form are the same for
// what clients and tools may send (reference section 9.4). A bare string is one text.
func blocksOf(raw json.RawMessage) []gateway.Block {
	if len(raw) == 0 {
		return nil
	}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		if s == "" {
			return nil
		}
		return []gateway.Block{{Type: "text", Text: s}}
	}
	var parts []json.RawMessage
	if json.Unmarshal(raw, &parts) != nil {
		return nil
	}
	var out []gateway.Block
	for _, p := range parts {
		var b gateway.Block
		if json.Unmarshal(p, &b) != nil {
			continue
		}
		switch b.Type {
		case "text":
			if b.Text == "" {
				continue
			}
			b = gateway.Block{Type: "text", Text: strings.ToValidUTF8(b.Text, "\uFFFD")}
		case "image": // of which model APIs take nothing else
			b = gateway.Block{Type: b.Type, Source: b.Source}
		case "document":
			b = gateway.Block{Type: b.Type, Source: b.Source, Title: b.Title, Context: b.Context}
		default:
			b = gateway.Block{Type: b.Type, Raw: p}
		}
		out = append(out, b)
	}
	return out
}

// noOutput stands where a tool gave nothing: an empty result is refused.
const noOutput = "(no output)"

func nonEmpty(b []gateway.Block) []gateway.Block {
	if len(b) == 0 {
		return []gateway.Block{{Type: "text", Text: noOutput}}
	}
	return b
}

// request builds the next model request from the state alone.
func (st *state) request() gateway.ModelRequest {
	r := gateway.ModelRequest{
		Model: st.agent.Model.ID, Effort: st.agent.Model.Effort.Type,
		Speed: st.agent.Model.Speed, InferenceGeo: st.agent.Model.InferenceGeo,
		Messages: paired(st.messages),
	}
	if st.agent.System != nil {
		r.System = *st.agent.System
	}
	for _, o := range st.agent.offers(st.tools) {
		r.Tools = append(r.Tools, o.model)
	}
	return r
}

// unknownResult stands in for a result that the log does not hold. It never
// says "failed": nobody knows (trials, section A).
const unknownResult = "The outcome of this call is unknown. Do not assume that it failed, and do not repeat it without checking."

// paired returns messages in which every tool use has exactly one result right
// behind it. What the log yields is paired already; a hole can only come from
// a log that another version wrote, and is filled with the honest unknown
// rather than left to brick the session (trial H1).
func paired(in []gateway.Message) []gateway.Message {
	out := make([]gateway.Message, 0, len(in)+1)
	var owed []string // tool uses of the assistant message just added
	flush := func() {
		if len(owed) == 0 {
			return
		}
		m := gateway.Message{Role: "user"}
		for _, id := range owed {
			m.Content = append(m.Content, unknownBlock(id))
		}
		out, owed = append(out, m), nil
	}
	for _, m := range in {
		if m.Role == "assistant" {
			flush()
			out = append(out, m)
			for _, b := range m.Content {
				if b.Type == "tool_use" {
					owed = append(owed, b.ID)
				}
			}
			continue
		}
		if m.Role != "user" {
			flush()
			out = append(out, m)
			continue
		}
		var results, rest []gateway.Block
		for _, b := range m.Content {
			switch i := index(owed, b.ToolUseID); {
			case b.Type != "tool_result":
				rest = append(rest, b)
			case i >= 0:
				owed = append(owed[:i:i], owed[i+1:]...)
				results = append(results, b)
			} // an orphan result is dropped
		}
		for _, id := range owed {
			results = append(results, unknownBlock(id))
		}
		owed = nil
		if all := append(results, rest...); len(all) > 0 {
			out = append(out, gateway.Message{Role: m.Role, Content: all})
		}
	}
	flush()
	return out
}

func unknownBlock(id string) gateway.Block {
	return gateway.Block{Type: "tool_result", ToolUseID: id, IsError: true,
		Content: []gateway.Block{{Type: "text", Text: unknownResult}}}
}

func index(list []string, s string) int {
	for i, v := range list {
		if v == s {
			return i
		}
	}
	return -1
}

// clip cuts s to at most n bytes at a rune boundary.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
