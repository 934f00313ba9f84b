package api

import (
	"cmp"
	"context"
	"encoding/json"
	"iter"
	"net/url"
	"path"
	"regexp"
	"strings"
	"unicode"
)

// The kinds of resources.
const (
	ResourceFile       = "file"
	ResourceRepository = "github_repository"
	ResourceMemory     = "memory_store"
)

// Limits of resources.
const (
	maxMountPath = 1024
	maxRefName   = 255
	maxToken     = 4096
)

// Where resources are put when nothing else is said (reference section 6.1).
const (
	UploadsFolder = "/mnt/session/uploads"
	OutputsFolder = "/mnt/session/outputs"
	WorkFolder    = "/workspace"
)

// mountRoots are the folders below which resources may be put: those that
// belong to the agent. The rest is the system's.
var mountRoots = []string{WorkFolder, "/mnt", "/home", "/root", "/srv", "/opt", "/data", "/tmp"}

// notMounted are below them and have a meaning of their own.
var notMounted = []string{OutputsFolder, "/mnt/memory"}

// ResourceParams is a resource of a session in a request. Type says which
// fields count: file, github_repository, memory_store.
type ResourceParams struct {
	Type               string    `json:"type"`
	MountPath          *string   `json:"mount_path,omitzero"`
	FileID             string    `json:"file_id,omitzero"`
	URL                string    `json:"url,omitzero"`
	AuthorizationToken Secret    `json:"authorization_token,omitzero"`
	Checkout           *Checkout `json:"checkout,omitzero"`
	MemoryStoreID      string    `json:"memory_store_id,omitzero"`
	Access             string    `json:"access,omitzero"`
	Instructions       *string   `json:"instructions,omitzero"`
}

// Checkout names the branch or commit of a repository.
type Checkout struct {
	Type string `json:"type"`
	Name string `json:"name,omitzero"`
	SHA  string `json:"sha,omitzero"`
}

// Resource is a file or a repository of a session (reference section 7).
type Resource struct {
	Type      string    `json:"type"`
	ID        string    `json:"id"`
	FileID    string    `json:"file_id,omitzero"` // the session's own copy
	URL       string    `json:"url,omitzero"`
	MountPath string    `json:"mount_path"`
	Checkout  *Checkout `json:"checkout,omitzero"`
	CreatedAt Time      `json:"created_at"`
	UpdatedAt Time      `json:"updated_at"`
}

// MarshalJSON writes a repository's checkout also when there is none.
func (r Resource) MarshalJSON() ([]byte, error) {
	type shadow Resource
	if r.Type != ResourceRepository || r.Checkout != nil {
		return Encode(shadow(r))
	}
	return Encode(struct {
		shadow
		Checkout *Checkout `json:"checkout"`
	}{shadow: shadow(r)})
}

// Validate checks one resource by itself.
func (r ResourceParams) Validate() error { return r.validate("") }

func (r ResourceParams) validate(path string) error {
	switch r.Type {
	case ResourceFile:
		err := required(sub(path, "file_id"), r.FileID, maxID)
		if err == nil {
			_, err = r.mountPath(path)
		}
		return err
	case ResourceRepository:
		err := cmp.Or(validateRepository(sub(path, "url"), r.URL), r.Checkout.validate(sub(path, "checkout")))
		if err == nil && r.AuthorizationToken != "" {
			err = validateToken(sub(path, "authorization_token"), r.AuthorizationToken)
		}
		if err == nil {
			_, err = r.mountPath(path)
		}
		return err
	case ResourceMemory:
		return cmp.Or(required(sub(path, "memory_store_id"), r.MemoryStoreID, maxID),
			oneOf(sub(path, "access"), cmp.Or(r.Access, "read_write"), "read_write", "read_only"),
			atMostPtr(sub(path, "instructions"), r.Instructions, maxInstructions))
	}
	return oneOf(sub(path, "type"), r.Type, ResourceFile, ResourceRepository, ResourceMemory)
}

var commitID = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

func (c *Checkout) validate(path string) error {
	if c == nil {
		return nil
	}
	switch c.Type {
	case "branch":
		if err := required(path+".name", c.Name, maxRefName); err != nil {
			return err
		}
		// What git-check-ref-format refuses, so far as it could be taken for
		// something else than a name.
		if strings.HasPrefix(c.Name, "-") || strings.Contains(c.Name, "..") || strings.ContainsAny(c.Name, " ~^:?*[\\") || strings.ContainsFunc(c.Name, unicode.IsControl) {
			return Invalid(path+".name", "%q is not the name of a branch", short(c.Name))
		}
		return nil
	case "commit":
		if !commitID.MatchString(c.SHA) {
			return Invalid(path+".sha", "must be a whole commit id: 40 hexadecimal digits in lower case")
		}
		return nil
	}
	return oneOf(path+".type", c.Type, "branch", "commit")
}

// validateRepository wants what git fetches over HTTPS. A token travels with it,
// so nothing else than HTTPS will do.
func validateRepository(path, s string) error {
	if err := validateURL(path, s); err != nil {
		return err
	}
	u, err := url.Parse(s)
	switch {
	case err != nil || !strings.EqualFold(u.Scheme, "https"):
		return Invalid(path, "must be an https URL such as https://github.com/owner/repository")
	case u.RawQuery != "" || u.ForceQuery || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f || r > 0x7e }):
		return Invalid(path, "must have no query and only visible ASCII characters")
	case repositoryName(s) == "":
		return Invalid(path, "names no repository; give one such as https://github.com/owner/repository")
	}
	return nil
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

// repositoryName is the folder that git would make for a repository.
func repositoryName(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return ""
	}
	name := strings.TrimSuffix(path.Base(strings.TrimRight(u.Path, "/")), ".git")
	if !plainName.MatchString(name) || name == "." || name == ".." {
		return ""
	}
	return name
}

// validateToken wants what can stand in a header.
func validateToken(path string, s Secret) error {
	switch {
	case s == "":
		return Invalid(path, "is required")
	case len(s) > maxToken:
		return Invalid(path, "has %d bytes; at most %d are allowed", len(s), maxToken)
	case strings.ContainsFunc(string(s), func(r rune) bool { return r <= ' ' || r > 0x7e }):
		return Invalid(path, "must hold only visible ASCII characters")
	}
	return nil
}

// mountPath is where the resource is put. Relative paths of files begin at the
// uploads folder.
func (r ResourceParams) mountPath(at string) (string, error) {
	field := sub(at, "mount_path")
	def, base := path.Join(UploadsFolder, plainFile(r.FileID)), UploadsFolder
	if r.Type == ResourceRepository {
		def, base = path.Join(WorkFolder, repositoryName(r.URL)), WorkFolder
	}
	if r.MountPath == nil || *r.MountPath == "" {
		return def, nil
	}
	p := *r.MountPath
	if len(p) > maxMountPath {
		return "", Invalid(field, "has %d bytes; at most %d are allowed", len(p), maxMountPath)
	}
	for part := range strings.SplitSeq(p, "/") {
		if part == ".." {
			return "", Invalid(field, "must not hold \"..\"")
		}
	}
	if strings.ContainsFunc(p, func(c rune) bool { return unicode.IsControl(c) || c == unicode.ReplacementChar }) {
		return "", Invalid(field, "must not hold control characters")
	}
	if strings.HasSuffix(p, "/") && r.Type == ResourceFile {
		return "", Invalid(field, "must name the file, not a folder")
	}
	if !path.IsAbs(p) {
		p = path.Join(base, p)
	}
	p = path.Clean(p)
	if !below(p, mountRoots) {
		return "", Invalid(field, "must be below one of %s", strings.Join(mountRoots, ", "))
	}
	for _, n := range notMounted {
		if p == n || below(p, []string{n}) {
			return "", Invalid(field, "%s is not a place for resources", n)
		}
		// A file, or a repository, cannot stand where the folder is.
		if below(n, []string{p}) {
			return "", Invalid(field, "%s holds %s; choose a place below %s", p, n, UploadsFolder)
		}
	}
	if p == UploadsFolder {
		return "", Invalid(field, "%s is a folder for files; name a place below it", p)
	}
	return p, nil
}

// plainFile keeps an id from being a path.
func plainFile(id string) string {
	if !plainName.MatchString(id) || id == "." || id == ".." {
		return "file"
	}
	return id
}

// below reports whether a clean path lies below one of the folders.
func below(p string, folders []string) bool {
	for _, f := range folders {
		if strings.HasPrefix(p, f+"/") {
			return true
		}
	}
	return false
}

// Resolve makes the resource of valid params. copied is the session's own copy
// of a file.
func (r ResourceParams) Resolve(id, copied string, now Time) (Resource, error) {
	p, err := r.mountPath("")
	if err != nil {
		return Resource{}, err
	}
	out := Resource{Type: r.Type, ID: id, MountPath: p, CreatedAt: now, UpdatedAt: now}
	if r.Type == ResourceFile {
		out.FileID = copied
	} else {
		out.URL, out.Checkout = r.URL, r.Checkout
	}
	return out, nil
}

// ClashingMounts says which of two resources lies at or below the other's place;
// -1 when none does.
func ClashingMounts(paths []string) (i, j int) {
	for i, p := range paths {
		for j, q := range paths[:i] {
			if p == q || below(p, []string{q}) || below(q, []string{p}) {
				return i, j
			}
		}
	}
	return -1, -1
}

func validateResources(at string, rs []ResourceParams) error {
	if len(rs) > MaxResources {
		return Invalid(at, "holds %d resources; at most %d are allowed", len(rs), MaxResources)
	}
	stores := 0
	var mounts []string
	var which []int
	for i, r := range rs {
		if err := r.validate(index(at, i)); err != nil {
			return err
		}
		if r.Type == ResourceMemory {
			stores++
			continue
		}
		p, err := r.mountPath(index(at, i))
		if err != nil {
			return err
		}
		mounts, which = append(mounts, p), append(which, i)
	}
	if i, j := ClashingMounts(mounts); i >= 0 {
		return Invalid(index(at, which[i])+".mount_path", "%q lies at or around the place of resource %d, %q; give each a place of its own", mounts[i], which[j], mounts[j])
	}
	if stores > MaxMemoryStores {
		return Invalid(at, "holds %d memory stores; at most %d are allowed", stores, MaxMemoryStores)
	}
	return nil
}

// ResourceUpdate is the body of POST /v1/sessions/{id}/resources/{rid}.
type ResourceUpdate struct {
	AuthorizationToken Secret `json:"authorization_token"`
}

// Validate checks the token.
func (u ResourceUpdate) Validate() error {
	return validateToken("authorization_token", u.AuthorizationToken)
}

// AddResource adds a file to a session.
func (c *Client) AddResource(ctx context.Context, session string, r ResourceParams) (Resource, error) {
	return post[Resource](ctx, c, sessionPath(session, "/resources"), r)
}

// AllResources walks the resources of a session.
func (c *Client) AllResources(ctx context.Context, session string) iter.Seq2[json.RawMessage, error] {
	return all[json.RawMessage](ctx, c, sessionPath(session, "/resources"), url.Values{})
}

// UpdateResource replaces the token of a repository.
func (c *Client) UpdateResource(ctx context.Context, session, id string, u ResourceUpdate) (Resource, error) {
	return post[Resource](ctx, c, sessionPath(session, "/resources/"+pathID(id)), u)
}

// DeleteResource removes a resource from a session's list.
func (c *Client) DeleteResource(ctx context.Context, session, id string) (Deleted, error) {
	return remove(ctx, c, sessionPath(session, "/resources/"+pathID(id)))
}
