package testenv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// acknowledged is what a client was told: the log of each session.
type acknowledged map[store.SessionID][]store.Entry

func read(t *testing.T, db *store.DB) acknowledged {
	t.Helper()
	out := acknowledged{}
	list, err := db.Sessions(t.Context(), "default", store.SessionFilter{IncludeArchived: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		entries, err := db.Entries(t.Context(), "default", s.ID, store.Range{})
		if err != nil {
			t.Fatal(err)
		}
		out[s.ID] = entries
	}
	return out
}

// verdict reads a damaged copy: every session is whole, or it refuses. It
// returns how many refuse; all of them when the store does not open.
func (want acknowledged) verdict(t *testing.T, e *testenv.Env, dir string) (refused int) {
	t.Helper()
	db, err := e.OpenCopy(dir)
	if err != nil {
		if !errors.Is(err, store.ErrDamaged) && !errors.Is(err, store.ErrForeign) {
			t.Errorf("opened with %v, want a clear word of damage", err)
		}
		return len(want)
	}
	defer db.Close()
	for id, entries := range want {
		got, err := db.Entries(context.Background(), "default", id, store.Range{})
		s, serr := db.Session(context.Background(), "default", id)
		switch {
		case err != nil || serr != nil:
			if err := errors.Join(err, serr); !errors.Is(err, store.ErrDamaged) {
				t.Errorf("%s refuses with %v, want a clear word of damage", id, err)
			}
			refused++
		case s.Damaged != "":
			refused++
		case !same(entries, got):
			t.Errorf("%s lost or changed acknowledged entries without a word: %d of %d are there", id, len(got), len(entries))
		}
	}
	return refused
}

// same compares hashes, which cover all fields but the body, and bodies.
func same(a, b []store.Entry) bool {
	return slices.EqualFunc(a, b, func(a, b store.Entry) bool { return a.Hash == b.Hash && bytes.Equal(a.Body, b.Body) })
}

// busy makes sessions with a history and leaves the store at rest.
func busy(t *testing.T, e *testenv.Env) acknowledged {
	t.Helper()
	for i := range 6 {
		tag := fmt.Sprint("damage-", i)
		id := e.Begin(tag, llm.PlayScript{Steps: []llm.Step{calls(use("put", tag)), calls(use("buy", tag)), calls(use("look", tag)), done}})
		e.Finish(id)
	}
	e.Check()
	return read(t, e.DB())
}

// TestK5Damage changes the files of a store behind its back: nothing that was
// acknowledged is lost without a word, what is damaged refuses, nothing else is
// touched (trial K5).
func TestK5Damage(t *testing.T) {
	e := testenv.New(t, testenv.Options{})
	want := busy(t, e)
	const database, journal = "planaria.db", "planaria.db-wal"
	damage := func(file string, f func(b []byte) []byte) func(dir string) {
		return func(dir string) {
			name := filepath.Join(dir, file)
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(name, f(b), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	cut := func(part float64) func([]byte) []byte {
		return func(b []byte) []byte { return b[:int(float64(len(b))*part)] }
	}
	zero := func(from, to float64) func([]byte) []byte {
		return func(b []byte) []byte { clear(b[int(float64(len(b))*from):int(float64(len(b))*to)]); return b }
	}
	for _, tt := range []struct {
		name  string
		spoil func(dir string)
		whole bool // nothing may refuse
	}{
		{"untouched", func(string) {}, true},
		{"database empty", damage(database, cut(0)), false},
		{"database cut in the middle", damage(database, cut(0.5)), false},
		{"database without its last page", damage(database, func(b []byte) []byte { return b[:max(0, len(b)-4096)] }), false},
		{"database zeroed in the middle", damage(database, zero(0.4, 0.6)), false},
		{"database zeroed at its end", damage(database, zero(0.9, 1)), false},
		{"journal gone", func(dir string) { os.Remove(filepath.Join(dir, journal)) }, false},
		{"journal empty", damage(journal, cut(0)), false},
		{"journal cut in the middle", damage(journal, cut(0.5)), false},
		{"journal zeroed at its end", damage(journal, zero(0.8, 1)), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := e.CopyData()
			tt.spoil(dir)
			refused := want.verdict(t, e, dir)
			t.Logf("%d of %d sessions refuse", refused, len(want))
			if tt.whole && refused > 0 {
				t.Errorf("%d sessions refuse", refused)
			}
		})
	}
}

// TestK5FlippedByte flips single bits all over the database: a session is whole
// or refuses, and never tells another story.
func TestK5FlippedByte(t *testing.T) {
	e := testenv.New(t, testenv.Options{})
	want := busy(t, e)
	e.Stop() // so that all of it is in one file
	const flips = 25
	rnd := rand.New(rand.NewPCG(3, 3))
	refused := 0
	for range flips {
		dir := e.CopyData()
		name := filepath.Join(dir, "planaria.db")
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		at := rnd.IntN(len(b))
		b[at] ^= 1 << rnd.IntN(8)
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
		refused += want.verdict(t, e, dir)
		if t.Failed() {
			t.Fatalf("bit flipped at byte %d of %d", at, len(b))
		}
	}
	t.Logf("%d sessions refused in %d copies of %d", refused, flips, len(want))
	e.Restart()
}

// TestE19DiskFull lets the kernel refuse writes while sessions run: requests
// are refused with words, nothing that was acknowledged is lost, nothing is sent
// without its record, and the sessions go on when there is room again (attack
// E19, trial K5).
func TestE19DiskFull(t *testing.T) {
	const child = "TESTENV_DISK_FULL"
	if os.Getenv(child) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestE19DiskFull$", "-test.v")
		cmd.Env = append(os.Environ(), child+"=1")
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "came through a full disk") {
			t.Fatalf("child: %v\n%s", err, out)
		}
		return
	}
	// In a process of its own: the limit on the size of files is for all of it.
	e := testenv.New(t, testenv.Options{})
	gate := e.World.HoldAfter("put", "full")
	id := e.Begin("full", llm.PlayScript{Steps: []llm.Step{calls(use("put", "full")), calls(use("buy", "full")), done}})
	<-gate.Arrived()
	before := read(t, e.DB())
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	small := syscall.Rlimit{Cur: 4096, Max: limit.Max}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &small); err != nil {
		t.Fatal(err)
	}
	_, err := e.API.Send(t.Context(), id, "", testenv.Message("is there room?"))
	gate.Release() // its completion cannot be written now
	if err == nil {
		t.Error("a message was accepted although nothing can be written")
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	e.Finish(id)
	e.Check()
	for sid, entries := range before {
		got, err := e.DB().Entries(t.Context(), "default", sid, store.Range{Until: store.Seq(len(entries))})
		if err != nil || !same(entries, got) {
			t.Errorf("%s: what was acknowledged before is not there any more: %v", sid, err)
		}
	}
	if n := e.World.Executions("buy", "full"); n != 1 {
		t.Errorf("buy happened %d times", n)
	}
	e.Crash()
	e.Restart()
	e.Check()
	if !t.Failed() {
		t.Log("came through a full disk")
	}
}
