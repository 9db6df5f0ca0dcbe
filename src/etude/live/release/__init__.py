"""The release of a version to users: the gate, the canary's steps, the stores of the clusters, and rollback."""
