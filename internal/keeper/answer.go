package keeper

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strings"
	"unicode/utf8"
)

// MaxDisplay is how many characters of text one tool result shows to the model
// and in events (reference section 11.4); the whole answer stays in the
// completion.
const MaxDisplay = 100_000

// maxInlineBinary bounds an image or document that goes into a result.
const maxInlineBinary = 8 << 20

// Answer is a tool's answer in the form that events and models take.
type Answer struct {
	// Content is a JSON array of wire content blocks, never empty.
	Content json.RawMessage
	IsError bool
	// Whole is Content before it was cut to MaxDisplay; nil when it was not cut.
	Whole json.RawMessage
}

// Response is the body kept with a completion: what was shown, and what came.
type Response struct {
	Content json.RawMessage `json:"content"`
	// Raw is the tool's result as it came, less credentials.
	Raw json.RawMessage `json:"raw,omitempty"`
}

type block struct {
	Type   string  `json:"type"`
	Text   string  `json:"text,omitempty"`
	Source *source `json:"source,omitempty"`
	Title  string  `json:"title,omitempty"`
}

type source struct {
	Type      string `json:"type"`
	MediaType string `json:"media_type"`
	Data      string `json:"data"`
}

// Text makes content of one text.
func Text(s string) json.RawMessage { return encode([]block{{Type: "text", Text: s}}) }

func encode(bs []block) json.RawMessage {
	b, err := json.Marshal(bs)
	if err != nil {
		panic("keeper: encode blocks: " + err.Error()) // strings only
	}
	return b
}

type mcpBlock struct {
	Type     string `json:"type"`
	Text     string `json:"text"`
	Data     string `json:"data"`
	MIMEType string `json:"mimeType"`
	URI      string `json:"uri"`
	Name     string `json:"name"`
	Resource struct {
		URI      string `json:"uri"`
		MIMEType string `json:"mimeType"`
		Text     string `json:"text"`
		Blob     string `json:"blob"`
	} `json:"resource"`
}

// readResult makes an Answer of a tool's result. Text is stripped of what a
// terminal or a model would obey and a person would not see (attack M10).
func readResult(raw json.RawMessage) Answer {
	var r struct {
		Content    []json.RawMessage `json:"content"`
		Structured json.RawMessage   `json:"structuredContent"`
		IsError    bool              `json:"isError"`
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		return Answer{Content: Text("(the answer has a form that we cannot show)"), IsError: false}
	}
	d := show(r.Content, r.Structured, MaxDisplay)
	var whole json.RawMessage
	if d.cut {
		whole = encode(show(r.Content, r.Structured, math.MaxInt).blocks)
		d.blocks = append(d.blocks, block{Type: "text", Text: fmt.Sprintf("(cut after %d characters; the whole answer is kept with the effect)", MaxDisplay)})
	}
	if len(d.blocks) == 0 {
		d.blocks = []block{{Type: "text", Text: "(no output)"}}
	}
	return Answer{Content: encode(d.blocks), IsError: r.IsError, Whole: whole}
}

// show collects what is shown of a result, at most max characters of text.
func show(content []json.RawMessage, structured json.RawMessage, max int) *display {
	d := &display{left: max}
	for _, b := range content {
		var m mcpBlock
		if json.Unmarshal(b, &m) != nil {
			d.text("(a content block that we cannot read)")
			continue
		}
		d.add(m)
	}
	if len(d.blocks) == 0 && len(structured) > 0 && string(structured) != "null" {
		d.text(string(structured))
	}
	return d
}

// display collects blocks within a limit of characters.
type display struct {
	blocks []block
	left   int
	cut    bool
}

func (d *display) text(s string) {
	s = Plain(s)
	if strings.TrimSpace(s) == "" {
		return
	}
	if n := utf8.RuneCountInString(s); n > d.left {
		d.cut = true
		s = string([]rune(s)[:d.left])
	}
	d.left -= utf8.RuneCountInString(s)
	if s != "" {
		d.blocks = append(d.blocks, block{Type: "text", Text: s})
	}
}

func (d *display) add(m mcpBlock) {
	switch m.Type {
	case "text":
		d.text(m.Text)
	case "image":
		d.binary("image", m.MIMEType, m.Data, "")
	case "resource":
		switch {
		case m.Resource.Blob != "":
			d.binary(m.Resource.MIMEType, m.Resource.MIMEType, m.Resource.Blob, m.Resource.URI)
		default:
			d.text(m.Resource.URI + "\n" + m.Resource.Text)
		}
	case "resource_link":
		d.text("(resource " + m.Name + " " + m.URI + ")")
	default:
		d.text("(a block of type " + m.Type + " that cannot be shown)")
	}
}

// binary adds an image or a PDF; other data is only named.
func (d *display) binary(kind, mime, data, title string) {
	raw, err := base64.StdEncoding.DecodeString(data)
	if err != nil || len(raw) == 0 || len(raw) > maxInlineBinary {
		d.text(fmt.Sprintf("(data of type %s that cannot be shown)", mime))
		return
	}
	src := &source{Type: "base64", MediaType: mime, Data: data}
	switch {
	case mime == "image/png" || mime == "image/jpeg" || mime == "image/gif" || mime == "image/webp":
		d.blocks = append(d.blocks, block{Type: "image", Source: src})
	case mime == "application/pdf":
		d.blocks = append(d.blocks, block{Type: "document", Source: src, Title: Plain(title)})
	default:
		d.text(fmt.Sprintf("(%s of type %s, %d bytes, not shown)", kind, mime, len(raw)))
	}
}

// escapes are the sequences of ECMA-48 that a terminal obeys: CSI, the string
// sequences (OSC, DCS, SOS, PM, APC) and two-byte ones, with ESC or in their
// one-byte forms. A string that does not end hides its line at most: behind it may
// be a tool's word on how the call ended, or what another program said.
var escapes = regexp.MustCompile("(?:\x1b\\[|\u009b)[0-?]*[ -/]*[@-~]|(?:\x1b[\\]PX^_]|[\u009d\u0090\u0098\u009e\u009f])[^\n\x07\x1b\u009c]*(?:\x07|\x1b\\\\|\u009c)?|\x1b[ -/]*[0-~]?")

// Plain strips terminal escapes, control characters but tab and newline, and
// characters that nobody sees: bidirectional overrides, zero-width spaces and
// marks, tag characters, variation selectors beyond those of emoji. Joiners
// stay, since scripts need them.
func Plain(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = escapes.ReplaceAllString(s, "")
	return strings.Map(func(r rune) rune {
		if hidden(r) {
			return -1
		}
		return r
	}, s)
}

func hidden(r rune) bool {
	switch {
	case r == '\t' || r == '\n':
		return false
	case r < ' ' || 0x7F <= r && r <= 0x9F:
		return true
	case r == 0x00AD, r == 0x061C, r == 0x180E, r == 0xFEFF, r == 0x3164, r == 0xFFA0:
		return true
	case r == 0x200B, r == 0x200E, r == 0x200F:
		return true
	case 0x202A <= r && r <= 0x202E, 0x2060 <= r && r <= 0x206F:
		return true
	case 0xE0000 <= r && r <= 0xE0FFF:
		return true
	case 0xFFF0 <= r && r <= 0xFFFB:
		return true
	}
	return false
}
