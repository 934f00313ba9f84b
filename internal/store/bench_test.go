package store_test

import (
	"fmt"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// cpuTime is what this process used, in microseconds: on a shared machine it
// tells more than elapsed time.
func cpuTime() float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e3
}

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
					if err != nil || len(ls) == 0 {
						b.Fatal("claimed nothing", err)
					}
					leases = append(leases, ls...)
				}
				commits := e.fault.count("append.before")
				cpu := cpuTime()
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
				b.ReportMetric((cpuTime()-cpu)/float64(b.N), "cpu-us/effect")
				b.ReportMetric(float64(e.fault.count("append.before")-commits)/float64(b.N), "commits/effect")
			})
		}
	}
}

// BenchmarkRaw is the baseline of BenchmarkEffect on SQLite: the same rows, bytes
// and indexes in group commits of the same kind, without the protocol.
func BenchmarkRaw(b *testing.B) {
	for _, n := range []int{1, 64, 1000} {
		b.Run(fmt.Sprintf("sqlite/%d", n), func(b *testing.B) {
			e := newEnv(b, "sqlite:"+filepath.Join(b.TempDir(), "data", "planaria.db"))
			for range n {
				e.create(message("go"))
			}
			var leases []*store.Lease
			for len(leases) < n {
				ls, err := e.node.Claim(b.Context(), 200)
				if err != nil || len(ls) == 0 {
					b.Fatal("claimed nothing", err)
				}
				leases = append(leases, ls...)
			}
			type step struct {
				store.RawStep
				done chan error
			}
			steps := make(chan step, n)
			var committer sync.WaitGroup
			committer.Go(func() {
				for first := range steps {
					batch := []step{first}
					raw := []store.RawStep{first.RawStep}
					for len(steps) > 0 {
						s := <-steps
						batch, raw = append(batch, s), append(raw, s.RawStep)
					}
					err := e.db.RawCommit(b.Context(), raw)
					for _, s := range batch {
						s.done <- err
					}
				}
			})
			cpu := cpuTime()
			body := make([]byte, 330) // about what the records of BenchmarkEffect have, sealed
			b.ResetTimer()
			var wg sync.WaitGroup
			work := make(chan struct{}, n)
			for _, l := range leases {
				wg.Go(func() {
					seq := l.Claimed().Head + 1
					done := make(chan error, 1)
					for range work {
						id := newEffect()
						for k := range 3 {
							steps <- step{store.RawStep{Session: l.Session(), Effect: id, Seq: seq, Step: k, Body: body}, done}
							if err := <-done; err != nil {
								b.Error(err)
								return
							}
							seq += store.Seq(1 + k/2)
						}
					}
				})
			}
			for range b.N {
				work <- struct{}{}
			}
			close(work)
			wg.Wait()
			close(steps)
			committer.Wait()
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "effects/s")
			b.ReportMetric((cpuTime()-cpu)/float64(b.N), "cpu-us/effect")
		})
	}
}

// BenchmarkRead measures reading and verifying a log of 10,000 entries.
func BenchmarkRead(b *testing.B) {
	for _, engine := range []string{"sqlite", "postgres"} {
		b.Run(engine, func(b *testing.B) {
			url := "sqlite:" + filepath.Join(b.TempDir(), "data", "planaria.db")
			if engine == "postgres" {
				url = testenv.Postgres(b)
			}
			e := newEnv(b, url)
			id, l := e.started()
			for range 100 {
				var a store.Append
				for range 100 {
					a.Entries = append(a.Entries, event("agent.message", "text", "some text of a usual length, which says what was done"))
				}
				e.must(l, a)
			}
			cpu := cpuTime()
			b.ResetTimer()
			for range b.N {
				list, err := e.db.Entries(b.Context(), ws, id, store.Range{})
				if err != nil || len(list) < 10_000 {
					b.Fatal(len(list), err)
				}
			}
			b.ReportMetric((cpuTime()-cpu)/float64(b.N)/1e3, "cpu-ms/read")
		})
	}
}
