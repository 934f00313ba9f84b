package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/planaria/planaria/internal/sandbox/guest"
)

const agentName = guest.Name

// ociSpec is the part of an OCI runtime configuration that is used here.
type ociSpec struct {
	Version  string     `json:"ociVersion"`
	Process  ociProcess `json:"process"`
	Root     ociRoot    `json:"root"`
	Hostname string     `json:"hostname"`
	Mounts   []ociMount `json:"mounts"`
	Linux    ociLinux   `json:"linux"`
	// Annotations are gVisor's own settings.
	Annotations map[string]string `json:"annotations,omitempty"`
}

type ociProcess struct {
	User struct {
		UID int `json:"uid"`
		GID int `json:"gid"`
	} `json:"user"`
	Args         []string            `json:"args"`
	Env          []string            `json:"env"`
	Cwd          string              `json:"cwd"`
	Capabilities map[string][]string `json:"capabilities"`
	Rlimits      []ociRlimit         `json:"rlimits"`
	NoNewPrivs   bool                `json:"noNewPrivileges"`
}

type ociRlimit struct {
	Type string `json:"type"`
	Soft uint64 `json:"soft"`
	Hard uint64 `json:"hard"`
}

type ociRoot struct {
	Path     string `json:"path"`
	Readonly bool   `json:"readonly"`
}

type ociMount struct {
	Destination string   `json:"destination"`
	Type        string   `json:"type"`
	Source      string   `json:"source"`
	Options     []string `json:"options,omitempty"`
}

type ociLinux struct {
	Namespaces []ociNamespace `json:"namespaces"`
}

type ociNamespace struct {
	Type string `json:"type"`
}

// capabilities of root inside: what installing packages and running services
// needs. They reach nothing outside. Without SYS_PTRACE no process can look
// into the agent.
var capabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP",
	"CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_MKNOD", "CAP_SETFCAP", "CAP_AUDIT_WRITE",
}

// writeBundle writes the configuration of a container. Mounts, their types and
// options must be the same when an image is restored; sources, host name and
// root path may differ.
func writeBundle(dir string, st *state, binaryDir, ctlDir string) error {
	spec := ociSpec{
		Version:  "1.1.0",
		Root:     ociRoot{Path: st.Root.Dir},
		Hostname: st.Hostname,
		Process: ociProcess{
			Args:         []string{filepath.Join(guest.BinaryDir, agentName)},
			Env:          []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "GOMAXPROCS=2", "GOGC=50"},
			Cwd:          "/",
			Capabilities: map[string][]string{"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
			Rlimits:      []ociRlimit{{"RLIMIT_NOFILE", 65536, 65536}, {"RLIMIT_CORE", 0, 0}},
			NoNewPrivs:   false,
		},
		Mounts: []ociMount{
			{"/proc", "proc", "proc", nil},
			{"/sys", "sysfs", "sysfs", []string{"nosuid", "noexec", "nodev", "ro"}},
			{"/dev", "tmpfs", "tmpfs", []string{"ro"}}, // it has no size, and files in it would be memory
			{"/dev/pts", "devpts", "devpts", nil},
			{"/dev/shm", "tmpfs", "tmpfs", []string{"nosuid", "nodev", "mode=1777", fmt.Sprintf("size=%d", st.Limits.MemoryBytes/4)}},
			{"/tmp", "tmpfs", "tmpfs", []string{"nosuid", "nodev", "mode=1777", fmt.Sprintf("size=%d", st.Limits.MemoryBytes/2)}},
			{guest.BinaryDir, "bind", binaryDir, []string{"bind", "ro", "nosuid", "nodev"}},
			{guest.ControlDir, "bind", ctlDir, []string{"bind", "ro", "nosuid", "nodev", "noexec"}},
		},
		Linux: ociLinux{Namespaces: []ociNamespace{{"pid"}, {"network"}, {"ipc"}, {"uts"}, {"mount"}}},
	}
	if st.CPUMask != nil {
		spec.Annotations = map[string]string{"dev.gvisor.internal.cpufeatures": featuresAnnotation(st.CPUMask)}
	}
	if st.Root.Kind == "host" {
		// Writable inside, into the overlay; the machine's own stays as it is.
		spec.Mounts = append(spec.Mounts, ociMount{"/usr", "bind", "/usr", []string{"bind", "rw", "nodev"}})
	}
	b, err := json.MarshalIndent(spec, "", " ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
}

// templateKey names what a pooled sandbox cannot change any more.
func templateKey(spec Spec, binary string) string {
	b, _ := json.Marshal(struct {
		Dir, Digest string
		Limits      Limits
		Binary      string
	}{spec.Root.Dir, spec.Root.Digest, spec.Limits.filled(), binary})
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
