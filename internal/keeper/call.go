package keeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/planaria/planaria/internal/effect"
	"github.com/planaria/planaria/internal/vault"
)

// Request is a ruled call, ready to be sent.
type Request struct {
	Tool      string
	ToolHash  string // the definition that was ruled; empty: not checked
	Arguments json.RawMessage
	// Header and Key carry an idempotency key where the contract wants one in a header.
	Header, Key string
	Timeout     time.Duration
}

// call is one tools/call that may leave. What happened to it is read from the
// wire; what the SDK says about it is not consulted (trap P3).
type call struct {
	req  Request
	line *line
	gate func() error    // right before the first byte
	ctx  context.Context // ends a read; a non-read runs to its deadline

	claimed atomic.Bool   // a request has taken this call, or it was given up
	done    chan struct{} // closed when that request is over; then the rest may be read
	reply   effect.Reply
	start   time.Time
	elapsed time.Duration
}

func newCall(ctx context.Context, req Request, l *line, gate func() error) *call {
	return &call{req: req, line: l, gate: gate, ctx: ctx, done: make(chan struct{})}
}

type callKey struct{}

// claim lets exactly one request have the call.
func (c *call) claim() bool { return c.claimed.CompareAndSwap(false, true) }

// send makes the one tools/call of cl over the SDK's session.
func (c *conn) send(cl *call) effect.Reply {
	ctx := context.WithValue(context.WithoutCancel(cl.ctx), callKey{}, cl)
	var err error
	// Another call on this connection may have found it dead since ours was prepared.
	if s := c.session.Load(); s != nil {
		_, err = s.CallTool(ctx, &mcp.CallToolParams{Name: cl.req.Tool, Arguments: cl.req.Arguments})
	}
	if cl.claim() {
		// The SDK never came to sending: its session is closed.
		cl.line.raw.Conn.Close()
		c.k.drop(c)
		return effect.Reply{Unsent: fmt.Sprintf("not sent: %v", c.clean(errOr(err, "the session is closed")))}
	}
	<-cl.done
	c.touch()
	return cl.reply
}

func errOr(err error, text string) error {
	if err != nil {
		return err
	}
	return errors.New(text)
}

// sendCall is RoundTrip for a tools/call. The SDK always gets an answer that
// leaves its session whole; the truth goes into the call.
func (c *conn) sendCall(req, out *http.Request, msg message) (*http.Response, error) {
	cl, _ := req.Context().Value(callKey{}).(*call)
	if cl == nil || !cl.claim() {
		return nil, effect.ErrSpent // traps P1, P2: nobody allowed this send
	}
	defer close(cl.done)
	// The header says what the body says, or it is not our request (attack M6).
	for h, want := range map[string]string{"Mcp-Name": msg.Params.Name, "Mcp-Method": methodCall} {
		if v := out.Header.Get(h); v != "" && v != want {
			cl.reply = effect.Reply{Unsent: "not sent: header and body name different calls"}
			return over(req, msg), nil
		}
	}
	if msg.Params.Name != cl.req.Tool {
		cl.reply = effect.Reply{Unsent: "not sent: another tool than was ruled"}
		return over(req, msg), nil
	}
	if cl.req.Header != "" {
		if err := errors.Join(vault.CheckHeaderName(cl.req.Header), vault.CheckHeaderValue(cl.req.Key)); err != nil {
			cl.reply = effect.Reply{Unsent: "not sent: the idempotency header cannot be written"}
			return over(req, msg), nil
		}
		out.Header.Set(cl.req.Header, cl.req.Key)
	}
	cl.reply = c.exchangeCall(cl, out, msg)
	if cl.reply.Status == http.StatusNotFound && out.Header.Get("Mcp-Session-Id") != "" {
		c.k.drop(c) // session gone: told apart from "may have run" by its status
	}
	if s := cl.reply.Status; s == http.StatusUnauthorized || s == http.StatusForbidden {
		c.k.drop(c)
	}
	return over(req, msg), nil
}

// over tells the SDK that the exchange has ended; it is not told how.
func over(req *http.Request, msg message) *http.Response {
	body := []byte(`{"jsonrpc":"2.0","id":` + string(msg.ID) + `,"error":{"code":-32000,"message":"the exchange is over"}}`)
	return answer{status: http.StatusOK, header: http.Header{}, body: body}.response(req)
}

// exchangeCall sends the request and says what came back.
func (c *conn) exchangeCall(cl *call, out *http.Request, msg message) effect.Reply {
	wire, err := wireForm(out)
	if err != nil {
		return effect.Reply{Unsent: "not sent: the request cannot be written"}
	}
	cl.start = time.Now()
	a, left, keep, err := cl.line.exchange(cl.ctx, wire, cl.start.Add(cl.req.Timeout), cl.gate, c.reader(cl.ctx, out, msg.ID))
	cl.elapsed = time.Since(cl.start)
	if keep {
		c.keep(cl.line)
	} else if err != nil {
		cl.line.raw.Conn.Close()
	}
	if err != nil && !left {
		return effect.Reply{Unsent: "not sent: " + unsentText(err)}
	}
	r := effect.Reply{Status: a.status}
	if err != nil {
		r.Lost = lostText(err, cl.req.Timeout)
		return r
	}
	if a.status < 200 || a.status > 299 {
		return r
	}
	c.readReply(&r, a.body, msg.ID)
	return r
}

// readReply takes the tool's answer out of a 2xx body.
func (c *conn) readReply(r *effect.Reply, body, id json.RawMessage) {
	m, err := readMessage(c.scrub(body))
	switch {
	case err != nil:
		r.Lost = err.Error()
	case !sameID(m.ID, id):
		r.Lost = "the answer is to another request"
	case m.Error != nil:
		r.Code, r.Message = m.Error.Code, Plain(m.Error.Message)
		if r.Code == 0 {
			r.Lost = "an error without a code"
		}
	default:
		r.Result, r.Lost = fullAnswer(m.Result)
	}
}

// fullAnswer returns a tool's result, or why it is not a full answer. A server
// that asks for input has not answered, and is never called again for it
// (trap P2, attack E3).
func fullAnswer(raw json.RawMessage) (json.RawMessage, string) {
	var res map[string]json.RawMessage
	if err := json.Unmarshal(raw, &res); err != nil || res == nil {
		return nil, "the answer has no result"
	}
	kind := ""
	if t, ok := res["resultType"]; ok && json.Unmarshal(t, &kind) != nil {
		return nil, "the answer's kind is unreadable"
	}
	if _, asks := res["inputRequests"]; asks || kind == "input_required" {
		return nil, "the server asks for input instead of answering"
	}
	if kind != "" && kind != "complete" {
		return nil, "the answer is of a kind that we do not know"
	}
	_, content := res["content"]
	_, structured := res["structuredContent"]
	if _, task := res["task"]; task && !content && !structured {
		return nil, "the server made a task of the call instead of answering"
	}
	return raw, ""
}

// unsentText says why nothing left.
func unsentText(err error) string {
	switch {
	case errors.Is(err, effect.ErrTooLate):
		return "the time to send it was over"
	case errors.Is(err, effect.ErrSpent):
		return "it was allowed to be sent once"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "cancelled"
	}
	return "the connection closed before the first byte"
}

// lostText says why there is no answer, in words without anything of the server's.
func lostText(err error, timeout time.Duration) string {
	var ne net.Error
	switch {
	case errors.Is(err, errTooLarge):
		return fmt.Sprintf("the answer is larger than %d bytes", MaxAnswer)
	case errors.As(err, &ne) && ne.Timeout():
		return fmt.Sprintf("no answer within %v", timeout)
	case errors.Is(err, errNoAnswer):
		return errNoAnswer.Error()
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "the connection was cut before the answer was complete"
	}
	return "the answer is unreadable"
}
