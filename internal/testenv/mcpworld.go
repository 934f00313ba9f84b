package testenv

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// MCPWorld is an MCP server over real HTTP, spoken by hand so that it can break
// the protocol at any byte. It counts executions, not answers, and fails the
// test by itself when an irreversible tool executes twice for the same
// arguments or an idempotency key changes.
type MCPWorld struct {
	URL string

	t        testing.TB
	closed   chan struct{}
	mu       sync.Mutex
	tools    []MCPTool
	faults   map[string][]MCPFault
	calls    []MCPCall
	keys     map[string]string // tool and arguments without key, to key
	answers  map[string]string // tool and key, to the first answer
	bearer   string
	sessions map[string]bool
	nextID   int
	requests []string // "METHOD rpc-method"
	stateful bool
	addrs    map[string]bool // remote addresses that connected
	stop     func()
}

// MCPTool is one tool of an MCPWorld.
type MCPTool struct {
	Name        string
	Class       string // read, idempotent, irreversible
	Description string
	Schema      string // JSON schema; default: any object
	Annotations string // JSON, may be empty
	// KeyArgument or KeyHeader names where the idempotency key comes.
	KeyArgument, KeyHeader string
	// Repeats allows equal executions of an irreversible tool.
	Repeats bool
	// Do executes; nil answers {"done": true}. An error is a tool error.
	Do func(args map[string]any) (any, error)
}

// MCPCall is one tools/call that arrived.
type MCPCall struct {
	Tool      string
	Arguments string
	Key       string
	Header    http.Header
	Executed  bool
}

// MCPFault says how one call goes wrong. The zero value is no fault.
type MCPFault struct {
	// Before: the fault strikes instead of execution, else after it.
	Before bool
	// Kind: "cut" closes the connection without an answer; "partial" in the
	// middle of it; "hang" waits for Release, or the client's end; "status"
	// answers Status; "input_required" asks for input; "error" answers JSON-RPC
	// Code; "redirect" answers 307 to Body; "gzip" sends a bomb; "oversized"
	// sends Size bytes of text; "echo" shows the request's headers; "garbage"
	// sends what is no JSON; "other" answers another id; "empty" sends no body.
	Kind    string
	Status  int
	Code    int
	Body    string
	Size    int
	Arrived chan<- struct{} // told when the fault strikes, if set
	Release <-chan struct{}
}

// NewMCPWorld starts the server on a loopback port until the test ends.
func NewMCPWorld(t testing.TB, tools ...MCPTool) *MCPWorld {
	t.Helper()
	w := &MCPWorld{t: t, tools: tools, closed: make(chan struct{}), faults: map[string][]MCPFault{}, keys: map[string]string{},
		answers: map[string]string{}, sessions: map[string]bool{}, addrs: map[string]bool{}, stateful: true}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.URL = "http://" + l.Addr().String() + "/mcp"
	srv := &http.Server{Handler: w, ConnState: func(c net.Conn, s http.ConnState) {
		if s == http.StateNew {
			w.mu.Lock()
			w.addrs[c.RemoteAddr().String()] = true
			w.mu.Unlock()
		}
	}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l) // ends with Close
	}()
	w.stop = sync.OnceFunc(func() {
		close(w.closed)
		srv.Close()
		<-done
	})
	t.Cleanup(w.stop)
	return w
}

// Stop ends the server before the test does: nobody listens any more.
func (w *MCPWorld) Stop() { w.stop() }

// Did counts executions, for use inside a tool.
func (w *MCPWorld) Did(tool string) (n int) {
	for _, c := range w.calls {
		if c.Tool == tool && c.Executed {
			n++
		}
	}
	return n
}

// Script sets how the next calls of a tool go wrong, in order.
func (w *MCPWorld) Script(tool string, faults ...MCPFault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults[tool] = append(w.faults[tool], faults...)
}

// RequireBearer makes every request need this token.
func (w *MCPWorld) RequireBearer(token string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.bearer = token
}

// ForgetSessions makes the server as if it had restarted.
func (w *MCPWorld) ForgetSessions() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sessions = map[string]bool{}
}

// Change replaces a tool's definition.
func (w *MCPWorld) Change(tool string, f func(*MCPTool)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.tools {
		if w.tools[i].Name == tool {
			f(&w.tools[i])
		}
	}
}

// Executions counts how often a tool executed.
func (w *MCPWorld) Executions(tool string) (n int) {
	for _, c := range w.Calls(tool) {
		if c.Executed {
			n++
		}
	}
	return n
}

// Calls lists the calls of a tool that arrived.
func (w *MCPWorld) Calls(tool string) (out []MCPCall) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.calls {
		if c.Tool == tool {
			out = append(out, c)
		}
	}
	return out
}

// Requests lists all requests as "METHOD rpc-method".
func (w *MCPWorld) Requests() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.requests)
}

// Connections counts the connections that were made.
func (w *MCPWorld) Connections() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.addrs)
}

type mcpRequest struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	} `json:"params"`
}

// ServeHTTP implements http.Handler.
func (w *MCPWorld) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 32<<20))
	if err != nil {
		return
	}
	var req mcpRequest
	if len(body) > 0 && json.Unmarshal(body, &req) != nil {
		http.Error(rw, "not JSON", http.StatusBadRequest)
		return
	}
	w.mu.Lock()
	w.requests = append(w.requests, r.Method+" "+req.Method)
	bearer := w.bearer
	known := w.sessions[r.Header.Get("Mcp-Session-Id")]
	w.mu.Unlock()
	switch {
	case bearer != "" && r.Header.Get("Authorization") != "Bearer "+bearer:
		http.Error(rw, "who are you?", http.StatusUnauthorized)
	case r.Method == http.MethodDelete:
		rw.WriteHeader(http.StatusNoContent)
	case r.Method != http.MethodPost:
		rw.WriteHeader(http.StatusMethodNotAllowed)
	case req.Method == "initialize":
		w.initialize(rw, req)
	case req.Method == "server/discover":
		mcpError(rw, req.ID, -32601, "unknown method")
	case w.stateful && !known:
		http.Error(rw, "no such session", http.StatusNotFound)
	case len(req.ID) == 0:
		rw.WriteHeader(http.StatusAccepted)
	case req.Method == "tools/list":
		w.list(rw, req)
	case req.Method == "tools/call":
		w.call(rw, r, req)
	default:
		mcpError(rw, req.ID, -32601, "unknown method")
	}
}

func mcpReply(rw http.ResponseWriter, id json.RawMessage, result any) {
	rw.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(rw).Encode(map[string]any{"jsonrpc": "2.0", "id": id, "result": result})
}

func mcpError(rw http.ResponseWriter, id json.RawMessage, code int, text string) {
	rw.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(rw).Encode(map[string]any{"jsonrpc": "2.0", "id": id, "error": map[string]any{"code": code, "message": text}})
}

func (w *MCPWorld) initialize(rw http.ResponseWriter, req mcpRequest) {
	w.mu.Lock()
	w.nextID++
	id := fmt.Sprintf("session-%d", w.nextID)
	w.sessions[id] = true
	w.mu.Unlock()
	rw.Header().Set("Mcp-Session-Id", id)
	mcpReply(rw, req.ID, map[string]any{"protocolVersion": "2025-06-18", "capabilities": map[string]any{"tools": map[string]any{}},
		"serverInfo": map[string]any{"name": "world", "version": "1"}})
}

func (w *MCPWorld) list(rw http.ResponseWriter, req mcpRequest) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var tools []map[string]any
	for _, t := range w.tools {
		schema := t.Schema
		if schema == "" {
			schema = `{"type":"object"}`
		}
		d := map[string]any{"name": t.Name, "description": t.Description, "inputSchema": json.RawMessage(schema)}
		if t.Annotations != "" {
			d["annotations"] = json.RawMessage(t.Annotations)
		}
		tools = append(tools, d)
	}
	mcpReply(rw, req.ID, map[string]any{"tools": tools})
}

func (w *MCPWorld) call(rw http.ResponseWriter, r *http.Request, req mcpRequest) {
	w.mu.Lock()
	i := slices.IndexFunc(w.tools, func(t MCPTool) bool { return t.Name == req.Params.Name })
	if i < 0 {
		w.mu.Unlock()
		mcpError(rw, req.ID, -32602, "unknown tool")
		return
	}
	tool := w.tools[i]
	var f MCPFault
	if q := w.faults[tool.Name]; len(q) > 0 {
		f, w.faults[tool.Name] = q[0], q[1:]
	}
	w.mu.Unlock()
	var args map[string]any
	if err := json.Unmarshal(req.Params.Arguments, &args); err != nil {
		mcpError(rw, req.ID, -32602, "bad arguments")
		return
	}
	key := r.Header.Get(tool.KeyHeader)
	if tool.KeyArgument != "" {
		key, _ = args[tool.KeyArgument].(string)
	}
	c := MCPCall{Tool: tool.Name, Arguments: string(req.Params.Arguments), Key: key, Header: maps.Clone(r.Header)}
	if f.Before {
		w.record(c)
		w.strike(rw, r, req, f, nil)
		return
	}
	c.Executed = true
	result := w.execute(tool, c, args)
	if f.Kind != "" {
		w.strike(rw, r, req, f, result)
		return
	}
	mcpReply(rw, req.ID, result)
}

func (w *MCPWorld) record(c MCPCall) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls = append(w.calls, c)
}

// execute does what the tool does, once per key, and checks the caller.
func (w *MCPWorld) execute(tool MCPTool, c MCPCall, args map[string]any) map[string]any {
	rest := maps.Clone(args)
	if tool.KeyArgument != "" {
		delete(rest, tool.KeyArgument)
	}
	b, _ := json.Marshal(rest)
	sum := sha256.Sum256(b)
	what := tool.Name + " " + hex.EncodeToString(sum[:])
	w.mu.Lock()
	defer w.mu.Unlock()
	if tool.KeyArgument+tool.KeyHeader != "" {
		if old, ok := w.keys[what]; ok && old != c.Key && !tool.Repeats {
			w.t.Errorf("mcp world: %s %s came with key %q and then with key %q", tool.Name, b, old, c.Key)
		}
		w.keys[what] = c.Key
		if a, ok := w.answers[tool.Name+" "+c.Key]; ok {
			c.Executed = false
			w.calls = append(w.calls, c)
			return mcpResult(json.RawMessage(a), nil)
		}
	}
	if tool.Class == "irreversible" && !tool.Repeats {
		for _, old := range w.calls {
			if old.Tool == tool.Name && old.Executed && old.Arguments == c.Arguments {
				w.t.Errorf("mcp world: irreversible %s %s executed twice", tool.Name, b)
			}
		}
	}
	w.calls = append(w.calls, c)
	var out any = map[string]any{"done": true}
	var err error
	if tool.Do != nil {
		out, err = tool.Do(args)
	}
	if text, merr := json.Marshal(out); merr == nil && err == nil && c.Key != "" {
		w.answers[tool.Name+" "+c.Key] = string(text)
	}
	return mcpResult(out, err)
}

func mcpResult(out any, err error) map[string]any {
	if err != nil {
		return map[string]any{"isError": true, "content": []any{map[string]any{"type": "text", "text": err.Error()}}}
	}
	if raw, ok := out.(map[string]any); ok && raw["content"] != nil {
		return raw // a whole result
	}
	text, _ := json.Marshal(out)
	return map[string]any{"content": []any{map[string]any{"type": "text", "text": string(text)}}, "structuredContent": out}
}

func mcpCut(rw http.ResponseWriter) {
	c, _, err := rw.(http.Hijacker).Hijack()
	if err == nil {
		c.Close()
	}
}

// strike makes a call go wrong.
func (w *MCPWorld) strike(rw http.ResponseWriter, r *http.Request, req mcpRequest, f MCPFault, result map[string]any) {
	if f.Arrived != nil {
		f.Arrived <- struct{}{}
	}
	switch f.Kind {
	case "cut":
		mcpCut(rw)
	case "partial":
		rw.Header().Set("Content-Type", "application/json")
		rw.Header().Set("Content-Length", "1000")
		_, _ = rw.Write([]byte(`{"jsonrpc":"2.0","id":`))
		_ = http.NewResponseController(rw).Flush()
		mcpCut(rw)
	case "hang":
		select {
		case <-f.Release:
			if result != nil {
				mcpReply(rw, req.ID, result)
			}
		case <-w.closed:
		case <-time.After(time.Minute):
		}
	case "status":
		rw.WriteHeader(f.Status)
		_, _ = io.WriteString(rw, f.Body)
	case "input_required":
		mcpReply(rw, req.ID, map[string]any{"resultType": "input_required", "inputRequests": map[string]any{}, "requestState": "s"})
	case "error":
		mcpError(rw, req.ID, f.Code, "failed")
	case "redirect":
		http.Redirect(rw, r, f.Body, http.StatusTemporaryRedirect)
	case "gzip":
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, _ = io.Copy(z, io.LimitReader(mcpZeros{}, 64<<20))
		z.Close()
		rw.Header().Set("Content-Type", "application/json")
		rw.Header().Set("Content-Encoding", "gzip")
		_, _ = rw.Write(b.Bytes())
	case "oversized":
		mcpReply(rw, req.ID, map[string]any{"content": []any{map[string]any{"type": "text", "text": strings.Repeat("x", f.Size)}}})
	case "echo":
		mcpReply(rw, req.ID, mcpResult(map[string]any{"headers": r.Header, "joined": strings.Join(r.Header.Values("Authorization"), ",")}, nil))
	case "garbage":
		rw.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(rw, "<html>ok</html>")
	case "other":
		mcpReply(rw, json.RawMessage(`"another"`), result)
	case "empty":
		rw.WriteHeader(http.StatusOK)
	default:
		w.t.Errorf("mcp world: unknown fault %q", f.Kind)
	}
}

type mcpZeros struct{}

func (mcpZeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
