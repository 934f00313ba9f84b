package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/planaria/planaria/internal/blob"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// Names in a data folder, beside those of vault.
const (
	storeFile  = "planaria.db"
	blobFolder = "blobs"
	// sandboxFolder holds the machines of the agents and their snapshots.
	sandboxFolder = "sandboxes"
)

// folderNames begin the names of all that we put into a data folder.
var folderNames = []string{storeFile, blobFolder, sandboxFolder, "lock", "master", "witness", "tmp", "lost+found", "planaria.yaml"}

// folderState says what a data folder holds.
type folderState int

const (
	folderMissing folderState = iota
	folderEmpty
	folderOurs
)

// inspectFolder looks without touching. A folder with anything that is not ours
// is store.ErrForeign.
func inspectFolder(dir string) (folderState, error) {
	names, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return folderMissing, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open data folder: %w", err)
	}
	ours := false
	for _, n := range names {
		if !ourName(n.Name()) {
			return 0, fmt.Errorf("open data folder: %w: %s holds %q", store.ErrForeign, dir, n.Name())
		}
		ours = ours || (n.Name() != "lost+found" && n.Name() != "planaria.yaml")
	}
	if !ours {
		return folderEmpty, nil
	}
	return folderOurs, nil
}

func ourName(name string) bool {
	for _, p := range folderNames {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}

// openMaster opens the master key; with create it makes one in a folder that
// has none and no database yet. A database without its key is never given a
// new one: what is sealed under the lost key would be lost for good.
func openMaster(cfg Config, create bool) (*vault.Master, error) {
	m, err := vault.OpenMaster(cfg.Data, cfg.MasterIdentityFile)
	if !errors.Is(err, vault.ErrNoMaster) {
		return m, err
	}
	if _, statErr := os.Stat(filepath.Join(cfg.Data, storeFile)); statErr == nil || !create {
		return nil, hinted(fmt.Errorf("open master key: %w", err), "put %s back from a backup; without it nothing in the store can be read",
			filepath.Join(cfg.Data, vault.MasterFile))
	}
	m, err = vault.CreateMaster(cfg.Data, cfg.MasterIdentityFile)
	if errors.Is(err, vault.ErrMasterExists) {
		return vault.OpenMaster(cfg.Data, cfg.MasterIdentityFile) // another process was first
	}
	return m, err
}

// openReadOnly opens a store for offline reading. The caller closes it.
func openReadOnly(ctx context.Context, cfg Config, getenv func(string) string) (*store.DB, error) {
	state, err := inspectFolder(cfg.Data)
	if err != nil {
		return nil, err
	}
	if state != folderOurs {
		return nil, hinted(fmt.Errorf("%s is not a planaria data folder", cfg.Data), "name the folder of 'planaria serve' with --data")
	}
	url, err := cfg.storeURL(getenv)
	if err != nil {
		return nil, err
	}
	master, err := openMaster(cfg, false)
	if err != nil {
		return nil, err
	}
	blobs, err := openBlobs(cfg.blobDir(), false)
	if err != nil {
		return nil, err
	}
	db, err := store.Open(ctx, store.Config{URL: url, Master: master, Blobs: blobs, ReadOnly: true})
	if err != nil {
		return nil, err
	}
	if err := checkMaster(ctx, db, cfg); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// checkMaster refuses a store that was sealed under another key, before
// anything is written that its other processes could not read.
func checkMaster(ctx context.Context, db *store.DB, cfg Config) error {
	_, err := db.WorkspaceSecret(ctx, policy.HomeWorkspace)
	switch {
	case err == nil, errors.Is(err, store.ErrNotFound): // a new store has no workspace yet
		return nil
	case errors.Is(err, vault.ErrWrongKey), errors.Is(err, vault.ErrDamaged):
		return hinted(fmt.Errorf("the master key of %s does not open this store: %w", cfg.Data, vault.ErrWrongKey),
			"copy %s and the identity from the data folder with which the store was made; all processes of one store share them", vault.MasterFile)
	}
	return err
}

// openBlobs opens the folder of large bodies. Offline readers do not make it.
func openBlobs(dir string, create bool) (*blob.Folder, error) {
	if _, err := os.Stat(dir); err != nil && !create {
		return nil, fmt.Errorf("open blobs: %w", err)
	}
	return blob.Open(dir)
}
