package tool

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/sandbox"
)

// MaxResult is how many characters of text an answer may have; what is longer
// goes into a file of the sandbox (reference section 11.4).
const MaxResult = 100_000

// What a preview shows of an answer's beginning and end, in characters. The
// agent can read the rest, so it needs no more than to know what it has.
const (
	previewHead = 12_000
	previewTail = 4_000
)

// answersDir takes answers that were too long. It is part of snapshots.
const answersDir = "/tmp/.planaria"

// Fit writes an answer that is too long for the context into a file of the
// sandbox and leaves a preview with its path. Others are returned as they are.
// Images and other blocks stay. The file is named by id and written whole or not
// at all: a crash leaves nothing but a file that the next Fit writes again.
// Without a sandbox (nil) only the preview is left.
func Fit(ctx context.Context, s *sandbox.Sandbox, id string, a gateway.Answer) (gateway.Answer, error) {
	// Every character has a byte, so most answers need not be parsed.
	if len(a.Content) <= MaxResult {
		return a, nil
	}
	var blocks []json.RawMessage
	if err := json.Unmarshal(a.Content, &blocks); err != nil {
		return a, fmt.Errorf("fit answer %s: %w", id, err)
	}
	var texts []string
	var rest []json.RawMessage
	first, chars := -1, 0
	for i, raw := range blocks {
		var b struct {
			Type string `json:"type"`
			Text string `json:"text"`
		}
		if err := json.Unmarshal(raw, &b); err != nil || b.Type != "text" {
			rest = append(rest, raw)
			continue
		}
		if first < 0 {
			first = i
		}
		texts = append(texts, b.Text)
		chars += utf8.RuneCountInString(b.Text)
	}
	if chars <= MaxResult {
		return a, nil
	}
	whole := strings.Join(texts, "\n\n")
	where := "the rest was not kept: this session has no machine"
	if s != nil {
		name := answersDir + "/" + fileName(id) + ".txt"
		if err := s.PutFile(ctx, name, 0o644, strings.NewReader(whole)); err != nil {
			return a, fmt.Errorf("fit answer %s: %w", id, err)
		}
		where = "all of it is in " + name
	}
	b := encode(block{Type: "text", Text: preview(whole, where)})
	blocks = append(append(append([]json.RawMessage(nil), rest[:first]...), b), rest[first:]...)
	a.Content = encode(blocks)
	return a, nil
}

// preview shows the beginning and the end of a text that is longer than both.
func preview(whole, where string) string {
	chars := utf8.RuneCountInString(whole)
	head, tail := whole, whole
	for n, i := 0, 0; i < len(whole); n++ {
		if n == previewHead {
			head = whole[:i]
		}
		if n == chars-previewTail {
			tail = whole[i:]
			break
		}
		_, size := utf8.DecodeRuneInString(whole[i:])
		i += size
	}
	return fmt.Sprintf("[this answer has %d characters; its first %d and last %d follow; %s]\n%s\n[… %d characters left out …]\n%s",
		chars, previewHead, previewTail, where, head, chars-previewHead-previewTail, tail)
}

// fileName keeps of an id what is safe in a name.
func fileName(id string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' {
			return r
		}
		return '_'
	}, id)
}
