package server_test

import (
	"encoding/base64"
	"net/url"
	"testing"

	"github.com/planaria/planaria/internal/server"
)

// A cursor is bytes from outside: whatever it holds, it is a position of its
// own list and order or a 400.
func FuzzCursor(f *testing.F) {
	f.Add(server.NewCursor("agents", "desc", 1, "agent_1"))
	f.Add("")
	f.Add("nonsense")
	f.Add(base64.RawURLEncoding.EncodeToString([]byte(`{"l":"agents","o":"desc","t":-1}`)))
	f.Add(base64.RawURLEncoding.EncodeToString([]byte(`{"l":"agents","o":"desc","i":"\u0000"}`)))
	f.Fuzz(func(t *testing.T, page string) {
		list, order, err := server.ReadCursor(url.Values{"page": {page}}, "agents", "desc")
		if err != nil {
			if e, ok := server.WireError(err); !ok || e.Status != 400 {
				t.Errorf("%q = %v, want a 400", page, err)
			}
			return
		}
		if page != "" && (list != "agents" || order != "desc") {
			t.Errorf("%q opened list %q order %q", page, list, order)
		}
	})
}

func TestCursorOfAnotherList(t *testing.T) {
	page := server.NewCursor("vaults", "desc", 1, "vlt_1")
	if _, _, err := server.ReadCursor(url.Values{"page": {page}}, "agents", "desc"); err == nil {
		t.Error("a cursor of vaults opens agents")
	}
	if _, _, err := server.ReadCursor(url.Values{"page": {page}}, "vaults", "asc"); err == nil {
		t.Error("a cursor opens the other order")
	}
}
