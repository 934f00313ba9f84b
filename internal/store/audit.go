package store

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"time"
)

// Act is what a person or a key did, or was refused: one row of the audit chain.
type Act struct {
	Workspace WorkspaceID
	Node      NodeID // whose chain it joins; "local" when empty
	Principal string // "apikey_…"
	Action    string // "noun.verb", as in policy
	Resource  string // id; when empty, the id of what the transaction wrote
	Detail    json.RawMessage
}

// AuditRow is one link of the chain of a workspace and node.
type AuditRow struct {
	Act
	ID   string // "aud_…"
	Seq  int64  // dense, from 1, per workspace and node
	At   time.Time
	Prev [32]byte // hash of the former row; zero for the first
	Hash [32]byte // SHA-256 over Prev and every other field
}

type actKey struct{}

// WithAct makes the next write under ctx record a in the same transaction: the
// act and its audit row are both durable or both not. An operation that writes
// in two transactions leaves two rows.
func WithAct(ctx context.Context, a Act) context.Context {
	return context.WithValue(ctx, actKey{}, a)
}

// written is called last inside every transaction that writes for a caller,
// with what it wrote. It adds what ctx carries: the audit row (WithAct) and the
// idempotency record (WithOnce). Its error rolls the write back.
func (db *DB) written(ctx context.Context, t *tx, result any) error {
	if a, ok := ctx.Value(actKey{}).(Act); ok {
		if a.Resource == "" {
			a.Resource = idOf(result)
		}
		if err := db.addAudit(t, a); err != nil {
			return err
		}
	}
	if o, ok := ctx.Value(onceKey{}).(*Once); ok {
		return db.addOnce(t, o, result)
	}
	return nil
}

// idOf is the id of a written object, empty where there is not exactly one.
func idOf(result any) string {
	switch v := result.(type) {
	case Session:
		return string(v.ID)
	case Agent:
		return string(v.ID)
	case Environment:
		return string(v.ID)
	case Vault:
		return string(v.ID)
	case Credential:
		return string(v.ID)
	case Connector:
		return string(v.ID)
	case APIKey:
		return string(v.ID)
	case Workspace:
		return string(v.ID)
	case File:
		return string(v.ID)
	}
	return ""
}

// Record writes an audit row of an act that wrote nothing, a refusal.
func (db *DB) Record(ctx context.Context, a Act) error {
	err := db.tx(ctx, func(t *tx) error { return db.addAudit(t, a) })
	if err != nil {
		return fmt.Errorf("record act %s: %w", a.Action, err)
	}
	return nil
}

func (db *DB) addAudit(t *tx, a Act) error {
	r := AuditRow{Act: a, At: db.Now()}
	if r.Node == "" {
		r.Node = "local"
	}
	if len(r.Detail) == 0 {
		r.Detail = json.RawMessage("{}")
	}
	r.ID = NewID("aud_", r.At)
	// The head row is locked by this statement until the end of the
	// transaction, so that the next row of this chain waits for ours.
	zero := make([]byte, 32)
	if _, err := t.exec(`INSERT INTO audit_heads (workspace, node, seq, hash) VALUES (?, ?, 0, ?)
		ON CONFLICT (workspace, node) DO NOTHING`, r.Workspace, r.Node, zero); err != nil {
		return fmt.Errorf("start audit chain: %w", err)
	}
	var prev []byte
	if err := t.queryRow(`UPDATE audit_heads SET seq = seq + 1 WHERE workspace = ? AND node = ? RETURNING seq, hash`,
		r.Workspace, r.Node).Scan(&r.Seq, &prev); err != nil {
		return fmt.Errorf("lock audit chain: %w", err)
	}
	copy(r.Prev[:], prev)
	r.Hash = r.sum()
	if _, err := t.exec(`INSERT INTO audit
		(workspace, node, seq, id, at, principal, action, resource, detail, prev, hash)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		r.Workspace, r.Node, r.Seq, r.ID, micros(r.At), r.Principal, r.Action, r.Resource,
		[]byte(r.Detail), r.Prev[:], r.Hash[:]); err != nil {
		return fmt.Errorf("insert audit row: %w", err)
	}
	if _, err := t.exec(`UPDATE audit_heads SET hash = ? WHERE workspace = ? AND node = ?`,
		r.Hash[:], r.Workspace, r.Node); err != nil {
		return fmt.Errorf("move audit head: %w", err)
	}
	return nil
}

// sum is the row's hash: every field with its length before it, so that no two
// rows have the same bytes.
func (r *AuditRow) sum() [32]byte {
	h := sha256.New()
	h.Write(r.Prev[:])
	var n [8]byte
	number := func(v int64) {
		binary.BigEndian.PutUint64(n[:], uint64(v))
		h.Write(n[:])
	}
	number(r.Seq)
	number(micros(r.At))
	for _, s := range []string{string(r.Workspace), string(r.Node), r.ID, r.Principal, r.Action, r.Resource, string(r.Detail)} {
		number(int64(len(s)))
		h.Write([]byte(s))
	}
	return [32]byte(h.Sum(nil))
}

// AuditFilter selects audit rows, newest first.
type AuditFilter struct {
	Principal, Action, Resource string
	CreatedGTE, CreatedLTE      time.Time
	AfterAt                     time.Time // position: at and id of the last row of the former page
	AfterID                     string
	Limit                       int
}

const auditColumns = `workspace, node, seq, id, at, principal, action, resource, detail, prev, hash`

// Audit lists audit rows of a workspace, of all its nodes.
func (db *DB) Audit(ctx context.Context, ws WorkspaceID, f AuditFilter) ([]AuditRow, error) {
	w := where{}
	w.add("workspace = ?", ws)
	w.equal("principal", f.Principal)
	w.equal("action", f.Action)
	w.equal("resource", f.Resource)
	w.between("at", f.CreatedGTE, f.CreatedLTE)
	w.before("at", f.AfterAt, f.AfterID)
	var out []AuditRow
	err := db.read(ctx, func(t *tx) error {
		var err error
		out, err = scanAudit(t, `SELECT `+auditColumns+` FROM audit`+w.sql()+` ORDER BY at DESC, id DESC`+w.limit(f.Limit), w.args...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list audit rows: %w", err)
	}
	return out, nil
}

func scanAudit(t *tx, query string, args ...any) ([]AuditRow, error) {
	rows, err := t.query(query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []AuditRow
	for rows.Next() {
		var r AuditRow
		var at int64
		var detail, prev, hash []byte
		if err := rows.Scan(&r.Workspace, &r.Node, &r.Seq, &r.ID, &at, &r.Principal, &r.Action,
			&r.Resource, &detail, &prev, &hash); err != nil {
			return nil, err
		}
		r.At, r.Detail = fromMicros(at), detail
		copy(r.Prev[:], prev)
		copy(r.Hash[:], hash)
		out = append(out, r)
	}
	return out, rows.Err()
}

// AuditChain says what a verified chain holds.
type AuditChain struct {
	Workspace WorkspaceID
	Node      NodeID
	Rows      int64
	Head      [32]byte
}

// auditBatch bounds the rows that VerifyAudit holds at once.
const auditBatch = 1000

// VerifyAudit reads every audit chain of a workspace and checks numbers, links
// and hashes up to the head. ErrDamaged names the first row that is wrong.
func (db *DB) VerifyAudit(ctx context.Context, ws WorkspaceID) ([]AuditChain, error) {
	var chains []AuditChain
	err := db.read(ctx, func(t *tx) error {
		var err error
		if chains, err = auditHeads(t, ws); err != nil {
			return err
		}
		for _, c := range chains {
			if err := verifyChain(t, c); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("verify audit of %s: %w", ws, err)
	}
	return chains, nil
}

func auditHeads(t *tx, ws WorkspaceID) ([]AuditChain, error) {
	rows, err := t.query(`SELECT node, seq, hash FROM audit_heads WHERE workspace = ? ORDER BY node`, ws)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []AuditChain
	for rows.Next() {
		c := AuditChain{Workspace: ws}
		var hash []byte
		if err := rows.Scan(&c.Node, &c.Rows, &hash); err != nil {
			return nil, err
		}
		copy(c.Head[:], hash)
		out = append(out, c)
	}
	return out, rows.Err()
}

func verifyChain(t *tx, c AuditChain) error {
	var seq int64
	var prev [32]byte
	for {
		batch, err := scanAudit(t, `SELECT `+auditColumns+` FROM audit
			WHERE workspace = ? AND node = ? AND seq > ? ORDER BY seq LIMIT ?`, c.Workspace, c.Node, seq, auditBatch)
		if err != nil {
			return err
		}
		for _, r := range batch {
			if r.Seq != seq+1 || r.Prev != prev || r.Hash != r.sum() {
				return fmt.Errorf("audit row %d of node %s: %w", seq+1, c.Node, ErrDamaged)
			}
			seq, prev = r.Seq, r.Hash
		}
		if len(batch) < auditBatch {
			break
		}
	}
	if seq != c.Rows || prev != c.Head {
		return fmt.Errorf("audit chain of node %s ends at row %d, its head says %d: %w", c.Node, seq, c.Rows, ErrDamaged)
	}
	return nil
}
