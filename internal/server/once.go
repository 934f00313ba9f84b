package server

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
)

// jsonRaw is shorter to read in signatures.
type jsonRaw = json.RawMessage

// maxIdempotencyKey is the longest Idempotency-Key.
const maxIdempotencyKey = 255

// onceOnly runs a POST so that it happens once (design section 9). Its record
// commits with the write. With a key of the client the record answers every
// repetition for a day; without one it answers the retries of an official
// client whose first answer was lost.
func (s *server) onceOnly(ctx context.Context, c *call, r route) (reply, error) {
	o := &store.Once{Workspace: c.caller.ws(), Path: c.r.URL.Path, Digest: sha256.Sum256(c.body),
		Request: c.request, Node: s.cfg.Node}
	if key, given := c.r.Header["Idempotency-Key"]; given {
		if len(key) != 1 || !validKey(key[0]) {
			return reply{}, api.Invalid("", "Idempotency-Key must be one value of 1 to %d visible ASCII characters", maxIdempotencyKey)
		}
		o.Key = key[0]
		row, err := s.db.OnceDone(ctx, o.Workspace, o.Path, o.Key)
		if err == nil {
			return s.repeat(ctx, c, r, o, row)
		}
		if !errors.Is(err, store.ErrNotFound) {
			return reply{}, err
		}
	} else {
		o.Implicit, o.Key = true, store.ImplicitKey(o.Digest, o.Request)
		row, found, err := s.lostAnswer(ctx, c, o)
		if err != nil || found {
			if found {
				return s.repeat(ctx, c, r, o, row)
			}
			return reply{}, err
		}
		c.leave = s.flight.enter(flightKey(o))
	}
	c.once = o
	out, err := s.run(store.WithOnce(ctx, o), c, r.handle)
	if !errors.Is(err, store.ErrRepeated) {
		return out, err
	}
	// Another request with this key committed first, while this one was on its way.
	row, err := s.db.OnceDone(ctx, o.Workspace, o.Path, o.Key)
	if err != nil {
		return reply{}, err
	}
	return s.repeat(ctx, c, r, o, row)
}

func validKey(key string) bool {
	if key == "" || len(key) > maxIdempotencyKey {
		return false
	}
	for i := range len(key) {
		if key[i] < 0x21 || key[i] > 0x7e {
			return false
		}
	}
	return true
}

// repeat gives the answer of a request that was done before.
func (s *server) repeat(ctx context.Context, c *call, r route, o *store.Once, row store.OnceRow) (reply, error) {
	c.once = nil
	if row.Digest != o.Digest {
		return reply{}, api.Invalid("", "Idempotency-Key %q was used with another body; use a new key for a new request", o.Key)
	}
	if r.again == nil {
		if row.Answer == nil {
			return reply{}, errors.New("an idempotency record without answer")
		}
		return reply{body: row.Answer, replayed: true}, nil
	}
	c.kept = row.Answer
	out, err := s.run(ctx, c, r.again)
	out.replayed = true
	return out, err
}

// lostAnswer finds the record of an earlier try of this request, when the
// client says that this is a retry and the earlier answer cannot have arrived:
// it could not be written, or the process that owed it is gone.
func (s *server) lostAnswer(ctx context.Context, c *call, o *store.Once) (store.OnceRow, bool, error) {
	if n, err := strconv.Atoi(c.r.Header.Get("X-Stainless-Retry-Count")); err != nil || n <= 0 {
		return store.OnceRow{}, false, nil
	}
	// The earlier try may still be at work here; its client has left it.
	if err := s.flight.wait(ctx, flightKey(o)); err != nil {
		return store.OnceRow{}, false, err
	}
	row, err := s.db.OnceRetried(ctx, o.Workspace, o.Path, o.Digest)
	if errors.Is(err, store.ErrNotFound) {
		return store.OnceRow{}, false, nil
	}
	if err != nil {
		return store.OnceRow{}, false, err
	}
	lost := row.Unanswered
	if !lost && row.Node != s.cfg.Node {
		if lost, err = s.db.NodeGone(ctx, row.Node); err != nil {
			return store.OnceRow{}, false, err
		}
	}
	return row, lost, nil
}

// noteTimeout bounds noting that an answer was lost.
const noteTimeout = 5 * time.Second

// unanswered notes that the client did not get its answer. When the write was
// not done there is no record, and nothing is noted.
func (s *server) unanswered(c *call) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.r.Context()), noteTimeout)
	defer cancel()
	if err := s.db.OnceUnanswered(ctx, c.once); err != nil {
		s.log.Warn("lost answer is not noted", "request", c.request, "err", err)
	}
}

// flight knows the requests without key that are under way in this process.
type flight struct {
	mu   sync.Mutex
	reqs map[string]*flying // by flightKey
}

type flying struct {
	n    int
	done chan struct{} // closed when n is 0
}

func flightKey(o *store.Once) string {
	return strings.Join([]string{string(o.Workspace), o.Path, string(o.Digest[:])}, "\x00")
}

// enter notes a request; the function returned ends it.
func (f *flight) enter(key string) func() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.reqs == nil {
		f.reqs = map[string]*flying{}
	}
	x := f.reqs[key]
	if x == nil {
		x = &flying{done: make(chan struct{})}
		f.reqs[key] = x
	}
	x.n++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if x.n--; x.n == 0 {
			delete(f.reqs, key)
			close(x.done)
		}
	}
}

// wait returns when no request of this key is under way.
func (f *flight) wait(ctx context.Context, key string) error {
	for {
		f.mu.Lock()
		x := f.reqs[key]
		f.mu.Unlock()
		if x == nil {
			return nil
		}
		select {
		case <-x.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
