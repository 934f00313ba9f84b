package effect_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/store"
)

func TestCanonical(t *testing.T) {
	for in, want := range map[string]string{
		``:                             `{}`,
		`null`:                         `{}`,
		` { "b" : 1 , "a" : [ 1.0 ]} `: `{"a":[1],"b":1}`,
		`{"n":1e2,"m":-0}`:             `{"m":0,"n":100}`,
		`{"s":"\u00e9\/"}`:             `{"s":"é/"}`,
		`{"s":"\ud83d\ude00"}`:         `{"s":"😀"}`,
		`{"n":9007199254740992}`:       `{"n":9007199254740992}`,
		`{"f":0.1,"o":{"a":1,"A ":2}}`: `{"f":0.1,"o":{"A ":2,"a":1}}`,
	} {
		got, err := effect.Canonical([]byte(in))
		if err != nil || string(got) != want {
			t.Errorf("%s: got %s, %v, want %s", in, got, err, want)
		}
	}
	for in, want := range map[string]string{
		`[1]`:                        "object",
		`"x"`:                        "object",
		`{"a":1,"a":1}`:              "duplicate",
		`{"o":{"a":1,"\u0061":2}}`:   "duplicate",
		`{"a":1,"A":2}`:              "case",
		`{"s":1,"ſ":2}`:              "case", // folds to s
		`{"n":9007199254740993}`:     "as a string",
		`{"n":-9007199254740993}`:    "as a string",
		`{"n":12345678901234567890}`: "as a string", // trap P9
		`{"n":9007199254740993.0}`:   "as a string",
		`{"n":1e400}`:                "as a string",
		`{"s":"\ud800"}`:             "surrogate",
		"{\"s\":\"\xc3\x28\"}":       "UTF-8",
		`{"s":"\u0000"}`:             "NUL",
		`{"\u0000":1}`:               "NUL",
		`{} {}`:                      "more than one",
		`{"a":}`:                     "strict",
		`{"a":1`:                     "strict",
		`{'a':1}`:                    "strict",
		strings.Repeat(`{"a":`, 65) + `1` + strings.Repeat(`}`, 65):       "deeper",
		`{"a":` + strings.Repeat(`[`, 64) + strings.Repeat(`]`, 64) + `}`: "deeper",
		`{"s":"` + strings.Repeat("x", effect.MaxArguments) + `"}`:        "bytes",
	} {
		got, err := effect.Canonical([]byte(in))
		var ae *effect.ArgumentError
		if !errors.As(err, &ae) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: got %.60s, %v, want an error about %q", in, got, err, want)
		}
	}
}

func FuzzCanonical(f *testing.F) {
	f.Add([]byte(`{"a":[1,{"b":null}],"c":"\ud83d\ude00"}`))
	f.Add([]byte(`{"a":1e-7,"b":9007199254740993}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := effect.Canonical(b)
		if err != nil {
			return
		}
		again, err := effect.Canonical(c)
		if err != nil || string(again) != string(c) {
			t.Errorf("%s: canonical form %s is not stable: %s, %v", b, c, again, err)
		}
		var strict, lenient any
		if err := json.Unmarshal(c, &strict); err != nil {
			t.Fatalf("%s: %v", c, err)
		}
		if len(strings.TrimSpace(string(b))) > 0 && string(c) != "{}" {
			if err := json.Unmarshal(b, &lenient); err != nil || !cmp.Equal(strict, lenient) {
				t.Errorf("%s: a lenient reader reads something else than %s: %v", b, c, err)
			}
		}
	})
}

func TestCheckSchema(t *testing.T) {
	schema := `{"type":"object","properties":{"to":{"type":"string","pattern":"^[a-z]+$"},"n":{"$ref":"#/$defs/n"}},"required":["to"],"$defs":{"n":{"type":"integer","minimum":1}}}`
	for args, ok := range map[string]bool{
		`{"to":"a"}`: true, `{"to":"a","n":2}`: true, `{"to":"a","other":1}`: true,
		`{}`: false, `{"to":1}`: false, `{"to":"A"}`: false, `{"to":"a","n":0}`: false, `{"to":"a","N":2}`: false,
	} {
		if err := effect.CheckSchema(t.Context(), json.RawMessage(schema), json.RawMessage(args)); (err == nil) != ok {
			t.Errorf("%s: %v, want ok %v", args, err, ok)
		}
	}
	// What cannot be checked is denied, and nothing is fetched.
	for _, s := range []string{`{"$ref":"http://127.0.0.1:1/schema"}`, `{"type":7}`, `[]`, `{"type":"object","pattern":"("}`,
		`{"description":"` + strings.Repeat("x", effect.MaxSchema) + `"}`} {
		if err := effect.CheckSchema(t.Context(), json.RawMessage(s), json.RawMessage(`{}`)); err == nil {
			t.Errorf("%.60s: no error", s)
		}
	}
}

// Attack F10: a schema that multiplies or has no end is refused before the
// validator sees it: it would burn a processor, or overflow the stack.
func TestCheckSchemaCost(t *testing.T) {
	var refs, props []string
	for i := range 60 {
		refs = append(refs, fmt.Sprintf(`"d%d":{"allOf":[{"$ref":"#/$defs/d%d"},{"$ref":"#/$defs/d%d"}]}`, i, i+1, i+1))
		props = append(props, fmt.Sprintf(`"d%d":{"properties":{"a":{"anyOf":[{"$ref":"#/$defs/d%d"},{"$ref":"#/$defs/d%d"}]}}}`, i, i+1, i+1))
	}
	deep := strings.Repeat(`{"a":`, 60) + "1" + strings.Repeat("}", 60)
	for schema, args := range map[string]string{
		`{"$ref":"#"}`:             `{}`,
		`{"allOf":[{"$ref":"#"}]}`: `{}`,
		`{"$ref":"#/$defs/a","$defs":{"a":{"not":{"$ref":"#/$defs/b"}},"b":{"if":{"$ref":"#/$defs/a"}}}}`: `{}`,
		`{"$ref":"#/$defs/d0","$defs":{` + strings.Join(refs, ",") + `,"d60":{}}}`:                        `{}`,
		`{"$ref":"#/$defs/d0","$defs":{` + strings.Join(props, ",") + `,"d60":{}}}`:                       deep,
		`{"$dynamicRef":"#a"}`:                                  `{}`,
		`{"$ref":"#anchor","$defs":{"a":{"$anchor":"anchor"}}}`: `{}`,
		`{"properties":{"a":{"$id":"http://x/y","$ref":"#"}}}`:  `{"a":1}`,
		`{"$ref":"#/nowhere"}`:                                  `{}`,
	} {
		start := time.Now()
		err := effect.CheckSchema(t.Context(), json.RawMessage(schema), json.RawMessage(args))
		if d := time.Since(start); err == nil || d > effect.SchemaTime/2 {
			t.Errorf("%.80s: got %v after %v, want a quick refusal", schema, err, d)
		}
	}
	// Recursion that ends with the value is fine.
	tree := `{"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{"kids":{"type":"array","items":{"$ref":"#/$defs/node"}}},"required":["kids"]}}}`
	for args, ok := range map[string]bool{`{"kids":[{"kids":[]},{"kids":[{"kids":[]}]}]}`: true, `{"kids":[{"kids":[{}]}]}`: false} {
		if err := effect.CheckSchema(t.Context(), json.RawMessage(tree), json.RawMessage(args)); (err == nil) != ok {
			t.Errorf("%s: %v, want ok %v", args, err, ok)
		}
	}
}

func parse(t testing.TB, contract string) effect.Contract {
	t.Helper()
	c, err := effect.ParseConnector([]byte(`{"name":"x","kind":"mcp","url":"https://x.example/mcp","tools":{"act":` + contract + `,"look":{"class":"read"}}}`))
	if err != nil {
		t.Fatalf("%s: %v", contract, err)
	}
	return c.Tools["act"]
}

func TestParseConnector(t *testing.T) {
	c := parse(t, `{"class":"idempotent","volatile":["ref"],"idempotency":{"natural":true},"reconcile":{"tool":"look","happened":[{"pointer":"","exists":true}]},"pre_execution_errors":[409,-32050,{"pointer":"/code","equals":"early"}]}`)
	got, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"class":"idempotent","volatile":["ref"],"idempotency":{"natural":true,"window_seconds":300},"repeat":"ask","in_doubt":"wait",` +
		`"reconcile":{"tool":"look","happened":[{"pointer":"","exists":true}],"settle_seconds":30},"pre_execution_errors":[409,-32050,{"pointer":"/code","equals":"early"}],"timeout_seconds":60}`
	if string(got) != want {
		t.Errorf("defaults: got\n%s\nwant\n%s", got, want)
	}
	if back, err := effect.ParseContract(got); err != nil || !cmp.Equal(back, c) {
		t.Errorf("round trip: %v\n%s", err, cmp.Diff(c, back))
	}
	if w := parse(t, `{"class":"idempotent","idempotency":{"argument":"t"}}`).Idempotency.Window; w != 86400 {
		t.Errorf("window is %d, want 86400", w)
	}
	if k := parse(t, `{}`); k.Class != store.ClassIrreversible {
		t.Errorf("class is %s, want irreversible", k.Class)
	}
}

func TestParseConnectorErrors(t *testing.T) {
	const head = `{"name":"x","kind":"mcp","url":"https://x.example/mcp"`
	tool := func(s string) string { return head + `,"tools":{"act":` + s + `,"write":{"class":"irreversible"}}}` }
	for body, field := range map[string]string{
		`{"kind":"mcp","url":"https://x.example"}`:                                                     "name",
		`{"name":"X","kind":"mcp","url":"https://x.example"}`:                                          "name",
		`{"name":"x","kind":"stdio","url":"https://x.example"}`:                                        "kind",
		`{"name":"x","url":"https://x.example"}`:                                                       "kind",
		`{"name":"x","kind":"mcp","url":"ftp://x"}`:                                                    "url",
		`{"name":"x","kind":"mcp","url":"https://u:p@x.example"}`:                                      "url",
		head + `,"colour":1}`:                                                                          "colour",
		head + `,"credential":{}}`:                                                                     "credential",
		head + `,"trust_annotations":"yes"}`:                                                           "trust_annotations",
		tool(`{"class":"safe"}`):                                                                       "tools.act.class",
		tool(`{"approval":"two"}`):                                                                     "tools.act.approval",
		tool(`{"colour":1}`):                                                                           "tools.act.colour",
		tool(`{"identity":["a"],"volatile":["a"]}`):                                                    "tools.act.identity",
		tool(`{"class":"idempotent"}`):                                                                 "tools.act.idempotency",
		tool(`{"class":"idempotent","idempotency":{}}`):                                                "tools.act.idempotency",
		tool(`{"class":"idempotent","idempotency":{"natural":true,"argument":"a"}}`):                   "tools.act.idempotency",
		tool(`{"class":"idempotent","idempotency":{"header":"Authorization"}}`):                        "tools.act.idempotency.header",
		tool(`{"class":"idempotent","idempotency":{"header":"Mcp-Name"}}`):                             "tools.act.idempotency.header",
		tool(`{"class":"idempotent","idempotency":{"header":"a\r\nb"}}`):                               "tools.act.idempotency.header",
		tool(`{"repeat":"never"}`):                                                                     "tools.act.repeat",
		tool(`{"repeat_window_seconds":-1}`):                                                           "tools.act.repeat_window_seconds",
		tool(`{"in_doubt":"guess"}`):                                                                   "tools.act.in_doubt",
		tool(`{"timeout_seconds":-1}`):                                                                 "tools.act.timeout_seconds",
		tool(`{"timeout_seconds":100000}`):                                                             "tools.act.timeout_seconds",
		tool(`{"pre_execution_errors":[200]}`):                                                         "tools.act.pre_execution_errors.0",
		tool(`{"reconcile":{"tool":"look"}}`):                                                          "tools.act.reconcile",
		tool(`{"reconcile":{"happened":[{"is_error":false}]}}`):                                        "tools.act.reconcile.tool",
		tool(`{"reconcile":{"tool":"write","happened":[{"is_error":false}]}}`):                         "tools.act.reconcile.tool",
		tool(`{"reconcile":{"tool":"l","happened":[{"pointer":"x","equals":1}]}}`):                     "tools.act.reconcile.happened.0",
		tool(`{"reconcile":{"tool":"l","happened":[{"pointer":"/x"}]}}`):                               "tools.act.reconcile.happened.0",
		tool(`{"reconcile":{"tool":"l","not_happened":[{"pointer":"/x","matches":"("}]}}`):             "tools.act.reconcile.not_happened.0",
		tool(`{"reconcile":{"tool":"l","happened":[{"is_error":true}],"arguments":{"a":"${env.X}"}}}`): "tools.act.reconcile.arguments",
		tool(`{"class":"read","class":"read"}`):                                                        "",
		`not json`:                                                                                     "",
	} {
		_, err := effect.ParseConnector([]byte(body))
		var fe *effect.FieldError
		if !errors.As(err, &fe) || fe.Field != field {
			t.Errorf("%s: got %v, want an error about %q", body, err, field)
		}
	}
}

// The outcome table of the design, row by row.
func TestJudge(t *testing.T) {
	result := json.RawMessage(`{"content":[]}`)
	var none effect.Contract
	for status := 100; status < 600; status++ {
		want := effect.InDoubt
		switch {
		case status >= 200 && status < 300:
			want = effect.OK
		case status >= 400 && status <= 407, status >= 410 && status <= 424, status >= 426 && status <= 429, status == 431, status == 451:
			want = effect.Refused
		}
		if got, _ := none.Judge(effect.Reply{Status: status, Result: result}); got != want {
			t.Errorf("status %d: got %s, want %s", status, got, want)
		}
	}
	k := parse(t, `{"pre_execution_errors":[503,-32050,{"pointer":"/code","equals":"early"}]}`)
	for name, c := range map[string]struct {
		contract effect.Contract
		reply    effect.Reply
		want     effect.Verdict
	}{
		"unsent":                   {none, effect.Reply{Unsent: "x"}, effect.Refused},
		"cut":                      {none, effect.Reply{Lost: "x"}, effect.InDoubt},
		"cut within 200":           {none, effect.Reply{Status: 200, Lost: "x"}, effect.InDoubt},
		"cut within 403":           {none, effect.Reply{Status: 403, Lost: "x"}, effect.Refused},
		"nothing":                  {none, effect.Reply{}, effect.InDoubt},
		"200 without answer":       {none, effect.Reply{Status: 200}, effect.InDoubt},
		"parse error":              {none, effect.Reply{Status: 200, Code: -32700}, effect.Refused},
		"invalid params":           {none, effect.Reply{Status: 200, Code: -32602}, effect.Refused},
		"internal error":           {none, effect.Reply{Status: 200, Code: -32603}, effect.InDoubt},
		"invalid params with 500":  {none, effect.Reply{Status: 500, Code: -32602}, effect.InDoubt},
		"tool error":               {none, effect.Reply{Status: 200, Result: json.RawMessage(`{"isError":true,"content":[]}`)}, effect.OK},
		"503 by contract":          {k, effect.Reply{Status: 503}, effect.Refused},
		"502 beside the contract":  {k, effect.Reply{Status: 502}, effect.InDoubt},
		"code by contract":         {k, effect.Reply{Status: 200, Code: -32050}, effect.Refused},
		"answer by contract":       {k, effect.Reply{Status: 200, Result: json.RawMessage(`{"structuredContent":{"code":"early"}}`)}, effect.Refused},
		"other answer by contract": {k, effect.Reply{Status: 200, Result: json.RawMessage(`{"structuredContent":{"code":"late"}}`)}, effect.OK},
	} {
		if got, why := c.contract.Judge(c.reply); got != c.want {
			t.Errorf("%s: got %s (%s), want %s", name, got, why, c.want)
		}
	}
}

func TestPredicates(t *testing.T) {
	structured := `{"content":[{"type":"text","text":"{\"status\":\"text\"}"}],"structuredContent":{"status":"deleted","n":1.0,"a/b":{"~":[10,null]},"list":["x"]}}`
	inText := `{"content":[{"type":"image"},{"type":"text","text":"{\"status\":\"deleted\"}"},{"type":"text","text":"{}"}]}`
	failed := `{"isError":true,"content":[{"type":"text","text":"{\"error\":\"down\"}"}]}`
	for _, c := range []struct {
		result, predicates string
		want               bool
	}{
		{structured, `[{"pointer":"/status","equals":"deleted"}]`, true},
		{structured, `[{"pointer":"/status","equals":"text"}]`, false},
		{structured, `[{"pointer":"/n","equals":1}]`, true},
		{structured, `[{"pointer":"/status","in":["gone","deleted"]}]`, true},
		{structured, `[{"pointer":"/status","in":[]}]`, false},
		{structured, `[{"pointer":"/a~1b/~0/0","equals":10}]`, true},
		{structured, `[{"pointer":"/a~1b/~0/1","equals":null}]`, true},
		{structured, `[{"pointer":"/list","equals":["x"]}]`, true},
		{structured, `[{"pointer":"/list/01","exists":true}]`, false},
		{structured, `[{"pointer":"/nope","exists":false}]`, true},
		{structured, `[{"pointer":"/nope","equals":null}]`, false},
		{structured, `[{"pointer":"/status","matches":"^del"}]`, true},
		{structured, `[{"pointer":"/n","matches":"1"}]`, false},
		{structured, `[{"pointer":"/status","equals":"deleted"},{"pointer":"/n","equals":2}]`, false},
		{structured, `[{"is_error":false}]`, true},
		{inText, `[{"pointer":"/status","equals":"deleted"}]`, true},
		{failed, `[{"is_error":true}]`, true},
		{failed, `[{"pointer":"/status","exists":false}]`, false}, // an error proves nothing by itself
		{failed, `[{"is_error":true},{"pointer":"/error","equals":"down"}]`, true},
		{`{"content":[{"type":"text","text":"not json"}]}`, `[{"pointer":"/x","exists":false}]`, false},
		{structured, `[]`, false},
	} {
		var ps []effect.Predicate
		if err := json.Unmarshal([]byte(c.predicates), &ps); err != nil {
			t.Fatal(err)
		}
		if got := effect.Hold(ps, json.RawMessage(c.result)); got != c.want {
			t.Errorf("%s on %s: got %v, want %v", c.predicates, c.result, got, c.want)
		}
	}
}

func TestFill(t *testing.T) {
	f := effect.Facts{Arguments: json.RawMessage(`{"id":"db-1","n":3,"o":{"k":"v"},"trick":"${effect.key}"}`), Key: "KEY", Effect: "eff_1",
		IntendedAt: time.Date(2026, 11, 29, 1, 2, 3, 4000, time.UTC)}
	got, err := effect.Fill(json.RawMessage(`{"a":"${args.id}","b":"x-${args.id}-${args.n}","c":["${args.o}"],"d":{"k":"${effect.key}","e":"${effect.id}","t":"${effect.intended_at}"},"plain":"$5 {x}","n":7,"trick":"${args.trick}!"}`), f)
	want := `{"a":"db-1","b":"x-db-1-3","c":[{"k":"v"}],"d":{"e":"eff_1","k":"KEY","t":"2026-11-29T01:02:03.000004Z"},"n":7,"plain":"$5 {x}","trick":"${effect.key}!"}`
	if err != nil || string(got) != want {
		t.Errorf("got %s, %v\nwant %s", got, err, want)
	}
	if _, err := effect.Fill(json.RawMessage(`{"a":"${args.missing}"}`), f); err == nil {
		t.Error("a missing argument was filled")
	}
}

func TestDigests(t *testing.T) {
	p := effect.Place{Workspace: "w", Lineage: "s", Target: "conn_1", Tool: "act"}
	c := parse(t, `{"class":"idempotent","identity":["to"],"volatile":["ref"],"idempotency":{"argument":"token"}}`)
	base, near := digests(t, c, p, `{"to":"a","note":"x","ref":"1","token":"k"}`)
	for args, want := range map[string][2]bool{ // equal digest, equal near
		`{"token":"other","ref":"2","note":"x","to":"a"}`: {true, true},
		`{"to":"a","note":"y"}`:                           {true, false},
		`{"to":"b","note":"x"}`:                           {false, false},
		`{"note":"x"}`:                                    {false, false},
	} {
		d, n := digests(t, c, p, args)
		if (d == base) != want[0] || (n == near) != want[1] {
			t.Errorf("%s: equal %v, near %v; want %v", args, d == base, n == near, want)
		}
	}
	all := effect.Implicit()
	base, _ = digests(t, all, p, `{"to":"a","note":"x"}`)
	if d, _ := digests(t, all, p, `{"to":"a","note":"y"}`); d == base {
		t.Error("without identity all arguments are identity, but the digest is equal")
	}
	// Parts do not flow into each other.
	for _, q := range []effect.Place{{"wa", "s", "conn_1", "act"}, {"w", "sa", "conn_1", "act"}, {"w", "s", "conn_1a", "ct"}, {"w", "s", "conn_1", "acta"}, {"ws", "", "conn_1", "act"}} {
		if d, _ := digests(t, all, q, `{"to":"a","note":"x"}`); d == base {
			t.Errorf("%+v: digest is equal", q)
		}
	}
}

func digests(t testing.TB, c effect.Contract, p effect.Place, args string) (string, string) {
	t.Helper()
	canonical, err := effect.Canonical([]byte(args))
	if err != nil {
		t.Fatal(err)
	}
	d, n, err := c.Digests(p, canonical)
	if err != nil {
		t.Fatal(err)
	}
	return d, n
}

func TestKey(t *testing.T) {
	a, b := effect.KeyFor([]byte("secret"), "eff_1"), effect.KeyFor([]byte("secret"), "eff_2")
	if len(a) != 43 || a == b || a != effect.KeyFor([]byte("secret"), "eff_1") || a == effect.KeyFor([]byte("other"), "eff_1") {
		t.Errorf("keys %q and %q", a, b)
	}
	c := parse(t, `{"class":"idempotent","idempotency":{"argument":"token"}}`)
	got, err := c.FillKey(json.RawMessage(`{"token":"mine","x":1}`), a)
	if want := `{"token":"` + a + `","x":1}`; err != nil || string(got) != want {
		t.Errorf("got %s, %v, want %s", got, err, want)
	}
}

func TestHints(t *testing.T) {
	for _, c := range []struct {
		trust           bool
		contract, hints string
		want            store.Class
	}{
		{false, `{"class":"read"}`, ``, store.ClassRead},
		{false, `{"class":"read"}`, `{"readOnlyHint":true}`, store.ClassRead},
		{false, `{"class":"read"}`, `{"readOnlyHint":false}`, store.ClassIrreversible},
		{false, `{"class":"read"}`, `{"destructiveHint":true}`, store.ClassIrreversible},
		{false, `{"class":"read"}`, `not json`, store.ClassRead},
		{false, `{"class":"idempotent","idempotency":{"natural":true}}`, `{"destructiveHint":true}`, store.ClassIrreversible},
		{false, `{"class":"idempotent","idempotency":{"natural":true}}`, `{"destructiveHint":true,"idempotentHint":true}`, store.ClassIdempotent},
		{false, `{"class":"idempotent","idempotency":{"natural":true}}`, `{"idempotentHint":false}`, store.ClassIrreversible},
		{false, ``, `{"readOnlyHint":true,"idempotentHint":true}`, store.ClassIrreversible},
		{true, ``, `{"readOnlyHint":true}`, store.ClassRead},
		{true, ``, `{"idempotentHint":true}`, store.ClassIdempotent},
		{true, ``, `{"destructiveHint":false}`, store.ClassIrreversible},
		{true, ``, ``, store.ClassIrreversible},
		{true, `{"class":"read"}`, `{"destructiveHint":true}`, store.ClassIrreversible},
	} {
		con := effect.Connector{TrustAnnotations: c.trust}
		if c.contract != "" {
			con.Tools = map[string]effect.Contract{"act": parse(t, c.contract)}
		}
		if got := con.For("act", json.RawMessage(c.hints)).Class; got != c.want {
			t.Errorf("trust %v, contract %s, hints %s: got %s, want %s", c.trust, c.contract, c.hints, got, c.want)
		}
	}
}

func TestNormalizeURL(t *testing.T) {
	for in, want := range map[string]string{
		"HTTPS://Example.COM:443/Mcp/": "https://example.com/Mcp",
		"http://example.com:80":        "http://example.com",
		"http://example.com.:8080/":    "http://example.com:8080",
		"https://[2001:DB8::1]:443/x":  "https://[2001:db8::1]/x",
		"https://example.com/a?b=C":    "https://example.com/a?b=C",
		"https://example.com:444/":     "https://example.com:444",
	} {
		if got, err := effect.NormalizeURL(in); err != nil || got != want {
			t.Errorf("%s: got %s, %v, want %s", in, got, err, want)
		}
	}
	for _, in := range []string{"", "example.com", "ftp://x", "https://", "https://u@x", "https://x/#f", "https://x\r\ny", "javascript:alert(1)", "https://" + strings.Repeat("x", 2048)} {
		if got, err := effect.NormalizeURL(in); err == nil {
			t.Errorf("%q: got %q, want an error", in, got)
		}
	}
}

func TestMayResend(t *testing.T) {
	c := parse(t, `{"class":"idempotent","idempotency":{"natural":true,"window_seconds":100},"timeout_seconds":40}`)
	at := time.Now()
	for after, want := range map[time.Duration]bool{0: true, 60 * time.Second: true, 61 * time.Second: false} {
		if got := c.MayResend(at, at.Add(after)); got != want {
			t.Errorf("after %v: got %v, want %v", after, got, want)
		}
	}
	c.Class = store.ClassIrreversible
	if c.MayResend(at, at) {
		t.Error("an irreversible call may be sent again")
	}
}
