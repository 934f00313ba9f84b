//go:build linux

package guest

import (
	"errors"
	"io/fs"
	"os"
	"sort"
	"time"
)

// Limits of a search (REF 11.4).
const (
	maxVisited = 50_000
	maxDepth   = 200 // folders held open at one time
	searchTime = 60 * time.Second
)

var (
	errVisited   = errors.New("too many entries")
	errLate      = errors.New("out of time")
	errFull      = errors.New("enough")
	errCancelled = errors.New("cancelled")
)

// walker visits what lies below a folder, through open folders and never
// through a link, in the order of names.
type walker struct {
	call    *call
	watch   *watch
	visited int
	// filesFirst visits the files of a folder before it walks its folders: what
	// is near comes before the limits.
	filesFirst bool
	visit      func(dir *os.Root, path string, e fs.DirEntry) error
}

// check tells whether to go on.
func (w *walker) check() error {
	select {
	case <-w.call.cancel:
		return errCancelled
	default:
	}
	if w.watch.elapsed() > searchTime {
		return errLate
	}
	return nil
}

// walk visits the entries of a folder; enter says which of its folders are
// walked too. path is that of dir, relative to where the walk began.
func (w *walker) walk(dir *os.Root, path string, depth int, enter func(path, name string) (func(), bool)) error {
	entries, err := w.read(dir)
	for _, e := range entries {
		if cerr := w.check(); cerr != nil {
			return cerr
		}
		name := e.Name()
		if path != "" {
			name = path + "/" + name
		}
		if !e.IsDir() {
			if err := w.visit(dir, name, e); err != nil {
				return err
			}
			continue
		}
		leave, ok := enter(path, e.Name())
		if !ok {
			continue
		}
		err := w.below(dir, name, e.Name(), depth, enter)
		leave()
		if err != nil {
			return err
		}
	}
	return err
}

// below walks one folder of an open one. One that is gone or closed to us by
// now has no entries.
func (w *walker) below(dir *os.Root, path, name string, depth int, enter func(path, name string) (func(), bool)) error {
	if depth == maxDepth {
		return nil
	}
	sub, err := dir.OpenRoot(name)
	if err != nil {
		return nil
	}
	defer sub.Close()
	return w.walk(sub, path, depth+1, enter)
}

// read lists a folder in the order of names; with errVisited when there is more
// than may be visited.
func (w *walker) read(dir *os.Root) (all []fs.DirEntry, err error) {
	f, err := dir.Open(".")
	if err != nil {
		return nil, nil
	}
	defer f.Close()
	for {
		some, rerr := f.ReadDir(1000)
		if room := maxVisited - w.visited; len(some) > room {
			some, err = some[:room], errVisited
		}
		w.visited += len(some)
		all = append(all, some...)
		if rerr == nil && err == nil {
			err = w.check()
		}
		if rerr != nil || err != nil {
			sort.Slice(all, func(i, j int) bool {
				if w.filesFirst && all[i].IsDir() != all[j].IsDir() {
					return all[j].IsDir()
				}
				return all[i].Name() < all[j].Name()
			})
			return all, err
		}
	}
}
