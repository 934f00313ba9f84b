package session_test

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

const previewed = store.SessionID("sesn_1")

func startOf(typ, event string) session.Delta {
	return session.Delta{Event: store.EventID(event), Type: typ, Start: true}
}

func textOf(typ, event, text string, block ...int) session.Delta {
	d := session.Delta{Event: store.EventID(event), Type: typ, Text: text}
	if len(block) > 0 {
		d.Index = block[0]
	}
	return d
}

// pending are the deltas that wait for a reader.
func pending(c <-chan session.Delta) (out []session.Delta) {
	for len(c) > 0 {
		out = append(out, <-c)
	}
	return out
}

// Who subscribes in the middle gets the start of what is under way, what there is
// of it, and then all that comes, without a gap.
func TestPreviewsLate(t *testing.T) {
	const msg, use, think = "agent.message", "agent.tool_use", "agent.thinking"
	m := session.New(session.Config{})
	publish := func(ds ...session.Delta) {
		for _, d := range ds {
			m.Publish(previewed, d)
		}
	}
	early, stop := m.Deltas(previewed)
	defer stop()
	publish(startOf(think, "t"), startOf(msg, "m"), textOf(msg, "m", "one "), textOf(msg, "m", "two"), textOf(msg, "m", "three ", 1),
		startOf(use, "u"), textOf(use, "u", "a\n"), textOf(use, "u", "b\n"))
	late, stopLate := m.Deltas(previewed)
	defer stopLate()
	publish(textOf(msg, "m", "four", 1), textOf(use, "u", "c\n"))
	more := []session.Delta{textOf(msg, "m", "four", 1), textOf(use, "u", "c\n")}
	want := append([]session.Delta{startOf(think, "t"), startOf(msg, "m"), textOf(msg, "m", "one two"), textOf(msg, "m", "three ", 1),
		startOf(use, "u"), textOf(use, "u", "a\nb\n")}, more...)
	if diff := cmp.Diff(want, pending(late)); diff != "" {
		t.Errorf("late reader (-want +got):\n%s", diff)
	}
	if got := pending(early); len(got) != 10 || !cmp.Equal(got[8:], more) {
		t.Errorf("early reader got %+v", got)
	}
	m.EndPreviews(previewed, "t", "m", "u")
	after, stopAfter := m.Deltas(previewed)
	defer stopAfter()
	if got := pending(after); len(got) > 0 {
		t.Errorf("of what has ended: %+v", got)
	}
	if n := m.PreviewBytes(); n != 0 {
		t.Errorf("%d bytes are kept of nothing", n)
	}
}

// What is kept is bounded: of a preview, of a session and of the process. Of a
// command the newest part stays; of an answer the beginning, and nothing follows
// behind a gap.
func TestPreviewsBounded(t *testing.T) {
	const msg, use = "agent.message", "agent.tool_use"
	m := session.New(session.Config{})
	m.Publish(previewed, startOf(use, "u"))
	m.Publish(previewed, startOf(msg, "m"))
	var printed, said strings.Builder
	for i := range 20_000 {
		line := fmt.Sprintf("é%06d\n", i)
		printed.WriteString(line)
		m.Publish(previewed, textOf(use, "u", line))
		said.WriteString(line)
		m.Publish(previewed, textOf(msg, "m", line))
	}
	c, stop := m.Deltas(previewed)
	got := pending(c)
	if len(got) != 4 {
		t.Fatalf("%d deltas, want two starts with a text each", len(got))
	}
	if s := got[1].Text; len(s) > session.MaxPreviewText || len(s) < session.MaxPreviewText-8 || !strings.HasSuffix(printed.String(), s) || !utf8.ValidString(s) {
		t.Errorf("of a command %d bytes are kept, %.20q to its end", len(s), s)
	}
	if s := got[3].Text; len(s) > session.MaxPreviewText || len(s) < session.MaxPreviewText-100 || !strings.HasPrefix(said.String(), s) {
		t.Errorf("of an answer %d bytes are kept: %.20q", len(s), s)
	}
	m.Publish(previewed, textOf(msg, "m", "behind the gap"))
	m.Publish(previewed, textOf(use, "u", "next"))
	if got := pending(c); len(got) != 1 || got[0].Text != "next" {
		t.Errorf("then came %+v, want what the command printed", got)
	}
	stop()
	m.EndPreviews(previewed, "u", "m")

	// A reader that takes nothing loses fragments: of the answer it gets no more.
	m.Publish(previewed, startOf(msg, "m"))
	slow, stop := m.Deltas(previewed)
	for i := range 1000 {
		m.Publish(previewed, textOf(msg, "m", fmt.Sprint(i, " ")))
	}
	taken := pending(slow)
	m.Publish(previewed, textOf(msg, "m", "behind the gap"))
	if got := pending(slow); len(got) > 0 || len(taken) < 100 || len(taken) == 1001 {
		t.Errorf("after %d deltas and a gap came %+v", len(taken), got)
	}
	stop()
	m.EndPreviews(previewed, "m")

	// All sessions together.
	const sessions, each = 100, 100
	big := strings.Repeat("x", 16<<10)
	for s := range sessions {
		for p := range each {
			e := fmt.Sprint("u", p)
			m.Publish(store.SessionID(fmt.Sprint(s)), startOf(use, e))
			for range 8 {
				m.Publish(store.SessionID(fmt.Sprint(s)), textOf(use, e, big))
			}
		}
	}
	if n := m.PreviewBytes(); n > session.MaxPreviewBytes || n < session.MaxPreviewBytes/2 {
		t.Errorf("%d bytes are kept", n)
	}
	first, stop := m.Deltas("0")
	if n := len(pending(first)); n != 2*session.MaxPreviews {
		t.Errorf("%d deltas of %d previews", n, each)
	}
	m.Publish("0", textOf(use, fmt.Sprint("u", each-1), "of one that was not kept"))
	if got := pending(first); len(got) > 0 {
		t.Errorf("without a start came %+v", got)
	}
	stop()
	for s := range sessions {
		for p := range each {
			m.EndPreviews(store.SessionID(fmt.Sprint(s)), store.EventID(fmt.Sprint("u", p)))
		}
	}
	if n := m.PreviewBytes(); n != 0 {
		t.Errorf("%d bytes are kept of nothing", n)
	}
}
