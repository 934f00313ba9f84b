//go:build linux

package guest

import (
	"crypto/hmac"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/planaria/planaria/internal/sandbox/link"
	"github.com/planaria/planaria/internal/sandbox/wire"
)

// Agent is process 1.
type Agent struct {
	mux  *link.Mux
	reap *reaper
	stir chan struct{} // size 1: a call has begun

	mu         sync.Mutex
	key        []byte
	fence      uint64
	owner      string
	generation uint64
	prepared   map[string][]byte // snapshot -> key of its restore
	limits     Limits
	env        []string
	calls      map[string]*call
	shells     map[string]*shell
	chrome     *chrome  // nil until a call needs it
	placed     []string // folders that the host has put files into
	changes    uint64
	kept       int64 // bytes of results
	egressOpen bool
	carried    map[string]bool // open connections to the proxy inside
	dead       []string        // those that a restore ended
}

// Main runs the agent and never returns.
func Main() {
	a, err := begin()
	if err != nil {
		fmt.Fprintf(os.Stderr, "planaria-agent: %v\n", err)
		os.Exit(1)
	}
	a.dial()
}

// begin reads the set-up and starts everything but the link.
func begin() (*Agent, error) {
	var setup Setup
	if err := json.NewDecoder(io.LimitReader(os.Stdin, 1<<20)).Decode(&setup); err != nil {
		return nil, fmt.Errorf("read set-up: %w", err)
	}
	// No process of the sandbox may read the key out of this one.
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, syscall.PR_SET_DUMPABLE, 0, 0, 0, 0, 0); errno != 0 {
		return nil, fmt.Errorf("hide the agent's memory: %w", errno)
	}
	shield()
	a := &Agent{
		reap: newReaper(), key: setup.Key, fence: setup.Fence, owner: setup.Owner, generation: 1,
		prepared: map[string][]byte{}, limits: setup.Limits, env: setup.Env,
		calls: map[string]*call{}, shells: map[string]*shell{}, carried: map[string]bool{}, egressOpen: setup.Identity.Egress,
		stir: make(chan struct{}, 1),
	}
	if a.limits.Processes == 0 {
		a.limits.Processes = 512
	}
	if a.limits.CallMillis == 0 {
		a.limits.CallMillis = 600_000
	}
	a.mux = link.New(link.Guest, a.accept)
	go a.reap.run()
	for _, dir := range []string{Workspace, Outputs, Uploads, "/tmp"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	if err := os.Chmod("/tmp", 0o777|os.ModeSticky); err != nil {
		return nil, err
	}
	if err := setIdentity(&setup.Identity); err != nil {
		return nil, err
	}
	if err := os.Chdir(Workspace); err != nil {
		return nil, err
	}
	go a.guard()
	go a.egress()
	return a, nil
}

// dial keeps a connection to the host for ever.
func (a *Agent) dial() {
	path := filepath.Join(ControlDir, SocketName)
	wait := time.Millisecond
	for {
		conn, err := dialBlocking(path)
		if err == nil {
			began := time.Now()
			err = a.serve(conn, path)
			if time.Since(began) > time.Second {
				wait = time.Millisecond
			}
		}
		// No server: look again soon at first, twice a second later on.
		time.Sleep(wait)
		if wait = wait * 3 / 2; wait > 500*time.Millisecond {
			wait = 500 * time.Millisecond
		}
		if err == nil {
			wait = time.Millisecond
		}
	}
}

// serve does the handshake and carries the streams until the cut.
func (a *Agent) serve(conn *blockingConn, path string) error {
	peer, err := a.handshake(conn)
	if err != nil {
		conn.shut()
		_ = conn.Close()
		return err
	}
	stop := make(chan struct{})
	go watchSocket(conn, path, stop)
	_ = a.mux.Serve(conn, peer)
	close(stop)
	return nil
}

// watchSocket cuts the connection when another server has put its socket in
// the place of the one that was dialled: the owner of before may be stopped and
// keep its end open. A newer owner must not wait for it.
func watchSocket(conn *blockingConn, path string, stop <-chan struct{}) {
	first, err := inode(path)
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		now, nerr := inode(path)
		if err != nil {
			first, err = now, nerr
		} else if nerr == nil && now != first {
			conn.shut()
			return
		}
	}
}

func inode(path string) (uint64, error) {
	var st syscall.Stat_t
	err := syscall.Lstat(path, &st)
	return st.Ino, err
}

var errRefused = errors.New("owner refused")

// handshake proves both sides to each other and decides what stays.
func (a *Agent) handshake(conn io.ReadWriter) (link.State, error) {
	var greeting wire.Greeting
	if err := wire.ReadMessage(conn, wire.MaxHandshake, &greeting); err != nil {
		return link.State{}, err
	}
	challenge := make([]byte, 32)
	if _, err := rand.Read(challenge); err != nil {
		return link.State{}, err
	}
	key, hello := a.hello(&greeting, challenge)
	if err := wire.WriteMessage(conn, hello); err != nil {
		return link.State{}, err
	}
	if key == nil {
		return link.State{}, fmt.Errorf("%w: snapshot %s is not in this memory", errRefused, greeting.Snapshot)
	}
	var offer wire.Offer
	if err := wire.ReadMessage(conn, wire.MaxHandshake, &offer); err != nil {
		return link.State{}, err
	}
	accept := wire.Accept{Refused: "proof is wrong"}
	if hmac.Equal(offer.Proof, wire.Prove(key, "host", challenge, offer.Fence)) {
		accept = a.judge(&greeting, &offer, key)
	}
	if err := wire.WriteMessage(conn, accept); err != nil {
		return link.State{}, err
	}
	if accept.Refused != "" {
		return link.State{}, fmt.Errorf("%w: %s", errRefused, accept.Refused)
	}
	return offer.State, nil
}

// hello answers a greeting with the key of its mode, nil where there is none.
func (a *Agent) hello(g *wire.Greeting, challenge []byte) ([]byte, wire.Hello) {
	a.mu.Lock()
	defer a.mu.Unlock()
	h := wire.Hello{Version: wire.Version, Generation: a.generation, Fence: a.fence, Challenge: challenge}
	key := a.key
	if g.Mode == wire.Restore {
		key = a.prepared[g.Snapshot]
	}
	if key != nil {
		h.Proof = wire.Prove(key, "agent", g.Challenge, a.fence)
	}
	return key, h
}

// judge accepts a proved owner whose fence is higher, or the same owner again.
func (a *Agent) judge(g *wire.Greeting, o *wire.Offer, key []byte) wire.Accept {
	a.mu.Lock()
	defer a.mu.Unlock()
	accept := wire.Accept{Fence: a.fence}
	switch {
	case g.Mode == wire.Restore:
		// Another life begins: the fence is that of its own session, every
		// stream belonged to the former one.
		a.key = key
		a.prepared = map[string][]byte{}
		a.generation = g.Generation
		a.egressOpen = false // until the new identity is set
		a.dead = slices.Sorted(maps.Keys(a.carried))
		for _, c := range a.calls {
			c.restored()
		}
		accept.Fresh = true
	case o.Fence < a.fence || o.Fence == a.fence && o.Owner != a.owner:
		accept.Refused = "a newer owner holds this sandbox"
		return accept
	case o.Owner != a.owner:
		accept.Fresh = true
	}
	if accept.Fresh {
		a.mux.Reset(errors.New("another owner"))
	}
	a.fence, a.owner = o.Fence, o.Owner
	accept.Fence = a.fence
	accept.State = a.mux.State()
	return accept
}

// accept serves a stream that the host opened.
func (a *Agent) accept(s *link.Stream) {
	switch s.Kind() {
	case wire.KindCall:
		a.serveCall(s)
	case wire.KindAdmin:
		a.serveAdmin(s)
	default:
		s.Reset()
	}
}
