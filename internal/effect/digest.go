package effect

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"slices"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/planaria/planaria/internal/store"
)

// Place is what a digest is bound to besides tool and arguments.
type Place struct {
	Workspace store.WorkspaceID
	Lineage   store.SessionID
	// Target is the connector's id, or the server's normalised URL where there
	// is no connector, or "client" for what the client performs.
	Target string
	Tool   string
}

// Digests returns the intent digest, of the identity arguments, and the near
// digest, of all arguments that are not volatile, as hex. Calls with equal
// digest are the same intent; where near differs they are near (design section
// 4, step 3). args is canonical.
func (c Contract) Digests(p Place, args json.RawMessage) (digest, near string, err error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(args, &fields); err != nil {
		return "", "", fmt.Errorf("digest arguments: %w", err)
	}
	volatile := c.volatile()
	stable, identity := map[string]json.RawMessage{}, map[string]json.RawMessage{}
	for name, v := range fields {
		if slices.Contains(volatile, name) {
			continue
		}
		stable[name] = v
		if len(c.Identity) == 0 || slices.Contains(c.Identity, name) {
			identity[name] = v
		}
	}
	if digest, err = p.sum("intent", identity); err != nil {
		return "", "", err
	}
	near, err = p.sum("near", stable)
	return digest, near, err
}

func (p Place) sum(label string, fields map[string]json.RawMessage) (string, error) {
	b, err := json.Marshal(fields)
	if err != nil {
		return "", fmt.Errorf("digest arguments: %w", err)
	}
	v := jsontext.Value(b)
	if err := v.Canonicalize(); err != nil {
		return "", fmt.Errorf("digest arguments: %w", err)
	}
	return hashParts(label, string(p.Workspace), string(p.Lineage), p.Target, p.Tool, string(v)), nil
}

// ApprovalDigest is what an approval binds to: the canonical call, the tool's
// definition and class, and the branch (design section 4, step 4; attack A1).
func ApprovalDigest(session store.SessionID, target string, h store.EffectHeader) string {
	return hashParts("approval", string(session), target, h.Tool, h.ToolHash, string(h.Class), string(h.Arguments))
}

// DefinitionDigest names a tool's definition as a server listed it. raw is the
// tool object; members are compared whatever their order.
func DefinitionDigest(raw json.RawMessage) string {
	v := jsontext.Value(slices.Clone(raw))
	if v.Canonicalize() != nil {
		v = jsontext.Value(raw) // numbers that have no canonical form: the bytes as they are
	}
	return hashParts("definition", string(v))
}

// hashParts is SHA-256 over the parts, each behind its length, so that no two
// lists of parts share bytes.
func hashParts(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		writePart(h, p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func writePart(h hash.Hash, p string) {
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], uint64(len(p)))
	h.Write(n[:])
	h.Write([]byte(p))
}

// KeyFor is the idempotency key of an effect: HMAC-SHA256(workspace secret,
// effect id), 43 characters of base64url, which fits the shortest limit of a
// target that we know (45). Only the gateway makes keys; one that the model
// offers is replaced (trial row 17, attack E7).
func KeyFor(secret []byte, id store.EffectID) string {
	m := hmac.New(sha256.New, secret)
	m.Write([]byte(id))
	return base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

// FillKey returns canonical arguments with the idempotency argument set to
// key, where the contract names one; other arguments are untouched.
func (c Contract) FillKey(args json.RawMessage, key string) (json.RawMessage, error) {
	if c.Idempotency == nil || c.Idempotency.Argument == "" {
		return args, nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(args, &fields); err != nil {
		return nil, fmt.Errorf("fill key: %w", err)
	}
	if fields == nil {
		fields = map[string]json.RawMessage{}
	}
	quoted, err := json.Marshal(key)
	if err != nil {
		return nil, fmt.Errorf("fill key: %w", err)
	}
	fields[c.Idempotency.Argument] = quoted
	b, err := json.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("fill key: %w", err)
	}
	v := jsontext.Value(b)
	if err := v.Canonicalize(); err != nil {
		return nil, fmt.Errorf("fill key: %w", err)
	}
	return json.RawMessage(v), nil
}
