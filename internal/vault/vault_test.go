package vault_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/vault"
)

func newMaster(t testing.TB) *vault.Master {
	t.Helper()
	m, err := vault.CreateMaster(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestWrap(t *testing.T) {
	m := newMaster(t)
	for _, plain := range [][]byte{nil, []byte("k"), bytes.Repeat([]byte{7}, 32), bytes.Repeat([]byte("x"), 1<<20)} {
		a, err := m.Wrap(plain)
		if err != nil {
			t.Fatal(err)
		}
		b, err := m.Wrap(plain)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Equal(a, b) {
			t.Error("two wraps are equal: a nonce was used twice")
		}
		if len(plain) > 8 && bytes.Contains(a, plain) {
			t.Error("wrapped bytes hold the plaintext")
		}
		got, err := m.Unwrap(a)
		if err != nil || !bytes.Equal(got, plain) {
			t.Errorf("Unwrap = %q, %v; want %q", got, err, plain)
		}
	}
}

// TestDamaged flips every bit and cuts at every length.
func TestDamaged(t *testing.T) {
	m := newMaster(t)
	sealed, err := m.Wrap([]byte("data key"))
	if err != nil {
		t.Fatal(err)
	}
	refused := func(name string, b []byte) {
		t.Helper()
		got, err := m.Unwrap(b)
		if !errors.Is(err, vault.ErrDamaged) && !errors.Is(err, vault.ErrWrongKey) {
			t.Errorf("%s: Unwrap = %q, %v; want ErrDamaged or ErrWrongKey", name, got, err)
		}
	}
	for i := range sealed {
		for bit := range 8 {
			b := bytes.Clone(sealed)
			b[i] ^= 1 << bit
			refused(fmt.Sprintf("byte %d bit %d", i, bit), b)
		}
		refused(fmt.Sprintf("cut at %d", i), sealed[:i])
	}
	refused("longer", append(bytes.Clone(sealed), 0))
	refused("nil", nil)
}

// TestK9CopiedRow: attack K9. A sealed credential opens for its own workspace
// and id only, and not as a data key.
func TestK9CopiedRow(t *testing.T) {
	m := newMaster(t)
	sealed, err := m.Seal("wrkspc_ab", "vcrd_c", vault.NewSecret(canary))
	if err != nil {
		t.Fatal(err)
	}
	got, err := m.Open("wrkspc_ab", "vcrd_c", sealed)
	if err != nil || got.Reveal() != canary {
		t.Fatalf("Open = %v, %v", got, err)
	}
	for _, to := range [][2]string{{"wrkspc_b", "vcrd_c"}, {"wrkspc_ab", "vcrd_d"}, {"wrkspc_abv", "crd_c"}, {"wrkspc_a", "bvcrd_c"}, {"", "wrkspc_abvcrd_c"}, {"", ""}} {
		if got, err := m.Open(to[0], to[1], sealed); !errors.Is(err, vault.ErrDamaged) || !got.Empty() {
			t.Errorf("Open as %q = %v, %v; want ErrDamaged", to, got, err)
		} else if strings.Contains(err.Error(), canary) {
			t.Errorf("error shows the secret: %v", err)
		}
	}
	if _, err := m.Unwrap(sealed); !errors.Is(err, vault.ErrDamaged) {
		t.Errorf("a credential unwraps as a data key: %v", err)
	}
	other := newMaster(t)
	if _, err := other.Open("wrkspc_ab", "vcrd_c", sealed); !errors.Is(err, vault.ErrWrongKey) {
		t.Errorf("Open under another master = %v, want ErrWrongKey", err)
	}
}

func TestDerive(t *testing.T) {
	m := newMaster(t)
	a, b := m.Derive("a"), m.Derive("b")
	if len(a) != 32 || bytes.Equal(a, b) {
		t.Errorf("Derive: %d bytes, differ %v", len(a), !bytes.Equal(a, b))
	}
	if !bytes.Equal(a, m.Derive("a")) {
		t.Error("Derive is not stable")
	}
	if bytes.Equal(a, newMaster(t).Derive("a")) {
		t.Error("two masters derive the same")
	}
}

// TestMasterHidesKey: no dump of a Master shows bytes of the key.
func TestMasterHidesKey(t *testing.T) {
	key := strings.Repeat("K", 32)
	m := vault.NewMasterForTest([]byte(key))
	j, err := json.Marshal(map[string]any{"m": m})
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("%v %+v %#v %v %+v %s", m, m, m, *m, *m, j) + fmt.Sprintln(m, *m)
	for _, form := range []string{"KKK", "75 75", "4b4b", "0x4b"} {
		if strings.Contains(text, form) {
			t.Errorf("dump shows the key: %s", text)
		}
	}
}

// FuzzUnwrap: bytes from a damaged store never panic and never open.
func FuzzUnwrap(f *testing.F) {
	m := vault.NewMasterForTest(bytes.Repeat([]byte{1}, 32))
	good, err := m.Wrap([]byte("x"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good[:12])
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		if plain, err := m.Unwrap(b); err == nil {
			t.Errorf("Unwrap(%x) = %x", b, plain)
		}
	})
}
