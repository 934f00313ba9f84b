package server_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestOperationsDocument: every setting and every metric of the program is in
// docs/operations.md, and no metric that the program does not have.
func TestOperationsDocument(t *testing.T) {
	doc := readText(t, "../../docs/operations.md")
	for _, m := range regexp.MustCompile(`yaml:"(\w+)"`).FindAllStringSubmatch(readText(t, "../../cmd/planaria/config.go"), -1) {
		if !regexp.MustCompile("`[^`\n]*\\b" + m[1] + "\\b[^`\n]*`").MatchString(doc) {
			t.Errorf("docs/operations.md does not mention the setting %s", m[1])
		}
	}
	sources, err := filepath.Glob("../../cmd/planaria/*.go")
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	for _, f := range sources {
		if !strings.HasSuffix(f, "_test.go") {
			code.WriteString(readText(t, f))
		}
	}
	metric := regexp.MustCompile(`"(planaria_[a-z_]+)"`)
	known := map[string]bool{}
	for _, m := range metric.FindAllStringSubmatch(code.String(), -1) {
		known[m[1]] = true
		if !strings.Contains(doc, "`"+m[1]) {
			t.Errorf("docs/operations.md does not mention the metric %s", m[1])
		}
	}
	if len(known) < 10 {
		t.Fatalf("only %d metrics were found in the code", len(known))
	}
	for _, m := range regexp.MustCompile("`(planaria_[a-z_]+)").FindAllStringSubmatch(doc, -1) {
		if !known[m[1]] {
			t.Errorf("docs/operations.md mentions the metric %s, which there is not", m[1])
		}
	}
}

// TestLinks: what the documents link to exists.
func TestLinks(t *testing.T) {
	docs, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("../../docs/*/*.md")
	if err != nil {
		t.Fatal(err)
	}
	docs = append(append(docs, more...), "../../README.md", "../../ARCHITECTURE.md")
	link := regexp.MustCompile(`\]\(([^)#:]+)\)`)
	n := 0
	for _, doc := range docs {
		for _, m := range link.FindAllStringSubmatch(readText(t, doc), -1) {
			n++
			if _, err := os.Stat(filepath.Join(filepath.Dir(doc), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", doc, m[1], err)
			}
		}
	}
	if n < 10 {
		t.Fatalf("only %d links were found", n)
	}
}

func readText(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
