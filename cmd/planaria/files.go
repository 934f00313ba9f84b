package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/planaria/planaria/api"
)

func (a *app) filesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "files",
		Short:   "List, upload, fetch and delete files",
		Example: "  planaria files upload report.csv\n  planaria files list --session sesn_01",
		RunE:    needSubcommand,
	}
	cmd.AddCommand(a.filesList(), a.filesUpload(), a.filesGet(), a.filesDelete())
	return cmd
}

func (a *app) filesList() *cobra.Command {
	var session string
	var limit int
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List files, newest first",
		Example: "  planaria files list --session sesn_01",
		Args:    argsExactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			files, err := collect(c.AllFiles(cmd.Context(), api.FileListParams{ScopeID: session, Limit: pageOf(limit)}), limit)
			if err != nil {
				return err
			}
			return list(a, files, "files", []string{"ID", "NAME", "TYPE", "BYTES", "SESSION", "DOWNLOADABLE", "CREATED", "EXPIRES"}, fileRow)
		},
	}
	cmd.Flags().StringVar(&session, "session", "", "only of this session: what it was given and what it made")
	cmd.Flags().IntVar(&limit, "limit", 50, "at most so many; 0 is all")
	return cmd
}

func fileRow(f api.File) []string {
	session, down := "", "no"
	if f.Scope != nil {
		session = f.Scope.ID
	}
	if f.Downloadable {
		down = "yes"
	}
	return []string{f.ID, cut(f.Filename, 50), f.MimeType, fmt.Sprint(f.SizeBytes), session, down, shortTime(f.CreatedAt.Time), when(f.ExpiresAt)}
}

func (a *app) filesUpload() *cobra.Command {
	var name, mimeType string
	var expires time.Duration
	cmd := &cobra.Command{
		Use:   "upload FILE",
		Short: "Upload a file, so that sessions can be given it",
		Long: `Upload a file, so that sessions can be given it. Its id is printed. Uploads cannot
be downloaded again; what sessions make in /mnt/session/outputs can.`,
		Example: "  planaria files upload report.csv --expires 24h",
		Args:    argsExactly("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if expires != 0 {
				if err := api.ValidateFileLife(int64(expires / time.Second)); err != nil {
					return misused(err, "--expires is from 1h to 2160h")
				}
			}
			if name == "" {
				name = filepath.Base(args[0])
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			f, err := c.UploadFile(cmd.Context(), api.FileUpload{Filename: name, MimeType: mimeType, ExpiresIn: expires,
				Open: func() (io.ReadCloser, error) { return os.Open(args[0]) }})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(f)
			}
			a.say("uploaded %s (%s, %d bytes)", oneLine(f.Filename), f.MimeType, f.SizeBytes)
			_, err = fmt.Fprintln(a.stdout, f.ID)
			return err
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "name of the file (default: its own)")
	cmd.Flags().StringVar(&mimeType, "type", "", "media type (default: the server finds out)")
	cmd.Flags().DurationVar(&expires, "expires", 0, "time after which it ends, such as 24h (default: never)")
	return cmd
}

func (a *app) filesGet() *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:   "get FILE",
		Short: "Fetch a file that a session made, by its id",
		Long: `Fetch a file that a session made, by its id. Its bytes go to standard output, or
with --output to a file, which is whole or not there. With --json nothing is
fetched and the file's description is printed.`,
		Example: "  planaria files get file_01 --output report.csv",
		Args:    argsExactly("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			if a.json {
				f, err := c.GetFile(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				return a.printJSON(f)
			}
			if out == "" && isTerminal(a.stdout) {
				return misused(errors.New("the file may not be text and standard output is a terminal"), "name a file with --output, or pipe it")
			}
			return a.fetchFile(cmd.Context(), c, args[0], out)
		},
	}
	cmd.Flags().StringVarP(&out, "output", "o", "", "file to write (default: standard output)")
	return cmd
}

// fetchFile writes a file's content to stdout, or to a file that is put in its
// place when it is whole.
func (a *app) fetchFile(ctx context.Context, c *api.Client, id, out string) error {
	r, err := c.DownloadFile(ctx, id)
	if err != nil {
		return err
	}
	defer r.Close()
	if out == "" {
		_, err := io.Copy(a.stdout, r)
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(out), ".planaria-*")
	if err != nil {
		return err
	}
	n, err := io.Copy(f, r)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), out)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("write %s: %w", out, err)
	}
	a.say("wrote %s (%d bytes)", out, n)
	return nil
}

func (a *app) filesDelete() *cobra.Command {
	return &cobra.Command{
		Use:     "delete FILE",
		Short:   "Delete a file, by its id; copies that sessions hold stay",
		Example: "  planaria files delete file_01",
		Args:    argsExactly("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			d, err := c.DeleteFile(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.show(d, [][2]string{{"deleted", d.ID}})
		},
	}
}
