package store_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/store"
)

// A fork is a row: it reads its ancestors' entries up to the fork point, then
// its own; its chain goes on from its parent's hash; the parent stays as it was
// (laws L8, L10). Forking itself is not built yet, so the row is made by hand.
func TestForkByReference(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		parent, l := e.started()
		e.must(l, entries(event("a"), event("b"), event("c"))) // seq 4, 5, 6
		e.must(l, store.Append{Entries: []store.Draft{idle()}, Rest: true})
		before, err := e.db.Entries(t.Context(), ws, parent, store.Range{})
		if err != nil {
			t.Fatal(err)
		}
		child := before[4] // seq 5
		mk := func(id, parent store.SessionID, at store.Entry) {
			t.Helper()
			n, err := e.db.Exec(t.Context(), `INSERT INTO sessions (workspace, id, parent, fork_seq, lineage, key_id, status, head, head_hash, created_at, updated_at)
 SELECT workspace, ?, id, ?, lineage, key_id, 'idle', ?, ?, created_at, ? FROM sessions WHERE id = ?`,
				string(id), int64(at.Seq), int64(at.Seq), at.Hash[:], at.At.UnixMicro(), string(parent))
			if err == nil && n == 1 {
				err = e.db.CopyConfig(t.Context(), ws, parent, id)
			}
			if err != nil || n != 1 {
				t.Fatalf("fork: %d rows, %v", n, err)
			}
			if _, err := e.db.AppendUnowned(t.Context(), ws, id, entries(event("of "+string(id))), nil); err != nil {
				t.Fatal(err)
			}
		}
		mk("sesn_fork", parent, child)
		log, err := e.db.Entries(t.Context(), ws, "sesn_fork", store.Range{})
		if err != nil || len(log) != 7 || log[6].Type != "of sesn_fork" || log[4].Session != parent {
			t.Fatalf("log of the fork = %v, %v", seqs(log), err)
		}
		mk("sesn_fork2", "sesn_fork", log[6])
		for _, c := range []struct {
			r    store.Range
			want []store.Seq
		}{
			{store.Range{}, []store.Seq{1, 2, 3, 4, 5, 6, 7, 8, 9}},
			{store.Range{Desc: true, Limit: 5}, []store.Seq{9, 8, 7, 6, 5}},
			{store.Range{After: 3, Until: 8}, []store.Seq{4, 5, 6, 7, 8}},
			{store.Range{Types: []string{"a", "b", "c"}}, []store.Seq{4, 5}},
		} {
			list, err := e.db.Entries(t.Context(), ws, "sesn_fork2", c.r)
			if diff := cmp.Diff(c.want, seqs(list)); err != nil || diff != "" {
				t.Errorf("%+v: %v %s", c.r, err, diff)
			}
		}
		if seq, err := e.db.SeqOf(t.Context(), ws, "sesn_fork2", store.EventID(before[3].ID)); err != nil || seq != 4 {
			t.Errorf("seq of an ancestor's event = %d, %v", seq, err)
		}
		if _, err := e.db.SeqOf(t.Context(), ws, "sesn_fork2", store.EventID(before[5].ID)); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("seq of what the parent logged later = %v", err)
		}
		for _, id := range []store.SessionID{parent, "sesn_fork", "sesn_fork2"} {
			if rep, err := e.db.Verify(t.Context(), ws, id); err != nil || rep.Problem != "" {
				t.Errorf("verify %s = %+v, %v", id, rep, err)
			}
		}
		after, err := e.db.Entries(t.Context(), ws, parent, store.Range{})
		if diff := cmp.Diff(before, after); err != nil || diff != "" {
			t.Errorf("the parent changed: %v %s", err, diff)
		}
		// The parent's entries stay while a fork reads them, and go with the last.
		if err := e.db.DeleteSession(t.Context(), ws, parent, "p"); err != nil {
			t.Fatal(err)
		}
		if list, err := e.db.Entries(t.Context(), ws, "sesn_fork2", store.Range{}); err != nil || list[0].Erased {
			t.Errorf("log of the fork after its ancestor was deleted: %v", err)
		}
		for _, id := range []store.SessionID{"sesn_fork", "sesn_fork2"} {
			if err := e.db.DeleteSession(t.Context(), ws, id, "p"); err != nil {
				t.Fatal(err)
			}
		}
		for _, id := range []store.SessionID{parent, "sesn_fork", "sesn_fork2"} {
			if rep, err := e.db.Verify(t.Context(), ws, id); err != nil || rep.Problem != "" || rep.Erased != rep.Entries {
				t.Errorf("verify erased %s = %+v, %v", id, rep, err)
			}
		}
	})
}
