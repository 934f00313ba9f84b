package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

func (b *memBlobs) PutReader(ctx context.Context, w string, r io.Reader) (string, int64, error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return "", 0, err
	}
	name, err := b.Put(ctx, w, data)
	return name, int64(len(data)), err
}

func (b *memBlobs) Stream(ctx context.Context, w, name string) (io.ReadCloser, error) {
	data, err := b.Get(ctx, w, name)
	if err != nil {
		return nil, err
	}
	return io.NopCloser(bytes.NewReader(data)), nil
}

func (b *memBlobs) Before(_ context.Context, w string, t time.Time) (out []string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key := range b.m {
		if name, ok := strings.CutPrefix(key, w+"/"); ok && b.at[key].Before(t) {
			out = append(out, name)
		}
	}
	return out, nil
}

// Sweep: nothing here is ever half written.
func (b *memBlobs) Sweep(context.Context, time.Time) (int, error) { return 0, nil }

// change replaces every blob by what f makes of it.
func (b *memBlobs) change(f func([]byte) []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, data := range b.m {
		b.m[name] = f(data)
	}
}

func (e *env) file(name string, data []byte, set ...func(*store.File)) store.File {
	e.t.Helper()
	c, err := e.db.PutContent(e.t.Context(), ws, bytes.NewReader(data))
	if err != nil {
		e.t.Fatalf("put content: %v", err)
	}
	now := e.db.Now()
	f := store.File{Workspace: ws, ID: store.FileID(store.NewID("file_", now)), Filename: name, MIME: "text/plain", CreatedAt: now}
	for _, s := range set {
		s(&f)
	}
	if f, err = e.db.CreateFile(e.t.Context(), f, c); err != nil {
		e.t.Fatalf("create file: %v", err)
	}
	return f
}

func (e *env) content(f store.File) ([]byte, error) {
	e.t.Helper()
	r, err := e.db.OpenFile(e.t.Context(), f)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

const chunk = 256 << 10

// What was put comes back, at every size around a chunk's, also after a restart;
// what lies in the blob store and in the row tells nothing of it.
func TestFileContents(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		seed := rand.Uint64()
		random := rand.New(rand.NewPCG(seed, 0))
		var files []store.File
		var want [][]byte
		for _, n := range []int{0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2*chunk + 7} {
			data := make([]byte, n)
			for i := range data {
				data[i] = byte(random.Uint32())
			}
			f := e.file(fmt.Sprintf("secret-name-%d.txt", n), data)
			if f.Size != int64(n) {
				t.Errorf("size = %d, want %d", f.Size, n)
			}
			files, want = append(files, f), append(want, data)
		}
		e.crash()
		for i, f := range files {
			got, err := e.db.File(t.Context(), ws, f.ID)
			if err != nil || got.Filename != f.Filename || got.MIME != f.MIME || got.SHA256 != f.SHA256 || !got.CreatedAt.Equal(f.CreatedAt) {
				t.Fatalf("file = %+v, %v, want %+v", got, err, f)
			}
			if data, err := e.content(got); err != nil || !bytes.Equal(data, want[i]) {
				t.Errorf("content of %d bytes: got %d bytes, %v (seed %d)", len(want[i]), len(data), err, seed)
			}
		}
		e.blobs.change(func(b []byte) []byte {
			if bytes.Contains(b, want[len(want)-1][:64]) {
				t.Error("a blob holds plain bytes of a file")
			}
			return b
		})
		for _, who := range []store.WorkspaceID{"other", ""} {
			if _, err := e.db.File(t.Context(), who, files[0].ID); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("file from workspace %q = %v, want ErrNotFound", who, err)
			}
		}
	})
}

// Attack: whoever can write to the blob store changes, cuts, repeats or moves
// chunks. Nothing is read then that was not sealed there.
func TestFileDamage(t *testing.T) {
	sealed := chunk + 12 + 16
	for name, change := range map[string]func([]byte) []byte{
		"bit":        func(b []byte) []byte { b[sealed+20] ^= 1; return b },
		"cut":        func(b []byte) []byte { return b[:len(b)-1] },
		"last chunk": func(b []byte) []byte { return b[:2*sealed] },
		"all":        func([]byte) []byte { return nil },
		"swapped": func(b []byte) []byte {
			return append(append(bytes.Clone(b[sealed:2*sealed]), b[:sealed]...), b[2*sealed:]...)
		},
		"repeated": func(b []byte) []byte { return append(bytes.Clone(b[:sealed]), b...) },
		"longer":   func(b []byte) []byte { return append(b, b[:sealed]...) },
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, "sqlite:"+t.TempDir()+"/data/planaria.db")
			data := bytes.Repeat([]byte("0123456789abcdef"), (2*chunk+1000)/16)
			f := e.file("f", data)
			e.blobs.change(change)
			got, err := e.content(f)
			if !errors.Is(err, store.ErrDamaged) {
				t.Errorf("read %d bytes, error %v, want ErrDamaged", len(got), err)
			}
			if !bytes.HasPrefix(data, got) {
				t.Errorf("read %d bytes that were never sealed there", len(got))
			}
		})
	}
}

// A reader that fails makes no file, and not a shorter one.
func TestFileCutShort(t *testing.T) {
	e := newEnv(t, "sqlite:"+t.TempDir()+"/data/planaria.db")
	for _, cut := range []error{io.ErrUnexpectedEOF, errors.New("gone")} {
		r := io.MultiReader(strings.NewReader(strings.Repeat("x", chunk+5)), &failing{cut})
		if _, err := e.db.PutContent(t.Context(), ws, r); !errors.Is(err, cut) {
			t.Errorf("put content of a reader that ends with %v = %v", cut, err)
		}
	}
	if n := e.blobs.count(); n != 0 {
		t.Errorf("%d blobs are there", n)
	}
	c, err := e.db.PutContent(t.Context(), ws, strings.NewReader("unused"))
	if err != nil {
		t.Fatal(err)
	}
	e.db.DropContent(t.Context(), c)
	if n := e.blobs.count(); n != 0 {
		t.Errorf("%d blobs are left of a dropped content", n)
	}
}

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

// Pages in both directions, filters, and the end of the content with its last row.
func TestFileListsAndCopies(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.create()
		var ids []store.FileID
		for i := range 5 {
			ids = append([]store.FileID{e.file(fmt.Sprint(i), []byte{byte(i)}).ID}, ids...)
		}
		cp, err := e.db.CopyFile(t.Context(), ws, s.ID, store.FileCopy{From: ids[0], To: "file_copy"})
		if err != nil || cp.Session != s.ID || cp.Downloadable || cp.Filename != "4" {
			t.Fatalf("copy = %+v, %v", cp, err)
		}
		list := func(f store.FileFilter) (out []store.FileID) {
			t.Helper()
			rows, err := e.db.Files(t.Context(), ws, f)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range rows {
				out = append(out, r.ID)
			}
			return out
		}
		var walked []store.FileID
		f := store.FileFilter{Limit: 2}
		for {
			rows, err := e.db.Files(t.Context(), ws, f)
			if err != nil {
				t.Fatal(err)
			}
			if len(rows) == 0 {
				break
			}
			for _, r := range rows {
				walked = append(walked, r.ID)
			}
			f.AfterAt, f.AfterID = rows[len(rows)-1].CreatedAt, rows[len(rows)-1].ID
		}
		if diff := cmp.Diff(append([]store.FileID{"file_copy"}, ids...), walked); diff != "" {
			t.Errorf("walked (-want +got):\n%s", diff)
		}
		if got := list(store.FileFilter{Session: s.ID}); len(got) != 1 || got[0] != "file_copy" {
			t.Errorf("files of the session = %v", got)
		}
		if got := list(store.FileFilter{IDs: []store.FileID{ids[3], "file_no", ids[1]}}); len(got) != 2 {
			t.Errorf("files by id = %v", got)
		}
		if got := list(store.FileFilter{IDs: []store.FileID{}}); len(got) != 0 {
			t.Errorf("files of no ids = %v", got)
		}
		if rows, err := e.db.Files(t.Context(), "other", store.FileFilter{}); err != nil || len(rows) != 0 {
			t.Errorf("files of another workspace = %v, %v", rows, err)
		}

		// The copy outlives the original, and its content goes with it.
		blobs := e.blobs.count()
		if err := e.db.DeleteFile(t.Context(), ws, ids[0]); err != nil {
			t.Fatal(err)
		}
		if err := e.db.DeleteFile(t.Context(), ws, ids[0]); !errors.Is(err, store.ErrNotFound) || errors.Is(err, store.ErrExpired) {
			t.Errorf("second deletion = %v", err)
		}
		if data, err := e.content(cp); err != nil || string(data) != "\x04" {
			t.Errorf("content of the copy = %q, %v", data, err)
		}
		if n := e.blobs.count(); n != blobs {
			t.Errorf("%d blobs, want %d: a copy still names the content", n, blobs)
		}
		if err := e.db.PutResourceSecret(t.Context(), ws, s.ID, store.ResourceSecret{ID: "sesrsc_1", Sealed: []byte("sealed")}); err != nil {
			t.Fatal(err)
		}
		if err := e.db.DeleteSession(t.Context(), ws, s.ID, "me"); err != nil {
			t.Fatal(err)
		}
		if n := e.blobs.count(); n != blobs-1 {
			t.Errorf("%d blobs after the session's deletion, want %d", n, blobs-1)
		}
		if _, err := e.db.File(t.Context(), ws, "file_copy"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("file of a deleted session = %v", err)
		}
		if _, err := e.db.ResourceSecret(t.Context(), ws, s.ID, "sesrsc_1"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("secret of a deleted session = %v", err)
		}
	})
}

// A session is created with its copies and tokens, or not at all.
func TestAttachments(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		f := e.file("in.txt", []byte("in"))
		n := store.NewSession{ID: "sesn_a", Created: store.Created{V: 1, Thread: "sthr_1",
			Config: store.SessionConfig{Agent: []byte(`{"id":"agent_1","version":3}`), EnvironmentID: "env_1"}}, Attach: store.Attachments{
			Files:   []store.FileCopy{{From: f.ID, To: "file_a"}},
			Secrets: []store.ResourceSecret{{ID: "sesrsc_a", Sealed: []byte("s1")}}}}
		if _, err := e.db.CreateSession(t.Context(), ws, n); err != nil {
			t.Fatal(err)
		}
		if cp, err := e.db.File(t.Context(), ws, "file_a"); err != nil || cp.Session != "sesn_a" {
			t.Errorf("copy = %+v, %v", cp, err)
		}
		if s, err := e.db.ResourceSecret(t.Context(), ws, "sesn_a", "sesrsc_a"); err != nil || string(s) != "s1" {
			t.Errorf("secret = %q, %v", s, err)
		}
		for _, other := range []struct {
			ws store.WorkspaceID
			id store.SessionID
		}{{"other", "sesn_a"}, {ws, "sesn_b"}} {
			if _, err := e.db.ResourceSecret(t.Context(), other.ws, other.id, "sesrsc_a"); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("secret from %v = %v", other, err)
			}
		}
		if err := e.db.PutResourceSecret(t.Context(), ws, "sesn_a", store.ResourceSecret{ID: "sesrsc_a", Sealed: []byte("s2")}); err != nil {
			t.Fatal(err)
		}
		if s, err := e.db.ResourceSecret(t.Context(), ws, "sesn_a", "sesrsc_a"); err != nil || string(s) != "s2" {
			t.Errorf("rotated secret = %q, %v", s, err)
		}
		n.ID, n.Attach.Files = "sesn_b", []store.FileCopy{{From: "file_none", To: "file_b"}}
		if _, err := e.db.CreateSession(t.Context(), ws, n); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("session with a file that is not there = %v", err)
		}
		if _, err := e.db.Session(t.Context(), ws, "sesn_b"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("the session is there: %v", err)
		}
	})
}

// One file per path and content of a session, whatever is repeated; a deleted
// one does not come back.
func TestOutputs(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.create()
		output := func(path, data string) (store.File, error) {
			t.Helper()
			c, err := e.db.PutContent(t.Context(), ws, strings.NewReader(data))
			if err != nil {
				t.Fatal(err)
			}
			defer e.db.DropContent(t.Context(), c)
			now := e.db.Now()
			return e.db.CreateOutput(t.Context(), store.File{Workspace: ws, ID: store.FileID(store.NewID("file_", now)), Session: s.ID,
				Filename: "r.csv", Path: path, Downloadable: true, CreatedAt: now}, c)
		}
		first, err := output("/mnt/session/outputs/r.csv", "1")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := output("/mnt/session/outputs/r.csv", "1"); !errors.Is(err, store.ErrDuplicate) {
			t.Errorf("the same output again = %v, want ErrDuplicate", err)
		}
		if _, err := output("/mnt/session/outputs/r.csv", "2"); err != nil {
			t.Errorf("a changed output = %v", err)
		}
		if _, err := output("/mnt/session/outputs/s.csv", "1"); err != nil {
			t.Errorf("another path = %v", err)
		}
		if n := e.blobs.count(); n != 3 {
			t.Errorf("%d blobs, want 3", n)
		}
		if err := e.db.DeleteFile(t.Context(), ws, first.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := output("/mnt/session/outputs/r.csv", "1"); !errors.Is(err, store.ErrDuplicate) {
			t.Errorf("a deleted output came back: %v", err)
		}
		if has, err := e.db.HasOutput(t.Context(), ws, s.ID, "/mnt/session/outputs/r.csv", first.SHA256); err != nil || !has {
			t.Errorf("has output = %v, %v", has, err)
		}
		if has, err := e.db.HasOutput(t.Context(), ws, "sesn_other", "/mnt/session/outputs/r.csv", first.SHA256); err != nil || has {
			t.Errorf("has output of another session = %v, %v", has, err)
		}
	})
}

// A crash between a content and its row, and one between the end of a row and the
// end of its content, leave blobs. They are removed when they are old enough; no
// content that a row names is, and none that may still get its row.
func TestSweepContents(t *testing.T) {
	for _, engine := range []string{"sqlite", "postgres"} {
		t.Run(engine, func(t *testing.T) {
			var later atomic.Int64 // hours that the store's clock is ahead
			set := func(c *store.Config) {
				c.Now = func() time.Time { return time.Now().Add(time.Duration(later.Load()) * time.Hour) }
			}
			url := "sqlite:" + t.TempDir() + "/data/planaria.db"
			if engine == "postgres" {
				url = testenv.Postgres(t)
			}
			e := newEnvWith(t, url, set)
			s := e.create()
			kept := e.file("kept", []byte("kept"))
			cp, err := e.db.CopyFile(t.Context(), ws, s.ID, store.FileCopy{From: kept.ID, To: "file_cp"})
			if err != nil {
				t.Fatal(err)
			}
			if err := e.db.DeleteFile(t.Context(), ws, kept.ID); err != nil { // the copy goes on
				t.Fatal(err)
			}
			// What is kept for others in the blob store is nobody's content.
			if _, err := e.blobs.Put(t.Context(), string(ws), []byte("a body of the log")); err != nil {
				t.Fatal(err)
			}
			if _, err := e.db.PutContent(t.Context(), ws, strings.NewReader("its upload was cut by a crash")); err != nil {
				t.Fatal(err)
			}
			e.crash()
			sweep := func(want int) {
				t.Helper()
				if n, err := e.db.SweepContents(t.Context()); err != nil || n != want {
					t.Errorf("sweep %d hours later = %d, %v, want %d", later.Load(), n, err, want)
				}
			}
			sweep(0)
			later.Store(23)
			sweep(0)
			later.Store(25)
			sweep(1)
			sweep(0)
			if data, err := e.content(cp); err != nil || string(data) != "kept" {
				t.Errorf("content of a copy = %q, %v", data, err)
			}
			if n := e.blobs.count(); n != 2 {
				t.Errorf("%d blobs, want the body and the copy's content", n)
			}
		})
	}
}

// A file ends at its time, says so for a week, and its content goes with it.
func TestFileExpiry(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.create()
		now := e.db.Now()
		f := e.file("short", []byte("x"), func(f *store.File) { f.ExpiresAt = now.Add(-time.Second) })
		long := e.file("long", []byte("y"), func(f *store.File) { f.ExpiresAt = now.Add(time.Hour) })
		check := func(when string) {
			t.Helper()
			if _, err := e.db.File(t.Context(), ws, f.ID); !errors.Is(err, store.ErrExpired) || !errors.Is(err, store.ErrNotFound) {
				t.Errorf("%s: expired file = %v, want ErrExpired", when, err)
			}
			if _, err := e.db.CopyFile(t.Context(), ws, s.ID, store.FileCopy{From: f.ID, To: "file_c"}); !errors.Is(err, store.ErrExpired) {
				t.Errorf("%s: copy of an expired file = %v", when, err)
			}
			rows, err := e.db.Files(t.Context(), ws, store.FileFilter{})
			if err != nil || len(rows) != 1 || rows[0].ID != long.ID {
				t.Errorf("%s: list = %v, %v", when, rows, err)
			}
		}
		check("before the sweep")
		if n, err := e.db.SweepFiles(t.Context()); err != nil || n != 1 {
			t.Fatalf("sweep = %d, %v", n, err)
		}
		check("after the sweep")
		if n := e.blobs.count(); n != 1 {
			t.Errorf("%d blobs, want 1", n)
		}
		if n, err := e.db.SweepFiles(t.Context()); err != nil || n != 0 {
			t.Errorf("second sweep = %d, %v", n, err)
		}
	})
}
