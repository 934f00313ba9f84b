package api

import (
	"cmp"
	"regexp"
	"strings"
	"sync"
	"time"
)

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

// Limits of a Machine: what one sandbox may be given, so that a slip of a digit
// does not take the node with it.
const (
	MaxCPUs            = 64
	MinMemoryMB        = 64
	MaxMemoryMB        = 262_144 // 256 GiB
	MinDiskMB          = 16
	MaxDiskMB          = 1_048_576 // 1 TiB
	MinProcesses       = 8
	MaxProcesses       = 65_536
	MaxCallSeconds     = 86_400
	MinIntervalSeconds = 10
	MaxIntervalSeconds = 86_400
	MaxKeepSnapshots   = 100
	MaxLingerSeconds   = 86_400
	maxImage           = 512
)

// DefaultLinger is how long a sandbox stays up at rest when nobody says otherwise.
const DefaultLinger = 60 * time.Second

// Machine is config.planaria of a cloud environment: how its sandboxes are
// made and when they are saved. An extension; what is left out, and zero where
// zero means nothing, is the default.
type Machine struct {
	// Image is the root file system: empty or "host" for the machine's own
	// programs, the name of an OCI image, or "layout:" and a folder with one.
	Image string `json:"image,omitzero"`

	CPUs        float64 `json:"cpus,omitzero"`         // above 0, at most 64; default: all
	MemoryMB    int64   `json:"memory_mb,omitzero"`    // MiB, 64 to 262,144; default 2,048
	DiskMB      int64   `json:"disk_mb,omitzero"`      // MiB that it may write, 16 to 1,048,576; default 10,240
	Processes   int     `json:"processes,omitzero"`    // 8 to 65,536; default 512
	CallSeconds int64   `json:"call_seconds,omitzero"` // longest a tool call may run, 1 to 86,400; default 600

	Snapshot        string `json:"snapshot,omitzero"`         // default step
	IntervalSeconds int64  `json:"interval_seconds,omitzero"` // of policy interval, 10 to 86,400; default 300
	OutputCommit    string `json:"output_commit,omitzero"`    // default local
	KeepSnapshots   int    `json:"keep_snapshots,omitzero"`   // newest ones that are kept, 1 to 100; default 5
	// LingerSeconds is how long it stays up at rest before it is suspended, 0
	// (at once) to 86,400; nil is DefaultLinger.
	LingerSeconds *int64 `json:"linger_seconds,omitzero"`
}

// Linger is how long the sandbox stays up at rest.
func (m Machine) Linger() time.Duration {
	if m.LingerSeconds == nil {
		return DefaultLinger
	}
	return time.Duration(*m.LingerSeconds) * time.Second
}

// MachineParams is a Machine in a request: a field that it does not know is an
// error, since nobody but us defines them.
type MachineParams Machine

// UnmarshalJSON refuses unknown fields.
func (p *MachineParams) UnmarshalJSON(data []byte) error {
	type shadow MachineParams
	return unmarshal(data, (*shadow)(p), rejectUnknown)
}

// imageName is a reference to an OCI image as registries take it: an optional
// host, a path of lower-case parts, an optional tag and digest.
var imageName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^([A-Za-z0-9.-]+(:[0-9]{1,5})?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?$`)
})

func validateImage(path, image string) error {
	folder, layout := strings.CutPrefix(image, "layout:")
	switch {
	case image == "" || image == "host":
		return nil
	case len(image) > maxImage:
		return Invalid(path, "has %d bytes; at most %d are allowed", len(image), maxImage)
	case layout && strings.HasPrefix(folder, "/") && !strings.ContainsRune(folder, 0):
		return nil
	case layout:
		return Invalid(path, "layout: needs the absolute path of a folder on the server")
	case !imageName().MatchString(image):
		return Invalid(path, "%q is not an image; use \"host\", a name such as docker.io/library/debian:13, or layout:/folder", short(image))
	}
	return nil
}

// between refuses a number outside of its bounds; 0 is the default.
func between(path string, n, min, max int64) error {
	if n != 0 && (n < min || n > max) {
		return Invalid(path, "must be from %d to %d", min, max)
	}
	return nil
}

func (m *Machine) validate(path string) error {
	if m == nil {
		return nil
	}
	if !(m.CPUs >= 0 && m.CPUs <= MaxCPUs) {
		return Invalid(path+".cpus", "must be above 0 and at most %d", MaxCPUs)
	}
	if l := m.LingerSeconds; l != nil && (*l < 0 || *l > MaxLingerSeconds) {
		return Invalid(path+".linger_seconds", "must be from 0 to %d", MaxLingerSeconds)
	}
	return cmp.Or(validateImage(path+".image", m.Image),
		between(path+".memory_mb", m.MemoryMB, MinMemoryMB, MaxMemoryMB),
		between(path+".disk_mb", m.DiskMB, MinDiskMB, MaxDiskMB),
		between(path+".processes", int64(m.Processes), MinProcesses, MaxProcesses),
		between(path+".call_seconds", m.CallSeconds, 1, MaxCallSeconds),
		oneOf(path+".snapshot", cmp.Or(m.Snapshot, SnapshotStep), SnapshotStep, SnapshotTurn, SnapshotInterval, SnapshotManual),
		between(path+".interval_seconds", m.IntervalSeconds, MinIntervalSeconds, MaxIntervalSeconds),
		oneOf(path+".output_commit", cmp.Or(m.OutputCommit, CommitLocal), CommitLocal, CommitStored, CommitOff),
		between(path+".keep_snapshots", int64(m.KeepSnapshots), 1, MaxKeepSnapshots))
}
