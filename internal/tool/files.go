package tool

import (
	"encoding/json"
	"errors"
)

// maxContent bounds what write takes at once, in bytes.
const maxContent = 16 << 20

type readInput struct {
	FilePath  string  `json:"file_path"`
	ViewRange []int64 `json:"view_range"`
}

var read = Tool{
	Name: "read",
	Description: `Read a text file of this session's machine.

Gives the file as it is, without line numbers. A relative path begins at /workspace. Readable are /workspace, /mnt/session (uploads, outputs), /mnt/memory, /tmp, home folders and the system's own files under /usr, /etc, /opt, /var and /srv; other places only through bash.

- Files up to 256 KiB come whole, longer ones by view_range: [start, end], lines counted from 1, both included; end 0 or less means the last line. One answer has at most 256 KiB; of more than 100,000 characters you see the beginning and the end.
- Only regular files that hold UTF-8 text.`,
	InputSchema: json.RawMessage(`{"type":"object","properties":{` +
		`"file_path":{"type":"string","description":"The file, absolute or relative to /workspace."},` +
		`"view_range":{"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":2,"description":"[start, end]: only these lines, from 1, both included; end 0 or less means the last line."}` +
		`},"required":["file_path"],"additionalProperties":false}`),
	Reads: true,
	empty: "(the file is empty)",
	check: checked(func(in readInput) error {
		if err := needPath("file_path", in.FilePath); err != nil {
			return err
		}
		return checkRange(in.ViewRange)
	}),
}

type writeInput struct {
	FilePath string  `json:"file_path"`
	Content  *string `json:"content"`
}

var write = Tool{
	Name: "write",
	Description: `Write a file on this session's machine, whole or not at all; one that is there is replaced and keeps its permissions.

Missing folders are made. A relative path begins at /workspace. Writable are /workspace, /mnt/session, /mnt/memory, /tmp and home folders; other places only through bash. Put files that the user should receive into /mnt/session/outputs. To change a part of a file use edit.`,
	InputSchema: json.RawMessage(`{"type":"object","properties":{` +
		`"file_path":{"type":"string","description":"The file, absolute or relative to /workspace."},` +
		`"content":{"type":"string","description":"All that the file will hold."}` +
		`},"required":["file_path","content"],"additionalProperties":false}`),
	check: checked(func(in writeInput) error {
		switch {
		case in.Content == nil:
			if in.FilePath == "" {
				return errors.New("file_path and content are missing")
			}
			return errors.New("content is missing; an empty file has \"\"")
		case len(*in.Content) > maxContent:
			return errors.New("content is longer than 16 MiB; make the file with bash")
		}
		return needPath("file_path", in.FilePath)
	}),
}

type editInput struct {
	FilePath   string  `json:"file_path"`
	OldString  *string `json:"old_string"`
	NewString  *string `json:"new_string"`
	ReplaceAll bool    `json:"replace_all"`
}

var edit = Tool{
	Name: "edit",
	Description: `Replace a string in a text file of this session's machine.

old_string must be in the file exactly once, byte for byte, spaces and line ends included; give enough lines around it to make it unique, or set replace_all to replace every one. The file is replaced whole or not at all and has at most 256 KiB. Paths are as in write.`,
	InputSchema: json.RawMessage(`{"type":"object","properties":{` +
		`"file_path":{"type":"string","description":"The file, absolute or relative to /workspace."},` +
		`"old_string":{"type":"string","description":"What is replaced. Not empty."},` +
		`"new_string":{"type":"string","description":"What stands there instead; may be empty."},` +
		`"replace_all":{"type":"boolean","description":"Replace every one, not exactly one."}` +
		`},"required":["file_path","old_string","new_string"],"additionalProperties":false}`),
	check: checked(func(in editInput) error {
		switch {
		case in.OldString == nil:
			return errors.New("old_string is missing")
		case in.NewString == nil:
			return errors.New("new_string is missing; to delete, give \"\"")
		case *in.OldString == "":
			return errors.New("old_string is empty; use write to make a file")
		case *in.OldString == *in.NewString:
			return errors.New("old_string and new_string are equal")
		}
		return needPath("file_path", in.FilePath)
	}),
}
