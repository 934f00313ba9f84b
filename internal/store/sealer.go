package store

import (
	"context"
	"fmt"
)

// Sealer seals the blobs of one lineage's snapshots under its data key. When
// the lineage is erased the key is destroyed, and with it all that was sealed.
type Sealer struct {
	key     *dataKey
	ws      WorkspaceID
	lineage SessionID
}

// Sealer returns the sealer of a session's lineage. ErrNotFound, ErrDamaged.
func (db *DB) Sealer(ctx context.Context, ws WorkspaceID, id SessionID) (*Sealer, error) {
	t := db.peek(ctx)
	row, err := t.sessionRow(ws, id, false)
	if err == nil {
		var key *dataKey
		if key, err = t.dataKey(ws, row.keyID); err == nil {
			return &Sealer{key: key, ws: ws, lineage: row.Lineage}, nil
		}
	}
	return nil, fmt.Errorf("sealer of session %s: %w", id, err)
}

func (s *Sealer) aad(name string) []byte { return aadOf("pack", s.ws, s.lineage, name) }

// Seal seals plain, bound to the lineage and to the name of its use. The nonce
// is random, so equal bytes give other sealed bytes each time.
func (s *Sealer) Seal(name string, plain []byte) ([]byte, error) {
	return s.key.seal(plain, s.aad(name)), nil
}

// Open is the inverse of Seal. ErrDamaged.
func (s *Sealer) Open(name string, sealed []byte) ([]byte, error) {
	return s.key.open(sealed, s.aad(name))
}
