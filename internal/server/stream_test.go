package server_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/planaria/planaria/internal/server"
)

// frame is one frame of a stream.
type frame struct {
	id, event string
	data      map[string]any
}

func (f frame) eventID() string { id, _ := f.data["id"].(string); return id }

func (f frame) processed() bool { return f.data["processed_at"] != nil }

// stream is an open stream.
type stream struct {
	t    *testing.T
	resp *http.Response
	r    *bufio.Reader
	stop context.CancelFunc
}

func (e *env) stream(path string, headers ...string) *stream {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), 30*time.Second)
	e.t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, "GET", e.url+path, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+adminKey)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		e.t.Fatal(err)
	}
	if resp.StatusCode != 200 || resp.Header.Get("content-type") != "text/event-stream" || resp.Header.Get("request-id") == "" {
		b, _ := io.ReadAll(resp.Body)
		e.t.Fatalf("stream = %d %s %s", resp.StatusCode, resp.Header, b)
	}
	return &stream{e.t, resp, bufio.NewReader(resp.Body), cancel}
}

// next reads a frame; io.EOF at the end of the stream.
func (s *stream) next() (frame, error) {
	var f frame
	for {
		line, err := s.r.ReadString('\n')
		if err != nil {
			return f, err
		}
		line = strings.TrimSuffix(line, "\n")
		name, value, _ := strings.Cut(line, ": ")
		switch name {
		case "id":
			f.id = value
		case "event":
			f.event = value
		case "data":
			if err := json.Unmarshal([]byte(value), &f.data); err != nil {
				s.t.Fatalf("frame %q: %v", line, err)
			}
		case "":
			if f.event == "" || f.data["type"] != f.event {
				s.t.Fatalf("frame without name, or another than its type: %+v", f)
			}
			return f, nil
		}
	}
}

// until reads frames up to one of a type.
func (s *stream) until(event string) []frame {
	s.t.Helper()
	var all []frame
	for {
		f, err := s.next()
		if err != nil {
			s.t.Fatalf("stream ended before %s: %v; %+v", event, err, all)
		}
		all = append(all, f)
		if f.event == event {
			return all
		}
	}
}

// rest reads up to the end of the stream.
func (s *stream) rest() []frame {
	s.t.Helper()
	var all []frame
	for {
		f, err := s.next()
		if err == io.EOF {
			return all
		}
		if err != nil {
			s.t.Fatalf("stream did not end: %v", err)
		}
		all = append(all, f)
	}
}

func (s *stream) close() { s.stop(); s.resp.Body.Close() }

func (e *env) say(session, text string) {
	e.t.Helper()
	got := e.do("POST", "/v1/sessions/"+session+"/events", fmt.Sprintf(`{"events":[{"type":"user.message","content":[{"type":"text","text":%q}]}]}`, text))
	if got.status != 200 {
		e.t.Fatalf("send: %d %s", got.status, got.body)
	}
}

// events lists the whole log through the API.
func (e *env) events(session string) (ids []string, byID map[string]map[string]any) {
	e.t.Helper()
	byID = map[string]map[string]any{}
	page := ""
	for {
		var list struct {
			Data     []map[string]any
			NextPage *string `json:"next_page"`
		}
		e.do("GET", "/v1/sessions/"+session+"/events?limit=4"+page, "").get(e.t, &list)
		for _, ev := range list.Data {
			ids = append(ids, ev["id"].(string))
			byID[ev["id"].(string)] = ev
		}
		if list.NextPage == nil {
			return ids, byID
		}
		page = "&page=" + *list.NextPage
	}
}

// A stream opened now shows what happens from now on, in the log's order, with
// the seq as id on what is in the log and none on what is queued.
func TestStreamLive(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	path := "/v1/sessions/" + o.session
	e.say(o.session, "hi")
	e.idle(o.session)
	for _, at := range []string{path + "/events/stream", path + "/threads/" + o.thread + "/stream"} {
		st := e.stream(at)
		before, _ := e.events(o.session)
		e.say(o.session, "hi again")
		frames := st.until("session.status_idle")
		st.close()
		after, byID := e.events(o.session)
		var got []string
		seq := 0
		for _, f := range frames {
			if f.event == "ping" {
				continue
			}
			if f.processed() {
				got = append(got, f.eventID())
				var n int
				if _, err := fmt.Sscan(f.id, &n); err != nil || n <= seq {
					t.Errorf("id %q after %d", f.id, seq)
				}
				seq = n
				if diff := cmp.Diff(byID[f.eventID()], f.data); diff != "" {
					t.Errorf("stream and list differ (-list +stream):\n%s", diff)
				}
			} else if f.id != "" || f.event != "user.message" {
				t.Errorf("queued frame %+v", f)
			}
		}
		if diff := cmp.Diff(after[len(before):], got); diff != "" {
			t.Errorf("stream of new events (-log +stream):\n%s", diff)
		}
	}
}

// Trial S1, law L10: streams are cut at random points and opened again by their
// cursor, a seq or an event id. The union is the log: nothing is missing,
// nothing is out of order, nothing shows twice but a queued client event.
func TestS1CutAndResume(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 1))
	path := "/v1/sessions/" + o.session + "/events/stream"
	const turns = 6
	talked := make(chan struct{})
	go func() {
		defer close(talked)
		for i := range turns {
			e.say(o.session, fmt.Sprint("think slowly ", i))
			e.idle(o.session)
		}
	}()
	var got []string
	queued := map[string]int{}
	cursor, idles, cuts := "0", 0, 0
	for idles < turns {
		st := e.stream(path+"?event_deltas[]=agent.message", "Last-Event-ID", cursor)
		for n := 1 + rnd.IntN(6); n > 0 && idles < turns; n-- {
			f, err := st.next()
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			switch {
			case f.event == "ping" || f.event == "event_start" || f.event == "event_delta":
				if f.id != "" {
					t.Errorf("seed %d: transient frame with id %q", seed, f.id)
				}
			case !f.processed():
				if slices.Contains(got, f.eventID()) {
					t.Errorf("seed %d: %s shows as queued after it was logged", seed, f.eventID())
				}
				queued[f.eventID()]++
			default:
				got = append(got, f.eventID())
				if cursor = f.id; rnd.IntN(2) == 0 {
					cursor = f.eventID()
				}
				if f.event == "session.status_idle" {
					idles++
				}
			}
		}
		st.close()
		cuts++
	}
	<-talked
	want, _ := e.events(o.session)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("seed %d, %d cuts: union of streams (-log +streams):\n%s", seed, cuts, diff)
	}
	t.Logf("%d cuts, %d events", cuts, len(got))
}

// Trial S1, the documented recipe: open a stream, list everything, drop what is
// there twice by id; again after each cut. A server restart is a cut too.
func TestS1Recipe(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	path := "/v1/sessions/" + o.session + "/events/stream"
	seen := map[string]bool{}
	var got []string
	note := func(id string, processed any) {
		if processed != nil && !seen[id] {
			seen[id] = true
			got = append(got, id)
		}
	}
	for turn := range 4 {
		st := e.stream(path)
		ids, byID := e.events(o.session)
		for _, id := range ids {
			note(id, byID[id]["processed_at"])
		}
		e.say(o.session, "think slowly")
		for range 2 + 2*turn { // then the connection breaks
			f, err := st.next()
			if err != nil {
				t.Fatal(err)
			}
			note(f.eventID(), f.data["processed_at"])
		}
		st.close()
		e.idle(o.session)
		if turn == 2 {
			e.restart()
		}
	}
	ids, byID := e.events(o.session)
	for _, id := range ids {
		note(id, byID[id]["processed_at"])
	}
	slices.Sort(ids)
	slices.Sort(got)
	if diff := cmp.Diff(ids, got); diff != "" {
		t.Errorf("union (-log +client):\n%s", diff)
	}
}

// Who opens a stream in the middle of an answer sees its start and all of it,
// from now on as well as with a cursor, behind the log that the cursor asks for.
func TestStreamLateReader(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	path := "/v1/sessions/" + o.session + "/events/stream"
	early := e.stream(path + "?event_deltas[]=agent.message")
	e.say(o.session, "drag on")
	early.until("event_delta")
	early.until("event_delta")
	for _, headers := range [][]string{nil, {"Last-Event-ID", "0"}} {
		late := e.stream(path+"?event_deltas[]=agent.message", headers...)
		frames := late.until("event_start")
		if headers == nil && len(frames) > 1 {
			t.Errorf("before the start: %+v", frames)
		}
		frames = append(frames[len(frames)-1:], late.until("agent.message")...)
		late.close()
		final := frames[len(frames)-1]
		frames = frames[:len(frames)-1]
		if frames[0].event != "event_start" || frames[0].data["event"].(map[string]any)["id"] != final.eventID() {
			t.Fatalf("%v: first frame %+v, want the start of %s", headers, frames[0], final.eventID())
		}
		said := ""
		for _, f := range frames[1:] {
			if f.event != "event_delta" {
				continue // the start of the request may be committed only now
			}
			said += f.data["delta"].(map[string]any)["content"].(map[string]any)["text"].(string)
		}
		if want := final.data["content"].([]any)[0].(map[string]any)["text"]; said != want {
			t.Errorf("%v: the previews say %q, the message %q", headers, said, want)
		}
		e.idle(o.session)
		e.say(o.session, "drag on")
		early.until("event_start")
		early.until("event_delta")
		early.until("event_delta")
	}
	early.close()
}

// A cursor that the log does not know: said so, then live.
func TestStreamReset(t *testing.T) {
	e := newEnv(t)
	e.stop()
	e.start(func(c *server.Config) { c.PingEvery = time.Hour }) // nothing but the reset itself flushes it
	o := e.fill(adminKey)
	other := e.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":%q,"environment_id":%q}`, o.agent, o.environment)).id(t)
	e.say(o.session, "hi")
	e.idle(o.session)
	ids, _ := e.events(o.session)
	for _, cursor := range []string{"999999", "-1", "nonsense", "sevt_00000000000000000000000000", ids[0]} {
		st := e.stream("/v1/sessions/"+other+"/events/stream", "Last-Event-ID", cursor)
		f, err := st.next()
		if err != nil || f.event != "stream.reset" || f.id != "" || f.data["oldest_cursor"] != "0" || f.data["last_event_id"] != cursor {
			t.Errorf("cursor %q: first frame %+v, %v", cursor, f, err)
		}
		st.close()
	}
	st := e.stream("/v1/sessions/"+o.session+"/events/stream", "Last-Event-ID", "999999")
	e.say(o.session, "hi")
	frames := st.until("session.status_idle")
	st.close()
	if frames[0].event != "stream.reset" || slices.Contains(ids, frames[1].eventID()) {
		t.Errorf("after a reset: %+v", frames[:2])
	}
	st = e.stream("/v1/sessions/"+o.session+"/events/stream", "Last-Event-ID", "0")
	frames = st.until("session.status_idle")
	st.close()
	if frames[0].eventID() != ids[0] {
		t.Errorf("from the oldest cursor the first frame is %+v, want %s", frames[0], ids[0])
	}
}

func TestStreamEnds(t *testing.T) {
	e := newEnv(t)
	o := e.fill(adminKey)
	e.say(o.session, "hi")
	e.idle(o.session)
	path := "/v1/sessions/" + o.session
	st := e.stream(path + "/events/stream")
	if got := e.do("POST", path+"/archive", ""); got.status != 200 {
		t.Fatalf("archive: %d %s", got.status, got.body)
	}
	frames := st.rest()
	if last := frames[len(frames)-1]; last.event != "session.status_terminated" {
		t.Errorf("a terminated session's stream ends with %s", last.event)
	}
	if frames := e.stream(path + "/events/stream").rest(); len(frames) != 0 {
		t.Errorf("a stream of a terminated session shows %+v", frames)
	}
	frames = e.stream(path+"/events/stream", "Last-Event-ID", "0").rest()
	if last := frames[len(frames)-1]; last.event != "session.status_terminated" {
		t.Errorf("replayed, it ends with %s", last.event)
	}

	doomed := e.do("POST", "/v1/sessions", fmt.Sprintf(`{"agent":%q,"environment_id":%q}`, o.agent, o.environment)).id(t)
	a, b := e.stream("/v1/sessions/"+doomed+"/events/stream"), e.stream("/v1/sessions/"+doomed+"/events/stream")
	if got := e.do("DELETE", "/v1/sessions/"+doomed, ""); got.status != 200 {
		t.Fatalf("delete: %d %s", got.status, got.body)
	}
	x, y := a.rest(), b.rest()
	if len(x) != 1 || x[0].event != "session.deleted" || !x[0].processed() || x[0].eventID() != y[0].eventID() {
		t.Errorf("streams of a deleted session end with %+v and %+v", x, y)
	}
}

func TestStreamPing(t *testing.T) {
	e := newEnv(t)
	e.stop()
	e.start(func(c *server.Config) { c.PingEvery = 20 * time.Millisecond })
	o := e.fill(adminKey)
	st := e.stream("/v1/sessions/" + o.session + "/events/stream")
	for range 3 {
		if f, err := st.next(); err != nil || f.event != "ping" {
			t.Fatalf("%+v, %v", f, err)
		}
	}
	st.close()
}

// A revoked key sees no more, though its stream was open before.
func TestStreamRevokedKey(t *testing.T) {
	e := newEnv(t)
	e.stop()
	e.start(func(c *server.Config) { c.PingEvery = 20 * time.Millisecond })
	o := e.fill(adminKey)
	k := e.do("POST", "/v1/api_keys", `{"name":"reader","role":"viewer"}`).object(t)
	st := e.stream("/v1/sessions/"+o.session+"/events/stream", "Authorization", "Bearer "+k["key"].(string))
	st.until("ping")
	if got := e.do("DELETE", "/v1/api_keys/"+k["id"].(string), ""); got.status != 200 {
		t.Fatalf("revoke: %d %s", got.status, got.body)
	}
	frames := st.rest()
	if last := frames[len(frames)-1]; last.event != "error" {
		t.Errorf("the stream ends with %+v, want an error", last)
	}
}

// A reader that takes nothing is cut off, and gets the rest by its cursor.
func TestStreamSlowReader(t *testing.T) {
	e := newEnv(t)
	e.stop()
	e.start(func(c *server.Config) { c.WriteTimeout = 100 * time.Millisecond })
	o := e.fill(adminKey)
	if got := e.do("POST", "/v1/sessions/"+o.session+"/pause", ""); got.status != 200 {
		t.Fatalf("pause: %d %s", got.status, got.body)
	}
	const n = 24 // of 512 KiB: more than the buffers of a connection
	text := strings.Repeat("x", 512<<10)
	for range n {
		e.say(o.session, text)
	}
	path := "/v1/sessions/" + o.session + "/events/stream"
	st := e.stream(path, "Last-Event-ID", "0")
	<-e.ended // the server has given up on it
	read := 0
	for {
		f, err := st.next()
		if err != nil {
			break
		}
		if f.event == "user.message" {
			read++
		}
	}
	st.close()
	if read >= n {
		t.Fatalf("the reader got all %d events although it was too slow", read)
	}
	e.restart() // with patience again
	again := e.stream(path, "Last-Event-ID", "0")
	for range n {
		again.until("user.message")
	}
	again.close()
}
