package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/internal/store"
)

// dataFlags are the flags of the commands that read a data folder offline.
type dataFlags struct {
	config, data, store, identity string
}

func (f *dataFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.config, "config", "", "settings file of the server")
	cmd.Flags().StringVar(&f.data, "data", "", "data folder (default ./planaria-data)")
	cmd.Flags().StringVar(&f.store, "store", "", "sqlite:FILE or postgres://… (default: the data folder's own)")
	cmd.Flags().StringVar(&f.identity, "master-identity", "", "file of the age identity that opens the master key")
}

// load is the configuration under these flags.
func (f *dataFlags) load() (Config, error) {
	cfg := DefaultConfig()
	if f.config != "" {
		var err error
		if cfg, err = LoadConfig(f.config); err != nil {
			return cfg, err
		}
	}
	if f.data != "" {
		cfg.Data = f.data
	}
	if f.store != "" {
		cfg.Store, cfg.StoreEnv = f.store, ""
	}
	if f.identity != "" {
		cfg.MasterIdentityFile = f.identity
	}
	if err := cfg.Validate(); err != nil {
		return cfg, misused(err, "see 'planaria serve --help'")
	}
	return cfg, nil
}

// chainReport is one verified chain, of a session's log or of the audit.
type chainReport struct {
	Kind      string `json:"kind"` // session, audit
	Workspace string `json:"workspace"`
	ID        string `json:"id"` // session or node
	Entries   int64  `json:"entries"`
	Erased    int64  `json:"erased"`
	OK        bool   `json:"ok"`
	Problem   string `json:"problem,omitzero"`
}

func (a *app) verifyCommand() *cobra.Command {
	var f dataFlags
	var quiet bool
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Verify the hash chains of every session and of the audit, offline",
		Long: `Verify the hash chains of every session's log and of the audit, without a
server: each entry's hash, its place behind the one before, its body where it was
not erased, the head, and that the rows of session and effects follow from the log.
Nothing is changed. Damage in one session does not stop
the others from being verified; the exit code is 1 if anything is damaged.`,
		Example: "  planaria verify --data ./planaria-data\n  planaria verify --json | jq 'select(.ok | not)'",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := f.load()
			if err != nil {
				return err
			}
			db, err := openReadOnly(cmd.Context(), cfg, a.getenv)
			if err != nil {
				return err
			}
			defer db.Close()
			v := &verifier{a: a, quiet: quiet}
			if err := v.run(cmd.Context(), db); err != nil {
				return err
			}
			return v.verdict()
		},
	}
	f.add(cmd)
	cmd.Flags().BoolVar(&quiet, "quiet", false, "print only what is damaged")
	return cmd
}

// verifier walks a store and counts.
type verifier struct {
	a     *app
	quiet bool

	sessions, chains, damaged int
	entries                   int64
}

// run verifies every session, then every audit chain.
func (v *verifier) run(ctx context.Context, db *store.DB) error {
	err := db.VerifyAll(ctx, func(r store.Report) error {
		v.sessions++
		return v.report(chainReport{Kind: "session", Workspace: string(r.Workspace), ID: string(r.Session), Entries: int64(r.Entries),
			Erased: int64(r.Erased), OK: r.Problem == "", Problem: r.Problem})
	})
	if err != nil {
		return err
	}
	workspaces, err := db.Workspaces(ctx, store.Page{IncludeArchived: true})
	if err != nil {
		return err
	}
	for _, ws := range workspaces {
		if err := v.audit(ctx, db, ws.ID); err != nil {
			return err
		}
	}
	return nil
}

func (v *verifier) audit(ctx context.Context, db *store.DB, ws store.WorkspaceID) error {
	chains, err := db.VerifyAudit(ctx, ws)
	if errors.Is(err, store.ErrDamaged) {
		v.chains++
		return v.report(chainReport{Kind: "audit", Workspace: string(ws), Problem: err.Error()})
	}
	if err != nil {
		return err
	}
	for _, c := range chains {
		v.chains++
		if err := v.report(chainReport{Kind: "audit", Workspace: string(c.Workspace), ID: string(c.Node), Entries: c.Rows, OK: true}); err != nil {
			return err
		}
	}
	return nil
}

func (v *verifier) report(r chainReport) error {
	v.entries += r.Entries
	if !r.OK {
		v.damaged++
	}
	if v.quiet && r.OK {
		return nil
	}
	if v.a.json {
		return v.a.printJSON(r)
	}
	state := fmt.Sprintf("ok, %d entries", r.Entries)
	if r.Erased > 0 {
		state += fmt.Sprintf(", %d erased", r.Erased)
	}
	if !r.OK {
		state = "DAMAGED: " + oneLine(r.Problem)
	}
	_, err := fmt.Fprintf(v.a.stdout, "%-8s %-12s %-34s %s\n", r.Kind, r.Workspace, r.ID, state)
	return err
}

// verdict is the sentence at the end, and an error if anything is damaged.
func (v *verifier) verdict() error {
	v.a.say("verified %d sessions and %d audit chains, %d entries", v.sessions, v.chains, v.entries)
	if v.damaged > 0 {
		return hinted(fmt.Errorf("%d of %d chains are damaged", v.damaged, v.sessions+v.chains),
			"a damaged session refuses to run and touches no other; restore the data folder from a backup")
	}
	return nil
}
