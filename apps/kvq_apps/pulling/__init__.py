"""Models by name from elsewhere: the hub, the package index, other programs, a path."""
