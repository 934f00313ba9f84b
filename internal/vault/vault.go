// Package vault seals and opens credentials. It is the only package whose
// values hold a plaintext secret (Secret), and the only one that holds the
// data folder's master key (Master).
//
// What it promises:
//
//   - A Secret shows itself through Reveal and nowhere else.
//   - Sealed bytes open only under the master key that sealed them and only for
//     the purpose, workspace and id that they were sealed for: a row that was
//     copied to another tenant or another credential does not open.
//   - CreateMaster never overwrites a key, and the key is durable when it
//     returns. Sealed data that outlives its key is lost, so this order matters:
//     first the key, then anything sealed.
//
// What it does not: it keeps no rows (store does), decides nothing (policy
// does), and cannot wipe plaintext from the memory of the process. Scrubber is
// best effort by nature.
//
// Files of the data folder:
//
//	master.key       32 random bytes, encrypted with age to the identity, mode 0600
//	master.identity  age X25519 identity, mode 0600; may be kept elsewhere, so
//	                 that a copy of the data folder alone opens nothing
package vault

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
)

// Errors of the vault. Callers test with errors.Is.
var (
	// ErrNoMaster: the folder has no master key; CreateMaster makes one.
	ErrNoMaster = errors.New("no master key")
	// ErrMasterExists: the folder has a master key already; it was not touched.
	ErrMasterExists = errors.New("master key exists already")
	// ErrWrongKey: the bytes were sealed under another key.
	ErrWrongKey = errors.New("wrong key")
	// ErrDamaged: the bytes are not what was sealed, or were sealed for another
	// purpose, workspace or id. Which of these cannot be told apart.
	ErrDamaged = errors.New("sealed bytes do not open here")
)

const (
	keySize     = 32
	keyIDSize   = 8
	sealVersion = 1
	headSize    = 1 + keyIDSize
)

// Master is the master key of a data folder. Safe for concurrent use. It
// implements the store's Wrapper.
type Master struct {
	key Secret // 32 bytes; behind a closure, so that a dump of Master shows nothing
	id  [keyIDSize]byte
}

// newMaster takes keySize bytes.
func newMaster(key []byte) *Master {
	m := &Master{key: NewSecret(string(key))}
	copy(m.id[:], m.Derive("id"))
	return m
}

// ID is the check value of the key: 16 hex digits that say which key it is and
// nothing about it. Two data folders that share a store must agree on it.
func (m *Master) ID() string { return hex.EncodeToString(m.id[:]) }

// Derive returns 32 bytes that depend on the master key and the purpose alone
// (HKDF-SHA-256, RFC 5869). Equal purposes give equal bytes, for ever.
func (m *Master) Derive(purpose string) []byte {
	k, err := hkdf.Key(sha256.New, []byte(m.key.Reveal()), nil, "planaria/v1/"+purpose, keySize)
	if err != nil {
		panic("vault: derive: " + err.Error()) // only for a length out of bounds
	}
	return k
}

// Wrap seals a data key.
func (m *Master) Wrap(plain []byte) ([]byte, error) { return m.seal(plain, "wrap") }

// Unwrap opens what Wrap sealed. ErrWrongKey, ErrDamaged.
func (m *Master) Unwrap(wrapped []byte) ([]byte, error) { return m.open(wrapped, "wrap") }

// Seal seals a credential for one workspace and one credential id.
func (m *Master) Seal(ws, id string, s Secret) ([]byte, error) {
	return m.seal([]byte(s.Reveal()), "credential", ws, id)
}

// Open opens what Seal sealed for the same workspace and id. ErrWrongKey,
// ErrDamaged.
func (m *Master) Open(ws, id string, sealed []byte) (Secret, error) {
	plain, err := m.open(sealed, "credential", ws, id)
	if err != nil {
		return Secret{}, fmt.Errorf("open credential %s: %w", id, err)
	}
	return NewSecret(string(plain)), nil
}

// seal returns version ‖ key id ‖ nonce ‖ ciphertext ‖ tag (AES-256-GCM, random
// 96-bit nonces: good for 2³² seals of one purpose). Purpose and names are
// authenticated, not stored.
func (m *Master) seal(plain []byte, purpose string, names ...string) ([]byte, error) {
	gcm, err := m.aead(purpose)
	if err != nil {
		return nil, fmt.Errorf("seal %s: %w", purpose, err)
	}
	head := append([]byte{sealVersion}, m.id[:]...)
	return append(head, gcm.Seal(nil, nil, plain, bound(head, purpose, names))...), nil
}

func (m *Master) open(sealed []byte, purpose string, names ...string) ([]byte, error) {
	if len(sealed) < headSize {
		return nil, fmt.Errorf("open %s: %d bytes: %w", purpose, len(sealed), ErrDamaged)
	}
	head, rest := sealed[:headSize], sealed[headSize:]
	if head[0] != sealVersion {
		return nil, fmt.Errorf("open %s: version %d: %w", purpose, head[0], ErrDamaged)
	}
	if [keyIDSize]byte(head[1:]) != m.id {
		return nil, fmt.Errorf("open %s: sealed under key %x, this is key %s: %w", purpose, head[1:], m.ID(), ErrWrongKey)
	}
	gcm, err := m.aead(purpose)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", purpose, err)
	}
	plain, err := gcm.Open(nil, nil, rest, bound(head, purpose, names))
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", purpose, ErrDamaged)
	}
	return plain, nil
}

// aead makes the cipher of one purpose. It is made anew for each call, some
// microseconds, so that no key schedule lies about in a struct.
func (m *Master) aead(purpose string) (cipher.AEAD, error) {
	block, err := aes.NewCipher(m.Derive("seal/" + purpose))
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// bound is the additional data: each part with its length before it, so that
// ("ab","c") and ("a","bc") differ.
func bound(head []byte, purpose string, names []string) []byte {
	out := append([]byte(nil), head...)
	for _, p := range append([]string{purpose}, names...) {
		out = binary.BigEndian.AppendUint32(out, uint32(len(p)))
		out = append(out, p...)
	}
	return out
}
