package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/sandbox"
)

// The words of act three. What the machine does stands in demo/script.yaml.
const (
	machineTask  = "Keep a counter running on your machine and write a note."
	machineAgain = "Look again, then do the long work."
	machineNote  = "The counter runs.\n"
	machineCalls = 6 // of built-in tools
	machineAsked = 8 // answers of the model
	longWork     = 8 // lines that the long command writes
	// machineKill is when in the long command of two seconds the server is killed.
	machineKill = 800 * time.Millisecond
)

// machineAct is act three: the agent's machine dies, then the server while a
// command runs on the machine.
type machineAct struct {
	// Missing says why it was not played; the rest is empty then.
	Missing string

	Session  string
	PIDs     [2]int // of the machine, before and after its death
	Results  []machineResult
	Stops    []string
	Died     time.Time // SIGKILL of the machine
	Restored time.Time // first result after it
	Killed   time.Time // SIGKILL of the server
	Ready    time.Time
	Finished time.Time // result of the command that ran over it
}

// machineResult is what a call of a built-in tool came to, as the log has it.
type machineResult struct {
	Tool    string    `json:"tool"`
	Text    string    `json:"text"`
	IsError bool      `json:"is_error"`
	At      time.Time `json:"at"`
}

// probeMachines finds out meanwhile whether this machine runs sandboxes; the
// answer is empty, or what is missing.
func probeMachines(ctx context.Context) <-chan string {
	out := make(chan string, 1)
	go func() { // ends by itself: Probe has a limit
		for _, f := range sandbox.Probe(ctx, sandbox.Config{Program: carried}) {
			if f.Fatal && !f.OK {
				out <- f.What + ": " + f.Says
				return
			}
		}
		out <- ""
	}()
	return out
}

// playMachine plays act three in a session of its own.
func (d *demo) playMachine(ctx context.Context, missing string) (*machineAct, error) {
	m := &machineAct{Missing: missing}
	if missing != "" {
		d.step("act 3 is left out, this machine runs no sandboxes: %s ('planaria doctor' says more)", missing)
		return m, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, demoLimit, fmt.Errorf("the session did not finish within %s", demoLimit))
	defer cancel()
	d.step("act 3: the agent has a machine of its own, with a counter in the background and files; the machine gets SIGKILL")
	agent, err := d.client.CreateAgent(ctx, api.AgentCreate{Name: "machinist", Model: api.ModelConfig{ID: demoModel},
		Tools: []api.ToolParams{{Type: "agent_toolset_20260401", DefaultConfig: &api.ToolDefaultParams{PermissionPolicy: &api.PermissionPolicy{Type: "always_allow"}}}}})
	if err != nil {
		return nil, fmt.Errorf("create agent: %w", err)
	}
	title := "demo, act 3"
	s, err := d.client.CreateSession(ctx, api.SessionCreate{Agent: api.AgentRef{ID: agent.ID}, EnvironmentID: d.env, Title: &title,
		InitialEvents: api.ClientEvents{&api.UserMessage{Content: api.Texts(machineTask)}}})
	if err != nil {
		return nil, fmt.Errorf("create session: %w", err)
	}
	m.Session = s.ID
	w := d.watch(ctx, m)
	if err := w.until(isIdle); err != nil {
		return nil, err
	}
	if err := d.killMachine(m); err != nil {
		return nil, err
	}
	if _, err := d.client.SendEvents(ctx, m.Session, &api.UserMessage{Content: api.Texts(machineAgain)}); err != nil {
		return nil, err
	}
	if err := d.killDuringWork(ctx, m, w); err != nil {
		return nil, err
	}
	if err := w.until(isIdle); err != nil {
		return nil, err
	}
	m.times()
	m.PIDs[1], err = d.machinePID(m.Session)
	return m, err
}

// times takes from the results when things went on.
func (m *machineAct) times() {
	for _, r := range m.Results {
		if m.Restored.IsZero() && r.At.After(m.Died) {
			m.Restored = r.At
		}
		if m.Finished.IsZero() && r.At.After(m.Killed) {
			m.Finished = r.At
		}
	}
}

// killMachine kills the agent's machine as the kernel would, from outside.
func (d *demo) killMachine(m *machineAct) error {
	var err error
	if m.PIDs[0], err = d.machinePID(m.Session); err != nil {
		return err
	}
	m.Died = time.Now()
	if err := syscall.Kill(m.PIDs[0], syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill the agent's machine: %w", err)
	}
	d.step("SIGKILL of the machine. The next message brings it back from its newest snapshot")
	return nil
}

// killDuringWork kills the server while the long command runs, and starts it
// again. The machine is a process of its own and works on.
func (d *demo) killDuringWork(ctx context.Context, m *machineAct, w *watcher) error {
	if err := w.until(func(e api.Event) bool {
		use, ok := e.Body.(*api.AgentToolUse)
		return ok && strings.Contains(string(use.Input), "work.log") && strings.Contains(string(use.Input), "sleep")
	}); err != nil {
		return err
	}
	t := time.NewTimer(machineKill)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	m.Killed = time.Now()
	d.server.kill()
	d.step("SIGKILL of the server, while the command runs on the machine")
	if _, err := d.server.start(ctx); err != nil {
		return err
	}
	m.Ready = time.Now()
	d.step("the server is back after %s and finds the machine at work", ms(m.Ready.Sub(m.Killed)))
	return nil
}

// machinePID reads from the server's folder which process a session's machine is.
func (d *demo) machinePID(session string) (int, error) {
	files, err := filepath.Glob(filepath.Join(d.server.data, sandboxFolder, "live", "*", "state.json"))
	if err != nil {
		return 0, err
	}
	for _, f := range files {
		var state struct {
			ID  string `json:"id"`
			PID int    `json:"pid"`
		}
		data, err := os.ReadFile(f)
		if err != nil || json.Unmarshal(data, &state) != nil {
			continue // it is being removed
		}
		if state.ID == session && state.PID > 1 {
			return state.PID, nil
		}
	}
	return 0, fmt.Errorf("session %s has no machine", session)
}

// watcher follows a session over both kills.
type watcher struct {
	d      *demo
	m      *machineAct
	events chan api.Event
	err    error // of the stream; read after events is closed
	names  map[string]string
}

func (d *demo) watch(ctx context.Context, m *machineAct) *watcher {
	w := &watcher{d: d, m: m, events: make(chan api.Event, 100), names: map[string]string{}}
	go func() { // ends with ctx
		defer close(w.events)
		for e, err := range d.client.Stream(ctx, m.Session, api.StreamOptions{}) {
			if err != nil {
				w.err = err
				return
			}
			select {
			case w.events <- e:
			case <-ctx.Done():
				return
			}
		}
	}()
	return w
}

// until shows events up to one that is looked for.
func (w *watcher) until(found func(api.Event) bool) error {
	for e := range w.events {
		w.show(e)
		if found(e) {
			return nil
		}
	}
	return errors.Join(errors.New("the stream ended"), w.err)
}

func isIdle(e api.Event) bool {
	_, ok := e.Body.(*api.SessionStatusIdle)
	return ok
}

func (w *watcher) show(e api.Event) {
	switch b := e.Body.(type) {
	case *api.AgentToolUse:
		w.names[e.ID] = b.Name
		w.d.a.say("    %s %s", b.Name, cut(oneLine(string(b.Input)), 100))
	case *api.AgentToolResult:
		r := machineResult{Tool: w.names[b.ToolUseID], Text: strings.TrimSpace(blockText(b.Content)), IsError: b.IsError}
		if e.ProcessedAt != nil {
			r.At = e.ProcessedAt.Time
		}
		w.m.Results = append(w.m.Results, r)
		w.d.a.say("      -> %s", cut(oneLine(r.Text), 100))
	case *api.SessionError:
		w.d.a.say("    %s", oneLine(b.Error.Message))
	case *api.SessionStatusIdle:
		w.m.Stops = append(w.m.Stops, b.StopReason.Type)
	}
}

// judge counts: the counter went on from its snapshot and never began again,
// files and the shell's variable are there, and the long command ran once.
func (m *machineAct) judge(fail func(string, ...any)) {
	if m.Missing != "" {
		return
	}
	for i, s := range m.Stops {
		if s != api.StopEndTurn {
			fail("act 3: turn %d ended with %q", i+1, s)
		}
	}
	if len(m.Stops) != 2 || len(m.Results) != machineCalls {
		fail("act 3: %d turns with %d results, not 2 with %d", len(m.Stops), len(m.Results), machineCalls)
		return
	}
	for _, r := range m.Results {
		if r.IsError {
			fail("act 3: %s says %s", r.Tool, cut(oneLine(r.Text), 200))
		}
	}
	if m.PIDs[0] == m.PIDs[1] {
		fail("act 3: the machine was not killed: it is process %d still", m.PIDs[0])
	}
	before, err := strconv.Atoi(m.Results[2].Text)
	if err != nil || before < 1 {
		fail("act 3: the counter stood at %q", m.Results[2].Text)
	}
	first, later := m.judgeRestored(before, fail)
	lines := strings.Fields(m.Results[5].Text)
	if m.Results[4].Text != "finished" || len(lines) != 3 || lines[0] != strconv.Itoa(longWork) {
		fail("act 3: the long command said %q and wrote %v lines, not %d", m.Results[4].Text, lines, longWork)
		return
	}
	if last, err := strconv.Atoi(lines[2]); err != nil || lines[1] != "whole" || last <= later || first < before {
		fail("act 3: the counter stood at %d, after the machine's death at %d and %d, in the end at %q (%s)", before, first, later, lines[2], lines[1])
	}
}

// judgeRestored looks at what the machine came back with.
func (m *machineAct) judgeRestored(before int, fail func(string, ...any)) (first, later int) {
	sum := sha256.Sum256([]byte(machineNote))
	got := strings.Fields(m.Results[3].Text)
	if len(got) != 5 {
		fail("act 3: after the machine's death it says %q", m.Results[3].Text)
		return 0, 0
	}
	if got[1] != hex.EncodeToString(sum[:]) {
		fail("act 3: the note is not what was written")
	}
	if got[2] != "seven" {
		fail("act 3: the shell has lost its variable")
	}
	first, err1 := strconv.Atoi(got[3])
	later, err2 := strconv.Atoi(got[4])
	if err1 != nil || err2 != nil || got[0] != "whole" || first < before || later <= first {
		fail("act 3: the counter does not go on: it stood at %d, then %s and %s, its numbers are %s", before, got[3], got[4], got[0])
	}
	return first, later
}

// printMachine prints act three.
func (d *demo) printMachine() error {
	m, w := d.report.Machine, d.a.stdout
	if m.Missing != "" {
		fmt.Fprintf(w, "\nACT 3 was left out: this machine runs no sandboxes: %s\n", m.Missing)
		return nil
	}
	fmt.Fprintf(w, "\nACT 3: the agent's machine was killed, then the server while a command ran on it\n\n")
	var rows [][]string
	for i, r := range m.Results {
		if i > 0 && r.At.After(m.Died) && !m.Results[i-1].At.After(m.Died) {
			rows = append(rows, []string{"", "-- the machine is killed here --", ""})
		}
		if i > 0 && r.At.After(m.Killed) && !m.Results[i-1].At.After(m.Killed) {
			rows = append(rows, []string{"", "-- the server is killed here, the command runs on --", ""})
		}
		rows = append(rows, []string{strconv.Itoa(i + 1), r.Tool, cut(oneLine(r.Text), 110)})
	}
	if err := table(w, []string{"CALL", "TOOL", "RESULT"}, rows); err != nil {
		return err
	}
	fmt.Fprintf(w, "machine killed to first result of the restored one %s, server killed to ready %s, to the running command's result %s\n",
		ms(m.Restored.Sub(m.Died)), ms(m.Ready.Sub(m.Killed)), ms(m.Finished.Sub(m.Killed)))
	return nil
}

// endMachines kills the machines that have outlived the server.
func (d *demo) endMachines() error {
	dir := filepath.Join(d.server.data, sandboxFolder)
	if _, err := os.Stat(dir); err != nil {
		return nil // it ran none
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	r, err := sandbox.Open(ctx, sandbox.Config{Dir: dir})
	if err != nil {
		return err
	}
	for _, l := range r.Live() {
		err = errors.Join(err, r.End(ctx, l[0], l[1]))
	}
	return errors.Join(err, r.Close())
}
