package llm_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/llm"
)

func TestModelsFor(t *testing.T) {
	cfg := llm.Config{BaseURL: "http://127.0.0.1:1"}
	own := llm.Prices{Input: 7}
	m, err := llm.NewModels(&http.Client{}, []llm.Rule{
		{Pattern: "claude-opus-5", Provider: "anthropic", Config: cfg, Prices: &own, ContextWindow: 5, MaxOutput: 6},
		{Pattern: "claude-*", Provider: "anthropic", Config: cfg},
		{Pattern: "org/*", Provider: "openai", Config: cfg, MaxOutput: 9},
	})
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		model string
		want  llm.Spec
	}{
		{"claude-opus-5", llm.Spec{Prices: own, ContextWindow: 5, MaxOutput: 6}},
		{"claude-haiku-4-5", llm.Spec{Prices: llm.Prices{Input: 1, Output: 5, CacheRead: 0.1, CacheWrite5m: 1.25, CacheWrite1h: 2}, ContextWindow: 200_000, MaxOutput: 64_000, Defaults: true}},
		{"claude-unheard-of", llm.Spec{}},
		{"org/some/model", llm.Spec{MaxOutput: 9}},
	}
	for _, tt := range tests {
		tt.want.Model = tt.model
		p, got, err := m.For(tt.model)
		if err != nil || p == nil {
			t.Fatalf("For(%s): %v", tt.model, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("For(%s) (-want +got):\n%s", tt.model, diff)
		}
	}
	_, _, err = m.For("gpt-x")
	if !errors.Is(err, llm.ErrNoModel) || !strings.Contains(err.Error(), `"gpt-x"`) || !strings.Contains(err.Error(), "config file") {
		t.Errorf("For(gpt-x) = %v, want an error that names model and way out", err)
	}
}

func TestMaxTokensCapped(t *testing.T) {
	s := llm.NewScriptServer(&llm.Script{Scripts: []llm.PlayScript{{Name: "a", Steps: []llm.Step{{Text: "x"}}}}})
	cfg := upstream(t, s)
	var got string
	cfg.Client.Transport = &tap{cfg.Client.Transport, &got}
	m, err := llm.NewModels(cfg.Client, []llm.Rule{{Pattern: "*", Provider: "anthropic", Config: llm.Config{BaseURL: cfg.BaseURL}, MaxOutput: 100}})
	if err != nil {
		t.Fatal(err)
	}
	p, _, _ := m.For("any/model")
	for _, n := range []int{0, 1000} {
		req := simple
		req.MaxTokens = n
		if _, err := p.Stream(t.Context(), req, nil); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(got, `"max_tokens":100,`) {
			t.Errorf("max_tokens of %d was sent as %s", n, got)
		}
	}
}

func TestModelsConfigErrors(t *testing.T) {
	ok := llm.Config{BaseURL: "http://127.0.0.1:1"}
	with := func(f func(*llm.Config)) llm.Config { c := ok; f(&c); return c }
	tests := []struct {
		rule llm.Rule
		want string
	}{
		{llm.Rule{Provider: "anthropic", Config: ok}, "pattern"},
		{llm.Rule{Pattern: "[", Provider: "anthropic", Config: ok}, "pattern"},
		{llm.Rule{Pattern: "*", Provider: "other", Config: ok}, "provider"},
		{llm.Rule{Pattern: "*", Provider: "anthropic"}, "base url"},
		{llm.Rule{Pattern: "*", Provider: "openai", Config: llm.Config{BaseURL: "ftp://x"}}, "base url"},
		{llm.Rule{Pattern: "*", Provider: "openai", Config: llm.Config{BaseURL: "https://user:pw@x"}}, "base url"},
		{llm.Rule{Pattern: "*", Provider: "anthropic", Config: with(func(c *llm.Config) { c.Auth = "basic" })}, "auth"},
		{llm.Rule{Pattern: "*", Provider: "anthropic", Config: with(func(c *llm.Config) { c.CacheTTL = "2h" })}, "cache ttl"},
		{llm.Rule{Pattern: "*", Provider: "anthropic", Config: with(func(c *llm.Config) { c.Headers = map[string]string{"X-Api-Key": "s"} })}, "headers"},
		{llm.Rule{Pattern: "*", Provider: "openai", Config: with(func(c *llm.Config) { c.MaxTokensField = "n" })}, "max tokens field"},
	}
	for _, tt := range tests {
		_, err := llm.NewModels(&http.Client{}, []llm.Rule{tt.rule})
		if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "pw@") {
			t.Errorf("%+v: err = %v, want one that names %q", tt.rule, err, tt.want)
		}
	}
	empty := ok
	empty.Client, empty.Key = &http.Client{}, func() string { return "" }
	if e := streamErr(t, anthropicAt(t, empty), simple); e.Kind != llm.ErrRequest || !strings.Contains(e.Message, "key") {
		t.Errorf("empty key: %+v", e)
	}
}

func TestCost(t *testing.T) {
	opus := llm.Spec{Prices: llm.Prices{Input: 5, Output: 25, CacheRead: 0.5, CacheWrite5m: 6.25, CacheWrite1h: 10}}
	tiered := llm.Spec{Prices: llm.Prices{Input: 0.1, Output: 0.5, LongOver: 100, Long: &llm.Prices{Input: 0.5, Output: 2.5}}}
	tests := []struct {
		usage llm.Usage
		spec  llm.Spec
		want  int64
	}{
		{llm.Usage{Input: 1_000_000}, opus, 5_000_000_000},
		{llm.Usage{Input: 1, Output: 2, CacheRead: 3, CacheCreation5m: 4, CacheCreation1h: 5}, opus, 5_000 + 50_000 + 1_500 + 25_000 + 50_000},
		{llm.Usage{Input: 100, Output: 1}, tiered, 10_000 + 500},
		{llm.Usage{Input: 60, CacheRead: 41, Output: 1}, tiered, 30_000 + 2_500},
		{llm.Usage{Input: 9, Output: 9}, llm.Spec{}, 0},
	}
	for _, tt := range tests {
		if got := llm.Cost(tt.usage, tt.spec); got != tt.want {
			t.Errorf("Cost(%+v) = %d, want %d", tt.usage, got, tt.want)
		}
	}
}
