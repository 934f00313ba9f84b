// Package testenv runs the parts of the system that tests need for real. It is
// imported by _test.go files only.
package testenv

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// pgFolders are where PostgreSQL's programs are looked for, before PATH.
var pgFolders = []string{"/usr/lib/postgresql/15/bin", "/usr/lib/postgresql/16/bin", "/usr/lib/postgresql/17/bin", "/usr/local/pgsql/bin"}

// pgStart bounds how long the server may take to answer.
const pgStart = 60 * time.Second

// errNoPostgres says that the machine has no PostgreSQL.
var errNoPostgres = errors.New("no PostgreSQL: initdb and postgres are neither in /usr/lib/postgresql nor in PATH")

// pgServer is the one server of this test binary.
type pgServer struct {
	socket string // folder of the unix socket
	err    error
	// stdin is held open by this process; its end tells the server's keeper to
	// stop it, however this process ends.
	stdin *os.File
}

var (
	pgOnce  sync.Once
	pg      pgServer
	pgCount atomic.Int64
)

// Postgres makes an empty database on a PostgreSQL server of our own and
// returns its URL; the test skips where the machine has no PostgreSQL. The
// server is started once per test binary, on a unix socket, and goes away with
// the binary, and all databases with it: dropping one costs a checkpoint.
func Postgres(t testing.TB) (url string) {
	t.Helper()
	pgOnce.Do(func() { pg.err = pg.start() })
	if errors.Is(pg.err, errNoPostgres) {
		t.Skip(pg.err)
	}
	if pg.err != nil {
		t.Fatalf("start PostgreSQL: %v", pg.err)
	}
	name := fmt.Sprintf("planaria_%d", pgCount.Add(1))
	if err := pg.admin(t.Context(), "CREATE DATABASE "+name); err != nil {
		t.Fatalf("create database: %v", err)
	}
	return pg.url(name)
}

func (s *pgServer) url(database string) string {
	return "postgres:///" + database + "?host=" + s.socket + "&user=planaria"
}

func (s *pgServer) admin(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, s.url("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

// start makes a data folder and runs the server as a user that is not root.
func (s *pgServer) start() error {
	initdb, err := pgProgram("initdb")
	if err != nil {
		return err
	}
	postgres, err := pgProgram("postgres")
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "planaria-pg-")
	if err != nil {
		return err
	}
	attr, err := unprivileged(dir)
	if err != nil {
		return err
	}
	data := filepath.Join(dir, "data")
	cmd := exec.Command(initdb, "-D", data, "-U", "planaria", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	cmd.SysProcAttr, cmd.Dir = attr, dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	return s.run(postgres, dir, data, attr)
}

// keepScript runs the server until stdin ends, then removes everything.
const keepScript = `dir=$1; data=$2; shift 2
"$@" &
read -r _
kill -QUIT $!
wait $!
rm -rf "$dir"`

func (s *pgServer) run(postgres, dir, data string, attr *syscall.SysProcAttr) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	logFile, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer logFile.Close()
	cmd := exec.Command("/bin/sh", "-c", keepScript, "keep", dir, data,
		postgres, "-D", data, "-k", dir, "-c", "listen_addresses=", "-c", "max_connections=400",
		"-c", "shared_buffers=64MB", "-c", "log_min_messages=warning", "-c", "fsync="+pgSync())
	cmd.SysProcAttr, cmd.Dir = attr, dir
	cmd.Stdin, cmd.Stdout, cmd.Stderr = r, logFile, logFile
	if err := cmd.Start(); err != nil {
		return err
	}
	r.Close()
	s.stdin, s.socket = w, dir
	ctx, cancel := context.WithTimeout(context.Background(), pgStart)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if err = s.admin(ctx, "SELECT 1"); err == nil {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			text, _ := os.ReadFile(logFile.Name())
			return fmt.Errorf("no answer: %w\n%s", err, text)
		}
	}
	return nil
}

// pgSync: tests kill processes of ours, never the server, so that they need no
// syncs; benchmarks measure them.
func pgSync() string {
	if f := flag.Lookup("test.bench"); f != nil && f.Value.String() != "" {
		return "on"
	}
	return "off"
}

func pgProgram(name string) (string, error) {
	for _, dir := range pgFolders {
		if p := filepath.Join(dir, name); isProgram(p) {
			return p, nil
		}
	}
	p, err := exec.LookPath(name)
	if err != nil {
		return "", errNoPostgres
	}
	return p, nil
}

func isProgram(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}

// unprivileged gives dir to a user that is not root, because PostgreSQL does
// not run as root. Without root everything stays with the present user.
func unprivileged(dir string) (*syscall.SysProcAttr, error) {
	if os.Geteuid() != 0 {
		return &syscall.SysProcAttr{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.Atoi(u.Uid)
		if err != nil {
			return nil, err
		}
		gid, err := strconv.Atoi(u.Gid)
		if err != nil {
			return nil, err
		}
		if err := os.Chown(dir, uid, gid); err != nil {
			return nil, err
		}
		return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
	}
	return nil, errors.New("running as root, and there is neither a user postgres nor nobody")
}
