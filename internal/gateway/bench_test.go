package gateway_test

import (
	"fmt"
	"testing"

	"github.com/planaria/planaria/internal/testenv"
)

// BenchmarkContinue is one call from intent to result over loopback, store
// included; BenchmarkContinue/read has no commit of its own.
func BenchmarkContinue(b *testing.B) {
	for class, contract := range map[string]string{"read": `{"class":"read"}`, "irreversible": `{"class":"irreversible"}`} {
		b.Run(class, func(b *testing.B) {
			w := testenv.NewMCPWorld(b, testenv.MCPTool{Name: "act", Class: "read"})
			e := newEnv(b, w, contracts{"act": contract})
			calls := e.calls("always_allow", "act", `{"x":1}`)
			n := 0
			for b.Loop() {
				n++
				calls[0].Arguments = fmt.Appendf(nil, `{"x":%d}`, n)
				e.goOn(e.rule(calls...)[0].Effect)
			}
		})
	}
}
