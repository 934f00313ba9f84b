package keeper

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// errNoAnswer: the body ended without the message that was asked for.
var errNoAnswer = errors.New("the answer ended before it was complete")

// maxAsked bounds the requests of a server that are answered within one exchange.
const maxAsked = 32

// askedTime bounds telling a server that we do not do what it asks.
const askedTime = 5 * time.Second

// reader returns the function that reads an answer's body: JSON whole, an
// event stream up to the message with our id. A server's own requests within
// the stream are refused (attack K13), pings answered.
func (c *conn) reader(ctx context.Context, out *http.Request, id json.RawMessage) readFunc {
	return func(resp *http.Response) ([]byte, bool, error) {
		kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
		if kind == "text/event-stream" && len(id) > 0 && resp.StatusCode < 300 {
			return c.readStream(ctx, out, resp.Body, id)
		}
		b, err := io.ReadAll(resp.Body)
		return b, err == nil, err
	}
}

// readStream reads server-sent events until the answer to id.
func (c *conn) readStream(ctx context.Context, out *http.Request, body io.Reader, id json.RawMessage) ([]byte, bool, error) {
	br := bufio.NewReader(body)
	var data []byte
	name, asked := "", 0
	for {
		text, err := br.ReadBytes('\n')
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errNoAnswer
			}
			return nil, false, err
		}
		text = bytes.TrimRight(text, "\r\n")
		if len(text) > 0 {
			field, value, _ := bytes.Cut(text, []byte(":"))
			value = bytes.TrimPrefix(value, []byte(" "))
			switch string(field) {
			case "data":
				if len(data) > 0 {
					data = append(data, '\n')
				}
				data = append(data, value...)
			case "event":
				name = string(value)
			}
			continue
		}
		event := data
		if name != "" && name != "message" {
			event = nil
		}
		data, name = nil, ""
		if len(event) == 0 {
			continue
		}
		m, err := readMessage(event)
		if err != nil {
			return nil, false, err
		}
		if m.Method == "" && sameID(m.ID, id) {
			return event, false, nil
		}
		if m.Method != "" && len(m.ID) > 0 {
			if asked++; asked > maxAsked {
				return nil, false, errors.New("the server asks too much")
			}
			c.decline(ctx, out, m)
		}
	}
}

// envelope is a JSON-RPC message that came in.
type envelope struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Result json.RawMessage `json:"result"`
	Error  *rpcError       `json:"error"`
}

type rpcError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// readMessage reads an envelope by its exact member names. Text that is not
// UTF-8 is mended rather than refused: an answer that can be read is an answer.
func readMessage(b []byte) (envelope, error) {
	var m envelope
	b = bytes.ToValidUTF8(b, []byte("\uFFFD"))
	if err := jsonv2.Unmarshal(b, &m, jsontext.AllowDuplicateNames(true)); err != nil {
		return m, fmt.Errorf("the answer is not a JSON-RPC message")
	}
	return m, nil
}

func sameID(a, b json.RawMessage) bool {
	return len(a) > 0 && string(bytes.TrimSpace(a)) == string(bytes.TrimSpace(b))
}

// decline answers a request of the server within a stream, on a line of its
// own, so that the server need not wait for ever.
func (c *conn) decline(ctx context.Context, out *http.Request, m envelope) {
	reply := map[string]any{"jsonrpc": "2.0", "id": m.ID}
	if m.Method == "ping" {
		reply["result"] = struct{}{}
	} else {
		reply["error"] = map[string]any{"code": -32601, "message": "not supported by this client"}
	}
	body, err := json.Marshal(reply)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askedTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, out.URL.String(), bytes.NewReader(body))
	if err != nil {
		return
	}
	req.GetBody = nil
	for _, h := range []string{"Content-Type", "Accept", "Accept-Encoding", "User-Agent", "Authorization", "Mcp-Protocol-Version", "Mcp-Session-Id"} {
		if v := out.Header.Get(h); v != "" {
			req.Header.Set(h, v)
		}
	}
	wire, err := wireForm(req)
	if err != nil {
		return
	}
	l, err := c.line(ctx)
	if err != nil {
		return
	}
	_, _, keep, _ := l.exchange(ctx, wire, time.Now().Add(askedTime), nil, c.reader(ctx, req, nil))
	if keep {
		c.keep(l)
	}
}
