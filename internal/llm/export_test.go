package llm

import (
	"bytes"
	"io"
	"net/http"

	"github.com/anthropics/anthropic-sdk-go/v2/packages/ssestream"
	chatsse "github.com/openai/openai-go/v3/packages/ssestream"
)

// ReadMessageStream reads the body of a Messages API stream.
func ReadMessageStream(body []byte) (*Reply, error) {
	s := &messageStream{}
	res := &http.Response{Body: io.NopCloser(bytes.NewReader(body))}
	if err := s.read(ssestream.NewDecoder(res), func() {}); err != nil {
		return nil, err
	}
	return s.finish(), nil
}

// ReadChatStream reads the body of a Chat Completions stream.
func ReadChatStream(body []byte) (*Reply, error) {
	s := &chatStream{used: map[string]bool{}}
	res := &http.Response{Body: io.NopCloser(bytes.NewReader(body))}
	if err := s.read(chatsse.NewDecoder(res), func() {}); err != nil {
		return nil, err
	}
	return s.finish(), nil
}

// CheckRequest validates a request as the scripted server does.
func CheckRequest(body []byte) error {
	_, err := readScriptRequest(body)
	return err
}

// Play plays a request without HTTP; it must not panic.
func Play(s *Script, body []byte) {
	req, err := readScriptRequest(body)
	if err != nil {
		return
	}
	p := newPlay(req)
	step, _, err := s.find(p)
	if err != nil {
		return
	}
	if m, err := newScriptReply(step, p, []byte("sum of the request"), len(body)); err == nil {
		m.json()
		m.events()
	}
}
