package tool_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/tool"
)

// TestDefinitions: the tools and fields of reference section 11.4, no other.
func TestDefinitions(t *testing.T) {
	type def struct {
		Name           string
		Reads, Named   bool
		Fields, Needed string
	}
	var got []def
	for _, d := range tool.All() {
		var schema struct {
			Type       string                     `json:"type"`
			Properties map[string]json.RawMessage `json:"properties"`
			Required   []string                   `json:"required"`
			Additional *bool                      `json:"additionalProperties"`
		}
		if err := json.Unmarshal(d.InputSchema, &schema); err != nil || schema.Type != "object" || schema.Additional == nil || *schema.Additional {
			t.Errorf("%s: schema %s: %v", d.Name, d.InputSchema, err)
		}
		if n := utf8.RuneCountInString(d.Description); n < 100 || n > 3000 {
			t.Errorf("%s: a description of %d characters", d.Name, n)
		}
		var names []string
		for n := range schema.Properties {
			names = append(names, n)
		}
		got = append(got, def{d.Name, d.Reads, d.Named, sorted(names), strings.Join(schema.Required, " ")})
		if f, ok := tool.Find(d.Name); !ok || f.Name != d.Name {
			t.Errorf("find %s: %v, %v", d.Name, f.Name, ok)
		}
	}
	want := []def{
		{"bash", false, false, "command restart timeout_ms", ""},
		{"read", true, false, "file_path view_range", "file_path"},
		{"write", false, false, "content file_path", "file_path content"},
		{"edit", false, false, "file_path new_string old_string replace_all", "file_path old_string new_string"},
		{"glob", true, false, "path pattern", "pattern"},
		{"grep", true, false, "path pattern", "pattern"},
		{"browser", false, true, "action selector submit text url", "action"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if _, ok := tool.Find("web_fetch"); ok {
		t.Error("web_fetch is found; it is no tool of the sandbox")
	}
}

// TestInput: what is wrong with an input is said, naming the field, before any
// sandbox is asked: there is none here.
func TestInput(t *testing.T) {
	for _, tt := range []struct{ tool, input, want string }{
		{"bash", `{}`, "command is missing"},
		{"bash", ``, "command is missing"},
		{"bash", `{"command":"  "}`, "command is missing"},
		{"bash", `{"command":5}`, "command must be a string, not number"},
		{"bash", `{"command":"a\u0000b"}`, "command contains a zero byte"},
		{"bash", `{"command":"ls","timeout_ms":0}`, "timeout_ms must be at least 1"},
		{"bash", `{"command":"ls","timeout_ms":"5"}`, "timeout_ms must be a whole number, not string"},
		{"bash", `{"command":"ls","timeout_ms":1.5}`, "timeout_ms must be a whole number, not number 1.5"},
		{"bash", `{"command":"ls","restart":"yes"}`, "restart must be true or false, not string"},
		{"bash", `{"command":"ls","cwd":"/"}`, "cwd is no field of this tool; it takes command, restart, timeout_ms"},
		{"bash", `["ls"]`, "must be a JSON object"},
		{"bash", `null`, "must be a JSON object"},
		{"bash", `{"command":"ls"`, "must be a JSON object"},
		{"read", `{}`, "file_path is missing"},
		{"read", `{"file_path":"a\u0000"}`, "file_path contains a zero byte"},
		{"read", `{"file_path":"a","view_range":[1]}`, "view_range must have two numbers"},
		{"read", `{"file_path":"a","view_range":[0,3]}`, "lines count from 1"},
		{"read", `{"file_path":"a","view_range":[4,3]}`, "before its start"},
		{"read", `{"file_path":"a","view_range":"1-3"}`, "view_range must be a list, not string"},
		{"read", `{"file_path":"` + strings.Repeat("a/", 2048) + `"}`, "file_path has 4096 bytes"},
		{"write", `{}`, "file_path and content are missing"},
		{"write", `{"file_path":"a"}`, "content is missing"},
		{"write", `{"content":"a"}`, "file_path is missing"},
		{"edit", `{"file_path":"a","new_string":"b"}`, "old_string is missing"},
		{"edit", `{"file_path":"a","old_string":"b"}`, "new_string is missing"},
		{"edit", `{"file_path":"a","old_string":"","new_string":"b"}`, "old_string is empty"},
		{"edit", `{"file_path":"a","old_string":"b","new_string":"b"}`, "are equal"},
		{"glob", `{}`, "pattern is missing"},
		{"glob", `{"pattern":"/etc/*"}`, "pattern must be relative"},
		{"glob", `{"pattern":"a/../b"}`, "pattern must not contain .."},
		{"grep", `{"pattern":""}`, "pattern is missing"},
		{"grep", `{"pattern":"(?=x)"}`, "pattern is no expression that grep understands"},
		{"grep", `{"pattern":"(a)\\1"}`, "pattern is no expression that grep understands"},
		{"browser", `{}`, "action is missing"},
		{"browser", `{"action":"fly"}`, "action must be one of open, click, type, read, screenshot"},
		{"browser", `{"action":"open"}`, "url is missing"},
		{"browser", `{"action":"open","url":"file:///etc/passwd"}`, "url must begin with http:// or https://"},
		{"browser", `{"action":"click"}`, "selector is missing"},
		{"browser", `{"action":"type","selector":"#a"}`, "text is missing"},
		{"browser", `{"action":"read","text":"a"}`, "text does not belong to read"},
		{"fly", `{}`, `there is no tool "fly"`},
	} {
		a, err := tool.Run(t.Context(), nil, tool.Call{ID: "c", Name: tt.tool, Input: json.RawMessage(tt.input)}, nil)
		if err != nil {
			t.Errorf("%s %.60s: %v", tt.tool, tt.input, err)
			continue
		}
		if got := text(t, a); !a.IsError || !strings.Contains(got, tt.want) {
			t.Errorf("%s %.60s = %q (error %v), want %q", tt.tool, tt.input, got, a.IsError, tt.want)
		}
	}
}

// TestFit without a sandbox: what stays as it is, and what the preview shows.
func TestFit(t *testing.T) {
	fit := func(content string) gateway.Answer {
		t.Helper()
		a, err := tool.Fit(t.Context(), nil, "c", gateway.Answer{IsError: true, Content: json.RawMessage(content)})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	// Characters count, not bytes: 100,000 of three bytes each fit.
	for _, same := range []string{
		`[{"type":"text","text":"short"}]`,
		`[{"type":"text","text":"` + strings.Repeat("日", tool.MaxResult) + `"}]`,
		`[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"` + strings.Repeat("A", 400_000) + `"}}]`,
	} {
		if a := fit(same); string(a.Content) != same {
			t.Errorf("changed: %.80s", a.Content)
		}
	}
	image := `{"type":"image","source":{"type":"base64","media_type":"image/png","data":"QUJD"}}`
	body := strings.Repeat("é", 60_000)
	a := fit(fmt.Sprintf(`[%s,{"type":"text","text":"first %s"},%s,{"type":"text","text":"%s last"}]`, image, body, image, body))
	got := blocks(t, a)
	if len(got) != 3 || got[0].Type != "image" || got[1].Type != "text" || got[2].Type != "image" || string(got[2].Source.Data) != "ABC" || !a.IsError {
		t.Fatalf("blocks = %d: %.300s", len(got), a.Content)
	}
	text := got[1].Text
	if !strings.Contains(text, "\nfirst é") || !strings.HasSuffix(text, "é last") || !strings.Contains(text, "[this answer has 120013 characters") ||
		!strings.Contains(text, "[… 104013 characters left out …]") || !utf8.ValidString(text) {
		t.Errorf("preview %.150s … %s", text, text[len(text)-20:])
	}
	if n := utf8.RuneCountInString(text); n > 17_000 {
		t.Errorf("a preview of %d characters", n)
	}
}
