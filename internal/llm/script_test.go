package llm_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/llm"
)

func parseScript(t testing.TB, text string) *llm.Script {
	t.Helper()
	s, err := llm.ParseScript([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func scripted(t testing.TB, text string) (*llm.Anthropic, *llm.ScriptServer) {
	t.Helper()
	s := llm.NewScriptServer(parseScript(t, text))
	return anthropicAt(t, upstream(t, s)), s
}

func say(role llm.Role, text string) llm.Message {
	return llm.Message{Role: role, Content: []llm.Block{{Type: "text", Text: text}}}
}

func result(id, text string) llm.Block {
	return llm.Block{Type: "tool_result", ToolUseID: id, Content: []llm.Block{{Type: "text", Text: text}}}
}

var offered = []llm.Tool{
	{Name: "create_vpc", InputSchema: json.RawMessage(`{"type":"object"}`)},
	{Name: "create_db", InputSchema: json.RawMessage(`{"type":"object"}`)}}

// The example is played through the real provider; each request meets a new
// server, as if the old one had been killed.
func TestScriptExample(t *testing.T) {
	script, err := llm.LoadScript(filepath.Join("testdata", "example.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var total llm.ScriptStats
	ask := func(req llm.Request) *llm.Reply {
		t.Helper()
		s := llm.NewScriptServer(script)
		r, err := anthropicAt(t, upstream(t, s)).Stream(t.Context(), req, nil)
		if err != nil {
			t.Fatal(err)
		}
		st := s.Stats()
		total.Requests += st.Requests
		total.Answered += st.Answered
		total.Invalid += st.Invalid + st.Unscripted
		return r
	}
	req := llm.Request{Model: "scripted-1", System: "s", Tools: offered, Messages: []llm.Message{say(llm.RoleUser, "go [migrate]")}}
	one := ask(req)
	if one.StopReason != "tool_use" || len(one.Content) != 3 || one.Content[0].Type != "thinking" || one.Content[1].Text != "I create the network." || string(one.Content[2].Input) != `{"region":"eu-1"}` {
		t.Fatalf("step 1 = %+v", one)
	}
	if again := ask(req); !cmp.Equal(one, again) {
		t.Errorf("the same request got another answer:\n%s", cmp.Diff(one, again))
	}
	req.Messages = append(req.Messages, llm.Message{Role: llm.RoleAssistant, Content: one.Content},
		llm.Message{Role: llm.RoleUser, Content: []llm.Block{result(one.Content[2].ID, `not sent again: {"vpc_id":"vpc-<7>","zones":[{"size":1},{"size":12345678901234567}]}`)}})
	two := ask(req)
	if got, want := string(two.Content[0].Input), `{"note":"in vpc-<7> now","size":12345678901234567,"vpc":"vpc-<7>"}`; got != want {
		t.Errorf("step 2 input = %s, want %s", got, want)
	}
	if got, want := two.Usage, (llm.Usage{Input: 100, Output: 20, CacheRead: 7, CacheCreation5m: 3, CacheCreation1h: 2}); got != want {
		t.Errorf("step 2 usage = %+v, want %+v", got, want)
	}
	if two.Content[0].ID == two.Content[1].ID || two.Content[0].ID == one.Content[2].ID {
		t.Error("tool ids repeat")
	}
	// A summary is asked for, and the conversation begins anew from it.
	sum := req
	sum.System = "Summarise the conversation so far."
	text := ask(sum).Content[0].Text
	if want := "Network vpc-<7> exists. [script-position: 1]"; text != want {
		t.Fatalf("summary = %q, want %q", text, want)
	}
	rest := req
	rest.Messages = []llm.Message{say(llm.RoleUser, "go [migrate]\n"+text), {Role: llm.RoleAssistant, Content: two.Content},
		{Role: llm.RoleUser, Content: []llm.Block{result(two.Content[0].ID, "a"), result(two.Content[1].ID, "db-2")}}}
	if got := ask(rest).Content[0].Text; got != "Finished: db-2" {
		t.Errorf("step 3 after compaction = %q", got)
	}
	talk := llm.Request{Model: "other", Messages: []llm.Message{say(llm.RoleUser, "one"), say(llm.RoleAssistant, "x"), say(llm.RoleUser, "two")}}
	if got := ask(talk).Content[0].Text; got != "You said: two" {
		t.Errorf("talk = %q", got)
	}
	if total.Answered != total.Requests || total.Invalid != 0 || total.Requests != 6 {
		t.Errorf("stats = %+v", total)
	}
}

func TestScriptFaults(t *testing.T) {
	tests := []struct {
		name, fault string
		want        llm.ErrorKind
		retryable   bool
		after       time.Duration
		then        bool // the second request is answered
	}{
		{"529", "{status: 529, times: 1}", llm.ErrOverloaded, true, 0, true},
		{"429", `{status: 429, retry_after: "3", times: 1}`, llm.ErrRateLimited, true, 3 * time.Second, true},
		{"429 spend cap", "{status: 429}", llm.ErrBilling, false, 0, false},
		{"400 own words", "{status: 400, message: prompt is too long}", llm.ErrContextWindow, false, 0, false},
		{"overloaded in the stream", "{error: overloaded_error, after_bytes: 500, times: 1}", llm.ErrOverloaded, true, 0, true},
		{"cut at once", "{cut_after_bytes: 1, times: 1}", llm.ErrServer, true, 0, true},
		{"cut in the middle", "{cut_after_bytes: 900, times: 1}", llm.ErrServer, true, 0, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, s := scripted(t, "scripts: [{name: a, steps: [{text: a long enough answer that has several chunks, fault: "+tt.fault+"}]}]")
			e := streamErr(t, p, simple)
			if e.Kind != tt.want || e.Retryable != tt.retryable || e.RetryAfter != tt.after {
				t.Errorf("got %+v, want %s retryable %v after %v", e, tt.want, tt.retryable, tt.after)
			}
			if tt.name == "cut in the middle" && e.Usage.Input == 0 {
				t.Error("the usage before the cut is lost")
			}
			_, err := p.Stream(t.Context(), simple, nil)
			if (err == nil) != tt.then {
				t.Errorf("second request: %v, want answered %v", err, tt.then)
			}
			if st := s.Stats(); st.Requests != 2 || st.Invalid != 0 || st.Faults == 0 {
				t.Errorf("stats = %+v", st)
			}
		})
	}
}

func TestScriptHangAndDelays(t *testing.T) {
	p, _ := scripted(t, "scripts: [{name: a, steps: [{text: x, fault: {hang: true, times: 1}, delay_ms: 1, chunk_delay_ms: 1, chunk: 1}]}]")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	var e *llm.Error
	if _, err := p.Stream(ctx, simple, nil); !errors.As(err, &e) || e.Kind != llm.ErrCancelled {
		t.Errorf("hang: %v", err)
	}
	if r, err := p.Stream(t.Context(), simple, nil); err != nil || r.Content[0].Text != "x" {
		t.Errorf("after the hang: %+v, %v", r, err)
	}
}

func TestScriptWithoutStream(t *testing.T) {
	cfg := upstream(t, llm.NewScriptServer(parseScript(t, `{"scripts":[{"name":"a","steps":[{"text":"x","tools":[{"name":"f","unoffered":true,"input":{"a":[1]}}]}]}],"key":"k"}`)))
	post := func(key, body string) (int, map[string]any) {
		req, _ := http.NewRequestWithContext(t.Context(), "POST", cfg.BaseURL+"/v1/messages", strings.NewReader(body))
		req.Header.Set("x-api-key", key)
		req.Header.Set("anthropic-version", "2023-06-01")
		res, err := cfg.Client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		var v map[string]any
		if err := json.NewDecoder(res.Body).Decode(&v); err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, v
	}
	body := `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}`
	status, v := post("k", body)
	blocks, _ := v["content"].([]any)
	if status != 200 || v["stop_reason"] != "tool_use" || len(blocks) != 2 {
		t.Fatalf("%d %v", status, v)
	}
	if diff := cmp.Diff(map[string]any{"a": []any{1.0}}, blocks[1].(map[string]any)["input"]); diff != "" {
		t.Error(diff)
	}
	if status, v := post("wrong", body); status != 401 || v["type"] != "error" {
		t.Errorf("wrong key: %d %v", status, v)
	}
	res, err := cfg.Client.Get(cfg.BaseURL + "/stats")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	got, _ := io.ReadAll(res.Body)
	if want := `{"requests":2,"answered":1,"invalid":1,"unscripted":0,"faults":0,"last_error":"invalid credential"}`; string(got) != want {
		t.Errorf("stats = %s, want %s", got, want)
	}
}

// Trial H1: the server refuses what the real API refuses.
func TestScriptServerRefuses(t *testing.T) {
	msgs := func(m string) string { return `{"model":"m","max_tokens":1,"messages":[` + m + `]}` }
	const (
		user = `{"role":"user","content":"hi"}`
		use  = `{"role":"assistant","content":[{"type":"tool_use","id":"t1","name":"f","input":{}},{"type":"tool_use","id":"t2","name":"f","input":{}}]}`
		r1   = `{"type":"tool_result","tool_use_id":"t1"}`
		r2   = `{"type":"tool_result","tool_use_id":"t2","content":[{"type":"text","text":"x"}]}`
		text = `{"type":"text","text":"t"}`
	)
	res := func(blocks ...string) string {
		return `{"role":"user","content":[` + strings.Join(blocks, ",") + `]}`
	}
	tests := []struct{ name, body, want string }{
		{"good", msgs(user + "," + use + "," + res(r2, r1, text)), ""},
		{"good surrogate pair", msgs(`{"role":"user","content":"\ud83d\ude00 \\ud83d"}`), ""},
		{"dangling", msgs(user + "," + use + "," + res(r1)), "t2"},
		{"dangling, text only", msgs(user + "," + use + "," + user), "no tool_result for t1, t2"},
		{"orphan", msgs(res(r1)), "did not call"},
		{"orphan beside", msgs(user + "," + use + "," + res(r1, r2, `{"type":"tool_result","tool_use_id":"t3"}`)), "did not call"},
		{"twice", msgs(user + "," + use + "," + res(r1, r2, r1)), "second tool_result"},
		{"text first", msgs(user + "," + use + "," + res(text, r1, r2)), "behind other content"},
		{"ids repeat", msgs(user + "," + use + "," + res(r1, r2) + "," + use + "," + res(r1, r2)), "one id"},
		{"tool_use by user", msgs(res(`{"type":"tool_use","id":"a","name":"f","input":{}}`)), "assistant"},
		{"input is no object", msgs(user + `,{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":"x"}]}`), "not an object"},
		{"empty text", msgs(res(`{"type":"text","text":""}`)), "empty"},
		{"blank text", msgs(res(`{"type":"text","text":" \n"}`)), "blank"},
		{"empty text in a result", msgs(user + "," + use + "," + res(r1, `{"type":"tool_result","tool_use_id":"t2","content":[{"type":"text","text":""}]}`)), "empty"},
		{"empty message", msgs(`{"role":"user","content":[]}`), "empty"},
		{"two users", msgs(user + "," + user), "twice in a row"},
		{"assistant first", msgs(`{"role":"assistant","content":"x"}`), "messages.0.role"},
		{"prefill", msgs(user + `,{"role":"assistant","content":"x"}`), "assistant turn"},
		{"no max_tokens", `{"model":"m","messages":[` + user + `]}`, "max_tokens"},
		{"no model", `{"max_tokens":1,"messages":[` + user + `]}`, "model"},
		{"unknown field", `{"model":"m","max_tokens":1,"raw":1,"messages":[` + user + `]}`, "raw"},
		{"unknown block field", msgs(res(`{"type":"text","text":"t","raw":{}}`)), "raw"},
		{"unknown block", msgs(res(`{"type":"mystery"}`)), "mystery"},
		{"title", msgs(res(`{"type":"document","title":"` + strings.Repeat("é", 500) + `","source":{}}`)), ""},
		{"long title", msgs(res(`{"type":"document","title":"` + strings.Repeat("e", 501) + `","source":{}}`)), "title"},
		{"invalid UTF-8", msgs("{\"role\":\"user\",\"content\":\"\xff\"}"), "Unicode"},
		{"lone high surrogate", msgs(`{"role":"user","content":"\ud83d x"}`), "Unicode"},
		{"high surrogate at the end", msgs(`{"role":"user","content":"\ud83d"}`), "Unicode"},
		{"lone low surrogate", msgs(`{"role":"user","content":"\ude00"}`), "Unicode"},
		{"not JSON", "{", "request body"},
		{"changed thinking", msgs(user + `,{"role":"assistant","content":[{"type":"thinking","thinking":"x","signature":"y"}]},` + user), "signature"},
		{"changed redacted", msgs(user + `,{"role":"assistant","content":[{"type":"redacted_thinking","data":"x"}]},` + user), "data"},
		{"tool twice", `{"model":"m","max_tokens":1,"tools":[{"name":"f","input_schema":{"type":"object"}},{"name":"f","input_schema":{"type":"object"}}],"messages":[` + user + `]}`, "one name"},
		{"tool name", `{"model":"m","max_tokens":1,"tools":[{"name":"a b","input_schema":{"type":"object"}}],"messages":[` + user + `]}`, "letters, digits"},
		{"tool schema", `{"model":"m","max_tokens":1,"tools":[{"name":"f"}],"messages":[` + user + `]}`, "input_schema"},
		{"five breakpoints", msgs(res(strings.TrimSuffix(strings.Repeat(`{"type":"text","text":"t","cache_control":{"type":"ephemeral"}},`, 5), ","))), "at most 4"},
	}
	for _, tt := range tests {
		err := llm.CheckRequest([]byte(tt.body))
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: err = %v, want one with %q", tt.name, err, tt.want)
		}
	}
	p, s := scripted(t, "scripts: [{name: a, steps: [{text: x}]}]")
	bad := simple
	bad.Messages = []llm.Message{{Role: llm.RoleUser, Content: []llm.Block{result("toolu_9", "x")}}}
	if e := streamErr(t, p, bad); e.Status != 400 || e.Kind != llm.ErrRequest {
		t.Errorf("orphan over HTTP: %+v", e)
	}
	if st := s.Stats(); st.Invalid != 1 || !strings.Contains(st.LastError, "toolu_9") {
		t.Errorf("stats = %+v", st)
	}
}

// A document's title may be as long as whoever named it wants, an MCP server for
// one; the API takes 500 characters.
func TestLongTitle(t *testing.T) {
	p, _ := scripted(t, "scripts: [{name: a, steps: [{text: x}]}]")
	req := simple
	doc := llm.Block{Type: "document", Title: strings.Repeat("é", 600), Source: json.RawMessage(`{"type":"text","media_type":"text/plain","data":"x"}`)}
	req.Messages = []llm.Message{{Role: llm.RoleUser, Content: []llm.Block{doc, {Type: "text", Text: "[a]"}}}}
	if _, err := p.Stream(t.Context(), req, nil); err != nil {
		t.Error(err)
	}
}

func TestScriptUnscripted(t *testing.T) {
	tests := []struct{ script, want string }{
		{"scripts: [{name: a, marker: zzz, steps: [{text: x}]}]", "no script matches"},
		{"scripts: [{name: a, rules: [{when: {user: zzz}, text: x}]}]", "step 1"},
		{"scripts: [{name: a, steps: [{tools: [{name: f}]}]}]", "not offered"},
		{"scripts: [{name: a, steps: [{text: '${result.1./a}'}]}]", "step 1 is not in the conversation"},
		{"scripts: [{name: a, steps: [{text: '${nope}'}]}]", "${nope}"},
		{"scripts: [{name: a, steps: [{text: '${result.f}'}]}]", "not called"},
	}
	for _, tt := range tests {
		p, s := scripted(t, tt.script)
		if e := streamErr(t, p, simple); e.Kind != llm.ErrRequest || !strings.Contains(e.Message, tt.want) {
			t.Errorf("%s: %v, want %q", tt.script, e, tt.want)
		}
		if st := s.Stats(); st.Unscripted != 1 || st.Invalid != 0 {
			t.Errorf("%s: stats = %+v", tt.script, st)
		}
	}
}

func TestLoadScriptErrors(t *testing.T) {
	tests := []struct{ text, want string }{
		{"", "empty"},
		{"scripts: []", "scripts: is empty"},
		{"scripts: [{steps: [{text: x}]}]", "scripts[0].name"},
		{"scripts: [{name: a}]", "scripts[0].steps"},
		{"scripts: [{name: a, steps: [{text: x}]}, {name: a, steps: [{text: x}]}]", "twice"},
		{"scripts: [{name: a, stepz: []}]", "stepz"},
		{"scripts: [{name: a, model: '[', steps: [{}]}]", "scripts[0].model"},
		{"scripts: [{name: a, rules: [{text: x}]}]", "scripts[0].rules[0].when"},
		{"scripts: [{name: a, steps: [{when: {user: x}}]}]", "scripts[0].steps[0].when"},
		{"scripts: [{name: a, steps: [{tools: [{name: 'a b'}]}]}]", "steps[0].tools[0].name"},
		{"scripts: [{name: a, steps: [{tools: [{name: f, input: {}, input_json: '{'}]}]}]", "input_json"},
		{"scripts: [{name: a, steps: [{tools: [{name: f, input: {a: .nan}}]}]}]", "tools[0].input"},
		{"scripts: [{name: a, steps: [{delay_ms: -1}]}]", "delay_ms"},
		{"scripts: [{name: a, steps: [{stop: tool_use}]}]", "stop"},
		{"scripts: [{name: a, steps: [{}]}]", "steps[0]: says nothing"},
		{"scripts: [{name: a, steps: [{fault: {}}]}]", "steps[0].fault"},
		{"scripts: [{name: a, steps: [{fault: {status: 200}}]}]", "fault.status"},
		{"scripts: [{name: a, steps: [{fault: {status: 500, hang: true}}]}]", "exactly one"},
		{"scripts: [{name: a, steps: [{usage: {input: -1}}]}]", "usage"},
		{"scripts: [{name: a, steps: [{}]}]\n---\nx: 1", "more than one document"},
	}
	for _, tt := range tests {
		file := filepath.Join(t.TempDir(), "s.yaml")
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := llm.LoadScript(file); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), file) {
			t.Errorf("%q: err = %v, want one with the file and %q", tt.text, err, tt.want)
		}
	}
	if _, err := llm.LoadScript(filepath.Join(t.TempDir(), "none.yaml")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

func FuzzScript(f *testing.F) {
	if b, err := os.ReadFile(filepath.Join("testdata", "example.yaml")); err == nil {
		f.Add(b, []byte(`{"model":"scripted-1","max_tokens":1,"messages":[{"role":"user","content":"[migrate]"}]}`))
	}
	f.Add([]byte("scripts: [{name: a, steps: [{text: '${result.1.1./a/0~1}'}]}]"), []byte(`{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\ud83d\ude00"},{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"b","input":{}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"{\"a\":[1]}"}]}]}`))
	f.Fuzz(func(t *testing.T, script, request []byte) {
		s, err := llm.ParseScript(script)
		if err != nil {
			return
		}
		if err := s.Validate(); err != nil {
			t.Fatalf("a parsed script is not valid: %v", err)
		}
		llm.Play(s, request)
	})
}
