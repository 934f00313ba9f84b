package api_test

import (
	"strings"
	"testing"

	"github.com/planaria/planaria/api"
)

// The example of the design, with everything that is filled in.
const connectorIn = `{"name": "aws", "kind": "mcp", "url": "https://mcp.example.com/mcp",
 "tools": {
  "delete_database": {"class": "irreversible", "identity": ["database_id"], "volatile": ["reference"],
   "reconcile": {"tool": "get_database", "arguments": {"database_id": "${args.database_id}"},
     "happened": [{"pointer": "/status", "equals": "deleted"}],
     "not_happened": [{"pointer": "/status", "equals": "available"}], "settle_seconds": 30}},
  "put_record": {"class": "idempotent", "identity": ["id", "value"], "volatile": ["client_token"],
   "idempotency": {"argument": "client_token", "window_seconds": 86400}}}}`

func TestConnectorGolden(t *testing.T) {
	var in api.ConnectorCreate
	if err := api.DecodeStrict([]byte(connectorIn), &in); err != nil {
		t.Fatal(err)
	}
	c, err := api.ResolveConnector(in)
	if err != nil {
		t.Fatal(err)
	}
	c.ID = "conn_1"
	wantJSON(t, "connector", c, `{"type":"connector","id":"conn_1","version":1,"name":"aws","kind":"mcp","url":"https://mcp.example.com/mcp",
		"trust_annotations":false,"digests":{},"created_at":"0001-01-01T00:00:00.000000Z","updated_at":"0001-01-01T00:00:00.000000Z","tools":{
		"delete_database":{"class":"irreversible","identity":["database_id"],"volatile":["reference"],"repeat":"ask","in_doubt":"wait","timeout_seconds":60,
			"reconcile":{"tool":"get_database","arguments":{"database_id":"${args.database_id}"},"happened":[{"pointer":"/status","equals":"deleted"}],
				"not_happened":[{"pointer":"/status","equals":"available"}],"settle_seconds":30}},
		"put_record":{"class":"idempotent","identity":["id","value"],"volatile":["client_token"],"repeat":"ask","in_doubt":"wait","timeout_seconds":60,
			"idempotency":{"argument":"client_token","window_seconds":86400}}}}`)

	if err := c.CheckTools([]string{"delete_database", "put_record", "get_database"}); err != nil {
		t.Errorf("CheckTools = %v", err)
	}
	for known, path := range map[string]string{"delete_database get_database": "tools.put_record", "delete_database put_record": "tools.delete_database.reconcile.tool"} {
		if err := c.CheckTools(strings.Fields(known)); err == nil || field(t, err) != path {
			t.Errorf("CheckTools(%s) = %v, want an error at %s", known, err, path)
		}
	}

	n, changed, err := api.ApplyConnectorUpdate(c, api.ConnectorUpdate{Tools: api.Null[map[string]api.ToolContract]()})
	if err != nil || !changed || n.Version != 2 || len(n.Tools) != 0 || len(c.Tools) != 2 {
		t.Errorf("update = %+v, %v, %v", n, changed, err)
	}
	if _, changed, err := api.ApplyConnectorUpdate(c, api.ConnectorUpdate{URL: api.Some(c.URL)}); changed || err != nil {
		t.Errorf("update that changes nothing: %v, %v", changed, err)
	}
	if _, _, err := api.ApplyConnectorUpdate(c, api.ConnectorUpdate{Version: api.Some(int64(9))}); err == nil || err.(*api.Error).Status != 409 {
		t.Errorf("wrong version: %v", err)
	}
}

func TestConnectorRules(t *testing.T) {
	tool := func(s string) string {
		return `{"name":"a","kind":"mcp","url":"http://127.0.0.1:9/mcp","tools":{"t":{` + s + `}}}`
	}
	probe := func(s string) string { return tool(`"reconcile":{"tool":"get",` + s + `}`) }
	predicate := func(s string) string { return probe(`"happened":[` + s + `]`) }
	for name, c := range map[string]struct{ in, path, says string }{
		"smallest":             {`{"name":"a","kind":"mcp","url":"http://127.0.0.1:9/mcp"}`, "", ""},
		"example":              {connectorIn, "", ""},
		"defaults":             {tool(``), "", ""},
		"name":                 {`{"name":"A b","kind":"mcp","url":"http://h"}`, "name", ""},
		"no kind":              {`{"name":"a","url":"http://h"}`, "kind", ""},
		"kind of later":        {`{"name":"a","kind":"stdio","url":"http://h"}`, "kind", "not supported yet"},
		"no url":               {`{"name":"a","kind":"mcp"}`, "url", ""},
		"unknown field":        {`{"name":"a","kind":"mcp","url":"http://h","colour":1}`, "colour", "unknown field"},
		"case":                 {`{"Name":"a","kind":"mcp","url":"http://h"}`, "Name", "unknown field"},
		"credential":           {`{"name":"a","kind":"mcp","url":"http://h","credential":{"vault_id":"v"}}`, "credential", "not supported yet"},
		"approval":             {tool(`"approval":"two"`), "tools.t.approval", "not supported yet"},
		"compensate":           {tool(`"compensate":{}`), "tools.t.compensate", "not supported yet"},
		"unknown in contract":  {tool(`"klass":"read"`), "tools.t.klass", "unknown field"},
		"unknown in reconcile": {probe(`"happened":[],"x":1`), "tools.t.reconcile.x", "unknown field"},
		"unknown in predicate": {predicate(`{"pointer":"/a","equal":1}`), "tools.t.reconcile.happened[0].equal", "unknown field"},
		"unknown in error":     {tool(`"pre_execution_errors":[{"pointer":"/a","x":1}]`), "tools.t.pre_execution_errors[0].x", "unknown field"},
		"duplicate":            {tool(`"class":"read","class":"mixed"`), "tools.t.class", "twice"},
		"class":                {tool(`"class":"safe"`), "tools.t.class", ""},
		"identity twice":       {tool(`"identity":["a","a"]`), "tools.t.identity[1]", ""},
		"identity volatile":    {tool(`"identity":["a"],"volatile":["b","a"]`), "tools.t.volatile[1]", ""},
		"idempotent, no key":   {tool(`"class":"idempotent"`), "tools.t.idempotency", ""},
		"two keys":             {tool(`"idempotency":{"argument":"a","natural":true}`), "tools.t.idempotency", ""},
		"no key":               {tool(`"idempotency":{"window_seconds":5}`), "tools.t.idempotency", ""},
		"key in identity":      {tool(`"identity":["a"],"idempotency":{"argument":"a"}`), "tools.t.idempotency.argument", ""},
		"header":               {tool(`"idempotency":{"header":"a b"}`), "tools.t.idempotency.header", ""},
		"window":               {tool(`"idempotency":{"natural":true,"window_seconds":-1}`), "tools.t.idempotency.window_seconds", ""},
		"repeat":               {tool(`"repeat":"again"`), "tools.t.repeat", ""},
		"repeat window":        {tool(`"repeat_window_seconds":-5`), "tools.t.repeat_window_seconds", ""},
		"in doubt":             {tool(`"in_doubt":"ignore"`), "tools.t.in_doubt", ""},
		"timeout":              {tool(`"timeout_seconds":99999`), "tools.t.timeout_seconds", ""},
		"timeout as text":      {tool(`"timeout_seconds":"60"`), "tools.t.timeout_seconds", "must be an integer"},
		"errors":               {tool(`"pre_execution_errors":[404,-32602,{"pointer":"/code","in":["a","b"]},{"is_error":true}]`), "", ""},
		"error code":           {tool(`"pre_execution_errors":[404,7]`), "tools.t.pre_execution_errors[1]", ""},
		"error predicate":      {tool(`"pre_execution_errors":[{"pointer":"/code"}]`), "tools.t.pre_execution_errors[0]", ""},
		"reconcile, tool":      {tool(`"reconcile":{"happened":[{"is_error":true}]}`), "tools.t.reconcile.tool", ""},
		"reconcile, nothing":   {probe(`"settle_seconds":1`), "tools.t.reconcile.happened", ""},
		"reconcile, arguments": {probe(`"arguments":[],"happened":[{"is_error":true}]`), "tools.t.reconcile.arguments", ""},
		"template":             {probe(`"arguments":{"a":["${effect.key} ${args.x}"]},"happened":[{"is_error":true}]`), "", ""},
		"unknown template":     {probe(`"arguments":{"a":["x ${env.HOME}"]},"happened":[{"is_error":true}]`), "tools.t.reconcile.arguments.a[0]", ""},
		"open template":        {probe(`"arguments":{"a":"${args.x"},"happened":[{"is_error":true}]`), "tools.t.reconcile.arguments.a", ""},
		"equals null":          {predicate(`{"pointer":"/a","equals":null}`), "", ""},
		"exists false":         {predicate(`{"pointer":"","exists":false}`), "", ""},
		"no pointer":           {predicate(`{"equals":1}`), "tools.t.reconcile.happened[0]", ""},
		"two tests":            {predicate(`{"pointer":"/a","equals":1,"exists":true}`), "tools.t.reconcile.happened[0]", ""},
		"is_error and more":    {predicate(`{"is_error":true,"pointer":"/a","equals":1}`), "tools.t.reconcile.happened[0]", ""},
		"bad pointer":          {predicate(`{"pointer":"a","equals":1}`), "tools.t.reconcile.happened[0].pointer", ""},
		"bad pattern":          {predicate(`{"pointer":"/a","matches":"("}`), "tools.t.reconcile.happened[0].matches", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var in api.ConnectorCreate
			err := api.DecodeStrict([]byte(c.in), &in)
			if err == nil {
				err = in.Validate()
			}
			switch {
			case c.path == "" && err != nil:
				t.Errorf("error = %v, want nil", err)
			case c.path != "" && err == nil:
				t.Errorf("error = nil, want one at %s", c.path)
			case c.path != "" && (field(t, err) != c.path || !strings.Contains(err.Error(), c.says)):
				t.Errorf("error names %q, want %q with %q (%v)", field(t, err), c.path, c.says, err)
			}
		})
	}
	var u api.ConnectorUpdate
	for in, path := range map[string]string{`{"name":"b"}`: "name", `{"tools":{"t":{"x":1}}}`: "tools.t.x", `{"tools":{"t":{"labels":[]}}}`: "tools.t.labels"} {
		if err := api.DecodeStrict([]byte(in), &u); err == nil || field(t, err) != path {
			t.Errorf("update %s: %v, want an error at %s", in, err, path)
		}
	}
}

// A settle time of zero is a declaration ("believe the target at once"), not
// an omission: it must survive the way through the store.
func TestConnectorKeepsZeroSettle(t *testing.T) {
	for _, c := range []struct{ field, want string }{
		{`,"settle_seconds":0`, `"settle_seconds":0`},
		{`,"settle_seconds":7`, `"settle_seconds":7`},
		{``, ``},
	} {
		var r api.Reconcile
		if err := api.DecodeStrict([]byte(`{"tool":"get","happened":[{"pointer":"","exists":true}],"not_happened":[]`+c.field+`}`), &r); err != nil {
			t.Fatalf("decode %q: %v", c.field, err)
		}
		got, err := api.Encode(r)
		if err != nil {
			t.Fatal(err)
		}
		if has := strings.Contains(string(got), "settle_seconds"); has != (c.want != "") || !strings.Contains(string(got), c.want) {
			t.Errorf("%q came back as %s", c.field, got)
		}
	}
}
