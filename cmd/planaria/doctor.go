package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// finding is the result of one check.
type finding struct {
	Check string `json:"check"`
	State string `json:"state"` // ok, warn, fail
	Says  string `json:"says"`
	Hint  string `json:"hint,omitzero"`
}

// The states of findings.
const (
	stateOK   = "ok"
	stateWarn = "warn"
	stateFail = "fail"
)

// lowDisk is the free space below which doctor warns; a full disk stops the log.
const lowDisk = 2 << 30

// minPostgres is the oldest PostgreSQL that is supported, as server_version_num.
const minPostgres = 150000

func (a *app) doctorCommand() *cobra.Command {
	var f dataFlags
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check data folder, store, keys, clock, disk, models and sandboxes of this machine",
		Long: `Check what a server on this machine depends on, and say what to do where
something is wrong. Nothing is changed; one sandbox is started for a moment, in a
temporary folder. The exit code is 1 if any check fails; warnings do not count.`,
		Example: "  planaria doctor --data ./planaria-data\n  planaria doctor --config planaria.yaml --json",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := f.load()
			if err != nil {
				return err
			}
			d := &doctor{cfg: cfg, getenv: a.getenv}
			d.run(cmd.Context())
			return a.printFindings(d.findings)
		},
	}
	f.add(cmd)
	return cmd
}

func (a *app) printFindings(fs []finding) error {
	failed := 0
	for _, f := range fs {
		if f.State == stateFail {
			failed++
		}
		if a.json {
			if err := a.printJSON(f); err != nil {
				return err
			}
			continue
		}
		if _, err := fmt.Fprintf(a.stdout, "%-5s %-14s %s\n", f.State, f.Check, oneLine(f.Says)); err != nil {
			return err
		}
		if f.Hint != "" {
			a.say("%20s hint: %s", "", oneLine(f.Hint))
		}
	}
	if failed > 0 {
		return hinted(fmt.Errorf("%d of %d checks failed", failed, len(fs)), "follow the hints above and run it again")
	}
	return nil
}

// doctor runs the checks and collects what they say.
type doctor struct {
	cfg      Config
	getenv   func(string) string
	findings []finding
}

func (d *doctor) add(check, state, hint, format string, args ...any) {
	d.findings = append(d.findings, finding{Check: check, State: state, Says: fmt.Sprintf(format, args...), Hint: hint})
}

// fail adds a failed check with the error's own hint.
func (d *doctor) fail(check string, err error) {
	hint := hintFor(err)
	var h *hintError
	if errors.As(err, &h) {
		hint = h.hint
	}
	d.add(check, stateFail, hint, "%v", err)
}

func (d *doctor) run(ctx context.Context) {
	d.folder(ctx)
	d.disk("disk", d.cfg.Data)
	if dir := d.cfg.Sandboxes.Dir; dir != "" && d.cfg.Sandboxes.Enabled != sandboxesOff {
		d.disk("sandbox disk", dir)
	}
	d.clock()
	if !d.cfg.sqlite() {
		d.postgres(ctx)
	}
	d.models()
	d.sandboxes(ctx)
}

// folder checks the data folder, the master key and the store's format.
func (d *doctor) folder(ctx context.Context) {
	state, err := inspectFolder(d.cfg.Data)
	switch {
	case err != nil:
		d.fail("data folder", err)
		return
	case state != folderOurs:
		d.add("data folder", stateOK, "", "%s is new; 'planaria serve' will initialise it", d.cfg.Data)
		d.parent()
		return
	}
	d.add("data folder", stateOK, "", "%s", d.cfg.Data)
	d.permissions()
	m, err := openMaster(d.cfg, false)
	if err != nil {
		d.fail("master key", err)
		return
	}
	d.add("master key", stateOK, "", "key %s opens", m.ID())
	db, err := openReadOnly(ctx, d.cfg, d.getenv)
	if err != nil {
		d.fail("store", err)
		return
	}
	defer db.Close()
	if err := db.Ping(ctx); err != nil {
		d.fail("store", err)
		return
	}
	d.add("store", stateOK, "", "answers, its format is known")
}

// parent checks that a missing folder can be made.
func (d *doctor) parent() {
	dir := filepath.Dir(filepath.Clean(d.cfg.Data))
	fi, err := os.Stat(dir)
	if err != nil || !fi.IsDir() {
		d.add("data folder", stateFail, "make the parent folder first", "the parent %s is not a folder", dir)
	}
}

// permissions checks that secrets are closed to others.
func (d *doctor) permissions() {
	state := len(d.findings)
	fi, err := os.Stat(d.cfg.Data)
	if err == nil && fi.Mode().Perm()&0o077 != 0 {
		d.add("permissions", stateWarn, "chmod 700 "+d.cfg.Data, "the data folder is open to others (mode %04o)", fi.Mode().Perm())
	}
	identity := d.cfg.MasterIdentityFile
	if identity == "" {
		identity = filepath.Join(d.cfg.Data, vault.IdentityFile)
	}
	for _, f := range []string{filepath.Join(d.cfg.Data, vault.MasterFile), identity} {
		if err := checkPrivate(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			d.fail("permissions", err)
		}
	}
	if len(d.findings) == state {
		d.add("permissions", stateOK, "", "folder and keys are closed to others")
	}
}

// disk checks the free space where a folder is or will be.
func (d *doctor) disk(check, dir string) {
	dir = filepath.Clean(dir)
	for {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			break
		}
		dir = filepath.Dir(dir)
	}
	free, err := freeBytes(dir)
	switch {
	case err != nil:
		d.add(check, stateWarn, "", "free space of %s: %v", dir, err)
	case free < lowDisk:
		d.add(check, stateWarn, "make room: a full disk stops every session until there is space again", "%d MiB free", free>>20)
	default:
		d.add(check, stateOK, "", "%d GiB free", free>>30)
	}
}

// clock checks that the clock is not obviously wrong.
func (d *doctor) clock() {
	now := time.Now()
	if now.Year() < 2025 {
		d.add("clock", stateFail, "set the clock; entries are stamped with it", "it says %s", now.UTC().Format(time.RFC3339))
		return
	}
	d.add("clock", stateOK, "", "%s", now.UTC().Format(time.RFC3339))
}

// postgresTimeout bounds the questions that doctor asks a database.
const postgresTimeout = 10 * time.Second

// postgres checks version, durability and clock of the database.
func (d *doctor) postgres(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, postgresTimeout)
	defer cancel()
	url, err := d.cfg.storeURL(d.getenv)
	if err != nil {
		d.fail("postgresql", err)
		return
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		d.add("postgresql", stateFail, "check address, user and PGPASSFILE", "connect to %s: %v", withoutPassword(url), err)
		return
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var ver int
	var commit, fsync string
	var theirs time.Time
	before := time.Now()
	err = conn.QueryRow(ctx, `SELECT current_setting('server_version_num')::int, current_setting('synchronous_commit'), current_setting('fsync'), clock_timestamp()`).
		Scan(&ver, &commit, &fsync, &theirs)
	if err != nil {
		d.fail("postgresql", err)
		return
	}
	ours := before.Add(time.Since(before) / 2)
	if ver < minPostgres {
		d.add("postgresql", stateFail, "use PostgreSQL 15 or newer", "version %d.%d is too old", ver/10000, ver%10000)
	} else {
		d.add("postgresql", stateOK, "", "version %d.%d", ver/10000, ver%10000)
	}
	if commit == "off" || fsync == "off" {
		d.add("durability", stateFail, "switch synchronous_commit and fsync on: what was acknowledged could be lost",
			"synchronous_commit is %s, fsync is %s", commit, fsync)
	} else {
		d.add("durability", stateOK, "", "synchronous_commit is %s", commit)
	}
	skew := theirs.Sub(ours).Abs()
	if skew > store.MaxSkew {
		d.add("clock skew", stateFail, "keep the clocks in step (NTP): a node that is off claims no session", "%s against the database, %s is allowed", skew.Round(time.Millisecond), store.MaxSkew)
	} else {
		d.add("clock skew", stateOK, "", "%s against the database", skew.Round(time.Millisecond))
	}
}

// models checks that the settings make providers. Nothing is asked of them.
func (d *doctor) models() {
	if d.cfg.ModelScript != "" {
		if _, err := llm.LoadScript(d.cfg.ModelScript); err != nil {
			d.fail("models", err)
			return
		}
		d.add("models", stateOK, "", "played from %s", d.cfg.ModelScript)
		return
	}
	rules, err := modelRules(d.cfg, d.getenv, nil)
	if err != nil {
		d.fail("models", err)
		return
	}
	if _, err := llm.NewModels(modelClient((&net.Dialer{}).DialContext), rules); err != nil {
		d.fail("models", err)
		return
	}
	if len(rules) == 0 {
		d.add("models", stateWarn, "set ANTHROPIC_API_KEY, or list models in the settings file", "no provider is configured")
		return
	}
	for _, r := range rules {
		key := "with a key"
		if r.Config.Key == nil {
			key = "without a key"
		}
		d.add("models", stateOK, "", "%s -> %s at %s, %s", r.Pattern, r.Provider, withoutPassword(r.Config.BaseURL), key)
	}
}

// sandboxes checks what the agents' machines need, and starts one for a moment
// in a temporary folder. What is missing fails only where the settings say that
// sandboxes must run.
func (d *doctor) sandboxes(ctx context.Context) {
	if !d.cfg.has(roleWorker) {
		return
	}
	if d.cfg.Sandboxes.Enabled == sandboxesOff {
		d.add("sandboxes", stateOK, "", "switched off by sandboxes.enabled")
		return
	}
	for _, f := range sandbox.Probe(ctx, sandbox.Config{Program: carried}) {
		state := stateOK
		switch {
		case f.OK:
		case f.Fatal && d.cfg.Sandboxes.Enabled == sandboxesOn:
			state = stateFail
		default:
			state = stateWarn
		}
		says := f.What + ": " + f.Says
		if !f.OK && f.Fatal {
			says += "; agents get no machines here"
		}
		d.add("sandboxes", state, f.Mend, "%s", says)
	}
}
