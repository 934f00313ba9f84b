package sandbox

import "time"

// ImageLimits are the limits of images, for tests that reach them.
type ImageLimits struct {
	Layers, Entries                       int
	Names, Unpacked, Packed, Config, Envs int64
	Time                                  time.Duration
}

// SetImageLimits replaces the limits that are not zero.
func (r *Runtime) SetImageLimits(l ImageLimits) {
	d := defaultImageLimits
	set := func(to *int64, v int64) {
		if v != 0 {
			*to = v
		}
	}
	if l.Layers != 0 {
		d.layers = l.Layers
	}
	if l.Entries != 0 {
		d.entries = l.Entries
	}
	if l.Envs != 0 {
		d.env = int(l.Envs)
	}
	if l.Time != 0 {
		d.time = l.Time
	}
	set(&d.names, l.Names)
	set(&d.unpacked, l.Unpacked)
	set(&d.packed, l.Packed)
	set(&d.config, l.Config)
	r.images.limits = d
}

// ForgetTags makes the next Image ask for every tag again.
func (r *Runtime) ForgetTags() {
	r.images.mu.Lock()
	defer r.images.mu.Unlock()
	for name, t := range r.images.tags {
		t.at = t.at.Add(-time.Hour)
		r.images.tags[name] = t
	}
}

// KeepsOwners tells whether images' owners are kept here.
func KeepsOwners() bool { return keepsOwners() }

// MakeRoom removes images that nobody uses until need more bytes fit.
func (r *Runtime) MakeRoom(need int64) error { return r.makeRoom(need) }

// RemoveImage removes an image as MakeRoom does, which saw its last use before.
func (r *Runtime) RemoveImage(dir string, used time.Time) (bool, error) {
	return r.removeImage(dir, used)
}

// RootsDir is where root file systems lie.
func (r *Runtime) RootsDir() string { return r.cfg.Dir + "/roots" }

// HostStamp is what a note of the machine's programs is believed by.
func HostStamp() string { return hostStamp() }

// ForgetListing makes the next Open list /usr as a new process would.
func ForgetListing() {
	listings.mu.Lock()
	defer listings.mu.Unlock()
	listings.stamp = ""
}

// HostListed is closed when Open's listing of /usr is over.
func (r *Runtime) HostListed() <-chan struct{} { return r.host.listed }
