package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync"
	"time"

	"github.com/planaria/planaria/internal/sandbox/link"
	"github.com/planaria/planaria/internal/sandbox/wire"
)

// Call is one tool call inside.
type Call struct {
	ID     string          // the tool event's; time-ordered; runs at most once
	Thread string          // whose shell
	Tool   string          // bash, read, write, edit, glob, grep
	Input  json.RawMessage // REF 11.4
	// Progress gets new output while it runs, if set. It may skip some; the
	// result has the whole tail.
	Progress func(text string)
}

// Result is what a call came to. An error of the tool itself is a Result with
// IsError, never a Go error.
type Result = wire.Result

// Do runs a call and waits for its result: across cuts, snapshots, and, when it
// is asked again, across owners. A call whose id is known is not started again.
// When ctx ends the call goes on inside; Cancel stops it. ErrGone when the
// sandbox dies: nobody knows then how far the call came, and all of it is undone
// by restoring a snapshot.
func (s *Sandbox) Do(ctx context.Context, c Call) (*Result, error) {
	r, err := s.call(ctx, wire.Call{ID: c.ID, Thread: c.Thread, Tool: c.Tool, Input: c.Input}, c.Progress)
	if err != nil {
		return nil, fmt.Errorf("call %s: %w", c.ID, err)
	}
	return r, nil
}

// Reattach asks for a call that an earlier owner may have started.
// ErrUnknownCall: it was never started here.
func (s *Sandbox) Reattach(ctx context.Context, id string, progress func(text string)) (*Result, error) {
	r, err := s.call(ctx, wire.Call{ID: id, Only: true}, progress)
	if err != nil {
		return nil, fmt.Errorf("reattach to call %s: %w", id, err)
	}
	return r, nil
}

func (s *Sandbox) call(ctx context.Context, req wire.Call, progress func(string)) (*Result, error) {
	if req.ID == "" {
		return nil, errors.New("id is missing")
	}
	heard := make(chan struct{}, 1)
	defer s.listen(ctx, heard, s.end)()
	for resets := 0; ; resets++ {
		r, err := s.ask(ctx, req, progress, heard)
		// A stream that was reset says nothing about the call: ask again.
		if err == nil || !errors.Is(err, link.ErrReset) {
			return r, err
		}
		if err := s.again(ctx, resets); err != nil {
			return nil, err
		}
	}
}

// askAgain is the longest pause between two requests of which the first was reset.
const askAgain = 500 * time.Millisecond

// again waits until a request may be made once more whose stream was reset: at
// once after the first reset, which another owner or a restore brings about, later
// after each further one. An agent that resets whatever it is asked keeps nobody
// busy.
func (s *Sandbox) again(ctx context.Context, resets int) error {
	if resets > 0 {
		t := time.NewTimer(min(time.Millisecond<<min(resets, 10), askAgain))
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return s.link.wait(ctx)
}

// ask asks once.
func (s *Sandbox) ask(ctx context.Context, req wire.Call, progress func(string), heard chan<- struct{}) (*Result, error) {
	st, err := s.open(ctx, wire.KindCall)
	if err != nil {
		return nil, err
	}
	defer st.Close()
	defer context.AfterFunc(ctx, st.Reset)()
	if err := wire.WriteMessage(st, req); err != nil {
		return nil, s.why(ctx, err)
	}
	for {
		var reply wire.Reply
		if err := wire.ReadReply(st, &reply); err != nil {
			return nil, s.why(ctx, err)
		}
		select {
		case heard <- struct{}{}:
		default:
		}
		switch {
		case reply.Result != nil:
			return bounded(reply.Result), nil
		case reply.Unknown:
			return nil, ErrUnknownCall
		case reply.Progress != "" && progress != nil:
			progress(reply.Progress[max(0, len(reply.Progress)-maxProgress):])
		}
	}
}

// maxProgress bounds what one message tells of a call's output, in bytes; an agent
// of ours says an eighth of it. Those who watch keep hundreds.
const maxProgress = 64 << 10

// bounded is a result that an agent of ours may give: images go to the log and to
// the model as they are.
func bounded(r *Result) *Result {
	n := 0
	for _, i := range r.Images {
		n += len(i.Data) + len(i.MediaType)
	}
	if n > wire.MaxImages+maxProgress || len(r.Images) > maxImages {
		return &Result{Text: "The machine gave more or larger images than a result may have. They were dropped.", IsError: true, Reason: "limit", Millis: r.Millis}
	}
	return r
}

// maxImages bounds the images of one result; tools of ours give one.
const maxImages = 64

// Times of the watch over the agent while somebody waits for it.
var (
	silence = 8 * time.Second  // without a word: ask whether it is there
	answer  = 12 * time.Second // for that
)

// patience is how often the agent may fail to answer in a row. Then a sandbox with
// a call is ended: its snapshot helps, waiting does not. What the host itself asks
// for only fails: nothing that may not be saved yet is ended for it.
const patience = 12

var errSilent = errors.New("its agent does not answer")

// listen watches over the agent while somebody waits for it. A process inside can
// stop it (SIGSTOP) or keep it busy; nobody inside can be relied on to wake it.
func (s *Sandbox) listen(ctx context.Context, heard <-chan struct{}, giveUp func()) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		missed := 0
		for {
			select {
			case <-heard:
				missed = 0
			case <-ctx.Done():
				return
			case <-time.After(silence):
				if s.answers(ctx) || ctx.Err() != nil {
					missed = 0
					continue
				}
				if missed++; missed == patience {
					s.r.log.Error("agent is silent and is given up", "session", s.ID())
					giveUp()
					return
				}
				s.wake(ctx)
			}
		}
	}()
	return func() { cancel(); <-done }
}

// answers tells whether the agent does. While a checkpoint is taken it cannot.
func (s *Sandbox) answers(ctx context.Context) bool {
	if s.paused.Load() || s.frozen.Load() {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	_, err := s.adminUnwatched(ctx, wire.Admin{Op: wire.OpPing})
	return err == nil || errors.Is(err, ErrGone)
}

// open opens a stream once the agent is there.
func (s *Sandbox) open(ctx context.Context, kind string) (*link.Stream, error) {
	if err := s.link.wait(ctx); err != nil {
		return nil, err
	}
	st, err := s.link.mux.Open(kind)
	if err != nil {
		return nil, s.why(ctx, err)
	}
	return st, nil
}

// why says what an error of a stream comes from.
func (s *Sandbox) why(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.link.mu.Lock()
	closed := s.link.closed
	s.link.mu.Unlock()
	if closed != nil {
		return closed
	}
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return link.ErrReset
	}
	return err
}

// admin asks the agent for something that may be asked twice.
func (s *Sandbox) admin(ctx context.Context, req wire.Admin) (*wire.AdminReply, error) {
	ctx, stop := s.watched(ctx)
	defer stop()
	return s.adminUnwatched(ctx, req)
}

// watched makes a context that ends also when the agent is silent for good.
func (s *Sandbox) watched(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	unwatch := s.listen(ctx, nil, func() { cancel(errSilent) })
	return ctx, func() { cancel(nil); unwatch() }
}

func (s *Sandbox) adminUnwatched(ctx context.Context, req wire.Admin) (*wire.AdminReply, error) {
	for resets := 0; ; resets++ {
		reply, err := s.adminOnce(ctx, req, nil)
		if err == nil || !errors.Is(err, link.ErrReset) {
			return reply, err
		}
		if err := s.again(ctx, resets); err != nil {
			return nil, err
		}
	}
}

func (s *Sandbox) adminOnce(ctx context.Context, req wire.Admin, body io.Reader) (*wire.AdminReply, error) {
	st, err := s.open(ctx, wire.KindAdmin)
	if err != nil {
		return nil, err
	}
	defer st.Close()
	defer context.AfterFunc(ctx, st.Reset)()
	if err := wire.WriteMessage(st, req); err != nil {
		return nil, s.why(ctx, err)
	}
	if body != nil {
		if _, err := io.Copy(struct{ io.Writer }{st}, body); err != nil {
			st.Reset() // half a file is none
			return nil, s.why(ctx, err)
		}
	}
	st.CloseWrite()
	var reply wire.AdminReply
	if err := wire.ReadReply(st, &reply); err != nil {
		return nil, s.why(ctx, err)
	}
	return &reply, replyError(&reply)
}

func replyError(r *wire.AdminReply) error {
	switch {
	case r.NotFound:
		return fmt.Errorf("%s: %w", r.Error, fs.ErrNotExist)
	case r.Error != "":
		return errors.New(r.Error)
	}
	return nil
}

// Ack says that the results of these calls are durable: the agent forgets them.
func (s *Sandbox) Ack(ctx context.Context, ids ...string) error {
	if _, err := s.admin(ctx, wire.Admin{Op: wire.OpAck, Calls: ids}); err != nil {
		return fmt.Errorf("acknowledge calls: %w", err)
	}
	return nil
}

// Cancel asks running calls to end; their results say so.
func (s *Sandbox) Cancel(ctx context.Context, ids ...string) error {
	if _, err := s.admin(ctx, wire.Admin{Op: wire.OpCancel, Calls: ids}); err != nil {
		return fmt.Errorf("cancel calls: %w", err)
	}
	return nil
}

// Calls lists the ids of calls that run, and of those whose results wait for
// acknowledgement.
func (s *Sandbox) Calls(ctx context.Context) (running, kept []string, err error) {
	reply, err := s.admin(ctx, wire.Admin{Op: wire.OpPing})
	if err != nil {
		return nil, nil, fmt.Errorf("list calls: %w", err)
	}
	return reply.Running, reply.Kept, nil
}

// Activity tells whether anything happened inside: two equal values mean that
// nothing changed (design section 6, When).
type Activity = wire.Activity

// Activity asks for it.
func (s *Sandbox) Activity(ctx context.Context) (Activity, error) {
	reply, err := s.admin(ctx, wire.Admin{Op: wire.OpActivity})
	if err != nil {
		return Activity{}, fmt.Errorf("ask for activity: %w", err)
	}
	if reply.Activity == nil {
		return Activity{}, errors.New("ask for activity: no answer in the reply")
	}
	a := *reply.Activity
	return a, nil
}

// Same tells whether nothing happened between two activities. Memory moves by
// itself and does not count.
func Same(a, b Activity) bool {
	a.MemoryKiB, b.MemoryKiB = 0, 0
	return a == b
}

// File is an entry of a folder inside.
type File = wire.File

// PutFile writes a file inside, whole or not at all. Mode 0 keeps that of the
// file it replaces, else 0644.
func (s *Sandbox) PutFile(ctx context.Context, path string, mode fs.FileMode, content io.Reader) error {
	ctx, stop := s.watched(ctx)
	defer stop()
	_, err := s.adminOnce(ctx, wire.Admin{Op: wire.OpPut, Path: path, Mode: uint32(mode.Perm())}, content)
	if err != nil {
		return fmt.Errorf("put file %s: %w", path, err)
	}
	return nil
}

// GetFile opens a regular file inside and tells its size. A read that ends
// before that many bytes is io.ErrUnexpectedEOF. fs.ErrNotExist.
func (s *Sandbox) GetFile(ctx context.Context, path string) (io.ReadCloser, int64, error) {
	ctx, unwatch := s.watched(ctx) // until the file is closed
	st, err := s.open(ctx, wire.KindAdmin)
	if err != nil {
		unwatch()
		return nil, 0, fmt.Errorf("get file %s: %w", path, err)
	}
	unhook := context.AfterFunc(ctx, st.Reset)
	stop := sync.OnceFunc(func() { unhook(); unwatch() })
	var reply wire.AdminReply
	err = wire.WriteMessage(st, wire.Admin{Op: wire.OpGet, Path: path})
	if err == nil {
		err = wire.ReadReply(st, &reply)
	}
	if err == nil {
		if err = replyError(&reply); err == nil && reply.Size < 0 {
			err = link.ErrProtocol
		}
	} else {
		err = s.why(ctx, err)
	}
	if err != nil {
		stop()
		_ = st.Close()
		return nil, 0, fmt.Errorf("get file %s: %w", path, err)
	}
	return &fileReader{st: st, left: reply.Size, stop: stop}, reply.Size, nil
}

type fileReader struct {
	st   *link.Stream
	left int64
	stop func()
}

func (f *fileReader) Read(p []byte) (int, error) {
	if f.left == 0 {
		return 0, io.EOF
	}
	n, err := f.st.Read(p[:min(int64(len(p)), f.left)])
	f.left -= int64(n)
	if err == io.EOF && f.left > 0 {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func (f *fileReader) Close() error {
	f.stop()
	if f.left > 0 {
		f.st.Reset()
	}
	return f.st.Close()
}

// ListFiles lists what lies below a folder inside, in the order of names. more
// says that only the first entries are listed: 10,000, fewer with long names.
// Links are listed as links and not followed. fs.ErrNotExist.
func (s *Sandbox) ListFiles(ctx context.Context, path string) (files []File, more bool, err error) {
	reply, err := s.admin(ctx, wire.Admin{Op: wire.OpList, Path: path})
	if err != nil {
		return nil, false, fmt.Errorf("list files of %s: %w", path, err)
	}
	return reply.Files, reply.More, nil
}

// HashTree digests everything below a folder inside: names, kinds, modes,
// owners, times, targets of links, bytes.
func (s *Sandbox) HashTree(ctx context.Context, path string) (string, error) {
	reply, err := s.admin(ctx, wire.Admin{Op: wire.OpHash, Path: path})
	if err != nil {
		return "", fmt.Errorf("hash %s: %w", path, err)
	}
	return reply.Text, nil
}

// clockTolerance is how far the clock inside may be from ours (trial R3).
const clockTolerance = 500 * time.Millisecond
