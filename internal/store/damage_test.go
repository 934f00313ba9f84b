package store_test

import (
	"bytes"
	"database/sql"
	"errors"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/store"
)

// folder is a SQLite store with sessions that were acknowledged and closed.
type folder struct {
	*env
	dir  string
	ids  []store.SessionID
	want map[store.SessionID]store.Seq // acknowledged heads
	logs map[store.SessionID][]store.Entry
}

const marker = "the body that is looked for in the files "

func newFolder(t *testing.T, sessions int) *folder {
	t.Helper()
	dir := t.TempDir()
	f := &folder{env: newEnv(t, "sqlite:"+filepath.Join(dir, "planaria.db")), dir: dir, want: map[store.SessionID]store.Seq{}, logs: map[store.SessionID][]store.Entry{}}
	for range sessions {
		id, l := f.started()
		f.must(l, entries(event("agent.message", "text", strings.Repeat(marker, 20)), event("b")))
		f.must(l, store.Append{Entries: []store.Draft{idle()}, Rest: true})
		f.ids = append(f.ids, id)
		f.want[id] = f.session(id).Head
		list, err := f.db.Entries(t.Context(), ws, id, store.Range{})
		if err != nil {
			t.Fatal(err)
		}
		f.logs[id] = list
	}
	return f
}

func (f *folder) path(name string) string { return filepath.Join(f.dir, name) }

// copyFiles copies database and WAL as a power cut at this moment would leave them.
func (f *folder) copyFiles(to string) {
	f.t.Helper()
	for _, name := range []string{"planaria.db", "planaria.db-wal", "lock", "witness"} {
		b, err := os.ReadFile(f.path(name))
		if err != nil {
			f.t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, name), b, 0o600); err != nil {
			f.t.Fatal(err)
		}
	}
}

// check opens a damaged folder: either the whole store says that it is damaged,
// or every session has all that was acknowledged or is refused by name.
func (f *folder) check(t *testing.T, dir string) (refused int) {
	t.Helper()
	cfg := f.cfg
	cfg.URL = "sqlite:" + filepath.Join(dir, "planaria.db")
	db, err := store.Open(t.Context(), cfg)
	if err != nil {
		if !errors.Is(err, store.ErrDamaged) {
			t.Fatalf("open = %v, want damaged", err)
		}
		t.Logf("refused as a whole: %v", err)
		return -1
	}
	defer db.Close()
	for id, head := range f.want {
		s, err := db.Session(t.Context(), ws, id)
		if err != nil {
			if errors.Is(err, store.ErrDamaged) {
				refused++
				continue
			}
			t.Fatalf("session %s = %v, want the session or damaged", id, err)
		}
		list, err := db.Entries(t.Context(), ws, id, store.Range{})
		switch {
		case s.Damaged != "":
			t.Logf("refused %s: %s", id, s.Damaged)
			refused++
		case errors.Is(err, store.ErrDamaged):
			t.Logf("reading %s: %v", id, err)
			refused++
		case err != nil:
			t.Fatalf("entries: %v", err)
		case len(list) < int(head):
			t.Errorf("session %s has %d entries of %d and says nothing", id, len(list), head)
		case !cmp.Equal(list, f.logs[id]):
			t.Errorf("session %s reads otherwise and says nothing: %s", id, cmp.Diff(f.logs[id], list))
		}
	}
	return refused
}

// A torn tail loses nothing that was acknowledged, or is noticed (recipe K5).
func TestTornFiles(t *testing.T) {
	f := newFolder(t, 8)
	wal, err := os.ReadFile(f.path("planaria.db-wal"))
	if err != nil {
		t.Fatal(err)
	}
	damage := func(name string, cut func([]byte) []byte) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			p := filepath.Join(dir, name)
			b, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(p, cut(b), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	zero := func(n int) func([]byte) []byte {
		return func(b []byte) []byte { copy(b[len(b)-min(n, len(b)):], make([]byte, n)); return b }
	}
	short := func(n int) func([]byte) []byte {
		return func(b []byte) []byte { return b[:len(b)-min(n, len(b))] }
	}
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, dir string)
		least  int // sessions refused; -1: the store as a whole
	}{
		{"none", func(*testing.T, string) {}, 0},
		{"WAL short by a byte", damage("planaria.db-wal", short(1)), 1},
		{"WAL short by a page", damage("planaria.db-wal", short(4120)), 1},
		{"WAL tail of zeros", damage("planaria.db-wal", zero(5000)), 1},
		{"WAL half gone", damage("planaria.db-wal", short(len(wal)/2)), 1},
		{"WAL gone", damage("planaria.db-wal", short(len(wal))), len(f.ids)},
		{"witness torn", damage("witness", short(10)), 0},
		{"witness gone", damage("witness", short(1<<30)), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			f.copyFiles(dir)
			c.damage(t, dir)
			got := f.check(t, dir)
			if c.least < 0 && got >= 0 && got < len(f.ids) || c.least == 0 && got != 0 || c.least > 0 && (got < c.least || c.least < len(f.ids) && got == len(f.ids)) {
				t.Errorf("refused %d sessions, want at least %d and not all", got, c.least)
			}
		})
	}
}

// Damage of the database file itself, checkpointed: never silent.
func TestDamagedDatabase(t *testing.T) {
	f := newFolder(t, 8)
	f.close()
	whole, err := os.ReadFile(f.path("planaria.db"))
	if err != nil {
		t.Fatal(err)
	}
	keep := map[string][]byte{}
	for _, n := range []string{"lock", "witness"} {
		if keep[n], err = os.ReadFile(f.path(n)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name string
		data []byte
	}{
		{"empty", nil},
		{"zeros", make([]byte, len(whole))},
		{"half", whole[:len(whole)/2]},
		{"short by a page", whole[:len(whole)-4096]},
		{"tail of zeros", append(bytes.Clone(whole[:len(whole)-3*4096]), make([]byte, 3*4096)...)},
		{"header flipped", append([]byte{whole[0] ^ 1}, whole[1:]...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for n, b := range keep {
				if err := os.WriteFile(filepath.Join(dir, n), b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(dir, "planaria.db"), c.data, 0o600); err != nil {
				t.Fatal(err)
			}
			if got := f.check(t, dir); got == 0 {
				t.Error("the damage was not noticed")
			}
		})
	}
	// A file that is gone is not made anew.
	dir := t.TempDir()
	for n, b := range keep {
		if err := os.WriteFile(filepath.Join(dir, n), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := f.check(t, dir); got != -1 {
		t.Error("a missing database was made anew")
	}
	f.open() // for Cleanup
}

// A byte flipped anywhere in the database file is harmless, or noticed, and what
// is not refused reads as it was acknowledged.
func TestFlippedByte(t *testing.T) {
	f := newFolder(t, 8)
	f.close()
	defer f.open() // for Cleanup
	whole, err := os.ReadFile(f.path("planaria.db"))
	if err != nil {
		t.Fatal(err)
	}
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	rnd := mathrand.New(mathrand.NewPCG(uint64(seed), 0))
	noticed := 0
	for range 60 {
		dir := t.TempDir()
		for _, n := range []string{"lock", "witness"} {
			b, err := os.ReadFile(f.path(n))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, n), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		b := bytes.Clone(whole)
		i := rnd.IntN(len(b))
		b[i] ^= byte(1 + rnd.IntN(255))
		if err := os.WriteFile(filepath.Join(dir, "planaria.db"), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if f.check(t, dir) != 0 {
			noticed++
		}
	}
	if noticed == 0 {
		t.Error("no flipped byte was noticed")
	}
	t.Logf("%d of 60 were noticed; the rest fell on unused space or on rows that Rebuild compares", noticed)
}

// A value of a type that its column never has (a flipped byte makes one) is
// damage, and not an error that a later try may not have.
func TestDamagedColumn(t *testing.T) {
	e := newEnv(t, "sqlite:"+filepath.Join(t.TempDir(), "data", "planaria.db"))
	id, _ := e.started()
	if _, err := e.db.Exec(t.Context(), `UPDATE sessions SET created_at = ? WHERE id = ?`, []byte("\x00\x06a"), id); err != nil {
		t.Fatal(err)
	}
	if s, err := e.db.Session(t.Context(), ws, id); !errors.Is(err, store.ErrDamaged) {
		t.Errorf("session = %+v, %v, want damaged", s, err)
	}
	if l, err := e.db.Sessions(t.Context(), ws, store.SessionFilter{Limit: 10}); !errors.Is(err, store.ErrDamaged) {
		t.Errorf("sessions = %+v, %v, want damaged", l, err)
	}
}

// A byte that flipped in the name of a migration does not make a newer store.
func TestDamagedMigration(t *testing.T) {
	e := newEnv(t, "sqlite:"+filepath.Join(t.TempDir(), "data", "planaria.db"))
	if _, err := e.db.Exec(t.Context(), `UPDATE migrations SET name = '0002_' || substr(name, 6) || 'x' WHERE name LIKE '0002_%'`); err != nil {
		t.Fatal(err)
	}
	e.close()
	if _, err := store.Open(t.Context(), e.cfg); !errors.Is(err, store.ErrDamaged) {
		t.Errorf("open = %v, want damaged", err)
	}
}

// An entry that does not match its hash refuses its session, wherever it is,
// and touches no other (attack E20).
func TestDamagedEntry(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		type harm struct {
			name, sql string
			args      []any
		}
		at := ` WHERE session = ? AND seq = 4`
		for _, h := range []harm{
			{"hash", `UPDATE log SET hash = ?` + at, []any{make([]byte, 32)}},
			{"body", `UPDATE log SET body = ?` + at, []any{make([]byte, 100)}},
			{"body of another entry", `UPDATE log SET body = (SELECT body FROM log l WHERE l.session = log.session AND l.seq = 5), salt = (SELECT salt FROM log l WHERE l.session = log.session AND l.seq = 5)` + at, nil},
			{"salt", `UPDATE log SET salt = ?` + at, []any{make([]byte, 16)}},
			{"kind", `UPDATE log SET kind = 'tools'` + at, nil},
			{"type", `UPDATE log SET type = 'user.message'` + at, nil},
			{"time", `UPDATE log SET at = at + 1` + at, nil},
			{"fence", `UPDATE log SET fence = 9` + at, nil},
			{"thread", `UPDATE log SET thread = 'sthr_9'` + at, nil},
			{"id", `UPDATE log SET id = 'sevt_9'` + at, nil},
			{"erased without digest", `UPDATE log SET digest = ?, body = NULL, salt = NULL` + at, []any{make([]byte, 32)}},
			{"row gone", `DELETE FROM log` + at, nil},
			{"tail gone", `DELETE FROM log WHERE session = ? AND seq > 4`, nil},
			{"head back", `UPDATE sessions SET head = 4 WHERE id = ?`, nil},
		} {
			t.Run(h.name, func(t *testing.T) {
				outer := e.t
				e.t = t
				defer func() { e.t = outer }()
				bad, l := e.started()
				e.must(l, entries(event("a"), event("b")))
				e.must(l, store.Append{Entries: []store.Draft{idle()}, Rest: true})
				good, gl := e.started()
				if n, err := e.db.Exec(t.Context(), h.sql, append(h.args, bad)...); err != nil || n == 0 {
					t.Fatalf("harm: %d, %v", n, err)
				}
				rep, err := e.db.Verify(t.Context(), ws, bad)
				if err != nil || rep.Problem == "" {
					t.Errorf("verify = %+v, %v", rep, err)
				}
				_, err = e.db.Entries(t.Context(), ws, bad, store.Range{})
				if !errors.Is(err, store.ErrDamaged) {
					t.Fatalf("entries = %v, want damaged", err)
				}
				if err := e.db.Refuse(t.Context(), ws, bad, err.Error()); err != nil {
					t.Fatal(err)
				}
				if _, err := e.db.Deliver(t.Context(), ws, bad, []store.Delivery{message("x")}, nil); !errors.Is(err, store.ErrDamaged) {
					t.Errorf("deliver = %v, want damaged", err)
				}
				if s := e.session(bad); s.Damaged == "" {
					t.Error("the session is listed without its reason")
				}
				if ls, err := e.node.Claim(t.Context(), 10); err != nil || len(ls) != 0 {
					t.Errorf("claimed %d sessions, %v", len(ls), err)
				}
				e.must(gl, store.Append{Entries: []store.Draft{idle()}, Rest: true})
				e.sound(good)
				// A way out: it can be deleted.
				if err := e.db.DeleteSession(t.Context(), ws, bad, "p"); err != nil {
					t.Errorf("delete = %v", err)
				}
				if err := e.db.DeleteSession(t.Context(), ws, good, "p"); err != nil {
					t.Errorf("delete = %v", err)
				}
			})
		}
	})
}

// A session that is refused while it is owned: its owner writes nothing more.
func TestRefuseOwned(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		id, l := e.started()
		if err := e.db.Refuse(t.Context(), ws, id, "because"); err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.Append(t.Context(), l, entries(event("x"))); !errors.Is(err, store.ErrDamaged) {
			t.Errorf("append = %v, want damaged", err)
		}
		<-l.Lost()
	})
}

// A configuration that cannot be opened at the claim refuses that session, and
// the others are claimed.
func TestDamagedAtClaim(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		bad := e.create(message("go")).ID
		good := e.create(message("go")).ID
		if _, err := e.db.Exec(t.Context(), `UPDATE session_configs SET config = ? WHERE session = ?`, make([]byte, 50), bad); err != nil {
			t.Fatal(err)
		}
		if l := e.claim(); l.Session() != good {
			t.Errorf("claimed %s, want %s", l.Session(), good)
		}
		if s := e.session(bad); s.Damaged == "" {
			t.Error("the damaged session does not say so")
		}
		list, err := e.db.Sessions(t.Context(), ws, store.SessionFilter{})
		if err != nil || len(list) != 2 {
			t.Errorf("list = %d sessions, %v", len(list), err)
		}
	})
}

// Offline, without the folder lock, all chains are walked and nothing is written.
func TestVerifyAll(t *testing.T) {
	f := newFolder(t, 3)
	eff := newEffect()
	id, l := f.started()
	f.must(l, entries(intent(eff, store.ClassIrreversible)))
	f.ids = append(f.ids, id)
	for _, c := range []struct {
		query string
		id    store.SessionID
	}{
		{`UPDATE log SET fence = 7 WHERE seq = 3 AND session = ?`, f.ids[1]},
		{`UPDATE sessions SET stop_reason = '{}' WHERE id = ?`, f.ids[2]},
		{`UPDATE effects SET state = 'completed' WHERE session = ?`, id},
	} {
		if n, err := f.db.Exec(t.Context(), c.query, c.id); err != nil || n != 1 {
			t.Fatalf("%s: %d rows, %v", c.query, n, err)
		}
	}
	cfg := f.cfg
	cfg.ReadOnly = true
	db, err := store.Open(t.Context(), cfg) // beside the running one
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	problems := map[store.SessionID]string{}
	if err := db.VerifyAll(t.Context(), func(r store.Report) error { problems[r.Session] = r.Problem; return nil }); err != nil {
		t.Fatal(err)
	}
	for i, id := range f.ids {
		want := []string{"", "does not match its hash", "does not follow from the log: session", "does not follow from the log: effect " + string(eff)}[i]
		if got := problems[id]; (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("session %d: problem %q, want %q", i, got, want)
		}
	}
	// The same from the files that a power cut leaves, and after a clean end.
	dir := t.TempDir()
	f.copyFiles(dir)
	f.close()
	defer f.open() // for Cleanup
	for _, url := range []string{"sqlite:" + filepath.Join(dir, "planaria.db"), f.cfg.URL} {
		cfg.URL = url
		off, err := store.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		if err := off.VerifyAll(t.Context(), func(r store.Report) error { n += len(r.Problem); return nil }); err != nil || n == 0 {
			t.Errorf("verify %s: %d, %v", url, n, err)
		}
		off.Close()
	}
	if err := db.EnsureWorkspace(t.Context(), "w", "W"); err == nil {
		t.Error("wrote while open for reading")
	}
	if _, err := db.Join(t.Context(), store.NodeInfo{}); err == nil {
		t.Error("joined while open for reading")
	}
}

// Folders and formats that are not ours are refused with a reason.
func TestRefusedFolders(t *testing.T) {
	cfg := func(dir string) store.Config {
		return store.Config{URL: "sqlite:" + filepath.Join(dir, "planaria.db"), Master: newMaster(t), Blobs: &memBlobs{}}
	}
	foreign := t.TempDir()
	if err := os.WriteFile(filepath.Join(foreign, "thesis.doc"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(t.Context(), cfg(foreign)); !errors.Is(err, store.ErrForeign) || !strings.Contains(err.Error(), "thesis.doc") {
		t.Errorf("open of a foreign folder = %v", err)
	}
	// Another program's database is not touched.
	cats := filepath.Join(t.TempDir(), "cats.db")
	other, err := sql.Open("sqlite", cats)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.ExecContext(t.Context(), `CREATE TABLE cats (name TEXT)`); err != nil {
		t.Fatal(err)
	}
	other.Close()
	before, err := os.ReadFile(cats)
	if err != nil {
		t.Fatal(err)
	}
	theirs := cfg("")
	theirs.URL = "sqlite:" + cats
	if _, err := store.Open(t.Context(), theirs); !errors.Is(err, store.ErrForeign) || !strings.Contains(err.Error(), "cats.db") {
		t.Errorf("open of another program's database = %v", err)
	}
	if now, err := os.ReadFile(cats); err != nil || !bytes.Equal(before, now) {
		t.Errorf("another program's database was written: %v", err)
	}
	newer := newEnv(t, "sqlite:"+filepath.Join(t.TempDir(), "planaria.db"))
	if _, err := newer.db.Exec(t.Context(), `INSERT INTO migrations (name, at) VALUES ('9999_future', 1)`); err != nil {
		t.Fatal(err)
	}
	newer.close()
	if _, err := store.Open(t.Context(), newer.cfg); !errors.Is(err, store.ErrNewer) || !strings.Contains(err.Error(), "9999_future") {
		t.Errorf("open of a newer store = %v", err)
	}
	if _, err := store.Open(t.Context(), store.Config{URL: "mysql:x", Master: newMaster(t), Blobs: &memBlobs{}}); err == nil {
		t.Error("opened an unknown engine")
	}
	if _, err := store.Open(t.Context(), store.Config{URL: "sqlite:x"}); err == nil {
		t.Error("opened without a master key")
	}
	// A start that died before the folder was marked is made again.
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "lock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "planaria.db"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := store.Open(t.Context(), cfg(dir))
	if err != nil {
		t.Fatalf("open of a half-made folder = %v", err)
	}
	db.Close()
}

// The two engines have the same migrations.
func TestMigrationNames(t *testing.T) {
	names := func(engine string) (out []string) {
		list, err := filepath.Glob("migrations/" + engine + "/*.sql")
		if err != nil || len(list) == 0 {
			t.Fatalf("no migrations of %s: %v", engine, err)
		}
		for _, p := range list {
			out = append(out, filepath.Base(p))
		}
		return out
	}
	if a, b := strings.Join(names("sqlite"), " "), strings.Join(names("postgres"), " "); a != b {
		t.Errorf("sqlite has %s, postgres has %s", a, b)
	}
}

// After a power cut the witness lags. What was deleted meanwhile stays deleted,
// and what is written behind a torn tail is read again (recipe K5).
func TestLaggingWitness(t *testing.T) {
	dir := t.TempDir()
	e := newEnv(t, "sqlite:"+filepath.Join(dir, "planaria.db"))
	gone, kept := e.create().ID, e.create().ID
	file := filepath.Join(dir, "witness")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.db.DeleteSession(t.Context(), ws, gone, "p"); err != nil {
		t.Fatal(err)
	}
	e.close()
	if err := os.WriteFile(file, append(before, "torn"...), 0o600); err != nil {
		t.Fatal(err)
	}
	e.open()
	if s, err := e.db.Session(t.Context(), ws, gone); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("deleted session = %q, %v; want not found", s.Damaged, err)
	}
	if _, err := e.db.AppendUnowned(t.Context(), ws, kept, entries(event("x")), nil); err != nil {
		t.Fatal(err)
	}
	if n, err := e.db.Exec(t.Context(), `DELETE FROM log WHERE session = ? AND seq = 3`, kept); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	e.crash()
	if s := e.session(kept); !strings.Contains(s.Damaged, "seq 3, which was acknowledged") {
		t.Errorf("session that lost an entry = %q, want damaged", s.Damaged)
	}
}
