package api_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/api"
)

// script is a server that answers its nth request with its nth handler and
// remembers what it was asked.
type script struct {
	t *testing.T

	mu    sync.Mutex
	steps []http.HandlerFunc
	asked []asked
}

type asked struct {
	method, path, query, body, key, auth, cursor string
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	n := len(s.asked)
	s.asked = append(s.asked, asked{r.Method, r.URL.EscapedPath(), r.URL.RawQuery, string(body),
		r.Header.Get("Idempotency-Key"), r.Header.Get("Authorization"), r.Header.Get("Last-Event-ID")})
	s.mu.Unlock()
	if n >= len(s.steps) {
		s.t.Errorf("unexpected request %d: %s %s", n, r.Method, r.URL)
		http.Error(w, "no more steps", http.StatusTeapot)
		return
	}
	s.steps[n](w, r)
}

// requests is what the server was asked so far.
func (s *script) requests() []asked {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked)
}

// serve starts a scripted server and a client for it that does not sleep.
func serve(t *testing.T, steps ...http.HandlerFunc) (*api.Client, *script, *[]time.Duration) {
	t.Helper()
	s := &script{t: t, steps: steps}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	c := &api.Client{BaseURL: srv.URL + "/", Key: "key_1"}
	var waited []time.Duration
	c.SetWait(func(ctx context.Context, d time.Duration) error {
		waited = append(waited, d)
		return ctx.Err()
	})
	t.Cleanup(func() {
		if n := len(s.requests()); n != len(steps) {
			t.Errorf("%d requests came, want %d", n, len(steps))
		}
	})
	return c, s, &waited
}

func reply(status int, body string, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("request-id", "req_7")
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// cut breaks the connection, after some bytes of a body or before any.
func cut(part string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if part != "" {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, part)
			w.(http.Flusher).Flush()
		}
		panic(http.ErrAbortHandler)
	}
}

const vaultJSON = `{"type":"vault","id":"vlt_1","display_name":"v","metadata":{},"created_at":"2026-11-29T15:14:05.000001Z","updated_at":"2026-11-29T15:14:05.000001Z","archived_at":null}`

func TestClientRetriesWhatIsSafe(t *testing.T) {
	ctx := context.Background()
	create := func(c *api.Client) error {
		v, err := c.CreateVault(ctx, api.VaultCreate{DisplayName: "v"})
		if err == nil && v.ID != "vlt_1" {
			err = fmt.Errorf("vault is %+v", v)
		}
		return err
	}
	read := func(c *api.Client) error { _, err := c.GetVault(ctx, "vlt_1"); return err }
	del := func(c *api.Client) error { _, err := c.DeleteVault(ctx, "vlt_1"); return err }
	overloaded := `{"type":"error","error":{"type":"overloaded_error","message":"busy"},"request_id":"req_8"}`
	for name, c := range map[string]struct {
		call   func(*api.Client) error
		steps  []http.HandlerFunc
		status int // of the error, 0 = none, -1 = not an answer
	}{
		"post, answer lost":      {create, []http.HandlerFunc{cut(""), cut(""), reply(200, vaultJSON)}, 0},
		"post, body cut":         {create, []http.HandlerFunc{reply(200, vaultJSON[:20], "Content-Length", "400"), reply(200, vaultJSON)}, 0},
		"post, 529":              {create, []http.HandlerFunc{reply(529, overloaded), reply(200, vaultJSON)}, 0},
		"post, 429":              {create, []http.HandlerFunc{reply(429, ``), reply(200, vaultJSON)}, 0},
		"post, 400":              {create, []http.HandlerFunc{reply(400, ``)}, 400},
		"post, 409":              {create, []http.HandlerFunc{reply(409, ``)}, 409},
		"post, 500, no":          {create, []http.HandlerFunc{reply(500, ``, "x-should-retry", "false")}, 500},
		"post, 409, yes":         {create, []http.HandlerFunc{reply(409, ``, "x-should-retry", "true"), reply(200, vaultJSON)}, 0},
		"get, answer lost":       {read, []http.HandlerFunc{cut(""), reply(200, vaultJSON)}, 0},
		"get, for ever":          {read, []http.HandlerFunc{reply(503, ``), reply(503, ``), reply(503, ``), reply(503, ``), reply(503, ``)}, 503},
		"delete, answer lost":    {del, []http.HandlerFunc{cut("")}, -1},
		"delete, 503":            {del, []http.HandlerFunc{reply(503, ``)}, 503},
		"redirect":               {read, []http.HandlerFunc{reply(307, ``, "Location", "/elsewhere")}, 307},
		"answer is not JSON":     {read, []http.HandlerFunc{reply(200, `<html>`)}, -1},
		"error page of a proxy":  {read, []http.HandlerFunc{reply(403, `<html>`)}, 403},
		"unknown field is fine":  {read, []http.HandlerFunc{reply(200, `{"id":"vlt_1","new":{"x":1}}`)}, 0},
		"no content is an error": {read, []http.HandlerFunc{reply(204, ``)}, 204},
	} {
		t.Run(name, func(t *testing.T) {
			client, s, _ := serve(t, c.steps...)
			err := c.call(client)
			var e *api.Error
			switch {
			case c.status == 0 && err != nil, c.status != 0 && err == nil:
				t.Fatalf("error = %v, want status %d", err, c.status)
			case c.status > 0 && (!errors.As(err, &e) || e.Status != c.status || e.RequestID != "req_7"):
				t.Errorf("error = %#v, want status %d and the request's id", err, c.status)
			case c.status == -1 && errors.As(err, &e):
				t.Errorf("error = %v, want one that is no answer of the server", err)
			}
			asked := s.requests()
			for i, a := range asked {
				if i > 0 && a != asked[0] {
					t.Errorf("try %d differs: %+v, want %+v", i, a, asked[0])
				}
				if (a.method == "POST") != (a.key != "") || a.auth != "Bearer key_1" {
					t.Errorf("try %d: key %q, authorization %q", i, a.key, a.auth)
				}
			}
		})
	}
}

func TestClientHints(t *testing.T) {
	c, _, waited := serve(t, reply(429, ``, "retry-after", "3"), reply(429, ``, "retry-after-ms", "1500"),
		reply(429, ``, "retry-after", "86400"), reply(500, ``), reply(200, vaultJSON))
	if _, err := c.GetVault(context.Background(), "vlt_1"); err != nil {
		t.Fatal(err)
	}
	w := *waited
	if len(w) != 4 || w[0] != 3*time.Second || w[1] != 1500*time.Millisecond || w[2] != time.Minute || w[3] < 1500*time.Millisecond || w[3] > 2*time.Second {
		t.Errorf("waited %v, want 3s, 1.5s, 1m and 1.5 to 2s", w)
	}
}

func TestClientKeysAndPaths(t *testing.T) {
	c, s, _ := serve(t, reply(200, vaultJSON), reply(200, vaultJSON), reply(200, vaultJSON), reply(200, vaultJSON))
	ctx := context.Background()
	for _, ctx := range []context.Context{ctx, ctx, api.WithIdempotencyKey(ctx, "mine")} {
		if _, err := c.ArchiveVault(ctx, "../a/b?c"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.GetVault(ctx, ".."); err != nil {
		t.Fatal(err)
	}
	asked := s.requests()
	if asked[0].key == asked[1].key || asked[2].key != "mine" {
		t.Errorf("keys %q, %q, %q: want two different ones and the caller's", asked[0].key, asked[1].key, asked[2].key)
	}
	if got, want := asked[0].path, "/v1/vaults/%2E%2E%2Fa%2Fb%3Fc/archive"; got != want {
		t.Errorf("path = %s, want %s", got, want)
	}
	if got, want := asked[3].path, "/v1/vaults/%2E%2E"; got != want {
		t.Errorf("path = %s, want %s", got, want)
	}
	_, err := (&api.Client{BaseURL: "localhost:4747"}).GetVault(ctx, "x")
	if err == nil || !strings.Contains(err.Error(), "server address: must be an absolute http") {
		t.Errorf("bad address: %v", err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := c.GetVault(cancelled, "x"); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestClientPaging(t *testing.T) {
	page := func(next string, ids ...string) http.HandlerFunc {
		var objects []string
		for _, id := range ids {
			objects = append(objects, fmt.Sprintf(`{"type":"vault","id":%q}`, id))
		}
		return reply(200, fmt.Sprintf(`{"data":[%s],"next_page":%s}`, strings.Join(objects, ","), next))
	}
	c, s, _ := serve(t, page(`"p2"`, "a", "b"), page(`"p3"`), reply(500, ``), page(`null`, "c"))
	var got []string
	for v, err := range c.AllVaults(context.Background(), api.ListParams{Limit: 2, IncludeArchived: true}) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, v.ID)
	}
	if want := []string{"a", "b", "c"}; !slices.Equal(got, want) {
		t.Errorf("walked %v, want %v", got, want)
	}
	asked := s.requests()
	for i, want := range []string{"include_archived=true&limit=2", "include_archived=true&limit=2&page=p2",
		"include_archived=true&limit=2&page=p3", "include_archived=true&limit=2&page=p3"} {
		if asked[i].query != want {
			t.Errorf("query %d = %s, want %s", i, asked[i].query, want)
		}
	}

	c, _, _ = serve(t, page(`"p2"`, "a"), page(`"p2"`, "a"))
	var last error
	for _, err := range c.AllVaults(context.Background(), api.ListParams{}) {
		last = err
	}
	if last == nil || !strings.Contains(last.Error(), "same page") {
		t.Errorf("a list that runs in a circle ended with %v", last)
	}
}

func TestClientSendsEvents(t *testing.T) {
	c, s, _ := serve(t, reply(200, `{"data":[{"id":"sevt_1","type":"user.tool_confirmation","tool_use_id":"sevt_0","result":"deny","processed_at":null}]}`))
	e, err := c.Confirm(context.Background(), "sesn_1", "sevt_0", false, "no")
	if err != nil {
		t.Fatal(err)
	}
	if e.ID != "sevt_1" || e.ProcessedAt != nil || e.Type() != api.TypeUserToolConfirmation {
		t.Errorf("Confirm = %+v", e)
	}
	want := `{"events":[{"type":"user.tool_confirmation","tool_use_id":"sevt_0","result":"deny","deny_message":"no"}]}`
	if asked := s.requests()[0]; asked.body != want || asked.path != "/v1/sessions/sesn_1/events" {
		t.Errorf("sent %s to %s, want %s", asked.body, asked.path, want)
	}
}

func TestClientQueries(t *testing.T) {
	at := api.At(time.Date(2026, 11, 29, 15, 14, 5, 0, time.UTC))
	for _, c := range []struct{ got, want string }{
		{api.SessionListParams{AgentID: "a", AgentVersion: 2, Statuses: []api.SessionStatus{"idle", "running"}, CreatedAt: api.TimeRange{GTE: at}, Order: "asc"}.Query().Encode(),
			"agent_id=a&agent_version=2&created_at%5Bgte%5D=2026-11-29T15%3A14%3A05.000000Z&order=asc&statuses%5B%5D=idle&statuses%5B%5D=running"},
		{api.EventListParams{Types: []api.EventType{"a", "b"}, Limit: 5, Page: "p"}.Query().Encode(), "limit=5&page=p&types%5B%5D=a&types%5B%5D=b"},
		{api.EffectListParams{States: []api.EffectState{"in_doubt"}, Classes: []api.EffectClass{"read"}, Tools: []string{"x"}}.Query().Encode(), "class%5B%5D=read&state%5B%5D=in_doubt&tool%5B%5D=x"},
	} {
		if diff := cmp.Diff(c.want, c.got); diff != "" {
			t.Errorf("query (-want +got):\n%s", diff)
		}
	}
}

// log is a server that keeps a session's log and plays the documented rules:
// replay after Last-Event-ID, then the end of the connection.
type log struct {
	t      *testing.T
	events []api.Event // Seq is index+1
	known  int         // cursors up to here are known

	mu      sync.Mutex
	streams int
	cursors []string
	script  func(stream int, after int, w *frames)
}

func (l *log) opened() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.streams
}

type frames struct {
	t *testing.T
	w http.ResponseWriter
}

func (f *frames) event(e api.Event) {
	data, err := api.Encode(e)
	if err != nil {
		f.t.Error(err)
	}
	id := ""
	if e.Seq > 0 {
		id = strconv.FormatInt(e.Seq, 10)
	}
	out, err := api.AppendFrame(nil, string(e.Type()), id, data)
	if err != nil {
		f.t.Error(err)
	}
	f.raw(string(out))
}

func (f *frames) raw(s string) {
	io.WriteString(f.w, s)
	f.w.(http.Flusher).Flush()
}

func newLog(t *testing.T, n int) *log {
	l := &log{t: t, known: n}
	for i := range n {
		at := api.At(time.Date(2026, 1, 1, 0, 0, i, 0, time.UTC))
		var body api.EventBody = &api.AgentMessage{Content: api.Texts(fmt.Sprintf("m%d", i+1))}
		if i == n-1 {
			body = &api.SessionStatusTerminated{}
		}
		l.events = append(l.events, api.Event{ID: fmt.Sprintf("sevt_%d", i+1), ProcessedAt: &at, Body: body, Seq: int64(i + 1)})
	}
	return l
}

func (l *log) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case strings.HasSuffix(r.URL.Path, "/events/stream"):
		after := -1
		cursor := r.Header.Get("Last-Event-ID")
		l.mu.Lock()
		l.cursors = append(l.cursors, cursor)
		l.mu.Unlock()
		for i, e := range l.events {
			if cursor == e.ID || cursor == strconv.FormatInt(e.Seq, 10) {
				after = i + 1
			}
		}
		if cursor == "0" {
			after = 0
		}
		l.mu.Lock()
		l.streams++
		n := l.streams
		l.mu.Unlock()
		w.Header().Set("Content-Type", "text/event-stream")
		w.WriteHeader(200)
		l.script(n, after, &frames{l.t, w})
	case strings.HasSuffix(r.URL.Path, "/events"):
		l.list(w, r)
	default:
		http.NotFound(w, r)
	}
}

// list pages by two and honours order and created_at[gt].
func (l *log) list(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	var gt api.Time
	if v := q.Get("created_at[gt]"); v != "" {
		if err := api.Decode([]byte(strconv.Quote(v)), &gt); err != nil {
			l.t.Error(err)
		}
	}
	l.mu.Lock()
	known := l.known
	l.mu.Unlock()
	var sel []api.Event
	for _, e := range l.events[:known] {
		if e.ProcessedAt.After(gt.Time) {
			sel = append(sel, e)
		}
	}
	if q.Get("order") == "desc" {
		slices.Reverse(sel)
	}
	from, _ := strconv.Atoi(q.Get("page"))
	page := api.Page[api.Event]{Data: sel[min(from, len(sel)):min(from+2, len(sel))]}
	if from+2 < len(sel) {
		next := strconv.Itoa(from + 2)
		page.NextPage = &next
	}
	out, err := api.Encode(page)
	if err != nil {
		l.t.Error(err)
	}
	reply(200, string(out))(w, r)
}

func follow(t *testing.T, l *log, o api.StreamOptions) ([]string, error) {
	t.Helper()
	srv := httptest.NewServer(l)
	defer srv.Close()
	c := &api.Client{BaseURL: srv.URL, Key: "k"}
	c.SetWait(func(ctx context.Context, d time.Duration) error { return ctx.Err() })
	var got []string
	for e, err := range c.Stream(context.Background(), "sesn_1", o) {
		if err != nil {
			return got, err
		}
		name := e.ID
		if name == "" {
			name = string(e.Type())
		}
		got = append(got, name)
	}
	return got, nil
}

func ids(from, to int) []string {
	var out []string
	for i := from; i <= to; i++ {
		out = append(out, fmt.Sprintf("sevt_%d", i))
	}
	return out
}

// Law L10: the union of what streams show is the log, wherever they are cut.
func TestStreamSurvivesCuts(t *testing.T) {
	const n = 12
	for part := 1; part < 200; part += 7 {
		l := newLog(t, n)
		l.script = func(stream, after int, f *frames) {
			if after < 0 {
				t.Errorf("stream %d came with an unknown cursor", stream)
				return
			}
			// Some whole frames, then a part of the next one, then the cut.
			for i, e := range l.events[after:] {
				if i == 2 && after+i < n {
					var b bytes.Buffer
					rec := &frames{t, &bufferWriter{Buffer: &b}}
					rec.event(e)
					f.raw("event: ping\ndata: {\"type\":\"ping\"}\n\n: note\n\n")
					f.raw(b.String()[:min(part, b.Len()-1)])
					panic(http.ErrAbortHandler)
				}
				f.event(e)
			}
		}
		got, err := follow(t, l, api.StreamOptions{})
		if err != nil {
			t.Fatalf("part %d: %v", part, err)
		}
		if diff := cmp.Diff(ids(1, n), got); diff != "" {
			t.Fatalf("part %d (-want +got):\n%s", part, diff)
		}
		// Each connection brings two events; the cursor is the seq, not the id.
		if diff := cmp.Diff([]string{"0", "2", "4", "6", "8", "10"}, l.cursors); diff != "" {
			t.Fatalf("part %d: cursors (-want +got):\n%s", part, diff)
		}
	}
}

type bufferWriter struct {
	*bytes.Buffer
	http.ResponseWriter
}

func (b *bufferWriter) Write(p []byte) (int, error) { return b.Buffer.Write(p) }
func (b *bufferWriter) Flush()                      {}

func TestStreamReset(t *testing.T) {
	l := newLog(t, 9)
	l.script = func(stream, after int, f *frames) {
		switch stream {
		case 1:
			for _, e := range l.events[after : after+3] {
				f.event(e)
			}
		case 2: // the cursor is lost; live frames overlap with the list
			l.mu.Lock()
			l.known = 7
			l.mu.Unlock()
			f.event(api.Event{Body: &api.StreamReset{Reason: "unknown cursor", LastEventID: "3"}})
			for _, e := range l.events[5:] {
				f.event(e)
			}
		}
	}
	got, err := follow(t, l, api.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Concat(ids(1, 3), []string{"stream.reset"}, ids(4, 9))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestStreamLiveAndTransient(t *testing.T) {
	l := newLog(t, 6)
	l.known = 4
	l.script = func(stream, after int, f *frames) {
		if stream == 1 {
			if after != 4 {
				t.Errorf("live stream begins after %d, want 4", after)
			}
			f.event(api.Event{Body: &api.EventStart{Event: api.EventPreview{Type: "agent.message", ID: "sevt_5"}}})
			f.event(api.Event{Body: api.TextDelta("sevt_5", 0, "m")})
			f.event(api.Event{ID: "sevt_q", Body: &api.UserMessage{Content: api.Texts("queued")}})
			return
		}
		for _, e := range l.events[after:] {
			f.event(e)
			f.event(e) // a server that repeats itself
		}
	}
	got, err := follow(t, l, api.StreamOptions{Live: true, Deltas: []api.EventType{"agent.message"}})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"event_start", "event_delta", "sevt_q", "sevt_5", "sevt_6"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestStreamEnds(t *testing.T) {
	fatal := "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"permission_error\",\"message\":\"revoked\"},\"request_id\":\"req_1\"}\n\n"
	busy := "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"busy\"},\"request_id\":\"req_1\"}\n\n"
	t.Run("deleted", func(t *testing.T) {
		l := newLog(t, 3)
		l.script = func(_, _ int, f *frames) {
			f.event(l.events[0])
			f.event(api.Event{ID: "sevt_x", ProcessedAt: l.events[0].ProcessedAt, Body: &api.SessionDeleted{}})
		}
		if got, err := follow(t, l, api.StreamOptions{}); err != nil || !slices.Equal(got, []string{"sevt_1", "sevt_x"}) {
			t.Errorf("got %v, %v", got, err)
		}
	})
	t.Run("error frame", func(t *testing.T) {
		l := newLog(t, 3)
		l.script = func(_, _ int, f *frames) { f.event(l.events[0]); f.raw(fatal) }
		got, err := follow(t, l, api.StreamOptions{})
		var e *api.Error
		if !errors.As(err, &e) || e.Type != api.ErrPermission || e.RequestID != "req_1" || len(got) != 1 || l.opened() != 1 {
			t.Errorf("got %v, %v after %d streams", got, err, l.opened())
		}
	})
	t.Run("passing error frame", func(t *testing.T) {
		l := newLog(t, 3)
		l.script = func(n, after int, f *frames) {
			if n == 1 {
				f.raw(busy)
				return
			}
			for _, e := range l.events[after:] {
				f.event(e)
			}
		}
		if got, err := follow(t, l, api.StreamOptions{After: 1}); err != nil || !slices.Equal(got, ids(2, 3)) {
			t.Errorf("got %v, %v", got, err)
		}
	})
	t.Run("gives up", func(t *testing.T) {
		l := newLog(t, 3)
		l.script = func(_, _ int, f *frames) {}
		if _, err := follow(t, l, api.StreamOptions{}); !errors.Is(err, io.ErrUnexpectedEOF) || l.opened() != api.StreamRetries+1 {
			t.Errorf("error %v after %d streams, want unexpected EOF after %d", err, l.opened(), api.StreamRetries+1)
		}
	})
	t.Run("not found", func(t *testing.T) {
		c, _, _ := serve(t, reply(404, `{"type":"error","error":{"type":"not_found_error","message":"session not found"},"request_id":"req_7"}`))
		for _, err := range c.Stream(context.Background(), "sesn_1", api.StreamOptions{}) {
			var e *api.Error
			if !errors.As(err, &e) || e.Status != 404 {
				t.Errorf("error = %v, want a 404", err)
			}
		}
	})
	t.Run("silent", func(t *testing.T) {
		l := newLog(t, 3)
		done := make(chan struct{})
		l.script = func(n, after int, f *frames) {
			if n == 1 {
				f.event(l.events[0])
				<-done // a connection that hangs
				return
			}
			for _, e := range l.events[after:] {
				f.event(e)
			}
			close(done)
		}
		if got, err := follow(t, l, api.StreamOptions{Silence: 50 * time.Millisecond}); err != nil || !slices.Equal(got, ids(1, 3)) {
			t.Errorf("got %v, %v", got, err)
		}
	})
	t.Run("slow caller", func(t *testing.T) {
		l := newLog(t, 2)
		first := make(chan struct{})
		l.script = func(_, _ int, f *frames) {
			f.event(l.events[0])
			<-first
			f.event(l.events[1])
		}
		srv := httptest.NewServer(l)
		defer srv.Close()
		const silence = 60 * time.Millisecond
		n := 0
		for _, err := range (&api.Client{BaseURL: srv.URL}).Stream(context.Background(), "sesn_1", api.StreamOptions{Silence: silence}) {
			if err != nil {
				t.Fatal(err)
			}
			if n++; n == 1 {
				busy, cancel := context.WithTimeout(context.Background(), 2*silence)
				<-busy.Done() // the time that the caller takes is not the server's silence
				cancel()
				close(first)
			}
		}
		if n != 2 || l.opened() != 1 {
			t.Errorf("%d events from %d streams, want 2 from 1", n, l.opened())
		}
	})
	t.Run("caller's context", func(t *testing.T) {
		l := newLog(t, 3)
		hang := make(chan struct{})
		l.script = func(_, _ int, f *frames) { f.event(l.events[0]); <-hang }
		srv := httptest.NewServer(l)
		defer srv.Close()
		defer close(hang)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var last error
		for _, err := range (&api.Client{BaseURL: srv.URL}).Stream(ctx, "sesn_1", api.StreamOptions{}) {
			cancel()
			last = err
		}
		if !errors.Is(last, context.Canceled) {
			t.Errorf("error = %v, want context.Canceled", last)
		}
	})
	t.Run("caller leaves", func(t *testing.T) {
		l := newLog(t, 3)
		l.script = func(_, _ int, f *frames) { f.event(l.events[0]); f.event(l.events[1]) }
		srv := httptest.NewServer(l)
		defer srv.Close()
		for range (&api.Client{BaseURL: srv.URL}).Stream(context.Background(), "sesn_1", api.StreamOptions{}) {
			break
		}
	})
}

func TestFrames(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		want []api.Frame
	}{
		"plain":         {"event: a\ndata: {}\n\n", []api.Frame{{Event: "a", Data: []byte("{}")}}},
		"no space":      {"event:a\ndata:{}\nid:7\n\n", []api.Frame{{Event: "a", Data: []byte("{}"), ID: "7", HasID: true}}},
		"two lines":     {"data: a\ndata:  b\n\n", []api.Frame{{Data: []byte("a\n b")}}},
		"empty line":    {"data: a\ndata\ndata: b\n\n", []api.Frame{{Data: []byte("a\n\nb")}}},
		"CRLF":          {"event: a\r\ndata: x\r\n\r\n", []api.Frame{{Event: "a", Data: []byte("x")}}},
		"BOM":           {"\xef\xbb\xbfdata: x\n\n", []api.Frame{{Data: []byte("x")}}},
		"comments":      {": ping\n\n:\n\ndata: x\n\n", []api.Frame{{Data: []byte("x")}}},
		"unknown field": {"retry: 5\nwhat: x\ndata: y\n\n", []api.Frame{{Data: []byte("y")}}},
		"name alone":    {"event: a\n\ndata: x\n\n", []api.Frame{{Data: []byte("x")}}},
		"NUL in id":     {"id: a\x00b\ndata: x\n\n", []api.Frame{{Data: []byte("x")}}},
		"cut frame":     {"data: x\n\ndata: y\n", []api.Frame{{Data: []byte("x")}}},
		"cut line":      {"data: x\n\ndata: y", []api.Frame{{Data: []byte("x")}}},
		"nothing":       {"", nil},
	} {
		got, err := api.ReadFrames(strings.NewReader(c.in), 1000)
		if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
	for _, in := range []string{"data: " + strings.Repeat("x", 2000) + "\n\n", strings.Repeat("data: x\n", 500) + "\n", ": " + strings.Repeat("x", 200_000)} {
		if _, err := api.ReadFrames(strings.NewReader(in), 1000); !errors.Is(err, api.ErrFrameTooLarge) {
			t.Errorf("%d bytes: %v, want %v", len(in), err, api.ErrFrameTooLarge)
		}
	}
	for _, bad := range [][3]string{{"", "1", "x"}, {"a\nb", "1", "x"}, {"a", "1\n", "x"}, {"a", "1", "x\ny"}} {
		if _, err := api.AppendFrame(nil, bad[0], bad[1], []byte(bad[2])); err == nil {
			t.Errorf("AppendFrame(%q) = nil, want an error", bad)
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte("event: a\nid: 1\ndata: {}\n\n: x\n\ndata"), "a", "1", []byte("{}"))
	f.Fuzz(func(t *testing.T, in []byte, event, id string, data []byte) {
		frames, err := api.ReadFrames(bytes.NewReader(in), 4096)
		if err != nil && !errors.Is(err, api.ErrFrameTooLarge) {
			t.Errorf("ReadFrames = %v", err)
		}
		for _, fr := range frames {
			if len(fr.Data) > 4096 {
				t.Errorf("frame of %d bytes", len(fr.Data))
			}
		}
		out, err := api.AppendFrame(nil, event, id, data)
		if err != nil {
			return
		}
		back, err := api.ReadFrames(bytes.NewReader(out), 1<<20)
		if err != nil || len(back) != 1 || back[0].Event != event || back[0].ID != id || string(back[0].Data) != string(data) {
			t.Errorf("AppendFrame(%q, %q, %q) reads back as %+v, %v", event, id, data, back, err)
		}
	})
}
