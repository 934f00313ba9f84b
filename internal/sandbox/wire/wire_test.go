package wire_test

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// FuzzReadReply: no bytes of an agent break the host, and what was written is read
// again as it was.
func FuzzReadReply(f *testing.F) {
	f.Add([]byte(`{"files":[{"path":"a"},{}],"running":["x"],"text":"\"[,{\\"}`))
	f.Add([]byte(`{"files":[{},{},{}]`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var got, again wire.AdminReply
		head := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
		if err := wire.ReadReply(bytes.NewReader(append(head, body...)), &got); err != nil {
			return
		}
		if n := len(got.Files) + len(got.Running) + len(got.Kept) + len(got.Dead); n > len(body) {
			t.Errorf("%d values of %d bytes", n, len(body))
		}
		var out, twice bytes.Buffer
		if err := wire.WriteMessage(&out, got); err != nil {
			t.Fatal(err)
		}
		said := bytes.Clone(out.Bytes())
		if err := wire.ReadReply(&out, &again); err != nil {
			t.Fatal(err)
		}
		if err := wire.WriteMessage(&twice, again); err != nil || !bytes.Equal(said, twice.Bytes()) {
			t.Errorf("%s was read as %s, %v", said[4:], twice.Bytes()[4:], err)
		}
	})
}
