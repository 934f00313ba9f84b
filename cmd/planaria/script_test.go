package main

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/planaria/planaria/api"
)

// TestScript runs the binary as a person uses it, against a real server on a
// free loopback port with a scripted model, and clouds that are real MCP
// servers in this process. Commands beyond testscript's own:
//
//	exits CODE CMD ARG…     runs and wants this exit code
//	capture VAR PATTERN     sets VAR to the group of PATTERN in stdout
//	server start [FLAG…]    starts planaria serve on $WORK/data; sets PLANARIA_SERVER, PLANARIA_API_KEY
//	server stop | kill      SIGTERM and exit code 0 | SIGKILL
//	server term             SIGTERM, without waiting
//	server gone CODE        waits until the server has ended with this code
//	worker start [FLAG…]    a second process on $WORK/data, killed at the end
//	cloud start             starts the old cloud of the demo; sets CLOUD_URL
//	cloud hold TOOL         the next call of TOOL is done, then its answer kept back
//	cloud wait              waits until that call has arrived
//	cloud release           lets the answer go
//	cloud saw N TOOL        TOOL was asked for N times
//	event SESSION TYPE [PATTERN]  waits for the next event of this type that matches
//	postgres                makes an empty PostgreSQL database; sets PG_URL, or skips
//	damage FILE SESSION     flips a bit of the body at seq 5 of SESSION in a database file
func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		UpdateScripts:       *update,
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			e.Values[worldKey{}] = &world{cursor: map[string]int64{}}
			e.Setenv("HOME", e.WorkDir)
			e.Setenv("PATH", os.Getenv("PATH"))
			e.Setenv("TMPDIR", e.WorkDir)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": cmdExits, "capture": cmdCapture, "server": cmdServer, "worker": cmdWorker, "cloud": cmdCloud, "event": cmdEvent, "damage": cmdDamage,
			"postgres": func(ts *testscript.TestScript, _ bool, _ []string) { ts.Setenv("PG_URL", Postgres(t)) },
		},
	})
}

// Postgres makes an empty database; set by the tests that may import testenv.
var Postgres func(testing.TB) string

// waitLimit bounds each wait of a script.
const waitLimit = 60 * time.Second

type worldKey struct{}

// world is what lives outside the commands of one script.
type world struct {
	server *exec.Cmd
	log    *watched
	addr   string
	cloud  *cloud
	hold   *hold
	cursor map[string]int64 // by session: events up to here were waited for
}

func worldOf(ts *testscript.TestScript) *world { return ts.Value(worldKey{}).(*world) }

func cmdExits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE CMD ARG...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	if got := exitCode(ts.Exec(args[1], args[2:]...)); got != want {
		ts.Fatalf("%s: exit code %d, want %d", strings.Join(args[1:], " "), got, want)
	}
}

func cmdCapture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: capture VAR PATTERN")
	}
	m := regexp.MustCompile(args[1]).FindStringSubmatch(ts.ReadFile("stdout"))
	if len(m) != 2 {
		ts.Fatalf("no match for %q in stdout", args[1])
	}
	ts.Setenv(args[0], m[1])
}

func cmdServer(ts *testscript.TestScript, neg bool, args []string) {
	w := worldOf(ts)
	switch {
	case len(args) >= 1 && args[0] == "start":
		ts.Check(w.start(ts, args[1:]))
	case len(args) == 1 && args[0] == "stop":
		ts.Check(w.server.Process.Signal(syscall.SIGTERM))
		if code := exitCode(w.server.Wait()); code != 0 {
			ts.Fatalf("the server ended with %d", code)
		}
		w.server = nil
	case len(args) == 1 && args[0] == "kill":
		w.kill()
	case len(args) == 1 && args[0] == "term":
		ts.Check(w.server.Process.Signal(syscall.SIGTERM))
		w.logged(ts, "draining")
	case len(args) == 2 && args[0] == "gone":
		if code := exitCode(w.server.Wait()); fmt.Sprint(code) != args[1] {
			ts.Fatalf("the server ended with %d, want %s", code, args[1])
		}
		w.server = nil
	default:
		ts.Fatalf("usage: server start [FLAG...] | stop | kill")
	}
}

// cmdWorker starts a second process, which shares store and keys with the first.
func cmdWorker(ts *testscript.TestScript, _ bool, args []string) {
	w := &world{}
	key, url := ts.Getenv("PLANARIA_API_KEY"), ts.Getenv("PLANARIA_SERVER")
	ts.Check(w.start(ts, args[1:]))
	ts.Setenv("PLANARIA_API_KEY", key)
	ts.Setenv("PLANARIA_SERVER", url)
}

// start starts the server; a second start takes the port of the first.
func (w *world) start(ts *testscript.TestScript, flags []string) error {
	if w.addr == "" {
		w.addr = "127.0.0.1:0"
	}
	log, err := os.OpenFile(ts.MkAbs("server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	ts.Defer(func() { w.kill(); ts.Check(log.Close()) })
	c := exec.Command(binary, append([]string{"serve", "--data", ts.MkAbs("data"), "--listen", w.addr}, flags...)...)
	c.Dir = ts.MkAbs(".")
	c.Env = append(withoutOurs(os.Environ()), "PLANARIA_API_KEY="+ts.Getenv("PLANARIA_API_KEY"))
	w.log = &watched{to: log, news: make(chan struct{}, 1)}
	c.Stderr = w.log
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	w.server = c
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if key, ok := strings.CutPrefix(lines.Text(), "planaria: admin key, shown this once: "); ok {
			ts.Setenv("PLANARIA_API_KEY", key)
		}
		if url, ok := strings.CutPrefix(lines.Text(), "planaria: ready on "); ok {
			ts.Setenv("PLANARIA_SERVER", url)
			w.addr = strings.TrimPrefix(url, "http://")
			return nil
		}
	}
	return fmt.Errorf("the server ended before it was ready:\n%s", ts.ReadFile("server.log"))
}

// watched passes a log on and tells when there is more of it.
type watched struct {
	to   io.Writer
	news chan struct{}

	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (l *watched) Write(b []byte) (int, error) {
	l.mu.Lock()
	l.text.Write(b)
	l.mu.Unlock()
	select {
	case l.news <- struct{}{}:
	default:
	}
	return l.to.Write(b)
}

func (l *watched) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), s)
}

// logged waits until the server's log holds a text.
func (w *world) logged(ts *testscript.TestScript, text string) {
	limit := time.After(waitLimit)
	for !w.log.has(text) {
		select {
		case <-w.log.news:
		case <-limit:
			ts.Fatalf("the log does not say %q", text)
		}
	}
}

func (w *world) kill() {
	if w.server != nil {
		_ = w.server.Process.Kill()
		_ = w.server.Wait()
		w.server = nil
	}
}

func cmdCloud(ts *testscript.TestScript, neg bool, args []string) {
	w := worldOf(ts)
	switch {
	case len(args) == 1 && args[0] == "start":
		var err error
		w.cloud, err = listenCloud(oldCloud, ts.MkAbs("cloud.jsonl"))
		ts.Check(err)
		ts.Defer(func() { ts.Check(w.cloud.close()) })
		ts.Setenv("CLOUD_URL", w.cloud.url)
	case len(args) == 2 && args[0] == "hold":
		w.hold = w.cloud.holdAnswer(args[1])
	case len(args) == 1 && args[0] == "wait":
		select {
		case <-w.hold.arrived:
		case <-time.After(waitLimit):
			ts.Fatalf("the call did not arrive within %s\n%s", waitLimit, ts.ReadFile("server.log"))
		}
	case len(args) == 1 && args[0] == "release":
		close(w.hold.release)
	case len(args) == 3 && args[0] == "saw":
		n := 0
		for _, l := range w.cloud.lines(1) {
			if l.Tool == args[2] {
				n++
			}
		}
		if fmt.Sprint(n) != args[1] {
			ts.Fatalf("the cloud was asked %d times for %s, want %s", n, args[2], args[1])
		}
	default:
		ts.Fatalf("usage: cloud start | hold TOOL | wait | release | saw N TOOL")
	}
}

// cmdEvent waits on the session's stream.
func cmdEvent(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 || len(args) > 3 {
		ts.Fatalf("usage: event SESSION TYPE [PATTERN]")
	}
	pattern := regexp.MustCompile("")
	if len(args) == 3 {
		pattern = regexp.MustCompile(args[2])
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), waitLimit, errors.New("the event did not come in time"))
	defer cancel()
	w := worldOf(ts)
	c := &api.Client{BaseURL: ts.Getenv("PLANARIA_SERVER"), Key: ts.Getenv("PLANARIA_API_KEY")}
	for e, err := range c.Stream(ctx, args[0], api.StreamOptions{After: w.cursor[args[0]]}) {
		if err != nil {
			ts.Fatalf("wait for %s: %v\n%s", args[1], err, ts.ReadFile("server.log"))
		}
		if e.Seq > 0 {
			w.cursor[args[0]] = e.Seq
		}
		if string(e.Type()) == args[1] && pattern.MatchString(describe(e)) {
			return
		}
	}
	ts.Fatalf("the stream ended without %s", args[1])
}

// cmdDamage flips one bit of a stored body, as a bad disk would: in the file,
// behind the database's back.
func cmdDamage(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: damage FILE SESSION")
	}
	file := ts.MkAbs(args[0])
	db, err := sql.Open("sqlite", "file:"+file+"?mode=ro")
	ts.Check(err)
	var body []byte
	err = db.QueryRow(`SELECT body FROM log WHERE session = ? AND seq = 5`, args[1]).Scan(&body)
	ts.Check(errors.Join(err, db.Close()))
	data, err := os.ReadFile(file)
	ts.Check(err)
	i := bytes.Index(data, body)
	if i < 0 || len(body) < 16 {
		ts.Fatalf("the body is not in %s", file)
	}
	data[i+len(body)/2] ^= 1
	ts.Check(os.WriteFile(file, data, 0o600))
}
