package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/url"
	"strings"

	"github.com/planaria/planaria/api"
)

// client makes the API client of a command.
func (a *app) client() (*api.Client, error) {
	base := a.server
	if base == "" {
		base = a.getenv("PLANARIA_SERVER")
	}
	if base == "" {
		base = defaultServer
	}
	u, err := url.Parse(base)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, misused(fmt.Errorf("server: %q is not an http or https address", base), "such as --server %s", defaultServer)
	}
	key, err := secretFrom("api key", "", a.keyFile, a.getenv)
	if err != nil {
		return nil, err
	}
	if key == "" {
		key = strings.TrimSpace(a.getenv("PLANARIA_API_KEY"))
	}
	if key == "" {
		return nil, hinted(errors.New("no API key"),
			"set PLANARIA_API_KEY to a key of the server, or name a file with --api-key-file; the first start of 'planaria serve' printed one")
	}
	return &api.Client{BaseURL: base, Key: key, UserAgent: "planaria-cli/" + version}, nil
}

// collect reads a list up to limit items; 0 is all.
func collect[T any](items iter.Seq2[T, error], limit int) ([]T, error) {
	var out []T
	for it, err := range items {
		if err != nil {
			return out, err
		}
		out = append(out, it)
		if limit > 0 && len(out) == limit {
			break
		}
	}
	return out, nil
}

// show prints one object: JSON for machines, name and value lines for people.
func (a *app) show(v any, fields [][2]string) error {
	if a.json {
		return a.printJSON(v)
	}
	width := 0
	for _, f := range fields {
		width = max(width, len(f[0]))
	}
	for _, f := range fields {
		if f[1] == "" {
			continue
		}
		lines := strings.Split(strings.TrimRight(clean(f[1]), "\n"), "\n")
		for i, l := range lines {
			name := f[0]
			if i > 0 {
				name = ""
			}
			if _, err := fmt.Fprintf(a.stdout, "%-*s  %s\n", width, name, l); err != nil {
				return err
			}
		}
	}
	return nil
}

// deref is the text behind a pointer, empty for nil.
func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// when is a nullable time as tables show it.
func when(t *api.Time) string {
	if t == nil {
		return ""
	}
	return shortTime(t.Time)
}

// money is an amount as people read it.
func money(m *api.Money) string {
	if m == nil {
		return ""
	}
	cents := m.Amount
	for len(cents) < 3 {
		cents = "0" + cents
	}
	return cents[:len(cents)-2] + "." + cents[len(cents)-2:] + " " + m.Currency
}

// background is the context of what must still be said after ctx has ended.
func background(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }
