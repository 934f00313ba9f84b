package api

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
)

// maxFrame bounds one frame of a stream: the wire limit of an event (32 MiB)
// and room for its envelope.
const maxFrame = 40 << 20

// errFrameTooLarge ends a stream whose frame would not fit.
var errFrameTooLarge = errors.New("frame is too large")

// frame is one event of an event stream.
type frame struct {
	Event string // name; empty when there was none
	Data  []byte // data lines joined by line feeds
	ID    string // id of this frame; empty when there was none
	HasID bool
}

// frameReader reads an event stream (text/event-stream).
type frameReader struct {
	r     *bufio.Reader
	max   int
	alive func() // called for every line; nil = nothing
	begun bool
}

func newFrameReader(r io.Reader, max int) *frameReader {
	return &frameReader{r: bufio.NewReaderSize(r, 64<<10), max: max}
}

// next returns the next frame that has data or an id. A frame that the end of
// the stream cut is not one: the error is io.EOF, or what ended the reading.
func (f *frameReader) next() (frame, error) {
	var out frame
	hasData := false
	budget := f.max
	for {
		line, err := f.line(&budget)
		if err != nil {
			return frame{}, err
		}
		if len(line) == 0 {
			if hasData || out.HasID {
				return out, nil
			}
			out, budget = frame{}, f.max // pings by comment, names without data
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "event":
			out.Event = string(value)
		case "data":
			if hasData {
				out.Data = append(out.Data, '\n')
			}
			out.Data = append(out.Data, value...)
			hasData = true
		case "id":
			if bytes.IndexByte(value, 0) < 0 {
				out.ID, out.HasID = string(value), true
			}
		}
	}
}

// line reads a line without its end and takes its length from the budget.
func (f *frameReader) line(budget *int) ([]byte, error) {
	var line []byte
	for {
		part, err := f.r.ReadSlice('\n')
		if *budget -= len(part); *budget < 0 {
			return nil, errFrameTooLarge
		}
		line = append(line, part...)
		if err == bufio.ErrBufferFull {
			continue
		}
		if err != nil {
			return nil, err
		}
		break
	}
	if f.alive != nil {
		f.alive()
	}
	line = bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r"))
	if !f.begun {
		f.begun = true
		line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
	}
	return line, nil
}

// AppendFrame appends one frame of an event stream: the name, which is always
// there, the id unless it is empty, and the data, which is one line of JSON.
func AppendFrame(out []byte, event, id string, data []byte) ([]byte, error) {
	if event == "" || strings.ContainsAny(event, "\r\n") || strings.ContainsAny(id, "\r\n\x00") || bytes.ContainsAny(data, "\r\n") {
		return out, fmt.Errorf("write frame %q: name, id and data must be one line each", event)
	}
	out = append(append(append(out, "event: "...), event...), '\n')
	if id != "" {
		out = append(append(append(out, "id: "...), id...), '\n')
	}
	return append(append(append(out, "data: "...), data...), "\n\n"...), nil
}
