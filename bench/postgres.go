package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// errNoPostgres says that the machine has no PostgreSQL.
var errNoPostgres = errors.New("no initdb and postgres in /usr/lib/postgresql or PATH")

// postgres is a server of our own on a unix socket, with the settings that
// PostgreSQL has by default: every commit waits for its sync.
type postgres struct {
	dir   string
	cmd   *exec.Cmd
	ended chan struct{}
	n     int
}

func isPostgres(url string) bool { return strings.HasPrefix(url, "postgres:") }

// startPostgres makes a cluster below dir and waits until it answers. As root
// it runs as another user, because PostgreSQL refuses root.
func startPostgres(dir string) (*postgres, error) {
	initdb, server := pgProgram("initdb"), pgProgram("postgres")
	if initdb == "" || server == "" {
		return nil, errNoPostgres
	}
	p := &postgres{dir: filepath.Join(dir, "pg"), ended: make(chan struct{})}
	if err := os.Mkdir(p.dir, 0o755); err != nil {
		return nil, err
	}
	attr, err := unprivileged(dir, p.dir)
	if err != nil {
		return nil, err
	}
	data := filepath.Join(p.dir, "data")
	cmd := exec.Command(initdb, "-D", data, "-U", "planaria", "-A", "trust", "-E", "UTF8", "--locale=C")
	cmd.Dir, cmd.SysProcAttr = p.dir, attr
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w: %s", err, out)
	}
	p.cmd = exec.Command(server, "-D", data, "-k", p.dir, "-c", "listen_addresses=", "-c", "max_connections=100")
	p.cmd.Dir, p.cmd.SysProcAttr = p.dir, attr
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait()
	}()
	return p, p.wait()
}

func pgProgram(name string) string {
	for _, version := range []string{"15", "16", "17", "18"} {
		file := filepath.Join("/usr/lib/postgresql", version, "bin", name)
		if st, err := os.Stat(file); err == nil && st.Mode()&0o111 != 0 {
			return file
		}
	}
	file, err := exec.LookPath(name)
	if err != nil {
		return ""
	}
	return file
}

func unprivileged(outer, dir string) (*syscall.SysProcAttr, error) {
	if os.Geteuid() != 0 {
		return &syscall.SysProcAttr{}, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		u, err = user.Lookup("nobody")
	}
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(outer, 0o755); err != nil { // the other user must get through
		return nil, err
	}
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, os.Chown(dir, int(uid), int(gid))
}

func (p *postgres) url(database string) string {
	return "postgres:///" + database + "?host=" + p.dir + "&user=planaria"
}

// startTimeout bounds how long a server may take to answer.
const startTimeout = time.Minute

func (p *postgres) wait() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := p.admin(ctx, "SELECT 1")
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.ended:
			return errors.New("postgres ended at its start")
		case <-ctx.Done():
			p.stop()
			return fmt.Errorf("postgres does not answer: %w", err)
		}
	}
}

func (p *postgres) admin(ctx context.Context, query string) error {
	conn, err := pgx.Connect(ctx, p.url("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, query)
	return err
}

// database makes an empty database and returns its URL.
func (p *postgres) database(ctx context.Context) (string, error) {
	p.n++
	name := fmt.Sprintf("bench_%d", p.n)
	return p.url(name), p.admin(ctx, "CREATE DATABASE "+name)
}

// stop ends the server; its files go with the run's folder.
func (p *postgres) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGINT) // fast shutdown; it may be gone
	<-p.ended
}
