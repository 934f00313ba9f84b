// Package guest is the agent: process 1 of a sandbox. It runs every tool call,
// keeps the shells, and dials the host's socket again after each cut.
//
// Its memory is part of every snapshot, so whatever it keeps (running calls,
// results not yet acknowledged, shells, streams) is there again after a
// restore. Nothing it does may depend on what it knows being true outside: an
// owner proves itself in each handshake (package wire).
//
// Results are kept until the host acknowledges them, and a call is started at
// most once per id: a host that lost the answer (cut, snapshot, its own death)
// asks again by id.
//
// Reads from the host's socket are plain blocking system calls. gVisor cuts
// host sockets at a checkpoint without waking those who wait in epoll, so a
// net.Conn would sleep for ever; a blocking read returns its end at once.
package guest

import "github.com/planaria/planaria/internal/sandbox/wire"

// Name is the argv[0] under which the binary is an agent.
const Name = "planaria-agent"

// Paths inside a sandbox.
const (
	ControlDir = "/.planaria/ctl" // the host's socket, bound read-only
	BinaryDir  = "/.planaria/bin" // our binary, bound read-only
	SpillDir   = "/tmp/.planaria" // outputs too long for a result
	Workspace  = "/workspace"
	Outputs    = "/mnt/session/outputs"
	Uploads    = "/mnt/session/uploads"
)

// SocketName is the host's socket in ControlDir.
const SocketName = "ctl.sock"

// EgressAddress is where the proxy of the way out listens inside.
const EgressAddress = "127.0.0.1:3128"

// Setup is what the host tells an agent on its standard input, once.
type Setup struct {
	Key    []byte `json:"key"` // of the link
	Fence  uint64 `json:"fence"`
	Owner  string `json:"owner"`
	Limits Limits `json:"limits"`
	// Identity is set before the first call.
	Identity wire.Identity `json:"identity"`
	Env      []string      `json:"env,omitempty"` // of shells, besides the agent's own
}

// Limits that the agent enforces. Zero means the default.
type Limits struct {
	MemoryBytes int64 `json:"memory_bytes,omitempty"` // default: none
	Processes   int   `json:"processes,omitempty"`    // default 512
	CallMillis  int64 `json:"call_millis,omitempty"`  // longest timeout a call may ask for; default 10 min
}
