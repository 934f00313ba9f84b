package store_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/store"
)

func (e *env) agent(name string) store.Agent {
	e.t.Helper()
	now := e.db.Now()
	a, err := e.db.CreateAgent(e.t.Context(), store.Agent{Workspace: ws, ID: store.AgentID(store.NewID("agent_", now)), Version: 1,
		Name: name, Body: json.RawMessage(`{"name":"` + name + `"}`), CreatedAt: now, UpdatedAt: now})
	if err != nil {
		e.t.Fatalf("create agent: %v", err)
	}
	return a
}

func TestAgentVersions(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		a := e.agent("one")
		for v := 2; v <= 4; v++ {
			got, err := e.db.UpdateAgent(t.Context(), ws, a.ID, func(old store.Agent) (store.Agent, error) {
				old.Version, old.UpdatedAt = v, e.db.Now()
				old.Body = json.RawMessage(fmt.Sprintf(`{"v":%d}`, v))
				return old, nil
			})
			if err != nil || got.Version != v {
				t.Fatalf("update to %d = %+v, %v", v, got, err)
			}
		}
		// No change: the same version, the body untouched.
		if got, err := e.db.UpdateAgent(t.Context(), ws, a.ID, func(old store.Agent) (store.Agent, error) { return old, nil }); err != nil || got.Version != 4 {
			t.Errorf("no-op = version %d, %v", got.Version, err)
		}
		first, err := e.db.Agent(t.Context(), ws, a.ID, 1)
		if err != nil || string(first.Body) != `{"name":"one"}` {
			t.Errorf("version 1 = %s, %v; a version must never change", first.Body, err)
		}
		list, err := e.db.AgentVersions(t.Context(), ws, a.ID, 4, 2)
		if err != nil || len(list) != 2 || list[0].Version != 3 || list[1].Version != 2 {
			t.Errorf("versions below 4 = %+v, %v", list, err)
		}
		boom := errors.New("boom")
		if _, err := e.db.UpdateAgent(t.Context(), ws, a.ID, func(store.Agent) (store.Agent, error) { return store.Agent{}, boom }); !errors.Is(err, boom) {
			t.Errorf("refused update = %v", err)
		}
		for _, who := range []store.WorkspaceID{"other", ""} {
			if _, err := e.db.Agent(t.Context(), who, a.ID, 0); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("agent from workspace %q = %v, want ErrNotFound", who, err)
			}
		}
	})
}

// A list walked page by page gives each row once, whatever the page size, also
// for rows of one time.
func TestPages(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		want := map[store.AgentID]bool{}
		now := e.db.Now()
		for i := range 7 {
			a := store.Agent{Workspace: ws, ID: store.AgentID(fmt.Sprintf("agent_%d", i)), Version: 1, Body: []byte(`{}`),
				CreatedAt: now.Add(time.Duration(i/3) * time.Second), UpdatedAt: now}
			if _, err := e.db.CreateAgent(t.Context(), a); err != nil {
				t.Fatal(err)
			}
			want[a.ID] = true
		}
		for size := 1; size <= 8; size++ {
			got := map[store.AgentID]bool{}
			p := store.Page{Limit: size}
			for {
				list, err := e.db.Agents(t.Context(), ws, p)
				if err != nil {
					t.Fatal(err)
				}
				if len(list) == 0 {
					break
				}
				for _, a := range list {
					if got[a.ID] {
						t.Errorf("page size %d: %s twice", size, a.ID)
					}
					got[a.ID] = true
				}
				p.AfterAt, p.AfterID = list[len(list)-1].CreatedAt, string(list[len(list)-1].ID)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("page size %d (-want +got):\n%s", size, diff)
			}
		}
	})
}

func TestCredentials(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		ctx, now := t.Context(), e.db.Now()
		vault := func(id string) store.VaultID {
			v, err := e.db.CreateVault(ctx, store.Vault{Workspace: ws, ID: store.VaultID(id), DisplayName: id, CreatedAt: now, UpdatedAt: now})
			if err != nil {
				t.Fatal(err)
			}
			return v.ID
		}
		put := func(v store.VaultID, key string) (store.Credential, error) {
			return e.db.CreateCredential(ctx, store.Credential{Workspace: ws, Vault: v, ID: store.CredentialID("vcrd_" + string(v) + key),
				AuthType: "static_bearer", MatchKey: key, Auth: []byte(`{}`), Sealed: []byte("sealed"), CreatedAt: now, UpdatedAt: now})
		}
		v1, v2 := vault("vlt_1"), vault("vlt_2")
		if _, err := put("vlt_none", "k"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("into no vault = %v", err)
		}
		c1, err := put(v1, "k")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := put(v1, "k"); !errors.Is(err, store.ErrDuplicate) {
			t.Errorf("same key = %v, want ErrDuplicate", err)
		}
		if _, err := put(v2, "k"); err != nil {
			t.Errorf("same key in another vault = %v", err)
		}
		for i := 1; i < store.MaxCredentials; i++ {
			if _, err := put(v1, fmt.Sprint("k", i)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := put(v1, "more"); !errors.Is(err, store.ErrFull) {
			t.Errorf("credential 21 = %v, want ErrFull", err)
		}
		// The first match in the order of the vaults.
		if got, err := e.db.CredentialFor(ctx, ws, []store.VaultID{v2, v1}, "k"); err != nil || got.Vault != v2 {
			t.Errorf("credential for k = %s, %v", got.Vault, err)
		}
		// Attack K9: a credential of another tenant is no credential.
		if _, err := e.db.CredentialFor(ctx, "other", []store.VaultID{v1, v2}, "k"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("credential of another workspace = %v", err)
		}
		// Archiving purges the secret and frees the key.
		c1, err = e.db.UpdateCredential(ctx, ws, v1, c1.ID, func(c store.Credential) (store.Credential, error) {
			c.ArchivedAt = now
			return c, nil
		})
		if err != nil || c1.Sealed != nil {
			t.Errorf("archived credential = %+v, %v", c1, err)
		}
		if got, err := e.db.Credential(ctx, ws, v1, c1.ID); err != nil || len(got.Sealed) != 0 {
			t.Errorf("archived credential is still sealed in the store: %q, %v", got.Sealed, err)
		}
		if got, err := e.db.CredentialFor(ctx, ws, []store.VaultID{v1}, "k"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("archived credential is used: %+v, %v", got, err)
		}
		// Archiving a vault takes its credentials with it.
		if _, err := e.db.UpdateVault(ctx, ws, v1, func(v store.Vault) (store.Vault, error) { v.ArchivedAt = now; return v, nil }); err != nil {
			t.Fatal(err)
		}
		all, err := e.db.Credentials(ctx, ws, v1, store.Page{IncludeArchived: true})
		if err != nil || len(all) != store.MaxCredentials {
			t.Fatalf("credentials of the archived vault: %d, %v", len(all), err)
		}
		for _, c := range all {
			if len(c.Sealed) != 0 || c.ArchivedAt.IsZero() {
				t.Errorf("credential %s outlived its vault", c.ID)
			}
		}
		if _, err := put(v1, "late"); !errors.Is(err, store.ErrArchived) {
			t.Errorf("into an archived vault = %v", err)
		}
	})
}

func TestConnectors(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		ctx, now := t.Context(), e.db.Now()
		create := func(w store.WorkspaceID, id, name string) (store.Connector, error) {
			return e.db.CreateConnector(ctx, store.Connector{Workspace: w, ID: store.ConnectorID(id), Name: name, Version: 1,
				URL: "https://one.example/mcp", Body: []byte(`{"v":1}`), CreatedAt: now, UpdatedAt: now})
		}
		c, err := create(ws, "conn_1", "one")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := create(ws, "conn_2", "one"); !errors.Is(err, store.ErrDuplicate) {
			t.Errorf("same name = %v, want ErrDuplicate", err)
		}
		if _, err := create("other", "conn_3", "one"); err != nil {
			t.Errorf("same name in another workspace = %v", err)
		}
		for range 2 {
			if got, err := e.db.PinTool(ctx, ws, c.ID, "delete", "first"); err != nil || got != "first" {
				t.Errorf("pin = %q, %v", got, err)
			}
		}
		if got, err := e.db.PinTool(ctx, ws, c.ID, "delete", "second"); err != nil || got != "first" {
			t.Errorf("another definition = %q, %v; the first one holds", got, err)
		}
		if _, err := e.db.PinTool(ctx, "other", c.ID, "delete", "x"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("pin of a foreign connector = %v", err)
		}
		got, err := e.db.ConnectorByURL(ctx, ws, "https://one.example/mcp")
		if err != nil || got.ID != c.ID || got.Pins["delete"] != "first" {
			t.Errorf("by url = %+v, %v", got, err)
		}
		got, err = e.db.UpdateConnector(ctx, ws, c.ID, func(c store.Connector) (store.Connector, error) {
			c.Body, c.Version, c.Pins = []byte(`{"v":2}`), 2, nil
			return c, nil
		})
		if err != nil || got.Version != 2 {
			t.Fatalf("update = %+v, %v", got, err)
		}
		if got, err := e.db.ConnectorByName(ctx, ws, "one"); err != nil || len(got.Pins) != 0 {
			t.Errorf("pins after the operator looked anew = %v, %v", got.Pins, err)
		}
		if err := e.db.DeleteConnector(ctx, ws, c.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.Connector(ctx, ws, c.ID); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("deleted connector = %v", err)
		}
	})
}

func TestAPIKeys(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		ctx, now := t.Context(), e.db.Now()
		key := store.NewKey()
		k := store.APIKey{Workspace: ws, ID: "apikey_1", Name: "first", Role: "admin", CreatedAt: now}
		for i, want := range []bool{true, false} {
			made, err := e.db.EnsureBootstrapKey(ctx, k, key)
			if err != nil || made != want {
				t.Errorf("bootstrap %d = %v, %v", i, made, err)
			}
		}
		got, err := e.db.APIKeyOf(ctx, key)
		if err != nil || got.ID != "apikey_1" || got.Last4 != key[len(key)-4:] {
			t.Errorf("key = %+v, %v", got, err)
		}
		if _, err := e.db.APIKeyOf(ctx, key+"x"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("wrong key = %v", err)
		}
		if _, err := e.db.RevokeAPIKey(ctx, ws, "apikey_1", "admin"); !errors.Is(err, store.ErrLastAdmin) {
			t.Errorf("revoke the last admin key = %v", err)
		}
		other := store.NewKey()
		if _, err := e.db.CreateAPIKey(ctx, store.APIKey{Workspace: ws, ID: "apikey_2", Role: "admin", CreatedAt: now}, other); err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.CreateAPIKey(ctx, store.APIKey{Workspace: "nowhere", ID: "apikey_3", Role: "admin", CreatedAt: now}, store.NewKey()); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("key of no workspace = %v", err)
		}
		if _, err := e.db.RevokeAPIKey(ctx, ws, "apikey_1", "admin"); err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.APIKeyOf(ctx, key); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("revoked key = %v", err)
		}
		short := store.NewKey()
		if _, err := e.db.CreateAPIKey(ctx, store.APIKey{Workspace: ws, ID: "apikey_4", Role: "viewer", CreatedAt: now, ExpiresAt: now.Add(-time.Second)}, short); err != nil {
			t.Fatal(err)
		}
		if _, err := e.db.APIKeyOf(ctx, short); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("expired key = %v", err)
		}
	})
}

// A write and its audit row are both there or both not, and the chain verifies.
func TestAudit(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		act := func(i int) context.Context {
			return store.WithAct(t.Context(), store.Act{Workspace: ws, Node: "node_a", Principal: "apikey_1", Action: "agents.create",
				Detail: []byte(fmt.Sprintf(`{"n":%d}`, i))})
		}
		now := e.db.Now()
		create := func(ctx context.Context, id string) error {
			_, err := e.db.CreateAgent(ctx, store.Agent{Workspace: ws, ID: store.AgentID(id), Version: 1, Body: []byte(`{}`), CreatedAt: now, UpdatedAt: now})
			return err
		}
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				if err := create(act(i), fmt.Sprint("agent_", i)); err != nil {
					t.Errorf("create %d: %v", i, err)
				}
			})
		}
		wg.Wait()
		if err := create(act(99), "agent_0"); err == nil {
			t.Error("created agent_0 twice")
		}
		rows, err := e.db.Audit(t.Context(), ws, store.AuditFilter{})
		if err != nil || len(rows) != 20 {
			t.Fatalf("%d audit rows, %v; a write that failed leaves none", len(rows), err)
		}
		if rows[0].Resource == "" {
			t.Error("the row of a creation does not name what was created")
		}
		chains, err := e.db.VerifyAudit(t.Context(), ws)
		if err != nil || len(chains) != 1 || chains[0].Rows != 20 {
			t.Errorf("verify = %+v, %v", chains, err)
		}
		for _, harm := range []struct {
			sql   string
			sound bool
		}{
			{`UPDATE audit SET principal = 'somebody else' WHERE seq = 7`, false},
			{`UPDATE audit SET principal = 'apikey_1' WHERE seq = 7`, true}, // and back
			{`DELETE FROM audit WHERE seq = 20`, false},
		} {
			if _, err := e.db.Exec(t.Context(), harm.sql); err != nil {
				t.Fatal(err)
			}
			_, err := e.db.VerifyAudit(t.Context(), ws)
			if harm.sound != (err == nil) || !harm.sound && !errors.Is(err, store.ErrDamaged) {
				t.Errorf("after %s: verify = %v", harm.sql, err)
			}
		}
	})
}

// Idempotency-Key: one write whatever the number of requests, also at once.
func TestOnce(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		now := e.db.Now()
		body := sha256.Sum256([]byte("body"))
		once := func(request string) *store.Once {
			return &store.Once{Workspace: ws, Path: "/v1/agents", Key: "k1", Digest: body, Request: request, Node: "node_a",
				Answer: func(r any) (json.RawMessage, error) {
					return json.RawMessage(`"` + string(r.(store.Agent).ID) + `"`), nil
				}}
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		made, repeated := 0, 0
		for i := range 8 {
			wg.Go(func() {
				id := fmt.Sprint("agent_", i)
				_, err := e.db.CreateAgent(store.WithOnce(t.Context(), once(id)), store.Agent{Workspace: ws, ID: store.AgentID(id),
					Version: 1, Body: []byte(`{}`), CreatedAt: now, UpdatedAt: now})
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					made++
				case errors.Is(err, store.ErrRepeated):
					repeated++
				default:
					t.Errorf("create: %v", err)
				}
			})
		}
		wg.Wait()
		if made != 1 || repeated != 7 {
			t.Errorf("made %d, repeated %d; want 1 and 7", made, repeated)
		}
		list, err := e.db.Agents(t.Context(), ws, store.Page{})
		if err != nil || len(list) != 1 {
			t.Fatalf("%d agents, %v", len(list), err)
		}
		row, err := e.db.OnceDone(t.Context(), ws, "/v1/agents", "k1")
		if err != nil || row.Digest != body || string(row.Answer) != `"`+string(list[0].ID)+`"` {
			t.Errorf("record = %+v, %v", row, err)
		}
		for _, miss := range [][3]string{{"other", "/v1/agents", "k1"}, {string(ws), "/v1/vaults", "k1"}, {string(ws), "/v1/agents", "k2"}} {
			if _, err := e.db.OnceDone(t.Context(), store.WorkspaceID(miss[0]), miss[1], miss[2]); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("record of %v = %v", miss, err)
			}
		}
	})
}

// The record of a send commits with the inbox rows, and with nothing else.
func TestOnceOfInbox(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.create()
		digest := sha256.Sum256([]byte("hello"))
		o := &store.Once{Workspace: ws, Path: "/p", Digest: digest, Request: "req_1", Node: "node_a", Implicit: true,
			Key: store.ImplicitKey(digest, "req_1"), Answer: func(r any) (json.RawMessage, error) {
				return json.RawMessage(`"` + r.([]store.Accepted)[0].ID + `"`), nil
			}}
		boom := errors.New("boom")
		ctx := store.WithOnce(t.Context(), o)
		if _, err := e.db.Deliver(ctx, ws, s.ID, []store.Delivery{message("hello")}, func(store.View) error { return boom }); !errors.Is(err, boom) {
			t.Fatalf("refused delivery = %v", err)
		}
		if _, err := e.db.OnceRetried(t.Context(), ws, "/p", digest); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("record of a refused send = %v", err)
		}
		m := message("hello")
		if _, err := e.db.Deliver(ctx, ws, s.ID, []store.Delivery{m}, nil); err != nil {
			t.Fatal(err)
		}
		row, err := e.db.OnceRetried(t.Context(), ws, "/p", digest)
		if err != nil || string(row.Answer) != `"`+m.ID+`"` || row.Unanswered {
			t.Errorf("record = %+v, %v", row, err)
		}
		if err := e.db.OnceUnanswered(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		if row, err := e.db.OnceRetried(t.Context(), ws, "/p", digest); err != nil || !row.Unanswered {
			t.Errorf("record after the answer was lost = %+v, %v", row, err)
		}
		if _, err := e.db.OnceRetried(t.Context(), ws, "/p", sha256.Sum256([]byte("other"))); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("another body = %v", err)
		}
		if gone, err := e.db.NodeGone(t.Context(), "node_unknown"); err != nil || !gone {
			t.Errorf("unknown node gone = %v, %v", gone, err)
		}
		if gone, err := e.db.NodeGone(t.Context(), e.node.ID()); err != nil || gone {
			t.Errorf("this node gone = %v, %v", gone, err)
		}
	})
}

// What a model call used is summed by model, session and day, and waste stands apart.
func TestUsage(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		m := message("hello")
		s := e.create(m)
		l := e.claim()
		e.must(l, store.Append{Entries: []store.Draft{running(), event("user.message")}, Consume: []string{m.ID}})
		e.must(l, entries(output(newEffect())))
		e.must(l, entries(output(newEffect())))
		for _, by := range []string{"model", "session", "agent", "day"} {
			sums, err := e.db.Usage(t.Context(), ws, store.UsageFilter{GroupBy: by})
			if err != nil || len(sums) != 1 {
				t.Fatalf("by %s: %+v, %v", by, sums, err)
			}
			if sums[0].Input != 20 || sums[0].ModelRequests != 2 {
				t.Errorf("by %s = %+v", by, sums[0])
			}
			if by == "session" && sums[0].Group != string(s.ID) {
				t.Errorf("group = %q", sums[0].Group)
			}
			if more, err := e.db.Usage(t.Context(), ws, store.UsageFilter{GroupBy: by, After: sums[0].Group}); err != nil || len(more) != 0 {
				t.Errorf("by %s after the last group: %+v, %v", by, more, err)
			}
		}
		if sums, err := e.db.Usage(t.Context(), "other", store.UsageFilter{GroupBy: "model"}); err != nil || len(sums) != 0 {
			t.Errorf("usage of another workspace = %+v, %v", sums, err)
		}
		if sums, err := e.db.Usage(t.Context(), ws, store.UsageFilter{GroupBy: "day", From: e.db.Now().Add(time.Hour)}); err != nil || len(sums) != 0 {
			t.Errorf("usage of the future = %+v, %v", sums, err)
		}
	})
}

// Acts at the same moment all join one chain: none is refused because others
// write its head.
func TestAuditRace(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		const writers, each = 48, 5
		var wg sync.WaitGroup
		for range writers {
			wg.Go(func() {
				for range each {
					now := e.db.Now()
					ctx := store.WithAct(t.Context(), store.Act{Workspace: ws, Node: "n", Principal: "p", Action: "agents.create"})
					if _, err := e.db.CreateAgent(ctx, store.Agent{Workspace: ws, ID: store.AgentID(store.NewID("agent_", now)), Version: 1,
						Name: "a", Body: json.RawMessage(`{}`), CreatedAt: now, UpdatedAt: now}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		chains, err := e.db.VerifyAudit(t.Context(), ws)
		if err != nil || len(chains) != 1 || chains[0].Rows != writers*each {
			t.Errorf("chains = %+v, %v", chains, err)
		}
	})
}
