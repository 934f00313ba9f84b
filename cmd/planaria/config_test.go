package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/llm"
)

func write(t *testing.T, name, text string, mode os.FileMode) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestLoadConfig(t *testing.T) {
	got, err := LoadConfig(write(t, "planaria.yaml", `
listen: 127.0.0.1:9
log: {level: debug}
models:
  - {pattern: "gpt-*", provider: openai, key_env: OPENAI_KEY, context_window: 400000, price: {input: 2, output: 8}}
`, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	want := DefaultConfig()
	want.Listen, want.Log.Level = "127.0.0.1:9", "debug"
	want.Models = []ModelConfig{{Pattern: "gpt-*", Provider: "openai", KeyEnv: "OPENAI_KEY", ContextWindow: 400_000, Price: &PriceConfig{Input: 2, Output: 8}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
	if err := got.Validate(); err != nil {
		t.Errorf("Validate() = %v", err)
	}
}

func TestLoadConfigRefuses(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"unknown key", "lisen: x", "lisen"},
		{"unknown nested key", "log: {levle: info}", "levle"},
		{"twice", "listen: a:1\nlisten: b:1", "listen"},
		{"two documents", "listen: a:1\n---\nlisten: b:1", "more than one document"},
		{"unknown sandbox key", "sandboxes: {folder: x}", "folder"},
		{"wrong type", "max_running: many", "max_running|line 1"},
		{"password", "store: postgres://a:sesame@h/d", "holds a password"},
		{"password in query", "store: postgres://h/d?password=sesame", "holds a password"},
	}
	for _, tt := range tests {
		_, err := LoadConfig(write(t, "planaria.yaml", tt.text, 0o600))
		if err == nil || !containsAny(err.Error(), tt.want) || strings.Contains(err.Error(), "sesame") {
			t.Errorf("%s: error %v, want one with %q and no secret", tt.name, err, tt.want)
		}
	}
}

func containsAny(s, alternatives string) bool {
	for a := range strings.SplitSeq(alternatives, "|") {
		if strings.Contains(s, a) {
			return true
		}
	}
	return false
}

func TestValidateNamesTheField(t *testing.T) {
	tests := []struct {
		want   string
		change func(*Config)
	}{
		{"listen:", func(c *Config) { c.Listen = "nowhere" }},
		{"listen:", func(c *Config) { c.Listen = "a:70000" }},
		{"advertise:", func(c *Config) { c.Advertise = "x" }},
		{"data:", func(c *Config) { c.Data = "" }},
		{"store:", func(c *Config) { c.Store = "mysql://x" }},
		{"store_env:", func(c *Config) { c.Store, c.StoreEnv = "sqlite:x", "X" }},
		{"blobs:", func(c *Config) { c.Blobs = "s3://x" }},
		{"roles:", func(c *Config) { c.Roles = nil }},
		{"roles:", func(c *Config) { c.Roles = []string{"api"} }},
		{"roles:", func(c *Config) { c.Roles = []string{"api", "worker"}; c.Store = "postgres://h/d" }},
		{"roles:", func(c *Config) { c.Roles = []string{"king"} }},
		{"max_running:", func(c *Config) { c.MaxRunning = 0 }},
		{"drain_seconds:", func(c *Config) { c.DrainSeconds = -1 }},
		{"sandboxes.enabled:", func(c *Config) { c.Sandboxes.Enabled = "maybe" }},
		{"sandboxes.memory_mb:", func(c *Config) { c.Sandboxes.MemoryMB = -1 }},
		{"sandboxes.images_mb:", func(c *Config) { c.Sandboxes.ImagesMB = -1 }},
		{"sandboxes.pool:", func(c *Config) { c.Sandboxes.Pool = 1001 }},
		{"log.level:", func(c *Config) { c.Log.Level = "loud" }},
		{"log.format:", func(c *Config) { c.Log.Format = "xml" }},
		{"models[0].pattern:", func(c *Config) { c.Models = []ModelConfig{{}} }},
		{"models[0].pattern:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "[a"}} }},
		{"models[1].provider:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*"}, {Pattern: "*", Provider: "acme"}} }},
		{"models[0].base_url:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*", BaseURL: "ftp://x"}} }},
		{"models[0].base_url:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*", BaseURL: "https://u:p@x"}} }},
		{"models[0].key_file:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*", KeyEnv: "A", KeyFile: "b"}} }},
		{"models[0].auth:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*", Auth: "basic"}} }},
		{"models[0].cache_ttl:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*", CacheTTL: "1d"}} }},
		{"models[0].max_tokens_field:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*", MaxTokensField: "x"}} }},
		{"models[0].context_window:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*", ContextWindow: -1}} }},
		{"models[0].max_output:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*", MaxOutput: -1}} }},
		{"models[0].price.cache_read:", func(c *Config) { c.Models = []ModelConfig{{Pattern: "*", Price: &PriceConfig{CacheRead: -1}}} }},
	}
	for _, tt := range tests {
		c := DefaultConfig()
		tt.change(&c)
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("Validate() = %v, want an error that begins with %s", err, tt.want)
		}
	}
}

// TestConfigIsDocumented: every field has a key, and a default config is valid.
func TestConfigIsDocumented(t *testing.T) {
	c := DefaultConfig()
	if err := c.Validate(); err != nil {
		t.Errorf("the default config: %v", err)
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[Config](), reflect.TypeFor[SandboxConfig](), reflect.TypeFor[LogConfig](), reflect.TypeFor[ModelConfig](), reflect.TypeFor[PriceConfig]()} {
		for i := range typ.NumField() {
			if f := typ.Field(i); f.Tag.Get("yaml") == "" {
				t.Errorf("%s.%s has no yaml key", typ.Name(), f.Name)
			}
		}
	}
}

func TestSecretFrom(t *testing.T) {
	env := func(name string) string { return map[string]string{"SET": " from env \n"}[name] }
	private := write(t, "key", "from file\n", 0o600)
	open := write(t, "key", "from file\n", 0o644)
	tests := []struct {
		env, file, want, err string
	}{
		{"SET", "", "from env", ""},
		{"UNSET", "", "", "key: the variable UNSET is empty"},
		{"", private, "from file", ""},
		{"", open, "", "can be read by others"},
		{"", private + ".missing", "", "no such file"},
		{"", "", "", ""},
	}
	for _, tt := range tests {
		got, err := secretFrom("key", tt.env, tt.file, env)
		if got != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("secretFrom(%q, %q) = %q, %v; want %q, %q", tt.env, tt.file, got, err, tt.want, tt.err)
		}
	}
}

func TestModelRules(t *testing.T) {
	own := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:4747")}
	tests := []struct {
		name   string
		models []ModelConfig
		env    map[string]string
		want   []string // pattern provider url, or an error that begins with "!"
	}{
		{"nothing", nil, nil, nil},
		{"key only", nil, map[string]string{"ANTHROPIC_API_KEY": "k"}, []string{"claude-* anthropic " + anthropicURL}},
		{"another address takes all names", nil, map[string]string{"ANTHROPIC_BASE_URL": "http://10.0.0.1:8080"}, []string{"* anthropic http://10.0.0.1:8080"}},
		{"file before environment", []ModelConfig{{Pattern: "gpt-*", Provider: "openai"}}, map[string]string{"ANTHROPIC_API_KEY": "k"},
			[]string{"gpt-* openai " + openaiURL, "claude-* anthropic " + anthropicURL}},
		{"ourselves", nil, map[string]string{"ANTHROPIC_BASE_URL": "http://127.0.0.1:4747"}, []string{"!ANTHROPIC_BASE_URL: http://127.0.0.1:4747 is this server's own address"}},
		{"ourselves by name", nil, map[string]string{"ANTHROPIC_BASE_URL": "http://localhost:4747/x"}, []string{"!ANTHROPIC_BASE_URL: "}},
		{"ourselves in the file", []ModelConfig{{Pattern: "*", BaseURL: "http://0.0.0.0:4747"}}, nil, []string{"!models[0]: "}},
		{"another port", nil, map[string]string{"ANTHROPIC_BASE_URL": "http://127.0.0.1:4748"}, []string{"* anthropic http://127.0.0.1:4748"}},
		{"empty variable", []ModelConfig{{Pattern: "*", KeyEnv: "NONE"}}, nil, []string{"!models[0]: key: the variable NONE is empty"}},
	}
	for _, tt := range tests {
		cfg := DefaultConfig()
		cfg.Models = tt.models
		rules, err := modelRules(cfg, func(k string) string { return tt.env[k] }, own)
		if err != nil {
			if len(tt.want) != 1 || !strings.HasPrefix("!"+err.Error(), tt.want[0]) {
				t.Errorf("%s: error %v, want %q", tt.name, err, tt.want)
			}
			continue
		}
		var got []string
		for _, r := range rules {
			got = append(got, r.Pattern+" "+r.Provider+" "+r.Config.BaseURL)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
		if _, err := llm.NewModels(modelClient(nil), rules); err != nil {
			t.Errorf("%s: NewModels: %v", tt.name, err)
		}
	}
}

// TestKeyFileIsReadAnew: a key can be replaced while the server runs.
func TestKeyFileIsReadAnew(t *testing.T) {
	file := write(t, "key", "old", 0o600)
	r, err := ModelConfig{Pattern: "*", KeyFile: file}.rule(func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("new\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := r.Config.Key(); got != "new" {
		t.Errorf("Key() = %q, want new", got)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if got := r.Config.Key(); got != "old" {
		t.Errorf("Key() without the file = %q, want the one that was there at the start", got)
	}
}

func TestWithoutPassword(t *testing.T) {
	for _, u := range []string{"postgres://a:sesame@h/d", "postgres://h/d?password=sesame&x=1", "postgres://%zz:sesame@h"} {
		if got := withoutPassword(u); strings.Contains(got, "sesame") {
			t.Errorf("withoutPassword(%q) = %q", u, got)
		}
	}
}
