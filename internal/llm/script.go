package llm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"
)

// Script is a file that a scripted model plays. Which step is played follows
// from the request alone, so the server may be killed at any time:
//
//	scripts:
//	  - name: migrate
//	    model: "scripted-*"          # glob on the model; default any
//	    marker: "[migrate]"          # text in the first user message; default any
//	    rules:                       # tried first, in order; the first match is played
//	      - when: {system: "summary of the conversation"}
//	        text: "Done so far: 2 steps. [script-position: ${position}]"
//	    steps:                       # step n is played when n-1 answers were given
//	      - thinking: "A network comes first."
//	        text: "I create the network."
//	        tools:
//	          - {name: create_vpc, input: {region: eu-1}}
//	      - tools:
//	          - {name: create_db, input: {vpc: "${result.1./vpc_id}", size: 3}}
//	        chunk_delay_ms: 5
//	      - text: "Finished."
//	        fault: {status: 529, times: 1}
//
// The answers given are the assistant messages since the last
// "[script-position: N]" in a user message (N counts as given), which a scripted
// summary carries across a compaction; without one, all assistant messages.
//
// Templates in text and input: ${result.STEP./pointer} is the result of the
// first tool call of that step (from 1; ${result.STEP.CALL./pointer} of a later
// one), ${result.TOOL./pointer} the newest result of that tool; without pointer
// the whole text. ${position} is the number of answers given, ${user} the last
// text of the user. A string that is one template keeps the type of its value.
type Script struct {
	// Key, if set, must be sent by callers as their credential.
	Key     string       `yaml:"key"`
	Scripts []PlayScript `yaml:"scripts"`
}

// PlayScript is one named script. The first that matches a request plays it.
type PlayScript struct {
	Name   string `yaml:"name"`
	Model  string `yaml:"model"`
	Marker string `yaml:"marker"`
	Rules  []Step `yaml:"rules"`
	Steps  []Step `yaml:"steps"`
	// Repeat begins again with step 1 after the last step. Without it, a request
	// beyond the last step is a 400.
	Repeat bool `yaml:"repeat"`
}

// When is a condition; every field that is set must hold. Texts match as substrings.
type When struct {
	System   string `yaml:"system"`
	User     string `yaml:"user"`   // the text of the last user message
	Result   string `yaml:"result"` // a tool result of the last user message
	Model    string `yaml:"model"`  // glob
	Position *int   `yaml:"position"`
}

// Step is one answer of the model.
type Step struct {
	When     *When      `yaml:"when"`
	Thinking string     `yaml:"thinking"`
	Redacted string     `yaml:"redacted_thinking"`
	Text     string     `yaml:"text"`
	Tools    []ToolCall `yaml:"tools"`
	// Stop defaults to tool_use with tools, else end_turn.
	Stop        string         `yaml:"stop"`
	StopDetails map[string]any `yaml:"stop_details"`
	Usage       *ScriptUsage   `yaml:"usage"` // default: lengths of request and answer, divided by four
	// DelayMS passes before the first byte, ChunkDelayMS between two events.
	DelayMS      int    `yaml:"delay_ms"`
	ChunkDelayMS int    `yaml:"chunk_delay_ms"`
	Chunk        int    `yaml:"chunk"` // characters per delta; default 24
	Fault        *Fault `yaml:"fault"`
}

// ToolCall is a tool_use block.
type ToolCall struct {
	Name  string         `yaml:"name"`
	Input map[string]any `yaml:"input"`
	// InputJSON is sent instead of Input, valid or not (streaming only if not).
	InputJSON string `yaml:"input_json"`
	// Unoffered allows a tool that the request does not offer.
	Unoffered bool `yaml:"unoffered"`
}

// ScriptUsage is the usage that an answer reports.
type ScriptUsage struct {
	Input           int64 `yaml:"input"`
	Output          int64 `yaml:"output"`
	CacheRead       int64 `yaml:"cache_read"`
	CacheCreation5m int64 `yaml:"cache_creation_5m"`
	CacheCreation1h int64 `yaml:"cache_creation_1h"`
}

// Fault spoils a step. Exactly one of Status, Error, CutAfter and Hang is set.
type Fault struct {
	// Status answers with an error; Type and Message default by it.
	Status     int    `yaml:"status"`
	Type       string `yaml:"type"`
	Message    string `yaml:"message"`
	RetryAfter string `yaml:"retry_after"`
	// Error is the type of an error event sent after After bytes of the stream.
	Error string `yaml:"error"`
	After int    `yaml:"after_bytes"`
	// CutAfter drops the connection after so many bytes of the body.
	CutAfter int `yaml:"cut_after_bytes"`
	// Hang sends nothing until the caller leaves.
	Hang bool `yaml:"hang"`
	// Times is how often the fault happens before the step plays; 0 is always.
	// It is counted per request in memory: a restarted server begins anew.
	Times int `yaml:"times"`
}

// maxScriptBytes bounds a script file.
const maxScriptBytes = 8 << 20

// LoadScript reads a script file, YAML or JSON. Errors name file, field and the way out.
func LoadScript(file string) (*Script, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("load model script: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxScriptBytes+1))
	if err != nil {
		return nil, fmt.Errorf("load model script %s: %w", file, err)
	}
	if len(data) > maxScriptBytes {
		return nil, fmt.Errorf("load model script %s: it is larger than %d bytes; split it", file, maxScriptBytes)
	}
	s, err := ParseScript(data)
	if err != nil {
		return nil, fmt.Errorf("load model script %s: %w", file, err)
	}
	return s, nil
}

// ParseScript reads and validates a script.
func ParseScript(data []byte) (*Script, error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	var s Script
	if err := dec.Decode(&s); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, errors.New("scripts: the file is empty; write at least one script with steps")
		}
		return nil, fmt.Errorf("%w (known fields are described at llm.Script)", err)
	}
	if dec.Decode(new(any)) != io.EOF {
		return nil, errors.New("the file has more than one document; put all scripts into one list")
	}
	return &s, s.Validate()
}

// Validate checks a script; errors name the field.
func (s *Script) Validate() error {
	if len(s.Scripts) == 0 {
		return errors.New("scripts: is empty; write at least one script with steps")
	}
	names := map[string]bool{}
	for i, p := range s.Scripts {
		at := fmt.Sprintf("scripts[%d]", i)
		switch _, err := path.Match(p.Model, ""); {
		case p.Name == "":
			return fmt.Errorf("%s.name: is empty; give each script a name", at)
		case names[p.Name]:
			return fmt.Errorf("%s.name: %q is used twice", at, p.Name)
		case err != nil:
			return fmt.Errorf("%s.model: %q is no glob; write a name or a pattern such as scripted-*", at, p.Model)
		case len(p.Steps)+len(p.Rules) == 0:
			return fmt.Errorf("%s.steps: is empty; write at least one step", at)
		}
		names[p.Name] = true
		for j := range p.Rules {
			if p.Rules[j].When == nil || *p.Rules[j].When == (When{}) {
				return fmt.Errorf("%s.rules[%d].when: is empty; a rule without condition would hide all steps", at, j)
			}
			if err := p.Rules[j].validate(fmt.Sprintf("%s.rules[%d]", at, j)); err != nil {
				return err
			}
		}
		for j := range p.Steps {
			if p.Steps[j].When != nil {
				return fmt.Errorf("%s.steps[%d].when: steps play by position; move it to rules", at, j)
			}
			if err := p.Steps[j].validate(fmt.Sprintf("%s.steps[%d]", at, j)); err != nil {
				return err
			}
		}
	}
	return nil
}

// maxDelayMS bounds the delays of a script: ten minutes.
const maxDelayMS = 600_000

func (st *Step) validate(at string) error {
	for name, v := range map[string]int{"delay_ms": st.DelayMS, "chunk_delay_ms": st.ChunkDelayMS} {
		if v < 0 || v > maxDelayMS {
			return fmt.Errorf("%s.%s: %d must be 0 to %d", at, name, v, maxDelayMS)
		}
	}
	if st.Chunk < 0 {
		return fmt.Errorf("%s.chunk: %d must not be negative", at, st.Chunk)
	}
	if w := st.When; w != nil {
		if _, err := path.Match(w.Model, ""); err != nil {
			return fmt.Errorf("%s.when.model: %q is no glob", at, w.Model)
		}
	}
	for i, t := range st.Tools {
		switch {
		case !toolName().MatchString(t.Name):
			return fmt.Errorf("%s.tools[%d].name: %q must be 1 to 128 letters, digits, - or _", at, i, t.Name)
		case t.InputJSON != "" && t.Input != nil:
			return fmt.Errorf("%s.tools[%d].input_json: give input or input_json, not both", at, i)
		}
		if _, err := json.Marshal(t.Input); err != nil {
			return fmt.Errorf("%s.tools[%d].input: %w; use only what JSON has", at, i, err)
		}
	}
	if st.Stop == "tool_use" && len(st.Tools) == 0 {
		return fmt.Errorf("%s.stop: tool_use needs tools", at)
	}
	if st.Usage != nil {
		u := *st.Usage
		if min(u.Input, u.Output, u.CacheRead, u.CacheCreation5m, u.CacheCreation1h) < 0 {
			return fmt.Errorf("%s.usage: a count is negative", at)
		}
	}
	if _, err := json.Marshal(st.StopDetails); err != nil {
		return fmt.Errorf("%s.stop_details: %w; use only what JSON has", at, err)
	}
	if err := st.Fault.validate(at + ".fault"); err != nil {
		return err
	}
	empty := st.Text == "" && st.Thinking == "" && st.Redacted == "" && len(st.Tools) == 0
	if empty && (st.Fault == nil || st.Fault.Times > 0) {
		return fmt.Errorf("%s: says nothing; an empty answer leaves no trace in the conversation, so the step would be played again: give text, thinking or tools", at)
	}
	return nil
}

func (f *Fault) validate(at string) error {
	if f == nil {
		return nil
	}
	set := 0
	for _, b := range []bool{f.Status != 0, f.Error != "", f.CutAfter != 0, f.Hang} {
		if b {
			set++
		}
	}
	switch {
	case set != 1:
		return fmt.Errorf("%s: set exactly one of status, error, cut_after_bytes and hang", at)
	case f.Status != 0 && (f.Status < 400 || f.Status > 599):
		return fmt.Errorf("%s.status: %d must be 400 to 599", at, f.Status)
	case f.CutAfter < 0 || f.After < 0 || f.Times < 0:
		return fmt.Errorf("%s: cut_after_bytes, after_bytes and times must not be negative", at)
	case strings.ContainsAny(f.RetryAfter, "\r\n"):
		return fmt.Errorf("%s.retry_after: must be one line", at)
	}
	return nil
}

var (
	toolName   = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-zA-Z0-9_-]{1,128}$`) })
	positionAt = regexp.MustCompile(`\[script-position: (\d{1,9})\]`)
	template   = regexp.MustCompile(`\$\{[^{}]*\}`)
)

// play is one request seen by a script.
type play struct {
	req      *scriptRequest
	position int // answers given
	base     int // of them before the messages that we see
	first    int // index of the first message that counts
}

func newPlay(req *scriptRequest) *play {
	p := &play{req: req}
	for i, m := range req.Messages {
		if m.Role == "user" {
			for _, b := range m.blocks {
				if all := positionAt.FindAllStringSubmatch(b.Text, -1); len(all) > 0 {
					p.base, _ = strconv.Atoi(all[len(all)-1][1])
					p.position, p.first = p.base, i
				}
			}
		} else if m.Role == "assistant" {
			p.position++
		}
	}
	return p
}

// find returns the step that answers req; where says which one it is.
func (s *Script) find(p *play) (step *Step, where string, err error) {
	for i := range s.Scripts {
		sc := &s.Scripts[i]
		if sc.Model != "" && !globMatch(sc.Model, p.req.Model) || !strings.Contains(p.req.firstUser(), sc.Marker) {
			continue
		}
		for j := range sc.Rules {
			if sc.Rules[j].When.holds(p) {
				return &sc.Rules[j], fmt.Sprintf("%s rule %d", sc.Name, j+1), nil
			}
		}
		n := p.position
		if sc.Repeat && len(sc.Steps) > 0 {
			n %= len(sc.Steps)
		}
		if n >= len(sc.Steps) {
			return nil, "", fmt.Errorf("script %s has %d steps, and step %d was asked for; add it, or set repeat", sc.Name, len(sc.Steps), n+1)
		}
		return &sc.Steps[n], fmt.Sprintf("%s step %d", sc.Name, n+1), nil
	}
	return nil, "", fmt.Errorf("no script matches model %q and the first user message; check model and marker of the scripts", clip(p.req.Model, 100))
}

func (w *When) holds(p *play) bool {
	if w == nil {
		return true
	}
	texts, results := p.req.lastUser()
	return strings.Contains(p.req.system, w.System) &&
		strings.Contains(texts, w.User) &&
		(w.Result == "" || strings.Contains(results, w.Result)) &&
		(w.Model == "" || globMatch(w.Model, p.req.Model)) &&
		(w.Position == nil || *w.Position == p.position)
}

// fill replaces the templates of s.
func (p *play) fill(s string) (string, error) {
	var failed error
	out := template.ReplaceAllStringFunc(s, func(t string) string {
		v, err := p.lookup(t[2 : len(t)-1])
		if err != nil && failed == nil {
			failed = fmt.Errorf("template %s: %w", t, err)
		}
		if str, ok := v.(string); ok {
			return str
		}
		return string(encode(v))
	})
	return out, failed
}

// fillValue replaces the templates in v, at any depth.
func (p *play) fillValue(v any) (any, error) {
	var err error
	switch v := v.(type) {
	case string:
		if m := template.FindString(v); m != "" && m == v {
			out, err := p.lookup(v[2 : len(v)-1])
			if err != nil {
				return nil, fmt.Errorf("template %s: %w", v, err)
			}
			return out, nil
		}
		return p.fill(v)
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, e := range v {
			if out[k], err = p.fillValue(e); err != nil {
				return nil, err
			}
		}
		return out, nil
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			if out[i], err = p.fillValue(e); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	return v, nil
}

func (p *play) lookup(name string) (any, error) {
	switch {
	case name == "position":
		return p.position, nil
	case name == "user":
		texts, _ := p.req.lastUser()
		return texts, nil
	case !strings.HasPrefix(name, "result."):
		return nil, errors.New("it must be position, user or result.STEP./pointer")
	}
	key, pointer, _ := strings.Cut(strings.TrimPrefix(name, "result."), "./")
	text, err := p.result(key)
	if err != nil || !strings.Contains(name, "./") {
		return text, err
	}
	v, err := readJSON(text)
	if err != nil {
		return nil, fmt.Errorf("the result is not JSON: %.100q", text)
	}
	return follow(v, pointer)
}

// result finds the text of a tool result by "STEP", "STEP.CALL" or "TOOL".
func (p *play) result(key string) (string, error) {
	stepText, callText, _ := strings.Cut(key, ".")
	step, err := strconv.Atoi(stepText)
	if err != nil {
		return p.newestResult(key)
	}
	call := 1
	if callText != "" {
		if call, err = strconv.Atoi(callText); err != nil || call < 1 {
			return "", fmt.Errorf("call %q must be a number from 1", callText)
		}
	}
	at := p.base
	for _, m := range p.req.Messages[p.first:] {
		if m.Role != "assistant" {
			continue
		}
		if at++; at != step {
			continue
		}
		for _, b := range m.blocks {
			if b.Type != "tool_use" {
				continue
			}
			if call--; call == 0 {
				return p.req.resultText(b.ID)
			}
		}
		return "", fmt.Errorf("step %d has no such tool call", step)
	}
	return "", fmt.Errorf("step %d is not in the conversation", step)
}

func (p *play) newestResult(tool string) (string, error) {
	for i := len(p.req.Messages) - 1; i >= 0; i-- {
		blocks := p.req.Messages[i].blocks
		for j := len(blocks) - 1; j >= 0; j-- {
			if b := blocks[j]; b.Type == "tool_use" && b.Name == tool {
				return p.req.resultText(b.ID)
			}
		}
	}
	return "", fmt.Errorf("tool %s was not called", tool)
}

// readJSON reads text, or the first object in it: a result may be told with a
// sentence before it.
func readJSON(text string) (v any, err error) {
	dec := func(s string) error {
		d := json.NewDecoder(strings.NewReader(s))
		d.UseNumber()
		return d.Decode(&v)
	}
	if err = dec(text); err != nil {
		if i := strings.IndexAny(text, "{["); i > 0 {
			err = dec(text[i:])
		}
	}
	return v, err
}

// follow walks a JSON pointer (RFC 6901) without its leading slash.
func follow(v any, pointer string) (any, error) {
	for _, part := range strings.Split(pointer, "/") {
		part = strings.NewReplacer("~1", "/", "~0", "~").Replace(part)
		switch c := v.(type) {
		case map[string]any:
			next, ok := c[part]
			if !ok {
				return nil, fmt.Errorf("the result has no field %q", part)
			}
			v = next
		case []any:
			i, err := strconv.Atoi(part)
			if err != nil || i < 0 || i >= len(c) {
				return nil, fmt.Errorf("the result has no element %q", part)
			}
			v = c[i]
		default:
			return nil, fmt.Errorf("the result has nothing below %q", part)
		}
	}
	return v, nil
}
