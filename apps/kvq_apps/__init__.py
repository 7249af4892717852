"""Everything a user or an editor touches: the command line. Nothing imports it."""
