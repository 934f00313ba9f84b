package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/planaria/planaria/internal/store"
)

// controlCheckpoint asks a session's owner for a named snapshot.
const controlCheckpoint = "checkpoint"

const (
	// maxCheckpointName is the longest name of a checkpoint, in characters.
	maxCheckpointName = 64
	// checkpointWait is how long Checkpoint waits for the snapshot: one of some
	// GiB on a slow disk.
	checkpointWait = 60 * time.Second
)

type checkpointRequest struct {
	V    int    `json:"v"`
	Name string `json:"name"`
}

// checkpointName checks a name: it must not read as a seq or an id, which name
// checkpoints too.
func checkpointName(name string) error {
	refuse := func(why string) error {
		return &Problem{Text: "name: " + why, Err: ErrInput}
	}
	switch {
	case name == "" || strings.TrimSpace(name) != name:
		return refuse("must not be empty, nor begin or end with space")
	case !utf8.ValidString(name) || utf8.RuneCountInString(name) > maxCheckpointName:
		return refuse(fmt.Sprintf("must have at most %d characters", maxCheckpointName))
	case strings.Trim(name, "0123456789") == "":
		return refuse("must not be a number, which names a position in the log")
	case strings.HasPrefix(name, "sevt_"), strings.HasPrefix(name, "snap-"):
		return refuse("must not look like an id")
	}
	for _, r := range name {
		if !unicode.IsPrint(r) {
			return refuse("must be printable")
		}
	}
	return nil
}

// Checkpoint gives the session's machine, as it is now, a name: a snapshot is
// taken of a running one, of a suspended one the newest is named. Its snapshot
// is kept until the session is deleted.
func (m *Manager) Checkpoint(ctx context.Context, ws store.WorkspaceID, id store.SessionID, name string) (store.SnapshotRow, error) {
	var none store.SnapshotRow
	if err := checkpointName(name); err != nil {
		return none, err
	}
	s, err := m.db.Session(ctx, ws, id)
	if err != nil {
		return none, err
	}
	rows, err := m.db.Snapshots(ctx, ws, id)
	if err != nil {
		return none, err
	}
	if _, taken := named(rows, name); taken {
		return none, nameTaken(name)
	}
	if s.Status == store.StatusTerminated {
		return m.nameNewest(ctx, ws, id, rows, name)
	}
	d := store.Delivery{ID: store.NewID("inb_", m.now()), Kind: store.InboxControl, Type: controlCheckpoint, Urgent: true,
		Body: encode(checkpointRequest{V: store.BodyVersion, Name: name})}
	answer := m.keep.asked(d.ID)
	defer m.keep.forget(d.ID)
	if _, err := m.db.Deliver(ctx, ws, id, []store.Delivery{d}, nil); err != nil {
		return none, m.explain(err, id)
	}
	return m.checkpointed(ctx, ws, id, s.Head, name, answer)
}

// checkpointed waits until the log names the checkpoint, or its owner says why
// it never will.
func (m *Manager) checkpointed(ctx context.Context, ws store.WorkspaceID, id store.SessionID, after store.Seq, name string, answer <-chan error) (store.SnapshotRow, error) {
	var none store.SnapshotRow
	ctx, cancel := context.WithTimeout(ctx, checkpointWait)
	defer cancel()
	f, err := m.db.Follow(ctx, ws, id, after)
	if err != nil {
		return none, err
	}
	defer f.Close()
	logged := make(chan error, 1)
	go func() { // ends with ctx at the latest
		for {
			items, err := f.Next(ctx)
			for _, it := range items {
				var b store.Snapshot
				if it.Entry != nil && it.Entry.Kind == store.KindSnapshot && json.Unmarshal(it.Entry.Body, &b) == nil && b.Name == name {
					logged <- nil
					return
				}
			}
			if err != nil {
				logged <- err
				return
			}
		}
	}()
	select {
	case err = <-logged:
	case err = <-answer:
	}
	if ctx.Err() != nil {
		return none, &Problem{Text: "the checkpoint is still being made; it will stand in the session's list of checkpoints", Err: ErrState}
	}
	if err != nil {
		return none, err
	}
	rows, err := m.db.Snapshots(ctx, ws, id)
	if err != nil {
		return none, err
	}
	if x, ok := named(rows, name); ok {
		return x, nil
	}
	return none, &Problem{Text: "the checkpoint was not made", Err: ErrState}
}

func named(rows []store.SnapshotRow, name string) (store.SnapshotRow, bool) {
	for _, x := range rows {
		if x.Name == name {
			return x, true
		}
	}
	return store.SnapshotRow{}, false
}

func nameTaken(name string) error {
	return &Problem{Text: fmt.Sprintf("name: the session has a checkpoint %q already", name), Err: ErrState}
}

func noSnapshot() error {
	return &Problem{Text: "the session has no machine that could be saved; it gets one with its first call of a built-in tool", Err: ErrState}
}

// nameNewest names the newest snapshot of a terminated session.
func (m *Manager) nameNewest(ctx context.Context, ws store.WorkspaceID, id store.SessionID, rows []store.SnapshotRow, name string) (store.SnapshotRow, error) {
	if len(rows) == 0 || rows[0].Session != id {
		return store.SnapshotRow{}, noSnapshot()
	}
	x := rows[0]
	_, err := m.db.AppendUnowned(ctx, ws, id, store.Append{Entries: []store.Draft{record(store.KindSnapshot, store.NewID("rec_", m.now()), "",
		store.Snapshot{V: store.BodyVersion, Act: store.SnapshotNamed, Snapshot: x.ID, Name: name})}}, nil)
	if errors.Is(err, store.ErrConflict) {
		return x, nameTaken(name)
	}
	x.Name = name
	return x, err
}

// checkpoint is the owner's part of Checkpoint: the snapshot, then one append
// that names it and consumes the request. A crash before leaves the request in
// the inbox for the next owner.
func (d *driver) checkpoint(ctx context.Context, r store.Inbox) error {
	var req checkpointRequest
	if err := json.Unmarshal(r.Body, &req); err != nil {
		return err
	}
	err := d.nameCheckpoint(ctx, r.ID, req.Name)
	var refused *Problem
	if err == nil || d.over(err) {
		return err
	}
	if !errors.As(err, &refused) {
		err = &Problem{Text: "the checkpoint could not be made: " + err.Error(), Err: ErrState}
	}
	d.m.keep.answer(r.ID, err)
	_, err = d.append(ctx, store.Append{Consume: []string{r.ID}})
	return err
}

func (d *driver) nameCheckpoint(ctx context.Context, request, name string) error {
	defer d.keepAlive(saveTime)()
	d.joinSave(ctx)
	d.saves.take.Lock()
	defer d.saves.take.Unlock()
	s, release, err := d.takeSnapshot(ctx, whyManual, d.through(), true)
	defer release()
	if err != nil {
		return err
	}
	if s == nil { // no machine runs
		if s, err = d.newest(ctx); err != nil {
			return err
		}
	}
	if s == nil {
		return noSnapshot()
	}
	body := s.Snapshot
	body.Name = name
	if s.logged {
		body = store.Snapshot{Act: store.SnapshotNamed, Snapshot: body.Snapshot, Name: name}
	}
	err = d.logSnapshots(ctx, []string{request}, body)
	if errors.Is(err, store.ErrConflict) {
		if rows, rerr := d.m.db.Snapshots(ctx, d.ws, d.id); rerr == nil {
			if _, taken := named(rows, name); taken {
				return nameTaken(name)
			}
		}
	}
	if err != nil {
		return err
	}
	d.saves.mu.Lock()
	s.logged = true
	d.saves.mu.Unlock()
	d.m.keep.look(d.ws, d.id, time.Second)
	return nil
}

// asked makes the channel on which the owner in this process answers a request.
func (k *keeping) asked(request string) <-chan error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.answers == nil {
		k.answers = map[string]chan error{}
	}
	c := make(chan error, 1)
	k.answers[request] = c
	return c
}

func (k *keeping) forget(request string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.answers, request)
}

// answer tells who waits for a request why nothing comes of it.
func (k *keeping) answer(request string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.answers[request]; c != nil {
		c <- err
	}
}
