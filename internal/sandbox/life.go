package sandbox

// Life names this run of the sandbox: no other start and no other restore has
// the name, while generations repeat when one snapshot is restored twice.
func (s *Sandbox) Life() string { return s.snapshotState().Container }

// FenceOf tells under which fence the sandbox of this name was owned last,
// without taking it over; false when none lives.
func (r *Runtime) FenceOf(workspace, id string) (fence uint64, ok bool) {
	if s := r.lookup(workspace, id); s != nil {
		return s.Fence(), true
	}
	return 0, false
}
