package sandbox

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// layoutPrefix begins the name of an image in a folder.
const layoutPrefix = "layout:"

// maxNesting of indexes in indexes; images in use have one or two.
const maxNesting = 4

// fetchTries of a layer whose bytes end too early.
const fetchTries = 3

// imageRef is a name that was read.
type imageRef struct {
	name   string
	remote name.Reference // nil: a layout
	folder string
	tag    string // of a layout
	digest string // "sha256:…" where the name has one
}

// foundImage is an image for this machine, proved to be the one that the name's
// digest or index stands for.
type foundImage struct {
	ref    *imageRef
	image  v1.Image
	digest string // hex
	pinned string // name with digest
}

// parseImage reads a name and refuses what this node does not offer.
func (r *Runtime) parseImage(image string) (*imageRef, error) {
	if rest, ok := strings.CutPrefix(image, layoutPrefix); ok {
		return r.parseLayout(image, rest)
	}
	ref, err := name.ParseReference(image, name.WeakValidation)
	if err != nil {
		return nil, badImage("%.200q is no name of an image; use REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:…", image)
	}
	if r.cfg.Transport == nil {
		return nil, badImage("image %s: this node fetches no images from registries; use the image \"host\", or ask its operator to allow them", image)
	}
	out := &imageRef{name: image, remote: ref}
	if d, ok := ref.(name.Digest); ok {
		out.digest = d.DigestStr()
	}
	return out, nil
}

func (r *Runtime) parseLayout(image, rest string) (*imageRef, error) {
	if r.cfg.Layouts == "" {
		return nil, badImage("image %.200q: this node offers no folder of images; name an image of a registry, or ask its operator for one", image)
	}
	out := &imageRef{name: image}
	if folder, digest, ok := strings.Cut(rest, "@"); ok {
		if !rootDigest.MatchString(digest) || strings.HasSuffix(digest, mappedOwners) {
			return nil, badImage("image %.200q: what follows @ is no sha256 digest", image)
		}
		rest, out.digest = folder, digest
	}
	if i := strings.LastIndexByte(rest, ':'); i >= 0 && !strings.Contains(rest[i:], "/") {
		rest, out.tag = rest[:i], rest[i+1:]
	}
	base, err := filepath.EvalSymlinks(r.cfg.Layouts)
	if err != nil {
		return nil, fmt.Errorf("open the folder of images: %w", err)
	}
	if !filepath.IsAbs(rest) {
		rest = filepath.Join(base, rest)
	}
	none := badImage("image %.200q: no such image in this node's folder of images; ask its operator which there are", image)
	dir, err := filepath.EvalSymlinks(rest)
	if err != nil {
		return nil, none
	}
	// One text for what lies elsewhere and for what is not there: a tenant's
	// name must tell nothing about the machine's other folders.
	if in, err := filepath.Rel(base, dir); err != nil || in == ".." || strings.HasPrefix(in, "../") {
		return nil, none
	}
	out.folder = dir
	return out, nil
}

// resolveImage finds the image for this machine. What it returns was fetched
// by its digest or hashes to it; layers are not fetched yet.
func (r *Runtime) resolveImage(ctx context.Context, ref *imageRef) (*foundImage, error) {
	var found *foundImage
	var err error
	if ref.remote == nil {
		found, err = findLayout(ref, r.imageLimits().config)
	} else {
		found, err = r.findRemote(ctx, ref)
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return nil, explainImage(ref, err)
	}
	return found, nil
}

func (r *Runtime) findRemote(ctx context.Context, ref *imageRef) (*foundImage, error) {
	options := []remote.Option{remote.WithContext(ctx), remote.WithTransport(plainOnlyHere{r.cfg.Transport}), remote.WithUserAgent("planaria"),
		remote.WithRetryBackoff(remote.Backoff{Duration: 200 * time.Millisecond, Factor: 3, Jitter: 0.1, Steps: 3})} // a session waits
	if r.cfg.Keychain != nil {
		options = append(options, remote.WithAuthFromKeychain(r.cfg.Keychain))
	}
	desc, err := remote.Get(ref.remote, options...)
	if err != nil {
		return nil, err
	}
	pinned := func(h v1.Hash) string { return ref.remote.Context().Name() + "@" + h.String() }
	if !desc.MediaType.IsIndex() {
		image, err := desc.Image()
		if err != nil {
			return nil, err
		}
		return newSearch(ref, r.imageLimits().config).single(image, desc.Digest, pinned)
	}
	index, err := desc.ImageIndex()
	if err != nil {
		return nil, err
	}
	return newSearch(ref, r.imageLimits().config).index(index, nil, pinned)
}

func findLayout(ref *imageRef, config int64) (*foundImage, error) {
	index, err := layout.ImageIndexFromPath(ref.folder)
	if err != nil {
		return nil, badImage("image %.200q: the folder holds no OCI layout: it needs the files oci-layout and index.json", ref.name)
	}
	pinned := func(h v1.Hash) string { return layoutPrefix + ref.folder + "@" + h.String() }
	if ref.digest != "" {
		h, err := v1.NewHash(ref.digest)
		if err != nil {
			return nil, err
		}
		return newSearch(ref, config).digest(index, h, pinned, 0)
	}
	var only func(v1.Descriptor) bool
	if ref.tag != "" {
		only = func(d v1.Descriptor) bool { return d.Annotations["org.opencontainers.image.ref.name"] == ref.tag }
	}
	return newSearch(ref, config).index(index, only, pinned)
}

// search goes through indexes for the image of this machine's platform.
type search struct {
	ref    *imageRef
	config int64    // limit
	others []string // platforms that were seen
	any    bool     // something has the tag
}

func newSearch(ref *imageRef, config int64) *search { return &search{ref: ref, config: config} }

func (s *search) index(index v1.ImageIndex, only func(v1.Descriptor) bool, pinned func(v1.Hash) string) (*foundImage, error) {
	found, err := s.walk(index, only, pinned, 0)
	switch {
	case err != nil || found != nil:
		return found, err
	case !s.any && s.ref.tag != "":
		return nil, badImage("image %.200q: the folder has no image with the tag %.100q", s.ref.name, s.ref.tag)
	}
	return nil, s.foreign()
}

func (s *search) foreign() error {
	slices.Sort(s.others)
	has := "it has none at all"
	if len(s.others) > 0 {
		has = "it has " + plain(strings.Join(slices.Compact(s.others), ", "))
	}
	return badImage("image %.200q has no variant for linux/%s (%s); name another image or tag", s.ref.name, runtime.GOARCH, has)
}

func (s *search) walk(index v1.ImageIndex, only func(v1.Descriptor) bool, pinned func(v1.Hash) string, depth int) (*foundImage, error) {
	if depth >= maxNesting {
		return nil, badImage("image %.200q: its indexes are nested more than %d deep", s.ref.name, maxNesting)
	}
	list, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	for _, d := range list.Manifests {
		if only != nil && !only(d) {
			continue
		}
		s.any = true
		if d.Platform != nil && !ours(d.Platform.OS, d.Platform.Architecture) {
			s.others = append(s.others, d.Platform.OS+"/"+d.Platform.Architecture)
			continue
		}
		switch {
		case d.MediaType.IsIndex():
			child, err := index.ImageIndex(d.Digest)
			if err != nil {
				return nil, err
			}
			if found, err := s.walk(child, nil, pinned, depth+1); found != nil || err != nil {
				return found, err
			}
		case d.MediaType.IsImage():
			image, err := index.Image(d.Digest)
			if err != nil {
				return nil, err
			}
			found, err := s.single(image, d.Digest, pinned)
			if err != nil && d.Platform == nil && errors.As(err, new(foreignImage)) {
				continue
			}
			return found, err
		}
	}
	return nil, nil
}

// digest finds the image with this digest, however deep.
func (s *search) digest(index v1.ImageIndex, want v1.Hash, pinned func(v1.Hash) string, depth int) (*foundImage, error) {
	list, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	for _, d := range list.Manifests {
		switch {
		case d.Digest == want && d.MediaType.IsImage():
			image, err := index.Image(d.Digest)
			if err != nil {
				return nil, err
			}
			return s.single(image, d.Digest, pinned)
		case d.MediaType.IsIndex() && depth < maxNesting:
			child, err := index.ImageIndex(d.Digest)
			if err != nil {
				return nil, err
			}
			if found, err := s.digest(child, want, pinned, depth+1); err == nil {
				return found, nil
			}
		}
	}
	return nil, badImage("image %.200q: the folder has no image with this digest", s.ref.name)
}

// foreignImage is an image whose own configuration names another platform.
type foreignImage struct{ error }

func (f foreignImage) Unwrap() error { return f.error }

func ours(system, arch string) bool { return system == "linux" && arch == runtime.GOARCH }

// single proves one image: its manifest has the digest by which it was asked
// for, its configuration the one that the manifest names, its platform is ours.
func (s *search) single(image v1.Image, want v1.Hash, pinned func(v1.Hash) string) (*foundImage, error) {
	raw, err := image.RawManifest()
	if err != nil {
		return nil, err
	}
	if want.Algorithm != "sha256" || hexSum(raw) != want.Hex {
		return nil, badImage("image %.200q: its manifest does not have the digest %s; fetch or build it again", s.ref.name, want)
	}
	manifest, err := image.Manifest()
	if err != nil {
		return nil, err
	}
	if n := manifest.Config.Size; n < 0 || n > s.config {
		return nil, badImage("image %.200q: its configuration has %d bytes; at most %d are allowed", s.ref.name, n, s.config)
	}
	if _, err := readConfig(s.ref.name, image, manifest); err != nil {
		var other foreignImage
		if errors.As(err, &other) {
			s.others = append(s.others, other.Error())
			return nil, foreignImage{s.foreign()}
		}
		return nil, err
	}
	return &foundImage{ref: s.ref, image: image, digest: want.Hex, pinned: pinned(want)}, nil
}

// imageConfig is what is used of an image's configuration. Its user, working
// directory, entry point and volumes are not: the agent is root and works in
// /workspace.
type imageConfig struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Config       struct {
		Env []string `json:"Env"`
	} `json:"config"`
}

func readConfig(image string, from v1.Image, manifest *v1.Manifest) (*imageConfig, error) {
	raw, err := from.RawConfigFile()
	if err != nil {
		return nil, err
	}
	if manifest.Config.Digest.Algorithm != "sha256" || hexSum(raw) != manifest.Config.Digest.Hex {
		return nil, badImage("image %.200q: its configuration does not have the digest that its manifest names", image)
	}
	c := new(imageConfig)
	if err := json.Unmarshal(raw, c); err != nil {
		return nil, badImage("image %.200q: its configuration is not the JSON of an image's", image)
	}
	if !ours(c.OS, c.Architecture) {
		return nil, foreignImage{errors.New(cmp.Or(c.OS, "unknown") + "/" + cmp.Or(c.Architecture, "unknown"))}
	}
	return c, nil
}

func hexSum(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// layerTypes are kinds of layers that are unpacked.
var layerTypes = []types.MediaType{types.DockerLayer, types.DockerUncompressedLayer, types.OCILayer, types.OCILayerZStd, types.OCIUncompressedLayer}

// checkLayers refuses an image before anything of it is fetched.
func checkLayers(image string, layers []v1.Descriptor, limits imageLimits) error {
	if len(layers) > limits.layers {
		return badImage("image %.200q has %d layers; at most %d are allowed", image, len(layers), limits.layers)
	}
	var total int64
	for i, d := range layers {
		switch {
		case !slices.Contains(layerTypes, d.MediaType) || len(d.URLs) > 0:
			return badImage("image %.200q: layer %d (%.80q) is not kept in the registry or is no file archive; build the image without it", image, i+1, string(d.MediaType))
		case d.Size < 0 || d.Digest.Algorithm != "sha256":
			return badImage("image %.200q: layer %d has no size or no sha256 digest", image, i+1)
		}
		if total += d.Size; total > limits.packed || total < 0 {
			return badImage("image %.200q has layers of more than %d MiB in all; use a smaller one", image, limits.packed>>20)
		}
	}
	return nil
}

// fetchLayer writes a layer's bytes as they are kept, and proves their digest.
// Bytes that end too early are asked for again.
func fetchLayer(ctx context.Context, image string, layer v1.Layer, want v1.Descriptor, path string) error {
	var err error
	for range fetchTries {
		err = fetchLayerOnce(ctx, layer, want, path)
		if err == nil || ctx.Err() != nil || errors.Is(err, errLayerDigest) {
			break
		}
	}
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, errLayerDigest):
		return badImage("image %.200q: layer %s does not have the digest and size that the manifest names; fetch or build it again", image, want.Digest)
	}
	return err
}

var errLayerDigest = errors.New("layer has another digest")

func fetchLayerOnce(ctx context.Context, layer v1.Layer, want v1.Descriptor, path string) error {
	in, err := layer.Compressed()
	if err != nil {
		return err
	}
	defer in.Close()
	defer context.AfterFunc(ctx, func() { _ = in.Close() })()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, h), io.LimitReader(in, want.Size+1))
	switch {
	case n > want.Size || n == want.Size && hex.EncodeToString(h.Sum(nil)) != want.Digest.Hex:
		return errLayerDigest
	case err != nil:
		return err
	case n < want.Size:
		return io.ErrUnexpectedEOF
	}
	return f.Close()
}

// plainOnlyHere refuses to speak without TLS, redirects and token services
// included, except to this machine.
type plainOnlyHere struct{ next http.RoundTripper }

var errPlain = errors.New("registries are spoken to with TLS only, except on this machine")

func (p plainOnlyHere) RoundTrip(req *http.Request) (*http.Response, error) {
	if host := req.URL.Hostname(); req.URL.Scheme != "https" && host != "localhost" {
		if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
			return nil, errPlain
		}
	}
	return p.next.RoundTrip(req)
}

// explainImage turns what a registry or the network said into what is wrong and
// what to do.
func explainImage(ref *imageRef, err error) error {
	var said *imageError
	var answer *transport.Error
	where := "the folder"
	if ref.remote != nil {
		where = "registry " + ref.remote.Context().RegistryStr()
	}
	text := func(format string, args ...any) error {
		return &imageError{text: fmt.Sprintf("image %.200q: ", ref.name) + fmt.Sprintf(format, args...), err: err}
	}
	switch {
	case errors.As(err, &said):
		return err
	case errors.Is(err, remote.ErrSchema1):
		return text("%s has it in a format that is no longer in use; push it again with a current tool", where)
	case errors.As(err, &answer):
		switch answer.StatusCode {
		case http.StatusNotFound:
			return text("%s has no such image or tag; check its name", where)
		case http.StatusUnauthorized, http.StatusForbidden:
			return text("%s refuses it: it is private or does not exist; check its name, or ask the node's operator for credentials of the registry", where)
		case http.StatusTooManyRequests:
			err = fmt.Errorf("%w: %w", ErrRegistry, err)
			return text("%s asks for fewer requests; try again later, or use a mirror", where)
		}
		err = fmt.Errorf("%w: %w", ErrRegistry, err)
		return text("%s answered with status %d; try again later", where, answer.StatusCode)
	case ref.remote == nil:
		return text("the folder cannot be read: %s", plain(err.Error()))
	case errors.Is(err, errPlain):
		return text("%s: %v; put it behind TLS", where, errPlain)
	}
	why := plain(err.Error())
	err = fmt.Errorf("%w: %w", ErrRegistry, err)
	return text("%s cannot be reached (%s); check the name and the node's network, then try again", where, why)
}

// plain shortens what others wrote and takes control characters out of it.
func plain(s string) string {
	s = strings.Map(func(c rune) rune {
		if unicode.IsControl(c) {
			return ' '
		}
		return c
	}, s)
	if len(s) > 300 {
		s = string(bytes.ToValidUTF8([]byte(s[:300]), nil)) + "…"
	}
	return s
}
