package main

import "github.com/spf13/cobra"

const (
	oldCloud = "old-cloud"
	newCloud = "new-cloud"
)

func (a *app) demoCommand() *cobra.Command { return &cobra.Command{Use: "demo"} }
