package server_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/planaria/planaria/internal/testenv"
)

var update = flag.Bool("update", false, "write the answers into testdata")

// Each file of testdata holds exchanges with a fresh server: a section with
// the request (method and path, headers, blank line, body), then one named
// ".out" with the answer (status, body). Ids are numbered by kind in the order
// of their appearance and can be used in later requests as ${agent_1}; cursors
// likewise as ${cursor_1}. What differs from run to run is blotted out. A
// request "IDLE ${sesn_1} end_turn" waits until that session is idle for that reason.
func TestExchanges(t *testing.T) { exchanges(t, newEnv) }

// The same exchanges over PostgreSQL: a difference is a bug.
func TestExchangesPostgres(t *testing.T) {
	if *update {
		t.Skip("answers are written from SQLite")
	}
	exchanges(t, func(t *testing.T) *env { return newEnvOn(t, testenv.Postgres(t)) })
}

func exchanges(t *testing.T, open func(*testing.T) *env) {
	t.Helper()
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no exchanges: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			ar, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			x := &exchange{e: open(t), names: map[string]string{}, values: map[string]string{}, count: map[string]int{}}
			var out []txtar.File
			wants := map[string]string{}
			for _, f := range ar.Files {
				if name, ok := strings.CutSuffix(f.Name, ".out"); ok {
					wants[name] = string(f.Data)
				}
			}
			for _, f := range ar.Files {
				if strings.HasSuffix(f.Name, ".out") {
					continue
				}
				got := x.run(t, string(f.Data))
				if diff := cmp.Diff(wants[f.Name], got); diff != "" && !*update {
					t.Errorf("%s: %s (-want +got):\n%s", file, f.Name, diff)
				}
				out = append(out, f)
				if got != "" {
					out = append(out, txtar.File{Name: f.Name + ".out", Data: []byte(got)})
				}
			}
			if *update {
				ar.Files = out
				if err := os.WriteFile(file, txtar.Format(ar), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

type exchange struct {
	e      *env
	names  map[string]string // value -> name
	values map[string]string // name -> value
	count  map[string]int
}

var variable = regexp.MustCompile(`\$\{[a-z_]+[0-9]+\}`)

func (x *exchange) run(t *testing.T, request string) string {
	t.Helper()
	request = variable.ReplaceAllStringFunc(request, func(v string) string {
		value, ok := x.values[v[2:len(v)-1]]
		if !ok {
			t.Fatalf("%s is not known", v)
		}
		return value
	})
	first, rest, _ := strings.Cut(request, "\n")
	method, path, _ := strings.Cut(strings.TrimSpace(first), " ")
	if method == "IDLE" {
		id, reason, _ := strings.Cut(path, " ")
		x.e.idleFor(id, reason)
		return ""
	}
	var headers []string
	for rest != "" && !strings.HasPrefix(rest, "{") {
		var line string
		line, rest, _ = strings.Cut(rest, "\n")
		if name, value, ok := strings.Cut(line, ": "); ok {
			headers = append(headers, name, value)
		}
	}
	a := x.e.do(method, path, rest, headers...)
	var pretty bytes.Buffer
	if err := json.Indent(&pretty, a.body, "", "  "); err != nil {
		t.Fatalf("%s %s: answer is not JSON: %s", method, path, a.body)
	}
	return fmt.Sprintf("%d\n%s\n", a.status, x.normal(pretty.String()))
}

var (
	anyID    = regexp.MustCompile(`\b([a-z]+)_[0-9a-z]{26}\b`)
	anyPage  = regexp.MustCompile(`("(?:next|prev)_page": )"([^"]+)"`)
	blotters = []struct {
		re *regexp.Regexp
		by string
	}{
		{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z`), "TIME"},
		{regexp.MustCompile(`"[0-9a-f]{64}"`), `"HASH"`},
		{regexp.MustCompile(`pk_planaria_[A-Za-z0-9_-]+`), "KEY"},
		{regexp.MustCompile(`"hint": "[^"]*"`), `"hint": "HINT"`},
		{regexp.MustCompile(`("(?:active|duration)_seconds": )[0-9.e-]+`), "${1}SECONDS"},
		{regexp.MustCompile(`("(?:in|out)put_tokens": )[1-9]\d*`), "${1}TOKENS"},
		{regexp.MustCompile(`("(?:head_)?seq": )\d+`), "${1}SEQ"},
		{regexp.MustCompile(`("group": )"\d{4}-\d\d-\d\d"`), `${1}"DAY"`},
	}
)

func (x *exchange) normal(s string) string {
	s = anyPage.ReplaceAllStringFunc(s, func(m string) string {
		g := anyPage.FindStringSubmatch(m)
		return g[1] + `"` + x.name("cursor", g[2]) + `"`
	})
	s = anyID.ReplaceAllStringFunc(s, func(id string) string {
		kind, _, _ := strings.Cut(id, "_")
		return x.name(kind, id)
	})
	for _, b := range blotters {
		s = b.re.ReplaceAllString(s, b.by)
	}
	return s
}

func (x *exchange) name(kind, value string) string {
	if kind == "req" {
		return "req_0"
	}
	if name, ok := x.names[value]; ok {
		return name
	}
	x.count[kind]++
	name := fmt.Sprintf("%s_%d", kind, x.count[kind])
	x.names[value], x.values[name] = name, value
	return name
}
