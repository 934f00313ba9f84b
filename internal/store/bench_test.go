package store_test

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"

	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// BenchmarkEffect measures whole effects (intent, attempt, completion with its
// event: three commits) with all projections, per number of sessions at work.
func BenchmarkEffect(b *testing.B) {
	for _, engine := range []string{"sqlite", "postgres"} {
		for _, n := range []int{1, 64, 1000} {
			b.Run(fmt.Sprintf("%s/%d", engine, n), func(b *testing.B) {
				url := "sqlite:" + filepath.Join(b.TempDir(), "data", "planaria.db")
				if engine == "postgres" {
					url = testenv.Postgres(b)
				}
				e := newEnv(b, url)
				for range n {
					e.create(message("go"))
				}
				var leases []*store.Lease
				for len(leases) < n {
					ls, err := e.node.Claim(b.Context(), 200)
					if err != nil {
						b.Fatal(err)
					}
					leases = append(leases, ls...)
				}
				commits := e.fault.count("append.before")
				b.ResetTimer()
				var wg sync.WaitGroup
				work := make(chan struct{}, n)
				for _, l := range leases {
					wg.Go(func() {
						for range work {
							id := newEffect()
							for _, a := range []store.Append{
								entries(intent(id, store.ClassIrreversible)),
								entries(attempt(id, 1)),
								entries(completion(id, 1), event("agent.mcp_tool_result", "text", "done")),
							} {
								if _, err := e.db.Append(b.Context(), l, a); err != nil {
									b.Error(err)
									return
								}
							}
						}
					})
				}
				for range b.N {
					work <- struct{}{}
				}
				close(work)
				wg.Wait()
				b.StopTimer()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "effects/s")
				b.ReportMetric(float64(e.fault.count("append.before")-commits)/float64(b.N), "commits/effect")
			})
		}
	}
}
