package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Config is every setting of planaria serve: the file planaria.yaml, under
// the flags of the same names. A key that is not here is an error. Secrets are
// never written in it: a field that ends in _file names a file, one that ends
// in _env an environment variable.
type Config struct {
	// Listen is where the API listens, host:port; port 0 takes a free one.
	// Default 127.0.0.1:4747: only this machine.
	Listen string `yaml:"listen"`
	// Data is the data folder. Default ./planaria-data.
	Data string `yaml:"data"`
	// Store is "sqlite:FILE" or "postgres://…". Default sqlite:DATA/planaria.db.
	// A password does not belong here: use PGPASSFILE, or store_env.
	Store string `yaml:"store"`
	// StoreEnv names a variable that holds Store. Default none.
	StoreEnv string `yaml:"store_env"`
	// Blobs is "file:FOLDER", where large bodies are kept. Default file:DATA/blobs.
	Blobs string `yaml:"blobs"`
	// MasterIdentityFile is the age identity that opens the master key
	// DATA/master.key. Keep it elsewhere, so that a copy of the data folder alone
	// opens nothing. Default DATA/master.identity; both are made on the first start.
	MasterIdentityFile string `yaml:"master_identity_file"`
	// Roles says what this process does: api answers requests, worker drives
	// sessions, keeper holds the secrets and dials. Default all three. worker
	// and keeper go together.
	Roles []string `yaml:"roles"`
	// Advertise is the address at which other nodes reach this one, host:port.
	// Default: the address it listens on.
	Advertise string `yaml:"advertise"`
	// AllowPrivateNetworks lets an agent's own mcp_servers, a session's
	// repositories and an environment's image be on private and loopback
	// addresses, and sandboxes reach those that a limited environment's
	// allowed_hosts names (no wildcard). Connectors, which operators make, may
	// always. Default false.
	AllowPrivateNetworks bool `yaml:"allow_private_networks"`
	// MaxRunning bounds the sessions that this process drives at once. Default 1000.
	MaxRunning int `yaml:"max_running"`
	// DrainSeconds bounds what SIGTERM waits for calls that are on their way.
	// Default 70: the longest default deadline of a call, and ten for the rest.
	DrainSeconds int `yaml:"drain_seconds"`
	// Sandboxes says how the agents' machines run here.
	Sandboxes SandboxConfig `yaml:"sandboxes"`
	// Log says how to log.
	Log LogConfig `yaml:"log"`
	// Models lists providers, first match wins; a model that matches none goes
	// to the default provider (ANTHROPIC_API_KEY, ANTHROPIC_BASE_URL). Default none.
	Models []ModelConfig `yaml:"models"`
	// ModelScript names a file that a scripted model plays in place of every
	// provider, over HTTP on a loopback listener of its own. Default none.
	ModelScript string `yaml:"model_script"`
}

// SandboxConfig says how the agents' machines run on this node. Without the
// role worker it has no meaning.
type SandboxConfig struct {
	// Enabled is on, off or auto: on where this machine can run them, which
	// 'planaria doctor' tries out. Default auto.
	Enabled string `yaml:"enabled"`
	// Dir is the folder of their state, which this process has for itself: a
	// local disk with room for snapshots. Default DATA/sandboxes.
	Dir string `yaml:"dir"`
	// MemoryMB bounds what all sandboxes together use, in MiB, when another one
	// is admitted. Default: 4/5 of what the machine has left at the start.
	MemoryMB int64 `yaml:"memory_mb"`
	// Pool is how many sandboxes of the default environment wait ready made, to
	// start faster. Each takes some 15 MB. Default 0.
	Pool int `yaml:"pool"`
	// ImagesMB is what unpacked images may take on the disk, in MiB, before
	// those that nobody uses are removed. Default 65536.
	ImagesMB int64 `yaml:"images_mb"`
	// Layouts is a folder below which OCI layouts lie that environments may
	// name as images. Default: none.
	Layouts string `yaml:"layouts"`
	// CPUFeatures are the only features of the processor that programs inside
	// see: names as in /proc/cpuinfo or levels such as x86-64-v3. Snapshots then
	// move to every node that has these. Default: all of this machine.
	CPUFeatures []string `yaml:"cpu_features"`
	// PackageHosts are mirrors of the operator that environments with
	// allow_package_managers reach besides the public registries: bare names,
	// "*." wildcards or host:port. Default: none.
	PackageHosts []string `yaml:"package_hosts"`
}

// Values of SandboxConfig.Enabled.
const (
	sandboxesAuto = "auto"
	sandboxesOn   = "on"
	sandboxesOff  = "off"
)

// LogConfig says how to log.
type LogConfig struct {
	// Level is debug, info, warn or error. Default info.
	Level string `yaml:"level"`
	// Format is text or json. Default text.
	Format string `yaml:"format"`
}

// ModelConfig is one provider and the models that go to it.
type ModelConfig struct {
	// Pattern is a glob on model names, such as claude-* or *. Required.
	Pattern string `yaml:"pattern"`
	// Provider is anthropic (Messages API) or openai (Chat Completions, and
	// what is compatible with it). Default anthropic.
	Provider string `yaml:"provider"`
	// BaseURL is the root of the provider's API. Default: the provider's own address.
	BaseURL string `yaml:"base_url"`
	// Auth is bearer or x-api-key: the header that carries the key. Default bearer.
	Auth string `yaml:"auth"`
	// KeyEnv names the variable that holds the key. Default none.
	KeyEnv string `yaml:"key_env"`
	// KeyFile names the file that holds the key; it is read anew for each
	// request, so that a key can be replaced while we run. Default none.
	KeyFile string `yaml:"key_file"`
	// CacheTTL is the life of cache breakpoints: 5m, 1h or off. Default 5m.
	CacheTTL string `yaml:"cache_ttl"`
	// ContextWindow is the model's window in tokens. Default: what is known of the name.
	ContextWindow int `yaml:"context_window"`
	// MaxOutput bounds the tokens of one answer. Default: what is known of the name.
	MaxOutput int `yaml:"max_output"`
	// MaxTokensField is the field that carries that bound to an openai-compatible
	// server. Default max_completion_tokens at api.openai.com, max_tokens elsewhere.
	MaxTokensField string `yaml:"max_tokens_field"`
	// Price is the list price. Default: what is known of the name.
	Price *PriceConfig `yaml:"price"`
}

// PriceConfig is a list price in dollars for a million tokens.
type PriceConfig struct {
	// Input and Output are the prices of tokens read and written. Default 0.
	Input  float64 `yaml:"input"`
	Output float64 `yaml:"output"`
	// CacheRead is the price of a token read from the cache. Default 0.
	CacheRead float64 `yaml:"cache_read"`
	// CacheWrite5m and CacheWrite1h are the prices of tokens written to the
	// cache. Default 1.25 and 2 times Input.
	CacheWrite5m float64 `yaml:"cache_write_5m"`
	CacheWrite1h float64 `yaml:"cache_write_1h"`
}

// DefaultConfig is what serve does when nobody says otherwise.
func DefaultConfig() Config {
	return Config{
		Listen:       "127.0.0.1:4747",
		Data:         "./planaria-data",
		Roles:        []string{roleAPI, roleWorker, roleKeeper},
		MaxRunning:   1000,
		DrainSeconds: 70,
		Sandboxes:    SandboxConfig{Enabled: sandboxesAuto},
		Log:          LogConfig{Level: "info", Format: "text"},
	}
}

// The roles of a process.
const (
	roleAPI    = "api"
	roleWorker = "worker"
	roleKeeper = "keeper"
)

// LoadConfig reads a file over the defaults. Unknown keys, repeated keys and a
// second document are errors that name the line.
func LoadConfig(file string) (Config, error) {
	cfg := DefaultConfig()
	data, err := os.ReadFile(file)
	if err != nil {
		return cfg, fmt.Errorf("read config: %w", err)
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(&cfg); err != nil && !errors.Is(err, io.EOF) {
		return cfg, fmt.Errorf("read config %s: %w", file, err)
	}
	var more yaml.Node
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return cfg, fmt.Errorf("read config %s: it holds more than one document", file)
	}
	if err := refusePassword("store", cfg.Store); err != nil {
		return cfg, fmt.Errorf("config %s: %w", file, err)
	}
	return cfg, nil
}

// Validate reports the first setting that cannot be, by its field.
func (c *Config) Validate() error {
	checks := []func() error{
		c.validateListen, c.validateStore, c.validateRoles, c.validateLimits, c.validateSandboxes, c.validateLog, c.validateModels,
	}
	for _, check := range checks {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) validateListen() error {
	if err := checkHostPort("listen", c.Listen); err != nil {
		return err
	}
	if c.Advertise != "" {
		return checkHostPort("advertise", c.Advertise)
	}
	return nil
}

func checkHostPort(field, v string) error {
	_, port, err := net.SplitHostPort(v)
	if err != nil {
		return fmt.Errorf("%s: %q is not host:port", field, v)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return fmt.Errorf("%s: %q is not a port", field, port)
	}
	return nil
}

func (c *Config) validateStore() error {
	if c.Data == "" {
		return errors.New("data: name a folder")
	}
	if c.Store != "" && c.StoreEnv != "" {
		return errors.New("store_env: store is set too, set one of them")
	}
	if c.Store != "" && !strings.HasPrefix(c.Store, "sqlite:") && !isPostgres(c.Store) {
		return fmt.Errorf("store: %q is neither sqlite:FILE nor postgres://…", withoutPassword(c.Store))
	}
	if c.Blobs != "" && !strings.HasPrefix(c.Blobs, "file:") {
		return fmt.Errorf("blobs: %q is not file:FOLDER", withoutPassword(c.Blobs))
	}
	return nil
}

func (c *Config) validateRoles() error {
	if len(c.Roles) == 0 {
		return errors.New("roles: name at least one of api, worker, keeper")
	}
	for _, r := range c.Roles {
		if !slices.Contains([]string{roleAPI, roleWorker, roleKeeper}, r) {
			return fmt.Errorf("roles: %q is none of api, worker, keeper", r)
		}
	}
	if c.has(roleWorker) != c.has(roleKeeper) {
		return errors.New("roles: worker and keeper go together in one process")
	}
	if c.sqlite() && len(c.Roles) != 3 {
		return errors.New("roles: a store in a file has one process, which needs all three")
	}
	return nil
}

func (c *Config) validateLimits() error {
	if c.MaxRunning < 1 || c.MaxRunning > 100_000 {
		return fmt.Errorf("max_running: %d is not between 1 and 100000", c.MaxRunning)
	}
	if c.DrainSeconds < 0 || c.DrainSeconds > 3600 {
		return fmt.Errorf("drain_seconds: %d is not between 0 and 3600", c.DrainSeconds)
	}
	return nil
}

func (c *Config) validateSandboxes() error {
	if e := c.Sandboxes.Enabled; !slices.Contains([]string{sandboxesAuto, sandboxesOn, sandboxesOff}, e) {
		return fmt.Errorf("sandboxes.enabled: %q is none of auto, on, off", e)
	}
	for _, f := range []struct {
		name       string
		value, max int64
	}{
		{"memory_mb", c.Sandboxes.MemoryMB, 1 << 30}, {"images_mb", c.Sandboxes.ImagesMB, 1 << 30}, {"pool", int64(c.Sandboxes.Pool), 1000},
	} {
		if f.value < 0 || f.value > f.max {
			return fmt.Errorf("sandboxes.%s: %d is not between 0 and %d", f.name, f.value, f.max)
		}
	}
	return nil
}

func (c *Config) validateLog() error {
	if _, err := logLevel(c.Log.Level); err != nil {
		return err
	}
	if c.Log.Format != "text" && c.Log.Format != "json" {
		return fmt.Errorf("log.format: %q is neither text nor json", c.Log.Format)
	}
	return nil
}

func (c *Config) validateModels() error {
	for i, m := range c.Models {
		if err := m.validate(fmt.Sprintf("models[%d]", i)); err != nil {
			return err
		}
	}
	return nil
}

func (m *ModelConfig) validate(at string) error {
	if _, err := path.Match(m.Pattern, ""); err != nil || m.Pattern == "" {
		return fmt.Errorf("%s.pattern: %q is not a glob such as claude-*", at, m.Pattern)
	}
	for _, f := range []struct {
		name, value string
		allowed     []string
	}{
		{"provider", m.Provider, []string{"", "anthropic", "openai"}},
		{"auth", m.Auth, []string{"", "bearer", "x-api-key"}},
		{"cache_ttl", m.CacheTTL, []string{"", "5m", "1h", "off"}},
		{"max_tokens_field", m.MaxTokensField, []string{"", "max_tokens", "max_completion_tokens"}},
	} {
		if !slices.Contains(f.allowed, f.value) {
			return fmt.Errorf("%s.%s: %q is none of %s", at, f.name, f.value, strings.Join(f.allowed[1:], ", "))
		}
	}
	if m.BaseURL != "" {
		if err := checkBaseURL(m.BaseURL); err != nil {
			return fmt.Errorf("%s.base_url: %w", at, err)
		}
	}
	if m.KeyEnv != "" && m.KeyFile != "" {
		return fmt.Errorf("%s.key_file: key_env is set too, set one of them", at)
	}
	if m.ContextWindow < 0 {
		return fmt.Errorf("%s.context_window: %d is negative", at, m.ContextWindow)
	}
	if m.MaxOutput < 0 {
		return fmt.Errorf("%s.max_output: %d is negative", at, m.MaxOutput)
	}
	return m.Price.validate(at + ".price")
}

func checkBaseURL(v string) error {
	u, err := url.Parse(v)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return errors.New("not an http or https URL")
	}
	if u.User != nil || u.RawQuery != "" {
		return errors.New("must carry neither user nor query; a key goes to key_env or key_file")
	}
	return nil
}

func (p *PriceConfig) validate(at string) error {
	if p == nil {
		return nil
	}
	for _, f := range []struct {
		name  string
		value float64
	}{
		{"input", p.Input}, {"output", p.Output}, {"cache_read", p.CacheRead},
		{"cache_write_5m", p.CacheWrite5m}, {"cache_write_1h", p.CacheWrite1h},
	} {
		if !(f.value >= 0 && f.value <= 1e6) {
			return fmt.Errorf("%s.%s: %g is not a price in dollars for a million tokens", at, f.name, f.value)
		}
	}
	return nil
}

func (c *Config) has(role string) bool { return slices.Contains(c.Roles, role) }

func (c *Config) sqlite() bool { return c.StoreEnv == "" && !isPostgres(c.Store) }

func (c *Config) drain() time.Duration { return time.Duration(c.DrainSeconds) * time.Second }

// storeURL resolves where the store is.
func (c *Config) storeURL(getenv func(string) string) (string, error) {
	switch {
	case c.StoreEnv != "":
		v := getenv(c.StoreEnv)
		if v == "" {
			return "", fmt.Errorf("store_env: the variable %s is empty", c.StoreEnv)
		}
		return v, nil
	case c.Store != "":
		return c.Store, nil
	}
	return "sqlite:" + filepath.Join(c.Data, storeFile), nil
}

// blobDir resolves the folder of large bodies.
func (c *Config) blobDir() string {
	if c.Blobs != "" {
		return strings.TrimPrefix(c.Blobs, "file:")
	}
	return filepath.Join(c.Data, blobFolder)
}

// sandboxDir resolves the folder of the agents' machines.
func (c *Config) sandboxDir() string {
	if c.Sandboxes.Dir != "" {
		return c.Sandboxes.Dir
	}
	return filepath.Join(c.Data, sandboxFolder)
}

func isPostgres(u string) bool {
	return strings.HasPrefix(u, "postgres://") || strings.HasPrefix(u, "postgresql://")
}

// refusePassword keeps passwords out of files that are copied and shown.
func refusePassword(field, v string) error {
	if !isPostgres(v) {
		return nil
	}
	u, err := url.Parse(v)
	if err != nil {
		return fmt.Errorf("%s: not a URL", field)
	}
	_, has := u.User.Password()
	if has || u.Query().Has("password") {
		return hinted(fmt.Errorf("%s: holds a password", field), "leave it out and name a PGPASSFILE, or put the whole URL into a variable and name that in store_env")
	}
	return nil
}

// withoutPassword makes a URL fit to be shown.
func withoutPassword(v string) string {
	u, err := url.Parse(v)
	if err != nil {
		return "(unreadable)"
	}
	q := u.Query()
	if q.Has("password") {
		q.Set("password", "REDACTED")
		u.RawQuery = q.Encode()
	}
	return u.Redacted()
}

func logLevel(s string) (slog.Level, error) {
	for _, l := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
		if strings.EqualFold(s, l.String()) {
			return l, nil
		}
	}
	return 0, fmt.Errorf("log.level: %q is none of debug, info, warn, error", s)
}

// newLogger makes the program's logger.
func newLogger(w io.Writer, c LogConfig) *slog.Logger {
	level, err := logLevel(c.Level)
	if err != nil {
		level = slog.LevelInfo
	}
	opts := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// secretFrom reads a secret from a variable or a file; empty when neither is
// named. A file that others may read is refused.
func secretFrom(field, env, file string, getenv func(string) string) (string, error) {
	switch {
	case env != "":
		v := strings.TrimSpace(getenv(env))
		if v == "" {
			return "", fmt.Errorf("%s: the variable %s is empty", field, env)
		}
		return v, nil
	case file != "":
		if err := checkPrivate(file); err != nil {
			return "", fmt.Errorf("%s: %w", field, err)
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("%s: %w", field, err)
		}
		v := strings.TrimSpace(string(data))
		if v == "" {
			return "", fmt.Errorf("%s: file %s is empty", field, file)
		}
		return v, nil
	}
	return "", nil
}

// checkPrivate refuses a secret's file that others may write or read.
func checkPrivate(file string) error {
	fi, err := os.Stat(file)
	if err != nil {
		return err
	}
	if mode := fi.Mode().Perm(); mode&0o077 != 0 {
		return hinted(fmt.Errorf("file %s can be read by others (mode %04o)", file, mode), "chmod 600 %s", file)
	}
	return nil
}
