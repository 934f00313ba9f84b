package blob

// SetFault sets the function that is asked around each durable step. Before
// use only.
func (f *Folder) SetFault(fault func(step string) error) { f.fault = fault }
