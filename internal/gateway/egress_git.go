package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/planaria/planaria/internal/keeper"
)

const repositoryUse = "the session's repositories are fetched from http://" + RepositoryHost + "/{resource}, over plain HTTP through the proxy."

const (
	pathRefs  = "info/refs?service=git-upload-pack"
	pathFetch = "git-upload-pack"
)

// repository serves a request for one of the session's repositories: the two
// that read, of git's smart protocol. The keeper sends them with the token that
// the session has for it; the answer comes back without. Which of them a
// process may send is not ruled by the environment's networking: the session
// was given the repository.
func (e *egress) repository(ctx context.Context, h *head, path string) bool {
	name, rest, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	name = strings.TrimSuffix(name, ".git")
	repo := e.resource(name)
	refs, fetch := h.method == http.MethodGet && rest == pathRefs, h.method == http.MethodPost && rest == pathFetch
	no := &denial{status: http.StatusNotFound, token: "http_request_denied"}
	switch {
	case repo == nil:
		no.text = fmt.Sprintf("this session has no repository %.100q; %s", name, repositoryUse)
	case strings.Contains(rest, "git-receive-pack"):
		no.status, no.reason = http.StatusForbidden, "Pushing is not possible from this sandbox"
		no.text = "pushing from a sandbox is not possible yet: it comes with contracted hosts, where each push is an effect that can be ruled and approved. Fetching works."
	case h.minor == 0 || !refs && !fetch || refs && h.hasBody():
		no.text = "only git's smart protocol for fetching is served here; " + repositoryUse
	default:
		return e.fetch(ctx, h, *repo)
	}
	return e.refuse(h, no)
}

func (e *egress) resource(name string) *Repository {
	for i := range e.scope.Repositories {
		if r := &e.scope.Repositories[i]; r.Resource == name {
			return r
		}
	}
	return nil
}

// repositoryPlace is what is recorded of a repository: its host and port.
func repositoryPlace(r Repository) place {
	u, err := url.Parse(r.URL)
	if err != nil {
		return place{host: RepositoryHost, port: portHTTPS}
	}
	p := place{host: u.Hostname(), port: portHTTPS}
	if n, err := strconv.Atoi(u.Port()); err == nil {
		p.port = n
	}
	return p
}

// fetch asks the keeper for a repository, with a record like any other way out.
func (e *egress) fetch(ctx context.Context, h *head, r Repository) (keep bool) {
	p := repositoryPlace(r)
	w, no := e.record(ctx, p)
	if no != nil {
		return e.refuse(h, no)
	}
	var failed error
	defer func() {
		if cause := context.Cause(ctx); cause != nil {
			failed, keep = fmt.Errorf("ended: %w", cause), false
		}
		w.end(text(failed))
	}()
	if failed = e.goOn(h); failed != nil {
		return false
	}
	f := keeper.Fetch{Workspace: e.scope.Workspace, Session: e.scope.Session, Resource: r.Resource, URL: r.URL, Length: h.length,
		Protocol: h.value("git-protocol"), ContentEncoding: h.value("content-encoding"), UserAgent: h.value("user-agent")}
	if h.method == http.MethodPost {
		pr, pw := io.Pipe()
		if h.chunked {
			f.Length = -1
		}
		f.Body = pr
		sent := e.sendBody(h, func(body io.Reader) error {
			err := copyPlain(&counter{pw, w}, body)
			_ = pw.CloseWithError(err) // nil is the end
			return err
		})
		if !h.hasBody() {
			_ = pw.Close()
		}
		defer func() {
			_ = pr.Close()
			if !keep {
				_ = e.raw.Close() // what is still on its way in would be read as the next request
			}
			<-sent.over
		}()
		keep, failed = e.fetched(ctx, h, f, w, p, sent.whole)
		return keep
	}
	e.sendBody(h, nil) // there is none
	keep, failed = e.fetched(ctx, h, f, w, p, func() bool { return true })
	return keep
}

// counter counts what goes out of a process.
type counter struct {
	io.Writer
	way *way
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.Writer.Write(p)
	c.way.sent.Add(int64(n))
	return n, err
}

// incoming counts what comes in.
type incoming struct {
	io.Reader
	way *way
}

func (c *incoming) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.way.received.Add(int64(n))
	c.way.watch.touch(n)
	return n, err
}

// fetched sends f and passes its answer on. whole reports whether the request's
// body has been read to its end.
func (e *egress) fetched(ctx context.Context, h *head, f keeper.Fetch, w *way, p place, whole func() bool) (bool, error) {
	got, err := e.g.keeper.Repository(ctx, f)
	if err != nil {
		no := e.unfetched(p, err)
		return e.refuse(h, no), errors.New(no.text)
	}
	defer got.Body.Close()
	if no := answered(p, got.Status); no != nil {
		return e.refuse(h, no), errors.New(no.text)
	}
	kind := got.ContentType
	if !strings.HasPrefix(kind, "application/x-git-") {
		kind = "text/plain"
	}
	resp := &http.Response{StatusCode: got.Status, ContentLength: -1, Body: io.NopCloser(&incoming{got.Body, w}),
		Header: http.Header{"Content-Type": {kind}, "Cache-Control": {"no-cache"}}}
	return e.answer(resp, h, !h.close && whole())
}

// answered says what an answer that is no success means.
func answered(p place, status int) *denial {
	no := &denial{status: http.StatusForbidden, token: "http_request_denied"}
	switch {
	case status >= 200 && status <= 299:
		return nil
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		no.text = fmt.Sprintf("%s refused the repository's stored token, or there is none and it needs one. Way out: set authorization_token of the session's resource.", p.host)
	case status == http.StatusNotFound:
		no.status = http.StatusNotFound
		no.text = fmt.Sprintf("%s knows no such repository, or the session's stored token may not see it.", p.host)
	default:
		no.status, no.token = http.StatusBadGateway, "http_protocol_error"
		no.text = fmt.Sprintf("%s answered with status %d.", p.host, status)
	}
	return no
}

// unfetched says inside why a repository was not fetched.
func (e *egress) unfetched(p place, err error) *denial {
	for _, why := range []error{keeper.ErrURL, keeper.ErrMoved, keeper.ErrCertificate, keeper.ErrToken, keeper.ErrAnswer} {
		if errors.Is(err, why) {
			e.refused(slog.LevelWarn, p.String(), "the repository was not fetched", err)
			return &denial{status: http.StatusBadGateway, token: "proxy_internal_error", text: fmt.Sprintf("the repository at %s was not fetched: %v.", p.host, why)}
		}
	}
	return e.unreached(p, err)
}
