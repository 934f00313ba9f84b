package session

import (
	"context"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/store"
)

// Expired exposes expired.
var Expired = expired

// CheckpointName exposes checkpointName.
var CheckpointName = checkpointName

// SweepImages sweeps n times, as the keeper does every few minutes.
func (m *Manager) SweepImages(ctx context.Context, n int) error {
	w := imageSweep{m: m}
	for range n {
		if err := w.sweep(ctx); err != nil {
			return err
		}
	}
	return nil
}

// KeepNow does for a session's snapshots what is due.
func (m *Manager) KeepNow(ctx context.Context, ws store.WorkspaceID, id store.SessionID) error {
	return m.keepSession(ctx, sessionKey{ws, id})
}

// KeepLater does for the snapshots of a session at rest what is due when the packs
// there are so much older.
func (m *Manager) KeepLater(ctx context.Context, ws store.WorkspaceID, id store.SessionID, age time.Duration) error {
	key := sessionKey{ws, id}
	rows, err := m.ownSnapshots(ctx, key)
	if err != nil {
		return err
	}
	for i := range rows {
		if !rows[i].PackedAt.IsZero() {
			rows[i].PackedAt = rows[i].PackedAt.Add(-age)
		}
	}
	return m.keepNewest(ctx, key, rows, true)
}

// Taking stands for a snapshot under way.
func (m *Manager) Taking() (release func()) { return m.keep.taking() }

// HoldPacks keeps snapshots from being packed until release is called.
func (m *Manager) HoldPacks() (release func()) {
	m.keep.packing.Lock()
	return sync.OnceFunc(m.keep.packing.Unlock)
}

// NextLook is how soon a session's snapshots are looked at again.
func (m *Manager) NextLook(ws store.WorkspaceID, id store.SessionID) (time.Duration, bool) {
	m.keep.mu.Lock()
	defer m.keep.mu.Unlock()
	at, ok := m.keep.due[sessionKey{ws, id}]
	return time.Until(at), ok
}
