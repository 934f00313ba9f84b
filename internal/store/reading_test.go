package store_test

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// awayBlobs are blobs that cannot be reached while away is set.
type awayBlobs struct {
	*memBlobs
	away atomic.Bool
}

func (b *awayBlobs) Get(ctx context.Context, w, name string) ([]byte, error) {
	if b.away.Load() {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.EMFILE}
	}
	return b.memBlobs.Get(ctx, w, name)
}

// What cannot be read now is not damaged: who takes it for damage refuses a
// session for good that nothing is wrong with (law L7).
func TestUnreadIsNotDamaged(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		blobs := &awayBlobs{memBlobs: e.blobs}
		e.crash()
		e.cfg.Blobs = blobs
		e.crash()
		s := e.create(message("hello"))
		l := e.claim()
		e.must(l, entries(running(), event("user.message", "text", strings.Repeat("x", store.MaxInlineBody))))
		blobs.away.Store(true)
		_, err := e.db.Entries(t.Context(), ws, s.ID, store.Range{})
		if !errors.Is(err, syscall.EMFILE) || errors.Is(err, store.ErrDamaged) {
			t.Errorf("blob that cannot be opened: %v", err)
		}
		blobs.away.Store(false)
		head := e.session(s.ID).Head
		for i := range 500 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Microsecond)
			_, err := e.db.Entries(ctx, ws, s.ID, store.Range{After: store.Seq(i % 2)})
			_, err1 := e.db.EntryAt(ctx, ws, s.ID, head)
			cancel()
			if err := errors.Join(err, err1); errors.Is(err, store.ErrDamaged) {
				t.Fatalf("reader that left after %d µs: %v", i, err)
			}
		}
		e.sound(s.ID)
	})
}
