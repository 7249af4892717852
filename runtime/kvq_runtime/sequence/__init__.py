"""Token sequences and their caches: passes, branches, edits, staleness."""
