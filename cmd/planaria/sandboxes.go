package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/planaria/planaria/internal/keeper"
	"github.com/planaria/planaria/internal/sandbox"
)

// openSandboxes opens the folder of the agents' machines where this process is
// to run them. Those that live on from before are found again by their
// sessions' next owner, whether the last process drained or was killed.
func (p *process) openSandboxes(ctx context.Context, dial keeper.DialFunc) error {
	on, err := p.sandboxesOn()
	if err != nil || !on {
		return err
	}
	c := p.cfg.Sandboxes
	p.machines, err = sandbox.Open(ctx, sandbox.Config{Dir: p.cfg.sandboxDir(), Program: carried, Blobs: p.blobs, Log: p.log,
		MemoryBytes: c.MemoryMB << 20, RootBytes: c.ImagesMB << 20, Layouts: c.Layouts, CPUFeatures: c.CPUFeatures,
		Transport: p.imageTransport(dial),
		// A sandbox has a way out once a driver of p.sessions holds it, so not
		// before openRooms has made that.
		Egress: func(ctx context.Context, s *sandbox.Sandbox, conn io.ReadWriteCloser) {
			p.sessions.Egress(ctx, s, conn)
		},
	})
	switch {
	case errors.Is(err, sandbox.ErrLocked) && p.cfg.Sandboxes.Enabled == sandboxesAuto:
		p.machines = nil
		p.log.Warn("runs no sandboxes: another process has the folder; give each its own with sandboxes.dir", "dir", p.cfg.sandboxDir(), "err", err)
		return nil
	case errors.Is(err, sandbox.ErrLocked):
		return hinted(err, "give each process of this machine a folder of its own with sandboxes.dir")
	case err != nil:
		return hinted(err, "'planaria doctor' says what is wrong; --sandboxes off starts without")
	}
	p.onClose(func() {
		// They live on for the next start.
		if err := p.machines.Close(); err != nil {
			p.log.Warn("cannot let go of the sandboxes", "err", err)
		}
	})
	p.tel.machines(p.machines)
	p.log.Info("sandboxes run here", "dir", p.cfg.sandboxDir(), "alive", len(p.machines.Live()))
	if p.fresh {
		p.a.say("planaria: sandboxes: agents can have machines here; 'planaria doctor' tries one")
	}
	return nil
}

// sandboxesOn decides by the setting and by what a quick look says. Whether one
// really starts is seen when the first one does, or by doctor.
func (p *process) sandboxesOn() (bool, error) {
	if p.cfg.Sandboxes.Enabled == sandboxesOff {
		return false, nil
	}
	for _, f := range sandbox.Check(sandbox.Config{Program: carried}) {
		if !f.Fatal || f.OK {
			continue
		}
		if p.cfg.Sandboxes.Enabled == sandboxesOn {
			return false, hinted(fmt.Errorf("sandboxes.enabled: this machine runs none: %s: %s", f.What, f.Says), "%s", f.Mend)
		}
		p.log.Info("runs no sandboxes", "why", f.What+": "+f.Says)
		if p.fresh {
			p.a.say("planaria: sandboxes: none here (%s: %s); 'planaria doctor' says more", f.What, f.Says)
		}
		return false, nil
	}
	return true, nil
}

// imageTransport reaches the registries of images. Tenants name them, so it
// refuses the addresses that agents may not reach either.
func (p *process) imageTransport(dial keeper.DialFunc) http.RoundTripper {
	t := &http.Transport{ForceAttemptHTTP2: true, TLSHandshakeTimeout: dialTime, IdleConnTimeout: idleTime, ResponseHeaderTimeout: registryTime}
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if p.cfg.AllowPrivateNetworks {
			ctx = keeper.Private(ctx)
		}
		return dial(ctx, network, addr)
	}
	return t
}

const (
	// registryTime bounds the wait for the begin of a registry's answer.
	registryTime = time.Minute
	// poolTime is between two looks at the pool.
	poolTime = time.Second
	// poolRest is how long the pool is let be when it cannot be filled.
	poolRest = 30 * time.Second
)

// keepPool keeps sandboxes of the default environment ready made until ctx ends.
func (p *process) keepPool(ctx context.Context) error {
	wait := time.NewTimer(0)
	defer wait.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-wait.C:
		}
		next := poolTime
		if err := p.machines.Warm(ctx, sandbox.Spec{}, p.cfg.Sandboxes.Pool); err != nil && ctx.Err() == nil {
			p.log.Warn("cannot fill the pool of sandboxes", "err", err)
			next = poolRest
		}
		wait.Reset(next)
	}
}
