// Command bench measures what Planaria costs, each figure beside a baseline of
// the same run on the same disk, because only ratios hold on another machine.
// It prints Markdown tables: docs/benchmarks.md holds those of one quiet run.
//
// It drives the real packages and the real binary. It changes nothing outside
// a temporary folder, which it removes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// sections are the measurements, in the order in which they run.
var sections = []struct {
	name string
	what string
	run  func(context.Context, *bench) error
}{
	{"effect", "latency of one durable effect through the store", benchEffect},
	{"throughput", "durable effects per second at 1, 64 and 1,000 sessions", benchThroughput},
	{"step", "a whole durable step beyond its two calls", benchStep},
	{"recovery", "from claim to the first new entry, by length of the log", benchRecovery},
	{"start", "from serve to ready, and the idle process", benchStart},
	{"memory", "sleeping and running sessions in one process", benchMemory},
	{"sandbox", "start, calls, snapshot, restore and sizes of one sandbox", benchSandbox},
	{"browser", "restore, pause and bytes of a sandbox with Chromium and a page", benchBrowser},
	{"density", "many small sandboxes at once", benchDensity},
	{"overhead", "a shell-intensive run as a plain process, in a sandbox, and with snapshots", benchOverhead},
	{"checkpoint", "recovery and traffic of three ways to save a machine", benchCheckpoint},
}

// bench is one run.
type bench struct {
	quick   bool
	dir     string // everything is below it
	engine  string // sqlite, postgres or both
	program string // the binary
	inside  string // what sandboxes run
	made    bool   // both are, by make build
	many    int    // sandboxes of section density, 0 for the default

	probed []sandbox.Finding // of this machine; nil: not looked at yet
}

func main() {
	b := &bench{}
	var only string
	flag.BoolVar(&b.quick, "quick", false, "fewer repetitions: to see that everything runs")
	flag.StringVar(&only, "only", "", "measure only these, separated by commas: "+strings.Join(names(), ", "))
	flag.StringVar(&b.engine, "engine", "both", "store of the throughput: sqlite, postgres, or both where PostgreSQL is installed")
	flag.StringVar(&b.dir, "dir", "", "folder on the disk to measure (default: the system's temporary folder)")
	flag.StringVar(&b.program, "planaria", "", "binary to measure (default: built now)")
	flag.StringVar(&b.inside, "inside", "", "program that sandboxes run (default: built now)")
	flag.IntVar(&b.many, "sandboxes", 0, "sandboxes at once in density (default 50, quick 10)")
	profile := flag.String("cpuprofile", "", "write a CPU profile of the run to this file")
	flag.Parse()
	if *profile != "" {
		f, err := os.Create(*profile)
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench: error:", err)
			os.Exit(1)
		}
		defer pprof.StopCPUProfile()
	}
	if err := b.main(only); err != nil {
		fmt.Fprintln(os.Stderr, "bench: error:", err)
		pprof.StopCPUProfile()
		os.Exit(1)
	}
}

func names() []string {
	out := make([]string, len(sections))
	for i, s := range sections {
		out[i] = s.name
	}
	return out
}

func (b *bench) main(only string) error {
	var chosen []string
	if only != "" {
		chosen = strings.Split(only, ",")
	}
	for _, c := range chosen {
		if !slices.Contains(names(), c) {
			return fmt.Errorf("-only: %q is none of %s", c, strings.Join(names(), ", "))
		}
	}
	if !slices.Contains([]string{"sqlite", "postgres", "both"}, b.engine) {
		return fmt.Errorf("-engine: %q is none of sqlite, postgres, both", b.engine)
	}
	dir, err := os.MkdirTemp(b.dir, "planaria-bench-")
	if err != nil {
		return err
	}
	b.dir = dir
	defer os.RemoveAll(dir)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	fmt.Printf("%s, %s", time.Now().UTC().Format("2006-01-02 15:04 MST"), machine())
	if b.quick {
		fmt.Print(", quick")
	}
	fmt.Print("\n\n")
	var failed []error
	for _, s := range sections {
		if chosen != nil && !slices.Contains(chosen, s.name) {
			continue
		}
		started := time.Now()
		fmt.Fprintf(os.Stderr, "bench: %s: %s\n", s.name, s.what)
		if err := s.run(ctx, b); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", s.name, err))
			continue
		}
		fmt.Fprintf(os.Stderr, "bench: %s took %s\n", s.name, time.Since(started).Round(time.Second))
	}
	return errors.Join(failed...)
}

// pick returns the full or the quick number.
func (b *bench) pick(full, quick int) int {
	if b.quick {
		return quick
	}
	return full
}

// folder makes a fresh folder below the run's.
func (b *bench) folder(name string) (string, error) {
	return os.MkdirTemp(b.dir, name+"-")
}
