package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) sandboxCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "sandbox SESSION",
		Short: "Show a session's machine and its snapshots",
		Long: `Show a session's machine and its snapshots. States: none (it never had one),
running (also while it lingers at rest), suspended (a snapshot holds all of it),
lost (it died; the next call brings back what can be).`,
		Example: "  planaria sandbox sesn_01\n  planaria sandbox sesn_01 --json",
		Args:    argsExactly("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			s, err := c.GetSandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			generation := ""
			if s.Generation > 0 {
				generation = fmt.Sprint(s.Generation)
			}
			if err := a.show(s, [][2]string{{"state", s.State}, {"since", when(s.Since)}, {"node", deref(s.Node)}, {"generation", generation},
				{"image", deref(s.Image)}, {"reason", deref(s.Reason)}, {"note", deref(s.Note)}}); err != nil || a.json {
				return err
			}
			return a.snapshotTable(s.Snapshots)
		},
	}
}

func (a *app) snapshotTable(all []api.SandboxSnapshot) error {
	if len(all) == 0 {
		a.say("no snapshots")
		return nil
	}
	if _, err := fmt.Fprintln(a.stdout); err != nil {
		return err
	}
	rows := make([][]string, len(all))
	for i, x := range all {
		rows[i] = []string{x.ID, fmt.Sprint(x.Seq), shortTime(x.CreatedAt.Time), x.Why, deref(x.Name), fmt.Sprint(x.SizeBytes),
			fmt.Sprintf("%d ms", x.PauseMS), whetherTime(x.PackedAt), whetherTime(x.TestedAt)}
	}
	return table(a.stdout, []string{"SNAPSHOT", "SEQ", "TAKEN", "WHY", "NAME", "BYTES", "PAUSE", "PACKED", "TESTED"}, rows)
}

func whetherTime(t *api.Time) string {
	if t == nil {
		return "no"
	}
	return "yes"
}

func (a *app) checkpointCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "checkpoint SESSION",
		Short: "Give a session's machine, as it is now, a name to come back to",
		Long: `Give a session's machine, as it is now, a name to come back to: a snapshot is taken
of a running one, of a suspended one the newest is named. It is kept until the
session is deleted.`,
		Example: "  planaria checkpoint sesn_01 --name before-migration",
		Args:    argsExactly("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("name") && name == "" {
				return misused(errors.New("--name is empty"), "leave it out for a name with the time")
			}
			if name == "" {
				name = "checkpoint " + time.Now().UTC().Format("2006-01-02 15:04:05")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			x, err := c.CreateCheckpoint(cmd.Context(), args[0], name)
			if err != nil {
				return err
			}
			return a.show(x, [][2]string{{"checkpoint", deref(x.Name)}, {"seq", fmt.Sprint(x.Seq)}, {"snapshot", x.ID}, {"bytes", fmt.Sprint(x.SizeBytes)}})
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "name of the checkpoint (default: one with the time)")
	return cmd
}
