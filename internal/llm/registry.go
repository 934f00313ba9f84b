package llm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"path"
	"strings"
)

// Prices are list prices in USD per million tokens.
type Prices struct {
	Input, Output, CacheRead, CacheWrite5m, CacheWrite1h float64
	// Long, if set, prices a request whose whole prompt (input, cache reads
	// and writes) has more than LongOver tokens.
	LongOver int64
	Long     *Prices
}

// Spec is what is known about one model. A zero is unknown.
type Spec struct {
	Model         string
	Prices        Prices
	ContextWindow int // tokens of prompt and answer
	MaxOutput     int // tokens
	// Defaults says that numbers come from our own table, not from the operator.
	Defaults bool
}

// Priced reports whether any price is known. Where it is not, Cost is 0 and
// means unknown, and must be shown so.
func (s Spec) Priced() bool { return s.Prices != Prices{} }

// Rule routes the models that match Pattern to one upstream.
type Rule struct {
	// Pattern is a glob on the model's name: "claude-*", "gpt-?". "*" is any.
	Pattern string
	// Provider is "anthropic" or "openai".
	Provider string
	Config   Config
	// Prices, ContextWindow and MaxOutput replace the built-in numbers where set.
	Prices        *Prices
	ContextWindow int
	MaxOutput     int
}

// Models finds the provider of a model. It is immutable and safe for concurrent use.
type Models struct {
	rules     []Rule
	providers []Provider
}

// ErrNoModel says that no rule matches a model.
var ErrNoModel = errors.New("no provider for this model")

// NewModels builds the providers of rules. client is used by rules without one of their own.
func NewModels(client *http.Client, rules []Rule) (*Models, error) {
	m := &Models{rules: rules}
	for i, r := range rules {
		if _, err := path.Match(r.Pattern, ""); err != nil || r.Pattern == "" {
			return nil, fmt.Errorf("models[%d].pattern %q: must be a glob such as claude-*", i, r.Pattern)
		}
		if r.Config.Client == nil {
			r.Config.Client = client
		}
		var p Provider
		var err error
		switch r.Provider {
		case "anthropic":
			p, err = NewAnthropic(r.Config)
		case "openai":
			p, err = NewOpenAI(r.Config)
		default:
			err = fmt.Errorf("provider %q: must be anthropic or openai", r.Provider)
		}
		if err != nil {
			return nil, fmt.Errorf("models[%d] (%s): %w", i, r.Pattern, err)
		}
		m.providers = append(m.providers, p)
	}
	return m, nil
}

// For returns the provider and the numbers of a model: the first rule that
// matches wins. The error wraps ErrNoModel and says what to configure.
func (m *Models) For(model string) (Provider, Spec, error) {
	for i, r := range m.rules {
		if !globMatch(r.Pattern, model) {
			continue
		}
		spec, known := builtin[model]
		spec.Model, spec.Defaults = model, known
		if r.Prices != nil {
			spec.Prices = *r.Prices
		}
		if r.ContextWindow > 0 {
			spec.ContextWindow = r.ContextWindow
		}
		if r.MaxOutput > 0 {
			spec.MaxOutput = r.MaxOutput
		}
		if known && r.Prices != nil && r.ContextWindow > 0 && r.MaxOutput > 0 {
			spec.Defaults = false
		}
		return capped{m.providers[i], spec.MaxOutput, r.Config.MaxTokens}, spec, nil
	}
	patterns := make([]string, len(m.rules))
	for i, r := range m.rules {
		patterns[i] = r.Pattern
	}
	have := "no models are configured"
	if len(patterns) > 0 {
		have = "configured are " + strings.Join(patterns, ", ")
	}
	return nil, Spec{}, fmt.Errorf("model %q: %w (%s); set ANTHROPIC_API_KEY for claude-* models, or add an entry to models in the config file: pattern: %q, provider: anthropic or openai, base_url, key",
		model, ErrNoModel, have, model)
}

// globMatch is path.Match without its special treatment of "/", which model
// names of some servers contain. The pattern was checked before.
func globMatch(pattern, name string) bool {
	flat := strings.NewReplacer("/", "\x00")
	ok, _ := path.Match(flat.Replace(pattern), flat.Replace(name))
	return ok
}

// capped keeps max_tokens within what the model can give: a larger value is a 400.
type capped struct {
	Provider
	max, configured int
}

func (c capped) Stream(ctx context.Context, req Request, onDelta func(Delta)) (*Reply, error) {
	if req.MaxTokens <= 0 {
		req.MaxTokens = c.configured
	}
	if req.MaxTokens <= 0 && c.max > 0 {
		req.MaxTokens = min(c.max, defaultMaxTokens)
	}
	if c.max > 0 && req.MaxTokens > c.max {
		req.MaxTokens = c.max
	}
	return c.Provider.Stream(ctx, req, onDelta)
}

// Cost is the list price of usage in nano-dollars (10⁻⁹ USD), rounded to the
// nearest. Unknown prices cost 0.
func Cost(u Usage, s Spec) int64 {
	p := s.Prices
	if p.Long != nil && u.Input+u.CacheRead+u.CacheCreation5m+u.CacheCreation1h > p.LongOver {
		p = *p.Long
	}
	usd := float64(u.Input)*p.Input + float64(u.Output)*p.Output + float64(u.CacheRead)*p.CacheRead +
		float64(u.CacheCreation5m)*p.CacheWrite5m + float64(u.CacheCreation1h)*p.CacheWrite1h
	n := math.Round(usd * 1000) // USD per million tokens = 1,000 nano-dollars per token
	if n >= math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(n)
}

// standard prices cache writes at 1.25 and 2 times the input price, which holds
// for every model of the published list; reads are given.
func standard(input, output, read float64) Prices {
	return Prices{Input: input, Output: output, CacheRead: read, CacheWrite5m: 1.25 * input, CacheWrite1h: 2 * input}
}

// builtin holds defaults as published by the vendor (pricing page and model
// overviews, October and November 2026); an operator overrides them by rule.
// They are standard-speed prices: no published number for speed "fast" is used.
var builtin = func() map[string]Spec {
	big := func(p Prices) Spec { return Spec{Prices: p, ContextWindow: 1_000_000, MaxOutput: 128_000} }
	small := Spec{Prices: standard(1, 5, 0.10), ContextWindow: 200_000, MaxOutput: 64_000}
	long := standard(0.50, 2.50, 0.05)
	haiku := standard(0.10, 0.50, 0.01)
	haiku.LongOver, haiku.Long = 100_000, &long
	return map[string]Spec{
		"claude-fable-5-2":          big(standard(8, 40, 0.20)), // from two resellers' pages that state the vendor's list price
		"claude-fable-5-1":          big(standard(10, 50, 0.25)),
		"claude-fable-5":            big(standard(10, 50, 1)),
		"claude-opus-5-5":           big(standard(4, 20, 0.20)),
		"claude-opus-5":             big(standard(5, 25, 0.50)),
		"claude-opus-4-8":           big(standard(5, 25, 0.50)),
		"claude-opus-4-7":           {Prices: standard(5, 25, 0.50)}, // window not found in a published list
		"claude-opus-4-6":           big(standard(5, 25, 0.50)),
		"claude-sonnet-5-5":         big(standard(2, 10, 0.10)),
		"claude-sonnet-5":           big(standard(2, 10, 0.20)),
		"claude-sonnet-4-6":         big(standard(3, 15, 0.30)),
		"claude-haiku-5-5":          big(haiku),
		"claude-haiku-4-5":          small,
		"claude-haiku-4-5-20251001": small,
	}
}()
