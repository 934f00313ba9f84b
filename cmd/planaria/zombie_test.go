package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // database/sql driver pgx

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
	"github.com/planaria/planaria/internal/vault"
)

// zombieTime bounds each wait: a lease is 6 s, and a little is needed on both sides.
const zombieTime = 60 * time.Second

// pair is two processes on one PostgreSQL.
type pair struct {
	*site
	db         *store.DB // looks on, owns nothing
	first      *victim
	second     *victim
	secondAddr string
}

// newPair starts the process that is going to be stopped. The second one is
// started later, so that it is known who owns the session.
func newPair(t *testing.T) *pair {
	t.Helper()
	p := &pair{site: newSite(t, testenv.Postgres(t))}
	p.first = p.start(p.addr)
	p.up(p.first)
	p.objects()
	master, err := vault.OpenMaster(p.dir, "")
	if err != nil {
		t.Fatal(err)
	}
	blobs, err := blob.Open(filepath.Join(p.dir, blobFolder))
	if err != nil {
		t.Fatal(err)
	}
	if p.db, err = store.Open(t.Context(), store.Config{URL: p.store, Master: master, Blobs: blobs, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.db.Close()
		blobs.Close()
	})
	return p
}

// takeOver starts the second process and directs the client to it.
func (p *pair) takeOver() {
	p.t.Helper()
	p.secondAddr = freePort(p.t)
	p.second = p.start(p.secondAddr)
	p.up(p.second)
	p.api.Base = "http://" + p.secondAddr
}

// signal sends a signal. A process that was told to stop is stopped when it
// returns: not one of its threads runs, or knows that time passes.
func (p *pair) signal(v *victim, s syscall.Signal) {
	p.t.Helper()
	if err := v.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
	if s != syscall.SIGSTOP {
		return
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(zombieTime); !stopped(p.t, v.cmd.Process.Pid); <-tick.C {
		if time.Now().After(deadline) {
			p.t.Fatal("a process does not stop")
		}
	}
}

// stopped reports whether every thread of a process is stopped (proc(5), field
// 3 of stat, behind the name in parentheses).
func stopped(t testing.TB, pid int) bool {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(files) == 0 {
		t.Fatalf("threads of process %d: %v", pid, err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) {
			continue // a thread that has ended
		}
		_, rest, ok := strings.Cut(string(b[strings.LastIndexByte(string(b), '(')+1:]), ") ")
		if err != nil || !ok || !strings.HasPrefix(rest, "T") {
			return false
		}
	}
	return true
}

// entries reads a session's log.
func (p *pair) entries(id string) []store.Entry {
	p.t.Helper()
	list, err := p.db.Entries(p.t.Context(), "default", store.SessionID(id), store.Range{})
	if err != nil {
		p.t.Fatal(err)
	}
	return list
}

// until waits for an entry of a kind, as the log grows.
func (p *pair) until(id string, what string, found func(store.Entry) bool) store.Entry {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), zombieTime)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond) // the onlooker of the store is not told of commits
	defer tick.Stop()
	for {
		for _, e := range p.entries(id) {
			if found(e) {
				return e
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			p.t.Fatalf("%s did not come\n%s", what, p.logs.Tail(6<<10))
		}
	}
}

func (p *pair) finish(id string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), zombieTime)
	defer cancel()
	if stop, err := p.person.Finish(ctx, id); err != nil || stop.Type != "end_turn" {
		p.t.Fatalf("it rests with %v: %v\n%s", stop, err, p.logs.Tail(6<<10))
	}
}

// end ends both processes in good order and checks all laws. The zombie may
// have ended by itself: it lost its lease, and whoever starts it starts it anew.
func (p *pair) end() {
	p.t.Helper()
	for _, v := range []*victim{p.first, p.second} {
		if err := v.cmd.Process.Signal(syscall.SIGTERM); err != nil && (v != p.first || !errors.Is(err, os.ErrProcessDone)) {
			p.t.Fatal(err)
		}
		select {
		case <-v.gone:
		case <-time.After(zombieTime):
			p.t.Fatalf("a process does not end\n%s", p.logs.Tail(4<<10))
		}
	}
	p.check()
}

// TestW1ZombieAtTheWorld: the owner is stopped while its irreversible call is
// at the world, past its lease. Another process takes over, settles the effect
// by its probe and finishes. The owner comes back: it writes nothing under its
// old fence, sends nothing, and the answer that it gets late is kept as
// evidence (trial W1, attack E10).
func TestW1ZombieAtTheWorld(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.model.Add(t, testenv.Marked("zombie", llm.PlayScript{Steps: []llm.Step{
		{Tools: []llm.ToolCall{{Name: "mcp__w__buy", Input: map[string]any{"id": "z"}}}},
		{Tools: []llm.ToolCall{{Name: "mcp__w__fire", Input: map[string]any{"id": "after"}}}},
		{Text: "Done."},
	}}))
	gate := p.world.HoldAfter("buy", "z")
	id, err := p.create(t.Context(), "zombie")
	if err != nil {
		t.Fatal(err)
	}
	<-gate.Arrived()
	p.signal(p.first, syscall.SIGSTOP)
	before := p.entries(id)
	p.takeOver()
	p.finish(id)
	p.signal(p.first, syscall.SIGCONT)
	gate.Release()
	late := p.until(id, "late evidence", func(e store.Entry) bool {
		var ev store.Evidence
		return e.Kind == store.KindEvidence && json.Unmarshal(e.Body, &ev) == nil && ev.Kind == "late"
	})
	owner := before[len(before)-1].Fence
	if late.Fence <= owner {
		t.Errorf("the evidence was written under fence %d, the zombie's is %d", late.Fence, owner)
	}
	for _, e := range p.entries(id)[len(before):] {
		if e.Fence <= owner {
			t.Errorf("seq %d (%s) was written under the old fence %d", e.Seq, e.Kind, e.Fence)
		}
	}
	if n := p.world.Executions("buy", "z"); n != 1 {
		t.Errorf("buy happened %d times", n)
	}
	if n := p.world.Executions("fire", "after"); n != 1 {
		t.Errorf("fire happened %d times", n)
	}
	p.end()
}

// TestW1ZombieBeforeFirstByte: the owner is stopped when the attempt of its
// irreversible call is durable and nothing of it has left. When it comes back
// its send_by is over and its fence is old: it sends nothing (trial W1).
//
// The moment is found by holding the commit: a deferred trigger waits for an
// advisory lock, the process is stopped, the lock is given up, the commit is
// done, and the process does not learn of it.
func TestW1ZombieBeforeFirstByte(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	db, err := sql.Open("pgx", p.store)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	const lock = 7_272_727
	for _, q := range []string{
		fmt.Sprintf(`CREATE FUNCTION hold_attempt() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN IF NEW.kind = 'attempt' THEN PERFORM pg_advisory_xact_lock(%d); END IF; RETURN NULL; END $$`, lock),
		`CREATE CONSTRAINT TRIGGER hold_attempt AFTER INSERT ON log DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hold_attempt()`,
	} {
		if _, err := db.ExecContext(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(t.Context(), `SELECT pg_advisory_lock($1)`, lock); err != nil {
		t.Fatal(err)
	}
	p.model.Add(t, testenv.Marked("unsent", llm.PlayScript{Steps: []llm.Step{
		{Tools: []llm.ToolCall{{Name: "mcp__w__quick", Input: map[string]any{"id": "u"}}}}, {Text: "Done."}}}))
	id, err := p.create(t.Context(), "unsent")
	if err != nil {
		t.Fatal(err)
	}
	// Until somebody waits for the lock: the commit of the attempt.
	ctx, cancel := context.WithTimeout(t.Context(), zombieTime)
	defer cancel()
	for n := 0; n == 0; {
		if err := conn.QueryRowContext(ctx, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = $1 AND NOT granted`, lock).Scan(&n); err != nil {
			t.Fatal(err)
		}
	}
	p.signal(p.first, syscall.SIGSTOP)
	if _, err := conn.ExecContext(t.Context(), `SELECT pg_advisory_unlock($1)`, lock); err != nil {
		t.Fatal(err)
	}
	attempt := p.until(id, "the attempt", func(e store.Entry) bool { return e.Kind == store.KindAttempt })
	if n := p.world.Executions("quick", "u"); n != 0 {
		t.Fatalf("quick happened %d times before its process was stopped", n)
	}
	p.takeOver()
	// The probe says that it did not happen, and is believed once nothing can be
	// on its way any more.
	p.finish(id)
	p.signal(p.first, syscall.SIGCONT)
	// The zombie learns that its commit was done, and that it is too late.
	p.end()
	if n := p.world.Executions("quick", "u"); n != 0 {
		t.Errorf("quick happened %d times: the zombie sent it", n)
	}
	for _, e := range p.entries(id) {
		if e.Seq > attempt.Seq && e.Fence <= attempt.Fence {
			t.Errorf("seq %d (%s) was written under the old fence %d", e.Seq, e.Kind, e.Fence)
		}
	}
}
