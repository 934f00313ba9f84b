package main

import (
	"fmt"
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
	spin *spinner
}

func newLiveText(a *app) *liveText {
	return &liveText{a: a, tty: isTerminal(a.stderr) && isTerminal(a.stdout)}
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
	l.part.WriteString(text)
	fmt.Fprint(l.a.stdout, text)
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

// end ends an open line and the spinner.
func (l *liveText) end() {
	l.stop()
	if l.open != "" {
		fmt.Fprintln(l.a.stdout)
		l.open = ""
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
