package session

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// A session's resources are in its configuration: files, which are copies of its
// own, and git repositories. They are put into the machine before a call runs in
// it, each once: a note inside, which every snapshot carries along, says which
// are there. What the agent makes of them afterwards is its own.

const (
	// mountedNote is the file inside that says which resources are there.
	mountedNote = "/var/lib/planaria/mounted.json"
	// maxNote bounds what is read of it: the agent may have written it.
	maxNote = 1 << 20
	// mountTime bounds how long all resources may take.
	mountTime = 20 * time.Minute
	// cloneTime bounds one repository, as far as call_seconds allow it so long.
	cloneTime = 10 * time.Minute
	// repositoryHost is the name under which the way out serves repositories.
	repositoryHost = gateway.RepositoryHost
	// mounting names the tunnels that mounting opens: they belong to no call.
	mounting = store.EventID("mount")
)

// MountError says why a resource could not be put into the machine. The model
// and the user read it.
type MountError struct {
	Resource string // "sesrsc_…"
	Path     string
	Says     string
}

func (e *MountError) Error() string {
	return fmt.Sprintf("mount %s at %s: %s", e.Resource, e.Path, e.Says)
}

// apply makes a change in a configuration; changed is false when nothing did.
func (r *ResourceChange) apply(c *store.SessionConfig) (changed bool, err error) {
	if r == nil {
		return false, nil
	}
	var all []json.RawMessage
	if len(c.Resources) > 0 {
		if err := json.Unmarshal(c.Resources, &all); err != nil {
			return false, fmt.Errorf("read resources: %w", err)
		}
	}
	at := slices.IndexFunc(all, func(raw json.RawMessage) bool {
		var x api.Resource
		return json.Unmarshal(raw, &x) == nil && x.ID == r.ID
	})
	switch {
	case r.Put == nil && at < 0:
		return false, nil
	case r.Put == nil:
		all = slices.Delete(all, at, at+1)
	case at >= 0:
		all[at] = r.Put
	case r.Replace:
		return false, &Problem{Text: fmt.Sprintf("resource %s was deleted meanwhile", r.ID), Err: ErrState}
	default:
		all = append(all, r.Put)
	}
	if len(all) > api.MaxResources {
		return false, &Problem{Text: fmt.Sprintf("the session has %d resources already; delete one first", api.MaxResources), Err: ErrState}
	}
	var places []string
	for _, raw := range all {
		var x api.Resource
		if err := json.Unmarshal(raw, &x); err != nil {
			return false, fmt.Errorf("read resources: %w", err)
		}
		places = append(places, x.MountPath)
	}
	if i, j := api.ClashingMounts(places); i >= 0 && r.Put != nil {
		return false, &Problem{Err: ErrInput, Text: fmt.Sprintf(
			"mount_path: %q lies at or around the place of another resource, %q; give it a place of its own", places[i], places[j])}
	}
	c.Resources = encode(all)
	return true, nil
}

// fitsBehind says whether a change is possible behind those that are accepted
// already and wait for the session's owner, so that none is accepted and then
// left out.
func (r *ResourceChange) fitsBehind(v store.View) error {
	if r == nil {
		return nil
	}
	rows, err := v.Inbox()
	if err != nil {
		return err
	}
	c := v.Session().Config
	for _, row := range rows {
		if row.Kind != store.InboxControl || row.Type != controlUpdate {
			continue
		}
		var p UpdateParams
		if err := json.Unmarshal(row.Body, &p); err != nil {
			return fmt.Errorf("read the update %s: %w", row.ID, err)
		}
		if _, err := p.Resources.apply(&c); err != nil {
			return err
		}
	}
	_, err = r.apply(&c)
	return err
}

// CheckResources says whether a change is possible in a session as it is.
func (m *Manager) CheckResources(s store.Session, r *ResourceChange) error {
	if s.Status == store.StatusTerminated {
		return &Problem{Text: fmt.Sprintf("session %s is terminated and read-only", s.ID), Err: ErrState}
	}
	var env api.EnvironmentConfig
	if len(s.Config.Environment) > 0 {
		if err := json.Unmarshal(s.Config.Environment, &env); err != nil {
			return fmt.Errorf("read environment: %w", err)
		}
	}
	if env.Type == api.EnvironmentSelfHosted {
		return &Problem{Text: "a session in a self_hosted environment takes no files: its machine is not ours", Err: ErrInput}
	}
	c := s.Config
	_, err := r.apply(&c)
	return err
}

// resources are those that the session has now.
func (d *driver) resources() (all []api.Resource, err error) {
	var raw json.RawMessage
	d.read(func(st *state) { raw = st.config.Resources })
	if len(raw) == 0 {
		return nil, nil
	}
	if err := json.Unmarshal(raw, &all); err != nil {
		return nil, fmt.Errorf("read resources of session %s: %w", d.id, err)
	}
	return all, nil
}

// repositories lists the git repositories that the machine may fetch through us.
func (d *driver) repositories() (out []gateway.Repository) {
	all, err := d.resources()
	if err != nil {
		d.m.log.Error("cannot read resources", "session", d.id, "err", err)
	}
	for _, r := range all {
		if r.Type == api.ResourceRepository {
			out = append(out, gateway.Repository{Resource: r.ID, URL: r.URL})
		}
	}
	return out
}

// listDigest names a list of resources, so that an unchanged one is known.
func (d *driver) listDigest() (digest string) {
	d.read(func(st *state) {
		sum := sha256.Sum256(st.config.Resources)
		digest = hex.EncodeToString(sum[:])
	})
	return digest
}

// mountInto puts the session's resources into a machine that this driver holds,
// so that a repository can be fetched through its way out. It does nothing when
// they have not changed since the last time.
func (d *driver) mountInto(ctx context.Context, b *machine) error {
	digest := d.listDigest()
	if b.mounted == digest {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, mountTime)
	defer cancel()
	b.begin(mounting)
	defer b.end(mounting)
	if err := d.mount(ctx, b.s); err != nil {
		return err
	}
	b.mounted = digest
	return nil
}

// mountedNow sees to it that a machine that was held before has what was added
// to the session since, or was missing in its snapshot. false: the calls that
// need it got the reason as their result, or something else is to be looked at.
func (d *driver) mountedNow(ctx context.Context, b *machine, needing []*call) (bool, error) {
	if b.mounted == d.listDigest() {
		return true, nil
	}
	var err, cut error
	d.during(ctx, func(soft context.Context) {
		defer d.keepAlive(mountTime)()
		err = d.mountInto(soft, b)
		cut = context.Cause(soft)
	})
	var bad *MountError
	switch {
	case err == nil:
		return true, nil
	case errors.Is(cut, store.ErrFenced):
		return false, cut
	case errors.Is(err, sandbox.ErrFenced):
		return false, fmt.Errorf("%w: %w", store.ErrFenced, err)
	case cut != nil, b.dead():
		return false, nil // the loop sees why
	case !errors.As(err, &bad):
		return false, err
	}
	d.m.log.Warn("cannot mount the session's resources", "session", d.id, "err", err)
	var drafts []store.Draft
	for _, c := range needing {
		drafts = append(drafts, d.unrun(c, gateway.Answer{IsError: true, Content: text(
			"The session's resources could not be put into its machine: " + bad.Error() + ". Nothing was run; the next call tries again.")})...)
	}
	_, err = d.append(ctx, store.Append{Entries: drafts})
	return false, err
}

// mount puts the session's resources into a machine, those that are not there.
//
//  1. the resource. A crash from here to 2 leaves it there without a note; the
//     next mount puts a file again and finds a repository.
//  2. the note inside that it is there. With a snapshot of an earlier time the
//     note goes back with the files.
func (d *driver) mount(ctx context.Context, s *sandbox.Sandbox) error {
	all, err := d.resources()
	if err != nil || len(all) == 0 {
		return err
	}
	there, err := mountedIn(ctx, s)
	if err != nil {
		return err
	}
	for _, r := range all {
		if there[r.ID] {
			continue
		}
		switch r.Type {
		case api.ResourceFile:
			err = d.putFile(ctx, s, r)
		case api.ResourceRepository:
			err = d.clone(ctx, s, r)
			if bad := (*MountError)(nil); errors.As(err, &bad) {
				// The session runs without it (reference section 9.8).
				if err = d.without(ctx, r, bad); err == nil {
					continue
				}
			}
		default:
			continue
		}
		if err == nil {
			there[r.ID] = true
			err = s.PutFile(ctx, mountedNote, 0o600, bytes.NewReader(encode(there)))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// without tells the user that the session goes on without a repository.
func (d *driver) without(ctx context.Context, r api.Resource, bad *MountError) error {
	d.m.log.Warn("the session runs without a repository", "session", d.id, "resource", r.ID, "err", bad)
	e := newSessionError(repositoryError(bad.Says), bad.Error()+"\nThe session goes on without it. It is tried again when its token "+
		"or the list of resources changes, and in each new machine.", "retrying")
	e.RepositoryURL = r.URL
	_, err := d.append(ctx, store.Append{Entries: []store.Draft{event(d.newID("sevt_"), evError, "", fields{"error": e})}})
	return err
}

// repositoryError is the type of session.error for what git says (reference
// section 9.8).
func repositoryError(says string) string {
	says = strings.ToLower(says)
	for _, x := range []struct{ typ, words string }{
		{"repository_checkout_error", "remote branch"}, {"repository_checkout_error", "remote ref"},
		{"repository_checkout_error", "not our ref"}, {"repository_checkout_error", "reference is not a tree"},
		{"repository_authentication_error", "could not read username"}, {"repository_authentication_error", "authentication failed"},
		{"repository_authentication_error", "returned error: 401"},
		{"repository_forbidden_error", "returned error: 403"}, {"repository_forbidden_error", "access denied"},
		{"repository_not_found_error", "repository not found"}, {"repository_not_found_error", "' not found"},
		{"repository_not_found_error", "returned error: 404"},
	} {
		if strings.Contains(says, x.words) {
			return x.typ
		}
	}
	return "repository_clone_error"
}

// mountedIn reads the note. One that is not there, or that the agent spoilt, says
// nothing: everything is put again.
func mountedIn(ctx context.Context, s *sandbox.Sandbox) (map[string]bool, error) {
	r, _, err := s.GetFile(ctx, mountedNote)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]bool{}, nil
	}
	if err != nil {
		return nil, err
	}
	defer r.Close()
	raw, err := io.ReadAll(io.LimitReader(r, maxNote))
	if err != nil {
		return nil, fmt.Errorf("read the note of mounted resources: %w", err)
	}
	there := map[string]bool{}
	if json.Unmarshal(raw, &there) != nil || there == nil {
		return map[string]bool{}, nil
	}
	return there, nil
}

// putFile streams a file into the machine. A copy that somebody deleted is left
// out: the session goes on without it.
func (d *driver) putFile(ctx context.Context, s *sandbox.Sandbox, r api.Resource) error {
	f, err := d.m.db.File(ctx, d.ws, store.FileID(r.FileID))
	if errors.Is(err, store.ErrNotFound) {
		d.m.log.Warn("a mounted file was deleted", "session", d.id, "resource", r.ID)
		return nil
	}
	if err != nil {
		return err
	}
	content, err := d.m.db.OpenFile(ctx, f)
	if errors.Is(err, store.ErrDamaged) {
		return &MountError{Resource: r.ID, Path: r.MountPath, Says: "the stored file is damaged; delete the resource and add the file again"}
	}
	if err != nil {
		return err
	}
	defer content.Close()
	err = s.PutFile(ctx, r.MountPath, 0o644, content)
	switch {
	case err == nil, ctx.Err() != nil, errors.Is(err, sandbox.ErrGone), errors.Is(err, sandbox.ErrFenced):
		return err
	}
	return &MountError{Resource: r.ID, Path: r.MountPath, Says: clip(err.Error(), maxMountWords)}
}

// maxMountWords is how much of what went wrong is told.
const maxMountWords = 2000

// clone fetches a repository into the machine, with git inside and through the
// way out, which adds the token. It is run in a shell of its own.
func (d *driver) clone(ctx context.Context, s *sandbox.Sandbox, r api.Resource) error {
	limit := min(cloneTime, d.callLimit())
	input := encode(map[string]any{"command": cloneCommand(r), "timeout_ms": limit.Milliseconds()})
	id := d.newID("mnt_")
	res, err := s.Do(ctx, sandbox.Call{ID: id, Thread: string(mounting), Tool: "bash", Input: input})
	if err != nil {
		return fmt.Errorf("clone %s: %w", r.URL, err)
	}
	if err := s.Ack(ctx, id); err != nil {
		return fmt.Errorf("clone %s: %w", r.URL, err)
	}
	if res.IsError {
		says := strings.TrimSpace(res.Text)
		if len(says) > maxMountWords {
			says = "…" + says[len(says)-maxMountWords:]
		}
		return &MountError{Resource: r.ID, Path: r.MountPath, Says: "git could not fetch " + r.URL + ":\n" + strings.ToValidUTF8(says, "")}
	}
	return nil
}

// cloneCommand fetches into a folder beside the place and moves it there when it
// is whole, so that a crash leaves no half repository. The repository's origin is
// its real URL; git asks us in its stead.
func cloneCommand(r api.Resource) string {
	inner := "http://" + repositoryHost + "/" + r.ID
	checkout := ""
	branch := ""
	if c := r.Checkout; c != nil && c.Type == "branch" {
		branch = "--branch=" + shellWord(c.Name) + " "
	} else if c != nil {
		sha := shellWord(c.SHA)
		checkout = `git -C "$t" cat-file -e ` + sha + `^{commit} 2>/dev/null || git -C "$t" fetch --quiet origin ` + sha + "\n" +
			`git -C "$t" -c advice.detachedHead=false checkout --quiet --detach ` + sha + "\n"
	}
	return `( set -e
p=` + shellWord(r.MountPath) + ` u=` + shellWord(r.URL) + ` i=` + shellWord(inner) + `
t="$p.planaria-clone"
command -v git >/dev/null || { echo "git is not installed in this machine's image" >&2; exit 1; }
export GIT_TERMINAL_PROMPT=0 http_proxy=` + sandbox.ProxyURL + `
if [ "$(git -C "$p" config --get planaria.resource 2>/dev/null)" = ` + shellWord(r.ID) + ` ]; then exit 0; fi
if [ -e "$p" ] && ! rmdir "$p" 2>/dev/null; then echo "$p exists and is not an empty folder" >&2; exit 1; fi
rm -rf "$t"; mkdir -p "$(dirname "$p")"
git -c "url.$i.insteadOf=$u" clone --quiet ` + branch + `-- "$u" "$t"
git -C "$t" config "url.$i.insteadOf" "$u"
` + checkout + `git -C "$t" config planaria.resource ` + shellWord(r.ID) + `
mv "$t" "$p" ) </dev/null`
}

// shellWord makes one word of a shell.
func shellWord(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
