package tool

import (
	"encoding/json"
	"errors"
	"strings"
)

// maxCommand bounds a command, in bytes; more belongs into a file.
const maxCommand = 1 << 20

type bashInput struct {
	Command   *string `json:"command"`
	Restart   bool    `json:"restart"`
	TimeoutMS *int64  `json:"timeout_ms"`
}

var bash = Tool{
	Name: "bash",
	Description: `Run a command in a persistent bash shell on this session's own Linux machine, as root.

The shell stays between calls: working directory, variables, functions and background processes are kept. It starts in /workspace. Files given to you are in /mnt/session/uploads; put files that the user should receive into /mnt/session/outputs.

- Standard input is empty: a command that asks gets the end of input at once. Use flags like -y, and write files with the write tool or a here-document.
- Standard output and standard error come back together, in order, without colours and other codes for terminals. Of more than 100,000 characters (or 100 KiB) you get the beginning and the end, and the path of a file that holds all of it; the oldest such files go when they come to 64 MiB.
- A command that ends with another code than 0 is an error whose last line is the exit code.
- After timeout_ms (default 120000, at most what this environment allows, usually 600000) the command is killed, the shell is restarted, and its variables and directory are lost. Start what takes longer, or never ends, in the background: command > /tmp/log 2>&1 &
- restart: true gives you a new shell; what runs in the background goes on.
- There is no network but a proxy for HTTP and HTTPS (the variables http_proxy and https_proxy); which hosts it lets through depends on the environment.`,
	InputSchema: json.RawMessage(`{"type":"object","properties":{` +
		`"command":{"type":"string","description":"The command to run. Needed unless restart is true."},` +
		`"restart":{"type":"boolean","description":"Restart the shell first."},` +
		`"timeout_ms":{"type":"integer","minimum":1,"description":"How long the command may run, in milliseconds. Default 120000."}` +
		`},"additionalProperties":false}`),
	foreign: true,
	empty:   "(no output)",
	check: checked(func(in bashInput) error {
		switch {
		case (in.Command == nil || strings.TrimSpace(*in.Command) == "") && !in.Restart:
			return errors.New("command is missing; give one, or set restart to true")
		case in.Command != nil && strings.ContainsRune(*in.Command, 0):
			return errors.New("command contains a zero byte")
		case in.Command != nil && len(*in.Command) > maxCommand:
			return errors.New("command is longer than 1 MiB; write a script with the write tool and run it")
		case in.TimeoutMS != nil && *in.TimeoutMS < 1:
			return errors.New("timeout_ms must be at least 1")
		}
		return nil
	}),
}
