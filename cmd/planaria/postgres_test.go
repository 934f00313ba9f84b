package main_test

import (
	planaria "github.com/planaria/planaria/cmd/planaria"
	"github.com/planaria/planaria/internal/testenv"
)

// The scripts of package main run on a PostgreSQL of our own.
func init() { planaria.Postgres = testenv.Postgres }
