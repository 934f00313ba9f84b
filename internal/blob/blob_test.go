package blob_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/blob"
)

func open(t *testing.T, dir string) *blob.Folder {
	t.Helper()
	f, err := blob.Open(dir)
	check(t, err)
	t.Cleanup(func() { check(t, f.Close()) })
	return f
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func nameOf(data []byte) string {
	d := sha256.Sum256(data)
	return hex.EncodeToString(d[:])
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	check(t, filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			rel, _ := filepath.Rel(dir, p)
			out = append(out, rel)
		}
		return err
	}))
	return out
}

func TestPutGet(t *testing.T) {
	ctx, dir := t.Context(), filepath.Join(t.TempDir(), "new", "blobs")
	f := open(t, dir)
	for _, data := range [][]byte{nil, []byte("a"), bytes.Repeat([]byte("xyz"), 1<<20)} {
		name, err := f.Put(ctx, "default", data)
		check(t, err)
		if want := nameOf(data); name != want {
			t.Errorf("name = %s, want %s", name, want)
		}
		again, size, err := f.PutReader(ctx, "default", iotest.HalfReader(bytes.NewReader(data)))
		if err != nil || again != name || size != int64(len(data)) {
			t.Errorf("PutReader = %s, %d, %v", again, size, err)
		}
		for _, from := range []*blob.Folder{f, open(t, dir)} {
			if got, err := from.Get(ctx, "default", name); err != nil || !bytes.Equal(got, data) {
				t.Errorf("Get = %d bytes, %v; want %d", len(got), err, len(data))
			}
		}
		r, err := f.Open(ctx, "default", name)
		check(t, err)
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, data) || r.Size() != int64(len(data)) {
			t.Errorf("Open read %d bytes of %d, %v", len(got), r.Size(), err)
		}
		check(t, r.Close())
	}
	list, err := f.List(ctx, "default")
	check(t, err)
	if len(list) != 3 || len(files(t, dir)) != 3 {
		t.Errorf("List = %v, files %v", list, files(t, dir))
	}
	for _, info := range list {
		check(t, f.Delete(ctx, "default", info.Name))
		check(t, f.Delete(ctx, "default", info.Name))
		if _, err := f.Get(ctx, "default", info.Name); !errors.Is(err, blob.ErrNotFound) {
			t.Errorf("Get after Delete = %v", err)
		}
	}
	check(t, f.Delete(ctx, "other", nameOf(nil)))
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// TestTenants: law L11, no blob is found or shared across workspaces.
func TestTenants(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	f := open(t, dir)
	name, err := f.Put(ctx, "wrkspc_a", []byte("same"))
	check(t, err)
	if _, err := f.Get(ctx, "wrkspc_b", name); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("Get by another workspace = %v, want ErrNotFound", err)
	}
	_, err = f.Put(ctx, "wrkspc_b", []byte("same"))
	check(t, err)
	want := []string{"wrkspc_a/" + name, "wrkspc_b/" + name}
	if d := cmp.Diff(want, files(t, dir)); d != "" {
		t.Errorf("files (-want +got):\n%s", d)
	}
	check(t, f.Delete(ctx, "wrkspc_a", name))
	if _, err := f.Get(ctx, "wrkspc_b", name); err != nil {
		t.Errorf("Delete by one workspace took the other's blob: %v", err)
	}
}

// TestF1Names: attacks F1 and F2. No name and no link leads out of the folder.
func TestF1Names(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	f := open(t, filepath.Join(dir, "blobs"))
	secret := nameOf([]byte("outside"))
	check(t, os.WriteFile(filepath.Join(dir, secret), []byte("outside"), 0o600))
	for _, ws := range []string{"", ".", "..", "../x", "a/b", "/abs", "A", "a.b", "a\x00", "ä", strings.Repeat("a", 129)} {
		if _, err := f.Put(ctx, ws, nil); !errors.Is(err, blob.ErrName) {
			t.Errorf("Put in workspace %q = %v, want ErrName", ws, err)
		}
		if _, err := f.Get(ctx, ws, secret); !errors.Is(err, blob.ErrName) {
			t.Errorf("Get in workspace %q = %v, want ErrName", ws, err)
		}
		if _, err := f.List(ctx, ws); !errors.Is(err, blob.ErrName) {
			t.Errorf("List of workspace %q = %v, want ErrName", ws, err)
		}
	}
	for _, name := range []string{"", ".", "../" + secret, strings.ToUpper(secret), secret[:63], secret + "0", secret[:62] + "zz", ".tmp-x"} {
		if _, err := f.Get(ctx, "a", name); !errors.Is(err, blob.ErrName) {
			t.Errorf("Get %q = %v, want ErrName", name, err)
		}
		if err := f.Delete(ctx, "a", name); !errors.Is(err, blob.ErrName) {
			t.Errorf("Delete %q = %v, want ErrName", name, err)
		}
	}
	check(t, os.Symlink(dir, filepath.Join(dir, "blobs", "linked")))
	if got, err := f.Get(ctx, "linked", secret); err == nil {
		t.Errorf("Get through a symlink = %q", got)
	}
	if _, err := f.Put(ctx, "linked", []byte("x")); err == nil {
		t.Error("Put through a symlink worked")
	}
}

// TestDamage: trial K5. Damaged bytes are refused, no other blob is touched,
// and putting the bytes again heals.
func TestDamage(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789"), 100)
	for name, breaks := range map[string]func(b []byte) []byte{
		"flipped byte": func(b []byte) []byte { b[500] ^= 1; return b },
		"truncated":    func(b []byte) []byte { return b[:len(b)-1] },
		"empty":        func(b []byte) []byte { return nil },
		"zero tail":    func(b []byte) []byte { clear(b[900:]); return b },
		"longer":       func(b []byte) []byte { return append(b, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			ctx, dir := t.Context(), t.TempDir()
			f := open(t, dir)
			id, err := f.Put(ctx, "default", data)
			check(t, err)
			other, err := f.Put(ctx, "default", []byte("other"))
			check(t, err)
			check(t, os.WriteFile(filepath.Join(dir, "default", id), breaks(bytes.Clone(data)), 0o600))
			if got, err := f.Get(ctx, "default", id); !errors.Is(err, blob.ErrDamaged) || got != nil {
				t.Errorf("Get = %d bytes, %v; want ErrDamaged", len(got), err)
			}
			r, err := f.Open(ctx, "default", id)
			check(t, err)
			if _, err := io.Copy(io.Discard, r); !errors.Is(err, blob.ErrDamaged) {
				t.Errorf("reading = %v, want ErrDamaged", err)
			}
			check(t, r.Close())
			if _, err := f.Get(ctx, "default", other); err != nil {
				t.Errorf("other blob: %v", err)
			}
			_, err = f.Put(ctx, "default", data)
			check(t, err)
			if got, err := f.Get(ctx, "default", id); err != nil || !bytes.Equal(got, data) {
				t.Errorf("after healing: %v", err)
			}
		})
	}
}

var errFault = errors.New("injected fault")

// TestFaultPairs: every durable step fails once and is not there, and fails
// once and is there. Nothing that was acknowledged is lost, no temporary file
// stays, and the same call works afterwards.
func TestFaultPairs(t *testing.T) {
	data := []byte("payload")
	for _, step := range []string{"mkdir", "sync folder", "write", "sync", "rename"} {
		for _, when := range []string{"before", "after"} {
			for nth := 1; nth <= 2; nth++ {
				t.Run(fmt.Sprintf("%s.%s %d", step, when, nth), func(t *testing.T) {
					ctx, dir := t.Context(), t.TempDir()
					f := open(t, dir)
					seen, fired := 0, false
					f.SetFault(func(s string) error {
						if s == step+"."+when {
							if seen++; seen == nth {
								fired = true
								return errFault
							}
						}
						return nil
					})
					name, err := f.Put(ctx, "default", data)
					f.SetFault(nil)
					if !fired {
						check(t, err) // the step happens less often than nth
					} else if !errors.Is(err, errFault) || name != "" {
						t.Fatalf("Put = %q, %v; want the fault", name, err)
					}
					for _, file := range files(t, dir) {
						if strings.Contains(file, ".tmp-") {
							t.Errorf("temporary file stays: %s", file)
						}
					}
					// Reload: there or not, but never wrong.
					again := open(t, dir)
					if got, err := again.Get(ctx, "default", nameOf(data)); err == nil && !bytes.Equal(got, data) {
						t.Errorf("Get after the fault = %q", got)
					} else if err != nil && !errors.Is(err, blob.ErrNotFound) {
						t.Errorf("Get after the fault = %v", err)
					}
					for _, next := range []*blob.Folder{f, again} {
						name, err := next.Put(ctx, "default", data)
						check(t, err)
						if got, err := next.Get(ctx, "default", name); err != nil || !bytes.Equal(got, data) {
							t.Errorf("Get after a second Put = %q, %v", got, err)
						}
					}
				})
			}
		}
	}
}

func TestDeleteFaultPairs(t *testing.T) {
	for _, step := range []string{"remove.before", "remove.after", "sync folder.before", "sync folder.after"} {
		t.Run(step, func(t *testing.T) {
			ctx, dir := t.Context(), t.TempDir()
			name, err := open(t, dir).Put(ctx, "default", []byte("x"))
			check(t, err)
			f, armed := open(t, dir), true
			f.SetFault(func(s string) error {
				if s == step && armed {
					armed = false
					return errFault
				}
				return nil
			})
			if err := f.Delete(ctx, "default", name); !errors.Is(err, errFault) {
				t.Fatalf("Delete = %v, want the fault", err)
			}
			check(t, f.Delete(ctx, "default", name))
			if _, err := f.Get(ctx, "default", name); !errors.Is(err, blob.ErrNotFound) {
				t.Errorf("Get = %v, want ErrNotFound", err)
			}
		})
	}
}

// TestSyncedBeforeNamed: the bytes are synced before they get their name, and
// the folder after it; the order is what a power cut tests.
func TestSyncedBeforeNamed(t *testing.T) {
	f := open(t, t.TempDir())
	var steps []string
	f.SetFault(func(s string) error { steps = append(steps, strings.TrimSuffix(s, ".before")); return nil })
	_, err := f.Put(t.Context(), "default", []byte("x"))
	check(t, err)
	want := "mkdir mkdir.after sync folder sync folder.after write write.after sync sync.after rename rename.after sync folder sync folder.after"
	if got := strings.Join(steps, " "); got != want {
		t.Errorf("steps:\n got %s\nwant %s", got, want)
	}
}

func TestSweep(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	f := open(t, dir)
	name, err := f.Put(ctx, "default", []byte("keep"))
	check(t, err)
	old, young := filepath.Join(dir, "default", ".tmp-old"), filepath.Join(dir, "default", ".tmp-young")
	for _, p := range []string{old, young} {
		check(t, os.WriteFile(p, []byte("half"), 0o600))
	}
	hour := time.Now().Add(-time.Hour)
	check(t, os.Chtimes(old, hour.Add(-time.Minute), hour.Add(-time.Minute)))
	if list, err := f.List(ctx, "default"); err != nil || len(list) != 1 || list[0].Name != name {
		t.Errorf("List = %v, %v; want the blob alone", list, err)
	}
	if old, err := f.Before(ctx, "default", hour); err != nil || len(old) != 0 {
		t.Errorf("Before = %v, %v; want none", old, err)
	}
	if old, err := f.Before(ctx, "default", time.Now().Add(time.Hour)); err != nil || len(old) != 1 || old[0] != name {
		t.Errorf("Before = %v, %v; want %s", old, err, name)
	}
	if n, err := f.Sweep(ctx, hour); err != nil || n != 1 {
		t.Errorf("Sweep = %d, %v; want 1", n, err)
	}
	if n, err := f.Sweep(ctx, time.Now().Add(time.Hour)); err != nil || n != 1 {
		t.Errorf("second Sweep = %d, %v; want 1", n, err)
	}
	if _, err := f.Get(ctx, "default", name); err != nil {
		t.Errorf("Sweep took a blob: %v", err)
	}
}

func TestCancelled(t *testing.T) {
	dir := t.TempDir()
	f := open(t, dir)
	ctx, cancel := context.WithCancelCause(t.Context())
	reads := 0
	src := readerFunc(func(p []byte) (int, error) {
		if reads++; reads == 2 {
			cancel(errFault)
		}
		return len(p), nil
	})
	if _, _, err := f.PutReader(ctx, "default", src); !errors.Is(err, errFault) {
		t.Errorf("PutReader = %v, want the cause", err)
	}
	if _, _, err := f.PutReader(t.Context(), "default", iotest.ErrReader(errFault)); !errors.Is(err, errFault) {
		t.Errorf("PutReader of a broken source = %v", err)
	}
	if _, err := f.Get(ctx, "default", nameOf(nil)); !errors.Is(err, errFault) {
		t.Errorf("Get = %v, want the cause", err)
	}
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestConcurrent(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	folders := []*blob.Folder{open(t, dir), open(t, dir)}
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			f, data := folders[i%2], fmt.Appendf(nil, "blob %d", i%4)
			name, err := f.Put(ctx, "default", data)
			if err != nil {
				t.Error(err)
				return
			}
			if got, err := folders[(i+1)%2].Get(ctx, "default", name); err != nil || !bytes.Equal(got, data) {
				t.Errorf("Get = %q, %v", got, err)
			}
		})
	}
	wg.Wait()
	if got := files(t, dir); len(got) != 4 {
		t.Errorf("files: %v", got)
	}
}
