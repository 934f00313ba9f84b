package session_test

import (
	"encoding/json"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// A log is folded as it is read, not held: what a process in the sandbox can
// make it grow by (a record for each connection that it opens) must not come to
// memory of the node that brings the session back.
func TestLongLogIsNotHeld(t *testing.T) {
	const records, each = 10_000, 10 << 10
	e := newEnv(t, nil, nil, done, done)
	id := e.begin()
	e.rests(id, 1)
	e.drain()
	e.send(id, message("go on"))
	node, err := e.db.Join(t.Context(), store.NodeInfo{})
	if err != nil {
		t.Fatal(err)
	}
	leases, err := node.Claim(t.Context(), 1)
	if err != nil || len(leases) != 1 {
		t.Fatalf("claim: %v, %d", err, len(leases))
	}
	body, err := json.Marshal(store.Tunnel{V: 1, Tunnel: "tun_1", Host: strings.Repeat("x", each), Port: 443})
	if err != nil {
		t.Fatal(err)
	}
	for range records / 500 {
		var drafts []store.Draft
		for range 500 {
			drafts = append(drafts, store.Draft{Kind: store.KindTunnel, ID: store.NewID("tun_", time.Now()), Body: body})
		}
		if _, err := e.db.Append(t.Context(), leases[0], store.Append{Entries: drafts}); err != nil {
			t.Fatal(err)
		}
	}
	head := e.session(id).Head
	heap := func() int64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	runtime.GC()
	before, most := heap(), int64(0)
	e.restart()
	for deadline := time.Now().Add(testDeadline); ; {
		most = max(most, heap()-before)
		if s := e.session(id); s.Head > head+3 && s.Status == store.StatusIdle {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the session does not come back")
		}
		<-time.After(5 * time.Millisecond)
	}
	t.Logf("%d MiB of log took %d MiB", records*each>>20, most>>20)
	if most > records*each {
		t.Errorf("%d MiB of log took %d MiB", records*each>>20, most>>20)
	}
}
