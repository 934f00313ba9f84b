package session

import (
	"sync"
	"unicode/utf8"

	"github.com/planaria/planaria/internal/store"
)

// Limits of previews. What is kept of those under way is for readers that come in
// their middle.
const (
	// deltaBuffer is how many fragments wait for one reader.
	deltaBuffer = 256
	// maxPreviewText is how much is kept of one preview, in bytes: of an answer
	// its beginning, of what a command prints the newest part.
	maxPreviewText = 64 << 10
	// maxPreviewBlocks is of how many content blocks of an answer text is kept.
	maxPreviewBlocks = 64
	// maxPreviews is how many previews are kept of one session at once.
	maxPreviews = 64
	// maxPreviewBytes bounds the text that is kept in this process.
	maxPreviewBytes = 32 << 20
)

// hub hands previews to the streams of this process. Deltas are transient: a
// slow reader loses fragments, never events.
type hub struct {
	mu   sync.Mutex
	subs map[store.SessionID]map[*reader]struct{}
	open map[store.SessionID][]*preview // under way, oldest first
	kept int                            // bytes of text in open
}

// reader is one subscriber of a session's previews.
type reader struct {
	c chan Delta
	// begun are the events whose start it has and whose text may follow. An answer
	// is none any more once a part of it was dropped or is not kept: its text so
	// far must be a prefix of the final one (reference section 10.4).
	begun map[store.EventID]bool
}

// preview is what is kept of an event under way.
type preview struct {
	event  store.EventID
	typ    string
	blocks [][]byte // texts by content block
	cut    bool     // the end of an answer's text is not kept
}

// Deltas subscribes to the previews of a session driven by this process. First
// come those under way, each with its start and what there is of it so far. The
// channel is bounded; fragments are dropped for a slow reader. cancel ends it.
func (m *Manager) Deltas(id store.SessionID) (deltas <-chan Delta, cancel func()) {
	h := &m.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	r := &reader{begun: map[store.EventID]bool{}}
	var first []Delta
	for _, p := range h.open[id] {
		first = append(first, p.deltas()...)
		if !p.cut {
			r.begun[p.event] = true
		}
	}
	r.c = make(chan Delta, deltaBuffer+len(first))
	for _, d := range first {
		r.c <- d
	}
	if h.subs == nil {
		h.subs = map[store.SessionID]map[*reader]struct{}{}
	}
	if h.subs[id] == nil {
		h.subs[id] = map[*reader]struct{}{}
	}
	h.subs[id][r] = struct{}{}
	return r.c, sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.subs[id], r)
		if len(h.subs[id]) == 0 {
			delete(h.subs, id)
		}
	})
}

// publish keeps a delta of a preview and hands it to those who watch. The first
// one of an event is its start; end must follow.
func (h *hub) publish(id store.SessionID, d Delta) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if d.Start {
		h.begin(id, d)
	} else {
		h.keep(id, d)
	}
	for r := range h.subs[id] {
		if !d.Start && !r.begun[d.Event] {
			continue
		}
		select {
		case r.c <- d:
			r.begun[d.Event] = true
		default:
			if d.Start || d.Type != evToolUse {
				delete(r.begun, d.Event)
			}
		}
	}
}

// begin keeps a new preview. h.mu is held.
func (h *hub) begin(id store.SessionID, d Delta) {
	h.drop(id, d.Event) // of a former driver of this process
	if len(h.open[id]) >= maxPreviews {
		return
	}
	if h.open == nil {
		h.open = map[store.SessionID][]*preview{}
	}
	h.open[id] = append(h.open[id], &preview{event: d.Event, typ: d.Type})
}

// keep adds text to what is kept of a preview, as far as there is room. h.mu is held.
func (h *hub) keep(id store.SessionID, d Delta) {
	for _, p := range h.open[id] {
		if p.event != d.Event {
			continue
		}
		before := p.size()
		room := min(maxPreviewText, before+maxPreviewBytes-h.kept)
		if p.typ == evToolUse {
			p.keepEnd(d.Text, room)
		} else {
			p.keepBeginning(d, room)
		}
		h.kept += p.size() - before
		return
	}
}

// end forgets previews. It comes before the commit of what ends them: who
// subscribes later finds them in the log.
func (h *hub) end(id store.SessionID, events ...store.EventID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range events {
		h.drop(id, e)
	}
	for r := range h.subs[id] {
		for _, e := range events {
			delete(r.begun, e)
		}
	}
}

// drop forgets one preview. h.mu is held.
func (h *hub) drop(id store.SessionID, event store.EventID) {
	list := h.open[id]
	for i, p := range list {
		if p.event == event {
			h.kept -= p.size()
			list = append(list[:i:i], list[i+1:]...)
			break
		}
	}
	if len(list) == 0 {
		delete(h.open, id)
		return
	}
	h.open[id] = list
}

// size is the text that is kept, in bytes.
func (p *preview) size() (n int) {
	for _, b := range p.blocks {
		n += len(b)
	}
	return n
}

// keepEnd keeps the newest bytes of a command's output, at most room.
func (p *preview) keepEnd(text string, room int) {
	if p.blocks == nil {
		p.blocks = [][]byte{nil}
	}
	all := append(p.blocks[0], text...)
	if over := len(all) - room; over > 0 {
		for over < len(all) && !utf8.RuneStart(all[over]) {
			over++
		}
		all = append([]byte(nil), all[over:]...) // not a window that moves on over a growing array
	}
	p.blocks[0] = all
}

// keepBeginning keeps a fragment of an answer if all before it are kept and all
// of it fits into room bytes.
func (p *preview) keepBeginning(d Delta, room int) {
	if p.cut || d.Index >= maxPreviewBlocks || p.size()+len(d.Text) > room {
		p.cut = true
		return
	}
	for len(p.blocks) <= d.Index {
		p.blocks = append(p.blocks, nil)
	}
	p.blocks[d.Index] = append(p.blocks[d.Index], d.Text...)
}

// deltas tell a new reader what is kept.
func (p *preview) deltas() []Delta {
	out := []Delta{{Event: p.event, Type: p.typ, Start: true}}
	for i, b := range p.blocks {
		if len(b) > 0 {
			out = append(out, Delta{Event: p.event, Type: p.typ, Index: i, Text: string(b)})
		}
	}
	return out
}
