package testenv

import "testing"

// Postgres is replaced below.
func Postgres(t testing.TB) string { t.Skip("no PostgreSQL yet"); return "" }
