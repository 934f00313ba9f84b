package session

import (
	"context"
	"errors"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/store"
)

// Inside is the sandbox that this process holds for a session; nil: none.
func (m *Manager) Inside(ws store.WorkspaceID, id store.SessionID) *sandbox.Sandbox {
	if d := m.holders.of(string(ws), string(id)); d != nil {
		return d.machine()
	}
	return nil
}

// SaveNow takes a snapshot of a session's machine as policy interval does. 0 for
// through: what is in the log now.
func (m *Manager) SaveNow(ctx context.Context, ws store.WorkspaceID, id store.SessionID, through store.Seq) error {
	d := m.holders.of(string(ws), string(id))
	if d == nil {
		return errors.New("nobody holds the session")
	}
	if through == 0 {
		through = d.through()
	}
	return d.save(ctx, whyInterval, through)
}

// FailTest logs that a test found a session's newest snapshot damaged.
func (m *Manager) FailTest(ctx context.Context, ws store.WorkspaceID, id store.SessionID, snapshot string) error {
	return m.noteSnapshot(ctx, sessionKey{ws, id}, store.Snapshot{Act: store.SnapshotTested, Snapshot: snapshot, Failed: "for the test"})
}

// SaveEvery replaces the timer of policy interval by one with another interval;
// false: there is none.
func (m *Manager) SaveEvery(ws store.WorkspaceID, id store.SessionID, every time.Duration) bool {
	d := m.holders.of(string(ws), string(id))
	if d == nil {
		return false
	}
	d.saves.mu.Lock()
	stop := d.saves.stop
	d.saves.stop = nil
	d.saves.mu.Unlock()
	if stop == nil {
		return false
	}
	stop()
	d.startInterval(context.Background(), every)
	return true
}

// Sweep looks at one sandbox as the sweeper does that has seen it for a while.
func (m *Manager) Sweep(ctx context.Context, ws store.WorkspaceID, id string, seen time.Duration) error {
	key := [2]string{string(ws), id}
	w := sweeper{m: m, asked: map[[2]string]time.Time{}, seen: map[[2]string]time.Time{key: m.now().Add(-seen)}}
	return w.look(ctx, key)
}

// MachineState is what a folded log says of the machine.
func (s State) MachineState() (act, life string, snapshots []string) {
	for _, x := range s.st.machine.Snapshots {
		snapshots = append(snapshots, x.Snapshot.Snapshot)
	}
	return s.st.machine.Act, s.st.machine.Life, snapshots
}
