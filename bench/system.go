package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// workspace is where everything is measured.
const workspace store.WorkspaceID = "default"

// quiet is the logger of what is measured.
var quiet = slog.New(slog.DiscardHandler)

// opened is a store in a data folder, with its node. Close ends it.
type opened struct {
	dir    string
	url    string
	db     *store.DB
	node   *store.Node
	master *vault.Master
	blobs  *blob.Folder
	stops  []func()
}

// open opens a store; dir holds its keys and blobs, and its database when url
// is empty.
func open(ctx context.Context, dir, url string) (o *opened, err error) {
	o = &opened{dir: dir, url: url}
	defer func() {
		if err != nil {
			o.close()
		}
	}()
	if o.url == "" {
		o.url = "sqlite:" + filepath.Join(dir, "planaria.db")
	}
	if err = os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if o.master, err = vault.OpenMaster(dir, ""); errors.Is(err, vault.ErrNoMaster) {
		o.master, err = vault.CreateMaster(dir, "")
	}
	if err != nil {
		return nil, err
	}
	if o.blobs, err = blob.Open(filepath.Join(dir, "blobs")); err != nil {
		return nil, err
	}
	o.stops = append(o.stops, func() { o.blobs.Close() })
	if o.db, err = store.Open(ctx, store.Config{URL: o.url, Master: o.master, Blobs: o.blobs, Logger: quiet}); err != nil {
		return nil, err
	}
	o.stops = append(o.stops, func() { o.db.Close() })
	o.background(ctx, func(ctx context.Context) { _ = o.db.Run(ctx) })
	if err = o.db.EnsureWorkspace(ctx, workspace, "default"); err != nil {
		return nil, err
	}
	if o.node, err = o.db.Join(ctx, store.NodeInfo{Roles: []string{"api", "worker", "keeper"}, Version: "bench"}); err != nil {
		return nil, err
	}
	o.background(ctx, func(ctx context.Context) { _ = o.node.Run(ctx) })
	return o, nil
}

// background runs f until close.
func (o *opened) background(ctx context.Context, f func(context.Context)) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(ctx)
	}()
	o.stops = append(o.stops, func() {
		cancel()
		<-done
	})
}

// close ends everything in reverse order.
func (o *opened) close() {
	for i := len(o.stops) - 1; i >= 0; i-- {
		o.stops[i]()
	}
	o.stops = nil
}

// newSession is a session of an agent. With starts it has a message in its
// inbox, so that it can be claimed.
func newSession(db *store.DB, agent any, message string) (store.NewSession, error) {
	raw, err := json.Marshal(agent)
	if err != nil {
		return store.NewSession{}, err
	}
	now := db.Now()
	s := store.NewSession{ID: store.SessionID(store.NewID("sesn_", now)), Now: now, Created: store.Created{V: store.BodyVersion,
		Thread: store.ThreadID(store.NewID("sthr_", now)), Creator: "bench",
		Config: store.SessionConfig{Metadata: map[string]string{}, Agent: raw, VaultIDs: []store.VaultID{}}}}
	if message != "" {
		s.Inbox = []store.Delivery{messageFor(db, message)}
	}
	return s, nil
}

// messageFor is a user's message that starts a turn.
func messageFor(db *store.DB, text string) store.Delivery {
	body, err := json.Marshal(map[string]any{"v": store.BodyVersion, "type": "user.message",
		"content": []map[string]string{{"type": "text", "text": text}}})
	if err != nil {
		panic(err)
	}
	return store.Delivery{ID: store.NewID("sevt_", db.Now()), Kind: store.InboxEvent, Type: "user.message", Body: body, Starts: true}
}

// claimAll claims n sessions that have work.
func claimAll(ctx context.Context, node *store.Node, n int) ([]*store.Lease, error) {
	var out []*store.Lease
	for len(out) < n {
		leases, err := node.Claim(ctx, min(64, n-len(out)))
		if err != nil {
			return nil, err
		}
		if len(leases) == 0 {
			return nil, fmt.Errorf("only %d of %d sessions can be claimed", len(out), n)
		}
		out = append(out, leases...)
	}
	return out, nil
}

// system is the whole of it in this process, but the HTTP server.
type system struct {
	*opened
	sessions *session.Manager
}

// openSystem opens a store and drives its sessions with the models of rules.
func openSystem(ctx context.Context, dir string, rules []llm.Rule) (*system, error) {
	o, err := open(ctx, dir, "")
	if err != nil {
		return nil, err
	}
	s := &system{opened: o}
	models, err := llm.NewModels(&http.Client{Transport: llm.Transport((&net.Dialer{}).DialContext)}, rules)
	if err != nil {
		o.close()
		return nil, err
	}
	effects := effect.New(o.db, effect.Config{})
	k := keeper.New(keeper.Config{DB: o.db, Effects: effects, Vault: o.master, Models: models, Logger: quiet,
		Dial: keeper.Guard((&net.Dialer{}).DialContext, nil), AllowPrivateNetworks: true})
	o.stops = append(o.stops, k.Close)
	g := gateway.New(gateway.Config{DB: o.db, Keeper: k, Effects: effects, Logger: quiet})
	s.sessions = session.New(session.Config{DB: o.db, Node: o.node, Gateway: g, Logger: quiet, MaxRunning: 2000})
	o.background(ctx, func(ctx context.Context) { _ = s.sessions.Run(ctx) })
	return s, nil
}

// create makes a session that begins with a message and returns its row.
func (s *system) create(ctx context.Context, agent any, message string) (store.Session, error) {
	raw, err := json.Marshal(agent)
	if err != nil {
		return store.Session{}, err
	}
	p := session.CreateParams{Agent: raw}
	if message != "" {
		ev, err := json.Marshal(map[string]any{"type": "user.message", "content": []map[string]string{{"type": "text", "text": message}}})
		if err != nil {
			return store.Session{}, err
		}
		p.InitialEvents = []json.RawMessage{ev}
	}
	return s.sessions.Create(ctx, workspace, "bench", p)
}

// idleTimeout bounds the wait for one session's turn.
const idleTimeout = 5 * time.Minute

// idle waits until a session rests, and fails when it rests for another reason
// than the end of its turn.
func (s *system) idle(ctx context.Context, id store.SessionID, after store.Seq) error {
	ctx, cancel := context.WithTimeout(ctx, idleTimeout)
	defer cancel()
	f, err := s.db.Follow(ctx, workspace, id, after)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		items, err := f.Next(ctx)
		if err != nil {
			return fmt.Errorf("wait for session %s: %w", id, err)
		}
		for _, it := range items {
			if it.Entry == nil || it.Entry.Type != "session.status_idle" {
				continue
			}
			return restedWell(it.Entry)
		}
	}
}

// each runs f for 0 to n-1 in goroutines of its own and returns the first error.
func each(n int, f func(i int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// serveHTTP serves a handler on a free loopback port until close.
func serveHTTP(h http.Handler) (addr string, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l) // ends with Close
	}()
	return l.Addr().String(), func() {
		srv.Close()
		<-done
	}, nil
}
