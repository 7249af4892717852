"""Settings from flags, the environment and the user's file."""
