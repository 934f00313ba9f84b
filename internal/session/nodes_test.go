package session_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
	"github.com/planaria/planaria/internal/vault"
)

// secondNode runs a node of its own on the environment's database and blobs,
// with another folder of sandboxes, until the test ends.
func secondNode(t *testing.T, e *testenv.Env) *sandbox.Runtime {
	t.Helper()
	log := slog.New(slog.NewTextHandler(e.Logs, &slog.HandlerOptions{Level: slog.LevelDebug})).With("node", "second")
	fatal := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	master, err := vault.OpenMaster(e.Dir(), "")
	fatal(err)
	blobs, err := blob.Open(filepath.Join(e.Dir(), "blobs"))
	fatal(err)
	all, cancel := context.WithCancel(context.Background())
	db, err := store.Open(all, store.Config{URL: e.StoreURL(), Master: master, Blobs: blobs, Logger: log})
	fatal(err)
	dbOver, nodeOver, over := make(chan struct{}), make(chan struct{}), make(chan struct{})
	dbCtx, closeDB := context.WithCancel(all)
	go func() { defer close(dbOver); _ = db.Run(dbCtx) }()
	node, err := db.Join(all, store.NodeInfo{Address: "127.0.0.1:1", Roles: []string{"worker"}, Version: "test"})
	fatal(err)
	nodeCtx, leave := context.WithCancel(all)
	go func() { defer close(nodeOver); _ = node.Run(nodeCtx) }()
	effects := effect.New(db, effect.Config{})
	models, err := llm.NewModels(http.DefaultClient, testenv.ModelRules(e.Model, 0))
	fatal(err)
	k := keeper.New(keeper.Config{DB: db, Effects: effects, Vault: master, Models: models, Logger: log,
		Dial: keeper.Guard((&net.Dialer{}).DialContext, nil)})
	var m *session.Manager
	boxes, err := sandbox.Open(all, sandbox.Config{Dir: t.TempDir(), Blobs: blobs, Binary: testenv.Binary(t), Log: log,
		Egress: func(ctx context.Context, s *sandbox.Sandbox, conn io.ReadWriteCloser) { m.Egress(ctx, s, conn) }})
	fatal(err)
	m = session.New(session.Config{DB: db, Node: node, Gateway: gateway.New(gateway.Config{DB: db, Keeper: k, Effects: effects, Logger: log}),
		Logger: log, Sandboxes: boxes})
	run, drain := context.WithCancel(all)
	go func() { defer close(over); _ = m.Run(run) }()
	t.Cleanup(func() {
		drain()
		<-over
		k.Close()
		for _, key := range boxes.Live() {
			if err := boxes.End(context.Background(), key[0], key[1]); err != nil {
				t.Error(err)
			}
		}
		if err := boxes.Close(); err != nil {
			t.Error(err)
		}
		leave()
		<-nodeOver
		closeDB()
		<-dbOver
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		blobs.Close()
	})
	return boxes
}

// TestTwoNodes: a node dies with a session's machine running. Another one takes
// the session over and brings the machine back from its newest pack, with what
// was done since done again. When the first node is there again it ends the
// sandbox that it had: another one owns the session under a newer fence.
func TestTwoNodes(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Engine: testenv.PostgreSQL, Sandboxes: true, Machine: testenv.M{"linger_seconds": 2},
		LeaseTTL: 4 * time.Second, LeaseRenew: time.Second, LeaseMargin: 500 * time.Millisecond})
	slow := calls(shell("cat /tmp/f; echo $v"))
	slow.DelayMS = 4000
	id := e.Begin("nodes", llm.PlayScript{Steps: []llm.Step{
		calls(shell("echo one > /tmp/f; v=kept")), ending, calls(shell("echo two >> /tmp/f")), slow, ending}})
	e.Finish(id)
	suspended(t, e, id)
	awaitPacked(t, e, id)
	e.Say(id, "[nodes] Go on.")
	results := 0
	await(t, e, id, "the second result", func(en store.Entry) bool {
		if en.Type == "agent.tool_result" {
			results++
		}
		return results == 2
	})
	first := e.SandboxPID(id)
	e.Crash()
	if first == 0 || e.SandboxPID(id) != first {
		t.Fatalf("the sandbox %d did not outlive its node", first)
	}
	boxes := secondNode(t, e)
	waitUntil(t, "the machine on the second node", func() bool { return len(boxes.Live()) == 1 })
	e.Restart()
	waitUntil(t, "the end of the first node's sandbox", func() bool { return e.SandboxPID(id) == 0 })
	e.Finish(id)
	if got := resultsOf(t, e, id); len(got) != 3 || got[2] != "one\ntwo\nkept" {
		t.Errorf("results %q\n%s", got, e.Describe(id))
	}
	ms := slices.DeleteFunc(machinesOf(t, e, id), func(m store.Machine) bool { return m.Act == store.MachineSuspended })
	if len(ms) != 3 || ms[2].Act != store.MachineRestored || ms[2].Node == ms[1].Node || len(ms[2].Repeated) != 1 || len(ms[2].Missing) != 0 ||
		!strings.Contains(ms[2].Note, "brought back") {
		t.Errorf("machines %+v\n%s", ms, e.Describe(id))
	}
	e.Check()
}

// TestImageOnAnotherNode: a session's machine was suspended on one node, and
// another one takes the next message before the snapshot is in the blob store.
// The state is waited for, not given up for a fresh machine, by a call inside and
// by an irreversible one that may build upon it.
func TestImageOnAnotherNode(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Engine: testenv.PostgreSQL, Sandboxes: true, MaxRunning: 1, Machine: testenv.M{"linger_seconds": 0}})
	release := e.Sessions().HoldPacks()
	defer release()
	var ids []string
	for i, then := range []llm.Step{calls(shell("cat /tmp/u")), acting("buy", "away1")} {
		id := e.Begin(fmt.Sprintf("away%d", i), llm.PlayScript{Steps: []llm.Step{
			calls(shell("cat /proc/sys/kernel/random/uuid > /tmp/u; cat /tmp/u")), ending, then, ending}})
		e.Finish(id)
		suspended(t, e, id)
		ids = append(ids, id)
	}
	slow := ending
	slow.DelayMS = 25_000
	busy := e.Begin("busy", llm.PlayScript{Steps: []llm.Step{slow}}) // takes the first node's only place
	await(t, e, busy, "its request", func(en store.Entry) bool { return en.Kind == store.KindIntent })
	secondNode(t, e)
	for _, id := range ids {
		e.Say(id, "Go on.")
		await(t, e, id, "what becomes of the machine", func(en store.Entry) bool {
			return en.Fence > 1 && (en.Kind == store.KindWait || en.Kind == store.KindMachine)
		})
	}
	release()
	for i, id := range ids {
		e.Finish(id)
		got := resultsOf(t, e, id)
		if len(got) != 2 || i == 0 && got[1] != got[0] {
			t.Errorf("results %q\n%s", got, e.Describe(id))
		}
	}
	if n := e.World.Executions("buy", "away1"); n != 1 {
		t.Errorf("bought %d times\n%s", n, e.Describe(ids[1]))
	}
	e.Check()
}
