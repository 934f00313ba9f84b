package sandbox

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
)

const (
	maxImagePath = 4096 // bytes of a name in a layer
	maxImageName = 255  // of one part of it
	maxLinkHops  = 40   // of links on the way to a name, as Linux has it
	// maxWindow is the memory that a zstd layer may ask for.
	maxWindow = 128 << 20

	whiteout = ".wh."
	opaque   = ".wh..wh..opq"

	// agentShell is what the bash tool runs.
	agentShell = "/bin/bash"
)

// unpackImage makes the folder of an image: root/ with its files, image.json
// beside it. Both appear with one rename, after all of it is synced; a crash
// leaves a temporary folder that the next Open removes.
func (r *Runtime) unpackImage(ctx context.Context, found *foundImage, digest string) (*unpackedImage, error) {
	name, limits := found.ref.name, r.imageLimits()
	manifest, err := found.image.Manifest()
	if err != nil {
		return nil, err
	}
	if err := checkLayers(name, manifest.Layers, limits); err != nil {
		return nil, err
	}
	config, err := readConfig(name, found.image, manifest)
	if err != nil {
		return nil, err
	}
	env, err := imageEnv(name, config.Config.Env, limits.env)
	if err != nil {
		return nil, err
	}
	temp, err := os.MkdirTemp(filepath.Join(r.cfg.Dir, "roots"), tempPrefix)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	if err := os.Mkdir(filepath.Join(temp, "root"), 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(filepath.Join(temp, "root"))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	// 1. Layer after layer: fetched, proved, unpacked, its archive removed.
	u := &unpacker{ctx: ctx, root: root, limits: limits, owners: keepsOwners(), dirs: map[string]attributes{}}
	archive := filepath.Join(temp, "layer")
	for i, d := range manifest.Layers {
		layer, err := found.image.LayerByDigest(d.Digest)
		if err == nil {
			err = fetchLayer(ctx, name, layer, d, archive)
		}
		if err != nil {
			return nil, explainImage(found.ref, err)
		}
		if err := u.unpack(archive); err != nil {
			var mine *fs.PathError
			if errors.As(err, &mine) || ctx.Err() != nil {
				return nil, fmt.Errorf("unpack image %.200q: layer %d: %w", name, i+1, err)
			}
			return nil, &imageError{text: fmt.Sprintf("image %.200q: layer %d cannot be unpacked: %s; build or choose another image", name, i+1, plain(err.Error())), err: err}
		}
	}
	if err := os.Remove(archive); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	// 2. What every sandbox needs, and the folders' own modes and times.
	if err := prepareRoot(root); err != nil {
		return nil, fmt.Errorf("prepare image %.200q: %w", name, err)
	}
	if err := u.checkShell(name); err != nil {
		return nil, err
	}
	if err := u.finish(); err != nil {
		return nil, fmt.Errorf("unpack image %.200q: %w", name, err)
	}
	// 3. Room is made for what it really takes, then it is durable.
	if err := r.makeRoom(u.written); err != nil {
		return nil, err
	}
	meta := &unpackedImage{Version: 1, Image: found.pinned, Digest: digest, Env: env, Entries: u.entries, Bytes: u.written, Skipped: u.skipped, At: time.Now().UTC()}
	b, err := json.Marshal(meta)
	if err != nil {
		return nil, err
	}
	if err := writeDurable(filepath.Join(temp, imageFile), b); err != nil {
		return nil, err
	}
	if err := syncFiles(temp); err != nil {
		return nil, fmt.Errorf("sync image %.200q: %w", name, err)
	}
	if err := r.hook("unpacked"); err != nil {
		return nil, err
	}
	r.images.publish.Lock()
	defer r.images.publish.Unlock()
	dir := r.imageDir(digest)
	if other, err := readImage(dir); err == nil {
		return other, nil // another fetch of it was faster
	}
	if err := os.RemoveAll(dir); err != nil { // one whose note is gone
		return nil, err
	}
	if err := os.Rename(temp, dir); err != nil {
		return nil, err
	}
	return meta, syncDir(filepath.Dir(dir))
}

// imageEnv keeps the variables that an image's configuration sets, but for those
// that name a proxy: the way out of a sandbox is ours.
func imageEnv(image string, env []string, limit int) ([]string, error) {
	var out []string
	n := 0
	for _, e := range env {
		name, _, ok := strings.Cut(e, "=")
		if !ok || name == "" || strings.ContainsRune(e, 0) || strings.HasSuffix(strings.ToLower(name), "_proxy") {
			continue
		}
		if n += len(e); n > limit {
			return nil, badImage("image %.200q sets more than %d bytes of variables; build it with fewer", image, limit)
		}
		out = append(out, e)
	}
	return out, nil
}

// unpacker unpacks layers into a folder that nobody else uses. Everything goes
// through an os.Root, which no link leads out of; links inside are followed as
// they will mean inside the sandbox, so that an absolute one stays within too.
//
// Of what an archive says it keeps names, bytes, modes, times, links and, as
// root, owners. It skips devices, pipes and sockets, drops extended attributes
// and the bits that change the user on execution: the agent is root inside, and
// a folder of strangers' setuid programs has no place on the node.
type unpacker struct {
	ctx    context.Context
	root   *os.Root
	limits imageLimits
	owners bool // keep them; else all belong to this process's user

	entries, skipped int
	names            int64                 // bytes of entries' names, which stay in memory
	bytes            int64                 // read from archives
	written          int64                 // to files: holes of an archive cost it nothing, but us
	dirs             map[string]attributes // of folders, applied at the end
	layer            map[string]bool       // names that the layer under way made
}

// attributes of a file or folder.
type attributes struct {
	folder   bool
	mode     int64
	uid, gid int
	changed  time.Time
}

func attributesOf(h *tar.Header) attributes {
	a := attributes{folder: h.Typeflag == tar.TypeDir, mode: h.Mode, uid: h.Uid, gid: h.Gid, changed: h.ModTime}
	if y := a.changed.Year(); y < 1970 || y > 2200 {
		a.changed = time.Unix(0, 0) // not every file system can keep it
	}
	return a
}

// errTooBig and others end an unpacking; their texts follow the layer's number.
var (
	errTooBig     = errors.New("it has more bytes than are allowed")
	errTooMany    = errors.New("it has more files than are allowed")
	errName       = errors.New("a name in it is not one of a file inside")
	errLinkTarget = errors.New("a hard link in it leads to no file inside")
	errLoop       = errors.New("links in it lead in a circle")
	errNoFolder   = errors.New("a file in it lies below something that is no folder")
	errArchive    = errors.New("it is no archive")
	errOwner      = errors.New("a file in it belongs to a user that this node cannot give it to")
)

// unpack unpacks one layer.
func (u *unpacker) unpack(archive string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	in, done, err := decompress(bufio.NewReaderSize(f, 1<<20))
	if err != nil {
		return fmt.Errorf("%w: %w", errArchive, err)
	}
	defer done()
	u.layer = map[string]bool{}
	t := tar.NewReader(&meter{u: u, in: in})
	for {
		if u.ctx.Err() != nil {
			return context.Cause(u.ctx)
		}
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return readError(err)
		}
		if err := u.count(h.Name); err != nil {
			return err
		}
		if err := u.entry(h, t); err != nil {
			return fmt.Errorf("%.200q: %w", h.Name, err)
		}
	}
}

// count counts a name that is kept in memory and takes an inode.
func (u *unpacker) count(name string) error {
	u.entries++
	u.names += int64(len(name))
	if u.entries > u.limits.entries || u.names > u.limits.names {
		return errTooMany
	}
	return nil
}

// readError tells an archive's own fault from ours.
func readError(err error) error {
	if errors.Is(err, errTooBig) {
		return err
	}
	return fmt.Errorf("%w: %w", errArchive, err)
}

// decompress looks at the first bytes: what the manifest says of them is not
// always so.
func decompress(in *bufio.Reader) (io.Reader, func(), error) {
	magic, err := in.Peek(4)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(in)
		return z, func() {}, err
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, nil, err
		}
		return z, z.Close, nil
	}
	return in, func() {}, nil
}

// meter counts what comes out of a layer and ends it at the limit: a bomb costs
// no more than an honest image of the largest size.
type meter struct {
	u  *unpacker
	in io.Reader
}

func (m *meter) Read(p []byte) (int, error) {
	left := m.u.limits.unpacked - m.u.bytes
	if left <= 0 {
		return 0, errTooBig
	}
	if m.u.ctx.Err() != nil {
		return 0, context.Cause(m.u.ctx)
	}
	n, err := m.in.Read(p[:min(int64(len(p)), left)])
	m.u.bytes += int64(n)
	return n, err
}

// cleanName is an entry's name below the root. "." is the root itself.
func cleanName(name string) (string, error) {
	if len(name) > maxImagePath || strings.ContainsRune(name, 0) || strings.HasPrefix(name, "/") {
		return "", errName
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." || len(part) > maxImageName {
			return "", errName
		}
	}
	return path.Clean(name), nil
}

func (u *unpacker) entry(h *tar.Header, body io.Reader) error {
	switch h.Typeflag {
	case tar.TypeXGlobalHeader:
		return nil
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		u.skipped++
		return nil
	case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeGNUSparse:
	default:
		return fmt.Errorf("%w: an entry of the kind %q", errArchive, h.Typeflag)
	}
	name, err := cleanName(h.Name)
	if err != nil || name == "." {
		return err
	}
	if base := path.Base(name); strings.HasPrefix(base, whiteout) {
		return u.remove(name)
	}
	at, err := u.place(name)
	if err != nil {
		return err
	}
	target := ""
	if h.Typeflag == tar.TypeLink {
		if target, err = u.linkTarget(h.Linkname); err != nil {
			return err
		}
		if target == at {
			return nil
		}
	}
	if err := u.clear(at, h.Typeflag == tar.TypeDir); err != nil {
		return err
	}
	u.mark(at)
	switch h.Typeflag {
	case tar.TypeDir:
		u.dirs[at] = attributesOf(h)
		if err := u.root.Mkdir(at, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		return nil
	case tar.TypeSymlink:
		return u.symlink(at, h)
	case tar.TypeLink:
		return u.root.Link(target, at)
	}
	return u.file(at, h, body)
}

// mark notes that the layer under way made a name and the folders above it.
func (u *unpacker) mark(at string) {
	for ; at != "." && at != "" && !u.layer[at]; at = path.Dir(at) {
		u.layer[at] = true
	}
}

// clear removes what stands at a name; a folder stays where one comes.
func (u *unpacker) clear(at string, folder bool) error {
	info, err := u.root.Lstat(at)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case folder && info.IsDir():
		return nil
	}
	delete(u.dirs, at)
	return u.root.RemoveAll(at)
}

func (u *unpacker) file(at string, h *tar.Header, body io.Reader) error {
	if h.Size > u.limits.unpacked-u.written {
		return errTooBig
	}
	f, err := u.root.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.Copy(struct{ io.Writer }{f}, body)
	u.written += n
	if err != nil {
		var ours *fs.PathError
		if errors.As(err, &ours) {
			return err
		}
		return readError(err)
	}
	if err := f.Close(); err != nil {
		return err
	}
	return u.finishOne(at, attributesOf(h))
}

// finishOne gives a file or a folder its owner, mode and times, in this order:
// a change of owner drops bits of the mode.
func (u *unpacker) finishOne(at string, a attributes) error {
	if err := u.chown(at, a); err != nil {
		return err
	}
	mode := fs.FileMode(a.mode).Perm()
	if a.folder && a.mode&0o1000 != 0 {
		mode |= fs.ModeSticky
	}
	if !u.owners {
		// Or we could not read or remove it ourselves.
		if mode |= 0o600; a.folder {
			mode |= 0o100
		}
	}
	if err := u.root.Chmod(at, mode); err != nil {
		return err
	}
	return u.root.Chtimes(at, a.changed, a.changed)
}

func (u *unpacker) chown(at string, a attributes) error {
	if !u.owners {
		return nil
	}
	const most = 1<<32 - 2 // the one after it means "leave it"
	if a.uid < 0 || a.gid < 0 || int64(a.uid) > most || int64(a.gid) > most {
		return errOwner
	}
	if err := u.root.Lchown(at, a.uid, a.gid); err != nil {
		return fmt.Errorf("%w: %d:%d", errOwner, a.uid, a.gid)
	}
	return nil
}

func (u *unpacker) symlink(at string, h *tar.Header) error {
	if h.Linkname == "" || len(h.Linkname) >= maxImagePath || strings.ContainsRune(h.Linkname, 0) {
		return errName
	}
	// Where it leads is nobody's business: nothing here follows it, and inside
	// the sandbox there is nothing else to lead to.
	if err := u.root.Symlink(h.Linkname, at); err != nil {
		return err
	}
	return u.chown(at, attributesOf(h))
}

// linkTarget is the place of a hard link's file, which must be there already.
func (u *unpacker) linkTarget(name string) (string, error) {
	clean, err := cleanName(name)
	if err != nil || clean == "." {
		return "", errLinkTarget
	}
	at, err := u.place(clean)
	if err != nil {
		return "", err
	}
	info, err := u.root.Lstat(at)
	if err != nil || !info.Mode().IsRegular() && info.Mode().Type() != fs.ModeSymlink {
		return "", errLinkTarget
	}
	return at, nil
}

// remove does what a whiteout says to names of the layers below. Names that
// this layer itself made stay, in whatever order they come.
func (u *unpacker) remove(name string) error {
	dir, base := path.Split(name)
	at, err := u.follow(path.Clean("./"+dir), true)
	if err != nil {
		return err
	}
	if base == opaque {
		return u.hide(at)
	}
	hidden := strings.TrimPrefix(base, whiteout)
	switch {
	case strings.HasPrefix(hidden, whiteout):
		return nil // notes of an older file system
	case hidden == "" || hidden == "." || hidden == "..":
		return errName
	}
	if gone := path.Join(at, hidden); !u.layer[gone] {
		delete(u.dirs, gone)
		return u.root.RemoveAll(gone)
	}
	return nil
}

// hide removes what layers below put into a folder.
func (u *unpacker) hide(dir string) error {
	f, err := u.root.Open(dir)
	if err != nil {
		return err
	}
	entries, err := f.ReadDir(-1)
	_ = f.Close()
	if err != nil {
		return err
	}
	for _, e := range entries {
		at := path.Join(dir, e.Name())
		switch {
		case !u.layer[at]:
			delete(u.dirs, at)
			err = u.root.RemoveAll(at)
		case e.IsDir():
			err = u.hide(at)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// place is where an entry goes: the folder above it with its links followed.
func (u *unpacker) place(name string) (string, error) {
	dir, err := u.follow(path.Dir(name), true)
	if err != nil {
		return "", err
	}
	info, err := u.root.Lstat(dir)
	if err != nil {
		return "", err
	}
	if !info.IsDir() {
		return "", errNoFolder
	}
	return path.Join(dir, path.Base(name)), nil
}

// follow resolves every link of a name as it means inside, where / is the root
// and .. of / is /. Folders that are missing are made if asked for.
func (u *unpacker) follow(name string, make bool) (string, error) {
	at, hops := ".", 0
	todo := strings.Split(name, "/")
	for len(todo) > 0 {
		part := todo[0]
		todo = todo[1:]
		if part == "" || part == "." {
			continue
		}
		if part == ".." {
			at = path.Dir(at)
			continue
		}
		next := path.Join(at, part)
		info, err := u.root.Lstat(next)
		switch {
		case errors.Is(err, fs.ErrNotExist) && make:
			if err := u.count(next); err != nil {
				return "", err
			}
			if err := u.root.Mkdir(next, 0o755); err != nil {
				return "", err
			}
			u.dirs[next] = attributes{folder: true, mode: 0o755, changed: time.Unix(0, 0)}
			u.mark(next)
			at = next
		case err != nil && isNotFolder(err):
			return "", errNoFolder
		case err != nil:
			return "", err
		case info.Mode().Type() == fs.ModeSymlink:
			if hops++; hops > maxLinkHops {
				return "", errLoop
			}
			to, err := u.root.Readlink(next)
			if err != nil {
				return "", err
			}
			if path.IsAbs(to) {
				at = "."
			}
			todo = append(strings.Split(to, "/"), todo...)
		default:
			at = next
		}
	}
	return at, nil
}

// checkShell refuses an image in which no tool of the agent would work.
func (u *unpacker) checkShell(image string) error {
	at, err := u.follow(strings.TrimPrefix(agentShell, "/"), false)
	if err == nil {
		var info fs.FileInfo
		if info, err = u.root.Lstat(at); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return nil
		}
	}
	return badImage("image %.200q has no %s, which the agent's shell is; add bash to the image, or use another one", image, agentShell)
}

// finish gives the folders their owners, modes and times, the deepest first.
func (u *unpacker) finish() error {
	names := make([]string, 0, len(u.dirs))
	for at := range u.dirs {
		names = append(names, at)
	}
	slices.Sort(names)
	slices.Reverse(names)
	for _, at := range names {
		info, err := u.root.Lstat(at)
		if errors.Is(err, fs.ErrNotExist) || isNotFolder(err) || err == nil && !info.IsDir() {
			continue // removed again by a later layer
		}
		if err == nil {
			err = u.finishOne(at, u.dirs[at])
		}
		if err != nil {
			return fmt.Errorf("%.200q: %w", at, err)
		}
	}
	return u.root.Chmod(".", 0o755)
}
