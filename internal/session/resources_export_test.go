package session

// Hooks on resources.
var (
	CloneCommand = cloneCommand
	MountedNote  = mountedNote

	RepositoryError = repositoryError
)
