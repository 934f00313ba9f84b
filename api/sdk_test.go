package api_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	sdk "github.com/anthropics/anthropic-sdk-go/v2"
	"github.com/anthropics/anthropic-sdk-go/v2/option"
	"github.com/anthropics/anthropic-sdk-go/v2/packages/param"
	"github.com/anthropics/anthropic-sdk-go/v2/packages/respjson"

	"github.com/planaria/planaria/api"
)

// official checks that a value which an official type decoded has every field
// that the type requires, the constants that it declares, and nothing that it
// does not know but what extra names.
type official struct {
	t     *testing.T
	extra []string
	seen  int // fields that were checked
}

func (o *official) check(path string, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			o.check(path, v.Elem())
		}
		return
	case reflect.Slice:
		for i := range v.Len() {
			o.check(path+"[]", v.Index(i))
		}
		return
	case reflect.Struct:
	default:
		return
	}
	meta := v.FieldByName("JSON")
	if !meta.IsValid() {
		return
	}
	if any := v.MethodByName("AsAny"); any.IsValid() {
		variant := any.Call(nil)[0]
		if variant.IsNil() {
			o.t.Errorf("%s: no variant of %s fits", path, v.Type())
			return
		}
		o.check(path, variant.Elem())
		return
	}
	for i := range v.NumField() {
		f := v.Type().Field(i)
		m := meta.FieldByName(f.Name)
		if f.Name == "JSON" || f.Name == "ExtraFields" || !m.IsValid() {
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		at := path + "." + name
		state := m.Interface().(respjson.Field)
		constant := f.Tag.Get("default")
		o.seen++
		switch {
		case state.Raw() == "" && (f.Tag.Get("api") == "required" || constant != ""):
			o.t.Errorf("%s is required by %s and missing", at, v.Type())
		case state.Raw() != "" && state.Raw() != "null" && !state.Valid():
			o.t.Errorf("%s does not fit %s: %s", at, f.Type, state.Raw())
		case constant != "" && v.Field(i).String() != constant:
			o.t.Errorf("%s = %q, want %q", at, v.Field(i), constant)
		case state.Valid():
			o.check(at, v.Field(i))
		}
	}
	if extra := meta.FieldByName("ExtraFields"); extra.IsValid() && !v.FieldByName("ExtraFields").IsValid() {
		for _, k := range extra.MapKeys() {
			if !slices.Contains(o.extra, k.String()) {
				o.t.Errorf("%s.%s is not known to %s", path, k, v.Type())
			}
		}
	}
}

// decodeOfficial encodes one of our objects and decodes it as an official type.
func decodeOfficial[T any](t *testing.T, ours any, atLeast int, extra ...string) T {
	t.Helper()
	data, err := api.Encode(ours)
	if err != nil {
		t.Fatal(err)
	}
	var v T
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatalf("decode %s as %T: %v", data, v, err)
	}
	o := &official{t: t, extra: extra}
	o.check(reflect.TypeFor[T]().Name(), reflect.ValueOf(v))
	if o.seen < atLeast {
		t.Errorf("only %d fields of %T were checked, want at least %d", o.seen, v, atLeast)
	}
	return v
}

// The check itself must be able to fail.
func TestOfficialCheckFails(t *testing.T) {
	for in, want := range map[string]bool{
		`{"id":"v","type":"vault","display_name":"d","metadata":{},"created_at":"2026-11-29T15:14:05Z","updated_at":"2026-11-29T15:14:05Z","archived_at":null}`:          true,
		`{"id":"v","type":"vault","display_name":"d","metadata":{},"created_at":"2026-11-29T15:14:05Z","updated_at":"2026-11-29T15:14:05Z"}`:                             false,
		`{"id":"v","type":"volt","display_name":"d","metadata":{},"created_at":"2026-11-29T15:14:05Z","updated_at":"2026-11-29T15:14:05Z","archived_at":null}`:           false,
		`{"id":"v","type":"vault","display_name":"d","metadata":{},"created_at":"2026-11-29T15:14:05Z","updated_at":"2026-11-29T15:14:05Z","archived_at":null,"x":1}`:    false,
		`{"id":"v","type":"vault","display_name":["d"],"metadata":{},"created_at":"2026-11-29T15:14:05Z","updated_at":"2026-11-29T15:14:05Z","archived_at":null}`:        false,
		`{"id":"v","type":"vault","display_name":"d","metadata":{},"created_at":"yesterday, about noon","updated_at":"2026-11-29T15:14:05Z","archived_at":null}`:         false,
		`{"id":"v","type":"vault","display_name":"d","metadata":["a"],"created_at":"2026-11-29T15:14:05Z","updated_at":"2026-11-29T15:14:05Z","archived_at":"2026-1-1"}`: false,
	} {
		var v sdk.BetaManagedAgentsVault
		if err := json.Unmarshal([]byte(in), &v); err != nil {
			t.Fatal(err)
		}
		probe := &testing.T{}
		(&official{t: probe}).check("vault", reflect.ValueOf(v))
		if got := !probe.Failed(); got != want {
			t.Errorf("%s passes = %v, want %v", in, got, want)
		}
	}
}

var when = api.At(time.Date(2026, 11, 29, 15, 14, 5, 123456000, time.UTC))

func richAgent(t *testing.T) api.Agent {
	a := resolve(t, `{"name":"a","model":{"id":"claude-opus-5-5","effort":"xhigh","speed":"fast","inference_geo":"eu"},"system":"s","description":"d",
		"tools":[{"type":"agent_toolset_20260401","configs":[{"name":"bash"},{"name":"read"},{"name":"write"},{"name":"edit"},{"name":"glob"},{"name":"grep"},
			{"name":"web_fetch","max_content_tokens":7,"allowed_domains":["a.com"],"url_sources":{"client_tool_results":{"type":"except","tools":[{"type":"tool_reference","name":"x"}]}}},
			{"name":"web_search","blocked_domains":["b.com/x"],"user_location":{"type":"approximate","city":"Bern"},"permission_policy":{"type":"auto"}}]},
			{"type":"mcp_toolset","mcp_server_name":"aws","configs":[{"name":"delete"}]},
			{"type":"custom","name":"ask","description":"ask","input_schema":{"type":"object","properties":{"q":{"type":"string"}},"required":["q"]}}],
		"mcp_servers":[{"type":"url","name":"aws","url":"planaria:aws"}],"skills":[{"type":"custom","skill_id":"skill_1"},{"type":"anthropic","skill_id":"xlsx","version":"3"}],
		"metadata":{"k":"v"}}`)
	a.CreatedAt, a.UpdatedAt = when, when
	return a
}

// Reference section 24, points 5 and 6.
func TestOfficialTypesDecodeOurObjects(t *testing.T) {
	a := richAgent(t)
	got := decodeOfficial[sdk.BetaManagedAgentsAgent](t, a, 60)
	if got.ID != "agent_1" || got.Version != 1 || got.Model.Effort.Type != "xhigh" || got.Model.InferenceGeo != "eu" || got.Model.Speed != "fast" ||
		!got.CreatedAt.Equal(when.Time) || got.System != "s" || len(got.Tools) != 3 || got.Metadata["k"] != "v" || got.ExecutionIdentity.Type != "service_account" {
		t.Errorf("agent = %+v", got)
	}
	small := resolve(t, `{"name":"a","model":"m"}`)
	decodeOfficial[sdk.BetaManagedAgentsAgent](t, small, 16)

	snap, err := api.Snapshot(a, nil)
	if err != nil {
		t.Fatal(err)
	}
	money := api.USD(25_000_000_000)
	s := api.Session{ID: "sesn_1", Status: "idle", Agent: snap, EnvironmentID: "env_1", CreatedAt: when, UpdatedAt: when,
		Budget:    &api.Budget{Type: "limit", MaxListCost: money},
		Usage:     api.Usage{InputTokens: 1, CacheCreation: api.CacheCreation{Ephemeral5m: 2}, ActiveSeconds: 1.5, ListCost: &money, ServerToolUse: &api.ServerToolUse{}},
		Resources: []json.RawMessage{json.RawMessage(`{"id":"sesrsc_1","type":"file","file_id":"file_1","mount_path":"/x","created_at":"2026-11-29T15:14:05Z","updated_at":"2026-11-29T15:14:05Z"}`)},
		VaultIDs:  []string{"vlt_1"}, Planaria: &api.SessionExtension{}}
	session := decodeOfficial[sdk.BetaManagedAgentsSession](t, s, 80, "planaria")
	if session.Status != "idle" || session.Usage.ListCost.Amount != "2500" || session.Budget.MaxListCost.Amount != "2500" || session.Agent.Name != "a" ||
		session.Usage.CacheCreation.Ephemeral5mInputTokens != 2 || session.VaultIDs[0] != "vlt_1" {
		t.Errorf("session = %+v", session)
	}
	decodeOfficial[sdk.BetaManagedAgentsSession](t, api.Session{Agent: snap}, 70)

	thread := api.Thread{ID: "sthr_1", SessionID: "sesn_1", Status: "running", Stats: &api.ThreadStats{StartupSeconds: 1}, Usage: &s.Usage, CreatedAt: when, UpdatedAt: when}
	if err := thread.SetAgent(snap); err != nil {
		t.Fatal(err)
	}
	decodeOfficial[sdk.BetaManagedAgentsSessionThread](t, thread, 70)
	var bare api.Thread
	if err := bare.SetAgent(snap); err != nil {
		t.Fatal(err)
	}
	decodeOfficial[sdk.BetaManagedAgentsSessionThread](t, bare, 60)

	for _, in := range []string{`{"name":"e"}`, `{"name":"e","config":{"type":"cloud","networking":{"type":"limited"}}}`, `{"name":"e","config":{"type":"self_hosted"}}`} {
		var c api.EnvironmentCreate
		if err := api.Decode([]byte(in), &c); err != nil {
			t.Fatal(err)
		}
		e, err := api.ResolveEnvironment(c)
		if err != nil {
			t.Fatal(err)
		}
		decodeOfficial[sdk.BetaEnvironment](t, e, 10)
	}
	decodeOfficial[sdk.BetaManagedAgentsVault](t, api.Vault{ID: "vlt_1", CreatedAt: when, ArchivedAt: &when}, 7)
	cred := decodeOfficial[sdk.BetaManagedAgentsCredential](t, api.Credential{ID: "vcrd_1", VaultID: "vlt_1",
		Auth: api.CredentialAuth{Type: "static_bearer", MCPServerURL: "https://x.example"}}, 10)
	if cred.Auth.MCPServerURL != "https://x.example" {
		t.Errorf("credential = %+v", cred)
	}
}

// Every stored event and every stream frame decodes as its official variant.
func TestOfficialTypesDecodeOurEvents(t *testing.T) {
	snap, err := api.Snapshot(richAgent(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	yes, title, money := true, "t", api.USD(1e9)
	budget := api.Budget{Type: "limit", MaxListCost: money}
	png := &api.Source{Type: "base64", MediaType: "image/png", Data: "aGk="}
	blocks := api.List[api.Block]{api.Text("x"), {Type: "image", Source: png}, {Type: "image", Source: &api.Source{Type: "url", URL: "https://x"}},
		{Type: "document", Title: &title, Source: &api.Source{Type: "text", MediaType: "text/plain", Data: "x"}},
		{Type: "document", Source: &api.Source{Type: "file", FileID: "file_1"}}}
	results := append(slices.Clone(blocks), api.Block{Type: "search_result", From: "s", Title: &title, Content: []api.TextBlock{{Type: "text", Text: "x"}}})
	reason := api.StopReason{Type: "requires_action", EventIDs: []string{"sevt_1"}}
	input := json.RawMessage(`{"a":1}`)
	three := int64(3)
	evaluation := &api.Evaluation{Type: "auto", EvaluatedPermission: &api.AutoPermission{Type: "ask", ReasonCode: "high_risk"}}
	var events []api.EventBody
	for _, typ := range []string{"unknown_error", "model_overloaded_error", "model_rate_limited_error", "model_request_failed_error", "billing_error",
		"tool_use_limit_reached_error", "compaction_limit_reached_error"} {
		events = append(events, &api.SessionError{Error: api.SessionErrorDetail{Type: typ, Message: "m", RetryStatus: api.RetryStatus{Type: "retrying"}}})
	}
	for _, typ := range []string{"end_turn", "retries_exhausted", "budget_reached", "refusal"} {
		events = append(events, &api.SessionStatusIdle{StopReason: api.StopReason{Type: typ}}, &api.ThreadStatusIdle{StopReason: api.StopReason{Type: typ}})
	}
	events = append(events,
		&api.UserMessage{Content: blocks}, &api.UserInterrupt{}, &api.UserInterrupt{SessionThreadID: "sthr_1"},
		&api.UserToolConfirmation{ToolUseID: "sevt_1", Result: "deny", DenyMessage: &title, SessionThreadID: "sthr_1"},
		&api.UserCustomToolResult{CustomToolUseID: "sevt_1", Content: results, IsError: &yes},
		&api.UserToolResult{ToolUseID: "sevt_1", Content: results},
		&api.UserDefineOutcome{Description: "d", Rubric: api.Rubric{Type: "text", Content: "c"}, MaxIterations: &three, OutcomeID: "outc_1"},
		&api.SystemMessage{Content: api.Texts("s")},
		&api.AgentMessage{Content: api.List[api.Block]{api.Text("x"), {Type: "redacted"}}}, &api.AgentThinking{},
		&api.AgentToolUse{Name: "bash", Input: input, EvaluatedPermission: "allow", Evaluation: &api.Evaluation{Type: "always_allow"}},
		&api.AgentToolResult{ToolUseID: "sevt_1", Content: results},
		&api.AgentMCPToolUse{MCPServerName: "aws", Name: "x", EvaluatedPermission: "ask", Evaluation: evaluation, SessionThreadID: "sthr_1"},
		&api.AgentMCPToolResult{MCPToolUseID: "sevt_1", Content: results, IsError: true},
		&api.AgentCustomToolUse{Name: "ask", Input: input}, &api.AgentContextCompacted{},
		&api.SessionStatusRunning{}, &api.SessionStatusIdle{StopReason: reason},
		&api.SessionStatusIdle{StopReason: api.StopReason{Type: "refusal"}, StopDetails: &api.StopDetails{Type: "refusal", Category: &title, Explanation: "e"}},
		&api.SessionStatusRescheduled{}, &api.SessionStatusTerminated{},
		&api.SessionUpdated{Title: api.Some("t"), Metadata: api.Some(api.Metadata{}), Agent: api.Some(snap), Budget: api.Some(budget)}, &api.SessionUpdated{Budget: api.Null[api.Budget]()},
		&api.SessionUsage{Usage: api.Usage{ListCost: &money}, Budget: &budget}, &api.SessionUsage{},
		&api.SessionError{Error: api.SessionErrorDetail{Type: "mcp_connection_failed_error", RetryStatus: api.RetryStatus{Type: "exhausted"}, MCPServerName: "aws"}},
		&api.SessionError{Error: api.SessionErrorDetail{Type: "mcp_authentication_failed_error", RetryStatus: api.RetryStatus{Type: "terminal"}, MCPServerName: "aws"}},
		&api.ThreadStatusRunning{SessionThreadID: "sthr_1", AgentName: "a"}, &api.ThreadStatusIdle{StopReason: reason},
		&api.ThreadStatusRescheduled{}, &api.ThreadStatusTerminated{},
		&api.ModelRequestStart{}, &api.ModelRequestEnd{ModelRequestStartID: "sevt_1", ModelUsage: api.ModelUsage{InputTokens: 1, Speed: "standard"}},
	)
	tested := map[api.EventType]bool{}
	for _, b := range events {
		tested[b.EventType()] = true
		e := api.Event{ID: "sevt_9", ProcessedAt: &when, Body: b}
		got := decodeOfficial[sdk.BetaManagedAgentsSessionEventUnion](t, e, 3)
		if got.ID != "sevt_9" || got.Type != string(b.EventType()) || !got.ProcessedAt.Equal(when.Time) {
			t.Errorf("event %T = %+v", b, got)
		}
		decodeOfficial[sdk.BetaManagedAgentsStreamSessionEventsUnion](t, e, 3)
	}
	frames := []api.Event{{Body: &api.EventStart{Event: api.EventPreview{Type: "agent.message", ID: "sevt_1"}}},
		{Body: &api.EventStart{Event: api.EventPreview{Type: "agent.thinking", ID: "sevt_1"}}},
		{Body: api.TextDelta("sevt_1", 1, "x")}, {ID: "sevt_2", ProcessedAt: &when, Body: &api.SessionDeleted{}}}
	for _, e := range frames {
		tested[e.Type()] = true
		decodeOfficial[sdk.BetaManagedAgentsStreamSessionEventsUnion](t, e, 3)
	}
	for _, typ := range api.BodyTypes() {
		if !tested[typ] && !slices.Contains([]api.EventType{"session.paused", "session.resumed", "stream.reset"}, typ) {
			t.Errorf("%s is not tested", typ)
		}
	}
}

// The requests of the official client are what our types read, and what we
// answer is what it reads.
func TestOfficialClientRequests(t *testing.T) {
	agent := richAgent(t)
	var got []byte
	answer := func(v any, err error) (any, error) { return v, err }
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got, _ = io.ReadAll(r.Body)
		out, err := answer(route(r.URL.Path, got, agent))
		w.Header().Set("Content-Type", "application/json")
		if err != nil {
			e, ok := err.(*api.Error)
			if !ok {
				e = api.NewError(api.ErrAPI, "%v", err)
			}
			w.Header().Set("x-should-retry", "false")
			w.WriteHeader(e.Status)
			out = e.Body("req_1")
		}
		if err := json.NewEncoder(w).Encode(out); err != nil {
			t.Error(err)
		}
	}))
	defer srv.Close()
	ctx := context.Background()
	c := sdk.NewClient(option.WithBaseURL(srv.URL), option.WithAPIKey("k"))

	a, err := c.Beta.Agents.New(ctx, sdk.BetaAgentNewParams{Name: "a", Model: sdk.BetaManagedAgentsModelConfigParams{ID: "claude-opus-5-5"},
		System: param.NewOpt("s"), Metadata: map[string]string{"k": "v"}})
	if err != nil || a.Name != "a" || a.System != "s" || a.Model.Effort.Type != "high" {
		t.Errorf("create: %+v, %v", a, err)
	}
	_, err = c.Beta.Agents.New(ctx, sdk.BetaAgentNewParams{Model: sdk.BetaManagedAgentsModelConfigParams{ID: "m"}})
	var apiErr *sdk.Error
	if err == nil || !asSDK(err, &apiErr) || apiErr.StatusCode != 400 || apiErr.RequestID == "" && !strings.Contains(apiErr.RawJSON(), "name: is required") {
		t.Errorf("create without name: %v", err)
	}
	u, err := c.Beta.Agents.Update(ctx, "agent_1", sdk.BetaAgentUpdateParams{System: param.Null[string](), Version: param.NewOpt(int64(1)), Name: param.NewOpt("b")})
	if err != nil || u.Version != 2 || u.System != "" || u.Name != "b" || u.Description != "d" || len(u.Tools) != 3 {
		t.Errorf("update from %s: %+v, %v", got, u, err)
	}
	sent, err := c.Beta.Sessions.Events.Send(ctx, "sesn_1", sdk.BetaSessionEventSendParams{Events: []sdk.BetaManagedAgentsEventParamsUnion{
		{OfUserMessage: &sdk.BetaManagedAgentsUserMessageEventParams{Content: []sdk.BetaManagedAgentsUserMessageEventParamsContentUnion{
			{OfText: &sdk.BetaManagedAgentsTextBlockParam{Text: "hi", Type: "text"}}}, Type: "user.message"}},
	}})
	if err != nil || len(sent.Data) != 1 || sent.Data[0].ID != "sevt_1" || sent.Data[0].Type != "user.message" {
		t.Errorf("send from %s: %+v, %v", got, sent, err)
	}
	e, err := c.Beta.Environments.New(ctx, sdk.BetaEnvironmentNewParams{Name: "e"})
	if err != nil || e.Config.Type != "cloud" {
		t.Errorf("environment from %s: %+v, %v", got, e, err)
	}
}

func asSDK(err error, into **sdk.Error) bool {
	e, ok := err.(*sdk.Error)
	*into = e
	return ok
}

// route is the smallest server of these requests.
func route(path string, body []byte, agent api.Agent) (any, error) {
	switch path {
	case "/v1/agents":
		var in api.AgentCreate
		if err := api.Decode(body, &in); err != nil {
			return nil, err
		}
		return api.ResolveAgent(in)
	case "/v1/agents/agent_1":
		var in api.AgentUpdate
		if err := api.Decode(body, &in); err != nil {
			return nil, err
		}
		a, _, err := api.ApplyUpdate(agent, in)
		return a, err
	case "/v1/environments":
		var in api.EnvironmentCreate
		if err := api.Decode(body, &in); err != nil {
			return nil, err
		}
		return api.ResolveEnvironment(in)
	case "/v1/sessions/sesn_1/events":
		var in api.SendEvents
		if err := api.Decode(body, &in); err != nil {
			return nil, err
		}
		if err := in.Validate(); err != nil {
			return nil, err
		}
		out := api.SentEvents{}
		for _, b := range in.Events {
			out.Data = append(out.Data, api.Event{ID: "sevt_1", Body: b})
		}
		return out, nil
	}
	return nil, api.Missing("path", path)
}
