package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/server"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// Limits of the listener.
const (
	readHeaderTime = 10 * time.Second
	idleTime       = 2 * time.Minute
	maxHeaderBytes = 64 << 10
	// closeTime bounds the end of streams once they were told to end.
	closeTime = 3 * time.Second
	// finishTime bounds the end of requests that are no streams.
	finishTime = 500 * time.Millisecond
	// dialTime bounds the making of one connection to the outside.
	dialTime = 10 * time.Second
)

func (a *app) serveCommand() *cobra.Command {
	var file string
	flags := DefaultConfig()
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the server",
		Long: `Run the server. An empty or missing data folder is initialised; the first start
prints an admin key once (PLANARIA_API_KEY sets it instead). A folder that holds
anything else, or a store of a newer version, is refused.

When it takes requests it prints one line to standard output:

  planaria: ready on http://127.0.0.1:4747

SIGTERM and Ctrl-C drain: calls that are on their way run to their answer, no new
ones begin. A second signal leaves at once. Both are as safe as SIGKILL.

Agents get machines of their own (sandboxes) where this machine can run them;
'planaria doctor' tries it out and says what is missing.

Models: ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL make the default provider; more
in the settings file. --model-script plays a scripted model instead.`,
		Example: `  planaria serve
  ANTHROPIC_API_KEY=… planaria serve --data /var/lib/planaria
  planaria serve --config planaria.yaml --listen 127.0.0.1:0
  planaria serve --store postgres://planaria@db/planaria --role worker,keeper`,
		Args: argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg := DefaultConfig()
			if file != "" {
				var err error
				if cfg, err = LoadConfig(file); err != nil {
					return err
				}
			}
			overlay(cmd, &cfg, flags)
			if err := cfg.Validate(); err != nil {
				return misused(err, "see 'planaria serve --help'")
			}
			return a.serve(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&file, "config", "", "settings file; flags stand above it")
	f.StringVar(&flags.Listen, "listen", flags.Listen, "address of the API; port 0 takes a free one")
	f.StringVar(&flags.Data, "data", flags.Data, "data folder")
	f.StringVar(&flags.Store, "store", "", "sqlite:FILE or postgres://… (default sqlite:DATA/"+storeFile+")")
	f.StringVar(&flags.Blobs, "blobs", "", "file:FOLDER for large bodies (default file:DATA/"+blobFolder+")")
	f.StringVar(&flags.MasterIdentityFile, "master-identity", "", "file of the age identity that opens the master key (default DATA/"+vault.IdentityFile+")")
	f.StringSliceVar(&flags.Roles, "role", flags.Roles, "what this process does: api, worker, keeper")
	f.StringVar(&flags.Advertise, "advertise", "", "address at which other nodes reach this one (default: the one it listens on)")
	f.BoolVar(&flags.AllowPrivateNetworks, "allow-private-networks", false, "let agents' own mcp_servers, and limited sandboxes' allowed_hosts, name private and loopback addresses")
	f.IntVar(&flags.MaxRunning, "max-running", flags.MaxRunning, "sessions that this process drives at once")
	f.IntVar(&flags.DrainSeconds, "drain-seconds", flags.DrainSeconds, "how long SIGTERM waits for calls on their way")
	f.StringVar(&flags.Sandboxes.Enabled, "sandboxes", flags.Sandboxes.Enabled, "run the agents' machines here: auto (where this machine can), on, off")
	f.StringVar(&flags.ModelScript, "model-script", "", "file that a scripted model plays in place of every provider")
	f.StringVar(&flags.Log.Level, "log-level", flags.Log.Level, "debug, info, warn or error")
	f.StringVar(&flags.Log.Format, "log-format", flags.Log.Format, "text or json")
	return cmd
}

// overlay puts the flags that were given above the settings of the file.
func overlay(cmd *cobra.Command, cfg *Config, flags Config) {
	for name, set := range map[string]func(){
		"listen":                 func() { cfg.Listen = flags.Listen },
		"data":                   func() { cfg.Data = flags.Data },
		"store":                  func() { cfg.Store, cfg.StoreEnv = flags.Store, "" },
		"blobs":                  func() { cfg.Blobs = flags.Blobs },
		"master-identity":        func() { cfg.MasterIdentityFile = flags.MasterIdentityFile },
		"role":                   func() { cfg.Roles = flags.Roles },
		"advertise":              func() { cfg.Advertise = flags.Advertise },
		"allow-private-networks": func() { cfg.AllowPrivateNetworks = flags.AllowPrivateNetworks },
		"max-running":            func() { cfg.MaxRunning = flags.MaxRunning },
		"drain-seconds":          func() { cfg.DrainSeconds = flags.DrainSeconds },
		"sandboxes":              func() { cfg.Sandboxes.Enabled = flags.Sandboxes.Enabled },
		"model-script":           func() { cfg.ModelScript = flags.ModelScript },
		"log-level":              func() { cfg.Log.Level = flags.Log.Level },
		"log-format":             func() { cfg.Log.Format = flags.Log.Format },
	} {
		if cmd.Flags().Changed(name) {
			set()
		}
	}
}

// serve opens the parts, runs them until a signal, and closes them.
func (a *app) serve(ctx context.Context, cfg Config) error {
	p := &process{a: a, cfg: cfg, log: newLogger(a.stderr, cfg.Log)}
	ctx, stop := p.signals(ctx)
	defer stop()
	defer p.close()
	if err := p.open(ctx); err != nil {
		return err
	}
	return p.run(ctx)
}

// process is one running server: its parts, in the order in which they are opened.
type process struct {
	a   *app
	cfg Config
	log *slog.Logger

	fresh    bool         // the data folder was initialised by this start
	listener net.Listener // of the API
	script   net.Listener // of the scripted model, nil without
	master   *vault.Master
	db       *store.DB
	node     *store.Node
	tel      *telemetry
	blobs    *blob.Folder
	keeper   *keeper.Keeper
	machines *sandbox.Runtime // nil where this node runs none
	sessions *session.Manager
	api      *http.Server
	models   *http.Server       // the scripted model
	requests context.CancelFunc // ends streams and whatever else is under way at api
	closers  []func()
}

// close undoes open, newest first.
func (p *process) close() {
	for _, c := range slices.Backward(p.closers) {
		c()
	}
}

func (p *process) onClose(f func()) { p.closers = append(p.closers, f) }

// run starts every goroutine of the server and waits for all of them. What
// others stand on lives longer: first the sessions drain, then requests and
// streams end, then the node leaves, then the store commits its last batch.
func (p *process) run(ctx context.Context) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	lasting := context.WithoutCancel(ctx)
	nodeCtx, leave := context.WithCancel(lasting)
	storeCtx, stopStore := context.WithCancel(lasting)
	drained, left := make(chan struct{}), make(chan struct{})

	var g errgroup.Group
	part := func(name string, run func() error) {
		g.Go(func() error {
			err := run()
			if err != nil {
				err = fmt.Errorf("%s: %w", name, err)
				fail(err) // one part's end is the end of all
			}
			return err
		})
	}
	part("store", func() error { return p.db.Run(storeCtx) })
	part("node", func() error { defer close(left); return p.node.Run(nodeCtx) })
	part("sessions", func() error { defer close(drained); return p.sessions.Run(ctx) })
	if p.machines != nil && p.cfg.Sandboxes.Pool > 0 {
		part("pool of sandboxes", func() error { return p.keepPool(ctx) })
	}
	part("api", func() error { return served(p.api.Serve(p.listener)) })
	if p.models != nil {
		part("scripted model", func() error { return served(p.models.Serve(p.script)) })
	}
	part("end", func() error {
		<-ctx.Done()
		p.log.Info("draining", "why", context.Cause(ctx))
		ended := p.drain(drained)
		p.stopServing()
		leave()
		<-left
		stopStore()
		return ended
	})
	if err := p.begin(ctx); err != nil {
		fail(err)
		return errors.Join(err, g.Wait())
	}
	err := g.Wait()
	p.tel.close(lasting)
	return err
}

// served is the error of a listener that ended, nil when it was closed.
func served(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// drain waits until no session is driven any more, but not for ever.
func (p *process) drain(drained <-chan struct{}) error {
	t := time.NewTimer(p.cfg.drain())
	defer t.Stop()
	select {
	case <-drained:
		return nil
	case <-t.C:
		// What is still on its way is in doubt or sent again after the next
		// start, as after SIGKILL.
		p.log.Warn("not drained in time, leaving", "elapsed", p.cfg.drain())
		os.Exit(exitFailed)
		return nil
	}
}

// stopServing lets requests finish, then ends the streams, whose clients come
// back with their cursors.
func (p *process) stopServing() {
	p.shutdown(p.api, finishTime)
	p.requests()
	p.shutdown(p.api, closeTime)
	p.shutdown(p.models, closeTime)
}

// shutdown waits for a server's requests, for so long.
func (p *process) shutdown(s *http.Server, wait time.Duration) {
	if s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		p.log.Debug("requests are still under way", "err", err)
	}
}

// signals makes SIGTERM and Ctrl-C the end of ctx, and the second one the end
// of the process.
func (p *process) signals(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	c := make(chan os.Signal, 2)
	signal.Notify(c, os.Interrupt, syscall.SIGTERM)
	go func() { // ends with stop, or with the process
		s, ok := <-c
		if !ok {
			return
		}
		cancel(fmt.Errorf("signal: %s", s))
		if s, ok = <-c; ok {
			p.log.Warn("leaving at once", "why", fmt.Sprintf("second signal: %s", s))
			os.Exit(exitFailed)
		}
	}()
	return ctx, func() { signal.Stop(c); close(c); cancel(nil) }
}

// begin makes the first key and says that we are ready.
func (p *process) begin(ctx context.Context) error {
	key, _, err := server.Bootstrap(ctx, p.db, p.node.ID(), strings.TrimSpace(p.a.getenv("PLANARIA_API_KEY")))
	if err != nil {
		return err
	}
	if key != "" {
		if err := p.tell("admin_key", key, "admin key, shown this once: %s", key); err != nil {
			return err
		}
	}
	url := "http://" + p.listener.Addr().String()
	p.log.Info("ready", "url", url, "node", p.node.ID(), "roles", strings.Join(p.cfg.Roles, ","))
	if err := p.tell("ready", url, "ready on %s", url); err != nil {
		return err
	}
	if err := forgetStart(); err != nil {
		p.log.Debug("cannot give back the pages of the start", "err", err)
	}
	return nil
}

// tell prints one line of data.
func (p *process) tell(name, value, format string, args ...any) error {
	if p.a.json {
		return p.a.printJSON(map[string]string{name: value})
	}
	_, err := fmt.Fprintf(p.a.stdout, "planaria: "+format+"\n", args...)
	return err
}

// open opens every part; nothing runs yet.
func (p *process) open(ctx context.Context) error {
	if err := p.openStore(ctx); err != nil {
		return err
	}
	if err := p.listen(); err != nil {
		return err
	}
	info := store.NodeInfo{Address: p.cfg.Advertise, Roles: p.cfg.Roles, Version: version}
	if info.Address == "" {
		info.Address = p.listener.Addr().String()
	}
	var err error
	if p.node, err = p.db.Join(ctx, info); err != nil {
		return err
	}
	return p.openRooms(ctx)
}

// openStore opens data folder, master key, blobs and store. In a new folder the
// key comes first: what is sealed under a key that is not durable would be lost.
func (p *process) openStore(ctx context.Context) error {
	state, err := inspectFolder(p.cfg.Data)
	if err != nil {
		return err
	}
	if state != folderOurs {
		if err := os.MkdirAll(p.cfg.Data, 0o700); err != nil {
			return fmt.Errorf("make data folder: %w", err)
		}
		p.a.say("planaria: new data folder %s", p.cfg.Data)
		p.fresh = true
	}
	master, err := openMaster(p.cfg, true)
	if err != nil {
		return err
	}
	blobs, err := openBlobs(p.cfg.blobDir(), true)
	if err != nil {
		return err
	}
	url, err := p.cfg.storeURL(p.a.getenv)
	if err != nil {
		return err
	}
	if refusePassword("store", p.cfg.Store) != nil {
		p.log.Warn("others on this machine can read the store's password in our command line; use PGPASSFILE or store_env")
	}
	p.db, err = store.Open(ctx, store.Config{URL: url, Master: master, Blobs: blobs, Logger: p.log})
	if err != nil {
		return err
	}
	p.onClose(func() {
		if err := p.db.Close(); err != nil {
			p.log.Warn("cannot close the store", "err", err)
		}
	})
	p.master, p.blobs = master, blobs
	return checkMaster(ctx, p.db, p.cfg)
}

// listen takes the addresses, so that they are known before anything can dial.
func (p *process) listen() error {
	var err error
	if p.listener, err = net.Listen("tcp", p.cfg.Listen); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	p.onClose(func() { _ = p.listener.Close() })
	if a := addrPort(p.listener); !a.Addr().IsLoopback() {
		p.log.Warn("other machines can reach the API without TLS; put a proxy with TLS before it", "url", "http://"+a.String())
	}
	if p.cfg.ModelScript == "" {
		return nil
	}
	if p.script, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return fmt.Errorf("listen for the scripted model: %w", err)
	}
	p.onClose(func() { _ = p.script.Close() })
	return nil
}

func addrPort(l net.Listener) netip.AddrPort {
	if a, ok := l.Addr().(*net.TCPAddr); ok {
		return a.AddrPort()
	}
	return netip.AddrPort{}
}

// openRooms wires effects, keeper, gateway, sessions and server. The one
// DialContext of the program is made here: it never reaches our own listener.
func (p *process) openRooms(ctx context.Context) error {
	dialer := &net.Dialer{Timeout: dialTime, KeepAlive: 30 * time.Second}
	dial := keeper.Guard(dialer.DialContext, []string{p.listener.Addr().String()})
	models, err := p.openModels(dial)
	if err != nil {
		return err
	}
	if p.tel, err = newTelemetry(ctx, p.a.getenv, p.log); err != nil {
		return err
	}
	p.tel.watch(p.db)
	effects := effect.New(p.db, effect.Config{})
	p.keeper = keeper.New(keeper.Config{DB: p.db, Effects: effects, Vault: p.master, Models: models, Dial: dial, Logger: p.log,
		AllowPrivateNetworks: p.cfg.AllowPrivateNetworks, Observe: p.tel.Ended})
	p.onClose(p.keeper.Close)
	gate := gateway.New(gateway.Config{DB: p.db, Keeper: p.keeper, Effects: effects, Logger: p.log,
		Contradicted: p.tel.Contradicted, Settled: p.tel.Settled,
		PackageHosts: p.cfg.Sandboxes.PackageHosts})
	sc := session.Config{DB: p.db, Logger: p.log, MaxRunning: p.cfg.MaxRunning, Observe: p.tel}
	if p.cfg.has(roleWorker) {
		sc.Node, sc.Gateway = p.node, gate
		if err := p.openSandboxes(ctx, dial); err != nil {
			return err
		}
		sc.Sandboxes = p.machines
	}
	p.sessions = session.New(sc)
	handler := server.New(server.Config{DB: p.db, Sessions: p.sessions, Master: p.master, Node: p.node.ID(), Version: version,
		Logger: p.log, Metrics: p.tel.handler(), Reset: p.tel.Reset})
	if !p.cfg.has(roleAPI) {
		handler = operationsOnly(handler)
	}
	p.api = p.httpServer(handler)
	var base context.Context
	base, p.requests = context.WithCancel(context.WithoutCancel(ctx))
	p.api.BaseContext = func(net.Listener) context.Context { return base }
	return nil
}

// httpServer is a server with limits. It has no write timeout: streams are
// long, and each of their writes has a deadline of its own.
func (p *process) httpServer(h http.Handler) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: readHeaderTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHeaderBytes,
		ErrorLog: slog.NewLogLogger(p.log.Handler(), slog.LevelDebug)}
}

// operationsOnly answers what a process without the role api answers.
func operationsOnly(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/healthz", "/readyz", "/metrics":
			h.ServeHTTP(w, r)
		default:
			http.Error(w, `{"type":"error","error":{"type":"not_found_error","message":"this process has not the role api"}}`, http.StatusNotFound)
		}
	})
}

// openModels makes the providers: those of the settings, or the scripted model
// on its own listener, reached over HTTP like any other.
func (p *process) openModels(dial keeper.DialFunc) (*llm.Models, error) {
	if p.script == nil {
		rules, err := modelRules(p.cfg, p.a.getenv, []netip.AddrPort{addrPort(p.listener)})
		if err != nil {
			return nil, err
		}
		return llm.NewModels(modelClient(dial), rules)
	}
	script, err := llm.LoadScript(p.cfg.ModelScript)
	if err != nil {
		return nil, err
	}
	if script.Key == "" {
		script.Key = rand.Text() // nobody else on this machine plays with it
	}
	p.models = p.httpServer(llm.NewScriptServer(script))
	p.log.Info("playing a scripted model", "file", p.cfg.ModelScript)
	return llm.NewModels(modelClient(dial), []llm.Rule{{Pattern: "*", Provider: "anthropic", ContextWindow: 200_000, MaxOutput: 32_000,
		Config: llm.Config{BaseURL: "http://" + p.script.Addr().String(), Key: func() string { return script.Key }}}})
}
