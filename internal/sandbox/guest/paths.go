//go:build linux

package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Where the file tools may go (REF 11.4). What a path leads to counts, after
// every link: it is asked of the open descriptor, so that nobody can put a link
// in its place between the check and the use. The shell may go anywhere; this
// keeps the tools from what is no file of the agent's, as /proc and /dev.
var (
	writable = []string{Workspace, "/mnt", "/tmp", "/var/tmp", "/home", "/root", "/srv", "/opt"}
	readable = []string{"/usr", "/etc", "/var", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}
	// never opened by a file of the host: what is there is no file.
	unreal = []string{"/proc", "/sys", "/dev", "/run", "/.planaria"}
)

// maxPlaced bounds the folders outside of these that the host put files into.
const maxPlaced = 64

// place notes that the host has put a file into a folder of its choice: the
// tools may work there too. a.mu is not held.
func (a *Agent) place(dir string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if dir == "/" || within(dir, writable) || within(dir, readable) || within(dir, unreal) || within(dir, a.placed) || len(a.placed) == maxPlaced {
		return
	}
	a.placed = append(a.placed, dir)
}

// allow tells whether a file tool may use a real path.
func (a *Agent) allow(real string, write bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if within(real, writable) || within(real, a.placed) || !write && within(real, readable) {
		return nil
	}
	if write && within(real, readable) {
		return fmt.Errorf("%s is outside the folders that this tool may write to (%s); use bash", real, strings.Join(writable, ", "))
	}
	return fmt.Errorf("%s is outside the folders that this tool may use (%s); use bash", real, strings.Join(writable, ", "))
}

func (a *Agent) mayRead(real string) error  { return a.allow(real, false) }
func (a *Agent) mayWrite(real string) error { return a.allow(real, true) }

// anywhere is for the host itself: it chooses its paths, and what they lead to
// inside is the agent's own.
func anywhere(string) error { return nil }

// within tells whether a path is one of some folders or below one.
func within(path string, dirs []string) bool {
	for _, d := range dirs {
		if path == d || strings.HasPrefix(path, d+"/") {
			return true
		}
	}
	return false
}

// at makes a path of the model absolute: relative ones begin at the workspace.
func at(path string) string {
	if !filepath.IsAbs(path) {
		path = filepath.Join(Workspace, path)
	}
	return filepath.Clean(path)
}

// realPath is where an open descriptor's file is.
func realPath(fd uintptr) (string, error) {
	return os.Readlink(procFD(fd))
}

func procFD(fd uintptr) string { return "/proc/self/fd/" + strconv.FormatUint(uint64(fd), 10) }

// openRegular opens a regular file for reading, after may has agreed to where
// it really is. What it is, is looked at before it is opened for reading: a pipe
// would hang, and a device may do anything.
func openRegular(path string, may func(real string) error) (*os.File, fs.FileInfo, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	handle := os.NewFile(uintptr(fd), path)
	defer handle.Close()
	info, err := handle.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil, fmt.Errorf("%s is not a regular file but %s", path, kindOf(info))
	}
	real, err := realPath(handle.Fd())
	if err != nil {
		return nil, nil, err
	}
	if err := may(real); err != nil {
		return nil, nil, err
	}
	// Through the descriptor: the same file, whatever its name is by now.
	f, err := os.OpenFile(procFD(handle.Fd()), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, &fs.PathError{Op: "open", Path: path, Err: errors.Unwrap(err)}
	}
	return f, info, nil
}

func kindOf(info fs.FileInfo) string {
	switch m := info.Mode(); {
	case m.IsDir():
		return "a folder"
	case m&fs.ModeNamedPipe != 0:
		return "a pipe"
	case m&fs.ModeSocket != 0:
		return "a socket"
	}
	return "a device"
}

// openFolder opens a folder and tells where it really is.
func openFolder(path string) (*os.Root, string, error) {
	r, err := os.OpenRoot(path)
	if err != nil {
		return nil, "", err
	}
	f, err := r.Open(".")
	if err != nil {
		_ = r.Close()
		return nil, "", err
	}
	defer f.Close()
	real, err := realPath(f.Fd())
	if err != nil {
		_ = r.Close()
	}
	return r, real, err
}

// spot is where a file is or will be: an open folder and a name in it that is
// no link.
type spot struct {
	dir  *os.Root
	name string
	real string      // where it really is
	info fs.FileInfo // nil: there is none yet
}

// maxLinks is how many links a path may lead through.
const maxLinks = 40

// openSpot finds the spot of a path, following links, and makes the folders
// that are missing, after may has agreed to where it really is. Every step goes
// through an open folder.
func openSpot(path string, may func(real string) error) (*spot, error) {
	for range maxLinks {
		s, next, err := lookSpot(path, may)
		if err != nil || s != nil {
			return s, err
		}
		path = next
	}
	return nil, &fs.PathError{Op: "open", Path: path, Err: unix.ELOOP}
}

// lookSpot is one step of openSpot: the spot, or where a link leads.
func lookSpot(path string, may func(real string) error) (s *spot, next string, err error) {
	dir, missing, real, err := openNearest(filepath.Dir(path))
	if err != nil {
		return nil, "", err
	}
	defer func() {
		if s == nil {
			_ = dir.Close()
		}
	}()
	name := filepath.Base(path)
	real = filepath.Join(real, filepath.Join(missing...), name)
	if err := may(real); err != nil {
		return nil, "", err
	}
	for _, m := range missing {
		if err := dir.Mkdir(m, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, "", err
		}
		sub, err := dir.OpenRoot(m)
		if err != nil {
			return nil, "", err
		}
		_ = dir.Close()
		dir = sub
	}
	info, err := dir.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &spot{dir, name, real, nil}, "", nil
	case err != nil:
		return nil, "", err
	case info.Mode()&fs.ModeSymlink == 0:
		return &spot{dir, name, real, info}, "", nil
	}
	to, err := dir.Readlink(name)
	if err != nil {
		return nil, "", err
	}
	if !filepath.IsAbs(to) {
		to = filepath.Join(filepath.Dir(real), to)
	}
	return nil, filepath.Clean(to), nil
}

// openNearest opens the deepest folder of a path that is there, and names those
// below it that are missing.
func openNearest(path string) (dir *os.Root, missing []string, real string, err error) {
	for {
		dir, real, err = openFolder(path)
		if !errors.Is(err, fs.ErrNotExist) || path == "/" {
			return dir, missing, real, err
		}
		missing = append([]string{filepath.Base(path)}, missing...)
		path = filepath.Dir(path)
	}
}
