package gateway_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// Servers made with the SDK, in all its ways: answers as JSON or as events,
// with and without sessions, over both generations of the protocol.
func TestSDKServers(t *testing.T) {
	for _, c := range []struct {
		name string
		opts mcp.StreamableHTTPOptions
		old  bool
	}{
		{name: "events", opts: mcp.StreamableHTTPOptions{}},
		{name: "json", opts: mcp.StreamableHTTPOptions{JSONResponse: true}},
		{name: "stateless events", opts: mcp.StreamableHTTPOptions{Stateless: true}},
		{name: "stateless json", opts: mcp.StreamableHTTPOptions{Stateless: true, JSONResponse: true}},
		{name: "old events", opts: mcp.StreamableHTTPOptions{}, old: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var executed atomic.Int32
			srv := mcp.NewServer(&mcp.Implementation{Name: "s", Version: "1"}, nil)
			type in struct {
				X int `json:"x"`
			}
			mcp.AddTool(srv, &mcp.Tool{Name: "act", Description: "acts"}, func(ctx context.Context, req *mcp.CallToolRequest, a in) (*mcp.CallToolResult, any, error) {
				executed.Add(1)
				_ = req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{Message: "half", Progress: 0.5})
				return nil, map[string]any{"sum": a.X + 1}, nil
			})
			mcp.AddTool(srv, &mcp.Tool{Name: "fails"}, func(context.Context, *mcp.CallToolRequest, in) (*mcp.CallToolResult, any, error) {
				return nil, nil, fmt.Errorf("tool says no")
			})
			h := http.Handler(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return srv }, &c.opts))
			if c.old {
				h = refuseDiscover(h)
			}
			hs := httptest.NewServer(h)
			defer hs.Close()
			w := testenv.NewMCPWorld(t)
			e := newBareEnv(t, w)
			e.server.URL = hs.URL
			for i := range 3 {
				p := e.goOn(e.intend("act", fmt.Sprintf(`{"x":%d}`, i)))
				if want := fmt.Sprintf(`{"sum":%d}`, i+1); !p.Done || p.Answer.IsError || text(p.Answer) != want {
					t.Errorf("act: got %+v %s, want %s", p, text(p.Answer), want)
				}
			}
			if p := e.goOn(e.intend("fails", `{"x":1}`)); !p.Done || !p.Answer.IsError || p.Answer.Outcome != store.OutcomeOK || text(p.Answer) != "tool says no" {
				t.Errorf("fails: got %+v %s", p, text(p.Answer))
			}
			if n := executed.Load(); n != 3 {
				t.Errorf("executed %d times, want 3", n)
			}
			e.close() // ends the MCP session well, too
		})
	}
}

// refuseDiscover makes a server of the older protocol.
func refuseDiscover(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		if strings.Contains(string(body), "server/discover") {
			http.Error(w, "unknown", http.StatusBadRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// Trap P2, attack E3: the SDK's server asks for input. One call, one execution.
func TestSDKInputRequired(t *testing.T) {
	var executed atomic.Int32
	srv := mcp.NewServer(&mcp.Implementation{Name: "s", Version: "1"}, nil)
	srv.AddTool(&mcp.Tool{Name: "act", InputSchema: json.RawMessage(`{"type":"object"}`)}, func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		executed.Add(1)
		return &mcp.CallToolResult{InputRequests: mcp.InputRequestMap{}, RequestState: "again"}, nil
	})
	hs := httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return srv }, nil))
	defer hs.Close()
	e := newBareEnv(t, testenv.NewMCPWorld(t))
	e.server.URL = hs.URL
	id := e.intend("act", `{}`)
	if p := e.goOn(id); !p.Person {
		t.Errorf("got %+v, want in doubt", p)
	}
	if n := executed.Load(); n != 1 {
		t.Errorf("executed %d times, want 1", n)
	}
}

// Attack K13: a server's requests within an answer are declined, pings are
// answered, and the answer comes.
func TestServerAsks(t *testing.T) {
	w := testenv.NewMCPWorld(t)
	var mu sync.Mutex
	var told []string
	answered := make(chan struct{}, 2)
	hs := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		var m struct {
			ID     json.RawMessage
			Method string
		}
		_ = json.Unmarshal(body, &m)
		reply := func(result string) {
			rw.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(rw, `{"jsonrpc":"2.0","id":%s,"result":%s}`, m.ID, result)
		}
		switch m.Method {
		case "initialize":
			reply(`{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"x","version":"1"}}`)
		case "tools/list":
			reply(`{"tools":[{"name":"act","inputSchema":{"type":"object"}}]}`)
		case "tools/call":
			rw.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(rw, "id: 1\ndata:\n\n: comment\n\nevent: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":\"a\",\"method\":\"ping\"}\n\n")
			fmt.Fprint(rw, "data: {\"jsonrpc\":\"2.0\",\"id\":\"b\",\"method\":\"sampling/createMessage\",\"params\":{}}\n\n")
			fmt.Fprint(rw, "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{}}\r\n\r\n")
			_ = http.NewResponseController(rw).Flush()
			<-answered
			<-answered
			fmt.Fprintf(rw, "data: {\"jsonrpc\":\"2.0\",\ndata: \"id\":%s,\"result\":{\"content\":[{\"type\":\"text\",\"text\":\"done\"}]}}\n\n", m.ID)
			_ = http.NewResponseController(rw).Flush()
			<-r.Context().Done() // never ends its stream
		case "":
			mu.Lock()
			told = append(told, string(body))
			mu.Unlock()
			rw.WriteHeader(http.StatusAccepted)
			answered <- struct{}{}
		default:
			rw.WriteHeader(http.StatusAccepted)
		}
	}))
	defer hs.Close()
	e := newBareEnv(t, w)
	e.server.URL = hs.URL
	id := e.intend("act", `{}`)
	start := time.Now()
	if p := e.goOn(id); !p.Done || text(p.Answer) != "done" {
		t.Errorf("got %+v %s", p, text(p.Answer))
	}
	if d := time.Since(start); d > 30*time.Second {
		t.Errorf("took %v: it waited for the end of a stream that had answered", d)
	}
	mu.Lock()
	defer mu.Unlock()
	if got := strings.Join(told, "\n"); len(told) != 2 || !strings.Contains(got, `"result":{}`) || !strings.Contains(got, "-32601") {
		t.Errorf("the server was told %s", got)
	}
}

// Trap P1: with an idempotency header, on a connection that was used before and
// is dropped after execution, the call arrives once.
func TestReusedConnectionDropped(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var calls, reused atomic.Int32
	go serveByHand(l, &calls, &reused)
	w := testenv.NewMCPWorld(t)
	e := newBareEnv(t, w)
	e.world.URL = "http://" + l.Addr().String() + "/mcp"
	e.connector(contracts{"act": `{"class":"irreversible","idempotency":{"header":"Idempotency-Key"}}`})
	id := e.intend("act", `{}`)
	if p := e.goOn(id); !p.Person {
		t.Errorf("got %+v, want in doubt", p)
	}
	if calls.Load() != 1 || reused.Load() == 0 {
		t.Errorf("%d calls arrived, on a connection used %d times before; want 1 on a used one", calls.Load(), reused.Load())
	}
}

// serveByHand is an MCP server that drops a connection instead of answering a
// call that has arrived on it whole.
func serveByHand(l net.Listener, calls, reused *atomic.Int32) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			br := bufio.NewReader(c)
			for n := int32(0); ; n++ {
				r, err := http.ReadRequest(br)
				if err != nil {
					return
				}
				body, _ := io.ReadAll(r.Body)
				var m struct {
					ID     json.RawMessage
					Method string
				}
				_ = json.Unmarshal(body, &m)
				out := map[string]string{
					"initialize": `{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"x","version":"1"}}`,
					"tools/list": `{"tools":[{"name":"act","inputSchema":{"type":"object"}}]}`,
				}[m.Method]
				switch {
				case m.Method == "tools/call":
					calls.Add(1)
					reused.Store(n)
					if r.Header.Get("Idempotency-Key") == "" {
						calls.Add(100)
					}
					return
				case out == "" && len(m.ID) > 0:
					out = fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32601,"message":"no"}}`, m.ID)
				case out != "":
					out = fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":%s}`, m.ID, out)
				}
				fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(out), out)
			}
		}()
	}
}
