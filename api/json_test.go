package api_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/api"
)

// field returns the path that an error names.
func field(t *testing.T, err error) string {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) {
		t.Fatalf("error = %v (%T), want *api.Error", err, err)
	}
	if e.Status != 400 && e.Status != 409 {
		t.Errorf("status = %d, want 400 or 409", e.Status)
	}
	return e.Field()
}

// Trial H1 row 5, attack M7: two readers must not understand two things.
func TestDecodeRefusesAmbiguousText(t *testing.T) {
	for name, c := range map[string]struct{ in, path, says string }{
		"duplicate name":        {`{"name":"a","name":"b"}`, "name", "twice"},
		"duplicate nested":      {`{"name":"a","tools":[{"type":"custom","type":"mcp_toolset"}]}`, "tools[0].type", "twice"},
		"duplicate in raw":      {`{"multiagent":{"type":"a","type":"b"}}`, "multiagent.type", "twice"},
		"duplicate in unknown":  {`{"x":{"a":1,"a":2}}`, "x.a", "twice"},
		"invalid UTF-8":         {"{\"name\":\"a\xff\"}", "name", "UTF-8"},
		"lone surrogate":        {`{"name":"\ud800"}`, "name", "surrogate"},
		"lone low surrogate":    {`{"name":"\udc00x"}`, "name", "surrogate"},
		"surrogate in unknown":  {`{"x":["\ud83d"]}`, "x[0]", "surrogate"},
		"surrogate as name":     {`{"metadata":{"\ud83d":"v"}}`, "", "surrogate"},
		"wrong type":            {`{"name":7}`, "name", "must be a string, got a number"},
		"wrong type in list":    {`{"mcp_servers":[{"name":"a"},{"name":[]}]}`, "mcp_servers[1].name", "must be a string, got an array"},
		"wrong type in model":   {`{"model":{"id":{}}}`, "model.id", "must be a string, got an object"},
		"wrong type, model":     {`{"model":7}`, "model", "must be a model id"},
		"wrong type in configs": {`{"tools":[{"configs":[{"url_sources":{"user_input":3}}]}]}`, "tools[0].configs[0].url_sources.user_input", "must be an object"},
		"metadata value":        {`{"metadata":{"k":1}}`, "metadata.k", "must be a string"},
		"truncated":             {`{"name":"a"`, "", "not valid JSON"},
		"two values":            {`{} {}`, "", "not valid JSON"},
		"empty":                 {` `, "", "empty"},
		"not an object":         {`[]`, "", "must be an object"},
	} {
		t.Run(name, func(t *testing.T) {
			var a api.AgentCreate
			err := api.Decode([]byte(c.in), &a)
			if err == nil {
				t.Fatalf("Decode(%s) = nil, want an error", c.in)
			}
			if got := field(t, err); c.path != "" && got != c.path {
				t.Errorf("Decode(%s) names %q, want %q (%v)", c.in, got, c.path, err)
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("Decode(%s) = %q, want %q in it", c.in, err, c.says)
			}
		})
	}
}

func TestDecodeIsExactAndTolerant(t *testing.T) {
	var a api.AgentCreate
	in := `{"NAME":"wrong","name":"right","model":"m","future":{"x":[1]},"system":"\ud83d\ude00"}`
	if err := api.Decode([]byte(in), &a); err != nil {
		t.Fatalf("Decode(%s) = %v", in, err)
	}
	if a.Name != "right" || a.Model.ID != "m" || a.System == nil || *a.System != "😀" {
		t.Errorf("Decode(%s) = %+v", in, a)
	}
}

func TestOptional(t *testing.T) {
	for in, want := range map[string][3]bool{ // set, null, value
		`{}`:               {false, false, false},
		`{"system":null}`:  {true, true, false},
		`{"system":""}`:    {true, false, true},
		`{"system":"abc"}`: {true, false, true},
	} {
		for how, decode := range map[string]func([]byte, any) error{"Decode": api.Decode, "encoding/json": json.Unmarshal} {
			var u api.AgentUpdate
			if err := decode([]byte(in), &u); err != nil {
				t.Fatalf("%s(%s) = %v", how, in, err)
			}
			_, ok := u.System.Get()
			if got := [3]bool{u.System.IsSet(), u.System.IsNull(), ok}; got != want {
				t.Errorf("%s(%s): set, null, value = %v, want %v", how, in, got, want)
			}
			for how, encode := range map[string]func(any) ([]byte, error){"Encode": api.Encode, "encoding/json": json.Marshal} {
				if out, err := encode(u); err != nil || string(out) != in {
					t.Errorf("%s of %s = %s, %v", how, in, out, err)
				}
			}
		}
	}
}

func TestTime(t *testing.T) {
	at := api.At(time.Date(2026, 11, 29, 16, 14, 5, 123456789, time.FixedZone("x", 3600)))
	out, err := json.Marshal(map[string]any{"at": at, "none": api.AtOrNull(time.Time{})})
	if want := `{"at":"2026-11-29T15:14:05.123456Z","none":null}`; err != nil || string(out) != want {
		t.Errorf("Marshal = %s, %v, want %s", out, err, want)
	}
	for in, want := range map[string]string{
		`"2026-11-29T15:14:05Z"`:               "2026-11-29T15:14:05.000000Z",
		`"2026-11-29T16:14:05.1234567+01:00"`:  "2026-11-29T15:14:05.123456Z",
		`"2026-11-29T15:14:05.999999999Z"`:     "2026-11-29T15:14:05.999999Z",
		`"2026-11-29"`:                         "",
		`5`:                                    "",
		`"2026-11-29T15:14:05.123456+00:00\n"`: "",
	} {
		var got api.Time
		err := api.Decode([]byte(in), &got)
		if (err == nil) != (want != "") || want != "" && got.String() != want {
			t.Errorf("Decode(%s) = %v, %v, want %q", in, got, err, want)
		}
	}
}

func TestListsAndMapsAreNeverNull(t *testing.T) {
	for _, v := range []any{api.Agent{}, api.Session{}, api.Environment{Config: api.EnvironmentConfig{Networking: &api.Networking{Type: "limited"}, Packages: &api.Packages{}}},
		api.Vault{}, api.Credential{}, api.Effect{}, api.Connector{}, api.Node{}, api.Page[api.Effect]{}, api.SessionPage{}, api.SentEvents{}} {
		for how, encode := range map[string]func(any) ([]byte, error){"Encode": api.Encode, "encoding/json": json.Marshal} {
			out, err := encode(v)
			if err != nil {
				t.Fatalf("%s(%T) = %v", how, v, err)
			}
			var m map[string]any
			if err := json.Unmarshal(out, &m); err != nil {
				t.Fatal(err)
			}
			for _, k := range []string{"metadata", "tools", "mcp_servers", "skills", "resources", "vault_ids", "outcome_evaluations",
				"attempts", "evidence", "digests", "roles", "data", "arguments"} {
				if got, ok := m[k]; ok && got == nil {
					t.Errorf("%s(%T).%s is null", how, v, k)
				}
			}
		}
	}
}

func TestErrorEnvelope(t *testing.T) {
	e := api.Invalid("tools[2].name", "is %q", "x")
	out, err := json.Marshal(e.Body("req_1"))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"type":"error","error":{"type":"invalid_request_error","message":"tools[2].name: is \"x\"","details":{"field":"tools[2].name"}},"request_id":"req_1"}`
	if diff := cmp.Diff(want, string(out)); diff != "" {
		t.Errorf("envelope (-want +got):\n%s", diff)
	}
	for typ, want := range map[api.ErrorType]int{api.ErrInvalidRequest: 400, api.ErrAuthentication: 401, api.ErrBilling: 402,
		api.ErrPermission: 403, api.ErrNotFound: 404, api.ErrConflict: 409, api.ErrTooLarge: 413, api.ErrRateLimit: 429,
		api.ErrAPI: 500, api.ErrTimeout: 504, api.ErrOverloaded: 529} {
		if got := api.NewError(typ, "x").Status; got != want {
			t.Errorf("status of %s = %d, want %d", typ, got, want)
		}
	}
}

func TestSecretHides(t *testing.T) {
	c := api.CredentialCreate{Auth: api.CredentialAuthParams{Type: "static_bearer", MCPServerURL: "https://x.example", Token: "hunter2"}}
	for _, s := range []string{c.Auth.Token.String(), c.Auth.Token.GoString(), c.Auth.Token.LogValue().String()} {
		if s != "REDACTED" {
			t.Errorf("secret shows as %q", s)
		}
	}
	if out, _ := json.Marshal(c); !strings.Contains(string(out), "hunter2") {
		t.Errorf("the wire must hold the secret, got %s", out)
	}
	c.Auth.Token = "hunter2 with spaces"
	if err := c.Validate(); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("Validate = %v, want an error without the secret", err)
	}
}

func TestNormalizeURL(t *testing.T) {
	for in, want := range map[string]string{
		"HTTPS://MCP.Example.com:443/mcp/": "https://mcp.example.com/mcp",
		"http://h:80":                      "http://h",
		"http://h:8080/A/?q=1":             "http://h:8080/A?q=1",
		"https://[::1]:443/x":              "https://[::1]/x",
		"planaria:aws":                     "planaria:aws",
	} {
		if got, err := api.NormalizeURL(in); err != nil || got != want {
			t.Errorf("NormalizeURL(%q) = %q, %v, want %q", in, got, err, want)
		}
	}
}

func TestEncodeIsStable(t *testing.T) {
	m := api.Metadata{}
	for i := range 50 {
		m[strings.Repeat("k", i+1)] = "<&>"
	}
	first, err := api.Encode(m)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(first), `"k":"<&>"`) {
		t.Errorf("Encode = %s, want no HTML escapes", first)
	}
	for range 20 {
		if again, err := api.Encode(m); err != nil || string(again) != string(first) {
			t.Fatalf("Encode = %s, %v, want %s", again, err, first)
		}
	}
}
