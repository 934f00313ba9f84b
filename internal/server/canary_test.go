package server_test

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
)

// occurrences counts a text in every file of the data folder and in the log.
func (e *env) occurrences(text string) int {
	e.t.Helper()
	n := bytes.Count([]byte(e.logs.String()), []byte(text))
	err := filepath.WalkDir(e.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		n += bytes.Count(b, []byte(text))
		return err
	})
	if err != nil {
		e.t.Fatal(err)
	}
	return n
}
