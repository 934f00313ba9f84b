package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// act is one step of the agent that is killed.
type act struct {
	tool  string
	input map[string]any
	reads bool // it changes nothing
}

// agentRun is n steps as an agent at work on a small project makes them: most
// read, some write files, some change variables of the shell and the memory of
// a process in the background.
func agentRun(n int) []act {
	acts := []act{{tool: "bash", input: map[string]any{"command": `coproc C { n=0; while read -r x; do n=$((n+x)); echo $n; done; }; TOTAL=0; mkdir -p src; echo started`}}}
	for i := 1; len(acts) < n; i++ {
		file := fmt.Sprintf("src/m%02d.py", i)
		acts = append(acts,
			act{tool: "write", input: map[string]any{"file_path": file, "content": strings.Repeat(fmt.Sprintf("value = %d\n", i), 50)}},
			act{tool: "read", input: map[string]any{"file_path": file}, reads: true},
			act{tool: "grep", input: map[string]any{"pattern": "value"}, reads: true},
			act{tool: "bash", input: map[string]any{"command": fmt.Sprintf(`echo %d >&${C[1]}; read -r TOTAL <&${C[0]}; echo $TOTAL > total.txt; cat total.txt`, i)}},
			act{tool: "read", input: map[string]any{"file_path": "total.txt"}, reads: true},
			act{tool: "glob", input: map[string]any{"pattern": "**/*.py"}, reads: true},
			act{tool: "edit", input: map[string]any{"file_path": file, "old_string": fmt.Sprintf("value = %d\n", i), "new_string": "result = 0\n", "replace_all": true}},
			act{tool: "read", input: map[string]any{"file_path": file}, reads: true},
			act{tool: "grep", input: map[string]any{"pattern": "result"}, reads: true},
			act{tool: "bash", input: map[string]any{"command": `wc -l src/*.py | tail -1`}})
	}
	return acts[:n]
}

// stateOf asks for all that counts: names, kinds, modes, targets and bytes of
// files, the shell's variable, and what the process in the background knows.
const stateOf = `find . -printf '%P %y %m %l\n' | LC_ALL=C sort | sha256sum | cut -c1-16
find . -type f -print0 | LC_ALL=C sort -z | xargs -0r sha256sum | sha256sum | cut -c1-16
if [ -n "${C_PID:-}" ] && kill -0 "$C_PID" 2>/dev/null; then echo 0 >&${C[1]}; read -t 5 -r n <&${C[0]}; echo "counter $n"; else echo "no counter"; fi
echo "total ${TOTAL:-unset}"`

// policy is one way to be prepared for the loss of a machine.
type policy struct {
	name    string
	saves   bool
	always  bool // a snapshot after every step, before the next; else as Planaria
	crashes int
	right   int
	wasted  int // steps that were run again
	taken   int
	written int64 // on the local disk
	stored  int64
	times   sample // from the kill to the next possible step
}

// benchCheckpoint repeats a published comparison (arXiv 2604.28138) on this
// machine: is the machine after a crash what the transcript says, and how many
// bytes does that cost?
func benchCheckpoint(ctx context.Context, b *bench) error {
	const title = "Recovery after a crash of the machine"
	x, err := b.boxes(ctx, "checkpoint")
	if err != nil {
		return skipped(title, err)
	}
	defer x.close()
	c := &checkpoints{x: x, acts: agentRun(b.pick(40, 14)), think: 400 * time.Millisecond, rounds: b.pick(5, 1)}
	c.rand = rand.New(rand.NewPCG(uint64(len(c.acts)), checkpointSeed))
	if err := c.reference(ctx); err != nil {
		return err
	}
	chat := &policy{name: "transcript only: a fresh machine"}
	each := &policy{name: "a snapshot after every step, whole image stored", saves: true, always: true}
	ours := &policy{name: "Planaria: when something changed, while the model thinks, packed", saves: true}
	for _, p := range []*policy{chat, each, ours} {
		if err := c.measure(ctx, p); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	reading := 0
	for _, a := range c.acts {
		if a.reads {
			reading++
		}
	}
	t := &table{title: title, head: []string{"", "crashes", "machine as the transcript says", "steps run again", "from the kill to the next step: median", "p99",
		"snapshots of a run", "written to the local disk", "stored", "stored against every step"}}
	for _, p := range []*policy{chat, each, ours} {
		t.row(p.name, count(float64(p.crashes)), percent(float64(p.right), float64(p.crashes)), count(float64(p.wasted)), ms(p.times.median()), ms(p.times.p99()),
			count(float64(p.taken)), mib(p.written), mib(p.stored), percent(float64(p.stored), float64(each.stored)))
	}
	t.note("%d steps, %d of them reading tools; killed with SIGKILL after random steps (seed %d), with Planaria at a random moment of the %s in which the model thinks, so also in the middle of a snapshot. Compared are the tree of files by hash, a variable of the shell and the memory of a process in the background. Bytes are of one run without crash.",
		len(c.acts), reading, checkpointSeed, ms(c.think))
	t.note("Published for other agents and another machine: 8 %% right with the transcript only, 100 %% with snapshots, 87 %% less traffic than a snapshot each turn. Here: %s right, %s less stored.",
		percent(float64(ours.right), float64(ours.crashes)), percent(float64(each.stored-ours.stored), float64(each.stored)))
	t.note("Target: 100 %% right: %s; at least 87 %% less stored: %s.", verdict(ours.right == ours.crashes), verdict(float64(ours.stored) <= 0.13*float64(each.stored)))
	t.print()
	return nil
}

// checkpointSeed makes the crash points of two runs the same.
const checkpointSeed = 20260428

// crashShare of the steps is followed by a crash.
const crashShare = 5

type checkpoints struct {
	x      *boxes
	acts   []act
	want   []string // state after each step
	think  time.Duration
	rounds int
	rand   *rand.Rand
}

// reference records the state after each step of a run that nothing disturbs.
func (c *checkpoints) reference(ctx context.Context) error {
	s, err := c.x.start(ctx, 0)
	if err != nil {
		return err
	}
	for _, a := range c.acts {
		if _, err := c.x.call(ctx, s, a.tool, a.input); err != nil {
			return err
		}
		state, err := c.x.sh(ctx, s, stateOf)
		if err != nil {
			return err
		}
		c.want = append(c.want, state)
	}
	return s.Kill(ctx)
}

// measure counts the bytes of an undisturbed run, then crashes others.
func (c *checkpoints) measure(ctx context.Context, p *policy) error {
	calm := &machineRun{c: c, p: p}
	if err := calm.run(ctx, func(int) bool { return false }); err != nil {
		return err
	}
	if p.saves {
		p.taken, p.written = calm.v.taken, calm.v.written
		if p.stored = calm.v.stored; p.always {
			p.stored = calm.v.written
		}
	}
	for range c.rounds {
		r := &machineRun{c: c, p: p}
		if err := r.run(ctx, func(int) bool { return c.rand.IntN(crashShare) == 0 }); err != nil {
			return err
		}
	}
	return nil
}

// machineRun is one run under a policy.
type machineRun struct {
	c *checkpoints
	p *policy
	s *sandbox.Sandbox
	v *saver

	results []string // of the steps so far: the transcript
	through int      // steps that the newest snapshot contains
	pending int      // the same, of the snapshot that is being taken
}

func (r *machineRun) run(ctx context.Context, crash func(step int) bool) error {
	var err error
	if r.s, err = r.c.x.start(ctx, 0); err != nil {
		return err
	}
	if r.v, err = r.c.x.saver(r.s); err != nil {
		return err
	}
	for i, a := range r.c.acts {
		result, err := r.c.x.call(ctx, r.s, a.tool, a.input)
		if err != nil {
			return err
		}
		r.results = append(r.results, result)
		if err := r.save(ctx, i+1); err != nil {
			return err
		}
		if crash(i) {
			err = r.crash(ctx, i)
		} else if err = r.think(ctx); err == nil {
			err = r.settled()
		}
		if err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return r.end(ctx)
}

// save does what the policy does after a step.
func (r *machineRun) save(ctx context.Context, steps int) error {
	switch {
	case !r.p.saves:
		return nil
	case r.p.always:
		r.through = steps
		return r.v.snapshot(ctx)
	}
	r.pending = steps
	r.v.begin(ctx)
	return nil
}

// think passes the time of the model; nothing waits for it where nothing is
// done in it.
func (r *machineRun) think(ctx context.Context) error {
	if !r.p.saves || r.p.always {
		return nil
	}
	return pause(ctx, r.c.think/4)
}

// settled waits for the snapshot that was begun.
func (r *machineRun) settled() error {
	if err := r.v.join(); err != nil {
		return err
	}
	if r.p.saves && !r.p.always {
		r.through = r.pending
	}
	return nil
}

// crash kills the machine after step i, brings it back, and looks whether it is
// what the transcript says. Where it is not, the run goes on with one that was
// brought there by hand, so that the next crash is judged by itself.
func (r *machineRun) crash(ctx context.Context, i int) error {
	if r.p.saves && !r.p.always {
		if err := pause(ctx, time.Duration(r.c.rand.Int64N(int64(r.c.think)))); err != nil {
			return err
		}
	}
	if err := r.c.x.sigkill(r.s); err != nil {
		return err
	}
	start := time.Now()
	had := r.v.last
	if err := r.settled(); err != nil && r.v.last != had { // else the kill has cut it
		return err
	}
	if err := r.s.Kill(ctx); err != nil { // clears away what is left of it
		return err
	}
	if err := r.recover(ctx, i+1); err != nil {
		return err
	}
	r.p.times = append(r.p.times, time.Since(start))
	state, err := r.c.x.sh(ctx, r.s, stateOf)
	if err != nil {
		return err
	}
	r.p.crashes++
	if state == r.c.want[i] {
		r.p.right++
		return nil
	}
	if r.p.saves {
		fmt.Fprintf(os.Stderr, "bench: checkpoint: %s: after step %d the machine is\n%s\nand should be\n%s\n", r.p.name, i+1, state, r.c.want[i])
	}
	return r.byHand(ctx, i+1)
}

// byHand makes a fresh machine and brings it to where the transcript is.
func (r *machineRun) byHand(ctx context.Context, steps int) error {
	if err := r.s.Kill(ctx); err != nil {
		return err
	}
	var err error
	if r.s, err = r.c.x.start(ctx, 0); err != nil {
		return err
	}
	for _, a := range r.c.acts[:steps] {
		if _, err := r.c.x.call(ctx, r.s, a.tool, a.input); err != nil {
			return err
		}
	}
	r.v.s, r.v.seen = r.s, sandbox.Activity{}
	if !r.p.saves {
		return nil
	}
	r.through = steps
	return r.v.snapshot(ctx)
}

// recover starts a fresh machine, or restores the newest snapshot and runs again
// what it does not contain, as far as each result is the one of the transcript.
func (r *machineRun) recover(ctx context.Context, steps int) error {
	var err error
	if !r.p.saves || r.v.last == nil {
		r.s, err = r.c.x.start(ctx, 0)
		r.through = 0
	} else {
		spec := r.c.x.spec(0)
		spec.Fence = 2
		r.s, _, err = r.c.x.r.Restore(ctx, r.v.last, spec)
	}
	if err != nil {
		return err
	}
	r.v.s = r.s
	r.v.seen = sandbox.Activity{}
	if !r.p.saves {
		return nil
	}
	for i := r.through; i < steps; i++ {
		a := r.c.acts[i]
		if a.reads {
			continue
		}
		r.p.wasted++
		result, err := r.c.x.call(ctx, r.s, a.tool, a.input)
		if err != nil {
			return err
		}
		if result != r.results[i] {
			return nil // from here on it would be another machine
		}
	}
	return nil
}

func (r *machineRun) end(ctx context.Context) error {
	if err := r.settled(); err != nil {
		return err
	}
	if r.v.last != nil {
		if err := r.c.x.r.DropImage(r.v.last.ID); err != nil {
			return err
		}
	}
	return r.s.Kill(ctx)
}
