package server

import (
	"context"
	"errors"
	"net/http"
	"strconv"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/session"
	"github.com/planaria/planaria/internal/store"
)

// errorTable maps what operations return to the wire (reference section 1.5),
// first match wins. What is not here is a 500 that says nothing; a message here
// replaces the error's own text, which may name internals.
var errorTable = []struct {
	is      error
	typ     api.ErrorType
	message string
}{
	{store.ErrNotFound, api.ErrNotFound, "not found"},
	{store.ErrTerminated, api.ErrInvalidRequest, "the session is terminated and takes no input; create another one"},
	{store.ErrAnswered, api.ErrInvalidRequest, "this was answered before, with another answer; the first one holds"},
	{store.ErrArchived, api.ErrInvalidRequest, "archived; it takes no change"},
	{store.ErrFull, api.ErrInvalidRequest, "the vault holds its 20 credentials; archive one first"},
	{store.ErrLastAdmin, api.ErrInvalidRequest, "this is the last admin key of the workspace; create another one first"},
	{store.ErrDuplicate, api.ErrConflict, "one with this name or key exists already"},
	{store.ErrConflict, api.ErrConflict, "something changed meanwhile; read it again and repeat"},
	{store.ErrOwned, api.ErrConflict, "the session is being worked on; repeat in a moment"},
	{store.ErrDamaged, api.ErrAPI, "the stored data of this object is damaged and is refused; nothing else is touched; see planaria verify"},
	{store.ErrUnknown, api.ErrAPI, "the outcome of the write is unknown; repeat it with the same Idempotency-Key, or read before you repeat it"},
	{policy.ErrDenied, api.ErrPermission, ""},
	{session.ErrState, api.ErrInvalidRequest, ""},
	{session.ErrInput, api.ErrInvalidRequest, ""},
	{context.DeadlineExceeded, api.ErrTimeout, "the request took too long; it may still have been done"},
}

// wireError is the answer to an error; ok is false when it is an internal one.
func wireError(err error) (e *api.Error, ok bool) {
	var own *api.Error
	if errors.As(err, &own) {
		return own, true
	}
	var problem *session.Problem
	text, code := "", ""
	if errors.As(err, &problem) {
		text, code = problem.Text, problem.Code
	}
	var denied *policy.DeniedError
	if errors.As(err, &denied) {
		text = denied.Reason
	}
	for _, row := range errorTable {
		if !errors.Is(err, row.is) {
			continue
		}
		if text == "" {
			text = row.message
		}
		if text == "" {
			text = err.Error()
		}
		if code != "" {
			return api.Coded(row.typ, code, "%s", text), true
		}
		return api.NewError(row.typ, "%s", text), true
	}
	return internalError(), false
}

func internalError() *api.Error { return api.NewError(api.ErrAPI, "internal error") }

// fail answers with an error. A client that has gone gets nothing.
func (s *server) fail(w http.ResponseWriter, c *call, err error) {
	if errors.Is(err, context.Canceled) && c.r.Context().Err() != nil {
		if c.once != nil {
			s.unanswered(c)
		}
		return
	}
	e, ok := wireError(err)
	if !ok || e.Status >= http.StatusInternalServerError {
		s.log.Error("request failed", "request", c.request, "method", c.r.Method, "path", c.r.URL.Path,
			"principal", c.caller.ID, "err", err)
	}
	s.writeError(w, c.request, e)
}

// writeError writes the envelope, if no answer has begun.
func (s *server) writeError(w http.ResponseWriter, id string, e *api.Error) {
	body, err := api.Encode(e.Body(id))
	if err != nil {
		s.log.Error("encode error", "request", id, "err", err)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if e.Status == http.StatusConflict {
		// Official clients would repeat a 409 twice for nothing.
		h.Set("x-should-retry", "false")
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(body)
}
