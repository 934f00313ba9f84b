package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/llm"
)

// demoReport is what the demo found.
type demoReport struct {
	Acts       []*act
	Machine    *machineAct
	Model      llm.ScriptStats
	FirstStart time.Duration
	Total      time.Duration
	Chains     int
	Entries    int64
	Damaged    int
	Broken     []string
}

// demoPlan is what each act must have done, in order.
var demoPlan = []string{
	"old-cloud get_database", "new-cloud create_network", "new-cloud create_subnet", "new-cloud create_subnet", "new-cloud create_database",
	"old-cloud set_read_only", "old-cloud create_snapshot", "old-cloud export_snapshot", "new-cloud import_database", "new-cloud verify_rows",
	"new-cloud put_dns_record", "old-cloud delete_database", "new-cloud enable_backups",
}

// irreversible are the tools that must arrive exactly once.
var irreversible = []string{"create_snapshot", "import_database", "delete_database"}

// judge collects the promises that were broken: from the ledgers, which are the
// world's own truth, then from the log.
func (r *demoReport) judge() []string {
	fail := func(format string, args ...any) { r.Broken = append(r.Broken, fmt.Sprintf(format, args...)) }
	for _, a := range r.Acts {
		a.judgeLedgers(fail)
		a.judgeEffects(fail)
		if a.Stop != api.StopEndTurn {
			fail("act %d: the session ended with %q", a.N, a.Stop)
		}
		if a.First.IsZero() {
			fail("act %d: the log shows nothing after the kill", a.N)
		}
	}
	if r.Model.Invalid > 0 || r.Model.Unscripted > 0 {
		fail("the model got %d invalid and %d unexpected requests: %s", r.Model.Invalid, r.Model.Unscripted, r.Model.LastError)
	}
	r.Machine.judge(fail)
	want := 2 * (demoSteps + 1)
	if r.Machine.Missing == "" {
		want += machineAsked
	}
	if r.Model.Answered < want {
		fail("the model was asked %d times, %d are needed", r.Model.Answered, want)
	}
	if r.Damaged > 0 || r.Chains == 0 {
		fail("%d of %d hash chains do not verify", r.Damaged, r.Chains)
	}
	return r.Broken
}

// judgeLedgers asks the clouds.
func (a *act) judgeLedgers(fail func(string, ...any)) {
	done := map[string]int{}
	for name, lines := range map[string][]ledgerLine{oldCloud: a.Old, newCloud: a.New} {
		arrived := map[string]int{}
		for _, l := range lines {
			if l.Did == didIt || l.Did == didRead {
				done[name+" "+l.Tool]++
			}
			if l.Did == didRefuse {
				fail("act %d: the %s refused %s", a.N, name, l.Tool)
			}
			if arrived[l.Tool]++; slices.Contains(irreversible, l.Tool) && arrived[l.Tool] == 2 {
				fail("act %d: the irreversible %s arrived at the %s more than once", a.N, l.Tool, name)
			}
		}
	}
	need := map[string]int{}
	for _, p := range demoPlan {
		need[p]++
	}
	for p, n := range need {
		switch {
		case done[p] < n:
			fail("act %d: the step %s is missing at the cloud", a.N, p)
		case done[p] > n && !strings.HasSuffix(p, " get_database") && !strings.HasSuffix(p, " set_read_only") && !strings.HasSuffix(p, " put_dns_record"):
			fail("act %d: %s was done %d times", a.N, p, done[p])
		}
	}
}

// judgeEffects asks the log.
func (a *act) judgeEffects(fail func(string, ...any)) {
	if len(a.Effects) != demoSteps {
		fail("act %d: the log holds %d calls, not %d", a.N, len(a.Effects), demoSteps)
	}
	for i, e := range a.Effects {
		if e.State != api.EffectCompleted || e.Outcome == nil || *e.Outcome != "ok" {
			fail("act %d: step %d (%s) is %s", a.N, i+1, e.Tool, e.State)
		}
		if i < len(demoPlan) && !strings.HasSuffix(demoPlan[i], " "+e.Tool) {
			fail("act %d: step %d is %s, not %s", a.N, i+1, e.Tool, demoPlan[i])
		}
		if e.Class == api.ClassIrreversible && len(e.Attempts) != 1 {
			fail("act %d: step %d (%s) has %d attempts", a.N, i+1, e.Tool, len(e.Attempts))
		}
	}
	if a.N == 2 && !slices.ContainsFunc(a.Effects, func(e api.Effect) bool { return e.Tool == a.tool && probed(e) }) {
		fail("act 2: the log shows no probe that settled %s", a.tool)
	}
}

// probed reports whether a probe found that the effect happened.
func probed(e api.Effect) bool {
	return slices.ContainsFunc(e.Evidence, func(v api.EffectEvidence) bool { return v.Kind == "probe" && v.Says == "happened" })
}

// print prints tables and verdict.
func (d *demo) print() error {
	if d.a.json {
		return d.a.printJSON(d.report.json())
	}
	w := d.a.stdout
	for _, a := range d.report.Acts {
		fmt.Fprintf(w, "\nACT %d: the server was killed while step %d (%s) was at the %s\n", a.N, a.step, a.tool, a.cloud.name)
		for _, l := range []struct {
			name  string
			lines []ledgerLine
		}{{oldCloud, a.Old}, {newCloud, a.New}} {
			fmt.Fprintf(w, "\nledger of the %s: what it was asked\n", l.name)
			if err := table(w, []string{"#", "TOOL", "ARGUMENTS", "KEY", "IT SAYS"}, a.ledgerRows(l.lines)); err != nil {
				return err
			}
		}
		fmt.Fprintf(w, "\neffect log of session %s\n", a.Session)
		if err := table(w, []string{"STEP", "SEQ", "TOOL", "CLASS", "STATE", "ATTEMPTS", "FENCE", "ARRIVED", "SETTLED BY"}, a.effectRows()); err != nil {
			return err
		}
	}
	if err := d.printMachine(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\ntimings of acts 1 and 2\n")
	if err := table(w, []string{"ACT", "KILL TO READY", "KILL TO FIRST NEW ENTRY", "KILL TO FINISHED", "ACT"}, d.report.timeRows()); err != nil {
		return err
	}
	fmt.Fprintf(w, "first start to ready %s, whole demo %s\n", ms(d.report.FirstStart), ms(d.report.Total))
	d.verdict()
	return nil
}

func (d *demo) verdict() {
	w, r := d.a.stdout, &d.report
	if len(r.Broken) > 0 {
		fmt.Fprintf(w, "\nVERDICT: BROKEN\n")
		for _, b := range r.Broken {
			fmt.Fprintf(w, "  - %s\n", oneLine(b))
		}
		return
	}
	machine := "the machine of act 3 was not tried"
	if r.Machine.Missing == "" {
		machine = "a machine that was killed went on from its snapshot; a command outlived its server and ran once"
	}
	fmt.Fprintf(w, `
VERDICT: every promise held
  - two SIGKILLs at the worst moments, two sessions finished by themselves, %d steps each
  - each irreversible call (%s) arrived exactly once per act
  - what was in doubt was settled by asking the cloud, not by trying again
  - %s
  - the model was asked %d times, no request was invalid
  - %d hash chains with %d entries verify
`, demoSteps, strings.Join(irreversible, ", "), machine, r.Model.Requests, r.Chains, r.Entries)
}

// ledgerRows are the lines of a ledger, with the kill at its place.
func (a *act) ledgerRows(lines []ledgerLine) [][]string {
	var rows [][]string
	marked := false
	for _, l := range lines {
		if !marked && l.At.After(a.Killed) {
			rows = append(rows, []string{"", "-- the server is killed here --", " ", " ", " "})
			marked = true
		}
		says := l.Did
		if l.Did == didSameKey {
			says = fmt.Sprintf("same key as #%d: answered from memory, nothing done", l.Of)
		}
		rows = append(rows, []string{fmt.Sprint(l.N), l.Tool, cut(compactArgs(l.Args), 76), cut(l.Key, 12), says})
	}
	return rows
}

// compactArgs is a call's arguments without the key, which has a column of its own.
func compactArgs(raw json.RawMessage) string {
	var m map[string]any
	if json.Unmarshal(raw, &m) != nil {
		return string(raw)
	}
	delete(m, "client_token")
	out, err := json.Marshal(m)
	if err != nil {
		return string(raw)
	}
	return string(out)
}

func (a *act) effectRows() [][]string {
	rows := make([][]string, len(a.Effects))
	for i, e := range a.Effects {
		settled := ""
		if probed(e) {
			settled = "probe: it happened"
		}
		attempts := ""
		if len(e.Attempts) > 0 {
			attempts = fmt.Sprint(len(e.Attempts))
		}
		rows[i] = []string{fmt.Sprint(i + 1), fmt.Sprint(e.Seq), e.Tool, string(e.Class), stateWord(e), attempts, lastFence(e), a.arrived(e), settled}
	}
	return rows
}

// arrived counts in the ledgers how often a call arrived; reads are not counted,
// because the probe is one too.
func (a *act) arrived(e api.Effect) string {
	if e.Class == api.ClassRead {
		return ""
	}
	n := 0
	for _, l := range slices.Concat(a.Old, a.New) {
		if l.Tool == e.Tool && compactArgs(l.Args) == compactArgs(e.Arguments) {
			n++
		}
	}
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

func (r *demoReport) timeRows() [][]string {
	var rows [][]string
	for _, a := range r.Acts {
		rows = append(rows, []string{fmt.Sprint(a.N), ms(a.Ready.Sub(a.Killed)), ms(a.First.Sub(a.Killed)), ms(a.Ended.Sub(a.Killed)), ms(a.Ended.Sub(a.Began))})
	}
	return rows
}

// demoJSON is the report for machines.
type demoJSON struct {
	OK      bool            `json:"ok"`
	Broken  []string        `json:"broken"`
	Acts    []demoActJSON   `json:"acts"`
	Machine demoMachineJSON `json:"machine"`
	Model   llm.ScriptStats `json:"model"`
	Chains  int             `json:"chains"`
	Entries int64           `json:"entries"`
	TotalMS int64           `json:"total_ms"`
}

type demoMachineJSON struct {
	Missing      string          `json:"missing,omitzero"`
	Session      string          `json:"session,omitzero"`
	Results      []machineResult `json:"results,omitzero"`
	RestoredMS   int64           `json:"machine_kill_to_first_result_ms,omitzero"`
	KillReadyMS  int64           `json:"server_kill_to_ready_ms,omitzero"`
	KillResultMS int64           `json:"server_kill_to_running_result_ms,omitzero"`
}

type demoActJSON struct {
	Act         int          `json:"act"`
	Session     string       `json:"session"`
	KillReadyMS int64        `json:"kill_to_ready_ms"`
	KillFirstMS int64        `json:"kill_to_first_entry_ms"`
	KillEndMS   int64        `json:"kill_to_finished_ms"`
	OldCloud    []ledgerLine `json:"old_cloud"`
	NewCloud    []ledgerLine `json:"new_cloud"`
	Effects     []api.Effect `json:"effects"`
}

func (r *demoReport) json() demoJSON {
	out := demoJSON{OK: len(r.Broken) == 0, Broken: append([]string{}, r.Broken...), Model: r.Model, Chains: r.Chains, Entries: r.Entries, TotalMS: r.Total.Milliseconds()}
	m := r.Machine
	out.Machine = demoMachineJSON{Missing: m.Missing, Session: m.Session, Results: m.Results, RestoredMS: m.Restored.Sub(m.Died).Milliseconds(),
		KillReadyMS: m.Ready.Sub(m.Killed).Milliseconds(), KillResultMS: m.Finished.Sub(m.Killed).Milliseconds()}
	for _, a := range r.Acts {
		out.Acts = append(out.Acts, demoActJSON{Act: a.N, Session: a.Session, KillReadyMS: a.Ready.Sub(a.Killed).Milliseconds(),
			KillFirstMS: a.First.Sub(a.Killed).Milliseconds(), KillEndMS: a.Ended.Sub(a.Killed).Milliseconds(),
			OldCloud: a.Old, NewCloud: a.New, Effects: a.Effects})
	}
	return out
}
