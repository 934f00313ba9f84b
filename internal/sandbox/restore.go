package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/planaria/planaria/internal/sandbox/wire"
)

// Restored tells what a restored sandbox came back with.
type Restored struct {
	// Dead are outside connections of processes inside that ended.
	Dead []string
	// Running are calls that go on inside; Kept those that have a result.
	Running, Kept []string
	// Took is the time until the agent had its new identity.
	Took time.Duration
}

// Restore brings a snapshot back as a sandbox of the spec's name: the same
// session's after a loss, or another one's, which is a fork. The image must lie
// in this folder (Unpack brings it there). The spec's root and limits are the
// snapshot's own; memory, disk, processor and call time may be set anew, except
// that mounts must stay as they are.
//
// ErrDamaged when the image does not match or the agent does not prove itself:
// the caller tries the next older one. ErrRoot, ErrRuntime, ErrNotFound, ErrFull,
// ErrUnsupported when the processor lacks what the snapshot's had.
func (r *Runtime) Restore(ctx context.Context, m *Manifest, spec Spec) (*Sandbox, *Restored, error) {
	ctx, end, err := r.begin(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("restore snapshot %s as sandbox %s: %w", m.ID, spec.ID, err)
	}
	defer end()
	if err := r.haveRoot(ctx, m, spec); err != nil {
		return nil, nil, fmt.Errorf("restore snapshot %s as sandbox %s: %w", m.ID, spec.ID, err)
	}
	admitted, err := r.admit(ctx, startMemory+m.Size(), m.Limits, spec.Wait)
	if err != nil {
		return nil, nil, fmt.Errorf("restore snapshot %s as sandbox %s: %w", m.ID, spec.ID, err)
	}
	defer admitted()
	ctx, cancel := context.WithTimeout(ctx, r.cfg.StartTimeout+time.Duration(m.Size()/restoreRate)*time.Second)
	defer cancel()
	s, back, err := r.restore(ctx, m, spec)
	if err != nil {
		return nil, nil, fmt.Errorf("restore snapshot %s as sandbox %s: %w", m.ID, spec.ID, err)
	}
	return s, back, nil
}

// restoreRate is how many bytes a second an image is read with at least, on a
// slow disk or a busy machine: no snapshot is given up for being large.
const restoreRate = 16 << 20

func (r *Runtime) restore(ctx context.Context, m *Manifest, spec Spec) (*Sandbox, *Restored, error) {
	began := time.Now()
	if m.Workspace != spec.Workspace {
		return nil, nil, ErrNotFound // another tenant's looks like none (L11)
	}
	// 1. The image is what the manifest says: read while the next steps go on,
	// and known before the sandbox gets an identity, without which it has no way
	// out and answers nobody. Binary and root are those it was taken with.
	verified := make(chan error, 1)
	go func() { verified <- r.VerifyImage(m) }()
	if err := r.needBinary(ctx, m.Runtime); err != nil {
		return nil, nil, err
	}
	if err := checkFeatures(m); err != nil {
		return nil, nil, err
	}
	spec.Limits = m.Limits
	if m.Root.Kind == "dir" {
		if spec.Root.Digest != "" && spec.Root.Digest != m.Root.Digest {
			return nil, nil, ErrRoot
		}
		if spec.Root.Dir == "" {
			spec.Root = Root{Dir: m.Root.Dir, Digest: m.Root.Digest, Image: m.Root.Image}
		}
	} else {
		spec.Root = Root{}
	}
	root, err := r.exactRoot(ctx, spec.Root)
	if err != nil {
		return nil, nil, err
	}
	if root.Digest != m.Root.Digest {
		return nil, nil, fmt.Errorf("%w: %s is %.12s, was %.12s", ErrRoot, root.Dir, root.Digest, m.Root.Digest)
	}
	// 2. A created sandbox of the same shape, under its new name.
	s, err := r.take(ctx, spec, m.Runtime)
	if err != nil {
		return nil, nil, err
	}
	back, err := s.revive(ctx, m, verified)
	if err != nil {
		// Any doubt ends it: it never had a way out.
		_ = s.Kill(context.WithoutCancel(ctx))
		return nil, nil, err
	}
	back.Took = time.Since(began)
	return s, back, nil
}

// revive loads the image into a created sandbox and makes it another one.
func (s *Sandbox) revive(ctx context.Context, m *Manifest, verified <-chan error) (*Restored, error) {
	s.mu.Lock()
	s.state.Generation = m.Generation + 1
	s.state.Parent = m.ID
	s.state.CPUFeatures = m.CPUFeatures // of the image, whatever is shown to new ones
	st := s.state
	s.mu.Unlock()
	// The agent of the image reads nothing from its standard input.
	_ = s.link.setup.Close()
	// 3. The agent redials and proves that its memory is the snapshot's.
	s.link.expect(wire.Greeting{Mode: wire.Restore, Snapshot: m.ID, Generation: st.Generation}, m.ProofKey)
	if err := s.link.listen(); err != nil {
		return nil, err
	}
	err := s.runsc(ctx, "restore", "--detach", "--image-path="+s.r.snapshotDir(m.ID), "--bundle="+s.dir+"/bundle", st.Container)
	if verr := <-verified; verr != nil {
		return nil, verr
	}
	if err != nil {
		return nil, err
	}
	if err := s.await(ctx); err != nil {
		return nil, err
	}
	// 4. The new identity, read back. The key changes with it: until the state
	// is saved a crash leaves phase "starting", which the next Open kills.
	sent := time.Now()
	reply, err := s.admin(ctx, wire.Admin{Op: wire.OpIdentity, Identity: &wire.Identity{
		Hostname: st.Hostname, MachineID: st.MachineID, Entropy: entropy(), Key: st.Key, UnixMicro: sent.UnixMicro(), Egress: st.Egress,
	}})
	if err != nil {
		return nil, err
	}
	got := time.Now()
	s.link.useStateKey()
	inside := time.UnixMicro(reply.UnixMicro)
	switch {
	case reply.Hostname != st.Hostname || reply.MachineID != st.MachineID:
		return nil, fmt.Errorf("%w: it calls itself %.40q, %.40q", ErrDamaged, reply.Hostname, reply.MachineID)
	case inside.Before(sent.Add(-clockTolerance)) || inside.After(got.Add(clockTolerance)):
		return nil, fmt.Errorf("%w: its clock is off by %v", ErrDamaged, inside.Sub(sent))
	}
	// Running from here on, with a way out.
	if err := s.run(); err != nil {
		return nil, err
	}
	return &Restored{Dead: reply.Dead, Running: reply.Running, Kept: reply.Kept}, nil
}

// Test restores a snapshot under a throw-away name without a way out, and kills
// it again: proof that it can be restored.
func (r *Runtime) Test(ctx context.Context, m *Manifest) error {
	s, _, err := r.Restore(ctx, m, Spec{Workspace: m.Workspace, ID: randomID("test-"), NoEgress: true, Fence: 1})
	if err != nil {
		return err
	}
	if _, _, err := s.Calls(ctx); err != nil {
		_ = s.Kill(context.WithoutCancel(ctx))
		return fmt.Errorf("test snapshot %s: %w: %w", m.ID, ErrDamaged, err)
	}
	return s.Kill(context.WithoutCancel(ctx))
}
