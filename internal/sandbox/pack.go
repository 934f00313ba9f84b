package sandbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"github.com/klauspost/compress/zstd"
)

// Sealer seals and opens the blobs of one lineage under its key. The name binds
// a blob to its use: opening it under another one fails.
type Sealer interface {
	Seal(name string, plain []byte) ([]byte, error)
	Open(name string, sealed []byte) ([]byte, error)
}

// Packed names a snapshot in the blob store.
type Packed struct {
	Snapshot string   `json:"snapshot"`
	Recipe   string   `json:"recipe"` // blob that tells how to rebuild the image
	Blobs    []string `json:"blobs"`  // all that it needs, those of earlier snapshots too; without the recipe
	Runtime  string   `json:"runtime"`
	Stored   int64    `json:"stored"` // bytes that this one added
	Image    int64    `json:"image"`  // bytes of the image
}

const (
	pageSize = 4096
	// packPages is how many new pages go into one pack: 8 MiB.
	packPages = 2048
	// digestSize of a page within its lineage, cut from SHA-256. What is found
	// by it is compared by the digests of the whole files at the end.
	digestSize = 16
)

type pageDigest [digestSize]byte

// recipe tells how to rebuild an image from packs.
type recipe struct {
	Version  int      `json:"version"`
	Manifest Manifest `json:"manifest"`
	// Packs are all that are needed; a page is named by its pack's place here
	// and its place in the pack.
	Packs []packRef `json:"packs"`
	// Pages has, for each file in the manifest's order, a reference a page:
	// pack+1 and page as varints, 0 for a page of zeros. The last page of a
	// file may be short and is filled with zeros.
	Pages [][]byte `json:"pages"`
}

type packRef struct {
	Blob  string `json:"blob"`
	Index string `json:"index"` // blob with the digests of its pages
	Pages int    `json:"pages"`
}

type place struct{ pack, page int }

// Pack brings a snapshot's image into the blob store: pages that an earlier
// snapshot of the lineage has are only referred to. It is meant for the
// background. On return everything is durable; a crash before leaves blobs that
// nothing names. The workspace is the manifest's.
func (r *Runtime) Pack(ctx context.Context, m *Manifest, earlier *Packed, key Sealer) (*Packed, error) {
	p, err := r.newPacker(ctx, m, earlier, key)
	if err == nil {
		err = p.image()
	}
	if err != nil {
		return nil, fmt.Errorf("pack snapshot %s: %w", m.ID, err)
	}
	return p.out, nil
}

type packer struct {
	r     *Runtime
	ctx   context.Context
	key   Sealer
	enc   *zstd.Encoder
	known map[pageDigest]place
	rec   recipe
	out   *Packed
	fresh []byte       // pages of the next pack
	marks []pageDigest // theirs
}

func (r *Runtime) newPacker(ctx context.Context, m *Manifest, earlier *Packed, key Sealer) (*packer, error) {
	if r.cfg.Blobs == nil {
		return nil, errors.New("no blob store")
	}
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	p := &packer{
		r: r, ctx: ctx, key: key, enc: enc, known: map[pageDigest]place{}, rec: recipe{Version: 1, Manifest: *m},
		out: &Packed{Snapshot: m.ID, Runtime: m.Runtime, Image: m.Size()},
	}
	if earlier == nil {
		return p, nil
	}
	old, err := r.recipe(ctx, m.Workspace, earlier, key)
	if err != nil {
		return nil, err
	}
	for i, ref := range old.Packs {
		index, err := p.get(ref.Index, "index")
		if err != nil {
			return nil, err
		}
		if len(index) != ref.Pages*digestSize {
			return nil, fmt.Errorf("index %s: %w", ref.Index, ErrDamaged)
		}
		for n := range ref.Pages {
			p.known[pageDigest(index[n*digestSize:])] = place{i, n}
		}
		p.rec.Packs = append(p.rec.Packs, ref)
	}
	return p, nil
}

// image packs all files of the image and then the recipe.
func (p *packer) image() error {
	for _, file := range p.rec.Manifest.Files {
		refs, err := p.file(filepath.Join(p.r.snapshotDir(p.rec.Manifest.ID), file.Name), file.SHA256)
		if err != nil {
			return err
		}
		p.rec.Pages = append(p.rec.Pages, refs)
	}
	if err := p.flush(); err != nil {
		return err
	}
	p.drop()
	body, err := json.Marshal(p.rec)
	if err != nil {
		return err
	}
	if p.out.Recipe, err = p.put("recipe", p.enc.EncodeAll(body, nil)); err != nil {
		return err
	}
	for _, ref := range p.rec.Packs {
		p.out.Blobs = append(p.out.Blobs, ref.Blob, ref.Index)
	}
	return nil
}

var zeroPage [pageSize]byte

// file refers to every page of one file, keeping the new ones, and proves that
// it was the file of the manifest.
func (p *packer) file(path, digest string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	whole := sha256.New()
	var refs []byte
	buf := make([]byte, 64*pageSize)
	for {
		n, err := io.ReadFull(f, buf)
		if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
			return nil, err
		}
		whole.Write(buf[:n])
		for at := 0; at < n; at += pageSize {
			page := buf[at:min(at+pageSize, n)]
			if len(page) < pageSize {
				page = append(bytes.Clone(page), zeroPage[len(page):]...)
			}
			if refs, err = p.page(refs, page); err != nil {
				return nil, err
			}
		}
		if n < len(buf) {
			break
		}
		if p.ctx.Err() != nil {
			return nil, context.Cause(p.ctx)
		}
		runtime.Gosched()
	}
	if fmt.Sprintf("%x", whole.Sum(nil)) != digest {
		return nil, fmt.Errorf("%s: %w", path, ErrDamaged)
	}
	return refs, nil
}

func (p *packer) page(refs, page []byte) ([]byte, error) {
	if bytes.Equal(page, zeroPage[:]) {
		return binary.AppendUvarint(refs, 0), nil
	}
	sum := sha256.Sum256(page)
	d := pageDigest(sum[:digestSize])
	at, ok := p.known[d]
	if !ok {
		at = place{len(p.rec.Packs), len(p.marks)}
		p.known[d] = at
		p.fresh = append(p.fresh, page...)
		p.marks = append(p.marks, d)
		if len(p.marks) == packPages {
			if err := p.flush(); err != nil {
				return nil, err
			}
		}
	}
	refs = binary.AppendUvarint(refs, uint64(at.pack)+1)
	return binary.AppendUvarint(refs, uint64(at.page)), nil
}

// flush stores the new pages as a pack.
func (p *packer) flush() error {
	if len(p.marks) == 0 {
		return nil
	}
	index := make([]byte, 0, len(p.marks)*digestSize)
	for _, d := range p.marks {
		index = append(index, d[:]...)
	}
	ref := packRef{Pages: len(p.marks)}
	var err error
	if ref.Blob, err = p.put("pack", p.enc.EncodeAll(p.fresh, nil)); err != nil {
		return err
	}
	if ref.Index, err = p.put("index", index); err != nil {
		return err
	}
	p.rec.Packs = append(p.rec.Packs, ref)
	p.fresh, p.marks = p.fresh[:0], nil
	return nil
}

// drop takes out the packs of earlier snapshots that no page needs any more, so
// that they can be deleted with those.
func (p *packer) drop() {
	used := make([]bool, len(p.rec.Packs))
	for _, refs := range p.rec.Pages {
		eachRef(refs, func(at place) { used[at.pack] = true })
	}
	to, packs := make([]int, len(used)), []packRef{}
	for i, u := range used {
		if to[i] = len(packs); u {
			packs = append(packs, p.rec.Packs[i])
		}
	}
	for i, refs := range p.rec.Pages {
		var out []byte
		for len(refs) > 0 {
			pack, n := binary.Uvarint(refs)
			refs = refs[n:]
			if pack == 0 {
				out = append(out, 0)
				continue
			}
			page, n := binary.Uvarint(refs)
			refs = refs[n:]
			out = binary.AppendUvarint(out, uint64(to[pack-1])+1)
			out = binary.AppendUvarint(out, page)
		}
		p.rec.Pages[i] = out
	}
	p.rec.Packs = packs
}

func eachRef(refs []byte, do func(place)) {
	for len(refs) > 0 {
		pack, n := binary.Uvarint(refs)
		refs = refs[n:]
		if pack == 0 {
			continue
		}
		page, n := binary.Uvarint(refs)
		refs = refs[n:]
		do(place{int(pack) - 1, int(page)})
	}
}

func (p *packer) put(kind string, plain []byte) (string, error) {
	sealed, err := p.key.Seal(kind, plain)
	if err != nil {
		return "", err
	}
	p.out.Stored += int64(len(sealed))
	name, _, err := p.r.cfg.Blobs.PutReader(p.ctx, p.rec.Manifest.Workspace, bytes.NewReader(sealed))
	return name, err
}

func (p *packer) get(name, kind string) ([]byte, error) {
	return p.r.getSealed(p.ctx, p.rec.Manifest.Workspace, name, kind, p.key)
}

func (r *Runtime) getSealed(ctx context.Context, workspace, name, kind string, key Sealer) ([]byte, error) {
	sealed, err := r.cfg.Blobs.Get(ctx, workspace, name)
	if err != nil {
		return nil, err
	}
	plain, err := key.Open(kind, sealed)
	if err != nil {
		return nil, fmt.Errorf("open %s %s: %w: %w", kind, name, ErrDamaged, err)
	}
	return plain, nil
}

// RemoveBlobs removes blobs of packs that no snapshot needs any more; the caller
// knows that. Those that are gone are no error.
func (r *Runtime) RemoveBlobs(ctx context.Context, workspace string, names []string) error {
	d, ok := r.cfg.Blobs.(interface {
		Delete(ctx context.Context, workspace, name string) error
	})
	if !ok {
		return nil // this blob store keeps everything
	}
	for _, n := range names {
		if err := d.Delete(ctx, workspace, n); err != nil {
			return fmt.Errorf("remove blob of a pack: %w", err)
		}
	}
	return nil
}

// Stores reports whether snapshots can be packed here.
func (r *Runtime) Stores() bool { return r.cfg.Blobs != nil }

// maxRecipe bounds an unpacked recipe; one of a 16 GiB image has some 20 MiB.
const maxRecipe = 256 << 20

func (r *Runtime) recipe(ctx context.Context, workspace string, p *Packed, key Sealer) (*recipe, error) {
	body, err := r.getSealed(ctx, workspace, p.Recipe, "recipe", key)
	if err != nil {
		return nil, err
	}
	dec, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(maxRecipe))
	if err != nil {
		return nil, err
	}
	defer dec.Close()
	plain, err := dec.DecodeAll(body, nil)
	if err != nil {
		return nil, fmt.Errorf("recipe %s: %w: %w", p.Recipe, ErrDamaged, err)
	}
	rec := new(recipe)
	if err := json.Unmarshal(plain, rec); err != nil {
		return nil, fmt.Errorf("recipe %s: %w: %w", p.Recipe, ErrDamaged, err)
	}
	if rec.Manifest.Workspace != workspace || rec.Manifest.ID != p.Snapshot || len(rec.Pages) != len(rec.Manifest.Files) {
		return nil, fmt.Errorf("recipe %s: %w", p.Recipe, ErrDamaged)
	}
	return rec, nil
}

// Unpack rebuilds a packed snapshot's image in this folder and proves it
// against its manifest. Where the image lies here already, it is only read.
func (r *Runtime) Unpack(ctx context.Context, workspace string, p *Packed, key Sealer) (*Manifest, error) {
	if m, err := r.ReadSnapshot(p.Snapshot); err == nil && m.Workspace == workspace {
		return m, nil
	}
	ctx, end, err := r.begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("unpack snapshot %s: %w", p.Snapshot, err)
	}
	defer end()
	// Forks of one session ask for the same image at the same moment.
	done, err := r.unpackAlone(ctx, p.Snapshot)
	if err != nil {
		return nil, fmt.Errorf("unpack snapshot %s: %w", p.Snapshot, err)
	}
	defer done()
	if m, err := r.ReadSnapshot(p.Snapshot); err == nil && m.Workspace == workspace {
		return m, nil
	}
	m, err := r.unpack(ctx, workspace, p, key)
	if err != nil {
		return nil, fmt.Errorf("unpack snapshot %s: %w", p.Snapshot, err)
	}
	return m, nil
}

// unpackAlone waits until nobody else unpacks a snapshot.
func (r *Runtime) unpackAlone(ctx context.Context, snapshot string) (done func(), err error) {
	mine := make(chan struct{})
	for {
		r.mu.Lock()
		other := r.unpacking[snapshot]
		if other == nil {
			if r.unpacking == nil {
				r.unpacking = map[string]chan struct{}{}
			}
			r.unpacking[snapshot] = mine
		}
		r.mu.Unlock()
		if other == nil {
			return func() {
				r.mu.Lock()
				delete(r.unpacking, snapshot)
				r.mu.Unlock()
				close(mine)
			}, nil
		}
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// unpack makes an image in a temporary folder, which the next Open removes after
// a crash, and gives it its name when it is proved and durable.
func (r *Runtime) unpack(ctx context.Context, workspace string, p *Packed, key Sealer) (*Manifest, error) {
	if r.cfg.Blobs == nil || !snapshotName.MatchString(p.Snapshot) {
		return nil, ErrNotFound
	}
	dir := r.snapshotDir(tempPrefix + randomID(""))
	defer os.RemoveAll(dir)
	rec, err := r.rebuilt(ctx, workspace, p, key, dir)
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(rec.Manifest)
	if err != nil {
		return nil, err
	}
	if err := writeDurable(filepath.Join(dir, manifestFile), b); err != nil {
		return nil, err
	}
	if err := os.Rename(dir, r.snapshotDir(p.Snapshot)); err != nil {
		return nil, err
	}
	return &rec.Manifest, syncDir(filepath.Dir(dir))
}

// Prove rebuilds a packed snapshot's image beside those of this folder, compares
// it with its manifest and removes it again: the packs alone are enough. What is
// not the image is ErrDamaged, what is not there the blob store's error.
func (r *Runtime) Prove(ctx context.Context, workspace string, p *Packed, key Sealer) error {
	ctx, end, err := r.begin(ctx)
	if err == nil {
		defer end()
		dir := r.snapshotDir(tempPrefix + randomID(""))
		defer os.RemoveAll(dir)
		_, err = r.rebuilt(ctx, workspace, p, key, dir)
	}
	if err != nil {
		return fmt.Errorf("prove the pack of snapshot %s: %w", p.Snapshot, err)
	}
	return nil
}

// rebuilt makes a packed snapshot's image in a new folder, durable and proved.
func (r *Runtime) rebuilt(ctx context.Context, workspace string, p *Packed, key Sealer, dir string) (*recipe, error) {
	rec, err := r.recipe(ctx, workspace, p, key)
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	if err := r.rebuild(ctx, workspace, rec, dir, key); err != nil {
		return nil, err
	}
	if err := syncTree(dir); err != nil {
		return nil, err
	}
	return rec, rec.Manifest.verify(dir)
}

// rebuild writes the files of an image, a pack at a time, each read once.
func (r *Runtime) rebuild(ctx context.Context, workspace string, rec *recipe, dir string, key Sealer) error {
	type target struct{ file, page, from int }
	wanted := make([][]target, len(rec.Packs))
	files := make([]*os.File, len(rec.Pages))
	for i, info := range rec.Manifest.Files {
		if info.Name != filepath.Base(info.Name) || info.Name == manifestFile {
			return fmt.Errorf("file %.80q: %w", info.Name, ErrDamaged)
		}
		f, err := os.OpenFile(filepath.Join(dir, info.Name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := f.Truncate(info.Size); err != nil {
			return err
		}
		files[i] = f
		page := 0
		for refs := rec.Pages[i]; len(refs) > 0; page++ {
			pack, n := binary.Uvarint(refs)
			if n <= 0 || pack > uint64(len(rec.Packs)) {
				return fmt.Errorf("reference to pack %d: %w", pack, ErrDamaged)
			}
			refs = refs[n:]
			if pack == 0 {
				continue
			}
			from, n := binary.Uvarint(refs)
			if n <= 0 || from >= uint64(rec.Packs[pack-1].Pages) {
				return fmt.Errorf("reference to page %d: %w", from, ErrDamaged)
			}
			refs = refs[n:]
			wanted[pack-1] = append(wanted[pack-1], target{i, page, int(from)})
		}
	}
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*packPages*pageSize))
	if err != nil {
		return err
	}
	defer dec.Close()
	var pages []byte
	for i, targets := range wanted {
		body, err := r.getSealed(ctx, workspace, rec.Packs[i].Blob, "pack", key)
		if err != nil {
			return err
		}
		if pages, err = dec.DecodeAll(body, pages[:0]); err != nil || len(pages) != rec.Packs[i].Pages*pageSize {
			return fmt.Errorf("pack %s: %w", rec.Packs[i].Blob, ErrDamaged)
		}
		for _, t := range targets {
			at := int64(t.page) * pageSize
			n := min(pageSize, rec.Manifest.Files[t.file].Size-at)
			if n <= 0 {
				return fmt.Errorf("page beyond the end: %w", ErrDamaged)
			}
			if _, err := files[t.file].WriteAt(pages[t.from*pageSize:t.from*pageSize+int(n)], at); err != nil {
				return err
			}
		}
	}
	return nil
}
