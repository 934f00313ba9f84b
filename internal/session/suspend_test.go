package session_test

import (
	"encoding/json"
	"testing"

	"github.com/planaria/planaria/internal/llm"
	"github.com/planaria/planaria/internal/store"
	"github.com/planaria/planaria/internal/testenv"
)

// counting asks for one port after the other, for ever, over connections that
// live as long as they can.
const counting = `cat > /tmp/count.py <<'X'
import http.client, time
i = 0
c = None
while True:
    i = i % 60000 + 1
    try:
        c = c or http.client.HTTPConnection("127.0.0.1", 3128, timeout=5)
        c.request("GET", "http://10.0.0.1:%d/" % i)
        c.getresponse().read()
    except Exception:
        c = None
        time.sleep(0.02)
X
python3 /tmp/count.py >/dev/null 2>&1 & sleep 0.5; echo started`

// What a process asks of the world after the state in which its machine is
// suspended, it would ask again when it is brought back: the way out is closed
// before the machine is saved.
func TestSuspendClosesTheWayOutFirst(t *testing.T) {
	t.Parallel()
	e := testenv.New(t, testenv.Options{Sandboxes: true, Machine: testenv.M{"linger_seconds": 0, "snapshot": "manual"}})
	id := e.Begin("count", llm.PlayScript{Steps: []llm.Step{calls(shell(counting)), ending, calls(shell("sleep 0.3; jobs; echo on")), ending}})
	e.Finish(id)
	suspended(t, e, id)
	e.Say(id, "again")
	e.Finish(id)
	asked := map[int]int{}
	for _, en := range entriesOf(t, e, id) {
		var b store.Tunnel
		if en.Kind == store.KindTunnel && json.Unmarshal(en.Body, &b) == nil && !b.Ended {
			asked[b.Port]++
		}
	}
	for port, n := range asked {
		if n > 1 {
			t.Errorf("port %d was asked for %d times", port, n)
		}
	}
	if len(asked) < 10 {
		t.Errorf("%d requests", len(asked))
	}
	e.Check()
}
