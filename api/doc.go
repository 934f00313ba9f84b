// Package api is the wire: the types of the REST API with their validation,
// and a Go client for it.
//
// It keeps no state and knows nothing of the rooms behind the API. A request
// type has Validate, which returns an *Error that names the field by its path
// and the way out. Resolving and updating (ResolveAgent, ApplyUpdate,
// Snapshot, ResolveEnvironment, …) are pure functions from a request to the
// object that the API shows; identifiers and times are the caller's.
//
// Invariants of everything that is encoded here: arrays and maps are never
// null, required nullable fields are present as null, times have one fixed
// format, and the "type" of an object is right whatever the caller set.
//
// Input is parsed once and strictly where two readers might understand two
// things: duplicate names, invalid UTF-8 and lone surrogates are refused, names
// match by exact case. Unknown fields are ignored in objects of the Managed
// Agents API and refused in ours (Decode, DecodeStrict).
package api
