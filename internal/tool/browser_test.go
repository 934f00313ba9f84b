package tool_test

import (
	"bytes"
	"context"
	"image/png"
	"io"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/planaria/planaria/internal/sandbox"
)

// site is a server inside the sandbox: a page with a counter that never stops,
// a form, and everything that has wedged a browser before.
const site = `
import http.server, time
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass
    def answer(self, body, kind="text/html", code=200, headers=()):
        b = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind + "; charset=utf-8")
        self.send_header("Content-Length", str(len(b)))
        for h in headers: self.send_header(*h)
        self.end_headers()
        self.wfile.write(b)
    def do_GET(self):
        p = self.path
        if p == "/": self.answer(PAGE, headers=[("Set-Cookie", "fromserver=yes; HttpOnly; Max-Age=9999")])
        elif p.startswith("/next"): self.answer("<title>Next</title><p>query " + p + "<p>cookies " + (self.headers.get("Cookie") or "none"))
        elif p == "/slow": time.sleep(1); self.answer("<title>Slow</title>slow page came")
        elif p == "/file": self.answer("saved", "application/octet-stream", headers=[("Content-Disposition", "attachment; filename=got.txt")])
        elif p == "/missing": self.answer("nothing here", code=404)
        else: self.answer("", code=204)
PAGE = """<title>Counter</title><h1>Hello</h1><p id=state></p>
<form action=/next><label>Your name <input name=q></label><select name=c><option>red</option><option value=b>blue</option></select><button>Send</button></form>
<a href=/next?tab target=_blank>in a new tab</a> <a href=/slow>slow</a> <a href=/file>file</a>
<button onclick="alert('wait for me')">alarm</button>
<div style="position:relative"><button id=under>under</button><div id=over style="position:absolute;inset:0"></div></div>
<script>
let n = 0, made = Math.random();
document.cookie = "fromscript=1"; localStorage.kept = "local"; sessionStorage.kept = "session";
caches.open("c").then(c => c.put("/x", new Response("cached")));
setInterval(async () => {
  n++;
  const c = await (await caches.open("c")).match("/x");
  state.textContent = "n=" + n + " made=" + made + " " + document.cookie + " " + localStorage.kept + " " + sessionStorage.kept + " " + (c ? await c.text() : "nothing");
}, 50);
String.prototype.slice = () => "tampered";
</script>"""
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), H).serve_forever()
`

// TestBrowser drives a real Chromium in a real sandbox, over a snapshot and its
// restore (trial R9: a page goes on).
func TestBrowser(t *testing.T) {
	refuse := func(_ context.Context, _ *sandbox.Sandbox, conn io.ReadWriteCloser) {
		defer conn.Close()
		buf := make([]byte, 4096)
		if _, err := conn.Read(buf); err == nil {
			_, _ = io.WriteString(conn, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		}
	}
	e := open(t, func(c *sandbox.Config) { c.Egress = refuse })
	s := e.start(sandbox.Spec{ID: "browser"})
	if out := e.run(s, "bash", in{"command": "test -x /usr/bin/chromium"}); out.IsError {
		a := e.run(s, "browser", in{"action": "open", "url": "http://localhost:8000/"})
		if got := text(t, a); !a.IsError || !strings.Contains(got, "apt-get install chromium") {
			t.Errorf("without Chromium: %s", got)
		}
		t.Skip("this machine has no /usr/bin/chromium (package chromium)")
	}
	if out := e.run(s, "bash", in{"command": "test -x /usr/bin/python3"}); out.IsError {
		t.Skip("this machine has no /usr/bin/python3 (package python3)")
	}
	e.run(s, "write", in{"file_path": "/tmp/site.py", "content": site})
	e.sh(s, "python3 /tmp/site.py > /tmp/site.log 2>&1 & until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.05; done")
	start := time.Now()
	a := e.run(s, "browser", in{"action": "open", "url": "http://localhost:8000/"})
	t.Logf("first page after %v", time.Since(start))
	page := text(t, a)
	for _, want := range []string{"title: Counter\nurl: http://localhost:8000/\n", "Hello", `input[name="q"]: text field "Your name"`, `select[name="c"]: choice`, "red of red | blue", `a[href="/slow"]: link "slow" = /slow`, `form > button: button "Send"`} {
		if a.IsError || !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	e.checks(s, []check{
		{"matches nothing", "browser", in{"action": "click", "selector": "#none"}, "matches nothing on this page", true},
		{"matches many", "browser", in{"action": "click", "selector": "a"}, "matches 3 elements; use one of these:\na[href=\"/next?tab\"]", true},
		{"no selector", "browser", in{"action": "click", "selector": "a["}, "is no CSS selector", true},
		{"covered", "browser", in{"action": "click", "selector": "#under"}, "is covered by #over", true},
		{"type into a button", "browser", in{"action": "type", "selector": "#under", "text": "a"}, "is no field for text", true},
		{"choose", "browser", in{"action": "type", "selector": "select", "text": "blue"}, "blue of red | blue", false},
		{"no option", "browser", in{"action": "type", "selector": "select", "text": "green"}, "there are red | blue", true},
		{"type", "browser", in{"action": "type", "selector": "[name=q]", "text": "Zoë 日本"}, `= "Zoë 日本"`, false},
		{"refused by the way out", "browser", in{"action": "open", "url": "https://example.com/x"}, "example.com was not reached", true},
		{"back", "browser", in{"action": "open", "url": "http://127.0.0.1:8000/"}, "Hello", false},
		{"dialog", "browser", in{"action": "click", "selector": `button[onclick]`}, "a dialog, alert, which was accepted: wait for me", false},
		{"typed", "browser", in{"action": "type", "selector": "[name=q]", "text": "kept text"}, "kept text", false},
	})
	browserShot(e, s)

	// The page goes on in the copy and in the original.
	before := counter(e, s)
	m, err := s.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if after := counter(e, s); after.made != before.made || after.n <= before.n {
		t.Errorf("the original: %+v, then %+v", before, after)
	}
	if err := s.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	copied, _, err := e.r.Restore(t.Context(), m, sandbox.Spec{Workspace: "w1", ID: "copied", Fence: 1})
	if err != nil {
		t.Fatal(err)
	}
	e.killAtEnd(copied)
	start = time.Now()
	after := counter(e, copied)
	t.Logf("restored page after %v", time.Since(start))
	if after.made != before.made || after.n <= before.n || after.rest != before.rest || !strings.Contains(after.rest, "fromscript=1 local session cached") {
		t.Errorf("the copy: %+v, then %+v", before, after)
	}
	e.checks(copied, []check{
		{"typed text", "browser", in{"action": "read"}, `= "kept text"`, false},
		{"submit", "browser", in{"action": "type", "selector": "[name=q]", "text": "sent", "submit": true}, "query /next?q=sent&c=red", false},
		{"cookies", "browser", in{"action": "read"}, "fromserver=yes", false},
		{"again", "browser", in{"action": "open", "url": "http://127.0.0.1:8000/"}, "Hello", false},
		{"new tab", "browser", in{"action": "click", "selector": `a[target="_blank"]`}, "query /next?tab", false},
		{"slow page", "browser", in{"action": "open", "url": "http://127.0.0.1:8000/slow"}, "slow page came", false},
		{"not found", "browser", in{"action": "open", "url": "http://127.0.0.1:8000/missing"}, "status: 404", false},
		{"download", "browser", in{"action": "open", "url": "http://127.0.0.1:8000/file"}, "download complete: 5 bytes", false},
		{"downloaded", "read", in{"file_path": "downloads/got.txt"}, "saved", false},
		{"nobody there", "browser", in{"action": "open", "url": "http://localhost:8001/"}, "localhost:8001 was not opened: net::ERR_CONNECTION_REFUSED", true},
	})
	// Killed, as the guard of the memory would: the next call starts it again.
	e.sh(copied, `kill -9 $(ps -eo pid,args 2>/dev/null | grep -- '--headless=new' | grep -v -- --type= | grep -v grep | awk '{print $1}') 2>/dev/null || for p in /proc/[0-9]*; do tr '\0' ' ' < $p/cmdline | grep -q -- '--headless=new' && kill -9 ${p#/proc/}; done; true`)
	e.checks(copied, []check{
		{"after a kill", "browser", in{"action": "read"}, "was started again; its pages are gone; open the page again", true},
		{"opened again", "browser", in{"action": "open", "url": "http://127.0.0.1:8000/next"}, "query /next", false},
	})
}

type counted struct {
	n          int
	made, rest string
}

var counterText = regexp.MustCompile(`n=(\d+) made=(\S+) (.*)`)

func counter(e *env, s *sandbox.Sandbox) counted {
	e.t.Helper()
	got := text(e.t, e.run(s, "browser", in{"action": "read"}))
	m := counterText.FindStringSubmatch(got)
	if m == nil {
		e.t.Fatalf("no counter on the page:\n%s", got)
	}
	n, _ := strconv.Atoi(m[1])
	return counted{n, m[2], m[3]}
}

func browserShot(e *env, s *sandbox.Sandbox) {
	e.t.Helper()
	a := e.run(s, "browser", in{"action": "screenshot"})
	b := blocks(e.t, a)
	if a.IsError || len(b) != 2 || b[1].Type != "image" || b[1].Source.MediaType != "image/png" || b[1].Source.Type != "base64" {
		e.t.Fatalf("screenshot: %.300s", a.Content)
	}
	img, err := png.DecodeConfig(bytes.NewReader(b[1].Source.Data))
	if err != nil || img.Width < 800 || img.Width > 1568 || img.Height < 600 || img.Height > 1568 {
		e.t.Errorf("screenshot of %d x %d: %v", img.Width, img.Height, err)
	}
	e.t.Logf("screenshot of %d x %d in %d bytes", img.Width, img.Height, len(b[1].Source.Data))
}
