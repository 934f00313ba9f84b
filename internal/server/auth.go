package server

import (
	"errors"
	"net/http"
	"strings"

	"github.com/planaria/planaria/api"
	"github.com/planaria/planaria/internal/policy"
	"github.com/planaria/planaria/internal/store"
)

// maxKey is the longest API key that is looked up.
const maxKey = 512

// keyOf reads the API key of a request: the bearer token of Authorization, else
// x-api-key (reference section 1.1).
func keyOf(r *http.Request) string {
	if h := r.Header.Get("Authorization"); h != "" {
		scheme, token, ok := strings.Cut(h, " ")
		if ok && strings.EqualFold(scheme, "bearer") {
			return strings.TrimSpace(token)
		}
	}
	return r.Header.Get("x-api-key")
}

// whoIs looks the key up in the store, each time: a revoked key is dead at once.
func (s *server) whoIs(r *http.Request) (Caller, error) {
	key := keyOf(r)
	if key == "" {
		return Caller{}, api.NewError(api.ErrAuthentication, "no API key; send it as Authorization: Bearer or x-api-key")
	}
	bad := api.NewError(api.ErrAuthentication, "the API key is not valid")
	if len(key) > maxKey {
		return Caller{}, bad
	}
	k, err := s.db.APIKeyOf(r.Context(), key)
	if errors.Is(err, store.ErrNotFound) {
		return Caller{}, bad
	}
	if err != nil {
		return Caller{}, err
	}
	return Caller{KeyID: k.ID, Principal: policy.Principal{ID: string(k.ID), Workspace: string(k.Workspace), Role: policy.Role(k.Role)}}, nil
}
