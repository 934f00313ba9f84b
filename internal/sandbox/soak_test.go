package sandbox_test

import (
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
)

var soakRounds = flag.Int("soak-rounds", 20, "rounds of suspend and restore in TestSoak")

// left is what a round may leave behind.
type left struct{ folders, images, state, processes, files, goroutines int }

func (e *env) left() left {
	count := func(dir string) int {
		list, err := os.ReadDir(dir)
		if err != nil {
			e.t.Fatal(err)
		}
		return len(list)
	}
	l := left{
		folders: count(filepath.Join(e.dir, "live")), images: count(filepath.Join(e.dir, "snapshots")), state: count(filepath.Join(e.dir, "run")),
		files: count("/proc/self/fd"), goroutines: runtime.NumGoroutine(),
	}
	exes, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, exe := range exes {
		if to, err := os.Readlink(exe); err == nil && strings.HasPrefix(to, e.dir) {
			l.processes++
		}
	}
	return l
}

// TestSoak: rounds of suspend and restore lose nothing and leave nothing behind
// (trial R1; G 97, 98). More rounds: -soak-rounds 1000.
func TestSoak(t *testing.T) {
	e := open(t)
	s := e.start("rounds")
	fill(e, s)
	tree, err := s.HashTree(t.Context(), "/tree")
	if err != nil {
		t.Fatal(err)
	}
	var first left
	var least int
	var secret string
	for round := range *soakRounds {
		e.sh(s, "rounds=$((rounds+1)); echo "+strconv.Itoa(round)+" >> /workspace/rounds")
		least, secret = count(e, s)
		m, err := s.Suspend(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-s.Done():
		case <-time.After(10 * time.Second):
			t.Fatal("a suspended sandbox lives")
		}
		s, _ = e.restore(m, "rounds")
		if err := e.r.DropImage(m.ID); err != nil {
			t.Fatal(err)
		}
		if n, again := count(e, s); n < least || again != secret {
			t.Errorf("counter is %d with %s, was %d with %s", n, again, least, secret)
		}
		if got, err := s.HashTree(t.Context(), "/tree"); err != nil || got != tree {
			t.Errorf("tree hash %s, %v, want %s", got, err, tree)
		}
		want := strconv.Itoa(round+1) + " hello planaria from /opt"
		if got := e.sh(s, "echo $rounds $(greet)"); got != want {
			t.Errorf("the shell says %q, want %q", got, want)
		}
		if round == 0 {
			first = e.left()
		}
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
	check(e, s, tree, least, secret)
	if n, err := strconv.Atoi(e.sh(s, "wc -l < /workspace/rounds")); err != nil || n != *soakRounds {
		t.Errorf("%d rounds were written, %v", n, err)
	}
	if s.Generation() != uint64(*soakRounds)+1 {
		t.Errorf("generation %d", s.Generation())
	}
	last := e.left()
	t.Logf("after the first round %+v, after the last %+v", first, last)
	if last.folders != 1 || last.images != 0 || last.state > first.state {
		t.Errorf("folders are left: %+v, at first %+v", last, first)
	}
	// Processes inside come and go, so these may differ by a few.
	if last.processes > first.processes+4 || last.files > first.files+3 || last.goroutines > first.goroutines+5 {
		t.Errorf("something leaks: %+v, at first %+v", last, first)
	}
	if err := s.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	gone := func() bool { l := e.left(); return l.processes == 0 && l.folders == 0 && l.state <= first.state }
	for deadline := time.Now().Add(10 * time.Second); !gone(); {
		if time.Now().After(deadline) {
			t.Fatalf("after the kill: %+v", e.left())
		}
		<-time.After(20 * time.Millisecond)
	}
}
