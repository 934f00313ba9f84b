package vault

import (
	"bytes"
	"fmt"
	"io"
	"slices"
)

// MinScrub is the shortest form of a secret that is looked for, in bytes.
// Shorter ones would match by chance all over.
const MinScrub = 6

// keyLen is how many bytes of a form find its bucket.
const keyLen = 4

// scrubBuffer is how much a Reader asks of its source at a time.
const scrubBuffer = 32 << 10

// Scrubber replaces secrets in bytes that come back from outside by REDACTED
// (attacks K2 and K3). It knows each secret in the encodings of forms: as it
// is, base64 at any alignment, hex, percent-encoded, escaped for JSON (once and
// twice) and HTML.
//
// It is best effort: a target that means to leak can encrypt, compress, split
// or spell a secret in ways that nobody lists. Compressed bodies must be
// decoded first. The first line of defence is that the keeper drops
// auth-bearing response headers and that no contract names an echoing endpoint;
// a count above zero here is an alarm.
//
// A Scrubber does not change after NewScrubber and is safe for concurrent use.
type Scrubber struct {
	buckets map[[keyLen]byte][][]byte // forms by their first bytes, longest first
	starts  map[string]bool           // the beginnings shorter than keyLen of all forms
	first   [256]bool                 // bytes that begin a form
	longest int
}

// NewScrubber makes a scrubber of secrets; those shorter than MinScrub are not
// looked for.
func NewScrubber(secrets ...Secret) *Scrubber {
	s := &Scrubber{buckets: map[[keyLen]byte][][]byte{}, starts: map[string]bool{}}
	seen := map[string]bool{}
	for _, secret := range secrets {
		if len(secret.Reveal()) < MinScrub {
			continue
		}
		for _, form := range forms(secret.Reveal()) {
			if len(form) >= MinScrub && !seen[form] {
				seen[form] = true
				s.add(form)
			}
		}
	}
	for _, b := range s.buckets {
		slices.SortFunc(b, func(x, y []byte) int { return len(y) - len(x) })
	}
	return s
}

func (s *Scrubber) add(form string) {
	key := [keyLen]byte([]byte(form[:keyLen]))
	s.buckets[key] = append(s.buckets[key], []byte(form))
	s.first[form[0]] = true
	for n := 1; n < keyLen; n++ {
		s.starts[form[:n]] = true
	}
	s.longest = max(s.longest, len(form))
}

// Format implements fmt.Formatter: a dump would show the secrets.
func (s *Scrubber) Format(f fmt.State, verb rune) { _, _ = io.WriteString(f, "vault.Scrubber") }

// Scrub returns b with every secret replaced, and how many replacements were
// made. It returns b itself when there is nothing to replace, and never writes
// into it.
func (s *Scrubber) Scrub(b []byte) ([]byte, int) {
	if !s.finds(b) {
		return b, 0
	}
	t := stream{s: s}
	return t.push(make([]byte, 0, len(b)), b, true), t.count
}

// finds reports whether b holds a form. Most answers hold none and are not
// copied.
func (s *Scrubber) finds(b []byte) bool {
	for i, c := range b {
		if s.first[c] {
			if n, _ := s.match(b[i:]); n > 0 {
				return true
			}
		}
	}
	return false
}

// match returns the length of the longest form at the start of b, 0 when none,
// and whether more bytes could make a longer one.
func (s *Scrubber) match(b []byte) (n int, open bool) {
	if !s.first[b[0]] {
		return 0, false
	}
	if len(b) < keyLen {
		return 0, s.starts[string(b)]
	}
	for _, form := range s.buckets[[keyLen]byte(b)] {
		switch {
		case len(form) > len(b):
			open = open || bytes.HasPrefix(form, b)
		case bytes.HasPrefix(b, form):
			return len(form), open
		}
	}
	return 0, open
}

// stream scrubs one stream of bytes. Where forms overlap, the whole overlap is
// replaced, so that no second secret shows half.
type stream struct {
	s       *Scrubber
	held    []byte // seen, not yet given on: it may be the beginning of a form
	covered int    // bytes at the start of held that belong to a form already replaced
	count   int
}

// push takes the next bytes and appends to out what is certain. At the end of
// the stream (last) everything is.
func (t *stream) push(out, b []byte, last bool) []byte {
	data := b
	if len(t.held) > 0 {
		data = append(t.held, b...)
	}
	if t.s.longest == 0 {
		return append(out, data...)
	}
	i := 0
	for ; i < len(data); i++ {
		if t.covered == 0 && !t.s.first[data[i]] {
			out = append(out, data[i])
			continue
		}
		n, open := t.s.match(data[i:])
		if open && !last {
			break
		}
		if n > 0 && t.covered == 0 {
			out = append(out, Redacted...)
			t.count++
		}
		t.covered = max(t.covered, n)
		if t.covered > 0 {
			t.covered--
			continue
		}
		out = append(out, data[i])
	}
	t.held = bytes.Clone(data[i:]) // b is the caller's
	return out
}

// Writer scrubs what passes through it. It holds back only bytes that may be
// the beginning of a secret, at most the longest form less one, so a stream of
// events is not delayed. Close writes the rest; it does not close the
// destination. Not safe for concurrent use.
type Writer struct {
	t   stream
	dst io.Writer
	buf []byte
	err error
}

// Writer returns a scrubbing writer to dst.
func (s *Scrubber) Writer(dst io.Writer) *Writer {
	return &Writer{t: stream{s: s}, dst: dst}
}

// Write takes all of p. An error of the destination shows here or at the next
// call; then the stream is broken.
func (w *Writer) Write(p []byte) (int, error) {
	w.push(p, false)
	if w.err != nil {
		return 0, w.err
	}
	return len(p), nil
}

// Close writes what is held back.
func (w *Writer) Close() error {
	w.push(nil, true)
	return w.err
}

// Count returns how many replacements were made so far.
func (w *Writer) Count() int { return w.t.count }

func (w *Writer) push(p []byte, last bool) {
	if w.err != nil {
		return
	}
	w.buf = w.t.push(w.buf[:0], p, last)
	if len(w.buf) > 0 {
		_, w.err = w.dst.Write(w.buf)
	}
}

// Reader scrubs what is read through it, as Writer does. Not safe for
// concurrent use.
type Reader struct {
	t   stream
	src io.Reader
	in  []byte
	out []byte // scrubbed, not yet read
	err error
}

// Reader returns a scrubbing reader of src.
func (s *Scrubber) Reader(src io.Reader) *Reader {
	return &Reader{t: stream{s: s}, src: src, in: make([]byte, scrubBuffer)}
}

// Read implements io.Reader. What was held back when src ended with an error
// is given out before that error.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	var space []byte
	for len(r.out) == 0 && r.err == nil {
		var n int
		n, r.err = r.src.Read(r.in)
		space = r.t.push(space[:0], r.in[:n], r.err != nil)
		r.out = space
	}
	if len(r.out) == 0 {
		return 0, r.err
	}
	n := copy(p, r.out)
	r.out = r.out[n:]
	return n, nil
}

// Count returns how many replacements were made so far.
func (r *Reader) Count() int { return r.t.count }
