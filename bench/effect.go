package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/store"
)

// protocol makes durable effects the way a session and its keeper do: three
// critical appends of the same records, without the calls between them.
type protocol struct {
	db  *store.DB
	log *effect.Log
}

// arguments and response have the size of a small tool call.
var (
	arguments = json.RawMessage(`{"database_id":"db-0123456789abcdef","reference":"cleanup after the move"}`)
	response  = json.RawMessage(`{"content":[{"type":"text","text":"{\"status\":\"deleted\",\"database_id\":\"db-0123456789abcdef\"}"}]}`)
)

// one makes one durable irreversible effect: intent with its tool-use event,
// attempt, completion with its result event.
func (p *protocol) one(ctx context.Context, l *store.Lease, thread store.ThreadID) error {
	now := p.db.Now()
	id, use := p.log.NewID(), store.NewID("sevt_", now)
	intent, err := effect.Intent(thread, store.Intent{EffectHeader: store.EffectHeader{Effect: id, Event: store.EventID(use),
		Tool: "delete_database", Server: "cloud", Class: store.ClassIrreversible, Arguments: arguments,
		Digest: digestOf(id), Near: digestOf(id)}})
	if err != nil {
		return err
	}
	event := eventDraft(use, "agent.mcp_tool_use", thread, map[string]any{"name": "delete_database", "mcp_server_name": "cloud",
		"input": arguments, "evaluated_permission": "allow"})
	if _, err := p.db.Append(ctx, l, store.Append{Entries: []store.Draft{event, intent}}); err != nil {
		return err
	}
	e := store.Effect{Workspace: l.Workspace(), Session: l.Session(), ID: id, Thread: thread,
		Class: store.ClassIrreversible, State: store.StateIntended}
	ticket, err := p.log.Attempt(ctx, l, e, time.Minute)
	if err != nil {
		return err
	}
	e.State, e.Attempts, e.AttemptFence = store.StateAttempted, ticket.N, l.Fence()
	return p.log.Complete(ctx, l, e, store.Completion{N: ticket.N, Outcome: store.OutcomeOK, Response: response},
		[]store.Draft{eventDraft(store.NewID("sevt_", now), "agent.mcp_tool_result", thread,
			map[string]any{"mcp_tool_use_id": use, "content": response, "is_error": false})})
}

// digestOf has the length of an intent digest and is unlike all others.
func digestOf(id store.EffectID) string {
	return fmt.Sprintf("%064x", string(id))[:64]
}

func eventDraft(id, typ string, thread store.ThreadID, body map[string]any) store.Draft {
	body["v"], body["type"] = store.BodyVersion, typ
	b, err := json.Marshal(body)
	if err != nil {
		panic(err) // built above
	}
	return store.Draft{Kind: store.KindEvent, Type: typ, ID: id, Thread: thread, Body: b}
}

// appended is the size of one bare append of the baseline: a third of the
// sealed bodies of one effect, with their headers.
const appended = 700

// bareFile appends to a file and syncs each time: what no durable write can
// be faster than.
type bareFile struct{ f *os.File }

func newBareFile(dir string) (*bareFile, error) {
	f, err := os.OpenFile(filepath.Join(dir, "bare"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	return &bareFile{f}, err
}

func (b *bareFile) append(data []byte) error {
	if _, err := b.f.Write(data); err != nil {
		return err
	}
	return syncData(b.f)
}

// benchEffect measures one session's effects beside three bare synced appends,
// in turns, so that both see the same disk.
func benchEffect(ctx context.Context, b *bench) error {
	dir, err := b.folder("effect")
	if err != nil {
		return err
	}
	o, err := open(ctx, filepath.Join(dir, "data"), "")
	if err != nil {
		return err
	}
	defer o.close()
	leases, err := claimable(ctx, o, 1)
	if err != nil {
		return err
	}
	bare, err := newBareFile(dir)
	if err != nil {
		return err
	}
	defer bare.f.Close()
	l, p := leases[0], &protocol{o.db, effect.New(o.db, effect.Config{})}
	thread, data := l.Claimed().Thread, make([]byte, appended)
	var ours, base sample
	const turn = 50
	for i := range b.pick(4000, 400) / turn {
		for range turn {
			start := time.Now()
			if err := p.one(ctx, l, thread); err != nil {
				return err
			}
			if i > 0 { // the first turn warms up
				ours = append(ours, time.Since(start))
			}
		}
		for range turn {
			start := time.Now()
			for range 3 {
				if err := bare.append(data); err != nil {
					return err
				}
			}
			if i > 0 {
				base = append(base, time.Since(start))
			}
		}
	}
	t := &table{title: "Durable effect, one session (SQLite)", head: []string{"", "median", "p99"}}
	t.row("intent, attempt, completion through the store (3 commits, 5 entries)", ms(ours.median()), ms(ours.p99()))
	t.row(fmt.Sprintf("baseline: 3 appends of %d bytes to a file, each with `fdatasync`", appended), ms(base.median()), ms(base.p99()))
	t.row("ratio", ratio(ours.median(), base.median()), ratio(ours.p99(), base.p99()))
	t.note("Target: at most 1.5 × the baseline (median): %s.", verdict(float64(ours.median()) <= 1.5*float64(base.median())))
	t.print()
	return nil
}

// claimable makes n sessions and claims them.
func claimable(ctx context.Context, o *opened, n int) ([]*store.Lease, error) {
	for range n {
		s, err := newSession(o.db, agentOf("bench", "scripted", ""), "go")
		if err != nil {
			return nil, err
		}
		if _, err := o.db.CreateSession(ctx, workspace, s); err != nil {
			return nil, err
		}
	}
	return claimAll(ctx, o.node, n)
}

// agentOf is a wire agent snapshot; mcp is the address of its one MCP server.
func agentOf(name, model, mcp string) map[string]any {
	a := map[string]any{"type": "agent", "id": "agent_bench", "version": 1, "name": name, "system": "You are measured.",
		"model": map[string]any{"id": model, "effort": map[string]string{"type": "medium"}, "speed": "standard"},
		"tools": []any{}, "mcp_servers": []any{}}
	if mcp != "" {
		a["mcp_servers"] = []any{map[string]string{"type": "url", "name": "world", "url": mcp}}
		a["tools"] = []any{map[string]any{"type": "mcp_toolset", "mcp_server_name": "world", "configs": []any{},
			"default_config": map[string]any{"enabled": true, "permission_policy": map[string]string{"type": "always_allow"}}}}
	}
	return a
}
