package store

import (
	"encoding/json"
	"time"
)

// Kind says what an entry of the log is. An event is shown by the API; every
// other kind is a record, which is not.
type Kind string

// The kinds of entries.
const (
	KindEvent      Kind = "event"      // Body is the wire event without id and processed_at, with "v"
	KindCreated    Kind = "created"    // Created; seq 1 of every log that has no parent
	KindClaim      Kind = "claim"      // Claim; the first entry of each fence
	KindConfig     Kind = "config"     // ConfigChange: the session's configuration was replaced
	KindTools      Kind = "tools"      // Tools: what an MCP server listed
	KindWait       Kind = "wait"       // Wait: why and until when the session sleeps
	KindOutput     Kind = "output"     // Output: one answer of a model
	KindProposal   Kind = "proposal"   // Proposal: a call that was denied or awaits approval
	KindIntent     Kind = "intent"     // Intent
	KindAttempt    Kind = "attempt"    // Attempt
	KindDoubt      Kind = "doubt"      // Doubt: an effect became in doubt
	KindCompletion Kind = "completion" // Completion
	KindEvidence   Kind = "evidence"   // Evidence
	KindSettlement Kind = "settlement" // Settlement
	KindCompaction Kind = "compaction" // Compaction: rebuilding the context starts here
	KindArchive    Kind = "archive"    // Archive: the session was archived
	KindMachine    Kind = "machine"    // Machine: the session's sandbox started, came back or went
	KindSnapshot   Kind = "snapshot"   // Snapshot: one was taken, packed, tested or dropped
	KindTunnel     Kind = "tunnel"     // Tunnel: a process in the sandbox reached a host
)

// Draft is an entry that is not in the log yet.
type Draft struct {
	Kind   Kind
	Type   string   // event type for KindEvent, else empty; in clear, so that lists filter without opening bodies
	ID     string   // "sevt_…" for events; the effect's id for records of one effect; else a fresh "rec_…"
	Thread ThreadID // empty for records of the whole session
	Body   []byte   // JSON object with a version field "v"
}

// Entry is one committed position of a session's log. It never changes; only
// erasing removes its body and salt and leaves the digest.
type Entry struct {
	Draft
	Session SessionID // whose log holds it: a fork reads its ancestors' entries
	Seq     Seq
	At      time.Time // strictly increasing in a session, UTC, microseconds
	Fence   Fence
	Hash    [32]byte
	Erased  bool // the body was erased; Body is nil
}

// Class is the effect class declared in a tool's contract (design section 4).
type Class string

// The classes, from harmless to worst.
const (
	ClassRead         Class = "read"
	ClassIdempotent   Class = "idempotent"
	ClassMixed        Class = "mixed"
	ClassIrreversible Class = "irreversible"
)

// EffectState is the state of an effect (design section 4, "States").
type EffectState string

// The states of an effect.
const (
	StateProposed         EffectState = "proposed"
	StateAwaitingApproval EffectState = "awaiting_approval"
	StateDenied           EffectState = "denied"
	StateIntended         EffectState = "intended"
	StateAttempted        EffectState = "attempted"
	StateInDoubt          EffectState = "in_doubt"
	StateCompleted        EffectState = "completed"
	StateVoid             EffectState = "void"
)

// Outcome is the outcome of a completed effect.
type Outcome string

// The outcomes. Refused means: the target proved that nothing happened.
const (
	OutcomeOK      Outcome = "ok"
	OutcomeRefused Outcome = "refused"
)

// BodyVersion is the version that this code writes into every body.
// sessions.format is the highest version in a session's log; a node claims
// only sessions whose format it can read.
const BodyVersion = 1

// Created is the body of KindCreated.
type Created struct {
	V       int           `json:"v"`
	Thread  ThreadID      `json:"thread"` // the primary thread
	Config  SessionConfig `json:"config"`
	Creator string        `json:"creator"` // principal
}

// SessionConfig is what a session was created with, as last updated.
type SessionConfig struct {
	Title         *string           `json:"title"`
	Metadata      map[string]string `json:"metadata"`
	Agent         json.RawMessage   `json:"agent"` // wire agent snapshot (reference section 6.2)
	EnvironmentID EnvironmentID     `json:"environment_id"`
	Environment   json.RawMessage   `json:"environment"` // wire config of the environment at creation
	VaultIDs      []VaultID         `json:"vault_ids"`
	Resources     json.RawMessage   `json:"resources,omitempty"`
	Budget        json.RawMessage   `json:"budget,omitempty"` // wire budget or null
	DeploymentID  string            `json:"deployment_id,omitempty"`
}

// ConfigChange is the body of KindConfig: the whole configuration after an update.
type ConfigChange struct {
	V      int           `json:"v"`
	Config SessionConfig `json:"config"`
}

// Claim is the body of KindClaim, written in the claiming transaction.
type Claim struct {
	V      int    `json:"v"`
	Node   NodeID `json:"node"`
	Former NodeID `json:"former,omitempty"` // the owner that this claim replaced, if it had not released
}

// Tools is the body of KindTools: what one MCP server listed, so that a model
// request is a function of the log alone.
type Tools struct {
	V         int             `json:"v"`
	Server    string          `json:"server"` // name in the agent's mcp_servers
	Connector ConnectorID     `json:"connector,omitempty"`
	Digest    string          `json:"digest"`
	Tools     json.RawMessage `json:"tools"` // []gateway.Tool
	Error     string          `json:"error,omitempty"`
}

// Wait is the body of KindWait.
type Wait struct {
	V      int       `json:"v"`
	Until  time.Time `json:"until"`
	Reason string    `json:"reason"` // "model_retry", "reconcile", …
	Tries  int       `json:"tries"`  // attempts without progress so far
}

// TokenUsage counts tokens of one model request (reference section 9.6).
type TokenUsage struct {
	Input           int64 `json:"input_tokens"`
	Output          int64 `json:"output_tokens"`
	CacheRead       int64 `json:"cache_read_input_tokens"`
	CacheCreation5m int64 `json:"ephemeral_5m_input_tokens"`
	CacheCreation1h int64 `json:"ephemeral_1h_input_tokens"`
}

// Output is the body of KindOutput: one complete answer of a model. It is the
// completion of the model call's effect, whose id it carries.
type Output struct {
	V           int             `json:"v"`
	Effect      EffectID        `json:"effect"`
	Purpose     string          `json:"purpose"` // "turn" or "compaction"
	Model       string          `json:"model"`
	Content     json.RawMessage `json:"content"` // assistant blocks, verbatim for the next request
	StopReason  string          `json:"stop_reason"`
	StopDetails json.RawMessage `json:"stop_details,omitempty"`
	Usage       TokenUsage      `json:"usage"`
	CostNanoUSD int64           `json:"cost_nusd"` // list cost, 10⁻⁹ dollars; 0 when the model has no price
	Calls       []OutputCall    `json:"calls,omitempty"`
	RequestID   string          `json:"request_id,omitempty"`
	ElapsedMS   int64           `json:"elapsed_ms"`
	// Failed is why there is no answer ("overloaded", "interrupted",
	// "owner_lost", …); Content is empty then, Usage is waste, and the effect is
	// completed as refused: a read has nothing to doubt.
	Failed string `json:"failed,omitempty"`
}

// OutputCall maps a tool use of the model to the event and effect made of it.
type OutputCall struct {
	ModelID string   `json:"model_id"` // "toolu_…" or the provider's own form
	Event   EventID  `json:"event"`
	Effect  EffectID `json:"effect,omitempty"` // empty when no effect came of it (unknown tool, bad arguments)
	// Waits names an effect whose outcome this call gets (design section 4, step 3a).
	Waits EffectID `json:"waits,omitempty"`
	// Tool names the built-in tool of a call inside the sandbox. It is contained:
	// no effect comes of it.
	Tool string `json:"tool,omitempty"`
	// Asks: such a call runs only when a person has allowed it.
	Asks bool `json:"asks,omitempty"`
}

// EffectHeader is common to Proposal and Intent.
type EffectHeader struct {
	Effect    EffectID        `json:"effect"`
	Event     EventID         `json:"event,omitempty"`     // the tool-use event; empty for model calls and probes
	Tool      string          `json:"tool"`                // tool name at the target, or "model:<name>"
	Server    string          `json:"server,omitempty"`    // name in the agent's mcp_servers
	Connector ConnectorID     `json:"connector,omitempty"` // empty for model and client tools
	Class     Class           `json:"class"`
	Arguments json.RawMessage `json:"arguments"` // canonical
	Digest    string          `json:"digest"`    // intent digest, hex; of identity arguments
	Near      string          `json:"near"`      // digest of identity and other non-volatile arguments, hex
	ToolHash  string          `json:"tool_hash,omitempty"`
	// Contract is the tool's contract as it was when ruled, so that settling
	// needs no look-up of something that may have changed since.
	Contract json.RawMessage `json:"contract,omitempty"`
}

// Proposal is the body of KindProposal.
type Proposal struct {
	V int `json:"v"`
	EffectHeader
	State    EffectState `json:"state"` // awaiting_approval or denied
	Reason   string      `json:"reason,omitempty"`
	Approval string      `json:"approval_digest,omitempty"` // what an approval binds to
}

// Intent is the body of KindIntent.
type Intent struct {
	V int `json:"v"`
	EffectHeader
	Key      string `json:"key,omitempty"`      // idempotency key, minted by the gateway
	Approved string `json:"approved,omitempty"` // event id of the confirmation that was burnt
	// Client is true for custom tools: performed by the client, never sent by us.
	Client bool `json:"client,omitempty"`
}

// Attempt is the body of KindAttempt: irreversible and mixed effects only.
type Attempt struct {
	V          int       `json:"v"`
	Effect     EffectID  `json:"effect"`
	N          int       `json:"n"` // from 1
	SendBy     time.Time `json:"send_by"`
	DeadlineMS int64     `json:"deadline_ms"`
}

// Doubt is the body of KindDoubt.
type Doubt struct {
	V      int      `json:"v"`
	Effect EffectID `json:"effect"`
	N      int      `json:"n"`      // the attempt in doubt
	Reason string   `json:"reason"` // "owner_lost", "answer_lost", "status 502", …
	Detail string   `json:"detail,omitempty"`
	// DeadSince is when the attempting process was proved dead; the zero time
	// when it is not, then send_by and the deadline count.
	DeadSince time.Time `json:"dead_since,omitzero"`
}

// Completion is the body of KindCompletion.
type Completion struct {
	V         int             `json:"v"`
	Effect    EffectID        `json:"effect"`
	N         int             `json:"n"` // attempt, 0 where the class has none
	Outcome   Outcome         `json:"outcome"`
	IsError   bool            `json:"is_error"`
	Response  json.RawMessage `json:"response,omitempty"` // wire content blocks and structured content
	Reason    string          `json:"reason,omitempty"`
	ETag      string          `json:"etag,omitempty"`
	SentAt    time.Time       `json:"sent_at,omitzero"`
	ElapsedMS int64           `json:"elapsed_ms"`
	// ReplayedFrom names the effect whose completion this is, in a fork.
	ReplayedFrom EffectID `json:"replayed_from,omitempty"`
}

// Evidence is the body of KindEvidence and of inbox rows of kind evidence.
type Evidence struct {
	V        int             `json:"v"`
	Effect   EffectID        `json:"effect"`
	Kind     string          `json:"kind"` // "probe", "late", "person"
	Says     string          `json:"says"` // "happened", "did_not_happen", "unknown"
	Detail   string          `json:"detail,omitempty"`
	Response json.RawMessage `json:"response,omitempty"`
	IsError  bool            `json:"is_error,omitempty"`
	// After a settlement evidence changes nothing; Contradicts says that it
	// disagrees, which alarms.
	Contradicts bool `json:"contradicts,omitempty"`
}

// Settlement is the body of KindSettlement: an effect in doubt, or an intent
// that is proved unsent, gets its outcome.
type Settlement struct {
	V        int             `json:"v"`
	Effect   EffectID        `json:"effect"`
	Outcome  string          `json:"outcome"` // "happened", "did_not_happen"
	By       string          `json:"by"`      // "late", "probe", "resend", "person", "recovery"
	Person   string          `json:"person,omitempty"`
	Reason   string          `json:"reason,omitempty"`
	Response json.RawMessage `json:"response,omitempty"` // known answer of a happened effect
	IsError  bool            `json:"is_error,omitempty"`
}

// Told is a settlement that leaves the effect in doubt but closes its tool
// use: the model was told that the outcome is unknown. It is written as a
// KindSettlement with Outcome "told".
const Told = "told"

// Compaction is the body of KindCompaction.
type Compaction struct {
	V       int             `json:"v"`
	Through Seq             `json:"through"` // entries up to here are replaced by Summary
	Summary string          `json:"summary"`
	Open    []EffectID      `json:"open,omitempty"` // effects open or in doubt at the cut
	Tools   json.RawMessage `json:"tools,omitempty"`
	Method  string          `json:"method"` // "summary" or "cut"
	// State is what a rebuild needs besides the summary, as session wrote it.
	State json.RawMessage `json:"state,omitempty"`
}

// Archive is the body of KindArchive: the session's row shows its time as ArchivedAt.
type Archive struct {
	V  int    `json:"v"`
	By string `json:"by"` // principal
}

// Acts of a Machine.
const (
	MachineStarted   = "started"   // fresh: nothing of an earlier one is in it
	MachineAttached  = "attached"  // it lived on while its owner was gone
	MachineRestored  = "restored"  // from a snapshot, as a new generation
	MachineSuspended = "suspended" // a snapshot holds all of it, then it was ended
	MachineLost      = "lost"      // it died, or its host did
)

// Machine is the body of KindMachine: what became of the session's sandbox. It
// is committed before a call runs in what it tells of.
type Machine struct {
	V          int    `json:"v"`
	Act        string `json:"act"`
	Node       NodeID `json:"node"` // where it runs or ran
	Generation uint64 `json:"generation,omitzero"`
	Life       string `json:"life,omitempty"`     // sandbox.Life: no other start or restore has it
	Snapshot   string `json:"snapshot,omitempty"` // that it was restored from or suspended into
	// Tried are newer snapshots that could not be restored.
	Tried []TriedSnapshot `json:"tried,omitempty"`
	// Dead are outside connections of processes inside that ended with a restore.
	Dead []string `json:"dead,omitempty"`
	// Repeated are calls that were run again after a restore, with equal results.
	Repeated []EventID `json:"repeated,omitempty"`
	// Missing are calls whose results stand in the log and whose doings are not
	// in the machine.
	Missing []EventID `json:"missing,omitempty"`
	// Note is what the model is told of it; empty when there is nothing to tell.
	Note      string `json:"note,omitempty"`
	Reason    string `json:"reason,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
}

// TriedSnapshot is a snapshot that could not be restored, and why.
type TriedSnapshot struct {
	Snapshot string `json:"snapshot"`
	Reason   string `json:"reason"`
}

// Acts of a Snapshot.
const (
	SnapshotTaken   = "taken"   // its image is durable and verified on the node's disk
	SnapshotPacked  = "packed"  // it is in the blob store too
	SnapshotTested  = "tested"  // a copy was restored from it
	SnapshotNamed   = "named"   // a person gave it a name
	SnapshotDropped = "dropped" // it is deleted: nothing of it is read any more
)

// Snapshot is the body of KindSnapshot.
type Snapshot struct {
	V        int    `json:"v"`
	Act      string `json:"act"`
	Snapshot string `json:"snapshot"`          // "snap-…"
	Name     string `json:"name,omitempty"`    // of a checkpoint that a person named
	Why      string `json:"why,omitempty"`     // taken: step, turn, interval, manual, commit, suspend; else a reason
	Node     NodeID `json:"node,omitempty"`    // on whose disk the image lies
	Through  Seq    `json:"through,omitzero"`  // calls with a result up to here are in it
	Parent   string `json:"parent,omitempty"`  // the snapshot before it; packed: whose packs it uses too
	Root     string `json:"root,omitempty"`    // digest of the root file system
	Runtime  string `json:"runtime,omitempty"` // digest of the binary that took it
	// Running are calls whose results may be behind Through and that the image
	// knows, under way or done. Whoever restores it asks the sandbox for them by
	// id: it answers, goes on, or has never heard of them.
	Running    []EventID       `json:"running,omitempty"`
	Generation uint64          `json:"generation,omitzero"`
	Bytes      int64           `json:"bytes,omitzero"`     // of the image; packed: that were added
	PauseMS    int64           `json:"pause_ms,omitzero"`  // for so long the sandbox stood still
	Activity   json.RawMessage `json:"activity,omitempty"` // sandbox.Activity: what had happened in it
	Packed     json.RawMessage `json:"packed,omitempty"`   // sandbox.Packed
	Failed     string          `json:"failed,omitempty"`   // tested: why it could not be restored
}

// Tunnel is the body of KindTunnel, written when it opens and when it ends. A
// tunnel is no effect: it is never in doubt and never replayed.
type Tunnel struct {
	V         int       `json:"v"`
	Tunnel    string    `json:"tunnel"` // id, the same in both entries
	Host      string    `json:"host"`
	Port      int       `json:"port"`
	Calls     []EventID `json:"calls,omitempty"` // calls under way when it opened; none: a process of an earlier one
	Ended     bool      `json:"ended,omitzero"`
	Sent      int64     `json:"sent,omitzero"`     // bytes from inside
	Received  int64     `json:"received,omitzero"` // bytes to inside
	Failed    string    `json:"failed,omitempty"`
	ElapsedMS int64     `json:"elapsed_ms,omitzero"`
}
