package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// ErrImage: an image cannot be used as a root file system. The text says why
// and what to do; it is for the one who named the image.
var ErrImage = errors.New("image cannot be used")

// ErrRegistry is an ErrImage that may pass by itself: the registry gave no
// answer that says anything about the image.
var ErrRegistry = errors.New("registry is out of reach")

// imageError is an ErrImage whose text stands for itself.
type imageError struct {
	text string
	err  error // cause, may be nil
}

func (e *imageError) Error() string { return e.text }

func (e *imageError) Unwrap() []error {
	if e.err == nil {
		return []error{ErrImage}
	}
	return []error{ErrImage, e.err}
}

func badImage(format string, args ...any) error {
	return &imageError{text: fmt.Sprintf(format, args...)}
}

// imageLimits bound what a stranger's image may cost the node.
type imageLimits struct {
	layers   int           // of an image
	entries  int           // of all its layers together, folders that they imply included
	names    int64         // bytes of their names
	unpacked int64         // bytes of all its layers, archives' own included
	packed   int64         // bytes of all its layers as they are fetched
	config   int64         // bytes of its configuration
	env      int           // bytes of its variables
	time     time.Duration // to fetch and unpack it
}

// defaultImageLimits hold the images that people make by hand many times over:
// the largest in common use have some 30 layers, 300,000 files, 12 GiB.
var defaultImageLimits = imageLimits{
	layers: 128, entries: 1_000_000, names: 256 << 20, unpacked: 32 << 30, packed: 16 << 30, config: 4 << 20, env: 64 << 10, time: 20 * time.Minute,
}

const (
	// defaultRootBytes is Config.RootBytes.
	defaultRootBytes = 64 << 30
	// tagTime is how long a tag's digest is taken for granted.
	tagTime = time.Minute
	// rootGrace is how long an image that was asked for is kept for its asker,
	// who has not yet started a sandbox on it.
	rootGrace = time.Hour
	// maxUnpacking is how many images are fetched and unpacked at once, and
	// maxUnpackingOne how many of them for one workspace: whose registry is slow, or
	// means to be, holds up no other tenant.
	maxUnpacking    = 4
	maxUnpackingOne = 2
	// mappedOwners ends the digest of an image whose files all belong to the
	// user that runs this process, for it may not give them to others.
	mappedOwners = "-mapped"
)

// images is what a Runtime knows of images.
type images struct {
	limits imageLimits // zero: defaultImageLimits

	publish sync.Mutex // over the moment in which an image comes or goes

	mu   sync.Mutex
	work map[imageAsk]*imageWork
	tags map[string]imageTag // by name
	all  *slots
	each map[string]*slots // by workspace
}

// imageAsk is what is asked for, by whom.
type imageAsk struct{ workspace, name string }

// slots are places for fetches at one time.
type slots struct {
	places chan struct{}
	users  int // that hold one or wait; guarded by images.mu
}

// imageWork is one fetch that all who ask for the name wait for.
type imageWork struct {
	done chan struct{}
	root Root
	err  error
}

// imageTag is what a name stood for at a time.
type imageTag struct {
	digest string
	at     time.Time
}

// unpackedImage is image.json beside an unpacked image.
type unpackedImage struct {
	Version int       `json:"version"`
	Image   string    `json:"image"`  // its name with its digest, to fetch it again
	Digest  string    `json:"digest"` // of the root file system
	Env     []string  `json:"env,omitempty"`
	Entries int       `json:"entries"`
	Bytes   int64     `json:"bytes"`
	Skipped int       `json:"skipped,omitzero"` // devices, pipes, sockets
	At      time.Time `json:"at"`
}

const (
	imageFile   = "image.json"
	imagePrefix = "oci-" // of the names of images' folders
)

var rootDigest = regexp.MustCompile(`^sha256:([0-9a-f]{64})(` + mappedOwners + `)?$`)

// imageDir is where an image with this digest of its root lies.
func (r *Runtime) imageDir(digest string) string {
	return filepath.Join(r.cfg.Dir, "roots", imagePrefix+strings.TrimPrefix(digest, "sha256:"))
}

// Image returns the root file system of an OCI image, fetched and unpacked where
// it does not lie here yet. The name has an optional registry, tag and digest,
// or is "layout:" with a folder below Config.Layouts and an optional tag. A tag
// is asked for again after a minute; while its registry cannot be reached, what
// it stood for last is used.
//
// Callers of one workspace that ask for the same image share one fetch, which goes
// on when one of them leaves. Errors about the image unwrap to ErrImage.
func (r *Runtime) Image(ctx context.Context, workspace, name string) (Root, error) {
	w, err := r.imageWork(imageAsk{workspace, name})
	if err != nil {
		return Root{}, err
	}
	select {
	case <-w.done:
		return w.root, w.err
	case <-ctx.Done():
		return Root{}, fmt.Errorf("wait for image %.200q, which is still being fetched: %w", name, context.Cause(ctx))
	}
}

func (r *Runtime) imageWork(ask imageAsk) (*imageWork, error) {
	r.images.mu.Lock()
	defer r.images.mu.Unlock()
	name := ask.name
	if w := r.images.work[ask]; w != nil {
		return w, nil
	}
	if !r.add() {
		return nil, fmt.Errorf("fetch image %.200q: %w", name, errClosed)
	}
	if r.images.work == nil {
		r.images.work, r.images.tags, r.images.each = map[imageAsk]*imageWork{}, map[string]imageTag{}, map[string]*slots{}
		r.images.all = &slots{places: make(chan struct{}, maxUnpacking)}
	}
	w := &imageWork{done: make(chan struct{})}
	r.images.work[ask] = w
	go func() {
		defer r.wait.Done()
		ctx, cancel := context.WithTimeoutCause(r.ctx, r.imageLimits().time,
			badImage("image %.200q was not there within %v; try again, or use a smaller one", name, r.imageLimits().time))
		defer cancel()
		w.root, w.err = r.fetchImage(ctx, ask)
		r.images.mu.Lock()
		delete(r.images.work, ask)
		r.images.mu.Unlock()
		close(w.done)
	}()
	return w, nil
}

func (r *Runtime) imageLimits() imageLimits {
	if r.images.limits.layers == 0 {
		return defaultImageLimits
	}
	return r.images.limits
}

// fetchImage makes sure that an image is here, and tells where.
func (r *Runtime) fetchImage(ctx context.Context, ask imageAsk) (Root, error) {
	name := ask.name
	ref, err := r.parseImage(name)
	if err != nil {
		return Root{}, err
	}
	r.images.mu.Lock()
	tag, known := r.images.tags[name]
	r.images.mu.Unlock()
	if ref.digest != "" {
		tag, known = imageTag{digest: ownersDigest(ref.digest), at: time.Now()}, true
	}
	if known && time.Since(tag.at) < tagTime {
		if root, err := r.unpackedRoot(tag.digest); err == nil {
			return root, nil
		}
	}
	found, err := r.resolveImage(ctx, ref)
	if err != nil {
		if root, rerr := r.unpackedRoot(tag.digest); known && rerr == nil && errors.Is(err, ErrRegistry) {
			r.log.Warn("cannot ask for an image's tag; uses what it stood for last", "image", name, "digest", tag.digest, "err", err)
			return root, nil
		}
		return Root{}, err
	}
	root, err := r.unpackNew(ctx, ask.workspace, found)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return Root{}, err
	}
	r.images.mu.Lock()
	r.images.tags[name] = imageTag{digest: root.Digest, at: time.Now()}
	r.images.mu.Unlock()
	return root, nil
}

// unpackNew unpacks an image that is not here yet. Two registries may be asked for
// the same image at the same time: none of them can hold up the other.
func (r *Runtime) unpackNew(ctx context.Context, workspace string, found *foundImage) (Root, error) {
	digest := ownersDigest("sha256:" + found.digest)
	leave, err := r.mayUnpack(ctx, workspace)
	if err != nil {
		return Root{}, err
	}
	defer leave()
	if root, err := r.unpackedRoot(digest); err == nil {
		return root, nil
	}
	began := time.Now()
	meta, err := r.unpackImage(ctx, found, digest)
	if err != nil {
		return Root{}, err
	}
	r.log.Info("unpacked image", "image", meta.Image, "entries", meta.Entries, "bytes", meta.Bytes, "skipped", meta.Skipped, "elapsed", time.Since(began))
	return r.unpackedRoot(digest)
}

// mayUnpack waits for a place among the workspace's own, and then among all.
func (r *Runtime) mayUnpack(ctx context.Context, workspace string) (leave func(), err error) {
	im := &r.images
	im.mu.Lock()
	own := im.each[workspace]
	if own == nil {
		own = &slots{places: make(chan struct{}, maxUnpackingOne)}
		im.each[workspace] = own
	}
	own.users++
	im.mu.Unlock()
	held := 0
	leave = func() {
		for _, s := range []*slots{own, im.all}[:held] {
			<-s.places
		}
		im.mu.Lock()
		defer im.mu.Unlock()
		if own.users--; own.users == 0 {
			delete(im.each, workspace)
		}
	}
	for _, s := range []*slots{own, im.all} {
		select {
		case s.places <- struct{}{}:
			held++
		case <-ctx.Done():
			leave()
			return nil, context.Cause(ctx)
		}
	}
	return leave, nil
}

// unpackedRoot returns an image that lies here and notes its use. fs.ErrNotExist.
func (r *Runtime) unpackedRoot(digest string) (Root, error) {
	if !rootDigest.MatchString(digest) {
		return Root{}, fs.ErrNotExist
	}
	meta, err := readImage(r.imageDir(digest))
	if err != nil {
		return Root{}, err
	}
	now := time.Now()
	_ = os.Chtimes(filepath.Join(r.imageDir(digest), imageFile), now, now) // only what is evicted first depends on it
	return Root{Dir: filepath.Join(r.imageDir(digest), "root"), Digest: digest, Image: meta.Image, Env: meta.Env}, nil
}

func readImage(dir string) (*unpackedImage, error) {
	b, err := os.ReadFile(filepath.Join(dir, imageFile))
	if err != nil {
		return nil, err
	}
	meta := new(unpackedImage)
	if err := json.Unmarshal(b, meta); err != nil {
		return nil, fmt.Errorf("read %s: %w", filepath.Join(dir, imageFile), err)
	}
	return meta, nil
}

// ownersDigest is the digest of an image's root as this process unpacks it.
func ownersDigest(image string) string {
	if keepsOwners() {
		return image
	}
	return image + mappedOwners
}

// keepsOwners tells whether this process may give files to any user: root, and
// not of a user namespace that knows itself alone.
var keepsOwners = sync.OnceValue(func() bool {
	if os.Geteuid() != 0 {
		return false
	}
	b, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return runtime.GOOS != "linux"
	}
	var inside, outside, n int64
	_, err = fmt.Sscan(string(b), &inside, &outside, &n)
	return err == nil && inside == 0 && n >= 1<<16
})

// makeRoom removes images that nobody uses, those not asked for the longest
// first, until need more bytes fit. What a sandbox or a snapshot in this folder
// is on stays, and what was asked for a moment ago.
func (r *Runtime) makeRoom(need int64) error {
	limit := r.cfg.RootBytes
	if limit == 0 {
		limit = defaultRootBytes
	}
	entries, err := os.ReadDir(filepath.Join(r.cfg.Dir, "roots"))
	if err != nil {
		return err
	}
	type root struct {
		dir  string
		meta *unpackedImage
		used time.Time
	}
	var all []root
	total := need
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			continue // it comes or goes
		}
		dir := filepath.Join(r.cfg.Dir, "roots", e.Name())
		meta, err := readImage(dir)
		if err != nil {
			continue // the host's, or one being made
		}
		info, err := os.Stat(filepath.Join(dir, imageFile))
		if err != nil {
			continue // it went meanwhile
		}
		all = append(all, root{dir, meta, info.ModTime()})
		total += meta.Bytes
	}
	if total <= limit {
		return nil
	}
	used, err := r.rootsInUse()
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b root) int { return a.used.Compare(b.used) })
	for _, o := range all {
		if total <= limit {
			break
		}
		if used[o.meta.Digest] || time.Since(o.used) < rootGrace {
			continue
		}
		gone, err := r.removeImage(o.dir, o.used)
		if err != nil {
			return err
		}
		if !gone {
			continue
		}
		r.log.Info("removed image", "image", o.meta.Image, "bytes", o.meta.Bytes)
		total -= o.meta.Bytes
	}
	if total > limit {
		return badImage("the node's folder of images is full (%d MiB) and all of them are in use; ask its operator for more room", limit>>20)
	}
	return nil
}

// removeImage removes an image that was last asked for at used. false: it was asked
// for meanwhile, or somebody else makes room too.
func (r *Runtime) removeImage(dir string, used time.Time) (bool, error) {
	// It is out of the way at once, or a fetch of it could put it back while it
	// is being removed. What a crash leaves is removed by the next Open.
	gone := filepath.Join(filepath.Dir(dir), tempPrefix+randomID("gone-"))
	r.images.publish.Lock()
	info, err := os.Stat(filepath.Join(dir, imageFile))
	asked := err == nil && !info.ModTime().Equal(used)
	if err == nil && !asked {
		err = os.Rename(dir, gone)
	}
	r.images.publish.Unlock()
	if asked || errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		err = os.RemoveAll(gone)
	}
	return err == nil, err
}

// rootsInUse are digests that a sandbox or a snapshot in this folder needs.
func (r *Runtime) rootsInUse() (map[string]bool, error) {
	used := map[string]bool{}
	r.mu.Lock()
	for _, s := range r.sandboxes {
		used[s.snapshotState().Root.Digest] = true
	}
	r.mu.Unlock()
	images, err := r.manifests()
	if err != nil {
		return nil, err
	}
	for _, m := range images {
		used[m.Root.Digest] = true
	}
	return used, nil
}
