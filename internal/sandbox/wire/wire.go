// Package wire is what a sandbox's host and its agent say to each other: the
// handshake at the beginning of each connection, and the messages on streams.
//
// An agent of an older binary may be restored under a newer host: fields are
// only added, and Version rises only when an old agent can no longer be served.
//
// The handshake, after the agent has dialled:
//
//	host  -> agent Greeting  attach or restore, a challenge
//	agent -> host  Hello     who I am, proof for the challenge, a challenge
//	host  -> agent Offer     its fence, proof for the challenge, what it has received
//	agent -> host  Accept    what it has received, or why not
//
// Both prove that they know the key of the mode: for attach the link's key, for
// restore the key that the snapshot placed in the agent's memory. So no other
// process of the sandbox can speak as its agent, no image can pass for
// another, and no agent obeys an owner that a newer one has replaced.
package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/planaria/planaria/internal/sandbox/link"
)

// Version of the protocol.
const Version = 1

// MaxMessage bounds a message, in bytes; tool inputs are bounded far below by
// the API, outputs by the agent.
const MaxMessage = 32 << 20

// MaxHandshake bounds a message of the handshake: up to 4,096 stream states.
const MaxHandshake = 1 << 20

// Modes of an Offer.
const (
	Attach  = "attach"
	Restore = "restore"
)

// Greeting begins a connection.
type Greeting struct {
	Version    int    `json:"version"`
	Mode       string `json:"mode"`
	Snapshot   string `json:"snapshot,omitzero"`   // of a restore
	Generation uint64 `json:"generation,omitzero"` // that a restore begins
	Challenge  []byte `json:"challenge"`
}

// Hello is the agent's answer. Without proof it does not know the key.
type Hello struct {
	Version    int    `json:"version"`
	Generation uint64 `json:"generation"`
	Fence      uint64 `json:"fence"`
	Challenge  []byte `json:"challenge"`
	Proof      []byte `json:"proof,omitzero"`
}

// Offer is the claim of an owner.
type Offer struct {
	Fence uint64     `json:"fence"`
	Owner string     `json:"owner"` // one open runtime; streams go on only under the same
	Proof []byte     `json:"proof"`
	State link.State `json:"state"`
}

// Accept ends the handshake. With Refused the connection closes.
type Accept struct {
	Refused string     `json:"refused,omitzero"`
	Fence   uint64     `json:"fence"`
	Fresh   bool       `json:"fresh,omitzero"` // the agent has reset its streams
	State   link.State `json:"state"`
}

// Prove makes the proof of one side ("host" or "agent") for a challenge.
func Prove(key []byte, side string, challenge []byte, fence uint64) []byte {
	h := hmac.New(sha256.New, key)
	fmt.Fprintf(h, "planaria link %s %d ", side, fence)
	h.Write(challenge)
	return h.Sum(nil)
}

// Kinds of streams. The host opens calls and admin; the agent opens egress.
const (
	KindCall   = "call"   // Call, then Reply until one is final
	KindAdmin  = "admin"  // Admin, then AdminReply; raw bytes where the op says so
	KindEgress = "egress" // raw bytes of a connection to the proxy inside
)

// Call asks for one tool call. Asking again with the same id attaches to it.
type Call struct {
	ID     string `json:"id"`
	Thread string `json:"thread"`
	Tool   string `json:"tool"`
	// Only: do not start it, ask for one that was started.
	Only  bool            `json:"only,omitzero"`
	Input json.RawMessage `json:"input,omitzero"`
}

// Reply is one message of a running call.
type Reply struct {
	// Started says whether this very request started the call.
	Started bool `json:"started,omitzero"`
	// Unknown: no such call was ever started here (only to Only).
	Unknown  bool    `json:"unknown,omitzero"`
	Progress string  `json:"progress,omitzero"` // new output, may skip some
	Result   *Result `json:"result,omitzero"`
}

// MaxImages bounds the images of one result, in bytes of all of them before
// they are coded: with their code they must fit into a message, and model APIs
// take no more than about 5 MB each.
const MaxImages = 4 << 20

// Image is a picture that a tool gives beside its text.
type Image struct {
	MediaType string `json:"media_type"`
	Data      []byte `json:"data"`
}

// Result is what a call came to.
type Result struct {
	Text    string  `json:"text"`
	Images  []Image `json:"images,omitzero"` // at most MaxImages bytes
	IsError bool    `json:"is_error,omitzero"`
	// ExitCode of a shell command; -1 when it was killed.
	ExitCode int `json:"exit_code,omitzero"`
	// Reason of an error that is not the command's own: "timeout",
	// "cancelled", "limit", "shell_exited".
	Reason string `json:"reason,omitzero"`
	// Millis the call ran, time frozen in a snapshot not counted.
	Millis int64 `json:"millis"`
	// Restored counts the restores that the agent noticed while the call ran;
	// one that ended in the moment of a restore may not have it.
	Restored int `json:"restored,omitzero"`
}

// Operations of Admin.
const (
	OpPing     = "ping"
	OpPrepare  = "prepare"  // keep Key for the restore of Snapshot
	OpPrepared = "prepared" // forget it: the snapshot is done, or failed
	OpIdentity = "identity" // a restored copy becomes Identity
	OpActivity = "activity" // -> Activity
	OpAck      = "ack"      // forget the results of Calls
	OpCancel   = "cancel"   // stop Calls[0]
	OpPut      = "put"      // raw bytes follow, until the end
	OpGet      = "get"      // raw bytes come after the reply
	OpList     = "list"     // -> Files
	OpHash     = "hash"     // -> Text: digest over a tree
)

// Admin is one request of the host itself.
type Admin struct {
	Op       string    `json:"op"`
	Snapshot string    `json:"snapshot,omitzero"`
	Key      []byte    `json:"key,omitzero"`
	Calls    []string  `json:"calls,omitzero"`
	Path     string    `json:"path,omitzero"`
	Mode     uint32    `json:"mode,omitzero"`
	Identity *Identity `json:"identity,omitzero"`
}

// Identity is what a restored copy must not share with its image.
type Identity struct {
	Hostname  string `json:"hostname"`
	MachineID string `json:"machine_id"`
	Entropy   []byte `json:"entropy"`
	Key       []byte `json:"key"` // of the link, from now on
	// UnixMicro is the host's clock when it sent this.
	UnixMicro int64 `json:"unix_micro"`
	// Egress opens the way out inside; a test restore never has it.
	Egress bool `json:"egress,omitzero"`
}

// AdminReply answers an Admin.
type AdminReply struct {
	Error    string    `json:"error,omitzero"`
	NotFound bool      `json:"not_found,omitzero"`
	Text     string    `json:"text,omitzero"`
	Size     int64     `json:"size,omitzero"`
	Files    []File    `json:"files,omitzero"`
	More     bool      `json:"more,omitzero"` // there are more than Files
	Activity *Activity `json:"activity,omitzero"`
	// Of OpIdentity, read back from the system after it was set.
	Hostname  string `json:"hostname,omitzero"`
	MachineID string `json:"machine_id,omitzero"`
	UnixMicro int64  `json:"unix_micro,omitzero"`
	// Dead lists the outside connections that did not survive.
	Dead []string `json:"dead,omitzero"`
	// Running are the ids of calls without result; Kept those with one.
	Running []string `json:"running,omitzero"`
	Kept    []string `json:"kept,omitzero"`
}

// Activity tells whether anything happened inside: two equal values mean that
// no process but the agent used the processor and no call ran but reading ones.
type Activity struct {
	Calls     uint64 `json:"calls"`     // started that may change something
	Ticks     uint64 `json:"ticks"`     // processor time of all processes but the agent, 10 ms each
	Processes string `json:"processes"` // their ids
	MemoryKiB int64  `json:"memory_kib"`
}

// File is one entry of a folder inside.
type File struct {
	Path      string `json:"path"`
	Size      int64  `json:"size"`
	Mode      uint32 `json:"mode"` // as fs.FileMode
	UnixMicro int64  `json:"unix_micro"`
	Link      string `json:"link,omitzero"`
}

// ErrTooLarge: a message was longer than its bound.
var ErrTooLarge = errors.New("message too large")

// WriteMessage writes v as JSON behind its length, in one write.
func WriteMessage(w io.Writer, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	buf := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body)))
	_, err = w.Write(append(buf, body...))
	return err
}

// maxValues bounds the values in what the agent says. In memory one of three
// bytes takes twenty times as many. Most has a list of 10,000 files: six each.
const maxValues = 1 << 18

// ReadReply reads one message of the agent's, whoever it may be by now.
func ReadReply(r io.Reader, v any) error {
	body, err := readBody(r, MaxMessage)
	if err != nil {
		return err
	}
	if countValues(body) > maxValues {
		return fmt.Errorf("read message of more than %d values: %w", maxValues, ErrTooLarge)
	}
	return json.Unmarshal(body, v)
}

// countValues counts the values in JSON, or more: each but the first follows one
// of three characters.
func countValues(body []byte) (n int) {
	quoted := false
	for i := 0; i < len(body); i++ {
		switch c := body[i]; {
		case c == '"':
			quoted = !quoted
		case quoted && c == '\\':
			i++
		case !quoted && (c == ',' || c == '[' || c == '{'):
			n++
		}
	}
	return n
}

// ReadMessage reads one message of at most limit bytes.
func ReadMessage(r io.Reader, limit uint32, v any) error {
	body, err := readBody(r, limit)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, v)
}

func readBody(r io.Reader, limit uint32) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > limit {
		return nil, fmt.Errorf("read message of %d bytes: %w", n, ErrTooLarge)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return body, nil
}
