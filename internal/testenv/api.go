package testenv

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
)

// API speaks to a server as a client does, over real HTTP. It keeps every
// answer, in which no secret may be.
type API struct {
	Base string
	Key  string
	HTTP *http.Client

	mu   sync.Mutex
	seen bytes.Buffer
}

// maxSeen bounds what is kept of answers for the search of secrets.
const maxSeen = 64 << 20

// APIError is an answer other than 200.
type APIError struct {
	Status  int
	Type    string
	Message string
}

func (e *APIError) Error() string {
	return fmt.Sprintf("status %d %s: %s", e.Status, e.Type, e.Message)
}

// M is a JSON object.
type M = map[string]any

// Do makes one request. An answer other than 200 is an *APIError, everything
// else means that nobody knows what became of it.
func (a *API) Do(ctx context.Context, method, path string, in, out any, headers ...string) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.Base+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+a.Key)
	req.Header.Set("anthropic-version", "2023-06-01")
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := a.HTTP.Do(req)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	a.keep(b)
	if resp.StatusCode != http.StatusOK {
		var e struct {
			Error struct {
				Type    string `json:"type"`
				Message string `json:"message"`
			} `json:"error"`
		}
		_ = json.Unmarshal(b, &e) // an unreadable body is shown as an empty message
		return fmt.Errorf("%s %s: %w", method, path, &APIError{resp.StatusCode, e.Error.Type, e.Error.Message})
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

func (a *API) keep(b []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.seen.Len() < maxSeen {
		a.seen.Write(b)
	}
}

// Seen returns all answers so far.
func (a *API) Seen() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return bytes.Clone(a.seen.Bytes())
}

// Event is an event as lists and streams show it.
type Event struct {
	ID          string          `json:"id"`
	Type        string          `json:"type"`
	ProcessedAt *string         `json:"processed_at"`
	Raw         json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the whole event too.
func (e *Event) UnmarshalJSON(b []byte) error {
	type plain Event
	if err := json.Unmarshal(b, (*plain)(e)); err != nil {
		return err
	}
	e.Raw = bytes.Clone(b)
	return nil
}

// Events lists all events of a session, oldest first.
func (a *API) Events(ctx context.Context, session string) ([]Event, error) {
	var all []Event
	page := ""
	for {
		q := url.Values{"order": {"asc"}, "limit": {"1000"}}
		if page != "" {
			q.Set("page", page)
		}
		var out struct {
			Data     []Event `json:"data"`
			NextPage *string `json:"next_page"`
		}
		if err := a.Do(ctx, http.MethodGet, "/v1/sessions/"+session+"/events?"+q.Encode(), nil, &out); err != nil {
			return nil, err
		}
		all = append(all, out.Data...)
		if out.NextPage == nil {
			return all, nil
		}
		page = *out.NextPage
	}
}

// EffectView is what tests read of an effect object.
type EffectView struct {
	ID      string          `json:"id"`
	Tool    string          `json:"tool"`
	Class   string          `json:"class"`
	State   string          `json:"state"`
	Outcome *string         `json:"outcome"`
	EventID *string         `json:"event_id"`
	Args    json.RawMessage `json:"arguments"`
	Session string          `json:"session_id"`
}

// Of is the id argument of an effect's call.
func (e EffectView) Of() string {
	var a struct {
		ID string `json:"id"`
	}
	_ = json.Unmarshal(e.Args, &a) // no object, no id
	return a.ID
}

// Effects lists a session's effects.
func (a *API) Effects(ctx context.Context, session string) ([]EffectView, error) {
	var all []EffectView
	page := ""
	for {
		q := url.Values{"limit": {"100"}}
		if page != "" {
			q.Set("page", page)
		}
		var out struct {
			Data     []EffectView `json:"data"`
			NextPage *string      `json:"next_page"`
		}
		if err := a.Do(ctx, http.MethodGet, "/v1/sessions/"+session+"/effects?"+q.Encode(), nil, &out); err != nil {
			return nil, err
		}
		all = append(all, out.Data...)
		if out.NextPage == nil {
			return all, nil
		}
		page = *out.NextPage
	}
}

// Send sends client events. With a key a repetition is safe.
func (a *API) Send(ctx context.Context, session, key string, events ...M) ([]Event, error) {
	var h []string
	if key != "" {
		h = []string{"Idempotency-Key", key}
	}
	var out struct {
		Data []Event `json:"data"`
	}
	err := a.Do(ctx, http.MethodPost, "/v1/sessions/"+session+"/events", M{"events": events}, &out, h...)
	return out.Data, err
}

// Message is a user.message event.
func Message(text string) M {
	return M{"type": "user.message", "content": []M{{"type": "text", "text": text}}}
}

// SessionView is what tests read of a session object.
type SessionView struct {
	ID     string `json:"id"`
	Status string `json:"status"`
}

// Session reads a session.
func (a *API) Session(ctx context.Context, id string) (SessionView, error) {
	var s SessionView
	return s, a.Do(ctx, http.MethodGet, "/v1/sessions/"+id, nil, &s)
}

// Frame is one frame of an event stream.
type Frame struct {
	ID    string // the id line, empty when there is none
	Name  string
	Data  []byte
	Event Event
}

// Stream is an open event stream.
type Stream struct {
	body io.ReadCloser
	r    *bufio.Reader
}

// Stream opens a session's event stream; after, if set, is the Last-Event-ID.
// It returns when the stream is live. ctx ends it.
func (a *API) Stream(ctx context.Context, session, after string) (*Stream, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.Base+"/v1/sessions/"+session+"/events/stream", nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+a.Key)
	if after != "" {
		req.Header.Set("Last-Event-ID", after)
	}
	resp, err := a.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 1000)) // shown only
		resp.Body.Close()
		return nil, &APIError{Status: resp.StatusCode, Message: string(b)}
	}
	return &Stream{body: resp.Body, r: bufio.NewReader(resp.Body)}, nil
}

// Close cuts the stream.
func (s *Stream) Close() { s.body.Close() }

// Next reads one frame; pings are left out.
func (s *Stream) Next() (Frame, error) {
	var f Frame
	for {
		line, err := s.r.ReadString('\n')
		if err != nil {
			return Frame{}, err // a frame without its blank line is no frame
		}
		line = strings.TrimRight(line, "\r\n")
		switch field, value, _ := strings.Cut(line, ":"); {
		case line == "":
			if f.Name == "" && len(f.Data) == 0 || f.Name == "ping" {
				f = Frame{}
				continue
			}
			if len(f.Data) > 0 {
				if err := json.Unmarshal(f.Data, &f.Event); err != nil {
					return f, fmt.Errorf("frame %s: %w", f.Name, err)
				}
			}
			return f, nil
		case field == "id":
			f.ID = strings.TrimPrefix(value, " ")
		case field == "event":
			f.Name = strings.TrimPrefix(value, " ")
		case field == "data":
			f.Data = append(f.Data, strings.TrimPrefix(value, " ")...)
		}
	}
}
