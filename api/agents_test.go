package api_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/api"
)

func decodeAgent(t *testing.T, in string) api.AgentCreate {
	t.Helper()
	var c api.AgentCreate
	if err := api.Decode([]byte(in), &c); err != nil {
		t.Fatalf("Decode(%s) = %v", in, err)
	}
	return c
}

func resolve(t *testing.T, in string) api.Agent {
	t.Helper()
	a, err := api.ResolveAgent(decodeAgent(t, in))
	if err != nil {
		t.Fatalf("ResolveAgent(%s) = %v", in, err)
	}
	a.ID = "agent_1"
	return a
}

// wantJSON compares a value's encoding with a text, whatever the order of keys.
func wantJSON(t *testing.T, what string, v any, want string) {
	t.Helper()
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	var got, exp any
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(want), &exp); err != nil {
		t.Fatalf("%s: bad wanted text: %v", what, err)
	}
	if diff := cmp.Diff(exp, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestResolveAgentGolden(t *testing.T) {
	wantJSON(t, "smallest", resolve(t, `{"name":"a","model":"claude-opus-5-5"}`), `{"type":"agent","id":"agent_1","version":1,
		"name":"a","description":null,"system":null,"model":{"id":"claude-opus-5-5","effort":{"type":"high"},"speed":"standard"},
		"tools":[],"mcp_servers":[],"skills":[],"multiagent":null,"execution_identity":{"type":"service_account"},"metadata":{},
		"created_at":"0001-01-01T00:00:00.000000Z","updated_at":"0001-01-01T00:00:00.000000Z","archived_at":null}`)

	a := resolve(t, `{"name":"a","model":{"id":"m","effort":"low","speed":"fast","inference_geo":"eu"},"system":"s","description":"d",
		"tools":[{"type":"agent_toolset_20260401","default_config":{"permission_policy":{"type":"always_ask"}},
			"configs":[{"name":"bash","enabled":false},{"name":"web_fetch","permission_policy":{"type":"auto"}},
				{"name":"web_search","allowed_domains":["example.com/docs"],"user_location":{"type":"approximate","city":"Bern"}}]},
			{"type":"mcp_toolset","mcp_server_name":"aws","configs":[{"name":"delete","type":"ignored","permission_policy":{"type":"always_allow"}}]},
			{"type":"custom","name":"ask","description":"ask","input_schema":{"type":"object","properties":{"q":{"type":"string"}}}}],
		"mcp_servers":[{"type":"url","name":"aws","url":"planaria:aws"}],"metadata":{"k":"v"}}`)
	wantJSON(t, "tools", a.Tools, `[
		{"type":"agent_toolset_20260401","default_config":{"enabled":true,"permission_policy":{"type":"always_ask"}},"configs":[
			{"type":"bash","name":"bash","enabled":false,"permission_policy":{"type":"always_ask"}},
			{"type":"web_fetch","name":"web_fetch","enabled":true,"permission_policy":{"type":"auto"},"url_sources":null},
			{"type":"web_search","name":"web_search","enabled":true,"permission_policy":{"type":"always_ask"},
				"allowed_domains":["example.com/docs"],"user_location":{"type":"approximate","city":"Bern"}}]},
		{"type":"mcp_toolset","mcp_server_name":"aws","default_config":{"enabled":true,"permission_policy":{"type":"always_ask"}},
			"configs":[{"name":"delete","enabled":true,"permission_policy":{"type":"always_allow"}}]},
		{"type":"custom","name":"ask","description":"ask","input_schema":{"type":"object","properties":{"q":{"type":"string"}}}}]`)
	wantJSON(t, "model", a.Model, `{"id":"m","effort":{"type":"low"},"speed":"fast","inference_geo":"eu"}`)
	if on, policy := a.Tools[1].Policy("delete"); !on || policy != "always_allow" {
		t.Errorf("Policy(delete) = %v, %s", on, policy)
	}
	if on, policy := a.Tools[1].Policy("other"); !on || policy != "always_ask" {
		t.Errorf("Policy(other) = %v, %s", on, policy)
	}
	if on, _ := a.Tools[0].Policy("bash"); on {
		t.Error("Policy(bash) is enabled")
	}

	// What was encoded reads back to the same object.
	out, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	var back api.Agent
	if err := json.Unmarshal(out, &back); err != nil {
		t.Fatal(err)
	}
	if again, _ := json.Marshal(back); string(again) != string(out) {
		t.Errorf("read back:\n%s\nwant\n%s", again, out)
	}

	wantJSON(t, "url sources", resolve(t, `{"name":"a","model":"m","tools":[{"type":"agent_toolset_20260401","configs":[
		{"name":"web_fetch","max_content_tokens":5,"url_sources":{"user_input":"none","client_tool_results":{"type":"only","tools":[{"type":"tool_reference","name":"x"}]}}}]}]}`).Tools[0].Configs[0],
		`{"type":"web_fetch","name":"web_fetch","enabled":true,"permission_policy":{"type":"always_allow"},"max_content_tokens":5,
		"url_sources":{"user_input":{"type":"none"},"client_tool_results":{"type":"only","tools":[{"type":"tool_reference","name":"x"}]},"server_tool_results":{"type":"all"}}}`)
}

// Reference sections 3.1, 11.1, 11.5 and 12.1.
func TestAgentRules(t *testing.T) {
	long := func(n int) string { return strings.Repeat("é", n) }
	many := func(n int, s string) string { return strings.TrimSuffix(strings.Repeat(s+",", n), ",") }
	custom := func(s string) string {
		return `{"name":"a","model":"m","tools":[{"type":"custom",` + s + `}]}`
	}
	schema := func(s string) string {
		return custom(`"name":"x","description":"d","input_schema":` + s)
	}
	builtin := func(s string) string {
		return `{"name":"a","model":"m","tools":[{"type":"agent_toolset_20260401","configs":[` + s + `]}]}`
	}
	server := func(name, url string) string {
		return `{"name":"a","model":"m","tools":[{"type":"mcp_toolset","mcp_server_name":"s"}],"mcp_servers":[{"type":"url","name":"` + name + `","url":"` + url + `"}]}`
	}
	for name, c := range map[string]struct{ in, path string }{
		"no name":               {`{"model":"m"}`, "name"},
		"blank name":            {`{"name":" \t","model":"m"}`, "name"},
		"longest name":          {`{"name":"` + long(256) + `","model":"m"}`, ""},
		"name too long":         {`{"name":"` + long(257) + `","model":"m"}`, "name"},
		"no model":              {`{"name":"a"}`, "model"},
		"null model":            {`{"name":"a","model":null}`, "model"},
		"model without id":      {`{"name":"a","model":{"effort":"low"}}`, "model"},
		"unknown effort":        {`{"name":"a","model":{"id":"m","effort":"huge"}}`, "model.effort"},
		"effort object":         {`{"name":"a","model":{"id":"m","effort":{"type":"xhigh"}}}`, ""},
		"unknown speed":         {`{"name":"a","model":{"id":"m","speed":"slow"}}`, "model.speed"},
		"description too long":  {`{"name":"a","model":"m","description":"` + long(2049) + `"}`, "description"},
		"system too long":       {`{"name":"a","model":"m","system":"` + long(100_001) + `"}`, "system"},
		"17 metadata":           {`{"name":"a","model":"m","metadata":{"a":"","b":"","c":"","d":"","e":"","f":"","g":"","h":"","i":"","j":"","k":"","l":"","m":"","n":"","o":"","p":"","q":""}}`, "metadata"},
		"metadata key":          {`{"name":"a","model":"m","metadata":{"` + long(65) + `":""}}`, "metadata"},
		"metadata value":        {`{"name":"a","model":"m","metadata":{"k":"` + long(513) + `"}}`, "metadata.k"},
		"unknown tool type":     {`{"name":"a","model":"m","tools":[{"type":"bash"}]}`, "tools[0].type"},
		"no tool type":          {`{"name":"a","model":"m","tools":[{}]}`, "tools[0].type"},
		"129 tools":             {`{"name":"a","model":"m","tools":[` + many(129, `{"type":"agent_toolset_20260401"}`) + `]}`, "tools"},
		"two agent toolsets":    {`{"name":"a","model":"m","tools":[` + many(2, `{"type":"agent_toolset_20260401"}`) + `]}`, "tools[1].type"},
		"unknown built-in":      {builtin(`{"name":"telnet"}`), "tools[0].configs[0].name"},
		"built-in twice":        {builtin(`{"name":"bash"},{"name":"bash"}`), "tools[0].configs[1].name"},
		"built-in type differs": {builtin(`{"name":"bash","type":"read"}`), "tools[0].configs[0].type"},
		"built-in type equal":   {builtin(`{"name":"bash","type":"bash"}`), ""},
		"browser":               {builtin(`{"name":"browser"}`), ""},
		"browser with web keys": {builtin(`{"name":"browser","allowed_domains":["a.com"]}`), "tools[0].configs[0]"},
		"custom browser":        {custom(`"name":"browser","description":"d","input_schema":{"type":"object"}`), ""},
		"two browsers": {`{"name":"a","model":"m","tools":[{"type":"custom","name":"browser","description":"d","input_schema":{"type":"object"}},
			{"type":"agent_toolset_20260401","configs":[{"name":"browser"}]}]}`, "tools[0].name"},
		"unknown policy":          {builtin(`{"name":"bash","permission_policy":{"type":"never"}}`), "tools[0].configs[0].permission_policy.type"},
		"web settings on bash":    {builtin(`{"name":"bash","allowed_domains":["a.com"]}`), "tools[0].configs[0]"},
		"both domain lists":       {builtin(`{"name":"web_search","allowed_domains":["a.com"],"blocked_domains":["b.com"]}`), "tools[0].configs[0].blocked_domains"},
		"empty domain list":       {builtin(`{"name":"web_search","allowed_domains":[]}`), "tools[0].configs[0].allowed_domains"},
		"fetch domain with path":  {builtin(`{"name":"web_fetch","allowed_domains":["a.com/x"]}`), "tools[0].configs[0].allowed_domains[0]"},
		"all sources none":        {builtin(`{"name":"web_fetch","url_sources":{"user_input":"none","client_tool_results":"none","server_tool_results":{"type":"none"}}}`), "tools[0].configs[0].url_sources"},
		"only without tools":      {builtin(`{"name":"web_fetch","url_sources":{"client_tool_results":{"type":"only"}}}`), "tools[0].configs[0].url_sources.client_tool_results.tools"},
		"user input only":         {builtin(`{"name":"web_fetch","url_sources":{"user_input":{"type":"only"}}}`), "tools[0].configs[0].url_sources.user_input.type"},
		"mcp toolset, no server":  {`{"name":"a","model":"m","tools":[{"type":"mcp_toolset","mcp_server_name":"s"}]}`, "tools[0].mcp_server_name"},
		"mcp toolset, no name":    {`{"name":"a","model":"m","tools":[{"type":"mcp_toolset"}]}`, "tools[0].mcp_server_name"},
		"server unused":           {`{"name":"a","model":"m","mcp_servers":[{"type":"url","name":"s","url":"https://s.example"}]}`, "mcp_servers[0].name"},
		"server used twice":       {`{"name":"a","model":"m","tools":[` + many(2, `{"type":"mcp_toolset","mcp_server_name":"s"}`) + `],"mcp_servers":[{"type":"url","name":"s","url":"https://s.example"}]}`, "tools[1].mcp_server_name"},
		"server name twice":       {`{"name":"a","model":"m","tools":[{"type":"mcp_toolset","mcp_server_name":"s"}],"mcp_servers":[` + many(2, `{"type":"url","name":"s","url":"https://s.example"}`) + `]}`, "mcp_servers[1].name"},
		"21 servers":              {`{"name":"a","model":"m","mcp_servers":[` + many(21, `{"type":"url","name":"s","url":"https://s.example"}`) + `]}`, "mcp_servers"},
		"server ok":               {server("s", "https://mcp.example.com/mcp"), ""},
		"server of a connector":   {server("s", "planaria:aws-prod"), ""},
		"connector's name":        {server("s", "planaria:AWS"), "mcp_servers[0].url"},
		"server, relative":        {server("s", "/mcp"), "mcp_servers[0].url"},
		"server, file":            {server("s", "file:///etc/passwd"), "mcp_servers[0].url"},
		"server with credentials": {server("s", "https://u:p@h"), "mcp_servers[0].url"},
		"server url too long":     {server("s", "https://h/"+strings.Repeat("a", 2048)), "mcp_servers[0].url"},
		"skill type":              {`{"name":"a","model":"m","skills":[{"type":"x","skill_id":"y"}]}`, "skills[0].type"},
		"skill id":                {`{"name":"a","model":"m","skills":[{"type":"custom"}]}`, "skills[0].skill_id"},
		"aws role":                {`{"name":"a","model":"m","execution_identity":{"type":"aws_role"}}`, "execution_identity.role_arn"},
		"multiagent type":         {`{"name":"a","model":"m","multiagent":{"type":"swarm"}}`, "multiagent.type"},
		"coordinator of none":     {`{"name":"a","model":"m","multiagent":{"type":"coordinator","agents":[]}}`, "multiagent.agents"},
		"coordinator":             {`{"name":"a","model":"m","multiagent":{"type":"coordinator","agents":["agent_x"]}}`, ""},
		"custom ok":               {schema(`{"type":"object"}`), ""},
		"custom name":             {custom(`"name":"a b"`), "tools[0].name"},
		"custom name long":        {custom(`"name":"` + strings.Repeat("a", 129) + `"`), "tools[0].name"},
		"custom like built-in":    {custom(`"name":"bash"`), "tools[0].name"},
		"custom like mcp":         {custom(`"name":"mcp__x"`), "tools[0].name"},
		"custom no description":   {custom(`"name":"x","input_schema":{"type":"object"}`), "tools[0].description"},
		"custom no schema":        {custom(`"name":"x","description":"d"`), "tools[0].input_schema"},
		"custom twice":            {`{"name":"a","model":"m","tools":[` + many(2, `{"type":"custom","name":"x","description":"d","input_schema":{"type":"object"}}`) + `]}`, "tools[1].name"},
		"schema root":             {schema(`{"type":"string"}`), "tools[0].input_schema.type"},
		"schema oneOf":            {schema(`{"type":"object","oneOf":[]}`), "tools[0].input_schema.oneOf"},
		"schema $ref":             {schema(`{"type":"object","properties":{"a":{"items":{"$ref":"#/x"}}}}`), "tools[0].input_schema.properties.a.items.$ref"},
		"property named $ref":     {schema(`{"type":"object","properties":{"$ref":{"type":"string"}}}`), ""},
		"property name long":      {schema(`{"type":"object","properties":{"` + strings.Repeat("a", 65) + `":{}}}`), "tools[0].input_schema.properties"},
		"schema is text":          {schema(`"object"`), "tools[0].input_schema"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := api.ResolveAgent(decodeAgent(t, c.in))
			if c.path == "" {
				if err != nil {
					t.Errorf("ResolveAgent = %v, want nil", err)
				}
				return
			}
			if err == nil {
				t.Fatalf("ResolveAgent = nil, want an error at %s", c.path)
			}
			if got := field(t, err); got != c.path {
				t.Errorf("error names %q, want %q (%v)", got, c.path, err)
			}
		})
	}
}

// Reference section 3.3.
func TestApplyUpdate(t *testing.T) {
	base := resolve(t, `{"name":"a","model":{"id":"m","effort":"low","speed":"fast","inference_geo":"eu"},"description":"d","system":"s",
		"tools":[{"type":"mcp_toolset","mcp_server_name":"s"}],"mcp_servers":[{"type":"url","name":"s","url":"https://s.example"}],
		"skills":[{"type":"custom","skill_id":"skill_1","version":"v1"}],"execution_identity":{"type":"aws_role","role_arn":"arn"},
		"multiagent":{"type":"multiagent_20261001","subagents":{"type":"enabled","inline_agents":{"type":"enabled"}},"workflows":{"type":"disabled"}},
		"metadata":{"k":"v","l":"w"}}`)
	before, _ := json.Marshal(base)
	for name, c := range map[string]struct {
		in      string
		changed bool
		path    string // refused there
		want    string // members that the result must have
	}{
		"nothing":               {`{}`, false, "", `{"version":1}`},
		"same":                  {`{"name":"a","system":"s","metadata":{"k":"v"}}`, false, "", `{"version":1}`},
		"right version":         {`{"version":1,"name":"b"}`, true, "", `{"version":2,"name":"b"}`},
		"version below 1":       {`{"version":0}`, false, "version", ``},
		"name null":             {`{"name":null}`, false, "name", ``},
		"name empty":            {`{"name":""}`, false, "name", ``},
		"model null":            {`{"model":null}`, false, "model", ``},
		"model empty":           {`{"model":""}`, false, "model", ``},
		"description null":      {`{"description":null}`, true, "", `{"description":null}`},
		"description empty":     {`{"description":""}`, true, "", `{"description":null}`},
		"system null":           {`{"system":null}`, true, "", `{"system":null}`},
		"same model keeps":      {`{"model":"m"}`, true, "", `{"model":{"id":"m","effort":{"type":"low"},"speed":"standard"}}`},
		"other model resets":    {`{"model":"n"}`, true, "", `{"model":{"id":"n","effort":{"type":"high"},"speed":"standard"}}`},
		"tools null":            {`{"tools":null}`, false, "mcp_servers[0].name", ``},
		"tools and servers":     {`{"tools":null,"mcp_servers":[]}`, true, "", `{"tools":[],"mcp_servers":[]}`},
		"skills null":           {`{"skills":null}`, true, "", `{"skills":[]}`},
		"identity null":         {`{"execution_identity":null}`, true, "", `{"execution_identity":{"type":"service_account"}}`},
		"metadata merges":       {`{"metadata":{"k":null,"n":"x"}}`, true, "", `{"metadata":{"l":"w","n":"x"}}`},
		"metadata empty stays":  {`{"metadata":{"k":""}}`, true, "", `{"metadata":{"k":"","l":"w"}}`},
		"metadata unknown key":  {`{"metadata":{"zzz":null}}`, false, "", `{"version":1}`},
		"multiagent null":       {`{"multiagent":null}`, true, "", `{"multiagent":null}`},
		"multiagent replaced":   {`{"multiagent":{"type":"coordinator","agents":["x"]}}`, true, "", `{"multiagent":{"type":"coordinator","agents":["x"]}}`},
		"multiagent merges":     {`{"multiagent":{"type":"multiagent_20261001","subagents":{"type":"enabled","predefined_agents":["y"]}}}`, true, "", `{"multiagent":{"type":"multiagent_20261001","subagents":{"type":"enabled","inline_agents":{"type":"enabled"},"predefined_agents":["y"]},"workflows":{"type":"disabled"}}}`},
		"multiagent other type": {`{"multiagent":{"type":"multiagent_20261001","subagents":{"type":"disabled"}}}`, true, "", `{"multiagent":{"type":"multiagent_20261001","subagents":{"type":"disabled"},"workflows":{"type":"disabled"}}}`},
	} {
		t.Run(name, func(t *testing.T) {
			var u api.AgentUpdate
			if err := api.Decode([]byte(c.in), &u); err != nil {
				t.Fatal(err)
			}
			got, changed, err := api.ApplyUpdate(base, u)
			if c.path != "" {
				if err == nil || field(t, err) != c.path {
					t.Fatalf("ApplyUpdate(%s) = %v, want an error at %s", c.in, err, c.path)
				}
				return
			}
			if err != nil || changed != c.changed {
				t.Fatalf("ApplyUpdate(%s): changed %v, %v, want %v", c.in, changed, err, c.changed)
			}
			out, _ := json.Marshal(got)
			var gotM, wantM map[string]any
			json.Unmarshal(out, &gotM)
			if err := json.Unmarshal([]byte(c.want), &wantM); err != nil {
				t.Fatal(err)
			}
			for k, want := range wantM {
				if diff := cmp.Diff(want, gotM[k]); diff != "" {
					t.Errorf("ApplyUpdate(%s).%s (-want +got):\n%s", c.in, k, diff)
				}
			}
			if changed && got.Version != 2 {
				t.Errorf("version = %d, want 2", got.Version)
			}
		})
	}
	if after, _ := json.Marshal(base); string(after) != string(before) {
		t.Errorf("an update changed the agent that it was given:\n%s", after)
	}

	// A wrong version is a conflict, also when nothing would change.
	_, _, err := api.ApplyUpdate(base, api.AgentUpdate{Version: api.Some(int64(7))})
	if e, ok := err.(*api.Error); !ok || e.Status != 409 || e.Type != api.ErrConflict {
		t.Errorf("wrong version: %v, want a 409", err)
	}
	archived := base
	archived.ArchivedAt = &base.CreatedAt
	if _, _, err := api.ApplyUpdate(archived, api.AgentUpdate{Name: api.Some("b")}); err == nil {
		t.Error("an archived agent was updated")
	}
}

// Reference section 6.1: overrides at the creation of a session.
func TestSnapshot(t *testing.T) {
	a := resolve(t, `{"name":"a","model":{"id":"m","effort":"low"},"system":"s","metadata":{"k":"v"}}`)
	a.Version = 3
	s, err := api.Snapshot(a, nil)
	if err != nil {
		t.Fatal(err)
	}
	wantJSON(t, "snapshot", s, `{"type":"agent","id":"agent_1","version":3,"name":"a","description":null,"system":"s",
		"model":{"id":"m","effort":{"type":"low"},"speed":"standard"},"tools":[],"mcp_servers":[],"skills":[],"multiagent":null,
		"execution_identity":{"type":"service_account"}}`)
	for in, want := range map[string]string{
		`{"type":"agent_with_overrides","id":"agent_1"}`:                                                `"s" m low 0`,
		`{"type":"agent_with_overrides","id":"agent_1","system":null}`:                                  `null m low 0`,
		`{"type":"agent_with_overrides","id":"agent_1","system":"t","model":"n"}`:                       `"t" n high 0`,
		`{"type":"agent_with_overrides","id":"agent_1","tools":[{"type":"agent_toolset_20260401"}]}`:    `"s" m low 1`,
		`{"type":"agent_with_overrides","id":"agent_1","model":null}`:                                   `agent.model`,
		`{"type":"agent_with_overrides","id":"agent_1","tools":[{"type":"x"}]}`:                         `agent.tools[0].type`,
		`{"type":"agent_with_overrides","id":"agent_1","mcp_servers":[{"name":"s","url":"https://s"}]}`: `agent.mcp_servers[0].name`,
	} {
		var ref api.AgentRef
		if err := api.Decode([]byte(in), &ref); err != nil {
			t.Fatal(err)
		}
		s, err := api.Snapshot(a, ref.Overrides)
		var got string
		if err != nil {
			got = field(t, err)
			if !strings.HasPrefix(err.Error(), got+": ") {
				t.Errorf("Snapshot(%s) = %q, want it to begin with %s", in, err, got)
			}
		} else {
			system, _ := json.Marshal(s.System)
			got = string(system) + " " + s.Model.ID + " " + string(s.Model.Effort) + " " + string(rune('0'+len(s.Tools)))
		}
		if got != want {
			t.Errorf("Snapshot(%s) = %s, want %s", in, got, want)
		}
	}
}
