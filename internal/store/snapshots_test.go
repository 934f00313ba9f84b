package store_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/planaria/planaria/internal/store"
)

func taken(id string, through store.Seq) store.Draft {
	return record(store.KindSnapshot, "", store.Snapshot{V: 1, Act: store.SnapshotTaken, Snapshot: id, Why: "step", Node: "node_1",
		Through: through, Runtime: "run-" + id, Root: "root", Generation: 3, Bytes: 100, PauseMS: 7,
		Running: []store.EventID{"sevt_a"}, Activity: json.RawMessage(`{"calls":4}`)})
}

func act(what, id string, set ...func(*store.Snapshot)) store.Draft {
	b := store.Snapshot{V: 1, Act: what, Snapshot: id}
	for _, f := range set {
		f(&b)
	}
	return record(store.KindSnapshot, "", b)
}

func packed(id, parent string, blobs ...string) store.Draft {
	return act(store.SnapshotPacked, id, func(b *store.Snapshot) {
		b.Parent, b.Bytes = parent, 55
		b.Packed = marshal(map[string]any{"snapshot": id, "recipe": "recipe-" + id, "blobs": blobs})
	})
}

func ids(list []store.SnapshotRow) (out []string) {
	for _, x := range list {
		out = append(out, x.ID)
	}
	return out
}

// TestSnapshots: the rows follow from the log, in the transaction that writes it
// and when they are derived anew, and what the log does not allow is refused.
func TestSnapshots(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.create(message("go"))
		l := e.claim()
		ctx := t.Context()
		e.must(l, store.Append{Entries: []store.Draft{running(), taken("snap-1", 2)}})
		e.must(l, store.Append{Entries: []store.Draft{packed("snap-1", "", "a", "b"), taken("snap-2", 3), packed("snap-2", "snap-1", "b", "c")}})
		e.must(l, store.Append{Entries: []store.Draft{act(store.SnapshotTested, "snap-2")}})
		e.must(l, store.Append{Entries: []store.Draft{act(store.SnapshotNamed, "snap-1", func(b *store.Snapshot) { b.Name = "before" })}})
		e.must(l, store.Append{Entries: []store.Draft{taken("snap-3", 5), act(store.SnapshotTested, "snap-3", func(b *store.Snapshot) { b.Failed = "damaged" })}})
		e.must(l, store.Append{Entries: []store.Draft{taken("snap-2", 9)}}) // again: nothing changed
		list, err := e.db.Snapshots(ctx, ws, s.ID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"snap-3", "snap-2", "snap-1"}, ids(list)); diff != "" {
			t.Errorf("snapshots, newest first: %s", diff)
		}
		two, one := list[1], list[2]
		if two.Through != 9 || two.TestedAt.IsZero() || two.Stored != 55 || two.PackedAt.IsZero() || two.Why != "step" || two.Generation != 3 {
			t.Errorf("snap-2: %+v", two)
		}
		if one.Name != "before" || list[0].Failed != "damaged" || !list[0].TestedAt.IsZero() {
			t.Errorf("snap-1: %+v, snap-3: %+v", one, list[0])
		}
		e.sound(s.ID)

		for name, d := range map[string]store.Draft{
			"packed, but never taken":             packed("snap-9", ""),
			"tested, but never taken":             act(store.SnapshotTested, "snap-9"),
			"of no id":                            taken("", 1),
			"another with the name":               act(store.SnapshotNamed, "snap-2", func(b *store.Snapshot) { b.Name = "before" }),
			"an act that does not exist":          act("eaten", "snap-2"),
			"shares packs with one that is not":   packed("snap-3", "snap-9"),
			"dropped, but never taken":            act(store.SnapshotDropped, "snap-9"),
			"taken under the name of another one": record(store.KindSnapshot, "", store.Snapshot{V: 1, Act: store.SnapshotTaken, Snapshot: "snap-8", Name: "before"}),
		} {
			if _, err := e.db.Append(ctx, l, store.Append{Entries: []store.Draft{d}}); !errors.Is(err, store.ErrConflict) {
				t.Errorf("%s: %v", name, err)
			}
		}

		// A dropped one is neither listed nor packed, tested or dropped again.
		e.must(l, store.Append{Entries: []store.Draft{act(store.SnapshotDropped, "snap-1")}})
		for _, d := range []store.Draft{packed("snap-1", ""), act(store.SnapshotDropped, "snap-1"), act(store.SnapshotNamed, "snap-1"), packed("snap-3", "snap-1"), taken("snap-1", 9)} {
			if _, err := e.db.Append(ctx, l, store.Append{Entries: []store.Draft{d}}); !errors.Is(err, store.ErrConflict) {
				t.Errorf("%s of a dropped one: %v", d.Body, err)
			}
		}
		e.sound(s.ID)
		if list, err = e.db.Snapshots(ctx, ws, s.ID); err != nil || len(list) != 2 {
			t.Errorf("listed: %v, %v", ids(list), err)
		}
		// Its name is free, and the packs that it alone needed can go.
		e.must(l, store.Append{Entries: []store.Draft{act(store.SnapshotNamed, "snap-2", func(b *store.Snapshot) { b.Name = "before" })}})
		gone, err := e.db.DroppedSnapshots(ctx, 10)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]store.DroppedSnapshot{{Workspace: ws, Session: s.ID, ID: "snap-1", Blobs: []string{"a", "recipe-snap-1"}}}, gone); diff != "" {
			t.Errorf("dropped: %s", diff)
		}
		if err := e.db.RemovedSnapshot(ctx, gone[0]); err != nil {
			t.Fatal(err)
		}
		if gone, err = e.db.DroppedSnapshots(ctx, 10); err != nil || len(gone) != 0 {
			t.Errorf("dropped after it was removed: %v, %v", gone, err)
		}
		runtimes, err := e.db.NeededRuntimes(ctx)
		slices.Sort(runtimes)
		if diff := cmp.Diff([]string{"run-snap-2", "run-snap-3"}, runtimes); diff != "" || err != nil {
			t.Errorf("runtimes: %s %v", diff, err)
		}
		for id, want := range map[string]bool{"snap-1": false, "snap-2": true, "snap-9": false} {
			if got, err := e.db.SnapshotLives(ctx, ws, s.ID, id); err != nil || got != want {
				t.Errorf("%s lives: %v, %v", id, got, err)
			}
			if got, err := e.db.SnapshotLives(ctx, "other", s.ID, id); err != nil || got {
				t.Errorf("%s lives in another workspace: %v, %v", id, got, err)
			}
		}
		e.sound(s.ID)
		e.crash()
		e.sound(s.ID)
	})
}

// TestSnapshotsDamaged: a row that is not what the log says is found.
func TestSnapshotsDamaged(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.create(message("go"))
		l := e.claim()
		e.must(l, store.Append{Entries: []store.Draft{taken("snap-1", 2), taken("snap-2", 2)}})
		e.sound(s.ID)
		if _, err := e.db.Exec(t.Context(), `DELETE FROM snapshots WHERE id = 'snap-1'`); err != nil {
			t.Fatal(err)
		}
		if diff, err := e.db.Rebuild(t.Context(), ws, s.ID); err != nil || diff == "" {
			t.Errorf("a lost row: %q, %v", diff, err)
		}
		// A row that was put in another's place does not open.
		if _, err := e.db.Exec(t.Context(), `UPDATE snapshots SET id = 'snap-1' WHERE id = 'snap-2'`); err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.Snapshots(t.Context(), ws, s.ID); !errors.Is(err, store.ErrDamaged) {
			t.Errorf("a moved row: %v", err)
		}
	})
}

// TestSnapshotsErased: deleting a session drops its snapshots, and their packs
// can be removed though the key is gone; nothing of the name is left.
func TestSnapshotsErased(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.create(message("go"))
		l := e.claim()
		ctx := t.Context()
		e.must(l, store.Append{Entries: []store.Draft{running(), taken("snap-1", 2), packed("snap-1", "", "a"), taken("snap-2", 2)}})
		e.must(l, store.Append{Entries: []store.Draft{idle()}, Rest: true, Seen: 1 << 40})
		if err := e.db.DeleteSession(ctx, ws, s.ID, "test"); err != nil {
			t.Fatal(err)
		}
		gone, err := e.db.DroppedSnapshots(ctx, 10)
		if err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(gone, func(a, b store.DroppedSnapshot) int { return strings.Compare(a.ID, b.ID) })
		want := []store.DroppedSnapshot{{Workspace: ws, Session: s.ID, ID: "snap-1", Blobs: []string{"a", "recipe-snap-1"}}, {Workspace: ws, Session: s.ID, ID: "snap-2"}}
		if diff := cmp.Diff(want, gone); diff != "" {
			t.Errorf("dropped: %s", diff)
		}
		if lives, err := e.db.SnapshotLives(ctx, ws, s.ID, "snap-2"); err != nil || lives {
			t.Errorf("a snapshot of a deleted session lives: %v, %v", lives, err)
		}
		if rt, err := e.db.NeededRuntimes(ctx); err != nil || len(rt) != 0 {
			t.Errorf("runtimes: %v, %v", rt, err)
		}
		if rep, err := e.db.Verify(ctx, ws, s.ID); err != nil || rep.Problem != "" {
			t.Errorf("verify: %+v, %v", rep, err)
		}
	})
}

// TestSealer: what one lineage sealed opens for it alone, under its own name.
func TestSealer(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		a, b := e.create(), e.create()
		sa, err := e.db.Sealer(t.Context(), ws, a.ID)
		if err != nil {
			t.Fatal(err)
		}
		sb, err := e.db.Sealer(t.Context(), ws, b.ID)
		if err != nil {
			t.Fatal(err)
		}
		sealed, err := sa.Seal("pack", []byte("secret"))
		if err != nil {
			t.Fatal(err)
		}
		again, _ := sa.Seal("pack", []byte("secret"))
		if string(again) == string(sealed) {
			t.Error("equal bytes have equal sealed bytes")
		}
		if plain, err := sa.Open("pack", sealed); err != nil || string(plain) != "secret" {
			t.Errorf("opened: %q, %v", plain, err)
		}
		if _, err := sa.Open("recipe", sealed); !errors.Is(err, store.ErrDamaged) {
			t.Errorf("under another name: %v", err)
		}
		if _, err := sb.Open("pack", sealed); !errors.Is(err, store.ErrDamaged) {
			t.Errorf("by another lineage: %v", err)
		}
		if _, err := e.db.Sealer(t.Context(), "other", a.ID); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("of another workspace: %v", err)
		}
	})
}
