package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// Outside is the world outside under test: an MCP server over real HTTP that
// writes down what it was asked to do before it answers, and that can be slow,
// cut, or lie about it. It outlives every crash of the system under test.
//
// Every tool takes "id", which names what is acted on. One id is acted on once
// by a tool in every test, so that an id with two executions is a law broken.
type Outside struct {
	URL   string // of the MCP endpoint
	Token string // bearer credential that every request must carry

	closed chan struct{} // closed when the test ends

	mu      sync.Mutex
	ledger  []Act
	answers map[string]json.RawMessage // by tool and key, of idempotent acts
	gates   []*Gate
	spoils  []*Spoil
	delay   time.Duration
	unauth  int
}

// Act is one line of the ledger.
type Act struct {
	N    int
	Tool string
	ID   string
	Key  string // idempotency key that came with it
	Did  string // "read", "done", or "same key"
	At   time.Time
}

// Tool is one tool of Outside with its contract.
type Tool struct {
	Name  string
	Class string // read, idempotent, irreversible, mixed
	// Contract is its part of the connector object; nil: none.
	Contract map[string]any
	Ask      bool // the agent's permission policy asks
}

// probe is the reconcile contract of a tool that can be asked about.
func probe(tool string) map[string]any {
	return map[string]any{
		"tool":           "status_of",
		"arguments":      map[string]any{"tool": tool, "id": "${args.id}"},
		"happened":       []any{map[string]any{"pointer": "/status", "equals": "done"}},
		"not_happened":   []any{map[string]any{"pointer": "/status", "equals": "absent"}},
		"settle_seconds": 1,
	}
}

// Tools are the tools of Outside, one of each kind that the protocol treats
// in its own way.
func Tools() []Tool {
	return []Tool{
		{Name: "status_of", Class: "read", Contract: map[string]any{"class": "read"}},
		{Name: "look", Class: "read", Contract: map[string]any{"class": "read"}},
		{Name: "put", Class: "idempotent", Contract: map[string]any{"class": "idempotent", "identity": []any{"id"},
			"volatile": []any{"client_token"}, "idempotency": map[string]any{"argument": "client_token"}}},
		{Name: "set", Class: "idempotent", Contract: map[string]any{"class": "idempotent", "idempotency": map[string]any{"natural": true}}},
		{Name: "buy", Class: "irreversible", Contract: map[string]any{"class": "irreversible", "identity": []any{"id"},
			"volatile": []any{"reference"}, "reconcile": probe("buy")}},
		{Name: "fire", Class: "irreversible", Contract: map[string]any{"class": "irreversible"}},
		{Name: "tell", Class: "irreversible", Contract: map[string]any{"class": "irreversible", "in_doubt": "tell"}},
		{Name: "swap", Class: "mixed", Contract: map[string]any{"class": "mixed", "reconcile": probe("swap")}},
		{Name: "pay", Class: "irreversible", Ask: true, Contract: map[string]any{"class": "irreversible", "reconcile": probe("pay")}},
		{Name: "quick", Class: "irreversible", Contract: map[string]any{"class": "irreversible", "reconcile": probe("quick"), "timeout_seconds": 2}},
		{Name: "plain", Class: "irreversible"},
	}
}

func toolNamed(name string) (Tool, bool) {
	ts := Tools()
	i := slices.IndexFunc(ts, func(t Tool) bool { return t.Name == name })
	if i < 0 {
		return Tool{}, false
	}
	return ts[i], true
}

// NewOutside starts the world on a loopback port.
func NewOutside(t testing.TB, token string) *Outside {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o := &Outside{URL: "http://" + l.Addr().String() + "/mcp", Token: token, answers: map[string]json.RawMessage{}, closed: make(chan struct{})}
	s := mcp.NewServer(&mcp.Implementation{Name: "outside", Version: "1.0.0"}, nil)
	for _, tool := range Tools() {
		s.AddTool(&mcp.Tool{Name: tool.Name, Description: "Does " + tool.Name + " to the thing with this id.", InputSchema: json.RawMessage(
			`{"type":"object","properties":{"id":{"type":"string"},"tool":{"type":"string"},"value":{"type":"string"},"client_token":{"type":"string"},"reference":{"type":"string"}},"required":["id"]}`)},
			o.handle(tool))
	}
	h := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return s }, &mcp.StreamableHTTPOptions{Stateless: true, JSONResponse: true})
	srv := &http.Server{Handler: o.guard(h), ReadHeaderTimeout: 10 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l) // ends with Close
	}()
	t.Cleanup(func() {
		close(o.closed)
		srv.Close()
		<-done
	})
	return o
}

// SetDelay makes every call of a non-read take this long before it executes
// and again before it is answered.
func (o *Outside) SetDelay(d time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.delay = d
}

// Gate holds one call.
type Gate struct {
	tool, id string
	executed bool // hold after execution, else before
	taken    bool
	arrived  chan struct{}
	release  chan struct{}
	once     sync.Once
}

// Arrived is closed when the call is held.
func (g *Gate) Arrived() <-chan struct{} { return g.arrived }

// Release lets the call go on.
func (g *Gate) Release() { g.once.Do(func() { close(g.release) }) }

// HoldBefore holds the next call of a tool on an id before it executes; it
// executes when it is released, whoever still listens.
func (o *Outside) HoldBefore(tool, id string) *Gate { return o.hold(tool, id, false) }

// HoldAfter holds the answer of the next call of a tool on an id.
func (o *Outside) HoldAfter(tool, id string) *Gate { return o.hold(tool, id, true) }

func (o *Outside) hold(tool, id string, executed bool) *Gate {
	g := &Gate{tool: tool, id: id, executed: executed, arrived: make(chan struct{}), release: make(chan struct{})}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.gates = append(o.gates, g)
	return g
}

func (o *Outside) gate(tool, id string, executed bool) {
	o.mu.Lock()
	i := slices.IndexFunc(o.gates, func(g *Gate) bool {
		return !g.taken && g.executed == executed && g.tool == tool && (g.id == "" || g.id == id)
	})
	if i < 0 {
		o.mu.Unlock()
		return
	}
	g := o.gates[i]
	g.taken = true
	o.mu.Unlock()
	close(g.arrived)
	select {
	case <-g.release:
	case <-o.closed:
	}
}

// Spoil says how calls of a tool go wrong on the wire.
type Spoil struct {
	Tool, ID string // ID empty: any
	// Mode: "cut" executes and drops the connection; "502" executes and answers
	// 502; "lost" drops the connection without executing; "403" refuses without
	// executing.
	Mode  string
	Times int
}

// Spoil makes the next calls of a tool go wrong.
func (o *Outside) Spoil(s Spoil) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.spoils = append(o.spoils, &s)
}

func (o *Outside) spoiled(tool, id string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.spoils {
		if s.Times > 0 && s.Tool == tool && (s.ID == "" || s.ID == id) {
			s.Times--
			return s.Mode
		}
	}
	return ""
}

// guard asks for the credential and spoils what is to be spoiled.
func (o *Outside) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o.mu.Lock()
		ok := o.Token == "" || r.Header.Get("Authorization") == "Bearer "+o.Token
		if !ok {
			o.unauth++
		}
		o.mu.Unlock()
		if !ok {
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		body, err := io.ReadAll(io.LimitReader(r.Body, 8<<20))
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		var msg struct {
			Method string `json:"method"`
			Params struct {
				Name      string `json:"name"`
				Arguments struct {
					ID string `json:"id"`
				} `json:"arguments"`
			} `json:"params"`
		}
		mode := ""
		if json.Unmarshal(body, &msg) == nil && msg.Method == "tools/call" {
			mode = o.spoiled(msg.Params.Name, msg.Params.Arguments.ID)
		}
		switch mode {
		case "":
			next.ServeHTTP(w, r)
		case "cut", "502":
			next.ServeHTTP(httptest.NewRecorder(), r)
			if mode == "502" {
				http.Error(w, "bad gateway", http.StatusBadGateway)
				return
			}
			panic(http.ErrAbortHandler)
		case "lost":
			panic(http.ErrAbortHandler)
		case "403":
			http.Error(w, "not allowed", http.StatusForbidden)
		default:
			panic("testenv: unknown spoil mode " + mode)
		}
	})
}

// handle is one tool.
func (o *Outside) handle(tool Tool) mcp.ToolHandler {
	return func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		var in struct {
			ID    string `json:"id"`
			Tool  string `json:"tool"`
			Token string `json:"client_token"`
		}
		if err := json.Unmarshal(req.Params.Arguments, &in); err != nil {
			return nil, err
		}
		if tool.Class != "read" {
			o.wait()
		}
		o.gate(tool.Name, in.ID, false)
		out := o.act(tool, in.ID, in.Tool, in.Token)
		o.gate(tool.Name, in.ID, true)
		if tool.Class != "read" {
			o.wait()
		}
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: string(out)}}, StructuredContent: out}, nil
	}
}

func (o *Outside) wait() {
	o.mu.Lock()
	d := o.delay
	o.mu.Unlock()
	if d == 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-o.closed:
	}
}

// act executes one call and writes it down.
func (o *Outside) act(tool Tool, id, about, key string) json.RawMessage {
	o.mu.Lock()
	defer o.mu.Unlock()
	line := Act{N: len(o.ledger) + 1, Tool: tool.Name, ID: id, Key: key, Did: "done", At: time.Now().UTC()}
	out := map[string]any{"id": id, "tool": tool.Name, "done": true, "n": line.N}
	known := tool.Name + " " + key
	switch {
	case tool.Name == "status_of":
		line.Did = "read"
		status := "absent"
		if o.executions(about, id) > 0 {
			status = "done"
		}
		out = map[string]any{"id": id, "status": status}
	case tool.Class == "read":
		line.Did = "read"
		out = map[string]any{"id": id, "seen": true}
		if strings.HasPrefix(id, "large-") { // more than a row holds
			out["text"] = strings.Repeat("0123456789abcde ", 5000)
		}
	case key != "" && o.answers[known] != nil:
		line.Did = "same key"
		o.ledger = append(o.ledger, line)
		return o.answers[known]
	}
	answer, err := json.Marshal(out)
	if err != nil {
		panic(err)
	}
	if key != "" {
		o.answers[known] = answer
	}
	o.ledger = append(o.ledger, line)
	return answer
}

// executions counts what a tool really did to an id. The caller holds the lock.
func (o *Outside) executions(tool, id string) (n int) {
	for _, a := range o.ledger {
		if a.Tool == tool && a.ID == id && a.Did == "done" {
			n++
		}
	}
	return n
}

// Executions counts what a tool really did to an id: repetitions under one
// idempotency key count once. Of a natural idempotent tool every execution counts.
func (o *Outside) Executions(tool, id string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.executions(tool, id)
}

// Ledger returns what was done so far.
func (o *Outside) Ledger() []Act {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.ledger)
}

// Unauthorized counts requests without the credential.
func (o *Outside) Unauthorized() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.unauth
}
