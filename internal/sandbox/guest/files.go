//go:build linux

package guest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
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

// at makes a path of the model absolute: relative ones begin at the workspace.
func at(path string) string {
	if !filepath.IsAbs(path) {
		path = filepath.Join(Workspace, path)
	}
	return filepath.Clean(path)
}

// openRegular opens a regular file for reading. A pipe or device would hang or
// never end.
func openRegular(path string) (*os.File, fs.FileInfo, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil, fmt.Errorf("%s is not a regular file but %s", path, kindOf(info))
	}
	f, err := os.Open(path)
	return f, info, err
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

func readFile(in readInput) wire.Result {
	if in.FilePath == "" {
		return failure("file_path is missing")
	}
	path := at(in.FilePath)
	f, info, err := openRegular(path)
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

func writeFile(in writeInput) wire.Result {
	if in.FilePath == "" || in.Content == nil {
		return failure("file_path and content are needed")
	}
	path := at(in.FilePath)
	if err := replaceFile(path, strings.NewReader(*in.Content), 0, false); err != nil {
		return failure("write: %v", err)
	}
	return wire.Result{Text: fmt.Sprintf("wrote %d bytes to %s", len(*in.Content), path)}
}

// replaceFile writes a file under another name and puts it in its place. Where
// there was one its permissions stay, unless set; a link stays a link, and its
// target is replaced.
func replaceFile(path string, content io.Reader, mode fs.FileMode, set bool) error {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	if info, err := os.Stat(path); err == nil {
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%s is not a regular file but %s", path, kindOf(info))
		}
		if !set {
			mode = info.Mode().Perm()
		}
	} else if !set {
		mode = 0o644
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".planaria-*")
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	if err == nil {
		err = f.Chmod(mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

func editFile(in editInput) wire.Result {
	switch {
	case in.FilePath == "" || in.NewString == nil:
		return failure("file_path, old_string and new_string are needed")
	case in.OldString == "":
		return failure("edit: old_string is empty; use write to make a file")
	case in.OldString == *in.NewString:
		return failure("edit: old_string and new_string are equal")
	}
	path := at(in.FilePath)
	f, info, err := openRegular(path)
	if err != nil {
		return failure("edit: %v", err)
	}
	defer f.Close()
	if info.Size() > maxFile {
		return failure("edit: %s has %d bytes, more than %d", path, info.Size(), maxFile)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return failure("edit: %v", err)
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
	if err := replaceFile(path, strings.NewReader(text), 0, false); err != nil {
		return failure("edit: %v", err)
	}
	return wire.Result{Text: fmt.Sprintf("replaced %d in %s", n, path)}
}
