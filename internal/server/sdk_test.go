package server_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	anthropic "github.com/anthropics/anthropic-sdk-go/v2"
	"github.com/anthropics/anthropic-sdk-go/v2/option"
	"github.com/anthropics/anthropic-sdk-go/v2/packages/param"
)

// sdk is the official client, pointed at the server under test.
func (e *env) sdk(opts ...option.RequestOption) anthropic.Client {
	return anthropic.NewClient(append([]option.RequestOption{option.WithBaseURL(e.url), option.WithAPIKey(adminKey)}, opts...)...)
}

// apiError is the error of an SDK call, which must have this status and a request id.
func apiError(t *testing.T, err error, status int) *anthropic.Error {
	t.Helper()
	var ae *anthropic.Error
	if !errors.As(err, &ae) || ae.StatusCode != status || ae.RequestID == "" {
		t.Fatalf("error = %v, want status %d with a request id", err, status)
	}
	return ae
}

func TestSDKAgents(t *testing.T) {
	e := newEnv(t)
	c, ctx := e.sdk(), t.Context()
	a, err := c.Beta.Agents.New(ctx, anthropic.BetaAgentNewParams{
		Name:   "helper",
		Model:  anthropic.BetaManagedAgentsModelConfigParams{ID: anthropic.BetaManagedAgentsModelClaudeOpus5_5},
		System: anthropic.String("Be brief."), Metadata: map[string]string{"team": "core"},
		Tools: []anthropic.BetaAgentNewParamsToolUnion{{OfAgentToolset20260401: &anthropic.BetaManagedAgentsAgentToolset20260401Params{}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if a.Version != 1 || a.Type != "agent" || a.System != "Be brief." || len(a.Tools) != 1 || a.CreatedAt.IsZero() || a.ExecutionIdentity.Type != "service_account" {
		t.Errorf("agent = %s", a.RawJSON())
	}
	up, err := c.Beta.Agents.Update(ctx, a.ID, anthropic.BetaAgentUpdateParams{Version: anthropic.Int(1), Name: anthropic.String("renamed")})
	if err != nil || up.Version != 2 || up.Name != "renamed" || !up.UpdatedAt.After(a.UpdatedAt) {
		t.Fatalf("update = %+v, %v", up, err)
	}
	if same, err := c.Beta.Agents.Update(ctx, a.ID, anthropic.BetaAgentUpdateParams{Name: anthropic.String("renamed")}); err != nil || same.Version != 2 {
		t.Errorf("no-op = %+v, %v", same, err)
	}
	_, err = c.Beta.Agents.Update(ctx, a.ID, anthropic.BetaAgentUpdateParams{Version: anthropic.Int(1), Name: anthropic.String("stale")})
	apiError(t, err, 409)
	if cleared, err := c.Beta.Agents.Update(ctx, a.ID, anthropic.BetaAgentUpdateParams{System: param.Null[string]()}); err != nil || cleared.JSON.System.Valid() {
		t.Errorf("cleared system = %v, %v", cleared.RawJSON(), err)
	}
	old, err := c.Beta.Agents.Get(ctx, a.ID, anthropic.BetaAgentGetParams{Version: anthropic.Int(1)})
	if err != nil || old.Name != "helper" {
		t.Errorf("version 1 = %+v, %v", old, err)
	}
	_, err = c.Beta.Agents.Get(ctx, a.ID, anthropic.BetaAgentGetParams{Version: anthropic.Int(99)})
	apiError(t, err, 404)
	versions := c.Beta.Agents.Versions.ListAutoPaging(ctx, a.ID, anthropic.BetaAgentVersionListParams{Limit: anthropic.Int(1)})
	var seen []int64
	for versions.Next() {
		seen = append(seen, versions.Current().Version)
	}
	if err := versions.Err(); err != nil || !slices.Equal(seen, []int64{3, 2, 1}) {
		t.Errorf("versions = %v, %v", seen, err)
	}
	for range 4 {
		if _, err := c.Beta.Agents.New(ctx, anthropic.BetaAgentNewParams{Name: "more", Model: anthropic.BetaManagedAgentsModelConfigParams{ID: "any-model"}}); err != nil {
			t.Fatal(err)
		}
	}
	pager := c.Beta.Agents.ListAutoPaging(ctx, anthropic.BetaAgentListParams{Limit: anthropic.Int(2), CreatedAtGte: anthropic.Time(a.CreatedAt)})
	n := 0
	for pager.Next() {
		n++
	}
	if pager.Err() != nil || n != 5 {
		t.Errorf("listed %d agents, %v", n, pager.Err())
	}
	arch, err := c.Beta.Agents.Archive(ctx, a.ID, anthropic.BetaAgentArchiveParams{})
	if err != nil || arch.ArchivedAt.IsZero() {
		t.Errorf("archive = %+v, %v", arch, err)
	}
	_, err = c.Beta.Agents.Update(ctx, a.ID, anthropic.BetaAgentUpdateParams{Name: anthropic.String("again")})
	apiError(t, err, 400)
}

func TestSDKEnvironments(t *testing.T) {
	e := newEnv(t)
	c, ctx := e.sdk(), t.Context()
	env, err := c.Beta.Environments.New(ctx, anthropic.BetaEnvironmentNewParams{Name: "env", Description: anthropic.String("for tests")})
	if err != nil || env.Type != "environment" || env.Config.Type != "cloud" {
		t.Fatalf("environment = %+v, %v", env, err)
	}
	up, err := c.Beta.Environments.Update(ctx, env.ID, anthropic.BetaEnvironmentUpdateParams{Name: anthropic.String("other")})
	if err != nil || up.Name != "other" || up.Description != "for tests" {
		t.Errorf("update = %+v, %v", up, err)
	}
	if got, err := c.Beta.Environments.Get(ctx, env.ID, anthropic.BetaEnvironmentGetParams{}); err != nil || got.Name != "other" {
		t.Errorf("get = %+v, %v", got, err)
	}
	if arch, err := c.Beta.Environments.Archive(ctx, env.ID, anthropic.BetaEnvironmentArchiveParams{}); err != nil || arch.ArchivedAt == "" {
		t.Errorf("archive = %+v, %v", arch, err)
	}
	_, err = c.Beta.Environments.Update(ctx, env.ID, anthropic.BetaEnvironmentUpdateParams{Name: anthropic.String("late")})
	if ae := apiError(t, err, 400); ae.ErrorCode() != "environment_archived" {
		t.Errorf("error code = %q", ae.ErrorCode())
	}
	list, err := c.Beta.Environments.List(ctx, anthropic.BetaEnvironmentListParams{})
	if err != nil || len(list.Data) != 0 {
		t.Errorf("list without archived = %+v, %v", list, err)
	}
	list, err = c.Beta.Environments.List(ctx, anthropic.BetaEnvironmentListParams{IncludeArchived: anthropic.Bool(true)})
	if err != nil || len(list.Data) != 1 {
		t.Errorf("list with archived = %+v, %v", list, err)
	}
	del, err := c.Beta.Environments.Delete(ctx, env.ID, anthropic.BetaEnvironmentDeleteParams{})
	if err != nil || del.Type != "environment_deleted" {
		t.Errorf("delete = %+v, %v", del, err)
	}
	_, err = c.Beta.Environments.Get(ctx, env.ID, anthropic.BetaEnvironmentGetParams{})
	apiError(t, err, 404)
}

func TestSDKVaults(t *testing.T) {
	e := newEnv(t)
	c, ctx := e.sdk(), t.Context()
	v, err := c.Beta.Vaults.New(ctx, anthropic.BetaVaultNewParams{DisplayName: "keys", Metadata: map[string]string{"a": "b"}})
	if err != nil || v.Type != "vault" || v.DisplayName != "keys" {
		t.Fatalf("vault = %+v, %v", v, err)
	}
	create := func(url string) (*anthropic.BetaManagedAgentsCredential, error) {
		return c.Beta.Vaults.Credentials.New(ctx, v.ID, anthropic.BetaVaultCredentialNewParams{
			Auth: anthropic.BetaVaultCredentialNewParamsAuthUnion{OfStaticBearer: &anthropic.BetaManagedAgentsStaticBearerCreateParams{
				Token: "canary-credential-value", MCPServerURL: url}}})
	}
	cr, err := create("https://mcp.example.com/mcp")
	if err != nil || cr.Type != "vault_credential" || cr.VaultID != v.ID || cr.Auth.Type != "static_bearer" {
		t.Fatalf("credential = %+v, %v", cr, err)
	}
	_, err = create("HTTPS://MCP.example.com:443/mcp/") // the same address
	apiError(t, err, 409)
	_, err = c.Beta.Vaults.Credentials.New(ctx, v.ID, anthropic.BetaVaultCredentialNewParams{
		Auth: anthropic.BetaVaultCredentialNewParamsAuthUnion{OfMCPOAuth: &anthropic.BetaManagedAgentsMCPOAuthCreateParams{
			AccessToken: "x", MCPServerURL: "https://mcp.example.com/other"}}})
	apiError(t, err, 400)
	up, err := c.Beta.Vaults.Credentials.Update(ctx, cr.ID, anthropic.BetaVaultCredentialUpdateParams{VaultID: v.ID, DisplayName: anthropic.String("mcp")})
	if err != nil || up.DisplayName != "mcp" {
		t.Errorf("update = %+v, %v", up, err)
	}
	list, err := c.Beta.Vaults.Credentials.List(ctx, v.ID, anthropic.BetaVaultCredentialListParams{})
	if err != nil || len(list.Data) != 1 {
		t.Errorf("list = %+v, %v", list, err)
	}
	if got, err := c.Beta.Vaults.Credentials.Archive(ctx, cr.ID, anthropic.BetaVaultCredentialArchiveParams{VaultID: v.ID}); err != nil || got.ArchivedAt.IsZero() {
		t.Errorf("archive = %+v, %v", got, err)
	}
	if del, err := c.Beta.Vaults.Credentials.Delete(ctx, cr.ID, anthropic.BetaVaultCredentialDeleteParams{VaultID: v.ID}); err != nil || del.Type != "vault_credential_deleted" {
		t.Errorf("delete = %+v, %v", del, err)
	}
	if got, err := c.Beta.Vaults.Archive(ctx, v.ID, anthropic.BetaVaultArchiveParams{}); err != nil || got.ArchivedAt.IsZero() {
		t.Errorf("archive vault = %+v, %v", got, err)
	}
	if del, err := c.Beta.Vaults.Delete(ctx, v.ID, anthropic.BetaVaultDeleteParams{}); err != nil || del.Type != "vault_deleted" {
		t.Errorf("delete vault = %+v, %v", del, err)
	}
	if n := e.occurrences("canary-credential-value"); n != 0 {
		t.Errorf("the credential stands %d times in clear in the data folder or the log (L6)", n)
	}
}

func userMessage(text string) anthropic.BetaManagedAgentsEventParamsUnion {
	return anthropic.BetaManagedAgentsEventParamsUnion{OfUserMessage: &anthropic.BetaManagedAgentsUserMessageEventParams{
		Content: []anthropic.BetaManagedAgentsUserMessageEventParamsContentUnion{{OfText: &anthropic.BetaManagedAgentsTextBlockParam{Text: text}}}}}
}

// The life of a session as the official client sees it: create, stream, send,
// list, update, archive, delete.
func TestSDKSessions(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	c, ctx := e.sdk(), t.Context()
	s, err := c.Beta.Sessions.New(ctx, anthropic.BetaSessionNewParams{
		Agent: anthropic.BetaSessionNewParamsAgentUnion{OfString: anthropic.String(o.agent)}, EnvironmentID: o.environment,
		Title: anthropic.String("first"), Metadata: map[string]string{"k": "v"}, VaultIDs: []string{o.vault}})
	if err != nil {
		t.Fatal(err)
	}
	if s.Status != "idle" || s.Agent.ID != o.agent || s.Agent.Version != 1 || len(s.VaultIDs) != 1 || s.Title != "first" {
		t.Errorf("session = %s", s.RawJSON())
	}
	stream := c.Beta.Sessions.Events.StreamEvents(ctx, s.ID, anthropic.BetaSessionEventStreamParams{
		EventDeltas: []anthropic.BetaManagedAgentsDeltaType{"agent.message", "agent.thinking"}})
	defer stream.Close()
	sent, err := c.Beta.Sessions.Events.Send(ctx, s.ID, anthropic.BetaSessionEventSendParams{Events: []anthropic.BetaManagedAgentsEventParamsUnion{userMessage("think slowly")}})
	if err != nil || len(sent.Data) != 1 {
		t.Fatalf("sent = %+v, %v", sent, err)
	}
	var types []string
	var started, text string
	for stream.Next() {
		ev := stream.Current()
		types = append(types, string(ev.Type))
		switch ev.Type {
		case "event_start":
			if start := ev.AsEventStart(); start.Event.Type == "agent.message" {
				started = start.Event.ID
			}
		case "event_delta":
			text += ev.AsEventDelta().Delta.Content.Text
		case "agent.message":
			if m := ev.AsAgentMessage(); m.ID != started {
				t.Errorf("the preview announced %q, the event is %q", started, m.ID)
			} else if full := m.Content[0].Text; len(text) > len(full) || full[:len(text)] != text {
				t.Errorf("previews %q are not the beginning of %q", text, full)
			}
		}
		if ev.Type == "session.status_idle" {
			break
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"user.message", "session.status_running", "session.thread_status_running", "span.model_request_start", "event_start",
		"agent.thinking", "agent.message", "span.model_request_end", "session.thread_status_idle", "session.usage", "session.status_idle"} {
		if !slices.Contains(types, want) {
			t.Errorf("the stream lacks %s: %v", want, types)
		}
	}
	// Status is committed before the event that announces it.
	if got, err := c.Beta.Sessions.Get(ctx, s.ID, anthropic.BetaSessionGetParams{}); err != nil || got.Status != "idle" || got.Usage.OutputTokens == 0 {
		t.Errorf("session right after the idle event = %s, %v", got.RawJSON(), err)
	}
	pager := c.Beta.Sessions.Events.ListAutoPaging(ctx, s.ID, anthropic.BetaSessionEventListParams{Limit: anthropic.Int(3), Order: "asc"})
	var last time.Time
	n := 0
	for pager.Next() {
		if at := pager.Current().ProcessedAt; !at.After(last) {
			t.Errorf("event %s: processed_at %s does not increase", pager.Current().ID, at)
		} else {
			last = at
		}
		n++
	}
	if pager.Err() != nil || n < 8 {
		t.Errorf("listed %d events, %v", n, pager.Err())
	}
	only, err := c.Beta.Sessions.Events.List(ctx, s.ID, anthropic.BetaSessionEventListParams{Types: []anthropic.BetaManagedAgentsSessionEventType{"agent.message"}})
	if err != nil || len(only.Data) != 1 {
		t.Errorf("events of one type = %+v, %v", only, err)
	}
	up, err := c.Beta.Sessions.Update(ctx, s.ID, anthropic.BetaSessionUpdateParams{Title: anthropic.String("second"), Metadata: map[string]string{"x": "y"}})
	if err != nil || up.Title != "second" || up.Metadata["x"] != "y" || up.Metadata["k"] != "v" {
		t.Errorf("update = %v, %v", up.RawJSON(), err)
	}
	threads, err := c.Beta.Sessions.Threads.List(ctx, s.ID, anthropic.BetaSessionThreadListParams{})
	if err != nil || len(threads.Data) != 1 || threads.Data[0].SessionID != s.ID {
		t.Fatalf("threads = %+v, %v", threads, err)
	}
	if res, err := c.Beta.Sessions.Resources.List(ctx, s.ID, anthropic.BetaSessionResourceListParams{}); err != nil || len(res.Data) != 0 {
		t.Errorf("resources = %+v, %v", res, err)
	}
	sessions := c.Beta.Sessions.ListAutoPaging(ctx, anthropic.BetaSessionListParams{Limit: anthropic.Int(1), AgentID: anthropic.String(o.agent)})
	n = 0
	for sessions.Next() {
		n++
	}
	if sessions.Err() != nil || n != 2 {
		t.Errorf("listed %d sessions, %v", n, sessions.Err())
	}
	arch, err := c.Beta.Sessions.Archive(ctx, s.ID, anthropic.BetaSessionArchiveParams{})
	if err != nil || arch.Status != "terminated" || arch.ArchivedAt.IsZero() {
		t.Errorf("archive = %v, %v", arch.RawJSON(), err)
	}
	_, err = c.Beta.Sessions.Events.Send(ctx, s.ID, anthropic.BetaSessionEventSendParams{Events: []anthropic.BetaManagedAgentsEventParamsUnion{userMessage("late")}})
	apiError(t, err, 400)
	if del, err := c.Beta.Sessions.Delete(ctx, s.ID, anthropic.BetaSessionDeleteParams{}); err != nil || del.Type != "session_deleted" {
		t.Errorf("delete = %+v, %v", del, err)
	}
	_, err = c.Beta.Sessions.Get(ctx, s.ID, anthropic.BetaSessionGetParams{})
	apiError(t, err, 404)
}

// lookup is a tool that the client performs.
type lookup struct{ calls atomic.Int64 }

func (*lookup) Name() string        { return "lookup" }
func (*lookup) Description() string { return "look up" }
func (*lookup) InputSchema() anthropic.BetaToolInputSchemaParam {
	return anthropic.BetaToolInputSchemaParam{}
}

func (l *lookup) Execute(context.Context, json.RawMessage) ([]anthropic.BetaToolResultBlockParamContentUnion, error) {
	l.calls.Add(1)
	return []anthropic.BetaToolResultBlockParamContentUnion{{OfText: &anthropic.BetaTextBlockParam{Text: "found"}}}, nil
}

// The official tool runner (reference section 9.11): stream, list, perform,
// answer, and stop by itself when the turn is over.
func TestSDKToolRunner(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	c := e.sdk()
	tool, idle := &lookup{}, 50*time.Millisecond
	for turn := int64(1); turn <= 2; turn++ {
		e.say(o.session, "use the tool")
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		r := c.Beta.Sessions.Events.NewToolRunner(ctx, o.session, anthropic.SessionToolRunnerOptions{
			Tools: []anthropic.BetaTool{tool}, MaxIdle: &idle, Logger: slog.New(slog.DiscardHandler)})
		n := 0
		for r.Next() {
			n++
		}
		if err := r.Err(); err != nil && !errors.Is(err, anthropic.ErrIdleTimeout) || n != 1 || tool.calls.Load() != turn {
			t.Fatalf("turn %d: %d calls answered, %d performed, %v; %s", turn, n, tool.calls.Load(), err, e.story())
		}
		if err := r.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		cancel()
		e.idleFor(o.session, "end_turn")
	}
}
