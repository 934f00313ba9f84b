package api_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/planaria/planaria/api"
)

// Reference section 6.1.
func TestSessionCreateRules(t *testing.T) {
	with := func(s string) string { return `{"agent":"agent_1","environment_id":"env_1",` + s + `}` }
	repeat := func(n int, s string) string { return strings.TrimSuffix(strings.Repeat(s+",", n), ",") }
	for name, c := range map[string]struct{ in, path string }{
		"smallest":              {`{"agent":"agent_1","environment_id":"env_1"}`, ""},
		"no agent":              {`{"environment_id":"env_1"}`, "agent"},
		"no environment":        {`{"agent":"agent_1"}`, "environment_id"},
		"agent reference":       {`{"agent":{"type":"agent","id":"a","version":2},"environment_id":"e"}`, ""},
		"agent version":         {`{"agent":{"type":"agent","id":"a","version":0},"environment_id":"e"}`, "agent.version"},
		"agent without id":      {`{"agent":{"type":"agent"},"environment_id":"e"}`, "agent"},
		"agent type":            {`{"agent":{"type":"x","id":"a"},"environment_id":"e"}`, "agent.type"},
		"agent list":            {`{"agent":[],"environment_id":"e"}`, "agent"},
		"overrides":             {`{"agent":{"type":"agent_with_overrides","id":"a","system":null,"tools":[]},"environment_id":"e"}`, ""},
		"model null":            {`{"agent":{"type":"agent_with_overrides","id":"a","model":null},"environment_id":"e"}`, "agent.model"},
		"wrong type inside":     {`{"agent":{"type":"agent_with_overrides","id":"a","tools":[{"type":5}]},"environment_id":"e"}`, "agent.tools[0].type"},
		"budget":                {with(`"budget":{"type":"limit","max_list_cost":{"amount":"2500","currency":"USD"}}`), ""},
		"budget type":           {with(`"budget":{"max_list_cost":{"amount":"2500","currency":"USD"}}`), "budget.type"},
		"budget, number":        {with(`"budget":{"type":"limit","max_list_cost":{"amount":2500,"currency":"USD"}}`), "budget.max_list_cost.amount"},
		"budget, decimal":       {with(`"budget":{"type":"limit","max_list_cost":{"amount":"25.00","currency":"USD"}}`), "budget.max_list_cost.amount"},
		"budget, zeros":         {with(`"budget":{"type":"limit","max_list_cost":{"amount":"025","currency":"USD"}}`), "budget.max_list_cost.amount"},
		"budget, zero":          {with(`"budget":{"type":"limit","max_list_cost":{"amount":"0","currency":"USD"}}`), "budget.max_list_cost.amount"},
		"budget, huge":          {with(`"budget":{"type":"limit","max_list_cost":{"amount":"999999999999","currency":"USD"}}`), "budget.max_list_cost.amount"},
		"budget, currency":      {with(`"budget":{"type":"limit","max_list_cost":{"amount":"25","currency":"EUR"}}`), "budget.max_list_cost.currency"},
		"initial events":        {with(`"initial_events":[{"type":"user.message","content":[{"type":"text","text":"x"}]}]`), ""},
		"51 initial events":     {with(`"initial_events":[` + repeat(51, `{"type":"user.message","content":[{"type":"text","text":"x"}]}`) + `]`), "initial_events"},
		"initial interrupt":     {with(`"initial_events":[{"type":"user.interrupt"}]`), "initial_events[0].type"},
		"initial unknown":       {with(`"initial_events":[{"type":"x"}]`), "initial_events[0].type"},
		"initial, deep":         {with(`"initial_events":[{"type":"user.message","content":[{"type":"text","text":""}]}]`), "initial_events[0].content[0].text"},
		"two outcomes":          {with(`"initial_events":[` + repeat(2, `{"type":"user.define_outcome","description":"d","rubric":{"type":"text","content":"c"}}`) + `]`), "initial_events[1].type"},
		"vaults":                {with(`"vault_ids":["vlt_1",""]`), "vault_ids[1]"},
		"51 vaults":             {with(`"vault_ids":[` + repeat(51, `"v"`) + `]`), "vault_ids"},
		"metadata":              {with(`"metadata":{"":"x"}`), "metadata"},
		"resource type":         {with(`"resources":[{"type":"disk"}]`), "resources[0].type"},
		"resource, file":        {with(`"resources":[{"type":"file"}]`), "resources[0].file_id"},
		"resource, repository":  {with(`"resources":[{"type":"github_repository","url":"https://github.com/a/b","checkout":{"type":"tag"}}]`), "resources[0].checkout.type"},
		"resource, commit":      {with(`"resources":[{"type":"github_repository","url":"https://github.com/a/b","checkout":{"type":"commit"}}]`), "resources[0].checkout.sha"},
		"resource, access":      {with(`"resources":[{"type":"memory_store","memory_store_id":"m","access":"all"}]`), "resources[0].access"},
		"nine memory stores":    {with(`"resources":[` + repeat(9, `{"type":"memory_store","memory_store_id":"m"}`) + `]`), "resources"},
		"501 resources":         {with(`"resources":[` + repeat(501, `{"type":"file","file_id":"f"}`) + `]`), "resources"},
		"unknown field is fine": {with(`"new":{"a":1}`), ""},
	} {
		t.Run(name, func(t *testing.T) {
			var s api.SessionCreate
			err := api.Decode([]byte(c.in), &s)
			if err == nil {
				err = s.Validate()
			}
			switch {
			case c.path == "" && err != nil:
				t.Errorf("error = %v, want nil", err)
			case c.path != "" && err == nil:
				t.Errorf("error = nil, want one at %s", c.path)
			case c.path != "" && field(t, err) != c.path:
				t.Errorf("error names %q, want %q (%v)", field(t, err), c.path, err)
			}
		})
	}
}

func TestAgentRefForms(t *testing.T) {
	for _, in := range []string{`"agent_1"`, `{"type":"agent","id":"agent_1","version":2}`,
		`{"type":"agent_with_overrides","id":"agent_1","system":null,"tools":[]}`} {
		var r api.AgentRef
		if err := api.Decode([]byte(in), &r); err != nil {
			t.Fatal(err)
		}
		wantJSON(t, in, r, in)
	}
}

// Reference section 6.3.
func TestApplySessionUpdate(t *testing.T) {
	title := "t"
	base := api.SessionConfig{Title: &title, Metadata: api.Metadata{"k": "v"},
		Budget: &api.Budget{Type: "limit", MaxListCost: api.Money{Amount: "100", Currency: "USD"}}}
	agent, err := api.Snapshot(resolve(t, `{"name":"a","model":"m"}`), nil)
	if err != nil {
		t.Fatal(err)
	}
	base.Agent = agent
	none := base
	none.Budget = nil
	budget := func(n string) string {
		return `{"budget":{"type":"limit","max_list_cost":{"amount":"` + n + `","currency":"USD"}}}`
	}
	for name, c := range map[string]struct {
		cfg      api.SessionConfig
		in, want string // want: the event, "" when nothing changed, "!path code" when refused
	}{
		"nothing":        {base, `{}`, ``},
		"same":           {base, `{"title":"t","metadata":{"k":"v"}}`, ``},
		"title":          {base, `{"title":"u"}`, `{"title":"u"}`},
		"title null":     {base, `{"title":null}`, `{"title":null}`},
		"metadata":       {base, `{"metadata":{"k":null,"l":"w"}}`, `{"metadata":{"l":"w"}}`},
		"vaults":         {base, `{"vault_ids":[]}`, `!vault_ids`},
		"agent null":     {base, `{"agent":null}`, `!agent`},
		"agent bad":      {base, `{"agent":{"mcp_servers":[{"name":"s","url":"https://s"}]}}`, `!agent.mcp_servers[0].name`},
		"budget raised":  {base, budget("101"), budget("101")},
		"budget lowered": {base, budget("51"), budget("51")},
		"budget spent":   {base, budget("50"), `!budget.max_list_cost.amount budget_not_raised`},
		"budget removed": {base, `{"budget":null}`, `{"budget":null}`},
		"budget added":   {none, budget("500"), `!budget budget_create_only`},
		"none removed":   {none, `{"budget":null}`, ``},
	} {
		t.Run(name, func(t *testing.T) {
			var u api.SessionUpdate
			if err := api.Decode([]byte(c.in), &u); err != nil {
				t.Fatal(err)
			}
			got, ev, err := api.ApplySessionUpdate(c.cfg, u, 50)
			if refused, ok := strings.CutPrefix(c.want, "!"); ok {
				if err == nil {
					t.Fatalf("error = nil, want %s", refused)
				}
				if is := strings.TrimSpace(field(t, err) + " " + err.(*api.Error).Code()); is != refused {
					t.Errorf("refused at %s, want %s (%v)", is, refused, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if c.want == "" {
				if ev != nil {
					t.Errorf("event = %+v, want none", ev)
				}
				return
			}
			if ev == nil {
				t.Fatal("no event")
			}
			wantJSON(t, "event", ev, c.want)
			if same, _ := json.Marshal(got); string(same) == mustJSON(t, c.cfg) {
				t.Error("nothing changed")
			}
		})
	}
	var u api.SessionUpdate
	if err := api.Decode([]byte(`{"agent":{"tools":[{"type":"agent_toolset_20260401"}]}}`), &u); err != nil {
		t.Fatal(err)
	}
	got, ev, err := api.ApplySessionUpdate(base, u, 0)
	if err != nil || ev == nil || len(got.Agent.Tools) != 1 || len(base.Agent.Tools) != 0 {
		t.Errorf("agent update: %v, %+v", err, ev)
	}
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func TestMoney(t *testing.T) {
	for nano, want := range map[int64]string{0: "0", 4_999_999: "0", 5_000_000: "1", 10_000_000: "1", 25_000_000_000: "2500"} {
		if got := api.USD(nano); got.Amount != want || got.Currency != "USD" {
			t.Errorf("USD(%d) = %+v, want %s", nano, got, want)
		}
	}
}

// Reference sections 4.1 to 4.3.
func TestEnvironments(t *testing.T) {
	for name, c := range map[string]struct{ in, path, config string }{
		"default":     {`{"name":"e"}`, "", `{"type":"cloud","networking":{"type":"unrestricted"},"packages":{"type":"packages","apt":[],"cargo":[],"gem":[],"go":[],"npm":[],"pip":[]}}`},
		"limited":     {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited","allowed_hosts":["*.example.com","a.1b.c"]}}}`, "", `{"type":"cloud","networking":{"type":"limited","allowed_hosts":["*.example.com","a.1b.c"],"allow_mcp_servers":false,"allow_package_managers":false},"packages":{"type":"packages","apt":[],"cargo":[],"gem":[],"go":[],"npm":[],"pip":[]}}`},
		"self-hosted": {`{"name":"e","config":{"type":"self_hosted"}}`, "", `{"type":"self_hosted"}`},
		"no name":     {`{}`, "name", ""},
		"type":        {`{"name":"e","config":{"type":"moon"}}`, "config.type", ""},
		"no type":     {`{"name":"e","config":{}}`, "config.type", ""},
		"self, net":   {`{"name":"e","config":{"type":"self_hosted","networking":{"type":"unrestricted"}}}`, "config", ""},
		"net type":    {`{"name":"e","config":{"type":"cloud","networking":{"type":"open"}}}`, "config.networking.type", ""},
		"net extras":  {`{"name":"e","config":{"type":"cloud","networking":{"type":"unrestricted","allow_mcp_servers":true}}}`, "config.networking", ""},
		"host":        {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited","allowed_hosts":["a.com","https://b.com"]}}}`, "config.networking.allowed_hosts[1]", ""},
		"host, port":  {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited","allowed_hosts":["a.com:80"]}}}`, "config.networking.allowed_hosts[0]", ""},
		"IPv4":        {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited","allowed_hosts":["10.0.0.1"]}}}`, "config.networking.allowed_hosts[0]", ""},
		"IPv6":        {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited","allowed_hosts":["a.com","2001:db8::1"]}}}`, "config.networking.allowed_hosts[1]", ""},
		"brackets":    {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited","allowed_hosts":["[::1]"]}}}`, "config.networking.allowed_hosts[0]", ""},
		"short IPv4":  {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited","allowed_hosts":["127.1"]}}}`, "config.networking.allowed_hosts[0]", ""},
		"hex":         {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited","allowed_hosts":["*.0x7f"]}}}`, "config.networking.allowed_hosts[0]", ""},
		"one number":  {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited","allowed_hosts":["2130706433"]}}}`, "config.networking.allowed_hosts[0]", ""},
		"packages":    {`{"name":"e","config":{"type":"cloud","networking":{"type":"limited"},"packages":{"pip":["x==1"]}}}`, "config.networking.allow_package_managers", ""},
		"flag":        {`{"name":"e","config":{"type":"cloud","packages":{"pip":["--index-url=x"]}}}`, "config.packages.pip[0]", ""},
		"scope":       {`{"name":"e","scope":"account"}`, "scope", ""},
		"metadata":    {`{"name":"e","metadata":{"":"x"}}`, "metadata", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var in api.EnvironmentCreate
			if err := api.Decode([]byte(c.in), &in); err != nil {
				t.Fatal(err)
			}
			e, err := api.ResolveEnvironment(in)
			if c.path != "" {
				if err == nil || field(t, err) != c.path {
					t.Errorf("error = %v, want one at %s", err, c.path)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			wantJSON(t, "config", e.Config, c.config)
		})
	}

	e, err := api.ResolveEnvironment(api.EnvironmentCreate{Name: "e", Metadata: map[string]string{"k": "v", "l": "w"},
		Config: &api.EnvironmentConfigParams{Type: "cloud", Packages: &api.Packages{Pip: []string{"x"}}}})
	if err != nil {
		t.Fatal(err)
	}
	e.ID = "env_1"
	update := func(in string) (api.Environment, bool, error) {
		var u api.EnvironmentUpdate
		if err := api.Decode([]byte(in), &u); err != nil {
			t.Fatal(err)
		}
		return api.ApplyEnvironmentUpdate(e, u)
	}
	n, changed, err := update(`{"description":"","metadata":{"k":"","l":null,"m":"x"},"config":{"type":"cloud","networking":{"type":"limited","allow_package_managers":true}}}`)
	if err != nil || !changed || n.Description == nil || *n.Description != "" || len(n.Metadata) != 1 ||
		n.Config.Networking.Type != "limited" || len(n.Config.Packages.Pip) != 1 {
		t.Errorf("update = %+v, %v, %v", n, changed, err)
	}
	if _, changed, err := update(`{"name":"e"}`); changed || err != nil {
		t.Errorf("an update that changes nothing: %v, %v", changed, err)
	}
	if _, _, err := update(`{"config":{"type":"self_hosted"}}`); err == nil || err.(*api.Error).Code() != api.CodeInvalidConfigTypeChange {
		t.Errorf("config type change: %v", err)
	}
	e.ArchivedAt = &e.CreatedAt
	if _, _, err := update(`{"name":"x"}`); err == nil || err.(*api.Error).Code() != api.CodeEnvironmentArchived || err.(*api.Error).Status != 400 {
		t.Errorf("update of an archived environment: %v", err)
	}
}

// Reference section 15.
func TestVaultsAndCredentials(t *testing.T) {
	for name, c := range map[string]struct{ in, path string }{
		"bearer":      {`{"auth":{"type":"static_bearer","mcp_server_url":"https://x.example","token":"t"}}`, ""},
		"no auth":     {`{}`, "auth.type"},
		"oauth":       {`{"auth":{"type":"mcp_oauth","mcp_server_url":"https://x.example","access_token":"t"}}`, "auth.type"},
		"no url":      {`{"auth":{"type":"static_bearer","token":"t"}}`, "auth.mcp_server_url"},
		"no token":    {`{"auth":{"type":"static_bearer","mcp_server_url":"https://x.example"}}`, "auth.token"},
		"header":      {`{"auth":{"type":"static_bearer","mcp_server_url":"https://x.example","token":"a\r\nX: y"}}`, "auth.token"},
		"name length": {`{"display_name":"` + strings.Repeat("x", 256) + `","auth":{"type":"static_bearer","mcp_server_url":"https://x.example","token":"t"}}`, "display_name"},
	} {
		var in api.CredentialCreate
		if err := api.Decode([]byte(c.in), &in); err != nil {
			t.Fatal(err)
		}
		err := in.Validate()
		if (err == nil) != (c.path == "") || err != nil && field(t, err) != c.path {
			t.Errorf("%s: error = %v, want one at %q", name, err, c.path)
		}
	}
	if err := (api.VaultCreate{DisplayName: " "}).Validate(); err == nil || field(t, err) != "display_name" {
		t.Errorf("blank vault: %v", err)
	}
	v, changed, err := api.ApplyVaultUpdate(api.Vault{ID: "v", DisplayName: "a", Metadata: api.Metadata{"k": "v"}},
		api.VaultUpdate{Metadata: api.Some(api.MetadataPatch{"k": nil})})
	if err != nil || !changed || len(v.Metadata) != 0 || v.DisplayName != "a" {
		t.Errorf("vault update = %+v, %v, %v", v, changed, err)
	}

	cred := api.Credential{ID: "c", Auth: api.CredentialAuth{Type: "static_bearer", MCPServerURL: "https://x.example"}}
	for in, want := range map[string]string{
		`{}`:                   "token=, changed=false",
		`{"display_name":"n"}`: "token=, changed=true",
		`{"auth":{"type":"static_bearer","token":"new"}}`:                        "token=new, changed=true",
		`{"auth":{"type":"static_bearer","mcp_server_url":"https://other"}}`:     "auth.mcp_server_url",
		`{"auth":{"type":"mcp_oauth"}}`:                                          "auth.type",
		`{"auth":{"type":"static_bearer","token":"a b"}}`:                        "auth.token",
		`{"auth":{"type":"static_bearer","mcp_server_url":"https://x.example"}}`: "token=, changed=false",
	} {
		var u api.CredentialUpdate
		if err := api.Decode([]byte(in), &u); err != nil {
			t.Fatal(err)
		}
		_, token, changed, err := api.ApplyCredentialUpdate(cred, u)
		got := "token=" + token.Reveal() + ", changed="
		if changed {
			got += "true"
		} else {
			got += "false"
		}
		if err != nil {
			got = field(t, err)
		}
		if got != want {
			t.Errorf("update %s: %s, want %s", in, got, want)
		}
	}
}

func TestSettleAndKeys(t *testing.T) {
	for in, path := range map[string]string{
		`{"outcome":"happened"}`: "",
		`{"outcome":"happened","response":{"a":1},"evidence":"saw it"}`: "",
		`{"outcome":"happened","response":null}`:                        "",
		`{"outcome":"happened","response":5}`:                           "response",
		`{"outcome":"did_not_happen","response":"x"}`:                   "response",
		`{"outcome":"probe"}`:                                           "",
		`{"outcome":"tell"}`:                                            "",
		`{"outcome":"maybe"}`:                                           "outcome",
		`{}`:                                                            "outcome",
		`{"outcome":"tell","evidence":"` + strings.Repeat("x", 10_001) + `"}`: "evidence",
	} {
		var s api.SettleRequest
		if err := api.DecodeStrict([]byte(in), &s); err != nil {
			t.Fatal(err)
		}
		err := s.Validate()
		if (err == nil) != (path == "") || err != nil && field(t, err) != path {
			t.Errorf("settle %s: %v, want an error at %q", in, err, path)
		}
	}
	var s api.SettleRequest
	if err := api.DecodeStrict([]byte(`{"outcome":"tell","why":"x"}`), &s); err == nil || field(t, err) != "why" {
		t.Errorf("unknown field: %v", err)
	}
	if err := (api.APIKeyCreate{Name: "n", Role: "root"}).Validate(); err == nil || field(t, err) != "role" {
		t.Errorf("role: %v", err)
	}
	if err := (api.APIKeyCreate{Name: "n", Role: api.RoleViewer}).Validate(); err != nil {
		t.Error(err)
	}
	if err := (api.WorkspaceCreate{}).Validate(); err == nil || field(t, err) != "name" {
		t.Errorf("workspace: %v", err)
	}
}
