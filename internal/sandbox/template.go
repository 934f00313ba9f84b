package sandbox

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Template is a snapshot that many sandboxes begin with: what takes long to set
// up is set up once, and each is a restore of it under its own name. It belongs
// to one workspace and this folder, and to no session: Snapshots does not list
// it.
type Template struct {
	Key       string    `json:"key"` // 64 hexadecimal digits: all that it depends on
	Workspace string    `json:"workspace"`
	Recipe    string    `json:"recipe"` // what its owner knows it by
	Snapshot  string    `json:"snapshot"`
	At        time.Time `json:"at"`

	// Used is when it was last asked for.
	Used time.Time `json:"-"`
}

func (r *Runtime) templatePath(key string) string {
	return filepath.Join(r.cfg.Dir, "templates", key+".json")
}

func templateName(key string) bool {
	b, err := hex.DecodeString(key)
	return err == nil && len(b) == 32
}

// KeepTemplate makes a snapshot a template. On return it is durable; a crash
// before leaves a snapshot that nobody has named.
func (r *Runtime) KeepTemplate(t Template) error {
	if !templateName(t.Key) || !snapshotName.MatchString(t.Snapshot) {
		return fmt.Errorf("keep template %.80q: %w", t.Key, ErrNotFound)
	}
	b, err := json.Marshal(t)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(r.templatePath(t.Key)), 0o700)
	}
	if err == nil {
		err = writeDurable(r.templatePath(t.Key), b)
	}
	if err != nil {
		return fmt.Errorf("keep template %s: %w", t.Key, err)
	}
	return nil
}

// Template finds a template with its snapshot, and notes its use. ErrNotFound.
func (r *Runtime) Template(key string) (*Template, *Manifest, error) {
	t, err := r.readTemplate(key)
	if err != nil {
		return nil, nil, fmt.Errorf("find template %.80q: %w", key, err)
	}
	m, err := r.ReadSnapshot(t.Snapshot)
	if err != nil {
		return nil, nil, fmt.Errorf("find template %s: %w", key, err)
	}
	now := time.Now()
	_ = os.Chtimes(r.templatePath(key), now, now) // only what is removed first depends on it
	return t, m, nil
}

func (r *Runtime) readTemplate(key string) (*Template, error) {
	if !templateName(key) {
		return nil, ErrNotFound
	}
	b, err := os.ReadFile(r.templatePath(key))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	t := new(Template)
	if err := json.Unmarshal(b, t); err != nil || t.Key != key {
		return nil, fmt.Errorf("its note: %w", ErrDamaged)
	}
	if info, err := os.Stat(r.templatePath(key)); err == nil {
		t.Used = info.ModTime()
	}
	return t, nil
}

// Templates lists the templates of this folder. Notes that cannot be read are
// left out.
func (r *Runtime) Templates() ([]Template, error) {
	entries, err := os.ReadDir(filepath.Join(r.cfg.Dir, "templates"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	var out []Template
	for _, e := range entries {
		key, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			continue
		}
		if t, err := r.readTemplate(key); err == nil {
			out = append(out, *t)
		}
	}
	return out, nil
}

// DropTemplate removes a template and its image. Sandboxes that began with it do
// not need it any more. One that is not there is no error.
func (r *Runtime) DropTemplate(key string) error {
	t, err := r.readTemplate(key)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	// The note goes first: what a crash leaves is a snapshot that nobody names.
	if rerr := os.Remove(r.templatePath(key)); rerr != nil {
		return fmt.Errorf("drop template %s: %w", key, rerr)
	}
	if err != nil {
		return nil // its note was damaged
	}
	if err := r.DropImage(t.Snapshot); err != nil {
		return fmt.Errorf("drop template %s: %w", key, err)
	}
	return nil
}

// ofTemplates are the snapshots that templates are made of.
func (r *Runtime) ofTemplates() (map[string]bool, error) {
	list, err := r.Templates()
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, t := range list {
		out[t.Snapshot] = true
	}
	return out, nil
}
