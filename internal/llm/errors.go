package llm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// maxRetryAfter bounds a server's retry hint: a larger one is taken as this,
// so that a hostile hint cannot park a session for ever.
const maxRetryAfter = time.Hour

// envelope is the error body of the Messages API; Chat Completions has the
// inner object with code and type in other words.
type envelope struct {
	Error struct {
		Type    string          `json:"type"`
		Message string          `json:"message"`
		Code    json.RawMessage `json:"code"`
		Details struct {
			ErrorCode string `json:"error_code"`
		} `json:"details"`
	} `json:"error"`
	RequestID string `json:"request_id"`
}

func (e envelope) code() string {
	var s string
	if json.Unmarshal(e.Error.Code, &s) == nil {
		return s
	}
	return strings.Trim(string(e.Error.Code), `"`)
}

func requestID(h http.Header) string {
	if id := h.Get("request-id"); id != "" {
		return clip(id, 200)
	}
	return clip(h.Get("x-request-id"), 200)
}

func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

// retryAfter reads the retry hint of an answer: milliseconds, seconds or a date.
func retryAfter(h http.Header, now time.Time) (time.Duration, bool) {
	bound := func(d time.Duration) (time.Duration, bool) {
		return min(max(d, 0), maxRetryAfter), true
	}
	for _, f := range []struct {
		name string
		unit time.Duration
	}{{"retry-after-ms", time.Millisecond}, {"retry-after", time.Second}} {
		v := strings.TrimSpace(h.Get(f.name))
		if n, err := strconv.ParseFloat(v, 64); err == nil && n >= 0 {
			if n > maxRetryAfter.Seconds()*1000 {
				return maxRetryAfter, true
			}
			return bound(time.Duration(n * float64(f.unit)))
		}
		if t, err := http.ParseTime(v); err == nil {
			return bound(t.Sub(now))
		}
	}
	return 0, false
}

// tooLong tells the refusals that mean "the conversation does not fit" from
// other refusals; the APIs have no type of their own for it.
func tooLong(code, message string) bool {
	if code == "context_length_exceeded" {
		return true
	}
	m := strings.ToLower(message)
	for _, s := range []string{
		"prompt is too long", "exceed context limit", "exceeds context limit",
		"exceeds the context window", "exceed the context window", "exceeds the model's context",
		"maximum context length", "context length exceeded", "exceeds the available context size",
	} {
		if strings.Contains(m, s) {
			return true
		}
	}
	return false
}

// classifyType maps an error type of the Messages API (reference section 1.5)
// to a kind; it is all that a mid-stream error tells.
func classifyType(typ string) (kind ErrorKind, retryable bool) {
	switch typ {
	case "overloaded_error":
		return ErrOverloaded, true
	case "rate_limit_error":
		return ErrRateLimited, true
	case "billing_error":
		return ErrBilling, false
	case "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large":
		return ErrRequest, false
	}
	return ErrServer, true // api_error, timeout_error, conflict_error and what we do not know
}

// classifyStatus maps an answer that is not a 200 (reference sections 1.5, 22.5).
func classifyStatus(status int, h http.Header, body []byte) *Error {
	var env envelope
	_ = json.Unmarshal(body, &env) // an unreadable body leaves the status to speak
	e := &Error{Status: status, RequestID: requestID(h), Message: env.Error.Message}
	if e.RequestID == "" {
		e.RequestID = clip(env.RequestID, 200)
	}
	if e.Message == "" {
		e.Message = strings.TrimSpace(http.StatusText(status) + " " + clip(strings.TrimSpace(string(body)), 200))
	}
	hint := false
	e.RetryAfter, hint = retryAfter(h, time.Now())
	switch {
	case status >= 300 && status < 400:
		e.Kind, e.Message = ErrRequest, fmt.Sprintf("the server redirects (%d); redirects are not followed, correct the base url", status)
		return e
	case status == 529 || env.Error.Type == "overloaded_error":
		e.Kind, e.Retryable = ErrOverloaded, true
	case status == 402 || env.Error.Type == "billing_error":
		e.Kind = ErrBilling
	case status == 429:
		e.Kind, e.Retryable = ErrRateLimited, true
	case status == 408 || status == 409 || status >= 500:
		e.Kind, e.Retryable = ErrServer, true
	case status == 400 && tooLong(env.code(), env.Error.Message):
		e.Kind = ErrContextWindow
	default:
		e.Kind = ErrRequest
	}
	should := h.Get("x-should-retry")
	// A 429 of a spend cap comes without a hint, and retrying does not help.
	if e.Kind == ErrRateLimited && !hint && should != "true" && env.Error.Details.ErrorCode != "ramp_limit_exceeded" {
		e.Kind, e.Retryable = ErrBilling, false
	}
	switch should {
	case "true":
		e.Retryable = true
	case "false":
		e.Retryable = false
	}
	return e
}

// classifyOpenAI is classifyStatus with the differences of Chat Completions:
// a spent quota has a code, and compatible servers give no hint with a 429.
func classifyOpenAI(status int, h http.Header, body []byte) *Error {
	e := classifyStatus(status, h, body)
	var env envelope
	_ = json.Unmarshal(body, &env)
	quota := env.code() == "insufficient_quota" || env.Error.Type == "insufficient_quota"
	switch {
	case status == 429 && quota:
		e.Kind, e.Retryable = ErrBilling, false
	case status == 429:
		e.Kind, e.Retryable = ErrRateLimited, h.Get("x-should-retry") != "false"
	}
	return e
}

// finish completes the error of a call: who ended it, usage so far, and no
// credential in its text.
func finish(parent, ctx context.Context, err error, usage Usage, id, key string) *Error {
	var e *Error
	if !errors.As(err, &e) {
		e = &Error{Kind: ErrServer, Retryable: true, Message: err.Error(), Err: err}
		if errors.Is(err, errTooLarge) {
			e.Retryable = false // the same request would be paid again for the same end
		}
	}
	switch cause := context.Cause(ctx); {
	case parent.Err() != nil:
		e = &Error{Kind: ErrCancelled, Message: context.Cause(parent).Error(), Err: parent.Err()}
	case errors.Is(cause, errIdle), errors.Is(cause, errDeadline):
		e = &Error{Kind: ErrServer, Retryable: true, Message: cause.Error(), Err: cause}
	}
	if e.Usage == (Usage{}) {
		e.Usage = usage
	}
	if e.RequestID == "" {
		e.RequestID = id
	}
	if len(key) >= 6 && strings.Contains(e.Message, key) {
		e.Message = strings.ReplaceAll(e.Message, key, "REDACTED")
	}
	if e.Err != nil && len(key) >= 6 && strings.Contains(e.Err.Error(), key) {
		e.Err = errors.New(strings.ReplaceAll(e.Err.Error(), key, "REDACTED"))
	}
	e.Message = clip(e.Message, maxMessage)
	return e
}
