package store_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// childURL makes this test binary another process of the same store.
const childURL = "PLANARIA_STORE_TEST_URL"

// TestChild is the other process: it joins, claims when told, appends when told.
func TestChild(t *testing.T) {
	url := os.Getenv(childURL)
	if url == "" {
		t.Skip("runs as a child of other tests")
	}
	ttl, err := time.ParseDuration(os.Getenv(childURL + "_TTL"))
	if err != nil {
		t.Fatal(err)
	}
	cfg := store.Config{URL: url, Master: newMaster(t), Blobs: &memBlobs{}, LeaseTTL: ttl, LeaseRenew: ttl / 3, LeaseMargin: ttl / 3}
	db, err := store.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { db.Run(ctx) })
	n, err := db.Join(ctx, store.NodeInfo{Roles: []string{"worker"}})
	if err != nil {
		t.Fatal(err)
	}
	wg.Go(func() { n.Run(ctx) })
	fmt.Println("joined", n.ID())
	var l *store.Lease
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "claim":
			ls, err := n.Claim(ctx, 1)
			if len(ls) > 0 {
				l = ls[0]
			}
			fmt.Println("claimed", len(ls), err)
		case "append":
			_, err := db.Append(ctx, l, entries(event("child")))
			fmt.Println("appended", err == nil, "fenced", errors.Is(err, store.ErrFenced))
		case "hammer":
			ls, err := n.Claim(ctx, 100)
			if err != nil {
				t.Error(err)
			}
			for _, l := range ls {
				wg.Go(func() {
					for {
						id := newEffect()
						for _, a := range []store.Append{entries(intent(id, store.ClassIrreversible)), entries(attempt(id, 1)), entries(completion(id, 1))} {
							out, err := db.Append(ctx, l, a)
							if err != nil {
								return
							}
							// One write per line: a line that is there is whole.
							os.Stdout.WriteString(fmt.Sprintf("ack %s %d\n", l.Session(), out[0].Seq))
						}
					}
				})
			}
			fmt.Println("hammering", len(ls))
		case "fail-sync":
			fmt.Println("syncs-fail", failSyncs())
		case "trusted":
			fmt.Println("trusted", time.Now().Round(0).Before(l.Trusted()))
		case "leave":
			cancel()
			wg.Wait()
			db.Close()
			fmt.Println("left")
		}
	}
	cancel()
	wg.Wait()
}

// child is the other process as the parent sees it.
type child struct {
	t    *testing.T
	cmd  *exec.Cmd
	in   io.Writer
	out  *bufio.Scanner
	node store.NodeID
}

func newChild(t *testing.T, url string, ttl time.Duration) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestChild$", "-test.v")
	cmd.Env = append(os.Environ(), childURL+"="+url, childURL+"_TTL="+ttl.String())
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, cmd: cmd, in: in, out: bufio.NewScanner(out)}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGCONT)
		cmd.Process.Kill()
		cmd.Wait()
	})
	c.node = store.NodeID(c.wait("joined"))
	return c
}

// wait returns what follows a word on the child's next line that has it.
func (c *child) wait(word string) string {
	c.t.Helper()
	for c.out.Scan() {
		if _, rest, ok := strings.Cut(c.out.Text(), word+" "); ok {
			return rest
		}
		if c.out.Text() == word {
			return ""
		}
	}
	c.t.Fatalf("the child ended before it said %q", word)
	return ""
}

func (c *child) tell(command, answer string) string {
	c.t.Helper()
	if _, err := fmt.Fprintln(c.in, command); err != nil {
		c.t.Fatal(err)
	}
	return c.wait(answer)
}

// until waits for a condition that another process brings about.
func until(t *testing.T, limit time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Since(start) > limit {
			t.Fatalf("after %v still not: %s", limit, what)
		}
		<-tick.C
	}
	return time.Since(start)
}

// watched is an env whose node runs.
func watched(t *testing.T, ttl time.Duration) *env {
	t.Helper()
	e := newEnvWith(t, testenv.Postgres(t), func(c *store.Config) {
		c.LeaseTTL, c.LeaseRenew, c.LeaseMargin = ttl, ttl/3, ttl/3
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := e.node.Run(ctx); err != nil {
			t.Errorf("node: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return e
}

// A killed process is seen within half a second, by its advisory lock, and its
// session is claimed by another node (recipe K1, L7).
func TestKilledNode(t *testing.T) {
	e := watched(t, 6*time.Second)
	c := newChild(t, e.cfg.URL, 6*time.Second)
	id := e.create(message("go")).ID
	until(t, 5*time.Second, "the child claims", func() bool { return strings.HasPrefix(c.tell("claim", "claimed"), "1") })
	if got := c.tell("append", "appended"); got != "true fenced false" {
		t.Fatalf("child append = %s", got)
	}
	if at, err := e.db.Dead(t.Context(), c.node); err != nil || !at.IsZero() {
		t.Fatalf("dead while it lives: %v, %v", at, err)
	}
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	took := until(t, 5*time.Second, "the node is proved dead", func() bool {
		at, err := e.db.Dead(t.Context(), c.node)
		return err == nil && !at.IsZero()
	})
	t.Logf("seen after %v", took)
	if took > 1500*time.Millisecond { // 500 ms on a machine that is not shared
		t.Errorf("seen only after %v", took)
	}
	l := e.claim()
	if l.Fence() != 2 || l.Session() != id {
		t.Errorf("claimed fence %d", l.Fence())
	}
	list, err := e.db.Entries(t.Context(), ws, id, store.Range{Kinds: []store.Kind{store.KindClaim}})
	if err != nil || len(list) != 2 || !strings.Contains(string(list[1].Body), `"former":"`+string(c.node)) {
		t.Errorf("claims = %v, %v", list, err)
	}
	e.sound(id)
}

// A stopped process keeps its lease until it ends, is not proved dead, and when
// it goes on its writes are refused and it does not trust itself (recipe W1).
func TestStoppedNode(t *testing.T) {
	const ttl = 1500 * time.Millisecond
	e := watched(t, ttl)
	c := newChild(t, e.cfg.URL, ttl)
	id := e.create(message("go")).ID
	until(t, 5*time.Second, "the child claims", func() bool { return strings.HasPrefix(c.tell("claim", "claimed"), "1") })
	if got := c.tell("trusted", "trusted"); got != "true" {
		t.Fatalf("child trusts its lease: %s", got)
	}
	if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var l *store.Lease
	took := until(t, 10*time.Second, "another node claims", func() bool {
		ls, err := e.node.Claim(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		if len(ls) == 1 {
			l = ls[0]
		}
		return l != nil
	})
	t.Logf("claimed after %v", took)
	if took < ttl/4 {
		t.Errorf("claimed after %v, while the lease of %v held", took, ttl)
	}
	if at, err := e.db.Dead(t.Context(), c.node); err != nil || !at.IsZero() {
		t.Errorf("a stopped process was proved dead at %v, %v", at, err)
	}
	e.must(l, entries(running()))
	head := e.session(id).Head
	if err := c.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if got := c.tell("append", "appended"); got != "false fenced true" {
		t.Errorf("zombie append = %s", got)
	}
	if got := c.tell("trusted", "trusted"); got != "false" {
		t.Errorf("the zombie trusts its lease: %s", got)
	}
	if got := e.session(id).Head; got != head {
		t.Errorf("head = %d after the zombie wrote, want %d", got, head)
	}
	e.must(l, store.Append{Entries: []store.Draft{idle()}, Park: true})
	e.sound(id)
}

// A node that leaves frees its sessions at once.
func TestLeavingNode(t *testing.T) {
	e := watched(t, 6*time.Second)
	c := newChild(t, e.cfg.URL, 6*time.Second)
	e.create(message("go"))
	until(t, 5*time.Second, "the child claims", func() bool { return strings.HasPrefix(c.tell("claim", "claimed"), "1") })
	c.tell("leave", "left")
	if l := e.claim(); l.Fence() != 2 {
		t.Errorf("fence = %d", l.Fence())
	}
}

// Two nodes that claim at once share the sessions; none has two owners (recipe W2).
func TestClaimRace(t *testing.T) {
	e := watched(t, 6*time.Second)
	const n = 40
	for range n {
		e.create(message("go"))
	}
	other, err := e.db.Join(t.Context(), store.NodeInfo{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	owners := map[store.SessionID]int{}
	for _, node := range []*store.Node{e.node, other, e.node, other} {
		wg.Go(func() {
			for range 2 * n {
				ls, err := node.Claim(t.Context(), 3)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, l := range ls {
					owners[l.Session()]++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(owners) != n {
		t.Errorf("%d sessions were claimed, want %d", len(owners), n)
	}
	for id, k := range owners {
		if k != 1 {
			t.Errorf("session %s was claimed %d times", id, k)
		}
	}
}

// A node whose clock is off claims nothing.
func TestSkewedClock(t *testing.T) {
	url := testenv.Postgres(t)
	e := newEnvWith(t, url, func(c *store.Config) {
		c.Now = func() time.Time { return time.Now().Add(time.Second) }
	})
	e.create(message("go"))
	if ls, err := e.node.Claim(t.Context(), 1); err != nil || len(ls) != 0 {
		t.Errorf("claimed %d sessions with a clock a second ahead, %v", len(ls), err)
	}
}

// Delivery, stream and work reach another node by notice and by poll.
func TestAcrossNodes(t *testing.T) {
	url := testenv.Postgres(t)
	a := newEnvWith(t, url, nil)
	b := newEnvWith(t, url, nil)
	id := a.create(message("go")).ID
	<-b.node.Work()
	f, err := a.db.Follow(t.Context(), ws, id, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var l *store.Lease
	until(t, 5*time.Second, "b claims", func() bool {
		ls, err := b.node.Claim(t.Context(), 1)
		if len(ls) == 1 {
			l = ls[0]
		}
		return err == nil && l != nil
	})
	<-l.Inbox() // the message of the creation
	if _, err := a.db.Deliver(t.Context(), ws, id, []store.Delivery{message("more")}, nil); err != nil {
		t.Fatal(err)
	}
	<-l.Inbox()
	b.must(l, entries(running(), event("agent.message")))
	seq := store.Seq(0)
	queued := 0
	for seq < 4 || queued < 2 {
		items, err := f.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, it := range items {
			if it.Queued != nil {
				queued++
				continue
			}
			if it.Entry.Seq != seq+1 {
				t.Fatalf("seq %d after %d", it.Entry.Seq, seq)
			}
			seq = it.Entry.Seq
		}
	}
	if queued != 2 {
		t.Errorf("%d queued events, want 2", queued)
	}
}

// On SQLite a new process is the only node: the owners of the former are dead
// and proved so; the folder cannot be opened twice.
func TestFolderLock(t *testing.T) {
	e := newEnv(t, "sqlite:"+t.TempDir()+"/planaria.db")
	e.create(message("go"))
	l := e.claim()
	former := e.node.ID()
	if _, err := store.Open(t.Context(), e.cfg); !errors.Is(err, store.ErrLocked) {
		t.Fatalf("second open = %v, want locked", err)
	}
	e.crash()
	if at, err := e.db.Dead(t.Context(), former); err != nil || at.IsZero() {
		t.Errorf("former node dead at %v, %v", at, err)
	}
	l2 := e.claim()
	if l2.Fence() != l.Fence()+1 {
		t.Errorf("fence = %d after %d", l2.Fence(), l.Fence())
	}
	if until := l2.Trusted(); until.Before(time.Now().Add(24 * time.Hour)) {
		t.Errorf("trusted until %v", until)
	}
	// A second node in the same process ends the first.
	if _, err := e.db.Join(t.Context(), store.NodeInfo{}); err != nil {
		t.Fatal(err)
	}
	<-l2.Lost()
	if _, err := e.db.Append(t.Context(), l2, entries(event("x"))); !errors.Is(err, store.ErrFenced) {
		t.Errorf("append of a former node = %v, want fenced", err)
	}
	if _, err := e.node.Claim(t.Context(), 1); !errors.Is(err, store.ErrFenced) {
		t.Errorf("claim of a former node = %v, want fenced", err)
	}
}

// Connections that the server cuts at any moment lose nothing and write nothing
// twice.
func TestCutConnections(t *testing.T) {
	url := testenv.Postgres(t)
	e := newEnvWith(t, url, nil)
	const n = 8
	for range n {
		e.create(message("go"))
	}
	leases, err := e.node.Claim(t.Context(), n)
	if err != nil || len(leases) != n {
		t.Fatalf("claimed %d, %v", len(leases), err)
	}
	admin, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(context.Background())
	stop := make(chan struct{})
	var cutter sync.WaitGroup
	cuts := 0
	cutter.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			var k int
			// Not the nodes' lock connections, which are idle outside of a transaction since long.
			if err := admin.QueryRow(t.Context(), `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'`).Scan(&k); err != nil {
				t.Errorf("cut: %v", err)
				return
			}
			cuts += k
		}
	})
	want := make([][]string, n)
	var wg sync.WaitGroup
	for i, l := range leases {
		wg.Go(func() {
			for k := range 150 {
				d := event("x", "k", k)
				_, err := e.db.Append(t.Context(), l, entries(d))
				switch {
				case err == nil:
					want[i] = append(want[i], d.ID)
				case errors.Is(err, store.ErrUnknown), errors.Is(err, store.ErrFenced):
					return // the owner drops its memory
				default:
					t.Logf("append: %v", err) // nothing is there
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	cutter.Wait()
	t.Logf("%d connections were cut", cuts)
	if cuts == 0 {
		t.Error("no connection was cut")
	}
	for i, l := range leases {
		list, err := e.db.Entries(t.Context(), ws, l.Session(), store.Range{Types: []string{"x"}})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, x := range list {
			got = append(got, x.ID)
		}
		if extra := len(got) - len(want[i]); extra < 0 || extra > 1 || !slices.Equal(got[:len(want[i])], want[i]) {
			t.Errorf("session %d has %d entries, acknowledged were %d", i, len(got), len(want[i]))
		}
		e.sound(l.Session())
	}
}

// A process that is killed at any moment loses nothing that it acknowledged,
// and its successor goes on (recipes K1 to K3, W3).
func TestKilledWriter(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		const sessions, kills = 6, 5
		head := map[store.SessionID]store.Seq{}
		for range sessions {
			s := e.create(message("go"))
			head[s.ID] = s.Head
		}
		for round := range kills {
			e.close()
			c := newChild(t, e.cfg.URL, time.Hour)
			if got := c.tell("hammer", "hammering"); got != fmt.Sprint(sessions) {
				t.Fatalf("round %d: the child claimed %s sessions", round, got)
			}
			acks := 0
			for limit := 20 + 37*round; c.out.Scan(); {
				var id store.SessionID
				var seq store.Seq
				if _, err := fmt.Sscanf(c.out.Text(), "ack %s %d", &id, &seq); err != nil {
					continue
				}
				if head[id] >= seq {
					t.Fatalf("session %s: seq %d was given out again", id, seq)
				}
				head[id] = seq
				if acks++; acks == limit {
					c.cmd.Process.Kill() // what is in the pipe was acknowledged, too
				}
			}
			c.cmd.Wait()
			e.open()
			for id, want := range head {
				s := e.session(id)
				if s.Head < want || s.Damaged != "" {
					t.Fatalf("round %d: session %s ends at %d (%s), acknowledged was %d", round, id, s.Head, s.Damaged, want)
				}
				head[id] = s.Head
				e.sound(id)
			}
		}
	})
}

// Readers that hang do not cost a node its lease, and appends go on.
func TestHangingReaders(t *testing.T) {
	const ttl = time.Second
	blobs := &hangingBlobs{memBlobs: &memBlobs{}, asked: make(chan struct{}, 100), answer: make(chan struct{})}
	e := newEnvWith(t, testenv.Postgres(t), func(c *store.Config) {
		c.Blobs = blobs
		c.LeaseTTL, c.LeaseRenew, c.LeaseMargin = ttl, ttl/5, ttl/4
	})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		if err := e.node.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	id := e.create().ID
	if _, err := e.db.AppendUnowned(t.Context(), ws, id, entries(event("big", "x", strings.Repeat("y", store.MaxInlineBody))), nil); err != nil {
		t.Fatal(err)
	}
	for range 24 {
		wg.Go(func() {
			if _, err := e.db.Entries(t.Context(), ws, id, store.Range{}); err != nil {
				t.Errorf("entries: %v", err)
			}
		})
	}
	defer close(blobs.answer)
	for range 8 {
		<-blobs.asked
	}
	start := time.Now()
	until(t, 10*time.Second, "the lease is renewed", func() bool { return e.node.Trusted().After(start.Add(2 * ttl)) })
}

// hangingBlobs answer when they are told to.
type hangingBlobs struct {
	*memBlobs
	asked, answer chan struct{}
}

func (b *hangingBlobs) Get(ctx context.Context, w, name string) ([]byte, error) {
	b.asked <- struct{}{}
	<-b.answer
	return b.memBlobs.Get(ctx, w, name)
}
