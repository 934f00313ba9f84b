// Package multicall is what a program does that is gVisor and the agent inside
// sandboxes too, told apart by argv[0]. It alone imports gVisor.
package multicall
