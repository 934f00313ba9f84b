package store

import (
	"context"
	"os"
)

// witness is filled in below once the engine stands.
type witness struct{ f *os.File }

func openWitness(dir string) (*witness, error)          { return &witness{}, nil }
func (w *witness) close() error                         { return nil }
func (db *DB) compareWitness(ctx context.Context) error { return nil }
