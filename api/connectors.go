package api

import (
	"cmp"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/go-json-experiment/json/jsontext"
)

// Defaults and limits of connectors (design section 7, "Connector object").
const (
	ConnectorMCP              = "mcp"
	DefaultWindowSeconds      = 86_400
	NaturalWindowSeconds      = 300
	DefaultToolTimeoutSeconds = 60
	maxTimeoutSeconds         = 3600
	maxWindowSeconds          = 30 * 86_400
	maxContractTools          = 1000
	maxPredicates             = 20
	maxPattern                = 1000
)

// The values of repeat and in_doubt.
const (
	RepeatAsk    = "ask"
	RepeatReturn = "return"
	InDoubtWait  = "wait"
	InDoubtTell  = "tell"
)

// ConnectorCreate is the body of POST /v1/connectors, read with DecodeStrict.
type ConnectorCreate struct {
	Name             string                  `json:"name"`
	Kind             string                  `json:"kind"`
	URL              string                  `json:"url"`
	TrustAnnotations bool                    `json:"trust_annotations,omitzero"`
	Tools            map[string]ToolContract `json:"tools,omitzero"`
}

// ConnectorUpdate is the body of POST /v1/connectors/{id}, read with
// DecodeStrict. Name and kind cannot change; tools are replaced as a whole.
type ConnectorUpdate struct {
	Version          Optional[int64]                   `json:"version,omitzero"`
	URL              Optional[string]                  `json:"url,omitzero"`
	TrustAnnotations Optional[bool]                    `json:"trust_annotations,omitzero"`
	Tools            Optional[map[string]ToolContract] `json:"tools,omitzero"`
}

// ToolContract is what an operator declares about one tool.
type ToolContract struct {
	Class EffectClass `json:"class,omitzero"` // default irreversible
	// Identity and Volatile are names of arguments. Identity nil means: all
	// that are not volatile.
	Identity            []string     `json:"identity,omitzero"`
	Volatile            []string     `json:"volatile,omitzero"`
	Idempotency         *Idempotency `json:"idempotency,omitzero"`
	RepeatWindowSeconds int64        `json:"repeat_window_seconds,omitzero"` // 0 = off
	Repeat              string       `json:"repeat,omitzero"`                // ask (default), return
	InDoubt             string       `json:"in_doubt,omitzero"`              // wait (default), tell
	Reconcile           *Reconcile   `json:"reconcile,omitzero"`
	// PreExecutionErrors prove that nothing happened: a number is an HTTP
	// status (100 to 599) or a JSON-RPC code (negative), an object a predicate.
	PreExecutionErrors []PreExecutionError `json:"pre_execution_errors,omitzero"`
	TimeoutSeconds     int64               `json:"timeout_seconds,omitzero"` // default 60
}

// Idempotency says where a tool takes a key. Exactly one of the first three is set.
type Idempotency struct {
	Argument      string `json:"argument,omitzero"`
	Header        string `json:"header,omitzero"`
	Natural       bool   `json:"natural,omitzero"`
	WindowSeconds int64  `json:"window_seconds,omitzero"` // default 86,400; natural 300
}

// Reconcile asks the target what happened.
type Reconcile struct {
	Tool string `json:"tool"`
	// Arguments may hold ${args.NAME}, ${effect.key}, ${effect.id} and
	// ${effect.intended_at} in strings.
	Arguments     json.RawMessage `json:"arguments,omitzero"`
	Happened      []Predicate     `json:"happened"`
	NotHappened   []Predicate     `json:"not_happened,omitzero"`
	SettleSeconds *int64          `json:"settle_seconds,omitempty"` // nil: 30; 0: at once
}

// Predicate tests an answer: the value at Pointer of the structured content,
// else of the first text block read as JSON; or whether it is an error. All
// predicates of a list must hold.
type Predicate struct {
	Pointer *string           `json:"pointer,omitzero"`
	Equals  json.RawMessage   `json:"equals,omitzero"`
	In      []json.RawMessage `json:"in,omitzero"`
	Exists  *bool             `json:"exists,omitzero"`
	Matches *string           `json:"matches,omitzero"`
	IsError *bool             `json:"is_error,omitzero"`
}

// PreExecutionError is a code or a predicate.
type PreExecutionError struct {
	Code      int64
	Predicate *Predicate
}

// MarshalJSON writes the form that is set.
func (p PreExecutionError) MarshalJSON() ([]byte, error) {
	if p.Predicate != nil {
		return Encode(p.Predicate)
	}
	return Encode(p.Code)
}

// UnmarshalJSON reads a number or a predicate; unknown fields are refused.
func (p *PreExecutionError) UnmarshalJSON(data []byte) error {
	*p = PreExecutionError{}
	if firstByte(data) != '{' {
		return unmarshal(data, &p.Code)
	}
	p.Predicate = &Predicate{}
	return unmarshal(data, p.Predicate, rejectUnknown)
}

// Connector is the connector object.
type Connector struct {
	Type    string `json:"type"`
	ID      string `json:"id"`
	Version int64  `json:"version"`
	ConnectorSpec
	// Digests are the tools' definitions that contracts are bound to, by tool.
	Digests   Metadata `json:"digests"`
	CreatedAt Time     `json:"created_at"`
	UpdatedAt Time     `json:"updated_at"`
}

// ConnectorSpec is what an operator declared, defaults filled in.
type ConnectorSpec struct {
	Name             string        `json:"name"`
	Kind             string        `json:"kind"`
	URL              string        `json:"url"`
	TrustAnnotations bool          `json:"trust_annotations"`
	Tools            ContractTools `json:"tools"`
}

// ContractTools maps names of tools to contracts; never null on the wire.
type ContractTools map[string]ToolContract

// MarshalJSON writes an empty map as {}.
func (c ContractTools) MarshalJSON() ([]byte, error) {
	if c == nil {
		return []byte("{}"), nil
	}
	return Encode(map[string]ToolContract(c))
}

// MarshalJSON sets the type.
func (c Connector) MarshalJSON() ([]byte, error) {
	type shadow Connector
	c.Type = "connector"
	return Encode(shadow(c))
}

// laterConnector and laterContract are fields whose time has not come.
var (
	laterConnector = []string{"credential", "command", "args", "env", "document", "base_url"}
	laterContract  = []string{"approval", "classify", "seal", "compensate", "cost", "scope", "credential_slot", "sinks", "labels", "limits"}
)

func laterPath(path []string) bool {
	switch {
	case len(path) == 1:
		return slices.Contains(laterConnector, path[0])
	case len(path) == 3 && path[0] == "tools":
		return slices.Contains(laterContract, path[2])
	}
	return false
}

func (*ConnectorCreate) later(path []string) bool { return laterPath(path) }
func (*ConnectorUpdate) later(path []string) bool { return laterPath(path) }

// Validate applies the rules of the connector object.
func (c ConnectorCreate) Validate() error {
	_, err := ResolveConnector(c)
	return err
}

// ResolveConnector makes the connector object of a valid request: version 1,
// defaults filled in. Id and times are the caller's.
func ResolveConnector(c ConnectorCreate) (Connector, error) {
	out := Connector{Type: "connector", Version: 1}
	out.ConnectorSpec = ConnectorSpec{Name: c.Name, Kind: c.Kind, URL: c.URL,
		TrustAnnotations: c.TrustAnnotations, Tools: resolveContracts(c.Tools)}
	return out, out.validate()
}

// ApplyConnectorUpdate applies an update. changed says whether that makes a new
// version; UpdatedAt is then the caller's to set.
func ApplyConnectorUpdate(c Connector, u ConnectorUpdate) (updated Connector, changed bool, err error) {
	if v, ok := u.Version.Get(); ok && v != c.Version {
		return c, false, NewError(ErrConflict, "version: the connector is at version %d, not %d; read it again and repeat the update", c.Version, v)
	}
	if u.URL.IsNull() {
		return c, false, Invalid("url", "cannot be cleared; leave it out to keep it")
	}
	n := c
	if v, ok := u.URL.Get(); ok {
		n.URL = v
	}
	if u.TrustAnnotations.IsSet() {
		n.TrustAnnotations, _ = u.TrustAnnotations.Get()
	}
	if u.Tools.IsSet() {
		v, _ := u.Tools.Get()
		n.Tools = resolveContracts(v)
	}
	if err := n.validate(); err != nil {
		return c, false, err
	}
	if sameJSON(c, n) {
		return c, false, nil
	}
	n.Version++
	return n, true, nil
}

func resolveContracts(in map[string]ToolContract) ContractTools {
	out := make(ContractTools, len(in))
	for name, t := range in {
		t.Class = cmp.Or(t.Class, ClassIrreversible)
		t.Repeat = cmp.Or(t.Repeat, RepeatAsk)
		t.InDoubt = cmp.Or(t.InDoubt, InDoubtWait)
		t.TimeoutSeconds = cmp.Or(t.TimeoutSeconds, DefaultToolTimeoutSeconds)
		if t.Idempotency != nil {
			i := *t.Idempotency
			if i.Natural {
				i.WindowSeconds = cmp.Or(i.WindowSeconds, NaturalWindowSeconds)
			}
			i.WindowSeconds = cmp.Or(i.WindowSeconds, DefaultWindowSeconds)
			t.Idempotency = &i
		}
		out[name] = t
	}
	return out
}

func (c Connector) validate() error {
	if !connectorName().MatchString(c.Name) {
		return Invalid("name", "%q must have 1 to 63 of a-z, 0-9 and -", short(c.Name))
	}
	if slices.Contains([]string{"stdio", "openapi", "http"}, c.Kind) {
		return Invalid("kind", "%q is not supported yet by this version; use %q", c.Kind, ConnectorMCP)
	}
	if err := cmp.Or(oneOf("kind", c.Kind, ConnectorMCP), validateURL("url", c.URL)); err != nil {
		return err
	}
	if len(c.Tools) > maxContractTools {
		return Invalid("tools", "holds %d contracts; at most %d are allowed", len(c.Tools), maxContractTools)
	}
	for _, name := range sortedKeys(c.Tools) {
		if err := cmp.Or(required("tools."+name, name, maxToolName), c.Tools[name].validate("tools."+name)); err != nil {
			return err
		}
	}
	return nil
}

// CheckTools refuses contracts and probes for tools that the target does not
// have. known are the names that it listed.
func (c Connector) CheckTools(known []string) error {
	for _, name := range sortedKeys(c.Tools) {
		if !slices.Contains(known, name) {
			return Invalid("tools."+name, "the target has no tool of this name; it has %s", short(strings.Join(known, ", ")))
		}
		if r := c.Tools[name].Reconcile; r != nil && !slices.Contains(known, r.Tool) {
			return Invalid("tools."+name+".reconcile.tool", "the target has no tool %q", short(r.Tool))
		}
	}
	return nil
}

func (t ToolContract) validate(path string) error {
	err := cmp.Or(
		oneOf(path+".class", string(t.Class), string(ClassRead), string(ClassIdempotent), string(ClassIrreversible), string(ClassMixed)),
		validateNames(path+".identity", t.Identity), validateNames(path+".volatile", t.Volatile),
		oneOf(path+".repeat", t.Repeat, RepeatAsk, RepeatReturn),
		oneOf(path+".in_doubt", t.InDoubt, InDoubtWait, InDoubtTell),
		within(path+".repeat_window_seconds", t.RepeatWindowSeconds, 0, maxWindowSeconds),
		within(path+".timeout_seconds", t.TimeoutSeconds, 1, maxTimeoutSeconds),
		t.Idempotency.validate(path+".idempotency"),
		t.Reconcile.validate(path+".reconcile"),
	)
	if err != nil {
		return err
	}
	for i, name := range t.Volatile {
		if slices.Contains(t.Identity, name) {
			return Invalid(index(path+".volatile", i), "%q is in identity too; an argument is one or the other", name)
		}
	}
	if i := t.Idempotency; i != nil && i.Argument != "" && slices.Contains(t.Identity, i.Argument) {
		return Invalid(path+".idempotency.argument", "%q is in identity too; a key differs from call to call", i.Argument)
	}
	if t.Class == ClassIdempotent && t.Idempotency == nil {
		return Invalid(path+".idempotency", "is required for class idempotent; say {\"argument\":…}, {\"header\":…} or {\"natural\":true}")
	}
	for i, p := range t.PreExecutionErrors {
		at := index(path+".pre_execution_errors", i)
		if p.Predicate != nil {
			if err := p.Predicate.validate(at); err != nil {
				return err
			}
		} else if p.Code >= 0 && (p.Code < 100 || p.Code > 599) {
			return Invalid(at, "%d is neither an HTTP status (100 to 599) nor a JSON-RPC code (negative)", p.Code)
		}
	}
	return nil
}

func validateNames(path string, names []string) error {
	for i, n := range names {
		if err := required(index(path, i), n, maxMCPName); err != nil {
			return err
		}
		if slices.Contains(names[:i], n) {
			return Invalid(index(path, i), "%q is named twice", n)
		}
	}
	return nil
}

func within(path string, n, min, max int64) error {
	if n < min || n > max {
		return Invalid(path, "is %d; it must be %d to %d", n, min, max)
	}
	return nil
}

var headerName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}$") })

func (i *Idempotency) validate(path string) error {
	if i == nil {
		return nil
	}
	ways := 0
	for _, set := range []bool{i.Argument != "", i.Header != "", i.Natural} {
		if set {
			ways++
		}
	}
	if ways != 1 {
		return Invalid(path, "must say exactly one of argument, header and natural")
	}
	if i.Header != "" && !headerName().MatchString(i.Header) {
		return Invalid(path+".header", "%q is not the name of an HTTP header", short(i.Header))
	}
	return within(path+".window_seconds", i.WindowSeconds, 1, maxWindowSeconds)
}

func (r *Reconcile) validate(path string) error {
	if r == nil {
		return nil
	}
	if err := required(path+".tool", r.Tool, maxToolName); err != nil {
		return err
	}
	if r.SettleSeconds != nil {
		if err := within(path+".settle_seconds", *r.SettleSeconds, 0, maxWindowSeconds); err != nil {
			return err
		}
	}
	if !isNull(r.Arguments) {
		var args map[string]any
		if err := unmarshal(r.Arguments, &args); err != nil {
			return Invalid(path+".arguments", "must be an object")
		}
		if err := validateTemplates(path+".arguments", args); err != nil {
			return err
		}
	}
	if len(r.Happened) == 0 && len(r.NotHappened) == 0 {
		return Invalid(path+".happened", "is required; say which answer of the probe proves that it happened, or that it did not")
	}
	return cmp.Or(validatePredicates(path+".happened", r.Happened), validatePredicates(path+".not_happened", r.NotHappened))
}

var (
	template      = regexp.MustCompile(`\$\{[^}]*\}?`)
	knownTemplate = regexp.MustCompile(`^\$\{(args\.[^}]+|effect\.(key|id|intended_at))\}$`)
)

// validateTemplates refuses templates that nothing would fill in.
func validateTemplates(path string, v any) error {
	switch v := v.(type) {
	case string:
		for _, t := range template.FindAllString(v, -1) {
			if !knownTemplate.MatchString(t) {
				return Invalid(path, "%q is not known; use ${args.NAME}, ${effect.key}, ${effect.id} or ${effect.intended_at}", short(t))
			}
		}
	case []any:
		for i, e := range v {
			if err := validateTemplates(index(path, i), e); err != nil {
				return err
			}
		}
	case map[string]any:
		for _, k := range sortedKeys(v) {
			if err := validateTemplates(path+"."+k, v[k]); err != nil {
				return err
			}
		}
	}
	return nil
}

func validatePredicates(path string, ps []Predicate) error {
	if len(ps) > maxPredicates {
		return Invalid(path, "holds %d predicates; at most %d are allowed", len(ps), maxPredicates)
	}
	for i := range ps {
		if err := ps[i].validate(index(path, i)); err != nil {
			return err
		}
	}
	return nil
}

func (p *Predicate) validate(path string) error {
	tests := 0
	for _, set := range []bool{p.Equals != nil, p.In != nil, p.Exists != nil, p.Matches != nil} {
		if set {
			tests++
		}
	}
	if p.IsError != nil {
		if p.Pointer != nil || tests > 0 {
			return Invalid(path, "is_error stands alone; use a predicate of its own for the rest")
		}
		return nil
	}
	if p.Pointer == nil || tests != 1 {
		return Invalid(path, "must be {\"pointer\":…} with exactly one of equals, in, exists and matches, or {\"is_error\":…}")
	}
	if !jsontext.Pointer(*p.Pointer).IsValid() {
		return Invalid(path+".pointer", "%q is not a JSON pointer; write one such as \"/status\"", short(*p.Pointer))
	}
	if p.Matches != nil {
		if err := atMost(path+".matches", *p.Matches, maxPattern); err != nil {
			return err
		}
		if _, err := regexp.Compile(*p.Matches); err != nil {
			return Invalid(path+".matches", "is not a regular expression (RE2): %v", err)
		}
	}
	return nil
}
