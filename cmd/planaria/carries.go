//go:build carries

package main

import _ "embed" // for the program

// carried is what sandboxes run: make build compiles it first. A program of
// 40 MB beside one of 100 costs each sandbox 10 MB less than one that is both.
//
//go:embed planaria-sandbox
var carried string

// becomeSandbox does nothing: sandboxes run the carried program.
func becomeSandbox() {}
