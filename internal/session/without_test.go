package session_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

// beginBuiltin makes a session of an agent with the built-in toolset.
func (e *env) beginBuiltin(toolset, environment m) store.SessionID {
	e.t.Helper()
	toolset["type"] = "agent_toolset_20260401"
	s, err := e.manager.Create(e.t.Context(), ws, "test", session.CreateParams{Environment: raw(environment),
		Agent:         raw(m{"id": "agent_1", "version": 1, "name": "tester", "model": m{"id": "scripted"}, "tools": []m{toolset}}),
		InitialEvents: []json.RawMessage{raw(message("begin"))}})
	if err != nil {
		e.t.Fatal(err)
	}
	return s.ID
}

// errorsSaid are the messages of a log's session.error events.
func errorsSaid(t testing.TB, all []store.Entry) (out []string) {
	t.Helper()
	for _, en := range all {
		if en.Type != "session.error" {
			continue
		}
		var b struct {
			Error struct {
				Type, Message string
				RetryStatus   struct{ Type string } `json:"retry_status"`
			}
		}
		if err := json.Unmarshal(en.Body, &b); err != nil {
			t.Fatal(err)
		}
		if b.Error.Type != "unknown_error" || b.Error.RetryStatus.Type != "retrying" {
			t.Errorf("told by %s", en.Body)
		}
		out = append(out, b.Error.Message)
	}
	return out
}

// An agent whose built-in tools cannot run is told of once: not by each turn, not
// by each process. What it does without and the way out are named.
func TestToldWithoutSandboxes(t *testing.T) {
	t.Parallel()
	cloud, self := m{"type": "cloud"}, m{"type": "self_hosted"}
	off := m{"enabled": false}
	for name, tt := range map[string]struct {
		toolset, environment m
		want                 []string // in what is said; nil: nothing is
		not                  string
	}{
		"no sandboxes": {m{}, cloud, []string{"bash, read, write, edit, glob, grep)", "this server runs none", "planaria doctor"}, "browser"},
		"some tools":   {m{"configs": []m{{"name": "bash", "enabled": false}, {"name": "browser"}}}, cloud, []string{"(read, write", "browser"}, "bash"},
		"self-hosted":  {m{}, self, []string{"self_hosted", "type cloud"}, "doctor"},
		"no tool":      {m{"default_config": off}, cloud, nil, ""},
		"other tools":  {m{"default_config": off, "configs": []m{{"name": "web_fetch", "enabled": true}}}, cloud, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, nil, nil, done, done, done)
			id := e.beginBuiltin(tt.toolset, tt.environment)
			e.until(id, "the first turn ended", ends(1))
			e.send(id, message("again"))
			e.until(id, "the second turn ended", ends(2))
			e.asleep(id)
			e.restart()
			e.send(id, message("and again"))
			all := e.until(id, "the third turn ended", ends(3))
			got := errorsSaid(t, all)
			if tt.want == nil {
				if len(got) > 0 {
					t.Errorf("told %q, want nothing", got)
				}
				return
			}
			if len(got) != 1 {
				t.Fatalf("told %q, want it once\n%s", got, e.tell(id))
			}
			for _, part := range tt.want {
				if !strings.Contains(got[0], part) {
					t.Errorf("told %q, want %q in it", got[0], part)
				}
			}
			if tt.not != "" && strings.Contains(got[0], tt.not) {
				t.Errorf("told %q, which has %q", got[0], tt.not)
			}
		})
	}
}

// Wherever the process dies, before or after one of the first commits, the user
// is told once.
func TestToldWithoutSandboxesOnce(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"append.before", "append.after"} {
		for nth := 1; nth <= 3; nth++ { // a turn that does nothing has three
			t.Run(fmt.Sprintf("%s %d", step, nth), func(t *testing.T) {
				t.Parallel()
				e := newEnv(t, nil, nil, done)
				dead := make(chan struct{})
				n, die := 0, sync.OnceFunc(func() { close(dead) })
				e.mu.Lock()
				e.step = func(p string) error {
					e.mu.Lock()
					defer e.mu.Unlock()
					if p == step {
						n++
					}
					if n < nth {
						return nil
					}
					die()
					return errKilled
				}
				e.mu.Unlock()
				id := e.beginBuiltin(m{}, m{"type": "cloud"})
				waitFor(t, "the death", dead)
				e.restart()
				all := e.until(id, "the turn ended", ends(1))
				told, listed := len(errorsSaid(t, all)), 0
				for _, en := range all {
					if en.Kind == store.KindTools {
						listed++
					}
				}
				if told != 1 || listed != 1 {
					t.Errorf("told %d times, with %d records\n%s", told, listed, e.tell(id))
				}
			})
		}
	}
}
