package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
)

// world is a scripted model over HTTP and an MCP server over loopback that
// write down when each call came and when it was answered, by session.
type world struct {
	modelURL string
	mcpURL   string
	stops    []func()

	mu    sync.Mutex
	calls map[string][]served
}

// served is one call at a server.
type served struct {
	model     bool
	came, end time.Time
}

// newWorld plays a script: steps tool calls of one tool and then an end, the
// model answering after a delay.
func newWorld(tool string, steps, delayMS int) (*world, error) {
	w := &world{calls: map[string][]served{}}
	play := llm.PlayScript{Name: "steps", Repeat: true, Rules: []llm.Step{{
		When: &llm.When{System: "You compress the history"}, Text: "Some steps were done. [script-position: 0]"}}}
	for i := range steps {
		name := "${user}"
		if i > 0 {
			name = fmt.Sprintf("${result.%d./name}", i)
		}
		play.Steps = append(play.Steps, llm.Step{Text: "I go on.", DelayMS: delayMS,
			Tools: []llm.ToolCall{{Name: "mcp__world__" + tool, Input: map[string]any{"name": name, "n": i}}}})
	}
	play.Steps = append(play.Steps, llm.Step{Text: "Done."})
	script := &llm.Script{Scripts: []llm.PlayScript{play}}
	if err := script.Validate(); err != nil {
		return nil, err
	}
	model, stop, err := serveHTTP(w.model(llm.NewScriptServer(script)))
	if err != nil {
		return nil, err
	}
	w.modelURL, w.stops = "http://"+model, append(w.stops, stop)
	tools, stop, err := serveHTTP(w.tools())
	if err != nil {
		w.close()
		return nil, err
	}
	w.mcpURL, w.stops = "http://"+tools+"/mcp", append(w.stops, stop)
	return w, nil
}

func (w *world) close() {
	for _, stop := range w.stops {
		stop()
	}
}

func (w *world) note(name string, s served) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls[name] = append(w.calls[name], s)
}

// model serves the scripted model and notes whose request it was: the name
// stands in the first message, as "[name]".
func (w *world) model(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		came := time.Now()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		next.ServeHTTP(rw, r)
		_, rest, _ := bytes.Cut(body, []byte("[s"))
		name, _, _ := bytes.Cut(rest, []byte("]"))
		w.note("[s"+string(name)+"]", served{true, came, time.Now()})
	})
}

// tools serves act, which is irreversible because nobody says otherwise, and
// look, for which a contract says that it reads.
func (w *world) tools() http.Handler {
	s := mcp.NewServer(&mcp.Implementation{Name: "world", Version: "1"}, nil)
	schema := json.RawMessage(`{"type":"object","properties":{"name":{"type":"string"},"n":{"type":"integer"}},"required":["name"]}`)
	for _, name := range []string{"act", "look"} {
		s.AddTool(&mcp.Tool{Name: name, Description: "Does " + name + ".", InputSchema: schema},
			func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
				came := time.Now()
				var in struct {
					Name string `json:"name"`
				}
				if err := json.Unmarshal(req.Params.Arguments, &in); err != nil {
					return nil, err
				}
				out, err := json.Marshal(map[string]any{"name": in.Name, "done": true})
				if err != nil {
					return nil, err
				}
				w.note(in.Name, served{false, came, time.Now()})
				return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: string(out)}}}, nil
			})
	}
	return mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return s },
		&mcp.StreamableHTTPOptions{Stateless: true, JSONResponse: true})
}

// between returns, for every step, the time from the arrival of its model
// request to the arrival of the next one that was spent in neither server:
// what the two clients, the network and everything around the calls took. The
// first step of each session is left out.
func (w *world) between() (sample, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out sample
	for name, calls := range w.calls {
		for i := 2; i+2 < len(calls); i += 2 {
			m, t, next := calls[i], calls[i+1], calls[i+2]
			if !m.model || t.model || !next.model {
				return nil, fmt.Errorf("session %s: calls %d to %d are not model, tool, model", name, i, i+2)
			}
			out = append(out, next.came.Sub(m.came)-m.end.Sub(m.came)-t.end.Sub(t.came))
		}
	}
	return out, nil
}

// turnSteps is how many steps a turn has: enough to measure, not so many that
// the history, which every model request carries, is all that is measured.
const turnSteps = 20

// benchStep measures whole durable steps beside the two calls alone.
func benchStep(ctx context.Context, b *bench) error {
	t := &table{title: "Whole durable step (model over HTTP, MCP tool over loopback; SQLite)",
		head: []string{"tool", "sessions", "model answers after", "step beyond the servers: median", "p99", "the two calls alone: median", "p99", "overhead: median", "p99", "CPU a step", "of it the two calls", "steps/s"}}
	var worst, worst99 time.Duration
	for _, c := range []struct {
		tool     string
		sessions int // at the same time
		delayMS  int
		rounds   int // sessions one after another, each with a fresh history
	}{
		{"act", 1, 0, b.pick(30, 5)},
		{"look", 1, 0, b.pick(30, 5)},
		{"act", 64, 500, b.pick(2, 1)},
		{"look", 64, 500, b.pick(2, 1)},
		{"act", 64, 0, b.pick(4, 1)},
	} {
		steps, perSecond, cpu, err := b.steps(ctx, c.tool, c.sessions, c.rounds, c.delayMS)
		if err != nil {
			return fmt.Errorf("%s, %d sessions: %w", c.tool, c.sessions, err)
		}
		alone, cpuAlone, err := twoCalls(ctx, c.tool, c.sessions, c.rounds, c.delayMS)
		if err != nil {
			return fmt.Errorf("two calls alone, %d sessions: %w", c.sessions, err)
		}
		over, over99 := steps.median()-alone.median(), steps.p99()-alone.p99()
		if c.sessions == 64 && c.delayMS > 0 {
			worst, worst99 = max(worst, over), max(worst99, over99)
		}
		t.row(c.tool, count(float64(c.sessions)), fmt.Sprintf("%d ms", c.delayMS), ms(steps.median()), ms(steps.p99()),
			ms(alone.median()), ms(alone.p99()), ms(over), ms(over99), ms(cpu), ms(cpuAlone), count(perSecond))
	}
	t.note("`act` is irreversible (three synced commits a step), `look` reads (one). Models and tools run in the process that is measured; " +
		"with an answer at once, 64 sessions keep all cores busy and the time of a step is the time in the queue.")
	t.note("Target: overhead at 64 sessions p50 at most 2 ms, p99 at most 10 ms: %s.", verdict(worst <= 2*time.Millisecond && worst99 <= 10*time.Millisecond))
	t.print()
	return nil
}

// steps runs turns in sessions beside each other, some rounds of it. It returns
// what their steps took beyond the servers, how many there were in a second,
// and how much CPU each took.
func (b *bench) steps(ctx context.Context, tool string, sessions, rounds, delayMS int) (sample, float64, time.Duration, error) {
	w, err := newWorld(tool, turnSteps, delayMS)
	if err != nil {
		return nil, 0, 0, err
	}
	defer w.close()
	dir, err := b.folder("step")
	if err != nil {
		return nil, 0, 0, err
	}
	sys, err := openSystem(ctx, filepath.Join(dir, "data"), w.rules())
	if err != nil {
		return nil, 0, 0, err
	}
	defer sys.close()
	if err := connect(ctx, sys.db, w.mcpURL); err != nil {
		return nil, 0, 0, err
	}
	start, used := time.Now(), cpuTime()
	err = each(sessions, func(i int) error {
		for r := range rounds {
			s, err := sys.create(ctx, agentOf("steps", "scripted", "planaria:world"), fmt.Sprintf("[s%d-%d]", i, r))
			if err == nil {
				err = sys.idle(ctx, s.ID, 0)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, 0, 0, err
	}
	steps := sessions * rounds * turnSteps
	perSecond := float64(steps) / time.Since(start).Seconds()
	cpu := (cpuTime() - used) / time.Duration(steps)
	out, err := w.between()
	return out, perSecond, cpu, err
}

// rules routes every model to the world's.
func (w *world) rules() []llm.Rule {
	return []llm.Rule{
		{Pattern: "*-small", Provider: "anthropic", Config: llm.Config{BaseURL: w.modelURL}, ContextWindow: 1000, MaxOutput: 200},
		{Pattern: "*", Provider: "anthropic", Config: llm.Config{BaseURL: w.modelURL}, ContextWindow: 100_000_000, MaxOutput: 1000},
	}
}

// connect declares the world as a connector whose tool look reads.
func connect(ctx context.Context, db *store.DB, url string) error {
	now := db.Now()
	body, err := json.Marshal(map[string]any{"name": "world", "kind": "mcp", "url": url,
		"tools": map[string]any{"look": map[string]string{"class": "read"}}})
	if err != nil {
		return err
	}
	_, err = db.CreateConnector(ctx, store.Connector{Workspace: workspace, ID: store.ConnectorID(store.NewID("conn_", now)),
		Name: "world", Version: 1, URL: url, Body: body, CreatedAt: now, UpdatedAt: now})
	return err
}

// twoCalls makes the same calls with the same libraries and nothing between
// them: no log, no rule, no record.
func twoCalls(ctx context.Context, tool string, workers, rounds, delayMS int) (sample, time.Duration, error) {
	w, err := newWorld(tool, turnSteps, delayMS)
	if err != nil {
		return nil, 0, err
	}
	defer w.close()
	models, err := llm.NewModels(&http.Client{Transport: llm.Transport((&net.Dialer{}).DialContext)}, w.rules())
	if err != nil {
		return nil, 0, err
	}
	provider, _, err := models.For("scripted")
	if err != nil {
		return nil, 0, err
	}
	// One connection for each worker stays open, as the keeper keeps its own.
	transport := &http.Transport{MaxIdleConnsPerHost: workers}
	defer transport.CloseIdleConnections()
	used := cpuTime()
	err = each(workers, func(i int) error {
		client := mcp.NewClient(&mcp.Implementation{Name: "bench", Version: "1"}, nil)
		session, err := client.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: w.mcpURL, DisableStandaloneSSE: true,
			HTTPClient: &http.Client{Transport: transport}}, nil)
		if err != nil {
			return err
		}
		defer session.Close()
		return pairs(ctx, provider, session, tool, fmt.Sprintf("[s%d]", i), rounds*turnSteps)
	})
	if err != nil {
		return nil, 0, err
	}
	cpu := (cpuTime() - used) / time.Duration(workers*rounds*turnSteps)
	out, err := w.between()
	return out, cpu, err
}

// pairs makes model call and tool call in turns.
func pairs(ctx context.Context, provider llm.Provider, session *mcp.ClientSession, tool, name string, steps int) error {
	req := llm.Request{Model: "scripted", System: "You are measured.", MaxTokens: 1000,
		Messages: []llm.Message{{Role: "user", Content: []llm.Block{{Type: "text", Text: name}}}},
		Tools: []llm.Tool{{Name: "mcp__world__" + tool, Description: "Does " + tool + ".",
			InputSchema: json.RawMessage(`{"type":"object","properties":{"name":{"type":"string"},"n":{"type":"integer"}},"required":["name"]}`)}}}
	for range steps {
		reply, err := provider.Stream(ctx, req, nil)
		if err != nil {
			return err
		}
		last := reply.Content[len(reply.Content)-1]
		if last.Type != "tool_use" {
			return errors.New("the model did not ask for the tool")
		}
		result, err := session.CallTool(ctx, &mcp.CallToolParams{Name: tool, Arguments: last.Input})
		if err != nil {
			return err
		}
		if result.IsError {
			return errors.New("the tool failed")
		}
	}
	return nil
}
