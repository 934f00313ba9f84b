package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// Root names a root file system. It is never written: what a sandbox writes goes
// into an overlay that belongs to it.
type Root struct {
	// Dir holds an unpacked image, not to be changed while a sandbox or a
	// snapshot uses it. Empty: the machine's own /usr with a generated /etc.
	Dir string
	// Digest names its content. Needed with Dir.
	Digest string
}

// rootRef is a Root as states and manifests keep it.
type rootRef struct {
	Kind   string `json:"kind"` // host or dir
	Dir    string `json:"dir"`
	Digest string `json:"digest"`
}

// listings remembers the digest of the machine's /usr for this process: it is
// the machine's, not a Runtime's, and takes a second or more to make.
var listings struct {
	mu     sync.Mutex
	stamp  string
	digest string
}

// hostDigest lists /usr, again only when its main folders have changed: every
// package manager renames files into some of them.
func hostDigest(ctx context.Context) (string, error) {
	listings.mu.Lock()
	defer listings.mu.Unlock()
	stamp := ""
	for _, dir := range []string{"/usr", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/share", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/local/bin", "/usr/local/lib"} {
		if info, err := os.Stat(dir); err == nil {
			stamp += fmt.Sprintf("%s %d ", dir, info.ModTime().UnixNano())
		}
	}
	if stamp == listings.stamp {
		return listings.digest, nil
	}
	digest, err := digestListing(ctx, "/usr")
	if err == nil {
		listings.stamp, listings.digest = stamp, digest
	}
	return digest, err
}

// root resolves a Root to a folder and a digest.
func (r *Runtime) root(ctx context.Context, root Root) (rootRef, error) {
	if root.Dir != "" {
		if root.Digest == "" {
			return rootRef{}, errors.New("root file system has no digest")
		}
		dir, err := filepath.Abs(root.Dir)
		if err != nil {
			return rootRef{}, err
		}
		return rootRef{Kind: "dir", Dir: dir, Digest: root.Digest}, nil
	}
	digest, err := hostDigest(ctx)
	if err != nil {
		return rootRef{}, fmt.Errorf("list /usr: %w", err)
	}
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

// makeSkeleton makes the host root: links into /usr, which is bound at start,
// and an /etc of our own. A crash leaves a temporary folder or the whole one.
func makeSkeleton(dir string) error {
	temp, err := os.MkdirTemp(filepath.Dir(dir), ".tmp-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	for _, d := range []string{"usr", "etc", "etc/ssl", "dev", "proc", "sys", "tmp", "run", "var/tmp", "var/log", "var/cache", "var/lib", "home", "root", "opt", "srv",
		"workspace", "mnt/session/outputs", "mnt/session/uploads", "mnt/memory", ".planaria/ctl", ".planaria/bin"} {
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
	for name, text := range map[string]string{
		"passwd":        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
		"group":         "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
		"shadow":        "root:*:19000:0:99999:7:::\n",
		"hosts":         "127.0.0.1 localhost\n::1 localhost\n",
		"resolv.conf":   "",
		"nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
		"machine-id":    "",
		"hostname":      "",
		"profile":       "umask 022\n",
	} {
		if err := os.WriteFile(filepath.Join(temp, "etc", name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	for _, name := range etcFiles {
		if err := copyTree(filepath.Join("/etc", name), filepath.Join(temp, "etc", name)); err != nil {
			return err
		}
	}
	for d, mode := range map[string]fs.FileMode{"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "": 0o755} {
		m := mode.Perm()
		if mode&0o1000 != 0 {
			m |= fs.ModeSticky
		}
		if err := os.Chmod(filepath.Join(temp, d), m); err != nil {
			return err
		}
	}
	return os.Rename(temp, dir)
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
