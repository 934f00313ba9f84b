//go:build !linux

package store_test

import "errors"

func failSyncs() error { return errors.New("only on Linux") }
