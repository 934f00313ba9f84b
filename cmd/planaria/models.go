package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/llm"
)

// The addresses of providers that need no base_url.
const (
	anthropicURL = "https://api.anthropic.com/"
	openaiURL    = "https://api.openai.com/v1/"
)

// modelRules turns the settings into rules, first match first: the file's
// entries, then the provider that the environment names. A base URL that is
// one of our own listeners is refused: the agent would talk to itself for ever.
func modelRules(cfg Config, getenv func(string) string, own []netip.AddrPort) ([]llm.Rule, error) {
	entries := cfg.Models
	if e, ok := environmentModel(getenv); ok {
		entries = append(entries[:len(entries):len(entries)], e)
	}
	rules := make([]llm.Rule, 0, len(entries))
	for i, m := range entries {
		at := fmt.Sprintf("models[%d]", i)
		if i == len(cfg.Models) {
			at = "ANTHROPIC_BASE_URL"
		}
		r, err := m.rule(getenv)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		u, err := url.Parse(r.Config.BaseURL)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		for _, l := range own {
			if sameListener(u, l) {
				return nil, hinted(fmt.Errorf("%s: %s is this server's own address; the model would be asked in a circle", at, r.Config.BaseURL),
					"unset ANTHROPIC_BASE_URL for planaria serve, or name the model provider's address")
			}
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// environmentModel is the default provider of the environment. With the
// vendor's own address it takes only that vendor's names; with another, all.
func environmentModel(getenv func(string) string) (ModelConfig, bool) {
	m := ModelConfig{Pattern: "claude-*", Provider: "anthropic", BaseURL: getenv("ANTHROPIC_BASE_URL")}
	if m.BaseURL != "" {
		m.Pattern = "*"
	}
	if getenv("ANTHROPIC_API_KEY") != "" {
		m.KeyEnv = "ANTHROPIC_API_KEY"
	}
	return m, m.BaseURL != "" || m.KeyEnv != ""
}

// rule is one entry as the registry takes it.
func (m ModelConfig) rule(getenv func(string) string) (llm.Rule, error) {
	r := llm.Rule{Pattern: m.Pattern, Provider: m.Provider, ContextWindow: m.ContextWindow, MaxOutput: m.MaxOutput}
	if r.Provider == "" {
		r.Provider = "anthropic"
	}
	r.Config = llm.Config{BaseURL: m.BaseURL, Auth: m.Auth, CacheTTL: m.CacheTTL, MaxTokensField: m.MaxTokensField}
	if m.BaseURL == "" {
		r.Config.BaseURL = map[string]string{"anthropic": anthropicURL, "openai": openaiURL}[r.Provider]
	}
	key, err := secretFrom("key", m.KeyEnv, m.KeyFile, getenv)
	if err != nil {
		return r, err
	}
	switch {
	case m.KeyFile != "":
		r.Config.Key = func() string {
			data, err := os.ReadFile(m.KeyFile)
			if err != nil {
				return key // the file is being replaced: the key that was there
			}
			return strings.TrimSpace(string(data))
		}
	case key != "":
		r.Config.Key = func() string { return key }
	}
	if p := m.Price; p != nil {
		r.Prices = &llm.Prices{Input: p.Input, Output: p.Output, CacheRead: p.CacheRead,
			CacheWrite5m: orElse(p.CacheWrite5m, 1.25*p.Input), CacheWrite1h: orElse(p.CacheWrite1h, 2*p.Input)}
	}
	return r, nil
}

func orElse(v, def float64) float64 {
	if v == 0 {
		return def
	}
	return v
}

// sameListener reports whether a URL's host and port are what a listener is
// bound to. What cannot be resolved cannot be us; the guard of the dialer looks
// again at each dial.
func sameListener(u *url.URL, l netip.AddrPort) bool {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	if port != strconv.Itoa(int(l.Port())) {
		return false
	}
	ips, err := net.LookupHost(u.Hostname())
	if err != nil {
		return false
	}
	for _, s := range ips {
		ip, err := netip.ParseAddr(s)
		if err != nil {
			continue
		}
		ip = ip.Unmap()
		loop := ip.IsLoopback() || ip.IsUnspecified()
		if ip == l.Addr().Unmap() || (l.Addr().IsUnspecified() && loop) || (ip.IsUnspecified() && l.Addr().IsLoopback()) {
			return true
		}
	}
	return false
}

// modelClient is the HTTP client of providers. Their addresses are given by the
// operator, so private ones are allowed.
func modelClient(dial keeper.DialFunc) *http.Client {
	return &http.Client{Transport: llm.Transport(func(ctx context.Context, network, addr string) (net.Conn, error) {
		return dial(keeper.Private(ctx), network, addr)
	})}
}
