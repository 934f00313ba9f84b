package api

// Node is the node object: one running process of the server.
type Node struct {
	Type      string       `json:"type"`
	ID        string       `json:"id"`
	Address   string       `json:"address"`
	Roles     List[string] `json:"roles"`
	Version   string       `json:"version"`
	StartedAt Time         `json:"started_at"`
	Until     *Time        `json:"until"` // end of its lease, null where there are no leases
	Alive     bool         `json:"alive"`
	Sessions  int64        `json:"sessions"` // sessions that it owns
}

// MarshalJSON sets the type.
func (n Node) MarshalJSON() ([]byte, error) {
	type shadow Node
	n.Type = "node"
	return Encode(shadow(n))
}
