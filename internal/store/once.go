package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Times of idempotency records (design section 9).
const (
	// OnceKept is how long an answer under a client's key is kept.
	OnceKept = 24 * time.Hour
	// RetryWindow is how long a request without key is remembered for a client's retry.
	RetryWindow = 30 * time.Second
)

// oncePurgeEvery is about how many records are written between two clean-ups.
const oncePurgeEvery = 256

// ErrRepeated: the request was done before; nothing was written. The caller
// reads the record and gives its answer.
var ErrRepeated = errors.New("request was done before")

// Once makes one POST happen once: its record is written in the transaction of
// the write it belongs to (design section 9, Idempotency-Key).
type Once struct {
	Workspace WorkspaceID
	Path      string
	Key       string   // the client's, or one of ours when Implicit
	Digest    [32]byte // of the body
	Request   string   // id of this request; a second write of the same request is no repetition
	Node      NodeID
	Implicit  bool
	// Answer makes of what the transaction wrote what a repetition needs: the
	// answer itself, or ids to read it by where content must not lie in clear.
	// Nil keeps nothing. It must be pure: it may run twice.
	Answer func(result any) (json.RawMessage, error)
}

// OnceRow is a record as it was kept.
type OnceRow struct {
	Key        string
	Request    string
	Digest     [32]byte
	Node       NodeID
	Answer     json.RawMessage // what Once.Answer made; nil for nothing
	Unanswered bool            // the answer could not be sent
	CreatedAt  time.Time
}

type onceKey struct{}

// WithOnce makes the next write under ctx keep o in the same transaction. When
// there is a record under its key already the write is rolled back and fails
// with ErrRepeated.
func WithOnce(ctx context.Context, o *Once) context.Context {
	return context.WithValue(ctx, onceKey{}, o)
}

// ImplicitKey is the key of a request without one: requests with equal bodies
// stand together, the request's id tells them apart.
func ImplicitKey(digest [32]byte, request string) string {
	return fmt.Sprintf("~%x/%s", digest, request)
}

func (db *DB) addOnce(t *tx, o *Once, result any) error {
	var answer []byte
	if o.Answer != nil {
		a, err := o.Answer(result)
		if err != nil {
			return fmt.Errorf("render answer: %w", err)
		}
		answer = a
	}
	now := db.Now()
	if micros(now)%oncePurgeEvery == 0 { // about one in so many
		if _, err := t.exec(`DELETE FROM once WHERE created_at < ? OR implicit = 1 AND created_at < ?`,
			micros(now.Add(-OnceKept)), micros(now.Add(-2*RetryWindow))); err != nil {
			return fmt.Errorf("purge idempotency records: %w", err)
		}
	}
	// A record that outlived its time gives way.
	if _, err := t.exec(`DELETE FROM once WHERE workspace = ? AND path = ? AND key = ? AND created_at < ?`,
		o.Workspace, o.Path, o.Key, micros(now.Add(-OnceKept))); err != nil {
		return fmt.Errorf("purge idempotency record: %w", err)
	}
	n, err := t.exec(`INSERT INTO once (workspace, path, key, request, implicit, digest, node, answer, unanswered, created_at)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?) ON CONFLICT (workspace, path, key) DO NOTHING`,
		o.Workspace, o.Path, o.Key, o.Request, b2i(o.Implicit), o.Digest[:], o.Node, orNull(answer), micros(now))
	if err != nil {
		return fmt.Errorf("insert idempotency record: %w", err)
	}
	if n == 1 {
		return nil
	}
	var request string
	if err := t.queryRow(`SELECT request FROM once WHERE workspace = ? AND path = ? AND key = ?`,
		o.Workspace, o.Path, o.Key).Scan(&request); err != nil {
		return fmt.Errorf("read idempotency record: %w", err)
	}
	if request != o.Request {
		return ErrRepeated
	}
	return nil
}

const onceColumns = `key, request, digest, node, answer, unanswered, created_at`

// OnceDone returns the record under a client's key; ErrNotFound when there is
// none or it is older than OnceKept.
func (db *DB) OnceDone(ctx context.Context, ws WorkspaceID, path, key string) (OnceRow, error) {
	return db.onceRow(ctx, `SELECT `+onceColumns+` FROM once
		WHERE workspace = ? AND path = ? AND key = ? AND created_at >= ?`,
		ws, path, key, micros(db.Now().Add(-OnceKept)))
}

// OnceRetried returns the newest record of a request without key that had this
// body within RetryWindow; ErrNotFound when there is none.
func (db *DB) OnceRetried(ctx context.Context, ws WorkspaceID, path string, digest [32]byte) (OnceRow, error) {
	from := fmt.Sprintf("~%x/", digest)
	return db.onceRow(ctx, `SELECT `+onceColumns+` FROM once
		WHERE workspace = ? AND path = ? AND key >= ? AND key < ? AND created_at >= ?
		ORDER BY created_at DESC, key DESC LIMIT 1`,
		ws, path, from, from[:len(from)-1]+"0", micros(db.Now().Add(-RetryWindow)))
}

func (db *DB) onceRow(ctx context.Context, query string, args ...any) (OnceRow, error) {
	var r OnceRow
	var digest, answer []byte
	var unanswered, at int64
	err := db.read(ctx, func(t *tx) error {
		return t.queryRow(query, args...).Scan(&r.Key, &r.Request, &digest, &r.Node, &answer, &unanswered, &at)
	})
	if err != nil {
		return OnceRow{}, fmt.Errorf("read idempotency record: %w", notFound(err))
	}
	copy(r.Digest[:], digest)
	r.Answer, r.Unanswered, r.CreatedAt = answer, unanswered != 0, fromMicros(at)
	return r, nil
}

// OnceUnanswered notes that the answer of a request could not be sent, so that
// the client's retry gets it.
func (db *DB) OnceUnanswered(ctx context.Context, o *Once) error {
	err := db.tx(ctx, func(t *tx) error {
		_, err := t.exec(`UPDATE once SET unanswered = 1 WHERE workspace = ? AND path = ? AND key = ? AND request = ?`,
			o.Workspace, o.Path, o.Key, o.Request)
		return err
	})
	if err != nil {
		return fmt.Errorf("note unanswered request to %s: %w", o.Path, err)
	}
	return nil
}

// NodeGone reports whether a node has left or is dead, so that what it did not
// answer will never be answered.
func (db *DB) NodeGone(ctx context.Context, id NodeID) (bool, error) {
	var gone int64
	err := db.read(ctx, func(t *tx) error {
		return t.queryRow(`SELECT CASE WHEN left_at > 0 OR dead_at > 0 OR proved_at > 0 OR until < ? THEN 1 ELSE 0 END FROM nodes WHERE id = ?`,
			micros(db.Now()), id).Scan(&gone)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at node %s: %w", id, err)
	}
	return gone != 0, nil
}
