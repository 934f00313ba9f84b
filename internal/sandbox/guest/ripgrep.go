//go:build linux

package guest

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"
)

// findRipgrep looks for ripgrep inside: it is much faster on large trees.
func findRipgrep() string {
	for _, name := range []string{"/usr/local/bin/rg", "/usr/bin/rg", "/bin/rg"} {
		if info, err := os.Stat(name); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return name
		}
	}
	return ""
}

// ripgrep searches below an open folder, with the rules of our own search. Its
// expressions run in linear time, as RE2's do.
func (g *grepper) ripgrep(reap *reaper, rg, expression string, dir *os.Root, root string) error {
	at, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer at.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	pid, exited, err := reap.start([]string{rg, "--no-config", "--no-messages", "--hidden", "--no-ignore", "--glob=!.git", "--crlf",
		"--max-filesize=" + strconv.Itoa(maxGrepFile), "--sort=path", "--no-heading", "--with-filename", "--line-number", "--color=never", "--null",
		"--regexp=" + expression, "--", "."}, &syscall.ProcAttr{
		Dir: procFD(at.Fd()), // the folder that is open, whatever its name leads to by now
		Env: []string{"PATH=/usr/bin:/bin", "LANG=C.UTF-8"}, Files: []uintptr{null.Fd(), w.Fd(), null.Fd()},
		Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	_ = w.Close()
	if err != nil {
		return err
	}
	read := make(chan error, 1)
	go func() { read <- g.collect(r, root) }()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for done := false; !done; {
		select {
		case err = <-read:
			done = true
		case <-tick.C:
			if stop := g.check(); stop != nil {
				_ = syscall.Kill(-pid, syscall.SIGKILL)
				<-read
				err, done = stop, true
			}
		}
	}
	_ = syscall.Kill(-pid, syscall.SIGKILL)
	if ws := <-exited; err == nil && ws.ExitStatus() > 1 && g.out.Len() == 0 {
		// It knows some syntax otherwise than RE2 does, or cannot run here.
		return g.folder(dir, root)
	}
	return err
}

// collect reads path, zero byte, line number and text from ripgrep.
func (g *grepper) collect(out *os.File, root string) error {
	r := bufio.NewReaderSize(out, 64<<10)
	for {
		line, err := readLine(r, true, maxGrepFile+maxPathBytes)
		if errors.Is(err, errLong) {
			return errFull
		}
		if name, rest, ok := bytes.Cut(line, []byte{0}); ok {
			number, text, _ := bytes.Cut(rest, []byte(":"))
			text = bytes.TrimSuffix(bytes.TrimSuffix(text, []byte("\n")), []byte("\r"))
			if n, err := strconv.Atoi(string(number)); err == nil && utf8.Valid(text) {
				if err := g.add(filepath.Join(root, strings.TrimPrefix(string(name), "./")), n, text); err != nil {
					return err
				}
			}
		}
		if err != nil {
			return nil
		}
	}
}

// maxPathBytes bounds a path and line number in front of a match.
const maxPathBytes = 8 << 10
