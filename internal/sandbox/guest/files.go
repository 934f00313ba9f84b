//go:build linux

package guest

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// maxFile is the largest file that read gives whole and edit changes (REF 11.4).
const maxFile = 256 << 10

type readInput struct {
	FilePath  string `json:"file_path"`
	ViewRange []int  `json:"view_range"`
}

type writeInput struct {
	FilePath string  `json:"file_path"`
	Content  *string `json:"content"`
}

type editInput struct {
	FilePath   string  `json:"file_path"`
	OldString  string  `json:"old_string"`
	NewString  *string `json:"new_string"`
	ReplaceAll bool    `json:"replace_all"`
}

func (a *Agent) readFile(in readInput) wire.Result {
	if in.FilePath == "" {
		return failure("file_path is missing")
	}
	path := at(in.FilePath)
	f, info, err := openRegular(path, a.mayRead)
	if err != nil {
		return failure("read: %v", err)
	}
	defer f.Close()
	if in.ViewRange != nil {
		return readRange(f, in.ViewRange)
	}
	if info.Size() > maxFile {
		return failure("read: %s has %d bytes, more than %d: ask for a part with view_range", path, info.Size(), maxFile)
	}
	// A file of /proc says it is empty and is not.
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case err != nil:
		return failure("read: %v", err)
	case len(b) > maxFile:
		return failure("read: %s has more than %d bytes: ask for a part with view_range", path, maxFile)
	case !utf8.Valid(b):
		return failure("read: %s is not text (%d bytes)", path, len(b))
	}
	return wire.Result{Text: string(b)}
}

// readRange streams the lines [first, last], both counted from 1.
func readRange(f io.Reader, lines []int) wire.Result {
	if len(lines) != 2 || lines[0] < 1 || lines[1] > 0 && lines[1] < lines[0] {
		return failure("view_range must be [start, end] with 1 <= start <= end; end 0 or less means the last line")
	}
	var out bytes.Buffer
	r := bufio.NewReaderSize(f, 64<<10)
	for n := 1; lines[1] <= 0 || n <= lines[1]; n++ {
		line, err := readLine(r, n >= lines[0], maxFile-out.Len())
		if errors.Is(err, errLong) {
			return failure("read: lines %d to %d are more than %d bytes: ask for fewer", lines[0], n, maxFile)
		}
		if err != nil && err != io.EOF {
			return failure("read: %v", err)
		}
		out.Write(line)
		if err == io.EOF {
			if n < lines[0] || n == lines[0] && len(line) == 0 && n > 1 {
				return failure("read: the file has %d lines", n-1)
			}
			break
		}
	}
	if !utf8.Valid(out.Bytes()) {
		return failure("read: these lines are not text")
	}
	return wire.Result{Text: out.String()}
}

var errLong = errors.New("too long")

// readLine reads to the end of a line, keeping at most room bytes of it, or
// nothing.
func readLine(r *bufio.Reader, keep bool, room int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if keep {
			if len(line)+len(part) > room {
				return nil, errLong
			}
			line = append(line, part...)
		}
		if err != bufio.ErrBufferFull {
			return line, err
		}
	}
}

func (a *Agent) writeFile(in writeInput) wire.Result {
	if in.FilePath == "" || in.Content == nil {
		return failure("file_path and content are needed")
	}
	path := at(in.FilePath)
	if err := replaceFile(path, strings.NewReader(*in.Content), 0, a.mayWrite); err != nil {
		return failure("write: %v", err)
	}
	return wire.Result{Text: fmt.Sprintf("wrote %d bytes to %s", len(*in.Content), path)}
}

// replaceFile writes a file under another name and puts it in its place. Where
// there was one its owner and permissions stay, unless mode is given; a link
// stays a link, and its target is replaced.
func replaceFile(path string, content io.Reader, mode fs.FileMode, may func(real string) error) (err error) {
	s, err := openSpot(path, may)
	if err != nil {
		return err
	}
	defer s.dir.Close()
	if s.info != nil && !s.info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file but %s", path, kindOf(s.info))
	}
	temp := ".planaria-" + rand.Text()
	f, err := s.dir.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = s.dir.Remove(temp)
		}
	}()
	_, err = io.Copy(f, content)
	if err == nil {
		err = s.inherit(f, mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return s.dir.Rename(temp, s.name)
}

// inherit gives a new file the owner and permissions of the one that it
// replaces; mode, where it is not 0, goes before.
func (s *spot) inherit(f *os.File, mode fs.FileMode) error {
	if s.info == nil {
		return f.Chmod(cmp.Or(mode, 0o644))
	}
	if st, ok := s.info.Sys().(*syscall.Stat_t); ok {
		if err := f.Chown(int(st.Uid), int(st.Gid)); err != nil {
			return err
		}
	}
	return f.Chmod(cmp.Or(mode, s.info.Mode().Perm()))
}

func (a *Agent) editFile(in editInput) wire.Result {
	switch {
	case in.FilePath == "" || in.NewString == nil:
		return failure("file_path, old_string and new_string are needed")
	case in.OldString == "":
		return failure("edit: old_string is empty; use write to make a file")
	case in.OldString == *in.NewString:
		return failure("edit: old_string and new_string are equal")
	}
	path := at(in.FilePath)
	f, info, err := openRegular(path, a.mayWrite)
	if err != nil {
		return failure("edit: %v", err)
	}
	defer f.Close()
	if info.Size() > maxFile {
		return failure("edit: %s has %d bytes, more than %d", path, info.Size(), maxFile)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case err != nil:
		return failure("edit: %v", err)
	case len(b) > maxFile: // it grew meanwhile; what was not read would be lost
		return failure("edit: %s has more than %d bytes", path, maxFile)
	}
	text := string(b)
	n := strings.Count(text, in.OldString)
	switch {
	case n == 0:
		return failure("edit: old_string is not in %s", path)
	case n > 1 && !in.ReplaceAll:
		return failure("edit: old_string is %d times in %s; make it longer, or set replace_all", n, path)
	}
	text = strings.ReplaceAll(text, in.OldString, *in.NewString)
	if err := replaceFile(path, strings.NewReader(text), 0, a.mayWrite); err != nil {
		return failure("edit: %v", err)
	}
	return wire.Result{Text: fmt.Sprintf("replaced %d in %s", n, path)}
}
