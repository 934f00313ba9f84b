package api

// When snapshots of a sandbox are taken (design section 6).
const (
	SnapshotStep     = "step"     // while the model thinks, when the step changed something
	SnapshotTurn     = "turn"     // when the turn ends
	SnapshotInterval = "interval" // every so many seconds, when something changed
	SnapshotManual   = "manual"   // when a person asks, and on suspending
)

// What an irreversible call of the session waits for (output commit).
const (
	CommitLocal  = "local"  // the machine's state is durable on the disk of the node
	CommitStored = "stored" // it is in the blob store
	CommitOff    = "off"    // it does not wait
)

// Machine is config.planaria of a cloud environment: how its sandboxes are
// made and when they are saved. An extension; zero fields mean the default.
type Machine struct {
	// Image is the root file system: empty or "host" for the machine's own
	// programs, the name of an OCI image, or "layout:" and a folder with one.
	Image string `json:"image,omitzero"`

	CPUs        float64 `json:"cpus,omitzero"`         // default: all
	MemoryMB    int64   `json:"memory_mb,omitzero"`    // MiB, default 2,048
	DiskMB      int64   `json:"disk_mb,omitzero"`      // MiB that it may write, default 10,240
	Processes   int     `json:"processes,omitzero"`    // default 512
	CallSeconds int64   `json:"call_seconds,omitzero"` // longest a tool call may run, default 600

	Snapshot        string `json:"snapshot,omitzero"`         // default step
	IntervalSeconds int64  `json:"interval_seconds,omitzero"` // of policy interval, default 300
	OutputCommit    string `json:"output_commit,omitzero"`    // default local
	KeepSnapshots   int    `json:"keep_snapshots,omitzero"`   // newest ones that are kept, default 5
	LingerSeconds   int64  `json:"linger_seconds,omitzero"`   // at rest, before it is suspended, default 60
}
