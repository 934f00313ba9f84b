package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

// cliPage is the reference page that is made from the help texts.
var cliPage = filepath.Join("..", "..", "docs", "cli.md")

// TestReferencePage fails when docs/cli.md is stale; -update rewrites it.
func TestReferencePage(t *testing.T) {
	want := referencePage()
	if *update {
		if err := os.MkdirAll(filepath.Dir(cliPage), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(cliPage, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(cliPage)
	if err != nil {
		t.Fatalf("read %s: %v (make it with go test ./cmd/planaria -run TestReferencePage -update)", cliPage, err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s is stale; go test ./cmd/planaria -run TestReferencePage -update rewrites it (-want +got):\n%s", cliPage, diff)
	}
}

// TestHelp holds every command to the rule: a sentence and an example that
// names the command.
func TestHelp(t *testing.T) {
	for _, c := range commands(newTestApp().root()) {
		if c.Short == "" {
			t.Errorf("%s has no short help", c.CommandPath())
		}
		if !strings.Contains(c.Example, c.CommandPath()) {
			t.Errorf("%s: the example %q does not show the command", c.CommandPath(), c.Example)
		}
		if strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: the short help ends with a full stop", c.CommandPath())
		}
	}
}

func newTestApp() *app {
	return &app{stdin: strings.NewReader(""), stdout: &bytes.Buffer{}, stderr: &bytes.Buffer{}, getenv: func(string) string { return "" }}
}

// commands lists a tree, depth first.
func commands(c *cobra.Command) []*cobra.Command {
	out := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		if sub.Name() != "help" && sub.Name() != "completion" {
			out = append(out, commands(sub)...)
		}
	}
	return out
}

func referencePage() []byte {
	var b bytes.Buffer
	root := newTestApp().root()
	root.InitDefaultHelpFlag()
	b.WriteString("# Command line\n\nMade from the help texts by a test; `go test ./cmd/planaria -run TestReferencePage -update` rewrites it.\n")
	for _, c := range commands(root) {
		depth := "##"
		if c.HasParent() && c.Parent().HasParent() {
			depth = "###"
		}
		fmt.Fprintf(&b, "\n%s %s\n\n%s.\n", depth, c.CommandPath(), c.Short)
		if c.Long != "" {
			fmt.Fprintf(&b, "\n```text\n%s\n```\n", strings.TrimSpace(c.Long))
		}
		if c.Runnable() && c.HasParent() && !c.HasSubCommands() {
			fmt.Fprintf(&b, "\nUsage: `%s`\n", c.UseLine())
		}
		fmt.Fprintf(&b, "\n```sh\n%s\n```\n", dedent(c.Example))
		flags := c.NonInheritedFlags()
		if text := strings.TrimRight(flags.FlagUsages(), "\n"); text != "" && flags.HasAvailableFlags() {
			fmt.Fprintf(&b, "\n```text\n%s\n```\n", text)
		}
	}
	return b.Bytes()
}

func dedent(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		lines[i] = strings.TrimPrefix(l, "  ")
	}
	return strings.Join(lines, "\n")
}
