// Package planaria_test checks the habits of the repository: import lines,
// comments, sizes, formatting. It belongs to no package of the program.
package planaria_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// maxLines is the ceiling of a Go file that is not a test.
const maxLines = 800

// tracked lists the repository's files that exist. Outside a clone (an
// unpacked archive) it lists all files but those that a build makes.
func tracked(t *testing.T) []string {
	t.Helper()
	var out []string
	if list, err := exec.CommandContext(t.Context(), "git", "ls-files", "-z").Output(); err == nil {
		for name := range strings.SplitSeq(string(list), "\x00") {
			if info, err := os.Lstat(name); err == nil && info.Mode().IsRegular() {
				out = append(out, name)
			}
		}
	} else {
		t.Logf("not a git clone (%v): looking at all files", err)
		err := filepath.WalkDir(".", func(p string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() && slices.Contains([]string{".git", "bin", "node_modules", "planaria-data"}, e.Name()) {
				return fs.SkipDir
			}
			if err == nil && e.Type().IsRegular() {
				out = append(out, filepath.ToSlash(p))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Contains(out, "go.mod") {
		t.Fatalf("go.mod is not among %d files", len(out))
	}
	return out
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func isTest(name string) bool {
	return strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, testenv+"/")
}

func TestPackageComments(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) > 0 && p.Doc == "" {
			t.Errorf("package %s has no package comment", p.ImportPath)
		}
	}
}

func TestGoFiles(t *testing.T) {
	for _, name := range tracked(t) {
		if !strings.HasSuffix(name, ".go") {
			continue
		}
		src := read(t, name)
		formatted, err := format.Source(src)
		switch {
		case err != nil:
			t.Errorf("%s: %v", name, err)
			continue
		case !bytes.Equal(src, formatted):
			t.Errorf("%s is not formatted: gofmt -w %s", name, name)
		}
		if n := bytes.Count(src, []byte("\n")); n > maxLines && !strings.HasSuffix(name, "_test.go") {
			t.Errorf("%s has %d lines, at most %d: split it by noun or act", name, n, maxLines)
		}
		if isTest(name) {
			for _, pos := range sleeps(t, name, src) {
				t.Errorf("%s: a test sleeps: wait on a signal or use testing/synctest", pos)
			}
		}
	}
}

// sleeps finds the uses of time.Sleep in a file.
func sleeps(t *testing.T, name string, src []byte) []token.Position {
	t.Helper()
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, src, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []token.Position
	ast.Inspect(file, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Sleep" {
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" {
				out = append(out, fset.Position(n.Pos()))
			}
		}
		return true
	})
	return out
}

// Patterns are put together here so that this file does not match them.
var (
	openEnd  = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME)\b(\(#\d+\): )?`)
	machine  = regexp.MustCompile("(^|[\\s\"'`=(:,])/(wo" + "rk|ro" + "ot)/[a-zA-Z0-9._]")
	minified = regexp.MustCompile(`\.min\.(js|css)$|(^|/)(vendor|node_modules|third_party)/`)
)

func TestText(t *testing.T) {
	for _, name := range tracked(t) {
		if minified.MatchString(name) {
			t.Errorf("%s: no vendored or minified files", name)
			continue
		}
		src := read(t, name)
		if bytes.IndexByte(src, 0) >= 0 || slices.Contains([]string{"LICENSE", "go.sum"}, name) {
			continue
		}
		n := 0
		for line := range bytes.Lines(src) {
			n++
			for _, m := range openEnd.FindAllSubmatch(line, -1) {
				if len(m[2]) == 0 {
					t.Errorf("%s:%d: open end without a number", name, n)
				}
			}
			if machine.Match(line) {
				t.Errorf("%s:%d: path of one machine: %s", name, n, bytes.TrimSpace(line))
			}
			if len(line) > 2000 && (strings.HasSuffix(name, ".js") || strings.HasSuffix(name, ".css")) {
				t.Errorf("%s:%d: a line of %d bytes: no minified files", name, n, len(line))
			}
		}
	}
}

// TestPatterns shows that the checks can fail.
func TestPatterns(t *testing.T) {
	todo, work, home := "TO"+"DO", "/wo"+"rk/", "/ro"+"ot/"
	for text, want := range map[string]bool{"// " + todo + ": later": true, "// " + todo + "(#12): later": false, "mastodon": false, "FIX" + "ME": true} {
		m := openEnd.FindStringSubmatch(text)
		if got := m != nil && m[2] == ""; got != want {
			t.Errorf("open end in %q: %v, want %v", text, got, want)
		}
	}
	for text, want := range map[string]bool{
		"see " + work + "main": true, `"` + home + `go"`: true, "cd " + home + "x": true,
		"/v1/environments/{id}" + work + "poll": false, "https://example.com" + work + "x": false, "a" + home: false,
	} {
		if got := machine.MatchString(text); got != want {
			t.Errorf("machine path in %q: %v, want %v", text, got, want)
		}
	}
	src := "package p\nimport \"time\"\nfunc f() { time.Sleep(1) }\n"
	if got := sleeps(t, "p.go", []byte(src)); len(got) != 1 || got[0].Line != 3 {
		t.Errorf("sleeps = %v, want one in line 3", got)
	}
	for name, want := range map[string]bool{"a/x.min.js": true, "vendor/x.go": true, "a/node_modules/b": true, "vendors.go": false} {
		if got := minified.MatchString(name); got != want {
			t.Errorf("minified or vendored %q: %v, want %v", name, got, want)
		}
	}
}

// TestMigrations: both engines have the same steps, numbered without a gap.
func TestMigrations(t *testing.T) {
	const dir = "internal/store/migrations"
	names := map[string][]string{}
	for _, engine := range []string{"sqlite", "postgres"} {
		files, err := filepath.Glob(filepath.Join(dir, engine, "*.sql"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			names[engine] = append(names[engine], filepath.Base(f))
		}
	}
	if len(names) == 0 {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s holds no migrations", dir)
		}
		return // the store keeps no tables yet
	}
	if d := cmp.Diff(names["sqlite"], names["postgres"]); d != "" {
		t.Errorf("migrations differ (-sqlite +postgres):\n%s", d)
	}
	form := regexp.MustCompile(`^\d{4}_[a-z0-9_]+\.sql$`)
	for i, name := range names["sqlite"] {
		if !form.MatchString(name) || !strings.HasPrefix(name, fmt.Sprintf("%04d_", i+1)) {
			t.Errorf("migration %d is named %s", i+1, name)
		}
	}
}
