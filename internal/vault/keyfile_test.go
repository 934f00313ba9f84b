package vault_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/vault"
)

func TestCreateOpen(t *testing.T) {
	dir := t.TempDir()
	if _, err := vault.OpenMaster(dir, ""); !errors.Is(err, vault.ErrNoMaster) {
		t.Fatalf("OpenMaster of an empty folder = %v, want ErrNoMaster", err)
	}
	m, err := vault.CreateMaster(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	wrapped, err := m.Wrap([]byte("k"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := vault.OpenMaster(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := again.Unwrap(wrapped); err != nil || string(got) != "k" {
		t.Errorf("Unwrap after reopening = %q, %v", got, err)
	}
	if again.ID() != m.ID() || len(m.ID()) != 16 {
		t.Errorf("ID = %q and %q", m.ID(), again.ID())
	}
	if _, err := vault.CreateMaster(dir, ""); !errors.Is(err, vault.ErrMasterExists) {
		t.Errorf("second CreateMaster = %v, want ErrMasterExists", err)
	}
	names := map[string]fs.FileMode{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		names[e.Name()] = info.Mode()
	}
	want := map[string]fs.FileMode{vault.MasterFile: 0o600, vault.IdentityFile: 0o600}
	if d := cmp.Diff(want, names); d != "" {
		t.Errorf("files (-want +got):\n%s", d)
	}
}

func TestIdentityElsewhere(t *testing.T) {
	dir, id := t.TempDir(), filepath.Join(t.TempDir(), "operator.txt")
	if _, err := vault.CreateMaster(dir, id); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, vault.IdentityFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("identity is in the data folder: %v", err)
	}
	if _, err := vault.OpenMaster(dir, id); err != nil {
		t.Error(err)
	}
	if _, err := vault.OpenMaster(dir, ""); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("OpenMaster without identity = %v", err)
	}
	// One identity may open several folders.
	if _, err := vault.CreateMaster(t.TempDir(), id); err != nil {
		t.Error(err)
	}
}

// TestKeyFileRefused: each trouble has its error and a hint.
func TestKeyFileRefused(t *testing.T) {
	tests := []struct {
		name   string
		breaks func(t *testing.T, master, identity string)
		want   error
		text   string
	}{
		{"master readable by the group", chmod(0, 0o640), nil, "mode 0640 lets others in"},
		{"master readable by the world", chmod(0, 0o604), nil, "mode 0604 lets others in"},
		{"identity readable by the group", chmod(1, 0o640), nil, "mode 0640 lets others in"},
		{"no identity", func(t *testing.T, _, id string) { check(t, os.Remove(id)) }, fs.ErrNotExist, "master.identity"},
		{"identity of another folder", func(t *testing.T, _, id string) {
			dir := t.TempDir()
			if _, err := vault.CreateMaster(dir, ""); err != nil {
				t.Fatal(err)
			}
			check(t, os.Rename(filepath.Join(dir, vault.IdentityFile), id))
		}, vault.ErrWrongKey, "another identity"},
		{"identity is nonsense", write(1, []byte("AGE-SECRET-KEY-1NONSENSE\n")), nil, "not an age identity file"},
		{"identity file is empty", write(1, nil), nil, "not an age identity file"},
		{"master is empty", write(0, nil), vault.ErrDamaged, "master.key"},
		{"master is not ours", write(0, []byte("hello")), vault.ErrDamaged, "master.key"},
		{"master is cut", edit(func(b []byte) []byte { return b[:len(b)-1] }), vault.ErrDamaged, "master.key"},
		{"master has a flipped byte", edit(func(b []byte) []byte { b[len(b)-5] ^= 1; return b }), vault.ErrDamaged, "master.key"},
		{"master has a zero tail", edit(func(b []byte) []byte { return append(b[:len(b)-8], make([]byte, 8)...) }), vault.ErrDamaged, "master.key"},
		{"master is huge", write(0, bytes.Repeat([]byte("x"), 1<<20)), nil, "larger than"},
		{"master is a folder", func(t *testing.T, m, _ string) { check(t, os.Remove(m)); check(t, os.Mkdir(m, 0o700)) }, nil, "not a regular file"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if _, err := vault.CreateMaster(dir, ""); err != nil {
				t.Fatal(err)
			}
			tt.breaks(t, filepath.Join(dir, vault.MasterFile), filepath.Join(dir, vault.IdentityFile))
			_, err := vault.OpenMaster(dir, "")
			if err == nil {
				t.Fatal("opened")
			}
			if tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("error = %v, want %v", err, tt.want)
			}
			if !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error = %v, want it to say %q", err, tt.text)
			}
			if strings.Contains(err.Error(), "AGE-SECRET") {
				t.Errorf("error quotes the identity: %v", err)
			}
			var hinted interface{ Hint() string }
			if !errors.As(err, &hinted) || hinted.Hint() == "" {
				t.Errorf("%v has no hint", err)
			}
		})
	}
}

// TestCreateAfterCrash: a crash after the identity and before the key, and one
// that left a temporary file, are repaired by the next CreateMaster.
func TestCreateAfterCrash(t *testing.T) {
	dir := t.TempDir()
	if _, err := vault.CreateMaster(dir, ""); err != nil {
		t.Fatal(err)
	}
	check(t, os.Rename(filepath.Join(dir, vault.MasterFile), filepath.Join(dir, ".tmp-key-1")))
	identity, err := os.ReadFile(filepath.Join(dir, vault.IdentityFile))
	check(t, err)
	if _, err := vault.CreateMaster(dir, ""); err != nil {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(filepath.Join(dir, vault.IdentityFile)); err != nil || !bytes.Equal(identity, after) {
		t.Errorf("identity was replaced: %v", err)
	}
	if _, err := vault.OpenMaster(dir, ""); err != nil {
		t.Error(err)
	}
}

// TestCreateRace: of many that create at once one wins and nobody gets a key
// that is not the folder's.
func TestCreateRace(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	made := make([]*vault.Master, 16)
	for i := range made {
		wg.Go(func() {
			m, err := vault.CreateMaster(dir, "")
			if err != nil && !errors.Is(err, vault.ErrMasterExists) {
				t.Errorf("CreateMaster = %v", err)
			}
			made[i] = m
		})
	}
	wg.Wait()
	final, err := vault.OpenMaster(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	won := 0
	for _, m := range made {
		if m == nil {
			continue
		}
		won++
		if m.ID() != final.ID() {
			t.Errorf("a caller holds key %s, the folder holds %s", m.ID(), final.ID())
		}
	}
	if won != 1 {
		t.Errorf("%d callers made the key, want 1", won)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// chmod, write and edit break one of the two files: 0 is the master, 1 the identity.
func chmod(which int, mode fs.FileMode) func(*testing.T, string, string) {
	return func(t *testing.T, m, id string) { check(t, os.Chmod([]string{m, id}[which], mode)) }
}

func write(which int, data []byte) func(*testing.T, string, string) {
	return func(t *testing.T, m, id string) { check(t, os.WriteFile([]string{m, id}[which], data, 0o600)) }
}

func edit(f func([]byte) []byte) func(*testing.T, string, string) {
	return func(t *testing.T, m, _ string) {
		b, err := os.ReadFile(m)
		check(t, err)
		check(t, os.WriteFile(m, f(b), 0o600))
	}
}
