package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"

	"golang.org/x/term"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// defaultServer is where serve listens when nobody says otherwise.
const defaultServer = "http://127.0.0.1:4747"

// printJSON prints one value on one line.
func (a *app) printJSON(v any) error {
	data, err := api.Encode(v)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	_, err = fmt.Fprintf(a.stdout, "%s\n", data)
	return err
}

// say prints words for a person.
func (a *app) say(format string, args ...any) {
	fmt.Fprintf(a.stderr, format+"\n", args...)
}

// table prints rows in aligned columns. A cell is made fit for a terminal.
func table(w io.Writer, header []string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, strings.Join(header, "\t"))
	for _, r := range rows {
		cells := make([]string, len(r))
		for i, c := range r {
			cells[i] = oneLine(c)
			if cells[i] == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(tw, strings.Join(cells, "\t"))
	}
	return tw.Flush()
}

// list prints a list: JSON lines for machines, a table for people, and a
// sentence on stderr when it is empty.
func list[T any](a *app, items []T, what string, header []string, row func(T) []string) error {
	if a.json {
		for _, it := range items {
			if err := a.printJSON(it); err != nil {
				return err
			}
		}
		return nil
	}
	if len(items) == 0 {
		a.say("no %s", what)
		return nil
	}
	rows := make([][]string, len(items))
	for i, it := range items {
		rows[i] = row(it)
	}
	return table(a.stdout, header, rows)
}

// oneLine makes text of others fit for one line of a terminal.
func oneLine(s string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || r == '\r' {
			return ' '
		}
		return visible(r)
	}, s))
}

// clean makes text of others fit for a terminal: lines stay, whatever could
// move the cursor, hide or reorder text goes (design section 7, hostile input).
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return r
		}
		return visible(r)
	}, s)
}

func visible(r rune) rune {
	if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || r == unicode.ReplacementChar || r == '\u2028' || r == '\u2029' {
		return -1
	}
	return r
}

// cut shortens text to n characters.
func cut(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n-1]) + "…"
}

// shortTime is a time as tables show it.
func shortTime(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04:05")
}

// isTerminal reports whether a stream is a person's terminal.
func isTerminal(s any) bool {
	f, ok := s.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// hintFor knows the way out of the errors that people meet.
func hintFor(err error) string {
	var apiErr *api.Error
	var fileErr *vault.FileError
	var urlErr *url.Error
	var opErr *net.OpError
	switch {
	case errors.As(err, &apiErr):
		return hintForAPI(apiErr)
	case errors.As(err, &fileErr):
		return fileErr.Hint()
	case errors.Is(err, store.ErrLocked):
		return "another planaria serve runs on this data folder; stop it, or name another folder with --data"
	case errors.Is(err, store.ErrForeign):
		return "name an empty or a new folder with --data; nothing was changed in this one"
	case errors.Is(err, store.ErrNewer):
		return "run the newer planaria that wrote it; nothing was changed"
	case errors.Is(err, store.ErrDamaged):
		return "restore the data folder from a backup; 'planaria verify' says what is damaged"
	case errors.Is(err, syscall.EADDRINUSE):
		return "something else listens there; choose another address with --listen"
	case errors.As(err, &urlErr), errors.As(err, &opErr):
		return "is the server running? start it with 'planaria serve', or say where it is with --server"
	}
	return ""
}

func hintForAPI(e *api.Error) string {
	switch e.Type {
	case api.ErrAuthentication:
		return "set PLANARIA_API_KEY to a key of this server; the first start of 'planaria serve' printed one"
	case api.ErrPermission:
		return "this key's role does not allow it; 'planaria keys list' shows the roles"
	case api.ErrRateLimit, api.ErrOverloaded:
		return "wait a little and try again"
	}
	return ""
}
