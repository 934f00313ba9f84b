package store

import (
	"crypto/rand"
	"encoding/binary"
	"time"
)

// Identifiers. Each is an opaque string on the wire; the prefixes are those of
// the Managed Agents API reference, section 1.10, and of design section 3.
type (
	// WorkspaceID names a tenant, "wrkspc_…" or "default".
	WorkspaceID string
	// SessionID names a session, "sesn_…".
	SessionID string
	// ThreadID names a session thread, "sthr_…".
	ThreadID string
	// EventID names an event of a session's log, "sevt_…".
	EventID string
	// EffectID names an effect, "eff_…".
	EffectID string
	// AgentID names an agent, "agent_…".
	AgentID string
	// EnvironmentID names an environment, "env_…".
	EnvironmentID string
	// VaultID names a vault, "vlt_…".
	VaultID string
	// CredentialID names a credential of a vault, "vcrd_…".
	CredentialID string
	// ConnectorID names a connector, "conn_…".
	ConnectorID string
	// APIKeyID names an API key, "apikey_…".
	APIKeyID string
	// NodeID names one running process, "node_…"; a restart is a new node.
	NodeID string
	// KeyID names a data key, "dkey_…".
	KeyID string
)

// Seq is the dense position of an entry in one session's log, from 1.
type Seq int64

// Fence is the fencing token of a session's owner. It grows with each claim.
type Fence int64

// crockford is the base-32 alphabet of ULIDs: no letters that read as digits,
// and the order of the text is the order of the bytes.
const crockford = "0123456789abcdefghjkmnpqrstvwxyz"

// NewID returns prefix, which ends in an underscore, and 26 characters that
// sort by the time of the call (48 bits of milliseconds, then 80 random bits),
// so that rows of one time stand together in an index.
func NewID(prefix string, now time.Time) string {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], uint64(now.UnixMilli())<<16)
	if _, err := rand.Read(b[6:]); err != nil {
		panic("store: no entropy: " + err.Error()) // crypto/rand never fails on a working system
	}
	out := make([]byte, 0, len(prefix)+26)
	out = append(out, prefix...)
	// 128 bits in 26 groups of five, the first group holds three bits.
	hi, lo := binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
	for shift := 125; shift >= 0; shift -= 5 {
		var v uint64
		switch {
		case shift >= 64:
			v = hi >> (shift - 64)
		case shift > 59:
			v = hi<<(64-shift) | lo>>shift
		default:
			v = lo >> shift
		}
		out = append(out, crockford[v&31])
	}
	return string(out)
}
