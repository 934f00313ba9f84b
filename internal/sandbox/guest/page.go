//go:build linux

package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/inspector"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/cdproto/target"
	"github.com/chromedp/chromedp"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// Limits of what a page gives.
const (
	maxPageChars = 20_000  // of its text
	maxElements  = 100     // that can be used
	maxPageJSON  = 1 << 20 // bytes
	maxShotSide  = 1568    // pixels; model APIs scale down what is larger
	maxShotBytes = 3500 << 10
)

// tab is one page of the browser.
type tab struct {
	id     target.ID
	ctx    context.Context
	cancel context.CancelFunc
	broken chan struct{} // closed when it has crashed

	mu      sync.Mutex
	loading map[cdp.FrameID]bool
}

func (t *tab) crashed() bool {
	select {
	case <-t.broken:
		return true
	default:
		return false
	}
}

// close lets go of it; the page itself stays.
func (t *tab) close() { go t.cancel() }

func (t *tab) isLoading() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.loading) > 0
}

// attach makes a page the last tab.
func (b *chrome) attach(c *call, id target.ID) error {
	t := &tab{id: id, broken: make(chan struct{}), loading: map[cdp.FrameID]bool{}}
	t.ctx, t.cancel = chromedp.NewContext(b.root, chromedp.WithTargetID(id), chromedp.WithDetachOnCancel(),
		chromedp.WithListener(func(ev any) { b.pageEvent(t, ev) }))
	err := b.bounded(c, browserPing, func() error {
		if err := chromedp.Do(t.ctx); err != nil {
			return err
		}
		// A tab in the background draws nothing.
		_, err := chromedp.CallBrowser(t.ctx, target.ActivateTarget, target.ActivateTargetParams{TargetID: id})
		return err
	})
	if err != nil {
		t.close()
		return fmt.Errorf("attach to the page: %w", err)
	}
	b.tabs = append(b.tabs, t)
	return nil
}

// pageEvent keeps dialogs from holding the page, and follows what loads. It may
// not wait.
func (b *chrome) pageEvent(t *tab, ev any) {
	switch e := ev.(type) {
	case *page.EventJavascriptDialogOpening:
		b.note("the page showed a dialog, %s, which was accepted: %s", e.Type, e.Message)
		go func() {
			_, _ = chromedp.Call(t.ctx, page.HandleJavaScriptDialog, page.HandleJavaScriptDialogParams{Accept: true, PromptText: e.DefaultPrompt})
		}()
	case *inspector.EventTargetCrashed:
		if !t.crashed() {
			close(t.broken)
		}
	case *page.EventFrameStartedLoading:
		t.mu.Lock()
		t.loading[e.FrameID] = true
		t.mu.Unlock()
	case *page.EventFrameStoppedLoading:
		t.mu.Lock()
		delete(t.loading, e.FrameID)
		t.mu.Unlock()
	case *page.EventFrameDetached:
		t.mu.Lock()
		delete(t.loading, e.FrameID)
		t.mu.Unlock()
	}
}

// act does what a call asks for, in the newest page.
func (b *chrome) act(in browserInput, c *call) (wire.Result, error) {
	t := b.tabs[len(b.tabs)-1]
	d := browserAct
	if in.Action == "open" {
		d = browserLoad
	}
	ctx, stop := b.limit(t.ctx, c, d, t.broken)
	defer stop()
	var err error
	switch in.Action {
	case "open":
		err = b.open(ctx, t, in.URL)
	case "click":
		err = click(ctx, t, in.Selector)
	case "type":
		if in.Text == nil {
			return wire.Result{}, errors.New("text is missing")
		}
		err = typeText(ctx, t, in.Selector, *in.Text, in.Submit)
	case "screenshot":
		return screenshot(ctx, t)
	case "read":
	default:
		err = fmt.Errorf("action must be one of open, click, type, read, screenshot, not %q", shorten(in.Action, 60))
	}
	if err != nil {
		return wire.Result{}, because(ctx, err)
	}
	if in.Action == "click" || in.Action == "type" {
		settle(ctx, t)
		if err := b.follow(c); err != nil {
			return wire.Result{}, err
		}
		if newest := b.tabs[len(b.tabs)-1]; newest != t {
			stop()
			t = newest
			ctx, stop = b.limit(t.ctx, c, browserAct, t.broken)
			defer stop()
			settle(ctx, t)
		}
	}
	return b.show(t, c)
}

// open goes to an address and waits until it has loaded. A page that takes too
// long is shown as far as it has come.
func (b *chrome) open(ctx context.Context, t *tab, address string) error {
	r, err := chromedp.Call(ctx, page.Navigate, page.NavigateParams{URL: address})
	switch {
	case err != nil:
		if errors.Is(because(ctx, err), errLate) {
			return fmt.Errorf("%s did not answer within %v: %w", shorten(address, 200), browserLoad, errLate)
		}
		return err
	case r.IsDownload:
		awaitDownload(ctx, b)
		return nil
	case r.ErrorText != "":
		return refused(address, r.ErrorText)
	}
	for {
		state, err := evaluate(ctx, t, "document.readyState")
		if err == nil && string(state) == `"complete"` {
			settle(ctx, t)
			return nil
		}
		if !pause(ctx, 50*time.Millisecond) {
			if errors.Is(context.Cause(ctx), errLate) {
				b.note("the page had not loaded fully after %v", browserLoad)
				return nil
			}
			return context.Cause(ctx)
		}
	}
}

// awaitDownload waits a while for the end of a download that began.
func awaitDownload(ctx context.Context, b *chrome) {
	for range 100 {
		b.mu.Lock()
		done := strings.Contains(strings.Join(b.notes, "\n"), "[download c")
		b.mu.Unlock()
		if done || !pause(ctx, 50*time.Millisecond) {
			return
		}
	}
}

// settle gives a page time to react: shortly, or until what it loads is there.
func settle(ctx context.Context, t *tab) {
	for n := 0; n < 4 || n < 200 && t.isLoading(); n++ {
		if !pause(ctx, 50*time.Millisecond) {
			return
		}
	}
}

// pause waits, and tells whether the context goes on.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// evaluate runs a script of ours in the page, in a world of its own where the
// page's own scripts have changed nothing, and returns its value as JSON.
func evaluate(ctx context.Context, t *tab, script string) ([]byte, error) {
	world, err := chromedp.Call(ctx, page.CreateIsolatedWorld, page.CreateIsolatedWorldParams{FrameID: cdp.FrameID(t.id), WorldName: "planaria"})
	if err != nil {
		return nil, err
	}
	b, err := chromedp.Run(ctx, chromedp.Evaluate[[]byte](script, func(p *runtime.EvaluateParams) {
		p.ContextID = world.ExecutionContextID
		yes := true
		p.ReturnByValue = &yes
	}))
	if err == nil && len(b) > maxPageJSON {
		err = errors.New("the page gave more than can be shown")
	}
	return b, err
}

// script calls one of the functions in pageScript with arguments.
func script(name string, args ...any) string {
	list := make([]string, len(args))
	for i, a := range args {
		b, _ := json.Marshal(a) // strings and numbers
		list[i] = string(b)
	}
	return "(() => {" + pageScript + "\nreturn " + name + "(" + strings.Join(list, ", ") + ")})()"
}

// found is what a script says of a selector.
type found struct {
	Error   string   `json:"error"`
	Count   int      `json:"count"`
	Some    []string `json:"some"`
	X       float64  `json:"x"`
	Y       float64  `json:"y"`
	Kind    string   `json:"kind"`
	Covered string   `json:"covered"`
}

// problem says why an element cannot be used.
func (f *found) problem(selector string) error {
	name := shorten(selector, 200)
	switch {
	case f.Error != "":
		return fmt.Errorf("selector %q: %s", name, shorten(f.Error, 300))
	case f.Count == 0:
		return fmt.Errorf("selector %q matches nothing on this page; read lists the elements that can be used", name)
	case f.Count > 1:
		return fmt.Errorf("selector %q matches %d elements; use one of these:\n%s", name, f.Count, shorten(strings.Join(f.Some, "\n"), 2000))
	case f.Covered != "":
		return fmt.Errorf("the element %q is covered by %s; close that first", name, shorten(f.Covered, 200))
	}
	return nil
}

func find(ctx context.Context, t *tab, script, selector string) (*found, error) {
	b, err := evaluate(ctx, t, script)
	if err != nil {
		return nil, err
	}
	var f found
	if err := decodeJS(b, &f); err != nil {
		return nil, err
	}
	return &f, f.problem(selector)
}

// click presses the one element that a selector matches, as a mouse does.
func click(ctx context.Context, t *tab, selector string) error {
	f, err := find(ctx, t, script("point", selector), selector)
	if err != nil {
		return err
	}
	for _, e := range []input.DispatchMouseEventParams{
		{Type: input.DispatchMouseEventTypeMouseMoved},
		{Type: input.DispatchMouseEventTypeMousePressed, Button: input.MouseButtonLeft, Buttons: 1, ClickCount: 1},
		{Type: input.DispatchMouseEventTypeMouseReleased, Button: input.MouseButtonLeft, ClickCount: 1},
	} {
		e.X, e.Y = f.X, f.Y
		if _, err := chromedp.Call(ctx, input.DispatchMouseEvent, e); err != nil {
			return err
		}
	}
	return nil
}

// typeText replaces what a field holds, or chooses an option.
func typeText(ctx context.Context, t *tab, selector, text string, submit bool) error {
	f, err := find(ctx, t, script("fill", selector, text), selector)
	if err != nil {
		return err
	}
	if f.Kind == "keys" && text != "" {
		if _, err := chromedp.Call(ctx, input.InsertText, input.InsertTextParams{Text: text}); err != nil {
			return err
		}
	}
	if !submit {
		return nil
	}
	key := input.DispatchKeyEventParams{Type: input.DispatchKeyEventTypeKeyDown, Key: "Enter", Code: "Enter", Text: "\r", WindowsVirtualKeyCode: 13}
	if _, err := chromedp.Call(ctx, input.DispatchKeyEvent, key); err != nil {
		return err
	}
	key.Type, key.Text = input.DispatchKeyEventTypeKeyUp, ""
	_, err = chromedp.Call(ctx, input.DispatchKeyEvent, key)
	return err
}

// screenshot is a picture of what is visible of the page.
func screenshot(ctx context.Context, t *tab) (wire.Result, error) {
	b, err := evaluate(ctx, t, "({title: document.title, url: location.href, w: innerWidth, h: innerHeight, x: scrollX, y: scrollY})")
	if err != nil {
		return wire.Result{}, because(ctx, err)
	}
	var v struct {
		Title, URL string
		W, H, X, Y float64
	}
	if err := decodeJS(b, &v); err != nil {
		return wire.Result{}, err
	}
	scale := min(1, maxShotSide/max(v.W, v.H, 1))
	for ; scale > 0.1; scale /= 2 {
		r, err := chromedp.Call(ctx, page.CaptureScreenshot, page.CaptureScreenshotParams{
			Format: page.CaptureScreenshotFormatPng, Clip: &page.Viewport{X: v.X, Y: v.Y, Width: max(v.W, 1), Height: max(v.H, 1), Scale: scale},
		})
		if err != nil {
			return wire.Result{}, because(ctx, err)
		}
		if len(r.Data) <= maxShotBytes {
			return wire.Result{
				Text:   fmt.Sprintf("title: %s\nurl: %s", shorten(v.Title, 300), shorten(v.URL, 2000)),
				Images: []wire.Image{{MediaType: "image/png", Data: r.Data}},
			}, nil
		}
	}
	return wire.Result{}, fmt.Errorf("no screenshot of %.0f x %.0f pixels has less than %d bytes", v.W, v.H, maxShotBytes)
}

// show is the text of a page and what can be used on it.
func (b *chrome) show(t *tab, c *call) (wire.Result, error) {
	ctx, stop := b.limit(t.ctx, c, browserAct, t.broken)
	defer stop()
	var raw []byte
	for {
		var err error
		if raw, err = evaluate(ctx, t, script("show", maxPageChars, maxElements)); err == nil {
			break
		}
		// A page that is just being left cannot answer; the next one can.
		if !pause(ctx, 100*time.Millisecond) {
			return wire.Result{}, fmt.Errorf("the page does not answer (its scripts may be busy): %w", because(ctx, err))
		}
	}
	var v struct {
		Title, URL, Text string
		Status, More     int
		Elements         []struct{ Selector, Kind, Name, Value string }
		Hidden, Frames   int
	}
	if err := decodeJS(raw, &v); err != nil {
		return wire.Result{}, err
	}
	var out strings.Builder
	fmt.Fprintf(&out, "title: %s\nurl: %s\n", shorten(v.Title, 300), shorten(v.URL, 2000))
	if v.Status >= 400 {
		fmt.Fprintf(&out, "status: %d\n", v.Status)
	}
	fmt.Fprintf(&out, "\n%s\n", strings.TrimSpace(v.Text))
	if v.More > 0 {
		fmt.Fprintf(&out, "[… %d characters left out]\n", v.More)
	}
	if v.Frames > 0 {
		fmt.Fprintf(&out, "[the text of %d frames inside the page is not shown]\n", v.Frames)
	}
	if len(v.Elements) > 0 {
		out.WriteString("\nelements (selector: what it is):\n")
	}
	for _, e := range v.Elements {
		fmt.Fprintf(&out, "%s: %s %q%s\n", e.Selector, e.Kind, e.Name, prefixed(" = ", e.Value))
	}
	if v.Hidden > 0 {
		fmt.Fprintf(&out, "[and %d more elements]\n", v.Hidden)
	}
	return wire.Result{Text: out.String()}, nil
}
