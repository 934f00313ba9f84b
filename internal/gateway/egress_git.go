package gateway

import (
	"context"
	"net/http"
)

const repositoryUse = "the session's repositories are fetched from http://" + RepositoryHost + "/{resource}, over plain HTTP through the proxy."

// repository serves a request for one of the session's repositories.
func (e *egress) repository(ctx context.Context, h *head, path string) bool {
	return e.refuse(h, &denial{status: http.StatusNotFound, token: "http_request_denied", text: repositoryUse})
}
