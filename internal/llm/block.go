package llm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// partial is a content block of a stream under way. Its fields keep the order
// and the bytes in which the server sent them; deltas only add to them.
type partial struct {
	typ    string
	fields []field

	text, thinking, signature, input strings.Builder
	citations                        []json.RawMessage
	raw                              json.RawMessage // as sent
}

type field struct {
	name  string
	value json.RawMessage
}

func newPartial(raw json.RawMessage) (*partial, error) {
	fields, err := readFields(raw)
	if err != nil {
		return nil, fmt.Errorf("read content_block: %w", err)
	}
	seen := map[string]bool{}
	for _, f := range fields {
		if seen[f.name] {
			return nil, fmt.Errorf("read content_block: field %.40q twice", f.name)
		}
		seen[f.name] = true
	}
	p := &partial{fields: fields, raw: raw}
	p.typ = p.str("type")
	if p.typ == "" {
		return nil, errors.New("read content_block: it has no type")
	}
	return p, nil
}

// readFields reads a JSON object and keeps the order of its fields.
func readFields(raw json.RawMessage) ([]field, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	t, err := dec.Token()
	if err != nil {
		return nil, err
	}
	if t != json.Delim('{') {
		return nil, errors.New("it is not an object")
	}
	var fields []field
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, err
		}
		f := field{name: t.(string)} // a token in key position is a string
		if err := dec.Decode(&f.value); err != nil {
			return nil, err
		}
		fields = append(fields, f)
	}
	_, err = dec.Token()
	return fields, err
}

// str is the string value of a field, "" if it is absent or no string.
func (p *partial) str(name string) (s string) {
	_ = json.Unmarshal(p.value(name), &s)
	return s
}

func (p *partial) value(name string) json.RawMessage {
	for _, f := range p.fields {
		if f.name == name {
			return f.value
		}
	}
	return nil
}

func (p *partial) set(name string, v json.RawMessage) {
	p.raw = nil
	for i := range p.fields {
		if p.fields[i].name == name {
			p.fields[i].value = v
			return
		}
	}
	p.fields = append(p.fields, field{name, v})
}

func (p *partial) appendStr(name, more string) {
	if more != "" {
		p.set(name, encode(p.str(name)+more))
	}
}

// block closes the block. Where no delta touched it, Raw is the server's own bytes.
func (p *partial) block() (Block, error) {
	b := Block{Type: p.typ}
	p.appendStr("text", p.text.String())
	p.appendStr("thinking", p.thinking.String())
	p.appendStr("signature", p.signature.String())
	if len(p.citations) > 0 {
		var all []json.RawMessage
		_ = json.Unmarshal(p.value("citations"), &all) // absent or null: none yet
		p.set("citations", encode(append(all, p.citations...)))
	}
	if text := p.input.String(); strings.TrimSpace(text) != "" {
		b.Input, b.InputText = toolInput(text)
		p.set("input", b.Input)
	} else if p.typ == "tool_use" {
		if b.Input = p.value("input"); !isObject(b.Input) {
			b.Input = json.RawMessage(`{}`) // an empty input means no arguments
			p.set("input", b.Input)
		}
	}
	switch p.typ {
	case "text":
		b.Text = p.str("text")
	case "tool_use":
		b.ID, b.Name = p.str("id"), p.str("name")
		if b.ID == "" || b.Name == "" {
			return b, errors.New("a tool_use without id or name")
		}
	}
	b.Raw = p.bytes()
	return b, nil
}

func (p *partial) bytes() json.RawMessage {
	if p.raw != nil {
		return bytes.Clone(p.raw)
	}
	var buf bytes.Buffer
	for i, f := range p.fields {
		buf.WriteByte("{,"[min(i, 1)])
		buf.Write(encode(f.name))
		buf.WriteByte(':')
		buf.Write(f.value)
	}
	buf.WriteByte('}')
	return buf.Bytes()
}

// toolInput returns the input of a tool call as an object, and the model's own
// text when that is none.
func toolInput(text string) (input json.RawMessage, broken string) {
	if isObject([]byte(text)) {
		return json.RawMessage(text), ""
	}
	return encode(map[string]string{"INVALID_JSON": text}), strings.ToValidUTF8(text, "\uFFFD")
}

func isObject(raw []byte) bool {
	raw = bytes.TrimSpace(raw)
	return len(raw) > 0 && raw[0] == '{' && json.Valid(raw)
}

// encode writes v as JSON without escaping HTML characters; v always can be.
func encode(v any) json.RawMessage {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(fmt.Sprintf("llm: encode %T: %v", v, err))
	}
	return bytes.TrimRight(buf.Bytes(), "\n")
}
