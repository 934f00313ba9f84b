package main

import (
	"fmt"
	"regexp"
	"strings"
	"time"
)

// liveText shows a turn as it happens: the agent's words on stdout as they
// come, notes on stderr, and on a terminal a line that says what is waited for.
// It is used by one goroutine; only the spinner's ticker is another.
type liveText struct {
	a    *app
	tty  bool
	open string // id of the message whose fragments are being printed
	part strings.Builder
	// again is how many bytes of part come a second time: the stream was cut, and
	// opened in the middle of the message.
	again int
	spin  *spinner

	running string          // id of the command whose line is being gathered
	line    strings.Builder // of its output, not ended yet
	lines   map[string]int  // that were shown, by command
}

// What is shown of a command while it runs. Its result has the rest.
const (
	maxLiveLines = 40
	maxLiveLine  = 200 // characters
	// maxLiveBytes is how much of a line is kept until it ends.
	maxLiveBytes = 4 << 10
)

func newLiveText(a *app) *liveText {
	return &liveText{a: a, tty: isTerminal(a.stderr) && isTerminal(a.stdout)}
}

// start begins a message anew: what was printed of it comes again.
func (l *liveText) start(id string) {
	if l.open == id {
		l.again = l.part.Len()
	}
}

// delta prints a fragment of a message.
func (l *liveText) delta(id, text string) {
	if l.a.json {
		return
	}
	l.stop()
	if l.open != id {
		l.end()
		l.open = id
	}
	text = clean(text)
	seen := min(l.again, len(text))
	l.again, text = l.again-seen, text[seen:]
	l.part.WriteString(text)
	fmt.Fprint(l.a.stdout, text)
}

// output shows what a command prints, line by line. Programs may print anything:
// what could move the cursor or reorder text is taken out, and of a line that was
// written over the last version is shown.
func (l *liveText) output(id, text string) {
	if l.a.json {
		return
	}
	if l.running != id {
		l.endLine()
		l.running = id
	}
	for {
		part, rest, ended := strings.Cut(text, "\n")
		l.line.WriteString(part[:min(len(part), max(0, maxLiveBytes-l.line.Len()))])
		if !ended {
			return
		}
		l.endLine()
		text = rest
	}
}

// endLine shows the line of a command's output that was gathered.
func (l *liveText) endLine() {
	text := plainLine(l.line.String())
	l.line.Reset()
	n := l.lines[l.running]
	if text == "" || n > maxLiveLines {
		return
	}
	if l.lines == nil {
		l.lines = map[string]int{}
	}
	l.lines[l.running]++
	if n == maxLiveLines {
		text = "… more; its result tells the end"
	}
	l.endMessage()
	l.a.say("%s", "  | "+cut(text, maxLiveLine))
}

// escapes are what terminals take for commands: sequences of control, and of the
// operating system with their text.
var escapes = regexp.MustCompile(`\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(\x07|\x1b\\|$)|\x1b[ -/]*[0-~]`)

// plainLine is a line of a terminal as it stands there in the end.
func plainLine(s string) string {
	s = strings.TrimRight(escapes.ReplaceAllString(strings.ToValidUTF8(s, ""), ""), "\r")
	return strings.TrimRight(clean(s[strings.LastIndexByte(s, '\r')+1:]), " \t")
}

// message prints a whole message, or what its fragments left out.
func (l *liveText) message(id, text string) {
	if l.a.json {
		return
	}
	l.stop()
	text = clean(text)
	if rest, ok := strings.CutPrefix(text, l.part.String()); ok && l.open == id {
		fmt.Fprint(l.a.stdout, rest)
		l.end()
		return
	}
	l.end() // fragments were lost: the message is the truth
	fmt.Fprintln(l.a.stdout, text)
}

// note prints words on a line of their own.
func (l *liveText) note(format string, args ...any) {
	l.end()
	l.a.say("%s", "  "+oneLine(fmt.Sprintf(format, args...)))
}

// wait says on a terminal what is waited for.
func (l *liveText) wait(what string) {
	if !l.tty {
		return
	}
	l.end()
	l.spin = startSpinner(l.a, what)
}

// end ends open lines and the spinner.
func (l *liveText) end() {
	l.endLine()
	l.endMessage()
}

func (l *liveText) endMessage() {
	l.stop()
	if l.open != "" {
		fmt.Fprintln(l.a.stdout)
		l.open, l.again = "", 0
		l.part.Reset()
	}
}

func (l *liveText) stop() {
	if l.spin != nil {
		l.spin.stop()
		l.spin = nil
	}
}

// spinner is the moving line on a terminal's stderr.
type spinner struct {
	quit, gone chan struct{}
}

// spinEvery is the time between two pictures of the spinner.
const spinEvery = 120 * time.Millisecond

func startSpinner(a *app, what string) *spinner {
	s := &spinner{quit: make(chan struct{}), gone: make(chan struct{})}
	go func() {
		defer close(s.gone)
		began := time.Now()
		t := time.NewTicker(spinEvery)
		defer t.Stop()
		for n := 0; ; n++ {
			fmt.Fprintf(a.stderr, "\r  %c %s %ds ", `|/-\`[n%4], what, int(time.Since(began).Seconds()))
			select {
			case <-s.quit:
				fmt.Fprint(a.stderr, "\r\033[K")
				return
			case <-t.C:
			}
		}
	}()
	return s
}

// stop ends the line and waits until it is gone.
func (s *spinner) stop() {
	close(s.quit)
	<-s.gone
}
