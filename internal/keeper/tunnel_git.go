package keeper

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strings"

	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/vault"
)

// Why a repository was not fetched; besides those of Tunnel. Their texts may be
// shown inside.
var (
	// ErrURL: the repository's URL is not one that a token may be sent to.
	ErrURL = errors.New("its URL is not https with a host and without a user name")
	// ErrMoved: the host redirects to another one, which is not asked (attack N5).
	ErrMoved = errors.New("it has moved to another host; give the resource its new URL")
	// ErrCertificate: the host does not prove that it is the one of the URL.
	ErrCertificate = errors.New("its TLS or certificate is not in order")
	// ErrToken: the stored token cannot be used.
	ErrToken = errors.New("its stored token cannot be used; set it anew")
	// ErrAnswer: what came is no answer of a git server.
	ErrAnswer = errors.New("its host gave no proper answer")
)

// maxMoves is how many redirects on one host are followed.
const maxMoves = 3

// maxMoved is how many moved repositories are remembered.
const maxMoved = 1000

// Fetch is one reading request of git's smart protocol for a session's
// repository.
type Fetch struct {
	Workspace store.WorkspaceID
	Session   store.SessionID
	Resource  string // names the stored token
	URL       string
	// Body of git-upload-pack; nil asks for the refs. Length -1: not known. It is
	// closed in the end, which must end a read of it.
	Body   io.ReadCloser
	Length int64
	// What git says about the request; sent where it can be.
	Protocol, ContentEncoding, UserAgent string
}

// Fetched is the answer to a Fetch, less the token.
type Fetched struct {
	Status      int
	ContentType string
	Body        io.ReadCloser
}

// Repository asks a repository's host over https, with the session's token for
// it where there is one; the token is set here and leaves by no other way.
// Redirects are followed on the same host only. Ctx must not end before the
// answer's body is read; the body must be closed. Errors are *TunnelError, with
// one of the reasons above or Tunnel's, or ctx's.
func (k *Keeper) Repository(ctx context.Context, f Fetch) (*Fetched, error) {
	u, err := url.Parse(f.URL)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || vault.CheckHost(u.Host) != nil {
		return nil, &TunnelError{Host: "the repository", Why: ErrURL, Err: ErrURL}
	}
	cred, err := k.repositoryToken(ctx, f)
	if err != nil {
		return nil, &TunnelError{Host: u.Host, Why: ErrToken, Err: err}
	}
	key := movedKey{f.Workspace, f.Session, f.Resource, f.URL}
	base := u
	if f.Body != nil {
		base = k.moved(key, u)
	}
	for range maxMoves + 1 {
		got, to, err := k.ask(ctx, f, base, cred)
		if err != nil && ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			return nil, &TunnelError{Host: u.Host, Why: repositoryReason(ctx, err), Err: errors.New(string(cred.clean(err.Error())))}
		}
		if to == nil {
			k.remember(key, u, base)
			return got, nil
		}
		_ = got.Body.Close()
		if f.Body != nil || to.Scheme != "https" || to.Host != u.Host || to.User != nil || !strings.HasSuffix(to.Path, refsPath) {
			return nil, &TunnelError{Host: u.Host, Why: ErrMoved, Err: ErrMoved}
		}
		next := *to
		next.Path, next.RawPath, next.RawQuery, next.Fragment = strings.TrimSuffix(to.Path, refsPath), "", "", ""
		base = &next
	}
	return nil, &TunnelError{Host: u.Host, Why: ErrAnswer, Err: errors.New("too many redirects")}
}

const refsPath = "/info/refs"

func (c *credential) clean(s string) []byte {
	if c == nil {
		return []byte(s)
	}
	b, _ := c.scrub.Scrub([]byte(s))
	return b
}

// repositoryToken opens the stored token, nil when there is none.
func (k *Keeper) repositoryToken(ctx context.Context, f Fetch) (*credential, error) {
	sealed, err := k.cfg.DB.ResourceSecret(ctx, f.Workspace, f.Session, f.Resource)
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up token of %s: %w", f.Resource, err)
	}
	token, err := k.cfg.Vault.Open(string(f.Workspace), f.Resource, sealed)
	if err != nil {
		return nil, err
	}
	if err := vault.CheckHeaderValue(token.Reveal()); err != nil {
		return nil, fmt.Errorf("token of %s: %w", f.Resource, err)
	}
	return &credential{token: token, scrub: vault.NewScrubber(token, vault.NewSecret(basicForm(token)))}, nil
}

// basicUser is the user name that git hosts take beside a token.
const basicUser = "x-access-token:"

// ask sends one request on a connection of its own. to is where it is
// redirected to.
func (k *Keeper) ask(ctx context.Context, f Fetch, base *url.URL, cred *credential) (got *Fetched, to *url.URL, err error) {
	req := fetchRequest(f, base, cred)
	dialCtx := ctx
	if k.cfg.AllowPrivateNetworks {
		dialCtx = Private(ctx)
	}
	l, err := dialLine(dialCtx, k.cfg.Dial, base, k.tls)
	if err != nil {
		return nil, nil, err
	}
	body := &fetchBody{line: l, written: make(chan struct{})}
	if f.Body != nil {
		body.request = f.Body
	}
	body.stop = context.AfterFunc(ctx, func() { l.raw.Conn.Close() })
	go func() {
		defer close(body.written)
		if req.Write(l) != nil {
			l.raw.Conn.Close() // half a request is none
		}
	}()
	l.in.left = MaxHeader
	resp, err := finalAnswer(l.br, req)
	if err != nil {
		_ = body.Close()
		return nil, nil, fmt.Errorf("%w: %w", ErrAnswer, err)
	}
	l.in.left = math.MaxInt64 // a repository has any size; the front's idle time bounds it
	body.Reader = resp.Body
	if cred != nil {
		body.Reader = cred.scrub.Reader(resp.Body)
	}
	got = &Fetched{Status: resp.StatusCode, ContentType: string(cred.clean(resp.Header.Get("Content-Type"))), Body: body}
	if resp.StatusCode >= 300 && resp.StatusCode <= 399 {
		if to, err = resp.Location(); err != nil {
			_ = body.Close()
			return nil, nil, fmt.Errorf("%w: a redirect to nowhere", ErrAnswer)
		}
	}
	return got, to, nil
}

// finalAnswer reads the head of an answer. Interim ones are dropped; they count
// against MaxHeader.
func finalAnswer(in *bufio.Reader, req *http.Request) (*http.Response, error) {
	for {
		resp, err := http.ReadResponse(in, req)
		switch {
		case err != nil:
			return nil, err
		case resp.StatusCode >= 100 && resp.StatusCode <= 199 && resp.StatusCode != http.StatusSwitchingProtocols:
			continue
		}
		if enc := resp.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
			return nil, errors.New("the answer is compressed, which was not asked for") // and could not be scrubbed
		}
		return resp, nil
	}
}

// fetchRequest makes the request; the token is added to nothing else.
func fetchRequest(f Fetch, base *url.URL, cred *credential) *http.Request {
	u := *base
	u.RawPath = ""
	h := http.Header{"User-Agent": {"git/2 (planaria)"}, "Accept-Encoding": {"identity"}, "Connection": {"close"}}
	req := &http.Request{Method: http.MethodGet, URL: &u, Host: u.Host, Header: h}
	if f.Body == nil {
		u.Path = strings.TrimSuffix(u.Path, "/") + refsPath
		u.RawQuery = "service=git-upload-pack"
	} else {
		u.Path = strings.TrimSuffix(u.Path, "/") + "/git-upload-pack"
		req.Method, req.Body, req.ContentLength = http.MethodPost, f.Body, f.Length
		h.Set("Content-Type", "application/x-git-upload-pack-request")
		h.Set("Accept", "application/x-git-upload-pack-result")
	}
	// Hosts tell git by its name from browsers.
	if strings.HasPrefix(f.UserAgent, "git/") && vault.CheckHeaderValue(f.UserAgent) == nil {
		h.Set("User-Agent", f.UserAgent)
	}
	if vault.CheckHeaderValue(f.Protocol) == nil {
		h.Set("Git-Protocol", f.Protocol)
	}
	if f.ContentEncoding == "gzip" {
		h.Set("Content-Encoding", "gzip")
	}
	if cred != nil {
		h.Set("Authorization", "Basic "+basicForm(cred.token))
	}
	return req
}

// fetchBody is an answer's body with all that hangs on it.
type fetchBody struct {
	io.Reader
	line    *line
	request io.Closer
	stop    func() bool
	written chan struct{} // closed when the request is out, or was given up
}

// Close ends the connection and waits for the writer of the request.
func (b *fetchBody) Close() error {
	b.stop()
	err := b.line.raw.Conn.Close()
	if b.request != nil {
		_ = b.request.Close()
	}
	<-b.written
	return err
}

func repositoryReason(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, ErrAnswer):
		return ErrAnswer
	case errors.Is(err, errTLS):
		return ErrCertificate
	}
	return whyNot(ctx, err)
}

// movedKey names a repository as a session knows it.
type movedKey struct {
	ws       store.WorkspaceID
	session  store.SessionID
	resource string
	url      string
}

// moved returns where a repository was found last: git asks for the refs first,
// and what it asks for next goes to the same place.
func (k *Keeper) moved(key movedKey, u *url.URL) *url.URL {
	k.mu.Lock()
	defer k.mu.Unlock()
	if to := k.places[key]; to != nil {
		return to
	}
	return u
}

func (k *Keeper) remember(key movedKey, u, base *url.URL) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if *base == *u {
		delete(k.places, key)
		return
	}
	if len(k.places) >= maxMoved {
		clear(k.places) // they are found again
	}
	k.places[key] = base
}

// basicForm is the token as it goes into the Authorization header.
func basicForm(token vault.Secret) string {
	return base64.StdEncoding.EncodeToString([]byte(basicUser + token.Reveal()))
}
