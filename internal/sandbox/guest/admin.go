//go:build linux

package guest

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/planaria/planaria/internal/sandbox/link"
	"github.com/planaria/planaria/internal/sandbox/wire"
)

// serveAdmin answers one request of the host itself.
func (a *Agent) serveAdmin(s *link.Stream) {
	defer s.Close()
	var req wire.Admin
	if err := wire.ReadMessage(s, wire.MaxMessage, &req); err != nil {
		s.Reset()
		return
	}
	if req.Op == wire.OpGet {
		a.get(s, &req)
		return
	}
	var reply wire.AdminReply
	if err := a.admin(&req, s, &reply); err != nil {
		reply.Error = err.Error()
		reply.NotFound = errors.Is(err, fs.ErrNotExist)
	}
	_ = wire.WriteMessage(s, reply)
}

func (a *Agent) admin(req *wire.Admin, body io.Reader, reply *wire.AdminReply) error {
	switch req.Op {
	case wire.OpPing:
		a.mu.Lock()
		defer a.mu.Unlock()
		reply.Running, reply.Kept = a.callIDs()
	case wire.OpPrepare:
		a.mu.Lock()
		defer a.mu.Unlock()
		// One snapshot at a time: a key left by an owner that died is void.
		a.prepared = map[string][]byte{req.Snapshot: slices.Clone(req.Key)}
		reply.Running, reply.Kept = a.callIDs()
	case wire.OpPrepared:
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.prepared, req.Snapshot)
	case wire.OpIdentity:
		return a.become(req.Identity, reply)
	case wire.OpActivity:
		reply.Activity = a.activity()
	case wire.OpAck:
		a.ack(req.Calls)
	case wire.OpCancel:
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, id := range req.Calls {
			if c := a.calls[id]; c != nil {
				c.stop()
			}
		}
	case wire.OpPut:
		a.place(filepath.Dir(at(req.Path)))
		a.mu.Lock()
		a.changes++ // a file put inside is worth a snapshot, as a call is
		a.mu.Unlock()
		return replaceFile(at(req.Path), body, fs.FileMode(req.Mode).Perm(), anywhere)
	case wire.OpList:
		return list(at(req.Path), reply)
	case wire.OpHash:
		text, err := hashTree(at(req.Path))
		reply.Text = text
		return err
	default:
		return fmt.Errorf("operation %q is not known to this agent", req.Op)
	}
	return nil
}

// callIDs lists calls without and with a result. a.mu is held.
func (a *Agent) callIDs() (running, kept []string) {
	for id, c := range a.calls {
		select {
		case <-c.done:
			if !c.gone {
				kept = append(kept, id)
			}
		default:
			running = append(running, id)
		}
	}
	slices.Sort(running)
	slices.Sort(kept)
	return running, kept
}

// get sends a file: a reply with its size, then its bytes.
func (a *Agent) get(s *link.Stream, req *wire.Admin) {
	f, info, err := openRegular(at(req.Path), anywhere)
	if err != nil {
		_ = wire.WriteMessage(s, wire.AdminReply{Error: err.Error(), NotFound: errors.Is(err, fs.ErrNotExist)})
		return
	}
	defer f.Close()
	if wire.WriteMessage(s, wire.AdminReply{Size: info.Size()}) != nil {
		return
	}
	// Of a file that grows meanwhile what it had; one that shrinks ends the
	// stream early, and the host sees that.
	_, _ = io.CopyN(s, f, info.Size())
}

// Bounds of a listing: entries, and bytes of their names, of which one may take
// six in the reply, which has to stay below wire.MaxMessage.
const (
	maxListed      = 10_000
	maxListedNames = 4 << 20
)

// list tells the files below a folder, links as links: the first ones by name
// where there are more than fit.
func list(root string, reply *wire.AdminReply) error {
	names := 0
	return filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			if name == root {
				return err
			}
			return nil
		}
		info, err := e.Info()
		if err != nil || name == root {
			return nil
		}
		f := wire.File{Path: name, Size: info.Size(), Mode: uint32(info.Mode()), UnixMicro: info.ModTime().UnixMicro()}
		if info.Mode()&fs.ModeSymlink != 0 {
			f.Link, _ = os.Readlink(name)
		}
		if names += len(f.Path) + len(f.Link); len(reply.Files) == maxListed || names > maxListedNames {
			reply.More = true
			return fs.SkipAll
		}
		reply.Files = append(reply.Files, f)
		return nil
	})
}

// hashTree hashes everything below a folder: names, kinds, modes, owners, times,
// link targets and bytes.
func hashTree(root string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		st, _ := info.Sys().(*syscall.Stat_t)
		rel, _ := filepath.Rel(root, name)
		fmt.Fprintf(h, "%q %v %d %d %d %d\n", rel, info.Mode(), info.Size(), info.ModTime().UnixNano(), st.Uid, st.Gid)
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(name)
			fmt.Fprintf(h, "-> %q\n", to)
			return err
		case info.Mode().IsRegular():
			f, err := os.Open(name)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = io.Copy(h, f)
			return err
		}
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

// become takes on a new identity after a restore and reads back what it has.
// The way out opens only when everything else is done.
func (a *Agent) become(id *wire.Identity, reply *wire.AdminReply) error {
	if id == nil || len(id.Key) == 0 {
		return errors.New("identity is missing")
	}
	if err := setIdentity(id); err != nil {
		return err
	}
	var err error
	if reply.Hostname, err = os.Hostname(); err != nil {
		return err
	}
	b, err := os.ReadFile("/etc/machine-id")
	if err != nil {
		return err
	}
	reply.MachineID = strings.TrimSpace(string(b))
	reply.UnixMicro = time.Now().UnixMicro()
	a.mu.Lock()
	defer a.mu.Unlock()
	reply.Running, reply.Kept = a.callIDs()
	reply.Dead = a.dead
	a.key = slices.Clone(id.Key)
	a.egressOpen = id.Egress
	return nil
}

// setIdentity writes what is a file or a device; the host name comes with the
// container.
func setIdentity(id *wire.Identity) error {
	if err := os.MkdirAll("/etc", 0o755); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"/etc/machine-id": id.MachineID + "\n",
		"/etc/hostname":   id.Hostname + "\n",
		"/etc/hosts":      "127.0.0.1 localhost " + id.Hostname + "\n::1 localhost\n",
	} {
		if err := place(name, text); err != nil {
			return fmt.Errorf("set identity: %w", err)
		}
	}
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("set entropy: %w", err)
	}
	defer f.Close()
	if _, err := f.Write(id.Entropy); err != nil {
		return fmt.Errorf("set entropy: %w", err)
	}
	return nil
}

// place writes a file whatever stands in its place: a link would lead the write
// elsewhere, and a folder that somebody made there must not make a snapshot
// useless.
func place(name, text string) error {
	temp := name + ".planaria"
	for _, n := range []string{temp, name} {
		if info, err := os.Lstat(n); err == nil && !info.Mode().IsRegular() {
			if err := os.RemoveAll(n); err != nil {
				return err
			}
		}
	}
	if err := os.WriteFile(temp, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(temp, name)
}
