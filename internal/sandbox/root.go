package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/planaria/planaria/internal/sandbox/guest"
)

// Root names a root file system. It is never written: what a sandbox writes goes
// into an overlay that belongs to it.
type Root struct {
	// Dir holds an unpacked image, not to be changed while a sandbox or a
	// snapshot uses it. Empty: the machine's own /usr with a generated /etc.
	Dir string
	// Digest names its content. Needed with Dir.
	Digest string
	// Image is the name of the image that it was unpacked from, with a digest:
	// with it another node, or this one later, gets it again. Runtime.Image
	// fills it in.
	Image string
	// Env is what the image's configuration sets for its processes.
	Env []string

	asker string // workspace for which an image is fetched again
}

// rootRef is a Root as states and manifests keep it.
type rootRef struct {
	Kind   string `json:"kind"` // host or dir
	Dir    string `json:"dir"`
	Digest string `json:"digest"`
	Image  string `json:"image,omitempty"`
}

// listings remembers the digest of the machine's /usr for this process: it is
// the machine's, not a Runtime's, and takes seconds to make (1 s for 150,000
// names when the system has them in memory, 3.5 s when not).
var listings struct {
	mu     sync.Mutex
	stamp  string
	digest string
}

// hostRoot is what a Runtime knows of the machine's own root.
//
// Open lists /usr in the background. Until that is done a first start takes the
// digest that an earlier process noted, if the stamp is still the same; should
// the listing then differ, the sandboxes that were started on the note get the
// true digest. A restore compares digests, so it never takes the note: it waits
// for the listing.
type hostRoot struct {
	mu     sync.Mutex
	listed chan struct{} // closed when the listing of Open is over
	noted  string        // digest that was taken from the note
	older  map[string]bool
}

// hostNote is host.json in the folder of roots.
type hostNote struct {
	Stamp  string `json:"stamp"`
	Digest string `json:"digest"`
}

const hostFile = "host.json"

// stampFiles change with what is installed: package managers rename files into
// the folders and write the others.
var stampFiles = []string{
	"/usr", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/share", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
	"/usr/local/bin", "/usr/local/lib", "/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/usr/lib/sysimage/rpm/rpmdb.sqlite",
	"/lib/apk/db/installed", "/var/lib/pacman/local",
}

func hostStamp() string {
	stamp := ""
	for _, name := range stampFiles {
		if info, err := os.Stat(name); err == nil {
			stamp += fmt.Sprintf("%s %d ", name, info.ModTime().UnixNano())
		}
	}
	return stamp
}

// hostDigest lists /usr, again only when the stamp has changed.
func hostDigest(ctx context.Context) (stamp, digest string, err error) {
	listings.mu.Lock()
	defer listings.mu.Unlock()
	stamp = hostStamp()
	if stamp == listings.stamp {
		return stamp, listings.digest, nil
	}
	digest, err = digestListing(ctx, "/usr")
	if err == nil {
		listings.stamp, listings.digest = stamp, digest
	}
	return stamp, digest, err
}

// listHost lists /usr while nobody waits for it, and notes its digest.
func (r *Runtime) listHost() {
	r.host.listed = make(chan struct{})
	r.host.older = map[string]bool{}
	for name := range r.sandboxes {
		r.host.older[name] = true // of another process; its digest was made by that
	}
	r.wait.Add(1)
	go func() {
		defer r.wait.Done()
		defer close(r.host.listed)
		stamp, digest, err := hostDigest(r.ctx)
		if err == nil {
			err = r.noteHost(hostNote{stamp, digest})
		}
		if err != nil && r.ctx.Err() == nil {
			r.log.Warn("cannot list the machine's programs", "err", err)
		}
	}()
}

// noteHost makes a listing the next process's note, and mends what was started
// on a wrong one.
func (r *Runtime) noteHost(n hostNote) error {
	path := filepath.Join(r.cfg.Dir, "roots", hostFile)
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(path); err != nil || string(old) != string(b) {
		if err := writeDurable(path, b); err != nil {
			return err
		}
	}
	r.host.mu.Lock()
	defer r.host.mu.Unlock()
	was := r.host.noted
	r.host.noted = ""
	if was == "" || was == n.Digest {
		return nil
	}
	r.log.Warn("the machine's programs have changed since they were listed last", "was", was, "is", n.Digest)
	root, err := r.hostRef(n.Digest)
	if err != nil {
		return err
	}
	r.mu.Lock()
	var wrong []*Sandbox
	for name, s := range r.sandboxes {
		if !r.host.older[name] {
			wrong = append(wrong, s)
		}
	}
	r.mu.Unlock()
	for _, s := range wrong {
		s.mu.Lock()
		mine := s.state.Root.Kind == "host" && s.state.Root.Digest == was
		if mine {
			s.state.Root = root
		}
		s.mu.Unlock()
		if mine {
			if err := s.save(); err != nil && s.alive() {
				return err
			}
		}
	}
	return nil
}

// notedHost is the digest that an earlier process noted, while Open's listing
// goes on and if nothing was installed since.
func (r *Runtime) notedHost() (string, bool) {
	select {
	case <-r.host.listed:
		return "", false
	default:
	}
	b, err := os.ReadFile(filepath.Join(r.cfg.Dir, "roots", hostFile))
	if err != nil {
		return "", false
	}
	var n hostNote
	if json.Unmarshal(b, &n) != nil || len(n.Digest) != 2*sha256.Size || n.Stamp != hostStamp() {
		return "", false
	}
	return n.Digest, true
}

// root resolves a Root for a start: to a folder and a digest.
func (r *Runtime) root(ctx context.Context, root Root) (rootRef, error) {
	if root.Dir == "" && root.Image == "" {
		// Under the lock the listing either has not corrected yet and will, or
		// has and the note is not taken any more.
		r.host.mu.Lock()
		digest, ok := r.notedHost()
		if ok {
			r.host.noted = digest
		}
		r.host.mu.Unlock()
		if ok {
			return r.hostRef(digest)
		}
	}
	return r.exactRoot(ctx, root)
}

// RootDigest is the digest of a root file system as a snapshot on it will name
// it. It may wait for the listing of /usr.
func (r *Runtime) RootDigest(ctx context.Context, root Root) (string, error) {
	ref, err := r.exactRoot(ctx, root)
	return ref.Digest, err
}

// exactRoot is root without what another process noted.
func (r *Runtime) exactRoot(ctx context.Context, root Root) (rootRef, error) {
	switch {
	case root.Image != "":
		return r.imageRef(ctx, root)
	case root.Dir != "":
		if root.Digest == "" {
			return rootRef{}, errors.New("root file system has no digest")
		}
		dir, err := filepath.Abs(root.Dir)
		if err != nil {
			return rootRef{}, err
		}
		return rootRef{Kind: "dir", Dir: dir, Digest: root.Digest}, nil
	}
	_, digest, err := hostDigest(ctx)
	if err != nil {
		return rootRef{}, fmt.Errorf("list /usr: %w", err)
	}
	return r.hostRef(digest)
}

// imageRef finds an image by its digest in this folder, wherever it was when
// the snapshot was taken, and fetches it where it is not here any more.
func (r *Runtime) imageRef(ctx context.Context, root Root) (rootRef, error) {
	got, err := r.unpackedRoot(root.Digest)
	if err != nil {
		if got, err = r.Image(ctx, root.asker, root.Image); err != nil {
			return rootRef{}, err
		}
	}
	if got.Digest != root.Digest {
		return rootRef{}, fmt.Errorf("%w: image %s is %s here, was %s", ErrRoot, root.Image, got.Digest, root.Digest)
	}
	return rootRef{Kind: "dir", Dir: got.Dir, Digest: got.Digest, Image: got.Image}, nil
}

// haveRoot brings the root of a snapshot here before the time of its restore is
// counted: an image may have to be fetched again, /usr to be listed first.
func (r *Runtime) haveRoot(ctx context.Context, m *Manifest, spec Spec) error {
	if m.Workspace != spec.Workspace {
		return ErrNotFound // another tenant's looks like none (L11)
	}
	var err error
	switch {
	case m.Root.Image != "":
		_, err = r.exactRoot(ctx, Root{Digest: m.Root.Digest, Image: m.Root.Image, asker: m.Workspace})
	case m.Root.Kind == "host":
		_, err = r.exactRoot(ctx, Root{})
	}
	return err
}

// hostRef makes the skeleton for a digest of /usr where there is none.
func (r *Runtime) hostRef(digest string) (rootRef, error) {
	r.roots.Lock()
	defer r.roots.Unlock()
	dir := filepath.Join(r.cfg.Dir, "roots", "host-"+digest[:32])
	if _, err := os.Stat(dir); err != nil {
		if err := makeSkeleton(dir); err != nil {
			return rootRef{}, fmt.Errorf("make the host root: %w", err)
		}
	}
	return rootRef{Kind: "host", Dir: dir, Digest: digest}, nil
}

// digestListing hashes the names, kinds, modes, sizes, times and link targets
// below a folder; its files' bytes are taken to follow their times.
func digestListing(ctx context.Context, root string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrPermission) {
			return nil // what we cannot read, no sandbox of ours can
		}
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if e.IsDir() && e.Name() == "__pycache__" {
			return fs.SkipDir // the host's own programs write there
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if e.IsDir() {
			// A folder's time changes with what is skipped in it.
			fmt.Fprintf(h, "%s %o\n", name, info.Mode())
			return nil
		}
		to := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			to, _ = os.Readlink(name)
		}
		fmt.Fprintf(h, "%s %o %d %d %s\n", name, info.Mode(), info.Size(), info.ModTime().UnixNano(), to)
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

// etcFiles are copied from the machine into the host root where they exist.
// None of them tells who uses the machine.
var etcFiles = []string{
	"ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf",
	"mime.types", "services", "protocols", "bash.bashrc", "magic", "fonts", "java-11-openjdk", "java-17-openjdk", "chromium.d", "terminfo",
	"debian_version", "os-release", "python3", "python3.11", "python3.12", "python3.13",
}

// rootFolders are in every root: what sandboxes mount on, and what programs
// take for granted. Those of an image stay as they are.
var rootFolders = []struct {
	name string
	mode fs.FileMode
}{
	{"etc", 0o755}, {"dev", 0o755}, {"proc", 0o755}, {"sys", 0o755}, {"run", 0o755}, {"tmp", 0o777 | fs.ModeSticky}, {"var/tmp", 0o777 | fs.ModeSticky}, {"root", 0o700},
	{guest.Workspace, 0o755}, {guest.Outputs, 0o755}, {guest.Uploads, 0o755}, {"mnt/memory", 0o755}, {guest.ControlDir, 0o755}, {guest.BinaryDir, 0o755},
}

// etcOurs are files of /etc that every root has from us: no resolver, for there
// is no network, and nobody's names. The agent writes what it is called.
var etcOurs = map[string]string{
	"hosts":       "127.0.0.1 localhost\n::1 localhost\n",
	"resolv.conf": "",
	"machine-id":  "",
	"hostname":    "",
}

// etcDefaults are files of /etc that a root has from us if it has none.
var etcDefaults = map[string]string{
	"passwd":        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
	"group":         "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
	"shadow":        "root:*:19000:0:99999:7:::\n",
	"nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
	"profile":       "umask 022\n",
}

// prepareRoot adds to a root what sandboxes need. A link or file that stands
// where a folder must be goes: nothing of ours is ever put through it.
func prepareRoot(root *os.Root) error {
	if err := root.RemoveAll(".planaria"); err != nil {
		return err
	}
	for _, f := range rootFolders {
		if err := forceFolder(root, strings.TrimPrefix(f.name, "/"), f.mode); err != nil {
			return err
		}
	}
	for name, text := range etcOurs {
		if err := root.RemoveAll("etc/" + name); err != nil {
			return err
		}
		if err := root.WriteFile("etc/"+name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	for name, text := range etcDefaults {
		if _, err := root.Lstat("etc/" + name); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := root.WriteFile("etc/"+name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func forceFolder(root *os.Root, name string, mode fs.FileMode) error {
	for at := range prefixes(name) {
		info, err := root.Lstat(at)
		if err == nil && info.IsDir() {
			continue
		}
		if err == nil {
			err = root.RemoveAll(at)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := root.Mkdir(at, 0o755); err != nil {
			return err
		}
		if at == name {
			if err := root.Chmod(at, mode); err != nil {
				return err
			}
		}
	}
	return nil
}

// prefixes of a/b/c are a, a/b and a/b/c.
func prefixes(name string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for i, c := range name {
			if c == '/' && !yield(name[:i]) {
				return
			}
		}
		yield(name)
	}
}

// makeSkeleton makes the host root: links into /usr, which is bound at start,
// and an /etc of our own. A crash leaves a temporary folder or the whole one.
func makeSkeleton(dir string) error {
	temp, err := os.MkdirTemp(filepath.Dir(dir), tempPrefix)
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	for _, d := range []string{"usr", "etc/ssl", "var/log", "var/cache", "var/lib", "home", "opt", "srv"} {
		if err := os.MkdirAll(filepath.Join(temp, d), 0o755); err != nil {
			return err
		}
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		if to, err := os.Readlink("/" + d); err == nil {
			if err := os.Symlink(to, filepath.Join(temp, d)); err != nil {
				return err
			}
		}
	}
	for _, name := range etcFiles {
		if err := copyTree(filepath.Join("/etc", name), filepath.Join(temp, "etc", name)); err != nil {
			return err
		}
	}
	root, err := os.OpenRoot(temp)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := prepareRoot(root); err != nil {
		return err
	}
	if err := os.Chmod(temp, 0o755); err != nil {
		return err
	}
	if err := syncFiles(temp); err != nil {
		return err
	}
	if err := os.Rename(temp, dir); err != nil {
		return err
	}
	return syncDir(filepath.Dir(dir))
}

// copyTree copies files, folders and links; links that lead into other folders
// of /etc than those that are copied stay as they are and may dangle.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(name string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return nil
		}
		if err != nil {
			return err
		}
		dst := to + strings.TrimPrefix(name, from)
		info, err := e.Info()
		if err != nil {
			return err
		}
		switch {
		case info.IsDir():
			return os.MkdirAll(dst, 0o755)
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(name)
			if err != nil {
				return err
			}
			return os.Symlink(target, dst)
		case !info.Mode().IsRegular() || info.Mode().Perm()&0o004 == 0:
			return nil // not for everybody
		}
		b, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		return os.WriteFile(dst, b, info.Mode().Perm())
	})
}
