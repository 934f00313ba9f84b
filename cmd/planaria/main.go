// Command planaria runs agents that can die at any step and come back exactly:
// the server, the client's commands, the demo and the offline checks, in one
// binary.
//
// It holds no rule of the domain. serve wires the rooms together; verify and
// doctor read a data folder; every other command speaks to a server through
// api.Client, so that whatever the command line can do, the API can do.
//
// Data goes to stdout, words to stderr. Exit codes: 0 done, 1 failed, 2
// misused; run adds 3 (waits for a person) and 130 (left by Ctrl-C).
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
)

// Exit codes of the binary.
const (
	exitDone        = 0
	exitFailed      = 1
	exitMisused     = 2
	exitWaits       = 3   // run: the session waits for a person
	exitInterrupted = 130 // run: left by a second Ctrl-C
)

// version is set at link time with -X main.version=….
var version = "dev"

func main() {
	becomeSandbox()
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv}
	os.Exit(a.main(context.Background(), os.Args[1:]))
}

// app is what the commands of one invocation share.
type app struct {
	stdin  io.Reader
	stdout io.Writer // data
	stderr io.Writer // words
	getenv func(string) string

	json    bool   // --json
	server  string // --server
	keyFile string // --api-key-file
}

// main runs one command line and returns the exit code.
func (a *app) main(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitDone
	}
	return a.fail(err)
}

// fail prints an error as the two lines that every command prints.
func (a *app) fail(err error) int {
	var quiet *exitError
	if errors.As(err, &quiet) {
		return quiet.code
	}
	code, hint := exitFailed, ""
	var h *hintError
	if errors.As(err, &h) {
		code, hint = h.code, h.hint
	} else {
		hint = hintFor(err)
	}
	fmt.Fprintf(a.stderr, "planaria: error: %s\n", oneLine(err.Error()))
	if hint != "" {
		fmt.Fprintf(a.stderr, "planaria: hint: %s\n", hint)
	}
	return code
}

// root makes the command tree.
func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "planaria",
		Short: "Run agents that can die at any step and come back exactly",
		Long: `Planaria runs agents that can die at any step and come back exactly.

serve runs the server, demo shows what it is about, and all other commands
speak to a server: --server or PLANARIA_SERVER says where it is,
PLANARIA_API_KEY or --api-key-file says who you are.`,
		Example: `  planaria demo
  planaria serve
  planaria run "What is in the backlog?" --mcp tracker=https://mcp.example.com/mcp`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs, // needSubcommand judges them
		RunE:          needSubcommand,
	}
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return misused(err, "see '%s --help'", cmd.CommandPath())
	})
	root.CompletionOptions.HiddenDefaultCmd = true
	f := root.PersistentFlags()
	f.BoolVar(&a.json, "json", false, "print JSON for machines: one value, or one per line where there are many")
	f.StringVar(&a.server, "server", "", "address of the server (default $PLANARIA_SERVER, else "+defaultServer+")")
	f.StringVar(&a.keyFile, "api-key-file", "", "file that holds the API key (default: the value of $PLANARIA_API_KEY)")
	root.AddCommand(
		a.serveCommand(), a.demoCommand(), a.runCommand(),
		a.sessionsCommand(), a.logCommand(), a.effectsCommand(), a.settleCommand(), a.approveCommand(),
		a.resumeCommand(), a.pauseCommand(), a.sandboxCommand(), a.checkpointCommand(), a.filesCommand(),
		a.agentsCommand(), a.connectorsCommand(), a.keysCommand(), a.usageCommand(),
		a.verifyCommand(), a.doctorCommand(), a.versionCommand(),
	)
	return root
}

// needSubcommand is the action of a command that only groups others.
func needSubcommand(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return misused(fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath()), "see '%s --help'", cmd.CommandPath())
	}
	return misused(fmt.Errorf("%q needs a command", cmd.CommandPath()), "see '%s --help'", cmd.CommandPath())
}

// argsExactly refuses other numbers of arguments, naming them.
func argsExactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < len(names) {
			return misused(fmt.Errorf("%s: %s is missing", cmd.CommandPath(), names[len(args)]), "usage: %s", cmd.UseLine())
		}
		if len(args) > len(names) {
			return misused(fmt.Errorf("%s: unexpected argument %q", cmd.CommandPath(), args[len(names)]), "usage: %s", cmd.UseLine())
		}
		return nil
	}
}

// hintError carries the way out beside the error.
type hintError struct {
	err  error
	hint string
	code int
}

func (e *hintError) Error() string { return e.err.Error() }
func (e *hintError) Unwrap() error { return e.err }

// exitError ends the program with a code and no words: they were printed.
type exitError struct{ code int }

func (e *exitError) Error() string { return fmt.Sprintf("exit %d", e.code) }

// hinted adds a hint to an error.
func hinted(err error, format string, args ...any) error {
	return &hintError{err: err, hint: fmt.Sprintf(format, args...), code: exitFailed}
}

// misused marks an error of the command line itself.
func misused(err error, format string, args ...any) error {
	return &hintError{err: err, hint: fmt.Sprintf(format, args...), code: exitMisused}
}
