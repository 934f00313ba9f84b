package api

import (
	"cmp"
	"net/netip"
	"strings"
)

// The kinds of environments and of their networking (reference section 4.1).
const (
	EnvironmentCloud      = "cloud"
	EnvironmentSelfHosted = "self_hosted"
	NetworkUnrestricted   = "unrestricted"
	NetworkLimited        = "limited"
	MaxEnvironmentName    = 256
	maxAllowedHosts       = 1000
	maxPackages           = 1000
)

// Networking says where an environment may connect to. In objects of type
// limited all three fields are present.
type Networking struct {
	Type                 string
	AllowedHosts         []string
	AllowMCPServers      bool
	AllowPackageManagers bool
}

type limitedNetworking struct {
	Type                 string       `json:"type"`
	AllowedHosts         List[string] `json:"allowed_hosts"`
	AllowMCPServers      bool         `json:"allow_mcp_servers"`
	AllowPackageManagers bool         `json:"allow_package_managers"`
}

// MarshalJSON writes the form of the type.
func (n Networking) MarshalJSON() ([]byte, error) {
	if n.Type == NetworkLimited {
		return Encode(limitedNetworking{n.Type, n.AllowedHosts, n.AllowMCPServers, n.AllowPackageManagers})
	}
	return Encode(map[string]string{"type": n.Type})
}

// UnmarshalJSON reads either form.
func (n *Networking) UnmarshalJSON(data []byte) error {
	var l limitedNetworking
	err := unmarshal(data, &l)
	*n = Networking{l.Type, l.AllowedHosts, l.AllowMCPServers, l.AllowPackageManagers}
	return err
}

// Packages are installed when an environment is built, by manager.
type Packages struct {
	Type  string       `json:"type"`
	Apt   List[string] `json:"apt"`
	Cargo List[string] `json:"cargo"`
	Gem   List[string] `json:"gem"`
	Go    List[string] `json:"go"`
	NPM   List[string] `json:"npm"`
	Pip   List[string] `json:"pip"`
}

func (p Packages) lists() map[string]List[string] {
	return map[string]List[string]{"apt": p.Apt, "cargo": p.Cargo, "gem": p.Gem, "go": p.Go, "npm": p.NPM, "pip": p.Pip}
}

// EnvironmentConfigParams is config in a request.
type EnvironmentConfigParams struct {
	Type       string      `json:"type"`
	Networking *Networking `json:"networking,omitzero"`
	Packages   *Packages   `json:"packages,omitzero"`
	// Planaria is an extension. In an update: left out it keeps, null goes back
	// to the defaults, an object replaces the whole of it, as networking does.
	Planaria Optional[MachineParams] `json:"planaria,omitzero"`
}

// EnvironmentConfig is config in an object: a cloud environment has networking
// and packages, a self-hosted one neither. Planaria is there when it was set.
type EnvironmentConfig struct {
	Type       string      `json:"type"`
	Networking *Networking `json:"networking,omitzero"`
	Packages   *Packages   `json:"packages,omitzero"`
	Planaria   *Machine    `json:"planaria,omitzero"` // extension
}

// EnvironmentCreate is the body of POST /v1/environments.
type EnvironmentCreate struct {
	Name        string                   `json:"name"`
	Description *string                  `json:"description,omitzero"`
	Config      *EnvironmentConfigParams `json:"config,omitzero"`
	Scope       string                   `json:"scope,omitzero"`
	Metadata    map[string]string        `json:"metadata,omitzero"`
}

// Validate applies the rules of reference section 4.1.
func (c EnvironmentCreate) Validate() error {
	_, err := ResolveEnvironment(c)
	return err
}

// EnvironmentUpdate is the body of POST /v1/environments/{id}.
type EnvironmentUpdate struct {
	Name        Optional[string]                  `json:"name,omitzero"`
	Description Optional[string]                  `json:"description,omitzero"`
	Config      Optional[EnvironmentConfigParams] `json:"config,omitzero"`
	Scope       Optional[string]                  `json:"scope,omitzero"`
	Metadata    Optional[MetadataPatch]           `json:"metadata,omitzero"`
}

// Validate checks what can be checked without the stored environment.
func (u EnvironmentUpdate) Validate() error {
	if u.Name.IsNull() {
		return Invalid("name", "cannot be cleared; leave it out to keep it")
	}
	return nil
}

// Environment is the environment object (reference section 4.2).
type Environment struct {
	Type        string            `json:"type"`
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Description *string           `json:"description"`
	Config      EnvironmentConfig `json:"config"`
	Scope       string            `json:"scope,omitzero"`
	Metadata    Metadata          `json:"metadata"`
	CreatedAt   Time              `json:"created_at"`
	UpdatedAt   Time              `json:"updated_at"`
	ArchivedAt  *Time             `json:"archived_at"`
}

// MarshalJSON sets the type.
func (e Environment) MarshalJSON() ([]byte, error) {
	type shadow Environment
	e.Type = "environment"
	return Encode(shadow(e))
}

// ResolveEnvironment makes the environment object of a valid request. Id and
// times are the caller's.
func ResolveEnvironment(c EnvironmentCreate) (Environment, error) {
	e := Environment{Type: "environment", Name: c.Name, Description: c.Description,
		Scope: cmp.Or(c.Scope, "organization"), Metadata: MetadataPatch(nil).apply(c.Metadata, false)}
	params := EnvironmentConfigParams{Type: EnvironmentCloud}
	if c.Config != nil {
		params = *c.Config
	}
	e.Config = params.over(EnvironmentConfig{Type: params.Type})
	return e, cmp.Or(e.validate(), params.validate("config"))
}

// ApplyEnvironmentUpdate applies an update; UpdatedAt is the caller's to set
// when it changed.
func ApplyEnvironmentUpdate(e Environment, u EnvironmentUpdate) (updated Environment, changed bool, err error) {
	if err := u.Validate(); err != nil {
		return e, false, err
	}
	if e.ArchivedAt != nil {
		return e, false, Coded(ErrInvalidRequest, CodeEnvironmentArchived, "environment %s is archived and cannot be updated; create another one", e.ID)
	}
	n := e
	if v, ok := u.Name.Get(); ok {
		n.Name = v
	}
	if u.Description.IsSet() {
		n.Description = nil
		if v, ok := u.Description.Get(); ok {
			n.Description = &v
		}
	}
	if p, ok := u.Config.Get(); ok {
		if p.Type != "" && p.Type != e.Config.Type {
			return e, false, Invalid("config.type", "cannot change from %q to %q; create another environment", e.Config.Type, short(p.Type)).
				withCode(CodeInvalidConfigTypeChange)
		}
		p.Type = e.Config.Type
		if err := p.validate("config"); err != nil {
			return e, false, err
		}
		n.Config = p.over(e.Config)
	}
	if v, ok := u.Scope.Get(); ok {
		n.Scope = v
	}
	if p, ok := u.Metadata.Get(); ok {
		n.Metadata = p.apply(e.Metadata, true)
	}
	if err := n.validate(); err != nil {
		return e, false, err
	}
	return n, !sameJSON(e, n), nil
}

func (p EnvironmentConfigParams) validate(path string) error {
	if p.Type == EnvironmentSelfHosted && (p.Networking != nil || p.Packages != nil) {
		return Invalid(path, "a self_hosted environment takes no networking or packages; they belong to type cloud")
	}
	if _, set := p.Planaria.Get(); set && p.Type == EnvironmentSelfHosted {
		return Invalid(path+".planaria", "a self_hosted environment has no machine of ours; it belongs to type cloud")
	}
	return nil
}

// over fills in what was left out from the stored config, then from the defaults.
func (p EnvironmentConfigParams) over(old EnvironmentConfig) EnvironmentConfig {
	c := EnvironmentConfig{Type: p.Type}
	if p.Type != EnvironmentCloud {
		return c
	}
	c.Networking = cmp.Or(p.Networking, old.Networking, &Networking{Type: NetworkUnrestricted})
	packages := *cmp.Or(p.Packages, old.Packages, &Packages{})
	packages.Type = "packages"
	c.Packages = &packages
	c.Planaria = old.Planaria
	if p.Planaria.IsSet() {
		c.Planaria = nil
	}
	if m, ok := p.Planaria.Get(); ok && Machine(m) != (Machine{}) {
		c.Planaria = (*Machine)(&m)
	}
	return c
}

func (e Environment) validate() error {
	err := cmp.Or(
		required("name", e.Name, MaxEnvironmentName),
		atMostPtr("description", e.Description, MaxDescription),
		oneOf("config.type", e.Config.Type, EnvironmentCloud, EnvironmentSelfHosted),
		oneOf("scope", e.Scope, "organization"),
		validateMetadata("metadata", e.Metadata),
	)
	if err != nil || e.Config.Type != EnvironmentCloud {
		return err
	}
	return cmp.Or(e.Config.Networking.validate("config.networking"), e.Config.validatePackages("config.packages"),
		e.Config.Planaria.validate("config.planaria"))
}

func (n Networking) validate(path string) error {
	if err := oneOf(path+".type", n.Type, NetworkUnrestricted, NetworkLimited); err != nil {
		return err
	}
	if n.Type == NetworkUnrestricted && (n.AllowedHosts != nil || n.AllowMCPServers || n.AllowPackageManagers) {
		return Invalid(path, "unrestricted networking takes no allow settings; use type limited")
	}
	if len(n.AllowedHosts) > maxAllowedHosts {
		return Invalid(path+".allowed_hosts", "holds %d hosts; at most %d are allowed", len(n.AllowedHosts), maxAllowedHosts)
	}
	for i, h := range n.AllowedHosts {
		if err := validateAllowedHost(index(path+".allowed_hosts", i), h); err != nil {
			return err
		}
	}
	return nil
}

// validateAllowedHost wants what a sandbox can ask for by name: no address, in
// none of its spellings (127.1, 0x7f.1). It would match nothing.
func validateAllowedHost(path, h string) error {
	name := strings.TrimPrefix(h, "*.")
	_, err := netip.ParseAddr(strings.Trim(name, "[]"))
	last := name[strings.LastIndexByte(name, '.')+1:]
	if err == nil || last != "" && last[0] >= '0' && last[0] <= '9' && !strings.ContainsAny(name, ":/") {
		return Invalid(path, "%q is an address; hosts are allowed by name only, such as api.example.com or *.example.com", short(h))
	}
	return validateHost(path, h)
}

func (c EnvironmentConfig) validatePackages(path string) error {
	lists := c.Packages.lists()
	total := 0
	for _, name := range sortedKeys(lists) {
		total += len(lists[name])
		for i, p := range lists[name] {
			at := index(path+"."+name, i)
			if err := required(at, p, MaxEnvironmentName); err != nil {
				return err
			}
			if strings.HasPrefix(p, "-") || strings.ContainsAny(p, " \t\r\n\x00") {
				return Invalid(at, "%q is not a package; give a name, with a version in the manager's own syntax", short(p))
			}
		}
	}
	switch {
	case total > maxPackages:
		return Invalid(path, "holds %d packages; at most %d are allowed", total, maxPackages)
	case total > 0 && c.Networking.Type == NetworkLimited && !c.Networking.AllowPackageManagers:
		return Invalid("config.networking.allow_package_managers", "must be true when packages are installed under limited networking")
	}
	return nil
}
