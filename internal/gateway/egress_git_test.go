package gateway_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
	"github.com/planaria/planaria/internal/vault"
)

// authority is a CA for the hosts of a test.
type authority struct {
	t    testing.TB
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pem  []byte
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{t: t}
	a.key, a.cert, a.pem = a.issue(&x509.Certificate{Subject: pkix.Name{CommonName: "Planaria test CA"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

func (a *authority) issue(c *x509.Certificate) (*ecdsa.PrivateKey, *x509.Certificate, []byte) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func (a *authority) roots() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// serveTLS puts a server with a certificate for its name in the world.
func (o *outside) serveTLS(a *authority, host string, h http.Handler) {
	name, _, _ := net.SplitHostPort(host)
	key, cert, _ := a.issue(&x509.Certificate{Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	s := httptest.NewUnstartedServer(h)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}}}
	s.EnableHTTP2 = true
	s.StartTLS()
	o.t.Cleanup(s.Close)
	o.at[host] = s.Listener.Addr().String()
}

// proxy listens for processes outside of any sandbox and returns its URL; stop
// waits until all of their connections are over.
func (i *inside) proxy() (url string, stop func()) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		i.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { i.g.Egress(i.ctx, i.scope, c) })
		}
	})
	stop = func() { l.Close(); wg.Wait() }
	i.t.Cleanup(stop)
	return "http://" + l.Addr().String(), stop
}

const gitToken = "ghp_ThisTokenNeverEntersASandbox42"

// repositories is a git host: one repository that wants the token.
type repositories struct {
	mu   sync.Mutex
	seen []string // "METHOD path authorization"
}

func gitServer(t testing.TB, o *outside, a *authority) *repositories {
	t.Helper()
	root := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", args...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "HOME="+root, "GIT_CONFIG_NOSYSTEM=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	git("init", "-q", "-b", "main", "work")
	if err := os.WriteFile(filepath.Join(root, "work", "README"), []byte("fetched by the keeper\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	git("-C", "work", "add", "README")
	git("-C", "work", "-c", "user.name=T", "-c", "user.email=t@example.test", "commit", "-q", "-m", "first")
	git("clone", "-q", "--bare", "work", "owner/repo.git")
	path, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		t.Fatal(err)
	}
	backend := filepath.Join(strings.TrimSpace(string(path)), "git-http-backend")
	if _, err := os.Stat(backend); err != nil {
		t.Skipf("git-http-backend is missing: %v", err)
	}
	handler := &cgi.Handler{Path: backend, Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1"}, Stderr: io.Discard}
	rs := &repositories{}
	o.serveTLS(a, "git.test:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		rs.mu.Lock()
		rs.seen = append(rs.seen, r.Method+" "+r.URL.Path+" "+user+" "+r.UserAgent())
		rs.mu.Unlock()
		switch {
		case strings.HasPrefix(r.URL.Path, "/away/"):
			http.Redirect(w, r, "https://other.test"+r.URL.RequestURI(), http.StatusMovedPermanently)
		case strings.HasPrefix(r.URL.Path, "/old/"):
			http.Redirect(w, r, strings.Replace(r.URL.RequestURI(), "/old/", "/owner/", 1), http.StatusMovedPermanently)
		case strings.HasPrefix(r.URL.Path, "/echo/"):
			w.Header().Set("Content-Type", r.Header.Get("Authorization"))
			_, _ = io.WriteString(w, "you sent "+r.Header.Get("Authorization")+" and "+password)
		case strings.HasPrefix(r.URL.Path, "/open/"):
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Set("Content-Encoding", "identity")
			r.URL.Path = strings.Replace(r.URL.Path, "/open/", "/owner/", 1)
			handler.ServeHTTP(w, r)
		case user != "x-access-token" || password != gitToken:
			w.Header().Set("WWW-Authenticate", "Basic")
			http.Error(w, "who are you", http.StatusUnauthorized)
		default:
			handler.ServeHTTP(w, r)
		}
	}))
	return rs
}

// storeToken seals the session's token for a resource, as the server does.
func (e *env) storeToken(resource, token string) {
	e.t.Helper()
	sealed, err := e.master.Seal(string(ws), resource, vault.NewSecret(token))
	if err != nil {
		e.t.Fatal(err)
	}
	if err := e.db.PutResourceSecret(e.t.Context(), ws, e.session, store.ResourceSecret{ID: resource, Sealed: sealed}); err != nil {
		e.t.Fatal(err)
	}
}

// A repository of the session is cloned with a token that only the keeper
// reads; nothing that comes back holds it (law L6, attacks N5, K2).
func TestEgressRepository(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("git is missing")
	}
	e := newBareEnv(t, testenv.NewMCPWorld(t))
	o := newOutside(t)
	a := newAuthority(t)
	host := gitServer(t, o, a)
	o.serveTLS(newAuthority(t), "fake.test:443", http.NotFoundHandler())
	i := o.inside(gateway.Network{}, func(k *keeper.Config) { k.DB, k.Vault, k.Roots = e.db, e.master, a.roots() })
	i.scope.Session = e.session
	for name, url := range map[string]string{"sesrsc_1": "https://git.test/owner/repo.git", "sesrsc_old": "https://git.test/old/repo.git/",
		"sesrsc_away": "https://git.test/away/repo.git", "sesrsc_echo": "https://git.test/echo/repo", "sesrsc_bare": "https://git.test/owner/repo.git",
		"sesrsc_open": "https://git.test/open/repo.git", "sesrsc_plain": "http://git.test/owner/repo.git", "sesrsc_user": "https://x:y@git.test/owner/repo.git",
		"sesrsc_fake": "https://fake.test/owner/repo.git", "sesrsc_gone": "https://gone.test/owner/repo.git"} {
		i.scope.Repositories = append(i.scope.Repositories, gateway.Repository{Resource: name, URL: url})
		if name != "sesrsc_bare" && name != "sesrsc_open" {
			e.storeToken(name, gitToken)
		}
	}
	proxy, stop := i.proxy()
	dir := t.TempDir()
	git := func(args ...string) (string, error) {
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		cmd.Env = []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH"), "http_proxy=" + proxy, "https_proxy=" + proxy, "GIT_TERMINAL_PROMPT=0", "GIT_CONFIG_NOSYSTEM=1", "LC_ALL=C",
			"GIT_TRACE_CURL=1", "GIT_TRACE_CURL_NO_DATA=0"}
		out, err := cmd.CombinedOutput()
		if strings.Contains(string(out), gitToken) {
			t.Errorf("git %v saw the token: %s", args, out)
		}
		return string(out), err
	}
	for _, c := range []struct{ resource, says string }{
		{"sesrsc_1", ""}, {"sesrsc_1.git", ""}, {"sesrsc_old", ""}, {"sesrsc_open", ""},
		{"sesrsc_bare", "set authorization_token"},
		{"sesrsc_away", "moved to another host"},
		{"sesrsc_plain", "not https"}, {"sesrsc_user", "not https"},
		{"sesrsc_fake", "certificate is not in order"},
		{"sesrsc_gone", "cannot be resolved"},
		{"sesrsc_foreign", "has no repository"},
	} {
		out, err := git("clone", "http://"+gateway.RepositoryHost+"/"+c.resource, c.resource)
		b, _ := os.ReadFile(filepath.Join(dir, c.resource, "README"))
		if cloned := string(b) == "fetched by the keeper\n"; cloned != (err == nil) || cloned != (c.says == "") || !strings.Contains(out, c.says) {
			t.Errorf("clone %s: %v, %q\n%s", c.resource, err, b, out)
		}
	}
	if out, err := git("-C", "sesrsc_1", "-c", "user.name=T", "-c", "user.email=t@x", "commit", "-q", "--allow-empty", "-m", "x"); err != nil {
		t.Fatal(out)
	}
	if out, err := git("-C", "sesrsc_1", "push", "origin", "main"); err == nil || !strings.Contains(out, "comes with contracted hosts") {
		t.Errorf("push: %v, %s", err, out)
	}
	if out, err := git("-C", "sesrsc_1", "fetch", "origin"); err != nil {
		t.Errorf("fetch: %v, %s", err, out)
	}
	for _, send := range []string{
		"CONNECT " + gateway.RepositoryHost + ":443 HTTP/1.1\r\nHost: " + gateway.RepositoryHost + "\r\n\r\n",
		"GET http://" + gateway.RepositoryHost + "/sesrsc_1/config HTTP/1.1\r\nHost: " + gateway.RepositoryHost + "\r\n\r\n",
		"GET http://" + gateway.RepositoryHost + "/sesrsc_1/../sesrsc_1/info/refs?service=git-upload-pack HTTP/1.1\r\nHost: " + gateway.RepositoryHost + "\r\n\r\n",
		"GET http://" + gateway.RepositoryHost + "/sesrsc_1/info/refs?service=git-upload-pack&x=y HTTP/1.1\r\nHost: " + gateway.RepositoryHost + "\r\n\r\n",
	} {
		p := i.dial()
		p.say(send)
		if resp, body := p.answer("GET"); resp.StatusCode != 403 && resp.StatusCode != 404 || !strings.Contains(body, gateway.RepositoryHost) {
			t.Errorf("%q: %s %q", send, resp.Status, body)
		}
	}
	p := i.dial()
	p.say("GET http://" + gateway.RepositoryHost + "/sesrsc_echo/info/refs?service=git-upload-pack HTTP/1.1\r\nHost: " + gateway.RepositoryHost + "\r\nAuthorization: Basic eDp5\r\n\r\n")
	if resp, body := p.answer("GET"); body != "you sent Basic REDACTED and REDACTED" || resp.Header.Get("Content-Type") != "text/plain" {
		t.Errorf("echo: %v %q", resp.Header, body)
	}
	p.Close()
	p.wait()
	stop()
	host.mu.Lock()
	defer host.mu.Unlock()
	for _, s := range host.seen {
		if strings.Contains(s, "receive-pack") || !strings.Contains(s, " git/") {
			t.Errorf("the host saw %q", s)
		}
	}
	for _, r := range o.ended {
		if r.Failed == "" && (r.Host != "git.test" || r.Port != 443 || r.Received == 0) {
			t.Errorf("record %+v", r)
		}
	}
	if o.tunnels() != len(o.ended) {
		t.Errorf("%d records opened, %d ended", o.tunnels(), len(o.ended))
	}
	if strings.Contains(e.logs.String(), gitToken) {
		t.Error("the token is in the log")
	}
}
