package tool_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/sandbox"
	"github.com/planaria/planaria/internal/tool"
)

// check is one call and what its answer must hold.
type check struct {
	name, tool string
	input      in
	want       string // contained
	isError    bool
}

func (e *env) checks(s *sandbox.Sandbox, all []check) {
	e.t.Helper()
	for _, c := range all {
		a := e.run(s, c.tool, c.input)
		got := text(e.t, a)
		if !strings.Contains(got, c.want) || a.IsError != c.isError {
			e.t.Errorf("%s: %s %.100v = %.300q (error %v), want %q (error %v)", c.name, c.tool, fmt.Sprint(c.input), got, a.IsError, c.want, c.isError)
		}
		if n := utf8.RuneCountInString(got); n > tool.MaxResult || !utf8.ValidString(got) {
			e.t.Errorf("%s: %d characters, valid %v", c.name, n, utf8.ValidString(got))
		}
	}
}

// TestLimits: every limit of reference section 11.4, in one real sandbox.
func TestLimits(t *testing.T) {
	e := open(t)
	s := e.start(sandbox.Spec{ID: "limits", Env: []string{"ANTHROPIC_API_KEY=secret", "ANTHROPIC_BASE_URL=x", "FLAVOUR=plum"}})
	for _, part := range []struct {
		name string
		run  func(*env, *sandbox.Sandbox)
	}{
		{"bash", limitsOfBash}, {"read and edit", limitsOfRead}, {"a file that grows", limitsOfGrowing}, {"write", limitsOfWrite}, {"glob", limitsOfGlob},
		{"grep with ripgrep", limitsOfGrep}, {"grep without", limitsOfOwnGrep}, {"folders", limitsOfFolders}, {"swapped links", limitsOfSwaps},
		{"answers of others", limitsOfFit},
	} {
		t.Run(part.name, func(t *testing.T) {
			e.t = t
			part.run(e, s)
		})
	}
}

func limitsOfBash(e *env, s *sandbox.Sandbox) {
	e.checks(s, []check{
		{"nothing said", "bash", in{"command": "true"}, "(no output)", false},
		{"environment", "bash", in{"command": "env | grep ANTHROPIC_; echo $FLAVOUR"}, "plum", false},
		{"exit code", "bash", in{"command": "echo said; x=1; (exit 3)"}, "said\nexit code 3", true},
		{"timeout", "bash", in{"command": "echo begun; sleep 60", "timeout_ms": 200}, "begun\ntimed out after 200 ms; the shell was restarted", true},
		{"restarted", "bash", in{"command": "echo ${x:-gone}"}, "gone", false},
		{"set", "bash", in{"command": "y=2; sleep 300 & echo $! > /tmp/background"}, "", false},
		{"restart", "bash", in{"restart": true, "command": "echo ${y:-gone}; kill -0 $(cat /tmp/background) && echo alive; kill $(cat /tmp/background)"}, "gone\nalive", false},
		{"bytes that are no text", "bash", in{"command": `printf 'a\377\376b'`}, "a\uFFFDb", false},
		{"folders for everybody", "bash", in{"command": "stat -c '%a %n' /tmp /dev/shm"}, "1777 /tmp\n1777 /dev/shm", false},
		{"codes for a terminal", "bash", in{"command": `printf '\033[0;39m1\033[0m\r\n\033]0;title\007two\U000E0041.\0'`}, "1\ntwo.", false},
		{"a code without an end", "bash", in{"command": `printf 'one\n\033]0;title'; (exit 3)`}, "one\n\nexit code 3", true},
		{"nothing but codes", "bash", in{"command": `printf '\033[0m'`}, "(no output)", false},
		{"more time than there is", "bash", in{"command": "sleep 0.3; echo done", "timeout_ms": int64(math.MaxInt64)}, "done", false},
		{"functions with names of builtins", "bash", in{"command": "for n in read eval printf; do builtin eval \"$n() { echo mine; }\"; done; printf", "timeout_ms": 5000}, "mine", false},
		{"and after them", "bash", in{"command": "unset -f read eval printf; printf own", "timeout_ms": 5000}, "own", false},
	})
	e.run(s, "bash", in{"command": "set -x; trap 'echo trapped' ERR; (exit 3)"})
	if got := e.sh(s, "echo traced $?; trap - ERR; set +x"); strings.Contains(got, "planaria") || strings.Contains(got, "trapped\n") || !strings.Contains(got, "+ echo traced 3\ntraced 3\n") {
		e.t.Errorf("the shell's loop shows in a trace: %s", got)
	}
	// The shell says late that a command has ended, as on a busy machine.
	e.run(s, "bash", in{"command": `trap 'case $BASH_COMMAND in *printf*__planaria_mark*) sleep 1.5;; esac' DEBUG`})
	if got := e.sh(s, "trap - DEBUG; echo clean"); got != "clean" {
		e.t.Errorf("after a late end: %q", got)
	}
	if got := e.sh(s, "env | grep -c ANTHROPIC_ || true"); got != "0" {
		e.t.Errorf("%s variables of the model are inside", got)
	}
	// The most that comes whole: 100,000 characters, 100 KiB.
	for _, tt := range []struct {
		command string
		whole   bool
	}{
		{`head -c 100000 /dev/zero | tr '\0' a`, true},
		{`head -c 100001 /dev/zero | tr '\0' a`, false},
		{`printf 'é%.0s' $(seq 51200)`, true},
		{`printf 'é%.0s' $(seq 51201)`, false},
	} {
		got := text(e.t, e.run(s, "bash", in{"command": tt.command}))
		if whole := !strings.Contains(got, "truncated"); whole != tt.whole || utf8.RuneCountInString(got) > tool.MaxResult || strings.Contains(got, "\uFFFD") {
			e.t.Errorf("%s: whole %v, %d characters", tt.command, whole, utf8.RuneCountInString(got))
		}
	}
	if got := e.sh(s, "ls /tmp/.planaria | wc -l"); got != "2" {
		e.t.Errorf("%s files of long outputs, want the two that are needed", got)
	}
	// They lie in memory: the oldest go when there are too many bytes of them.
	e.sh(s, "cd /tmp/.planaria; truncate -s 50M old.txt older.txt; touch -d 2020-01-02 old.txt; touch -d 2020-01-01 older.txt; truncate -s 100M mine; touch -d 2019-01-01 mine")
	long := text(e.t, e.run(s, "bash", in{"command": "seq 100000; exit 7"}))
	if got := e.sh(s, "cd /tmp/.planaria; ls -1 old* mine; rm old* mine"); got != "mine\nold.txt" {
		e.t.Errorf("of the files of long outputs there are left: %s", got)
	}
	_, rest, _ := strings.Cut(long, "all of it is in ")
	file, rest, _ := strings.Cut(rest, "]\n")
	if !strings.HasPrefix(long, "[output truncated: 588895 bytes") || !strings.HasPrefix(rest, "1\n2\n3\n") || !strings.HasSuffix(long, "\n100000\nthe shell exited; the next command gets a new one\nexit code 7") {
		e.t.Errorf("long output: %.200s … %s", long, long[len(long)-100:])
	}
	if n := utf8.RuneCountInString(long); n < tool.MaxResult-4000 || n > tool.MaxResult {
		e.t.Errorf("%d characters of a long output are shown", n)
	}
	if got := e.sh(s, "cmp "+file+" <(seq 100000) && echo same"); got != "same" {
		e.t.Errorf("the file of a long output: %s", got)
	}
}

func limitsOfRead(e *env, s *sandbox.Sandbox) {
	e.sh(s, `cd /workspace; head -c 262144 /dev/zero | tr '\0' '\n' > full; (cat full; echo) > over
		seq 3000000 > lines; mkfifo pipe; printf 'a\377' > binary; : > empty; printf 'one\ntwo' > open; yes é | head -c 240000 > wide`)
	e.checks(s, []check{
		{"256 KiB", "edit", in{"file_path": "full", "old_string": "\n", "new_string": "", "replace_all": true}, "replaced 262144", false},
		{"more", "edit", in{"file_path": "over", "old_string": "\n", "new_string": "", "replace_all": true}, "has 262145 bytes, more than 262144", true},
		{"more", "read", in{"file_path": "over"}, "has 262145 bytes, more than 262144: ask for a part with view_range", true},
		{"part of 23 MB", "read", in{"file_path": "lines", "view_range": []int{2999999, 0}}, "2999999\n3000000\n", false},
		{"part too long", "read", in{"file_path": "lines", "view_range": []int{1, 0}}, "are more than 262144 bytes: ask for fewer", true},
		{"part of over", "read", in{"file_path": "over", "view_range": []int{262145, 262145}}, "\n", false},
		{"characters count", "read", in{"file_path": "wide"}, "[output truncated: 240000 bytes", false},
		{"no end of line", "read", in{"file_path": "open", "view_range": []int{2, 2}}, "two", false},
		{"empty", "read", in{"file_path": "empty"}, "(the file is empty)", false},
		{"binary", "read", in{"file_path": "binary"}, "is not text", true},
		{"pipe", "read", in{"file_path": "pipe"}, "a pipe", true},
		{"pipe", "edit", in{"file_path": "pipe", "old_string": "a", "new_string": "b"}, "a pipe", true},
		{"pipe", "write", in{"file_path": "pipe", "content": "a"}, "a pipe", true},
		{"pipe", "grep", in{"pattern": "a", "path": "pipe"}, "a pipe", true},
		{"device", "read", in{"file_path": "/dev/zero"}, "a device", true},
		{"device", "grep", in{"pattern": "a", "path": "/dev/zero"}, "a device", true},
		{"folder", "edit", in{"file_path": "/workspace", "old_string": "a", "new_string": "b"}, "a folder", true},
		{"found twice", "edit", in{"file_path": "open", "old_string": "o", "new_string": "0"}, "is 2 times in", true},
		{"found never", "edit", in{"file_path": "open", "old_string": "x", "new_string": "0"}, "is not in", true},
		{"found once", "edit", in{"file_path": "open", "old_string": "tw", "new_string": "TW"}, "replaced 1", false},
		{"edited", "read", in{"file_path": "open"}, "one\nTWo", false},
	})
}

// limitsOfGrowing: a file that passes the limit while edit reads it is refused,
// not cut. One that grows and shrinks all the time does so often enough.
func limitsOfGrowing(e *env, s *sandbox.Sandbox) {
	if got := e.sh(s, "command -v python3 || echo none"); got == "none" {
		e.t.Skip("no python3 on this machine")
	}
	e.run(s, "write", in{"file_path": "grow/writer.py", "content": `import os
open("f", "w").write("needle" + "x" * 262134)
open("cut", "w").close()
while not os.path.exists("stop"):
    with open("f", "a") as f: f.write("y" * 100)
    n = os.stat("f").st_size # 262140, with the hundred or the edit's one more
    if n in (262146, 262246): open("cut", "a").write(str(n) + "\n")
    os.truncate("f", 262140)
`})
	e.sh(s, "cd /workspace/grow; (python3 writer.py > log 2>&1 &); until [ -e cut ]; do sleep 0.05; done")
	for range 60 {
		e.run(s, "edit", in{"file_path": "grow/f", "old_string": "needle", "new_string": "needles"})
	}
	if got := e.sh(s, "cd /workspace/grow; touch stop; cat cut log"); got != "(no output)" {
		e.t.Errorf("files were cut to: %s", got)
	}
}

func limitsOfWrite(e *env, s *sandbox.Sandbox) {
	e.sh(s, `cd /workspace; mkdir w; printf old > w/script; chown nobody w/script; chmod 755 w/script; ln -s script w/link; ln -s /workspace/w/new/deep w/dangling`)
	e.checks(s, []check{
		{"parents", "write", in{"file_path": "w/a/b/c", "content": "x"}, "wrote 1 bytes to /workspace/w/a/b/c", false},
		{"empty", "write", in{"file_path": "w/none", "content": ""}, "wrote 0 bytes", false},
		{"replaced", "write", in{"file_path": "/workspace/w/link", "content": "new"}, "wrote 3 bytes", false},
		{"through a link", "write", in{"file_path": "w/dangling", "content": "deep"}, "wrote 4 bytes", false},
		{"a folder", "write", in{"file_path": "w/a", "content": "x"}, "a folder", true},
		{"below a file", "write", in{"file_path": "w/script/x", "content": "x"}, "not a directory", true},
	})
	got := e.sh(s, `cd /workspace/w; cat script new/deep; echo; stat -c '%A %U' script; readlink link; find . -name '.planaria*' | wc -l; umask; stat -c %a none`)
	if want := "newdeep\n-rwxr-xr-x nobody\nscript\n0\n0022\n644"; got != want {
		e.t.Errorf("after writing:\n%s\nwant:\n%s", got, want)
	}
	// Whole or not at all: a reader never sees half.
	e.sh(s, `cd /workspace/w; printf '%01000d' 0 > whole; (until [ -e stop ]; do n=$(wc -c < whole); [ $n = 1000 ] || echo $n; done) > seen 2>&1 & `)
	for i := range 10 {
		e.run(s, "write", in{"file_path": "w/whole", "content": strings.Repeat(fmt.Sprint(i), 1000)})
	}
	if got := e.sh(s, "cd /workspace/w; { touch stop; wait; } 2>/dev/null; cat seen"); got != "(no output)" {
		e.t.Errorf("a reader saw files of %s bytes", got)
	}
}

func limitsOfGlob(e *env, s *sandbox.Sandbox) {
	e.sh(s, `mkdir -p /workspace/g/a/b /workspace/g/.h; cd /workspace/g; touch -d 2020-01-01 a/x.ts; touch -d 2021-01-01 a/b/y.tsx; touch -d 2022-01-01 z.ts; touch -d 2019-01-01 .h/q.ts
		ln -s /usr a/usr; touch -d 2018-01-01 'a/[w].md' 'a/v.md'
		mkdir many; touch -d 2000-01-01 many/{001..249}.m; touch many/newest.m;`)
	e.checks(s, []check{
		{"newest first", "glob", in{"pattern": "**/*.{ts,tsx}", "path": "g/a/.."}, "/workspace/g/z.ts\n/workspace/g/a/b/y.tsx\n/workspace/g/a/x.ts\n/workspace/g/.h/q.ts\n", false},
		{"one level", "glob", in{"pattern": "*/?.ts", "path": "/workspace/g"}, "/workspace/g/a/x.ts\n/workspace/g/.h/q.ts\n", false},
		{"** stands for nothing", "glob", in{"pattern": "a/**/x.ts", "path": "/workspace/g"}, "/workspace/g/a/x.ts\n", false},
		{"** within a name is *", "glob", in{"pattern": "**.ts", "path": "/workspace/g"}, "/workspace/g/z.ts\n", false},
		{"set", "glob", in{"pattern": "a/[!w-z].*", "path": "g"}, "/workspace/g/a/v.md\n", false},
		{"escaped", "glob", in{"pattern": `a/\[w\].md`, "path": "g"}, "/workspace/g/a/[w].md\n", false},
		{"nested braces", "glob", in{"pattern": "{a/{x,v}.{ts,md},none}", "path": "g"}, "/workspace/g/a/x.ts\n/workspace/g/a/v.md\n", false},
		{"links are not followed", "glob", in{"pattern": "a/usr/*", "path": "g"}, "no matches", false},
		{"200", "glob", in{"pattern": "many/*.m", "path": "g"}, "[the newest 200 of 250]", false},
		{"newest of them", "glob", in{"pattern": "many/*.m", "path": "g"}, "/workspace/g/many/newest.m\n/workspace/g/many/001.m", false},
		{"only where it can match", "glob", in{"pattern": "a/*.ts", "path": "g"}, "/workspace/g/a/x.ts", false},
		{"nothing", "glob", in{"pattern": "nope/**", "path": "g"}, "no matches", false},
		{"open set", "glob", in{"pattern": "[a", "path": "g"}, "is not closed", true},
		{"open brace", "glob", in{"pattern": "{a,b", "path": "g"}, "a brace of the pattern is not closed", true},
		{"too many braces", "glob", in{"pattern": strings.Repeat("{a,b}", 9), "path": "g"}, "more than 256 alternatives", true},
		{"up", "glob", in{"pattern": "{a,..}/x", "path": "g"}, "must not contain ..", true},
		{"no folder", "glob", in{"pattern": "*", "path": "none"}, "no such file", true},
	})
	if got := text(e.t, e.run(s, "glob", in{"pattern": "a/*.ts", "path": "g"})); strings.Contains(got, "stopped") {
		e.t.Errorf("a folder that cannot match was walked: %s", got)
	}
	e.sh(s, "if [ $(find /usr | head -n 50001 | wc -l) -le 50000 ]; then mkdir /usr/huge; cd /usr/huge; seq -f e%g 50010 | xargs touch; fi")
	e.checks(s, []check{{"50,000", "glob", in{"pattern": "**/none", "path": "/usr"}, "[stopped after 50000 entries: give a narrower path]", false}})
}

func limitsOfGrep(e *env, s *sandbox.Sandbox) {
	if got := e.sh(s, "command -v rg || echo none"); got == "none" {
		e.t.Skip("no ripgrep on this machine")
	}
	e.sh(s, `mkdir -p /workspace/s/sub/.git /workspace/s/.hidden; cd /workspace/s; printf 'one\nTwo\nthree\n\nlast' > a.txt; printf 'two\r\n' > sub/b.txt; printf 'two\0' > bin
		echo two > sub/.git/c; echo two > .hidden/d; echo two > ignored; echo ignored > .gitignore; printf 'tw\377o two\n' > bad; mkfifo pipe; ln -s /etc etc
		(head -c 8388600 /dev/zero | tr '\0' x; echo; echo large match) > large; mkdir out; yes 'fill the output to the brim' | head -n 5000 > out/full; (printf 'wide '; printf '日%.0s' $(seq 2000); echo) > wide; echo ok > -dash`)
	grepChecks(e, s)
}

func grepChecks(e *env, s *sandbox.Sandbox) {
	e.checks(s, []check{
		{"all", "grep", in{"pattern": "(?i)two", "path": "s"}, "/workspace/s/.hidden/d:1:two\n/workspace/s/a.txt:2:Two\n/workspace/s/ignored:1:two\n/workspace/s/sub/b.txt:1:two\n", false},
		{"one file", "grep", in{"pattern": "^t.*e$", "path": "s/a.txt"}, "/workspace/s/a.txt:3:three\n", false},
		{"empty line", "grep", in{"pattern": "^$", "path": "s"}, "/workspace/s/a.txt:4:\n", false},
		{"no end of line", "grep", in{"pattern": "^last$", "path": "s"}, "/workspace/s/a.txt:5:last\n", false},
		{"end of line of two bytes", "grep", in{"pattern": "^two$", "path": "s/sub"}, "/workspace/s/sub/b.txt:1:two\n", false},
		{"name like a flag", "grep", in{"pattern": "^ok", "path": "s"}, "/workspace/s/-dash:1:ok\n", false},
		{"pattern like a flag", "grep", in{"pattern": "--version", "path": "s"}, "no matches", false},
		{"too large", "grep", in{"pattern": "large match", "path": "s"}, "no", false},
		{"100 KiB", "grep", in{"pattern": "brim", "path": "s/out"}, "[stopped at 100 KiB of matches: search for less]", false},
		{"long line", "grep", in{"pattern": "^wide", "path": "s"}, "日…\n", false},
		{"nothing", "grep", in{"pattern": "nothing like it", "path": "s/sub"}, "no matches", false},
		{"no folder", "grep", in{"pattern": "a", "path": "s/none"}, "no such file", true},
	})
	if got := text(e.t, e.run(s, "grep", in{"pattern": "large match", "path": "s"})); strings.Contains(got, "/large:") {
		e.t.Errorf("a file over 8 MiB was searched: %s", got)
	}
	full := text(e.t, e.run(s, "grep", in{"pattern": "brim", "path": "s/out"}))
	if len(full) < 90<<10 || len(full) > 100<<10 || !strings.HasPrefix(full, "/workspace/s/out/full:1:fill the output to the brim\n") {
		e.t.Errorf("%d bytes of matches: %.100s", len(full), full)
	}
}

func limitsOfOwnGrep(e *env, s *sandbox.Sandbox) {
	if got := e.sh(s, "if command -v rg >/dev/null; then mv $(command -v rg) /tmp/rg.away; fi; command -v rg || echo none"); got != "none" {
		e.t.Fatalf("ripgrep is still at %s", got)
	}
	if got := e.sh(s, "[ -d /workspace/s ] && echo there || echo none"); got == "none" {
		e.t.Skip("the files to search were not made: no ripgrep on this machine")
	}
	grepChecks(e, s)
	if got := text(e.t, e.run(s, "grep", in{"pattern": "large match", "path": "s"})); !strings.Contains(got, "[files over 8 MiB are not searched: 1]") {
		e.t.Errorf("nothing is said of the large file: %s", got)
	}
}

// limitsOfFolders: attack F1, and F2 where the links lie still.
func limitsOfFolders(e *env, s *sandbox.Sandbox) {
	e.sh(s, `mkdir /workspace-x /runner; echo sibling > /workspace-x/f; cd /workspace; ln -s /proc/version v; ln -s / top; ln -s /etc etc; ln -s /tmp/there there; echo tmp > /tmp/there; ln -s loop loop; ln -s / out; echo a > /.planaria-x; echo host > /etc/made`)
	outside := "is outside the folders that this tool may use"
	e.checks(s, []check{
		{"dots", "read", in{"file_path": "../proc/version"}, outside, true},
		{"absolute", "read", in{"file_path": "/proc/1/environ"}, outside, true},
		{"absolute with dots", "read", in{"file_path": "/workspace/../../proc/version"}, outside, true},
		{"sibling", "read", in{"file_path": "/workspace-x/f"}, outside, true},
		{"sibling", "write", in{"file_path": "/workspace-x/g", "content": "a"}, outside, true},
		{"sibling", "edit", in{"file_path": "/workspace-x/f", "old_string": "s", "new_string": "t"}, outside, true},
		{"sibling", "glob", in{"pattern": "*", "path": "/workspace-x"}, outside, true},
		{"sibling", "grep", in{"pattern": ".", "path": "/workspace-x"}, outside, true},
		{"file of a sibling", "grep", in{"pattern": ".", "path": "/workspace-x/f"}, outside, true},
		{"new folder at the top", "write", in{"file_path": "/new/f", "content": "a"}, outside, true},
		{"file at the top", "write", in{"file_path": "/f", "content": "a"}, outside, true},
		{"link out", "read", in{"file_path": "v"}, outside, true},
		{"link out", "write", in{"file_path": "v", "content": "a"}, outside, true},
		{"link to a folder", "read", in{"file_path": "top/proc/version"}, outside, true},
		{"link to a folder", "write", in{"file_path": "top/new", "content": "a"}, outside, true},
		{"link to a folder", "glob", in{"pattern": "*", "path": "top"}, outside, true},
		{"link to a folder", "grep", in{"pattern": ".", "path": "top/proc"}, outside, true},
		{"pattern through a link", "glob", in{"pattern": "top/proc/*"}, "no matches", false},
		{"the agent's own", "read", in{"file_path": "/.planaria/ctl/ctl.sock"}, "a socket", true},
		{"the agent's own", "write", in{"file_path": "/.planaria/x", "content": "a"}, outside, true},
		{"system, read", "read", in{"file_path": "/etc/made"}, "host", false},
		{"system, link", "read", in{"file_path": "etc/made"}, "host", false},
		{"system, write", "write", in{"file_path": "/etc/made", "content": "a"}, "may write to", true},
		{"system, edit", "edit", in{"file_path": "etc/made", "old_string": "host", "new_string": "a"}, "may write to", true},
		{"system, new", "write", in{"file_path": "/usr/local/x/y", "content": "a"}, "may write to", true},
		{"link between folders", "read", in{"file_path": "there"}, "tmp", false},
		{"link between folders", "write", in{"file_path": "there", "content": "changed"}, "wrote 7 bytes", false},
		{"loop", "read", in{"file_path": "loop"}, "too many", true},
		{"loop", "write", in{"file_path": "loop", "content": "a"}, "too many", true},
		{"memory", "write", in{"file_path": "/mnt/memory/notes/a.md", "content": "a"}, "wrote 1 bytes", false},
	})
	if got := e.sh(s, "cat /workspace-x/f /etc/made; ls /new /f /usr/local/x /workspace-x 2>/dev/null; readlink /workspace/there; cat /tmp/there"); got != "sibling\nhost\n/workspace-x:\nf\n/tmp/there\nchanged" {
		e.t.Errorf("outside: %s", got)
	}
	// Where the host has put a file, the tools may work.
	if err := s.PutFile(e.t.Context(), "/data/in.csv", 0, strings.NewReader("a,b\n")); err != nil {
		e.t.Fatal(err)
	}
	e.checks(s, []check{
		{"placed", "read", in{"file_path": "/data/in.csv"}, "a,b", false},
		{"beside it", "write", in{"file_path": "/data/out.csv", "content": "a"}, "wrote", false},
		{"its sibling", "write", in{"file_path": "/data-x/out.csv", "content": "a"}, outside, true},
	})
}

// limitsOfSwaps: attack F2, a link that is put in place between check and use.
func limitsOfSwaps(e *env, s *sandbox.Sandbox) {
	e.sh(s, `mkdir -p /workspace/swap/real /workspace-x/out; cd /workspace/swap; echo inside > real/version; echo hidden > /workspace-x/version
		ln -s real link; (while [ ! -e stop ]; do ln -sfn /workspace-x link; ln -sfn real link; done) & `)
	read := map[string]int{}
	for i := range 60 {
		got := text(e.t, e.run(s, "read", in{"file_path": "swap/link/version"}))
		if strings.Contains(got, "hidden") {
			e.t.Fatalf("read %d went out: %s", i, got)
		}
		if strings.Contains(got, "is outside") {
			got = "refused"
		}
		read[strings.TrimSpace(got)]++
		if got := text(e.t, e.run(s, "grep", in{"pattern": "hidden", "path": "swap/link"})); strings.Contains(got, ":hidden") {
			e.t.Fatalf("search %d went out: %s", i, got)
		}
		e.run(s, "write", in{"file_path": "swap/link/out/w", "content": "a"})
		e.run(s, "edit", in{"file_path": "swap/link/version", "old_string": "hidden", "new_string": "changed"})
	}
	if got := e.sh(s, "cd /workspace/swap; { touch stop; wait; } 2>/dev/null; cat /workspace-x/version; ls -A /workspace-x/out"); got != "hidden" {
		e.t.Errorf("outside: %s", got)
	}
	for k := range read {
		if k != "inside" && k != "refused" {
			delete(read, "inside")
			delete(read, "refused")
			e.t.Errorf("other answers: %s", cmp.Diff(map[string]int{}, read))
			break
		}
	}
	e.t.Logf("reads: %v", read)
}

// limitsOfFit: the long answer of a tool outside goes into a file inside.
func limitsOfFit(e *env, s *sandbox.Sandbox) {
	long := strings.Repeat("0123456789", 15_000)
	a := e.run(s, "bash", in{"command": "true"})
	a.Content = []byte(`[{"type":"text","text":"` + long + `"}]`)
	got, err := tool.Fit(e.t.Context(), s, "sevt_1/../x", a)
	if err != nil {
		e.t.Fatal(err)
	}
	if !strings.Contains(text(e.t, got), "all of it is in /tmp/.planaria/sevt_1____x.txt]") {
		e.t.Errorf("preview: %.200s", text(e.t, got))
	}
	if n := e.sh(s, "wc -c < /tmp/.planaria/sevt_1____x.txt"); n != "150000" {
		e.t.Errorf("the file has %s bytes", n)
	}
	e.checks(s, []check{{"the rest is read", "grep", in{"pattern": "0123", "path": "/tmp/.planaria/sevt_1____x.txt"}, ".txt:1:0123", false}})
}
