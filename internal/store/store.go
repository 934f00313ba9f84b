package store

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"
)

// Errors of the store. Callers test with errors.Is.
var (
	// ErrNotFound: no such row in this workspace. A foreign id looks the same.
	ErrNotFound = errors.New("not found")
	// ErrConflict: a precondition does not hold; nothing was written.
	ErrConflict = errors.New("conflict")
	// ErrFenced: a newer owner exists, or the lease's node is not trusted any
	// more. The caller drops its state; nothing was written.
	ErrFenced = errors.New("fenced: a newer owner exists")
	// ErrOwned: the session is owned by a live node.
	ErrOwned = errors.New("session is owned")
	// ErrDamaged: an entry does not match its hash, or cannot be opened.
	ErrDamaged = errors.New("log is damaged")
	// ErrUnknown: the commit's fate is unknown and could not be found out. The
	// owner drops its memory and rebuilds from the store.
	ErrUnknown = errors.New("outcome of the commit is unknown")
	// ErrTerminated: the session is terminated and takes no input.
	ErrTerminated = errors.New("session is terminated")
	// ErrAnswered: the target already has another answer.
	ErrAnswered = errors.New("already answered")
	// ErrNewer: the store was written by a newer version of this program.
	ErrNewer = errors.New("store has a newer format")
	// ErrForeign: the data folder holds something that is not ours.
	ErrForeign = errors.New("folder is not a planaria data folder")
	// ErrLocked: another process owns the data folder.
	ErrLocked = errors.New("data folder is in use by another process")
)

// Wrapper wraps the data keys of lineages under a master key. vault implements it.
type Wrapper interface {
	Wrap(plain []byte) ([]byte, error)
	Unwrap(wrapped []byte) ([]byte, error)
}

// Blobs keeps bodies over MaxInlineBody. blob implements it. Put is durable on
// return; names are digests of the (sealed) bytes.
type Blobs interface {
	Put(ctx context.Context, ws string, data []byte) (name string, err error)
	Get(ctx context.Context, ws, name string) ([]byte, error)
	Delete(ctx context.Context, ws, name string) error
}

// Limits of the store.
const (
	// MaxInlineBody is the largest body kept in a row; a larger one is a
	// reference to a blob (design section 3).
	MaxInlineBody = 64 << 10
	// MaxBody is the largest body of an entry: the wire limit of 32 MiB with
	// room for our own fields.
	MaxBody = 40 << 20
	// RelaxedDelay is how long a relaxed entry may wait for a critical commit.
	RelaxedDelay = 50 * time.Millisecond
	// MaxBatch is how many appends one group commit takes.
	MaxBatch = 1024
)

// Times of leases (design section 5, "Nodes"); PostgreSQL only.
const (
	LeaseTTL    = 6 * time.Second
	LeaseRenew  = 2 * time.Second
	LeaseMargin = 2 * time.Second
	MaxSkew     = 500 * time.Millisecond
	PollEvery   = 250 * time.Millisecond
)

// Config opens a store.
type Config struct {
	// URL is "sqlite:FILE" or "postgres://…".
	URL string
	// Master wraps data keys. Required.
	Master Wrapper
	// Blobs keeps large bodies. Required.
	Blobs Blobs
	// Logger is slog.Default when nil.
	Logger *slog.Logger
	// Now is time.Now when nil.
	Now func() time.Time
	// Fault is called around each durable step with its name: S.before (an error
	// means that the step fails and is not there), S.after (it fails and is
	// there), and after an error of COMMIT S.compare (an error means that nobody
	// can tell, ErrUnknown). S is append, claim, deliver, create, unowned, delete,
	// refuse, join, bury, leave, blob, or tx for configuration objects; besides,
	// append.commit makes COMMIT itself fail with nothing there. For fault pairs
	// in tests; nil in production.
	Fault func(step string) error
	// ReadOnly opens without the folder lock and refuses writes (offline verify).
	ReadOnly bool
	// LeaseTTL, LeaseRenew, LeaseMargin replace the constants when not zero (tests of takeover).
	LeaseTTL, LeaseRenew, LeaseMargin time.Duration
}

// Status is a session's status on the wire (reference section 6.2).
type Status string

// The statuses.
const (
	StatusIdle         Status = "idle"
	StatusRunning      Status = "running"
	StatusRescheduling Status = "rescheduling"
	StatusTerminated   Status = "terminated"
)

// Session is a session's row: what its log says, by the one projection
// function, and what is not in the log (owner, fence, inbox flag).
type Session struct {
	Workspace WorkspaceID
	ID        SessionID
	Parent    SessionID // empty unless a fork
	ForkSeq   Seq
	Lineage   SessionID // the root's id

	Status     Status          // effective: running as soon as input that starts a turn was accepted
	StopReason json.RawMessage // of the last idle event; nil before the first
	Paused     bool
	Config     SessionConfig
	Thread     ThreadID // primary

	Owner     NodeID
	Fence     Fence
	Head      Seq
	HeadHash  [32]byte
	Compacted Seq // newest compaction entry, 0 when none
	Format    int
	WakeAt    time.Time // zero when none

	Usage SessionUsage

	CreatedAt    time.Time
	UpdatedAt    time.Time
	RunningSince time.Time // zero unless running
	TerminatedAt time.Time
	ArchivedAt   time.Time
	Damaged      string // why the log is refused, empty when sound
}

// SessionUsage sums what a session used (reference section 14).
type SessionUsage struct {
	TokenUsage
	CostNanoUSD  int64 `json:"cost_nusd"`
	ActiveMicros int64 `json:"active_us"` // time in status running
	WastedTokens int64 `json:"wasted_tokens"`
}

// Effect is an effect's row, derived from the log. Bodies are read from the
// log by the seqs.
type Effect struct {
	Workspace WorkspaceID
	Session   SessionID
	Lineage   SessionID
	ID        EffectID
	Thread    ThreadID
	Tool      string
	Server    string
	Connector ConnectorID
	Class     Class
	State     EffectState
	Outcome   Outcome // empty unless completed
	IsError   bool
	Shadow    bool
	Client    bool // performed by the client (custom tools)
	Told      bool // in doubt, and its tool use was closed by telling the model
	Event     EventID
	Digest    string
	Near      string
	Key       string // idempotency key

	FirstSeq     Seq   // proposal or intent
	IntentSeq    Seq   // 0 before the intent
	AttemptSeqs  []Seq // each attempt
	Attempts     int
	AttemptFence Fence
	SendBy       time.Time // of the last attempt
	EndSeq       Seq       // completion, or the settlement that ended it
	EvidenceSeqs []Seq     // evidence and settlements

	CreatedAt time.Time
	UpdatedAt time.Time
}

// InboxKind says what an inbox row carries.
type InboxKind string

// The kinds of inbox rows.
const (
	InboxEvent    InboxKind = "event"    // a client event; Body is the wire event without id and processed_at
	InboxSettle   InboxKind = "settle"   // Body is session.SettleRequest
	InboxEvidence InboxKind = "evidence" // Body is Evidence
	InboxControl  InboxKind = "control"  // Type: "resume", "pause", "update", "archive", "delete"
)

// Delivery is one inbox row to be accepted.
type Delivery struct {
	ID     string // "sevt_…" for events, "inb_…" else
	Kind   InboxKind
	Type   string // event type, or the control's name
	Thread ThreadID
	// Target makes an answer unique: at most one accepted answer per target
	// for the life of the session. Empty for what may repeat.
	Target string
	Body   []byte
	// Starts turns an idle session's status to running in the same
	// transaction. A paused session stays idle and queues.
	Starts bool
	// Urgent rows (interrupts, resume) also wake a paused session's owner and
	// stand before others.
	Urgent bool
}

// Inbox is an accepted row that no append has consumed yet.
type Inbox struct {
	Delivery
	N         int64 // order of arrival in the session
	CreatedAt time.Time
}

// Accepted is what Deliver did with one delivery.
type Accepted struct {
	ID        string // the id under which it was first accepted
	Duplicate bool   // an identical answer was accepted earlier; nothing was written
	At        time.Time
}

// EffectIs is a precondition on an effect's row.
type EffectIs struct {
	ID     EffectID
	States []EffectState // the state is one of these
	// Attempt, when not 0, must equal the number of attempts made.
	Attempt int
	// Fence, when not 0, must equal the fence of the last attempt.
	Fence Fence
}

// Append is the one write of an owner, as data.
type Append struct {
	Entries []Draft
	// Consume names inbox rows deleted in the same transaction; a missing one
	// is ErrConflict.
	Consume []string
	Effects []EffectIs
	// Rest releases the session: it is refused with ErrConflict when the inbox
	// holds anything newer than Seen (but rows that Consume names; of a paused
	// session only urgent rows count), or when the status is neither idle nor
	// terminated. On success the owner is none and the lease is over.
	Rest bool
	// Keep turns a Rest into one that holds on to the session: it is refused
	// where the rest would be, but the owner stays and so does the lease. A
	// session rests so while its sandbox lingers.
	Keep bool
	// Park releases the session without rest: a driver that waits (Wait entry)
	// or drains. The inbox may hold rows.
	Park bool
	// Seen is the N of the newest inbox row that the owner read and leaves
	// queued on purpose (messages that wait behind a question). With Rest or
	// Park of an idle session, rows up to it do not make it claimable again;
	// the next delivery does. 0: every row does.
	Seen int64
}

// NodeInfo describes a process that joins.
type NodeInfo struct {
	Address string   // where other nodes reach it
	Roles   []string // api, worker, keeper
	Version string
}

// Range selects entries of one session's log.
type Range struct {
	After  Seq // exclusive
	Until  Seq // inclusive; 0 = head
	Limit  int // 0 = all
	Desc   bool
	Kinds  []Kind   // nil = all
	Types  []string // event types; nil = all
	Thread ThreadID // empty = all
	// At bounds, compared with processed_at; zero = none.
	AtGT, AtGTE, AtLT, AtLTE time.Time
}

// SessionFilter selects sessions of a list (reference section 1.7).
type SessionFilter struct {
	AgentID                                      AgentID
	AgentVersion                                 int
	Statuses                                     []Status
	IncludeArchived                              bool
	CreatedGT, CreatedGTE, CreatedLT, CreatedLTE time.Time
	Asc                                          bool
	// Cursor is the created_at and id of the last row of the former page.
	AfterAt time.Time
	AfterID SessionID
	Limit   int
}

// EffectFilter selects effects.
type EffectFilter struct {
	Session SessionID // empty = the whole workspace
	States  []EffectState
	Classes []Class
	Tools   []string
	// Living leaves out effects of sessions that take no input any more: deleted
	// and terminated ones.
	Living bool
	// After is the last effect id of the former page; ids are time-ordered.
	After EffectID
	Desc  bool
	Limit int
}

// FollowItem is one thing a follower sees: a committed entry, or a client
// event that was accepted and is still queued.
type FollowItem struct {
	Entry  *Entry
	Queued *Inbox
}
