package effect

import (
	"encoding/json"
	"fmt"
	"slices"
)

// Verdict is what an answer proves.
type Verdict string

// The verdicts. Refused: nothing happened. InDoubt: nobody can know yet.
const (
	OK      Verdict = "ok"
	Refused Verdict = "refused"
	InDoubt Verdict = "in_doubt"
)

// Reply is what came back from a target, as far as it was seen on the wire.
// The texts of a client library are never consulted (trap P3).
type Reply struct {
	// Unsent is set, with its reason, when the connection never existed or the
	// sender gave up before its first byte.
	Unsent string
	// Status is the HTTP status; 0 when none came.
	Status int
	// Code and Message are of a JSON-RPC error; Code 0 when none came.
	Code    int
	Message string
	// Result is the tool's full answer, a complete JSON-RPC result.
	Result json.RawMessage
	// Lost says why there is neither answer nor error: cut, timeout,
	// unreadable, oversized, input required.
	Lost string
}

// span is an inclusive range.
type span struct{ from, to int }

// refusedStatus lists the HTTP statuses by which a target says that it did
// nothing (design section 4). 408, 409, 425 and all of 5xx are not here: they
// also come after execution (attack E4).
var refusedStatus = []span{{400, 407}, {410, 424}, {426, 428}, {429, 429}, {431, 431}, {451, 451}}

// refusedCode lists the JSON-RPC errors that come before execution: parse
// error, invalid request, unknown method, invalid params.
var refusedCode = []int{-32700, -32600, -32601, -32602}

// RefusedStatus reports whether the status proves that nothing happened.
func RefusedStatus(status int) bool {
	return slices.ContainsFunc(refusedStatus, func(s span) bool { return s.from <= status && status <= s.to })
}

// Judge applies the outcome table to a reply, with a phrase that says why.
func (c Contract) Judge(r Reply) (Verdict, string) {
	switch {
	case r.Unsent != "":
		return Refused, r.Unsent
	case r.Status != 0 && c.preStatus(r.Status):
		return Refused, fmt.Sprintf("status %d, before execution by the contract", r.Status)
	case r.Code != 0 && c.preCode(r.Code):
		return Refused, fmt.Sprintf("error %d, before execution by the contract", r.Code)
	case r.Status != 0 && (r.Status < 200 || r.Status > 299):
		if RefusedStatus(r.Status) {
			return Refused, fmt.Sprintf("status %d", r.Status)
		}
		return InDoubt, fmt.Sprintf("status %d", r.Status)
	case r.Lost != "":
		return InDoubt, r.Lost
	case r.Code != 0:
		if slices.Contains(refusedCode, r.Code) {
			return Refused, fmt.Sprintf("error %d", r.Code)
		}
		return InDoubt, fmt.Sprintf("error %d", r.Code)
	case len(r.Result) == 0:
		return InDoubt, "no answer"
	case c.preResult(r.Result):
		return Refused, "the answer is an error before execution by the contract"
	}
	return OK, ""
}
