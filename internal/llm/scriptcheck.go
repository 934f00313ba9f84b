package llm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// scriptRequest is a Messages API request as the scripted server reads it.
type scriptRequest struct {
	Model        string            `json:"model"`
	MaxTokens    int               `json:"max_tokens"`
	Stream       bool              `json:"stream"`
	System       json.RawMessage   `json:"system"`
	Messages     []scriptMessage   `json:"messages"`
	Tools        []json.RawMessage `json:"tools"`
	OutputConfig *struct {
		Effort string `json:"effort"`
	} `json:"output_config"`
	Speed string `json:"speed"`

	system string
	tools  map[string]bool
}

type scriptMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
	blocks  []scriptBlock
}

type scriptBlock struct {
	Type      string          `json:"type"`
	Text      string          `json:"text"`
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Input     json.RawMessage `json:"input"`
	ToolUseID string          `json:"tool_use_id"`
	Content   json.RawMessage `json:"content"`
	Thinking  string          `json:"thinking"`
	Signature string          `json:"signature"`
	Data      string          `json:"data"`
	Source    json.RawMessage `json:"source"`
	Title     string          `json:"title"`

	results string // text of a tool result's content
}

// Fields that the API takes; anything else is refused there, and here.
var (
	topFields   = fieldSet("model max_tokens messages system tools tool_choice thinking output_config speed inference_geo service_tier metadata stop_sequences container cache_control diagnostics stream temperature top_p top_k")
	blockFields = map[string]map[string]bool{
		"text":              fieldSet("type text cache_control citations"),
		"image":             fieldSet("type source cache_control"),
		"document":          fieldSet("type source cache_control title context citations"),
		"search_result":     fieldSet("type source title content citations cache_control"),
		"tool_use":          fieldSet("type id name input cache_control caller"),
		"tool_result":       fieldSet("type tool_use_id content is_error cache_control"),
		"thinking":          fieldSet("type thinking signature"),
		"redacted_thinking": fieldSet("type data"),
	}
	toolUseID = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)
)

func fieldSet(names string) map[string]bool {
	set := map[string]bool{}
	for _, n := range strings.Fields(names) {
		set[n] = true
	}
	return set
}

// readScriptRequest reads and checks a request as the real API would; the
// error is the message of its 400.
func readScriptRequest(body []byte) (*scriptRequest, error) {
	if !utf8.Valid(body) || loneSurrogate(body) {
		return nil, fmt.Errorf("request body: is not valid Unicode")
	}
	fields, err := readFields(body)
	if err != nil {
		return nil, fmt.Errorf("request body: %v", err)
	}
	for _, f := range fields {
		if !topFields[f.name] {
			return nil, fmt.Errorf("%s: unknown field", clip(f.name, 80))
		}
	}
	var r scriptRequest
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, fmt.Errorf("request body: %v", err)
	}
	switch {
	case r.Model == "":
		return nil, fmt.Errorf("model: is missing")
	case r.MaxTokens < 1:
		return nil, fmt.Errorf("max_tokens: must be at least 1")
	case len(r.Messages) == 0:
		return nil, fmt.Errorf("messages: is empty")
	case r.OutputConfig != nil && !fieldSet("low medium high xhigh max")[r.OutputConfig.Effort] && r.OutputConfig.Effort != "":
		return nil, fmt.Errorf("output_config.effort: is none of low, medium, high, xhigh, max")
	case r.Speed != "" && r.Speed != "standard" && r.Speed != "fast":
		return nil, fmt.Errorf("speed: is neither standard nor fast")
	}
	if n := bytes.Count(body, []byte(`"cache_control":{`)); n > 4 {
		return nil, fmt.Errorf("cache_control: on %d blocks, at most 4 are taken", n)
	}
	system, err := readBlocks(r.System, "system")
	if err != nil {
		return nil, err
	}
	for _, b := range system {
		r.system += b.Text
	}
	if err := r.checkTools(); err != nil {
		return nil, err
	}
	return &r, r.checkMessages()
}

func (r *scriptRequest) checkTools() error {
	r.tools = map[string]bool{}
	for i, raw := range r.Tools {
		var t struct {
			Type, Name  string
			InputSchema *struct{ Type string } `json:"input_schema"`
		}
		if err := json.Unmarshal(raw, &t); err != nil {
			return fmt.Errorf("tools.%d: %v", i, err)
		}
		switch {
		case !toolName().MatchString(t.Name):
			return fmt.Errorf("tools.%d.name: takes 1 to 128 letters, digits, underscores and hyphens", i)
		case r.tools[t.Name]:
			return fmt.Errorf("tools: two have one name")
		case (t.Type == "" || t.Type == "custom") && (t.InputSchema == nil || t.InputSchema.Type != "object"):
			return fmt.Errorf("tools.%d.input_schema: is not of type object", i)
		}
		r.tools[t.Name] = true
	}
	return nil
}

func (r *scriptRequest) checkMessages() error {
	var open []string // tool uses of the message before that wait for results
	used := map[string]bool{}
	last := ""
	for i := range r.Messages {
		m := &r.Messages[i]
		at := fmt.Sprintf("messages.%d", i)
		var err error
		if m.blocks, err = readBlocks(m.Content, at+".content"); err != nil {
			return err
		}
		switch {
		case m.Role != "user" && m.Role != "assistant" && m.Role != "system":
			return fmt.Errorf("%s.role: is none of user, assistant, system", at)
		case i == 0 && m.Role != "user":
			return fmt.Errorf("messages.0.role: is not user")
		case m.Role == last:
			return fmt.Errorf("messages: role %q stands twice in a row", m.Role)
		case len(m.blocks) == 0:
			return fmt.Errorf("%s.content: is empty", at)
		}
		last = m.Role
		if err := checkResults(at, m, open); err != nil {
			return err
		}
		if open, err = checkUses(at, m, used); err != nil {
			return err
		}
	}
	if last == "assistant" {
		return fmt.Errorf("messages: end with an assistant turn, which this model does not continue")
	}
	return nil
}

// checkResults checks that m answers exactly the tool uses in open, results first.
func checkResults(at string, m *scriptMessage, open []string) error {
	waiting := map[string]int{}
	for _, id := range open {
		waiting[id] = 0
	}
	other := false
	for i, b := range m.blocks {
		if b.Type != "tool_result" {
			other = true
			continue
		}
		n, known := waiting[b.ToolUseID]
		switch {
		case m.Role != "user":
			return fmt.Errorf("%s: a tool_result outside of a user message", at)
		case !known:
			return fmt.Errorf("%s.content.%d: tool_result for %s, which the message before did not call", at, i, clip(b.ToolUseID, 80))
		case n > 0:
			return fmt.Errorf("%s.content.%d: a second tool_result for %s", at, i, b.ToolUseID)
		case other:
			return fmt.Errorf("%s.content.%d: a tool_result behind other content", at, i)
		}
		waiting[b.ToolUseID]++
	}
	var missing []string
	for _, id := range open {
		if waiting[id] == 0 {
			missing = append(missing, id)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s: no tool_result for %s, which the message before called", at, strings.Join(missing, ", "))
	}
	return nil
}

// checkUses checks the assistant's blocks and returns the ids of its tool uses.
func checkUses(at string, m *scriptMessage, used map[string]bool) (open []string, err error) {
	for i, b := range m.blocks {
		where := fmt.Sprintf("%s.content.%d", at, i)
		switch b.Type {
		case "tool_use":
			switch {
			case m.Role != "assistant":
				return nil, fmt.Errorf("%s: a tool_use outside of an assistant message", where)
			case !toolUseID.MatchString(b.ID):
				return nil, fmt.Errorf("%s.id: takes letters, digits, underscores and hyphens", where)
			case used[b.ID]:
				return nil, fmt.Errorf("messages: two tool_use blocks have one id")
			case b.Name == "":
				return nil, fmt.Errorf("%s.name: is missing", where)
			case !isObject(b.Input):
				return nil, fmt.Errorf("%s.input: is not an object", where)
			}
			used[b.ID] = true
			open = append(open, b.ID)
		case "thinking":
			if m.Role != "assistant" || b.Signature != sign(b.Thinking) {
				return nil, fmt.Errorf("%s: the signature does not fit its thinking", where)
			}
		case "redacted_thinking":
			if text, sig, _ := strings.Cut(b.Data, "."); m.Role != "assistant" || sig != sign(text) {
				return nil, fmt.Errorf("%s: data was not sealed here", where)
			}
		}
	}
	return open, nil
}

// readBlocks reads content: a string, or a list of blocks; absent is none.
func readBlocks(raw json.RawMessage, at string) ([]scriptBlock, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 {
		return nil, nil
	}
	if raw[0] == '"' {
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return nil, fmt.Errorf("%s: %v", at, err)
		}
		if s == "" {
			return nil, nil
		}
		return []scriptBlock{{Type: "text", Text: s}}, nil
	}
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("%s: is neither text nor a list of blocks", at)
	}
	blocks := make([]scriptBlock, len(list))
	for i, raw := range list {
		if err := readBlock(raw, &blocks[i], fmt.Sprintf("%s.%d", at, i)); err != nil {
			return nil, err
		}
	}
	return blocks, nil
}

func readBlock(raw json.RawMessage, b *scriptBlock, at string) error {
	fields, err := readFields(raw)
	if err != nil {
		return fmt.Errorf("%s: is not an object", at)
	}
	var head struct{ Type string }
	if err := json.Unmarshal(raw, &head); err != nil {
		return fmt.Errorf("%s: %v", at, err)
	}
	allowed, known := blockFields[head.Type]
	if !known {
		return fmt.Errorf("%s: type %q is not known", at, clip(head.Type, 80))
	}
	for _, f := range fields {
		if !allowed[f.name] {
			return fmt.Errorf("%s.%s.%s: unknown field", at, head.Type, clip(f.name, 80))
		}
	}
	if head.Type == "search_result" {
		b.Type = head.Type
		return nil
	}
	if err := json.Unmarshal(raw, b); err != nil {
		return fmt.Errorf("%s: %v", at, err)
	}
	switch b.Type {
	case "text":
		switch {
		case b.Text == "":
			return fmt.Errorf("%s: text is empty", at)
		case strings.TrimSpace(b.Text) == "":
			return fmt.Errorf("%s: text is blank", at)
		}
	case "image", "document":
		if !isObject(b.Source) {
			return fmt.Errorf("%s.%s.source: is missing", at, b.Type)
		}
		if n := utf8.RuneCountInString(b.Title); n > 500 {
			return fmt.Errorf("%s.%s.title: has %d characters, more than 500", at, b.Type, n)
		}
	case "tool_result":
		inner, err := readBlocks(b.Content, at+".tool_result.content")
		if err != nil {
			return err
		}
		for _, c := range inner {
			if c.Type == "tool_use" || c.Type == "tool_result" || c.Type == "thinking" {
				return fmt.Errorf("%s.tool_result.content: a %s block is not allowed here", at, c.Type)
			}
			b.results += c.Text
		}
	}
	return nil
}

// loneSurrogate reports a \uD8xx escape without its other half: decoders
// replace it silently, the API refuses it.
func loneSurrogate(body []byte) bool {
	high := -1 // where the second half must begin
	for i := 0; i < len(body); i++ {
		if body[i] != '\\' || i+1 >= len(body) {
			if high == i {
				return true
			}
			continue
		}
		if body[i+1] != 'u' || i+6 > len(body) {
			if high == i {
				return true
			}
			i++
			continue
		}
		n, err := strconv.ParseUint(string(body[i+2:i+6]), 16, 32)
		low := err == nil && n >= 0xDC00 && n <= 0xDFFF
		if (high == i) != low {
			return true
		}
		high = -1
		if n >= 0xD800 && n <= 0xDBFF {
			high = i + 6
		}
		i += 5
	}
	return false
}

func (r *scriptRequest) firstUser() string {
	var b strings.Builder
	for _, blk := range r.Messages[0].blocks {
		b.WriteString(blk.Text)
	}
	return b.String()
}

// lastUser is the text and the tool results of the last user message.
func (r *scriptRequest) lastUser() (texts, results string) {
	for i := len(r.Messages) - 1; i >= 0; i-- {
		if r.Messages[i].Role != "user" {
			continue
		}
		for _, b := range r.Messages[i].blocks {
			texts += b.Text
			results += b.results
		}
		break
	}
	return texts, results
}

// resultText is the text of the result of a tool call.
func (r *scriptRequest) resultText(id string) (string, error) {
	for _, m := range r.Messages {
		for _, b := range m.blocks {
			if b.Type == "tool_result" && b.ToolUseID == id {
				return b.results, nil
			}
		}
	}
	return "", fmt.Errorf("tool call %s has no result", id)
}
