package api

import (
	"context"
	"iter"
	"net/url"
)

// AllWorkspaceEffects walks the effects of all sessions of the workspace.
func (c *Client) AllWorkspaceEffects(ctx context.Context, p EffectListParams) iter.Seq2[Effect, error] {
	return all[Effect](ctx, c, "/v1/effects", p.Query())
}

// AllApprovals walks the effects that wait for a person, oldest first.
func (c *Client) AllApprovals(ctx context.Context) iter.Seq2[Effect, error] {
	return all[Effect](ctx, c, "/v1/approvals", url.Values{})
}

// ApprovalAnswer is the body of POST /v1/approvals/{effect}.
type ApprovalAnswer struct {
	Result      string  `json:"result"` // allow, deny
	DenyMessage *string `json:"deny_message,omitzero"`
}

// AnswerApproval allows or denies an effect that waits for a person.
// denyMessage, which the agent is told, may be empty.
func (c *Client) AnswerApproval(ctx context.Context, effect string, allow bool, denyMessage string) (Effect, error) {
	in := ApprovalAnswer{Result: ResultAllow}
	if !allow {
		in.Result = ResultDeny
		if denyMessage != "" {
			in.DenyMessage = &denyMessage
		}
	}
	return post[Effect](ctx, c, "/v1/approvals/"+pathID(effect), in)
}
