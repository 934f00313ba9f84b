package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// ErrorType is the "type" of an error on the wire (reference section 1.5).
type ErrorType string

// The error types.
const (
	ErrInvalidRequest ErrorType = "invalid_request_error"
	ErrAuthentication ErrorType = "authentication_error"
	ErrBilling        ErrorType = "billing_error"
	ErrPermission     ErrorType = "permission_error"
	ErrNotFound       ErrorType = "not_found_error"
	ErrConflict       ErrorType = "conflict_error"
	ErrTooLarge       ErrorType = "request_too_large"
	ErrRateLimit      ErrorType = "rate_limit_error"
	ErrAPI            ErrorType = "api_error"
	ErrTimeout        ErrorType = "timeout_error"
	ErrOverloaded     ErrorType = "overloaded_error"
)

// Error codes that this server uses (reference section 1.5).
const (
	CodeEnvironmentArchived     = "environment_archived"
	CodeInvalidConfigTypeChange = "invalid_config_type_change"
	CodeInvalidMetadata         = "invalid_metadata"
	CodeEnvironmentNotFound     = "environment_not_found"
	CodeBodyTooLarge            = "request_body_too_large_after_decoding"
	CodeAgentModelRequired      = "agent_model_required"
	CodeBudgetCreateOnly        = "budget_create_only"
	CodeBudgetNotRaised         = "budget_not_raised"
	CodeModelNotBudgetable      = "model_not_budgetable"
	CodeNoSystemTurns           = "model_does_not_support_mid_conversation_system"
)

// ErrorDetails is the optional part of an error.
type ErrorDetails struct {
	ErrorCode string `json:"error_code,omitzero"`
	// Field is the path of the field that was refused; an extension.
	Field string `json:"field,omitzero"`
}

// Error is an error of the API, on both sides: the server encodes it in an
// ErrorBody, the client returns it. errors.As finds it.
type Error struct {
	Status    int           `json:"-"` // HTTP status
	Type      ErrorType     `json:"type"`
	Message   string        `json:"message"`
	Details   *ErrorDetails `json:"details,omitzero"`
	RequestID string        `json:"-"` // on the wire it stands in the ErrorBody
	// RetryAfter is the server's hint, 0 when there is none.
	RetryAfter time.Duration `json:"-"`
}

// Error is the message with what is needed to find it again.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Message)
	fmt.Fprintf(&b, " (%s", e.Type)
	if e.Status != 0 {
		fmt.Fprintf(&b, ", status %d", e.Status)
	}
	if e.RequestID != "" {
		fmt.Fprintf(&b, ", request %s", e.RequestID)
	}
	b.WriteByte(')')
	return b.String()
}

// Code is the error code, empty when there is none.
func (e *Error) Code() string {
	if e.Details == nil {
		return ""
	}
	return e.Details.ErrorCode
}

// Field is the path of the field that was refused, empty when there is none.
func (e *Error) Field() string {
	if e.Details == nil {
		return ""
	}
	return e.Details.Field
}

func (e *Error) withCode(code string) *Error {
	if e.Details == nil {
		e.Details = &ErrorDetails{}
	}
	e.Details.ErrorCode = code
	return e
}

// ErrorBody is the envelope of an error, in answers and in "error" frames of streams.
type ErrorBody struct {
	Type      string `json:"type"`
	Error     Error  `json:"error"`
	RequestID string `json:"request_id"`
}

// MarshalJSON sets the envelope's type.
func (b ErrorBody) MarshalJSON() ([]byte, error) {
	type shadow ErrorBody
	b.Type = "error"
	if b.Error.Type == "" {
		b.Error.Type = ErrAPI
	}
	return Encode(shadow(b))
}

// Body is the envelope of e under a request id.
func (e *Error) Body(requestID string) ErrorBody {
	return ErrorBody{Type: "error", Error: *e, RequestID: requestID}
}

// NewError makes an error of a type with the status that belongs to it.
func NewError(t ErrorType, format string, args ...any) *Error {
	return &Error{Status: statusOf(t), Type: t, Message: fmt.Sprintf(format, args...)}
}

// Coded is NewError with an error code.
func Coded(t ErrorType, code, format string, args ...any) *Error {
	return NewError(t, format, args...).withCode(code)
}

// Invalid is a 400 that names the field by its path; an empty path means the
// request as a whole.
func Invalid(path, format string, args ...any) *Error {
	e := NewError(ErrInvalidRequest, format, args...)
	if path != "" {
		e.Message = path + ": " + e.Message
		e.Details = &ErrorDetails{Field: path}
	}
	return e
}

// Missing is the 404 of an object. A foreign id gets the same answer as an
// unknown one.
func Missing(kind, id string) *Error {
	return NewError(ErrNotFound, "%s %q not found", kind, short(id))
}

func statusOf(t ErrorType) int {
	switch t {
	case ErrInvalidRequest:
		return http.StatusBadRequest
	case ErrAuthentication:
		return http.StatusUnauthorized
	case ErrBilling:
		return http.StatusPaymentRequired
	case ErrPermission:
		return http.StatusForbidden
	case ErrNotFound:
		return http.StatusNotFound
	case ErrConflict:
		return http.StatusConflict
	case ErrTooLarge:
		return http.StatusRequestEntityTooLarge
	case ErrRateLimit:
		return http.StatusTooManyRequests
	case ErrTimeout:
		return http.StatusGatewayTimeout
	case ErrOverloaded:
		return 529
	}
	return http.StatusInternalServerError
}

func typeOf(status int) ErrorType {
	for _, t := range []ErrorType{ErrAuthentication, ErrBilling, ErrPermission, ErrNotFound,
		ErrConflict, ErrTooLarge, ErrRateLimit, ErrTimeout, ErrOverloaded} {
		if statusOf(t) == status {
			return t
		}
	}
	if status >= 400 && status < 500 {
		return ErrInvalidRequest
	}
	return ErrAPI
}

// errorFromAnswer reads the error out of an answer that is not a success.
func errorFromAnswer(status int, h http.Header, body []byte) *Error {
	var b ErrorBody
	if err := json.Unmarshal(body, &b); err != nil || b.Error.Message == "" {
		b.Error = Error{Type: typeOf(status), Message: fmt.Sprintf("the server answered %d %s without a readable reason",
			status, http.StatusText(status))}
	}
	e := b.Error
	e.Status = status
	e.RequestID = h.Get("request-id")
	if e.RequestID == "" {
		e.RequestID = b.RequestID
	}
	e.RetryAfter = retryAfter(h)
	return &e
}
