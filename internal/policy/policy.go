// Package policy decides: principal, action and resource in; allow, ask or
// deny out, with the reason. It is pure: no I/O, no clock, no state, so equal
// questions have equal answers.
//
// Two questions are answered here. Decide says whether an API key may do an
// action of the REST API. Permit evaluates the permission policy of a tool
// call (Managed Agents API reference, section 11.3).
//
// Invariant: what is not known is denied. An unknown role, an unknown action,
// a missing workspace or an unknown policy type never allows anything.
//
// It does not authenticate, keeps no grants and writes no audit rows; its
// callers do.
package policy

import (
	"errors"
	"fmt"
)

// Verdict is what a decision says.
type Verdict string

// The verdicts. The zero value is none of them and means nothing allowed.
const (
	Allow Verdict = "allow"
	Ask   Verdict = "ask"
	Deny  Verdict = "deny"
)

// Decision is the answer to a question, with the rule that gave it.
type Decision struct {
	Verdict Verdict
	Reason  string // a phrase for people; names the rule and holds nothing of the arguments
}

// Principal is who asks. Key and session ids stand here as text, since policy
// imports no package of ours.
type Principal struct {
	ID        string // "apikey_…"
	Workspace string // the workspace that the key belongs to
	Role      Role
}

// Resource is what an action is asked on.
type Resource struct {
	Workspace string // whose it is; the caller fills it from its own row, not from the request
	ID        string // empty for lists and creations
}

// ErrDenied is what every *DeniedError unwraps to.
var ErrDenied = errors.New("denied")

// DeniedError is a refusal, with all that an audit row needs.
type DeniedError struct {
	Principal Principal
	Action    Action
	Resource  Resource
	Reason    string
}

// Error names who, what and why.
func (e *DeniedError) Error() string {
	on := ""
	if e.Resource.ID != "" {
		on = " on " + e.Resource.ID
	}
	return fmt.Sprintf("%s may not %s%s: %s", e.Principal.ID, e.Action, on, e.Reason)
}

// Unwrap returns ErrDenied.
func (e *DeniedError) Unwrap() error { return ErrDenied }

// Decide says whether p may do a on r. A resource of another workspace is
// denied whatever the role; the caller shows it as unknown (design L11).
func Decide(p Principal, a Action, r Resource) Decision {
	rule, known := rules[a]
	switch {
	case !known:
		return Decision{Deny, "unknown action"}
	case !p.Role.Valid():
		return Decision{Deny, "unknown role"}
	case p.Workspace == "" || r.Workspace == "":
		return Decision{Deny, "no workspace"}
	case p.Workspace != r.Workspace && !rule.installation:
		return Decision{Deny, "resource of another workspace"}
	case rule.installation && p.Workspace != HomeWorkspace:
		return Decision{Deny, "only keys of the workspace " + HomeWorkspace + " act on the whole installation"}
	case !rule.roles.has(p.Role):
		return Decision{Deny, fmt.Sprintf("role %s does not include %s", p.Role, a)}
	}
	return Decision{Allow, fmt.Sprintf("role %s includes %s", p.Role, a)}
}

// Check is Decide as an error: nil when allowed, else a *DeniedError. A caller
// that can put a question to a person uses Decide.
func Check(p Principal, a Action, r Resource) error {
	d := Decide(p, a, r)
	if d.Verdict == Allow {
		return nil
	}
	return &DeniedError{Principal: p, Action: a, Resource: r, Reason: d.Reason}
}
