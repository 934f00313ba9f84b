package store_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// A file is deleted, expires, or goes with its session while a session is made
// with a copy of it, or is given one: the copy is whole or is refused, and the
// content ends with the last row that names it.
func TestCopyWhileDeleted(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		target := e.create()
		for name, drop := range map[string]func(store.File) error{
			"delete": func(f store.File) error { return e.db.DeleteFile(t.Context(), ws, f.ID) },
			"expiry": func(f store.File) error { _, err := e.db.SweepFiles(t.Context()); return err },
			"session": func(f store.File) error {
				return e.db.DeleteSession(t.Context(), ws, f.Session, "me")
			},
		} {
			t.Run(name, func(t *testing.T) {
				for i := range 40 {
					var owner store.SessionID
					if name == "session" {
						owner = e.create().ID
					}
					f := e.file("f", []byte("content"), func(f *store.File) {
						f.Session = owner
						if name == "expiry" {
							f.ExpiresAt = e.db.Now().Add(10 * time.Millisecond)
						}
					})
					e.race(t, f, fmt.Sprintf("%s_%d", name, i), target.ID, drop)
					if t.Failed() {
						return
					}
				}
			})
		}
		if err := e.db.DeleteSession(t.Context(), ws, target.ID, "me"); err != nil {
			t.Fatal(err)
		}
		if n := e.blobs.count(); n != 0 {
			t.Errorf("%d blobs are left though nothing names them", n)
		}
	})
}

// race drops a file while two copies of it are made, reads those that were made
// and drops them too, both at once.
func (e *env) race(t *testing.T, f store.File, tag string, target store.SessionID, drop func(store.File) error) {
	t.Helper()
	made := store.SessionID("sesn_" + tag)
	copies := []store.FileID{store.FileID("file_new_" + tag), store.FileID("file_old_" + tag)}
	acts := []func() error{
		func() error { return drop(f) },
		func() error {
			_, err := e.db.CreateSession(t.Context(), ws, store.NewSession{ID: made, Created: store.Created{V: 1, Thread: "sthr_1",
				Config: store.SessionConfig{Agent: []byte(`{"id":"agent_1","version":3}`), EnvironmentID: "env_1"}},
				Attach: store.Attachments{Files: []store.FileCopy{{From: f.ID, To: copies[0]}}}})
			return err
		},
		func() error {
			_, err := e.db.CopyFile(t.Context(), ws, target, store.FileCopy{From: f.ID, To: copies[1]})
			return err
		},
	}
	errs := atOnce(acts)
	if errs[0] != nil && !errors.Is(errs[0], store.ErrNotFound) {
		t.Errorf("%s: drop: %v", tag, errs[0])
	}
	for i, id := range copies {
		if err := errs[i+1]; err != nil {
			if !errors.Is(err, store.ErrNotFound) {
				t.Errorf("%s: copy %s: %v", tag, id, err)
			}
			continue
		}
		cp, err := e.db.File(t.Context(), ws, id)
		if err != nil {
			t.Errorf("%s: copy %s was made and cannot be read: %v", tag, id, err)
			continue
		}
		if data, err := e.content(cp); err != nil || string(data) != "content" {
			t.Errorf("%s: content of copy %s = %q, %v", tag, id, data, err)
		}
	}
	for i, err := range atOnce([]func() error{
		func() error { return ignore(e.db.DeleteSession(t.Context(), ws, made, "me"), store.ErrNotFound) },
		func() error { return ignore(e.db.DeleteFile(t.Context(), ws, copies[1]), store.ErrNotFound) },
		func() error { return ignore(e.db.DeleteFile(t.Context(), ws, f.ID), store.ErrNotFound) },
	}) {
		if err != nil {
			t.Errorf("%s: clean up %d: %v", tag, i, err)
		}
	}
	if !f.ExpiresAt.IsZero() {
		for n := 1; n > 0 && !t.Failed(); { // until it has expired
			if _, err := e.db.SweepFiles(t.Context()); err != nil {
				t.Error(err)
			}
			n = e.blobs.count()
		}
	}
	if n := e.blobs.count(); n != 0 {
		t.Errorf("%s: %d blobs are left though nothing names them", tag, n)
	}
}

func ignore(err, what error) error {
	if errors.Is(err, what) {
		return nil
	}
	return err
}

// atOnce runs acts at the same time.
func atOnce(acts []func() error) []error {
	errs := make([]error, len(acts))
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i, act := range acts {
		wg.Go(func() { <-start; errs[i] = act() })
	}
	close(start)
	wg.Wait()
	return errs
}

// Who reads a file while it is deleted finds it or does not; it is never damaged.
func TestReadWhileDeleted(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for i := range 60 {
			f := e.file("f", []byte("content"))
			errs := atOnce([]func() error{
				func() error { return e.db.DeleteFile(t.Context(), ws, f.ID) },
				func() error { _, err := e.db.File(t.Context(), ws, f.ID); return ignore(err, store.ErrNotFound) },
				func() error { _, err := e.db.File(t.Context(), ws, f.ID); return ignore(err, store.ErrNotFound) },
				func() error {
					r, err := e.db.OpenFile(t.Context(), f)
					if err == nil {
						r.Close()
					}
					return ignore(err, store.ErrNotFound)
				},
				func() error { _, err := e.db.Files(t.Context(), ws, store.FileFilter{}); return err },
			})
			for n, err := range errs {
				if err != nil {
					t.Errorf("round %d, act %d: %v", i, n, err)
				}
			}
			if _, err := e.db.OpenFile(t.Context(), f); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("open a deleted file = %v, want ErrNotFound", err)
			}
			if t.Failed() {
				return
			}
		}
	})
}
