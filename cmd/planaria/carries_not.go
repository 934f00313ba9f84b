//go:build !carries

package main

import "github.com/planaria/planaria/cmd/internal/multicall"

// carried is empty in what go build and go install make by themselves: they
// cannot compile one program before another. Sandboxes then run this binary.
const carried = ""

// becomeSandbox turns this program into what sandboxes run when it was started
// as that. Nothing may run before it.
func becomeSandbox() { multicall.Run() }
