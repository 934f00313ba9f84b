package sandbox

// SetFault makes a named step between two durable ones fail.
func (r *Runtime) SetFault(f func(at string) error) { r.cfg.fault = f }

// Dir is the sandbox's folder.
func (s *Sandbox) Dir() string { return s.dir }

// PID of the sandbox's first process.
func (s *Sandbox) PID() int { return s.snapshotState().PID }

// SnapshotDir is where an image lies.
func (r *Runtime) SnapshotDir(id string) string { return r.snapshotDir(id) }
