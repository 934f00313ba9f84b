package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/store"
)

// sandboxStates names the state that each act of a machine leads to.
var sandboxStates = map[string]string{
	store.MachineStarted:   api.SandboxRunning,
	store.MachineAttached:  api.SandboxRunning,
	store.MachineRestored:  api.SandboxRunning,
	store.MachineSuspended: api.SandboxSuspended,
	store.MachineLost:      api.SandboxLost,
}

func textOrNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func wireSnapshot(kind string, x store.SnapshotRow) api.SandboxSnapshot {
	w := api.SandboxSnapshot{Type: kind, ID: x.ID, Seq: int64(x.Seq), Through: int64(x.Through), Name: textOrNull(x.Name), Why: x.Why,
		Node: string(x.Node), Generation: int64(x.Generation), SizeBytes: x.Bytes, StoredBytes: x.Stored, PauseMS: x.PauseMS,
		Running: api.List[string]{}, CreatedAt: api.At(x.At), PackedAt: api.AtOrNull(x.PackedAt), TestedAt: api.AtOrNull(x.TestedAt),
		Failed: textOrNull(x.Failed)}
	for _, id := range x.Running {
		w.Running = append(w.Running, string(id))
	}
	return w
}

// getSandbox tells what the log says of the session's machine.
func (s *server) getSandbox(ctx context.Context, c *call) (any, error) {
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	rows, err := s.db.Snapshots(ctx, x.Workspace, x.ID)
	if err != nil {
		return nil, missing(err, "session", string(x.ID))
	}
	out := api.Sandbox{SessionID: string(x.ID), State: api.SandboxNone, Snapshots: api.List[api.SandboxSnapshot]{}}
	for _, r := range rows {
		out.Snapshots = append(out.Snapshots, wireSnapshot("snapshot", r))
	}
	if len(rows) > 0 {
		out.Image = textOrNull(rows[0].Root)
	}
	last, err := s.db.Entries(ctx, x.Workspace, x.ID, store.Range{Kinds: []store.Kind{store.KindMachine}, Desc: true, Limit: 1})
	if err != nil || len(last) == 0 {
		return out, err
	}
	var m store.Machine
	if err := json.Unmarshal(last[0].Body, &m); err != nil {
		return nil, fmt.Errorf("read machine of session %s: %w", x.ID, err)
	}
	at := api.At(last[0].At)
	out.State, out.Node, out.Generation, out.Since = sandboxStates[m.Act], textOrNull(string(m.Node)), int64(m.Generation), &at
	out.Reason, out.Note = textOrNull(m.Reason), textOrNull(m.Note)
	return out, nil
}

// listCheckpoints lists the places that the session can go back to with its
// machine, newest first: its snapshots, named or not.
func (s *server) listCheckpoints(ctx context.Context, c *call) (any, error) {
	limit, err := c.query.limit(20, 100)
	if err != nil {
		return nil, err
	}
	at, err := c.query.cursor("checkpoints", "desc")
	if err != nil {
		return nil, err
	}
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	rows, err := s.db.Snapshots(ctx, x.Workspace, x.ID)
	if err != nil {
		return nil, missing(err, "session", string(x.ID))
	}
	out := api.Page[api.SandboxSnapshot]{Data: api.List[api.SandboxSnapshot]{}}
	for _, r := range rows {
		if at != nil && int64(r.Seq) >= at.N {
			continue
		}
		if len(out.Data) == limit {
			out.NextPage = next(cursor{List: "checkpoints", Order: "desc", N: out.Data[limit-1].Seq})
			break
		}
		out.Data = append(out.Data, wireSnapshot("checkpoint", r))
	}
	return out, nil
}

// createCheckpoint gives the session's machine, as it is now, a name.
func (s *server) createCheckpoint(ctx context.Context, c *call) (any, error) {
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	var req api.CheckpointCreate
	if err := api.DecodeStrict(c.body, &req); err != nil {
		return nil, err
	}
	row, err := s.sessions.Checkpoint(ctx, x.Workspace, x.ID, req.Name)
	if err != nil {
		return nil, missing(err, "session", string(x.ID))
	}
	return wireSnapshot("checkpoint", row), nil
}

// createdCheckpoint answers a request that was accepted before. The checkpoint
// may not be there yet, or could not be made.
func (s *server) createdCheckpoint(ctx context.Context, c *call) (any, error) {
	x, err := s.session(ctx, c)
	if err != nil {
		return nil, err
	}
	var req api.CheckpointCreate
	if err := api.DecodeStrict(c.body, &req); err != nil {
		return nil, err
	}
	rows, err := s.db.Snapshots(ctx, x.Workspace, x.ID)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	for _, r := range rows {
		if r.Name == req.Name {
			return wireSnapshot("checkpoint", r), nil
		}
	}
	return nil, api.Invalid("", "the checkpoint was asked for and is not made; see the session's list of checkpoints, and ask again with a new Idempotency-Key")
}
