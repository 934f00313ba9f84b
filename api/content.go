package api

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
)

// The types of content blocks (reference section 9.4).
const (
	BlockText         = "text"
	BlockImage        = "image"
	BlockDocument     = "document"
	BlockSearchResult = "search_result"
	BlockRedacted     = "redacted"
)

// Limits of content.
const (
	// MaxBlocks is the largest number of blocks in one event.
	MaxBlocks = 1000
	maxTitle  = 2048
)

// Block is one content block. Type says which fields count.
type Block struct {
	Type      string
	Text      string          // text
	Source    *Source         // image, document
	From      string          // search_result: its "source" on the wire
	Title     *string         // document, search_result
	Context   *string         // document
	Content   List[TextBlock] // search_result
	Citations *Citations      // search_result
}

// Text makes a text block.
func Text(s string) Block { return Block{Type: BlockText, Text: s} }

// Texts makes a list of one text block.
func Texts(s string) List[Block] { return List[Block]{Text(s)} }

// TextBlock is a block that can only be text.
type TextBlock struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

// Citations says whether a search result may be cited.
type Citations struct {
	Enabled bool `json:"enabled"`
}

// Source is where an image or document is. Type says which fields count.
type Source struct {
	Type      string `json:"type"` // base64, url, file; text for documents
	MediaType string `json:"media_type,omitzero"`
	Data      string `json:"data,omitzero"`
	URL       string `json:"url,omitzero"`
	FileID    string `json:"file_id,omitzero"`
}

// MarshalJSON writes the form of the type.
func (b Block) MarshalJSON() ([]byte, error) {
	switch b.Type {
	case BlockText:
		return Encode(TextBlock{b.Type, b.Text})
	case BlockRedacted:
		return Encode(map[string]string{"type": b.Type})
	case BlockSearchResult:
		title := ""
		if b.Title != nil {
			title = *b.Title
		}
		return Encode(struct {
			Type      string          `json:"type"`
			Source    string          `json:"source"`
			Title     string          `json:"title"`
			Content   List[TextBlock] `json:"content"`
			Citations Citations       `json:"citations"`
		}{b.Type, b.From, title, b.Content, *cmp.Or(b.Citations, &Citations{})})
	}
	return Encode(struct {
		Type    string  `json:"type"`
		Source  *Source `json:"source,omitzero"`
		Title   *string `json:"title,omitzero"`
		Context *string `json:"context,omitzero"`
	}{b.Type, b.Source, b.Title, b.Context})
}

// UnmarshalJSON reads any form.
func (b *Block) UnmarshalJSON(data []byte) error {
	var s struct {
		Type      string          `json:"type"`
		Text      string          `json:"text"`
		Source    json.RawMessage `json:"source"`
		Title     *string         `json:"title"`
		Context   *string         `json:"context"`
		Content   List[TextBlock] `json:"content"`
		Citations *Citations      `json:"citations"`
	}
	if err := unmarshal(data, &s); err != nil {
		return err
	}
	*b = Block{Type: s.Type, Text: s.Text, Title: s.Title, Context: s.Context, Content: s.Content, Citations: s.Citations}
	if isNull(s.Source) {
		return nil
	}
	var into any = &b.From
	if firstByte(s.Source) == '{' {
		b.Source = &Source{}
		into = b.Source
	}
	if err := unmarshal(s.Source, into); err != nil {
		return &fieldError{path: []string{"source"}, text: err.Error()}
	}
	return nil
}

// where says in which kind of event content stands, because rules differ.
type where int

const (
	inMessage where = iota // user.message
	inResult               // user.custom_tool_result, user.tool_result
	inSystem               // system.message
)

func validateBlocks(path string, blocks []Block, in where) error {
	if len(blocks) > MaxBlocks {
		return Invalid(path, "holds %d blocks; at most %d are allowed", len(blocks), MaxBlocks)
	}
	if len(blocks) == 0 && in != inResult {
		return Invalid(path, "is required; send at least one block, such as {\"type\":\"text\",\"text\":\"…\"}")
	}
	for i, b := range blocks {
		if err := b.validate(index(path, i), in); err != nil {
			return err
		}
	}
	return nil
}

func (b Block) validate(path string, in where) error {
	switch {
	case b.Type == BlockRedacted:
		return Invalid(path+".type", "redacted blocks are output only; leave the block out")
	case b.Type == BlockText:
		if b.Text == "" || in != inResult && blank(b.Text) {
			return Invalid(path+".text", "must not be empty; leave the block out, or say what there is to say, such as \"(no output)\"")
		}
		return nil
	case in == inSystem:
		return oneOf(path+".type", b.Type, BlockText)
	case b.Type == BlockImage:
		return b.Source.validateImage(path + ".source")
	case b.Type == BlockDocument:
		return cmp.Or(atMostPtr(path+".title", b.Title, maxTitle), b.Source.validateDocument(path+".source"))
	case b.Type == BlockSearchResult && in == inResult:
		return b.validateSearch(path)
	case in == inResult:
		return oneOf(path+".type", b.Type, BlockText, BlockImage, BlockDocument, BlockSearchResult)
	}
	return oneOf(path+".type", b.Type, BlockText, BlockImage, BlockDocument)
}

func (b Block) validateSearch(path string) error {
	if b.Title == nil {
		return Invalid(path+".title", "is required")
	}
	if err := required(path+".source", b.From, maxURL); err != nil {
		return err
	}
	if len(b.Content) == 0 {
		return Invalid(path+".content", "must hold at least one text block")
	}
	for i, t := range b.Content {
		p := index(path+".content", i)
		if err := cmp.Or(oneOf(p+".type", t.Type, BlockText), required(p+".text", t.Text, 0)); err != nil {
			return err
		}
	}
	return nil
}

func (s *Source) validateImage(path string) error {
	if s == nil {
		return Invalid(path, "is required; give an object of type base64, url or file")
	}
	if s.Type == "base64" {
		return cmp.Or(oneOf(path+".media_type", s.MediaType, "image/jpeg", "image/png", "image/gif", "image/webp"),
			validateBase64(path+".data", s.Data))
	}
	return s.validateReference(path, "base64", "url", "file")
}

func (s *Source) validateDocument(path string) error {
	if s == nil {
		return Invalid(path, "is required; give an object of type base64, text, url or file")
	}
	switch s.Type {
	case "base64":
		return cmp.Or(oneOf(path+".media_type", s.MediaType, "application/pdf"), validateBase64(path+".data", s.Data))
	case "text":
		return cmp.Or(oneOf(path+".media_type", s.MediaType, "text/plain"), required(path+".data", s.Data, 0))
	}
	return s.validateReference(path, "base64", "text", "url", "file")
}

func (s *Source) validateReference(path string, types ...string) error {
	switch s.Type {
	case "url":
		return validateURL(path+".url", s.URL)
	case "file":
		return required(path+".file_id", s.FileID, maxMCPName)
	}
	return oneOf(path+".type", s.Type, types...)
}

func validateBase64(path, data string) error {
	if data == "" {
		return Invalid(path, "is required")
	}
	if _, err := base64.StdEncoding.DecodeString(data); err != nil {
		return Invalid(path, "is not standard base64")
	}
	return nil
}
