package api

import (
	"context"
	"io"
	"time"
)

// SetWait replaces how a client waits between tries.
func (c *Client) SetWait(f func(context.Context, time.Duration) error) { c.wait = f }

// Frame is one frame as the parser read it.
type Frame = frame

// ReadFrames reads frames until the stream ends.
func ReadFrames(r io.Reader, max int) ([]Frame, error) {
	f := newFrameReader(r, max)
	var out []Frame
	for {
		fr, err := f.next()
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		out = append(out, fr)
	}
}

// ErrFrameTooLarge is what a frame over the limit gives.
var ErrFrameTooLarge = errFrameTooLarge

// BodyTypes are the types of events that have a body here.
func BodyTypes() []EventType {
	var out []EventType
	for t := range bodies {
		out = append(out, t)
	}
	return out
}
