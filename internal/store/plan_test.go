package store_test

import (
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
