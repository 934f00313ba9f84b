package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/store"
)

// call is one request on its way through the wrapper.
type call struct {
	caller  Caller
	request string // request id
	r       *http.Request
	w       http.ResponseWriter // for stream handlers only
	body    []byte
	once    *store.Once // nil where nothing is kept: GET, DELETE
	kept    jsonRaw     // for again: what the record of the first request kept
	leave   func()      // ends this request's flight; nil when there is none
	upload  *upload     // what receive took; nil for other routes
	drop    func()      // removes what receive took and nobody used; nil when there is nothing
	query   query
}

// id is a part of the path. One that no id of ours can be (it would trouble
// the store) is replaced by one that nothing has.
func (c *call) id(name string) string { return plainID(c.r.PathValue(name)) }

// maxID is the longest id or name that is looked up.
const maxID = 512

func plainID(s string) string {
	bad := func(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) }
	if s == "" || len(s) > maxID || strings.ContainsFunc(s, bad) {
		return "-"
	}
	return s
}

// keeps sets what of a write its own transaction keeps for repetitions: the
// answer, or what the route's again reads it by.
func (c *call) keeps(f func(result any) (any, error)) {
	if c.once == nil {
		return
	}
	c.once.Answer = func(result any) (jsonRaw, error) {
		v, err := f(result)
		if err != nil || v == nil {
			return nil, err
		}
		return api.Encode(v)
	}
}

// reply is an encoded answer.
type reply struct {
	body     []byte
	replayed bool
}

// serve is the one wrapper around every route: request id, authentication,
// policy, body, idempotency, operation, answer.
func (s *server) serve(r route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		id := w.Header().Get(requestID)
		defer s.recovered(w, req, id)
		c := &call{request: id, r: req, query: query{values: req.URL.Query()}}
		defer func() {
			if c.leave != nil {
				c.leave()
			}
			if c.drop != nil {
				c.drop()
			}
		}()
		var err error
		if c.caller, err = s.cfg.WhoIs(req); err != nil {
			s.fail(w, c, err)
			return
		}
		w.Header().Set("anthropic-workspace-id", c.caller.Workspace)
		if asked := req.Header.Get("anthropic-workspace-id"); asked != "" && asked != c.caller.Workspace {
			s.fail(w, c, api.NewError(api.ErrPermission, "the API key does not belong to the workspace named by anthropic-workspace-id; leave the header out"))
			return
		}
		ctx := req.Context()
		if err := s.authorise(ctx, c, r); err != nil {
			s.fail(w, c, err)
			return
		}
		if r.stream {
			c.w = w
			if _, err := r.handle(ctx, c); err != nil {
				s.fail(w, c, err)
			}
			return
		}
		if r.receive != nil {
			err = r.receive(w, c)
		} else {
			c.body, err = s.readBody(w, req)
		}
		if err != nil {
			s.fail(w, c, err)
			return
		}
		ctx, cancel := context.WithTimeout(ctx, AnswerTimeout)
		defer cancel()
		out, err := s.answer(ctx, c, r)
		if err != nil {
			s.fail(w, c, err)
			return
		}
		s.send(w, c, out)
	})
}

// authorise asks policy. Rows are looked up in the caller's workspace only, so
// that is the resource's workspace. A refusal is an audit row before it is an answer.
func (s *server) authorise(ctx context.Context, c *call, r route) error {
	res := policy.Resource{Workspace: c.caller.Workspace, ID: lastID(r.pattern, c)}
	err := policy.Check(c.caller.Principal, r.action, res)
	if err == nil {
		return nil
	}
	detail, eerr := api.Encode(map[string]string{"refused": err.Error(), "request_id": c.request, "route": r.pattern})
	if eerr != nil {
		return eerr
	}
	if aerr := s.db.Record(context.WithoutCancel(ctx), store.Act{Workspace: c.caller.ws(), Node: s.cfg.Node,
		Principal: c.caller.ID, Action: string(r.action), Resource: res.ID, Detail: detail}); aerr != nil {
		return aerr
	}
	return err
}

// lastID is the last id in the path: what the action is asked on.
func lastID(pattern string, c *call) string {
	open := strings.LastIndexByte(pattern, '{')
	if open < 0 {
		return ""
	}
	name, _, _ := strings.Cut(pattern[open+1:], "}")
	return c.id(name)
}

func (s *server) readBody(w http.ResponseWriter, req *http.Request) ([]byte, error) {
	if req.Method == http.MethodGet || req.Method == http.MethodHead {
		return nil, nil
	}
	if req.ContentLength > s.cfg.MaxBody {
		return nil, tooLarge(s.cfg.MaxBody)
	}
	var b bytes.Buffer
	if _, err := io.Copy(&b, http.MaxBytesReader(w, req.Body, s.cfg.MaxBody)); err != nil {
		var over *http.MaxBytesError
		if errors.As(err, &over) {
			return nil, tooLarge(s.cfg.MaxBody)
		}
		return nil, api.Invalid("", "the request body could not be read to its end")
	}
	return b.Bytes(), nil
}

func tooLarge(limit int64) error {
	return api.NewError(api.ErrTooLarge, "the request body is larger than %d bytes", limit)
}

// answer runs the operation: a POST under its idempotency record, a write with
// its audit row.
func (s *server) answer(ctx context.Context, c *call, r route) (reply, error) {
	write := c.r.Method != http.MethodGet && c.r.Method != http.MethodHead
	if write && !r.logged {
		detail, err := api.Encode(map[string]string{"request_id": c.request, "route": r.pattern})
		if err != nil {
			return reply{}, err
		}
		ctx = store.WithAct(ctx, store.Act{Workspace: c.caller.ws(), Node: s.cfg.Node, Principal: c.caller.ID,
			Action: string(r.action), Resource: lastID(r.pattern, c), Detail: detail})
	}
	if c.r.Method == http.MethodPost {
		return s.onceOnly(ctx, c, r)
	}
	return s.run(ctx, c, r.handle)
}

func (s *server) run(ctx context.Context, c *call, h handler) (reply, error) {
	v, err := h(ctx, c)
	if err != nil {
		return reply{}, err
	}
	body, err := api.Encode(v)
	if err != nil {
		return reply{}, fmt.Errorf("encode answer: %w", err)
	}
	return reply{body: body}, nil
}

// send writes an answer. When the client is gone, its retry gets the answer
// that it did not see.
func (s *server) send(w http.ResponseWriter, c *call, out reply) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(out.body)))
	if out.replayed {
		h.Set("idempotent-replayed", "true")
	}
	_, err := w.Write(out.body)
	if err == nil {
		err = http.NewResponseController(w).Flush()
	}
	if err == nil || errors.Is(err, http.ErrNotSupported) {
		err = c.r.Context().Err()
	}
	if err != nil && c.once != nil {
		s.unanswered(c)
	}
}

// recovered turns a panic of one request into a 500 and leaves the others alone.
func (s *server) recovered(w http.ResponseWriter, req *http.Request, id string) {
	p := recover()
	if p == nil {
		return
	}
	if p == http.ErrAbortHandler {
		panic(p)
	}
	s.log.Error("request panicked", "request", id, "method", req.Method, "path", req.URL.Path, "err", fmt.Sprint(p), "stack", string(debug.Stack()))
	s.writeError(w, id, internalError())
}

func (s *server) unknownPath(w http.ResponseWriter, req *http.Request) {
	id := w.Header().Get(requestID)
	var allow []string
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodDelete} {
		other := req.Clone(req.Context())
		other.Method = method
		if _, pattern := s.mux.Handler(other); pattern != "/" && pattern != "" {
			allow = append(allow, method)
		}
	}
	if len(allow) > 0 {
		w.Header().Set("Allow", strings.Join(allow, ", "))
		s.writeError(w, id, &api.Error{Status: http.StatusMethodNotAllowed, Type: api.ErrInvalidRequest,
			Message: fmt.Sprintf("%s is not possible on %s; use %s", req.Method, req.URL.Path, strings.Join(allow, " or "))})
		return
	}
	s.writeError(w, id, api.NewError(api.ErrNotFound, "no such path: %s", req.URL.Path))
}

func (s *server) healthz(w http.ResponseWriter, req *http.Request) {
	body, err := api.Encode(map[string]string{"status": "ok", "version": s.cfg.Version, "node": string(s.cfg.Node)})
	if err != nil {
		s.writeError(w, w.Header().Get(requestID), internalError())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body)
}

// readyTimeout bounds the question whether the process is ready.
const readyTimeout = 3 * time.Second

func (s *server) readyz(w http.ResponseWriter, req *http.Request) {
	ctx, cancel := context.WithTimeout(req.Context(), readyTimeout)
	defer cancel()
	ready := s.cfg.Ready
	if ready == nil {
		ready = s.db.Ping
	}
	if err := ready(ctx); err != nil {
		s.log.Warn("not ready", "err", err)
		s.writeError(w, w.Header().Get(requestID), &api.Error{Status: http.StatusServiceUnavailable, Type: api.ErrAPI, Message: "not ready"})
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write([]byte(`{"status":"ready"}`))
}
