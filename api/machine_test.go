package api_test

import (
	"testing"
	"time"

	sdk "github.com/anthropics/anthropic-sdk-go/v2"

	"github.com/planaria/planaria/api"
)

// config.planaria: what is taken, what is refused and where, and how it looks.
func TestMachine(t *testing.T) {
	for name, c := range map[string]struct{ in, path, want string }{
		"nothing":      {`{}`, "", ""},
		"host":         {`{"image":"host"}`, "", `{"image":"host"}`},
		"registry":     {`{"image":"ghcr.io:443/a/b_c/d:v1.2@sha256:` + zeros + `"}`, "", `{"image":"ghcr.io:443/a/b_c/d:v1.2@sha256:` + zeros + `"}`},
		"short image":  {`{"image":"debian"}`, "", `{"image":"debian"}`},
		"layout":       {`{"image":"layout:/srv/images/base"}`, "", `{"image":"layout:/srv/images/base"}`},
		"all":          {`{"cpus":0.5,"memory_mb":64,"disk_mb":16,"processes":8,"call_seconds":1,"snapshot":"interval","interval_seconds":10,"output_commit":"stored","keep_snapshots":1,"linger_seconds":0}`, "", `{"cpus":0.5,"memory_mb":64,"disk_mb":16,"processes":8,"call_seconds":1,"snapshot":"interval","interval_seconds":10,"output_commit":"stored","keep_snapshots":1,"linger_seconds":0}`},
		"largest":      {`{"cpus":64,"memory_mb":262144,"disk_mb":1048576,"processes":65536,"call_seconds":86400,"interval_seconds":86400,"keep_snapshots":100,"linger_seconds":86400}`, "", `{"cpus":64,"memory_mb":262144,"disk_mb":1048576,"processes":65536,"call_seconds":86400,"interval_seconds":86400,"keep_snapshots":100,"linger_seconds":86400}`},
		"upper case":   {`{"image":"Debian"}`, "config.planaria.image", ""},
		"url":          {`{"image":"https://ghcr.io/a"}`, "config.planaria.image", ""},
		"flag":         {`{"image":"--privileged"}`, "config.planaria.image", ""},
		"relative":     {`{"image":"layout:images"}`, "config.planaria.image", ""},
		"digest":       {`{"image":"a@sha256:12"}`, "config.planaria.image", ""},
		"cpus":         {`{"cpus":-1}`, "config.planaria.cpus", ""},
		"many cpus":    {`{"cpus":64.5}`, "config.planaria.cpus", ""},
		"memory":       {`{"memory_mb":63}`, "config.planaria.memory_mb", ""},
		"much memory":  {`{"memory_mb":262145}`, "config.planaria.memory_mb", ""},
		"negative":     {`{"disk_mb":-1}`, "config.planaria.disk_mb", ""},
		"disk":         {`{"disk_mb":1048577}`, "config.planaria.disk_mb", ""},
		"processes":    {`{"processes":7}`, "config.planaria.processes", ""},
		"call":         {`{"call_seconds":86401}`, "config.planaria.call_seconds", ""},
		"policy":       {`{"snapshot":"always"}`, "config.planaria.snapshot", ""},
		"interval":     {`{"interval_seconds":9}`, "config.planaria.interval_seconds", ""},
		"commit":       {`{"output_commit":"maybe"}`, "config.planaria.output_commit", ""},
		"keep":         {`{"keep_snapshots":101}`, "config.planaria.keep_snapshots", ""},
		"linger":       {`{"linger_seconds":86401}`, "config.planaria.linger_seconds", ""},
		"short linger": {`{"linger_seconds":-1}`, "config.planaria.linger_seconds", ""},
		"unknown":      {`{"memory":1}`, "config.planaria.memory", ""},
		"type":         {`{"cpus":"2"}`, "config.planaria.cpus", ""},
		"no object":    {`[]`, "config.planaria", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var in api.EnvironmentCreate
			err := api.Decode([]byte(`{"name":"e","config":{"type":"cloud","planaria":`+c.in+`}}`), &in)
			var e api.Environment
			if err == nil {
				e, err = api.ResolveEnvironment(in)
			}
			if c.path != "" {
				if err == nil || field(t, err) != c.path {
					t.Errorf("error = %v, want one at %s", err, c.path)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if c.want == "" {
				if e.Config.Planaria != nil {
					t.Errorf("config.planaria is shown though nothing was set: %+v", e.Config.Planaria)
				}
				return
			}
			wantJSON(t, "planaria", e.Config.Planaria, c.want)
			decodeOfficial[sdk.BetaEnvironment](t, e, 10, "planaria")
		})
	}
}

const zeros = "0000000000000000000000000000000000000000000000000000000000000000"

// A machine belongs to environments that we run; an update keeps, clears or
// replaces the whole of it.
func TestMachineUpdate(t *testing.T) {
	var self api.EnvironmentCreate
	if err := api.Decode([]byte(`{"name":"e","config":{"type":"self_hosted","planaria":{"cpus":1}}}`), &self); err != nil {
		t.Fatal(err)
	}
	if _, err := api.ResolveEnvironment(self); err == nil || field(t, err) != "config.planaria" {
		t.Errorf("self-hosted with a machine: %v", err)
	}
	var in api.EnvironmentCreate
	if err := api.Decode([]byte(`{"name":"e","config":{"type":"cloud","planaria":{"cpus":1,"memory_mb":512}}}`), &in); err != nil {
		t.Fatal(err)
	}
	e, err := api.ResolveEnvironment(in)
	if err != nil {
		t.Fatal(err)
	}
	for patch, want := range map[string]string{
		`{"name":"f"}`:                       `{"cpus":1,"memory_mb":512}`,
		`{"config":{"planaria":null}}`:       `null`,
		`{"config":{"planaria":{}}}`:         `null`,
		`{"config":{"type":"cloud"}}`:        `{"cpus":1,"memory_mb":512}`,
		`{"config":{"planaria":{"cpus":2}}}`: `{"cpus":2}`,
	} {
		var u api.EnvironmentUpdate
		if err := api.Decode([]byte(patch), &u); err != nil {
			t.Fatal(err)
		}
		got, _, err := api.ApplyEnvironmentUpdate(e, u)
		if err != nil {
			t.Fatalf("%s: %v", patch, err)
		}
		wantJSON(t, patch, got.Config.Planaria, want)
	}
	var u api.EnvironmentUpdate
	if err := api.Decode([]byte(`{"config":{"planaria":{"cpus":65}}}`), &u); err != nil {
		t.Fatal(err)
	}
	if _, _, err := api.ApplyEnvironmentUpdate(e, u); err == nil || field(t, err) != "config.planaria.cpus" {
		t.Errorf("update beyond the limit: %v", err)
	}
}

func TestLinger(t *testing.T) {
	none, ten := int64(0), int64(10)
	for _, c := range []struct {
		m    api.Machine
		want time.Duration
	}{{api.Machine{}, time.Minute}, {api.Machine{LingerSeconds: &none}, 0}, {api.Machine{LingerSeconds: &ten}, 10 * time.Second}} {
		if got := c.m.Linger(); got != c.want {
			t.Errorf("linger of %+v = %v, want %v", c.m, got, c.want)
		}
	}
}
