package keeper

// Hidden shows what Plain strips.
var Hidden = hidden

// Literal shows what counts as a literal address.
var Literal = literal

// Offerable shows which schemas a model API takes.
var Offerable = offerable

// Share shows how long one of several addresses is waited for.
var Share = share
