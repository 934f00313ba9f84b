//go:build linux

package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/chromedp/cdproto/browser"
	"github.com/chromedp/cdproto/target"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/remote"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// Limits of the browser tool.
const (
	browserStart = 60 * time.Second // until Chromium answers
	browserLoad  = 30 * time.Second // until a page has loaded
	browserAct   = 20 * time.Second // of everything else
	browserPing  = 10 * time.Second // an answer of Chromium itself
	maxTabs      = 10               // older ones are closed
	maxNotes     = 20               // of what happened beside the action
)

// Where the browser keeps what it has. All of it is part of a snapshot.
const (
	browserProfile = "/var/lib/planaria-browser"
	downloadsDir   = Workspace + "/downloads"
)

// chromiums are the places where root file systems have it.
var chromiums = []string{"/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome-stable", "/usr/bin/google-chrome", "/usr/local/bin/chromium", "/opt/google/chrome/chrome"}

// chrome is the one browser of a sandbox: a Chromium that the first call
// starts, and the connection to it. The connection is loopback, so both survive
// a snapshot; where it does not, the next call dials again and finds the same
// page. Time is measured without what was frozen.
type chrome struct {
	agent *Agent
	turn  sync.Mutex // one call at a time

	// Owned by who holds turn. pid 0: none was started.
	pid    int
	exited <-chan syscall.WaitStatus
	root   context.Context // of the connection; nil: none
	hangUp context.CancelFunc
	tabs   []*tab    // oldest first; the last one is used
	last   target.ID // of the page that was used

	mu    sync.Mutex
	notes []string // what happened beside the action
}

type browserInput struct {
	Action   string  `json:"action"`
	URL      string  `json:"url"`
	Selector string  `json:"selector"`
	Text     *string `json:"text"`
	Submit   bool    `json:"submit"`
}

// browserOf returns the browser, made when the first call needs it.
func (a *Agent) browserOf() *chrome {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.chrome == nil {
		a.chrome = &chrome{agent: a}
	}
	return a.chrome
}

// browse runs one call of the browser tool.
func (a *Agent) browse(in browserInput, c *call) wire.Result {
	b := a.browserOf()
	b.turn.Lock()
	defer b.turn.Unlock()
	gone, err := b.ensure(c)
	if err != nil {
		return browserFailure(c, gone, err)
	}
	if gone != "" && in.Action != "open" {
		return failure("browser: %s; open the page again", gone)
	}
	r, err := b.act(in, c)
	if err != nil {
		return browserFailure(c, b.takeNotes(gone), err)
	}
	if notes := b.takeNotes(gone); notes != "" {
		r.Text = strings.TrimRight(notes+"\n"+r.Text, "\n")
	}
	return r
}

func browserFailure(c *call, notes string, err error) wire.Result {
	if c.wasStopped() {
		return cancelled()
	}
	r := failure("browser: %v", err)
	r.Text = join(r.Text, notes)
	if errors.Is(err, errLate) {
		r.Reason = "timeout"
	}
	return r
}

// note keeps what happened beside the action, for the next result.
func (b *chrome) note(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.notes) < maxNotes {
		b.notes = append(b.notes, "["+shorten(fmt.Sprintf(format, args...), 500)+"]")
	}
}

func (b *chrome) takeNotes(first string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	notes := b.notes
	b.notes = nil
	if first != "" {
		notes = append([]string{"[" + first + "]"}, notes...)
	}
	return strings.Join(notes, "\n")
}

// ensure leaves a browser that answers and has a page. gone says why the pages
// of before are no longer there, if they are not.
func (b *chrome) ensure(c *call) (gone string, err error) {
	if b.pid != 0 {
		select {
		case ws := <-b.exited:
			gone = fmt.Sprintf("the browser %s and was started again; its pages are gone", ended(ws))
			b.drop()
		default:
		}
	}
	if b.pid != 0 {
		// Twice: the connection may be gone where the browser is not.
		for range 2 {
			if b.root == nil || b.root.Err() != nil {
				err = b.dial(c)
			}
			if err == nil {
				err = b.follow(c)
			}
			if err == nil || c.wasStopped() {
				return "", err
			}
			b.disconnect()
		}
		gone = "the browser did not answer and was started again; its pages are gone"
		select {
		case ws := <-b.exited: // it was just ending
			gone = fmt.Sprintf("the browser %s and was started again; its pages are gone", ended(ws))
			b.drop()
		case <-time.After(time.Second):
			b.kill()
		}
	}
	if err := b.start(c); err != nil {
		return gone, err
	}
	if err := b.dial(c); err != nil {
		return gone, err
	}
	return gone, b.follow(c)
}

func ended(ws syscall.WaitStatus) string {
	if ws.Signaled() {
		return "was killed (" + ws.Signal().String() + ")"
	}
	return fmt.Sprintf("ended (exit code %d)", ws.ExitStatus())
}

// start starts Chromium and waits until it can be dialled.
func (b *chrome) start(c *call) error {
	program := ""
	for _, p := range chromiums {
		if info, err := os.Stat(p); err == nil && info.Mode().Perm()&0o111 != 0 {
			program = p
			break
		}
	}
	if program == "" {
		return fmt.Errorf("there is no Chromium in this machine's root file system; it needs the package chromium: use an image that has it, or, where packages can be installed here, apt-get install chromium")
	}
	for _, dir := range []string{browserProfile, downloadsDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	// A browser that was killed leaves its lock, under a host name that may be
	// another one by now, and the port of its connection.
	for _, name := range []string{"SingletonLock", "SingletonCookie", "SingletonSocket", "DevToolsActivePort"} {
		_ = os.Remove(filepath.Join(browserProfile, name))
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	pid, exited, err := b.agent.reap.start(append([]string{program}, chromiumFlags()...), &syscall.ProcAttr{
		Dir: Workspace, Env: b.agent.environment(), Files: []uintptr{null.Fd(), null.Fd(), null.Fd()},
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", program, err)
	}
	b.pid, b.exited = pid, exited
	ctx, stop := b.limit(context.Background(), c, browserStart, nil)
	defer stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := debuggerURL(); err == nil {
			return nil
		}
		select {
		case ws := <-b.exited:
			b.drop()
			return fmt.Errorf("%s %s before it could be used", program, ended(ws))
		case <-ctx.Done():
			b.kill()
			return fmt.Errorf("start %s: %w", program, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// chromiumFlags say how it runs. It has no sandbox of its own: gVisor is one.
// Loopback is not asked of the proxy, which stands outside: a page that is
// served in here is reached directly, everything else only through the way out.
func chromiumFlags() []string {
	return []string{
		"--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-default-browser-check",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic", "--disable-breakpad",
		"--disable-default-apps", "--disable-features=Translate,MediaRouter,OptimizationHints", "--mute-audio", "--password-store=basic",
		"--window-size=1280,900", "--user-data-dir=" + browserProfile, "--proxy-server=http://" + EgressAddress,
		// A port of its choice: it writes which one into its profile.
		"--remote-debugging-address=127.0.0.1", "--remote-debugging-port=0", "about:blank",
	}
}

// debuggerURL is where our Chromium can be dialled: it writes that into its
// profile, so no other process at the port passes for it.
func debuggerURL() (string, error) {
	b, err := os.ReadFile(filepath.Join(browserProfile, "DevToolsActivePort"))
	if err != nil {
		return "", err
	}
	port, path, ok := strings.Cut(strings.TrimSpace(string(b)), "\n")
	if _, err := strconv.ParseUint(port, 10, 16); !ok || err != nil || !strings.HasPrefix(path, "/devtools/browser/") {
		return "", errors.New("no address of the browser yet")
	}
	return "ws://127.0.0.1:" + port + path, nil
}

// dial connects to the browser that runs.
func (b *chrome) dial(c *call) error {
	b.disconnect()
	address, err := debuggerURL()
	if err != nil {
		return err
	}
	silent := func(string, ...any) {} // process 1 has no log
	alloc, stop := remote.NewAllocator(context.Background(), address, remote.NoModifyURL)
	root, cancel := chromedp.NewContext(alloc, chromedp.WithBrowserOption(chromedp.WithBrowserErrorf(silent), chromedp.WithBrowserLogf(silent)))
	b.root, b.hangUp = root, func() {
		// Both wait for answers that may never come.
		go func() { cancel(); stop() }()
	}
	err = b.bounded(c, browserPing, func() error {
		events := true
		if err := chromedp.ListenBrowser(root, b.browserEvent); err != nil {
			return err
		}
		_, err := chromedp.CallBrowser(root, browser.SetDownloadBehavior, browser.SetDownloadBehaviorParams{
			Behavior: browser.SetDownloadBehaviorBehaviorAllow, DownloadPath: downloadsDir, EventsEnabled: &events,
		})
		return err
	})
	if err != nil {
		b.disconnect()
		return fmt.Errorf("connect to the browser: %w", err)
	}
	return nil
}

// bounded runs what cannot be given a context that ends, because what it starts
// lives on with its context. When time is up it is left behind; hanging up ends
// it.
func (b *chrome) bounded(c *call, d time.Duration, do func() error) error {
	ctx, stop := b.limit(context.Background(), c, d, nil)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// limit ends a context when time is up, the call is cancelled, or broken says
// so.
func (b *chrome) limit(parent context.Context, c *call, d time.Duration, broken <-chan struct{}) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	w := newWatch()
	go func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-c.cancel:
				cancel(errCancelled)
			case <-broken:
				cancel(errCrashed)
			case <-tick.C:
				if w.elapsed() > d {
					cancel(errLate)
				}
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

var errCrashed = errors.New("the page crashed; it may need more memory than this machine has")

func (b *chrome) disconnect() {
	if b.hangUp != nil {
		b.hangUp()
	}
	b.root, b.hangUp, b.tabs = nil, nil, nil
}

func (b *chrome) drop() {
	b.disconnect()
	b.pid, b.exited = 0, nil
}

func (b *chrome) kill() {
	if b.pid != 0 {
		_ = syscall.Kill(-b.pid, syscall.SIGKILL)
		<-b.exited
	}
	b.drop()
}

// browserEvent notes downloads.
func (b *chrome) browserEvent(ev any) {
	switch e := ev.(type) {
	case *browser.EventDownloadWillBegin:
		b.note("download of %s to %s began", filepath.Base(e.SuggestedFilename), downloadsDir)
	case *browser.EventDownloadProgress:
		switch e.State {
		case browser.DownloadProgressStateCompleted:
			b.note("download complete: %d bytes%s", int64(e.ReceivedBytes), prefixed(" in ", e.FilePath))
		case browser.DownloadProgressStateCanceled:
			b.note("download cancelled")
		}
	}
}

func prefixed(prefix, s string) string {
	if s == "" {
		return ""
	}
	return prefix + s
}

// follow makes the newest page the last tab, and drops those that are closed.
func (b *chrome) follow(c *call) error {
	ctx, stop := b.limit(b.root, c, browserPing, nil)
	defer stop()
	all, err := chromedp.CallBrowser(ctx, target.GetTargets, target.GetTargetsParams{})
	if err != nil {
		return because(ctx, err)
	}
	open := map[target.ID]bool{}
	var fresh []target.ID
	for _, t := range all.TargetInfos {
		if t.Type != "page" || strings.HasPrefix(t.URL, "devtools://") {
			continue
		}
		open[t.TargetID] = true
		if !slices.ContainsFunc(b.tabs, func(o *tab) bool { return o.id == t.TargetID }) {
			fresh = append(fresh, t.TargetID)
		}
	}
	b.tabs = slices.DeleteFunc(b.tabs, func(t *tab) bool {
		if !open[t.id] || t.crashed() {
			t.close()
			return true
		}
		return false
	})
	again := len(b.tabs) == 0 // a new connection: the page of before stays the last
	if i := slices.Index(fresh, b.last); again && i >= 0 {
		fresh = append(slices.Delete(fresh, i, i+1), b.last)
	}
	for _, id := range fresh {
		if !again {
			b.note("a new tab opened; it is the one you see now")
		}
		if err := b.attach(c, id); err != nil {
			return err
		}
	}
	if len(b.tabs) == 0 {
		made, err := chromedp.CallBrowser(ctx, target.CreateTarget, target.CreateTargetParams{URL: "about:blank"})
		if err != nil {
			return because(ctx, err)
		}
		if err := b.attach(c, made.TargetID); err != nil {
			return err
		}
	}
	b.last = b.tabs[len(b.tabs)-1].id
	for len(b.tabs) > maxTabs {
		_, _ = chromedp.CallBrowser(ctx, target.CloseTarget, target.CloseTargetParams{TargetID: b.tabs[0].id})
		b.tabs[0].close()
		b.tabs = b.tabs[1:]
	}
	return nil
}

// because is why a call of the browser failed.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errLate) || errors.Is(cause, errCancelled) || errors.Is(cause, errCrashed) {
			return cause
		}
		return fmt.Errorf("the connection to the browser ended: %w", err)
	}
	return err
}

// refused says what an error of a navigation means.
func refused(address, text string) error {
	host := address
	if u, err := url.Parse(address); err == nil && u.Host != "" {
		host = u.Host
	}
	switch text {
	case "net::ERR_TUNNEL_CONNECTION_FAILED", "net::ERR_PROXY_CONNECTION_FAILED", "net::ERR_EMPTY_RESPONSE", "net::ERR_PROXY_AUTH_UNSUPPORTED":
		return fmt.Errorf("%s was not reached: the way out of this machine refused or could not connect (%s). The environment's network settings decide which hosts are allowed", host, text)
	}
	return fmt.Errorf("%s was not opened: %s", host, text)
}

// shorten cuts a text to a number of characters.
func shorten(s string, chars int) string {
	n := 0
	for i := range s {
		if n++; n > chars {
			return s[:i] + "…"
		}
	}
	return s
}

// decodeJS decodes what a script gave.
func decodeJS(b []byte, v any) error {
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("read what the page gave: %w", err)
	}
	return nil
}
