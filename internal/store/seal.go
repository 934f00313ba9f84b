package store

import (
	"container/list"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"
)

// saltSize is the size of the random bytes that go into a body's digest, so
// that an erased body cannot be guessed from it.
const saltSize = 16

// maxKeys bounds the unwrapped data keys in memory, about 1 KiB each.
const maxKeys = 4096

// dataKey is a lineage's unwrapped key.
type dataKey struct {
	id   KeyID
	aead cipher.AEAD
	mac  [32]byte // key of digests that would tell a guessable body
}

// keyring unwraps data keys and keeps the recently used ones.
type keyring struct {
	master Wrapper

	mu   sync.Mutex // guards the fields below
	keys map[KeyID]*list.Element
	used *list.List // of *dataKey, newest first
}

func newKeyring(master Wrapper) *keyring {
	return &keyring{master: master, keys: map[KeyID]*list.Element{}, used: list.New()}
}

// mint makes a data key and returns it with its wrapped form.
func (k *keyring) mint(id KeyID) (*dataKey, []byte, error) {
	raw := random(32)
	wrapped, err := k.master.Wrap(raw)
	if err != nil {
		return nil, nil, fmt.Errorf("wrap data key: %w", err)
	}
	key, err := newDataKey(id, raw)
	if err != nil {
		return nil, nil, err
	}
	k.put(key)
	return key, wrapped, nil
}

func newDataKey(id KeyID, raw []byte) (*dataKey, error) {
	block, err := aes.NewCipher(raw)
	if err != nil {
		return nil, fmt.Errorf("data key %s: %w", id, err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, fmt.Errorf("data key %s: %w", id, err)
	}
	m := hmac.New(sha256.New, raw)
	m.Write([]byte("planaria digests of answers"))
	key := &dataKey{id: id, aead: aead}
	m.Sum(key.mac[:0])
	return key, nil
}

func (k *keyring) put(key *dataKey) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.keys[key.id]; ok {
		return
	}
	k.keys[key.id] = k.used.PushFront(key)
	if k.used.Len() > maxKeys {
		old := k.used.Remove(k.used.Back()).(*dataKey)
		delete(k.keys, old.id)
	}
}

func (k *keyring) cached(id KeyID) *dataKey {
	k.mu.Lock()
	defer k.mu.Unlock()
	e, ok := k.keys[id]
	if !ok {
		return nil
	}
	k.used.MoveToFront(e)
	return e.Value.(*dataKey)
}

// drop forgets a destroyed key.
func (k *keyring) drop(id KeyID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if e, ok := k.keys[id]; ok {
		k.used.Remove(e)
		delete(k.keys, id)
	}
}

// dataKey returns a key of the workspace. A destroyed or unreadable key is ErrDamaged.
func (t *tx) dataKey(ws WorkspaceID, id KeyID) (*dataKey, error) {
	if key := t.db.keys.cached(id); key != nil {
		return key, nil
	}
	var wrapped []byte
	err := t.queryRow(`SELECT wrapped FROM data_keys WHERE workspace = ? AND id = ? AND destroyed_at = 0`, ws, id).Scan(&wrapped)
	if err != nil {
		return nil, fmt.Errorf("data key %s: %w", id, missing(t.db.mapErr(err)))
	}
	raw, err := t.db.keys.master.Unwrap(wrapped)
	if err != nil {
		return nil, fmt.Errorf("%w: unwrap data key %s: %w", ErrDamaged, id, err)
	}
	key, err := newDataKey(id, raw)
	if err != nil {
		return nil, err
	}
	t.db.keys.put(key)
	return key, nil
}

// seal encrypts plain, bound to what aad names. The nonce stands before the text.
func (k *dataKey) seal(plain, aad []byte) []byte {
	n := k.aead.NonceSize()
	out := make([]byte, n, n+len(plain)+k.aead.Overhead())
	mustRandom(out)
	return k.aead.Seal(out, out, plain, aad)
}

// open is the inverse of seal; ErrDamaged when the text or its place was changed.
func (k *dataKey) open(sealed, aad []byte) ([]byte, error) {
	n := k.aead.NonceSize()
	if len(sealed) < n {
		return nil, fmt.Errorf("%w: sealed body of %d bytes", ErrDamaged, len(sealed))
	}
	plain, err := k.aead.Open(nil, sealed[:n], sealed[n:], aad)
	if err != nil {
		return nil, fmt.Errorf("%w: a body does not open under key %s", ErrDamaged, k.id)
	}
	return plain, nil
}

// digest is the keyed digest of an answer: equal bodies have equal digests, and
// without the lineage's key it does not tell which of few answers was given.
func (k *dataKey) digest(body []byte) []byte {
	m := hmac.New(sha256.New, k.mac[:])
	m.Write(body)
	return m.Sum(nil)
}

func random(n int) []byte {
	b := make([]byte, n)
	mustRandom(b)
	return b
}

func mustRandom(b []byte) {
	if _, err := rand.Read(b); err != nil {
		panic("store: no entropy: " + err.Error()) // crypto/rand never fails on a working system
	}
}

// fields length-prefixes each field, so that no two lists of fields are equal bytes.
func fields(b []byte, parts ...string) []byte {
	for _, p := range parts {
		b = binary.BigEndian.AppendUint64(b, uint64(len(p)))
		b = append(b, p...)
	}
	return b
}

func number(b []byte, n int64) []byte {
	b = binary.BigEndian.AppendUint64(b, 8)
	return binary.BigEndian.AppendUint64(b, uint64(n))
}

// aadOfEntry binds an inline body to its place in the log.
func aadOfEntry(ws WorkspaceID, id SessionID, seq Seq) []byte {
	return number(fields(make([]byte, 0, 128), "entry", string(ws), string(id)), int64(seq))
}

// aadOfBlob binds a large body, which is stored before its seq is known, to its
// session and salt; the hash binds the salt to the seq.
func aadOfBlob(ws WorkspaceID, id SessionID, salt []byte) []byte {
	return fields(make([]byte, 0, 128), "blob", string(ws), string(id), string(salt))
}

func aadOf(what string, ws WorkspaceID, id SessionID, rest string) []byte {
	return fields(make([]byte, 0, 128), what, string(ws), string(id), rest)
}

// bodyDigest is what the chain keeps of a body, also after it was erased.
func bodyDigest(salt, body []byte) (d [32]byte) {
	h := sha256.New()
	h.Write(salt)
	h.Write(body)
	h.Sum(d[:0])
	return d
}

// chainHash is an entry's hash: over the previous one, the header and the
// body's digest. buf is scratch space of the caller.
func chainHash(prev [32]byte, ws WorkspaceID, e *Entry, key KeyID, digest [32]byte, buf *[]byte) [32]byte {
	b := append((*buf)[:0], prev[:]...)
	b = fields(b, string(ws), string(e.Session))
	b = number(b, int64(e.Seq))
	b = fields(b, string(e.Kind), e.Type, e.ID, string(e.Thread))
	b = number(b, micros(e.At))
	b = number(b, int64(e.Fence))
	b = fields(b, string(key))
	b = append(b, digest[:]...)
	*buf = b
	return sha256.Sum256(b)
}

// WorkspaceSecret is the workspace's secret for keys derived by HMAC (32 bytes).
func (db *DB) WorkspaceSecret(ctx context.Context, ws WorkspaceID) ([]byte, error) {
	var wrapped []byte
	err := db.peek(ctx).queryRow(`SELECT secret_wrapped FROM workspaces WHERE id = ?`, ws).Scan(&wrapped)
	if err != nil {
		return nil, fmt.Errorf("secret of workspace %s: %w", ws, notFound(db.mapErr(err)))
	}
	secret, err := db.keys.master.Unwrap(wrapped)
	if err != nil {
		return nil, fmt.Errorf("unwrap secret of workspace %s: %w", ws, err)
	}
	return secret, nil
}

// EnsureWorkspace makes a workspace with its secret, if it is not there. The
// name of an existing one is not changed.
func (db *DB) EnsureWorkspace(ctx context.Context, id WorkspaceID, name string) error {
	wrapped, err := db.keys.master.Wrap(random(32))
	if err != nil {
		return fmt.Errorf("wrap secret of workspace %s: %w", id, err)
	}
	return db.tx(ctx, func(t *tx) error {
		_, err := t.exec(`INSERT INTO workspaces (id, name, secret_wrapped, created_at) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO NOTHING`,
			id, name, wrapped, micros(db.Now()))
		return err
	})
}
