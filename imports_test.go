package planaria_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/planaria/planaria"

// mayImport is the architecture: a package may import what stands beside it
// and no other package of ours. A failing line is a design question, not a
// line to edit.
var mayImport = map[string]string{
	"api":              "",
	"internal/policy":  "",
	"internal/blob":    "",
	"internal/vault":   "",
	"internal/llm":     "",
	"internal/store":   "policy",
	"internal/sandbox": "blob",
	"internal/effect":  "store",
	"internal/keeper":  "effect store vault llm",
	"internal/gateway": "keeper effect store policy",
	"internal/tool":    "sandbox gateway",
	"internal/session": "tool gateway effect sandbox store policy blob api",
	"internal/server":  "session store policy vault blob api",
	"internal/console": "session store policy api",
	"internal/testenv": everything,
	"cmd":              everything,
	"bench":            everything,
}

// everything means all of ours but testenv and programs.
const everything = "*"

// testenv is imported by test files only.
const testenv = "internal/testenv"

// pkg is what go list says about one package.
type pkg struct {
	ImportPath  string
	Doc         string
	GoFiles     []string
	Imports     []string
	TestImports []string // of test files inside the package
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e", "-json=ImportPath,Doc,GoFiles,Imports,TestImports", "./...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("go list: %v", err)
		}
		all = append(all, p)
	}
	if len(all) < 3 {
		t.Fatalf("go list found %d packages", len(all))
	}
	return all
}

// room names the row of mayImport for a path inside the module: packages below
// a room (fakes, generated code, subcommands) keep its line.
func room(path string) (string, bool) {
	for p := path; p != ""; {
		if _, ok := mayImport[p]; ok {
			return p, true
		}
		i := strings.LastIndexByte(p, '/')
		if i < 0 {
			break
		}
		p = p[:i]
	}
	return "", false
}

// ours returns the path of an import inside the module.
func ours(path string) (string, bool) {
	return strings.CutPrefix(path, module+"/")
}

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		if p.ImportPath == module {
			if len(p.GoFiles) > 0 {
				t.Errorf("the module root holds code: %v", p.GoFiles)
			}
			continue
		}
		path, _ := ours(p.ImportPath)
		own, ok := room(path)
		if !ok {
			t.Errorf("package %s has no import line in imports_test.go", path)
			continue
		}
		// Files of package x_test may import anything: they drive a package
		// with its real neighbours.
		for _, imp := range p.Imports {
			if why := refuse(own, imp); why != "" {
				t.Errorf("%s imports %s: %s", path, imp, why)
			}
		}
		for _, imp := range p.TestImports {
			if imp == module+"/"+testenv {
				continue // the line of testenv speaks of test files, and this is one
			}
			if why := refuse(own, imp); why != "" {
				t.Errorf("test files of %s import %s: %s", path, imp, why)
			}
		}
	}
}

// refuse says why a package of the room own may not import imp; empty when it
// may.
func refuse(own, imp string) string {
	to, ok := ours(imp)
	if !ok {
		if strings.HasPrefix(imp, "gvisor.dev/") && own != "cmd" {
			return "only cmd imports gVisor"
		}
		return ""
	}
	other, ok := room(to)
	switch {
	case !ok:
		return "that package has no import line"
	case other == own:
		return ""
	case other == testenv && own != testenv:
		return "only test files import testenv"
	case other == "cmd" || other == "bench":
		return "programs are imported by nobody"
	case mayImport[own] == everything:
		return ""
	case slices.Contains(strings.Fields(mayImport[own]), strings.TrimPrefix(other, "internal/")):
		return ""
	}
	return "its line allows: " + mayImport[own]
}

// TestRefuse shows that the check can fail.
func TestRefuse(t *testing.T) {
	for _, tt := range []struct {
		own, imp string
		ok       bool
	}{
		{"internal/store", module + "/internal/policy", true},
		{"internal/store", module + "/internal/vault", false},
		{"internal/policy", module + "/internal/store", false},
		{"internal/gateway", module + "/internal/vault", false},
		{"internal/keeper", module + "/internal/vault", true},
		{"internal/server", module + "/internal/session", true},
		{"internal/server", module + "/internal/gateway", false},
		{"internal/session", module + "/api", true},
		{"api", module + "/internal/store", false},
		{"cmd", module + "/internal/vault", true},
		{"cmd", module + "/internal/testenv", false},
		{"internal/testenv", module + "/internal/session", true},
		{"internal/session", module + "/cmd/planaria", false},
		{"internal/store", module + "/internal/nowhere", false},
		{"internal/sandbox", "gvisor.dev/gvisor/runsc/cli", false},
		{"internal/store", "database/sql", true},
	} {
		if why := refuse(tt.own, tt.imp); (why == "") != tt.ok {
			t.Errorf("refuse(%s, %s) = %q, want ok %v", tt.own, tt.imp, why, tt.ok)
		}
	}
}
