package main

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/llm"
)

// goodReport is what a demo finds in which every promise held.
func goodReport() *demoReport {
	r := &demoReport{Model: llm.ScriptStats{Requests: 36, Answered: 36}, Chains: 3}
	for n := 1; n <= 2; n++ {
		now := time.Now()
		a := &act{N: n, tool: "delete_database", Stop: api.StopEndTurn, First: now}
		ok := "ok"
		for i, p := range demoPlan {
			cloud, tool, _ := strings.Cut(p, " ")
			l := ledgerLine{N: i, Act: n, Tool: tool, Did: didIt, Args: fmt.Appendf(nil, `{"n":%d}`, i)}
			e := api.Effect{Tool: tool, Class: api.ClassIdempotent, State: api.EffectCompleted, Outcome: &ok}
			for _, x := range irreversible {
				if x == tool {
					e.Class, e.Attempts = api.ClassIrreversible, api.List[api.EffectAttempt]{{Seq: 1, Fence: 1}}
				}
			}
			if tool == a.tool {
				e.Evidence = api.List[api.EffectEvidence]{{Kind: "probe", Says: "happened"}}
			}
			a.Effects = append(a.Effects, e)
			if cloud == oldCloud {
				a.Old = append(a.Old, l)
			} else {
				a.New = append(a.New, l)
			}
		}
		r.Acts = append(r.Acts, a)
	}
	r.Machine = &machineAct{PIDs: [2]int{11, 12}, Stops: []string{api.StopEndTurn, api.StopEndTurn}}
	sum := fmt.Sprintf("%x", sha256.Sum256([]byte(machineNote)))
	for _, text := range []string{"started", "", "9", "whole\n" + sum + "\nseven 12 20", "finished", "8\nwhole\n70"} {
		r.Machine.Results = append(r.Machine.Results, machineResult{Tool: "bash", Text: text})
	}
	return r
}

// TestDemoJudges: the demo's verdict sees each broken promise.
func TestDemoJudges(t *testing.T) {
	if broken := goodReport().judge(); len(broken) > 0 {
		t.Fatalf("a good report is judged broken: %q", broken)
	}
	last := func(lines []ledgerLine) *ledgerLine { return &lines[len(lines)-1] }
	tests := []struct {
		want  string
		spoil func(*demoReport)
	}{
		{"the irreversible delete_database arrived at the old-cloud more than once", func(r *demoReport) { r.Acts[1].Old = append(r.Acts[1].Old, *last(r.Acts[1].Old)) }},
		{"more than once", func(r *demoReport) {
			again := *last(r.Acts[0].Old)
			again.Did = didRefuse
			r.Acts[0].Old = append(r.Acts[0].Old, again)
		}},
		{"the step new-cloud enable_backups is missing", func(r *demoReport) { r.Acts[0].New = r.Acts[0].New[:len(r.Acts[0].New)-1] }},
		{"enable_backups was done 2 times", func(r *demoReport) { r.Acts[0].New = append(r.Acts[0].New, *last(r.Acts[0].New)) }},
		{"refused", func(r *demoReport) { last(r.Acts[0].New).Did = didRefuse }},
		{"step 12 (delete_database) is in_doubt", func(r *demoReport) { r.Acts[1].Effects[11].State = api.EffectInDoubt }},
		{"has 2 attempts", func(r *demoReport) {
			r.Acts[0].Effects[11].Attempts = append(r.Acts[0].Effects[11].Attempts, api.EffectAttempt{})
		}},
		{"the log holds 12 calls, not 13", func(r *demoReport) { r.Acts[0].Effects = r.Acts[0].Effects[:12] }},
		{"no probe", func(r *demoReport) { r.Acts[1].Effects[11].Evidence = nil }},
		{`ended with "retries_exhausted"`, func(r *demoReport) { r.Acts[0].Stop = api.StopRetriesExhausted }},
		{"nothing after the kill", func(r *demoReport) { r.Acts[1].First = time.Time{} }},
		{"1 invalid", func(r *demoReport) { r.Model.Invalid = 1 }},
		{"1 unexpected", func(r *demoReport) { r.Model.Unscripted = 1 }},
		{"was asked 35 times", func(r *demoReport) { r.Model.Answered = 35 }},
		{"was not killed", func(r *demoReport) { r.Machine.PIDs[1] = 11 }},
		{"has lost its variable", func(r *demoReport) {
			r.Machine.Results[3].Text = strings.Replace(r.Machine.Results[3].Text, "seven", "eight", 1)
		}},
		{"the note is not what was written", func(r *demoReport) {
			r.Machine.Results[3].Text = strings.Replace(r.Machine.Results[3].Text, "\n", "\n0", 1)
		}},
		{"the counter does not go on", func(r *demoReport) {
			r.Machine.Results[3].Text = strings.Replace(r.Machine.Results[3].Text, "seven 12", "seven 3", 1)
		}},
		{"its numbers are gap", func(r *demoReport) {
			r.Machine.Results[3].Text = strings.Replace(r.Machine.Results[3].Text, "whole", "gap", 1)
		}},
		{"wrote [16 whole 70] lines, not 8", func(r *demoReport) { r.Machine.Results[5].Text = "16\nwhole\n70" }},
		{"in the end at \"2\"", func(r *demoReport) { r.Machine.Results[5].Text = "8\nwhole\n2" }},
		{"act 3: bash says no", func(r *demoReport) { r.Machine.Results[0] = machineResult{Tool: "bash", Text: "no", IsError: true} }},
		{"2 turns with 5 results", func(r *demoReport) { r.Machine.Results = r.Machine.Results[:5] }},
		{"1 of 3 hash chains", func(r *demoReport) { r.Damaged = 1 }},
		{"0 of 0 hash chains", func(r *demoReport) { r.Chains = 0 }},
	}
	for _, tt := range tests {
		r := goodReport()
		tt.spoil(r)
		if broken := strings.Join(r.judge(), "\n"); !strings.Contains(broken, tt.want) {
			t.Errorf("judged %q, want it to say %q", broken, tt.want)
		}
	}
}

// TestDemoKeep: --keep leaves the server running until Ctrl-C, and the folder.
func TestDemoKeep(t *testing.T) {
	dir := t.TempDir()
	c := exec.Command(binary, "demo", "--keep")
	c.Env = append(withoutOurs(os.Environ()), "TMPDIR="+dir)
	words, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill() })
	env := regexp.MustCompile(`PLANARIA_SERVER=(\S+) PLANARIA_API_KEY=(\S+)`)
	var client *api.Client
	lines := bufio.NewScanner(words)
	for lines.Scan() {
		if m := env.FindStringSubmatch(lines.Text()); m != nil {
			client = &api.Client{BaseURL: m[1], Key: m[2]}
		}
		if strings.Contains(lines.Text(), "stays") {
			break
		}
	}
	if client == nil {
		t.Fatalf("the demo ended without telling where the server is: %v", c.Wait())
	}
	sessions, err := collect(client.AllSessions(t.Context(), api.SessionListParams{}), 0)
	if err != nil || len(sessions) < 2 || len(sessions) > 3 {
		t.Errorf("the server lists %d sessions, %v; want 3, or 2 without act three", len(sessions), err)
	}
	if err := c.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
		t.Log(lines.Text())
	}
	if err := c.Wait(); err != nil {
		t.Errorf("the demo ended with %v", err)
	}
	if err := client.Healthz(t.Context()); err == nil {
		t.Error("the server outlived the demo")
	}
	if left, err := filepath.Glob(filepath.Join(dir, "planaria-demo-*", "data", storeFile)); err != nil || len(left) != 1 {
		t.Errorf("the folder does not stay: %q, %v", left, err)
	}
}
