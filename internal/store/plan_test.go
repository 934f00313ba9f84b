package store_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/store"
)

// What is asked at every step must not grow with the workspace.
func TestHotQueriesUseTheirIndexes(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for range 20 { // so that no plan is for an empty table
			_, l := e.started()
			id := newEffect()
			e.must(l, entries(intent(id, store.ClassIrreversible)))
			e.must(l, entries(attempt(id, 1)))
		}
		for _, q := range store.HotQueries() {
			plan, err := e.db.Plan(t.Context(), q.Text, q.Args...)
			if err != nil {
				t.Fatalf("%s: %v", q.Name, err)
			}
			index := q.Index
			if index == "pkey" && strings.Contains(plan, "Index Cond") {
				continue // PostgreSQL takes any index that narrows small tables enough
			}
			if !strings.Contains(plan, index) {
				t.Errorf("%s does not use %s:\n%s", q.Name, index, plan)
			}
		}
	})
}

// The short ways to a body's version say what reading all of it says.
func TestBodyVersion(t *testing.T) {
	for _, body := range []string{
		`{"v":3}`, `{"v":3,"a":1}`, `{"a":1,"v":3}`, `{"a":{"v":9},"v":3}`, `{"v":3,"a":{"b":1,"v":9}}`, `{"a":{"b":1,"v":9}}`,
		`{"v":2,"a":[1,{"b":2,"v":9}]}`, `{"a":"x,\"v\":9}"}`, `{"a":",\"v\":9}","v":3}`, `{"a":"\\","v":3}`, `{"a":1,"v":1234567}`,
		`{"v":1234567}`, `{"a":1,"v": 4}`, `{"a":1,"v":4 }`, `{}`, `{"a":1}`, `{"v":0}`,
	} {
		var want struct {
			V int `json:"v"`
		}
		if err := json.Unmarshal([]byte(body), &want); err != nil {
			t.Fatal(body, err)
		}
		if got, err := store.VersionOf([]byte(body)); err != nil || got != want.V {
			t.Errorf("version of %s = %d, %v, want %d", body, got, err, want.V)
		}
	}
	for _, body := range []string{``, `{`, `nonsense`} {
		if _, err := store.VersionOf([]byte(body)); err == nil {
			t.Errorf("version of %q: no error", body)
		}
	}
}
