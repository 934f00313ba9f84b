package api_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/api"
)

// Reference sections 9.3 and 9.4.
func TestClientEventRules(t *testing.T) {
	msg := `{"type":"user.message","content":[{"type":"text","text":"hi"}]}`
	sys := `{"type":"system.message","content":[{"type":"text","text":"be brief"}]}`
	content := func(blocks string) string { return `{"type":"user.message","content":[` + blocks + `]}` }
	result := func(blocks string) string {
		return `{"type":"user.custom_tool_result","custom_tool_use_id":"sevt_1","content":[` + blocks + `]}`
	}
	for name, c := range map[string]struct{ in, path string }{
		"none":                       {``, "events"},
		"message":                    {msg, ""},
		"unknown type":               {msg + `,{"type":"user.shout"}`, "events[1].type"},
		"server type":                {`{"type":"agent.message","content":[]}`, "events[0].type"},
		"no type":                    {`{"content":[]}`, "events[0].type"},
		"not an object":              {msg + `,"x"`, "events[1]"},
		"text for content":           {`{"type":"user.message","content":"hi"}`, "events[0].content"},
		"no content":                 {`{"type":"user.message"}`, "events[0].content"},
		"empty content":              {content(``), "events[0].content"},
		"empty text":                 {content(`{"type":"text","text":""}`), "events[0].content[0].text"},
		"blank text":                 {content(`{"type":"text","text":" \n"}`), "events[0].content[0].text"},
		"second block":               {content(`{"type":"text","text":"a"},{"type":"text"}`), "events[0].content[1].text"},
		"redacted":                   {content(`{"type":"redacted"}`), "events[0].content[0].type"},
		"unknown block":              {content(`{"type":"video"}`), "events[0].content[0].type"},
		"search result in a message": {content(`{"type":"search_result","source":"s","title":"t","content":[{"type":"text","text":"x"}],"citations":{"enabled":true}}`), "events[0].content[0].type"},
		"image":                      {content(`{"type":"image","source":{"type":"base64","media_type":"image/png","data":"aGk="}}`), ""},
		"image, media type":          {content(`{"type":"image","source":{"type":"base64","media_type":"image/bmp","data":"aGk="}}`), "events[0].content[0].source.media_type"},
		"image, base64":              {content(`{"type":"image","source":{"type":"base64","media_type":"image/png","data":"a b"}}`), "events[0].content[0].source.data"},
		"image, url":                 {content(`{"type":"image","source":{"type":"url","url":"ftp://x"}}`), "events[0].content[0].source.url"},
		"image, source is text":      {content(`{"type":"image","source":"x"}`), "events[0].content[0].source"},
		"document":                   {content(`{"type":"document","title":"t","source":{"type":"text","media_type":"text/plain","data":"x"}}`), ""},
		"document, type":             {content(`{"type":"document","source":{"type":"x"}}`), "events[0].content[0].source.type"},
		"document, no source":        {content(`{"type":"document"}`), "events[0].content[0].source"},
		"interrupt":                  {`{"type":"user.interrupt"}`, ""},
		"confirmation":               {`{"type":"user.tool_confirmation","tool_use_id":"sevt_1","result":"allow"}`, ""},
		"confirmation, no id":        {`{"type":"user.tool_confirmation","result":"allow"}`, "events[0].tool_use_id"},
		"confirmation, result":       {`{"type":"user.tool_confirmation","tool_use_id":"sevt_1","result":"yes"}`, "events[0].result"},
		"deny message with allow":    {`{"type":"user.tool_confirmation","tool_use_id":"sevt_1","result":"allow","deny_message":"x"}`, "events[0].deny_message"},
		"deny message":               {`{"type":"user.tool_confirmation","tool_use_id":"sevt_1","result":"deny","deny_message":"` + strings.Repeat("x", 10_000) + `"}`, ""},
		"deny message too long":      {`{"type":"user.tool_confirmation","tool_use_id":"sevt_1","result":"deny","deny_message":"` + strings.Repeat("x", 10_001) + `"}`, "events[0].deny_message"},
		"custom result, no content":  {`{"type":"user.custom_tool_result","custom_tool_use_id":"sevt_1"}`, ""},
		"custom result, no id":       {`{"type":"user.custom_tool_result"}`, "events[0].custom_tool_use_id"},
		"custom result, empty text":  {result(`{"type":"text","text":""}`), "events[0].content[0].text"},
		"custom result, line end":    {result(`{"type":"text","text":"\n"}`), ""},
		"custom result, search":      {result(`{"type":"search_result","source":"s","title":"t","content":[{"type":"text","text":"x"}],"citations":{"enabled":true}}`), ""},
		"custom result, no hits":     {result(`{"type":"search_result","source":"s","title":"t","content":[]}`), "events[0].content[0].content"},
		"tool result, no id":         {`{"type":"user.tool_result"}`, "events[0].tool_use_id"},
		"outcome":                    {`{"type":"user.define_outcome","description":"d","rubric":{"type":"text","content":"c"}}`, ""},
		"outcome, iterations":        {`{"type":"user.define_outcome","description":"d","rubric":{"type":"text","content":"c"},"max_iterations":21}`, "events[0].max_iterations"},
		"outcome, rubric":            {`{"type":"user.define_outcome","description":"d","rubric":{"type":"file"}}`, "events[0].rubric.file_id"},
		"system alone":               {sys, ""},
		"system after message":       {msg + `,` + sys, ""},
		"system first":               {sys + `,` + msg, "events[0].type"},
		"two systems":                {sys + `,` + sys, "events[0].type"},
		"system after interrupt":     {`{"type":"user.interrupt"},` + sys, "events[1].type"},
		"system with image":          {`{"type":"system.message","content":[{"type":"image"}]}`, "events[0].content[0].type"},
		"system, too many":           {`{"type":"system.message","content":[` + strings.TrimSuffix(strings.Repeat(`{"type":"text","text":"x"},`, 1001), ",") + `]}`, "events[0].content"},
		"too many":                   {strings.TrimSuffix(strings.Repeat(msg+",", 1001), ","), "events"},
	} {
		t.Run(name, func(t *testing.T) {
			var s api.SendEvents
			err := api.Decode([]byte(`{"events":[`+c.in+`]}`), &s)
			if err == nil {
				err = s.Validate()
			}
			if c.path == "" {
				if err != nil {
					t.Errorf("error = %v, want nil", err)
				}
				return
			}
			if err == nil {
				t.Fatalf("error = nil, want one at %s", c.path)
			}
			if got := field(t, err); got != c.path {
				t.Errorf("error names %q, want %q (%v)", got, c.path, err)
			}
		})
	}
}

// A body goes to the log and comes out of it as the API shows it.
func TestEventsThroughTheLog(t *testing.T) {
	at := time.Date(2026, 11, 29, 15, 14, 5, 123456000, time.UTC)
	yes := true
	for _, c := range []struct {
		body api.EventBody
		want string // without id and processed_at
	}{
		{&api.UserMessage{Content: api.Texts("<hi> & \u2028")}, `"type":"user.message","content":[{"type":"text","text":"<hi> & \u2028"}]`},
		{&api.UserInterrupt{}, `"type":"user.interrupt"`},
		{&api.UserCustomToolResult{CustomToolUseID: "sevt_1", IsError: &yes}, `"type":"user.custom_tool_result","custom_tool_use_id":"sevt_1","is_error":true`},
		{&api.AgentMessage{}, `"type":"agent.message","content":[]`},
		{&api.AgentThinking{}, `"type":"agent.thinking"`},
		{&api.AgentToolUse{Name: "bash", EvaluatedPermission: "allow", Evaluation: &api.Evaluation{Type: "always_allow"}},
			`"type":"agent.tool_use","name":"bash","input":{},"evaluated_permission":"allow","evaluation":{"type":"always_allow"}`},
		{&api.AgentMCPToolUse{MCPServerName: "aws", Name: "x", Input: json.RawMessage(`{"b":1,"a":2}`), EvaluatedPermission: "ask"},
			`"type":"agent.mcp_tool_use","mcp_server_name":"aws","name":"x","input":{"b":1,"a":2},"evaluated_permission":"ask"`},
		{&api.AgentCustomToolUse{Name: "x"}, `"type":"agent.custom_tool_use","name":"x","input":{}`},
		{&api.AgentMCPToolResult{MCPToolUseID: "sevt_1"}, `"type":"agent.mcp_tool_result","mcp_tool_use_id":"sevt_1","content":[],"is_error":false`},
		{&api.SessionStatusIdle{StopReason: api.StopReason{Type: "end_turn", EventIDs: []string{"ignored"}}},
			`"type":"session.status_idle","stop_reason":{"type":"end_turn"},"stop_details":null`},
		{&api.SessionStatusIdle{StopReason: api.StopReason{Type: "requires_action"}},
			`"type":"session.status_idle","stop_reason":{"type":"requires_action","event_ids":[]},"stop_details":null`},
		{&api.ThreadStatusIdle{SessionThreadID: "sthr_1", AgentName: "a", StopReason: api.StopReason{Type: "requires_action", EventIDs: []string{"sevt_1"}}},
			`"type":"session.thread_status_idle","session_thread_id":"sthr_1","agent_name":"a","stop_reason":{"type":"requires_action","event_ids":["sevt_1"]},"stop_details":null`},
		{&api.SessionUpdated{Title: api.Some("t"), Budget: api.Null[api.Budget]()}, `"type":"session.updated","title":"t","budget":null`},
		{&api.SessionError{Error: api.SessionErrorDetail{Type: "unknown_error", Message: "m", RetryStatus: api.RetryStatus{Type: "retrying"}}},
			`"type":"session.error","error":{"type":"unknown_error","message":"m","retry_status":{"type":"retrying"}}`},
		{&api.ModelRequestEnd{ModelRequestStartID: "sevt_1"}, `"type":"span.model_request_end","model_request_start_id":"sevt_1","is_error":false,"model_usage":{"input_tokens":0,"output_tokens":0,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}`},
		{&api.SessionPaused{}, `"type":"session.paused"`},
	} {
		body, err := api.MarshalBody(c.body)
		if err != nil {
			t.Fatalf("%T: %v", c.body, err)
		}
		if !strings.HasPrefix(string(body), `{"v":1,"type":"`) {
			t.Errorf("body of %T = %s, want version and type first", c.body, body)
		}
		wire, err := api.WireEvent("sevt_9", &at, body)
		if err != nil {
			t.Fatalf("%T: %v", c.body, err)
		}
		typ, rest, more := strings.Cut(c.want, ",")
		want := `{"id":"sevt_9",` + typ + `,"processed_at":"2026-11-29T15:14:05.123456Z"`
		if more {
			want += "," + rest
		}
		want += "}"
		want = strings.ReplaceAll(want, `\u2028`, "\u2028")
		if diff := cmp.Diff(want, string(wire)); diff != "" {
			t.Errorf("%T (-want +got):\n%s", c.body, diff)
		}
		var e api.Event
		if err := json.Unmarshal(wire, &e); err != nil {
			t.Fatalf("%T: %v", c.body, err)
		}
		if e.ID != "sevt_9" || !e.ProcessedAt.Equal(at) || e.Type() != c.body.EventType() {
			t.Errorf("%T reads back as %+v", c.body, e)
		}
		if again, err := json.Marshal(e); err != nil || stable(t, again) != stable(t, wire) {
			t.Errorf("%T encodes again as %s, %v, want %s", c.body, again, err, wire)
		}
	}

	queued, err := api.WireEvent("sevt_1", nil, []byte(`{"v":1,"type":"user.interrupt"}`))
	if want := `{"id":"sevt_1","type":"user.interrupt","processed_at":null}`; err != nil || string(queued) != want {
		t.Errorf("queued = %s, %v, want %s", queued, err, want)
	}
	delta, err := api.Encode(api.Event{Body: api.TextDelta("sevt_1", 0, "x")})
	if want := `{"type":"event_delta","event_id":"sevt_1","delta":{"type":"content_delta","index":0,"content":{"type":"text","text":"x"}}}`; err != nil || string(delta) != want {
		t.Errorf("delta = %s, %v, want %s", delta, err, want)
	}
}

// stable writes JSON in one form, because v1 of the library escapes more.
func stable(t *testing.T, b []byte) string {
	t.Helper()
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func TestUnknownEventsSurvive(t *testing.T) {
	in := `{"id":"sevt_1","type":"agent.dreamt","processed_at":"2026-11-29T15:14:05.000000Z","of":{"sheep":[1,2]}}`
	var e api.Event
	if err := api.Decode([]byte(in), &e); err != nil {
		t.Fatal(err)
	}
	if u, ok := e.Body.(*api.UnknownEvent); !ok || u.Type != "agent.dreamt" || e.ID != "sevt_1" {
		t.Errorf("Decode = %+v", e)
	}
	if out, err := api.Encode(e); err != nil || string(out) != in {
		t.Errorf("Encode = %s, %v, want %s", out, err, in)
	}
	if api.KnownEventType("agent.dreamt") || api.KnownEventType("session.deleted") || !api.KnownEventType("agent.message") || !api.KnownEventType("workflow_run.error") {
		t.Error("KnownEventType is wrong about what lists filter by")
	}
}

// A client cannot set what the server sets.
func TestClientCannotForgeEnvelope(t *testing.T) {
	var s api.SendEvents
	in := `{"events":[{"id":"sevt_forged","processed_at":"2026-11-29T15:14:05Z","v":7,"type":"user.interrupt","x":1}]}`
	if err := api.Decode([]byte(in), &s); err != nil {
		t.Fatal(err)
	}
	body, err := api.MarshalBody(s.Events[0])
	if want := `{"v":1,"type":"user.interrupt"}`; err != nil || string(body) != want {
		t.Errorf("body = %s, %v, want %s", body, err, want)
	}
}

// Trial H1: whatever a model or a target says, the log takes it, and what
// comes out of it is valid JSON.
func TestHostileTextPassesTheLog(t *testing.T) {
	at := time.Unix(0, 0)
	for _, c := range []struct {
		body api.EventBody
		want string
	}{
		{&api.AgentMCPToolUse{Input: json.RawMessage(`{"a":1,"a":2}`)}, `"input":{"a":1,"a":2}`},
		{&api.AgentMCPToolUse{Input: json.RawMessage(`{"a":"\ud800"}`)}, `"input":{"a":`},
		{&api.AgentMCPToolUse{Input: json.RawMessage("{\"a\":\"\xff\"}")}, `"input":{"a":`},
		{&api.AgentToolUse{Input: json.RawMessage(`{"a":`)}, `"input":{"unreadable":"{\"a\":"}`},
		{&api.AgentToolUse{Input: json.RawMessage(`[1]`)}, `"input":{"unreadable":"[1]"}`},
		{&api.AgentCustomToolUse{Input: json.RawMessage(` null `)}, `"input":{}`},
		{&api.AgentCustomToolUse{Input: json.RawMessage(`{"n":12345678901234567890}`)}, `"input":{"n":12345678901234567890}`},
		{&api.AgentMessage{Content: api.Texts("a\xff\x00b")}, `"text":"a\ufffd\u0000b"`},
		{&api.AgentMCPToolResult{Content: api.Texts("\xed\xa0\x80")}, `"text":"\ufffd\ufffd\ufffd"`},
	} {
		body, err := api.MarshalBody(c.body)
		if err != nil {
			t.Errorf("MarshalBody(%+v) = %v", c.body, err)
			continue
		}
		wire, err := api.WireEvent("sevt_1", &at, body)
		if err != nil || !json.Valid(wire) || !utf8.Valid(wire) {
			t.Errorf("WireEvent(%q) = %q, %v", body, wire, err)
			continue
		}
		if want := strings.NewReplacer(`\ufffd`, "\ufffd").Replace(c.want); !strings.Contains(string(wire), want) {
			t.Errorf("WireEvent(%q) = %s, want %s in it", body, wire, want)
		}
		if _, err := api.UnmarshalBody(body); err != nil {
			t.Errorf("UnmarshalBody(%q) = %v", body, err)
		}
		var e api.Event
		if err := json.Unmarshal(wire, &e); err != nil || e.Type() != c.body.EventType() {
			t.Errorf("read %s: %v", wire, err)
		}
	}
}

func FuzzWireEvent(f *testing.F) {
	f.Add([]byte(`{"v":1,"type":"agent.message","content":[{"type":"text","text":"x"}]}`))
	f.Add([]byte(`{"type":"x","id":"y","processed_at":null,"a":{"a":1,"a":"\ud800"}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		at := time.Unix(0, 0)
		wire, err := api.WireEvent("sevt_1", &at, body)
		if err != nil {
			return
		}
		var e api.Event
		if err := json.Unmarshal(wire, &e); err == nil && e.ID != "sevt_1" {
			t.Errorf("WireEvent(%q) = %q: id %q", body, wire, e.ID)
		}
		if !json.Valid(wire) {
			t.Errorf("WireEvent(%q) = %q is not JSON", body, wire)
		}
	})
}
