package testenv

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/llm"
)

// Model is a scripted model API over real HTTP to which scripts can be added
// while it runs. It keeps every request body, in which no secret may be.
type Model struct {
	URL string
	Key string // credential that callers must show

	mu      sync.Mutex
	scripts []llm.PlayScript
	now     *llm.ScriptServer
	former  []*llm.ScriptServer
	bodies  [][]byte
	kept    int // bytes of them
}

// NewModel starts a scripted model on a loopback port.
func NewModel(t testing.TB, key string) *Model {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &Model{URL: "http://" + l.Addr().String(), Key: key}
	srv := &http.Server{Handler: m, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l) // ends with Close
	}()
	t.Cleanup(func() {
		srv.Close()
		<-done
	})
	return m
}

// Add adds a script. Its marker must be unlike all others.
func (m *Model) Add(t testing.TB, p llm.PlayScript) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	scripts := append(m.scripts[:len(m.scripts):len(m.scripts)], p)
	s := &llm.Script{Key: m.Key, Scripts: scripts}
	if err := s.Validate(); err != nil {
		t.Fatalf("script %s: %v", p.Name, err)
	}
	if m.now != nil {
		m.former = append(m.former, m.now)
	}
	m.scripts, m.now = scripts, llm.NewScriptServer(s)
}

// maxKept bounds the request bodies that are kept for the search of secrets.
const maxKept = 64 << 20

// ServeHTTP implements http.Handler.
func (m *Model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 33<<20))
	if err != nil {
		return // the caller left
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	m.mu.Lock()
	if m.kept < maxKept {
		m.bodies, m.kept = append(m.bodies, body), m.kept+len(body)
	}
	now := m.now
	m.mu.Unlock()
	if now == nil {
		http.Error(w, "no script", http.StatusInternalServerError)
		return
	}
	now.ServeHTTP(w, r)
}

// Stats sums the counts since the start.
func (m *Model) Stats() llm.ScriptStats {
	m.mu.Lock()
	defer m.mu.Unlock()
	var sum llm.ScriptStats
	for _, s := range append(m.former[:len(m.former):len(m.former)], m.now) {
		if s == nil {
			continue
		}
		st := s.Stats()
		sum.Requests += st.Requests
		sum.Answered += st.Answered
		sum.Invalid += st.Invalid
		sum.Unscripted += st.Unscripted
		sum.Faults += st.Faults
		if st.LastError != "" {
			sum.LastError = st.LastError
		}
	}
	return sum
}

// Bodies returns the requests that were kept.
func (m *Model) Bodies() [][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bodies[:len(m.bodies):len(m.bodies)]
}
