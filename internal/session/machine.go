package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// A session's machine is its sandbox. It is started when the first contained
// call needs it, kept while the session works and for a while at rest
// (linger.go), and suspended into a snapshot then. What became of it is in
// records of kind machine, which are the only thing that the next owner and
// the model's notes go by (recover.go).

// machine is a live sandbox in the hands of a driver.
type machine struct {
	s    *sandbox.Sandbox
	over chan struct{} // closed when the driver lets go of it: its way out is closed

	tunnels sync.WaitGroup // connections that are served

	// Owned by the driver.
	mounted   string                // digest of the resources that are in it
	collected map[string]outputSeen // outputs that are kept as files, by path
	told      left                  // what the user was last told of outputs that are not

	mu      sync.Mutex
	shut    bool                   // no new connection is served: calls are run again, or it is let go of
	partial bool                   // it does not hold yet what the log says of it: nothing of it is saved
	running map[store.EventID]bool // contained calls under way
}

func newMachine(s *sandbox.Sandbox) *machine {
	return &machine{s: s, over: make(chan struct{}), running: map[store.EventID]bool{}}
}

// reopened is the same machine with its way out open again.
func (b *machine) reopened() *machine {
	n := newMachine(b.s)
	n.mounted, n.collected, n.told = b.mounted, b.collected, b.told
	return n
}

// dead reports whether the sandbox's process is gone.
func (b *machine) dead() bool {
	select {
	case <-b.s.Done():
		return true
	default:
		return false
	}
}

// begin and end say which calls are under way, so that a tunnel can name them.
func (b *machine) begin(id store.EventID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running[id] = true
}

func (b *machine) end(id store.EventID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.running, id)
}

func (b *machine) underWay() []store.EventID {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []store.EventID
	for id := range b.running {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

// setShut closes the door for new connections, or opens it.
func (b *machine) setShut(shut bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shut = shut
}

// setPartial says whether calls that ended have still to be run again in it.
func (b *machine) setPartial(partial bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.partial = partial
}

func (b *machine) isPartial() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.partial
}

// enter lets a connection in, unless the door is closed.
func (b *machine) enter() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.shut {
		return false
	}
	b.tunnels.Add(1)
	return true
}

// held is the machine in this driver's hands that lives; nil when there is none.
func (d *driver) held() *machine {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hands == nil || d.hands.dead() {
		return nil
	}
	return d.hands
}

// hold takes a machine into the driver's hands.
func (d *driver) hold(b *machine) {
	d.mu.Lock()
	d.hands, d.box = b, b.s
	d.mu.Unlock()
}

// drop takes a machine out of the driver's hands.
func (d *driver) drop(b *machine) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hands == b {
		d.hands, d.box = nil, nil
	}
}

// letGo closes the machine's way out, waits until no connection is served any
// more, so that the ends of tunnels are in the log, and takes it out of the
// driver's hands. The sandbox lives on.
func (d *driver) letGo() {
	d.mu.Lock()
	b := d.hands
	d.hands, d.box = nil, nil
	d.mu.Unlock()
	if b != nil {
		b.close()
	}
}

// close closes the way out for good and waits for what was served.
func (b *machine) close() {
	b.mu.Lock()
	select {
	case <-b.over:
	default:
		close(b.over)
	}
	b.shut = true
	b.mu.Unlock()
	b.tunnels.Wait()
}

// environment is what a driver needs of the wire environment (reference section
// 4.1). A session without one is in a cloud without limits.
type environment struct {
	api.EnvironmentConfig
	machine api.Machine
}

// Defaults of an environment's machine.
const (
	defaultCallTime  = 10 * time.Minute
	cancelledCallEnd = 10 * time.Second // how long a cancelled call may take to say so
	cancelAgain      = 500 * time.Millisecond
)

func parseEnvironment(raw json.RawMessage) (environment, error) {
	e := environment{EnvironmentConfig: api.EnvironmentConfig{Type: api.EnvironmentCloud}}
	if len(raw) > 0 && string(raw) != "null" {
		if err := json.Unmarshal(raw, &e.EnvironmentConfig); err != nil {
			return e, fmt.Errorf("read environment: %w", err)
		}
	}
	if e.Planaria != nil {
		e.machine = *e.Planaria
	}
	return e, nil
}

func (e environment) cloud() bool { return e.Type == "" || e.Type == api.EnvironmentCloud }

func (e environment) linger() time.Duration { return e.machine.Linger() }

func (e environment) callTime() time.Duration {
	if e.machine.CallSeconds > 0 {
		return time.Duration(e.machine.CallSeconds) * time.Second
	}
	return defaultCallTime
}

// sandboxed reports whether this session's built-in tools run here.
func (d *driver) sandboxed() (yes bool) {
	if d.m.cfg.Sandboxes == nil {
		return false
	}
	d.read(func(st *state) { yes = st.env.cloud() })
	return yes
}

// spec describes the session's machine, but for its root.
func (d *driver) spec() sandbox.Spec {
	var e environment
	d.read(func(st *state) { e = st.env })
	return sandbox.Spec{Workspace: string(d.ws), ID: string(d.id), Fence: uint64(d.lease.Fence()),
		Limits: sandbox.Limits{MemoryBytes: e.machine.MemoryMB << 20, CPUs: e.machine.CPUs, DiskBytes: e.machine.DiskMB << 20,
			Processes: e.machine.Processes, CallTime: e.callTime()}}
}

// holders finds the driver that holds a sandbox.
type holders struct {
	mu  sync.Mutex
	all map[[2]string]*driver
}

func (h *holders) add(d *driver) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all == nil {
		h.all = map[[2]string]*driver{}
	}
	h.all[d.key()] = d
}

func (h *holders) remove(d *driver) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all[d.key()] == d {
		delete(h.all, d.key())
	}
}

func (h *holders) of(workspace, id string) *driver {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.all[[2]string{workspace, id}]
}

func (d *driver) key() [2]string { return [2]string{string(d.ws), string(d.id)} }

// adopting is how long a connection waits for its sandbox to be taken into a
// driver's hands: one that was just started or found is in a moment.
const adopting = 10 * time.Second

// Egress serves one connection of a process in a sandbox under the session that
// holds it; a sandbox that no driver holds has no way out.
func (m *Manager) Egress(ctx context.Context, s *sandbox.Sandbox, conn io.ReadWriteCloser) {
	if m.builds.serve(ctx, m.cfg.Gateway, s, conn) {
		return
	}
	d, b := m.holder(ctx, s)
	if b == nil || !b.enter() {
		_ = conn.Close()
		return
	}
	defer b.tunnels.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends with this call
		select {
		case <-b.over:
		case <-d.lease.Lost():
		case <-ctx.Done():
		}
		cancel()
	}()
	if err := d.unpanicked(func() error {
		m.cfg.Gateway.Egress(ctx, d.egressScope(b), conn)
		return nil
	}); err != nil {
		_ = conn.Close()
	}
}

// holder waits until a driver holds the sandbox.
func (m *Manager) holder(ctx context.Context, s *sandbox.Sandbox) (*driver, *machine) {
	ctx, cancel := context.WithTimeout(ctx, adopting)
	defer cancel()
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for {
		d := m.holders.of(s.Workspace(), s.ID())
		if d != nil {
			if b := d.held(); b != nil && b.s == s {
				return d, b
			}
		}
		select {
		case <-ctx.Done():
			return nil, nil
		case <-s.Done():
			return nil, nil
		case <-t.C:
		}
	}
}

// egressScope says what the machine's processes may reach. A tunnel is in the
// log before it is dialled (law L1): a call that reached out is not run again.
func (d *driver) egressScope(b *machine) gateway.EgressScope {
	var e environment
	var servers []string
	d.read(func(st *state) {
		e = st.env
		for _, s := range st.agent.MCPServers {
			servers = append(servers, s.URL)
		}
	})
	return gateway.EgressScope{Workspace: d.ws, Session: d.id, Network: network(e, servers), Repositories: d.repositories(),
		Opened: func(ctx context.Context, t store.Tunnel) error {
			t.V, t.Calls = store.BodyVersion, b.underWay()
			_, err := d.append(ctx, store.Append{Entries: []store.Draft{record(store.KindTunnel, t.Tunnel, d.scope.Thread, t)}})
			return err
		},
		Ended: func(t store.Tunnel) {
			t.V, t.Ended = store.BodyVersion, true
			d.m.db.AppendRelaxed(d.lease, []store.Draft{record(store.KindTunnel, t.Tunnel, d.scope.Thread, t)})
		}}
}

// network reads an environment's networking. A type that is not known is not
// taken for unrestricted.
func network(e environment, servers []string) gateway.Network {
	if e.Networking == nil || e.Networking.Type == api.NetworkUnrestricted {
		return gateway.Network{Unrestricted: true}
	}
	n := gateway.Network{Hosts: slices.Clone([]string(e.Networking.AllowedHosts)), PackageManagers: e.Networking.AllowPackageManagers}
	if e.Networking.AllowMCPServers {
		for _, s := range servers {
			if u, err := url.Parse(s); err == nil && u.Hostname() != "" {
				n.Servers = append(n.Servers, u.Host)
			}
		}
	}
	return n
}

// sweepEvery is how often sandboxes that nobody holds are looked for.
const sweepEvery = 2 * time.Second

// sweep ends sandboxes that no driver will hold again, and sees to it that a
// session at rest whose sandbox was left running is claimed to suspend it. It
// runs until ctx ends.
func (m *Manager) sweep(ctx context.Context) {
	s := sweeper{m: m, asked: map[[2]string]time.Time{}, seen: map[[2]string]time.Time{}}
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	for {
		for _, key := range m.cfg.Sandboxes.Live() {
			if err := s.look(ctx, key); err != nil && ctx.Err() == nil {
				m.log.Warn("cannot sweep sandbox", "session", key[1], "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// sessionPrefix begins the ids of sessions.
const sessionPrefix = "sesn_"

// How long a sandbox stays that no session will hold again.
const (
	// strangerStays: one that is no session's is a copy under test, which lives
	// for a moment, unless the process that tested it died.
	strangerStays = 10 * time.Minute
	// damagedStays: a person may mend the log of its session meanwhile. Its
	// snapshots stay.
	damagedStays = time.Hour
)

// sweeper looks at sandboxes that no driver holds.
type sweeper struct {
	m     *Manager
	asked map[[2]string]time.Time // sessions that were asked to leave, and when
	seen  map[[2]string]time.Time // sandboxes that stay for a while, and since when
}

// stays reports whether a sandbox has not been seen for long enough yet.
func (w *sweeper) stays(key [2]string, long time.Duration) bool {
	since, ok := w.seen[key]
	if !ok {
		since = w.m.now()
		w.seen[key] = since
	}
	return w.m.now().Sub(since) < long
}

// look decides what becomes of one sandbox.
func (w *sweeper) look(ctx context.Context, key [2]string) error {
	if w.m.holders.of(key[0], key[1]) != nil {
		return nil
	}
	ws, id := store.WorkspaceID(key[0]), store.SessionID(key[1])
	// Read before the row: it only grows.
	fence, ok := w.m.cfg.Sandboxes.FenceOf(key[0], key[1])
	if !ok {
		return nil
	}
	row, err := w.m.db.Session(ctx, ws, id)
	switch {
	case errors.Is(err, store.ErrNotFound) && !strings.HasPrefix(key[1], sessionPrefix):
		if w.stays(key, strangerStays) {
			return nil
		}
		return w.kill(ctx, key, fence, "it is no session's")
	case errors.Is(err, store.ErrNotFound):
		return w.kill(ctx, key, fence, "the session is gone")
	case err != nil && !errors.Is(err, store.ErrDamaged):
		return err
	case errors.Is(err, store.ErrDamaged) || row.Damaged != "":
		if w.stays(key, damagedStays) {
			return nil
		}
		return w.kill(ctx, key, fence, "the session's log is damaged")
	case row.Status == store.StatusTerminated:
		return w.kill(ctx, key, fence, "the session is terminated")
	case row.Owner != "" && row.Owner != w.m.cfg.Node.ID() && uint64(row.Fence) > fence:
		return w.kill(ctx, key, fence, "the session has a newer owner")
	case row.Owner != "" || row.Status != store.StatusIdle:
		return nil // a driver comes; an owner of this fence is the process that was here before
	}
	return w.atRest(ctx, key, fence, row)
}

// atRest sees to the sandbox of a session that rests without an owner.
func (w *sweeper) atRest(ctx context.Context, key [2]string, fence uint64, row store.Session) error {
	newest, err := w.m.db.Entries(ctx, row.Workspace, row.ID, store.Range{Kinds: []store.Kind{store.KindMachine}, Desc: true, Limit: 1})
	if err != nil {
		return err
	}
	if len(newest) == 0 {
		return w.kill(ctx, key, fence, "no record tells of it")
	}
	var body store.Machine
	if err := json.Unmarshal(newest[0].Body, &body); err != nil {
		return err
	}
	if !liveAct(body.Act) {
		return w.kill(ctx, key, fence, "the session's machine is "+body.Act)
	}
	if !row.WakeAt.IsZero() || w.m.now().Sub(w.asked[key]) < time.Minute {
		return nil // its next owner comes by itself
	}
	w.asked[key] = w.m.now()
	return w.m.askToLeave(ctx, row.Workspace, row.ID)
}

// kill ends a sandbox that nobody holds, unless it was claimed since it was looked
// at.
func (w *sweeper) kill(ctx context.Context, key [2]string, fence uint64, why string) error {
	if w.m.holders.of(key[0], key[1]) != nil {
		return nil // claimed meanwhile
	}
	w.m.log.Info("ends a sandbox that nobody holds", "session", key[1], "why", why)
	return w.m.cfg.Sandboxes.EndUnder(context.WithoutCancel(ctx), key[0], key[1], fence)
}

// killNamed ends the sandbox of the driver's session, whether or not it answers,
// unless it is a newer owner's by now.
func (d *driver) killNamed(ctx context.Context) error {
	return d.m.cfg.Sandboxes.EndUnder(context.WithoutCancel(ctx), string(d.ws), string(d.id), uint64(d.lease.Fence()))
}

// paused are the sandboxes whose owner lost its lease: they stand still until
// this node owns the session again, or a newer owner is known.
type paused struct {
	mu  sync.Mutex
	all map[[2]string]*sandbox.Sandbox
}

// pauseLost makes the machine of a lost lease stand still: nothing in it may go
// on while somebody else may bring it back elsewhere.
func (d *driver) pauseLost(ctx context.Context) {
	b := d.held()
	if b == nil {
		return
	}
	b.close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelledCallEnd)
	defer cancel()
	p := &d.m.paused
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.m.holders.of(string(d.ws), string(d.id)) != d {
		return // this node owns the session again: whoever drives it now lets it run
	}
	if err := b.s.Pause(ctx); err != nil {
		d.m.log.Warn("cannot pause the machine of a lost lease", "session", d.id, "err", err)
		return
	}
	if p.all == nil {
		p.all = map[[2]string]*sandbox.Sandbox{}
	}
	p.all[d.key()] = b.s
}

// unpause lets a sandbox go on whose session this node owns again.
func (m *Manager) unpause(ctx context.Context, key [2]string) {
	m.paused.mu.Lock()
	defer m.paused.mu.Unlock()
	s := m.paused.all[key]
	if s == nil {
		return
	}
	if err := s.Resume(ctx); err != nil && !gone(s) {
		m.log.Warn("cannot let a machine go on", "session", key[1], "err", err)
		return // the next owner tries again
	}
	delete(m.paused.all, key)
}

// gone tells whether a sandbox has died.
func gone(s *sandbox.Sandbox) bool {
	select {
	case <-s.Done():
		return true
	default:
		return false
	}
}

// askToLeave asks the owner of a session at rest to suspend its machine and
// leave; without an owner the next one comes for it.
func (m *Manager) askToLeave(ctx context.Context, ws store.WorkspaceID, id store.SessionID) error {
	d := store.Delivery{ID: store.NewID("inb_", m.now()), Kind: store.InboxControl, Type: controlLeave, Urgent: true, Body: []byte(`{"v":1}`)}
	_, err := m.db.Deliver(ctx, ws, id, []store.Delivery{d}, nil)
	return err
}

// leavingTime is how long an operation waits for a session at rest to be left.
const leavingTime = 30 * time.Second

// unowned runs an operation that needs a session without an owner. One that only
// lingers with its machine is asked to leave first.
func (m *Manager) unowned(ctx context.Context, ws store.WorkspaceID, id store.SessionID, op func() error) error {
	err := op()
	if !errors.Is(err, store.ErrOwned) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, leavingTime)
	defer cancel()
	for asked := false; ; {
		s, serr := m.db.Session(ctx, ws, id)
		switch {
		case serr != nil || s.Status != store.StatusIdle:
			return err
		case s.Owner == "":
			if err = op(); !errors.Is(err, store.ErrOwned) {
				return err
			}
			asked = false
		case !asked:
			if aerr := m.askToLeave(ctx, ws, id); aerr != nil {
				return err
			}
			asked = true
		}
		t := time.NewTimer(10 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return err
		}
	}
}
