package testenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
)

// Person does what a client and an operator do: answers approvals and custom
// tools, and settles what is in doubt by looking at what really happened.
type Person struct {
	API   *API
	World *Outside
	// Deny, if set, says which calls are denied.
	Deny func(EffectView) bool
}

// Stop is why a session rests.
type Stop struct {
	Type     string   `json:"type"`
	EventIDs []string `json:"event_ids"`
}

// Rested reads why a session rests; ok is false while it does not.
func (a *API) Rested(ctx context.Context, id string) (Stop, bool, error) {
	s, err := a.Session(ctx, id)
	if err != nil || s.Status != "idle" {
		return Stop{}, false, err
	}
	q := url.Values{"types[]": {"session.status_idle"}, "order": {"desc"}, "limit": {"1"}}
	var out struct {
		Data []Event `json:"data"`
	}
	if err := a.Do(ctx, http.MethodGet, "/v1/sessions/"+id+"/events?"+q.Encode(), nil, &out); err != nil || len(out.Data) == 0 {
		return Stop{}, false, err
	}
	return stopOf(out.Data[0])
}

func stopOf(e Event) (Stop, bool, error) {
	var b struct {
		StopReason Stop `json:"stop_reason"`
	}
	if err := json.Unmarshal(e.Raw, &b); err != nil {
		return Stop{}, false, fmt.Errorf("read %s: %w", e.Type, err)
	}
	return b.StopReason, true, nil
}

// Await waits until a session rests and says why.
func (a *API) Await(ctx context.Context, id string) (Stop, error) {
	s, err := a.Stream(ctx, id, "")
	if err != nil {
		return Stop{}, err
	}
	defer s.Close()
	for {
		// The stream is live: what it does not bring from now on is in the list.
		if stop, ok, err := a.Rested(ctx, id); err != nil || ok {
			return stop, err
		}
		for {
			f, err := s.Next()
			if err != nil {
				return Stop{}, fmt.Errorf("stream of %s: %w", id, err)
			}
			if f.Name == "session.status_idle" || f.Name == "session.status_terminated" {
				break
			}
		}
	}
}

// Finish brings a session to the end of its turn, answering what it asks.
func (p *Person) Finish(ctx context.Context, id string) (Stop, error) {
	for {
		stop, err := p.API.Await(ctx, id)
		if err != nil {
			return Stop{}, err
		}
		if stop.Type != "requires_action" {
			return stop, nil
		}
		if err := p.Answer(ctx, id, stop); err != nil {
			return Stop{}, err
		}
	}
}

// Answer answers what a session that rests with requires_action asks.
func (p *Person) Answer(ctx context.Context, id string, stop Stop) error {
	effects, err := p.API.Effects(ctx, id)
	if err != nil {
		return err
	}
	if len(stop.EventIDs) == 0 {
		return fmt.Errorf("session %s requires action and names nothing", id)
	}
	for _, event := range stop.EventIDs {
		var e *EffectView
		for i := range effects {
			if effects[i].EventID != nil && *effects[i].EventID == event {
				e = &effects[i]
			}
		}
		if e == nil {
			return fmt.Errorf("session %s waits for %s, which has no effect", id, event)
		}
		if err := p.answer(ctx, id, event, *e); err != nil && !over(err) {
			return fmt.Errorf("answer %s (%s, %s): %w", event, e.Tool, e.State, err)
		}
	}
	return nil
}

func (p *Person) answer(ctx context.Context, id, event string, e EffectView) error {
	switch {
	case e.State == "awaiting_approval":
		c := M{"type": "user.tool_confirmation", "tool_use_id": event, "result": "allow"}
		if p.Deny != nil && p.Deny(e) {
			c["result"], c["deny_message"] = "deny", "not today"
		}
		_, err := p.API.Send(ctx, id, "", c)
		return err
	case e.State == "in_doubt":
		outcome := "did_not_happen"
		if p.World.Executions(e.Tool, e.Of()) > 0 {
			outcome = "happened"
		}
		return p.API.Do(ctx, http.MethodPost, "/v1/effects/"+e.ID+"/settle", M{"outcome": outcome}, nil)
	case e.State == "intended":
		_, err := p.API.Send(ctx, id, "", M{"type": "user.custom_tool_result", "custom_tool_use_id": event,
			"content": []M{{"type": "text", "text": "done by the client"}}})
		return err
	}
	return nil // it moved on while we looked
}

// over says that an answer came too late to matter: the call is closed or was
// answered already.
func over(err error) bool {
	var e *APIError
	return errors.As(err, &e) && e.Status == http.StatusBadRequest
}
