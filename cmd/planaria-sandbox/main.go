// Command planaria-sandbox is what each process of a sandbox runs: gVisor
// outside, the agent inside. planaria carries it within itself (make build) and
// keeps a copy per version; it is of no use to a person.
package main

import (
	"fmt"
	"os"

	"github.com/planaria/planaria/cmd/internal/multicall"
)

func main() {
	multicall.Run()
	fmt.Fprintln(os.Stderr, "planaria-sandbox is started by planaria, which carries it; see 'planaria serve --help'")
	os.Exit(2)
}
