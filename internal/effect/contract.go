package effect

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/planaria/planaria/internal/store"
)

// Defaults of a contract (design section 7, "Connector object").
const (
	DefaultTimeout       = 60  // seconds from the send to the hard deadline
	MaxTimeout           = 600 // seconds; an owner waits that long when it drains
	DefaultWindow        = 86400
	DefaultNaturalWindow = 300
	DefaultSettle        = 30 // seconds until a probe's "did not happen" is believed
)

// Contract is what an operator declared about one tool. Parsed contracts have
// their defaults filled in. The zero value is no contract: irreversible.
type Contract struct {
	Class       store.Class  `json:"class"`
	Identity    []string     `json:"identity,omitempty"` // empty: all that are not volatile
	Volatile    []string     `json:"volatile,omitempty"`
	Idempotency *Idempotency `json:"idempotency,omitempty"`
	// RepeatWindow is for how many seconds an equal completed call asks (or
	// returns, by Repeat) instead of being sent; 0 is off.
	RepeatWindow int        `json:"repeat_window_seconds,omitempty"`
	Repeat       string     `json:"repeat,omitempty"`   // ask or return
	InDoubt      string     `json:"in_doubt,omitempty"` // wait or tell
	Reconcile    *Reconcile `json:"reconcile,omitempty"`
	// PreExecution lists answers that the target gives before it does anything.
	PreExecution []PreError `json:"pre_execution_errors,omitempty"`
	Timeout      int        `json:"timeout_seconds,omitempty"`
}

// Idempotency says how a target recognises a repeated call. One of Argument,
// Header and Natural is set.
type Idempotency struct {
	Argument string `json:"argument,omitempty"`
	Header   string `json:"header,omitempty"`
	Natural  bool   `json:"natural,omitempty"`
	Window   int    `json:"window_seconds,omitempty"` // counted from the intent
}

// Reconcile is the probe that asks the target what happened.
type Reconcile struct {
	Tool        string          `json:"tool"`
	Arguments   json.RawMessage `json:"arguments,omitempty"` // template
	Happened    []Predicate     `json:"happened,omitempty"`
	NotHappened []Predicate     `json:"not_happened,omitempty"`
	Settle      *int            `json:"settle_seconds,omitempty"`
}

// PreError is an entry of pre_execution_errors: an HTTP status, a JSON-RPC
// code, or a predicate on the answer.
type PreError struct {
	Number    int
	Predicate *Predicate
}

// UnmarshalJSON reads a number or a predicate.
func (p *PreError) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '{' {
		p.Predicate = new(Predicate)
		return jsonv2.Unmarshal(b, p.Predicate, jsonv2.RejectUnknownMembers(true))
	}
	return json.Unmarshal(b, &p.Number)
}

// MarshalJSON writes what UnmarshalJSON reads.
func (p PreError) MarshalJSON() ([]byte, error) {
	if p.Predicate != nil {
		return json.Marshal(p.Predicate)
	}
	return json.Marshal(p.Number)
}

// Connector is a connector's own part of the wire object.
type Connector struct {
	Name             string              `json:"name"`
	Kind             string              `json:"kind"`
	URL              string              `json:"url"`
	TrustAnnotations bool                `json:"trust_annotations"`
	Tools            map[string]Contract `json:"tools"`
}

// FieldError says which field of a connector is wrong.
type FieldError struct {
	Field   string // path with dots, as a person writes it
	Problem string
}

func (e *FieldError) Error() string {
	if e.Field == "" {
		return e.Problem
	}
	return e.Field + ": " + e.Problem
}

var connectorName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9-]{1,63}$`) })

// ParseConnector reads the body of a connector strictly and fills in the
// defaults. Errors are *FieldError.
func ParseConnector(body []byte) (Connector, error) {
	var c Connector
	err := jsonv2.Unmarshal(body, &c, jsonv2.RejectUnknownMembers(true))
	if err != nil {
		return c, fieldError(err)
	}
	if !connectorName().MatchString(c.Name) {
		return c, &FieldError{"name", "must be 1 to 63 of a-z, 0-9 and -"}
	}
	switch c.Kind {
	case "mcp":
	case "stdio", "openapi", "http":
		return c, &FieldError{"kind", c.Kind + " is not supported yet; use mcp"}
	default:
		return c, &FieldError{"kind", "must be mcp"}
	}
	if c.URL, err = NormalizeURL(c.URL); err != nil {
		return c, &FieldError{"url", err.Error()}
	}
	for name, t := range c.Tools {
		if name == "" || len(name) > 128 {
			return c, &FieldError{"tools", "a tool's name has 1 to 128 characters"}
		}
		if err := t.complete("tools." + name); err != nil {
			return c, err
		}
		c.Tools[name] = t
	}
	for name, t := range c.Tools {
		if r := t.Reconcile; r != nil {
			if probe, ok := c.Tools[r.Tool]; ok && probe.Class != store.ClassRead {
				return c, &FieldError{"tools." + name + ".reconcile.tool", r.Tool + " is not of class read"}
			}
		}
	}
	return c, nil
}

// LoadConnector reads a stored connector, whose body may carry the fields of
// an answer beside the operator's own.
func LoadConnector(body []byte) (Connector, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil {
		return Connector{}, fmt.Errorf("read connector: %w", err)
	}
	for _, name := range []string{"id", "type", "version", "digest", "digests", "created_at", "updated_at"} {
		delete(fields, name)
	}
	own, err := json.Marshal(fields)
	if err != nil {
		return Connector{}, fmt.Errorf("read connector: %w", err)
	}
	c, err := ParseConnector(own)
	if err != nil {
		return c, fmt.Errorf("read connector: %w", err)
	}
	return c, nil
}

// later names fields of the design whose time has not come.
var later = []string{"approval", "classify", "seal", "compensate", "cost", "scope", "credential",
	"credential_slot", "sinks", "labels", "limits"}

func fieldError(err error) error {
	var se *jsonv2.SemanticError
	if !errors.As(err, &se) {
		return &FieldError{"", "not strict JSON: " + plain(err)}
	}
	path := dotted(se.JSONPointer)
	if errors.Is(err, jsonv2.ErrUnknownName) {
		if slices.Contains(later, se.JSONPointer.LastToken()) {
			return &FieldError{path, "is not supported yet"}
		}
		return &FieldError{path, "is not a known field"}
	}
	if inner := new(FieldError); errors.As(err, &inner) {
		return inner
	}
	return &FieldError{path, "has the wrong type or value"}
}

func dotted(p jsontext.Pointer) string {
	var parts []string
	for tok := range p.Tokens() {
		parts = append(parts, tok)
	}
	return strings.Join(parts, ".")
}

// complete validates a contract at path and fills in its defaults.
func (c *Contract) complete(path string) error {
	bad := func(field, format string, a ...any) error {
		return &FieldError{path + "." + field, fmt.Sprintf(format, a...)}
	}
	switch c.Class {
	case "":
		c.Class = store.ClassIrreversible
	case store.ClassRead, store.ClassIdempotent, store.ClassMixed, store.ClassIrreversible:
	default:
		return bad("class", "must be read, idempotent, mixed or irreversible")
	}
	for _, name := range c.Identity {
		if slices.Contains(c.Volatile, name) {
			return bad("identity", "%q is volatile too", name)
		}
	}
	if err := c.completeIdempotency(bad); err != nil {
		return err
	}
	if c.RepeatWindow < 0 {
		return bad("repeat_window_seconds", "must not be negative")
	}
	if c.Repeat == "" {
		c.Repeat = "ask"
	}
	if c.Repeat != "ask" && c.Repeat != "return" {
		return bad("repeat", "must be ask or return")
	}
	if c.InDoubt == "" {
		c.InDoubt = "wait"
	}
	if c.InDoubt != "wait" && c.InDoubt != "tell" {
		return bad("in_doubt", "must be wait or tell")
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	if c.Timeout < 1 || c.Timeout > MaxTimeout {
		return bad("timeout_seconds", "must be 1 to %d", MaxTimeout)
	}
	for i, p := range c.PreExecution {
		if p.Predicate != nil {
			if err := p.Predicate.check(); err != nil {
				return bad(fmt.Sprintf("pre_execution_errors.%d", i), "%v", err)
			}
		} else if (p.Number < 400 || p.Number > 599) && p.Number >= 0 {
			return bad(fmt.Sprintf("pre_execution_errors.%d", i), "must be an HTTP status of 400 to 599, a negative JSON-RPC code or a predicate")
		}
	}
	return c.completeReconcile(bad)
}

// reservedHeaders may not carry an idempotency key.
var reservedHeaders = []string{"authorization", "cookie", "host", "connection", "content-length", "content-type",
	"transfer-encoding", "accept", "accept-encoding", "te", "trailer", "upgrade", "user-agent", "expect",
	"proxy-authorization", "last-event-id", "origin", "referer", "x-api-key"}

var headerName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9-]{1,64}$`) })

func (c *Contract) completeIdempotency(bad func(string, string, ...any) error) error {
	i := c.Idempotency
	if i == nil {
		if c.Class == store.ClassIdempotent {
			return bad("idempotency", "is required for class idempotent: argument, header or natural")
		}
		return nil
	}
	if c.Class != store.ClassIdempotent {
		// A key also helps an irreversible target to refuse a duplicate, but no
		// resend may follow from it.
		if c.Class == store.ClassRead {
			return bad("idempotency", "has no meaning for class read")
		}
	}
	n := 0
	for _, set := range []bool{i.Argument != "", i.Header != "", i.Natural} {
		if set {
			n++
		}
	}
	if n != 1 {
		return bad("idempotency", "needs exactly one of argument, header, natural")
	}
	if i.Header != "" {
		h := strings.ToLower(i.Header)
		if !headerName().MatchString(h) || slices.Contains(reservedHeaders, h) || strings.HasPrefix(h, "mcp-") {
			return bad("idempotency.header", "%q cannot be used", i.Header)
		}
	}
	if i.Argument != "" && slices.Contains(c.Identity, i.Argument) {
		return bad("idempotency.argument", "%q is an identity argument", i.Argument)
	}
	if i.Window == 0 {
		i.Window = DefaultWindow
		if i.Natural {
			i.Window = DefaultNaturalWindow
		}
	}
	if i.Window < 1 {
		return bad("idempotency.window_seconds", "must be positive")
	}
	return nil
}

func (c *Contract) completeReconcile(bad func(string, string, ...any) error) error {
	r := c.Reconcile
	if r == nil {
		return nil
	}
	if r.Tool == "" {
		return bad("reconcile.tool", "is required")
	}
	if len(r.Arguments) > 0 {
		if err := checkTemplate(r.Arguments); err != nil {
			return bad("reconcile.arguments", "%v", err)
		}
	}
	if len(r.Happened) == 0 && len(r.NotHappened) == 0 {
		return bad("reconcile", "needs happened or not_happened, else it proves nothing")
	}
	for field, list := range map[string][]Predicate{"happened": r.Happened, "not_happened": r.NotHappened} {
		for i, p := range list {
			if err := p.check(); err != nil {
				return bad(fmt.Sprintf("reconcile.%s.%d", field, i), "%v", err)
			}
		}
	}
	if r.Settle == nil {
		d := DefaultSettle
		r.Settle = &d
	}
	if *r.Settle < 0 {
		return bad("reconcile.settle_seconds", "must not be negative")
	}
	return nil
}

// ParseContract reads a contract as it was kept with an effect. Empty is the
// conservative one.
func ParseContract(raw json.RawMessage) (Contract, error) {
	var c Contract
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &c); err != nil {
			return c, fmt.Errorf("read contract: %w", err)
		}
	}
	if err := c.complete("contract"); err != nil {
		return c, fmt.Errorf("read contract: %w", err)
	}
	return c, nil
}

// Implicit is the contract of a tool that nobody declared: irreversible.
func Implicit() Contract {
	return Contract{Class: store.ClassIrreversible, Repeat: "ask", InDoubt: "wait", Timeout: DefaultTimeout}
}

// hints are a target's own claims about a tool (MCP annotations).
type hints struct {
	ReadOnly    *bool `json:"readOnlyHint"`
	Destructive *bool `json:"destructiveHint"`
	Idempotent  *bool `json:"idempotentHint"`
}

func said(b *bool, v bool) bool { return b != nil && *b == v }

// For returns the contract that rules a call of the tool: the declared one or
// the implicit one, its class made worse by the target's hints. Hints make a
// class better only where the operator trusts the target's annotations and
// declared nothing about the tool (attack E16).
func (c Connector) For(tool string, annotations json.RawMessage) Contract {
	var h hints
	if len(annotations) > 0 && json.Unmarshal(annotations, &h) != nil {
		h = hints{} // unreadable claims claim nothing
	}
	k, declared := c.Tools[tool]
	if !declared {
		k = Implicit()
		if c.TrustAnnotations {
			h.improve(&k)
		}
		return k
	}
	if h.worse(k.Class) {
		k.Class = store.ClassIrreversible
	}
	return k
}

func (h hints) improve(k *Contract) {
	switch {
	case said(h.ReadOnly, true) && !said(h.Destructive, true):
		k.Class = store.ClassRead
	case said(h.Idempotent, true):
		k.Class = store.ClassIdempotent
		k.Idempotency = &Idempotency{Natural: true, Window: DefaultNaturalWindow}
	}
}

// worse reports whether the hints contradict a class that may be sent again.
func (h hints) worse(class store.Class) bool {
	switch class {
	case store.ClassRead:
		return said(h.ReadOnly, false) || (said(h.Destructive, true) && !said(h.ReadOnly, true))
	case store.ClassIdempotent:
		return !said(h.ReadOnly, true) &&
			(said(h.Idempotent, false) || (said(h.Destructive, true) && !said(h.Idempotent, true)))
	}
	return false
}

// Deadline is how long a send may take, from its first byte.
func (c Contract) Deadline() time.Duration {
	if c.Timeout <= 0 {
		return DefaultTimeout * time.Second
	}
	return time.Duration(c.Timeout) * time.Second
}

// Settle is how long a probe's "did not happen" must wait.
func (c Contract) Settle() time.Duration {
	if c.Reconcile == nil || c.Reconcile.Settle == nil {
		return DefaultSettle * time.Second
	}
	return time.Duration(*c.Reconcile.Settle) * time.Second
}

// Attempted reports whether the class needs a durable attempt.
func Attempted(class store.Class) bool {
	return class == store.ClassIrreversible || class == store.ClassMixed
}

// MayResend reports whether a send that starts now ends inside the target's
// window, counted from the intent (attack E9).
func (c Contract) MayResend(intended, now time.Time) bool {
	if c.Class != store.ClassIdempotent || c.Idempotency == nil {
		return false
	}
	end := intended.Add(time.Duration(c.Idempotency.Window) * time.Second)
	return !now.Add(c.Deadline()).After(end)
}

// Keyed reports whether the gateway gives the call an idempotency key.
func (c Contract) Keyed() bool {
	return c.Idempotency != nil && (c.Idempotency.Argument != "" || c.Idempotency.Header != "")
}

// volatile lists the arguments that no digest covers.
func (c Contract) volatile() []string {
	if c.Idempotency == nil || c.Idempotency.Argument == "" {
		return c.Volatile
	}
	return append(slices.Clone(c.Volatile), c.Idempotency.Argument)
}

func (c Contract) preStatus(status int) bool {
	return slices.ContainsFunc(c.PreExecution, func(p PreError) bool { return p.Predicate == nil && p.Number == status })
}

func (c Contract) preCode(code int) bool {
	return code < 0 && slices.ContainsFunc(c.PreExecution, func(p PreError) bool { return p.Predicate == nil && p.Number == code })
}

func (c Contract) preResult(result json.RawMessage) bool {
	return slices.ContainsFunc(c.PreExecution, func(p PreError) bool {
		return p.Predicate != nil && Hold([]Predicate{*p.Predicate}, result)
	})
}

// NormalizeURL returns the form under which servers, connectors and
// credentials are matched (reference section 11.5): lower-case scheme and host,
// no default port, no trailing slash or dot. Refused: anything but http and
// https, no host, user information, a fragment.
func NormalizeURL(raw string) (string, error) {
	if len(raw) > 2048 {
		return "", errors.New("is longer than 2048 characters")
	}
	u, err := url.Parse(strings.TrimSpace(raw))
	if err != nil {
		return "", errors.New("is not a URL")
	}
	u.Scheme = strings.ToLower(u.Scheme)
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return "", errors.New("must begin with http:// or https://")
	case u.User != nil:
		return "", errors.New("must not carry a user or password; use a vault")
	case u.Fragment != "":
		return "", errors.New("must not carry a fragment")
	}
	host := strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	if host == "" {
		return "", errors.New("names no host")
	}
	port := u.Port()
	if (u.Scheme == "http" && port == "80") || (u.Scheme == "https" && port == "443") {
		port = ""
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if port != "" {
		host += ":" + port
	}
	u.Host = host
	u.Path = strings.TrimSuffix(u.Path, "/")
	u.RawPath = strings.TrimSuffix(u.RawPath, "/")
	return u.String(), nil
}
