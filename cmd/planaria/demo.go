package main

import (
	"context"
	"crypto/rand"
	"embed"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/llm"
)

//go:embed demo/*.yaml
var demoFiles embed.FS

// The demo's names.
const (
	oldCloud  = "old-cloud"
	newCloud  = "new-cloud"
	demoModel = "scripted-migration"
	demoSteps = 13
	demoTask  = "Move the orders database from the old cloud to the new one. Delete the old one when nobody needs it any more."
	demoKey   = "demo-model-key" // of the scripted model, which listens on loopback for the demo's time
)

// demoLimit bounds one act: far more than it takes.
const demoLimit = 60 * time.Second

func (a *app) demoCommand() *cobra.Command {
	d := &demo{a: a}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "See an agent's server killed at the worst moments, and nothing done twice",
		Long: `See what Planaria is about, on this machine alone: no account, no key, no network.

An agent moves a database between two clouds in 13 steps. The clouds are two real
MCP servers in the demo's own process; each keeps a ledger of what it was asked.
The server is a process of its own ('planaria serve'), the model is scripted and
reached over HTTP like any other.

  Act one   While step 13 is at the new cloud, the server gets SIGKILL. It starts
            again, the session comes back by itself and finishes. Step 12, which
            deleted the old database, is not repeated.
  Act two   A new session. This time SIGKILL comes while step 12, the deletion, is
            at the old cloud: done there, its answer never delivered. Nobody can
            know; the effect is in doubt. The contract's probe asks the cloud, finds
            the database deleted, and the session goes on.
  Act three An agent with a machine of its own (a sandbox), on which a counter runs in
            the background. The machine gets SIGKILL and comes back from its
            snapshot: the counter goes on, the files are there. Then the server gets
            SIGKILL while a command runs on the machine: its result arrives, it ran
            once. Left out where the machine runs no sandboxes.

Then it prints both ledgers, the effect log and the timings, verifies every hash
chain, and exits with 1 if an irreversible call arrived twice, a step is missing,
the counter began again, or a request to the model was invalid.`,
		Example: "  planaria demo\n  planaria demo --keep --verbose",
		Args:    argsExactly(),
		RunE:    func(cmd *cobra.Command, _ []string) error { return d.run(cmd.Context()) },
	}
	cmd.Flags().BoolVar(&d.keep, "keep", false, "keep the data folder, and leave the server running for you to look until Ctrl-C")
	cmd.Flags().BoolVar(&d.verbose, "verbose", false, "show the server's log")
	return cmd
}

// demo is one run: the outside world, the model and the server's process.
type demo struct {
	a             *app
	keep, verbose bool

	dir      string
	old, new *cloud
	model    *llm.ScriptServer
	modelURL string
	modelSrv *http.Server
	server   *child
	client   *api.Client
	agent    string
	env      string
	report   demoReport
}

// act is one of the two stories.
type act struct {
	N     int
	cloud *cloud
	tool  string // the server is killed while this one's call is at cloud
	step  int

	Session  string
	Began    time.Time
	Killed   time.Time
	Ready    time.Time // the server took requests again
	First    time.Time // first entry of the log after the kill
	Ended    time.Time
	Stop     string
	times    []time.Time // of all entries that the stream showed
	Effects  []api.Effect
	Old, New []ledgerLine
}

func (d *demo) run(ctx context.Context) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	began := time.Now()
	defer d.close()
	machines := probeMachines(ctx)
	if err := d.open(ctx); err != nil {
		return err
	}
	if err := d.prepare(ctx); err != nil {
		return err
	}
	for _, act := range []*act{
		{N: 1, cloud: d.new, tool: "enable_backups", step: 13},
		{N: 2, cloud: d.old, tool: "delete_database", step: 12},
	} {
		if err := d.play(ctx, act); err != nil {
			return fmt.Errorf("act %d: %w", act.N, err)
		}
		d.report.Acts = append(d.report.Acts, act)
	}
	var err error
	if d.report.Machine, err = d.playMachine(ctx, <-machines); err != nil {
		return fmt.Errorf("act 3: %w", err)
	}
	if err := d.server.stop(); err != nil {
		return err
	}
	if err := d.verify(ctx); err != nil {
		return err
	}
	d.report.Model = d.model.Stats()
	d.report.Total = time.Since(began)
	broken := d.report.judge()
	if err := d.print(); err != nil {
		return err
	}
	if d.keep {
		if err := d.linger(ctx); err != nil {
			return err
		}
	}
	if len(broken) > 0 {
		return hinted(fmt.Errorf("%d promise(s) broken, see the verdict above", len(broken)), "this must never happen; please report it with the output")
	}
	return nil
}

// open makes the folder and starts the outside world: clouds and model.
func (d *demo) open(ctx context.Context) error {
	var err error
	if d.dir, err = os.MkdirTemp("", "planaria-demo-"); err != nil {
		return err
	}
	d.step("two clouds and a scripted model start on this machine")
	if d.old, err = listenCloud(oldCloud, filepath.Join(d.dir, "old-cloud.jsonl")); err != nil {
		return err
	}
	if d.new, err = listenCloud(newCloud, filepath.Join(d.dir, "new-cloud.jsonl")); err != nil {
		return err
	}
	if err := d.openModel(); err != nil {
		return err
	}
	config := filepath.Join(d.dir, "planaria.yaml")
	text := fmt.Sprintf("models:\n  - pattern: %s\n    base_url: %s\n    key_env: %s\n    context_window: 200000\n    max_output: 8000\n", demoModel, d.modelURL, demoKeyEnv)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return err
	}
	d.server = &child{a: d.a, data: filepath.Join(d.dir, "data"), config: config, log: filepath.Join(d.dir, "server.log"),
		key: "pk_demo_" + rand.Text(), verbose: d.verbose, addr: "127.0.0.1:0"}
	d.step("the server starts")
	took, err := d.server.start(ctx)
	if err != nil {
		return err
	}
	d.report.FirstStart = took
	d.client = &api.Client{BaseURL: d.server.url, Key: d.server.key, UserAgent: "planaria-demo"}
	return nil
}

// openModel serves the script. It plays by position in the conversation alone,
// so it needs to know nothing of acts and kills.
func (d *demo) openModel() error {
	data, err := demoFiles.ReadFile("demo/script.yaml")
	if err != nil {
		return err
	}
	script, err := llm.ParseScript(data)
	if err != nil {
		return fmt.Errorf("read the demo's script: %w", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen for the model: %w", err)
	}
	d.model = llm.NewScriptServer(script)
	d.modelURL = "http://" + l.Addr().String()
	d.modelSrv = &http.Server{Handler: d.model, ReadHeaderTimeout: readHeaderTime}
	go func() { _ = d.modelSrv.Serve(l) }() // ends with close
	return nil
}

// close ends everything that open started.
func (d *demo) close() {
	if d.server != nil {
		d.server.kill()
		if err := d.endMachines(); err != nil {
			d.a.say("planaria: cannot end the agents' machines: %v", err)
		}
	}
	for _, c := range []*cloud{d.old, d.new} {
		if c != nil {
			_ = c.close()
		}
	}
	if d.modelSrv != nil {
		_ = d.modelSrv.Close()
	}
	if d.dir != "" && !d.keep {
		_ = os.RemoveAll(d.dir)
	}
}

// prepare makes connectors, agent and environment through the API.
func (d *demo) prepare(ctx context.Context) error {
	d.step("connectors with contracts, an agent and an environment are created through the API")
	in := agentFlags{model: demoModel, system: "You move databases between clouds, one step at a time."}
	for _, c := range []*cloud{d.old, d.new} {
		data, err := demoFiles.ReadFile("demo/" + c.name + ".yaml")
		if err != nil {
			return err
		}
		var conn api.ConnectorCreate
		if err := decodeYAML(data, &conn); err != nil {
			return fmt.Errorf("read connector %s: %w", c.name, err)
		}
		conn.URL = c.url
		if _, _, err := applyConnector(ctx, d.client, conn); err != nil {
			return fmt.Errorf("create connector %s: %w", c.name, err)
		}
		in.servers = append(in.servers, c.name+"=planaria:"+c.name)
	}
	create, err := in.create("migrator")
	if err != nil {
		return err
	}
	agent, err := d.client.CreateAgent(ctx, create)
	if err != nil {
		return fmt.Errorf("create agent: %w", err)
	}
	d.agent = agent.ID
	d.env, err = defaultEnvironment(ctx, d.client)
	return err
}

// play plays one act: the session runs, the server is killed while one call is
// at its cloud, starts again, and the session finishes by itself.
func (d *demo) play(ctx context.Context, a *act) error {
	ctx, cancel := context.WithTimeoutCause(ctx, demoLimit, fmt.Errorf("the session did not finish within %s", demoLimit))
	defer cancel()
	d.step("act %d: the agent moves the database; SIGKILL comes while step %d (%s) is at the %s", a.N, a.step, a.tool, a.cloud.name)
	d.old.reset(a.N)
	d.new.reset(a.N)
	h := a.cloud.holdAnswer(a.tool)
	a.Began = time.Now()
	title := fmt.Sprintf("demo, act %d", a.N)
	s, err := d.client.CreateSession(ctx, api.SessionCreate{Agent: api.AgentRef{ID: d.agent}, EnvironmentID: d.env, Title: &title,
		InitialEvents: api.ClientEvents{&api.UserMessage{Content: api.Texts(demoTask)}}})
	if err != nil {
		close(h.release)
		return fmt.Errorf("create session: %w", err)
	}
	a.Session = s.ID
	followed := make(chan error, 1)
	go func() { followed <- d.follow(ctx, a) }() // what it writes to a is read after it has ended
	select {
	case <-h.arrived:
	case err := <-followed:
		close(h.release)
		return errors.Join(errors.New("the session ended before the call arrived"), err)
	}
	err = d.killAndRestart(ctx, a, h)
	if ferr := <-followed; ferr != nil {
		return errors.Join(err, ferr)
	}
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(a.times, func(t time.Time) bool { return t.After(a.Killed) }); i >= 0 {
		a.First = a.times[i]
	}
	a.Old, a.New = d.old.lines(a.N), d.new.lines(a.N)
	a.Effects, err = collect(withoutModels(d.client.AllEffects(ctx, a.Session, api.EffectListParams{Limit: 100})), 0)
	return err
}

// killAndRestart kills the server while the cloud holds its answer, lets the
// answer go to nobody, and starts the server again.
func (d *demo) killAndRestart(ctx context.Context, a *act, h *hold) error {
	a.Killed = time.Now()
	d.server.kill()
	close(h.release)
	d.step("SIGKILL. %s was done at the %s, its answer went to nobody", a.tool, a.cloud.name)
	if _, err := d.server.start(ctx); err != nil {
		return err
	}
	a.Ready = time.Now()
	d.step("the server is back after %s; the session goes on by itself", ms(a.Ready.Sub(a.Killed)))
	return nil
}

// follow watches the session over the kill: the client's stream opens again by
// itself and goes on where it was.
func (d *demo) follow(ctx context.Context, a *act) error {
	step := 0
	var times []time.Time
	defer func() { a.times = times }()
	for e, err := range d.client.Stream(ctx, a.Session, api.StreamOptions{}) {
		if err != nil {
			return err
		}
		if e.ProcessedAt != nil {
			times = append(times, e.ProcessedAt.Time)
		}
		switch b := e.Body.(type) {
		case *api.AgentMCPToolUse:
			step++
			d.a.say("    step %2d  %s.%s %s", step, b.MCPServerName, b.Name, cut(oneLine(string(b.Input)), 90))
		case *api.SessionError:
			d.a.say("    %s", oneLine(b.Error.Message))
		case *api.SessionStatusRescheduled:
			d.a.say("    in doubt: the session waits for the contract's probe")
		case *api.SessionStatusIdle:
			a.Stop, a.Ended = b.StopReason.Type, time.Now()
			return nil
		case *api.SessionStatusTerminated:
			a.Stop, a.Ended = "terminated", time.Now()
			return nil
		}
	}
	return errors.New("the stream ended")
}

// verify verifies every hash chain offline, as 'planaria verify' does.
func (d *demo) verify(ctx context.Context) error {
	d.step("the server is stopped; every hash chain is verified")
	cfg := DefaultConfig()
	cfg.Data = d.server.data
	db, err := openReadOnly(ctx, cfg, d.a.getenv)
	if err != nil {
		return err
	}
	defer db.Close()
	v := &verifier{a: &app{stdout: discard{}, stderr: discard{}}, quiet: true}
	if err := v.run(ctx, db); err != nil {
		return err
	}
	d.report.Chains, d.report.Entries, d.report.Damaged = v.sessions+v.chains, v.entries, v.damaged
	return nil
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

// linger leaves the server running until Ctrl-C.
func (d *demo) linger(ctx context.Context) error {
	if _, err := d.server.start(ctx); err != nil {
		return err
	}
	d.a.say(`
the server runs on until Ctrl-C; in another terminal:
  export PLANARIA_SERVER=%s PLANARIA_API_KEY=%s
  planaria log %s
  planaria effects list
the folder %s stays`, d.server.url, d.server.key, d.report.Acts[1].Session, d.dir)
	<-ctx.Done()
	return d.server.stop()
}

// step says what happens now.
func (d *demo) step(format string, args ...any) { d.a.say("* "+format, args...) }

// ms is a duration as people read it.
func ms(t time.Duration) string {
	if t >= 10*time.Second {
		return t.Round(100 * time.Millisecond).String()
	}
	return t.Round(time.Millisecond).String()
}
