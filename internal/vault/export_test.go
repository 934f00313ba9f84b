package vault

// NewMasterForTest makes a master of a known key.
var NewMasterForTest = newMaster
