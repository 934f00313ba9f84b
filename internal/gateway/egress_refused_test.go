package gateway_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/planaria/planaria/internal/gateway"
	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/testenv"
)

// An operator sees what a sandbox was refused, once for each host and then at
// each power of ten: a process that tries for ever fills no log.
func TestEgressRefusalsAreTold(t *testing.T) {
	o := newOutside(t)
	i := o.inside(gateway.Network{Hosts: []string{"a.test"}})
	var log testenv.Logs
	i.g = gateway.New(gateway.Config{Keeper: keeper.New(keeper.Config{Dial: o.dial}), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	p := i.dial()
	get := func(p *process, host string) {
		t.Helper()
		p.say("GET http://" + host + "/ HTTP/1.1\r\nHost: " + host + "\r\n\r\n")
		if resp, _ := p.answer("GET"); resp.StatusCode != 403 {
			t.Fatalf("%s: %s", host, resp.Status)
		}
	}
	for range 250 {
		get(p, "evil.test")
	}
	told := func(with string) int { return strings.Count(string(log.All()), with) }
	if n := told("host=evil.test:80"); n != 3 || told("times=100") != 1 || told("session=sesn_1") != 3 || told("level=INFO") != 3 {
		t.Errorf("told %d times:\n%s", n, string(log.All()))
	}
	for n := range 1000 {
		get(p, fmt.Sprintf("h%d.test", n))
	}
	if n := told("\n"); n > 40 || told("host=others") != 3 {
		t.Errorf("%d lines:\n%s", n, string(log.All()))
	}
	i.scope.Session = "sesn_2"
	get(i.dial(), "evil.test")
	if told("session=sesn_2") != 1 {
		t.Errorf("another session:\n%s", string(log.All()))
	}
}
